//! Where nodes and invitations arrive.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdmc_fabric::{ControlListener, ControlStream, Environment};
use tokio::io::AsyncWriteExt;
use tokio::sync::{Semaphore, mpsc};

use super::fabrics::Fabrics;
use super::frame::{self, Frame, PROTOCOL_VERSION, Reject};
use super::invite::{Invitation, Roster};
use crate::node::NodeId;
use crate::scope::Scope;

/// Listens at one address for the nodes of any number of clusters, and for invitations to new ones.
///
/// A node of a fixed cluster makes its own; a service that is invited ([`invite`](crate::invite)) binds one and takes
/// the invitations from it. It stops listening when it and every node that uses it are dropped.
#[derive(Clone)]
pub struct Listener {
    shared: Arc<ListenerShared>,
    invitations: Arc<tokio::sync::Mutex<mpsc::Receiver<Invitation>>>,
    _scope: Arc<Scope>,
}

struct ListenerShared {
    address: String,
    nodes: Mutex<BTreeMap<(u128, NodeId), mpsc::Sender<Arrived>>>,
    invited: mpsc::Sender<Invitation>,
    takes_invitations: bool,
    fabrics: Fabrics,
    environment: Arc<dyn Environment>,
}

/// A connection that another node opened, with its `Hello` read.
pub(crate) struct Arrived {
    pub(crate) stream: Box<dyn ControlStream>,
    pub(crate) from: NodeId,
}

impl Listener {
    /// Listens at `address` (`host:port`, port 0 for any free one) and takes invitations to clusters on any of `fabrics`.
    ///
    /// The first of them listens for all.
    ///
    /// # Cancel safety
    /// Dropping the future stops to listen.
    ///
    /// # Errors
    /// The operating system's refusal to listen there.
    pub async fn bind(fabrics: impl Into<Fabrics>, address: &str) -> io::Result<Self> {
        Self::bind_with(fabrics.into(), address, true).await
    }

    pub(crate) async fn bind_with(fabrics: Fabrics, address: &str, takes_invitations: bool) -> io::Result<Self> {
        let environment = fabrics.environment();
        let listener = environment.listen(address).await?;
        let (invited, invitations) = mpsc::channel(INVITATIONS_MAX);
        let shared = Arc::new(ListenerShared {
            address: listener.local_address(),
            nodes: Mutex::default(),
            invited,
            takes_invitations,
            fabrics,
            environment: environment.clone(),
        });
        let scope = Arc::new(Scope::new(environment));
        let accepting = accept(listener, shared.clone(), scope.spawner());
        scope.spawn(accepting);
        let invitations = Arc::new(tokio::sync::Mutex::new(invitations));
        Ok(Self { shared, invitations, _scope: scope })
    }

    /// Returns the address that others connect to, with the port that was chosen for port 0.
    pub fn local_address(&self) -> &str {
        &self.shared.address
    }

    /// Waits for the next invitation.
    ///
    /// # Cancel safety
    /// No invitation is lost.
    pub async fn next_invitation(&self) -> Invitation {
        let mut invitations = self.invitations.lock().await;
        let mut invitation = invitations.recv().await.expect("the sender lives in self");
        invitation.arrived_at(self.clone());
        invitation
    }

    pub(crate) fn fabrics(&self) -> &Fabrics {
        &self.shared.fabrics
    }

    /// Lets connections to a node of a cluster arrive. They stop when the receiver is dropped.
    pub(crate) fn register(&self, cluster: u128, node: NodeId) -> mpsc::Receiver<Arrived> {
        let (arrived, arrivals) = mpsc::channel(ARRIVALS_MAX);
        let mut nodes = self.shared.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|_, arrived| !arrived.is_closed());
        nodes.insert((cluster, node), arrived);
        arrivals
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.shared.address).finish_non_exhaustive()
    }
}

async fn accept(mut listener: Box<dyn ControlListener>, shared: Arc<ListenerShared>, spawner: crate::scope::Spawner) {
    let greetings = Arc::new(Semaphore::new(GREETINGS_MAX));
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(%error, address = shared.address, "no longer listening");
                return;
            }
        };
        let Ok(permit) = greetings.clone().try_acquire_owned() else {
            tracing::warn!(max = GREETINGS_MAX, "control connection refused: too many say what they want at once");
            continue;
        };
        let shared = shared.clone();
        spawner.spawn(Box::pin(async move {
            let _permit = permit;
            let environment = shared.environment.clone();
            let from = stream.peer_address();
            match environment.timeout(GREETING_LIMIT, shared.greet(stream)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(?from, %error, "control connection refused"),
                Err(elapsed) => tracing::warn!(?from, %elapsed, "control connection refused"),
            }
        }));
    }
}

impl ListenerShared {
    /// Reads a connection's first frame and hands it to whom it concerns.
    async fn greet(&self, mut stream: Box<dyn ControlStream>) -> io::Result<()> {
        let reason = match frame::read(&mut stream).await? {
            Some(Frame::Hello { version, .. } | Frame::Invite { version, .. }) if version != PROTOCOL_VERSION => {
                Reject::Version { ours: PROTOCOL_VERSION }
            }
            Some(Frame::Hello { cluster, from, to, .. }) => {
                let node = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).get(&(cluster, to)).cloned();
                match node {
                    Some(node) if !node.is_closed() => {
                        let _ = node.send(Arrived { stream, from }).await;
                        return Ok(());
                    }
                    _ => Reject::Cluster,
                }
            }
            Some(Frame::Invite { cluster, you, members, fabrics: asked, payload, .. }) if self.takes_invitations => {
                let offers = self.fabrics.wire_names();
                match (Roster::new(cluster, you, members), asked.in_common(offers)) {
                    (None, _) => Reject::Identity,
                    (_, None) => Reject::Fabrics { offers: offers.clone(), asked },
                    (Some(roster), Some(common)) => {
                        let environment = self.environment.clone();
                        let invitation = Invitation::new(environment, stream, roster, asked, common, payload);
                        let _ = self.invited.send(invitation).await;
                        return Ok(());
                    }
                }
            }
            Some(Frame::Invite { .. }) => Reject::NoInvitations,
            Some(_) => return Err(io::Error::other("the first frame was neither a hello nor an invitation")),
            None => return Ok(()),
        };
        if let Reject::Fabrics { offers, asked } = &reason {
            tracing::warn!(from = ?stream.peer_address(), %asked, %offers, "invitation refused: no fabric in common");
        }
        refuse(&mut stream, reason).await
    }
}

/// Tells the other end why it is refused.
pub(crate) async fn refuse(stream: &mut Box<dyn ControlStream>, reason: Reject) -> io::Result<()> {
    stream.write_all(&frame::encode(&Frame::Reject { reason })).await?;
    stream.flush().await
}

/// How long a connection may take to say what it wants.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// Connections that have not yet said what they want, at once.
const GREETINGS_MAX: usize = 256;
/// Connections of one node that wait to be taken.
const ARRIVALS_MAX: usize = 64;
/// Invitations that wait to be taken.
const INVITATIONS_MAX: usize = 16;
