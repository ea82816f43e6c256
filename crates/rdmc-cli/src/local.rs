//! What commands share that run several processes of this program on one host: their start, clocks and memory.

use std::io::Read;
use std::process::Stdio;

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::exit::Exit;
use crate::size::Bytes;

/// Starts this program once more, with its standard input and output in our hands; it is killed when it is dropped.
///
/// What is started has to end when its standard input ends, so that nobody is left behind when this process is killed.
pub(crate) fn start_child(
    arguments: impl IntoIterator<Item = String>,
) -> anyhow::Result<(Child, Lines<BufReader<ChildStdout>>)> {
    start(Command::from(this_program()?).args(arguments).kill_on_drop(true))
}

/// Starts this program once more; dropped, it has to find out that its standard input ends.
pub(crate) fn start_guard(
    arguments: impl IntoIterator<Item = String>,
) -> anyhow::Result<(Child, Lines<BufReader<ChildStdout>>)> {
    start(Command::from(this_program()?).args(arguments))
}

/// Returns a command that is this program.
pub(crate) fn this_program() -> anyhow::Result<std::process::Command> {
    Ok(std::process::Command::new(std::env::current_exe().context("the program does not know where it is")?))
}

fn start(command: &mut Command) -> anyhow::Result<(Child, Lines<BufReader<ChildStdout>>)> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("a process cannot be started")?;
    let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    Ok((child, lines))
}

/// Ends this process when its standard input ends, which whoever has started it holds.
pub(crate) fn end_with_stdin() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// Refuses what would not fit into the memory of this host.
pub(crate) fn check_memory(needed: u64) -> anyhow::Result<()> {
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    });
    match available {
        Some(available) if needed > available => {
            let (needed, available) = (Bytes(needed), Bytes(available));
            let what = format!("{needed} are needed for all members, {available} are available: choose fewer or less");
            Err(Exit::Usage.error(what))
        }
        _ => Ok(()),
    }
}

/// Returns the host's monotonic clock: the same for all its processes.
pub(crate) fn monotonic_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// Returns the processor time, user and system, that this process has used.
pub(crate) fn cpu_ns() -> u64 {
    clock_ns(ClockId::ProcessCPUTime)
}

/// Returns nanoseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "a duration to be displayed")]
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Returns the number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(now.tv_nsec))
}
