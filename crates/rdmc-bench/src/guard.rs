//! A process that ends a command when the benchmark is gone.

use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process, setpgid};

use crate::error::BenchError;

/// Runs a command with its output in one stream. Ends it when standard input ends. Exits with its exit code.
///
/// # Errors
/// The command cannot be started.
pub fn run_guard(command: &[String]) -> Result<(), BenchError> {
    Ok(guard(command)?)
}

fn guard(command: &[String]) -> anyhow::Result<()> {
    let (program, arguments) = command.split_first().context("a command")?;
    // A signal of the terminal is for the benchmark. When the benchmark ends, this process ends.
    setpgid(None, None)?;
    let both = std::io::stdout().as_fd().try_clone_to_owned()?;
    let mut child = Command::new(program);
    let child = child.args(arguments).stdin(Stdio::null()).stderr(Stdio::from(both));
    let mut child = child.spawn().with_context(|| program.clone())?;
    let pid = Pid::from_child(&child);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        // Fails only if the command has ended, which ends this process.
        let _ = kill_process(pid, Signal::TERM);
        std::thread::sleep(TERM_LIMIT);
        let _ = kill_process(pid, Signal::KILL);
        std::process::exit(1);
    });
    // The reader of the output knows what a failure means.
    let code = child.wait()?.code();
    std::process::exit(code.unwrap_or(1))
}

/// How long the command may take to end its own processes.
const TERM_LIMIT: Duration = Duration::from_secs(5);
