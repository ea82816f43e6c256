//! A receiver of the demo: a process or a task.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::StreamExt;
use rdmc::{Algorithm, Fabric, GroupSpec, Listener, Node, NodeId, Shutdown, TcpFabric};
use rdmc_bench::local::{cpu_ns, end_with_stdin, monotonic_ns};
use rdmc_files::fabric::open_device;
use serde::{Deserialize, Serialize};

use crate::cli::DemoMemberOptions;
use crate::exit::of_transfer;
use crate::progress::{TICK, print_json};

/// What all members of the demo do, one group after the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DemoPlan {
    pub(crate) rounds: Vec<Algorithm>,
    pub(crate) block_size: u32,
    pub(crate) bytes: u64,
    pub(crate) digest: [u8; 32],
    /// Whether each member is a process, with its own processor time.
    pub(crate) processes: bool,
    /// Whether progress is shown.
    pub(crate) progress: bool,
}

impl DemoPlan {
    /// Makes the group of a round.
    pub(crate) fn spec(&self, round: usize, nodes: &[NodeId]) -> anyhow::Result<GroupSpec> {
        let algorithm = self.rounds.get(round).context("there is no such round")?.clone();
        let spec = GroupSpec::new(1 + round as u64, nodes.iter().copied());
        Ok(spec.algorithm(algorithm).block_size(self.block_size).formation_limit(FORMATION_LIMIT))
    }

    /// Returns the bound of a node's pool: the object, and room for blocks.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.bytes.saturating_add(4 << 30)
    }
}

/// What a member reports to the sender's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum MemberEvent {
    /// It listens.
    Listening { address: String },
    /// It has received so many bytes of the round's object.
    Progress { round: usize, bytes: u64 },
    /// It has finished a round.
    Finished {
        round: usize,
        /// When it had the whole object, by the host's monotonic clock.
        at_ns: u64,
        /// Processor time of the round.
        cpu_ns: u64,
        digest_ok: bool,
        /// Corrupted blocks that were fetched again.
        blocks_healed: u64,
    },
}

/// Takes part as a process: prints where it listens, is invited, receives, and ends with its standard input.
pub(crate) async fn run(options: DemoMemberOptions) -> anyhow::Result<()> {
    // The sender's process holds the other end, so that this process ends with it.
    end_with_stdin();
    let address = Some(options.listen.ip()).filter(|ip| !ip.is_loopback());
    let fabric: Arc<dyn Fabric> = match &options.device {
        Some(device) => open_device(device, address).map_err(of_transfer)?,
        None => TcpFabric::new(),
    };
    let listener = Listener::bind(options.port_rate.limit(fabric), &options.listen.to_string()).await?;
    print_json(&MemberEvent::Listening { address: listener.local_address().to_owned() });
    let invitation = listener.next_invitation().await;
    let plan: DemoPlan = postcard::from_bytes(invitation.payload())?;
    let nodes = invitation.nodes();
    let node = invitation.accept().await?.pool_bytes_max(plan.pool_bytes()).start().await?;
    take_rounds(&node, &nodes, &plan, |told| print_json(&told)).await?;
    node.shutdown(Shutdown::Abort).await;
    Ok(())
}

/// Receives the object of every round, and checks it outside of the measured time.
pub(crate) async fn take_rounds(
    node: &Node,
    nodes: &[NodeId],
    plan: &DemoPlan,
    tell: impl Fn(MemberEvent),
) -> anyhow::Result<()> {
    for round in 0..plan.rounds.len() {
        let mut group = node.join_group(plan.spec(round, nodes)?).await?;
        let cpu_before = cpu_ns();
        let mut tick = tokio::time::interval(TICK);
        let message = loop {
            tokio::select! {
                message = group.next() => break message.context("the group was closed before the object was sent")??,
                _ = tick.tick(), if plan.progress => {
                    tell(MemberEvent::Progress { round, bytes: group.stats().bytes_received });
                }
            }
        };
        let at_ns = monotonic_ns();
        let blocks_healed = group.stats().blocks_healed;
        group.close().await?;
        let cpu_ns = if plan.processes { cpu_ns() - cpu_before } else { 0 };
        ensure!(message.len() as u64 == plan.bytes, "the object has {} bytes", message.len());
        let digest = tokio::task::spawn_blocking(move || *blake3::hash(&message).as_bytes()).await?;
        tell(MemberEvent::Finished { round, at_ns, cpu_ns, digest_ok: digest == plan.digest, blocks_healed });
    }
    Ok(())
}

/// How long the next round may take to begin. Members first check what they received.
const FORMATION_LIMIT: Duration = Duration::from_secs(600);
