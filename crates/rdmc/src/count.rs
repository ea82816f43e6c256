//! Counts that tasks wait for.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use futures::task::AtomicWaker;

use crate::sync::lock;

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

/// A number that only grows, and that any number of tasks wait for.
#[derive(Debug, Default)]
pub(crate) struct Level(Mutex<LevelState>);

#[derive(Debug, Default)]
struct LevelState {
    value: u64,
    /// By the values that they wait for, and numbers of their own.
    waiting: BTreeMap<(u64, u64), Waker>,
    waits: u64,
}

impl Level {
    pub(crate) fn get(&self) -> u64 {
        lock(&self.0).value
    }

    /// Raises it to `value`, unless it is already as large.
    pub(crate) fn raise_to(&self, value: u64) {
        let reached = {
            let mut state = lock(&self.0);
            if state.value >= value {
                return;
            }
            state.value = value;
            let later = value.checked_add(1).map(|next| state.waiting.split_off(&(next, 0))).unwrap_or_default();
            std::mem::replace(&mut state.waiting, later)
        };
        reached.into_values().for_each(Waker::wake);
    }

    /// Waits until it is at least `value`.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) fn reaches(&self, value: u64) -> LevelWait<'_> {
        LevelWait { level: self, value, number: None }
    }
}

/// Waits until a [`Level`] is reached.
pub(crate) struct LevelWait<'a> {
    level: &'a Level,
    value: u64,
    number: Option<u64>,
}

impl Future for LevelWait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.level.0);
        if state.value >= self.value {
            return Poll::Ready(());
        }
        let number = self.number.unwrap_or(state.waits);
        state.waits = state.waits.max(number + 1);
        state.waiting.insert((self.value, number), cx.waker().clone());
        drop(state);
        self.number = Some(number);
        Poll::Pending
    }
}

impl Drop for LevelWait<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let waker = lock(&self.level.0).waiting.remove(&(self.value, number));
            drop(waker);
        }
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

    #[test]
    fn all_that_wait_for_a_level_learn_of_it() {
        let level = Level::default();
        assert!(level.reaches(0).now_or_never().is_some());
        let (mut two, mut twice, mut seven) =
            (Box::pin(level.reaches(2)), Box::pin(level.reaches(2)), Box::pin(level.reaches(7)));
        let (first_wakes, first) = counting_waker();
        let (second_wakes, second) = counting_waker();
        for _ in 0..2 {
            assert!(two.as_mut().poll(&mut Context::from_waker(&first)).is_pending());
            assert!(twice.as_mut().poll(&mut Context::from_waker(&second)).is_pending());
        }
        assert!(seven.as_mut().poll(&mut Context::from_waker(&first)).is_pending());
        assert_eq!(lock(&level.0).waiting.len(), 3, "each waits once, however often it is polled");
        level.raise_to(1);
        assert_eq!((first_wakes.get(), second_wakes.get()), (0, 0));
        level.raise_to(5);
        level.raise_to(3);
        assert_eq!((level.get(), first_wakes.get(), second_wakes.get()), (5, 1, 1));
        assert!(two.now_or_never().is_some() && twice.now_or_never().is_some());
        drop(seven);
        assert!(lock(&level.0).waiting.is_empty(), "who waits no more is forgotten");
    }

    /// A waker that counts its wakes.
    fn counting_waker() -> (Arc<Count>, Waker) {
        struct Counting(Arc<Count>);
        impl std::task::Wake for Counting {
            fn wake(self: Arc<Self>) {
                self.0.increment();
            }
        }
        let count = Arc::<Count>::default();
        (count.clone(), Arc::new(Counting(count)).into())
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
