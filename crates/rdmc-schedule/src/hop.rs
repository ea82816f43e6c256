//! The words of a schedule: ranks, blocks, steps, and the hop made of them.

use std::fmt;

/// A member's place in its group, counted from 0; rank 0 is the root, the only sender of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Rank(pub u32);

impl Rank {
    /// The member from which every message comes.
    pub const ROOT: Rank = Rank(0);

    /// Tells whether this is the root.
    #[must_use]
    pub const fn is_root(self) -> bool {
        self.0 == Self::ROOT.0
    }

    /// Returns the rank as an index into a list of members.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A block's place in its message, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIndex(pub u32);

impl BlockIndex {
    /// Returns the place as an index into a list of blocks.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A number of blocks, at most 2³² − 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockCount(pub u32);

impl BlockCount {
    /// Returns the bare number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// One slot of a schedule, counted from 0.
///
/// A step is an order, not a time: members agree on what step 7 means without a common clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step(pub u64);

/// One block crossing one edge, seen from the member that asked.
///
/// The member itself is not part of the value: it is the one whose [`Sends`](crate::Sends) or
/// [`Receives`](crate::Receives) this came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hop {
    /// The slot of the schedule in which the block moves.
    pub step: Step,
    /// The member at the other end, which takes or sends the block.
    pub peer: Rank,
    /// Which block of the message moves.
    pub block: BlockIndex,
}

macro_rules! display_as_number {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    )*};
}

display_as_number!(Rank, BlockIndex, BlockCount, Step);
