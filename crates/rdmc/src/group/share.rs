//! How fast a group may go: by its own bound, and by what the ports of its members leave to it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rdmc_schedule::Rank;

use super::Group;
use super::membership::Membership;
use crate::shares::{ALLOTTED_MIN, PortUser};
use crate::sync::lock;
use crate::transfer::exchange::Exchange;
use crate::transfer::limit::RateLimits;
use crate::wire::GroupFrame;

/// What the ports of the members leave to a group.
pub(super) struct Allotments {
    membership: Arc<Membership>,
    exchange: Arc<Exchange>,
    /// At the root: bytes of messages a second, by the members that hold the group back.
    by_member: Mutex<BTreeMap<Rank, u64>>,
}

impl Allotments {
    pub(super) fn new(membership: Arc<Membership>, exchange: Arc<Exchange>) -> Self {
        let allotments = Self { membership, exchange, by_member: Mutex::default() };
        allotments.limit(None);
        allotments
    }

    /// Sets how fast this member may send.
    fn limit(&self, allotted: Option<u64>) {
        let limits = RateLimits { blocks: self.membership.spec.rate_max, messages: allotted };
        // The node wants to know how often bytes leave.
        let counts = self.membership.node.port.is_known();
        self.exchange.limit.set(limits, counts, self.membership.now());
    }

    /// At the root: takes what a member's port leaves to the group.
    pub(super) fn take(&self, member: Rank, rate: Option<u64>) {
        self.note_shared(rate);
        let least = {
            let mut by_member = lock(&self.by_member);
            match rate {
                Some(rate) => by_member.insert(member, rate.max(ALLOTTED_MIN)),
                None => by_member.remove(&member),
            };
            by_member.values().min().copied()
        };
        self.limit(least);
    }

    /// A port that holds the group back is shared.
    fn note_shared(&self, rate: Option<u64>) {
        if rate.is_some() {
            self.exchange.distance.note_shared();
        }
    }
}

impl PortUser for Group {
    fn weight(&self) -> Option<u32> {
        self.membership.spec.share
    }

    fn block_size(&self) -> u32 {
        self.membership.spec.block_size
    }

    fn traffic(&self) -> [u64; 2] {
        self.exchange.counters.traffic()
    }

    fn copies(&self) -> [f64; 2] {
        let received = if self.membership.rank.is_root() { 0.0 } else { 1.0 };
        [received, self.exchange.limit.copies()]
    }

    fn allot(&self, rate: Option<u64>) {
        if self.membership.rank.is_root() {
            self.allotments.take(Rank::ROOT, rate);
            return;
        }
        self.allotments.note_shared(rate);
        self.membership.post_to_root(GroupFrame::Allot { rate });
    }

    fn has_ended(&self) -> bool {
        self.end.outcome().is_some()
    }
}
