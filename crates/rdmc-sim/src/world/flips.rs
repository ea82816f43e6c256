//! Bits that change on the way.

use std::collections::BTreeMap;
use std::sync::Mutex;

use rdmc_fabric::{Buffer, Memory, MemoryRegion};

use super::{World, WorldShared};
use crate::simulation::{NodeIndex, lock};

/// A bit that changes of what is sent, counted from the first, modulo their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlippedBit {
    /// One of the bytes, or of the immediate if there are none.
    OfPayload(u64),
    /// One of the immediate.
    OfImmediate(u64),
}

/// What is to change, and what has.
#[derive(Debug, Default)]
pub(super) struct Flips {
    /// By the node that receives: what changes, and of how many sends more.
    planned: Mutex<BTreeMap<NodeIndex, (FlippedBit, u64)>>,
    /// From one node to another.
    happened: Mutex<Vec<(NodeIndex, NodeIndex)>>,
}

impl World {
    /// Turns over a bit of each of the next `count` sends that come to a node; the memory that they come from stays as it is.
    /// It takes the place of what was said before.
    pub fn flip_bits(&self, node: NodeIndex, bit: FlippedBit, count: u64) {
        let mut planned = lock(&self.0.flips.planned);
        planned.remove(&node);
        if count > 0 {
            planned.insert(node, (bit, count));
        }
    }

    /// Returns between which nodes, from one to the other, sends went of which a bit was turned over, in the order in which they
    /// were received.
    pub fn flipped(&self) -> Vec<(NodeIndex, NodeIndex)> {
        lock(&self.0.flips.happened).clone()
    }
}

impl WorldShared {
    /// Returns what a node receives of what another has sent.
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

/// Returns a copy of bytes, of which there are some, that differs in a bit.
fn flipped(data: &Buffer, bit: u64) -> Buffer {
    let mut bytes = data.to_vec();
    let bits_of_byte = u64::from(u8::BITS);
    let at = usize::try_from(bit / bits_of_byte % bytes.len() as u64).expect("an index");
    bytes[at] ^= 1 << (bit % bits_of_byte);
    MemoryRegion::new(Memory::from(bytes), Box::new(())).into_shared()
}
