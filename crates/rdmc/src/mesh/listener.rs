//! The listener at which nodes and invitations arrive.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use rdmc_fabric::{ControlListener, ControlStream, Environment, StrangerPlace, Strangers};
use rustls::pki_types::CertificateDer;
use tokio::io::AsyncWriteExt;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

use super::roster::Roster;
use crate::checksum::yield_now;
use crate::cluster::Cluster;
use crate::detection::check_detection;
use crate::fabrics::{FabricNames, Fabrics};
use crate::id::NodeId;
use crate::security::{self, Distrust, Fingerprint, Identities, Opening, Security};
use crate::stats::{ListenerStats, Refusals};
use crate::wire::{self, Frame, OtherVersion, PROTOCOL_VERSION, RejectReason};
use rdmc_fabric::Scope;

/// Listens at one address for the nodes of any number of clusters, and for invitations to new ones.
///
/// A node of a fixed cluster makes its own. A service that is invited ([`invite`](crate::invite)) binds one and takes
/// the invitations from it. It stops listening when it and every node that uses it are dropped.
///
/// Connections that have not said what they want are bounded for each peer and in all. When there are too many, the
/// oldest silent one is closed for a new one. Connections that have proved who they are do not count among them.
#[derive(Clone)]
pub struct Listener {
    shared: Arc<ListenerShared>,
    invitations: Arc<tokio::sync::Mutex<mpsc::Receiver<ArrivedInvitation>>>,
    _scope: Arc<Scope>,
}

/// Binds a listener; made by [`Listener::bind`].
///
/// # Cancel safety
/// Dropping it stops listening. The address is free when the listener's tasks have ended, soon after.
#[must_use = "futures do nothing unless they are polled"]
pub struct Bind {
    fabrics: Fabrics,
    address: String,
    security: Option<Security>,
    binding: Option<BoxFuture<'static, io::Result<Listener>>>,
}

impl Bind {
    /// Takes only connections that `security` admits; by default, and with `None`, all.
    ///
    /// Every holder of the key, or of a certificate of the authority, may invite. Nodes made from invitations use the
    /// same security. Set it before the future is polled.
    pub fn security(mut self, security: impl Into<Option<Security>>) -> Self {
        self.security = security.into();
        self
    }
}

impl Future for Bind {
    type Output = io::Result<Listener>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { fabrics, address, security, binding } = &mut *self;
        let bind = || {
            let (fabrics, address, security) = (fabrics.clone(), address.clone(), security.clone());
            async move { Listener::bind_with(fabrics, &address, security, true).await }.boxed()
        };
        binding.get_or_insert_with(bind).poll_unpin(cx)
    }
}

impl fmt::Debug for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bind").field("address", &self.address).finish_non_exhaustive()
    }
}

struct ListenerShared {
    address: String,
    nodes: Mutex<BTreeMap<(u128, NodeId), Registration>>,
    invited: mpsc::Sender<ArrivedInvitation>,
    takes_invitations: bool,
    fabrics: Fabrics,
    environment: Arc<dyn Environment>,
    security: Option<Security>,
    refusals: Refusals,
    /// Connections that have proved who they are, or said what they want, and are not handed on yet.
    admitted: Semaphore,
}

/// A node whose connections arrive here.
#[derive(Clone)]
struct Registration {
    arrived: mpsc::Sender<NodeConnection>,
    /// The identities that nodes that connect to it must prove, if there is security.
    identities: Arc<Identities>,
}

/// A connection that another node opened, with its `Hello` read.
pub(crate) struct NodeConnection {
    pub(crate) stream: Box<dyn ControlStream>,
    pub(crate) from: NodeId,
    /// In which life the other node is.
    pub(crate) incarnation: u64,
    /// Counts it if it is refused.
    pub(crate) refusals: Refusals,
}

/// An invitation that another node sent, with what both have in common.
pub(crate) struct ArrivedInvitation {
    pub(crate) environment: Arc<dyn Environment>,
    pub(crate) stream: Box<dyn ControlStream>,
    pub(crate) roster: Roster,
    /// The inviting node's fabrics.
    pub(crate) asked: FabricNames,
    /// The fabrics among these that this node offers.
    pub(crate) offered: FabricNames,
    pub(crate) payload: Vec<u8>,
    /// The credential that the inviting node has shown, if any.
    pub(crate) inviting: Option<Fingerprint>,
}

impl Listener {
    /// Listens at `address` (`host:port`, port 0 for any free one) and takes invitations to clusters on any of
    /// `fabrics`. All connections are taken, unless [security](Bind::security) is set.
    ///
    /// The first of the fabrics listens for all.
    ///
    /// # Cancel safety
    /// Dropping the future stops listening. The address is free when the listener's tasks have ended, soon after.
    ///
    /// # Errors
    /// The operating system's error.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn listen() -> Result<(), Box<dyn std::error::Error>> {
    /// let security = rdmc::Security::key_file("/etc/rdmc.key")?;
    /// let listener = rdmc::Listener::bind(rdmc::TcpFabric::new(), "0.0.0.0:7400").security(security).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn bind(fabrics: impl Into<Fabrics>, address: &str) -> Bind {
        Bind { fabrics: fabrics.into(), address: address.to_owned(), security: None, binding: None }
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
            admitted: Semaphore::new(ADMITTED_MAX),
        });
        let scope = Arc::new(Scope::new(environment.clone()));
        scope.spawn(shared.refusals.clone().report(environment));
        let accepting = accept(listener, shared.clone(), scope.spawner());
        scope.spawn(accepting);
        let invitations = Arc::new(tokio::sync::Mutex::new(invitations));
        Ok(Self { shared, invitations, _scope: scope })
    }

    /// Returns the address to which others connect, with the port that was chosen for port 0.
    pub fn local_address(&self) -> &str {
        &self.shared.address
    }

    /// Waits for the next invitation.
    ///
    /// # Cancel safety
    /// No invitation is lost.
    pub(crate) async fn invited(&self) -> ArrivedInvitation {
        let mut invitations = self.invitations.lock().await;
        invitations.recv().await.expect("the sender lives in self")
    }

    pub(crate) fn fabrics(&self) -> &Fabrics {
        &self.shared.fabrics
    }

    /// Returns the listener's counters.
    pub fn stats(&self) -> ListenerStats {
        ListenerStats { connections_refused: self.shared.refusals.count() }
    }

    pub(crate) fn security(&self) -> Option<&Security> {
        self.shared.security.as_ref()
    }

    pub(crate) fn refusals(&self) -> &Refusals {
        &self.shared.refusals
    }

    /// Registers a node of a cluster; its connections arrive until the receiver is dropped.
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

async fn accept(mut listener: Box<dyn ControlListener>, shared: Arc<ListenerShared>, spawner: rdmc_fabric::Spawner) {
    let strangers = Strangers::new(STRANGERS_PER_PEER_MAX, STRANGERS_MAX);
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(%error, address = shared.address, "no longer listening");
                return;
            }
        };
        let from = stream.peer_address();
        if !strangers.has_room_for(from) {
            // Older connections whose first bytes have arrived are not silent: their tasks read them now.
            yield_now().await;
        }
        let (place, displacement) = strangers.admit(from);
        let shared = shared.clone();
        spawner.spawn(Box::pin(async move {
            let environment = shared.environment.clone();
            let greeted = environment.timeout(GREETING_LIMIT, shared.greet(stream, place));
            match displacement.unless_displaced(greeted).await {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => shared.failed("greeting", from, &error),
                Some(Err(elapsed)) => shared.refused("silent", from, &elapsed),
                None => shared.refused("displaced", from, &"too many had not said what they want; it was the oldest"),
            }
        }));
    }
}

/// A connection that has proved who it is, or said what it wants.
struct Greeted<'a> {
    first: Frame,
    stream: Box<dyn ControlStream>,
    /// The credential that the other end has shown, if there is security.
    shown: Option<CertificateDer<'static>>,
    _admitted: SemaphorePermit<'a>,
}

impl ListenerShared {
    /// Reads a connection's first frame and hands the connection on.
    async fn greet(&self, stream: Box<dyn ControlStream>, place: StrangerPlace) -> io::Result<()> {
        let Some(Greeted { first, mut stream, shown, _admitted }) = self.first_frame(stream, place).await? else {
            return Ok(());
        };
        let from_address = stream.peer_address();
        let reason = match first {
            Frame::Hello { cluster, from, to, incarnation, .. } => {
                let node = self.nodes.lock().unwrap_or_else(PoisonError::into_inner).get(&(cluster, to)).cloned();
                match node {
                    Some(node) if !node.arrived.is_closed() => {
                        let checked = self.check(&node.identities, from, shown.as_ref());
                        if let Err(distrust) = checked {
                            let told = format!("it does not take this node for node {from}: {}", distrust.told());
                            self.refused("identity", from_address, &format!("it says it is node {from}: {distrust}"));
                            // If the other end does not wait for the reason, it is lost.
                            let _ = refuse(&mut stream, RejectReason::Declined { reason: told }).await;
                            return Ok(());
                        }
                        let refusals = self.refusals.clone();
                        let _ = node.arrived.send(NodeConnection { stream, from, incarnation, refusals }).await;
                        return Ok(());
                    }
                    _ => RejectReason::Cluster,
                }
            }
            Frame::Invite { cluster, you, members, fabrics: asked, payload, detection_ms, .. }
                if self.takes_invitations =>
            {
                let (offers, detection) = (self.fabrics.wire_names(), Duration::from_millis(detection_ms.into()));
                let roster = Roster::new(cluster, you, members, detection);
                match (roster, asked.in_common(offers), check_detection(detection)) {
                    (None, ..) => RejectReason::Identity,
                    (_, _, Err(error)) => RejectReason::Declined { reason: error.to_string() },
                    (_, None, _) => RejectReason::Fabrics { offers: offers.clone(), asked },
                    (Some(roster), Some(offered), Ok(())) => match self.room_for_invitation().await {
                        Some(room) => {
                            let environment = self.environment.clone();
                            let inviting = shown.as_ref().map(Fingerprint::of);
                            let arrived =
                                ArrivedInvitation { environment, stream, roster, asked, offered, payload, inviting };
                            room.send(arrived);
                            return Ok(());
                        }
                        None => RejectReason::Busy,
                    },
                }
            }
            Frame::Invite { .. } => RejectReason::NoInvitations,
            _ => return Err(io::Error::other("the first frame was neither a hello nor an invitation")),
        };
        if let RejectReason::Fabrics { offers, asked } = &reason
            && self.refusals.is_to_log("fabrics", from_address)
        {
            let from = from_address.map(tracing::field::display);
            tracing::warn!(from, %asked, %offers, "invitation refused: no fabric in common");
        }
        refuse(&mut stream, reason).await
    }

    /// Waits for room among the invitations that wait for the application; returns `None` if it takes none in time.
    async fn room_for_invitation(&self) -> Option<mpsc::Permit<'_, ArrivedInvitation>> {
        let room = self.environment.timeout(INVITATION_LIMIT, self.invited.reserve()).await;
        room.ok().and_then(Result::ok)
    }

    /// Reads the first frame, inside TLS if there is security; returns `None` if the connection has ended, or was
    /// refused with an answer.
    ///
    /// The connection keeps its place among the strangers until it has proved who it is. Without security it keeps the
    /// place until it has said a valid first frame.
    async fn first_frame(
        &self,
        mut stream: Box<dyn ControlStream>,
        place: StrangerPlace,
    ) -> io::Result<Option<Greeted<'_>>> {
        let from = stream.peer_address();
        let Some(opening) = Opening::read(&mut stream).await? else { return Ok(None) };
        place.note_spoken();
        match (&self.security, opening.asks_for_tls()) {
            (None, false) => {
                let first = wire::read(&mut opening.before(&mut stream)).await;
                let Some(first) = self.unless_of_another_version(first, &mut stream).await? else { return Ok(None) };
                drop(place);
                let Some(admitted) = self.admit(&mut stream).await? else { return Ok(None) };
                Ok(Some(Greeted { first, stream, shown: None, _admitted: admitted }))
            }
            (Some(security), true) => match security.accept(&opening, stream).await {
                Ok((mut stream, shown)) => {
                    drop(place);
                    let Some(admitted) = self.admit(&mut stream).await? else { return Ok(None) };
                    let first = wire::read(&mut stream).await;
                    let first = self.unless_of_another_version(first, &mut stream).await?;
                    Ok(first.map(|first| Greeted { first, stream, shown: Some(shown), _admitted: admitted }))
                }
                Err((error, mut stream)) => {
                    self.failed("security", from, &error);
                    // However that ends, the refusal was sent as far as possible.
                    let _ = self.environment.timeout(security::DRAIN_LIMIT, security::drain(&mut stream)).await;
                    Ok(None)
                }
            },
            (Some(_), false) => {
                self.refused("security", from, &Distrust::Plain);
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
                self.refused("security", from, &Distrust::UnexpectedTls);
                let reason = "it does not speak TLS".to_owned();
                let _ = refuse(&mut stream, RejectReason::Declined { reason }).await;
                Ok(None)
            }
        }
    }

    /// Returns the first frame; refuses one of another version, and returns `None` then.
    async fn unless_of_another_version(
        &self,
        first: io::Result<Option<Frame>>,
        stream: &mut Box<dyn ControlStream>,
    ) -> io::Result<Option<Frame>> {
        let other = match first {
            Err(error) => match error.downcast::<OtherVersion>() {
                Ok(other) => other,
                Err(error) => return Err(error),
            },
            first => return first,
        };
        self.refused("version", stream.peer_address(), &other);
        refuse(stream, RejectReason::Version { ours: PROTOCOL_VERSION }).await?;
        // More bytes of its frames may be unread: closing the connection before they are read would reset it.
        let _ = self.environment.timeout(security::DRAIN_LIMIT, security::drain(stream)).await;
        Ok(None)
    }

    /// Counts a connection as admitted; refuses it, and returns `None`, if there are too many.
    async fn admit(&self, stream: &mut Box<dyn ControlStream>) -> io::Result<Option<SemaphorePermit<'_>>> {
        if let Ok(admitted) = self.admitted.try_acquire() {
            return Ok(Some(admitted));
        }
        self.refused("busy", stream.peer_address(), &"too many connections wait to be handed on");
        refuse(stream, RejectReason::Busy).await?;
        Ok(None)
    }

    /// Checks that an end which claims to be node `from` has proved that node's identity.
    fn check(
        &self,
        identities: &Identities,
        from: NodeId,
        shown: Option<&CertificateDer<'static>>,
    ) -> Result<(), Distrust> {
        match (&self.security, shown, identities.get(&from)) {
            (Some(security), Some(shown), Some(expected)) => security.check(shown, expected),
            (Some(_), None, _) => Err(Distrust::NoCertificate),
            // The node itself refuses nodes that are not in its cluster.
            (Some(_), Some(_), None) | (None, ..) => Ok(()),
        }
    }

    /// Refuses a connection for an error, unless its other end has gone: nodes that need each other no more close
    /// connections that are being made.
    fn failed(&self, kind: &'static str, from: Option<IpAddr>, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                tracing::debug!(from = from.map(tracing::field::display), %error, "control connection ended early");
            }
            _ => self.refused(kind, from, error),
        }
    }

    /// Counts a refused connection, and logs it unless one of its kind and peer was logged lately.
    fn refused(&self, kind: &'static str, from: Option<IpAddr>, reason: &dyn fmt::Display) {
        if self.refusals.add(kind, from) {
            tracing::warn!(from = from.map(tracing::field::display), %reason, "control connection refused");
        }
    }
}

/// Tells the other end why it is refused.
pub(crate) async fn refuse(stream: &mut Box<dyn ControlStream>, reason: RejectReason) -> io::Result<()> {
    stream.write_all(&wire::encode(&Frame::Reject { reason })).await?;
    stream.flush().await
}

/// How long a connection may take to say what it wants.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// Connections that have not yet said what they want, at once: of one peer.
pub(crate) const STRANGERS_PER_PEER_MAX: usize = 128;
/// Connections that have not yet said what they want, at once: of all peers.
const STRANGERS_MAX: usize = 384;
/// Admitted connections that wait to be handed on.
const ADMITTED_MAX: usize = 256;
/// How long an invitation waits for room among those that the application is to take.
const INVITATION_LIMIT: Duration = Duration::from_secs(2);
/// Connections of one node that wait to be taken.
const ARRIVALS_MAX: usize = 64;
/// Invitations that wait to be taken.
const INVITATIONS_MAX: usize = 16;

#[cfg(test)]
mod tests;
