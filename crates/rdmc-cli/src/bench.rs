//! `rdmc bench`: its options, and where its results go.

use std::cell::RefCell;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use rdmc::Algorithm;
use rdmc_bench::local::Program;
use rdmc_bench::{Bench, Checks, Completion, Contestant, Delivery, Output, OutputFormat};
use rdmc_files::FabricSelection;
use rdmc_files::size::Bytes;

use crate::choice::{AUTO, AlgorithmName, HybridOptions, OrAuto, RacksText, SpineName};
use crate::exit::Exit;
use crate::fabric::FABRICS;
use crate::named::{Named, one_of};
use crate::progress::{Bar, OutputOptions, Reporter, print_line};
use crate::size;

/// Options of `rdmc bench`.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct BenchOptions {
    /// Members of a group, the sender included
    #[arg(long, short, default_value = "2,4,8", value_delimiter = ',', value_name = "COUNT,…", value_parser = parse_nodes)]
    nodes: Vec<u32>,
    /// Bytes of a message, 1 byte to 1 GiB
    #[arg(long, short, default_value = "1,64k,1M,16M,64M,256M", value_delimiter = ',', value_name = "SIZE,…", value_parser = parse_size)]
    size: Vec<u64>,
    /// How blocks travel from the sender to all receivers
    #[arg(long, short, default_value = AUTO, value_delimiter = ',', value_name = "NAME,…")]
    algorithm: Vec<OrAuto<AlgorithmName>>,
    /// For hybrid, who shares a rack: sizes in order of rank (4,4), or the ranks of each rack (0,2/1,3)
    #[arg(long, value_name = "RACKS")]
    racks: Option<RacksText>,
    /// For hybrid, the schedule among the racks: the cascade unless another one is given
    #[arg(long, value_name = "NAME")]
    spine: Option<SpineName>,
    /// Bytes of a block, the unit that is relayed, up to 1 GiB, or auto: what should take least, from 64 KiB to 2 MiB
    #[arg(long, short, default_value = AUTO, value_delimiter = ',', value_name = "SIZE,…", value_parser = size::parse_block_or_auto)]
    block_size: Vec<OrAuto<u32>>,
    /// What moves the bytes; the members are processes of this host, and listen on its loopback only
    #[arg(long, default_value = "auto", value_delimiter = ',', value_name = "NAME,…", value_parser = one_of(&FABRICS))]
    fabric: Vec<FabricSelection>,
    /// How receivers get messages: a copy each, or one sealed object that all of them map; the second on shared memory only
    #[arg(long, default_value = "private", value_delimiter = ',', value_name = "NAME,…", value_parser = one_of(&DELIVERIES))]
    delivery: Vec<Delivery>,
    /// Whether receivers verify a sum of each block as it comes, which no MPI does
    #[arg(long, default_value = "auto", value_delimiter = ',', value_name = "NAME,…", value_parser = one_of(&CHECKS))]
    checks: Vec<Checks>,
    /// For verbs, the RDMA device
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// How members wait for completions
    #[arg(long, default_value = "event", value_delimiter = ',', value_name = "NAME,…", value_parser = one_of(&COMPLETIONS))]
    completion: Vec<Completion>,
    /// Groups that send at once, each over all members
    #[arg(long, default_value = "1", value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=64))]
    groups: Vec<u32>,
    /// Members among which the groups' roots are shared out; by default each group has another root, as far as there are
    /// members
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=64))]
    senders: Vec<u32>,
    /// Rounds that are measured; by default as many as take about a second and a half, 5 to 1000
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,
    /// Rounds before those, which are not counted
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(0..=1000))]
    warm_up: u32,
    /// Count messages per second of messages that are sent one by one, with so many of them in flight, instead of packing
    /// those of up to 4 KiB into batches
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    window: Option<u32>,
    /// Measure MPI_Bcast on the same work, in turn with rdmc: ompi (Open MPI) or mpich, which use shared memory or TCP
    /// as the fabric does; ompi:tcp, ompi:shm, … insist
    #[arg(long, value_delimiter = ',', value_name = "MPI,…")]
    vs: Vec<Contestant>,
    /// Say for each combination what the cost model chooses, how long it predicts that to take, how long it took, and what of
    /// all that was measured took least; without lists of algorithms and block sizes up to nine ways are measured beside
    #[arg(long)]
    explain: bool,
    /// Print lines of comma-separated values instead of the table
    #[arg(long, conflicts_with_all = ["json", "quiet", "explain"])]
    csv: bool,
    /// Draw time and rate over the size, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

impl BenchOptions {
    /// Returns what is to be measured.
    fn measured(&self) -> anyhow::Result<rdmc_bench::BenchOptions> {
        let mut options = rdmc_bench::BenchOptions::default();
        options.nodes.clone_from(&self.nodes);
        options.sizes.clone_from(&self.size);
        options.algorithms = self.algorithm.iter().map(|name| self.resolve(*name)).collect::<anyhow::Result<_>>()?;
        options.block_sizes = self.block_size.iter().map(|size| size.given()).collect();
        options.fabrics.clone_from(&self.fabric);
        options.deliveries.clone_from(&self.delivery);
        options.checks.clone_from(&self.checks);
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

    /// Makes the algorithm, if one is given, which must suit every number of members.
    fn resolve(&self, algorithm: OrAuto<AlgorithmName>) -> anyhow::Result<Option<Algorithm>> {
        let mut hybrid = HybridOptions { racks: self.racks.clone(), spine: self.spine };
        let named = OrAuto::Given(AlgorithmName::Hybrid);
        // They are for the one in the list that needs them.
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
pub(crate) async fn run(options: BenchOptions) -> anyhow::Result<()> {
    let bench = Bench::prepare(options.measured()?, Program::this([PROCESS])?)?;
    // Before it takes long to find out that it cannot be written.
    if let Some(path) = &options.plot {
        std::fs::write(path, "").with_context(|| path.display().to_string()).context(Exit::Usage)?;
    }
    let format = match options {
        BenchOptions { output: OutputOptions { json: true, .. }, .. } => OutputFormat::Json,
        BenchOptions { csv: true, .. } => OutputFormat::Csv,
        _ => OutputFormat::Table,
    };
    let reporter = Reporter::new(options.output);
    let total = bench.configurations();
    let bar = RefCell::new(Some(reporter.work_bar("", total)));
    let results = bench.run(format, &Printer { reporter, bar, total }).await?;
    if let Some(path) = &options.plot {
        std::fs::write(path, results.picture()).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Where results go.
struct Printer {
    reporter: Reporter,
    /// Until everything is measured.
    bar: RefCell<Option<Bar>>,
    total: u64,
}

impl Output for Printer {
    fn print(&self, text: &str) {
        if self.reporter.is_json() {
            print_line(text);
        } else {
            self.reporter.print(text);
        }
    }

    fn progress(&self, now: &str, done: u64) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.label(now);
            // Programs see the results.
            if !self.reporter.is_json() {
                bar.set(done);
            }
        }
        if done == self.total {
            self.bar.take();
        }
    }
}

/// The subcommand that is a process of the benchmark.
pub(crate) const PROCESS: &str = "internal-bench-node";

/// How members can wait for completions.
const COMPLETIONS: [Named<Completion>; 3] = [
    (Completion::Event, "event", "Sleeps until there is one"),
    (Completion::Hybrid, "hybrid", "Polls for 50 ms after the last one, then sleeps"),
    (Completion::Poll, "poll", "Never sleeps: keeps a core busy for each member"),
];
/// How receivers can get messages.
const DELIVERIES: [Named<Delivery>; 2] = [
    (Delivery::Private, "private", "Each has a copy in its own memory"),
    (Delivery::Shared, "shared", "All map one object, which nobody can change, and nothing is copied"),
];
/// Whether blocks can be summed.
const CHECKS: [Named<Checks>; 2] = [
    (Checks::Auto, "auto", "Where the fabric does not protect what it carries, as groups do by default: with TCP"),
    (Checks::Off, "off", "Nowhere"),
];

fn parse_nodes(text: &str) -> Result<u32, String> {
    let nodes = text.parse::<u32>().map_err(|_| format!("{text:?} is no number of members: give 2 to {NODES_MAX}"))?;
    match nodes {
        0 | 1 => Err(format!("a group of {nodes} has no receiver: give 2 or more members, the sender included")),
        2..=NODES_MAX => Ok(nodes),
        _ => Err(format!("{nodes} processes are too many for one host: give {NODES_MAX} at most")),
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    match size::parse(text)? {
        0 => Err("a message of 0 bytes has no content to time or to verify: give 1 byte or more".to_owned()),
        bytes if bytes > BYTES_MAX => Err(format!("{} are too long: give 1 GiB at most", Bytes(bytes))),
        bytes => Ok(bytes),
    }
}

/// Processes on one host, at most.
const NODES_MAX: u32 = 64;
/// Bytes of a message, at most.
const BYTES_MAX: u64 = 1 << 30;

/// What the help says about the figures.
const HELP: &str = "\
Every combination of what the lists name is a configuration. Each member is a process of its own,
of one thread. A round is one message of each group: it begins when all members are ready, and
ends when the last receiver has the message, by the host's monotonic clock. Memory is warm at both
ends. Each round has other content; every byte is verified at every receiver, outside of the time
taken (but inside it where messages per second are counted). A mismatch ends the program with code
5.

With --delivery shared the sender fills an object and seals it, outside of the time taken, and a
round ends when the last receiver has mapped it: nothing is copied, and pages are brought in when
the content is verified, outside of the time taken. So it has no rates, and is not compared with
what copies: those columns are empty.

Algorithm and block size are what the cost model chooses for processes of one host, unless they are
given; rdmc send plans TCP for a network.

Columns:
  chosen       algorithm and block size, where one of them is left to auto
  by           whose figures these are, and what moved the bytes
  time         to the last receiver: median, and the 10th, 90th and 99th percentile of the rounds
  skew         from the first receiver that has it to the last (median)
  each         bytes of the message over the median time
  aggregate    the same for all receivers, and all groups, together
  CPU s/GiB    processor time, user and system, of all members over the rounds, for each GiB
               delivered
  /floor       aggregate over the copy floor: threads, 2 or as many as there are cores and
               receivers, that copy blocks of 256 KiB from one source to as many warm places as
               there are receivers; by plain or non-temporal stores, whichever is faster. From
               16 MiB on once after each round, whose median counts, up to then before the rounds
  /streams     aggregate over that of plain TCP streams on loopback, one for each receiver at
               once: a writing process with a thread for each (writes of 256 KiB), a reading
               process for each
  msg/s        up to 64 KiB: messages a second of all groups. Up to 4 KiB they are fed to a
               BatchSender and come out of BatchReceivers. Longer ones, objects that are shared,
               and all if --window is given, are a multicast each, 64 or so many of them in flight
               in each group
  /rdmc        for --vs: its time over that of rdmc
The machine's limits are measured before each combination of size and members, with messages of
256 MiB at most.

Output for programs (--json), one object per line, times in seconds, rates in bytes or messages
per second:
  setting   cores, processor, window (null if not given), warm_up
  limits    nodes, bytes, memcpy_rate (one thread, warm private memory), copy_threads,
            copy_floor_plain_rate, copy_floor_non_temporal_rate (null where there are no such
            stores), stream_rate (one stream), stream_seconds, streams_rate (one for each
            receiver, together), streams_seconds
  result    by (rdmc, or the MPI), transport, setup (of an MPI), fabric, completion, nodes,
            groups, senders, algorithm, block_size, bytes, rounds, seconds {median, p10, p90, p99,
            min, max}, skew_seconds, receiver_rate, aggregate_rate, cpu_seconds_per_gib,
            message_rate (null above 64 KiB), to_copy_floor, to_streams, to_memcpy,
            seconds_to_rdmc (null for rdmc), delivery (private or shared; for the latter the rates
            of bytes, and to_…, are null), checks (auto or off), copy_floor_rate (of which
            to_copy_floor is the part)
  explanation with --explain: fabric, transport, completion, nodes, senders, bytes; of the choice
            algorithm, block_size, predicted_seconds, measured_seconds; of what took least
            best_algorithm, best_block_size, best_seconds; to_best (the choice's time over that)
  failed    code, message
--csv prints the results' fields in the same units.

MPI: a program of rdmc's is compiled with the compiler that comes with the MPI, into a temporary
directory, and does the same work: a barrier, MPI_Bcast, a barrier, verification; for msg/s
MPI_Bcast in a loop, as far ahead as it lets its root. Rounds of both alternate in four blocks,
each in fresh processes with its own warm-up. Both MPIs wait with sched_yield, as members share
cores.

Exit codes: 0 done; 1 a process failed; 2 the arguments make no sense, or an MPI is not installed;
5 wrong content arrived; 130, 143 interrupted.";

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

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
