//! `rdmc demo` multicasts real data to processes on this host, and measures it.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use rdmc::{
    Algorithm, Buffer, Cluster, Fabric, InviteOptions, MemNetwork, Memory, Node, NodeBuilder, NodeId, Shutdown,
    TcpFabric,
};
use rdmc_bench::local::{Program, check_memory, cores, cpu_ns, monotonic_ns, seconds};
use rdmc_files::fabric::{open_device, register_to_send, usable_devices};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::cli::{DemoFabric, DemoOptions};
use crate::exit::{Exit, of_transfer};
use crate::port::DemoPort;
use crate::progress::{Bar, Reporter, Screen, print_json};
use member::{DemoPlan, MemberEvent, take_rounds};
use table::{DemoSetting, RoundResult};

pub(crate) mod member;
mod table;

/// Runs the demo.
pub(crate) async fn run(options: DemoOptions, screen: Screen) -> anyhow::Result<()> {
    let reporter = Reporter::new(options.output, screen);
    let algorithm = options.algorithm.resolve(options.nodes)?;
    let file = options.file.as_ref().map(|path| open(path)).transpose()?;
    let bytes = file.as_ref().map_or(options.size, |(_, bytes)| *bytes);
    if bytes == 0 {
        return Err(Exit::Usage.error("0 bytes show nothing: give a larger --size or --file"));
    }
    let placement = Placement::find(&options)?;
    let port = options.port_rate.unwrap_or_else(|| placement.port_unless_given());
    // Every receiver holds the whole object in memory.
    check_memory(bytes.saturating_mul(options.nodes.into()))?;
    let data = make_data(file.map(|(file, _)| file), bytes).await?;

    // The first round is not measured. It takes memory, and opens the connections' windows.
    let mut algorithms = vec![algorithm.clone(), algorithm.clone()];
    if algorithm != Algorithm::Sequential {
        algorithms.push(Algorithm::Sequential);
    }
    let plan = DemoPlan {
        rounds: algorithms,
        block_size: options.block_size,
        bytes,
        digest: *blake3::hash(&data).as_bytes(),
        processes: !matches!(placement, Placement::Tasks),
        progress: !options.output.quiet,
    };
    let setting = DemoSetting {
        fabric: placement.fabric_name(),
        devices: placement.devices(options.nodes),
        port_rate: matches!(port, DemoPort::Limited(_)).then(|| port.to_string()),
        members: options.nodes,
        bytes,
        block_size: options.block_size,
        cores: cores(),
    };
    let mut members = Members::start(options.nodes, placement, port, &plan).await?;
    let bytes = Bytes::from(data);
    let copied = bytes.clone();
    let copy = move |to: &mut [u8]| {
        to.copy_from_slice(&copied);
        Ok(())
    };
    let data = register_to_send(&members.node, Memory::from(bytes), copy).await?;
    let mut measured = Vec::new();
    for (round, algorithm) in plan.rounds.iter().enumerate() {
        let label = if round == 0 { "warming up".to_owned() } else { algorithm.to_string() };
        let found = members.round(&plan, round, &data, &reporter, &label).await?;
        if round > 0 {
            if reporter.is_json() {
                print_json(&setting.event(&found, algorithm));
            }
            measured.push(found);
        }
    }
    members.end().await?;
    reporter.print(&format!("{}\n{}", setting.table(&measured), setting.remark(&measured, &algorithm)));
    let receivers = rdmc::Rank(setting.receivers()).index();
    let wrong = measured.iter().any(|round| round.digests_ok != receivers);
    if wrong { Err(Exit::Integrity.error("a receiver's digest is wrong")) } else { Ok(()) }
}

fn open(path: &std::path::Path) -> anyhow::Result<(File, u64)> {
    let file = File::open(path).with_context(|| format!("{}", path.display()))?;
    let metadata = file.metadata()?;
    ensure!(metadata.is_file(), "{} is not a file", path.display());
    Ok((file, metadata.len()))
}

/// Makes the object: the file, or incompressible bytes.
async fn make_data(file: Option<File>, bytes: u64) -> anyhow::Result<Buffer> {
    let len = usize::try_from(bytes).context("longer than the address space")?;
    let fabric = TcpFabric::new();
    if let Some(file) = file {
        // SAFETY: the user gives the file for a demonstration. A process that changes it meanwhile spoils the digests.
        #[expect(unsafe_code, reason = "the file is mapped, to be sent without a copy")]
        let memory = unsafe { Memory::map_file(&file, len) }?;
        return Ok(fabric.register(memory)?.into_shared());
    }
    let made = tokio::task::spawn_blocking(move || {
        let mut buffer = fabric.register(Memory::anonymous(len)?)?.into_mut().expect("anonymous memory is writable");
        let mut state = 0x0072_646d_6364_656d_u64;
        for chunk in buffer.chunks_mut(8) {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            chunk.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes()[..chunk.len()]);
        }
        anyhow::Ok(buffer.freeze())
    });
    made.await?
}

/// Where the members run, and which fabric connects them.
enum Placement {
    /// Tasks of this process.
    Tasks,
    /// Processes on TCP over loopback.
    Loopback,
    /// Processes that take turns with the RDMA devices, and the fabric of the sender's device.
    Devices(Vec<(String, Option<IpAddr>)>, Arc<dyn Fabric>),
}

impl Placement {
    fn find(options: &DemoOptions) -> anyhow::Result<Self> {
        if options.device.is_some() && options.fabric != DemoFabric::Verbs {
            return Err(Exit::Usage.error("--device needs --fabric verbs"));
        }
        Ok(match options.fabric {
            DemoFabric::Mem => Placement::Tasks,
            DemoFabric::Tcp => Placement::Loopback,
            DemoFabric::Verbs => {
                let devices = usable_devices(options.device.as_deref()).map_err(of_transfer)?;
                let (name, address) = devices.first().expect("there is one, or it is an error");
                let fabric = open_device(name, *address).map_err(of_transfer)?;
                Placement::Devices(devices, fabric)
            }
        })
    }

    fn fabric_name(&self) -> &'static str {
        match self {
            Placement::Tasks => "mem",
            Placement::Loopback => "tcp",
            Placement::Devices(_, fabric) => fabric.capabilities().name,
        }
    }

    /// Returns the port that each member gets unless the user says otherwise: devices have ports.
    fn port_unless_given(&self) -> DemoPort {
        match self {
            Placement::Tasks | Placement::Loopback => DemoPort::default(),
            Placement::Devices(..) => DemoPort::Unlimited,
        }
    }

    /// Returns the names of the devices that so many members use.
    fn devices(&self, members: u32) -> Vec<String> {
        match self {
            Placement::Tasks | Placement::Loopback => Vec::new(),
            Placement::Devices(devices, _) => {
                let used = devices.iter().take(rdmc::Rank(members).index());
                used.map(|(name, _)| name.clone()).collect()
            }
        }
    }

    /// Returns the arguments of the process of member `rank`.
    fn arguments(&self, rank: usize, port: DemoPort) -> Vec<String> {
        let at = |ip: IpAddr| {
            ["--listen", &SocketAddr::new(ip, 0).to_string(), "--port-rate", &port.to_string()]
                .map(str::to_owned)
                .to_vec()
        };
        match self {
            Placement::Tasks | Placement::Loopback => at(Ipv4Addr::LOCALHOST.into()),
            Placement::Devices(devices, _) => {
                let (name, address) = &devices[rank % devices.len()];
                let mut arguments = at(address.unwrap_or(Ipv4Addr::LOCALHOST.into()));
                arguments.extend(["--device".to_owned(), name.clone()]);
                arguments
            }
        }
    }
}

/// The sender's node, and the receivers.
struct Members {
    node: Node,
    nodes: Vec<NodeId>,
    told: MemberEvents,
    /// The receivers' processes.
    children: Vec<Child>,
}

/// The events of the receivers, which are known by their indices.
struct MemberEvents {
    told: mpsc::UnboundedReceiver<(usize, MemberEvent)>,
    /// The receivers' tasks, or tasks that read the output of the receivers' processes.
    tasks: JoinSet<anyhow::Result<()>>,
}

/// How a receiver has finished a round.
struct Finished {
    at_ns: u64,
    cpu_ns: u64,
    digest_ok: bool,
    blocks_healed: u64,
}

impl Members {
    async fn start(members: u32, placement: Placement, port: DemoPort, plan: &DemoPlan) -> anyhow::Result<Self> {
        let nodes: Vec<NodeId> = (0..members).map(NodeId).collect();
        let (tell, told) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        let (builder, children) = match placement {
            Placement::Tasks => (start_tasks(&nodes, port, plan, &tell, &mut tasks), Vec::new()),
            placement => start_processes(members, placement, port, plan, &tell, &mut tasks).await?,
        };
        let node = builder.pool_bytes_max(plan.pool_bytes()).start().await?;
        Ok(Self { node, nodes, told: MemberEvents { told, tasks }, children })
    }

    /// Sends the object once, and measures it.
    async fn round(
        &mut self,
        plan: &DemoPlan,
        round: usize,
        data: &Buffer,
        reporter: &Reporter,
        label: &str,
    ) -> anyhow::Result<RoundResult> {
        let receivers = self.nodes.len() - 1;
        let bar = reporter.bar(label, plan.bytes.saturating_mul(receivers as u64));
        let sender = self.node.create_group(plan.spec(round, &self.nodes)?).await?;
        let (cpu_before, begun_ns) = (cpu_ns(), monotonic_ns());
        let sending = async {
            sender.send(data.clone()).await.context(Exit::Partial)?;
            sender.close().await.context(Exit::Partial)?;
            anyhow::Ok(cpu_ns() - cpu_before)
        };
        let (own_cpu_ns, finished) = tokio::try_join!(sending, self.told.collect(round, receivers, &bar))?;
        let since_begun = |end: &Finished| seconds(end.at_ns.saturating_sub(begun_ns));
        let seconds_of_receivers: Vec<f64> = finished.iter().map(since_begun).collect();
        let last = seconds_of_receivers.iter().copied().fold(0.0, f64::max);
        let first = seconds_of_receivers.iter().copied().fold(last, f64::min);
        let cpu_seconds = seconds(own_cpu_ns + finished.iter().map(|end| end.cpu_ns).sum::<u64>());
        let digests_ok = finished.iter().filter(|end| end.digest_ok).count();
        let algorithm = plan.rounds[round].to_string();
        Ok(RoundResult {
            algorithm,
            seconds: last,
            seconds_of_receivers,
            skew_seconds: last - first,
            cpu_seconds,
            digests_ok,
            blocks_healed: finished.iter().map(|end| end.blocks_healed).sum(),
        })
    }

    /// Waits until all receivers have ended.
    async fn end(self) -> anyhow::Result<()> {
        self.node.shutdown(Shutdown::Abort).await;
        for mut child in self.children {
            drop(child.stdin.take());
            // A process that does not end by itself is killed when it is dropped.
            let _ = tokio::time::timeout(END_LIMIT, child.wait()).await;
        }
        Ok(())
    }
}

impl MemberEvents {
    /// Waits until all receivers have finished a round.
    async fn collect(&mut self, round: usize, receivers: usize, bar: &Bar) -> anyhow::Result<Vec<Finished>> {
        let mut finished = Vec::new();
        let mut received = vec![0; receivers];
        while finished.len() < receivers {
            tokio::select! {
                Some((place, news)) = self.told.recv() => match news {
                    MemberEvent::Finished { round: of, at_ns, cpu_ns, digest_ok, blocks_healed } if of == round => {
                        finished.push(Finished { at_ns, cpu_ns, digest_ok, blocks_healed });
                    }
                    MemberEvent::Progress { round: of, bytes } if of == round => {
                        received[place] = bytes;
                        bar.set(received.iter().sum());
                    }
                    _ => {}
                },
                Some(ended) = self.tasks.join_next() => ended?.context("a receiver has ended")?,
                else => return Err(Exit::Partial.error("the receivers have ended too early")),
            }
        }
        Ok(finished)
    }
}

/// Starts a process for every receiver, and invites them all.
async fn start_processes(
    members: u32,
    placement: Placement,
    port: DemoPort,
    plan: &DemoPlan,
    tell: &mpsc::UnboundedSender<(usize, MemberEvent)>,
    tasks: &mut JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<(NodeBuilder, Vec<Child>)> {
    let (mut children, mut addresses) = (Vec::new(), Vec::new());
    let program = Program::this(["internal-demo-member"])?;
    for place in 0..rdmc::Rank(members - 1).index() {
        let (child, mut lines) = program.start(placement.arguments(place + 1, port)).context("a receiver")?;
        let first = lines.next_line().await?.context("a receiver ended before it listened")?;
        match serde_json::from_str(&first)? {
            MemberEvent::Listening { address } => addresses.push(address),
            other => anyhow::bail!("a receiver began with {other:?}"),
        }
        let tell = tell.clone();
        tasks.spawn(async move {
            while let Some(line) = lines.next_line().await? {
                let _ = tell.send((place, serde_json::from_str(&line)?));
            }
            Ok(())
        });
        children.push(child);
    }
    let payload = postcard::to_stdvec(plan)?;
    let fabric = match placement {
        Placement::Devices(_, fabric) => fabric,
        Placement::Tasks | Placement::Loopback => TcpFabric::new(),
    };
    Ok((
        rdmc::invite(port.limit(fabric), &addresses, InviteOptions::new(START_LIMIT).payload(payload)).await?,
        children,
    ))
}

/// Starts a task for every receiver.
fn start_tasks(
    nodes: &[NodeId],
    port: DemoPort,
    plan: &DemoPlan,
    tell: &mpsc::UnboundedSender<(usize, MemberEvent)>,
    tasks: &mut JoinSet<anyhow::Result<()>>,
) -> NodeBuilder {
    let network = MemNetwork::new();
    let cluster = Cluster::new(nodes.iter().map(|node| (node.0, format!("member {node}"))));
    let builder = |node| Node::builder(node, cluster.clone()).fabric(port.limit(network.fabric()));
    for (place, &me) in nodes[1..].iter().enumerate() {
        let (builder, nodes, plan, tell) = (builder(me), nodes.to_vec(), plan.clone(), tell.clone());
        tasks.spawn(async move {
            let node = builder.pool_bytes_max(plan.pool_bytes()).start().await?;
            // Fails only if the sender has failed, which reports it.
            take_rounds(&node, &nodes, &plan, |told| drop(tell.send((place, told)))).await?;
            node.shutdown(Shutdown::Abort).await;
            Ok(())
        });
    }
    builder(nodes[0])
}

/// How long the receivers' processes may take to answer.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long they may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);
