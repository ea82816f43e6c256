//! Two flows, each on its own queue pair with one message in flight: the benchmark of Zhang et al.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::try_join_all;
use futures::{FutureExt, TryFutureExt};
use rdmc_fabric::{CompletionMode, Endpoint, FlowSource, FlowSpec, FlowTarget, FlowVerb, Peer, Role};
use tokio::sync::oneshot;

use super::super::measure::VIRTUAL_LIMIT;
use super::super::{ExperimentError, PaperCluster};
use crate::deployment::DeploymentError;
use crate::simulation::NodeIndex;
use crate::world::{Simulation, World};

/// A megabyte: the unit of the paper's elephants, and the payload scale of the model.
pub(crate) const MB: u64 = 1_000_000;

/// The traffic of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Moves messages of `megabytes`.
    Elephant(Elephant),
    /// Writes messages of `bytes`, and polls for their completions.
    Mouse { bytes: u64 },
}

impl Flow {
    /// Returns what its messages are, and how its sender waits.
    fn spec(self) -> (FlowSpec, CompletionMode) {
        let (verb, bytes, waits) = match self {
            Self::Elephant(Elephant { verb, megabytes, waits: CompletionWait::Busy }) => {
                (verb, megabytes, CompletionMode::Poll)
            }
            Self::Elephant(Elephant { verb, megabytes, waits: CompletionWait::Event }) => {
                (verb, megabytes, CompletionMode::Event)
            }
            Self::Mouse { bytes } => (FlowVerb::Write, bytes, CompletionMode::Poll),
        };
        let bytes = usize::try_from(bytes).expect("messages are short, or modelled by short ones");
        (FlowSpec { verb, bytes, in_flight: 1, receives: RECEIVES }, waits)
    }
}

/// Large messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elephant {
    pub(crate) verb: FlowVerb,
    pub(crate) megabytes: u64,
    pub(crate) waits: CompletionWait,
}

impl Elephant {
    /// Sends messages.
    pub(crate) fn sends(megabytes: u64, waits: CompletionWait) -> Self {
        Self { verb: FlowVerb::Send, megabytes, waits }
    }
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
pub(crate) fn elephants(flows: [Elephant; 2]) -> Result<[f64; 2], ExperimentError> {
    let largest = flows[0].megabytes.max(flows[1].megabytes);
    // Long enough for five messages of the larger flow at half the rate of the port.
    let duration = Duration::from_nanos(largest * MB * 8 / 24 * 5).max(Duration::from_millis(20));
    let FlowsMeasurement { done, until_ns, .. } = compete(&flows.map(Flow::Elephant), duration)?;
    // The window holds whole messages of the larger size, since a part of a message counts at an even rate.
    let larger = done[usize::from(flows[1].megabytes > flows[0].megabytes)].0.iter().map(|&(_, done)| done);
    let within = || larger.clone().filter(|&done| done <= until_ns);
    let (from, to) = (within().next().unwrap_or(0), within().next_back().unwrap_or(0));
    let rate = |flow: usize| done[flow].per_second_within(from, to) * (flows[flow].megabytes * MB * 8) as f64 / 1e9;
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
    let elephant = megabytes.map(|megabytes| Flow::Elephant(Elephant::sends(megabytes, CompletionWait::Event)));
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
    let alone = compete(&[Flow::Elephant(Elephant::sends(megabytes, CompletionWait::Event))], MOUSE_WINDOW)?;
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

/// Plays flows from one node to another, on the modelled adapters of Zhang et al., for a while of virtual time. The
/// second node polls.
///
/// # Errors
/// The flows do not end.
pub fn play_flows(flows: &[(FlowSpec, CompletionMode)], duration: Duration) -> Result<PlayedFlows, ExperimentError> {
    let FlowsMeasurement { done, until_ns, .. } = play(flows, (1, false), duration)?;
    Ok(PlayedFlows { messages: done.into_iter().map(|times| times.0).collect(), until_ns })
}

/// What flows did in the model.
#[derive(Clone, Debug)]
pub struct PlayedFlows {
    /// When each message of each flow was posted and complete, in ns of virtual time. The last one of each is complete
    /// after the end.
    pub messages: Vec<Vec<(u64, u64)>>,
    /// The end, in ns of virtual time.
    pub until_ns: u64,
}

fn compete(flows: &[Flow], duration: Duration) -> Result<FlowsMeasurement, ExperimentError> {
    // A mouse writes its own bytes.
    let scales_writes = !flows.iter().any(|flow| matches!(flow, Flow::Mouse { .. }));
    play(&flows.iter().map(|flow| flow.spec()).collect::<Vec<_>>(), (MB, scales_writes), duration)
}

/// Runs flows from one node to another for a while, each on its own queue pair and thread.
fn play(
    flows: &[(FlowSpec, CompletionMode)],
    (payload_scale, scales_writes): (u64, bool),
    duration: Duration,
) -> Result<FlowsMeasurement, ExperimentError> {
    let mut model = PaperCluster::Kbnets.model();
    (model.nodes, model.payload_scale, model.scales_writes) = (2, payload_scale, scales_writes);
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
    (spec, waits): (FlowSpec, CompletionMode),
    stop: Arc<AtomicBool>,
) -> impl Future<Output = Result<MessageTimes, DeploymentError>> + use<> {
    // All bytes go the same way: who reads is at the other end.
    let (near, far) = if spec.verb == FlowVerb::Read { (RECEIVER, SENDER) } else { (SENDER, RECEIVER) };
    let without_limits = "the model has no limits";
    let mut source = FlowSource::new(&*world.fabric(near), spec, waits).expect(without_limits);
    let target = FlowTarget::new(&*world.fabric(far), spec, CompletionMode::Poll).expect(without_limits);
    let peer = |endpoint: Endpoint, role| Peer { endpoint, role, address: None };
    let ends = (peer(target.endpoint(), Role::Active), peer(source.endpoint(), Role::Passive));
    let ends = futures::join!(source.connect(ends.0, target.remote()), target.connect(ends.1));
    ends.0.and(ends.1).expect(WITHOUT_FAILURES);
    world.spawn_on(far, Box::pin(target.run().map(|_closed| ())));
    let clock = world.clone();
    let (ended, done) = oneshot::channel();
    world.spawn_on(
        near,
        Box::pin(async move {
            let mut done = MessageTimes::default();
            let note = |posted, complete| {
                done.0.push((posted, complete));
                if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            source.run(|| clock.now().as_nanos(), note).await.expect(WITHOUT_FAILURES);
            let _ = ended.send(done);
        }),
    );
    done.map_err(|_| DeploymentError::new("a flow did not end"))
}

const WITHOUT_FAILURES: &str = "this world has no failures";
const SENDER: NodeIndex = NodeIndex(0);
const RECEIVER: NodeIndex = NodeIndex(1);
/// Receives that an elephant's receiver posts ahead, as in the paper.
const RECEIVES: u32 = 5;
/// Duration of the measurement of mice.
const MOUSE_WINDOW: Duration = Duration::from_millis(20);
