//! The unchanged runtime on the nodes of a world.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::try_join_all;
use rdmc::{
    Algorithm, Certificate, Cluster, Delivery, GroupError, GroupFailure, GroupSpec, Node, NodeBuilder, NodeId,
    Receiver, SendError, Sender, StartError,
};
use rdmc_fabric::Timestamp;
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::simulation::NodeIndex;
use crate::world::World;

/// A runtime on every node of a world, all in one cluster.
#[derive(Clone, Debug)]
pub struct Deployment {
    world: World,
    nodes: Vec<Node>,
}

/// A group to be formed.
#[derive(Clone, Debug)]
pub struct GroupPlan {
    /// The group's number, unique in the world.
    pub id: u64,
    /// The members, the root first.
    pub members: Vec<NodeIndex>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The block size in modelled bytes.
    pub block_size: u64,
    /// When members deliver messages.
    pub delivery: Delivery,
    /// The slots of a ring for short messages, and the modelled bytes of a slot.
    pub ring: Option<(u32, u64)>,
}

/// A deployment failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct DeploymentError {
    what: String,
}

impl DeploymentError {
    pub(crate) fn new(what: impl std::fmt::Display) -> Self {
        Self { what: what.to_string() }
    }
}

impl From<GroupError> for DeploymentError {
    fn from(error: GroupError) -> Self {
        Self::new(error)
    }
}

impl From<GroupFailure> for DeploymentError {
    fn from(failure: GroupFailure) -> Self {
        Self::new(failure)
    }
}

impl From<SendError> for DeploymentError {
    fn from(error: SendError) -> Self {
        Self::new(error)
    }
}

impl From<rdmc_schedule::ScheduleError> for DeploymentError {
    fn from(error: rdmc_schedule::ScheduleError) -> Self {
        Self::new(error)
    }
}

impl From<StartError> for DeploymentError {
    fn from(error: StartError) -> Self {
        Self::new(error)
    }
}

/// A formed group, with the handles of all members.
#[derive(Debug)]
pub struct FormedGroup {
    world: World,
    plan: GroupPlan,
    sender: Sender,
    /// Number of messages sent so far.
    sent: AtomicUsize,
    deliveries: Vec<DeliveryLog>,
}

/// The deliveries at one member.
#[derive(Debug)]
struct DeliveryLog {
    member: NodeIndex,
    seen: Mutex<DeliveryTimes>,
    closed: oneshot::Receiver<Result<Certificate, GroupFailure>>,
}

#[derive(Debug)]
struct DeliveryTimes {
    times: Vec<Timestamp>,
    /// Ends with the stream of messages or with the node.
    more: mpsc::UnboundedReceiver<Timestamp>,
}

/// The times of one multicast.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MulticastTimes {
    /// When the root's application called send.
    pub began: Timestamp,
    /// When the root's memory was free again.
    pub sent: Timestamp,
    /// When each other member delivered the message, in rank order.
    pub delivered: Vec<Timestamp>,
}

impl MulticastTimes {
    /// Returns the time until the last member had the message.
    pub fn latency(&self) -> Duration {
        let last = self.delivered.iter().copied().max().unwrap_or(self.sent);
        last.since(self.began)
    }

    /// Returns the time between the first and the last member to have the message.
    pub fn skew(&self) -> Duration {
        let first = self.delivered.iter().copied().min().unwrap_or(self.sent);
        self.delivered.iter().copied().max().unwrap_or(self.sent).since(first)
    }
}

impl Deployment {
    /// Starts a runtime on every node and waits until all are connected.
    ///
    /// # Errors
    /// A node cannot be started.
    pub async fn start(world: &World) -> Result<Self, DeploymentError> {
        Self::start_with(world, |builder| builder).await
    }

    /// Does the same; `prepare` adjusts the builder of each node.
    ///
    /// # Errors
    /// A node cannot be started.
    pub async fn start_with(
        world: &World,
        prepare: impl Fn(NodeBuilder) -> NodeBuilder,
    ) -> Result<Self, DeploymentError> {
        let starting = prepared(world, prepare).map(|(node, delay, builder)| async move {
            world.sleep(delay).await;
            on_node(world, node, builder.start()).await
        });
        let nodes = try_join_all(starting).await?.into_iter().collect::<Result<_, _>>()?;
        Ok(Self { world: world.clone(), nodes })
    }

    /// Does the same, but does not wait until the nodes are connected.
    pub(crate) async fn start_joining_with(
        world: &World,
        prepare: impl Fn(NodeBuilder) -> NodeBuilder,
    ) -> Result<Self, DeploymentError> {
        let starting = prepared(world, prepare).map(|(node, delay, builder)| async move {
            world.sleep(delay).await;
            // Groups fail that have a node which is not reached.
            let (started, _joining) = on_node(world, node, builder.start_joining()).await??;
            Ok::<_, DeploymentError>(started)
        });
        Ok(Self { world: world.clone(), nodes: try_join_all(starting).await? })
    }

    /// Returns the world.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Returns a node's runtime.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn node(&self, node: NodeIndex) -> &Node {
        &self.nodes[node.index()]
    }

    /// Forms a group. Every member but the root receives and drops messages.
    ///
    /// # Errors
    /// A member cannot join.
    pub async fn form(&self, plan: GroupPlan) -> Result<FormedGroup, DeploymentError> {
        let scale = self.world.model().payload_scale;
        let block_size = u32::try_from((plan.block_size / scale).max(1)).unwrap_or(u32::MAX);
        let spec = GroupSpec::new(plan.id, plan.members.iter().map(|node| NodeId(node.0)))
            .algorithm(plan.algorithm.clone())
            .formation_limit(CONNECT_LIMIT)
            .delivery(plan.delivery)
            .block_size(block_size);
        let spec = match plan.ring {
            Some((slots, bytes)) => spec.ring(slots, u32::try_from((bytes / scale).max(1)).unwrap_or(u32::MAX)),
            None => spec,
        };
        let members = plan.members.iter().skip(1).map(|&member| {
            let (node, spec, world) = (self.node(member).clone(), spec.clone(), self.world.clone());
            async move { on_node(&world, member, async move { node.join_group(spec).await }).await }
        });
        let root = *plan.members.first().ok_or_else(|| DeploymentError::new("a group needs a root"))?;
        let created = {
            let (node, spec) = (self.node(root).clone(), spec.clone());
            on_node(&self.world, root, async move { node.create_group(spec).await })
        };
        let (sender, receivers) = futures::try_join!(created, try_join_all(members))?;
        let receivers = receivers.into_iter().collect::<Result<Vec<_>, _>>()?;
        let members = plan.members.iter().skip(1).zip(receivers);
        let deliveries = members.map(|(&member, receiver)| DeliveryLog::of(&self.world, member, receiver)).collect();
        Ok(FormedGroup { world: self.world.clone(), plan, sender: sender?, sent: AtomicUsize::new(0), deliveries })
    }
}

impl FormedGroup {
    /// Returns the plan of the group.
    pub fn plan(&self) -> &GroupPlan {
        &self.plan
    }

    /// Sends a message of `bytes` modelled bytes and waits until every member has delivered it.
    ///
    /// # Errors
    /// The group's failure.
    pub async fn multicast(&self, bytes: u64) -> Result<MulticastTimes, DeploymentError> {
        self.stream(bytes, 1).await
    }

    /// Sends `count` messages of `bytes` modelled bytes without pauses, and waits until every member has delivered
    /// them.
    ///
    /// # Errors
    /// The group's failure.
    pub async fn stream(&self, bytes: u64, count: usize) -> Result<MulticastTimes, DeploymentError> {
        let began = self.world.now();
        if count == 0 {
            return Ok(MulticastTimes { began, sent: began, delivered: Vec::new() });
        }
        let sends = futures::stream::iter(0..count).map(|_| self.sender.send(self.payload(bytes)));
        let mut sends = sends.buffered(STREAM_AHEAD);
        while let Some(sent) = sends.next().await {
            sent?;
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
        let sent = self.world.now();
        let last = self.sent.load(Ordering::Relaxed).saturating_sub(1);
        Ok(MulticastTimes { began, sent, delivered: self.delivered(last).await? })
    }

    /// Begins to send a message on the root, after the messages before it.
    pub(crate) fn begin(&self, bytes: u64) -> oneshot::Receiver<Result<Timestamp, SendError>> {
        let (done, sent) = oneshot::channel();
        let (send, world) = (self.sender.send(self.payload(bytes)), self.world.clone());
        let root = self.plan.members[0];
        self.world.spawn_on(
            root,
            Box::pin(async move {
                let outcome = send.await;
                let _ = done.send(outcome.map(|_| world.now()));
            }),
        );
        sent
    }

    /// Waits until every member has delivered message `number`, counted from 0; returns the times in rank order.
    pub(crate) async fn delivered(&self, number: usize) -> Result<Vec<Timestamp>, DeploymentError> {
        let mut delivered = Vec::new();
        for deliveries in &self.deliveries {
            let time = deliveries.nth(number).await;
            let member = deliveries.member;
            delivered
                .push(time.ok_or_else(|| DeploymentError::new(format!("node {member} did not deliver the message")))?);
        }
        Ok(delivered)
    }

    /// Closes the group.
    ///
    /// # Errors
    /// The group's failure.
    pub async fn close(self) -> Result<(), DeploymentError> {
        // Runs on the root's node, and ends with it.
        on_node(&self.world, self.plan.members[0], self.sender.close()).await??;
        for deliveries in self.deliveries {
            deliveries.closed.await.map_err(|_| DeploymentError::new("a member's node died"))??;
        }
        Ok(())
    }

    fn payload(&self, bytes: u64) -> Vec<u8> {
        let scaled = bytes.div_ceil(self.world.model().payload_scale);
        vec![0; usize::try_from(scaled).expect("messages are modelled by short ones")]
    }
}

impl DeliveryLog {
    fn of(world: &World, member: NodeIndex, mut receiver: Receiver) -> Self {
        let (arrived, more) = mpsc::unbounded_channel();
        let (done, closed) = oneshot::channel();
        let clock = world.clone();
        world.spawn_on(
            member,
            Box::pin(async move {
                while let Some(Ok(message)) = receiver.next().await {
                    drop(message);
                    let _ = arrived.send(clock.now());
                }
                drop(arrived);
                let _ = done.send(receiver.close().await);
            }),
        );
        Self { member, seen: Mutex::new(DeliveryTimes { times: Vec::new(), more }), closed }
    }

    /// Waits for message `number` and returns the time of its delivery; `None` if it cannot come any more.
    async fn nth(&self, number: usize) -> Option<Timestamp> {
        let mut seen = self.seen.lock().await;
        while seen.times.len() <= number {
            let time = seen.more.recv().await?;
            seen.times.push(time);
        }
        seen.times.get(number).copied()
    }
}

/// Returns the payload scale: the smallest block and the shortest message keep a thousand bytes or more, and the scale
/// divides every block size.
pub(crate) fn scale_for(block_sizes: &[u64], shortest_message: u64) -> u64 {
    let smallest = block_sizes.iter().copied().min().unwrap_or(1).min(shortest_message);
    let divides = |scale: &u64| block_sizes.iter().all(|size| size.is_multiple_of(*scale));
    (1..=smallest / PAYLOAD_OF_A_BLOCK).rev().find(divides).unwrap_or(1)
}

/// Returns the builders of all nodes, each with the time after which it is to start.
fn prepared(
    world: &World,
    prepare: impl Fn(NodeBuilder) -> NodeBuilder,
) -> impl Iterator<Item = (NodeIndex, Duration, NodeBuilder)> {
    let cluster = Cluster::new(world.nodes().map(|node| (node.0, address(node))));
    world.nodes().map(move |node| {
        let builder = Node::builder(NodeId(node.0), cluster.clone())
            .fabric(world.fabric(node))
            .connect_limit(CONNECT_LIMIT)
            .completion_capacity(u32::MAX);
        // The highest node first, since the others connect to it: so no node refuses a connection for too many at once.
        (node, START_INTERVAL * (world.model().nodes - 1 - node.0), prepare(builder))
    })
}

/// Runs a future on a node and returns its output.
pub(crate) async fn on_node<T: Send + 'static>(
    world: &World,
    node: NodeIndex,
    future: impl Future<Output = T> + Send + 'static,
) -> Result<T, DeploymentError> {
    let (done, output) = oneshot::channel();
    world.spawn_on(
        node,
        Box::pin(async move {
            let _ = done.send(future.await);
        }),
    );
    output.await.map_err(|_| DeploymentError::new(format!("node {node} died")))
}

/// Returns the address at which a node's control plane listens.
pub(crate) fn address(node: NodeIndex) -> String {
    format!("n{node}:1")
}

/// Limit of the time to connect nodes and to form groups: large ones have very many connections.
const CONNECT_LIMIT: Duration = Duration::from_secs(600);
/// Time from the start of one node to that of the next.
const START_INTERVAL: Duration = Duration::from_micros(50);
/// Payload bytes of a modelled block, at least.
const PAYLOAD_OF_A_BLOCK: u64 = 1024;
/// Limit of the messages of a stream in flight at the root.
const STREAM_AHEAD: usize = 8;
