//! How fast a member may send.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdmc_fabric::{Environment, Timestamp};
use tokio::sync::Notify;

use crate::sync::lock;

/// The rate at which a member may send blocks, if it is limited: a bucket that empties by the clock.
#[derive(Debug, Default)]
pub(crate) struct SendLimit {
    is_set: AtomicBool,
    bucket: Mutex<Bucket>,
    /// The rate has changed.
    changed: Notify,
}

/// What limits a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RateLimits {
    /// Bytes of blocks a second that may leave.
    pub(crate) blocks: Option<u64>,
    /// Bytes of messages a second that may leave, each as often as it does.
    pub(crate) messages: Option<u64>,
}

#[derive(Debug)]
struct Bucket {
    limits: RateLimits,
    /// How often each byte of the current message leaves.
    copies: f64,
    /// Bytes of blocks that have left and not drained by the clock. If negative, so many may leave at once, since a
    /// task may wake late.
    level: f64,
    drained: Timestamp,
}

impl SendLimit {
    /// Sets the limits, and whether [`copies`](Self::copies) are wanted without any.
    pub(crate) fn set(&self, limits: RateLimits, counts: bool, now: Timestamp) {
        {
            let mut bucket = lock(&self.bucket);
            bucket.drain(now);
            bucket.limits = limits;
            self.is_set.store(limits != RateLimits::default() || counts, Ordering::Release);
        }
        self.changed.notify_one();
    }

    /// Returns how many bytes of blocks may leave in a second.
    pub(crate) fn rate(&self) -> Option<u64> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is positive and below 2^64")]
        lock(&self.bucket).rate().map(|rate| rate as u64)
    }

    /// Returns how often each byte of the latest message leaves this member.
    pub(crate) fn copies(&self) -> f64 {
        lock(&self.bucket).copies
    }

    /// Tells whether blocks must [pass](Self::pass).
    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Waits until a block may leave, of a message of which each byte leaves so often, and counts it.
    ///
    /// # Cancel safety
    /// If it is dropped, nothing is counted.
    pub(crate) async fn pass(&self, bytes: usize, copies: f64, environment: &dyn Environment) {
        while let Err(wait) = self.try_pass(bytes, copies, environment.now()) {
            let changed = std::pin::pin!(self.changed.notified());
            futures::future::select(changed, environment.sleep(wait)).await;
        }
    }

    /// Counts a block that may leave now; else returns how long to wait.
    pub(crate) fn try_pass(&self, bytes: usize, copies: f64, now: Timestamp) -> Result<(), Duration> {
        let mut bucket = lock(&self.bucket);
        bucket.drain(now);
        bucket.copies = copies;
        let Some(rate) = bucket.rate() else { return Ok(()) };
        if bucket.level > 0.0 {
            return Err(Duration::try_from_secs_f64(bucket.level / rate).unwrap_or(WAIT_MAX).clamp(WAIT_MIN, WAIT_MAX));
        }
        bucket.level += bytes as f64;
        Ok(())
    }
}

impl Bucket {
    /// Returns the bytes of blocks that may leave in a second.
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn rate(&self) -> Option<f64> {
        // Of a message that is repaired, few blocks leave.
        let messages = self.limits.messages.map(|rate| rate.max(1) as f64 * self.copies.max(1.0));
        let blocks = self.limits.blocks.map(|rate| rate.max(1) as f64);
        messages.into_iter().chain(blocks).reduce(f64::min)
    }

    fn drain(&mut self, now: Timestamp) {
        let rate = self.rate().unwrap_or(0.0);
        let drained = rate * now.since(self.drained).as_secs_f64();
        self.level = (self.level - drained).max(-rate * LATENESS.as_secs_f64());
        self.drained = now;
    }
}

impl Default for Bucket {
    fn default() -> Self {
        Self { limits: RateLimits::default(), copies: 0.0, level: 0.0, drained: Timestamp::ZERO }
    }
}

/// How late a task may wake and still make up for it.
const LATENESS: Duration = Duration::from_millis(5);
/// Bounds of a wait: a clock may not see less, and a limit may be raised.
const WAIT_MIN: Duration = Duration::from_micros(1);
const WAIT_MAX: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;
    use rdmc_fabric::{Fabric, MemNetwork};

    use super::*;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_nanos(micros * 1000)
    }

    /// Limits messages to so many bytes a second.
    fn limited(rate: impl Into<Option<u64>>) -> SendLimit {
        let limit = SendLimit::default();
        limit.set(RateLimits { messages: rate.into(), blocks: None }, false, at(0));
        limit
    }

    proptest! {
        /// However the blocks come: in no span more than the rate, a block, and what a late task makes up for.
        #[test]
        fn no_more_leaves_than_the_rate_and_whoever_waits_gets_all_of_it(
            blocks in proptest::collection::vec((1_usize..5000, 0_u64..4000), 50..200),
        ) {
            const RATE: u64 = 1_000_000;
            let limit = limited(RATE);
            let (mut now, mut left, mut waited) = (0, Vec::new(), 0);
            for (bytes, pause) in blocks {
                now += pause;
                while let Err(wait) = limit.try_pass(bytes, 1.0, at(now)) {
                    let wait = u64::try_from(wait.as_micros()).unwrap() + 1;
                    (now, waited) = (now + wait, waited + wait);
                }
                left.push((now, bytes));
            }
            let late = u64::try_from(LATENESS.as_micros()).expect("it is short");
            for (first, &(from, _)) in left.iter().enumerate() {
                let mut sum = 0;
                for &(until, bytes) in &left[first..] {
                    let most = until - from + late + 5000;
                    prop_assert!(sum <= most, "{sum} bytes, at most {most}");
                    sum += bytes as u64;
                }
            }
            let all: u64 = left[..left.len() - 1].iter().map(|(_, bytes)| *bytes as u64).sum();
            prop_assert!(waited <= all + left.len() as u64, "waited for {waited} µs, and sent {all} bytes");
        }
    }

    #[test]
    fn a_message_counts_once_however_often_its_blocks_leave() {
        let limit = limited(1000);
        let seconds = |copies| {
            let now = 1_000_000;
            while limit.try_pass(1000, copies, at(now)).is_ok() {}
            let wait = limit.try_pass(1000, copies, at(now)).expect_err("it is full");
            wait.as_secs_f64()
        };
        let one = seconds(1.0);
        assert!((one - 0.995).abs() < 0.01 && limit.rate() == Some(1000), "{one}");
        // Half of the time that is left, as each byte leaves twice.
        let two = seconds(2.0);
        assert!((two - one / 2.0).abs() < 0.01 && limit.rate() == Some(2000), "{two}");
        // Of a message that is repaired a hundredth leaves, as fast as of any other.
        let few = seconds(0.01);
        assert!((few - one).abs() < 0.01, "{few}");
        let _ = limit.try_pass(1, 2.0, at(1_000_000));
        // A bound of blocks counts each that leaves.
        limit.set(RateLimits { messages: Some(1000), blocks: Some(1500) }, false, at(1_000_000));
        assert_eq!(limit.rate(), Some(1500));
        limit.set(RateLimits::default(), true, at(1_000_000));
        assert!(limit.is_set() && limit.copies() == 2.0);
        limit.set(RateLimits::default(), false, at(1_000_000));
        assert!(!limit.is_set() && limit.try_pass(1 << 30, 1.0, at(1_000_000)).is_ok() && limit.rate().is_none());
    }

    #[tokio::test]
    async fn whoever_waits_learns_of_another_rate() {
        let fabric = MemNetwork::new().fabric();
        let environment = &*fabric.environment();
        let limit = limited(1);
        let slow = RateLimits { messages: Some(1), blocks: None };
        limit.set(slow, false, environment.now());
        while limit.try_pass(1 << 20, 1.0, environment.now()).is_ok() {}
        // That would take days.
        let mut passing = Box::pin(limit.pass(1, 1.0, environment));
        assert!((&mut passing).now_or_never().is_none());
        limit.set(RateLimits::default(), false, environment.now());
        assert!(passing.now_or_never().is_some());
    }
}
