//! The program `rdmc` sends files and directories from one host to many by reliable multicast.

#![deny(unsafe_code)]
// These macros panic if the reader is gone.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod address;
mod bench;
mod choice;
mod cli;
mod demo;
mod doctor;
mod examples;
mod exit;
mod fabric;
mod flows;
mod gateway;
mod get;
mod manual;
mod named;
mod port;
mod progress;
mod recv;
mod results;
mod schedule;
mod security;
mod send;
mod serve;
mod sim;
mod size;
mod wording;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use rdmc_bench::ProcessRole;
use rdmc_files::words::printable;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use cli::{Cli, Command, DemoFabric};
use exit::{Exit, Signal, Stop};
use progress::{Screen, tell_outcome};

/// Reads the filter of log messages.
fn log_filter(given: Option<OsString>, default: &str) -> anyhow::Result<EnvFilter> {
    let Some(given) = given.filter(|given| !given.is_empty()) else { return Ok(EnvFilter::new(default)) };
    let given = given.to_string_lossy();
    EnvFilter::try_new(&given).map_err(|error| {
        let given = printable(&given);
        Exit::Usage.error(format!("RDMC_LOG is {given}: {error}; give for example info, or rdmc=debug"))
    })
}

/// Logs to the screen. If that fails, the program goes on.
fn log(filter: EnvFilter, screen: Screen) {
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || screen.clone())
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .init();
}

fn main() -> ExitCode {
    let cli = Cli::read();
    // Messages of simulated nodes are off by default.
    let default = if matches!(cli.command, Command::Sim(_)) { "off" } else { LOG_DEFAULT };
    let screen = Screen::new();
    match log_filter(std::env::var_os("RDMC_LOG"), default) {
        Ok(filter) => log(filter, screen.clone()),
        Err(error) => return exit::report(Err(error)),
    }
    exit::report(match cli.command {
        Command::Send(options) => {
            tell_outcome(options.output, run(Threads::Many, |stop| send::run(options, screen, stop)))
        }
        Command::Recv(options) => {
            tell_outcome(options.output, run(Threads::Many, |stop| recv::run(options, screen, stop)))
        }
        Command::Serve(options) => tell_outcome(options.output(), run(Threads::Many, |stop| serve::run(options, stop))),
        Command::Get(options) => {
            tell_outcome(options.output(), run(Threads::Many, |stop| get::get(options, screen, stop)))
        }
        Command::Put(options) => {
            tell_outcome(options.output(), run(Threads::Many, |stop| get::put(options, screen, stop)))
        }
        Command::Gateway(options) => {
            tell_outcome(options.output, run(Threads::Many, |stop| gateway::run(options, stop)))
        }
        Command::Demo(options) => {
            let threads = if options.fabric == DemoFabric::Mem { Threads::Many } else { Threads::One };
            tell_outcome(options.output, run(threads, |stop| unless_stopped(stop, demo::run(options, screen))))
        }
        Command::Bench(options) => {
            let output = options.output();
            tell_outcome(output, run(Threads::One, |stop| unless_stopped(stop, bench::run(options, screen))))
        }
        Command::BenchNode { role } => bench_process(&role),
        Command::DemoMember(options) => run(Threads::One, |stop| unless_stopped(stop, demo::member::run(options))),
        Command::Schedule(options) => schedule::run(&options),
        Command::Doctor(options) => run(Threads::One, |stop| unless_stopped(stop, doctor::run(options))),
        Command::Sim(options) => sim::run(&options, screen),
        Command::Keygen { file } => security::keygen(&file),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::man(dir.as_deref()),
    })
}

/// Runs a process of the benchmark.
fn bench_process(arguments: &[String]) -> anyhow::Result<()> {
    match ProcessRole::from_arguments(arguments)? {
        ProcessRole::Member(role) => {
            run(Threads::One, |stop| unless_stopped(stop, async { Ok(rdmc_bench::run_member(role).await?) }))
        }
        ProcessRole::FlowSource { setup } => {
            run(Threads::One, |stop| unless_stopped(stop, async { Ok(rdmc_bench::run_flow_source(&setup).await?) }))
        }
        ProcessRole::FlowTarget { setup } => {
            run(Threads::One, |stop| unless_stopped(stop, async { Ok(rdmc_bench::run_flow_target(&setup).await?) }))
        }
        ProcessRole::Sink { bytes } => Ok(rdmc_bench::run_sink(bytes)?),
        ProcessRole::Guard { command } => Ok(rdmc_bench::run_guard(&command)?),
    }
}

/// Number of threads of a command.
enum Threads {
    /// One thread, for commands with more processes than cores. With 8 members on 2 cores it takes less processor time.
    One,
    /// One thread for each core, for commands that are one process.
    Many,
}

/// Runs a command until it ends. After the first signal it ends in good order and in bounded time. A second signal ends
/// it at once.
fn run<F>(threads: Threads, command: impl FnOnce(Stop) -> F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let mut builder = match threads {
        Threads::One => Builder::new_current_thread(),
        Threads::Many => Builder::new_multi_thread(),
    };
    let runtime = builder.enable_all().build()?;
    let outcome = runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut next = async || {
            tokio::select! {
                _ = interrupt.recv() => Signal::Interrupt,
                _ = terminate.recv() => Signal::Terminate,
            }
        };
        let (tell, stop) = Stop::new();
        let mut command = Box::pin(command(stop));
        let first = tokio::select! {
            outcome = &mut command => return outcome,
            signal = next() => signal,
        };
        tell.send_replace(Some(first));
        tokio::select! {
            outcome = &mut command => outcome,
            second = next() => Err(Exit::Signal(second).into()),
        }
    });
    runtime.shutdown_timeout(SHUTDOWN_LIMIT);
    outcome
}

/// Runs a command that a signal cancels.
async fn unless_stopped(stop: Stop, command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::select! {
        outcome = command => outcome,
        signal = stop.signalled() => Err(Exit::Signal(signal).into()),
    }
}

/// How long background work may take to end. The removal of temporary files does not wait longer.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Default filter of log messages. Commands report the failures of groups themselves.
const LOG_DEFAULT: &str = "warn,rdmc::group=off";
