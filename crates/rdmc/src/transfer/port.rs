//! One direction of a member's port: blocks of different neighbours follow each other instead of sharing it.
//!
//! The schedules let a member send one block and receive one block per step. If it shared its port among several, each
//! block would arrive late, its relays would be late in turn, and the members would fall out of step. So a block from
//! or to another neighbour than the block before it waits until that one is nearly through. Blocks of the same
//! neighbour queue behind each other anyway.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use rdmc_fabric::NearlyDone;
use rdmc_schedule::{Rank, Step};

use crate::sync::lock;

/// One direction of a member's port.
#[derive(Debug, Default)]
pub(crate) struct Port {
    last: Mutex<Option<PortBlock>>,
    /// The rank of the last neighbour that took the port, plus 1. Its next block may follow at once.
    with: AtomicU32,
}

/// The last block that took the port.
#[derive(Debug)]
struct PortBlock {
    with: Rank,
    turn: PortTurn,
    nearly_done: NearlyDone,
}

/// When a block is due: the number of its message, and the step in it.
pub(crate) type PortTurn = (u64, Step);

impl Port {
    /// Returns the neighbour of the last block.
    pub(crate) fn occupant(&self) -> Option<Rank> {
        lock(&self.last).as_ref().map(|block| block.with)
    }

    /// Tells whether a block of `peer` may follow the last one at once.
    ///
    /// A block never waits for one that is due later, as there is when ports have run free: that one may depend on it.
    pub(crate) fn is_free_for(&self, peer: Rank, turn: PortTurn) -> bool {
        self.with.load(Ordering::Relaxed) == peer.0 + 1
            || lock(&self.last)
                .as_ref()
                .is_none_or(|block| !block.is_before(peer, turn) || block.nearly_done.is_reached())
    }

    /// Waits until a block of `peer` may follow the last one.
    pub(crate) async fn free_for(&self, peer: Rank, turn: PortTurn) {
        let other = lock(&self.last).take_if(|block| block.is_before(peer, turn));
        if let Some(block) = other {
            block.nearly_done.await;
        }
    }

    /// Notes the block that has the port now.
    pub(crate) fn occupy(&self, with: Rank, turn: PortTurn, nearly_done: NearlyDone) {
        *lock(&self.last) = Some(PortBlock { with, turn, nearly_done });
        self.with.store(with.0 + 1, Ordering::Relaxed);
    }
}

impl PortBlock {
    fn is_before(&self, peer: Rank, turn: PortTurn) -> bool {
        self.with != peer && self.turn <= turn
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use rdmc_fabric::{BufferMut, Fabric, MemNetwork, QueuePairConfig};

    use super::*;

    const FIRST: PortTurn = (0, Step(1));
    const LATER: PortTurn = (0, Step(2));

    #[test]
    fn another_neighbours_block_waits_for_the_last_one_unless_that_is_due_later() {
        let fabric = MemNetwork::new().fabric();
        let config = QueuePairConfig { receive_depth: 1, ..Default::default() };
        let completions = fabric.create_completion_queue(1 << 16, rdmc_fabric::CompletionMode::Event).unwrap();
        let queue_pair = fabric.create_queue_pair(&completions.source(), config).unwrap();
        let port = Port::default();
        let free = |peer, turn| port.is_free_for(Rank(peer), turn);
        assert!(free(1, FIRST) && port.occupant().is_none());
        let never = queue_pair.receive(BufferMut::empty());
        port.occupy(Rank(1), LATER, never.nearly_done());
        assert!(free(1, LATER) && free(2, FIRST) && !free(2, LATER));
        let mut waiting = Box::pin(port.free_for(Rank(2), LATER));
        assert!(waiting.as_mut().now_or_never().is_none());
        // What it waits for has the port no more.
        assert!(free(1, LATER) && free(3, LATER));
        // The queue is full.
        let refused = queue_pair.receive(BufferMut::empty());
        port.occupy(Rank(2), LATER, refused.nearly_done());
        assert!(free(2, LATER) && free(1, LATER) && port.occupant() == Some(Rank(2)));
    }
}
