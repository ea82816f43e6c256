//! When a sender tries again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

/// The attempts of one transfer.
///
/// Two senders may refuse each other: each has reached a receiver that the other one lacks. So the pauses are random.
/// They get longer with the time that has passed, so that few attempts are made in vain.
#[derive(Debug)]
pub(crate) struct Attempts {
    begun: Instant,
    /// How long new attempts are made.
    limit: Duration,
    /// Number of attempts that were in vain.
    failed: u32,
}

impl Attempts {
    /// Begins the first attempt. Others may begin until `limit` has passed.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { begun: Instant::now(), limit, failed: 0 }
    }

    /// Tells whether the attempt is the first one.
    pub(crate) fn is_first(&self) -> bool {
        self.failed == 0
    }

    /// Returns for how long new attempts may begin.
    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.begun.elapsed())
    }

    /// Returns how long to wait before the next attempt; `None` if there is to be none. The last attempt is made at the
    /// very end.
    pub(crate) fn next_pause(&mut self) -> Option<Duration> {
        self.failed += 1;
        pause(self.begun.elapsed(), self.limit, random_fraction())
    }
}

/// Returns the pause after an attempt that has failed at `now`. `fraction` is random, from 0 to 1.
fn pause(now: Duration, limit: Duration, fraction: f64) -> Option<Duration> {
    let left = limit.checked_sub(now).filter(|left| !left.is_zero())?;
    Some((now / 2).clamp(PAUSE_MIN, PAUSE_MAX).mul_f64(fraction).min(left))
}

/// Returns a random number from 0 to 1, from the operating system's seed of hash tables.
#[expect(clippy::cast_precision_loss, reason = "any fraction will do")]
fn random_fraction() -> f64 {
    RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64
}

/// Longest pause at first.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause after a long time.
const PAUSE_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(100);

    #[test]
    fn pauses_get_longer_and_the_last_attempt_is_made_at_the_end() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let longest = |at: u64| pause(Duration::from_millis(at), LIMIT, 1.0);
        assert_eq!([0, 10, 400, 8_000, 60_000, 95_000].map(longest), [50, 50, 200, 4_000, 10_000, 5_000].map(ms));
        assert_eq!([100_000, 200_000].map(longest), [None, None]);
        assert_eq!(pause(Duration::from_secs(8), LIMIT, 0.25), ms(1_000));
        assert_eq!(pause(Duration::ZERO, Duration::ZERO, 1.0), None);
    }

    #[test]
    fn senders_that_meet_wait_differently() {
        let drawn = [0; 4].map(|_| random_fraction());
        assert!(drawn.iter().all(|fraction| (0.0..=1.0).contains(fraction)), "{drawn:?}");
        assert!(drawn.windows(2).any(|pair| pair[0] != pair[1]), "{drawn:?}");
    }
}
