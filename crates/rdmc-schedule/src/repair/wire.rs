//! The encoding of a set of blocks; bytes to decode may come from a peer.

use std::error::Error;
use std::fmt;

use super::block_set::BlockSet;
use crate::hop::{BlockCount, BlockIndex};

const RUNS: u8 = 0;
const BITMAP: u8 = 1;

impl BlockSet {
    /// Returns the longest encoding of a set in bytes: 1 + ⌈k / 8⌉ for a message of k blocks.
    #[must_use]
    pub const fn encoded_len_max(blocks: BlockCount) -> usize {
        1 + blocks.get().div_ceil(8) as usize
    }

    /// Encodes the set in at most [`encoded_len_max`](BlockSet::encoded_len_max) bytes.
    ///
    /// They are the lengths of the runs, or a bitmap if that is shorter. The first byte is the form:
    ///
    /// - 0, then the lengths of runs of held and of missing blocks by turns, which add up to the number of blocks.
    ///   The first is of held blocks, and it alone may be 0. A length is a varint: seven bits to a byte, the lowest
    ///   first, and the high bit set in all bytes except the last.
    /// - 1, then ⌈k / 8⌉ bytes: bit b mod 8 of byte ⌊b / 8⌋ is set if block b is held, and bits beyond the last block
    ///   are clear.
    ///
    /// A prefix of the message takes 3 to 9 bytes. O(k / 64 + bytes).
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let len_max = BlockSet::encoded_len_max(self.blocks());
        let mut bytes = vec![RUNS];
        let (mut at, mut held) = (0, true);
        while at < self.blocks().get() {
            let end = self.run_end(at, held);
            push_varint(&mut bytes, end - at);
            if bytes.len() > len_max {
                return self.encode_bitmap();
            }
            (at, held) = (end, !held);
        }
        bytes
    }

    fn encode_bitmap(&self) -> Vec<u8> {
        let len = BlockSet::encoded_len_max(self.blocks());
        let mut bytes = Vec::with_capacity(len + size_of::<u64>());
        bytes.push(BITMAP);
        bytes.extend(self.words().iter().flat_map(|word| word.to_le_bytes()));
        bytes.truncate(len);
        bytes
    }

    /// Decodes a set of blocks of a message of `blocks` from bytes that any peer may have sent.
    ///
    /// Takes ⌈k / 64⌉ words of memory, however many bytes there are, and O(k / 64 + bytes) time. Bytes that are no
    /// longer than [`encoded_len_max`](BlockSet::encoded_len_max) suffice for every set.
    ///
    /// # Errors
    /// The bytes do not describe exactly `blocks` blocks, each once, in the form that [`encode`](BlockSet::encode)
    /// writes.
    pub fn decode(blocks: BlockCount, bytes: &[u8]) -> Result<BlockSet, BlockSetError> {
        match bytes.split_first() {
            Some((&RUNS, rest)) => decode_runs(blocks, rest),
            Some((&BITMAP, rest)) => decode_bitmap(blocks, rest),
            Some((&got, _)) => Err(BlockSetError::Form { got }),
            None => Err(BlockSetError::TooShort { want: blocks }),
        }
    }
}

fn decode_runs(blocks: BlockCount, mut bytes: &[u8]) -> Result<BlockSet, BlockSetError> {
    let mut set = BlockSet::empty(blocks);
    let (mut at, mut held, mut first) = (0, true, true);
    while at < blocks.get() {
        let run = BlockSetError::Run { at: BlockIndex(at) };
        if bytes.is_empty() {
            return Err(BlockSetError::TooShort { want: blocks });
        }
        let len = take_varint(&mut bytes).filter(|&len| len > 0 || first).ok_or(run)?;
        if len > blocks.get() - at {
            return Err(BlockSetError::TooLong { want: blocks });
        }
        if held {
            set.fill(at..at + len);
        }
        (at, held, first) = (at + len, !held, false);
    }
    if bytes.is_empty() { Ok(set) } else { Err(BlockSetError::TooLong { want: blocks }) }
}

fn decode_bitmap(blocks: BlockCount, bytes: &[u8]) -> Result<BlockSet, BlockSetError> {
    let len = blocks.get().div_ceil(8) as usize;
    if bytes.len() < len {
        return Err(BlockSetError::TooShort { want: blocks });
    }
    let beyond = bytes.last().is_some_and(|last| !blocks.get().is_multiple_of(8) && last >> (blocks.get() % 8) != 0);
    if bytes.len() > len || beyond {
        return Err(BlockSetError::TooLong { want: blocks });
    }
    let words = bytes.chunks(size_of::<u64>()).map(|chunk| {
        let mut word = [0; size_of::<u64>()];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    Ok(BlockSet::from_words(blocks, words))
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

/// Takes a number below 2³² that is written with as few bytes as it needs.
fn take_varint(bytes: &mut &[u8]) -> Option<u32> {
    let mut value = 0;
    for shift in (0..u32::BITS).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            let shortest = byte != 0 || shift == 0;
            return u32::try_from(value).ok().filter(|_| shortest);
        }
    }
    None
}

/// Bytes do not describe a set of that message's blocks; the peer that sent them is at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockSetError {
    /// The first byte names no form.
    Form {
        /// The byte.
        got: u8,
    },
    /// The length of a run is 0 or no number below 2³² in its shortest form.
    Run {
        /// The block with which the run begins.
        at: BlockIndex,
    },
    /// The bytes end before the last block.
    TooShort {
        /// The blocks of the message.
        want: BlockCount,
    },
    /// The bytes go on after the last block.
    TooLong {
        /// The blocks of the message.
        want: BlockCount,
    },
}

impl fmt::Display for BlockSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BlockSetError::Form { got } => write!(f, "a set of blocks in the unknown form {got}"),
            BlockSetError::Run { at } => write!(f, "a set of blocks with a bad run at block {at}"),
            BlockSetError::TooShort { want } => write!(f, "a set of blocks that describes fewer than {want}"),
            BlockSetError::TooLong { want } => write!(f, "a set of blocks that describes more than {want}"),
        }
    }
}

impl Error for BlockSetError {}
