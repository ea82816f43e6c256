//! Checksums of blocks, which find a changed bit.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use rdmc_fabric::{Buffer, Inspector};
use rdmc_schedule::BlockIndex;
use twox_hash::{XxHash3_64, xxhash3_128};

use crate::sync::lock;

/// The XXH3 of a block's bytes in 128 bits.
///
/// The root computes it once, and every other member once, from the block that has arrived. A member relays the
/// checksum that it has verified. So the next member finds a bit that changes in a relay's memory, and the edge is
/// known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checksum(pub(crate) u128);

/// Identifies a block in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockIdentity {
    /// The message's number in its group.
    pub(crate) message: u64,
    /// The message's size in bytes.
    pub(crate) size: u64,
    pub(crate) block: BlockIndex,
}

impl Checksum {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(xxhash3_128::Hasher::oneshot(bytes))
    }

    /// Computes as [`of`](Self::of) does, and yields between pieces of long blocks.
    pub(crate) async fn of_yielding(bytes: &[u8]) -> Self {
        if bytes.len() <= PIECE {
            return Self::of(bytes);
        }
        Self::finish_yielding(xxhash3_128::Hasher::new(), bytes).await
    }

    /// Sums the rest of a block.
    async fn finish_yielding(mut hasher: xxhash3_128::Hasher, rest: &[u8]) -> Self {
        for piece in rest.chunks(PIECE) {
            hasher.write(piece);
            yield_now().await;
        }
        Self(hasher.finish_128())
    }

    /// Computes as [`of_yielding`](Self::of_yielding) does, of bytes that the application may change.
    ///
    /// # Errors
    /// They are in a mapped file, which was shortened or cannot be read.
    pub(crate) async fn of_shared_yielding(bytes: &Buffer) -> io::Result<Self> {
        if !bytes.may_change() {
            return Ok(Self::of_yielding(bytes).await);
        }
        let mut hasher = xxhash3_128::Hasher::new();
        let mut copy = vec![0; bytes.len().min(COPY)];
        let mut from = 0;
        while from < bytes.len() {
            let piece = &mut copy[..(bytes.len() - from).min(COPY)];
            bytes.copy_to(from, piece)?;
            hasher.write(piece);
            from += piece.len();
            if from % PIECE == 0 {
                yield_now().await;
            }
        }
        Ok(Self(hasher.finish_128()))
    }

    /// Returns the immediate with which the block travels.
    ///
    /// It depends on the block's identity: a block that comes in place of another is found even if the bytes are equal.
    pub(crate) fn seal(self, identity: BlockIdentity) -> u32 {
        let mut bytes = [0; 36];
        bytes[..16].copy_from_slice(&self.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&identity.message.to_le_bytes());
        bytes[24..32].copy_from_slice(&identity.size.to_le_bytes());
        bytes[32..].copy_from_slice(&identity.block.0.to_le_bytes());
        #[expect(clippy::cast_possible_truncation, reason = "an immediate has 32 bits")]
        let seal = XxHash3_64::oneshot(&bytes) as u32;
        seal
    }
}

/// Sums a block as it arrives, as far as the fabric shows it: bytes in the cache need not come from memory again.
pub(crate) struct IncrementalChecksum {
    partial: Mutex<PartialSum>,
}

/// The sum of the bytes that the fabric has shown of a block.
struct PartialSum {
    hasher: xxhash3_128::Hasher,
    len: usize,
}

impl IncrementalChecksum {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { partial: Mutex::new(PartialSum { hasher: xxhash3_128::Hasher::new(), len: 0 }) })
    }

    /// Returns the checksum of the whole block, or `None` if much of it is still to be summed.
    pub(crate) fn checksum_at_once(&self, block: &[u8]) -> Option<Checksum> {
        let mut partial = lock(&self.partial);
        match block.get(partial.len..) {
            Some(rest) if partial.len > 0 && rest.len() <= PIECE => {
                partial.hasher.write(rest);
                partial.len = block.len();
                Some(Checksum(partial.hasher.finish_128()))
            }
            Some(_) if partial.len > 0 => None,
            _ => (block.len() <= PIECE).then(|| Checksum::of(block)),
        }
    }

    /// Returns the checksum of the whole block; yields between pieces of the rest.
    pub(crate) async fn checksum_of(&self, block: &[u8]) -> Checksum {
        if let Some(checksum) = self.checksum_at_once(block) {
            return checksum;
        }
        let (hasher, summed) = {
            let partial = lock(&self.partial);
            (partial.hasher.clone(), partial.len)
        };
        match block.get(summed..) {
            Some(rest) => Checksum::finish_yielding(hasher, rest).await,
            None => Checksum::of_yielding(block).await,
        }
    }
}

impl Inspector for IncrementalChecksum {
    fn inspect(&self, bytes: &[u8]) {
        let mut partial = lock(&self.partial);
        partial.hasher.write(bytes);
        partial.len += bytes.len();
    }
}

impl fmt::Debug for IncrementalChecksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IncrementalChecksum").finish_non_exhaustive()
    }
}

/// Gives the other futures of the task a turn.
pub(crate) async fn yield_now() {
    let mut gave = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut gave, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Bytes to sum before other work of the task gets a turn: a tenth of a millisecond.
const PIECE: usize = 1 << 20;
/// Bytes of a file to copy at once: few enough to stay in the cache.
const COPY: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    const IDENTITY: BlockIdentity = BlockIdentity { message: 3, size: 5_000_000, block: BlockIndex(2) };

    proptest! {
        #[test]
        fn every_bit_of_a_block_and_of_its_place_counts(
            bytes in proptest::collection::vec(any::<u8>(), 1..2000),
            bit in any::<prop::sample::Index>(),
        ) {
            let seal = Checksum::of(&bytes).seal(IDENTITY);
            let bit = bit.index(bytes.len() * 8);
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(Checksum::of(&other).seal(IDENTITY), seal);
            for elsewhere in [
                BlockIdentity { message: IDENTITY.message ^ (1 << (bit % 64)), ..IDENTITY },
                BlockIdentity { size: IDENTITY.size ^ (1 << (bit % 64)), ..IDENTITY },
                BlockIdentity { block: BlockIndex(IDENTITY.block.0 ^ (1 << (bit % 32))), ..IDENTITY },
            ] {
                prop_assert_ne!(Checksum::of(&bytes).seal(elsewhere), seal);
            }
        }
    }

    #[tokio::test]
    async fn a_block_sums_to_the_same_however_much_was_shown_as_it_came() {
        let bytes: Vec<u8> = (0..PIECE + 700).map(|i| u8::try_from(i % 251).expect("below 251")).collect();
        for len in [0, 1, 240, 241, 700, PIECE, bytes.len()] {
            let block = &bytes[..len];
            for shown in [0, 1, 64, 239, 256, 300, len / 2, len].into_iter().filter(|shown| *shown <= len) {
                for piece in [1 + shown / 3, 1024, PIECE] {
                    let summing = IncrementalChecksum::new();
                    block[..shown].chunks(piece).for_each(|piece| summing.inspect(piece));
                    let checksum = summing.checksum_of(block).await;
                    assert_eq!(checksum, Checksum::of(block), "{shown} of {len} bytes were shown, {piece} at once");
                }
            }
        }
    }

    #[test]
    fn a_long_block_is_summed_in_pieces_to_the_same() {
        let bytes: Vec<u8> = (0..3 * PIECE + 5).map(|i| u8::try_from(i % 251).expect("below 251")).collect();
        let mut gentle = std::pin::pin!(Checksum::of_yielding(&bytes));
        let mut turns = 0;
        let gentle = loop {
            match (&mut gentle).now_or_never() {
                Some(checksum) => break checksum,
                None => turns += 1,
            }
        };
        assert_eq!((gentle, turns), (Checksum::of(&bytes), 4));
    }
}
