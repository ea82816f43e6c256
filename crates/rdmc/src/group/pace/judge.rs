//! Finds the cause of waiting.
//!
//! A member that waits for a slow one makes others wait in turn. So waiting is followed along, as random surfers follow
//! links: the waiting for a member moves on, in proportion, to the members for which that one waits, until it does not
//! move any more. Most of it ends at the slow member.

use std::collections::BTreeMap;

use rdmc_schedule::Rank;

use super::WINDOW_MS;
use crate::wire::WaitTimes;

/// The waiting of members within the latest window.
#[derive(Default)]
pub(crate) struct WaitReports {
    /// What each member has reported, and the age of that in windows.
    latest: BTreeMap<Rank, (u32, Vec<WaitTimes>)>,
    /// What blocks to each member have taken so far, and within the last windows: each counts half of the next one.
    so_far: BTreeMap<u32, Cost>,
    recent: BTreeMap<u32, Cost>,
}

/// What blocks to a member have taken. Both are counted in parts of [`PARTS`], so that they can be halved.
#[derive(Clone, Copy, Default)]
struct Cost {
    busy_ms: u64,
    blocks: u64,
}

impl Cost {
    fn add(&mut self, waited: &WaitTimes) {
        self.busy_ms = self.busy_ms.saturating_add(u64::from(waited.busy_ms) * PARTS);
        self.blocks = self.blocks.saturating_add(u64::from(waited.blocks) * PARTS);
    }

    /// Halves what has two blocks or more. Time without blocks adds up.
    fn halve(&mut self) {
        if self.blocks >= 2 * PARTS {
            *self = Self { busy_ms: self.busy_ms / 2, blocks: self.blocks / 2 };
        }
    }

    /// Returns microseconds for each block.
    fn of_block(self) -> u64 {
        self.busy_ms.saturating_mul(1000) / self.blocks.max(PARTS)
    }
}

impl WaitReports {
    /// Takes a member's report.
    pub(crate) fn add(&mut self, from: Rank, waited: Vec<WaitTimes>) {
        for waited in &waited {
            self.so_far.entry(waited.on).or_default().add(waited);
            self.recent.entry(waited.on).or_default().add(waited);
        }
        self.latest.insert(from, (0, waited));
    }

    /// Tells whether there are no recent reports.
    pub(crate) fn is_empty(&self) -> bool {
        self.latest.is_empty()
    }

    /// Forgets reports that are too old.
    pub(crate) fn age(&mut self) {
        self.recent.values_mut().for_each(Cost::halve);
        self.latest.retain(|_, (age, _)| {
            *age += 1;
            *age < REPORT_AGE_MAX
        });
    }

    /// Returns the receiver that holds the others up, if there is one, and the member that waits most for it.
    pub(crate) fn slowest(&self, members: u32) -> Option<(Rank, Rank)> {
        let weights = self.ends(members);
        let receivers = 1..members as usize;
        let most = receivers.clone().max_by(|a, b| weights[*a].total_cmp(&weights[*b]))?;
        let slowest = Rank(u32::try_from(most).ok()?);
        if members == 2 {
            return self.grants_nothing(slowest).then_some((slowest, Rank::ROOT));
        }
        let others: f64 = receivers.clone().filter(|other| *other != most).map(|other| weights[other]).sum();
        #[expect(clippy::cast_precision_loss, reason = "a number of members")]
        let average = others / (receivers.len() - 1) as f64;
        let stuck = self.most(slowest, |waited| waited.ready_ms + waited.leaving_ms) >= WINDOW_MS / 2;
        let slow = stuck && weights[most] >= average * WEIGHT_RATIO_MIN && self.is_costly(slowest);
        slow.then(|| (slowest, self.longest_waiting(slowest)))
    }

    /// Returns the member that waits most for another.
    fn longest_waiting(&self, with: Rank) -> Rank {
        let wait = |waited: &[WaitTimes]| {
            let on = waited.iter().filter(|waited| waited.on == with.0);
            on.map(|waited| waited.ready_ms + waited.leaving_ms).sum::<u32>()
        };
        let most = self.latest.iter().max_by_key(|(_, (_, waited))| wait(waited));
        most.map_or(Rank::ROOT, |(rank, _)| *rank)
    }

    /// Tells whether this member takes several times as long for a block as others do.
    fn is_costly(&self, slowest: Rank) -> bool {
        let mut costs: BTreeMap<u32, Cost> = BTreeMap::new();
        self.waits().for_each(|waited| costs.entry(waited.on).or_default().add(waited));
        costs.retain(|_, cost| cost.busy_ms > 0 || cost.blocks > 0);
        let is_alone = costs.keys().all(|on| *on == slowest.0);
        // Some schedules serve one member after the other.
        let (own, others) = if is_alone { (&self.recent, &self.so_far) } else { (&costs, &costs) };
        let own = own.get(&slowest.0).map_or(0, |cost| cost.of_block());
        let others = others.iter().filter(|(on, cost)| **on != slowest.0 && cost.blocks > 0);
        let mut others: Vec<u64> = others.map(|(_, cost)| cost.of_block()).collect();
        others.sort_unstable();
        // Most may be slow because of the slowest: in a pipeline, the members that wait for its blocks.
        match others.get(others.len() / 4) {
            Some(quick) => own >= quick.saturating_mul(COST_RATIO_MIN),
            // If it is served beside others, they get nothing because of it.
            None => !is_alone || self.grants_nothing(slowest),
        }
    }

    /// Tells whether a member that cannot be compared with others is slow. A fast one may be waited for most of the
    /// time, too.
    fn grants_nothing(&self, slowest: Rank) -> bool {
        self.most(slowest, |waited| waited.ready_ms) >= WINDOW_MS / 10 * 9
            && self.most(slowest, |waited| waited.blocks) == 0
    }

    /// Returns the most that one member has reported of another.
    fn most(&self, of: Rank, what: fn(&WaitTimes) -> u32) -> u32 {
        self.waits().filter(|waited| waited.on == of.0).map(what).max().unwrap_or(0)
    }

    fn waits(&self) -> impl Iterator<Item = &WaitTimes> {
        self.latest.values().flat_map(|(_, waited)| waited)
    }

    /// Follows all waiting to its end; returns how much of it ends at each member.
    #[expect(clippy::cast_precision_loss, reason = "times of less than a second and numbers of members")]
    fn ends(&self, members: u32) -> Vec<f64> {
        let count = members as usize;
        let window = f64::from(WINDOW_MS);
        let mut weights = vec![1.0 / count as f64; count];
        for _ in 0..ROUNDS {
            let mut next = vec![0.0; count];
            let mut spread = 0.0;
            for (rank, weight) in weights.iter().enumerate() {
                let waited = u32::try_from(rank).ok().and_then(|rank| self.latest.get(&Rank(rank)));
                let of = |waited: &WaitTimes| f64::from(waited.ready_ms + waited.leaving_ms + waited.arriving_ms);
                let all: f64 = waited.iter().flat_map(|(_, waited)| waited).map(of).sum();
                let goes_on = if all > 0.0 { FOLLOWED * (all / window).min(1.0) } else { 0.0 };
                spread += weight * (1.0 - goes_on);
                for waited in waited.iter().flat_map(|(_, waited)| waited) {
                    next[waited.on as usize] += weight * goes_on * of(waited) / all.max(1.0);
                }
            }
            next.iter_mut().for_each(|weight| *weight += spread / count as f64);
            weights = next;
        }
        weights
    }
}

/// Windows after which a member's report does not count any more.
const REPORT_AGE_MAX: u32 = 2;
/// Parts of a millisecond and of a block.
const PARTS: u64 = 1 << 10;
/// Rounds in which waiting is followed along.
const ROUNDS: u32 = 30;
/// The share of waiting that is followed.
const FOLLOWED: f64 = 0.85;
/// Least ratio of the waiting that ends at a slow member to the average of the others.
const WEIGHT_RATIO_MIN: f64 = 1.8;
/// Least ratio of the time of a block to a slow member to that of a block to others.
const COST_RATIO_MIN: u64 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(waits: &[(u32, u32, u32, u32, u32, u32)]) -> WaitReports {
        let mut reports = WaitReports::default();
        let mut by_member: BTreeMap<u32, Vec<WaitTimes>> = BTreeMap::new();
        for &(from, on, ready_ms, leaving_ms, arriving_ms, blocks) in waits {
            let busy_ms = ready_ms + leaving_ms;
            by_member.entry(from).or_default().push(WaitTimes {
                on,
                ready_ms,
                leaving_ms,
                arriving_ms,
                busy_ms,
                blocks,
            });
        }
        by_member.into_iter().for_each(|(from, waited)| reports.add(Rank(from), waited));
        reports
    }

    #[test]
    fn who_grants_nothing_is_slow() {
        // A chain in which the third takes nothing.
        let chain = reports(&[(0, 1, 5, 10, 0, 40), (1, 2, 240, 0, 0, 1), (3, 2, 0, 0, 240, 0)]);
        assert_eq!(chain.slowest(4), Some((Rank(2), Rank(1))));
        assert_eq!(reports(&[(0, 1, 250, 0, 0, 0)]).slowest(2), Some((Rank(1), Rank(0))));
        assert_eq!(reports(&[(0, 1, 250, 0, 0, 400)]).slowest(2), None);
        assert_eq!(reports(&[(0, 1, 0, 250, 0, 9)]).slowest(2), None, "that may be the network");
    }

    #[test]
    fn who_waits_for_the_slow_one_is_not_slow() {
        // 0 sends to 1, 2 and 4; 4 is slow in both directions, 6 waits for its blocks and makes 2 wait.
        let cube = reports(&[
            (0, 1, 5, 10, 0, 20),
            (0, 2, 5, 10, 0, 20),
            (0, 4, 100, 100, 0, 2),
            (5, 4, 0, 150, 0, 2),
            (4, 0, 0, 0, 80, 0),
            (4, 5, 0, 0, 80, 0),
            (4, 6, 0, 90, 0, 2),
            (6, 4, 0, 0, 200, 0),
            (2, 6, 150, 10, 0, 3),
            (2, 3, 5, 10, 0, 20),
            (1, 5, 10, 10, 0, 20),
            (1, 3, 10, 10, 0, 20),
        ]);
        assert_eq!(cube.slowest(7).map(|(slow, _)| slow), Some(Rank(4)));
    }

    #[test]
    fn of_equals_nobody_is_slow() {
        let even: Vec<_> = (0..8).map(|rank| (rank, (rank + 1) % 8, 60, 100, 60, 20)).collect();
        assert_eq!(reports(&even).slowest(8), None);
        assert_eq!(WaitReports::default().slowest(8), None);
        assert_eq!(WaitReports::default().slowest(1), None);
    }

    #[test]
    fn who_is_served_alone_is_compared_with_those_before() {
        // One after the other is sent to, and always waited for.
        let serving = |reports: &mut WaitReports, on, blocks| {
            let waited = WaitTimes { on, ready_ms: 150, leaving_ms: 90, arriving_ms: 0, busy_ms: 240, blocks };
            reports.add(Rank(0), vec![waited]);
            let slow = reports.slowest(4).map(|(slow, _)| slow);
            reports.age();
            slow
        };
        let mut sequential = WaitReports::default();
        assert_eq!(serving(&mut sequential, 1, 20), None, "nobody is known");
        assert_eq!(serving(&mut sequential, 2, 20), None);
        assert_eq!(serving(&mut sequential, 3, 2), Some(Rank(3)));
        assert_eq!(serving(&mut sequential, 1, 20), None);
        // With a block in 500 ms, one that gets nothing is slow after three times as long.
        let mut long = WaitReports::default();
        assert_eq!([0, 1, 0, 1].map(|blocks| serving(&mut long, 1, blocks)), [None; 4]);
        assert_eq!([0, 1, 0, 1].map(|blocks| serving(&mut long, 2, blocks)), [None; 4]);
        assert!((0..8).any(|_| serving(&mut long, 3, 0) == Some(Rank(3))), "it gets nothing");
        let mut stuck = WaitReports::default();
        stuck.add(Rank(0), vec![WaitTimes { on: 1, ready_ms: 250, busy_ms: 250, ..WaitTimes::default() }]);
        assert_eq!(stuck.slowest(4), Some((Rank(1), Rank(0))), "it grants nothing");
    }

    #[test]
    fn what_was_said_does_not_count_for_long() {
        let mut stuck = reports(&[(0, 1, 250, 0, 0, 0)]);
        stuck.age();
        assert_eq!(stuck.slowest(2), Some((Rank(1), Rank(0))));
        stuck.age();
        assert_eq!(stuck.slowest(2), None);
    }
}
