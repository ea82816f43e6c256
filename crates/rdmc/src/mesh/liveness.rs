//! Signs of life: nodes that share groups ask each other for them, and give up nodes that do not answer. A node whose
//! application follows the members of the cluster asks all nodes that are connected.
//!
//! A node checks every connection in steps of a third of the detection time, and then asks all its partners. A question
//! is itself a sign of life: a node that has just asked does not answer. So between two nodes one frame goes in each
//! direction in a step. A node that is asked in the second half of its step checks at once, so nodes fall into step. A
//! node that was asked by one with a lower number leaves it to that one to begin the next step: its own timer is a
//! quarter of a step late, and does not wake it.
//!
//! A node that was asked and not heard of until the next check is given up 2.55 steps after its last sign of life, if
//! it gives none until then. The rest of the time is left for the survivors to agree. A process that was stopped itself
//! counts that time as one step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::FutureExt;
use rdmc_fabric::Timestamp;

use super::{Mesh, MeshState};
use crate::failure::FailureCause;
use crate::id::NodeId;
use crate::wire::{self, Frame};

/// The signs of life of one connection.
#[derive(Default)]
pub(super) struct Liveness {
    heard: Arc<LastHeard>,
    /// The current silence; `None` while nothing needs monitoring.
    silence: Option<SilentPeriod>,
    /// This node has asked since the other's last question.
    pinged: bool,
}

/// A time without a sign of life, however short.
#[derive(Clone, Copy)]
struct SilentPeriod {
    since: Timestamp,
    /// At the last check nothing had come since the one before.
    unanswered: bool,
}

/// A check of all connections.
#[derive(Clone, Copy)]
struct LivenessCheck {
    /// When the check before was.
    last: Timestamp,
    /// When this check was due, at the latest.
    due: Timestamp,
    now: Timestamp,
}

/// A time for which this process did not run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stall {
    ended_at: Timestamp,
    /// It began up to 5/12 of the detection time earlier.
    at_least: Duration,
}

/// When the last frame came since the last check.
#[derive(Default)]
pub(super) struct LastHeard(AtomicU64);

impl LastHeard {
    pub(super) fn set(&self, now: Timestamp) {
        self.0.store(now.as_nanos().max(1), Ordering::Relaxed);
    }

    fn take(&self) -> Option<Timestamp> {
        Some(self.0.swap(0, Ordering::Relaxed)).filter(|&nanos| nanos > 0).map(Timestamp::from_nanos)
    }

    fn is_none(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

impl Liveness {
    pub(super) fn heard(&self) -> Arc<LastHeard> {
        self.heard.clone()
    }

    /// Stops monitoring: no group is shared with the node, and the application does not follow the members.
    fn stop(&mut self) {
        (self.silence, self.pinged) = (None, false);
    }

    /// Tells whether nothing had come at the last check.
    fn is_silent(&self) -> bool {
        self.silence.is_some_and(|silence| silence.unanswered)
    }

    /// Checks for frames since the check before, and notes that the node is asked now. Returns when to give it up, if
    /// that is before the next check.
    fn check(&mut self, LivenessCheck { last, due, now }: LivenessCheck, detection: Duration) -> Option<Timestamp> {
        self.pinged = true;
        let step = step(detection);
        let late = now.since(due);
        // This node did not run, and could neither ask nor read.
        let stopped = late >= step / 2;
        let counted_from = if stopped { last + (now.since(last) - step) } else { last };
        let (since, unanswered) = match (self.heard.take(), self.silence) {
            (Some(at), _) => (at.max(counted_from), false),
            // It has not been asked before.
            (None, None) => (counted_from, false),
            (None, Some(SilentPeriod { since, unanswered: false })) if stopped => (since.max(counted_from), true),
            (None, Some(SilentPeriod { since, .. })) => (since, true),
        };
        self.silence = Some(SilentPeriod { since, unanswered });
        // Frames that came meanwhile are still to be read.
        let give_up = (since + silence_max(detection)).max(now + late.min(step / 2));
        (unanswered && give_up <= now + step).then_some(give_up)
    }
}

impl MeshState {
    /// Tells whether a connected node is asked for signs of life: it shares a group with this one, or the application
    /// follows the members.
    fn monitors(&self, node: NodeId) -> bool {
        !self.subscriptions.is_empty() || self.groups.has_partner(node)
    }

    /// Tells whether any connected node is.
    pub(super) fn monitors_any(&self) -> bool {
        !self.subscriptions.is_empty() || !self.groups.is_empty()
    }
}

/// A node that is about to be given up.
struct SuspectedNode {
    node: NodeId,
    serial: u64,
    /// When it is given up, if it gives no sign of life until then.
    at: Timestamp,
}

impl Mesh {
    /// Asks the nodes that are monitored for signs of life, for ever.
    pub(crate) async fn watch(self) {
        let environment = &*self.0.environment;
        let step = step(self.0.detection);
        let mut changes = self.0.changes.subscribe();
        self.lock().checked_at = environment.now();
        // Whether another node begins the next step.
        let mut follows = false;
        loop {
            if !self.lock().monitors_any() {
                self.lock().links.values_mut().for_each(|link| link.liveness.stop());
                follows = false;
                // Most changes are connections; all links would be walked for each of them.
                while !self.lock().monitors_any() {
                    if changes.changed().await.is_err() {
                        return;
                    }
                }
                self.lock().checked_at = environment.now();
            }
            let last = self.lock().checked_at;
            let due = last + if follows { step * 5 / 4 } else { step };
            self.lock().run_due = Some(due);
            futures::select_biased! {
                () = self.0.check_now.notified().fuse() => {}
                () = environment.sleep_until(due).fuse() => {}
            }
            let now = self.note_run();
            // Several nodes may have asked for this check before it began.
            if now.since(last) < step / 2 {
                continue;
            }
            let (suspected, led) = self.check(LivenessCheck { last, due, now });
            follows = led;
            for suspected in suspected {
                self.lock().run_due = Some(suspected.at);
                environment.sleep_until(suspected.at).await;
                // Frames that came while this node did not run are still to be read.
                let late = self.note_run().since(suspected.at).min(step / 2);
                environment.sleep_until(environment.now() + late).await;
                self.give_up(&suspected);
            }
        }
    }

    /// Notes that this process runs, and for how long it did not if it is late; returns the time.
    fn note_run(&self) -> Timestamp {
        let now = self.0.environment.now();
        let mut state = self.lock();
        let late = state.run_due.take().map_or(Duration::ZERO, |due| now.since(due));
        if late >= stall_min(self.0.detection) {
            tracing::warn!(at_least = ?late, "this process did not run: others may take it for dead");
            state.stall = Some(Stall { ended_at: now, at_least: late });
        }
        now
    }

    /// Returns for how long at least this process did not run lately, if others may have given it up for that.
    pub(crate) fn stalled(&self) -> Option<Duration> {
        let now = self.0.environment.now();
        let state = self.lock();
        let lately = |stall: &Stall| now.since(stall.ended_at) <= self.0.detection * STALL_MEMORY;
        let noted = state.stall.filter(lately).map(|stall| stall.at_least);
        // It may have gone on just now, and not have come to note that.
        let unnoted = state.run_due.map(|due| now.since(due)).filter(|late| *late >= stall_min(self.0.detection));
        noted.max(unnoted)
    }

    /// Checks all connections and asks the nodes that are monitored. Returns the nodes to give up before the next check,
    /// in order of time, and whether another node begins the next check.
    fn check(&self, check: LivenessCheck) -> (Vec<SuspectedNode>, bool) {
        let (mut asked, mut suspected, mut silent) = (Vec::new(), Vec::new(), false);
        let led;
        {
            let mut state = self.lock();
            let state = &mut *state;
            state.checked_at = check.now;
            // The leader's question may have come just after the last check, a step ago. If it is older the leader may
            // be dead, and no node waits a quarter of a step for it twice.
            led = state.pinged_by_leader_at.is_some_and(|at| check.now.since(at) < step(self.0.detection) * 11 / 10);
            let everybody = !state.subscriptions.is_empty();
            for (&node, link) in &mut state.links {
                if !everybody && !state.groups.has_partner(node) {
                    link.liveness.stop();
                    continue;
                }
                if let Some(at) = link.liveness.check(check, self.0.detection) {
                    suspected.push(SuspectedNode { node, serial: link.serial, at });
                }
                silent |= link.liveness.is_silent();
                asked.push(link.outgoing.clone());
            }
        }
        for outgoing in asked {
            // Fails only for a node that takes no frames, and for a connection that has ended: both are noticed
            // elsewhere.
            let _ = outgoing.post_now(wire::encode_unchecked(&Frame::Ping));
        }
        suspected.sort_by_key(|suspected| suspected.at);
        // A node that may be given up soon is checked in time, even if the leader falls silent.
        (suspected, led && !silent)
    }

    fn give_up(&self, suspected: &SuspectedNode) {
        let state = self.lock();
        let link = state.links.get(&suspected.node).filter(|link| link.serial == suspected.serial);
        if let Some(link) = link.filter(|link| link.liveness.heard.is_none()) {
            let silence = silence_max(self.0.detection);
            // Fails only if it was cut before.
            let _ = link.cut.try_send(FailureCause::Unresponsive { silence });
        }
    }

    /// Answers a question, unless this node has asked since the question before.
    ///
    /// A node that asks and does not read is not answered either: it is about to be given up.
    pub(super) fn answer_ping(&self, peer: NodeId) {
        let outgoing = {
            let mut state = self.lock();
            let monitored = state.monitors(peer);
            let now = self.0.environment.now();
            if monitored && peer < self.0.me {
                state.pinged_by_leader_at = Some(now);
            }
            if monitored && now.since(state.checked_at) >= step(self.0.detection) / 2 {
                // The question of that check is the answer.
                self.0.check_now.notify_one();
                return;
            }
            let Some(link) = state.links.get_mut(&peer) else { return };
            if std::mem::take(&mut link.liveness.pinged) {
                return;
            }
            link.outgoing.clone()
        };
        if outgoing.waiting() < PONG_BYTES_MAX {
            let _ = outgoing.post_now(wire::encode_unchecked(&Frame::Pong));
        }
    }
}

/// Returns the time from one check to the next.
fn step(detection: Duration) -> Duration {
    detection / STEPS_PER_DETECTION
}

/// Returns the silence after which a node is given up: 17/20 of the detection time, which are 2.55 steps.
fn silence_max(detection: Duration) -> Duration {
    detection * 17 / 20
}

/// Returns how late a check is at least when this process did not run for so long that others may have given it up: a
/// check is due 5/12 of the detection time after the one before it at the latest, and silence ends 17/20 after the
/// last sign of life.
fn stall_min(detection: Duration) -> Duration {
    detection * 2 / 5
}

/// Detection times for which a stall may be why a group fails: as long as an agreement may take.
const STALL_MEMORY: u32 = 4;
/// Checks in one detection time.
const STEPS_PER_DETECTION: u32 = 3;
/// Bytes that wait to be written to a node whose question for a sign of life is still answered.
const PONG_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// A step is a second.
    const DETECTION: Duration = Duration::from_secs(3);

    fn at(steps: f64) -> Timestamp {
        Timestamp::ZERO + Duration::from_secs(1).mul_f64(steps)
    }

    /// Checks at these times, of which the first is that of the check before; each is due a step after the one before.
    fn check(liveness: &mut Liveness, times: &[f64]) -> Vec<Option<Timestamp>> {
        let due = times.windows(2).map(|pair| (pair[0], pair[0] + 1.0, pair[1]));
        due.map(|due| check_due(liveness, due)).collect()
    }

    /// Checks once, from the times of the check before, when this one is due, and when it is done.
    fn check_due(liveness: &mut Liveness, (last, due, now): (f64, f64, f64)) -> Option<Timestamp> {
        liveness.check(LivenessCheck { last: at(last), due: at(due), now: at(now) }, DETECTION)
    }

    /// Returns the liveness of a connection whose last frame came at this time.
    fn heard_at(steps: f64) -> Liveness {
        let liveness = Liveness::default();
        liveness.heard().set(at(steps));
        liveness
    }

    #[test]
    fn who_falls_silent_is_given_up_2_55_steps_after_it_was_last_heard_of() {
        let mut liveness = Liveness::default();
        assert_eq!(check(&mut liveness, &[0.0, 1.0]), [None], "it was not asked");
        liveness.heard().set(at(1.1));
        assert_eq!(check(&mut liveness, &[1.0, 2.0, 3.0]), [None, Some(at(3.65))]);
        liveness.heard().set(at(3.6));
        assert_eq!(check(&mut liveness, &[3.0, 3.65]), [None]);
    }

    #[test]
    fn it_is_given_up_as_late_if_the_looks_are_late() {
        assert_eq!(check(&mut heard_at(1.1), &[1.0, 2.25, 3.25]), [None, Some(at(3.65))]);
    }

    #[test]
    fn it_is_given_up_as_late_if_another_one_was_to_begin_the_step() {
        for heard in [1.1, 1.6, 1.699, 1.701, 1.9] {
            let mut liveness = heard_at(heard);
            assert_eq!(check_due(&mut liveness, (1.0, 2.25, 2.25)), None);
            let checks = check(&mut liveness, &[2.25, 3.25, 4.25]);
            assert_eq!(checks.into_iter().flatten().next(), Some(at(heard + 2.55)), "{heard}");
        }
        let mut liveness = heard_at(2.0);
        assert_eq!(check_due(&mut liveness, (2.0, 3.25, 3.5)), None, "no process was stopped");
        assert_eq!(check(&mut liveness, &[3.5, 4.5]), [Some(at(4.55))]);
    }

    #[test]
    fn who_looks_late_leaves_as_much_time_for_what_is_to_be_read() {
        for late in [0.0, 0.2, 0.4] {
            assert_eq!(
                check(&mut heard_at(1.0), &[1.0, 2.0, 3.0 + late]),
                [None, Some(at((3.0 + 2.0 * late).max(3.55)))]
            );
        }
    }

    #[test]
    fn who_looks_early_gives_nobody_up_sooner() {
        let checks = check(&mut heard_at(1.0), &[0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
        assert_eq!(checks, [None, None, None, None, Some(at(3.55))]);
    }

    #[test]
    fn who_never_answers_is_given_up_1_55_steps_after_it_was_first_asked() {
        assert_eq!(check(&mut Liveness::default(), &[0.0, 1.0, 2.0]), [None, Some(at(2.55))]);
    }

    #[test]
    fn who_was_itself_stopped_gives_others_the_time_of_a_step_and_a_half() {
        let checks = check(&mut heard_at(1.0), &[1.0, 2.0, 100.0, 101.0]);
        assert_eq!(checks, [None, None, Some(at(101.55))]);
    }

    #[test]
    fn who_was_heard_of_before_a_late_look_has_time_to_answer() {
        let checks = check(&mut heard_at(1.0), &[1.0, 2.9, 3.9]);
        assert_eq!(checks, [None, Some(at(4.45))]);
    }

    #[test]
    fn who_is_stopped_again_and_again_gives_up_those_who_are_silent() {
        let checks = check(&mut heard_at(1.0), &[1.0, 2.0, 100.0, 200.0]);
        assert_eq!(checks, [None, None, Some(at(200.5))]);
    }

    #[test]
    fn who_first_looks_late_gives_nobody_up_sooner() {
        let checks = check(&mut Liveness::default(), &[0.0, 3.0, 4.0]);
        assert_eq!(checks, [None, Some(at(4.55))]);
    }
}
