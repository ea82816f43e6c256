//! The ring: slots in the memory of each receiver, into which the root writes short messages one-sidedly.
//!
//! Messages are in the slots in order. A slot has a short message, or several that waited at the same time; of a long
//! message it tells the size. A receiver's row says how many slots it has read; the root writes them again.

use std::collections::VecDeque;
use std::io;
use std::ops::{DerefMut, Range};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, ready};

use futures::FutureExt;
use rdmc_fabric::{Buffer, ExposedRegion, Fabric, Operation, WorkError};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::memory::WriteMemory;
use crate::count::Count;
use crate::sync::lock;

/// How many slots a ring has, and how many bytes of a message fit into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RingShape {
    pub(crate) slots: u32,
    pub(crate) bytes: u32,
}

impl RingShape {
    /// Returns the bytes of the whole ring.
    pub(crate) fn len(self) -> usize {
        self.slots as usize * self.slot_len()
    }

    /// Tells whether the write of a slot is to be reported at once: often enough that the root, when it has written all
    /// slots, waits for none that is not reported.
    pub(super) fn is_reported(self, number: u64) -> bool {
        (number + 1).is_multiple_of((u64::from(self.slots) / 2).max(1))
    }

    fn slot_len(self) -> usize {
        SLOT_HEADER_LEN + (self.bytes as usize).next_multiple_of(8)
    }

    /// Returns where a slot begins; slots are counted from the first of the ring on.
    pub(super) fn place(self, number: u64) -> usize {
        self.index(number) * self.slot_len()
    }

    /// Returns the place that a slot has, of those of the ring.
    fn index(self, number: u64) -> usize {
        usize::try_from(number % u64::from(self.slots)).expect("there are few slots")
    }
}

/// The content of a slot.
pub(crate) enum Slot<T> {
    /// A message.
    Message(T),
    /// Several messages, [packed](pack).
    Messages(T),
    /// A message of this size comes in blocks.
    InBlocks(u64),
}

/// Encodes the slot of a message, whose bytes `fill` writes, at the beginning of `memory`. Its check value depends on
/// the place of the message in the ring. Returns the bytes of the slot.
pub(crate) fn encode(
    slot: &Slot<usize>,
    (salt, number): (u64, u64),
    memory: &mut [u8],
    fill: impl FnOnce(&mut [u8]),
) -> usize {
    let (kind, len, bytes_len) = match *slot {
        Slot::Message(len) => (KIND_MESSAGE, len as u64, len),
        Slot::Messages(len) => (KIND_MESSAGES, len as u64, len),
        Slot::InBlocks(size) => (KIND_IN_BLOCKS, size, 0),
    };
    let word = kind << KIND_SHIFT | len;
    let (header, bytes) = memory[..SLOT_HEADER_LEN + bytes_len].split_at_mut(SLOT_HEADER_LEN);
    fill(bytes);
    header[..8].copy_from_slice(&word.to_le_bytes());
    header[8..].copy_from_slice(&check(word, bytes, salt, number).to_le_bytes());
    SLOT_HEADER_LEN + bytes_len
}

/// Reads a slot by `read_at`, with the memory that `memory` returns for a message; `None` if it has come corrupted.
pub(crate) fn read<M: DerefMut<Target = [u8]>, E>(
    shape: RingShape,
    (salt, number): (u64, u64),
    read_at: impl Fn(usize, &mut [u8]),
    memory: impl FnOnce(usize) -> Result<M, E>,
) -> Result<Option<Slot<M>>, E> {
    let mut header = [0; SLOT_HEADER_LEN];
    read_at(0, &mut header);
    let Some((slot, word, sum)) = decode(&header, shape) else { return Ok(None) };
    let (len, is_one) = match slot {
        Slot::Message(len) => (len, true),
        Slot::Messages(len) => (len, false),
        Slot::InBlocks(size) => return Ok((check(word, &[], salt, number) == sum).then_some(Slot::InBlocks(size))),
    };
    let mut memory = memory(len)?;
    read_at(SLOT_HEADER_LEN, &mut memory);
    let is_right = check(word, &memory, salt, number) == sum;
    Ok(is_right.then(|| if is_one { Slot::Message(memory) } else { Slot::Messages(memory) }))
}

/// Decodes the header of a slot: kind and length, and the check value. `None` if it cannot be.
fn decode(header: &[u8; SLOT_HEADER_LEN], shape: RingShape) -> Option<(Slot<usize>, u64, u64)> {
    let (word, check) = header.split_at(8);
    let (word, check) = (u64::from_le_bytes(word.try_into().ok()?), u64::from_le_bytes(check.try_into().ok()?));
    let len = word & ((1 << KIND_SHIFT) - 1);
    let bytes = || usize::try_from(len).ok().filter(|len| *len <= shape.bytes as usize);
    let slot = match word >> KIND_SHIFT {
        KIND_MESSAGE => Slot::Message(bytes()?),
        KIND_MESSAGES => Slot::Messages(bytes()?),
        KIND_IN_BLOCKS => Slot::InBlocks(len),
        _ => return None,
    };
    Some((slot, word, check))
}

fn check(word: u64, bytes: &[u8], salt: u64, number: u64) -> u64 {
    let of_bytes = XxHash3_64::oneshot_with_seed(salt ^ number.rotate_left(32), bytes);
    XxHash3_64::oneshot_with_seed(of_bytes, &word.to_le_bytes())
}

/// Returns the bytes of messages of these lengths, packed.
pub(crate) fn packed_len(lens: impl Iterator<Item = usize>) -> usize {
    lens.fold(COUNT_LEN, |sum, len| sum + COUNT_LEN + len)
}

/// Packs messages: their number and their lengths (u32 each, little endian), then their bytes.
pub(crate) fn pack<'a>(messages: impl ExactSizeIterator<Item = &'a [u8]>, memory: &mut [u8]) {
    let count = |number: usize| u32::try_from(number).expect("a slot is short").to_le_bytes();
    let (head, mut room) = memory.split_at_mut(COUNT_LEN * (1 + messages.len()));
    let (number, lens) = head.split_at_mut(COUNT_LEN);
    number.copy_from_slice(&count(messages.len()));
    for (len, message) in lens.chunks_exact_mut(COUNT_LEN).zip(messages) {
        len.copy_from_slice(&count(message.len()));
        let (place, rest) = room.split_at_mut(message.len());
        place.copy_from_slice(message);
        room = rest;
    }
}

/// Returns where the packed messages are; `None` if the bytes are not those of [`pack`].
pub(crate) fn unpack(packed: &[u8]) -> Option<Vec<Range<usize>>> {
    let (counts, _) = packed.as_chunks::<COUNT_LEN>();
    let count = |at: usize| Some(u32::from_le_bytes(*counts.get(at)?) as usize);
    let number = count(0)?;
    let mut end = number.checked_add(1)?.checked_mul(COUNT_LEN)?;
    // Before memory is allocated for so many.
    if end > packed.len() {
        return None;
    }
    let mut places = Vec::with_capacity(number);
    for at in 1..=number {
        let start = end;
        end = start.checked_add(count(at)?)?;
        places.push(start..end);
    }
    (end == packed.len()).then_some(places)
}

/// A receiver's side of the ring.
pub(crate) struct IncomingRing {
    shape: RingShape,
    region: ExposedRegion,
    /// Slots that were written.
    pub(super) written: Count,
    read: AtomicU64,
}

impl IncomingRing {
    pub(super) fn new(shape: RingShape, region: ExposedRegion) -> Self {
        Self { shape, region, written: Count::default(), read: AtomicU64::new(0) }
    }

    pub(super) fn region(&self) -> &ExposedRegion {
        &self.region
    }

    /// Waits until the next slot is written; reads it, with the memory that `memory` returns for a message. `None` if it
    /// has come corrupted. One task reads at a time.
    pub(super) async fn next<M: DerefMut<Target = [u8]>, E>(
        &self,
        salt: u64,
        memory: impl FnOnce(usize) -> Result<M, E>,
    ) -> Result<Option<Slot<M>>, E> {
        let number = self.read.load(Ordering::Relaxed);
        self.written.reaches(number + 1).await;
        let place = self.shape.place(number);
        let read_at = |at, bytes: &mut [u8]| self.region.read_at(place + at, bytes).expect("it lies in the ring");
        let slot = read(self.shape, (salt, number), read_at, memory)?;
        self.read.store(number + 1, Ordering::Release);
        Ok(slot)
    }

    /// Reads a slot that the root has sent again by another way; `None` if it is corrupted too.
    pub(super) fn read_again<M: DerefMut<Target = [u8]>, E>(
        &self,
        (salt, number): (u64, u64),
        bytes: &[u8],
        memory: impl FnOnce(usize) -> Result<M, E>,
    ) -> Result<Option<Slot<M>>, E> {
        let is_whole = |slot: &Slot<M>| match slot {
            Slot::Message(memory) | Slot::Messages(memory) => SLOT_HEADER_LEN + memory.len() == bytes.len(),
            Slot::InBlocks(_) => bytes.len() == SLOT_HEADER_LEN,
        };
        let read_at = |at: usize, into: &mut [u8]| {
            let there = bytes.get(at..).unwrap_or_default();
            let len = into.len().min(there.len());
            into[..len].copy_from_slice(&there[..len]);
        };
        Ok(read(self.shape, (salt, number), read_at, memory)?.filter(is_whole))
    }

    /// Returns how many slots were read.
    pub(crate) fn read(&self) -> u64 {
        self.read.load(Ordering::Acquire)
    }

    /// Tells whether the root should hear how many slots were read, after it has heard of so many.
    pub(crate) fn should_tell(&self, told: u64) -> bool {
        self.read() - told >= u64::from(self.shape.slots).div_ceil(2)
    }
}

/// The root's side of the ring.
pub(crate) struct OutgoingRing {
    pub(super) shape: RingShape,
    /// The memory from which each slot is written.
    memory: Mutex<Vec<WriteMemory>>,
    /// Slots that are written, or about to be.
    pub(super) written: AtomicU64,
    /// Slots that all receivers have read.
    read: AtomicU64,
    /// How often a receiver has told that it has read slots.
    told: Count,
    /// Writes to each receiver that are not acknowledged, oldest first.
    pub(super) unacknowledged: Mutex<Vec<VecDeque<Operation<()>>>>,
}

impl OutgoingRing {
    pub(super) fn new(shape: RingShape, receivers: usize) -> Self {
        let unacknowledged = Mutex::new((0..receivers).map(|_| VecDeque::new()).collect());
        let memory = Mutex::new((0..shape.slots).map(|_| WriteMemory::new(shape.slot_len())).collect());
        Self {
            shape,
            memory,
            written: AtomicU64::new(0),
            read: AtomicU64::new(0),
            told: Count::default(),
            unacknowledged,
        }
    }

    /// Encodes the slot of message `number` of the ring, whose bytes `fill` writes.
    pub(super) fn encode(
        &self,
        fabric: &dyn Fabric,
        slot: &Slot<usize>,
        (salt, number): (u64, u64),
        fill: impl FnOnce(&mut [u8]),
    ) -> io::Result<Buffer> {
        let encode = |memory: &mut [u8]| encode(slot, (salt, number), memory, fill);
        lock(&self.memory)[self.shape.index(number)].write(fabric, encode)
    }

    /// Returns a slot that some receivers have not read, as it was written.
    pub(crate) fn slot(&self, number: u64) -> Option<Buffer> {
        let written = self.written();
        let is_there = number < written && written - number <= self.shape.slots.into();
        lock(&self.memory)[self.shape.index(number)].written().filter(|_| is_there)
    }

    /// Returns the most bytes of messages in a slot.
    pub(crate) fn bytes_max(&self) -> usize {
        self.shape.bytes as usize
    }

    /// Tells whether there is room for the slot of the next message.
    pub(crate) fn has_room(&self) -> bool {
        self.read.load(Ordering::Acquire) >= (self.written() + 1).saturating_sub(self.shape.slots.into())
    }

    /// Returns how often a receiver has told that it has read slots.
    pub(crate) fn told(&self) -> u64 {
        self.told.get()
    }

    /// Waits until a receiver tells more often than `told` times that it has read slots.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn told_more(&self, told: u64) {
        self.told.reaches(told + 1).await;
    }

    /// Notes that a receiver has told what it has read, and how many slots all have read now.
    pub(crate) fn note_read(&self, by_all: u64) {
        self.read.fetch_max(by_all, Ordering::AcqRel);
        self.told.increment();
    }

    /// Waits until fewer writes to a receiver are unacknowledged than there are slots.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn acknowledged(&self, receiver: usize) -> Result<(), WorkError> {
        std::future::poll_fn(|cx| {
            let mut all = lock(&self.unacknowledged);
            let of_receiver = &mut all[receiver];
            while of_receiver.len() >= self.shape.slots as usize {
                ready!(of_receiver[0].poll_unpin(cx))?;
                of_receiver.pop_front();
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    pub(super) fn note(&self, receiver: usize, write: Operation<()>) {
        lock(&self.unacknowledged)[receiver].push_back(write);
    }

    /// Returns how many slots are written, or about to be.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }
}

/// Bytes of a slot before those of its message.
pub(crate) const SLOT_HEADER_LEN: usize = 16;
const KIND_MESSAGE: u64 = 1;
const KIND_IN_BLOCKS: u64 = 2;
const KIND_MESSAGES: u64 = 3;
/// Bytes of a number or length of packed messages.
pub(crate) const COUNT_LEN: usize = 4;
/// The kind is above the length, which no message exceeds.
const KIND_SHIFT: u32 = 56;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: RingShape = RingShape { slots: 4, bytes: 50 };

    proptest! {
        #[test]
        fn a_slot_is_read_as_it_was_written_at_its_place(
            bytes in proptest::collection::vec(any::<u8>(), 0..=50), salt: u64, number in 0..1_u64 << 40, bit in 0..528_usize
        ) {
            let mut memory = [0; SLOT_HEADER_LEN + 50];
            let fill = |place: &mut [u8]| place.copy_from_slice(&bytes);
            let len = encode(&Slot::Message(bytes.len()), (salt, number), &mut memory, fill);
            let slot = &memory[..len];
            let header = |slot: &[u8]| <[u8; SLOT_HEADER_LEN]>::try_from(&slot[..SLOT_HEADER_LEN]).expect("a header");
            let is_right = |slot: &[u8], number| match decode(&header(slot), SHAPE) {
                Some((Slot::Message(len), word, sum)) => {
                    let bytes = slot.get(SLOT_HEADER_LEN..SLOT_HEADER_LEN + len);
                    bytes.is_some_and(|bytes| check(word, bytes, salt, number) == sum)
                }
                Some((Slot::InBlocks(_), word, sum)) => check(word, &[], salt, number) == sum,
                Some((Slot::Messages(_), ..)) | None => false,
            };
            prop_assert!(is_right(slot, number));
            prop_assert!(!is_right(slot, number + 1));
            let mut changed = slot.to_vec();
            let at = bit % (8 * changed.len());
            changed[at / 8] ^= 1 << (at % 8);
            prop_assert!(!is_right(&changed, number));
        }

        #[test]
        fn packed_messages_are_unpacked(
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..20),
        ) {
            let mut packed = vec![0; packed_len(messages.iter().map(Vec::len))];
            pack(messages.iter().map(Vec::as_slice), &mut packed);
            let places = unpack(&packed).unwrap();
            prop_assert_eq!(places.into_iter().map(|place| packed[place].to_vec()).collect::<Vec<_>>(), messages);
            packed.push(0);
            prop_assert_eq!(unpack(&packed), None);
        }

        #[test]
        fn any_bytes_are_packed_messages_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..40), low: u8) {
            let bytes = [&[low % 8, 0, 0, 0], &bytes[..]].concat();
            for bytes in [&bytes[..], &bytes[4..]] {
                let places = unpack(bytes).unwrap_or_default();
                prop_assert!(places.windows(2).all(|pair| pair[0].end == pair[1].start));
                prop_assert!(places.last().is_none_or(|last| last.end == bytes.len()));
            }
        }

        #[test]
        fn any_bytes_are_a_slot_or_none(header: [u8; SLOT_HEADER_LEN]) {
            if let Some((Slot::Message(len), ..)) = decode(&header, SHAPE) {
                prop_assert!(len <= 50);
            }
        }
    }

    #[test]
    fn slots_do_not_overlap() {
        let places: Vec<usize> = (0..8).map(|number| SHAPE.place(number)).collect();
        assert_eq!(places, [0, 72, 144, 216, 0, 72, 144, 216]);
        assert_eq!(SHAPE.len(), 288);
    }
}
