//! The hops that a member has still to make in one direction.

use std::collections::VecDeque;
use std::iter::Fuse;

use rdmc_schedule::{Hop, Rank};

/// The hops that a member has still to make in one direction: those that come next, by neighbour.
pub(super) struct PendingHops {
    later: Fuse<Box<dyn Iterator<Item = Hop> + Send + Sync>>,
    /// The very next hop, if it was looked at alone.
    alone: Option<Hop>,
    next: Vec<NeighbourHops>,
    /// Number of hops in `next`.
    looked_ahead: usize,
}

struct NeighbourHops {
    with: Rank,
    hops: VecDeque<Hop>,
}

impl PendingHops {
    /// Takes the hops in the order of their steps.
    pub(super) fn new(hops: Box<dyn Iterator<Item = Hop> + Send + Sync>) -> Self {
        Self { later: hops.fuse(), alone: None, next: Vec::new(), looked_ahead: 0 }
    }

    /// Returns the very next hop.
    pub(super) fn first(&mut self) -> Option<Hop> {
        if self.looked_ahead > 0 {
            return self.first_that(|_| true);
        }
        if self.alone.is_none() {
            self.alone = self.later.next();
        }
        self.alone
    }

    /// Looks at the hops that come next, `count` of them at most.
    pub(super) fn look_ahead(&mut self, count: usize) {
        while self.looked_ahead < count {
            let Some(hop) = self.alone.take().or_else(|| self.later.next()) else { return };
            let known = self.next.iter().position(|hops| hops.with == hop.peer);
            let at = known.unwrap_or_else(|| {
                self.next.push(NeighbourHops { with: hop.peer, hops: VecDeque::new() });
                self.next.len() - 1
            });
            self.next[at].hops.push_back(hop);
            self.looked_ahead += 1;
        }
    }

    /// Returns the first of the neighbours' next hops, of those looked at, for which `can_go` holds, in the order of
    /// the steps.
    pub(super) fn first_that(&self, mut can_go: impl FnMut(&Hop) -> bool) -> Option<Hop> {
        let mut first: Option<Hop> = None;
        for hop in self.neighbours_next() {
            if first.is_none_or(|first| hop.step < first.step) && can_go(&hop) {
                first = Some(hop);
            }
        }
        first
    }

    /// Lists the next hop with each neighbour, of those looked at.
    pub(super) fn neighbours_next(&self) -> impl Iterator<Item = Hop> {
        self.next.iter().filter_map(|next| next.hops.front().copied())
    }

    /// Removes the next hop with a neighbour.
    pub(super) fn remove(&mut self, with: Rank) {
        if self.looked_ahead == 0 {
            debug_assert!(self.alone.is_some_and(|hop| hop.peer == with), "no other hop was looked at");
            self.alone = None;
            return;
        }
        let Some(at) = self.next.iter().position(|next| next.with == with) else { return };
        self.looked_ahead -= usize::from(self.next[at].hops.pop_front().is_some());
        // Few neighbours come again, and keep their memory. A root may have thousands.
        if self.next[at].hops.is_empty() && self.next.len() > NEIGHBOURS_KEPT {
            self.next.swap_remove(at);
        }
    }

    /// Tells whether the very next hop is with this neighbour.
    pub(super) fn goes_on_with(&mut self, with: Rank) -> bool {
        self.first().is_some_and(|next| next.peer == with)
    }
}

/// Neighbours that are kept although no hop with them comes next.
const NEIGHBOURS_KEPT: usize = 32;

#[cfg(test)]
mod tests {
    use rdmc_schedule::{BlockIndex, Step};

    use super::*;

    fn pending(peers: &[u32]) -> PendingHops {
        let hops: Vec<Hop> = (0..)
            .zip(peers)
            .map(|(step, &peer)| Hop { step: Step(step), peer: Rank(peer), block: BlockIndex(0) })
            .collect();
        PendingHops::new(Box::new(hops.into_iter()))
    }

    fn step(hop: Option<Hop>) -> Option<u64> {
        hop.map(|hop| hop.step.0)
    }

    #[test]
    fn the_first_that_can_go_goes_and_each_neighbours_hops_keep_their_order() {
        let mut sends = pending(&[1, 1, 2, 1, 2, 3]);
        assert_eq!(step(sends.first()), Some(0));
        sends.look_ahead(5);
        assert_eq!(step(sends.first_that(|_| true)), Some(0));
        assert_eq!(step(sends.first_that(|hop| hop.peer != Rank(1))), Some(2));
        sends.remove(Rank(2));
        assert_eq!(step(sends.first_that(|hop| hop.peer != Rank(1))), Some(4));
        sends.remove(Rank(2));
        assert_eq!(step(sends.first_that(|hop| hop.peer != Rank(1))), None);
        sends.look_ahead(5);
        assert_eq!(step(sends.first_that(|hop| hop.peer != Rank(1))), Some(5));
        for expected in [Some(0), Some(1), Some(3), None] {
            let next = sends.first_that(|hop| hop.peer == Rank(1));
            assert_eq!(step(next), expected);
            sends.remove(Rank(1));
        }
    }

    #[test]
    fn a_member_may_look_ahead_at_times() {
        let mut sends = pending(&[1, 2, 1, 3]);
        for (looks_ahead, expected) in [(false, 0), (true, 1), (false, 2), (false, 3)] {
            if looks_ahead {
                sends.look_ahead(2);
            }
            let next = sends.first().expect("a hop");
            assert_eq!(next.step.0, expected);
            sends.remove(next.peer);
        }
        assert_eq!(sends.first(), None);
        sends.look_ahead(2);
        assert_eq!(sends.first_that(|_| true), None);
    }

    #[test]
    fn a_run_ends_where_another_neighbour_comes_next() {
        let mut sends = pending(&[1, 1, 2]);
        for more in [true, false, false] {
            let hop = sends.first().expect("a hop");
            sends.remove(hop.peer);
            assert_eq!(sends.goes_on_with(hop.peer), more);
        }
        assert_eq!(sends.first(), None);
    }
}
