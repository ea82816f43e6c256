//! The end of the program, and its exit codes.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use rdmc_bench::BenchError;
use rdmc_files::{FailedPeer, TransferError};
use tokio::sync::watch;

/// Kind of a failure, attached to an error as its context. It decides the exit code.
///
/// Errors of the libraries know their own codes. Others without a kind are local failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The arguments are wrong.
    Usage,
    /// The transfer began, but not every receiver has everything.
    Partial,
    /// Bytes that arrived or were read differ from the announced ones.
    Integrity,
    /// A signal ended the program.
    Signal(Signal),
}

/// Signals that end the program in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Interrupt,
    Terminate,
}

/// Tells a command that a signal has come.
#[derive(Clone, Debug)]
pub(crate) struct Stop(watch::Receiver<Option<Signal>>);

impl Stop {
    /// Makes one, and its sending end.
    pub(crate) fn new() -> (watch::Sender<Option<Signal>>, Self) {
        let (told, stop) = watch::channel(None);
        (told, Self(stop))
    }

    /// Waits for a signal.
    pub(crate) async fn signalled(&self) -> Signal {
        let mut told = self.0.clone();
        let signal = told.wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match signal {
            Some(signal) => signal,
            // No signal can come any more.
            None => std::future::pending().await,
        }
    }
}

impl Exit {
    /// Returns the exit code of an error.
    pub(crate) fn code_of(error: &anyhow::Error) -> u8 {
        if let Some(exit) = error.downcast_ref::<Exit>() {
            return exit.code();
        }
        if let Some(error) = error.downcast_ref::<TransferError>() {
            return error.code();
        }
        match error.downcast_ref() {
            Some(BenchError::Request { .. }) => Exit::Usage.code(),
            Some(BenchError::Integrity { .. }) => Exit::Integrity.code(),
            _ => LOCAL,
        }
    }

    fn code(self) -> u8 {
        match self {
            Exit::Usage => 2,
            Exit::Partial => 3,
            Exit::Integrity => 5,
            Exit::Signal(Signal::Interrupt) => 130,
            Exit::Signal(Signal::Terminate) => 143,
        }
    }

    /// Makes an error of this kind.
    pub(crate) fn error(self, message: impl fmt::Display) -> anyhow::Error {
        anyhow::anyhow!("{message}").context(self)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exit::Usage => "usage",
            Exit::Partial => "partial delivery",
            Exit::Integrity => "integrity error",
            Exit::Signal(Signal::Interrupt) => "interrupted",
            Exit::Signal(Signal::Terminate) => "terminated",
        })
    }
}

impl std::error::Error for Exit {}

/// Takes over an error of a transfer. A wrong request is a usage error of this program.
pub(crate) fn of_transfer(error: TransferError) -> anyhow::Error {
    match error {
        TransferError::Request { .. } => Exit::Usage.error(error),
        other => other.into(),
    }
}

/// Returns the peers that an error names.
pub(crate) fn failed_peers(error: &anyhow::Error) -> &[FailedPeer] {
    error.downcast_ref().map_or(&[], TransferError::failed)
}

/// Prints a text for people to stderr. If that fails, the program goes on.
pub(crate) fn tell(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints the error, and returns the exit code.
pub(crate) fn report(outcome: Result<(), anyhow::Error>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            tell(format_args!("rdmc: {error:#}"));
            ExitCode::from(Exit::code_of(&error))
        }
    }
}

/// Tells whether the reader of the output is gone, as `head` may be.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Code of failures of no other kind.
const LOCAL: u8 = 1;

/// The part of the help behind the examples: exit codes, and where log messages go.
macro_rules! help {
    ($codes:literal) => {
        concat!(
            "Exit codes:\n",
            $codes,
            "  130  interrupted (SIGINT); 143: terminated (SIGTERM)\n\n",
            "Logging: RDMC_LOG=info (or debug, rdmc=trace, …) writes log messages to stderr;\n",
            "the default is warn."
        )
    };
}

/// Exit codes in the help of commands between two hosts.
pub(crate) const HELP_OF_TWO: &str = help!(
    "  0    done: the other end has everything, or everything is here
  1    local failure: a file, the disk, the network interface, a defect
  2    wrong arguments
  3    partial: the transfer began, but some files were left out, or the other
       end was lost
  4    the other end refused or could not be reached
  5    integrity error: bytes arrived that differ from those that were sent
"
);

/// Exit codes in the help and the manual.
pub(crate) const HELP: &str = help!(
    "  0    done: every receiver has everything, and every digest is right;
       for recv: every receiver that remains
  1    local failure: a file, the disk, the network interface, a defect
  2    wrong arguments, or a required RDMA device that cannot be used
  3    partial delivery: the transfer began, but not every receiver has
       everything
  4    a receiver refused or could not be reached; nothing was sent
  5    integrity error: bytes differ from the announced ones, or a file changed
       while it was sent
"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_a_kind_is_a_local_failure() {
        assert_eq!(Exit::code_of(&anyhow::anyhow!("disk")), 1);
    }

    #[test]
    fn the_kind_survives_further_context() {
        let error = Exit::Partial.error("10.0.0.2:7471 was lost").context("sending");
        assert_eq!(Exit::code_of(&error), 3);
        assert_eq!(format!("{error:#}"), "sending: partial delivery: 10.0.0.2:7471 was lost");
    }
}
