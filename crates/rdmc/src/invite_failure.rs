//! Why listeners do not take part in a cluster to which they were invited.

use std::io;

use rdmc_fabric::Elapsed;

use crate::detection::DetectionError;
use crate::security::Distrust;
use crate::wire::{OtherVersion, PROTOCOL_VERSION};

/// Some of the invited listeners cannot take part.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} of the invited cannot take part: {}",
    failures.len(),
    failures.iter().map(|(address, failure)| format!("{address} {failure}")).collect::<Vec<_>>().join("; ")
)]
pub struct InviteError {
    /// The addresses of these listeners, and why they cannot take part.
    pub failures: Vec<(String, InviteFailure)>,
}

/// A listener did not accept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InviteFailure {
    /// It could not be reached.
    #[error("could not be reached: {0}")]
    Unreachable(io::Error),
    /// It closed the connection before it answered: it has ended, or had no room for the connection. It may answer if
    /// it is invited again.
    #[error("closed the connection before it answered")]
    Closed(#[source] io::Error),
    /// It is busy: its application [says so](crate::Invitation::busy), or too many invitations wait. It may accept if
    /// it is invited again.
    #[error("is busy")]
    Busy,
    /// The process at this address speaks another protocol.
    #[error("does not speak rdmc: {0}")]
    Stranger(io::Error),
    /// It speaks another version of the protocol: both ends need the same.
    #[error("speaks version {theirs} of the protocol, this node speaks version {ours}")]
    OtherVersion {
        /// Its version.
        theirs: u16,
        /// The inviting node's version.
        ours: u16,
    },
    /// The detection time of the invitation is out of bounds; the listener was not invited.
    #[error("was not invited: {0}")]
    Detection(DetectionError),
    /// It refused.
    #[error("refused: {reason}")]
    Refused {
        /// Its reason.
        reason: String,
    },
    /// It has none of the inviting node's fabrics.
    #[error("refused: it offers {}, not {}", offers.join(", "), asked.join(", "))]
    OtherFabrics {
        /// The fabrics that it has; for one that the inviting node has as well, with the reason why it does not reach.
        offers: Vec<String>,
        /// The inviting node's fabrics.
        asked: Vec<String>,
    },
    /// It shares a fabric with the inviting node, but not all nodes share one.
    #[error("offers {}, not {}, and no fabric is offered by all", offers.join(", "), lacks.join(", "))]
    NotForAll {
        /// The inviting node's fabrics that it has.
        offers: Vec<String>,
        /// The inviting node's fabrics that it lacks.
        lacks: Vec<String>,
    },
    /// It did not answer in time.
    #[error("did not answer: {0}")]
    Silent(Elapsed),
    /// It is not trusted, or does not trust this node.
    #[error("is not trusted: {0}")]
    Insecure(Distrust),
}

impl InviteFailure {
    pub(crate) fn of(error: io::Error) -> Self {
        let error = match error.downcast() {
            Ok(distrust) => return Self::Insecure(distrust),
            Err(error) => error,
        };
        let error = match error.downcast() {
            Ok(OtherVersion { theirs }) => return Self::OtherVersion { theirs, ours: PROTOCOL_VERSION },
            Err(error) => error,
        };
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Stranger(error),
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            // The connection ended while it was opened.
            | io::ErrorKind::NotConnected => Self::Closed(error),
            _ => Self::Unreachable(error),
        }
    }
}
