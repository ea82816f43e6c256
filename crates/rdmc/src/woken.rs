//! Futures that are polled only when somebody has woken them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Polls a future for the first time, and after that only if it was woken.
///
/// A task that waits for several things at once polls all of them whenever one moves, at a member with every block. What
/// seldom moves, but takes long to say that it has not, is put in here.
pub(crate) struct WhenWoken<F> {
    future: F,
    wakes: Arc<Wakes>,
    /// Of `wakes`, as the future is to have it.
    waker: Waker,
}

struct Wakes {
    woken: AtomicBool,
    task: AtomicWaker,
}

impl<F: Future + Unpin> WhenWoken<F> {
    pub(crate) fn new(future: F) -> Self {
        let wakes = Arc::new(Wakes { woken: AtomicBool::new(true), task: AtomicWaker::new() });
        Self { future, waker: wakes.clone().into(), wakes }
    }
}

impl<F: Future + Unpin> Future for WhenWoken<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        // First, so that a wake after the look at the flag reaches the task.
        this.wakes.task.register(cx.waker());
        if !this.wakes.woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        Pin::new(&mut this.future).poll(&mut Context::from_waker(&this.waker))
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures::FutureExt;
    use futures::task::noop_waker_ref;

    use super::*;

    #[derive(Default)]
    struct Task(AtomicBool);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_future_is_polled_at_first_and_when_it_was_woken() {
        let (polls, waker) = (Cell::new(0), Cell::new(None));
        let future = std::future::poll_fn(|cx| {
            polls.set(polls.get() + 1);
            waker.set(Some(cx.waker().clone()));
            if polls.get() == 3 { Poll::Ready("done") } else { Poll::Pending }
        });
        let mut future = WhenWoken::new(future);
        let mut poll = || future.poll_unpin(&mut Context::from_waker(noop_waker_ref()));
        assert_eq!((poll(), poll(), polls.get()), (Poll::Pending, Poll::Pending, 1));
        waker.take().expect("it was polled").wake();
        assert_eq!((poll(), poll(), polls.get()), (Poll::Pending, Poll::Pending, 2));
        waker.take().expect("it was polled").wake_by_ref();
        assert_eq!((poll(), polls.get()), (Poll::Ready("done"), 3));
    }

    #[test]
    fn a_wake_reaches_whichever_task_polled_last() {
        let (tell, told) = tokio::sync::oneshot::channel();
        let mut waiting = WhenWoken::new(told);
        let tasks = [Arc::new(Task::default()), Arc::new(Task::default())];
        for task in &tasks {
            assert!(waiting.poll_unpin(&mut Context::from_waker(&task.clone().into())).is_pending());
        }
        tell.send(7).expect("it is waited for");
        assert_eq!(tasks.map(|task| task.0.load(Ordering::Relaxed)), [false, true]);
        assert_eq!(waiting.now_or_never(), Some(Ok(7)));
    }

    #[tokio::test]
    async fn a_future_that_wakes_itself_is_polled_again() {
        let mut left = 3;
        let counting = std::future::poll_fn(move |cx| {
            left -= 1;
            cx.waker().wake_by_ref();
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        });
        WhenWoken::new(counting).await;
    }
}
