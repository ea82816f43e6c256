//! Paced requests: a token bucket that is filled by time.

use std::fmt;
use std::time::Duration;

use rdmc_fabric::Timestamp;

/// A rate that a path admits, as a policer counts it.
///
/// A policer drops what exceeds its rate by more than its burst. So the session asks for no more bytes at once than the
/// burst, and for no more in the long run than the rate (Kissel and Swany, §V.C).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    bytes_per_second: u64,
    burst: u64,
}

impl Rate {
    /// Returns a rate with bursts of [`BURST`](Self::BURST).
    ///
    /// # Panics
    /// If it is zero.
    pub fn bytes_per_second(bytes_per_second: u64) -> Self {
        assert!(bytes_per_second > 0, "a rate of zero moves nothing");
        Self { bytes_per_second, burst: Self::BURST }
    }

    /// Returns the same rate with bursts of at most `bytes`, at least 1.
    #[must_use]
    pub fn burst(self, bytes: u64) -> Self {
        Self { burst: bytes.max(1), ..self }
    }

    /// Most bytes at once, unless [`burst`](Self::burst) says otherwise: 256 KiB.
    pub const BURST: u64 = 256 << 10;

    /// Returns the bytes per second.
    pub fn as_bytes_per_second(self) -> u64 {
        self.bytes_per_second
    }

    /// Returns the most bytes at once.
    pub fn burst_bytes(self) -> u64 {
        self.burst
    }

    fn time_of(self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl fmt::Debug for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes/s in bursts of {}", self.bytes_per_second, self.burst)
    }
}

/// Decides when bytes may be asked for.
///
/// It counts by the clock, not by sleeps: a task that wakes late asks for the bytes of the time that it has missed, up
/// to a burst.
#[derive(Debug)]
pub(crate) struct Pacer {
    rate: Option<Rate>,
    /// How late a caller may be and still get the bytes of the time that it has missed, beyond a burst.
    lateness: Duration,
    /// When the bucket was, or will be, full.
    full_at: Timestamp,
}

impl Pacer {
    pub(crate) fn new(rate: Option<Rate>) -> Self {
        Self { rate, lateness: Duration::ZERO, full_at: Timestamp::ZERO }
    }

    /// Returns the most bytes that may be asked for at once.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.rate.map_or(u64::MAX, |rate| rate.burst)
    }

    /// Changes the rate to one that was found, with bursts of `burst` bytes. What was taken before stays taken. A task
    /// that wakes late makes up for that, but a pause does not lead to a longer burst.
    pub(crate) fn set_found(&mut self, bytes_per_second: u64, burst: usize) {
        self.rate = Some(Rate::bytes_per_second(bytes_per_second).burst(burst as u64));
        self.lateness = LATENESS;
    }

    /// Takes `bytes` out of the bucket; returns when they may leave, which is `now` unless the bucket is too empty.
    pub(crate) fn take(&mut self, bytes: u64, now: Timestamp) -> Timestamp {
        let Some(rate) = self.rate else { return now };
        // The bucket is full again when the time of all bytes taken out has passed.
        let is_late = now.since(self.full_at) > self.lateness;
        self.full_at = if is_late { now } else { self.full_at } + rate.time_of(bytes);
        let ahead = self.full_at.since(now);
        now + ahead.saturating_sub(rate.time_of(rate.burst))
    }
}

/// How late a task wakes, if it is not kept from running.
const LATENESS: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What a policer with the same rate and burst sees: it never has to drop anything.
        #[test]
        fn a_policer_of_the_same_rate_drops_nothing(
            requests in proptest::collection::vec((1u64..1000, 0u64..5_000_000), 1..200),
        ) {
            let rate = Rate::bytes_per_second(1_000_000).burst(1000);
            let mut pacer = Pacer::new(Some(rate));
            let (mut now, mut tokens, mut filled) = (Timestamp::ZERO, 1000.0, Timestamp::ZERO);
            for (bytes, pause) in requests {
                now = now + Duration::from_nanos(pause);
                let leaves = pacer.take(bytes, now);
                prop_assert!(leaves >= now);
                tokens = f64::min(1000.0, tokens + leaves.since(filled).as_secs_f64() * 1e6);
                filled = leaves;
                tokens -= bytes as f64;
                prop_assert!(tokens > -0.1, "{tokens} after {bytes} bytes at {leaves:?}");
                // The caller waits.
                now = leaves;
            }
        }
    }

    #[test]
    fn the_rate_is_used_in_full_by_a_task_that_wakes_late() {
        let rate = Rate::bytes_per_second(1_000_000).burst(10_000);
        let mut pacer = Pacer::new(Some(rate));
        let (mut now, mut sent) = (Timestamp::ZERO, 0);
        while now < Timestamp::from_nanos(1_000_000_000) {
            let leaves = pacer.take(1000, now);
            // Timers have a granularity of a millisecond.
            now = Timestamp::from_nanos(leaves.as_nanos().div_ceil(1_000_000) * 1_000_000);
            sent += 1000;
        }
        assert!((990_000..=1_012_000).contains(&sent), "{sent} bytes in a second");
    }

    /// With bursts that are far shorter than what passes in a millisecond.
    #[test]
    fn a_rate_that_was_found_is_used_in_full_but_not_made_up_for_after_a_pause() {
        let mut pacer = Pacer::new(None);
        pacer.set_found(100_000_000, 1000);
        let begin = Timestamp::from_nanos(5_000_000_000);
        let end = begin + Duration::from_secs(1);
        let (mut now, mut sent, mut first) = (begin, 0, 0);
        while now < end {
            let leaves = pacer.take(1000, now);
            now = Timestamp::from_nanos(leaves.as_nanos().div_ceil(1_000_000) * 1_000_000);
            sent += 1000;
            first += u64::from(now == begin);
        }
        assert!((99_000_000..=100_200_000).contains(&sent), "{sent} bytes in a second");
        assert_eq!(first, 1, "a burst after a pause");
    }

    #[test]
    fn without_a_rate_nothing_waits() {
        let now = Timestamp::from_nanos(7);
        assert_eq!(Pacer::new(None).take(u64::MAX, now), now);
    }
}
