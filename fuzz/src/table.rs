//! Targets for memory that other members of a group write: rows of the status table, slots of the ring.

use rdmc::fuzzing::{RingSlot, read_row, read_slot, write_row, write_slot};

use crate::allocation::{PER_BYTE, bounded};
use crate::{Seed, named};

/// Checks that a row that is read is the one that was written.
pub fn row(bytes: &[u8]) {
    let Some(counts) = bounded(bytes.len(), PER_BYTE, || read_row(bytes)) else { return };
    assert_eq!(write_row(counts)[..], bytes[..write_row(counts).len()]);
}

/// Makes rows.
pub fn row_seeds() -> Vec<Seed> {
    named([
        ("begin", write_row([0; 6])),
        ("counts", write_row([9, 5, 2, 4, 1033, 8])),
        ("most", write_row([u64::MAX; 6])),
        ("nothing", vec![0; write_row([0; 6]).len()]),
    ])
}

/// Checks that a slot that is read is the one that was written, and no longer than a slot.
pub fn slot(bytes: &[u8]) {
    let Some(slot) = read_slot(bytes) else { return };
    let encoded = write_slot(&slot);
    assert_eq!(encoded, bytes[..encoded.len().min(bytes.len())]);
    if let RingSlot::Message(message) = slot {
        assert!(message.len() <= 100);
    }
}

/// Makes slots.
pub fn slot_seeds() -> Vec<Seed> {
    named([
        ("empty", write_slot(&RingSlot::Message(Vec::new()))),
        ("message", write_slot(&RingSlot::Message(vec![7; 100]))),
        ("too-long", write_slot(&RingSlot::Message(vec![7; 101]))),
        ("messages", write_slot(&RingSlot::Messages(vec![vec![7; 10], Vec::new(), vec![8; 30]]))),
        ("in-blocks", write_slot(&RingSlot::InBlocks(1 << 40))),
        ("nothing", vec![0; 116]),
    ])
}
