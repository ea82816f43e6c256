//! Sources of messages that the root reads while it sends them.

use serde::{Deserialize, Serialize};

use super::GroupCase;

/// A source of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceCase {
    /// Bytes that it gives at once.
    pub piece: u32,
    /// Pause before each piece, in ns.
    pub pause_ns: u64,
    /// Whether and how it breaks before the message is whole.
    #[serde(default)]
    pub broken: Option<BrokenSource>,
}

/// How a source breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BrokenSource {
    /// It ends early.
    Ends {
        /// Bytes before that.
        after: u64,
    },
    /// It fails.
    Fails {
        /// Bytes before that.
        after: u64,
    },
}

/// The moment at which the source of a message breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::campaign) enum Break {
    /// Before the message has its place in the order: it is not sent.
    BeforeItsPlace,
    /// Later: the group fails when the message has begun.
    AfterItsPlace,
}

impl BrokenSource {
    /// Returns the bytes that it gives before it breaks.
    pub fn after(self) -> u64 {
        match self {
            Self::Ends { after } | Self::Fails { after } => after,
        }
    }
}

impl GroupCase {
    /// Returns the bytes of a message that the root reads from its source before the message has its place.
    pub(in crate::campaign) fn read_first(&self, message: usize) -> u64 {
        let (size, block) = (self.messages[message].size, u64::from(self.block_size));
        let is_whole_first = self.delta || self.has_headers() || self.members.len() == 1;
        if is_whole_first { size } else { size.min(block) }
    }

    /// Returns when the source of a message breaks, if it does.
    pub(in crate::campaign) fn break_of(&self, message: usize) -> Option<Break> {
        let broken = self.messages[message].source?.broken?;
        let is_early = broken.after() < self.read_first(message);
        let breaks = broken.after() < self.messages[message].size;
        breaks.then_some(if is_early { Break::BeforeItsPlace } else { Break::AfterItsPlace })
    }

    /// Returns whether the source of a message breaks after the message has its place, which ends the group.
    pub(in crate::campaign) fn has_broken_source(&self) -> bool {
        (0..self.messages.len()).any(|message| self.break_of(message) == Some(Break::AfterItsPlace))
    }
}
