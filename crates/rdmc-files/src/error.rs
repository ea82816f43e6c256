//! The errors of transfers: the type that callers see, and the type that travels inside this crate.

use std::fmt;
use std::io;

use rdmc::{GroupFailure, NodeId};
use rdmc_wan::SessionError;
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::blame::{FailedPeer, PeerFailure, explain, stopped_before, stopped_for};
use crate::descriptors;

/// Error of a transfer. The variant tells who must act.
///
/// The texts are complete, causes included; an error has no source. As JSON it has the fields `code`, `message` and
/// `failed` of the event `failed`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The caller must change the request: an address is malformed, or a required device cannot be used.
    #[error("{message}")]
    #[non_exhaustive]
    Request {
        /// What is wrong with the request.
        message: String,
    },
    /// Something must be changed at this host: a file cannot be read, a disk is full, or an address is in use.
    #[error("{message}")]
    #[non_exhaustive]
    Local {
        /// What went wrong.
        message: String,
    },
    /// A peer refused or could not be reached. Nothing was sent.
    #[error("nothing was sent: {message}")]
    #[non_exhaustive]
    Refused {
        /// What happened, and to whom.
        message: String,
        /// The peers that refused or failed; empty if they are not known.
        failed: Vec<FailedPeer>,
    },
    /// Peers failed during the transfer, so that not every receiver has everything.
    #[error("partial delivery: {message}")]
    #[non_exhaustive]
    Partial {
        /// What happened, to whom, and what the others have.
        message: String,
        /// The peers that failed; empty if they are not known.
        failed: Vec<FailedPeer>,
    },
    /// Bytes differ from those that were announced. They were changed on the way, or a file was changed while it was
    /// sent.
    #[error("integrity error: {message}")]
    #[non_exhaustive]
    Integrity {
        /// What happened to which file.
        message: String,
        /// The peers that failed because of it; empty if they are not known.
        failed: Vec<FailedPeer>,
    },
    /// The caller has stopped the transfer.
    #[error("stopped")]
    Stopped,
}

impl TransferError {
    /// Returns the peers that failed; empty if none failed or they are not known.
    pub fn failed(&self) -> &[FailedPeer] {
        match self {
            Self::Refused { failed, .. } | Self::Partial { failed, .. } | Self::Integrity { failed, .. } => failed,
            Self::Request { .. } | Self::Local { .. } | Self::Stopped => &[],
        }
    }

    /// Makes the error of a program that cannot listen at `address`. It has the remedy, and calls the program by its
    /// kind: `server`, `gateway`.
    pub fn cannot_listen(address: &str, error: &io::Error, program: &str) -> Self {
        cannot_listen(address, error, program).into()
    }

    /// Returns the exit code with which the program `rdmc` reports the variant.
    ///
    /// It is 1 for [`Local`](Self::Local), 2 for [`Request`](Self::Request), 3 for [`Partial`](Self::Partial), 4 for
    /// [`Refused`](Self::Refused), 5 for [`Integrity`](Self::Integrity) and 130 for [`Stopped`](Self::Stopped).
    pub fn code(&self) -> u8 {
        match self {
            Self::Local { .. } => 1,
            Self::Request { .. } => 2,
            Self::Partial { .. } => 3,
            Self::Refused { .. } => 4,
            Self::Integrity { .. } => 5,
            Self::Stopped => 130,
        }
    }
}

impl Serialize for TransferError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("TransferError", 3)?;
        fields.serialize_field("code", &self.code())?;
        fields.serialize_field("message", &self.to_string())?;
        fields.serialize_field("failed", self.failed())?;
        fields.end()
    }
}

/// An error inside this crate. Every other error converts into one of [`Kind::Local`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    message: String,
    failed: Vec<FailedPeer>,
}

/// The variants of [`TransferError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Request,
    Local,
    Refused,
    /// As [`Refused`](Self::Refused), because another transfer is under way. The message begins with
    /// [`BUSY`](crate::blame::BUSY).
    Busy,
    Partial,
    Integrity,
    Stopped,
}

impl Kind {
    /// Makes a problem of this kind.
    pub(crate) fn problem(self, message: impl fmt::Display) -> Problem {
        self.blaming(message, Vec::new())
    }

    /// Makes a problem of this kind that these peers have caused.
    pub(crate) fn blaming(self, message: impl fmt::Display, failed: Vec<FailedPeer>) -> Problem {
        Problem { kind: self, message: message.to_string(), failed }
    }
}

impl Problem {
    /// Makes a local problem.
    pub(crate) fn local(message: impl fmt::Display) -> Self {
        Kind::Local.problem(message)
    }

    /// Puts a text before the message.
    pub(crate) fn context(self, text: impl fmt::Display) -> Self {
        Self { message: format!("{text}: {}", self.message), ..self }
    }

    /// Puts a text behind the message.
    pub(crate) fn followed_by(self, text: impl fmt::Display) -> Self {
        Self { message: format!("{}; {text}", self.message), ..self }
    }

    /// Changes the kind.
    pub(crate) fn of_kind(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// Tells whether the same transfer may succeed soon: nothing was sent, for reasons that pass.
    pub(crate) fn may_pass(&self) -> bool {
        let passes = |peer: &FailedPeer| peer.cause().may_pass();
        self.kind == Kind::Refused && !self.failed.is_empty() && self.failed.iter().all(passes)
    }

    /// Returns the peers that have caused it.
    pub(crate) fn failed(&self) -> &[FailedPeer] {
        &self.failed
    }

    /// Returns the message without the kind.
    pub(crate) fn reason_alone(&self) -> &str {
        &self.message
    }

    /// Makes the problem of a group that has failed, because of these peers, before anything was sent.
    pub(crate) fn not_sent(failure: &GroupFailure, failed: Vec<FailedPeer>) -> Self {
        match stopped_before(failure) {
            Some(stopped) => Kind::Refused.problem(stopped_for(stopped)),
            None => Kind::Refused.blaming(explain(&failed), failed),
        }
    }

    /// Makes a refusal a local problem if this process has reached its limit of open files, and a partial delivery if
    /// this process has failed and its limit is low. Says so of other partial deliveries, too. It is called at node
    /// `me` while the connections to the members are open.
    pub(crate) fn blamed_on_limit(self, me: NodeId, members: usize) -> Self {
        // A connection that could not be accepted here is broken for the peer.
        let broke = |peer: &FailedPeer| {
            use PeerFailure::{ConnectionLost, DataConnection, Unreachable};
            matches!(peer.cause(), ConnectionLost | DataConnection | Unreachable)
        };
        let lacks = |peer: &FailedPeer| peer.cause() == PeerFailure::Resources || broke(peer);
        let lacked = self.failed.iter().any(|peer| peer.node() == me.0 && lacks(peer));
        let may_be = descriptors::names_limit(&self.message) || self.failed.iter().any(broke);
        match self.kind {
            Kind::Refused if descriptors::is_reached(members, may_be) => self.of_own_limit(),
            Kind::Partial if lacked && descriptors::is_low(members) => self.of_own_limit(),
            // Connections were closed when the others went on.
            Kind::Partial if may_be && descriptors::is_low(members) => self.context(descriptors::reached()),
            _ => self,
        }
    }

    /// Makes the problem of a failed system call of this process a local one, if the call has failed because of the
    /// limit of open files.
    pub(crate) fn blamed_on_limit_of_call(self) -> Self {
        if descriptors::names_limit(&self.message) { self.of_own_limit() } else { self }
    }

    /// Makes a local problem of one that comes from the limit of open files of this process.
    pub(crate) fn of_own_limit(self) -> Self {
        let says_so = self.message.contains(descriptors::LIMIT_COMMAND);
        Self::local(if says_so { self.message } else { descriptors::reached() })
    }

    /// Returns the text that other members get if this problem makes a member refuse something. The kind is for this
    /// member alone, unless bytes are wrong.
    pub(crate) fn reason(&self) -> String {
        match self.kind {
            Kind::Integrity => format!("{INTEGRITY}: {}", self.message),
            _ => self.message.clone(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        TransferError::from(self.clone()).fmt(f)
    }
}

impl<E: std::error::Error + 'static> From<E> for Problem {
    fn from(error: E) -> Self {
        let error: &(dyn std::error::Error + 'static) = &error;
        // Of a session that has begun.
        let (kind, again) = match error.downcast_ref() {
            Some(SessionError::Lost { .. } | SessionError::NotResumed { .. }) => (Kind::Partial, true),
            Some(SessionError::Aborted { .. }) => (Kind::Partial, false),
            Some(SessionError::Corrupt { .. }) => (Kind::Integrity, false),
            _ => (Kind::Local, false),
        };
        let problem = kind.problem(descriptors::with_remedy(chain(error)));
        if again { problem.followed_by("run the same command again") } else { problem }
    }
}

impl From<Problem> for TransferError {
    fn from(Problem { kind, message, failed }: Problem) -> Self {
        match kind {
            Kind::Request => Self::Request { message },
            Kind::Local => Self::Local { message },
            Kind::Refused | Kind::Busy => Self::Refused { message, failed },
            Kind::Partial => Self::Partial { message, failed },
            Kind::Integrity => Self::Integrity { message, failed },
            Kind::Stopped => Self::Stopped,
        }
    }
}

/// Adds facts to an error.
pub(crate) trait Context<T> {
    /// Puts a text before the message.
    fn context(self, text: impl fmt::Display) -> Result<T, Problem>;
    /// Puts a text before the message. `text` runs only if there is an error.
    fn with_context<D: fmt::Display>(self, text: impl FnOnce() -> D) -> Result<T, Problem>;
    /// Changes the kind.
    fn of_kind(self, kind: Kind) -> Result<T, Problem>;
}

impl<T, E: Into<Problem>> Context<T> for Result<T, E> {
    fn context(self, text: impl fmt::Display) -> Result<T, Problem> {
        self.map_err(|error| error.into().context(text))
    }

    fn with_context<D: fmt::Display>(self, text: impl FnOnce() -> D) -> Result<T, Problem> {
        self.map_err(|error| error.into().context(text()))
    }

    fn of_kind(self, kind: Kind) -> Result<T, Problem> {
        self.map_err(|error| error.into().of_kind(kind))
    }
}

/// Makes the problem of an address that cannot be listened at, by a program of this kind.
pub(crate) fn cannot_listen(address: &str, error: &io::Error, program: &str) -> Problem {
    let in_use = format!("; another {program} may run here: choose another port");
    let (kind, remedy) = match error.kind() {
        io::ErrorKind::InvalidInput => (Kind::Request, "; write it as ADDRESS:PORT"),
        io::ErrorKind::AddrInUse => (Kind::Local, &*in_use),
        io::ErrorKind::AddrNotAvailable => (Kind::Local, "; it is not an address of this host"),
        _ => (Kind::Local, ""),
    };
    kind.problem(format!("cannot listen at {address}: {}{remedy}", chain(error)))
}

/// Returns the text of an error and its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// Beginning of a refusal because of wrong bytes. The sender recognizes such refusals by it.
pub(crate) const INTEGRITY: &str = "integrity error";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_survives_further_context() {
        let error = Kind::Partial.problem("10.0.0.2:7471 was lost").context("sending");
        assert_eq!(error.kind, Kind::Partial);
        let error = TransferError::from(error);
        assert_eq!(
            (error.code(), error.to_string().as_str()),
            (3, "partial delivery: sending: 10.0.0.2:7471 was lost")
        );
    }

    #[test]
    fn any_error_is_local_and_tells_its_causes() {
        let error = u8::try_from(300_u32).unwrap_err();
        let text = error.to_string();
        let problem = Err::<(), _>(error).context("the length").unwrap_err();
        assert_eq!(TransferError::from(problem), TransferError::Local { message: format!("the length: {text}") });
    }

    #[test]
    fn the_limit_of_this_process_is_not_blamed_on_peers() {
        let failed = Problem::from(io::Error::from_raw_os_error(24)).of_kind(Kind::Refused);
        let told = "Too many open files (os error 24); raise this process's limit of ";
        assert!(failed.reason_alone().contains(told), "{failed}");
        assert_eq!(failed.blamed_on_limit_of_call().kind, Kind::Local);
        // Of a peer, while this process may open many more.
        let of_peer = Kind::Refused.problem("host:7471 could not be reached: Too many open files (os error 24)");
        assert_eq!(of_peer.clone().blamed_on_limit(NodeId(0), 3), of_peer);
        let other = Kind::Partial.problem("host:7471 was lost");
        assert_eq!(other.clone().blamed_on_limit(NodeId(0), 3).blamed_on_limit_of_call(), other);
    }

    #[test]
    fn others_are_told_the_kind_of_wrong_bytes_alone() {
        assert_eq!(Kind::Partial.problem("lost").reason(), "lost");
        assert_eq!(Kind::Integrity.problem("wrong").reason(), "integrity error: wrong");
    }
}
