//! Measures the peak of resident memory of members.

use std::fs::File;
use std::io::Write;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use futures::StreamExt;
use rdmc::{GroupSpec, Node, Payload};
use rdmc_benches::word as content;

use crate::remote::{Cluster, FabricKind, Host, word};

/// Measures the peak of resident memory, on this host's loopback
#[derive(clap::Args)]
pub(crate) struct Memory {
    /// Size of the message in MiB.
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Receivers.
    #[arg(long, default_value_t = 2)]
    receivers: usize,
    /// Block size in KiB.
    #[arg(long, default_value_t = 1024)]
    block_kib: u32,
    /// Fabrics to measure.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    fabric: Vec<FabricKind>,
    /// Places of the message at the sender.
    #[arg(long, value_delimiter = ',', default_value = "file,pool")]
    source: Vec<Source>,
}

/// Place of the message at the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Source {
    /// In a mapped file.
    File,
    /// In memory of the pool.
    Pool,
}

impl Memory {
    pub(crate) fn run(&self) -> Result<()> {
        let Self { mib, receivers, block_kib, .. } = self;
        println!(
            "{mib} MiB to {receivers} receivers into memory of the pool, blocks of {block_kib} KiB; in MiB: peak of \
             resident memory less the message, and in brackets pages of other members that were mapped when the \
             message was there, which exist once"
        );
        println!("  fabric   source   sender   receivers");
        for &fabric in &self.fabric {
            for &source in &self.source {
                let peaks = self.measure(fabric, source)?;
                let in_mib = |bytes: u64| bytes as f64 / 1048576.0;
                let beyond = |&(peak, of_peers): &(u64, u64)| {
                    format!("{:.1} ({:.1})", in_mib(peak) - *mib as f64, in_mib(of_peers))
                };
                let beyond: Vec<_> = peaks.iter().map(beyond).collect();
                println!("  {:6}   {:6}   {:>6}   {}", word(fabric), word(source), beyond[0], beyond[1..].join(" "));
            }
        }
        Ok(())
    }

    /// Returns for the sender and each receiver, in bytes: the peak, and the mapped pages of other members.
    fn measure(&self, fabric: FabricKind, source: Source) -> Result<Vec<(u64, u64)>> {
        forget_peak()?;
        let len = self.mib << 20;
        let block_size = self.block_kib << 10;
        let mut cluster = Cluster::start(&Host::loopback(self.receivers), fabric, None, 0)?;
        // This node gives no sign of life meanwhile. No node waits for one as long as there is no group.
        let message = cluster.runtime.block_on(source.message(&cluster.node, len))?;
        cluster.tell(&format!("receive {block_size}"))?;
        let of_peers = cluster.runtime.block_on(async {
            let sender = cluster.node.create_group(spec(&cluster.node, block_size)).await?;
            sender.send(message).await?;
            let of_peers = pages_of_peers()?;
            sender.close().await?;
            anyhow::Ok(of_peers)
        })?;
        let mut peaks = vec![(peak()?, of_peers)];
        for remote in &cluster.remotes {
            let answer = remote.process.answer()?;
            let [received, peak, of_peers] = answer.split(' ').collect::<Vec<_>>()[..] else {
                bail!("three numbers are expected: {answer}")
            };
            ensure!(received.parse::<usize>()? == len, "the message has another size");
            peaks.push((peak.parse()?, of_peers.parse()?));
        }
        Ok(peaks)
    }
}

impl Source {
    /// Makes a message of `len` bytes.
    async fn message(self, node: &Node, len: usize) -> Result<Payload> {
        match self {
            Self::Pool => {
                let mut memory = node.allocate(len).await?;
                memory.iter_mut().zip((0..).flat_map(content)).for_each(|(byte, word)| *byte = word);
                Ok(memory.into())
            }
            Self::File => {
                let mut file = tempfile::tempfile()?;
                write_words(&mut file, len)?;
                // SAFETY: the file has no name. Its only descriptors are this one and those of the mapping.
                Ok(unsafe { rdmc::Memory::map_file(&file, len) }?.into())
            }
        }
    }
}

/// Writes an object in pieces of 1 MiB.
fn write_words(file: &mut File, len: usize) -> Result<()> {
    let mut words = (0..).flat_map(content);
    let mut left = len;
    while left > 0 {
        let piece: Vec<u8> = words.by_ref().take(left.min(1 << 20)).collect();
        file.write_all(&piece)?;
        left -= piece.len();
    }
    Ok(())
}

/// Receives a message, and returns one line: its length, this process's peak, and its mapped pages of other members.
pub(crate) async fn receive(node: &Node, block_size: u32) -> Result<String> {
    let mut receiver = node.join_group(spec(node, block_size)).await?;
    let message = receiver.next().await.context("a message")??;
    let of_peers = pages_of_peers()?;
    receiver.close().await?;
    Ok(format!("{} {} {of_peers}", message.len(), peak()?))
}

fn spec(node: &Node, block_size: u32) -> GroupSpec {
    GroupSpec::new(1, node.nodes()).block_size(block_size)
}

/// Returns the peak of this process's resident memory in bytes, shared pages included.
fn peak() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("only Linux tells the peak")?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    Ok(kib.context("a line VmHWM")?.parse::<u64>()? << 10)
}

/// Returns the bytes of other processes' memory that this one has mapped and touched: its read-only pages.
fn pages_of_peers() -> Result<u64> {
    let maps = std::fs::read_to_string("/proc/self/smaps").context("only Linux tells what is mapped")?;
    let (mut of_peers, mut kib) = (false, 0);
    for line in maps.lines() {
        if let Some(resident) = line.strip_prefix("Rss:") {
            let resident: u64 = resident.trim().trim_end_matches(" kB").parse()?;
            kib += if of_peers { resident } else { 0 };
        } else if line.split(' ').next().is_some_and(|word| !word.ends_with(':')) {
            of_peers = line.contains(" r--s ") && line.contains("/memfd:");
        }
    }
    Ok(kib << 10)
}

/// Resets the peak to the memory that is resident now.
fn forget_peak() -> Result<()> {
    std::fs::write("/proc/self/clear_refs", "5").context("only Linux forgets the peak")
}
