//! The cascade, a spine that costs no port a second block a step.
//!
//! Each rack sends the blocks on from a member whose port the rack's binomial pipeline leaves idle. In step j of that
//! pipeline, which has d dimensions, the vertex across from the leader sends nothing, since the leader misses nothing.
//! The member that would send for that vertex got block j − d from the leader a round earlier, and now sends it to the
//! leader of the next rack. So each rack begins d + 1 steps after the one before it, and takes one block a step, in
//! order. A rack has one such port, so the racks can only follow one another.
//!
//! Racks whose size is no power of two have a closing step, in which there is no port to spare: there one member sends
//! two blocks, the last one to the next rack.

use crate::pipeline::Cube;
use crate::racks::Racks;
use crate::simple;
use crate::walk::{PeerBlock, Side, StepSource, Walk};

/// The hops from one rack to the next, from the view of one member at either end.
#[derive(Clone, Debug)]
pub(crate) struct Handover {
    /// The rack that hands on.
    from: Cube,
    /// The step of the first block.
    start: u64,
    end: HandoverEnd,
}

#[derive(Clone, Copy, Debug)]
enum HandoverEnd {
    /// The member at this place of the one rack, and the number of the other.
    Giver { place: u32, to: u32 },
    /// The leader of the other.
    Taker,
}

impl Handover {
    /// Returns the `index`th hop and its step. The taker's peer is a place in the rack before; the giver's peer is the
    /// number of the next rack.
    pub(crate) fn peer_block(&self, index: u64) -> Option<(u64, PeerBlock)> {
        let block = u32::try_from(index).expect("blocks are 32-bit numbers");
        let giver = self.from.first_taker(block);
        let peer = match self.end {
            HandoverEnd::Taker => giver,
            HandoverEnd::Giver { place, to } if place == giver => to,
            HandoverEnd::Giver { .. } => return None,
        };
        Some((self.start + index, PeerBlock { peer, block }))
    }
}

/// Lists what the member at `place` in `rack` sends on, or takes as its leader; the rack's first step is `start`.
pub(crate) fn walk(racks: &Racks, blocks: u32, rack: u32, start: u64, place: u32, side: Side) -> Walk {
    let (giving, taken_from, end) = match side {
        Side::Send if rack + 1 < racks.count() => {
            (rack, start + delay(racks, rack), HandoverEnd::Giver { place, to: rack + 1 })
        }
        Side::Receive if rack > 0 && place == 0 => (rack - 1, start, HandoverEnd::Taker),
        _ => return simple::idle(),
    };
    let from = Cube::new(racks.size(giving), blocks);
    if side == Side::Send && !from.takes_from_root(place) {
        return simple::idle();
    }
    // A leader has a block from the step after the one in which it comes.
    Walk::new(StepSource::Handover(Box::new(Handover { from, start: taken_from - 1, end })), 0..blocks.into())
}

/// Returns the first step of `rack`, in which its leader has the first block. O(racks).
pub(crate) fn start(racks: &Racks, rack: u32) -> u64 {
    (0..rack).map(|before| delay(racks, before)).sum()
}

/// Returns by how many steps the rack after `rack` begins later.
pub(crate) fn delay(racks: &Racks, rack: u32) -> u64 {
    u64::from(racks.size(rack).ilog2()) + 1
}

/// Returns the number of steps until the last leader has the last block. O(racks).
pub(crate) fn steps(racks: &Racks, blocks: u32) -> u64 {
    match start(racks, racks.count() - 1) {
        0 => 0,
        start => start + u64::from(blocks) - 1,
    }
}
