//! The rings of a queue pair: shared memory in which each end writes entries that the other end carries out.
//!
//! A request has one entry or several. An entry names the location of its bytes, or carries them if they are few.
//! Entries are carried out in order, and the end that carries them out counts them.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::map::Mapping;
use crate::remote::RemoteMemory;
use crate::work::WorkError;

/// The kind of request that an entry belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Send,
    Write(Target),
    Read(Target),
    /// Bytes that the other end has requested by a read.
    ReadData,
}

/// Exposed memory of the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) key: u64,
    pub(crate) address: u64,
}

impl Target {
    pub(super) fn of(remote: RemoteMemory) -> Self {
        Self { key: remote.key, address: remote.address }
    }

    pub(super) fn of_len(self, len: u64) -> RemoteMemory {
        RemoteMemory { key: self.key, address: self.address, len }
    }
}

/// Where an entry's bytes are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Payload {
    /// The bytes stand in the entry.
    Inline([u8; INLINE_LEN_MAX]),
    /// The bytes lie in memory that the writer of the entry shares under this number.
    Shared { object: u64, offset: u64 },
}

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inline(_) => f.write_str("Inline"),
            Self::Shared { object, offset } => write!(f, "Shared({object:x} at {offset})"),
        }
    }
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    pub(crate) imm: Option<u32>,
    /// Whether it is the first entry of its request.
    pub(crate) first: bool,
    /// Whether it is the last entry of its request.
    pub(crate) last: bool,
    /// Whether its writer need not be woken when it is carried out.
    pub(crate) quiet: bool,
    /// Bytes of the whole request.
    pub(crate) total: u64,
    /// Bytes of this entry; 0 for a read.
    pub(crate) len: u64,
    pub(crate) payload: Payload,
}

impl Entry {
    pub(crate) fn encode(&self) -> [u8; ENTRY_LEN] {
        let (kind, target) = match self.kind {
            EntryKind::Send => (1, Target { key: 0, address: 0 }),
            EntryKind::Write(target) => (2, target),
            EntryKind::Read(target) => (3, target),
            EntryKind::ReadData => (4, Target { key: 0, address: 0 }),
        };
        let mut out = [0; ENTRY_LEN];
        let mut put = |at: usize, number: u64| out[at..at + 8].copy_from_slice(&number.to_le_bytes());
        put(8, self.total);
        put(16, self.len);
        put(24, target.key);
        put(32, target.address);
        if let Payload::Shared { object, offset } = self.payload {
            put(40, object);
            put(48, offset);
        }
        out[0] = kind;
        let inline = matches!(self.payload, Payload::Inline(_));
        let flags = [(self.imm.is_some(), 1), (self.first, 2), (self.last, 4), (inline, 8), (self.quiet, 16)];
        out[1] = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
        out[4..8].copy_from_slice(&self.imm.unwrap_or(0).to_le_bytes());
        if let Payload::Inline(bytes) = self.payload {
            out[INLINE_AT..].copy_from_slice(&bytes);
        }
        out
    }

    /// Decodes an entry; returns `None` if no peer writes such an entry.
    pub(crate) fn decode(bytes: &[u8; ENTRY_LEN]) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let target = Target { key: number(24), address: number(32) };
        let kind = match bytes[0] {
            1 => EntryKind::Send,
            2 => EntryKind::Write(target),
            3 => EntryKind::Read(target),
            4 => EntryKind::ReadData,
            _ => return None,
        };
        let flag = |flag: u8| bytes[1] & flag != 0;
        let payload = match flag(8) {
            true => Payload::Inline(std::array::from_fn(|i| bytes[INLINE_AT + i])),
            false => Payload::Shared { object: number(40), offset: number(48) },
        };
        let imm = flag(1).then(|| u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])));
        let (total, len) = (number(8), number(16));
        let entry = Self { kind, imm, first: flag(2), last: flag(4), quiet: flag(16), total, len, payload };
        let sensible = match (kind, payload) {
            (EntryKind::Read(_), _) => len == 0 && flag(2) && flag(4) && imm.is_none(),
            (_, Payload::Inline(_)) => len <= INLINE_LEN_MAX as u64,
            (_, Payload::Shared { offset, .. }) => len > 0 && offset.checked_add(len).is_some(),
        };
        (sensible && len <= total && bytes[1] < 32).then_some(entry)
    }
}

/// One direction of a queue pair: the producer writes the entries, the consumer carries them out.
#[derive(Clone)]
pub(super) struct Ring {
    memory: Arc<Mapping>,
    at: usize,
}

impl Ring {
    /// Returns the two rings in a queue pair's memory: first that of the end that created the memory.
    pub(super) fn both(memory: &Arc<Mapping>) -> [Self; 2] {
        [0, RING_LEN].map(|at| Self { memory: memory.clone(), at })
    }

    // The producer.

    /// Writes the entry `number`, which the consumer does not see yet. Its slot must be free.
    pub(super) fn put(&self, number: u64, entry: &Entry) {
        let encoded = entry.encode();
        // SAFETY: the slot lies in the mapping, and the consumer reads it only after it was published.
        unsafe { std::ptr::copy_nonoverlapping(encoded.as_ptr(), self.slot(number), ENTRY_LEN) };
    }

    /// Lets the consumer see all entries below `count`.
    pub(super) fn publish(&self, count: u64) {
        self.memory.number(self.at + PUBLISHED_AT).store(count, Ordering::Release);
    }

    /// Returns how many entries the consumer claims to have carried out.
    pub(super) fn done(&self) -> u64 {
        self.memory.number(self.at + DONE_AT).load(Ordering::Acquire)
    }

    /// Returns the reason why the consumer has refused its next entry, if it has.
    pub(super) fn refusal(&self) -> Option<WorkError> {
        let code = self.memory.word(self.at + REFUSAL_AT).load(Ordering::Acquire);
        let at = usize::try_from(code).ok()?.checked_sub(1)?;
        Some(REFUSALS.get(at).copied().unwrap_or(WorkError::RemoteInvalidRequest))
    }

    /// Announces that the memory of all entries may change from now on.
    pub(super) fn close(&self) {
        self.memory.word(self.at + CLOSED_AT).store(1, Ordering::SeqCst);
        // This comes before anything that the memory's owner does with it afterwards.
        fence(Ordering::SeqCst);
    }

    // The consumer.

    /// Returns how many entries the producer claims to have written.
    pub(super) fn published(&self) -> u64 {
        self.memory.number(self.at + PUBLISHED_AT).load(Ordering::Acquire)
    }

    /// Copies the entry `number`, which must be published; returns `None` if it is invalid.
    pub(super) fn get(&self, number: u64) -> Option<Entry> {
        let mut encoded = [0; ENTRY_LEN];
        // SAFETY: the slot lies in the mapping; a producer that writes it now spoils only this copy.
        unsafe { std::ptr::copy_nonoverlapping(self.slot(number), encoded.as_mut_ptr(), ENTRY_LEN) };
        Entry::decode(&encoded)
    }

    /// Announces that all entries below `count` have been carried out.
    pub(super) fn set_done(&self, count: u64) {
        self.memory.number(self.at + DONE_AT).store(count, Ordering::Release);
    }

    /// Announces that the first entry that is not done is refused, with the reason for its producer.
    pub(super) fn refuse(&self, reason: WorkError) {
        let at = REFUSALS.iter().position(|known| *known == reason).unwrap_or(0);
        let code = u32::try_from(at + 1).expect("there are few");
        self.memory.word(self.at + REFUSAL_AT).store(code, Ordering::SeqCst);
    }

    /// Tells whether the memory of entries may have changed. If not, everything copied before is intact.
    pub(super) fn is_closed(&self) -> bool {
        // The bytes were copied before this load.
        fence(Ordering::SeqCst);
        self.memory.word(self.at + CLOSED_AT).load(Ordering::SeqCst) != 0
    }

    fn slot(&self, number: u64) -> *mut u8 {
        let slot = usize::try_from(number % SLOTS).expect("less than the number of slots");
        self.memory.as_mut_ptr().wrapping_add(self.at + SLOTS_AT + slot * ENTRY_LEN)
    }
}

/// The reasons for a refusal. The last one means that the bytes could not be read.
const REFUSALS: [WorkError; 4] =
    [WorkError::RemoteInvalidRequest, WorkError::RemoteAccess, WorkError::ReceiverNotReady, WorkError::LocalProtection];
/// Most entries of one direction that are not carried out yet.
pub(super) const SLOTS: u64 = 64;
/// Most bytes that stand in an entry itself.
pub(crate) const INLINE_LEN_MAX: usize = ENTRY_LEN - INLINE_AT;
/// Bytes of an entry.
pub(crate) const ENTRY_LEN: usize = 128;
/// Offset of those bytes.
const INLINE_AT: usize = 56;
/// Bytes of a queue pair's memory: two rings.
pub(super) const RINGS_LEN: usize = 2 * RING_LEN;
/// Bytes of one ring, a multiple of pages.
const RING_LEN: usize = 12 << 10;
/// Offsets of the numbers: those of producer and consumer are on different cache lines.
const PUBLISHED_AT: usize = 0;
const CLOSED_AT: usize = 64;
const DONE_AT: usize = 128;
const REFUSAL_AT: usize = 192;
/// Offset of the entries.
const SLOTS_AT: usize = 256;
const _: () = assert!(SLOTS * (ENTRY_LEN as u64) + SLOTS_AT as u64 <= RING_LEN as u64, "the entries fit");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_an_entry_or_none(
            mut bytes: [u8; ENTRY_LEN], kind in 0u8..6, flags in 0u8..33, len in 0u64..100,
        ) {
            bytes[0] = kind;
            bytes[1] = flags;
            bytes[16..24].copy_from_slice(&len.to_le_bytes());
            if let Some(entry) = Entry::decode(&bytes) {
                prop_assert!(entry.len <= entry.total);
                prop_assert_eq!(Entry::decode(&entry.encode()), Some(entry));
            }
        }
    }

    #[test]
    fn what_is_put_is_what_is_got() {
        let (memory, _file) = Mapping::create(RINGS_LEN).unwrap();
        let [ring, other] = Ring::both(&Arc::new(memory));
        let entry = Entry {
            kind: EntryKind::Write(Target { key: 7, address: 8 }),
            imm: Some(9),
            first: true,
            last: false,
            quiet: true,
            total: 1 << 40,
            len: 1 << 20,
            payload: Payload::Shared { object: 5, offset: 6 },
        };
        ring.put(SLOTS + 3, &entry);
        ring.publish(SLOTS + 4);
        assert_eq!((ring.published(), ring.get(3), other.published()), (SLOTS + 4, Some(entry), 0));
        ring.refuse(WorkError::RemoteAccess);
        ring.close();
        assert_eq!((ring.refusal(), ring.is_closed()), (Some(WorkError::RemoteAccess), true));
        assert_eq!((other.refusal(), other.is_closed()), (None, false));
    }
}
