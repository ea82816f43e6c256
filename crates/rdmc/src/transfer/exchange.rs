//! What a member exchanges blocks by: its neighbours, both directions of its port, and what it knows of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{Environment, Timestamp};
use rdmc_schedule::{Algorithm, BlockCount, BlockIndex, Rank, Schedule};

use super::Shape;
use super::distance::Distance;
use super::limit::SendLimit;
use super::neighbour::Neighbour;
use super::port::Port;
use super::waits::{WaitMonitor, WaitReason};
use crate::stats::Counters;

/// One member's connections to its neighbours in a group. The transfers of all messages share them.
pub(crate) struct Exchange {
    pub(crate) rank: Rank,
    pub(crate) members: u32,
    pub(crate) algorithm: Algorithm,
    /// Size of a block in bytes.
    pub(crate) block_size: u32,
    /// Whether blocks are checked where they arrive.
    pub(crate) checks_blocks: bool,
    pub(crate) neighbours: BTreeMap<Rank, Neighbour>,
    /// The port by which blocks come in.
    pub(crate) ingress: Port,
    /// The port by which blocks go out.
    pub(crate) egress: Port,
    pub(crate) distance: Distance,
    /// How fast blocks may leave.
    pub(crate) limit: SendLimit,
    pub(crate) waits: WaitMonitor,
    pub(crate) counters: Counters,
    pub(crate) node_counters: Arc<Counters>,
    pub(crate) environment: Arc<dyn Environment>,
}

impl Exchange {
    pub(crate) fn now(&self) -> Timestamp {
        self.environment.now()
    }

    /// Returns the schedule of a message of `blocks` blocks.
    pub(crate) fn schedule(&self, blocks: BlockCount) -> Schedule {
        Schedule::new(&self.algorithm, self.members, blocks).expect("checked when the group was formed")
    }

    /// Returns the first block that a member receives of a message; `None` at the root.
    pub(crate) fn first_received(&self, shape: Shape, rank: Rank) -> Option<BlockIndex> {
        self.schedule(shape.count).receives(rank).next().map(|receive| receive.block)
    }

    /// Returns the first block that this member receives of a message.
    pub(super) fn first_of(&self, shape: Shape) -> BlockIndex {
        self.first_received(shape, self.rank).expect("a member that is not the root receives every block")
    }

    /// Returns a member that the schedule names as a peer of this one.
    pub(crate) fn neighbour(&self, rank: Rank) -> &Neighbour {
        self.neighbours.get(&rank).expect("the neighbours are all peers of every schedule")
    }

    /// Awaits `wait`, which is for a neighbour; returns also how long it took.
    pub(crate) async fn waiting<T>(&self, what: WaitReason, on: Rank, wait: impl Future<Output = T>) -> (T, Duration) {
        let wait_ends = WaitEnds { exchange: self, what, on };
        let began = self.now();
        self.waits.begin(what, on, began);
        let value = wait.await;
        drop(wait_ends);
        (value, self.now().since(began))
    }

    pub(crate) fn count_received(&self, bytes: usize) {
        self.counters.received(bytes);
        self.node_counters.received(bytes);
    }

    pub(crate) fn count_sent(&self, bytes: usize, waited_for_ready: Duration) {
        self.counters.sent(bytes);
        if !waited_for_ready.is_zero() {
            self.counters.waited(waited_for_ready);
        }
        self.node_counters.sent(bytes);
    }
}

/// Notes that a wait is over when it is dropped, as it may be if a task waits for other things too.
struct WaitEnds<'a> {
    exchange: &'a Exchange,
    what: WaitReason,
    on: Rank,
}

impl Drop for WaitEnds<'_> {
    fn drop(&mut self) {
        self.exchange.waits.end(self.what, self.on, self.exchange.now());
    }
}
