//! Measures RDMA devices: `rdmc` against perftest's `ib_send_bw`, algorithms against each other, the phases of a
//! transfer, and transfers over a network that loses packets.
//!
//! Every member is a process on its own device. `cargo xtask lab bench` runs this on Soft-RoCE. On a host with two
//! ports of hardware, `cargo bench -p rdmc-benches --bench verbs -- pair` compares these. Variants take turns. Figures
//! are medians. The first round of each variant is not counted.

use std::collections::{HashMap, VecDeque};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use clap::{Args, Parser, Subcommand};
use futures::{StreamExt, TryStreamExt};
use rdmc::{Algorithm, CompletionMode, Fabric, GroupSpec, InviteOptions, Listener, Node, NodeId};
use rdmc_benches::{Figure, Process, median, monotonic, object, processor_time, report};
use rdmc_fabric::{Opcode, QueuePairId, TcpFabric, TraceEvent, TraceFabric, TraceKind};
use rdmc_schedule::{BlockCount, Rank, Schedule};
use rdmc_verbs::{VerbsConfig, VerbsFabric};

mod loss;

use loss::Loss;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
    /// Given by cargo.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum What {
    /// Compares two nodes with `ib_send_bw`, with the same message size and completion mode
    Pair {
        /// Block sizes in KiB.
        #[arg(long, value_delimiter = ',', default_value = "64,1024")]
        block_kib: Vec<u32>,
        /// Ways to wait for completions: event, poll, hybrid.
        #[arg(long, value_delimiter = ',', default_value = "event,poll")]
        modes: Vec<String>,
        /// Size of a round in MiB.
        #[arg(long, default_value_t = 256)]
        mib: usize,
        /// Size of a message in MiB, sent again and again. `ib_send_bw` sends a buffer of one block again and again.
        #[arg(long, default_value_t = 4)]
        message_mib: usize,
        /// Counted rounds.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// Compares all algorithms among the same nodes
    Group {
        /// Members, the sender included.
        #[arg(long, default_value_t = 4)]
        nodes: usize,
        /// Block size in KiB.
        #[arg(long, default_value_t = 1024)]
        block_kib: u32,
        /// Size of the object in MiB.
        #[arg(long, default_value_t = 64)]
        mib: usize,
        /// Counted rounds.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// Traces the phases of one transfer at the root and at a relayer (DSN, Table 1)
    Time {
        /// Members, the sender included.
        #[arg(long, default_value_t = 4)]
        nodes: usize,
        /// Block size in KiB.
        #[arg(long, default_value_t = 1024)]
        block_kib: u32,
        /// Size of the object in MiB.
        #[arg(long, default_value_t = 256)]
        mib: usize,
    },
    /// Counts the transfers that complete over a network that loses packets, on devices and over TCP; in the lab only
    Loss(Loss),
    /// Runs one receiver
    #[command(hide = true)]
    Receiver {
        device: String,
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: String,
        #[arg(long)]
        traced: bool,
        #[command(flatten)]
        reliability: Reliability,
    },
}

/// How a connection on a device retransmits.
#[derive(Args, Clone, Copy, Default)]
struct Reliability {
    /// Retransmissions before a connection is lost; Soft-RoCE takes 7 for no limit [default: the fabric's]
    #[arg(long)]
    retries: Option<u8>,
    /// Milliseconds until a packet counts as lost [default: the fabric's]
    #[arg(long)]
    timeout_ms: Option<u64>,
}

impl Reliability {
    /// Returns the options for a receiver.
    fn options(&self) -> Vec<String> {
        let retries = self.retries.map(|retries| format!("--retries={retries}"));
        let timeout = self.timeout_ms.map(|ms| format!("--timeout-ms={ms}"));
        retries.into_iter().chain(timeout).collect()
    }
}

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match Arguments::parse().what {
        What::Receiver { device, listen, traced, reliability } => {
            receiver(&runtime, &device, &listen, traced, reliability)
        }
        What::Loss(loss) => loss.measure(&runtime),
        What::Pair { block_kib, modes, mib, message_mib, rounds } => {
            pair(&runtime, &block_kib, &modes, mib / message_mib, message_mib, rounds)
        }
        What::Group { nodes, block_kib, mib, rounds } => group(&runtime, nodes, block_kib, mib, rounds),
        What::Time { nodes, block_kib, mib } => time(&runtime, nodes, block_kib, mib),
    }
}

fn pair(
    runtime: &tokio::runtime::Runtime,
    block_kib: &[u32],
    modes: &[String],
    messages: usize,
    message_mib: usize,
    rounds: usize,
) -> Result<()> {
    ensure!(messages > 0, "a round is shorter than one message of {message_mib} MiB");
    let mib = messages * message_mib;
    println!("two nodes, {messages} messages of {message_mib} MiB, against ib_send_bw; medians of {rounds} rounds");
    println!("block KiB  mode   rdmc MiB/s  ib_send_bw MiB/s  ratio  rdmc CPU s/GiB");
    let devices = devices(2)?;
    for mode in modes {
        let mut cluster = Cluster::start(runtime, &devices, mode, false)?;
        for &kib in block_kib {
            let object = object(message_mib);
            let (mut ours, mut theirs, mut cpu) = (Vec::new(), Vec::new(), Vec::new());
            for round in 0..=rounds {
                let (_, figure) = cluster.round(runtime, &object, messages, kib << 10, &Algorithm::BinomialPipeline)?;
                let rate = perftest(&devices, mode, kib, mib)?;
                if round > 0 {
                    ours.push(mib as f64 / figure.seconds);
                    cpu.push(figure.processor_seconds * 1024.0 / mib as f64);
                    theirs.push(rate);
                }
            }
            let (ours, theirs, cpu) = (median(&ours), median(&theirs), median(&cpu));
            println!("{kib:9}  {mode:5} {ours:11.0} {theirs:17.0} {:6.2} {cpu:15.2}", ours / theirs);
        }
    }
    Ok(())
}

fn group(runtime: &tokio::runtime::Runtime, nodes: usize, kib: u32, mib: usize, rounds: usize) -> Result<()> {
    println!("{nodes} nodes, {mib} MiB, blocks of {kib} KiB, events; medians of {rounds} rounds");
    println!("algorithm           delivered MiB/s  of the pipeline's  CPU s/GiB delivered");
    let mut cluster = Cluster::start(runtime, &devices(nodes)?, "event", false)?;
    let object = object(mib);
    let mut figures: Vec<Vec<Figure>> = vec![Vec::new(); Algorithm::ALL_FLAT.len()];
    for round in 0..=rounds {
        for (algorithm, figures) in Algorithm::ALL_FLAT.iter().zip(&mut figures) {
            let (_, figure) = cluster.round(runtime, &object, 1, kib << 10, algorithm)?;
            figures.extend((round > 0).then_some(figure));
        }
    }
    let delivered = (mib * (nodes - 1)) as f64;
    let rate =
        |figures: &[Figure]| delivered / median(&figures.iter().map(|figure| figure.seconds).collect::<Vec<_>>());
    let pipeline = Algorithm::ALL_FLAT.iter().position(|algorithm| *algorithm == Algorithm::BinomialPipeline);
    let pipeline = rate(&figures[pipeline.context("the pipeline is an algorithm")?]);
    for (algorithm, figures) in Algorithm::ALL_FLAT.iter().zip(&figures) {
        let cpu = median(&figures.iter().map(|figure| figure.processor_seconds).collect::<Vec<_>>());
        let rate = rate(figures);
        println!("{:18} {rate:16.0} {:18.2} {:20.2}", algorithm.to_string(), rate / pipeline, cpu * 1024.0 / delivered);
    }
    Ok(())
}

fn time(runtime: &tokio::runtime::Runtime, nodes: usize, kib: u32, mib: usize) -> Result<()> {
    ensure!(nodes > 2, "a relayer needs a third node");
    let mut cluster = Cluster::start(runtime, &devices(nodes)?, "event", true)?;
    let object = object(mib);
    // The first round warms memory and connections.
    cluster.round(runtime, &object, 1, kib << 10, &Algorithm::BinomialPipeline)?;
    cluster.traces(runtime)?;
    let (started, _) = cluster.round(runtime, &object, 1, kib << 10, &Algorithm::BinomialPipeline)?;
    let traces = cluster.traces(runtime)?;
    let members = u32::try_from(nodes)?;
    let blocks = BlockCount(u32::try_from(object.len().div_ceil((kib << 10) as usize))?);
    let schedule = Schedule::new(&Algorithm::BinomialPipeline, members, blocks)?;

    // The schedule has the peers of each send, the traces have the times.
    let mut incoming: HashMap<u32, Vec<Interval>> = HashMap::new();
    let mut outgoing: HashMap<u32, Vec<Interval>> = HashMap::new();
    for (rank, trace) in (0..members).zip(&traces) {
        let sends: Vec<_> = schedule.sends(Rank(rank)).collect();
        ensure!(sends.len() == trace.len(), "rank {rank} sent {} blocks of {}", trace.len(), sends.len());
        for (send, &interval) in sends.iter().zip(trace) {
            outgoing.entry(rank).or_default().push(interval);
            incoming.entry(send.peer.0).or_default().push(interval);
        }
    }
    let start = nanos(started);
    let first = |intervals: &[Interval]| intervals.iter().map(|interval| interval.0).min();
    let root_begins = first(&outgoing[&0]).context("the root sends")?;
    println!("{nodes} nodes, {mib} MiB, blocks of {kib} KiB, binomial pipeline; microseconds (DSN, Table 1)");
    println!("{:28} {:>12} {:>12}", "", "root", "relayer");
    // The last member relays as much as any other.
    let relayer = members - 1;
    let of_relayer: Vec<Interval> =
        [incoming.get(&relayer), outgoing.get(&relayer)].into_iter().flatten().flatten().copied().collect();
    let relayer_begins = first(&of_relayer).context("the relayer takes part")?;
    let column = |begins: u64, intervals: &[Interval]| {
        let end = intervals.iter().map(|interval| interval.1).max().unwrap_or(begins);
        let busy = union(intervals);
        (busy, end - begins - busy, end - start)
    };
    let (root, relay) = (column(root_begins, &outgoing[&0]), column(relayer_begins, &of_relayer));
    let micros = |ns: u64| ns as f64 / 1e3;
    let line = |name: &str, root: Option<u64>, relayer: u64| {
        let root = root.map_or("-".into(), |ns| format!("{:.0}", micros(ns)));
        println!("{name:28} {root:>12} {:12.0}", micros(relayer));
    };
    line("remote setup", None, root_begins - start);
    line("remote block transfers", None, relayer_begins - root_begins);
    line("local setup", Some(root_begins - start), 0);
    line("block transfers", Some(root.0), relay.0);
    line("waiting", Some(root.1), relay.1);
    line("total", Some(root.2), relay.2);
    let part = |(_, waiting, total): (u64, u64, u64)| 100.0 * waiting as f64 / total as f64;
    println!("{:28} {:>11.2}% {:11.2}%", "waiting, of the total", part(root), part(relay));
    println!("The copy of the first block runs beside the transfers of the others.");
    Ok(())
}

/// Time from posting to completion, in nanoseconds of the monotonic clock.
type Interval = (u64, u64);

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("584 years are not over")
}

/// Returns the total time that the intervals cover.
fn union(intervals: &[Interval]) -> u64 {
    let mut sorted = intervals.to_vec();
    sorted.sort_unstable();
    let (mut busy, mut until) = (0, 0);
    for (from, to) in sorted {
        busy += to.saturating_sub(from.max(until));
        until = until.max(to);
    }
    busy
}

/// Chooses the devices; repeats them if there are too few.
fn devices(count: usize) -> Result<Vec<String>> {
    let names = rdmc_verbs::usable_devices()?;
    ensure!(!names.is_empty(), "this machine has no RDMA device with an active port");
    Ok((0..count).map(|i| names[i % names.len()].clone()).collect())
}

/// Records when each block was sent: from posting to completion.
#[derive(Clone, Default)]
struct BlockTrace(Arc<Mutex<Sends>>);

#[derive(Default)]
struct Sends {
    done: Vec<Option<Interval>>,
    under_way: HashMap<QueuePairId, VecDeque<Option<usize>>>,
}

impl BlockTrace {
    fn note(&self, event: TraceEvent) {
        let mut sends = self.0.lock().expect("no holder panics");
        let at = nanos(monotonic());
        match event.kind {
            TraceKind::Posted { queue_pair, opcode, len, .. } if opcode != Opcode::Receive => {
                let block = (opcode == Opcode::Send && len > 0).then(|| {
                    sends.done.push(Some((at, at)));
                    sends.done.len() - 1
                });
                sends.under_way.entry(queue_pair).or_default().push_back(block);
            }
            TraceKind::Completed(completion) if completion.opcode != Opcode::Receive => {
                let oldest = sends.under_way.get_mut(&completion.queue_pair).and_then(VecDeque::pop_front);
                if let Some(Some(Some(interval))) = oldest.map(|block| block.map(|block| &mut sends.done[block])) {
                    interval.1 = at;
                }
            }
            _ => {}
        }
    }

    /// Takes the recorded intervals, in the order of posting.
    fn take(&self) -> Vec<Interval> {
        std::mem::take(&mut self.0.lock().expect("no holder panics").done).into_iter().flatten().collect()
    }
}

/// Opens a device, with a trace on request, or TCP by the name `tcp`.
fn open(device: &str, trace: Option<BlockTrace>, reliability: Reliability) -> Result<Arc<dyn Fabric>> {
    if device == "tcp" {
        return Ok(TcpFabric::new());
    }
    let mut config = VerbsConfig::default();
    config.device = Some(device.to_owned());
    config.retries = reliability.retries.unwrap_or(config.retries);
    config.acknowledgement_timeout =
        reliability.timeout_ms.map_or(config.acknowledgement_timeout, Duration::from_millis);
    let fabric = VerbsFabric::open(config)?;
    Ok(match trace {
        Some(trace) => TraceFabric::new(fabric, move |event| trace.note(event)),
        None => fabric,
    })
}

fn mode(name: &str) -> Result<CompletionMode> {
    match name {
        "event" => Ok(CompletionMode::Event),
        "poll" => Ok(CompletionMode::Poll),
        "hybrid" => Ok(CompletionMode::HYBRID),
        _ => bail!("{name} is no way of waiting: event, poll or hybrid"),
    }
}

/// The sender's node and the receivers' processes.
struct Cluster {
    node: Node,
    receivers: Vec<Receiver>,
    trace: BlockTrace,
    groups: u64,
}

impl Cluster {
    fn start(runtime: &tokio::runtime::Runtime, devices: &[String], waiting: &str, traced: bool) -> Result<Self> {
        let members: Vec<Member> = devices.iter().map(|device| Member::of_device(device)).collect();
        Self::start_among(runtime, &members, waiting, traced, Reliability::default())
    }

    fn start_among(
        runtime: &tokio::runtime::Runtime,
        members: &[Member],
        waiting: &str,
        traced: bool,
        reliability: Reliability,
    ) -> Result<Self> {
        let start = |member| Receiver::start(member, traced, reliability);
        let mut receivers = members[1..].iter().map(start).collect::<Result<Vec<_>>>()?;
        let addresses: Vec<String> = receivers.iter().map(|receiver| receiver.address.clone()).collect();
        for receiver in &mut receivers {
            receiver.process.tell(&format!("node {waiting}"))?;
        }
        let trace = BlockTrace::default();
        let node = runtime.block_on(async {
            let fabric = open(&members[0].device, traced.then(|| trace.clone()), reliability)?;
            let builder = rdmc::invite(fabric, &addresses, InviteOptions::new(Duration::from_secs(20))).await?;
            anyhow::Ok(builder.completion_mode(mode(waiting)?).start().await?)
        })?;
        Ok(Self { node, receivers, trace, groups: 0 })
    }

    /// Sends the object `messages` times, and returns the start and the cost.
    fn round(
        &mut self,
        runtime: &tokio::runtime::Runtime,
        object: &Bytes,
        messages: usize,
        block_size: u32,
        algorithm: &Algorithm,
    ) -> Result<(Duration, Figure)> {
        self.groups += 1;
        for receiver in &mut self.receivers {
            receiver.process.tell(&format!("group {} {block_size} {algorithm}", self.groups))?;
        }
        let members = (0..).take(self.receivers.len() + 1).map(NodeId);
        let spec = GroupSpec::new(self.groups, members).algorithm(algorithm.clone()).block_size(block_size);
        let (started, used) = runtime.block_on(async {
            // Register the memory before, so that the round does not measure the registration.
            let mut memory = self.node.allocate(object.len()).await?;
            memory.copy_from_slice(object);
            let sender = self.node.create_group(spec).await?;
            // After an empty message all members have joined.
            sender.send(Bytes::new()).await?;
            // Let them come to rest before the clock starts.
            tokio::time::sleep(Duration::from_millis(100)).await;
            let (started, used) = (monotonic(), processor_time());
            let memory = memory.freeze();
            let sends = futures::stream::iter(0..messages).map(|_| sender.send(memory.clone()));
            sends.buffered(MESSAGES_AHEAD).try_for_each(|_| std::future::ready(Ok(()))).await?;
            sender.close().await?;
            anyhow::Ok((started, processor_time() - used))
        })?;
        let receivers = self.receivers.iter().map(|receiver| &receiver.process);
        Ok((started, Figure::of_round(receivers, started, used)?))
    }

    /// Takes the traces of all members, in rank order.
    fn traces(&mut self, runtime: &tokio::runtime::Runtime) -> Result<Vec<Vec<Interval>>> {
        // The runtime must run to take the last completions.
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(100)).await });
        let mut traces = vec![self.trace.take()];
        for receiver in &mut self.receivers {
            receiver.process.tell("trace")?;
            let numbers =
                receiver.process.answer()?.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            traces.push(numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect());
        }
        Ok(traces)
    }
}

/// Where a member runs.
struct Member {
    /// The device's name, or `tcp`.
    device: String,
    /// Where it listens, if it is a receiver.
    listen: String,
    /// Its network namespace, if that is not the sender's.
    namespace: Option<String>,
}

impl Member {
    fn of_device(device: &str) -> Self {
        Self { device: device.to_owned(), listen: "127.0.0.1:0".to_owned(), namespace: None }
    }
}

/// A receiver's process and its address.
struct Receiver {
    process: Process,
    address: String,
}

impl Receiver {
    fn start(member: &Member, traced: bool, reliability: Reliability) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut command = match &member.namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(["receiver", &member.device, "--listen", &member.listen]);
        let process = Process::start(command.args(traced.then_some("--traced")).args(reliability.options()))?;
        let address = process.answer()?;
        Ok(Self { process, address })
    }
}

/// Serves commands until standard input ends.
fn receiver(
    runtime: &tokio::runtime::Runtime,
    device: &str,
    listen: &str,
    traced: bool,
    reliability: Reliability,
) -> Result<()> {
    let trace = BlockTrace::default();
    let listener = runtime.block_on(async {
        anyhow::Ok(Listener::bind(open(device, traced.then(|| trace.clone()), reliability)?, listen).await?)
    })?;
    println!("{}", listener.local_address());
    let mut node = None;
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["node", waiting] => {
                node = Some(runtime.block_on(async {
                    let invitation = listener.next_invitation().await;
                    let nodes = invitation.nodes();
                    let builder = invitation.accept().await?.completion_mode(mode(waiting)?);
                    anyhow::Ok((builder.start().await?, nodes))
                })?);
            }
            ["group", id, block_size, algorithm] => {
                let (node, nodes) = node.as_ref().context("a node")?;
                let spec = GroupSpec::new(id.parse()?, nodes.clone());
                let spec = spec.algorithm(algorithm.parse()?).block_size(block_size.parse()?);
                let (at, used) = runtime.block_on(async {
                    let mut group = node.join_group(spec).await?;
                    group.next().await.context("the first message")??;
                    let used = processor_time();
                    let (mut message, mut at) = (None, monotonic());
                    while let Some(next) = group.next().await {
                        // Give the memory back before the next message needs it.
                        drop(message.replace(next?));
                        at = monotonic();
                    }
                    let used = processor_time() - used;
                    let message = message.context("the object")?;
                    let right = message
                        .chunks_exact(8)
                        .zip(0u64..)
                        .step_by(997)
                        .all(|(word, i)| *word == rdmc_benches::word(i));
                    ensure!(right, "the object differs");
                    drop(message);
                    group.close().await?;
                    anyhow::Ok((at, used))
                })?;
                report(at, used);
            }
            ["trace"] => {
                let numbers = trace.take().into_iter().flat_map(|(from, to)| [from, to]);
                println!("{}", numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(" "));
            }
            _ => bail!("unknown command {line:?}"),
        }
    }
    Ok(())
}

/// Measures `ib_send_bw` in MiB/s: the time of a long run less that of a short one.
///
/// Its own clock is not reliable where the processor's frequency is not known.
fn perftest(devices: &[String], mode: &str, kib: u32, mib: usize) -> Result<f64> {
    let messages = |mib: usize| (mib << 10) / kib as usize;
    let (short, long) = (messages(mib / 8).max(10), messages(mib + mib / 8));
    ensure!(long >= 2 * short, "{mib} MiB are too few for blocks of {kib} KiB");
    let seconds = perftest_run(devices, mode, kib, long)? - perftest_run(devices, mode, kib, short)?;
    ensure!(seconds > 0.0, "{mib} MiB are too few: a run of them takes no longer than a short one");
    let moved = ((long - short) * kib as usize) as f64 / 1024.0;
    Ok(moved / seconds)
}

fn perftest_run(devices: &[String], mode: &str, kib: u32, messages: usize) -> Result<f64> {
    let command = |device: &str| {
        let mut command = Command::new("ib_send_bw");
        command.args(["-F", "-x", "1", "-d", device, "-s", &(kib << 10).to_string(), "-n", &messages.to_string()]);
        if mode == "event" {
            command.arg("-e");
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    for _ in 0..PERFTEST_ATTEMPTS {
        let mut server = command(&devices[1]).spawn().context("ib_send_bw (package perftest) cannot be started")?;
        // The client tries only once, and the server does not report when it listens.
        std::thread::sleep(Duration::from_millis(500));
        let started = Instant::now();
        let client = command(&devices[0]).arg("127.0.0.1").status()?;
        let seconds = started.elapsed().as_secs_f64();
        if !client.success() {
            let _ = server.kill();
        }
        let served = server.wait()?;
        if client.success() && served.success() {
            return Ok(seconds);
        }
        eprintln!("ib_send_bw failed ({client}, {served}); once more");
    }
    bail!("ib_send_bw failed {PERFTEST_ATTEMPTS} times")
}

/// Messages that the sender has queued at once.
const MESSAGES_AHEAD: usize = 4;
/// Runs of perftest before this gives up: Soft-RoCE sometimes drops a connection.
const PERFTEST_ATTEMPTS: usize = 3;
