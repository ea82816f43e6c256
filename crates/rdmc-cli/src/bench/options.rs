//! What the benchmark is asked for: lists on the command line.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rdmc::{CompletionMode, DeliveryMode};
use serde::{Deserialize, Serialize};

use super::mpi::Contestant;
use crate::choice::{AUTO, AlgorithmName, OrAuto, RacksText, SpineName};
use crate::cli::OutputOptions;
use crate::fabric::FabricName;
use crate::size;

/// Options of `rdmc bench`.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct BenchOptions {
    /// Members of a group, the sender included
    #[arg(long, short, default_value = "2,4,8", value_delimiter = ',', value_name = "COUNT,…", value_parser = parse_nodes)]
    pub(super) nodes: Vec<u32>,
    /// Bytes of a message, 1 byte to 1 GiB
    #[arg(long, short, default_value = "1,64k,1M,16M,64M,256M", value_delimiter = ',', value_name = "SIZE,…", value_parser = parse_size)]
    pub(super) size: Vec<u64>,
    /// How blocks travel from the sender to all receivers
    #[arg(long, short, default_value = AUTO, value_delimiter = ',', value_name = "NAME,…")]
    pub(super) algorithm: Vec<OrAuto<AlgorithmName>>,
    /// For hybrid, who shares a rack: sizes in order of rank (4,4), or the ranks of each rack (0,2/1,3)
    #[arg(long, value_name = "RACKS")]
    pub(super) racks: Option<RacksText>,
    /// For hybrid, the schedule among the racks: the cascade unless another one is given
    #[arg(long, value_name = "NAME")]
    pub(super) spine: Option<SpineName>,
    /// Bytes of a block, the unit that is relayed, up to 1 GiB, or auto: what should take least, from 64 KiB to 2 MiB
    #[arg(long, short, default_value = AUTO, value_delimiter = ',', value_name = "SIZE,…", value_parser = size::parse_block_or_auto)]
    pub(super) block_size: Vec<OrAuto<u32>>,
    /// What moves the bytes; the members are processes of this host, and listen on its loopback only
    #[arg(long, default_value = "auto", value_delimiter = ',', value_name = "NAME,…")]
    pub(super) fabric: Vec<FabricName>,
    /// How receivers get messages: a copy each, or one sealed object that all of them map; the second on shared memory only
    #[arg(long, default_value = "private", value_delimiter = ',', value_name = "NAME,…")]
    pub(super) delivery: Vec<Delivery>,
    /// Whether receivers verify a sum of each block as it comes, which no MPI does
    #[arg(long, default_value = "auto", value_delimiter = ',', value_name = "NAME,…")]
    pub(super) checks: Vec<Checks>,
    /// For verbs, the RDMA device
    #[arg(long, value_name = "NAME")]
    pub(super) device: Option<String>,
    /// How members wait for completions
    #[arg(long, default_value = "event", value_delimiter = ',', value_name = "NAME,…")]
    pub(super) completion: Vec<Completion>,
    /// Groups that send at once, each over all members
    #[arg(long, default_value = "1", value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) groups: Vec<u32>,
    /// Members among which the groups' roots are shared out; by default each group has another root, as far as there are
    /// members
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) senders: Vec<u32>,
    /// Rounds that are measured; by default as many as take about a second and a half, 5 to 1000
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) rounds: Option<u32>,
    /// Rounds before those, which are not counted
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(super) warm_up: u32,
    /// Count messages per second of messages that are sent one by one, with so many of them in flight, instead of packing
    /// those of up to 4 KiB into batches
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) window: Option<u32>,
    /// Measure MPI_Bcast on the same work, in turn with rdmc: ompi (Open MPI) or mpich, which use shared memory or TCP
    /// as the fabric does; ompi:tcp, ompi:shm, … insist
    #[arg(long, value_delimiter = ',', value_name = "MPI,…")]
    pub(super) vs: Vec<Contestant>,
    /// Say for each combination what the cost model chooses, how long it predicts that to take, how long it took, and what of
    /// all that was measured took least; without lists of algorithms and block sizes up to nine ways are measured beside
    #[arg(long)]
    pub(super) explain: bool,
    /// Print lines of comma-separated values instead of the table
    #[arg(long, conflicts_with_all = ["json", "quiet", "explain"])]
    pub(super) csv: bool,
    /// Draw time and rate over the size, as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// How a node waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Completion {
    /// Sleeps until there is one
    Event,
    /// Polls for 50 ms after the last one, then sleeps
    Hybrid,
    /// Never sleeps: keeps a core busy for each member
    Poll,
}

impl Completion {
    /// Returns the name under which it is typed.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Hybrid => "hybrid",
            Self::Poll => "poll",
        }
    }
}

impl From<Completion> for CompletionMode {
    fn from(completion: Completion) -> Self {
        match completion {
            Completion::Event => Self::Event,
            Completion::Hybrid => Self::HYBRID,
            Completion::Poll => Self::Poll,
        }
    }
}

/// How receivers get messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Delivery {
    /// Each has a copy in its own memory
    Private,
    /// All map one object, which nobody can change, and nothing is copied
    Shared,
}

impl Delivery {
    /// Returns the name under which it is typed.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Shared => "shared",
        }
    }
}

impl From<Delivery> for DeliveryMode {
    fn from(delivery: Delivery) -> Self {
        match delivery {
            Delivery::Private => Self::Private,
            Delivery::Shared => Self::Shared,
        }
    }
}

/// Whether blocks are summed by the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Checks {
    /// Where the fabric does not protect what it carries, as groups do by default: with TCP
    Auto,
    /// Nowhere
    Off,
}

impl Checks {
    /// Returns the name under which it is typed.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
        }
    }
}

/// What a process that the benchmark starts is to be.
#[derive(Clone, Debug, Args)]
pub(crate) struct BenchNodeOptions {
    #[command(subcommand)]
    pub(crate) role: Role,
}

/// The roles of the benchmark's processes.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Role {
    /// A member of the groups
    Member {
        /// What moves the bytes
        #[arg(long)]
        fabric: FabricName,
        /// The RDMA device
        #[arg(long)]
        device: Option<String>,
        /// Whether it invites the others, instead of being invited
        #[arg(long)]
        first: bool,
    },
    /// The receiver of a plain TCP stream
    Sink {
        /// Bytes of a message
        #[arg(long)]
        bytes: usize,
    },
    /// Runs a command, and ends it when its own standard input ends
    Guard {
        /// The command
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
}

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
        bytes if bytes > BYTES_MAX => Err(format!("{} are too long: give 1 GiB at most", size::Bytes(bytes))),
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

/// Tells whether messages of so many bytes are also counted per second.
pub(super) fn is_short(bytes: u64) -> bool {
    bytes <= SHORT_MAX
}

/// Longest message of which messages per second are counted, in bytes.
const SHORT_MAX: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

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
    fn what_is_chosen_has_the_name_under_which_it_is_typed() {
        for completion in Completion::value_variants() {
            let typed = completion.to_possible_value().expect("all can be typed");
            assert_eq!(typed.get_name(), completion.name());
        }
        for delivery in Delivery::value_variants() {
            let typed = delivery.to_possible_value().expect("all can be typed");
            assert_eq!(typed.get_name(), delivery.name());
        }
        for checks in Checks::value_variants() {
            let typed = checks.to_possible_value().expect("all can be typed");
            assert_eq!(typed.get_name(), checks.name());
        }
    }
}
