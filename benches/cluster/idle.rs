//! Measures the cost of groups at rest.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::StreamExt;
use rdmc::{GroupSpec, Node, Receiver, Sender};
use rdmc_benches::processor_time;

use crate::bare::Mesh;
use crate::remote::{Cluster, Completion, FabricKind, Host, word};

/// Measures processor time at rest, on this host's loopback
#[derive(clap::Args)]
pub(crate) struct Idle {
    /// Members; each is a process.
    #[arg(long, default_value_t = 8)]
    nodes: usize,
    /// Groups of all members; the roots take turns.
    #[arg(long, default_value_t = 64)]
    groups: u64,
    /// Fabrics to measure.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    fabric: Vec<FabricKind>,
    /// Ways to wait for completions.
    #[arg(long, value_delimiter = ',', default_value = "event,hybrid")]
    completion: Vec<Completion>,
    /// Seconds for which processor time is counted.
    #[arg(long, default_value_t = 20)]
    seconds: u32,
    /// Seconds between the last message and the count.
    #[arg(long, default_value_t = 2)]
    settle: u32,
}

impl Idle {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(self.nodes > 1, "a group has two members at least");
        let Self { nodes, groups, seconds, .. } = self;
        println!("{groups} groups of {nodes} processes, at rest for {seconds} s: processor time of all of them");
        println!("  fabric   completion   per cent of a core");
        println!("  bare     -            {:18.3}", self.share(self.bare()?));
        for &fabric in &self.fabric {
            for &completion in &self.completion {
                let share = self.share(self.measure(fabric, completion)?);
                println!("  {:6}   {:10}   {share:18.3}", word(fabric), word(completion));
            }
        }
        Ok(())
    }

    /// Returns the processor time in per cent of one core.
    fn share(&self, used: Duration) -> f64 {
        used.as_secs_f64() / f64::from(self.seconds) * 100.0
    }

    /// Returns the processor time of as many processes that only exchange signs of life over sockets.
    fn bare(&self) -> Result<Duration> {
        let mut cluster = Cluster::start(&Host::loopback(self.nodes - 1), FabricKind::Tcp, None, 0)?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut all = vec![listener.local_addr()?];
        for remote in &cluster.remotes {
            all.push(remote.plain.parse()?);
        }
        let (settle, seconds) = (self.settle, self.seconds);
        let addresses = all.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(" ");
        for (remote, place) in cluster.remotes.iter_mut().zip(1..) {
            remote.process.tell(&format!("bare {place} {settle} {seconds} {addresses}"))?;
        }
        let mut mesh = Mesh::join(&listener, &all, 0)?;
        with_receivers(mesh.rest(settle, seconds)?, &cluster)
    }

    /// Returns the processor time of all processes together.
    fn measure(&self, fabric: FabricKind, completion: Completion) -> Result<Duration> {
        let mut cluster = Cluster::start(&Host::loopback(self.nodes - 1), fabric, Some(completion), 0)?;
        cluster.tell(&format!("hold {}", self.groups))?;
        let _held = cluster.runtime.block_on(hold(&cluster.node, self.groups))?;
        let (settle, seconds) = (self.settle, self.seconds);
        cluster.tell(&format!("rest {settle} {seconds}"))?;
        with_receivers(cluster.runtime.block_on(rest(settle, seconds)), &cluster)
    }
}

/// Adds the processor times that the receivers report.
fn with_receivers(mut used: Duration, cluster: &Cluster) -> Result<Duration> {
    for remote in &cluster.remotes {
        used += Duration::try_from_secs_f64(remote.process.answer()?.parse()?)?;
    }
    Ok(used)
}

/// A group after its message.
#[expect(dead_code, reason = "it is kept, nothing more")]
pub(crate) enum Held {
    Root(Sender),
    Member(Receiver),
}

/// Forms groups of all nodes, and sends a message in each.
pub(crate) async fn hold(node: &Node, groups: u64) -> Result<Vec<Held>> {
    let mut held = Vec::new();
    for id in 1..=groups {
        let mut members = node.nodes();
        let roots = members.len();
        members.rotate_left(usize::try_from(id)? % roots);
        let rooted_here = members[0] == node.id();
        let spec = GroupSpec::new(id, members);
        held.push(if rooted_here {
            let sender = node.create_group(spec).await?;
            sender.send(Bytes::from_static(&[7; 100_000])).await?;
            Held::Root(sender)
        } else {
            let mut receiver = node.join_group(spec).await?;
            receiver.next().await.context("a message")??;
            Held::Member(receiver)
        });
    }
    Ok(held)
}

/// Lets the nodes of this process rest for `settle` + `seconds` seconds, and returns the processor time of the last
/// `seconds`.
pub(crate) async fn rest(settle: u32, seconds: u32) -> Duration {
    tokio::time::sleep(Duration::from_secs(settle.into())).await;
    let used = processor_time();
    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
    processor_time() - used
}
