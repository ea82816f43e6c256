//! One direction of a member's port: blocks of different neighbours follow each other instead of sharing it.
//!
//! The schedules let a member send one block and receive one block per step. If it shared its port among several, each
//! block would arrive late, its relays would be late in turn, and the members would fall out of step. So a block from
//! or to another neighbour than the block before it waits until that one is nearly through. Blocks of the same
//! neighbour queue behind each other anyway.

use std::sync::Mutex;

use rdmc_fabric::NearlyDone;
use rdmc_schedule::Rank;

use crate::sync::lock;

/// One direction of a member's port.
#[derive(Debug, Default)]
pub(crate) struct Port {
    /// The neighbour of the last block and when that is nearly through.
    last: Mutex<Option<(Rank, NearlyDone)>>,
}

impl Port {
    /// Returns the neighbour of the last block.
    pub(crate) fn occupant(&self) -> Option<Rank> {
        lock(&self.last).as_ref().map(|(of, _)| *of)
    }

    /// Tells whether a block of `peer` may follow the last one at once.
    pub(crate) fn is_free_for(&self, peer: Rank) -> bool {
        lock(&self.last).as_ref().is_none_or(|(of, nearly_done)| *of == peer || nearly_done.is_reached())
    }

    /// Waits until a block of `peer` may follow the last one.
    pub(crate) async fn free_for(&self, peer: Rank) {
        let other = lock(&self.last).take_if(|(of, _)| *of != peer);
        if let Some((_, nearly_done)) = other {
            nearly_done.await;
        }
    }

    /// Notes the block that has the port now.
    pub(crate) fn occupy(&self, peer: Rank, nearly_done: NearlyDone) {
        *lock(&self.last) = Some((peer, nearly_done));
    }
}
