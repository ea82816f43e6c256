//! Starts the targets of flows, each in a process of its own, when sources ask for them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rdmc_files::words::printable;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdout};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::FlowFabric;
use super::ends::EndSetup;
use super::flow::Flow;
use super::lines;
use crate::error::{BenchError, Kind};
use crate::local::{Program, require_memory};
use crate::process::ProcessRole;

/// What a source asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// The version of these lines.
    version: u32,
    flow: Flow,
    fabric: FlowFabric,
}

/// The answer to a request, and what a target's process says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Started {
    /// The target waits for its source at this port.
    Listening {
        port: u16,
    },
    Refused {
        reason: String,
    },
}

/// Listens for sources of flows, which run elsewhere, and starts a target for each.
#[derive(Debug)]
pub struct FlowServer {
    listener: TcpListener,
    address: String,
    program: Program,
    device: Option<String>,
}

impl FlowServer {
    /// Listens at `address`. `program` is that of [`Bench`](crate::Bench), `device` the RDMA device of flows that want
    /// one; by default it is the one with the address by which the source has come.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing listens.
    ///
    /// # Errors
    /// The address cannot be listened at.
    pub async fn bind(address: &str, program: Program, device: Option<String>) -> Result<Self, BenchError> {
        let listening = || format!("cannot listen at {address}");
        let listener = TcpListener::bind(address).await.with_context(listening)?;
        let address = listener.local_addr().with_context(listening)?.to_string();
        Ok(Self { listener, address, program, device })
    }

    /// Returns the address at which sources ask for targets, with the port that was chosen for port 0.
    pub fn local_address(&self) -> &str {
        &self.address
    }

    /// Starts targets until the future is dropped, which ends them.
    pub async fn serve(self) {
        let Self { listener, program, device, .. } = self;
        let room = Arc::new(Room::new());
        let mut targets = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, from)) => {
                        // One more than these is closed.
                        let Ok(asking) = room.asking.clone().try_acquire_owned() else { continue };
                        let (program, device, room) = (program.clone(), device.clone(), room.clone());
                        targets.spawn(async move {
                            if let Err(error) = start((stream, asking), &program, device, &room).await {
                                tracing::warn!(%from, error = format!("{error:#}"), "a flow has no target");
                            }
                        });
                    }
                    // All descriptors may be in use.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                },
                Some(_ended) = targets.join_next() => {}
            }
        }
    }
}

/// The room for targets.
struct Room {
    /// Connections whose request has not come.
    asking: Arc<Semaphore>,
    targets: Semaphore,
    /// Bytes of all targets.
    bytes: AtomicU64,
}

impl Room {
    fn new() -> Self {
        let asking = Arc::new(Semaphore::new(ASKING_MAX));
        Self { asking, targets: Semaphore::new(TARGETS_MAX), bytes: AtomicU64::new(0) }
    }

    /// Takes room for a target with so many bytes.
    fn take(&self, bytes: u64) -> anyhow::Result<Place<'_>> {
        let permit = self.targets.try_acquire().context("too many flows run")?;
        let place = Place { room: self, bytes, _permit: permit };
        // Those that run may have some of theirs already. Then less is available than could be.
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        require_memory(all, "the targets of flows", REMEDY)?;
        Ok(place)
    }
}

/// The room of one target, until it is dropped.
struct Place<'a> {
    room: &'a Room,
    bytes: u64,
    _permit: SemaphorePermit<'a>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.room.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Starts a target for a source, and ends it when the source goes.
async fn start(
    (stream, asking): (TcpStream, OwnedSemaphorePermit),
    program: &Program,
    device: Option<String>,
    room: &Room,
) -> anyhow::Result<()> {
    let here = stream.local_addr()?.ip();
    let mut stream = BufStream::new(stream);
    let asked = tokio::time::timeout(ANSWER_LIMIT, lines::expect(&mut stream)).await.context("no request came")?;
    drop(asking);
    let started = async {
        let Request { version, flow, fabric } = asked?;
        ensure!(version == VERSION, "this end has version {VERSION} of flows, the other one {version}");
        let place = room.take(flow.spec().target_bytes())?;
        let setup = EndSetup { flow, fabric, device, here };
        let (child, mut from_child) =
            program.start(ProcessRole::FlowTarget { setup: lines::to_json(&setup) }.arguments())?;
        let said =
            tokio::time::timeout(ANSWER_LIMIT, from_child.next_line()).await.context("a target does not start")?;
        let said: Started = serde_json::from_str(&said?.context("a target has ended")?)?;
        Ok::<_, anyhow::Error>((said, Some((child, from_child, place))))
    };
    let (said, target) = match started.await {
        Ok(started) => started,
        Err(error) => (Started::Refused { reason: format!("{error:#}") }, None),
    };
    lines::write(&mut stream, &said).await?;
    if let Some((child, from_child, _place)) = target {
        until_over(&mut stream, child, from_child).await;
    }
    Ok(())
}

/// Waits until the source goes or the target ends.
async fn until_over(
    source: &mut BufStream<TcpStream>,
    mut child: Child,
    _from_child: tokio::io::Lines<tokio::io::BufReader<ChildStdout>>,
) {
    // It would be closed by waiting, which ends the target.
    let _stdin = child.stdin.take();
    let mut byte = [0];
    tokio::select! {
        _ = source.read(&mut byte) => {}
        _ = child.wait() => {}
    }
}

/// A target that was started elsewhere. It ends when this is dropped.
pub(super) struct StartedTarget {
    /// Where the source finds it.
    pub(super) address: SocketAddr,
    /// The address of this host by which the target's host is reached.
    pub(super) here: IpAddr,
    _stream: BufStream<TcpStream>,
}

/// Asks for a target.
pub(super) async fn ask(server: &str, flow: &Flow, fabric: FlowFabric) -> anyhow::Result<StartedTarget> {
    let connected = tokio::time::timeout(ANSWER_LIMIT, TcpStream::connect(server)).await;
    let stream = connected
        .with_context(|| format!("{server} does not answer"))?
        .with_context(|| format!("{server} cannot be reached: run rdmc bench flows --listen there first"))?;
    let (there, here) = (stream.peer_addr()?.ip(), stream.local_addr()?.ip());
    let mut stream = BufStream::new(stream);
    lines::write(&mut stream, &Request { version: VERSION, flow: flow.clone(), fabric }).await?;
    let started = tokio::time::timeout(2 * ANSWER_LIMIT, lines::expect(&mut stream)).await;
    match started.with_context(|| format!("{server} does not answer"))?.with_context(|| server.to_owned())? {
        Started::Listening { port } => {
            Ok(StartedTarget { address: SocketAddr::new(there, port), here, _stream: stream })
        }
        Started::Refused { reason } => bail!(Kind::Request.error(format!("{server}: {}", printable(&reason)))),
    }
}

/// The version of the lines between processes of flows.
const VERSION: u32 = 1;
/// What to do if there is too little memory.
pub(super) const REMEDY: &str = "choose fewer flows, shorter messages, or less depth and fewer receives";
/// Connections at once whose request has not come.
const ASKING_MAX: usize = 64;
/// Targets at once.
const TARGETS_MAX: usize = 64;
/// How long a request, or the start of a target, may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
