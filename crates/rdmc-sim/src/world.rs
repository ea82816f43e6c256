//! The modelled world: nodes, ports and paths, and their faults.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{Exposures, Timestamp, WorkError};

use crate::control::{Control, ControlFault, Pipe};
use crate::fabric::SimFabric;
use crate::flows::{Flows, LinkIndex};
use crate::host::Host;
use crate::log::{Log, Recorded};
use crate::model::{ClusterModel, WaitMode};
use crate::path::{Path, PathModel};
use crate::queue_pair::SimQueuePair;
use crate::random::Random;
use crate::simulation::{Executor, NodeIndex, Stalled, lock};

mod flips;

pub use flips::FlippedBit;
use flips::Flips;

/// A simulation: a [`World`] and its executor.
///
/// Dropping it ends all tasks of the world.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use rdmc_sim::{ClusterModel, Simulation};
///
/// let simulation = Simulation::new(ClusterModel::new(2, 10_000, 1_000), 1).expect("the model is valid");
/// let world = simulation.world().clone();
/// let slept = simulation.run(Duration::MAX, async move {
///     world.sleep(Duration::from_secs(3600)).await;
///     world.now()
/// });
/// assert_eq!(slept.expect("it ends").as_nanos(), 3_600_000_000_000);
/// ```
#[derive(Debug)]
pub struct Simulation {
    world: World,
}

impl Simulation {
    /// Makes the world of a model; `seed` decides everything random.
    ///
    /// # Errors
    /// The model is invalid.
    pub fn new(model: ClusterModel, seed: u64) -> Result<Self, ModelError> {
        model.check().map_err(|what| ModelError { what })?;
        Ok(Self { world: World::new(model, seed) })
    }

    /// Returns the handle of the world.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Runs until `future` has ended. Other tasks continue at the next call.
    ///
    /// # Errors
    /// [`Stalled`] if `future` cannot end, or does not end within `limit` of virtual time.
    pub fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Stalled> {
        self.world.0.executor.run(limit, future)
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        self.world.0.executor.end();
        self.world.0.flows.end();
        // Planned calls hold references to the world.
        self.world.0.nodes.iter().for_each(|node| lock(&node.planned_calls).clear());
    }
}

/// The parameters of a model are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster cannot be modelled: {what}")]
pub struct ModelError {
    /// The parameter, and its valid values.
    pub what: String,
}

/// A handle of a modelled world; cheap to clone.
///
/// # Panics
/// Every method with a node panics if there is no such node.
#[derive(Clone)]
pub struct World(pub(crate) Arc<WorldShared>);

pub(crate) struct WorldShared {
    pub(crate) executor: Executor,
    pub(crate) flows: Flows,
    pub(crate) model: ClusterModel,
    pub(crate) random: Mutex<Random>,
    pub(crate) nodes: Vec<Node>,
    /// The uplink of each rack: out of the rack and into it.
    uplinks: Vec<(LinkIndex, LinkIndex)>,
    /// Paths from one node to another with a limit of their own.
    limited: Mutex<BTreeMap<(NodeIndex, NodeIndex), LinkIndex>>,
    /// Directions, from one node to another, with conditions.
    pub(crate) paths: Mutex<BTreeMap<(NodeIndex, NodeIndex), Path>>,
    /// Queue pairs, by the nonce in their endpoint.
    pub(crate) queue_pairs: Mutex<BTreeMap<u128, Weak<SimQueuePair>>>,
    pub(crate) control: Control,
    /// Directions, from one node to another, that are cut.
    cut: Mutex<BTreeSet<(NodeIndex, NodeIndex)>>,
    flips: Flips,
    pub(crate) log: Mutex<Log>,
}

/// A node of the world.
pub(crate) struct Node {
    pub(crate) host: Mutex<Host>,
    pub(crate) adapter: Mutex<Adapter>,
    pub(crate) egress: LinkIndex,
    pub(crate) ingress: LinkIndex,
    pub(crate) exposures: Arc<Exposures>,
    alive: AtomicBool,
    /// Number of operations that it has begun.
    operations: AtomicU64,
    /// The number of the operation before which the first planned call is due.
    next_planned: AtomicU64,
    planned_calls: Mutex<BTreeMap<u64, PlannedCall>>,
}

/// A call that is planned before an operation.
type PlannedCall = Box<dyn FnOnce() + Send>;

/// Until when earlier operations occupy a node's adapter, in each direction.
#[derive(Debug, Default)]
pub(crate) struct Adapter {
    pub(crate) out_free_ns: u64,
    pub(crate) in_free_ns: u64,
}

impl World {
    fn new(model: ClusterModel, seed: u64) -> Self {
        let executor = Executor::new();
        let flows = Flows::new(executor.clone());
        let rate = model.port_mbps * BITS_PER_MBIT;
        let nodes = (0..model.nodes).map(|_| Node {
            host: Mutex::default(),
            adapter: Mutex::default(),
            egress: flows.add_link(rate),
            ingress: flows.add_link(rate),
            exposures: Arc::default(),
            alive: AtomicBool::new(true),
            operations: AtomicU64::new(0),
            next_planned: AtomicU64::new(u64::MAX),
            planned_calls: Mutex::default(),
        });
        let nodes = nodes.collect();
        let racks = (0..model.nodes).map(|node| model.rack_of(node)).max().map_or(0, |rack| rack + 1);
        let uplink = model.racks.as_ref().map(|racks| racks.uplink_mbps * BITS_PER_MBIT);
        let uplinks = uplink.map(|rate| (0..racks).map(|_| (flows.add_link(rate), flows.add_link(rate))).collect());
        Self(Arc::new(WorldShared {
            executor,
            flows,
            model,
            random: Mutex::new(Random::new(seed)),
            nodes,
            uplinks: uplinks.unwrap_or_default(),
            limited: Mutex::default(),
            paths: Mutex::default(),
            queue_pairs: Mutex::default(),
            control: Control::default(),
            cut: Mutex::default(),
            flips: Flips::default(),
            log: Mutex::default(),
        }))
    }

    /// Returns the parameters.
    pub fn model(&self) -> &ClusterModel {
        &self.0.model
    }

    /// Returns the numbers of all nodes.
    pub fn nodes(&self) -> impl Iterator<Item = NodeIndex> + use<> {
        (0..self.0.model.nodes).map(NodeIndex)
    }

    /// Returns the virtual time.
    pub fn now(&self) -> Timestamp {
        self.0.executor.now()
    }

    /// Waits for `duration` of virtual time.
    pub async fn sleep(&self, duration: Duration) {
        self.0.executor.sleep_until(self.now() + duration).await;
    }

    /// Waits until a moment of virtual time.
    pub async fn sleep_until(&self, at: Timestamp) {
        self.0.executor.sleep_until(at).await;
    }

    /// Makes a fabric of a node.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn fabric(&self, node: NodeIndex) -> Arc<SimFabric> {
        assert!(node.index() < self.0.nodes.len(), "the cluster has no node {node}");
        Arc::new(SimFabric::new(self.clone(), node))
    }

    /// Runs a task on a node; it ends with the node.
    pub fn spawn_on(&self, node: NodeIndex, task: BoxFuture<'static, ()>) {
        if self.is_alive(node) {
            self.0.executor.spawn(Some(node), task);
        }
    }

    /// Runs a task outside all nodes.
    pub fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.0.executor.spawn(None, task);
    }

    /// Counts the tasks of a node that have not ended.
    pub fn tasks_of(&self, node: NodeIndex) -> usize {
        self.0.executor.tasks_of(node)
    }

    /// Counts the queue pairs of a node, broken ones included.
    pub fn queue_pairs_of(&self, node: NodeIndex) -> usize {
        self.0.queue_pairs_of(node).len()
    }

    /// Returns the number of operations that a node has begun: all actions of its software that other nodes can observe
    /// or cause. These are requests posted, completions taken, queue pairs connected and closed, control connections
    /// opened, accepted and ended, and reads and writes on them.
    pub fn operations_of(&self, node: NodeIndex) -> u64 {
        self.0.nodes[node.index()].operations.load(Ordering::Relaxed)
    }

    /// Calls `call` when a node has begun `count` operations and is about to begin the next.
    ///
    /// If `call` kills the node, the operation and all later ones have no effect. If `call` stops the node, the running
    /// task continues until it waits.
    pub fn before_operation(&self, node: NodeIndex, count: u64, call: impl FnOnce() + Send + 'static) {
        let node = &self.0.nodes[node.index()];
        let mut planned_calls = lock(&node.planned_calls);
        planned_calls.insert(count, Box::new(call));
        node.next_planned
            .store(planned_calls.first_key_value().map_or(u64::MAX, |(count, _)| *count), Ordering::Relaxed);
    }

    /// Returns the digest of all events and their times: equal runs have equal digests.
    pub fn digest(&self) -> u64 {
        lock(&self.0.log).digest()
    }

    /// Records events from now on, for [`recorded`](Self::recorded).
    pub fn record(&self) {
        lock(&self.0.log).record();
    }

    /// Takes the recorded events.
    pub fn recorded(&self) -> Vec<Recorded> {
        lock(&self.0.log).take()
    }

    /// Returns the bytes of flows that have left a node's port, and those that have arrived.
    pub fn carried_bytes(&self, node: NodeIndex) -> (u64, u64) {
        let Node { egress, ingress, .. } = self.0.nodes[node.index()];
        (self.0.flows.carried_bytes(egress), self.0.flows.carried_bytes(ingress))
    }

    /// Returns the processor time that a node's software has used so far.
    pub fn cpu_time(&self, node: NodeIndex, mode: WaitMode) -> Duration {
        let cpu_ns = lock(&self.0.nodes[node.index()].host).cpu_ns(mode, self.0.executor.now_ns());
        Duration::from_nanos(cpu_ns)
    }

    // Faults.

    /// Returns whether a node is alive.
    pub fn is_alive(&self, node: NodeIndex) -> bool {
        self.0.nodes[node.index()].alive.load(Ordering::Relaxed)
    }

    /// Kills the process of a node: its operating system closes its connections.
    pub fn kill(&self, node: NodeIndex) {
        if !self.0.die(node, "killed") {
            return;
        }
        for queue_pair in self.0.queue_pairs_of(node) {
            queue_pair.break_with(WorkError::Flushed, true);
        }
        for pipe in self.0.control.pipes_of(node) {
            pipe.reset();
        }
        self.0.executor.end_tasks_of(node);
    }

    /// Removes a node without notice to the others, as a power failure does.
    pub fn vanish(&self, node: NodeIndex) {
        if !self.0.die(node, "vanished") {
            return;
        }
        for queue_pair in self.0.queue_pairs_of(node) {
            queue_pair.break_with(WorkError::Flushed, false);
        }
        for other in self.nodes().filter(|&other| other != node) {
            self.0.cut_off(node, other);
        }
        // Its values are dropped when no connection can report it any more.
        self.0.executor.end_tasks_of(node);
    }

    /// Stops the process of a node, as SIGSTOP does; its adapter and its kernel continue.
    pub fn stop(&self, node: NodeIndex) {
        self.0.note_fault(Some(node), "stopped");
        self.0.executor.stop_tasks_of(node);
    }

    /// Resumes a stopped process.
    pub fn resume(&self, node: NodeIndex) {
        self.0.note_fault(Some(node), "resumed");
        self.0.executor.resume_tasks_of(node);
    }

    /// Takes the core away from a node's software for a while.
    pub fn hold_up(&self, node: NodeIndex, duration: Duration) {
        let (now_ns, duration_ns) = (self.0.executor.now_ns(), duration.as_nanos());
        let duration_ns = u64::try_from(duration_ns).unwrap_or(u64::MAX);
        lock(&self.0.log).held_up(now_ns, node, duration_ns);
        lock(&self.0.nodes[node.index()].host).hold_up(now_ns, duration_ns);
    }

    /// Makes a node's software and port slower by a factor, relative to the model.
    pub fn slow_down(&self, node: NodeIndex, times: u64) {
        let times = times.max(1);
        lock(&self.0.nodes[node.index()].host).slow_down(times);
        self.limit_port(node, self.0.model.port_mbps / times);
    }

    /// Changes the rate of a node's port.
    pub fn limit_port(&self, node: NodeIndex, mbps: u64) {
        self.0.note_fault(Some(node), "port limited");
        let Node { egress, ingress, .. } = self.0.nodes[node.index()];
        for link in [egress, ingress] {
            self.0.flows.set_rate(link, mbps * BITS_PER_MBIT);
        }
    }

    /// Changes the rate of a rack's uplink.
    ///
    /// # Panics
    /// If there is no such rack.
    pub fn limit_uplink(&self, rack: u32, mbps: u64) {
        self.0.note_fault(None, "uplink limited");
        let (out, into) = self.0.uplinks[rack as usize];
        for link in [out, into] {
            self.0.flows.set_rate(link, mbps * BITS_PER_MBIT);
        }
    }

    /// Limits the rate between two nodes, in each direction, besides the rates of their ports. Messages in flight at
    /// the first call have no limit.
    pub fn limit_path(&self, a: NodeIndex, b: NodeIndex, mbps: u64) {
        self.0.note_fault(None, "path limited");
        for ends in [(a, b), (b, a)] {
            let rate = mbps * BITS_PER_MBIT;
            let known = lock(&self.0.limited).get(&ends).copied();
            match known {
                Some(link) => self.0.flows.set_rate(link, rate),
                None => {
                    let link = self.0.flows.add_link(rate);
                    lock(&self.0.limited).insert(ends, link);
                }
            }
        }
    }

    /// Changes the conditions of the path from one node to another. The other direction keeps its own.
    ///
    /// # Errors
    /// The conditions are invalid.
    pub fn set_path(&self, from: NodeIndex, to: NodeIndex, path: PathModel) -> Result<(), ModelError> {
        path.check().map_err(|what| ModelError { what })?;
        self.0.note_fault(None, "path changed");
        lock(&self.0.paths).insert((from, to), Path::new(path));
        Ok(())
    }

    /// Partitions two nodes. A message that has not left its port waits, and fails if it waits too long. A message that
    /// has left still arrives, and so does its acknowledgement.
    pub fn cut(&self, a: NodeIndex, b: NodeIndex) {
        if a != b {
            self.0.cut_off(a, b);
        }
    }

    /// Cuts the direction from one node to another. Control connections carry the other direction until they break.
    /// Queue pairs, which wait for acknowledgements, stop in both directions.
    pub fn cut_one_way(&self, from: NodeIndex, to: NodeIndex) {
        if from != to {
            self.0.cut_directions(from, to, &[(from, to)]);
        }
    }

    /// Heals the partition of two nodes.
    pub fn heal(&self, a: NodeIndex, b: NodeIndex) {
        let joined = self.is_alive(a) && self.is_alive(b) && {
            let mut cut = lock(&self.0.cut);
            // Without short-circuit: both are removed.
            cut.remove(&(a, b)) | cut.remove(&(b, a))
        };
        if joined {
            self.0.note_fault(None, "healed");
            for node in [a, b] {
                for queue_pair in self.0.queue_pairs_of(node) {
                    queue_pair.resume();
                }
            }
            for pipe in self.0.control.pipes_between(a, b) {
                pipe.resume();
            }
        }
    }

    /// Heals all partitions of living nodes.
    pub fn heal_all(&self) {
        let cut: Vec<_> = lock(&self.0.cut).iter().copied().collect();
        for (a, b) in cut {
            self.heal(a, b);
        }
    }

    /// Resets the control connections between two nodes.
    pub fn reset_control(&self, a: NodeIndex, b: NodeIndex) {
        self.0.note_fault(None, "control connections reset");
        for pipe in self.0.control.pipes_between(a, b) {
            pipe.reset();
        }
    }

    /// Truncates the next write on each control connection from one node to another to `bytes`, or to all but one byte,
    /// and then resets the connections between them.
    pub fn truncate_control(&self, from: NodeIndex, to: NodeIndex, bytes: usize) {
        self.0.note_fault(None, "control bytes cut short");
        self.0.control.inject(from, to, ControlFault::Truncate { bytes });
    }

    /// Flips a bit of the next write on each control connection from one node to another.
    pub fn garble_control(&self, from: NodeIndex, to: NodeIndex, bit: usize) {
        self.0.note_fault(None, "control bytes garbled");
        self.0.control.inject(from, to, ControlFault::Garble { bit });
    }

    /// Breaks the queue pairs between two nodes, as a bad cable does.
    pub fn break_queue_pairs(&self, a: NodeIndex, b: NodeIndex) {
        self.0.note_fault(None, "queue pairs broken");
        for queue_pair in self.0.queue_pairs_of(a) {
            if queue_pair.peer_node() == Some(b) {
                queue_pair.break_with(WorkError::ConnectionLost, true);
            }
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl WorldShared {
    /// Returns the links between two ports.
    pub(crate) fn path(&self, from: NodeIndex, to: NodeIndex) -> Vec<LinkIndex> {
        if from == to {
            return Vec::new();
        }
        let mut path = vec![self.nodes[from.index()].egress];
        let (rack_from, rack_to) = (self.model.rack_of(from.0), self.model.rack_of(to.0));
        if rack_from != rack_to {
            path.push(self.uplinks[rack_from as usize].0);
            path.push(self.uplinks[rack_to as usize].1);
        }
        path.extend(lock(&self.limited).get(&(from, to)));
        path.push(self.nodes[to.index()].ingress);
        path
    }

    /// Returns the time between two ports.
    pub(crate) fn latency_ns(&self, from: NodeIndex, to: NodeIndex) -> u64 {
        let apart = self.model.rack_of(from.0) != self.model.rack_of(to.0);
        let between = self.model.racks.as_ref().filter(|_| apart).map_or(0, |racks| racks.latency_ns);
        self.model.latency_ns + between
    }

    /// Occupies a node's adapter with one operation; returns when the operation ends.
    pub(crate) fn occupy_adapter(&self, node: NodeIndex, outwards: bool) -> u64 {
        let mut adapter = lock(&self.nodes[node.index()].adapter);
        let free_ns = if outwards { &mut adapter.out_free_ns } else { &mut adapter.in_free_ns };
        *free_ns = (*free_ns).max(self.executor.now_ns()) + self.model.nic.operation_ns;
        *free_ns
    }

    /// Returns whether messages get through from one node to another.
    pub(crate) fn reaches(&self, from: NodeIndex, to: NodeIndex) -> bool {
        !lock(&self.cut).contains(&(from, to))
    }

    /// Returns whether messages get through between two nodes in both directions.
    pub(crate) fn reach_each_other(&self, a: NodeIndex, b: NodeIndex) -> bool {
        self.reaches(a, b) && self.reaches(b, a)
    }

    pub(crate) fn is_alive(&self, node: NodeIndex) -> bool {
        self.nodes[node.index()].alive.load(Ordering::Relaxed)
    }

    pub(crate) fn queue_pairs_of(&self, node: NodeIndex) -> Vec<Arc<SimQueuePair>> {
        let queue_pairs = lock(&self.queue_pairs);
        queue_pairs.values().filter_map(Weak::upgrade).filter(|queue_pair| queue_pair.node() == node).collect()
    }

    /// Executes a call that is planned before a node's next operation, and counts the operation; returns whether the
    /// node is alive.
    ///
    /// The caller holds no lock of the world.
    pub(crate) fn begin_operation(&self, node: NodeIndex) -> bool {
        let node = &self.nodes[node.index()];
        let count = node.operations.fetch_add(1, Ordering::Relaxed);
        if count == node.next_planned.load(Ordering::Relaxed) {
            let call = {
                let mut planned_calls = lock(&node.planned_calls);
                let call = planned_calls.remove(&count);
                node.next_planned
                    .store(planned_calls.first_key_value().map_or(u64::MAX, |(count, _)| *count), Ordering::Relaxed);
                call
            };
            if let Some(call) = call {
                call();
            }
        }
        node.alive.load(Ordering::Relaxed)
    }

    fn die(&self, node: NodeIndex, how: &'static str) -> bool {
        let was_alive = self.nodes[node.index()].alive.swap(false, Ordering::Relaxed);
        if was_alive {
            self.note_fault(Some(node), how);
        }
        was_alive
    }

    fn cut_off(&self, a: NodeIndex, b: NodeIndex) {
        self.cut_directions(a, b, &[(a, b), (b, a)]);
    }

    fn cut_directions(&self, a: NodeIndex, b: NodeIndex, directions: &[(NodeIndex, NodeIndex)]) {
        let before = lock(&self.cut).len();
        lock(&self.cut).extend(directions);
        if lock(&self.cut).len() == before {
            return;
        }
        self.note_fault(None, "cut");
        for (node, other) in [(a, b), (b, a)] {
            for queue_pair in self.queue_pairs_of(node) {
                if queue_pair.peer_node() == Some(other) {
                    queue_pair.stall();
                }
            }
        }
        let pipes: Vec<Arc<Pipe>> = self.control.pipes_between(a, b);
        let at_ns = self.executor.now_ns().saturating_add(self.model.control.patience_ns);
        for pipe in pipes {
            pipe.stall(at_ns);
        }
    }

    pub(crate) fn note_fault(&self, node: Option<NodeIndex>, what: &'static str) {
        lock(&self.log).fault(self.executor.now_ns(), node, what);
    }
}

/// Bit/s of a Mbit/s.
const BITS_PER_MBIT: u64 = 1_000_000;

#[cfg(test)]
mod tests;
