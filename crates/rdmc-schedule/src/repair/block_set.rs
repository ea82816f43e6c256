//! A set of blocks of one message.

use std::fmt;
use std::ops::Range;

use super::bits::{Bits, WORD, ones};
use crate::hop::{BlockCount, BlockIndex};

/// A set of blocks of one message, such as the blocks that a member holds.
///
/// It knows how many blocks the message has, and takes one bit of memory for each of them. Two sets are equal when
/// their messages have the same number of blocks and they contain the same ones.
///
/// # Examples
/// ```
/// use rdmc_schedule::{BlockCount, BlockIndex, BlockSet};
///
/// let mut held = BlockSet::empty(BlockCount(5));
/// for block in [0, 1, 3] {
///     held.insert(BlockIndex(block));
/// }
/// assert_eq!(held.len(), BlockCount(3));
/// assert!(held.missing().eq([BlockIndex(2), BlockIndex(4)]));
/// assert_eq!(BlockSet::decode(BlockCount(5), &held.encode()), Ok(held));
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct BlockSet {
    blocks: u32,
    len: u32,
    bits: Bits,
}

impl BlockSet {
    /// Makes the empty set for a message of `blocks`.
    #[must_use]
    pub fn empty(blocks: BlockCount) -> BlockSet {
        BlockSet { blocks: blocks.get(), len: 0, bits: Bits::clear(blocks.get()) }
    }

    /// Makes the set of all blocks of a message of `blocks`.
    #[must_use]
    pub fn full(blocks: BlockCount) -> BlockSet {
        let mut full = BlockSet::empty(blocks);
        full.fill(0..blocks.get());
        full
    }

    /// Adds `block`; returns whether it was missing.
    ///
    /// # Panics
    /// If the message has no such block.
    pub fn insert(&mut self, block: BlockIndex) -> bool {
        let missing = !self.contains(block);
        self.bits.set(block.0);
        self.len += u32::from(missing);
        missing
    }

    /// Tells whether `block` is in the set.
    ///
    /// # Panics
    /// If the message has no such block.
    #[must_use]
    pub fn contains(&self, block: BlockIndex) -> bool {
        assert!(block.0 < self.blocks, "block {block} is none of a message of {}", self.blocks);
        self.bits.contains(block.0)
    }

    /// Returns the number of blocks of the message, in the set or not.
    #[must_use]
    pub fn blocks(&self) -> BlockCount {
        BlockCount(self.blocks)
    }

    /// Returns the number of blocks in the set.
    #[must_use]
    pub fn len(&self) -> BlockCount {
        BlockCount(self.len)
    }

    /// Tells whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tells whether every block of the message is in the set.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len == self.blocks
    }

    /// Lists the blocks in the set, ascending.
    pub fn held(&self) -> impl Iterator<Item = BlockIndex> + '_ {
        self.bits.ones().map(BlockIndex)
    }

    /// Lists the blocks of the message that are not in the set, ascending.
    pub fn missing(&self) -> impl Iterator<Item = BlockIndex> + '_ {
        let words = self.words().iter().zip((0..).step_by(64));
        let clear = words.flat_map(|(&word, start)| ones(!word).map(move |bit| BlockIndex(start + bit)));
        clear.take((self.blocks - self.len) as usize)
    }

    pub(super) fn holds(&self, block: u32) -> bool {
        self.bits.contains(block)
    }

    /// Adds a range of blocks, none of which is in the set.
    pub(super) fn fill(&mut self, range: Range<u32>) {
        let words = self.bits.words_mut();
        let mut at = range.start;
        while at < range.end {
            let count = (WORD - at % WORD).min(range.end - at);
            words[(at / WORD) as usize] |= (u64::MAX >> (WORD - count)) << (at % WORD);
            at += count;
            self.len += count;
        }
    }

    /// Returns where the run of blocks that begins at `start` ends, all of them held or all of them missing.
    pub(super) fn run_end(&self, start: u32, held: bool) -> u32 {
        let mut at = start;
        while at < self.blocks {
            let word = self.words()[(at / WORD) as usize];
            let other = if held { !word } else { word } >> (at % WORD);
            if other != 0 {
                return self.blocks.min(at + other.trailing_zeros());
            }
            at = at.saturating_add(WORD - at % WORD);
        }
        self.blocks
    }

    /// Bit b mod 64 of word b / 64 is block b; bits beyond the last block are clear.
    pub(super) fn words(&self) -> &[u64] {
        self.bits.words()
    }

    /// Takes the bits of a set as they are.
    pub(super) fn from_words(blocks: BlockCount, words: impl Iterator<Item = u64>) -> BlockSet {
        let mut set = BlockSet::empty(blocks);
        for (place, word) in set.bits.words_mut().iter_mut().zip(words) {
            *place = word;
            set.len += word.count_ones();
        }
        set
    }
}

impl fmt::Debug for BlockSet {
    /// Writes the runs held, at most sixteen of them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} blocks:", self.len, self.blocks)?;
        let mut start = self.run_end(0, false);
        for _ in 0..RUNS_SHOWN {
            if start == self.blocks {
                return Ok(());
            }
            let end = self.run_end(start, true);
            write!(f, " {start}..{end}")?;
            start = self.run_end(end, false);
        }
        if start < self.blocks { write!(f, " and more") } else { Ok(()) }
    }
}

const RUNS_SHOWN: usize = 16;
