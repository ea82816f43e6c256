//! The two ends of a flow, each in a process of its own, or in a thread with the fabric `mem`.
//!
//! The target listens; the source connects to it. Over this connection they exchange what their queue pairs need, and
//! the source asks for the target's processor time.

use std::net::IpAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rdmc::{Fabric, TcpFabric};
use rdmc_fabric::{ControlStream, Endpoint, FlowSource, FlowTarget, Peer, RemoteMemory, Role, ShmFabric};
use rdmc_files::words::count;
use rdmc_verbs::{VerbsConfig, VerbsFabric};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use tokio::io::BufStream;
use tokio::sync::mpsc;

use super::flow::Flow;
use super::lines;
use super::tally::{Sample, Tally, Window};
use super::{FlowFabric, FlowFabric::*};
use crate::error::Kind;
use crate::local::{cores, monotonic_ns, seconds};

/// What the process of an end must know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndSetup {
    pub(crate) flow: Flow,
    pub(crate) fabric: FlowFabric,
    /// The RDMA device at this end.
    pub(crate) device: Option<String>,
    /// The address of this end by which the other one reaches it.
    pub(crate) here: IpAddr,
}

impl EndSetup {
    /// Opens the fabric. `mem` is not one of a process.
    pub(crate) fn open(&self) -> anyhow::Result<Arc<dyn Fabric>> {
        Ok(match self.fabric {
            Tcp => TcpFabric::new(),
            Shm => ShmFabric::new().context(Kind::Request)?,
            Verbs => {
                let mut config = VerbsConfig::default();
                config.device.clone_from(&self.device);
                if self.device.is_none() && !self.here.is_loopback() {
                    config.address = Some(self.here);
                }
                if self.flow.inline {
                    config.inline_bytes = u32::try_from(self.flow.bytes).unwrap_or(u32::MAX);
                }
                config.service_level = self.flow.service_level;
                config.traffic_class = self.flow.traffic_class;
                VerbsFabric::open(config).context(Kind::Request)?
            }
            Mem | Sim => bail!("{} joins no processes", self.fabric.name()),
        })
    }
}

/// Moves this thread, and those that it starts, to a core.
pub(crate) fn pin(core: Option<usize>) -> anyhow::Result<()> {
    let Some(core) = core else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(core);
    let unusable = || {
        let last = cores().saturating_sub(1);
        format!(
            "core {core} cannot be used: this process may use {}, perhaps 0 to {last}",
            count(cores() as u64, "core")
        )
    };
    sched_setaffinity(None, &set).map_err(|_| Kind::Request.error(unusable()))
}

/// What the source says first.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    endpoint: Vec<u8>,
}

/// What the target answers.
#[derive(Debug, Serialize, Deserialize)]
enum Welcome {
    Ready { endpoint: Vec<u8>, remote: Option<[u8; RemoteMemory::ENCODED_LEN]> },
    Failed { message: String },
}

/// What the source asks for later.
#[derive(Debug, Serialize, Deserialize)]
enum Question {
    /// The processor time so far.
    ProcessorTime,
}

/// Serves a flow until the source goes. `listening` learns the address at which it waits for the source.
pub(crate) async fn serve(
    fabric: Arc<dyn Fabric>,
    flow: &Flow,
    place: &str,
    cpu_ns: fn() -> u64,
    listening: impl FnOnce(&str),
) -> anyhow::Result<()> {
    let environment = fabric.environment();
    let mut listener = environment.listen(place).await.with_context(|| format!("cannot listen at {place}"))?;
    listening(&listener.local_address());
    let stream = environment.timeout(HANDSHAKE_LIMIT, listener.accept()).await.context("no source came")??;
    // The fabric's connections come to the same place.
    environment.spawn(Box::pin(async move { while listener.accept().await.is_ok() {} }));
    let address = stream.peer_address();
    let mut stream = BufStream::new(stream);
    let ready = environment.timeout(HANDSHAKE_LIMIT, async {
        let hello: Hello = lines::expect(&mut stream).await?;
        let target = match FlowTarget::new(&*fabric, flow.spec(), flow.mode()) {
            Ok(target) => target,
            Err(error) => {
                let error = anyhow::Error::from(error);
                lines::write(&mut stream, &Welcome::Failed { message: format!("{error:#}") }).await?;
                return Err(error);
            }
        };
        let endpoint = target.endpoint().as_bytes().to_vec();
        let remote = target.remote().map(RemoteMemory::encode);
        lines::write(&mut stream, &Welcome::Ready { endpoint, remote }).await?;
        target.connect(Peer { endpoint: Endpoint::new(hello.endpoint)?, role: Role::Passive, address }).await?;
        Ok(target)
    });
    let target = ready.await.context("the source does not connect")??;
    let answering = async {
        while let Some(Question::ProcessorTime) = lines::read(&mut stream).await? {
            lines::write(&mut stream, &cpu_ns()).await?;
        }
        Ok(())
    };
    tokio::select! {
        answered = answering => answered,
        // The source tells why, or has gone.
        _ = target.run() => Ok(()),
    }
}

/// What the measurement orders a source to do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FlowOrder {
    /// To post messages, and to say when the first one is complete.
    Begin,
    /// To count messages, and to say when the window is over.
    Count(Window),
    /// To end the messages, and to say what was counted.
    Stop,
}

/// What a source says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FlowAnswer {
    Connected,
    /// A message is complete; more follow.
    Posting,
    /// The window is over; messages go on.
    Over,
    Counted(Sample),
    /// `by_request`: the request must be changed.
    Failed {
        message: String,
        by_request: bool,
    },
}

/// Orders, as they come to a source. The flag is set as soon as a stop arrives, however busy the source is.
pub(crate) struct FlowOrders {
    pub(crate) orders: mpsc::UnboundedReceiver<FlowOrder>,
    pub(crate) stops: Arc<AtomicBool>,
}

/// The source of a flow, which follows orders until none can come any more.
pub(crate) async fn post(
    fabric: Arc<dyn Fabric>,
    flow: &Flow,
    target: &str,
    cpu_ns: fn() -> u64,
    orders: FlowOrders,
    answer: impl Fn(&FlowAnswer),
) -> anyhow::Result<()> {
    let environment = fabric.environment();
    let connecting = environment.timeout(HANDSHAKE_LIMIT, connect(&fabric, flow, target));
    let (mut source, mut stream) = connecting.await.context("the other end does not answer")??;
    answer(&FlowAnswer::Connected);
    let FlowOrders { mut orders, stops } = orders;
    while let Some(order) = orders.recv().await {
        ensure!(order == FlowOrder::Begin, "{order:?} is out of order");
        let before = (monotonic_ns(), cpu_ns(), target_cpu_ns(&mut stream).await?);
        let mut tally = None::<Tally>;
        let progress = AtomicU64::new(0);
        let done = |posted, done| {
            if progress.fetch_add(1, Ordering::Relaxed) == 0 {
                answer(&FlowAnswer::Posting);
            }
            if tally.is_none()
                && let Ok(FlowOrder::Count(window)) = orders.try_recv()
            {
                tally = Some(Tally::new(window));
            }
            if let Some(tally) = &mut tally {
                let was_complete = tally.is_complete();
                tally.note(posted, done);
                if tally.is_complete() && !was_complete {
                    answer(&FlowAnswer::Over);
                }
            }
            if stops.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let stall_limit = flow.stall_limit();
        let stalled = async {
            let mut seen = None;
            while seen != Some(progress.load(Ordering::Relaxed)) {
                seen = Some(progress.load(Ordering::Relaxed));
                environment.sleep(stall_limit).await;
            }
        };
        tokio::select! {
            ran = source.run(monotonic_ns, done) => ran?,
            () = stalled => bail!("no message was complete for {} s", stall_limit.as_secs()),
        }
        let tally = tally.context("it was stopped before it was to count")?;
        let after = (monotonic_ns(), cpu_ns(), target_cpu_ns(&mut stream).await?);
        let share = |spent: u64| seconds(spent) / seconds((after.0 - before.0).max(1));
        let cpu = [share(after.1 - before.1), share(after.2.saturating_sub(before.2))];
        answer(&FlowAnswer::Counted(tally.sample(Some(cpu))));
        // The stop that has ended it.
        orders.recv().await.context("no order can come any more")?;
        stops.store(false, Ordering::Relaxed);
    }
    Ok(())
}

type Stream = BufStream<Box<dyn ControlStream>>;

async fn connect(fabric: &Arc<dyn Fabric>, flow: &Flow, target: &str) -> anyhow::Result<(FlowSource, Stream)> {
    let stream = fabric.environment().connect(target).await.with_context(|| format!("{target} cannot be reached"))?;
    let address = stream.peer_address();
    let mut stream = BufStream::new(stream);
    let mut source = FlowSource::new(&**fabric, flow.spec(), flow.mode())?;
    lines::write(&mut stream, &Hello { endpoint: source.endpoint().as_bytes().to_vec() }).await?;
    match lines::expect(&mut stream).await? {
        Welcome::Ready { endpoint, remote } => {
            let peer = Peer { endpoint: Endpoint::new(endpoint)?, role: Role::Active, address };
            source.connect(peer, remote.map(RemoteMemory::decode)).await?;
        }
        Welcome::Failed { message } => bail!("the other end: {}", rdmc_files::words::printable(&message)),
    }
    Ok((source, stream))
}

async fn target_cpu_ns(stream: &mut Stream) -> anyhow::Result<u64> {
    let asking = async {
        lines::write(stream, &Question::ProcessorTime).await?;
        lines::expect(stream).await
    };
    tokio::time::timeout(HANDSHAKE_LIMIT, asking).await.context("the other end does not answer")?
}

/// How long two ends may take to connect, memory included.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);
