//! Finds the cause of waiting.
//!
//! A member that waits for a slow one makes others wait in turn. So waiting is followed along, as random surfers follow
//! links: the waiting for a member moves on, in proportion, to the members for which that one waits, until it does not
//! move any more. Most of it ends at the slow member.

use std::collections::BTreeMap;

use rdmc_schedule::Rank;

use super::WINDOW;
use crate::wire::WaitTimes;

/// The waiting of members within the latest window.
#[derive(Default)]
pub(crate) struct WaitReports(BTreeMap<Rank, (u32, Vec<WaitTimes>)>);

impl WaitReports {
    /// Takes a member's report.
    pub(crate) fn add(&mut self, from: Rank, waited: Vec<WaitTimes>) {
        self.0.insert(from, (0, waited));
    }

    /// Tells whether there are no recent reports.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets reports that are too old.
    pub(crate) fn age(&mut self) {
        self.0.retain(|_, (age, _)| {
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
        let waits = |ms: fn(&WaitTimes) -> u32| {
            let all = self.0.values().flat_map(|(_, waited)| waited).filter(|waited| waited.on == slowest.0);
            all.map(ms).max().unwrap_or(0)
        };
        let window = u32::try_from(WINDOW.as_millis()).unwrap_or(u32::MAX);
        if members == 2 {
            // There is no member to compare it with: it is slow only if it grants nothing at all. A fast one may be
            // waited for most of the time, too.
            let grants_nothing =
                waits(|waited| waited.ready_ms) >= window / 10 * 9 && waits(|waited| waited.blocks) == 0;
            return grants_nothing.then_some((slowest, Rank::ROOT));
        }
        let others: f64 = receivers.clone().filter(|other| *other != most).map(|other| weights[other]).sum();
        #[expect(clippy::cast_precision_loss, reason = "a number of members")]
        let average = others / (receivers.len() - 1) as f64;
        let stuck = waits(|waited| waited.ready_ms + waited.leaving_ms) >= window / 2;
        let slow = stuck && weights[most] >= average * WEIGHT_RATIO_MIN && self.is_costly(slowest);
        slow.then(|| (slowest, self.longest_waiting(slowest)))
    }

    /// Returns the member that waits most for another.
    fn longest_waiting(&self, with: Rank) -> Rank {
        let wait = |waited: &[WaitTimes]| {
            let on = waited.iter().filter(|waited| waited.on == with.0);
            on.map(|waited| waited.ready_ms + waited.leaving_ms).sum::<u32>()
        };
        let most = self.0.iter().max_by_key(|(_, (_, waited))| wait(waited));
        most.map_or(Rank::ROOT, |(rank, _)| *rank)
    }

    /// Tells whether this member takes several times as long for a block as others do.
    fn is_costly(&self, slowest: Rank) -> bool {
        let mut costs: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for waited in self.0.values().flat_map(|(_, waited)| waited) {
            let (time, blocks) = costs.entry(waited.on).or_default();
            *time += u64::from(waited.busy_ms);
            *blocks += u64::from(waited.blocks);
        }
        let cost = |(time, blocks): (u64, u64)| time * 1000 / blocks.max(1);
        let own = costs.remove(&slowest.0).map_or(0, cost);
        let mut others: Vec<u64> = costs.into_values().filter(|(_, blocks)| *blocks > 0).map(cost).collect();
        others.sort_unstable();
        // Most may be slow because of the slowest: in a pipeline, the members that wait for its blocks.
        others.get(others.len() / 4).is_none_or(|quick| own >= quick.saturating_mul(COST_RATIO_MIN))
    }

    /// Follows all waiting to its end; returns how much of it ends at each member.
    #[expect(clippy::cast_precision_loss, reason = "times of less than a second and numbers of members")]
    fn ends(&self, members: u32) -> Vec<f64> {
        let count = members as usize;
        let window = WINDOW.as_millis() as f64;
        let mut weights = vec![1.0 / count as f64; count];
        for _ in 0..ROUNDS {
            let mut next = vec![0.0; count];
            let mut spread = 0.0;
            for (rank, weight) in weights.iter().enumerate() {
                let waited = u32::try_from(rank).ok().and_then(|rank| self.0.get(&Rank(rank)));
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
    fn what_was_said_does_not_count_for_long() {
        let mut stuck = reports(&[(0, 1, 250, 0, 0, 0)]);
        stuck.age();
        assert_eq!(stuck.slowest(2), Some((Rank(1), Rank(0))));
        stuck.age();
        assert_eq!(stuck.slowest(2), None);
    }
}
