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
    /// By the receiving node and the immediate: the bit of the bytes, and the number of remaining writes.
    planned_of_writes: Mutex<BTreeMap<(NodeIndex, u32), (u64, u64)>>,
    /// The sending and the receiving node of each flip.
    happened: Mutex<Vec<(NodeIndex, NodeIndex)>>,
    /// The writing and the receiving node, and the immediate, of each flip of a write.
    happened_of_writes: Mutex<Vec<(NodeIndex, NodeIndex, u32)>>,
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

    /// Flips a bit of the bytes of each of the next `count` writes to a node that carry an immediate `imm` and are
    /// longer than a counter of 8 bytes. A second call for the same immediate replaces the first.
    pub fn flip_writes(&self, node: NodeIndex, imm: u32, bit: u64, count: u64) {
        let mut planned = lock(&self.0.flips.planned_of_writes);
        planned.remove(&(node, imm));
        if count > 0 {
            planned.insert((node, imm), (bit, count));
        }
    }

    /// Returns the sending and the receiving node of each send with a flipped bit, in the order of receipt.
    pub fn flipped(&self) -> Vec<(NodeIndex, NodeIndex)> {
        lock(&self.0.flips.happened).clone()
    }

    /// Returns the writing and the receiving node of each write that carried an immediate `imm` and has a flipped bit,
    /// in the order of receipt.
    pub fn flipped_writes(&self, imm: u32) -> Vec<(NodeIndex, NodeIndex)> {
        let happened = lock(&self.0.flips.happened_of_writes);
        happened.iter().filter(|(.., of)| *of == imm).map(|(from, to, _)| (*from, *to)).collect()
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
        let Some(bit) = take_one(&mut lock(&self.flips.planned), to) else { return (data, imm) };
        lock(&self.flips.happened).push((from, to));
        self.note_fault(Some(to), "bit flipped");
        match bit {
            FlippedBit::OfPayload(bit) if !data.is_empty() => (flipped(&data, bit), imm),
            FlippedBit::OfPayload(bit) | FlippedBit::OfImmediate(bit) => {
                (data, imm.map(|imm| imm ^ 1 << (bit % u64::from(u32::BITS))))
            }
        }
    }

    /// Returns the bytes of a write with an immediate as they reach the memory of the receiver.
    pub(crate) fn written(&self, (from, to): (NodeIndex, NodeIndex), data: Buffer, imm: u32) -> Buffer {
        if data.len() <= COUNTER_LEN {
            return data;
        }
        let Some(bit) = take_one(&mut lock(&self.flips.planned_of_writes), (to, imm)) else { return data };
        lock(&self.flips.happened_of_writes).push((from, to, imm));
        self.note_fault(Some(to), "bit of a write flipped");
        flipped(&data, bit)
    }
}

/// Takes one of the planned flips, if there is one.
fn take_one<K: Ord, B: Copy>(planned: &mut BTreeMap<K, (B, u64)>, key: K) -> Option<B> {
    let (bit, left) = planned.get_mut(&key)?;
    let bit = *bit;
    *left -= 1;
    if *left == 0 {
        planned.remove(&key);
    }
    Some(bit)
}

/// Returns a copy of non-empty bytes with one flipped bit.
fn flipped(data: &Buffer, bit: u64) -> Buffer {
    let mut bytes = data.to_vec();
    let bits_of_byte = u64::from(u8::BITS);
    let at = usize::try_from(bit / bits_of_byte % bytes.len() as u64).expect("an index");
    bytes[at] ^= 1 << (bit % bits_of_byte);
    MemoryRegion::new(Memory::from(bytes), Box::new(())).into_shared()
}

/// Bytes of a counter that is written.
const COUNTER_LEN: usize = 8;
