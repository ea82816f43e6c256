//! Counts the instructions that the runtime executes for each block, with Valgrind.
//!
//! The count shows what a change costs or saves, without the noise of time.
//!
//! `cargo bench -p rdmc-benches --bench instructions` sends messages of `k` and `2k` short blocks to members of one
//! process, on a single thread, under callgrind. The difference of the two counts, divided by `k`, is the cost of one
//! more block: the beginning and the end of a message cancel out. The kernel's instructions are not counted. Without
//! Valgrind (`apt-get install valgrind`) the program measures nothing, and reports that.
//!
//! `bare` is the floor of a block over sockets: a Tokio task at either end, a header, the block and a grant.
//!
//! With `--keep DIR` the profiles stay. `callgrind_annotate DIR/mem-2-unchecked/callgrind.out.3` shows the functions.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, ensure};
use bytes::Bytes;
use clap::{Parser, Subcommand, ValueEnum};
use rdmc::{Fabric, MemNetwork, TcpFabric};
use rdmc_benches::callgrind::{self, Counts};
use rdmc_benches::{Members, median};

mod attributed;
mod bare;

use attributed::Attributed;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    /// Fabrics to measure. `bare` uses nothing of this project: two members, without checks.
    #[arg(long, value_delimiter = ',', default_value = "bare,mem,tcp,shm")]
    fabrics: Vec<Kind>,
    /// Members, the root included.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    members: Vec<u32>,
    /// Blocks of the shorter message.
    #[arg(long, default_value_t = 1024)]
    blocks: usize,
    /// Bytes of a block.
    #[arg(long, default_value_t = 1024)]
    block_bytes: u32,
    /// Runs of each configuration. The output has their median and their range.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Directory in which to leave the profiles of the last round.
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Given by cargo.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum What {
    /// Runs the program that is measured
    #[command(hide = true)]
    Multicasts(Multicasts),
}

#[derive(clap::Args, Clone, Copy)]
struct Multicasts {
    fabric: Kind,
    members: u32,
    blocks: usize,
    block_bytes: u32,
    #[arg(long)]
    checks: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Bare,
    Mem,
    Tcp,
    Shm,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(What::Multicasts(multicasts)) = arguments.what {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(multicasts.run());
    }
    ensure!(arguments.blocks > 0 && arguments.block_bytes > 0 && arguments.rounds > 0, "of nothing nothing is counted");
    let Some(version) = callgrind::version()? else {
        println!("skipped: valgrind is not installed");
        return Ok(());
    };
    let Arguments { blocks, block_bytes, rounds, .. } = arguments;
    println!("instructions for each block of {block_bytes} bytes, from messages of {blocks} and {} blocks", 2 * blocks);
    println!(
        "by {version}; medians of {rounds} runs, spread: their range. At the root and at each receiver: the node's"
    );
    println!("tasks; rest: the fabric's tasks and the executor, for each receiver; all: together, for each receiver.");
    println!("fabric  members  checks     root  receiver      rest       all  spread %");
    for &fabric in &arguments.fabrics {
        for &members in &arguments.members {
            for checks in [false, true] {
                if fabric == Kind::Bare && (checks || members != 2) {
                    continue;
                }
                let multicasts = Multicasts { fabric, members, blocks, block_bytes, checks };
                let costs = (0..rounds).map(|_| multicasts.cost(arguments.keep.as_deref()));
                multicasts.tell(&costs.collect::<Result<Vec<_>>>()?);
            }
        }
    }
    Ok(())
}

/// Cost of one more block, in instructions.
struct Cost {
    root: f64,
    /// Cost at each receiver.
    receiver: f64,
    /// Cost of all members together, for each receiver.
    all: f64,
}

impl Multicasts {
    /// Counts the cost of one more block.
    fn cost(self, keep: Option<&Path>) -> Result<Cost> {
        let temporary = tempfile::tempdir()?;
        let directory = match keep {
            Some(keep) => {
                let directory = keep.join(self.name());
                if directory.exists() {
                    std::fs::remove_dir_all(&directory)?;
                }
                std::fs::create_dir_all(&directory)?;
                directory
            }
            None => temporary.path().to_owned(),
        };
        let mut arguments = vec!["multicasts".to_owned(), Kind::name(self.fabric)];
        arguments.extend([self.members as usize, self.blocks, self.block_bytes as usize].map(|n| n.to_string()));
        arguments.extend(self.checks.then(|| "--checks".to_owned()));
        let phases = callgrind::phases(&std::env::current_exe()?, &arguments, "phase_ends", &directory)?;
        let [_, short, long, ..] = &phases[..] else {
            anyhow::bail!("callgrind has seen {} phases instead of {PHASES}", phases.len())
        };
        let per_block = |count: fn(&Counts) -> u64| (count(long) as f64 - count(short) as f64) / self.blocks as f64;
        let receivers = f64::from(self.members - 1);
        Ok(Cost {
            root: per_block(|counts| counts.of("poll_at_root")),
            receiver: per_block(|counts| counts.of("poll_at_receiver")) / receivers,
            all: per_block(|counts| counts.total) / receivers,
        })
    }

    fn tell(self, costs: &[Cost]) {
        let receivers = f64::from(self.members - 1);
        let middle = |part: fn(&Cost) -> f64| median(&costs.iter().map(part).collect::<Vec<_>>());
        let (root, receiver, all) = (middle(|cost| cost.root), middle(|cost| cost.receiver), middle(|cost| cost.all));
        let rest = all - root / receivers - receiver;
        let least = costs.iter().map(|cost| cost.all).fold(f64::INFINITY, f64::min);
        let most = costs.iter().map(|cost| cost.all).fold(0.0, f64::max);
        let (fabric, checks) = (self.fabric.name(), if self.checks { "on" } else { "off" });
        let spread = 100.0 * (most - least) / all;
        println!(
            "{fabric:6} {:8}  {checks:6} {root:8.0} {receiver:9.0} {rest:9.0} {all:9.0} {spread:9.2}",
            self.members
        );
    }

    fn name(self) -> String {
        let checks = if self.checks { "checked" } else { "unchecked" };
        format!("{}-{}-{checks}", self.fabric.name(), self.members)
    }

    /// Sends three messages: one to reach the steady state, a short one and a long one.
    async fn run(self) -> Result<()> {
        let object = Bytes::from(vec![7; 2 * self.blocks * self.block_bytes as usize]);
        let messages = [object.clone(), object.slice(..object.len() / 2), object.clone()];
        if self.fabric == Kind::Bare {
            let mut pair = bare::Pair::connect(object.len()).await?;
            for message in messages {
                pair = pair.send(message, self.block_bytes as usize).await?;
                phase_ends();
            }
            return Ok(());
        }
        let network = MemNetwork::new();
        let fabrics = (0..self.members).map(|id| {
            let attributed: Arc<dyn Fabric> = Attributed::new(self.fabric.open(&network)?, id == 0);
            Ok(attributed)
        });
        let mut members = Members::join(fabrics.collect::<Result<_>>()?, self.block_bytes, self.checks).await?;
        for message in messages {
            members.multicast(message).await?;
            phase_ends();
        }
        members.close().await
    }
}

impl Kind {
    fn name(self) -> String {
        self.to_possible_value().expect("none is skipped").get_name().to_owned()
    }

    fn open(self, network: &MemNetwork) -> Result<Arc<dyn Fabric>> {
        Ok(match self {
            Self::Bare => anyhow::bail!("bare sockets are no fabric"),
            Self::Mem => network.fabric(),
            Self::Tcp => TcpFabric::new(),
            #[cfg(target_os = "linux")]
            Self::Shm => rdmc::ShmFabric::new()?,
            #[cfg(not(target_os = "linux"))]
            Self::Shm => anyhow::bail!("shared memory needs Linux"),
        })
    }
}

/// Marks the place at which callgrind writes its counts and starts again.
#[inline(never)]
fn phase_ends() {
    std::hint::black_box(());
}

/// Phases of the program under callgrind.
const PHASES: usize = 3;
