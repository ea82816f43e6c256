//! Bits that flip on the way.

use std::collections::BTreeMap;
use std::sync::Mutex;

use rdmc_fabric::{Buffer, Memory, MemoryRegion};

use super::{World, WorldShared};
use crate::simulation::{NodeIndex, lock};

/// A bit of a send that flips, counted from the first, modulo the number of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlippedBit {
    /// A bit of the bytes, or of the immediate if there are no bytes.
    OfPayload(u64),
    /// A bit of the immediate.
    OfImmediate(u64),
}

/// Planned flips, and those that happened.
#[derive(Debug, Default)]
pub(super) struct Flips {
    /// By the receiving node: the bit, and the number of remaining sends.
    planned: Mutex<BTreeMap<NodeIndex, (FlippedBit, u64)>>,
    /// The sending and the receiving node of each flip.
    happened: Mutex<Vec<(NodeIndex, NodeIndex)>>,
}

impl World {
    /// Flips a bit of each of the next `count` sends to a node; the memory of the sender does not change. A second call
    /// replaces the first.
    pub fn flip_bits(&self, node: NodeIndex, bit: FlippedBit, count: u64) {
        let mut planned = lock(&self.0.flips.planned);
        planned.remove(&node);
        if count > 0 {
            planned.insert(node, (bit, count));
        }
    }

    /// Returns the sending and the receiving node of each send with a flipped bit, in the order of receipt.
    pub fn flipped(&self) -> Vec<(NodeIndex, NodeIndex)> {
        lock(&self.0.flips.happened).clone()
    }
}

impl WorldShared {
    /// Returns a send as its receiver gets it.
    pub(crate) fn received(
        &self,
        (from, to): (NodeIndex, NodeIndex),
        data: Buffer,
        imm: Option<u32>,
    ) -> (Buffer, Option<u32>) {
        let bit = {
            let mut planned = lock(&self.flips.planned);
            let Some((bit, left)) = planned.get_mut(&to) else { return (data, imm) };
            let bit = *bit;
            *left -= 1;
            if *left == 0 {
                planned.remove(&to);
            }
            bit
        };
        lock(&self.flips.happened).push((from, to));
        self.note_fault(Some(to), "bit flipped");
        match bit {
            FlippedBit::OfPayload(bit) if !data.is_empty() => (flipped(&data, bit), imm),
            FlippedBit::OfPayload(bit) | FlippedBit::OfImmediate(bit) => {
                (data, imm.map(|imm| imm ^ 1 << (bit % u64::from(u32::BITS))))
            }
        }
    }
}

/// Returns a copy of non-empty bytes with one flipped bit.
fn flipped(data: &Buffer, bit: u64) -> Buffer {
    let mut bytes = data.to_vec();
    let bits_of_byte = u64::from(u8::BITS);
    let at = usize::try_from(bit / bits_of_byte % bytes.len() as u64).expect("an index");
    bytes[at] ^= 1 << (bit % bits_of_byte);
    MemoryRegion::new(Memory::from(bytes), Box::new(())).into_shared()
}
