//! Bounded warnings about refused connections.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::Notify;

use super::{Environment, Timestamp};
use crate::sync::lock;

/// Bounds the warnings about refused connections: the first of a kind and peer is logged at once, the others as a sum
/// each [`PERIOD`](Self::PERIOD).
///
/// It remembers [`PEERS_MAX`](Self::PEERS_MAX) peers at once; the refusals of further peers are summed together.
#[derive(Debug, Default)]
pub struct RefusalLog {
    state: Mutex<RefusalLogState>,
    noted: Notify,
}

#[derive(Debug, Default)]
struct RefusalLogState {
    /// How many were not logged, by kind and peer.
    unlogged: BTreeMap<(&'static str, Option<IpAddr>), u64>,
    /// When the next sums are due.
    period_ends: Option<Timestamp>,
}

/// Refused connections of one kind and peer that were not logged one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusalSum {
    /// Why they were refused, in a word.
    pub kind: &'static str,
    /// Where they came from; `None` if that is not known, or if they came from several peers.
    pub from: Option<IpAddr>,
    /// How many there were.
    pub count: u64,
}

impl RefusalLog {
    /// Time between two sums.
    pub const PERIOD: Duration = Duration::from_secs(60);
    /// Most kinds and peers that are remembered at once.
    pub const PEERS_MAX: usize = 64;

    /// Notes a refusal; tells whether the caller is to log it. If not, it becomes part of the next sum.
    pub fn note(&self, kind: &'static str, from: Option<IpAddr>) -> bool {
        let is_first = {
            let unlogged = &mut lock(&self.state).unlogged;
            let is_known = unlogged.contains_key(&(kind, from));
            let from = from.filter(|_| is_known || unlogged.len() < Self::PEERS_MAX);
            let is_first = !unlogged.contains_key(&(kind, from));
            *unlogged.entry((kind, from)).or_default() += u64::from(!is_first);
            is_first
        };
        self.noted.notify_one();
        is_first
    }

    /// Waits until a period after a refusal is over and returns the sums of what was not logged, for the caller to log.
    ///
    /// One task calls it at a time, again and again.
    ///
    /// # Cancel safety
    /// No refusal is lost, and the period goes on.
    pub async fn next_sums(&self, environment: &dyn Environment) -> Vec<RefusalSum> {
        loop {
            while lock(&self.state).unlogged.is_empty() {
                self.noted.notified().await;
            }
            let period_ends = *lock(&self.state).period_ends.get_or_insert_with(|| environment.now() + Self::PERIOD);
            environment.sleep_until(period_ends).await;
            let sums = self.take_sums();
            if !sums.is_empty() {
                return sums;
            }
        }
    }

    /// Ends the period; forgets the peers from which nothing more came.
    fn take_sums(&self) -> Vec<RefusalSum> {
        let mut state = lock(&self.state);
        state.period_ends = None;
        state.unlogged.retain(|_, count| *count > 0);
        let sums = state.unlogged.iter_mut().map(|(&(kind, from), count)| {
            let count = std::mem::take(count);
            RefusalSum { kind, from, count }
        });
        sums.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures::FutureExt;
    use futures::future::BoxFuture;

    use super::super::{ControlListener, ControlStream};
    use super::*;

    /// A clock that is set by hand.
    #[derive(Clone, Debug, Default)]
    struct ManualClock {
        seconds: Arc<AtomicU64>,
        moved: Arc<Notify>,
    }

    impl ManualClock {
        fn advance(&self, seconds: u64) {
            self.seconds.fetch_add(seconds, Ordering::Relaxed);
            self.moved.notify_waiters();
        }
    }

    impl Environment for ManualClock {
        fn now(&self) -> Timestamp {
            Timestamp::ZERO + Duration::from_secs(self.seconds.load(Ordering::Relaxed))
        }

        fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
            let clock = self.clone();
            Box::pin(async move {
                loop {
                    let moved = clock.moved.notified();
                    if clock.now() >= at {
                        return;
                    }
                    moved.await;
                }
            })
        }

        fn spawn(&self, _: BoxFuture<'static, ()>) {
            unreachable!("nothing is spawned")
        }

        fn fill_random(&self, _: &mut [u8]) {
            unreachable!("nothing is random")
        }

        fn listen(&self, _: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
            unreachable!("nothing listens")
        }

        fn connect(&self, _: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
            unreachable!("nothing connects")
        }
    }

    fn peer(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    #[test]
    fn the_first_refusal_is_logged_and_the_others_are_summed_each_minute() {
        let (log, clock) = (RefusalLog::default(), ManualClock::default());
        let mut sums = Box::pin(log.next_sums(&clock));
        assert!(sums.as_mut().now_or_never().is_none());
        let logged = (0..1000).filter(|_| log.note("silent", peer(1))).count();
        assert_eq!(logged, 1);
        assert!(log.note("silent", peer(2)) && log.note("version", peer(1)), "another peer, another kind");
        assert!(sums.as_mut().now_or_never().is_none());
        clock.advance(59);
        // One that is dropped does not begin the period anew.
        sums = Box::pin(log.next_sums(&clock));
        assert!(sums.as_mut().now_or_never().is_none());
        clock.advance(1);
        let sum = |count| vec![RefusalSum { kind: "silent", from: peer(1), count }];
        assert_eq!(sums.now_or_never(), Some(sum(999)));
        // It goes on, and is not logged one by one.
        let mut sums = Box::pin(log.next_sums(&clock));
        assert!(sums.as_mut().now_or_never().is_none());
        assert!(!log.note("silent", peer(1)) && log.note("silent", peer(2)), "the other peer was forgotten");
        clock.advance(60);
        assert_eq!(sums.now_or_never(), Some(sum(1)));
        let mut sums = Box::pin(log.next_sums(&clock));
        assert!(sums.as_mut().now_or_never().is_none());
        clock.advance(60);
        assert!(sums.as_mut().now_or_never().is_none(), "there is nothing to sum");
        assert!(log.note("silent", peer(1)), "after a quiet minute it is the first again");
    }

    #[test]
    fn peers_beyond_the_bound_are_summed_together() {
        let log = RefusalLog::default();
        let logged = (0..=255).filter(|last| log.note("silent", peer(*last))).count();
        assert_eq!(logged, RefusalLog::PEERS_MAX + 1);
        let sums = log.take_sums();
        assert_eq!(sums, [RefusalSum { kind: "silent", from: None, count: 256 - logged as u64 }]);
        assert!(lock(&log.state).unlogged.len() <= RefusalLog::PEERS_MAX + 1);
    }
}
