//! One member's side of a flat schedule, and the walk along its steps.

use std::ops::Range;

use crate::cascade::Handover;
use crate::circulant::Lanes;
use crate::pipeline::CubeSide;
use crate::simple::{Fan, Run};
use crate::two_tree::Edges;

/// The end of the hops that a member is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

/// The block that crosses the asked member's edge in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerBlock {
    pub(crate) peer: u32,
    pub(crate) block: u32,
}

/// Walks along the hops of one member on one side, in step order.
///
/// It looks only at the steps in `window`; for a fan-out and for a handover these are the hops. No more than O(log n)
/// of them are idle in a row.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    source: StepSource,
    window: Range<u64>,
}

impl Walk {
    pub(crate) fn new(source: StepSource, window: Range<u64>) -> Walk {
        Walk { source, window }
    }
}

impl Iterator for Walk {
    type Item = (u64, PeerBlock);

    fn next(&mut self) -> Option<(u64, PeerBlock)> {
        let source = &self.source;
        self.window.find_map(|index| source.peer_block(index))
    }
}

/// Gives random access to the steps of one member on one side.
#[derive(Clone, Debug)]
pub(crate) enum StepSource {
    Run(Run),
    Fan(Fan),
    Cube(CubeSide),
    Lanes(Box<Lanes>),
    Edges(Edges),
    Handover(Box<Handover>),
}

impl StepSource {
    fn peer_block(&self, index: u64) -> Option<(u64, PeerBlock)> {
        let hop = match self {
            StepSource::Run(run) => Some(run.peer_block(index)),
            StepSource::Fan(fan) => return Some(fan.peer_block(index)),
            StepSource::Handover(handover) => return handover.peer_block(index),
            StepSource::Cube(side) => side.peer_block(index),
            StepSource::Lanes(lanes) => lanes.peer_block(index),
            StepSource::Edges(edges) => edges.peer_block(index),
        };
        hop.map(|hop| (index, hop))
    }
}

/// Returns block `due`, or the last one when the message ends before it.
pub(crate) fn capped(due: u64, blocks: u32) -> u32 {
    let last = blocks - 1;
    u32::try_from(due).map_or(last, |due| due.min(last))
}
