//! Counts that tasks wait for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;

/// A number that only grows, and that one task at a time can wait for.
///
/// The windows of the neighbours are made of these. Reading it costs a load; adding to it costs an addition and a check
/// for a waiting task.
#[derive(Debug, Default)]
pub(crate) struct Count {
    value: AtomicU64,
    waiting: AtomicWaker,
}

impl Count {
    pub(crate) fn get(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Adds one.
    pub(crate) fn increment(&self) {
        self.value.fetch_add(1, Ordering::AcqRel);
        self.waiting.wake();
    }

    /// Raises it to `value`, unless it is already as large.
    pub(crate) fn raise_to(&self, value: u64) {
        if self.value.fetch_max(value, Ordering::AcqRel) < value {
            self.waiting.wake();
        }
    }

    /// Waits until it is at least `value`. If several tasks wait, only the last one polled is woken.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn reaches(&self, value: u64) {
        std::future::poll_fn(|cx| self.poll_reaches(value, cx)).await;
    }

    /// Tells whether it is at least `value`; if not, the task is woken when it is.
    pub(crate) fn poll_reaches(&self, value: u64, cx: &mut Context<'_>) -> Poll<()> {
        if self.get() >= value {
            return Poll::Ready(());
        }
        self.waiting.register(cx.waker());
        // It may have grown before the registration.
        if self.get() >= value { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_count_is_reached_once_it_is_as_large() {
        let count = Count::default();
        assert!(count.reaches(0).now_or_never().is_some());
        let mut two = Box::pin(count.reaches(2));
        count.increment();
        assert!((&mut two).now_or_never().is_none());
        count.increment();
        assert!(two.now_or_never().is_some());
        count.raise_to(1);
        assert_eq!(count.get(), 2);
        count.raise_to(7);
        assert!(count.reaches(7).now_or_never().is_some());
    }

    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "a thread beside the task")]
    async fn whoever_waits_is_woken_from_another_thread() {
        for raises in [false, true] {
            let count = Arc::new(Count::default());
            let counting = std::thread::spawn({
                let count = count.clone();
                move || (1..=1000).for_each(|value| if raises { count.raise_to(value) } else { count.increment() })
            });
            for value in (0..=1000).step_by(10) {
                count.reaches(value).await;
            }
            counting.join().expect("it does not panic");
        }
    }
}
