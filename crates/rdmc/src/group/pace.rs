//! Finds the member that holds a group up.
//!
//! A member notes for which neighbours it waits: with a block ready to send, for their *ready_for_block* or for room on
//! the way to them; with destinations posted, for their blocks. Several times a second members report to the root. The
//! root finds the cause of the waiting, and tells all members.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rdmc_fabric::Timestamp;
use rdmc_schedule::Rank;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::Group;
use crate::failure::FailureCause;
use crate::mesh::frame::GroupFrame;
use crate::sync::lock;

mod judge;

pub(crate) use judge::WaitReports;

/// Chooses what a group does about a member that holds the others up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlowReceivers {
    /// It waits.
    #[default]
    Wait,
    /// It evicts the member after it has been held up for so long: the member fails with [`FailureCause::TooSlow`], and
    /// the others can [recover](crate::GroupFailure::recover).
    Evict {
        /// How long the group waits; at least a second.
        after: Duration,
    },
}

impl SlowReceivers {
    /// Evicts a member that has held the others up for so long; at least a second.
    pub fn evict_after(after: Duration) -> Self {
        Self::Evict { after }
    }
}

/// How long one member has waited for another within [`WINDOW`], in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitTimes {
    /// The rank of the other.
    pub(crate) on: u32,
    /// For its grants.
    pub(crate) ready_ms: u32,
    /// For blocks to leave to it.
    pub(crate) leaving_ms: u32,
    /// For its blocks.
    pub(crate) arriving_ms: u32,
    /// How long it was receiving blocks, or was due to receive one.
    pub(crate) busy_ms: u32,
    /// Blocks that it has received.
    pub(crate) blocks: u32,
}

/// What a member waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitReason {
    Ready,
    Leaving,
    Arriving,
}

/// Measures the waiting of one member.
#[derive(Default)]
pub(crate) struct PaceMonitor {
    state: Mutex<PaceState>,
    /// A wait has begun while there was none.
    wait_began: Notify,
}

#[derive(Default)]
struct PaceState {
    /// The current waits: blocks go out one after the other, and so do grants.
    relay: Option<CurrentWait>,
    intake: Option<CurrentWait>,
    spent: BTreeMap<Rank, WaitTotals>,
    busy: BTreeMap<Rank, BusyPeriod>,
    /// At the root: the reports of members.
    reports: WaitReports,
    slow: Option<SlowMember>,
    /// The member that holds the others up by the latest window, and since when.
    suspect: Option<(Rank, Timestamp)>,
    /// The member that was slow last, and when it was.
    last: Option<(Rank, Timestamp)>,
    /// All time for which this member has waited for slow members.
    held_up: Duration,
}

struct CurrentWait {
    what: WaitReason,
    on: Rank,
    since: Timestamp,
}

#[derive(Default)]
struct WaitTotals {
    ready: Duration,
    leaving: Duration,
    arriving: Duration,
    busy: Duration,
    blocks: u32,
}

/// The blocks that a neighbour is to receive.
#[derive(Default)]
struct BusyPeriod {
    with: u32,
    since: Option<Timestamp>,
}

/// A member that holds the others up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlowMember {
    pub(crate) member: Rank,
    pub(crate) since: Timestamp,
}

impl PaceMonitor {
    /// Notes that a wait begins. A neighbour that is waited for to be ready is due to receive a block.
    fn begin(&self, what: WaitReason, on: Rank, now: Timestamp) {
        if what == WaitReason::Ready {
            self.block_due(on, || now);
        }
        *self.lock().slot(what) = Some(CurrentWait { what, on, since: now });
        self.wait_began.notify_one();
    }

    /// Tells whether there is nothing to report; forgets the blocks that were sent meanwhile.
    fn is_idle(&self) -> bool {
        let mut state = self.lock();
        let waited = |spent: &WaitTotals| !(spent.ready + spent.leaving + spent.arriving).is_zero();
        let still = state.relay.is_none()
            && state.intake.is_none()
            && state.slow.is_none()
            && state.suspect.is_none()
            && state.reports.is_empty()
            && !state.spent.values().any(waited);
        if still {
            state.spent.clear();
        }
        still
    }

    /// Notes that a wait is over.
    fn end(&self, what: WaitReason, on: Rank, now: Timestamp) {
        if what == WaitReason::Ready {
            self.block_taken(on, 0, || now);
        }
        let mut state = self.lock();
        if let Some(wait) = state.slot(what).take() {
            state.spend(&wait, now);
        }
    }

    /// Notes that a neighbour is due to receive a block.
    pub(crate) fn block_due(&self, who: Rank, now: impl FnOnce() -> Timestamp) {
        let mut state = self.lock();
        let busy = state.busy.entry(who).or_default();
        busy.with += 1;
        if busy.with == 1 {
            busy.since = Some(now());
        }
    }

    /// Notes that a neighbour has received so many blocks, or is not due to receive one any more.
    pub(crate) fn block_taken(&self, who: Rank, blocks: u32, now: impl FnOnce() -> Timestamp) {
        let mut state = self.lock();
        let busy = state.busy.entry(who).or_default();
        busy.with = busy.with.saturating_sub(1);
        let since = if busy.with == 0 { busy.since.take() } else { None };
        let spent = state.spent.entry(who).or_default();
        spent.blocks = spent.blocks.saturating_add(blocks);
        spent.busy += since.map_or(Duration::ZERO, |since| now().since(since));
    }

    /// Takes the waiting since the last call.
    fn take(&self, now: Timestamp) -> Vec<WaitTimes> {
        let mut state = self.lock();
        for what in [WaitReason::Ready, WaitReason::Arriving] {
            if let Some(wait) = state.slot(what).take() {
                state.spend(&wait, now);
                *state.slot(what) = Some(CurrentWait { since: now, ..wait });
            }
        }
        let PaceState { busy, spent, .. } = &mut *state;
        for (who, busy) in busy {
            if let Some(since) = &mut busy.since {
                spent.entry(*who).or_default().busy += now.since(std::mem::replace(since, now));
            }
        }
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let spent = std::mem::take(&mut state.spent);
        let waited = spent.into_iter().map(|(on, spent)| WaitTimes {
            on: on.0,
            ready_ms: millis(spent.ready),
            leaving_ms: millis(spent.leaving),
            arriving_ms: millis(spent.arriving),
            busy_ms: millis(spent.busy),
            blocks: spent.blocks,
        });
        waited.filter(|waited| *waited != WaitTimes { on: waited.on, ..WaitTimes::default() }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, PaceState> {
        lock(&self.state)
    }
}

impl PaceState {
    fn slot(&mut self, what: WaitReason) -> &mut Option<CurrentWait> {
        match what {
            WaitReason::Ready | WaitReason::Leaving => &mut self.relay,
            WaitReason::Arriving => &mut self.intake,
        }
    }

    fn spend(&mut self, wait: &CurrentWait, now: Timestamp) {
        let time = now.since(wait.since);
        let spent = self.spent.entry(wait.on).or_default();
        match wait.what {
            WaitReason::Ready => spent.ready += time,
            WaitReason::Leaving => spent.leaving += time,
            WaitReason::Arriving => spent.arriving += time,
        }
        if self.slow.is_some_and(|slow| slow.member == wait.on) {
            self.held_up += time;
        }
    }
}

impl Group {
    /// Awaits `wait`, which is for a neighbour; returns also how long it took.
    pub(crate) async fn waiting<T>(&self, what: WaitReason, on: Rank, wait: impl Future<Output = T>) -> (T, Duration) {
        let began = self.now();
        self.pace.begin(what, on, began);
        let value = wait.await;
        let ended = self.now();
        self.pace.end(what, on, ended);
        (value, ended.since(began))
    }

    /// Reports the waiting of this member for ever; at the root, judges which member holds the group up.
    pub(super) async fn watch_pace(&self) {
        loop {
            while self.pace.is_idle() {
                self.pace.wait_began.notified().await;
            }
            self.node.environment.sleep(WINDOW).await;
            let waited = self.pace.take(self.now());
            if self.rank.is_root() {
                if !waited.is_empty() {
                    self.receive_wait_times(self.rank, waited);
                }
                self.judge();
            } else if !waited.is_empty() {
                self.node.mesh.post(self.members[0], self.id, GroupFrame::WaitTimes { on: waited });
            }
        }
    }

    /// At the root: takes a member's report of its waiting.
    pub(super) fn receive_wait_times(&self, from: Rank, mut waited: Vec<WaitTimes>) {
        // No member waits for more than the others.
        waited.truncate(self.members.len());
        waited.retain(|waited| waited.on < self.spec.count() && waited.on != from.0);
        for WaitTimes { ready_ms, leaving_ms, arriving_ms, busy_ms, .. } in &mut waited {
            for time in [ready_ms, leaving_ms, arriving_ms, busy_ms] {
                *time = (*time).min(WAITED_MAX_MS);
            }
        }
        self.pace.lock().reports.add(from, waited);
        self.pace.wait_began.notify_one();
    }

    /// At the root: finds the member that holds the group up, tells the others, and evicts it if it is time.
    fn judge(&self) {
        let now = self.now();
        let (verdict, told) = {
            let mut state = self.pace.lock();
            let found = state.reports.slowest(self.spec.count()).map(|(slow, patient)| match state.last {
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
            (slow, told)
        };
        if told {
            let member = verdict.map(|slow| slow.member.0);
            for &other in &self.members[1..] {
                self.node.mesh.post(other, self.id, GroupFrame::Slow { member });
            }
            self.log_slow(verdict.map(|slow| slow.member));
        }
        if let (Some(slow), SlowReceivers::Evict { after }) = (verdict, self.spec.slow_receivers)
            && now.since(slow.since) >= after.max(EVICT_MIN)
        {
            self.accuse(slow.member, FailureCause::TooSlow { held_up: now.since(slow.since) });
        }
    }

    /// At another member: takes the root's report of the member that holds the group up.
    pub(super) fn receive_slow(&self, member: Option<u32>) -> Result<(), &'static str> {
        if member.is_some_and(|member| member >= self.spec.count()) {
            return Err("calls a rank slow that has no member");
        }
        let member = member.map(Rank);
        self.pace.lock().slow = member.map(|member| SlowMember { member, since: self.now() });
        self.log_slow(member);
        Ok(())
    }

    fn log_slow(&self, member: Option<Rank>) {
        match member {
            Some(member) => {
                let node = self.members[member.index()];
                tracing::warn!(parent: &self.span, %member, %node, "a member holds the group up");
            }
            None => tracing::info!(parent: &self.span, "no member holds the group up any more"),
        }
    }

    /// Returns the member that holds the group up, and for how long this member has waited for such members in all.
    pub(super) fn held_up(&self) -> (Option<Rank>, Duration) {
        let state = self.pace.lock();
        (state.slow.map(|slow| slow.member), state.held_up)
    }
}

/// Time between two reports of a member's waiting.
pub(crate) const WINDOW: Duration = Duration::from_millis(250);
/// How long a member that was slow counts as the cause of the time that its own blocks take.
const MEMORY: Duration = Duration::from_secs(5);
/// The longest wait within a window that is believed: members look at their clocks a little late.
const WAITED_MAX_MS: u32 = 10_000;
/// Shortest time after which a slow member is evicted.
const EVICT_MIN: Duration = Duration::from_secs(1);
