//! Why members fail.

use std::fmt;
use std::time::Duration;

use rdmc_schedule::Rank;
use serde::{Deserialize, Serialize};

use crate::id::NodeId;

/// A member that failed: it is gone or could not go on. It is not the member that noticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedMember {
    /// Its rank.
    pub member: Rank,
    /// Its node.
    pub node: NodeId,
    /// Why it failed.
    pub cause: FailureCause,
}

impl fmt::Display for FailedMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {} (node {}) {}", self.member, self.node, self.cause)
    }
}

/// Why a [`FailedMember`] failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FailureCause {
    /// Its connection was lost: it died, was cut off or ended without closing the group.
    #[error("was lost: its connection broke")]
    ConnectionLost,
    /// It gave no sign of life for as long as [`detection`](crate::NodeBuilder::detection) allows: it hangs, is stopped
    /// or cut off.
    #[error("was not heard of for {} ms", silence.as_millis())]
    Unresponsive {
        /// How long it was silent.
        silence: Duration,
    },
    /// It could not exchange blocks with another member, although both can be reached; or its node did not start,
    /// because it did not reach the other.
    #[error("could not exchange blocks with another member: {what}")]
    DataConnection {
        /// The fabric's error.
        what: String,
    },
    /// It dropped its handle of the group before the group was closed.
    #[error("left the group without closing it")]
    Abandoned,
    /// Its application refused a message.
    #[error("refused a message: {reason}")]
    Refused {
        /// The application's reason.
        reason: String,
    },
    /// It held the others up for longer than the group [allows](crate::SlowReceivers::Evict).
    #[error("held the others up for {} ms", held_up.as_millis())]
    TooSlow {
        /// How long it held them up.
        held_up: Duration,
    },
    /// It did not take part in forming the group in time.
    #[error("did not join in time")]
    NotJoined,
    /// It formed the group with other members, another algorithm or another block size, or does not check blocks where
    /// others do.
    #[error("has another specification of the group")]
    SpecMismatch,
    /// It violated the protocol.
    #[error("broke the protocol: {what}")]
    Protocol {
        /// The violation.
        what: String,
    },
    /// It sent a corrupted block, and no member could supply the block whole.
    #[error("passed on block {block} of message {message} corrupted, and no member could supply it whole")]
    Corrupted {
        /// The message's place in the group's order, from 0.
        message: u64,
        /// The block's place in the message, from 0.
        block: u32,
    },
    /// It has other messages than the root: the digests differ.
    #[error("has other messages than the root, by their digests")]
    Diverged,
    /// It could not get memory or other resources for its part.
    #[error("ran out of resources: {what}")]
    Resources {
        /// The resource that was missing.
        what: String,
    },
    /// Its process was started again. The new one has nothing of the group, and is not in it.
    #[error("was started again, and is not in the group any more")]
    Restarted,
    /// It was the root, and could not read a message from its [source](crate::Sender::send_from).
    #[error("could not read message {message} from its source: {what}")]
    Unreadable {
        /// The message's place in the group's order, from 0.
        message: u64,
        /// The source's error.
        what: String,
    },
    /// Another member was never connected to it while the nodes [joined](crate::Joining), or the other way round: until
    /// the time to connect was over, or one of them had accepted the invitation and ended since.
    #[error("could not be reached by a member: {what}")]
    Unreachable {
        /// The last problem with the connection.
        what: String,
    },
}

impl FailureCause {
    /// Returns the cause's rank as evidence: of several causes the one with the lowest rank is named.
    pub(crate) fn evidence_rank(&self) -> u8 {
        match self {
            Self::Refused { .. }
            | Self::Abandoned
            | Self::Resources { .. }
            | Self::Diverged
            | Self::Unreadable { .. } => 0,
            Self::Protocol { .. } | Self::Corrupted { .. } => 1,
            Self::SpecMismatch => 2,
            Self::NotJoined | Self::TooSlow { .. } => 3,
            // A leader may count such a member out as unresponsive, too. This says more.
            Self::Unreachable { .. } => 4,
            Self::Unresponsive { .. } | Self::Restarted => 5,
            Self::ConnectionLost => 6,
            Self::DataConnection { .. } => 7,
        }
    }

    /// Returns the length of its text in bytes.
    pub(crate) fn text_len(&self) -> usize {
        match self {
            Self::Refused { reason: text }
            | Self::DataConnection { what: text }
            | Self::Protocol { what: text }
            | Self::Resources { what: text }
            | Self::Unreadable { what: text, .. }
            | Self::Unreachable { what: text } => text.len(),
            Self::ConnectionLost
            | Self::Unresponsive { .. }
            | Self::Abandoned
            | Self::NotJoined
            | Self::TooSlow { .. }
            | Self::SpecMismatch
            | Self::Corrupted { .. }
            | Self::Diverged
            | Self::Restarted => 0,
        }
    }

    /// Tells whether the cause is that the control connection was lost.
    pub(crate) fn is_connection_loss(&self) -> bool {
        matches!(self, Self::ConnectionLost | Self::Unreachable { .. } | Self::Unresponsive { .. } | Self::Restarted)
    }

    /// Tells whether the cause lies rather with the accused member than between it and the accuser.
    pub(crate) fn blames_the_accused(&self) -> bool {
        match self {
            Self::Protocol { .. }
            | Self::SpecMismatch
            | Self::NotJoined
            | Self::TooSlow { .. }
            | Self::Unresponsive { .. }
            | Self::Corrupted { .. }
            | Self::Restarted => true,
            Self::ConnectionLost
            | Self::Unreachable { .. }
            | Self::DataConnection { .. }
            | Self::Abandoned
            | Self::Refused { .. }
            | Self::Diverged
            | Self::Resources { .. }
            | Self::Unreadable { .. } => false,
        }
    }
}

/// Returns an error's text with those of its causes, to be passed on as text.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
