//! Finds the member that holds a group up.
//!
//! A member notes for which neighbours it waits (`transfer/waits.rs`). Several times a second members report to the
//! root. The root finds the cause of the waiting, and tells all members.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rdmc_fabric::Timestamp;
use rdmc_schedule::Rank;

use super::ending::GroupEnd;
use super::membership::Membership;
use super::spec::{EVICT_MIN, SlowReceivers};
use crate::failure::FailureCause;
use crate::sync::lock;
use crate::transfer::exchange::Exchange;
use crate::wire::{GroupFrame, WaitTimes};

mod judge;

pub(crate) use judge::WaitReports;

/// At the root: finds the member that holds the group up. At the others: the root's finding.
pub(super) struct PaceJudge {
    membership: Arc<Membership>,
    exchange: Arc<Exchange>,
    end: Arc<GroupEnd>,
    state: Mutex<JudgeState>,
}

#[derive(Default)]
struct JudgeState {
    /// The reports of members.
    reports: WaitReports,
    slow: Option<SlowMember>,
    /// The member that holds the others up by the latest window, and since when.
    suspect: Option<(Rank, Timestamp)>,
    /// The member that was slow last, and when it was.
    last: Option<(Rank, Timestamp)>,
}

/// A member that holds the others up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlowMember {
    pub(crate) member: Rank,
    pub(crate) since: Timestamp,
}

impl PaceJudge {
    pub(super) fn new(membership: Arc<Membership>, exchange: Arc<Exchange>, end: Arc<GroupEnd>) -> Self {
        Self { membership, exchange, end, state: Mutex::default() }
    }

    fn is_idle(&self) -> bool {
        let state = self.lock();
        state.slow.is_none() && state.suspect.is_none() && state.reports.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, JudgeState> {
        lock(&self.state)
    }

    /// Reports the waiting of this member for ever; at the root, judges which member holds the group up.
    pub(super) async fn watch(&self) {
        loop {
            while self.is_idle() && self.exchange.waits.is_idle() {
                self.exchange.waits.changed().await;
            }
            self.membership.node.environment.sleep(WINDOW).await;
            let waited = self.exchange.waits.take(self.membership.now());
            if self.membership.rank.is_root() {
                if !waited.is_empty() {
                    self.receive_wait_times(self.membership.rank, waited);
                }
                self.judge(self.exchange.waits.has_paced());
            } else if !waited.is_empty() {
                self.membership.post_to_root(GroupFrame::WaitTimes { on: waited });
            }
        }
    }

    /// At the root: takes a member's report of its waiting.
    pub(super) fn receive_wait_times(&self, from: Rank, mut waited: Vec<WaitTimes>) {
        // No member waits for more than the others.
        waited.truncate(self.membership.members.len());
        waited.retain(|waited| waited.on < self.membership.spec.count() && waited.on != from.0);
        for WaitTimes { ready_ms, leaving_ms, arriving_ms, busy_ms, .. } in &mut waited {
            for time in [ready_ms, leaving_ms, arriving_ms, busy_ms] {
                *time = (*time).min(WAITED_MAX_MS);
            }
        }
        self.lock().reports.add(from, waited);
        self.exchange.waits.wake();
    }

    /// At the root: finds the member that holds the group up, tells the others, and evicts it if it is time. If the
    /// root `has_paced`, others wait because of that.
    fn judge(&self, has_paced: bool) {
        let now = self.membership.now();
        let (verdict, told) = {
            let mut state = self.lock();
            let slowest = if has_paced { None } else { state.reports.slowest(self.membership.spec.count()) };
            let found = slowest.map(|(slow, patient)| match state.last {
                // The blocks that a slow member sends take long too.
                Some((last, at)) if last == patient && now.since(at) < MEMORY => last,
                _ => slow,
            });
            state.reports.age();
            let since = match (found, state.suspect) {
                (Some(found), Some((suspect, since))) if found == suspect => Some(since),
                (Some(_), _) => Some(now),
                (None, _) => None,
            };
            state.suspect = found.zip(since);
            // One window may be a hiccup.
            let slow = state.suspect.filter(|(_, since)| now.since(*since) >= WINDOW);
            let slow = slow.map(|(member, since)| SlowMember { member, since });
            let told = state.slow.map(|slow| slow.member) != slow.map(|slow| slow.member);
            state.slow = slow;
            state.last = slow.map(|slow| (slow.member, now)).or(state.last);
            self.exchange.waits.set_slow(slow.map(|slow| slow.member));
            (slow, told)
        };
        if told {
            let member = verdict.map(|slow| slow.member.0);
            self.membership.post_to_others(&GroupFrame::Slow { member });
            self.log_slow(verdict.map(|slow| slow.member));
        }
        if let (Some(slow), SlowReceivers::Evict { after }) = (verdict, self.membership.spec.slow_receivers)
            && now.since(slow.since) >= after.max(EVICT_MIN)
        {
            self.end.accuse(slow.member, FailureCause::TooSlow { held_up: now.since(slow.since) });
        }
    }

    /// At another member: takes the root's report of the member that holds the group up.
    pub(super) fn receive_slow(&self, member: Option<u32>) -> Result<(), &'static str> {
        if member.is_some_and(|member| member >= self.membership.spec.count()) {
            return Err("calls a rank slow that has no member");
        }
        let member = member.map(Rank);
        self.lock().slow = member.map(|member| SlowMember { member, since: self.membership.now() });
        self.exchange.waits.set_slow(member);
        self.log_slow(member);
        Ok(())
    }

    fn log_slow(&self, member: Option<Rank>) {
        match member {
            Some(member) => {
                let node = self.membership.members[member.index()];
                tracing::warn!(parent: &self.membership.span, %member, %node, "a member holds the group up");
            }
            None => tracing::info!(parent: &self.membership.span, "no member holds the group up any more"),
        }
    }

    /// Returns the member that holds the group up, and for how long this member has waited for such members in all.
    pub(super) fn held_up(&self) -> (Option<Rank>, Duration) {
        (self.lock().slow.map(|slow| slow.member), self.exchange.waits.held_up())
    }
}

/// Time between two reports of a member's waiting.
pub(crate) const WINDOW: Duration = Duration::from_millis(WINDOW_MS as u64);
const WINDOW_MS: u32 = 250;
/// How long a member that was slow counts as the cause of the time that its own blocks take.
const MEMORY: Duration = Duration::from_secs(5);
/// The longest wait within a window that is believed: members look at their clocks a little late.
const WAITED_MAX_MS: u32 = 10_000;
