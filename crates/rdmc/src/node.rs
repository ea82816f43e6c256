//! A node: one process's membership in a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rdmc_fabric::{BufferMut, Capabilities, CompletionMode, Fabric, FabricError, Memory, MemoryRegion};
use tokio::sync::mpsc;

use crate::cluster::Cluster;
use crate::detection::{DETECTION_MAX, DETECTION_MIN, check_detection};
use crate::fabrics::FabricChoice;
use crate::failure::FailureCause;
use crate::group::error::GroupError;
use crate::group::receiver::JoinGroup;
use crate::group::sender::Sender;
use crate::group::{self, GroupSpec};
use crate::id::{GroupId, NodeId};
use crate::invite_failure::InviteFailure;
use crate::mesh::Mesh;
use crate::mesh::ahead::ConnectionsAhead;
use crate::mesh::listener::{Listener, NodeConnection};
use crate::mesh::members::MemberEvents;
use crate::pool::{Pool, PoolError};
use crate::resources::{GroupEnding, NodeResources, OpenGroups};
use crate::round_trips::RoundTrips;
use crate::security::{PeerSecurity, Security};
use crate::shares::PortShares;
use crate::stats::{NodeStats, Refusals};
use rdmc_fabric::Scope;

mod error;
mod joining;

pub use error::StartError;
use joining::InvitationStreams;
pub use joining::Joining;

/// Prepares a node; made by [`Node::builder`], [`invite`](crate::invite) or an accepted invitation.
pub struct NodeBuilder {
    me: NodeId,
    cluster: Cluster,
    fabric: Option<Arc<dyn Fabric>>,
    choice: Option<FabricChoice>,
    replies: BTreeMap<NodeId, Bytes>,
    missing: Vec<(String, InviteFailure)>,
    conclusion: Bytes,
    /// The connections of the invitation. They stay open until the node has started, so that each side notices if the
    /// other one gives up.
    invitation: InvitationStreams,
    ahead: ConnectionsAhead,
    listener: Option<Listener>,
    arrivals: Option<mpsc::Receiver<NodeConnection>>,
    security: Option<Security>,
    completion_mode: Option<CompletionMode>,
    completion_capacity: Option<u32>,
    port_rate: Option<u64>,
    pool_bytes_max: u64,
    preallocate: (usize, usize),
    connect_limit: Duration,
    detection: Duration,
    /// That of the inviting node, if the builder came from an invitation.
    detection_invited: Option<Duration>,
}

impl NodeBuilder {
    /// The detection time by default.
    pub const DETECTION_DEFAULT: Duration = Duration::from_secs(2);
    /// The shortest detection time.
    pub const DETECTION_MIN: Duration = DETECTION_MIN;
    /// The longest detection time.
    pub const DETECTION_MAX: Duration = DETECTION_MAX;

    pub(crate) fn new(me: NodeId, cluster: Cluster) -> Self {
        Self {
            me,
            cluster,
            fabric: None,
            choice: None,
            replies: BTreeMap::new(),
            missing: Vec::new(),
            conclusion: Bytes::new(),
            invitation: Vec::new(),
            ahead: ConnectionsAhead::new(),
            listener: None,
            arrivals: None,
            security: None,
            completion_mode: None,
            completion_capacity: None,
            port_rate: None,
            pool_bytes_max: 4 << 30,
            preallocate: (0, 0),
            connect_limit: CONNECT_LIMIT,
            detection: Self::DETECTION_DEFAULT,
            detection_invited: None,
        }
    }

    /// Sets the fabric that moves the bytes. Required, unless the builder came from an invitation.
    #[must_use]
    pub fn fabric(mut self, fabric: Arc<dyn Fabric>) -> Self {
        self.fabric = Some(fabric);
        self.choice = None;
        self
    }

    /// Returns the name of the fabric that moves the bytes, or `None` if none was set yet.
    pub fn fabric_name(&self) -> Option<&'static str> {
        self.fabric.as_ref().map(|fabric| fabric.capabilities().name)
    }

    /// Returns which fabric was chosen and why, if the builder came from an invitation.
    pub fn fabric_choice(&self) -> Option<&FabricChoice> {
        self.choice.as_ref()
    }

    /// Returns the [replies](crate::Invitation::reply) of the invited nodes, if the builder came from
    /// [`invite`](crate::invite).
    pub fn replies(&self) -> &BTreeMap<NodeId, Bytes> {
        &self.replies
    }

    /// Returns the addresses of the listeners that do not take part, and why, if the builder came from an invitation
    /// with a [quorum](crate::InviteOptions::quorum).
    ///
    /// At an invited node it is empty: there the numbers of the [nodes](Node::nodes) have gaps.
    pub fn missing(&self) -> &[(String, InviteFailure)] {
        &self.missing
    }

    /// Returns what the inviting application [concludes](crate::ReachedListeners::invite_and_conclude) from the replies
    /// of all invited nodes that take part, at most [`REPLY_LEN_MAX`](crate::Invitation::REPLY_LEN_MAX) bytes; empty
    /// if it says nothing.
    pub fn conclusion(&self) -> &Bytes {
        &self.conclusion
    }

    /// Sets which nodes may take part; by default all that reach the port.
    ///
    /// A [listener](Self::listener) must have been bound with security as well. Builders that came from an invitation
    /// already have the security of their listener, or of [`InviteOptions::security`](crate::InviteOptions::security).
    #[must_use]
    pub fn security(mut self, security: impl Into<Option<Security>>) -> Self {
        self.security = security.into();
        self
    }

    /// Uses an existing listener instead of one at the node's own address of the cluster.
    #[must_use]
    pub fn listener(mut self, listener: Listener) -> Self {
        self.arrivals = Some(listener.register(&self.cluster, self.me));
        self.listener = Some(listener);
        self
    }

    /// Sets the rate of the node's port in bytes a second, in each direction: what it carries of blocks at most. By
    /// default it is [what the fabric knows](rdmc_fabric::Capabilities::port_rate), which `tcp` and `shm` do not.
    ///
    /// Starting fails with [`StartError::PortRate`] if it is 0.
    ///
    /// It is what groups with a [share](GroupSpec::share) divide; they leave four per cent of it. With a rate that is
    /// too high, weights count for less; with one that is too low, some of the port is idle while groups share it. Over
    /// TCP with packets of 1500 bytes, a port carries 0.95 of the rate of its link.
    #[must_use]
    pub fn port_rate(mut self, bytes_per_second: impl Into<Option<u64>>) -> Self {
        self.port_rate = bytes_per_second.into();
        self
    }

    /// Sets how the node waits for completions; by default as the fabric prefers.
    #[must_use]
    pub fn completion_mode(mut self, mode: CompletionMode) -> Self {
        self.completion_mode = Some(mode);
        self
    }

    /// Sets the most bytes that the pool may hold, lent and kept; default 4 GiB.
    ///
    /// Longer messages cannot be received into pool memory, and longer [objects](crate::DeliveryMode::Shared) cannot be
    /// attached. Each group has one block more.
    #[must_use]
    pub fn pool_bytes_max(mut self, bytes: u64) -> Self {
        self.pool_bytes_max = bytes;
        self
    }

    /// Allocates and registers `count` regions of `len` bytes at the start; default none.
    ///
    /// The first messages then do not wait for it (DSN §4.2).
    #[must_use]
    pub fn preallocate(mut self, len: usize, count: usize) -> Self {
        self.preallocate = (len, count);
        self
    }

    /// Sets how long [`start`](Self::start), or the groups of a node that [is joining](Self::start_joining), wait for
    /// the other nodes; default 30 s.
    ///
    /// If the builder came from an invitation the default is 10 s, since all nodes have just accepted.
    #[must_use]
    pub fn connect_limit(mut self, limit: Duration) -> Self {
        self.connect_limit = limit;
        self
    }

    /// Sets after which time a silent node is given up, and the groups that it is a member of fail: 50 ms to an hour,
    /// default 2 s. Within it all members that still reach each other have learnt of it and agree.
    ///
    /// All nodes of a cluster must have the same detection time. In a cluster formed by invitation the inviting node
    /// chooses it for all ([`InviteOptions::detection`](crate::InviteOptions::detection)), and another one given here
    /// is refused. In a cluster given as a list, set it at each node. If the times differ, nothing is lost, but a node
    /// with a shorter time may take others for dead that answer as slowly as their own time allows.
    ///
    /// Nodes that share groups ask each other for a sign of life three times as often, and a node whose application
    /// follows the [members](Node::members) asks all others. A node whose program does not let its tasks run for two
    /// fifths of the detection time, or whose machine is overloaded for so long, may be taken for dead; its
    /// [`GroupFailure::stalled`](crate::GroupFailure::stalled) then says so. A connection that is reset is noticed at
    /// once, whatever the detection time.
    #[must_use]
    pub fn detection(mut self, detection: Duration) -> Self {
        self.detection = detection;
        self
    }

    /// Sets how many completions all queue pairs of the node can have outstanding; default 1,048,576, or fewer if the
    /// fabric's device offers fewer.
    #[must_use]
    pub fn completion_capacity(mut self, entries: u32) -> Self {
        self.completion_capacity = Some(entries);
        self
    }

    pub(crate) fn chosen(mut self, fabric: Arc<dyn Fabric>, choice: FabricChoice) -> Self {
        let reason = choice.reason();
        tracing::info!(node = %self.me, fabric = choice.fabric, ?reason, "fabric chosen");
        self.fabric = Some(fabric);
        self.choice = Some(choice);
        self.connect_limit = CONNECT_INVITED_LIMIT;
        self
    }

    /// Takes the detection time of the inviting node.
    pub(crate) fn invited_with(mut self, detection: Duration) -> Self {
        self.detection = detection;
        self.detection_invited = Some(detection);
        self
    }

    /// Takes connections that are open already, or are being opened.
    pub(crate) fn ahead(mut self, ahead: ConnectionsAhead) -> Self {
        self.ahead = ahead;
        self
    }

    pub(crate) fn concluded(mut self, conclusion: Bytes, streams: InvitationStreams) -> Self {
        self.conclusion = conclusion;
        self.invitation = streams;
        self
    }

    pub(crate) fn replied(mut self, replies: BTreeMap<NodeId, Bytes>, missing: Vec<(String, InviteFailure)>) -> Self {
        (self.replies, self.missing) = (replies, missing);
        self
    }

    pub(crate) fn arrivals(mut self, listener: Listener, arrivals: mpsc::Receiver<NodeConnection>) -> Self {
        self.security = listener.security().cloned();
        self.listener = Some(listener);
        self.arrivals = Some(arrivals);
        self
    }

    /// Starts the node: pool, completion queue, and the mesh of connections to all other nodes.
    ///
    /// # Cancel safety
    /// Dropping the future stops everything that it has started.
    ///
    /// # Errors
    /// [`StartError::Unreachable`] names the nodes that did not connect in time; [`StartError::GaveUp`] names one that
    /// has accepted the invitation and ended since. The others are those of [`start_joining`](Self::start_joining).
    ///
    /// # Panics
    /// If the fabric's [name](rdmc_fabric::Capabilities::name) is invalid.
    pub async fn start(self) -> Result<Node, StartError> {
        let (node, joining) = self.start_joining().await?;
        match joining.await {
            Ok(()) => Ok(node),
            Err(error) => {
                joining::leave_unjoined(&node.0).await;
                Err(error)
            }
        }
    }

    /// Starts the node, and returns it before the other nodes are connected. [`Joining`] waits until they are, or until
    /// the node goes on without some of them.
    ///
    /// Groups can be created meanwhile. Their members connect to each other as soon as the nodes are connected, so that
    /// a group forms a round trip sooner than after [`start`](Self::start). The
    /// [formation limit](GroupSpec::formation_limit) of a group counts from its creation. It should be longer than the
    /// [connect limit](Self::connect_limit).
    ///
    /// # Cancel safety
    /// Dropping the future stops everything that it has started.
    ///
    /// # Errors
    /// [`StartError::Listen`] also says that only one of node and listener has security; [`StartError::Detection`] and
    /// [`StartError::DetectionInvited`] refuse a detection time; [`StartError::NoFabric`] asks for a fabric.
    ///
    /// # Panics
    /// If the fabric's [name](rdmc_fabric::Capabilities::name) is invalid.
    ///
    /// # Examples
    /// A member of a group that starts with its node:
    /// ```no_run
    /// # async fn join(invitation: rdmc::Invitation, spec: rdmc::GroupSpec) -> Result<(), Box<dyn std::error::Error>> {
    /// let (node, _joining) = invitation.accept().await?.start_joining().await?;
    /// let receiver = node.join_group(spec).await?;
    /// # drop(receiver);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn start_joining(self) -> Result<(Node, Joining), StartError> {
        let fabric = self.fabric.ok_or(StartError::NoFabric)?;
        if self.port_rate == Some(0) {
            return Err(StartError::PortRate);
        }
        check_detection(self.detection)?;
        if let Some(invited) = self.detection_invited.filter(|invited| *invited != self.detection) {
            return Err(StartError::DetectionInvited { invited, got: self.detection });
        }
        let environment = fabric.environment();
        let own_address = self.cluster.nodes.get(&self.me).ok_or(StartError::NotInCluster { node: self.me })?;
        // The highest node opens no connection, the lowest accepts none: it need not listen.
        let accepts = self.cluster.nodes.keys().any(|&node| node < self.me);
        let (listener, arrivals) = match (self.listener, self.arrivals) {
            (Some(listener), Some(arrivals)) => {
                if listener.security().is_some() != self.security.is_some() {
                    let source =
                        io::Error::new(io::ErrorKind::InvalidInput, "one of node and listener has no security");
                    return Err(StartError::Listen { address: listener.local_address().to_owned(), source });
                }
                (Some(listener), Some(arrivals))
            }
            _ if accepts => {
                let bound = Listener::bind_with(fabric.clone().into(), own_address, self.security.clone(), false).await;
                let listener = bound.map_err(|source| StartError::Listen { address: own_address.clone(), source })?;
                let arrivals = listener.register(&self.cluster, self.me);
                (Some(listener), Some(arrivals))
            }
            _ => (None, None),
        };
        let pool = Pool::new(fabric.clone(), self.pool_bytes_max);
        let (len, count) = self.preallocate;
        match pool.preallocate(len, count) {
            Ok(()) => {}
            Err(PoolError::Fabric(error)) => return Err(error.into()),
            Err(PoolError::TooLong { .. }) => unreachable!("preallocation stops at the limit"),
        }
        let capabilities = fabric.capabilities();
        let mode = self.completion_mode.unwrap_or(capabilities.completion_mode);
        let capacity = self.completion_capacity.unwrap_or(COMPLETIONS_DEFAULT.min(capabilities.completions_max));
        let queue = fabric.create_completion_queue(capacity, mode)?;
        let completions = queue.source();
        let scope = Scope::new(environment.clone());
        scope.spawn(queue.drain());
        let refusals = match &listener {
            Some(listener) => listener.refusals().clone(),
            None => {
                let refusals = Refusals::default();
                scope.spawn(refusals.clone().report(environment.clone()));
                refusals
            }
        };
        let peers = PeerSecurity { security: self.security, identities: self.cluster.identities(), refusals };
        let mesh = Mesh::new(
            self.me,
            self.cluster.shared_key(),
            self.cluster.nodes,
            environment.clone(),
            self.detection,
            peers,
        );
        scope.spawn(mesh.clone().watch());
        if let Some(arrivals) = arrivals {
            scope.spawn(mesh.clone().welcome(arrivals, scope.spawner()));
        }
        let mut ahead = self.ahead;
        for peer in mesh.dialled() {
            scope.spawn(mesh.clone().dial(peer, ahead.remove(&peer)));
        }
        let port = Arc::new(PortShares::new(self.port_rate.or(capabilities.port_rate)));
        scope.spawn({
            let (port, environment) = (port.clone(), environment.clone());
            async move { port.decide(&*environment).await }
        });
        let counters = Arc::default();
        let shared = NodeResources {
            mesh,
            fabric,
            choice: self.choice,
            environment,
            completions,
            completions_max: capacity,
            pool,
            counters,
            groups: OpenGroups::default(),
            round_trips: RoundTrips::default(),
            port,
            _listener: listener,
            scope,
        };
        let shared = Arc::new(shared);
        let joining = joining::begin(&shared, self.connect_limit, self.invitation);
        Ok((Node(shared), joining))
    }
}

impl fmt::Debug for NodeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeBuilder").field("me", &self.me).field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

/// A process's membership in a cluster; cheap to clone.
///
/// It lives until its last clone and the last handle of its groups are dropped.
#[derive(Clone)]
pub struct Node(pub(crate) Arc<NodeResources>);

impl Node {
    /// Prepares node `me` of `cluster`.
    pub fn builder(me: NodeId, cluster: Cluster) -> NodeBuilder {
        NodeBuilder::new(me, cluster)
    }

    /// Returns this node's number.
    pub fn id(&self) -> NodeId {
        self.0.mesh.me()
    }

    /// Returns the numbers of all nodes of the cluster in ascending order, this one included.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.0.mesh.nodes()
    }

    /// Follows the other nodes of the cluster: the stream returns an event when one is connected or lost.
    ///
    /// It begins with a [`Joined`](crate::MemberEvent::Joined) for each node that is connected now. Then
    /// [`Lost`](crate::MemberEvent::Lost) and [`Returned`](crate::MemberEvent::Returned) alternate for each node. A
    /// stream that is read slowly skips what has passed meanwhile: of several losses of a node, it returns the last
    /// one. It never misses the latest state, and keeps at most two events for each node.
    ///
    /// A process of the cluster that has ended may be started again as the same node, at the same address. The others
    /// connect to it again, and `Returned` says that it is another process. It can be a member of new groups.
    ///
    /// While a stream exists, this node asks all connected nodes for signs of life, not only those that share a group
    /// with it. So it notices within the [detection time](NodeBuilder::detection) that a node is stopped or cut off.
    /// That costs one short frame in each direction and node, three times in a detection time.
    ///
    /// The stream ends when the node is [shut down](Self::shutdown), or when its last handle is dropped.
    ///
    /// # Examples
    /// ```no_run
    /// use futures::StreamExt;
    ///
    /// # async fn example(node: rdmc::Node) {
    /// let mut members = node.members();
    /// while let Some(event) = members.next().await {
    ///     println!("{event}");
    /// }
    /// # }
    /// ```
    pub fn members(&self) -> MemberEvents {
        self.0.mesh.members()
    }

    /// Returns the name of the fabric that moves the bytes.
    pub fn fabric_name(&self) -> &'static str {
        self.capabilities().name
    }

    /// Returns which fabric was chosen and why, if the cluster was formed by invitation.
    pub fn fabric_choice(&self) -> Option<&FabricChoice> {
        self.0.choice.as_ref()
    }

    /// Returns what the fabric can do.
    pub fn capabilities(&self) -> Capabilities {
        self.0.fabric.capabilities()
    }

    /// Creates a group with this node as the root, the only sender (DSN §3).
    ///
    /// All members call [`create_group`](Self::create_group) or [`join_group`](Self::join_group) with the same
    /// specification, in any order and concurrently with other groups. Each waits for its neighbours, and until its
    /// node is connected to those of all members.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the group: the others learn that this member has left.
    ///
    /// # Errors
    /// See [`GroupError`].
    pub async fn create_group(&self, spec: GroupSpec) -> Result<Sender, GroupError> {
        group::sender::create(self.0.clone(), spec).await
    }

    /// Joins a group as a receiver; its messages arrive in memory of the pool. A receiver that supplies the memory for
    /// each message joins [with offers](JoinGroup::with_offers).
    ///
    /// # Cancel safety
    /// If the future is dropped before it is polled, nothing has begun. Later, the group is abandoned: the others learn
    /// that this member has left.
    ///
    /// # Errors
    /// See [`GroupError`].
    ///
    /// # Examples
    /// ```no_run
    /// # async fn join(node: rdmc::Node, spec: rdmc::GroupSpec) -> Result<(), rdmc::GroupError> {
    /// let mut messages = node.join_group(spec.clone()).await?;
    /// // Or, for messages in memory of its own:
    /// let mut offers = node.join_group(spec).with_offers().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn join_group(&self, spec: GroupSpec) -> JoinGroup {
        JoinGroup::new(self.0.clone(), spec)
    }

    /// Lends `len` bytes of registered memory, to be filled and sent without a copy; their content is unspecified.
    ///
    /// Waits while too much of the pool is lent.
    ///
    /// # Cancel safety
    /// Nothing is lent if the future is dropped.
    ///
    /// # Errors
    /// `len` exceeds the pool's limit, or the fabric refuses.
    pub async fn allocate(&self, len: usize) -> Result<BufferMut, PoolError> {
        self.0.pool.lend(len).await
    }

    /// Registers the application's memory with the fabric, such as a mapped file to receive into.
    ///
    /// # Errors
    /// The fabric refuses.
    pub fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        self.0.fabric.register(memory)
    }

    /// Returns the node's counters.
    pub fn stats(&self) -> NodeStats {
        self.0.counters.node_stats(self.0.pool.lent_bytes(), self.0.mesh.refused())
    }

    /// Shuts the node down, for all clones of this handle; returns the groups that were cut short.
    ///
    /// No group can be created or joined any more. Groups that have not ended then fail on the other members, with this
    /// node as the cause. The shutdown takes at most the given limit, twice the
    /// [detection time](NodeBuilder::detection), and a second. Handles of groups return the groups' end. A node that is
    /// shut down relays nothing.
    ///
    /// Dropping the last handle of a node and of its groups does the same as [`Shutdown::Abort`], but does not wait
    /// until the other nodes know.
    ///
    /// # Cancel safety
    /// Some groups may not have ended, and some nodes may not know. Call it again, on a clone.
    pub async fn shutdown(self, how: Shutdown) -> Vec<GroupId> {
        let shared = &*self.0;
        let mut groups = shared.groups.close();
        if let Shutdown::Drain { limit } = how {
            let ended = futures::future::join_all(groups.iter().map(|group| group.ended()));
            let _ = shared.environment.timeout(limit, ended).await;
        }
        groups.retain(|group| group.state().is_none());
        groups.iter().for_each(|group| group.declare(FailureCause::Abandoned));
        let ended = futures::future::join_all(groups.iter().map(|group| group.ended()));
        let _ = shared.environment.timeout(shared.mesh.detection() * 2, ended).await;
        groups.iter().for_each(|group| group.depart());
        let _ = shared.environment.timeout(LEAVE_LIMIT, shared.mesh.leave()).await;
        shared.scope.end();
        // Some may have closed well while this node was about to leave them.
        groups.retain(|group| group.state() != Some(GroupEnding::Closed));
        groups.iter().map(|group| group.id()).collect()
    }
}

/// How a node shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shutdown {
    /// It waits until its groups have ended, up to a limit, and leaves the others.
    Drain {
        /// The longest time to wait.
        limit: Duration,
    },
    /// It leaves its groups, and tells their members so.
    Abort,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// Completions that a node can have outstanding by default.
const COMPLETIONS_DEFAULT: u32 = 1 << 20;
/// How long a starting node waits for the others.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// The same in a cluster formed by invitation, in which all nodes have just accepted.
const CONNECT_INVITED_LIMIT: Duration = Duration::from_secs(10);
/// How long it may take to tell the other nodes that this one leaves.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);
