//! The errors of benchmarks: the type that callers see, and the kinds inside this crate.

use std::fmt;

use rdmc_files::TransferError;

/// Error of a benchmark. The variant tells who must act.
///
/// The texts are complete, causes included; an error has no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The caller must change the request: options contradict each other, or require what this host does not have.
    #[error("{message}")]
    #[non_exhaustive]
    Request {
        /// What is wrong, and what to request instead.
        message: String,
    },
    /// Wrong content arrived.
    #[error("{message}")]
    #[non_exhaustive]
    Integrity {
        /// Which member received what.
        message: String,
    },
    /// A process failed, or this host has a problem.
    #[error("{message}")]
    #[non_exhaustive]
    Failed {
        /// What went wrong.
        message: String,
    },
}

impl From<anyhow::Error> for BenchError {
    fn from(error: anyhow::Error) -> Self {
        let message = format!("{error:#}");
        match error.downcast_ref() {
            Some(Kind::Request) => Self::Request { message },
            Some(Kind::Integrity) => Self::Integrity { message },
            None => Self::Failed { message },
        }
    }
}

/// Kind of an error, attached to it as its context. An error without one is [`BenchError::Failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Request,
    Integrity,
}

impl Kind {
    /// Makes an error of this kind.
    pub(crate) fn error(self, message: impl fmt::Display) -> anyhow::Error {
        anyhow::anyhow!("{message}").context(self)
    }

    /// Returns the kind of an error.
    #[cfg(test)]
    pub(crate) fn of(error: &anyhow::Error) -> Option<Self> {
        error.downcast_ref().copied()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Request => "usage",
            Kind::Integrity => "integrity error",
        })
    }
}

impl std::error::Error for Kind {}

/// Converts an error of a fabric.
pub(crate) fn taken_over(error: TransferError) -> anyhow::Error {
    match error {
        TransferError::Request { .. } => Kind::Request.error(error),
        other => other.into(),
    }
}
