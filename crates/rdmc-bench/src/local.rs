//! Several processes of one program on one host: how they start, their clocks and memory.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::Context;
use rdmc_files::size::ByteSize;
use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::error::{BenchError, Kind};

/// A way to start this program again.
#[derive(Clone, Debug)]
pub struct Program {
    executable: PathBuf,
    arguments: Vec<String>,
}

impl Program {
    /// Finds this program. `arguments` come first on its command line, and tell it what to do.
    ///
    /// # Errors
    /// The system does not tell where the program is.
    pub fn this(arguments: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, BenchError> {
        let executable = std::env::current_exe().context("the program does not know where it is")?;
        Ok(Self { executable, arguments: arguments.into_iter().map(Into::into).collect() })
    }

    /// Starts the program with piped standard input and output. Dropping the child kills it.
    ///
    /// It must end when its standard input ends, so that it does not outlive this process.
    ///
    /// # Errors
    /// No process can be started.
    pub fn start(
        &self,
        arguments: impl IntoIterator<Item = String>,
    ) -> Result<(Child, Lines<BufReader<ChildStdout>>), BenchError> {
        Ok(start(Command::from(self.command()).args(arguments).kill_on_drop(true))?)
    }

    /// Starts the program with piped standard input and output. A dropped child must notice that its standard input
    /// ends.
    pub(crate) fn start_guard(
        &self,
        arguments: impl IntoIterator<Item = String>,
    ) -> anyhow::Result<(Child, Lines<BufReader<ChildStdout>>)> {
        start(Command::from(self.command()).args(arguments))
    }

    /// Returns a command that runs the program.
    pub(crate) fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(&self.executable);
        command.args(&self.arguments);
        command
    }
}

fn start(command: &mut Command) -> anyhow::Result<(Child, Lines<BufReader<ChildStdout>>)> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("a process cannot be started")?;
    let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    Ok((child, lines))
}

/// Ends this process when its standard input ends, whose other end the starting process holds.
pub fn end_with_stdin() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// Checks that this host has enough memory for all members.
///
/// # Errors
/// [`BenchError::Request`]: less memory is available.
pub fn check_memory(needed: u64) -> Result<(), BenchError> {
    Ok(require_members_memory(needed)?)
}

pub(crate) fn require_members_memory(needed: u64) -> anyhow::Result<()> {
    require_memory(needed, "all members", "choose fewer members or a smaller size")
}

/// Fails with `remedy` if the host has less than the `needed` memory for `what`.
pub(crate) fn require_memory(needed: u64, what: &str, remedy: &str) -> anyhow::Result<()> {
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    });
    match available {
        Some(available) if needed > available => {
            let (needed, available) = (ByteSize(needed), ByteSize(available));
            Err(Kind::Request.error(format!("{needed} are needed for {what}, {available} are available: {remedy}")))
        }
        _ => Ok(()),
    }
}

/// Returns the host's monotonic clock, which is the same for all its processes.
pub fn monotonic_ns() -> u64 {
    clock_ns(ClockId::Monotonic)
}

/// Returns the processor time of this process, user and system.
pub fn cpu_ns() -> u64 {
    clock_ns(ClockId::ProcessCPUTime)
}

/// Returns the processor time of this thread, user and system.
pub(crate) fn thread_cpu_ns() -> u64 {
    clock_ns(ClockId::ThreadCPUTime)
}

/// Returns nanoseconds as seconds.
#[expect(clippy::cast_precision_loss, reason = "a duration to be displayed")]
pub fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Returns the number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(now.tv_nsec))
}

/// Prints a line of JSON to standard output, for the process that has started this one.
pub(crate) fn tell(value: &impl serde::Serialize) {
    let line = serde_json::to_string(value).expect("what is told has string keys");
    let mut stdout = std::io::stdout().lock();
    // If nothing reads it, the starting process has ended, which ends this process too.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}
