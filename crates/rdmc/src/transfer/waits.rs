//! Notes for which neighbours a member waits, and for how long: with a block ready to send, for their *ready_for_block*
//! or for room on the way to them; with destinations posted, for their blocks.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rdmc_fabric::Timestamp;
use rdmc_schedule::Rank;
use tokio::sync::Notify;

use crate::sync::lock;
use crate::wire::WaitTimes;

/// What a member waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitReason {
    Ready,
    Leaving,
    Arriving,
}

/// Measures the waiting of one member.
#[derive(Default)]
pub(crate) struct WaitMonitor {
    state: Mutex<WaitState>,
    /// A wait has begun while there was none, or others have reported theirs.
    changed: Notify,
}

#[derive(Default)]
struct WaitState {
    /// The current waits: blocks go out one after the other, and so do grants.
    relay: Option<CurrentWait>,
    intake: Option<CurrentWait>,
    neighbours: BTreeMap<Rank, NeighbourWaits>,
    /// Whether this member holds blocks back by its own rate, and whether it has since that was asked.
    is_pacing: bool,
    has_paced: bool,
    /// The member that holds the group up.
    slow: Option<Rank>,
    /// All time for which this member has waited for slow members.
    held_up: Duration,
}

struct CurrentWait {
    what: WaitReason,
    on: Rank,
    since: Timestamp,
}

/// What is known of one neighbour.
#[derive(Default)]
struct NeighbourWaits {
    spent: WaitTotals,
    busy: BusyPeriod,
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

impl WaitMonitor {
    /// Notes that a wait begins. A neighbour that is waited for to be ready is due to receive a block.
    pub(crate) fn begin(&self, what: WaitReason, on: Rank, now: Timestamp) {
        if what == WaitReason::Ready {
            self.block_due(on, || now);
        }
        *self.lock().slot(what) = Some(CurrentWait { what, on, since: now });
        self.changed.notify_one();
    }

    /// Notes that a wait is over.
    pub(crate) fn end(&self, what: WaitReason, on: Rank, now: Timestamp) {
        if what == WaitReason::Ready {
            self.block_taken(on, 0, || now);
        }
        let mut state = self.lock();
        if let Some(wait) = state.slot(what).take() {
            state.spend(&wait, now);
        }
    }

    /// Awaits `wait`, for which this member holds a block back by its own rate.
    pub(crate) async fn pacing<T>(&self, wait: impl Future<Output = T>) -> T {
        struct Ends<'a>(&'a WaitMonitor);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.lock().is_pacing = false;
            }
        }
        {
            let mut state = self.lock();
            (state.is_pacing, state.has_paced) = (true, true);
        }
        let _ends = Ends(self);
        wait.await
    }

    /// Tells whether this member has held blocks back by its own rate since the last call.
    pub(crate) fn has_paced(&self) -> bool {
        let mut state = self.lock();
        let is_pacing = state.is_pacing;
        std::mem::replace(&mut state.has_paced, is_pacing)
    }

    /// Notes that a neighbour is due to receive a block.
    pub(crate) fn block_due(&self, who: Rank, now: impl FnOnce() -> Timestamp) {
        let mut state = self.lock();
        let busy = &mut state.neighbour(who).busy;
        busy.with += 1;
        if busy.with == 1 {
            busy.since = Some(now());
        }
    }

    /// Notes that a neighbour has received so many blocks, or is not due to receive one any more.
    pub(crate) fn block_taken(&self, who: Rank, blocks: u32, now: impl FnOnce() -> Timestamp) {
        let mut state = self.lock();
        let NeighbourWaits { spent, busy } = state.neighbour(who);
        busy.with = busy.with.saturating_sub(1);
        spent.blocks = spent.blocks.saturating_add(blocks);
        if busy.with == 0
            && let Some(since) = busy.since.take()
        {
            spent.busy += now().since(since);
        }
    }

    /// Tells whether there is nothing to report; forgets the blocks that were sent meanwhile.
    pub(crate) fn is_idle(&self) -> bool {
        let mut state = self.lock();
        let waited =
            |NeighbourWaits { spent, .. }: &NeighbourWaits| !(spent.ready + spent.leaving + spent.arriving).is_zero();
        let idle = state.relay.is_none() && state.intake.is_none() && !state.neighbours.values().any(waited);
        if idle {
            state.neighbours.values_mut().for_each(|neighbour| neighbour.spent = WaitTotals::default());
        }
        idle
    }

    /// Waits until a wait begins, or [`wake`](Self::wake) is called.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Wakes the task that waits for a change.
    pub(crate) fn wake(&self) {
        self.changed.notify_one();
    }

    /// Takes the waiting since the last call.
    pub(crate) fn take(&self, now: Timestamp) -> Vec<WaitTimes> {
        let mut state = self.lock();
        for what in [WaitReason::Ready, WaitReason::Arriving] {
            if let Some(wait) = state.slot(what).take() {
                state.spend(&wait, now);
                *state.slot(what) = Some(CurrentWait { since: now, ..wait });
            }
        }
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        let waited = state.neighbours.iter_mut().map(|(on, NeighbourWaits { spent, busy })| {
            if let Some(since) = &mut busy.since {
                spent.busy += now.since(std::mem::replace(since, now));
            }
            let spent = std::mem::take(spent);
            WaitTimes {
                on: on.0,
                ready_ms: millis(spent.ready),
                leaving_ms: millis(spent.leaving),
                arriving_ms: millis(spent.arriving),
                busy_ms: millis(spent.busy),
                blocks: spent.blocks,
            }
        });
        waited.filter(|waited| *waited != WaitTimes { on: waited.on, ..WaitTimes::default() }).collect()
    }

    /// Notes which member holds the group up, if one does.
    pub(crate) fn set_slow(&self, member: Option<Rank>) {
        self.lock().slow = member;
    }

    /// Returns for how long this member has waited for members that held the group up, in all.
    pub(crate) fn held_up(&self) -> Duration {
        self.lock().held_up
    }

    fn lock(&self) -> MutexGuard<'_, WaitState> {
        lock(&self.state)
    }
}

impl WaitState {
    fn neighbour(&mut self, rank: Rank) -> &mut NeighbourWaits {
        self.neighbours.entry(rank).or_default()
    }

    fn slot(&mut self, what: WaitReason) -> &mut Option<CurrentWait> {
        match what {
            WaitReason::Ready | WaitReason::Leaving => &mut self.relay,
            WaitReason::Arriving => &mut self.intake,
        }
    }

    fn spend(&mut self, wait: &CurrentWait, now: Timestamp) {
        let time = now.since(wait.since);
        let spent = &mut self.neighbour(wait.on).spent;
        match wait.what {
            WaitReason::Ready => spent.ready += time,
            WaitReason::Leaving => spent.leaving += time,
            WaitReason::Arriving => spent.arriving += time,
        }
        if self.slow == Some(wait.on) {
            self.held_up += time;
        }
    }
}
