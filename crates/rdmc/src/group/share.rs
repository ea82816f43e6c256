//! How fast a group may go: by its own bound, and by what the ports of its members leave to it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rdmc_schedule::Rank;

use super::Group;
use super::membership::Membership;
use crate::shares::{ALLOTTED_MIN, Allotment, PortUser};
use crate::sync::lock;
use crate::transfer::exchange::Exchange;
use crate::wire::GroupFrame;

/// What the ports of the members leave to a group.
pub(super) struct Allotments {
    membership: Arc<Membership>,
    exchange: Arc<Exchange>,
    /// At the root: what it knows of the members, itself included.
    by_member: Mutex<BTreeMap<Rank, Allotment>>,
}

impl Allotments {
    pub(super) fn new(membership: Arc<Membership>, exchange: Arc<Exchange>) -> Self {
        let own = membership.spec.rate_max.filter(|_| membership.rank.is_root());
        exchange.limit.set(own, false, membership.now());
        Self { membership, exchange, by_member: Mutex::default() }
    }

    /// At the root: takes what a member's port leaves to the group.
    pub(super) fn take(&self, member: Rank, allotment: Allotment) {
        let (is_shared, least) = {
            let mut by_member = lock(&self.by_member);
            by_member.insert(member, allotment);
            let rates = by_member.values().filter_map(|allotment| Some(allotment.rate?.max(ALLOTTED_MIN)));
            (by_member.values().any(|allotment| allotment.is_shared), rates.min())
        };
        let rate = self.membership.spec.rate_max.into_iter().chain(least).min();
        self.exchange.limit.set(rate, is_shared, self.membership.now());
        self.exchange.distance.note_shared(is_shared);
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

    fn copies(&self) -> Option<f64> {
        self.membership.rank.is_root().then(|| self.exchange.limit.copies())
    }

    fn allot(&self, allotment: Allotment) {
        if self.membership.rank.is_root() {
            self.allotments.take(Rank::ROOT, allotment);
            return;
        }
        let Allotment { is_shared, rate } = allotment;
        self.exchange.distance.note_shared(is_shared);
        self.membership.post_to_root(GroupFrame::Allot { is_shared, rate });
    }

    fn has_ended(&self) -> bool {
        self.end.outcome().is_some()
    }
}
