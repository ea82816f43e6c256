//! Futures that are polled only when they were woken.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Polls a future for the first time, and after that only if it was woken.
///
/// A task that waits for several futures polls all of them whenever one makes progress: at a member, with every block.
/// This wrapper is for futures that seldom make progress but take long to poll.
pub(crate) struct WhenWoken<F> {
    future: F,
    wakes: Arc<WakeFlags>,
    /// The waker of `wakes`, for the future.
    waker: Waker,
}

struct WakeFlags {
    woken: AtomicBool,
    /// The task that is to be woken checks the flag by itself before it sleeps.
    looking: AtomicBool,
    task: AtomicWaker,
}

impl WakeFlags {
    fn new() -> Arc<Self> {
        Arc::new(Self { woken: AtomicBool::new(true), looking: AtomicBool::new(false), task: AtomicWaker::new() })
    }
}

impl<F: Future + Unpin> WhenWoken<F> {
    pub(crate) fn new(future: F) -> Self {
        let wakes = WakeFlags::new();
        Self { future, waker: wakes.clone().into(), wakes }
    }
}

impl<F: Future + Unpin> Future for WhenWoken<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        // First, so that a wake after the check of the flag reaches the task.
        this.wakes.task.register(cx.waker());
        if !this.wakes.woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        Pin::new(&mut this.future).poll(&mut Context::from_waker(&this.waker))
    }
}

/// Waits for one future, which is polled only if it was woken, beside others whose progress may wake it.
///
/// With ordinary wakes, a task whose own work completes the future would be polled once more, for nothing.
pub(crate) struct WokenWait {
    wakes: Arc<WakeFlags>,
    waker: Waker,
}

impl WokenWait {
    pub(crate) fn new() -> Self {
        let wakes = WakeFlags::new();
        Self { waker: wakes.clone().into(), wakes }
    }

    /// Waits for `wanted`; until then calls `others` again and again, each time until it has nothing to do.
    pub(crate) async fn wait<T, E>(
        &mut self,
        wanted: impl Future<Output = T>,
        mut others: impl FnMut(&mut Context<'_>) -> Poll<Option<Result<(), E>>>,
    ) -> Result<T, E> {
        let mut wanted = std::pin::pin!(wanted);
        self.wakes.woken.store(true, Ordering::Relaxed);
        std::future::poll_fn(|cx| {
            self.wakes.task.register(cx.waker());
            self.wakes.looking.store(true, Ordering::Relaxed);
            loop {
                let woken = self.wakes.woken.swap(false, Ordering::AcqRel);
                if woken && let Poll::Ready(value) = wanted.as_mut().poll(&mut Context::from_waker(&self.waker)) {
                    return Poll::Ready(Ok(value));
                }
                // If it wakes itself while it is polled, it gives way to other tasks.
                let gives_way = woken && self.wakes.woken.load(Ordering::Acquire);
                // All that are ready, since several may complete what is waited for.
                while let Poll::Ready(Some(done)) = others(cx) {
                    if let Err(error) = done {
                        return Poll::Ready(Err(error));
                    }
                }
                if gives_way {
                    self.wakes.looking.store(false, Ordering::SeqCst);
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if self.ends() {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// Stops looking, unless there was a wake meanwhile; returns whether it stopped.
    fn ends(&self) -> bool {
        self.wakes.looking.store(false, Ordering::SeqCst);
        let sleeps = !self.wakes.woken.load(Ordering::SeqCst);
        self.wakes.looking.store(!sleeps, Ordering::Relaxed);
        sleeps
    }
}

impl Wake for WakeFlags {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // In one order with the operations of `WokenWait::ends`: either it sees the first, or this sees the second.
        self.woken.store(true, Ordering::SeqCst);
        if !self.looking.load(Ordering::SeqCst) {
            self.task.wake();
        }
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
    async fn what_is_waited_for_is_seen_though_nobody_was_woken() {
        let window = tokio::sync::Semaphore::new(0);
        let mut others = [true, true, false].into_iter();
        let others = |_: &mut Context<'_>| match others.next() {
            Some(true) => Poll::Ready(Some(Ok::<_, ()>(()))),
            Some(false) => {
                window.add_permits(1);
                Poll::Pending
            }
            None => unreachable!("what is waited for is there"),
        };
        let mut attention = WokenWait::new();
        let permit = attention.wait(window.acquire(), others).now_or_never().expect("it is there at the first poll");
        assert!(permit.expect("nothing failed").is_ok());
    }

    #[tokio::test]
    #[expect(clippy::disallowed_methods, reason = "a thread beside the task")]
    async fn what_is_waited_for_is_seen_when_it_comes_from_elsewhere() {
        let mut attention = WokenWait::new();
        for _ in 0..100 {
            let (tell, told) = tokio::sync::oneshot::channel();
            let teller = std::thread::spawn(move || tell.send(7));
            let heard = attention.wait(told, |_| Poll::Ready(None::<Result<(), ()>>)).await;
            assert_eq!(heard, Ok(Ok(7)));
            assert_eq!(teller.join().expect("it does not panic"), Ok(()));
        }
    }

    #[test]
    fn what_wakes_itself_gives_way() {
        let (mut attention, mut polls) = (WokenWait::new(), 0);
        let wanted = std::future::poll_fn(|cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls == 3 { Poll::Ready(()) } else { Poll::Pending }
        });
        let mut waiting = std::pin::pin!(attention.wait(wanted, |_| Poll::Ready(None::<Result<(), ()>>)));
        let task = Arc::new(Task::default());
        let (waker, woken) = (task.clone().into(), &task.0);
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert!(woken.swap(false, Ordering::Relaxed));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert!(woken.swap(false, Ordering::Relaxed));
        assert_eq!(waiting.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Ready(Ok(())));
    }

    #[tokio::test]
    async fn what_fails_beside_ends_the_wait() {
        let wanted = std::future::pending::<()>();
        assert_eq!(WokenWait::new().wait(wanted, |_| Poll::Ready(Some(Err("failed")))).await, Err("failed"));
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
