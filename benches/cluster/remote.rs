//! Starts receiving processes, and holds what they share with the sender.

use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::ValueEnum;
use rdmc::{CompletionMode, Fabric, InviteOptions, Node, NodeBuilder, TcpConfig, TcpFabric};
use rdmc_benches::Process;
use tokio::runtime::Runtime;

use crate::INVITE_LIMIT;

/// A fabric to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FabricKind {
    /// TCP.
    Tcp,
    /// Shared memory.
    Shm,
}

impl FabricKind {
    /// Makes the fabric. `RDMC_BENCH_NEAR_KIB` and `RDMC_BENCH_CONGESTION` (cubic, system) set options of TCP, here and
    /// in the receivers.
    pub(crate) fn open(self) -> Result<Arc<dyn Fabric>> {
        match self {
            Self::Tcp => Ok(tcp()),
            #[cfg(target_os = "linux")]
            Self::Shm => Ok(rdmc::ShmFabric::new()?),
            #[cfg(not(target_os = "linux"))]
            Self::Shm => anyhow::bail!("shared memory needs Linux"),
        }
    }
}

fn tcp() -> Arc<TcpFabric> {
    let mut config = TcpConfig::default();
    if let Some(kib) = std::env::var("RDMC_BENCH_NEAR_KIB").ok().and_then(|text| text.parse::<u32>().ok()) {
        config.near_bytes = kib << 10;
    }
    match std::env::var("RDMC_BENCH_CONGESTION").as_deref() {
        Ok("system") => (config.congestion_control, config.lossy_congestion_control) = (None, None),
        Ok("cubic") => (config.congestion_control, config.lossy_congestion_control) = (Some("cubic"), None),
        _ => {}
    }
    TcpFabric::with_config(config)
}

/// A way to wait for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Completion {
    /// Sleep.
    Event,
    /// Poll for 50 ms, then sleep.
    Hybrid,
}

impl Completion {
    /// Sets the way, unless `completion` leaves it to the fabric.
    pub(crate) fn set(completion: Option<Self>, builder: NodeBuilder) -> NodeBuilder {
        match completion {
            None => builder,
            Some(Self::Event) => builder.completion_mode(CompletionMode::Event),
            Some(Self::Hybrid) => builder.completion_mode(CompletionMode::HYBRID),
        }
    }
}

/// Returns the name of a value on the command line.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("none is skipped").get_name().to_owned()
}

/// Where a receiver runs.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    /// Command that enters the host; empty for this host.
    pub(crate) enter: Vec<String>,
    /// Address at which the receiver listens.
    pub(crate) ip: String,
}

impl Host {
    /// Returns this host `count` times.
    pub(crate) fn loopback(count: usize) -> Vec<Self> {
        vec![Self { enter: Vec::new(), ip: "127.0.0.1".to_owned() }; count]
    }
}

/// A receiver's process and its addresses.
pub(crate) struct Remote {
    pub(crate) process: Process,
    rdmc: String,
    pub(crate) plain: String,
}

impl Remote {
    fn start(host: &Host, fabric: FabricKind, completion: Option<Completion>) -> Result<Self> {
        let program = std::env::current_exe()?;
        let words: Vec<&std::ffi::OsStr> =
            host.enter.iter().map(AsRef::as_ref).chain([program.as_os_str(), "receiver".as_ref()]).collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["--listen", &format!("{}:0", host.ip), "--fabric", &word(fabric)]);
        if let Some(completion) = completion {
            command.args(["--completion", &word(completion)]);
        }
        let process = Process::start(&mut command)?;
        let hello = process.answer()?;
        let (rdmc, plain) = hello.split_once(' ').context("two addresses")?;
        Ok(Self { rdmc: rdmc.to_owned(), plain: plain.to_owned(), process })
    }
}

/// The receiving processes, and this process as the node that invited them.
pub(crate) struct Cluster {
    pub(crate) runtime: Runtime,
    pub(crate) node: Node,
    pub(crate) remotes: Vec<Remote>,
}

impl Cluster {
    /// Starts receivers with `expected` bytes of memory each, and forms a cluster with them.
    pub(crate) fn start(
        hosts: &[Host],
        fabric: FabricKind,
        completion: Option<Completion>,
        expected: usize,
    ) -> Result<Self> {
        let remotes = hosts.iter().map(|host| Remote::start(host, fabric, completion));
        let mut remotes = remotes.collect::<Result<Vec<_>>>()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let addresses: Vec<String> = remotes.iter().map(|remote| remote.rdmc.clone()).collect();
        for remote in &mut remotes {
            remote.process.tell(&format!("join {expected}"))?;
        }
        let node = runtime.block_on(async {
            let builder = rdmc::invite(fabric.open()?, &addresses, InviteOptions::new(INVITE_LIMIT)).await?;
            Completion::set(completion, builder).start().await.map_err(anyhow::Error::from)
        })?;
        Ok(Self { runtime, node, remotes })
    }

    /// Sends the same command to all receivers.
    pub(crate) fn tell(&mut self, command: &str) -> Result<()> {
        self.remotes.iter_mut().try_for_each(|remote| remote.process.tell(command))
    }
}
