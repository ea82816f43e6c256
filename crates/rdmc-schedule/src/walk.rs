//! One member's side of a flat schedule, and the walk along its steps.

use std::ops::Range;

use crate::cascade::Handover;
use crate::circulant::Lanes;
use crate::pipeline::Port;
use crate::simple::{Fan, Run};

/// The end of its hops that a member is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

/// What crosses the asked member's edge in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerBlock {
    pub(crate) peer: u32,
    pub(crate) block: u32,
}

/// The hops of one member on one side, in step order.
///
/// Only the steps in `window` are looked at, of a fan-out and of a handover the transfers, and no more than O(log n) of
/// them are idle in a row.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    part: Part,
    window: Range<u64>,
}

impl Walk {
    pub(crate) fn new(part: Part, window: Range<u64>) -> Walk {
        Walk { part, window }
    }
}

impl Iterator for Walk {
    type Item = (u64, PeerBlock);

    fn next(&mut self) -> Option<(u64, PeerBlock)> {
        let part = &self.part;
        self.window.find_map(|index| part.peer_block(index))
    }
}

/// Random access to the steps of one member on one side.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    Run(Run),
    Fan(Fan),
    Port(Port),
    Lanes(Box<Lanes>),
    Handover(Box<Handover>),
}

impl Part {
    fn peer_block(&self, index: u64) -> Option<(u64, PeerBlock)> {
        let hop = match self {
            Part::Run(run) => Some(run.peer_block(index)),
            Part::Fan(fan) => return Some(fan.peer_block(index)),
            Part::Handover(handover) => return handover.peer_block(index),
            Part::Port(port) => port.peer_block(index),
            Part::Lanes(lanes) => lanes.peer_block(index),
        };
        hop.map(|hop| (index, hop))
    }
}

/// Returns block `due`, or the last one when the message ends before it.
pub(crate) fn capped(due: u64, blocks: u32) -> u32 {
    let last = blocks - 1;
    u32::try_from(due).map_or(last, |due| due.min(last))
}
