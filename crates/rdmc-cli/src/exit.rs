//! How the program ends: the exit codes that scripts rely on.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use rdmc_bench::BenchError;
use rdmc_files::{FailedPeer, TransferError};
use tokio::sync::watch;

/// The kind of failure, which decides the exit code; attached to errors as their context.
///
/// Errors without one are local failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The arguments make no sense.
    Usage,
    /// The transfer began, but not every receiver has everything.
    Partial,
    /// The bytes that arrived, or that were read, are not those that were announced; a file changed while it was sent.
    Integrity,
    /// A signal ended the program.
    Signal(Signal),
}

/// The signals that end the program in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Interrupt,
    Terminate,
}

/// Tells the parts of a command that the program is to end.
#[derive(Clone, Debug)]
pub(crate) struct Stop(watch::Receiver<Option<Signal>>);

impl Stop {
    /// Makes one, and what tells it.
    pub(crate) fn new() -> (watch::Sender<Option<Signal>>, Self) {
        let (told, stop) = watch::channel(None);
        (told, Self(stop))
    }

    /// Waits until a signal has come.
    pub(crate) async fn signalled(&self) -> Signal {
        let mut told = self.0.clone();
        let signal = told.wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match signal {
            Some(signal) => signal,
            // Nobody is there to tell it any more.
            None => std::future::pending().await,
        }
    }
}

impl Exit {
    /// Returns the code of an error: that of its kind, 1 if it has none.
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

/// Takes over an error of a transfer: a request that makes no sense is a usage error of this program.
pub(crate) fn of_transfer(error: TransferError) -> anyhow::Error {
    match error {
        TransferError::Request { .. } => Exit::Usage.error(error),
        other => other.into(),
    }
}

/// Returns whose error it is, if that is known.
pub(crate) fn failed_peers(error: &anyhow::Error) -> &[FailedPeer] {
    error.downcast_ref().map_or(&[], TransferError::failed)
}

/// Tells people something on the standard error. Where nobody can hear it the work goes on.
pub(crate) fn tell(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Turns the outcome into the code the shell sees.
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

/// Tells whether the reader of the output has gone, as `head` does.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The code of failures that are of no other kind.
const LOCAL: u8 = 1;

/// What the help and the manual say about the codes.
pub(crate) const HELP: &str = "\
Exit codes:
  0    done: every receiver (at a receiver: that is left) has everything, and every digest is right
  1    local failure: a file, the disk, the network interface, a defect
  2    the arguments make no sense, or ask for an RDMA device that cannot be used
  3    partial delivery: the transfer began, but not every receiver has everything
  4    a receiver refused or could not be reached; nothing was sent
  5    integrity error: the bytes are not those that were announced, or a file changed while it was sent
  130  interrupted (SIGINT); 143: terminated (SIGTERM)

Logging: RDMC_LOG=info (or debug, rdmc=trace, …) writes what happens to stderr; the default is warn.";

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
