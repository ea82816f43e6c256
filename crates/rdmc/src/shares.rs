//! How the groups of a node share its port, if any of them has a [weight](crate::GroupSpec::share).
//!
//! A network shares a port as its queues happen to, whatever was promised. So each node computes, again and again, what
//! its port leaves to each group, and tells the root of the group. The root sends no faster than the ports of all
//! members allow. As the other members follow their root, they never wait for their shares.
//!
//! What a group does not use goes to the others. All groups together get a little less than the port carries, so that
//! no queue decides who gets how much.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rdmc_fabric::Environment;
use tokio::sync::Notify;

use crate::sync::lock;

/// A group, as far as the node's port is concerned.
pub(crate) trait PortUser: Send + Sync {
    /// Its weight among the groups of the node, if it has one.
    fn weight(&self) -> Option<u32>;

    /// Bytes of a block.
    fn block_size(&self) -> u32;

    /// Bytes of blocks that this member has received, and has sent, so far.
    fn traffic(&self) -> [u64; 2];

    /// How often each byte of the latest message comes in, and how often it leaves.
    fn copies(&self) -> [f64; 2];

    /// Learns how many bytes of messages a second the port leaves to the group; `None` if it is not held back.
    fn allot(&self, rate: Option<u64>);

    /// Tells whether the group has ended.
    fn has_ended(&self) -> bool;
}

/// The groups that use a node's port.
pub(crate) struct PortShares {
    /// Bytes a second in each direction; `None` if that is not known. Then nobody is held back.
    rate: Option<u64>,
    uses: Mutex<Vec<PortUse>>,
    /// There is one more group.
    joined: Notify,
}

/// What is known of one group.
struct PortUse {
    user: Weak<dyn PortUser>,
    /// 1 unless it has a weight.
    weight: f64,
    has_weight: bool,
    received: Meter,
    sent: Meter,
    /// How often each byte of a message comes in, and how often it leaves.
    copies: [f64; 2],
    told: Option<u64>,
}

/// The rate of a group in one direction of the port.
#[derive(Clone, Copy)]
struct Meter {
    /// Bytes that it has counted.
    bytes: u64,
    /// Bytes a second.
    rate: f64,
    /// What the direction leaves to the group, in bytes a second; infinite if it does not hold the group back.
    limit: f64,
}

/// What a group asks of one direction of a port.
#[derive(Clone, Copy, Debug)]
struct Demand {
    /// How many bytes it gets for each byte of a group of weight 1: by its own weight, and as often as each byte of its
    /// messages passes.
    weight: f64,
    /// Bytes a second; infinite if it would use whatever it got.
    rate: f64,
}

/// What a decision has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// No group has a weight, or there is only one.
    Nothing,
    /// Nothing moves.
    Rest,
    Traffic,
}

impl PortShares {
    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self { rate, uses: Mutex::default(), joined: Notify::new() }
    }

    /// Tells whether the rate of the port is known, so that shares may be decided.
    pub(crate) fn is_known(&self) -> bool {
        self.rate.is_some()
    }

    /// Adds a group, until it ends.
    pub(crate) fn join(&self, user: &Arc<dyn PortUser>) {
        if !self.is_known() {
            return;
        }
        let [received, sent] = user.traffic().map(Meter::new);
        let (weight, user) = (user.weight(), Arc::downgrade(user));
        let (has_weight, weight) = (weight.is_some(), weight.unwrap_or(1).into());
        let mut uses = lock(&self.uses);
        uses.retain(|used| used.user.strong_count() > 0);
        uses.push(PortUse { user, weight, has_weight, received, sent, copies: [0.0; 2], told: None });
        drop(uses);
        self.joined.notify_one();
    }

    /// Decides for ever what each group gets.
    pub(crate) async fn decide(&self, environment: &dyn Environment) {
        let Some(rate) = self.rate else { return };
        loop {
            self.joined.notified().await;
            if !is_shared(&lock(&self.uses)) {
                continue;
            }
            let (mut before, mut pause) = (environment.now(), PAUSE);
            loop {
                environment.sleep(pause).await;
                let now = environment.now();
                pause = match self.decide_once(rate, now.since(before)) {
                    Found::Nothing => break,
                    Found::Rest => (pause * 2).min(PAUSE_MAX),
                    Found::Traffic => PAUSE,
                };
                before = now;
            }
        }
    }

    /// Decides, after so much time since it did last.
    fn decide_once(&self, port_rate: u64, passed: Duration) -> Found {
        let mut told = Vec::new();
        let found = {
            let mut uses = lock(&self.uses);
            let mut moves = false;
            uses.retain_mut(|used| match used.user.upgrade().filter(|user| !user.has_ended()) {
                Some(user) => {
                    moves |= used.read(&*user, passed);
                    true
                }
                None => false,
            });
            let (decides, port) = (is_shared(&uses), port(port_rate));
            limit(port, decides, uses.iter_mut().map(|used| (used.weight, used.copies[0], &mut used.received)));
            limit(port, decides, uses.iter_mut().map(|used| (used.weight, used.copies[1], &mut used.sent)));
            for used in uses.iter_mut() {
                let rate = used.rate_left();
                if differs(used.told, rate) {
                    used.told = rate;
                    told.push((used.user.clone(), rate));
                }
            }
            match (decides, moves) {
                (false, _) => Found::Nothing,
                (true, false) => Found::Rest,
                (true, true) => Found::Traffic,
            }
        };
        for (user, rate) in told {
            user.upgrade().into_iter().for_each(|user| user.allot(rate));
        }
        found
    }
}

impl PortUse {
    /// Reads what has passed; returns whether anything has.
    fn read(&mut self, user: &dyn PortUser, passed: Duration) -> bool {
        let [received, sent] = user.traffic();
        let has_received = self.received.read(received, passed, user.block_size());
        let has_sent = self.sent.read(sent, passed, user.block_size());
        self.copies = user.copies();
        has_received || has_sent
    }

    /// Returns what both directions leave to the group.
    fn rate_left(&self) -> Option<u64> {
        let left = self.received.limit.min(self.sent.limit / self.copies[1]);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is positive and below 2^64")]
        left.is_finite().then(|| (left as u64).max(ALLOTTED_MIN))
    }
}

impl Meter {
    fn new(bytes: u64) -> Self {
        Self { bytes, rate: 0.0, limit: f64::INFINITY }
    }

    /// Reads how many bytes have passed; tells whether there are more than before.
    fn read(&mut self, bytes: u64, passed: Duration, block_size: u32) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        self.bytes = bytes;
        let seconds = passed.as_secs_f64().max(f64::MIN_POSITIVE);
        // Blocks are counted as a whole, so it is the rate of several.
        let several = BLOCKS_METERED * f64::from(block_size);
        let span = if self.rate > 0.0 { (several / self.rate).clamp(SPAN_MIN, SPAN_MAX) } else { SPAN_MIN };
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let latest = more as f64 / seconds;
        self.rate += (latest - self.rate) * -(-seconds / span).exp_m1();
        more > 0
    }

    /// Returns what the group would use, if it were not held back.
    fn demand(&self) -> f64 {
        if self.rate >= self.limit * HELD_BACK { f64::INFINITY } else { self.rate * GROWTH }
    }
}

/// Tells whether shares are to be decided.
fn is_shared(uses: &[PortUse]) -> bool {
    uses.len() > 1 && uses.iter().any(|used| used.has_weight)
}

/// Returns the bytes a second of a port that are shared.
#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn port(rate: u64) -> f64 {
    rate as f64 * PORT_SHARED
}

/// Limits the groups in one direction of a port, if shares are decided.
///
/// `uses` are their weights, how often each byte of their messages passes, and their meters.
fn limit<'a>(port: f64, decides: bool, uses: impl Iterator<Item = (f64, f64, &'a mut Meter)>) {
    let (uses, idle): (Vec<_>, Vec<_>) = uses.partition(|(_, copies, _)| decides && *copies > 0.0);
    idle.into_iter().for_each(|(_, _, meter)| meter.limit = f64::INFINITY);
    let demands = uses.iter().map(|(weight, copies, meter)| Demand { weight: weight * copies, rate: meter.demand() });
    let demands: Vec<_> = demands.collect();
    // A group alone has what the port carries, whatever rate was given.
    let level = if is_alone(port, &demands) { f64::INFINITY } else { level(port, demands) };
    for (weight, copies, meter) in uses {
        meter.limit = weight * copies * level;
    }
}

/// Tells whether all groups but one together ask for next to nothing.
fn is_alone(port: f64, demands: &[Demand]) -> bool {
    let mut rates: Vec<f64> = demands.iter().map(|demand| demand.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.pop();
    rates.into_iter().sum::<f64>() <= port * ALONE_MAX
}

/// Returns what a group gets at most for each unit of its weight: the max-min fair shares by weight. Infinite if all
/// get what they ask for.
fn level(port: f64, mut demands: Vec<Demand>) -> f64 {
    demands.sort_by(|a, b| (a.rate / a.weight).total_cmp(&(b.rate / b.weight)));
    let (mut left, mut weights) = (port, demands.iter().map(|demand| demand.weight).sum::<f64>());
    for Demand { weight, rate } in demands {
        if rate / weight > left / weights {
            return left / weights;
        }
        left -= rate;
        weights -= weight;
    }
    f64::INFINITY
}

/// Tells whether what a port leaves to a group differs so much from what was told that it is told again.
fn differs(told: Option<u64>, now: Option<u64>) -> bool {
    match (told, now) {
        // If it is less, soon: else the port gets too much.
        (Some(before), Some(rate)) => rate < before - before / 256 || rate > before + before / 64,
        (told, now) => told != now,
    }
}

/// The least that a port leaves to a group, in bytes a second, so that nobody waits for ever.
pub(crate) const ALLOTTED_MIN: u64 = 64 << 10;
/// Pause between two decisions. While nothing moves, it becomes longer.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(160);
/// The part of a port that is shared.
const PORT_SHARED: f64 = 0.96;
/// A group that uses so much of its limit would use more. Where queues are full, rates scatter: one that has its turn
/// late must not lose its share to the others, or the queues stay full.
const HELD_BACK: f64 = 0.75;
/// How much more a group may use soon than it does now, if it is not held back.
const GROWTH: f64 = 1.0 / HELD_BACK;
/// If all others together use less of a port, a group counts as alone.
const ALONE_MAX: f64 = 0.01;
/// Blocks of which a rate is the average, and bounds of their time in seconds.
const BLOCKS_METERED: f64 = 8.0;
const SPAN_MIN: f64 = 0.1;
const SPAN_MAX: f64 = 2.0;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(port: f64, demands: &[(f64, f64)]) -> Vec<f64> {
        let level = level(port, demands.iter().map(|&(weight, rate)| Demand { weight, rate }).collect());
        demands.iter().map(|&(weight, rate)| rate.min(weight * level)).collect()
    }

    proptest! {
        /// The ideal is that of a fair scheduler of infinitely short turns.
        #[test]
        fn shares_are_fair_by_weight_and_leave_nothing_that_anybody_wants(
            demands in proptest::collection::vec((1_u32..100, prop_oneof![Just(f64::INFINITY), 0.0..3.0]), 1..20),
        ) {
            let demands: Vec<(f64, f64)> = demands.into_iter().map(|(weight, rate)| (f64::from(weight), rate)).collect();
            let shares = shares(1.0, &demands);
            let used: f64 = shares.iter().sum();
            let asked: f64 = demands.iter().map(|(_, rate)| rate).sum();
            prop_assert!((used - asked.min(1.0)).abs() < 1e-9, "it is work-conserving: {used} of {asked}");
            for (share, (weight, rate)) in shares.iter().zip(&demands) {
                prop_assert!(*share > 0.0 || *rate == 0.0, "nobody starves");
                // Whoever gets less than it asks for has no less by weight than anybody else.
                for (other, (other_weight, _)) in shares.iter().zip(&demands).filter(|_| share < rate) {
                    prop_assert!(share / weight >= other / other_weight - 1e-9);
                }
            }
        }
    }

    #[test]
    fn a_group_is_alone_unless_others_together_ask_for_something() {
        let alone =
            |rates: &[f64]| is_alone(1.0, &rates.iter().map(|&rate| Demand { weight: 1.0, rate }).collect::<Vec<_>>());
        assert!(alone(&[]) && alone(&[f64::INFINITY]) && alone(&[0.9, 0.001, 0.0]));
        // However many, and however little each has.
        assert!(!alone(&[0.009; 100]) && !alone(&[0.001, f64::INFINITY, f64::INFINITY]) && !alone(&[0.02, 0.5]));
    }

    #[test]
    fn a_rate_is_that_of_several_blocks() {
        let mut meter = Meter::new(5);
        let (mut bytes, mut seen) = (5, Vec::new());
        for at in 0..400 {
            // A block of 1000 bytes in every fourth pause.
            bytes += if at % 4 == 0 { 1000 } else { 0 };
            assert_eq!(meter.read(bytes, PAUSE, 1000), at % 4 == 0);
            seen.push(meter.rate);
        }
        let average = 1000.0 / (4.0 * PAUSE.as_secs_f64());
        assert!(seen[200..].iter().all(|rate| (rate / average - 1.0).abs() < 0.1), "{:?}", &seen[390..]);
    }

    #[test]
    fn small_changes_are_not_told() {
        assert!(!differs(Some(6400), Some(6490)) && differs(Some(6400), Some(6550)));
        assert!(!differs(Some(6400), Some(6380)) && differs(Some(6400), Some(6370)));
        assert!(differs(None, Some(u64::MAX)) && differs(Some(u64::MAX), None));
        assert!(differs(Some(u64::MAX), Some(0)) && !differs(None, None));
    }
}
