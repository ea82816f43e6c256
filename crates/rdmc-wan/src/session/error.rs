//! Errors of sessions.

use std::io;
use std::time::Duration;

use rdmc_fabric::{Elapsed, FabricError};

use super::state::Violation;

/// A session could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The other end could not be reached: check the address, and that it listens.
    #[error("cannot reach {address}")]
    Unreachable {
        /// Where it should listen.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The other end refused the session; the reason says who must act.
    #[error("{address} refuses the session: {reason}")]
    Refused {
        /// Where it listens.
        address: String,
        /// What it says.
        reason: String,
    },
    /// The other end did not answer, or the connection ended.
    #[error("the session could not be agreed on with {address}")]
    Handshake {
        /// Where the other end listens, or from where it connects.
        address: String,
        /// What went wrong.
        source: io::Error,
    },
    /// The own fabric refused resources.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The settings cannot be used.
    #[error("{0}")]
    Invalid(&'static str),
}

/// A session has failed. Both directions have ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The connection was lost, and no other one was made in time.
    #[error("the connection was lost and could not be resumed within {within:?}: {cause}")]
    Lost {
        /// How long it was tried.
        within: Duration,
        /// How the connection was lost, or why it was not resumed.
        cause: String,
    },
    /// The data channel could not be made when the session began.
    #[error("the data channel could not be connected: {reason}")]
    Channel {
        /// What went wrong.
        reason: String,
    },
    /// The connection was lost, and the other end does not go on.
    #[error("the connection was lost, and the other end does not go on: {reason}")]
    NotResumed {
        /// What it says.
        reason: String,
    },
    /// The other end has failed or was dropped before the end of its data.
    #[error("the other end ended the session: {reason}")]
    Aborted {
        /// What it says.
        reason: String,
    },
    /// The other end's application takes no more slabs.
    #[error("the other end takes no more data")]
    Stopped,
    /// The other end broke the protocol.
    #[error("the other end broke the protocol: {what}")]
    Protocol {
        /// What it did.
        what: String,
    },
    /// A slab differs from what was sent, each time it was fetched: memory or a network of this path changes bits.
    #[error("slab {number} arrives with other bytes than were sent, {attempts} times")]
    Corrupt {
        /// The slab's number.
        number: u64,
        /// How often it was fetched.
        attempts: u32,
    },
    /// The own fabric refused memory.
    #[error("{reason}")]
    Fabric {
        /// What it says.
        reason: String,
    },
    /// This end was dropped or has ended the session.
    #[error("this end has ended the session")]
    Closed,
}

impl From<Violation> for SessionError {
    fn from(Violation(what): Violation) -> Self {
        Self::Protocol { what: what.to_owned() }
    }
}

impl From<FabricError> for SessionError {
    fn from(error: FabricError) -> Self {
        Self::Fabric { reason: error.to_string() }
    }
}

impl From<SessionError> for io::Error {
    fn from(error: SessionError) -> Self {
        let kind = match &error {
            SessionError::Lost { .. } | SessionError::NotResumed { .. } | SessionError::Channel { .. } => {
                io::ErrorKind::ConnectionReset
            }
            SessionError::Stopped | SessionError::Closed => io::ErrorKind::BrokenPipe,
            SessionError::Aborted { .. } => io::ErrorKind::ConnectionAborted,
            SessionError::Protocol { .. } | SessionError::Corrupt { .. } => io::ErrorKind::InvalidData,
            SessionError::Fabric { .. } => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

/// Says that an end was silent.
pub(crate) fn silent(elapsed: Elapsed) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, elapsed)
}
