//! `rdmc bench`: the options, and the output of the results.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};
use rdmc::{Algorithm, GroupSpec};
use rdmc_bench::local::Program;
use rdmc_bench::{Bench, Checks, Completion, Contestant, Delivery, Ring, RingChoice};
use rdmc_files::FabricSelection;
use rdmc_files::size::ByteSize;

use crate::choice::{AUTO, AlgorithmName, HybridOptions, OrAuto, RacksText, SpineName};
use crate::fabric::FABRICS;
use crate::flows::FlowsOptions;
use crate::named::{Named, one_of};
use crate::progress::{OutputOptions, Reporter, Screen};
use crate::results::{PROCESS, Printer, check_writable, format_of};
use crate::size;
use crate::{examples, flows};

/// Options of `rdmc bench`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = HELP,
    after_long_help = format!("{}\n\n{HELP}", examples::BENCH),
    args_conflicts_with_subcommands = true
)]
pub(crate) struct BenchOptions {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    /// Numbers of members of a group, the sender included; 2 to 64
    #[arg(
        long,
        short,
        default_value = "2,4,8",
        value_delimiter = ',',
        value_name = "COUNT,…",
        value_parser = parse_nodes
    )]
    nodes: Vec<u32>,
    /// Bytes of a message, 1 byte to 1 GiB: 64k, 16M (powers of 1024)
    #[arg(
        long,
        short,
        default_value = "1,64k,1M,16M,64M,256M",
        value_delimiter = ',',
        value_name = "SIZE,…",
        value_parser = parse_size
    )]
    size: Vec<u64>,
    /// The algorithms by which blocks travel
    #[arg(long, short, default_value = AUTO, value_delimiter = ',', value_name = "NAME,…")]
    algorithm: Vec<OrAuto<AlgorithmName>>,
    /// With --algorithm hybrid, the members that share a rack: sizes in order of rank (4,4), or the ranks of each rack
    /// (0,2/1,3); rank 0 is the sender
    #[arg(long, value_name = "RACKS")]
    racks: Option<RacksText>,
    /// With --algorithm hybrid, the schedule among the racks; by default two trees
    #[arg(long, value_name = "NAME")]
    spine: Option<SpineName>,
    /// Bytes of a block, the unit that receivers relay, up to 1 GiB: 64k, 1M (powers of 1024); auto chooses 64 KiB to
    /// 2 MiB by a cost model
    #[arg(
        long,
        short,
        default_value = AUTO,
        value_delimiter = ',',
        value_name = "SIZE,…",
        value_parser = size::parse_block_or_auto
    )]
    block_size: Vec<OrAuto<u32>>,
    /// The fabrics, which carry the data; the members are processes of this host and listen on its loopback only
    #[arg(long, default_value = "auto", value_delimiter = ',', value_name = "NAME,…", value_parser = one_of(&FABRICS))]
    fabric: Vec<FabricSelection>,
    /// How receivers get messages: a copy each, or one sealed object that all map, which needs shared memory
    #[arg(
        long,
        default_value = "private",
        value_delimiter = ',',
        value_name = "NAME,…",
        value_parser = one_of(&DELIVERIES)
    )]
    delivery: Vec<Delivery>,
    /// Whether receivers verify a checksum of each block on arrival, which no MPI does
    #[arg(long, default_value = "auto", value_delimiter = ',', value_name = "NAME,…", value_parser = one_of(&CHECKS))]
    checks: Vec<Checks>,
    /// The rings for short messages: slots and most bytes of a message in a slot (64x4k), auto for the cost model's
    /// choice, or none
    #[arg(long, default_value = NO_RING, value_delimiter = ',', value_name = "RING,…", value_parser = parse_ring)]
    ring: Vec<RingChoice>,
    /// With --fabric verbs, the RDMA device; by default the best one
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// How members wait for completions
    #[arg(
        long,
        default_value = "event",
        value_delimiter = ',',
        value_name = "NAME,…",
        value_parser = one_of(&COMPLETIONS)
    )]
    completion: Vec<Completion>,
    /// Number of groups that send at the same time, each with all members
    #[arg(
        long,
        default_value = "1",
        value_delimiter = ',',
        value_name = "COUNT,…",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    groups: Vec<u32>,
    /// Number of members that send; by default each group has another sender, as far as there are members
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=64))]
    senders: Vec<u32>,
    /// Number of measured rounds; by default as many as take about 1.5 seconds, 5 to 1000
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,
    /// Number of rounds before those, which are not measured
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(0..=1000))]
    warm_up: u32,
    /// Send single messages with so many in flight when messages per second are counted; by default messages of up to
    /// 4 KiB are packed into batches
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    window: Option<u32>,
    /// Measure MPI_Bcast on the same work in turn with rdmc: ompi (Open MPI) or mpich, over shared memory or TCP as
    /// rdmc does; ompi:tcp, ompi:shm, mpich:tcp and mpich:shm name the transport
    #[arg(long, value_delimiter = ',', value_name = "MPI,…")]
    vs: Vec<Contestant>,
    /// Compare the cost model's choice, its prediction and its time with the fastest way that was measured; without
    /// lists of algorithms and block sizes, up to nine ways are measured
    #[arg(long)]
    explain: bool,
    /// Print comma-separated values instead of the table
    #[arg(long, conflicts_with_all = ["json", "quiet", "explain"])]
    csv: bool,
    /// Draw time and rate over the message's size into this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    output: OutputOptions,
}

/// The subcommands of `rdmc bench`.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure flows of single verbs, each alone and beside the others, on this host or between hosts
    Flows(Box<FlowsOptions>),
}

impl BenchOptions {
    /// Returns the options of the output.
    pub(crate) fn output(&self) -> OutputOptions {
        match &self.command {
            Some(BenchCommand::Flows(options)) => options.output,
            None => self.output,
        }
    }

    /// Returns the options of the library.
    fn measured(&self) -> anyhow::Result<rdmc_bench::BenchOptions> {
        let mut options = rdmc_bench::BenchOptions::default();
        options.nodes.clone_from(&self.nodes);
        options.sizes.clone_from(&self.size);
        options.algorithms = self.algorithm.iter().map(|name| self.resolve(*name)).collect::<anyhow::Result<_>>()?;
        options.block_sizes = self.block_size.iter().map(|size| size.given()).collect();
        options.fabrics.clone_from(&self.fabric);
        options.deliveries.clone_from(&self.delivery);
        options.checks.clone_from(&self.checks);
        options.rings.clone_from(&self.ring);
        options.device.clone_from(&self.device);
        options.completions.clone_from(&self.completion);
        options.groups.clone_from(&self.groups);
        options.senders.clone_from(&self.senders);
        options.rounds = self.rounds;
        options.warm_up = self.warm_up;
        options.window = self.window;
        options.vs.clone_from(&self.vs);
        options.explain = self.explain;
        Ok(options)
    }

    /// Makes the algorithm, if one is given. It must suit every number of members.
    fn resolve(&self, algorithm: OrAuto<AlgorithmName>) -> anyhow::Result<Option<Algorithm>> {
        let mut hybrid = HybridOptions { racks: self.racks.clone(), spine: self.spine };
        let named = OrAuto::Given(AlgorithmName::Hybrid);
        // The racks belong to the hybrid algorithm in the list.
        if self.algorithm.contains(&named) && algorithm != named {
            (hybrid.racks, hybrid.spine) = (None, None);
        }
        let mut resolved = None;
        for nodes in &self.nodes {
            resolved = hybrid.resolve_given(algorithm, *nodes)?;
        }
        Ok(resolved)
    }
}

/// Runs the benchmark.
pub(crate) async fn run(options: BenchOptions, screen: Screen) -> anyhow::Result<()> {
    if let Some(BenchCommand::Flows(options)) = options.command {
        return flows::run(*options, screen).await;
    }
    let bench = Bench::prepare(options.measured()?, Program::this([PROCESS])?)?;
    // Fails before the measurements if the file cannot be written.
    if let Some(path) = &options.plot {
        check_writable(path)?;
    }
    let printer = Printer::new(Reporter::new(options.output, screen), bench.configurations());
    let results = bench.run(format_of(options.output, options.csv), &printer).await?;
    if let Some(path) = &options.plot {
        std::fs::write(path, results.picture()).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// How members wait for completions.
const COMPLETIONS: [Named<Completion>; 3] = [
    (Completion::Event, "event", "Sleeps until there is a completion"),
    (Completion::Hybrid, "hybrid", "Polls for 50 ms after the last one, then sleeps"),
    (Completion::Poll, "poll", "Never sleeps: keeps a core busy for each member"),
];
/// How receivers get messages.
const DELIVERIES: [Named<Delivery>; 2] = [
    (Delivery::Private, "private", "Each receiver has a copy in its own memory"),
    (Delivery::Shared, "shared", "All map one object that cannot be changed, and nothing is copied"),
];
/// Whether blocks are checked.
const CHECKS: [Named<Checks>; 2] = [
    (Checks::Auto, "auto", "Where the fabric does not protect the data, as with TCP; the default of groups"),
    (Checks::Off, "off", "Nowhere"),
];

fn parse_nodes(text: &str) -> Result<u32, String> {
    let nodes =
        text.parse::<u32>().map_err(|_| format!("{text:?} is not a number of members: give 2 to {NODES_MAX}"))?;
    match nodes {
        0 | 1 => Err(format!("a group of {nodes} has no receiver: give 2 or more members, the sender included")),
        2..=NODES_MAX => Ok(nodes),
        _ => Err(format!("{nodes} processes are too many for one host: give {NODES_MAX} at most")),
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("a message of 0 bytes has no content to time or to verify: give 1 byte or more".to_owned()),
        bytes if bytes > BYTES_MAX => Err(format!("{} are too long: give 1 GiB at most", ByteSize(bytes))),
        bytes => Ok(bytes),
    }
}

/// Parses the slots and bytes of a ring: `64x4k`.
fn parse_ring(text: &str) -> Result<RingChoice, String> {
    match text {
        NO_RING => return Ok(RingChoice::None),
        AUTO_RING => return Ok(RingChoice::ByModel),
        _ => {}
    }
    const SLOTS: RangeInclusive<u32> = GroupSpec::RING_SLOTS_MIN..=GroupSpec::RING_SLOTS_MAX;
    const BYTES: RangeInclusive<u32> = 1..=GroupSpec::RING_BYTES_MAX;
    let shape = || {
        format!("{text:?} is not a ring: give 2x1 to 4096x64k (slots, and bytes of a slot), {AUTO_RING} or {NO_RING}")
    };
    let (slots, bytes) = text.split_once('x').ok_or_else(shape)?;
    let slots = slots.parse().ok().filter(|slots| SLOTS.contains(slots)).ok_or_else(shape)?;
    let bytes = size::parse(bytes)?;
    let bytes = u32::try_from(bytes).ok().filter(|bytes| BYTES.contains(bytes)).ok_or_else(shape)?;
    Ok(RingChoice::Given(Ring { slots, bytes }))
}

/// The name of no ring.
const NO_RING: &str = "none";
/// The name of the ring that the cost model chooses.
const AUTO_RING: &str = "auto";
/// Greatest number of processes on one host.
const NODES_MAX: u32 = 64;
/// Greatest length of a message in bytes.
const BYTES_MAX: u64 = 1 << 30;

/// The end of the help, which explains the figures.
const HELP: &str = "\
Every combination of the lists is a configuration. Each member is a process with one thread.

A round is one message of each group. It begins when the root has the receipt of a message of one
byte, which is the barrier, and ends when the last receiver has the message, by the host's
monotonic clock. Memory is warm at both ends. Each round has other content. Every receiver verifies
every byte, outside of the measured time; where messages per second are counted, inside of it. A
mismatch ends the program with code 5.

With --delivery shared the sender fills and seals an object before the measured time. The round
ends when the last receiver has mapped the object. Nothing is copied, and the first access of the
verification brings in the pages, outside of the measured time. Therefore these configurations have
no rates and are not compared with copies; their columns are empty.

Algorithm and block size are given, or the cost model chooses them for processes of one host.
rdmc send plans TCP for a network.

Columns:
  chosen       algorithm and block size, if one of them is left to auto
  by           the measured program, and what moved the bytes
  time         to the last receiver: median, and the 10th, 90th and 99th percentile of the rounds
  skew         from the first receiver that has the message to the last (median)
  each         bytes of the message over the median time
  aggregate    the same for all receivers and groups together
  CPU s/GiB    processor time, user and system, of all members over the rounds, for each GiB
               delivered
  /floor       aggregate over the copy floor. Threads, 2 or as many as there are cores and
               receivers, copy blocks of 256 KiB from one source to as many warm places as there are
               receivers, by plain or non-temporal stores, whichever is faster. From 16 MiB on this
               runs after each round, and the median counts; below it runs before the rounds
  /streams     aggregate over that of plain TCP streams on loopback, one for each receiver at once:
               a writing process with a thread for each (writes of 256 KiB), a reading process for
               each
  msg/s        up to 64 KiB: messages per second of all groups. Messages of up to 4 KiB go through a
               BatchSender and BatchReceivers. Longer ones, shared objects, and all messages with
               --window are single multicasts, 64 or so many of them in flight in each group
  /rdmc        for --vs: its time over that of rdmc
The limits of the machine are measured before each combination of size and members, with messages
of 256 MiB at most.

Output for programs (--json), one object per line, times in seconds, rates in bytes or messages
per second:
  setting   cores, processor, window (null if not given), warm_up
  limits    nodes, bytes, memcpy_rate (one thread, warm private memory), copy_threads,
            copy_floor_plain_rate, copy_floor_non_temporal_rate (null if there are no such
            stores), stream_rate (one stream), stream_seconds, streams_rate (one for each
            receiver, together), streams_seconds
  result    by (rdmc, or the MPI), transport, setup (of an MPI), fabric, completion, nodes,
            groups, senders, algorithm, block_size, bytes, rounds, seconds {median, p10, p90, p99,
            min, max}, skew_seconds, receiver_rate, aggregate_rate, cpu_seconds_per_gib,
            message_rate (null above 64 KiB), to_copy_floor, to_streams, to_memcpy,
            seconds_to_rdmc (null for rdmc), delivery (private or shared; for shared the rates
            of bytes and to_… are null), checks (auto or off), copy_floor_rate (the divisor of
            to_copy_floor), ring (null for none)
  explanation with --explain: fabric, transport, completion, nodes, senders, bytes; of the choice
            algorithm, block_size, predicted_seconds, measured_seconds; of the fastest way
            best_algorithm, best_block_size, best_seconds; to_best (the choice's time over that)
  failed    code, message
--csv prints the fields of the results in the same units.

MPI: the compiler that comes with the MPI compiles a program of rdmc into a temporary directory.
The program does the same work: a barrier, MPI_Bcast, a barrier, verification; for msg/s MPI_Bcast
in a loop, as far ahead as it lets its root. Rounds of both alternate in four blocks, each in new
processes with its own warm-up. Both MPIs wait with sched_yield, because members share cores.

Exit codes: 0 done; 1 a process failed; 2 wrong arguments, or an MPI that is not installed;
5 wrong content arrived; 130, 143 interrupted.";

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;
    use crate::exit::Exit;

    fn measured(arguments: &[&str]) -> anyhow::Result<rdmc_bench::BenchOptions> {
        let command = BenchOptions::augment_args(clap::Command::new("bench"));
        let matches = command.try_get_matches_from(std::iter::once(&"bench").chain(arguments))?;
        BenchOptions::from_arg_matches(&matches)?.measured()
    }

    #[test]
    fn groups_without_receivers_and_messages_without_bytes_are_refused_with_the_remedy() {
        for (text, remedy) in [("1", "2 or more"), ("0", "2 or more"), ("65", "64 at most"), ("two", "2 to 64")] {
            let error = parse_nodes(text).unwrap_err();
            assert!(error.contains(remedy), "{error}");
        }
        for (text, remedy) in [("0", "1 byte or more"), ("2G", "1 GiB at most"), ("much", "256MiB")] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains(remedy), "{error}");
        }
        assert_eq!((parse_nodes("2"), parse_size("1G")), (Ok(2), Ok(1 << 30)));
    }

    #[test]
    fn every_value_is_typed_under_its_name() {
        assert_eq!(
            COMPLETIONS.map(|(value, name, _)| (value, name)),
            Completion::ALL.map(|value| (value, value.name()))
        );
        assert_eq!(DELIVERIES.map(|(value, name, _)| (value, name)), Delivery::ALL.map(|value| (value, value.name())));
        assert_eq!(CHECKS.map(|(value, name, _)| (value, name)), Checks::ALL.map(|value| (value, value.name())));
    }

    #[test]
    fn what_is_not_given_is_what_the_library_measures() {
        assert_eq!(measured(&[]).unwrap(), rdmc_bench::BenchOptions::default());
    }

    #[test]
    fn racks_that_do_not_suit_all_members_are_usage_errors() {
        let wrong: [&[&str]; 5] = [
            &["--racks", "1,1", "-n", "2", "--algorithm", "auto"],
            &["--algorithm", "hybrid"],
            &["--racks", "1,1", "-n", "2"],
            &["--algorithm", "hybrid", "--racks", "2,2", "-n", "8"],
            &["--algorithm", "hybrid", "--racks", "2,2", "-n", "4,8"],
        ];
        for arguments in wrong {
            assert_eq!(Exit::code_of(&measured(arguments).unwrap_err()), 2, "{arguments:?}");
        }
        let both = measured(&["--algorithm", "hybrid,chain", "--racks", "2,2", "-n", "4"]).unwrap();
        assert_eq!(both.algorithms.len(), 2);
        for arguments in [["-n", "1"], ["-n", "2,,3"], ["--size", "0"], ["--fabric", "pigeon"], ["--vs", "lam"]] {
            assert!(measured(&arguments).is_err(), "{arguments:?}");
        }
    }
}
