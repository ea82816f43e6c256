//! Measures whole clusters of processes.
//!
//! Run it by `cargo bench -p rdmc-benches --bench cluster -- SUBCOMMAND`:
//!
//! | subcommand | compares or measures |
//! |---|---|
//! | `loopback` | one object to n − 1 receiving processes: `rdmc` over TCP against n − 1 plain TCP streams at once |
//! | `checks` | on the loopback, groups that check blocks against groups that do not |
//! | `shaped --rate 200` | limited ports against their ideal; ports of that rate in Mbit/s, by `benches/shaped.sh` |
//! | `racks` | schedules and placements in racks behind narrow uplinks, by `benches/racks.sh` |
//! | `idle` | processor time of a cluster without messages, against bare sockets with the same signs of life |
//! | `memory` | by how much the peak of resident memory of sender and receivers exceeds the message |
//!
//! Variants take turns. Receivers keep their memory. The first round of each kind is not counted. `idle` and `memory`
//! run on the loopback, over TCP and shared memory.

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rdmc::{Algorithm, NodeId};

mod bare;
mod idle;
mod memory;
mod racks;
mod receiver;
mod remote;
mod rounds;

use remote::{Completion, FabricKind, Host};
use rounds::{Plan, Way, measure};

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
    /// Compares with plain TCP streams, on this host's loopback
    Loopback {
        /// Members, the sender included.
        #[arg(long, value_delimiter = ',', default_value = "2,8")]
        nodes: Vec<usize>,
        #[command(flatten)]
        work: Work,
    },
    /// Compares checked with unchecked blocks, on this host's loopback
    Checks {
        /// Members, the sender included.
        #[arg(long, value_delimiter = ',', default_value = "8")]
        nodes: Vec<usize>,
        #[command(flatten)]
        work: Work,
    },
    /// Compares with the ideal of limited ports; benches/shaped.sh runs it inside its first namespace
    Shaped {
        /// Members, the sender included.
        #[arg(long, value_delimiter = ',', default_value = "2,3,5,8")]
        nodes: Vec<usize>,
        #[command(flatten)]
        network: Network,
        #[command(flatten)]
        work: Work,
    },
    /// Compares schedules in racks; benches/racks.sh runs it inside its first namespace
    Racks(racks::Racks),
    /// Measures processor time at rest, on this host's loopback
    Idle(idle::Idle),
    /// Measures the peak of resident memory, on this host's loopback
    Memory(memory::Memory),
    /// Runs one receiver
    #[command(hide = true)]
    Receiver {
        #[arg(long)]
        listen: String,
        #[arg(long, default_value = "tcp")]
        fabric: FabricKind,
        #[arg(long)]
        completion: Option<Completion>,
    },
}

#[derive(clap::Args, Clone)]
struct Network {
    /// Rate of every port in Mbit/s, headers included.
    #[arg(long, default_value_t = 200.0)]
    rate: f64,
    /// Names of the namespaces, without their number.
    #[arg(long, default_value = "h")]
    prefix: String,
    /// Addresses without their last number. The last number is that of the namespace plus one.
    #[arg(long, default_value = "10.77.0")]
    network: String,
}

impl Network {
    /// Returns the hosts of `n` − 1 receivers, in namespaces of their own.
    fn receivers(&self, n: usize) -> Vec<Host> {
        let host = |i| {
            let enter = ["ip", "netns", "exec", &format!("{}{i}", self.prefix)].map(str::to_owned);
            Host { enter: enter.to_vec(), ip: format!("{}.{}", self.network, i + 1) }
        };
        (1..n).map(host).collect()
    }

    /// Returns the bytes of payload per second of a port: 1448 in each packet of 1514.
    fn payload_rate(&self) -> f64 {
        self.rate * 1e6 / 8.0 * (1448.0 / 1514.0)
    }
}

#[derive(clap::Args, Clone)]
struct Work {
    /// Size of the object in MiB.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Block size in KiB.
    #[arg(long, default_value_t = 1024)]
    block_kib: u32,
    /// Counted rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Algorithm.
    #[arg(long, default_value = "binomial-pipeline")]
    algorithm: Algorithm,
}

impl Work {
    /// Returns the plan of a group of `n` members in the order of their numbers.
    fn plan(&self, n: usize, checks: bool) -> Plan {
        let members = (0..).take(n).map(NodeId).collect();
        Plan { checks, algorithm: self.algorithm.clone(), members }
    }
}

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("RDMC_LOG"))
        .with_writer(std::io::stderr)
        .init();
    match Arguments::parse().what {
        What::Receiver { listen, fabric, completion } => receiver::run(&listen, fabric, completion),
        What::Loopback { nodes, work } => loopback(nodes, &work),
        What::Checks { nodes, work } => checks(nodes, &work),
        What::Shaped { nodes, network, work } => shaped(nodes, &network, &work),
        What::Racks(racks) => racks.run(),
        What::Idle(idle) => idle.run(),
        What::Memory(memory) => memory.run(),
    }
}

fn loopback(nodes: Vec<usize>, work: &Work) -> Result<()> {
    println!("{} MiB, blocks of {} KiB, {}, tcp on loopback", work.mib, work.block_kib, work.algorithm);
    println!("  n   rdmc s   plain s   plain/rdmc   rdmc MiB/s each   rdmc CPU s/GiB   plain CPU s/GiB");
    for n in nodes {
        let ways = [Way::Rdmc(work.plan(n, true)), Way::Plain];
        let figures = measure(Host::loopback(n - 1), work, &ways)?;
        let (rdmc, plain) = (figures[0], figures[1]);
        let copied = (work.mib * (n - 1)) as f64 / 1024.0;
        println!(
            "{n:3} {:8.3} {:9.3} {:12.2} {:17.0} {:16.2} {:17.2}",
            rdmc.seconds,
            plain.seconds,
            plain.seconds / rdmc.seconds,
            work.mib as f64 / rdmc.seconds,
            rdmc.processor_seconds / copied,
            plain.processor_seconds / copied,
        );
    }
    Ok(())
}

fn checks(nodes: Vec<usize>, work: &Work) -> Result<()> {
    println!("{} MiB, blocks of {} KiB, {}, tcp on loopback", work.mib, work.block_kib, work.algorithm);
    println!("  n   checked s   unchecked s   checked/unchecked   checked CPU s/GiB   unchecked CPU s/GiB");
    for n in nodes {
        let ways = [true, false].map(|checks| Way::Rdmc(work.plan(n, checks)));
        let figures = measure(Host::loopback(n - 1), work, &ways)?;
        let (checked, unchecked) = (figures[0], figures[1]);
        let copied = (work.mib * (n - 1)) as f64 / 1024.0;
        println!(
            "{n:3} {:11.3} {:13.3} {:19.3} {:19.2} {:21.2}",
            checked.seconds,
            unchecked.seconds,
            checked.seconds / unchecked.seconds,
            checked.processor_seconds / copied,
            unchecked.processor_seconds / copied,
        );
    }
    Ok(())
}

fn shaped(nodes: Vec<usize>, network: &Network, work: &Work) -> Result<()> {
    let rate = network.rate;
    println!("{} MiB, blocks of {} KiB, {}, ports of {rate} Mbit/s", work.mib, work.block_kib, work.algorithm);
    println!("  n   rdmc s   ideal s   ideal/rdmc   rdmc/(size/wire rate)");
    for n in nodes {
        let rdmc = measure(network.receivers(n), work, &[Way::Rdmc(work.plan(n, true))])?[0];
        let size = (work.mib << 20) as f64;
        let block = f64::from(work.block_kib) * 1024.0;
        let steps = (size / block).ceil() - 1.0 + (n as f64).log2().ceil();
        let ideal = steps * block / network.payload_rate();
        let wire = size / (rate * 1e6 / 8.0);
        println!("{n:3} {:8.3} {ideal:9.3} {:12.3} {:14.3}", rdmc.seconds, ideal / rdmc.seconds, rdmc.seconds / wire);
    }
    Ok(())
}

/// Limit on the time to invite nodes.
const INVITE_LIMIT: Duration = Duration::from_secs(10);
