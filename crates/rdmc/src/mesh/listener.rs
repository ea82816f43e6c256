//! Where nodes and invitations arrive.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdmc_fabric::{ControlListener, ControlStream, Environment};
use rustls::pki_types::CertificateDer;
use tokio::io::AsyncWriteExt;
use tokio::sync::{Semaphore, mpsc};

use super::fabrics::Fabrics;
use super::frame::{self, Frame, PROTOCOL_VERSION, RejectReason};
use super::invite::{Invitation, Roster};
use super::security::{self, Distrust, Fingerprint, Identities, Opening, Security};
use crate::node::{Cluster, NodeId};
use crate::scope::Scope;
use crate::stats::{ListenerStats, Refusals};

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
    nodes: Mutex<BTreeMap<(u128, NodeId), Registration>>,
    invited: mpsc::Sender<Invitation>,
    takes_invitations: bool,
    fabrics: Fabrics,
    environment: Arc<dyn Environment>,
    security: Option<Security>,
    refusals: Refusals,
}

/// A node whose connections arrive here.
#[derive(Clone)]
struct Registration {
    arrived: mpsc::Sender<NodeConnection>,
    /// What the nodes that connect to it must show, if anything.
    identities: Arc<Identities>,
}

/// A connection that another node opened, with its `Hello` read.
pub(crate) struct NodeConnection {
    pub(crate) stream: Box<dyn ControlStream>,
    pub(crate) from: NodeId,
    /// Where it is counted if it is refused.
    pub(crate) refusals: Refusals,
}

impl Listener {
    /// Listens at `address` (`host:port`, port 0 for any free one) and takes invitations to clusters on any of `fabrics`.
    ///
    /// The first of them listens for all.
    ///
    /// # Cancel safety
    /// Dropping the future stops to listen; as after a listener is dropped, the address is free when its tasks have ended,
    /// soon after.
    ///
    /// # Errors
    /// The operating system's refusal to listen there.
    pub async fn bind(fabrics: impl Into<Fabrics>, address: &str) -> io::Result<Self> {
        Self::bind_with(fabrics.into(), address, None, true).await
    }

    /// Listens as [`bind`](Self::bind) does, and takes connections only of those whom `security` lets in; of everybody if it
    /// is none.
    ///
    /// Whoever has the key, or any certificate of the authority, may invite. The nodes that are made of invitations use
    /// the same security.
    ///
    /// # Cancel safety
    /// Dropping the future stops to listen; as after a listener is dropped, the address is free when its tasks have ended,
    /// soon after.
    ///
    /// # Errors
    /// The operating system's refusal to listen there.
    pub async fn bind_secured(
        fabrics: impl Into<Fabrics>,
        address: &str,
        security: impl Into<Option<Security>>,
    ) -> io::Result<Self> {
        Self::bind_with(fabrics.into(), address, security.into(), true).await
    }

    pub(crate) async fn bind_with(
        fabrics: Fabrics,
        address: &str,
        security: Option<Security>,
        takes_invitations: bool,
    ) -> io::Result<Self> {
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
            security,
            refusals: Refusals::default(),
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

    /// Returns what happened so far.
    pub fn stats(&self) -> ListenerStats {
        ListenerStats { connections_refused: self.shared.refusals.count() }
    }

    pub(crate) fn security(&self) -> Option<&Security> {
        self.shared.security.as_ref()
    }

    pub(crate) fn refusals(&self) -> &Refusals {
        &self.shared.refusals
    }

    /// Lets connections to a node of a cluster arrive. They stop when the receiver is dropped.
    pub(crate) fn register(&self, cluster: &Cluster, node: NodeId) -> mpsc::Receiver<NodeConnection> {
        let (arrived, arrivals) = mpsc::channel(ARRIVALS_MAX);
        let identities = Arc::new(self.security().map_or_else(Identities::new, |_| cluster.identities()));
        let mut nodes = self.shared.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|_, registered| !registered.arrived.is_closed());
        nodes.insert((cluster.shared_key(), node), Registration { arrived, identities });
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
                Ok(Err(error)) => shared.refused(from, &error),
                Err(elapsed) => shared.refused(from, &elapsed),
            }
        }));
    }
}

impl ListenerShared {
    /// Reads a connection's first frame and hands it to whom it concerns.
    async fn greet(&self, stream: Box<dyn ControlStream>) -> io::Result<()> {
        let Some((first, mut stream, shown)) = self.first_frame(stream).await? else { return Ok(()) };
        let reason = match first {
            Frame::Hello { version, .. } | Frame::Invite { version, .. } if version != PROTOCOL_VERSION => {
                RejectReason::Version { ours: PROTOCOL_VERSION }
            }
            Frame::Hello { cluster, from, to, .. } => {
                let node = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).get(&(cluster, to)).cloned();
                match node {
                    Some(node) if !node.arrived.is_closed() => {
                        let checked = self.check(&node.identities, from, shown.as_ref());
                        if let Err(distrust) = checked {
                            self.refused(stream.peer_address(), &format!("it says it is node {from}: {distrust}"));
                            let told = format!("it does not take this node for node {from}: {}", distrust.told());
                            // Whoever does not wait for the reason needs none.
                            let _ = refuse(&mut stream, RejectReason::Declined { reason: told }).await;
                            return Ok(());
                        }
                        let refusals = self.refusals.clone();
                        let _ = node.arrived.send(NodeConnection { stream, from, refusals }).await;
                        return Ok(());
                    }
                    _ => RejectReason::Cluster,
                }
            }
            Frame::Invite { cluster, you, members, fabrics: asked, payload, .. } if self.takes_invitations => {
                let offers = self.fabrics.wire_names();
                match (Roster::new(cluster, you, members), asked.in_common(offers)) {
                    (None, _) => RejectReason::Identity,
                    (_, None) => RejectReason::Fabrics { offers: offers.clone(), asked },
                    (Some(roster), Some(common)) => {
                        let environment = self.environment.clone();
                        let mut invitation = Invitation::new(environment, stream, roster, asked, common, payload);
                        invitation.came_from(shown.as_ref().map(Fingerprint::of));
                        let _ = self.invited.send(invitation).await;
                        return Ok(());
                    }
                }
            }
            Frame::Invite { .. } => RejectReason::NoInvitations,
            _ => return Err(io::Error::other("the first frame was neither a hello nor an invitation")),
        };
        if let RejectReason::Fabrics { offers, asked } = &reason {
            let from = stream.peer_address().map(tracing::field::display);
            tracing::warn!(from, %asked, %offers, "invitation refused: no fabric in common");
        }
        refuse(&mut stream, reason).await
    }

    /// Reads the first frame, inside TLS if there is security, and what the other end has shown; none if the connection has
    /// ended, or was refused and told so.
    async fn first_frame(
        &self,
        mut stream: Box<dyn ControlStream>,
    ) -> io::Result<Option<(Frame, Box<dyn ControlStream>, Option<CertificateDer<'static>>)>> {
        let from = stream.peer_address();
        let Some(opening) = Opening::read(&mut stream).await? else { return Ok(None) };
        match (&self.security, opening.asks_for_tls()) {
            (None, false) => {
                let first = frame::read(&mut opening.before(&mut stream)).await?;
                Ok(first.map(|first| (first, stream, None)))
            }
            (Some(security), true) => match security.accept(&opening, stream).await {
                Ok((mut stream, shown)) => {
                    let first = frame::read(&mut stream).await?;
                    Ok(first.map(|first| (first, stream, Some(shown))))
                }
                Err((error, mut stream)) => {
                    self.refused(from, &error);
                    // However that ends, the refusal was told as far as possible.
                    let _ = self.environment.timeout(security::DRAIN_LIMIT, security::drain(&mut stream)).await;
                    Ok(None)
                }
            },
            (Some(_), false) => {
                self.refused(from, &Distrust::Plain);
                let drained =
                    self.environment.timeout(security::DRAIN_LIMIT, security::drain_frame(&opening, &mut stream)).await;
                if !matches!(drained, Ok(Ok(()))) {
                    return Ok(None);
                }
                let reason = "it speaks TLS only: this node needs a key or certificates".to_owned();
                let _ = refuse(&mut stream, RejectReason::Declined { reason }).await;
                Ok(None)
            }
            (None, true) => {
                self.refused(from, &Distrust::UnexpectedTls);
                let reason = "it does not speak TLS".to_owned();
                let _ = refuse(&mut stream, RejectReason::Declined { reason }).await;
                Ok(None)
            }
        }
    }

    /// Checks that an end which says that it is node `from` has shown what that node must show.
    fn check(
        &self,
        identities: &Identities,
        from: NodeId,
        shown: Option<&CertificateDer<'static>>,
    ) -> Result<(), Distrust> {
        match (&self.security, shown, identities.get(&from)) {
            (Some(security), Some(shown), Some(expected)) => security.check(shown, expected),
            (Some(_), None, _) => Err(Distrust::NoCertificate),
            // The node itself refuses who is not of its cluster.
            (Some(_), Some(_), None) | (None, ..) => Ok(()),
        }
    }

    /// Counts and tells a connection that was refused.
    fn refused(&self, from: Option<IpAddr>, reason: &dyn fmt::Display) {
        self.refusals.add();
        match from {
            Some(from) => tracing::warn!(%from, %reason, "control connection refused"),
            None => tracing::warn!(%reason, "control connection refused"),
        }
    }
}

/// Tells the other end why it is refused.
pub(crate) async fn refuse(stream: &mut Box<dyn ControlStream>, reason: RejectReason) -> io::Result<()> {
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
