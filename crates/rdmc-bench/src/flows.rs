//! Flows side by side: how fast each of them is alone, and beside the others.
//!
//! A flow is messages of one verb over a queue pair of its own. Each of its two ends is a process, and sources and
//! targets may be on different hosts. With the fabric `mem` the ends are threads, and `sim` plays the flows on the
//! modelled adapters of Zhang et al. (KBNets 2017), whose study of isolation this repeats anywhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use futures::future::try_join_all;
use rdmc_fabric::MemNetwork;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::process::Child;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use crate::error::{BenchError, Kind};
use crate::local::{Program, monotonic_ns, require_memory, thread_cpu_ns};
use crate::output::{Output, OutputFormat};
use crate::process::ProcessRole;
use ends::{FlowAnswer, FlowOrder, FlowOrders};
use flow::Flow;
use process::SourceSetup;
use report::{FlowResult, Setting};
use server::FlowServer;
use tally::{Sample, Tally, Window, WindowEnd};

pub(crate) mod ends;
pub(crate) mod flow;
mod lines;
pub(crate) mod process;
mod report;
pub(crate) mod server;
mod tally;

/// What carries flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowFabric {
    /// TCP.
    Tcp,
    /// Shared memory of one host.
    Shm,
    /// An RDMA device.
    Verbs,
    /// Memory of one process.
    Mem,
    /// The modelled adapters of Zhang et al., in virtual time.
    Sim,
}

impl FlowFabric {
    /// Every variant.
    pub const ALL: [Self; 5] = [Self::Tcp, Self::Shm, Self::Verbs, Self::Mem, Self::Sim];

    /// Returns its name: the variant in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Verbs => "verbs",
            Self::Mem => "mem",
            Self::Sim => "sim",
        }
    }
}

/// What to measure. `rdmc bench flows` has an option for each field, and messages name these options.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FlowsOptions {
    /// The flows, 1 to 16.
    pub flows: Vec<Flow>,
    /// What carries them.
    pub fabric: FlowFabric,
    /// The RDMA device of the sources.
    pub device: Option<String>,
    /// Where targets are asked for (`host:port`), for one flow after the other, again from the first on; if there is
    /// none, they are on this host.
    pub to: Vec<String>,
    /// How long messages are counted, up to an hour, or a second in the model; `None` for a second, or 20 ms in the
    /// model.
    pub duration: Option<Duration>,
    /// How many messages of each flow are counted, in place of a duration: 1 or more.
    pub count: Option<u64>,
    /// How long messages are not counted before that, within the same bounds; `None` for a fifth of a second, or 2 ms
    /// in the model.
    pub warm_up: Option<Duration>,
    /// How often each flow is measured alone, and all are measured together, 1 or more; the medians count.
    pub repetitions: u32,
}

impl FlowsOptions {
    /// Measures these flows three times.
    pub fn new(flows: Vec<Flow>, fabric: FlowFabric) -> Self {
        Self { flows, fabric, device: None, to: Vec::new(), duration: None, count: None, warm_up: None, repetitions: 3 }
    }

    fn check(&self) -> anyhow::Result<()> {
        let Self { flows, fabric, .. } = self;
        let wrong = |what: String| Err(Kind::Request.error(what));
        if !(1..=FLOWS_MAX).contains(&flows.len()) {
            return wrong(format!("{} flows: give 1 to {FLOWS_MAX} by --flow", flows.len()));
        }
        for flow in flows {
            if let Some(option) = flow.device_option()
                && *fabric != FlowFabric::Verbs
            {
                return wrong(format!("{flow}: {option} needs --fabric verbs"));
            }
            if let Some(option) = flow.process_option()
                && matches!(fabric, FlowFabric::Mem | FlowFabric::Sim)
                && (*fabric == FlowFabric::Sim || option != "hybrid")
            {
                return wrong(format!("{flow}: {option} needs --fabric tcp, shm or verbs"));
            }
        }
        if self.device.is_some() && *fabric != FlowFabric::Verbs {
            return wrong("--device needs --fabric verbs".into());
        }
        if !self.to.is_empty() && !matches!(fabric, FlowFabric::Tcp | FlowFabric::Verbs) {
            return wrong(format!("--to needs --fabric tcp or verbs: {} joins no hosts", fabric.name()));
        }
        if self.count.is_some() && *fabric == FlowFabric::Sim {
            return wrong("--count needs real flows: give --duration with --fabric sim".into());
        }
        if self.repetitions == 0 || self.count == Some(0) {
            return wrong("nothing would be measured: give 1 or more by --repetitions and --count".into());
        }
        let (warm_up, duration) = self.times();
        let most = if *fabric == FlowFabric::Sim { SIM_MAX } else { DURATION_MAX };
        if duration.is_zero() || warm_up.max(duration) > most {
            let most = most.as_secs();
            return wrong(format!("--duration and --warm-up are at most {most} s with --fabric {}", fabric.name()));
        }
        let here = if self.to.is_empty() { 1 } else { 0 };
        let specs = flows.iter().map(Flow::spec);
        let needed = specs.map(|spec| spec.source_bytes() + here * spec.target_bytes()).sum();
        require_memory(needed, "the ends of all flows", server::REMEDY)
    }

    /// Returns how long messages are not counted, and how long they are then.
    fn times(&self) -> (Duration, Duration) {
        let (warm_up, duration) = match self.fabric {
            FlowFabric::Sim => (Duration::from_millis(2), Duration::from_millis(20)),
            _ => (Duration::from_millis(200), Duration::from_secs(1)),
        };
        (self.warm_up.unwrap_or(warm_up), self.duration.unwrap_or(duration))
    }
}

/// A measurement of flows: each alone, and all together.
#[derive(Debug)]
pub struct FlowsBench {
    options: FlowsOptions,
    program: Program,
}

impl FlowsBench {
    /// Checks the options. `program` is that of [`Bench`](crate::Bench).
    ///
    /// # Errors
    /// [`BenchError::Request`]: the options contradict each other, or need more memory than there is.
    pub fn prepare(options: FlowsOptions, program: Program) -> Result<Self, BenchError> {
        options.check()?;
        Ok(Self { options, program })
    }

    /// Returns how many measurements there are: each flow alone, and all together, as often as they are repeated.
    pub fn measurements(&self) -> u64 {
        (self.sets().len() * self.options.repetitions as usize) as u64
    }

    /// Returns the flows that are measured together: each alone, then all.
    fn sets(&self) -> Vec<Vec<usize>> {
        let flows = self.options.flows.len();
        let mut sets: Vec<Vec<usize>> = (0..flows).map(|flow| vec![flow]).collect();
        if flows > 1 {
            sets.push((0..flows).collect());
        }
        sets
    }

    /// Measures, and prints the results.
    ///
    /// # Cancel safety
    /// If the future is dropped, all flows end. Those in the model are played on in the background.
    ///
    /// # Errors
    /// A flow cannot be set up, or fails.
    pub async fn run(self, format: OutputFormat, output: &dyn Output) -> Result<FlowsResults, BenchError> {
        let (sets, mut done) = (self.sets(), 0);
        let mut samples: Vec<Vec<Vec<Sample>>> = vec![Vec::new(); sets.len()];
        for _ in 0..self.options.repetitions {
            for (set, samples) in sets.iter().zip(&mut samples) {
                let label = match set[..] {
                    [flow] => self.options.flows[flow].to_string(),
                    _ => "all flows".to_owned(),
                };
                output.progress(&label, done);
                // Nothing else polls meanwhile.
                let flows = self.start(set).await.with_context(|| label.clone())?;
                samples.push(flows.measure(set, &self.options).await.with_context(|| label.clone())?);
                done += 1;
            }
        }
        output.progress("", done);
        let results = self.results(&sets, &samples);
        report::print(&results, self.ends_here(), format, output);
        Ok(FlowsResults(results))
    }

    /// Returns how many ends of flows share the cores of this host.
    fn ends_here(&self) -> usize {
        let ends = match self.options.fabric {
            FlowFabric::Sim => 0,
            _ if self.options.to.is_empty() => 2,
            _ => 1,
        };
        ends * self.options.flows.len()
    }

    fn results(&self, sets: &[Vec<usize>], samples: &[Vec<Vec<Sample>>]) -> Vec<FlowResult> {
        let of = |set: usize, place: usize| samples[set].iter().map(|run| run[place].clone()).collect::<Vec<_>>();
        let mut results = Vec::new();
        for (number, flow) in self.options.flows.iter().enumerate() {
            let alone = FlowResult::of(number, flow, &self.options, Setting::Alone, &of(number, 0));
            let beside = (sets.len() > self.options.flows.len()).then(|| {
                FlowResult::of(number, flow, &self.options, Setting::Beside, &of(sets.len() - 1, number)).over(&alone)
            });
            results.push(alone);
            results.extend(beside);
        }
        let all: f64 =
            results.iter().filter(|result| result.setting == Setting::Beside).map(|result| result.rate).sum();
        for result in &mut results {
            result.share = (result.setting == Setting::Beside && all > 0.0).then(|| result.rate / all);
        }
        results
    }

    /// Sets flows up.
    async fn start(&self, set: &[usize]) -> anyhow::Result<Flows> {
        let FlowsOptions { flows, fabric, device, to, .. } = &self.options;
        let mut sources = Vec::new();
        // Dropping it ends the server.
        let mut server = JoinSet::new();
        match fabric {
            FlowFabric::Sim => return Ok(Flows::Modelled),
            FlowFabric::Mem => {
                let network = MemNetwork::new();
                for flow in set {
                    sources.push(Source::in_threads(&network, *flow, &flows[*flow])?);
                }
            }
            FlowFabric::Tcp | FlowFabric::Shm | FlowFabric::Verbs => {
                let mut places = to.clone();
                if places.is_empty() {
                    let here = FlowServer::bind("127.0.0.1:0", self.program.clone(), device.clone()).await?;
                    places.push(here.local_address().to_owned());
                    server.spawn(here.serve());
                }
                for flow in set {
                    let server = places[flow % places.len()].clone();
                    let setup =
                        SourceSetup { flow: flows[*flow].clone(), fabric: *fabric, device: device.clone(), server };
                    sources.push(Source::in_a_process(&self.program, setup)?);
                }
            }
        }
        expect_all(&mut sources, &FlowAnswer::Connected).await?;
        Ok(Flows::Real { sources, _server: server })
    }
}

/// The results of flows; made by [`FlowsBench::run`].
#[derive(Debug)]
pub struct FlowsResults(Vec<FlowResult>);

impl FlowsResults {
    /// Draws rates and times of messages, alone and beside the others, as SVG.
    pub fn picture(&self) -> String {
        report::draw(&self.0).to_svg()
    }
}

/// The flows of a measurement.
enum Flows {
    Real { sources: Vec<Source>, _server: JoinSet<()> },
    Modelled,
}

impl Flows {
    /// Measures all of them at once. `set` tells which they are.
    async fn measure(self, set: &[usize], options: &FlowsOptions) -> anyhow::Result<Vec<Sample>> {
        match self {
            Self::Real { mut sources, .. } => measure(&mut sources, options).await,
            Self::Modelled => {
                let (set, options) = (set.to_vec(), options.clone());
                tokio::task::spawn_blocking(move || play(&set, &options)).await?
            }
        }
    }
}

async fn measure(sources: &mut [Source], options: &FlowsOptions) -> anyhow::Result<Vec<Sample>> {
    sources.iter().for_each(|source| source.tell(FlowOrder::Begin));
    expect_all(sources, &FlowAnswer::Posting).await?;
    let (warm_up, duration) = options.times();
    let from_ns = monotonic_ns() + nanos(warm_up);
    let until = match options.count {
        Some(messages) => WindowEnd::After { messages },
        None => WindowEnd::At { ns: from_ns + nanos(duration) },
    };
    sources.iter().for_each(|source| source.tell(FlowOrder::Count(Window { from_ns, until })));
    expect_all(sources, &FlowAnswer::Over).await?;
    sources.iter().for_each(|source| source.tell(FlowOrder::Stop));
    try_join_all(sources.iter_mut().map(async |source| match source.answer().await? {
        FlowAnswer::Counted(sample) => Ok(sample),
        other => bail!("{} says {other:?} at the end", source.name),
    }))
    .await
}

/// Waits until all sources have said this. The first one that fails ends the wait.
async fn expect_all(sources: &mut [Source], expected: &FlowAnswer) -> anyhow::Result<()> {
    try_join_all(sources.iter_mut().map(async |source| {
        let said = source.answer().await?;
        ensure!(said == *expected, "{} says {said:?} instead of {expected:?}", source.name);
        Ok(())
    }))
    .await?;
    Ok(())
}

/// Plays some of the flows in the model.
fn play(set: &[usize], options: &FlowsOptions) -> anyhow::Result<Vec<Sample>> {
    let flows: Vec<_> = set.iter().map(|flow| (options.flows[*flow].spec(), options.flows[*flow].mode())).collect();
    let (warm_up, duration) = options.times();
    let played =
        rdmc_sim::experiments::play_flows(&flows, warm_up + duration).map_err(|error| anyhow::anyhow!("{error}"))?;
    let until_ns = played.until_ns;
    let window = Window { from_ns: until_ns - nanos(duration), until: WindowEnd::At { ns: until_ns } };
    let count = |messages: Vec<(u64, u64)>| {
        let mut tally = Tally::new(window);
        messages.into_iter().for_each(|(posted, done)| tally.note(posted, done));
        tally.sample(None)
    };
    Ok(played.messages.into_iter().map(count).collect())
}

/// The source of a flow, seen from the measurement.
struct Source {
    name: String,
    orders: mpsc::UnboundedSender<FlowOrder>,
    /// In a thread, the flag that stops it.
    stops: Option<Arc<AtomicBool>>,
    answers: mpsc::UnboundedReceiver<FlowAnswer>,
    /// Dropping it ends the process.
    _child: Option<Child>,
}

impl Source {
    fn in_a_process(program: &Program, setup: SourceSetup) -> anyhow::Result<Self> {
        let name = format!("{} to {}", setup.flow, setup.server);
        let (mut child, mut lines) =
            program.start(ProcessRole::FlowSource { setup: lines::to_json(&setup) }.arguments())?;
        let mut stdin = child.stdin.take().context("a process has no standard input")?;
        let (orders, mut given) = mpsc::unbounded_channel::<FlowOrder>();
        let (said, answers) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(order) = given.recv().await {
                let line = lines::to_json(&order) + "\n";
                // If it has ended, no answer comes.
                if stdin.write_all(line.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let Ok(answer) = serde_json::from_str(&line) else { return };
                if said.send(answer).is_err() {
                    return;
                }
            }
        });
        Ok(Self { name, orders, stops: None, answers, _child: Some(child) })
    }

    fn in_threads(network: &MemNetwork, number: usize, flow: &Flow) -> anyhow::Result<Self> {
        let (orders, given) = mpsc::unbounded_channel();
        let (said, answers) = mpsc::unbounded_channel();
        let (listening, place) = oneshot::channel();
        let stops = Arc::new(AtomicBool::new(false));
        let name = format!("flow {number}");
        let (fabric, target, place_of_target) = (network.fabric(), flow.clone(), name.clone());
        in_a_thread(async move {
            let listening = |address: &str| drop(listening.send(address.to_owned()));
            ends::serve(fabric, &target, &place_of_target, thread_cpu_ns, listening).await
        })?;
        let (fabric, source, orders_of_source) =
            (network.fabric(), flow.clone(), FlowOrders { orders: given, stops: stops.clone() });
        let failed = said.clone();
        in_a_thread(async move {
            let posting = async {
                let place = place.await.context("the target does not listen")?;
                let answer = |answer: &FlowAnswer| drop(said.send(answer.clone()));
                ends::post(fabric, &source, &place, thread_cpu_ns, orders_of_source, answer).await
            };
            if let Err(error) = posting.await {
                drop(failed.send(FlowAnswer::Failed { message: format!("{error:#}"), by_request: false }));
            }
            Ok(())
        })?;
        Ok(Self { name: flow.to_string(), orders, stops: Some(stops), answers, _child: None })
    }

    fn tell(&self, order: FlowOrder) {
        if let (FlowOrder::Stop, Some(stops)) = (order, &self.stops) {
            stops.store(true, Ordering::Relaxed);
        }
        // If it has ended, no answer comes.
        let _ = self.orders.send(order);
    }

    /// Waits for what it says next.
    async fn answer(&mut self) -> anyhow::Result<FlowAnswer> {
        match self.answers.recv().await.with_context(|| format!("{} has ended", self.name))? {
            FlowAnswer::Failed { message, by_request: true } => {
                Err(Kind::Request.error(format!("{}: {message}", self.name)))
            }
            FlowAnswer::Failed { message, by_request: false } => bail!("{}: {message}", self.name),
            answer => Ok(answer),
        }
    }
}

/// Runs an end of a flow in a thread.
fn in_a_thread(end: impl Future<Output = anyhow::Result<()>> + Send + 'static) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("flow".into()).spawn(move || {
        if let Err(error) = runtime.block_on(end) {
            tracing::debug!(error = format!("{error:#}"), "an end of a flow has failed");
        }
    })?;
    Ok(())
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(stops) = &self.stops {
            stops.store(true, Ordering::Relaxed);
        }
    }
}

/// How long the model may be played, and flows may be measured.
const SIM_MAX: Duration = Duration::from_secs(1);
const DURATION_MAX: Duration = Duration::from_secs(3600);
/// Flows at once.
const FLOWS_MAX: usize = 16;
