//! `rdmc bench flows`: the options, and the output of the results.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rdmc_bench::local::Program;
use rdmc_bench::{Flow, FlowFabric, FlowServer, FlowsBench};
use serde::Serialize;

use crate::examples;
use crate::named::{Named, one_of};
use crate::progress::{OutputOptions, Reporter, Screen, print_json};
use crate::results::{PROCESS, Printer, check_writable, format_of};

/// Options of `rdmc bench flows`.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP, after_long_help = format!("{}\n\n{HELP}", examples::FLOWS))]
pub(crate) struct FlowsOptions {
    /// A flow: a verb (send, write, write-imm, read), bytes of a message, and options (see below): write:1M:poll
    #[arg(long = "flow", short, value_name = "VERB:SIZE[:OPTION…]", required_unless_present = "listen")]
    flows: Vec<Flow>,
    /// What carries the flows
    #[arg(long, default_value = "tcp", value_name = "NAME", value_parser = one_of(&FABRICS))]
    fabric: FlowFabric,
    /// With --fabric verbs, the RDMA device; by default the one with the address by which the other end is reached
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Hosts that run rdmc bench flows --listen: the flows go to them in turn; by default to this host
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,…", value_parser = parse_place)]
    to: Vec<String>,
    /// Be the other end of flows, until interrupted; whoever reaches this address can make this host send and receive
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = LISTEN_CONFLICTS)]
    listen: Option<String>,
    /// How long messages are counted, in seconds: 0.001 to 3600, with --fabric sim up to 1; 1 by default, 0.02 with
    /// --fabric sim
    #[arg(long, value_name = "SECONDS", value_parser = parse_duration, conflicts_with = "count")]
    duration: Option<Duration>,
    /// Count so many messages of each flow, in place of a duration
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    count: Option<u64>,
    /// How long messages are not counted before that, in seconds: 0.001 to 3600; 0.2 by default, 0.002 with --fabric
    /// sim
    #[arg(long, value_name = "SECONDS", value_parser = parse_duration)]
    warm_up: Option<Duration>,
    /// How often each flow is measured alone, and all are measured together; the medians count
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Print comma-separated values instead of the table
    #[arg(long, conflicts_with_all = ["json", "quiet"])]
    csv: bool,
    /// Draw rates and times of messages into this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// The other end of flows can be reached.
#[derive(Serialize)]
#[serde(tag = "event", rename = "listening")]
struct Listening<'a> {
    address: &'a str,
}

/// Options that a listening end does not take: the other end has them.
const LISTEN_CONFLICTS: [&str; 9] =
    ["flows", "fabric", "to", "duration", "count", "warm_up", "repetitions", "csv", "plot"];

/// Measures flows, or is the other end of some.
pub(crate) async fn run(options: FlowsOptions, screen: Screen) -> anyhow::Result<()> {
    let program = Program::this([PROCESS])?;
    let reporter = Reporter::new(options.output, screen);
    if let Some(address) = &options.listen {
        let server = FlowServer::bind(address, program, options.device).await?;
        let address = server.local_address().to_owned();
        match reporter.is_json() {
            true => print_json(&Listening { address: &address }),
            false => reporter.print(&format!("listening at {address} for rdmc bench flows --to")),
        }
        server.serve().await;
        return Ok(());
    }
    let mut measured = rdmc_bench::FlowsOptions::new(options.flows, options.fabric);
    measured.device = options.device;
    measured.to = options.to;
    measured.duration = options.duration;
    measured.count = options.count;
    measured.warm_up = options.warm_up;
    measured.repetitions = options.repetitions;
    let bench = FlowsBench::prepare(measured, program)?;
    // Fails before the measurements if the file cannot be written.
    if let Some(path) = &options.plot {
        check_writable(path)?;
    }
    let total = bench.measurements();
    let results = bench.run(format_of(options.output, options.csv), &Printer::new(reporter, total)).await?;
    if let Some(path) = &options.plot {
        std::fs::write(path, results.picture()).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn parse_place(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(text.to_owned()),
        _ => Err(format!("{text:?}: HOST:PORT is expected, where rdmc bench flows --listen runs")),
    }
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let allowed = Duration::from_millis(1)..=Duration::from_secs(3600);
    seconds
        .filter(|seconds| allowed.contains(seconds))
        .ok_or_else(|| format!("{text:?}: a number of seconds from 0.001 to 3600 is expected, such as 0.5"))
}

/// What carries flows.
const FABRICS: [Named<FlowFabric>; 5] = [
    (FlowFabric::Tcp, "tcp", "TCP, of this host's loopback or between hosts"),
    (FlowFabric::Shm, "shm", "Shared memory of this host"),
    (FlowFabric::Verbs, "verbs", "An RDMA device"),
    (FlowFabric::Mem, "mem", "Memory of one process, with a thread for each end"),
    (FlowFabric::Sim, "sim", "Modelled adapters (ConnectX-3, 48 Gbit/s), in virtual time"),
];

/// The end of the help, which explains flows and figures.
const HELP: &str = "\
Each flow has a queue pair of its own, and a process at each end. Messages follow each other, as
many under way as its depth. Each flow is measured alone, then all of them together; this is
repeated, and the medians of the repetitions are printed. A flow fails if no message is complete for
10 seconds, and one more for each 5 MB under way.

Options of a flow, after its size:
  event, poll, hybrid   how both ends wait for completions (event); with --fabric sim the far end
                        polls
  depth=N               messages under way at once, 1 to 1024 (1)
  receives=N            with send and write-imm, receives that are posted ahead (depth + 1)
  inline                the request carries the bytes; needs --fabric verbs
  sl=N, tc=N            service level and traffic class; need --fabric verbs
  core=N, far-core=N    the core of the end that posts, and of the other one

Columns:
  rate          bytes of messages per second. A message whose turn is across an end of the
                measured time counts in proportion
  msg/s         messages per second
  median, p99, p99.9, max
                time from the posting of a message to its completion
  CPU, far CPU  processor time of the end that posts, and of the other one, warm-up included; 1 is
                a core
  share         of the rates of all flows
  /alone        the figure beside the others over that alone

Output for programs (--json), one object per line for each flow alone and beside the others:
  result    number (of the flow, from 1), flow, setting (alone or beside), fabric, repetitions,
            rate (bytes per second), message_rate, seconds {median, p99, p999, max} (null if no message
            was complete in time), cpu_source, cpu_target (null with sim), share, rate_to_alone,
            median_to_alone, p99_to_alone (null for alone)
  listening with --listen: address
  failed    code, message
--csv prints the same fields in the same units.

Exit codes: 0 done; 1 a flow failed; 2 wrong arguments, or what a host does not have;
130, 143 interrupted.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fabric_is_typed_under_its_name() {
        assert_eq!(
            FABRICS.map(|(fabric, name, _)| (fabric, name)),
            FlowFabric::ALL.map(|fabric| (fabric, fabric.name()))
        );
    }

    #[test]
    fn a_duration_has_bounds() {
        assert_eq!(parse_duration("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "3601", "soon", "1e300"] {
            assert!(parse_duration(text).unwrap_err().contains("0.001 to 3600"), "{text}");
        }
    }
}
