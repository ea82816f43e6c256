//! The completion queue: one stream of work completions for many queue pairs.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use futures::task::AtomicWaker;

use crate::environment::{Environment, Timestamp};
use crate::fabric::FabricError;
use crate::work::{Completed, WorkCompletion};

/// How a completion queue waits when it is empty (DSN §4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Never sleeps: lowest latency, one core busy for ever.
    Poll,
    /// Sleeps until an event: no idle cost, one wake-up of latency. The default where cores are shared.
    Event,
    /// Polls for a while after the last completion, then sleeps: the paper's choice, with 50 ms.
    Hybrid {
        /// How long to poll after the last completion.
        window: Duration,
    },
}

impl CompletionMode {
    /// The paper's hybrid: poll for 50 ms after the last completion, then wait for events.
    pub const HYBRID: Self = Self::Hybrid { window: Duration::from_millis(50) };
}

/// Where a completion queue takes its completions from; implemented by fabrics.
pub trait CompletionSource: Any + Send + Sync {
    /// Takes the next completion, if there is one.
    fn poll(&self) -> Option<Completed>;

    /// Asks to be woken for the next completion; ready if there may be one already.
    ///
    /// After this returned pending, a completion that arrives wakes the task; one that arrived before the call is
    /// not missed.
    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Sets room aside for `entries` completions of one queue pair.
    ///
    /// # Errors
    /// [`FabricError::CompletionQueueFull`]: a queue that could overflow loses completions.
    fn reserve(&self, entries: u32) -> Result<(), FabricError>;

    /// Gives back what [`reserve`](Self::reserve) set aside.
    fn release(&self, entries: u32);
}

/// A stream of work completions, shared by many queue pairs.
///
/// Taking a completion out of the stream is what resolves the operation it belongs to: **somebody must poll it**,
/// usually one task that runs [`drain`](Self::drain).
pub struct CompletionQueue {
    source: Arc<dyn CompletionSource>,
    environment: Arc<dyn Environment>,
    mode: CompletionMode,
    last: Timestamp,
}

impl CompletionQueue {
    /// Makes a queue over a fabric's source; called by fabrics.
    pub fn new(source: Arc<dyn CompletionSource>, environment: Arc<dyn Environment>, mode: CompletionMode) -> Self {
        let last = environment.now();
        Self { source, environment, mode, last }
    }

    /// Returns the source, by which queue pairs are attached.
    pub fn source(&self) -> Arc<dyn CompletionSource> {
        self.source.clone()
    }

    /// Takes completions for ever, resolving the operations; never finishes.
    ///
    /// # Cancel safety
    /// No completion is lost; it waits for the next poll of the queue.
    pub async fn drain(mut self) {
        loop {
            std::future::poll_fn(|cx| Pin::new(&mut self).poll_next(cx)).await;
        }
    }
}

impl Stream for CompletionQueue {
    type Item = WorkCompletion;

    /// Never ends.
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<WorkCompletion>> {
        loop {
            if let Some(completed) = self.source.poll() {
                if matches!(self.mode, CompletionMode::Hybrid { .. }) {
                    self.last = self.environment.now();
                }
                return Poll::Ready(Some(completed.resolve()));
            }
            let spin = match self.mode {
                CompletionMode::Poll => true,
                CompletionMode::Event => false,
                CompletionMode::Hybrid { window } => self.environment.now().since(self.last) < window,
            };
            if spin {
                // Where cores are shared, whoever is to complete something needs this one.
                std::thread::yield_now();
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if self.source.poll_event(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// The queue of fabrics made in software: they [`push`](Self::push) what they have completed.
#[derive(Debug)]
pub struct SoftwareCompletions {
    completed: Mutex<VecDeque<Completed>>,
    waker: AtomicWaker,
    reserved: AtomicU32,
    capacity: u32,
}

impl SoftwareCompletions {
    /// Makes an empty queue that admits reservations of `capacity` entries in all.
    pub fn new(capacity: u32) -> Self {
        Self { completed: Mutex::default(), waker: AtomicWaker::new(), reserved: AtomicU32::new(0), capacity }
    }

    /// Appends a completion and wakes whoever waits for one. It fits if room for it was reserved.
    pub fn push(&self, completed: Completed) {
        self.push_unannounced(completed);
        self.announce();
    }

    /// Appends a completion, of which nobody need hear before [`announce`](Self::announce) is called.
    pub fn push_unannounced(&self, completed: Completed) {
        self.completed.lock().unwrap_or_else(PoisonError::into_inner).push_back(completed);
    }

    /// Wakes whoever waits for completions.
    pub fn announce(&self) {
        self.waker.wake();
    }
}

impl CompletionSource for SoftwareCompletions {
    fn poll(&self) -> Option<Completed> {
        self.completed.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        if self.completed.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    fn reserve(&self, entries: u32) -> Result<(), FabricError> {
        let grow = |reserved: u32| reserved.checked_add(entries).filter(|&sum| sum <= self.capacity);
        match self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow) {
            Ok(_) => Ok(()),
            Err(reserved) => {
                Err(FabricError::CompletionQueueFull { capacity: self.capacity, reserved, wanted: entries })
            }
        }
    }

    fn release(&self, entries: u32) {
        self.reserved.fetch_sub(entries, Ordering::AcqRel);
    }
}
