//! The command line. Help, completions and manual pages are made from it.

use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgGroup, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use rdmc::NodeBuilder;
use rdmc_files::{FabricSelection, OnFailure, PortRate};
use rdmc_wan::SessionConfig;
use rdmc_wan::gateway::{AllowRule, Target};

use crate::address::{AddressList, LISTEN_DEFAULT};
use crate::bench::BenchOptions;
use crate::choice::{AUTO, AlgorithmName, AlgorithmOptions, HybridOptions, OrAuto};
use crate::fabric::{FabricOptions, SessionFabricOptions};
use crate::get::{GetOptions, PutOptions, parse_rate};
use crate::named::{Named, Switch, one_of};
use crate::port::DemoPort;
use crate::progress::OutputOptions;
use crate::security::SecurityOptions;
use crate::serve::ServeOptions;
use crate::{address, examples, exit, size};

/// Sends files and directories from one host to many at once, by reliable multicast
///
/// Receivers run `rdmc recv`, and the sender runs `rdmc send FILE… --to HOST,…`. Every receiver passes blocks on
/// to others, so that sending to many takes hardly longer than sending to one. `rdmc demo` shows it on this host.
#[derive(Debug, Parser)]
#[command(name = "rdmc", version, after_help = exit::HELP, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Reads the arguments of the program and its environment. Ends the program if they are wrong.
    pub(crate) fn read() -> Self {
        Self::read_from(command(), std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    pub(crate) fn read_from(
        command: clap::Command,
        arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
        let mut command = without_contradicting_variables(command, &arguments);
        let matches = command.try_get_matches_from_mut(arguments)?;
        let mut cli = Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        let (Command::Send(SendOptions { fabric, .. }) | Command::Recv(RecvOptions { fabric, .. })) = &mut cli.command
        else {
            return Ok(cli);
        };
        // A variable serves many commands. One that uses no device ignores it.
        let source = matches.subcommand().and_then(|(_, options)| options.value_source("device"));
        if matches!(fabric.fabric, FabricSelection::Tcp | FabricSelection::Shm)
            && source == Some(ValueSource::EnvVariable)
        {
            fabric.device = None;
        }
        Ok(cli)
    }
}

/// Returns the program's command. Its options take negative numbers as values, so that a refusal names the option.
pub(crate) fn command() -> clap::Command {
    let takes_them = |option: clap::Arg| {
        let has_value = !option.is_positional() && option.get_action().takes_values();
        if has_value { option.allow_negative_numbers(true) } else { option }
    };
    Cli::command().mut_subcommands(|command| command.mut_args(takes_them))
}

/// Returns the command without variables that contradict a typed option: RDMC_SIZE does not forbid --file.
fn without_contradicting_variables(command: clap::Command, arguments: &[OsString]) -> clap::Command {
    let without_variables = |command: clap::Command| command.mut_args(|option| option.env(None::<&str>));
    let typed = command.clone().mut_subcommands(without_variables).ignore_errors(true).try_get_matches_from(arguments);
    // --help and --version are errors.
    let Some((name, typed)) = typed.as_ref().ok().and_then(clap::ArgMatches::subcommand) else { return command };
    let Some(subcommand) = command.find_subcommand(name) else { return command };
    let is_typed = |option: &&clap::Arg| typed.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
    let contradict = |one: &clap::Arg, other: &clap::Arg| {
        let of = |option| subcommand.get_arg_conflicts_with(option);
        of(one).contains(&other) || of(other).contains(&one)
    };
    let typed: Vec<&clap::Arg> = subcommand.get_arguments().filter(is_typed).collect();
    let overruled = subcommand.get_arguments().filter(|option| {
        option.get_env().is_some() && !typed.contains(option) && typed.iter().any(|typed| contradict(typed, option))
    });
    let overruled: Vec<clap::Id> = overruled.map(|option| option.get_id().clone()).collect();
    command.mut_subcommand(name, |subcommand| {
        overruled.into_iter().fold(subcommand, |command, id| command.mut_arg(id, |option| option.env(None::<&str>)))
    })
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Multicast real data to processes on this host, and measure it
    Demo(DemoOptions),
    /// Measure multicasts to processes on this host, and compare with the host's limits and with MPI
    Bench(BenchOptions),
    /// Send files and directories to receivers
    Send(SendOptions),
    /// Receive files and directories
    Recv(RecvOptions),
    /// Serve a directory to `rdmc get` and `rdmc put`, over long paths too
    Serve(ServeOptions),
    /// Get files and directories of a host that runs `rdmc serve`
    Get(GetOptions),
    /// Put files and directories into a directory of a host that runs `rdmc serve --writable`
    Put(PutOptions),
    /// Carry TCP connections over a long path, in one session between two gateways
    Gateway(GatewayOptions),
    /// Print which member sends which block to which member in which step
    Schedule(ScheduleOptions),
    /// Examine what this host offers, and advise on what is missing
    Doctor(DoctorOptions),
    /// Simulate the same runtime on a modelled network, in virtual time
    Sim(SimOptions),
    /// Write a new key for --key to a file; copy it to the other hosts over a secure channel, such as scp
    Keygen {
        /// The file; it must not exist yet
        file: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write the pages of all subcommands to a directory
    Man {
        /// The directory for the pages rdmc.1, rdmc-send.1, …; by default the main page goes to stdout
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// A process of the benchmark, which starts it
    #[command(hide = true, name = "internal-bench-node")]
    BenchNode {
        /// Its role
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        role: Vec<String>,
    },
    /// A receiver of the demo, which starts it
    #[command(hide = true, name = "internal-demo-member")]
    DemoMember(DemoMemberOptions),
}

/// Options of `rdmc send`.
#[derive(Debug, Args)]
#[command(
    after_help = exit::HELP,
    after_long_help = examples::of_send(),
    mut_args(racks_of_send)
)]
pub(crate) struct SendOptions {
    /// Files and directories to send; each arrives under its own name
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// The receivers, with commas or spaces between them; the port is 7471 unless given. The receivers must reach each other at
    /// these addresses, too
    #[arg(
        long,
        short,
        env = "RDMC_TO",
        required = true,
        value_name = "HOST[:PORT],…",
        value_parser = address::parse_receivers
    )]
    pub(crate) to: Vec<AddressList>,
    /// The algorithm by which blocks travel
    #[arg(long, short, env = "RDMC_ALGORITHM", default_value = AUTO, value_name = "NAME")]
    pub(crate) algorithm: OrAuto<AlgorithmName>,
    #[command(flatten)]
    pub(crate) hybrid: HybridOptions,
    /// Bytes of a block, the unit that receivers relay, up to 1 GiB: 64k, 1M (powers of 1024); auto chooses 32 KiB to
    /// 2 MiB by a cost model
    #[arg(
        long,
        short,
        env = "RDMC_BLOCK_SIZE",
        default_value = AUTO,
        value_name = "SIZE",
        value_parser = size::parse_block_or_auto
    )]
    pub(crate) block_size: OrAuto<u32>,
    /// Speed of the members' network ports in bits per second, for the cost model: 200M, 10G (powers of 1000); by
    /// default that of this host's network device, or 2.5G if the system does not know it
    #[arg(long, env = "RDMC_PORT_RATE", value_name = "RATE")]
    pub(crate) port_rate: Option<PortRate>,
    /// Time from a member to the farthest one and back, for the cost model, from 1us to 60s: 250us, 24ms; measured by
    /// default
    #[arg(long, env = "RDMC_PATH_RTT", value_name = "TIME", value_parser = parse_round_trip)]
    pub(crate) path_rtt: Option<Duration>,
    /// Send at most so many bits of files per second from each host: 200M, 10G (powers of 1000); by default as many as
    /// the network takes
    #[arg(long, env = "RDMC_RATE", value_name = "RATE", value_parser = parse_rate)]
    pub(crate) rate: Option<PortRate>,
    #[command(flatten)]
    pub(crate) fabric: FabricOptions,
    #[command(flatten)]
    pub(crate) security: SecurityOptions,
    /// Seconds to wait for the receivers' answers; with --wait, seconds during which receivers are invited again
    #[arg(
        long,
        env = "RDMC_TIMEOUT",
        default_value_t = 10,
        value_name = "SECONDS",
        value_parser = parse_whole_seconds::<1>
    )]
    pub(crate) timeout: u64,
    /// Wait for receivers that are busy, closed the connection or cannot be reached, and invite them again until
    /// --timeout has passed; by default the first refusal ends the program
    #[arg(long, env = "RDMC_WAIT", value_parser = Switch)]
    pub(crate) wait: bool,
    /// Seconds within which the others have agreed to give up a silent member, from 0.05 to 3600: it is silent for
    /// 17/20 of them; longer for machines that stop for a while
    #[arg(long, env = "RDMC_DETECTION", default_value = "2", value_name = "SECONDS", value_parser = parse_detection)]
    pub(crate) detection: Duration,
    /// How the transfer goes on if a receiver or the sender fails after all have agreed to the list of files
    #[arg(
        long,
        env = "RDMC_ON_FAILURE",
        default_value = "repair",
        value_name = "NAME",
        value_parser = one_of(&ON_FAILURE)
    )]
    pub(crate) on_failure: OnFailure,
    /// Evict a receiver that has delayed the others for so many seconds without a break; by default the others wait for
    /// it
    #[arg(
        long,
        env = "RDMC_EVICT_AFTER",
        value_name = "SECONDS",
        value_parser = parse_whole_seconds::<1>
    )]
    pub(crate) evict_after: Option<u64>,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// Lets a sender find racks by default.
fn racks_of_send(option: clap::Arg) -> clap::Arg {
    if option.get_id() == "racks" { option.default_value(AUTO).help(RACKS_OF_SEND) } else { option }
}

/// Parses a number of seconds from `MIN` to a day.
fn parse_whole_seconds<const MIN: u64>(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok().filter(|seconds| (MIN..=86_400).contains(seconds));
    seconds.ok_or_else(|| format!("a whole number of seconds from {MIN} to 86400 is expected"))
}

/// Parses a detection time in seconds, which may have a fraction.
fn parse_detection(text: &str) -> Result<Duration, String> {
    let (min, max) = (NodeBuilder::DETECTION_MIN, NodeBuilder::DETECTION_MAX);
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.filter(|seconds| (min..=max).contains(seconds)).ok_or_else(|| {
        format!("a number of seconds from {} to {} is expected, such as 0.5", min.as_secs_f64(), max.as_secs_f64())
    })
}

/// Parses a time from a microsecond to a minute with its unit: `us`, `ms` or `s`.
fn parse_round_trip(text: &str) -> Result<Duration, String> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit_s = match unit.trim() {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => f64::NAN,
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * unit_s).filter(|seconds| *seconds <= 60.0);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let time = time.filter(|time| *time >= Duration::from_micros(1));
    time.ok_or_else(|| "a time from 1us to 60s is expected, with its unit us, ms or s: 250us, 24ms".to_owned())
}

/// Help of --racks of `rdmc send`.
const RACKS_OF_SEND: &str = "With --algorithm auto or hybrid, the members that share a rack: sizes in order of rank \
    (4,4), or the ranks of each rack (0,2/1,3); rank 0 is the sender. With --algorithm auto, auto finds them \
    and none ignores them";
/// What can happen if a member fails.
const ON_FAILURE: [Named<OnFailure>; 2] = [
    (
        OnFailure::Repair,
        "repair",
        "The survivors complete the interrupted file from the blocks that they hold, and go on",
    ),
    (OnFailure::Fail, "fail", "The transfer ends for all"),
];

/// Options of `rdmc recv`.
#[derive(Clone, Debug, Args)]
#[command(after_help = exit::HELP, after_long_help = examples::of_recv())]
pub(crate) struct RecvOptions {
    /// The address to listen at. The default is for senders on this host only; 0.0.0.0 or :7471 is for senders
    /// anywhere. The port is 7471 unless given; port 0 is any free port
    #[arg(
        long,
        short,
        env = "RDMC_LISTEN",
        default_value = LISTEN_DEFAULT,
        value_name = "ADDRESS[:PORT]",
        value_parser = address::parse_listen
    )]
    pub(crate) listen: String,
    /// The directory for received files; this user must be able to write there
    #[arg(long, short, env = "RDMC_DIR", default_value = ".", value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// End after the first transfer, with its exit code; an offer that ends before the first file does not count. By
    /// default rdmc recv runs until a signal comes
    #[arg(long, env = "RDMC_ONCE", value_parser = Switch)]
    pub(crate) once: bool,
    /// Decline transfers of more bytes than this: 500M, 2GiB (powers of 1024); by default there is no limit
    #[arg(long, env = "RDMC_MAX_SIZE", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) max_size: Option<u64>,
    /// Decline transfers that would replace a file, and fail if such a file appears later; by default files are replaced
    #[arg(long, env = "RDMC_NO_OVERWRITE", value_parser = Switch)]
    pub(crate) no_overwrite: bool,
    /// Keep no parts of files when a transfer is interrupted, remove those that earlier transfers have left of the same
    /// files, and receive every file in full; by default a later transfer sends only the missing blocks
    #[arg(long, env = "RDMC_DISCARD_PARTS", value_parser = Switch)]
    pub(crate) discard_parts: bool,
    /// Force every file to the disk (fsync) before it takes its name; by default the kernel writes it later
    #[arg(long, env = "RDMC_FSYNC", value_parser = Switch)]
    pub(crate) fsync: bool,
    #[command(flatten)]
    pub(crate) fabric: FabricOptions,
    #[command(flatten)]
    pub(crate) security: SecurityOptions,
    /// Seconds for which running transfers may go on after SIGTERM; SIGINT or a second signal ends them at once
    #[arg(
        long,
        env = "RDMC_DRAIN",
        default_value_t = 10,
        value_name = "SECONDS",
        value_parser = parse_whole_seconds::<0>
    )]
    pub(crate) drain: u64,
    /// Greatest registered memory of a transfer in bytes: 512M, 4GiB (powers of 1024). RDMA receives whole files into
    /// it, so that longer files need TCP or a larger pool
    #[arg(long, env = "RDMC_POOL_SIZE", default_value = "4GiB", value_name = "SIZE", value_parser = size::parse_pool)]
    pub(crate) pool_size: u64,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// Options of `rdmc gateway`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = exit::HELP_OF_TWO,
    after_long_help = examples::of_gateway(),
    group = ArgGroup::new("end").args(["listen", "serve"]).required(true),
    group = ArgGroup::new("where").args(["to", "socks", "transparent"]),
    override_usage = "rdmc gateway [OPTIONS] --listen <ADDRESS[:PORT]> --peer <HOST[:PORT]> \
                      <--to <HOST:PORT>|--socks|--transparent>\n       \
                      rdmc gateway [OPTIONS] --serve <ADDRESS[:PORT]> --allow <NETWORK|HOST[:PORT]>...\n       \
                      rdmc gateway [OPTIONS] --serve <ADDRESS[:PORT]> --via <HOST[:PORT]>"
)]
pub(crate) struct GatewayOptions {
    /// The entrance: take connections of programs at this address. Needs --peer, and --to, --socks or --transparent.
    /// Programs prove nothing: listen where only yours can connect. The port is 7471 unless given; port 0 is any free
    /// port
    #[arg(
        long,
        value_name = "ADDRESS[:PORT]",
        requires_all = ["peer", "where"],
        conflicts_with_all = ["serve", "allow", "via"],
        value_parser = address::parse_listen
    )]
    pub(crate) listen: Option<String>,
    /// The exit to which the entrance opens a session; the port is 7471 unless given
    #[arg(long, value_name = "HOST[:PORT]", requires = "listen", value_parser = parse_peer)]
    pub(crate) peer: Option<String>,
    /// All connections lead to this target, which the exit connects
    #[arg(long, value_name = "HOST:PORT", requires = "listen")]
    pub(crate) to: Option<Target>,
    /// Each program says by SOCKS5 where its connection leads; the exit resolves names
    #[arg(long, requires = "listen")]
    pub(crate) socks: bool,
    /// Connections lead where the programs connected to: a rule of the system diverts them to --listen (TPROXY). Needs
    /// the capability CAP_NET_ADMIN. Linux only
    #[arg(long, requires = "listen")]
    pub(crate) transparent: bool,
    /// The exit: take sessions of entrances at this address, and connect to targets, or with --via to the next gateway.
    /// The port is 7471 unless given; port 0 is any free port
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = address::parse_listen)]
    pub(crate) serve: Option<String>,
    /// A gateway between: pass connections on to the gateway that serves here, in a session of its own with the same
    /// key. The port is 7471 unless given
    #[arg(long, value_name = "HOST[:PORT]", requires = "serve", value_parser = parse_peer)]
    pub(crate) via: Option<String>,
    /// The exit connects to this network or host only, at this port if there is one: 10.0.0.0/8, 10.1.0.0/16:443,
    /// host.example:22. It may be repeated. By default the exit connects to nothing. With --via, it passes everything on
    /// by default, and a network allows addresses only, no names
    #[arg(long, value_name = "NETWORK|HOST[:PORT]", requires = "serve")]
    pub(crate) allow: Vec<AllowRule>,
    /// Greatest length in bytes of each of the rings of slabs (one for each direction, and one for slabs that the other
    /// gateway writes), from 4 MiB on: 64M, 1GiB
    /// (powers of 1024). The path stays full if a ring has three times what the path carries in a round trip
    #[arg(long, env = "RDMC_RING", default_value = "256MiB", value_name = "SIZE", value_parser = size::parse_ring)]
    pub(crate) ring: u64,
    /// Ask the other gateway for no more than so many bits per second: 200M, 10G (powers of 1000); by default there is
    /// no limit
    #[arg(long, env = "RDMC_RATE", value_name = "RATE", value_parser = parse_rate)]
    pub(crate) rate: Option<PortRate>,
    #[command(flatten)]
    pub(crate) fabric: SessionFabricOptions,
    /// Number of connections that carry the slabs, 1 to 64, as the entrance chooses [default: 4, or 8 for TCP without
    /// BBR and 16 for a distant RDMA device]
    #[arg(
        long,
        env = "RDMC_STREAMS",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u16).range(1..=i64::from(SessionConfig::STREAMS_MAX))
    )]
    pub(crate) streams: Option<u16>,
    #[command(flatten)]
    pub(crate) security: SecurityOptions,
    /// Seconds for which connections may go on after SIGTERM; SIGINT or a second signal ends them at once
    #[arg(
        long,
        env = "RDMC_DRAIN",
        default_value_t = 10,
        value_name = "SECONDS",
        value_parser = parse_whole_seconds::<0>
    )]
    pub(crate) drain: u64,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// Parses the address of one host.
fn parse_peer(text: &str) -> Result<String, String> {
    match <[String; 1]>::try_from(address::parse_receivers(text)?.0) {
        Ok([address]) => Ok(address),
        Err(_) => Err("one address is expected: HOST or HOST:PORT".to_owned()),
    }
}

/// Options of `rdmc demo`.
#[derive(Clone, Debug, Args)]
#[command(after_long_help = examples::DEMO)]
pub(crate) struct DemoOptions {
    /// Number of members: one sender and the receivers; 2 to 256
    #[arg(
        long,
        short,
        env = "RDMC_NODES",
        default_value_t = 8,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(2..=256)
    )]
    pub(crate) nodes: u32,
    /// Bytes of random data to send: 500M, 1GiB (powers of 1024)
    #[arg(long, short, env = "RDMC_SIZE", default_value = "64MiB", value_name = "SIZE", value_parser = size::parse)]
    pub(crate) size: u64,
    /// Send this file instead of random data
    #[arg(long, value_name = "PATH", conflicts_with = "size")]
    pub(crate) file: Option<PathBuf>,
    /// The fabric, which carries the data
    #[arg(long, default_value = "tcp", value_name = "NAME")]
    pub(crate) fabric: DemoFabric,
    /// With --fabric verbs, the RDMA device, or the beginning of the names of the devices that the members share; by
    /// default they share all devices
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Speed of the port that each member gets for sending, in bits per second: 200M, 10G (powers of 1000), or none.
    /// The program emulates these ports [default: 1G; with --fabric verbs: none]
    #[arg(long, value_name = "RATE")]
    pub(crate) port_rate: Option<DemoPort>,
    #[command(flatten)]
    pub(crate) algorithm: AlgorithmOptions,
    /// Bytes of a block, the unit that receivers relay, up to 1 GiB: 64k, 1M (powers of 1024)
    #[arg(
        long,
        short,
        env = "RDMC_BLOCK_SIZE",
        default_value = "1MiB",
        value_name = "SIZE",
        value_parser = size::parse_block
    )]
    pub(crate) block_size: u32,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// The fabrics of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DemoFabric {
    /// Memory copies; the members are tasks of one process
    Mem,
    /// TCP on loopback; every receiver is a process
    Tcp,
    /// RDMA; every receiver is a process, and the members take turns with the devices of this host
    Verbs,
}

/// Options of a receiver of the demo.
#[derive(Clone, Debug, Args)]
pub(crate) struct DemoMemberOptions {
    /// Where to listen
    #[arg(long)]
    pub(crate) listen: std::net::SocketAddr,
    /// The RDMA device; TCP if there is none
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// The rate of its port
    #[arg(long)]
    pub(crate) port_rate: DemoPort,
}

/// Options of `rdmc schedule`.
#[derive(Debug, Args)]
pub(crate) struct ScheduleOptions {
    /// Number of members, the sender included
    #[arg(
        long,
        short,
        env = "RDMC_NODES",
        default_value_t = 8,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(rdmc_schedule::MEMBERS_MAX))
    )]
    pub(crate) nodes: u32,
    /// Number of blocks of the message
    #[arg(
        long,
        short = 'k',
        default_value_t = 3,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) blocks: u32,
    #[command(flatten)]
    pub(crate) algorithm: AlgorithmOptions,
    /// Show what every member sends instead of what it receives
    #[arg(long, conflicts_with = "json")]
    pub(crate) sends: bool,
    /// Print a JSON object with every hop of a block
    #[arg(long, env = "RDMC_JSON", value_parser = Switch)]
    pub(crate) json: bool,
}

/// Options of `rdmc sim`.
#[derive(Debug, Args)]
#[command(
    arg_required_else_help = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = SIM_EXIT_CODES
)]
pub(crate) struct SimOptions {
    #[command(subcommand)]
    pub(crate) command: Option<SimCommand>,
    /// The scenario to play: cluster, groups, messages and faults, as described in docs/EXPERIMENTS.md
    #[arg(long, value_name = "FILE.toml", required = true)]
    pub(crate) scenario: Option<PathBuf>,
    /// The seed of everything random; the same seed gives the same times on every machine
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// Write the traffic as a trace for <https://ui.perfetto.dev> or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long, env = "RDMC_JSON", value_parser = Switch)]
    pub(crate) json: bool,
}

/// The subcommands of `rdmc sim`.
#[derive(Debug, Subcommand)]
pub(crate) enum SimCommand {
    /// Repeat experiments of the papers: tables, plots and a comparison with the papers' findings
    Figure(FigureOptions),
    /// Hunt for faults: each seed draws a cluster, groups, messages and faults, and everything is checked
    Campaign(CampaignOptions),
}

/// Options of `rdmc sim figure`.
#[derive(Debug, Args)]
pub(crate) struct FigureOptions {
    /// The experiments, or all of them
    #[arg(required = true, value_name = "NAME", value_parser = figure_names())]
    pub(crate) names: Vec<String>,
    /// The directory for the results
    #[arg(long, short, default_value = "figures", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// The seed of everything random
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// For experiment 9, a file with a workload instead of the fitted one, in lines
    /// `microseconds,bytes,target,target,target`
    #[arg(long, value_name = "FILE")]
    pub(crate) workload: Option<PathBuf>,
}

/// Options of `rdmc sim campaign`.
#[derive(Debug, Args)]
pub(crate) struct CampaignOptions {
    /// The seeds to play: a range without its end, or a single seed
    #[arg(long, default_value = "0..1000", value_name = "A..B", value_parser = parse_seeds)]
    pub(crate) seeds: Range<u64>,
    /// Play the case in this file instead of seeds, for example one that --shrink has written
    #[arg(long, value_name = "FILE.json", conflicts_with = "seeds")]
    pub(crate) case: Option<PathBuf>,
    /// Instead of seeds, harm each member at each of its operations, in groups of up to 5 with every algorithm and
    /// messages of up to 4 blocks; cases that fail are written to exhaustive-NUMBER.json
    #[arg(long, conflicts_with_all = ["seeds", "case"])]
    pub(crate) exhaustive: bool,
    /// Look for a smaller case that fails in the same way, and write it to case-SEED.json
    #[arg(long)]
    pub(crate) shrink: bool,
}

/// The exit codes of `rdmc sim`.
const SIM_EXIT_CODES: &str = "Exit codes: 0 if the scenario was played, even if groups failed, or if no case failed; \
    1 if it could not be played to its end, or if a case failed; 2 if the scenario or the arguments are invalid";

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?} is not a seed: {error}"));
    let Some((first, end)) = text.split_once("..") else {
        let seed = number(text)?;
        return Ok(seed..seed.checked_add(1).ok_or("this seed is too large")?);
    };
    let (first, end) = (number(first)?, number(end)?);
    if first < end { Ok(first..end) } else { Err(format!("{first}..{end} is empty: its end is excluded")) }
}

fn figure_names() -> clap::builder::PossibleValuesParser {
    let all = clap::builder::PossibleValue::new(ALL_FIGURES).help("every experiment");
    let each = rdmc_sim::experiments::EXPERIMENTS
        .iter()
        .map(|experiment| clap::builder::PossibleValue::new(experiment.name).help(experiment.about));
    clap::builder::PossibleValuesParser::new(each.chain([all]))
}

/// Name that stands for all experiments.
pub(crate) const ALL_FIGURES: &str = "all";

/// Options of `rdmc doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorOptions {
    /// Print a JSON object
    #[arg(long, env = "RDMC_JSON", value_parser = Switch)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use rdmc_files::size::POOL_BYTES_DEFAULT;

    #[test]
    fn round_trips_have_a_unit_and_are_from_a_microsecond_to_a_minute() {
        let us = [("250us", 250), ("24ms", 24_000), ("1.5 ms", 1_500), ("60s", 60_000_000), ("1us", 1), ("3µs", 3)];
        for (text, us) in us {
            assert_eq!(parse_round_trip(text), Ok(Duration::from_micros(us)), "{text}");
        }
        for text in ["", "0", "0ms", "0.5us", "5", "ms", "-1ms", "61s", "1h", "NaNms", "1e3ms", "infs"] {
            assert!(parse_round_trip(text).is_err_and(|error| error.contains("us, ms or s: 250us, 24ms")), "{text}");
        }
    }

    #[test]
    fn only_help_of_send_says_that_racks_are_found() {
        let (mut commands, mut found) = (command(), Vec::new());
        commands.build();
        for command in commands.get_subcommands() {
            let Some(racks) = command.get_arguments().find(|option| option.get_id() == "racks") else { continue };
            let is_found = racks.get_help().is_some_and(|help| help.to_string().contains("auto finds them"));
            assert_eq!(is_found, racks.get_default_values() == [AUTO], "{}", command.get_name());
            found.extend(is_found.then(|| command.get_name().to_owned()));
        }
        assert_eq!(found, ["send"]);
    }

    #[test]
    fn a_detection_time_is_within_its_bounds() {
        for (text, ms) in [("0.05", 50), ("2", 2000), ("3600", 3_600_000)] {
            assert_eq!(parse_detection(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["0", "0.049", "3601", "-1", "NaN", "soon", "2s"] {
            assert!(parse_detection(text).is_err_and(|error| error.contains("from 0.05 to 3600")), "{text}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_variable_has_the_same_values_for_all_subcommands() {
        let (mut meanings, mut defaults) = (BTreeMap::new(), BTreeMap::new());
        for command in Cli::command().get_subcommands() {
            for argument in command.get_arguments() {
                let Some(variable) = argument.get_env() else { continue };
                let values = argument.get_possible_values().into_iter().map(|value| value.get_name().to_owned());
                // Not everywhere something can be left to be chosen.
                let values: Vec<_> = values.filter(|name| name != AUTO).collect();
                let meaning = (argument.get_id().clone(), values);
                let known = meanings.entry(variable.to_owned()).or_insert_with(|| meaning.clone());
                assert_eq!(*known, meaning, "{variable:?} of {}", command.get_name());
                let default = argument.get_default_values().to_vec();
                if default != [AUTO] {
                    let known = defaults.entry(variable.to_owned()).or_insert_with(|| default.clone());
                    assert_eq!(*known, default, "{variable:?} of {}", command.get_name());
                }
            }
        }
        assert!(meanings.contains_key(std::ffi::OsStr::new("RDMC_FABRIC")));
    }

    #[test]
    fn a_device_from_the_environment_says_nothing_to_tcp() {
        // A variable that is set wherever tests run takes the place of RDMC_DEVICE.
        let exported = |command: clap::Command| command.mut_arg("device", |device| device.env("PATH"));
        let device = |arguments: &[&str]| {
            let command = Cli::command().mut_subcommand("send", exported).mut_subcommand("recv", exported);
            match Cli::read_from(command, ["rdmc"].iter().chain(arguments)).unwrap().command {
                Command::Send(SendOptions { fabric, .. }) | Command::Recv(RecvOptions { fabric, .. }) => fabric.device,
                other => panic!("{other:?}"),
            }
        };
        let path = std::env::var("PATH").ok();
        for command in [&["recv"][..], &["send", "file", "--to", "host:1"]] {
            let with = |options: &[&'static str]| device(&[command, options].concat());
            assert_eq!(with(&["--fabric", "tcp"]), None);
            assert_eq!(with(&["--fabric", "tcp", "--device", "rxe0"]).as_deref(), Some("rxe0"));
            assert_eq!(with(&["--fabric", "verbs"]), path);
            assert_eq!(with(&["--fabric", "auto"]), path);
        }
    }

    #[test]
    fn a_typed_option_overrules_a_variable_that_contradicts_it() {
        // A variable that is set wherever tests run takes the place of RDMC_SIZE and RDMC_KEY_FILE.
        let exported = |option: &'static str| {
            let export =
                |command: clap::Command| command.mut_arg(option, |option| option.env("CARGO_PKG_VERSION_MAJOR"));
            Cli::command().mut_subcommand("demo", export)
        };
        let demo = |command: clap::Command, options: &[&str]| {
            let read = Cli::read_from(command, ["rdmc", "demo"].iter().chain(options));
            read.map(|cli| match cli.command {
                Command::Demo(options) => options,
                other => panic!("{other:?}"),
            })
        };
        let size = |options: &[&str]| demo(exported("size"), options).map(|options| options.size);
        assert_eq!(size(&[]).unwrap(), 0, "the variable is read");
        assert_eq!(size(&["--file", "x"]).unwrap(), 64 << 20, "the default");
        assert_eq!(size(&["--size", "3", "--nodes", "2"]).unwrap(), 3);
        assert!(size(&["--file", "x", "--size", "1"]).is_err());
        let output = demo(exported("json"), &["--quiet"]).unwrap().output;
        assert!(output.quiet && !output.json);
    }

    #[test]
    fn a_key_and_certificates_exclude_each_other_and_certificates_come_complete() {
        let read = |options: &[&str]| {
            let arguments = ["rdmc", "recv"].iter().chain(options);
            Cli::read_from(Cli::command(), arguments).map(drop)
        };
        let files = ["--tls-ca", "ca", "--tls-cert", "cert", "--tls-key", "key"];
        assert!(read(&["--key", "k", "--encrypt"]).is_ok() && read(&files).is_ok());
        assert!(read(&[&files[..], &["--key", "k"]].concat()).is_err());
        for incomplete in [&files[..2], &files[..4], &files[2..], &files[4..]] {
            assert!(read(incomplete).is_err(), "{incomplete:?}");
        }
    }

    #[test]
    fn a_gateway_is_an_entrance_or_an_exit() {
        let read = |options: &str| {
            let read = Cli::read_from(command(), ["rdmc", "gateway"].into_iter().chain(options.split_whitespace()));
            read.map(|cli| match cli.command {
                Command::Gateway(options) => options,
                other => panic!("{other:?}"),
            })
        };
        let entrance = read("--listen 127.0.0.1:1080 --peer far --socks --rate 200M --streams 8").unwrap();
        assert_eq!((entrance.peer.as_deref(), entrance.ring, entrance.streams), (Some("far:7471"), 256 << 20, Some(8)));
        assert!(read("--listen :80 --peer far --to [fd00::2]:80").unwrap().to.is_some());
        let exit = read("--serve :7471 --allow 10.0.0.0/8 --allow host.example:22 --ring 64M").unwrap();
        assert_eq!((exit.allow.len(), exit.ring), (2, 64 << 20));
        assert!(read("--listen :80 --peer far --transparent").unwrap().transparent);
        let between = read("--serve :7471 --via far --allow 10.0.0.0/8").unwrap();
        assert_eq!(between.via.as_deref(), Some("far:7471"));
        for wrong in [
            "",
            "--listen :80",
            "--listen :80 --peer far",
            "--listen :80 --to host:1",
            "--listen :80 --peer far --to host:1 --socks",
            "--listen :80 --peer far --to host:1 --transparent",
            "--listen :80 --peer far --socks --transparent",
            "--listen :80 --peer far --socks --via farther",
            "--serve :7471 --transparent",
            "--via far",
            "--listen :80 --peer far --socks --allow 10.0.0.0/8",
            "--listen :80 --peer far,farther --socks",
            "--listen :80 --peer far --socks --serve :7471",
            "--serve :7471 --peer far",
            "--serve :7471 --socks",
            "--serve :7471 --allow 10.0.0.1/8",
            "--serve :7471 --ring 1M",
            "--serve :7471 --streams 65",
            "--peer far --socks",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_missing_is_named_and_nothing_else() {
        for (typed, missing, unnamed) in [
            ("gateway", "<--listen <ADDRESS[:PORT]>|--serve <ADDRESS[:PORT]>>", "--peer <HOST[:PORT]>\n"),
            ("gateway --listen :80 --peer far", "<--to <HOST:PORT>|--socks|--transparent>", "  --serve"),
            ("gateway --listen :80 --socks", "  --peer <HOST[:PORT]>", "  --to"),
            ("get --from host/a", "  --to <HOST[:PORT]/PATH>", "[DIR]"),
            ("get --to host", "  --from <HOST[:PORT]/PATH>...", "[DIR]"),
        ] {
            let read = Cli::read_from(command(), ["rdmc"].into_iter().chain(typed.split(' ')));
            let error = read.expect_err("something is missing").to_string();
            let listed = error.split("Usage:").next().expect("there is a first part");
            assert!(listed.contains(missing) && !listed.contains(unnamed), "{typed}: {error}");
        }
        let usage = Cli::read_from(command(), ["rdmc", "gateway"]).expect_err("it needs options").to_string();
        assert!(usage.contains("--serve <ADDRESS[:PORT]> --via <HOST[:PORT]>"), "{usage}");
    }

    #[test]
    fn seeds_are_a_range_or_one() {
        assert_eq!((parse_seeds("3..7"), parse_seeds("5")), (Ok(3..7), Ok(5..6)));
        for wrong in ["", "..", "7..7", "8..7", "1..x", "-1", "18446744073709551615"] {
            assert!(parse_seeds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_pool_is_as_long_as_it_is_said_to_be() {
        let Command::Recv(options) = Cli::read_from(Cli::command(), ["rdmc", "recv"]).unwrap().command else {
            panic!("recv was asked for");
        };
        assert_eq!(options.pool_size, POOL_BYTES_DEFAULT);
    }
}
