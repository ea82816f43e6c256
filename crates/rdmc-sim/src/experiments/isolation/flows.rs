//! Two flows, each on its own queue pair with one message in flight: the benchmark of Zhang et al.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::TryFutureExt;
use futures::future::try_join_all;
use rdmc_fabric::{
    CompletionMode, CompletionSource, Endpoint, Expose, Fabric, Operation, Peer, QueuePair, QueuePairConfig, Received,
    RemoteAccess, Role,
};
use tokio::sync::oneshot;

use super::super::measure::VIRTUAL_LIMIT;
use super::super::{ExperimentError, PaperCluster};
use crate::deployment::DeploymentError;
use crate::fabric::SimFabric;
use crate::simulation::NodeIndex;
use crate::world::{Simulation, World};

/// A megabyte: the unit of the paper's elephants, and the payload scale of the model.
pub(crate) const MB: u64 = 1_000_000;

/// The traffic of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Sends messages of `megabytes`.
    Elephant { megabytes: u64, waits: CompletionWait },
    /// Writes messages of `bytes`, and polls for their completions.
    Mouse { bytes: u64 },
}

/// How a process waits for its completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompletionWait {
    /// By polling.
    Busy,
    /// Asleep until an event.
    Event,
}

/// The times at which each message of a flow was posted and complete, in ns.
#[derive(Clone, Debug, Default)]
struct MessageTimes(Vec<(u64, u64)>);

impl MessageTimes {
    /// Returns the median time of a message in ns.
    fn median_ns(&self) -> f64 {
        let mut times: Vec<u64> = self.0.iter().map(|(posted, done)| done - posted).collect();
        times.sort_unstable();
        times.get(times.len() / 2).map_or(f64::NAN, |&ns| ns as f64)
    }

    /// Returns messages per second.
    fn per_second(&self) -> f64 {
        let first = self.0.first().map_or(0, |&(posted, _)| posted);
        let last = self.0.last().map_or(0, |&(_, done)| done);
        self.0.len() as f64 * 1e9 / (last - first) as f64
    }

    /// Returns messages per second between two moments. Messages across a moment count in proportion.
    fn per_second_within(&self, from: u64, to: u64) -> f64 {
        let part = |&(posted, done): &(u64, u64)| {
            let inside = done.min(to).saturating_sub(posted.max(from));
            inside as f64 / (done - posted) as f64
        };
        self.0.iter().map(part).sum::<f64>() * 1e9 / (to - from) as f64
    }
}

/// Lets two elephants share the port; returns their rates in Gbit/s.
pub(crate) fn elephants(flows: [(u64, CompletionWait); 2]) -> Result<[f64; 2], ExperimentError> {
    let largest = flows[0].0.max(flows[1].0);
    // Long enough for five messages of the larger flow at half the rate of the port.
    let duration = Duration::from_nanos(largest * MB * 8 / 24 * 5).max(Duration::from_millis(20));
    let [a, b] = flows.map(|(megabytes, waits)| Flow::Elephant { megabytes, waits });
    let FlowsMeasurement { done, until_ns, .. } = compete(&[a, b], duration)?;
    // The window holds whole messages of the larger size, since a part of a message counts at an even rate.
    let larger = done[usize::from(flows[1].0 > flows[0].0)].0.iter().map(|&(_, done)| done);
    let within = || larger.clone().filter(|&done| done <= until_ns);
    let (from, to) = (within().next().unwrap_or(0), within().next_back().unwrap_or(0));
    let rate = |flow: usize| done[flow].per_second_within(from, to) * (flows[flow].0 * MB * 8) as f64 / 1e9;
    Ok([rate(0), rate(1)])
}

/// The latency and rate of a mouse, and the rate of the elephant beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MouseTimes {
    pub(crate) median_us: f64,
    /// Millions of messages per second.
    pub(crate) rate: f64,
    /// The rate of the elephant, in Gbit/s.
    pub(crate) elephant_gbps: f64,
}

/// Runs a mouse with messages of `bytes` alone, or beside an elephant that waits for events.
pub(crate) fn mouse(bytes: u64, megabytes: Option<u64>) -> Result<MouseTimes, ExperimentError> {
    let elephant = megabytes.map(|megabytes| Flow::Elephant { megabytes, waits: CompletionWait::Event });
    let flows: Vec<Flow> = std::iter::once(Flow::Mouse { bytes }).chain(elephant).collect();
    let competed = compete(&flows, MOUSE_WINDOW)?;
    let mouse = &competed.done[0];
    Ok(MouseTimes {
        median_us: mouse.median_ns() / 1e3,
        rate: mouse.per_second() / 1e6,
        elephant_gbps: competed.elephants_gbps(bytes, mouse),
    })
}

/// Returns the rate in Gbit/s of an elephant alone that waits for events, over the same window as for mice.
pub(crate) fn elephant_alone(megabytes: u64) -> Result<f64, ExperimentError> {
    let alone = compete(&[Flow::Elephant { megabytes, waits: CompletionWait::Event }], MOUSE_WINDOW)?;
    Ok(alone.elephants_gbps(0, &MessageTimes::default()))
}

/// The results of competing flows.
struct FlowsMeasurement {
    /// The messages of each flow; the last one of each ends after the window.
    done: Vec<MessageTimes>,
    /// The end of the window, in ns.
    until_ns: u64,
    /// Bytes that the port has carried for flows that share it.
    carried: u64,
    duration: Duration,
}

impl FlowsMeasurement {
    fn elephants_gbps(&self, mouse_bytes: u64, mouse: &MessageTimes) -> f64 {
        // Short messages do not share the port, so they are not in the count.
        let mice = if mouse_bytes > 256 { mouse_bytes * mouse.0.len() as u64 } else { 0 };
        self.carried.saturating_sub(mice) as f64 * 8.0 / self.duration.as_secs_f64() / 1e9
    }
}

/// Runs flows from one node to another for a while, each on its own queue pair and thread.
fn compete(flows: &[Flow], duration: Duration) -> Result<FlowsMeasurement, ExperimentError> {
    let mut model = PaperCluster::Kbnets.model();
    model.nodes = 2;
    model.payload_scale = MB;
    let simulation = Simulation::new(model, 1)?;
    let world = simulation.world().clone();
    let flows = flows.to_vec();
    let competed = simulation.run(VIRTUAL_LIMIT, async move {
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = Vec::new();
        for flow in flows {
            running.push(start(&world, flow, stop.clone()).await);
            // Keeps the flows out of step.
            world.sleep(Duration::from_micros(7)).await;
        }
        let (before, _) = world.carried_bytes(SENDER);
        world.sleep(duration).await;
        let (after, _) = world.carried_bytes(SENDER);
        let until_ns = world.now().as_nanos();
        stop.store(true, Ordering::Relaxed);
        let done = try_join_all(running).await?;
        Ok::<_, DeploymentError>(FlowsMeasurement { done, until_ns, carried: after - before, duration })
    })?;
    Ok(competed?)
}

/// Starts a flow; the returned future resolves to its messages when it is stopped.
async fn start(
    world: &World,
    flow: Flow,
    stop: Arc<AtomicBool>,
) -> impl Future<Output = Result<MessageTimes, DeploymentError>> + use<> {
    let (sender, receiver) = (world.fabric(SENDER), world.fabric(RECEIVER));
    let waits = match flow {
        Flow::Elephant { waits: CompletionWait::Event, .. } => CompletionMode::Event,
        _ => CompletionMode::Poll,
    };
    let (from, to) = (queue_pair(&sender, waits), queue_pair(&receiver, CompletionMode::Poll));
    let peer = |endpoint: Endpoint, role| Peer { endpoint, role, address: None };
    let (near, far) = futures::join!(
        from.connect(peer(to.endpoint(), Role::Active)),
        to.connect(peer(from.endpoint(), Role::Passive))
    );
    near.and(far).expect("this world has no failures");
    let clock = world.clone();
    let post = poster(flow, &sender, &receiver, from, to, world);
    let (ended, done) = oneshot::channel();
    world.spawn_on(
        SENDER,
        Box::pin(async move {
            let mut done = MessageTimes::default();
            while !stop.load(Ordering::Relaxed) {
                let posted = clock.now().as_nanos();
                post().await.expect("this world has no failures");
                done.0.push((posted, clock.now().as_nanos()));
            }
            let _ = ended.send(done);
        }),
    );
    done.map_err(|_| DeploymentError::new("a flow did not end"))
}

/// Returns a closure that posts a message of a flow. The receiver of an elephant posts receives ahead.
fn poster(
    flow: Flow,
    sender: &Arc<SimFabric>,
    receiver: &Arc<SimFabric>,
    from: QueuePair,
    to: QueuePair,
    world: &World,
) -> impl Fn() -> Operation<()> + Send + use<> {
    let bytes = match flow {
        Flow::Elephant { megabytes, .. } => megabytes,
        Flow::Mouse { bytes } => bytes,
    };
    let len = usize::try_from(bytes).expect("messages are short, or modelled by short ones");
    let memory = |fabric: &Arc<SimFabric>| {
        let region = fabric.allocate(len).expect("memory of the heap");
        region.into_mut().expect("allocated memory is writable")
    };
    let data = memory(sender).freeze();
    let exposed = match flow {
        Flow::Mouse { .. } => {
            let access = Expose::Mutable(memory(receiver), RemoteAccess::WRITE);
            let exposed = receiver.expose(access).expect("memory can be exposed");
            Some((exposed, to))
        }
        Flow::Elephant { .. } => {
            let rooms: VecDeque<_> = (0..RECEIVES).map(|_| to.receive(memory(receiver))).collect();
            world.spawn_on(RECEIVER, Box::pin(receive(rooms, to)));
            None
        }
    };
    move || match &exposed {
        Some((exposed, _open)) => from.write(data.clone(), exposed.remote(), None),
        None => from.send(data.clone(), None),
    }
}

/// Takes messages and posts their receives again.
async fn receive(mut rooms: VecDeque<Operation<Received>>, queue_pair: QueuePair) {
    while let Some(room) = rooms.pop_front() {
        let Ok(received) = room.await else { return };
        rooms.push_back(queue_pair.receive(received.buffer));
    }
}

fn queue_pair(fabric: &Arc<SimFabric>, mode: CompletionMode) -> QueuePair {
    let queue = fabric.create_completion_queue(1024, mode).expect("the model has no limit");
    let source: Arc<dyn CompletionSource> = queue.source();
    fabric.environment().spawn(Box::pin(queue.drain()));
    fabric.create_queue_pair(&source, QueuePairConfig::default()).expect("the completion queue has room")
}

const SENDER: NodeIndex = NodeIndex(0);
const RECEIVER: NodeIndex = NodeIndex(1);
/// Receives that an elephant's receiver posts ahead, as in the paper.
const RECEIVES: usize = 5;
/// Duration of the measurement of mice.
const MOUSE_WINDOW: Duration = Duration::from_millis(20);
