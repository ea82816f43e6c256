//! The completion queue: one stream of work completions for many queue pairs.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use futures::task::AtomicWaker;

use crate::environment::{Environment, Timestamp};
use crate::fabric::FabricError;
use crate::work::{Completed, WorkCompletion};

/// How a completion queue waits when it is empty (DSN §4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionMode {
    /// Never sleeps: the lowest latency, but one core is always busy.
    Poll,
    /// Sleeps until an event: no idle cost, but one wake-up of latency. The default where cores are shared.
    Event,
    /// Polls for a while after the last completion, then sleeps. The paper uses 50 ms.
    Hybrid {
        /// How long to poll after the last completion.
        window: Duration,
    },
}

impl CompletionMode {
    /// The paper's hybrid: poll for 50 ms after the last completion, then wait for events.
    pub const HYBRID: Self = Self::Hybrid { window: Duration::from_millis(50) };
}

/// The source of a completion queue's completions; fabrics implement it.
pub trait CompletionSource: Any + Send + Sync {
    /// Takes the next completion, if there is one.
    fn poll(&self) -> Option<Completed>;

    /// Registers the task to be woken for the next completion; ready if there may be one already.
    ///
    /// After it has returned pending, the next completion wakes the task. A completion that arrived before the call is
    /// not missed.
    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Reserves room for `entries` completions of one queue pair.
    ///
    /// # Errors
    /// [`FabricError::CompletionQueueFull`], because a queue that could overflow loses completions.
    fn reserve(&self, entries: u32) -> Result<(), FabricError>;

    /// Releases what [`reserve`](Self::reserve) has reserved.
    fn release(&self, entries: u32);

    /// Does work of the fabric that completes requests, as far as there is any now. A task that polls calls it before
    /// each look, unless there [is no news](Self::has_news), so that no other thread has to be woken.
    fn advance(&self) {}

    /// Tells whether [`advance`](Self::advance) has work to do. `None` if that cannot be told, or if completions come
    /// from other tasks, which need the thread of the task that polls.
    fn has_news(&self) -> Option<bool> {
        None
    }

    /// Learns that a task polls the queue from now on, or that it does not any more.
    fn attend(&self, polls: bool) {
        let _ = polls;
    }
}

/// A stream of work completions, shared by many queue pairs.
///
/// Taking a completion from the stream resolves its operation. **A task must poll the queue**, usually one task that
/// runs [`drain`](Self::drain).
pub struct CompletionQueue {
    source: Arc<dyn CompletionSource>,
    environment: Arc<dyn Environment>,
    mode: CompletionMode,
    last: Timestamp,
    /// Whether the source knows that a task polls.
    attends: bool,
    pause: Pause,
}

impl CompletionQueue {
    /// Creates a queue over a fabric's source; fabrics call it.
    pub fn new(source: Arc<dyn CompletionSource>, environment: Arc<dyn Environment>, mode: CompletionMode) -> Self {
        let last = environment.now();
        Self { source, environment, mode, last, attends: false, pause: Pause::new() }
    }

    /// Returns the source, which attaches queue pairs to this queue.
    pub fn source(&self) -> Arc<dyn CompletionSource> {
        self.source.clone()
    }

    /// Takes completions and resolves their operations for ever; never returns.
    ///
    /// # Cancel safety
    /// No completion is lost; it waits for the next poll of the queue.
    pub async fn drain(mut self) {
        loop {
            std::future::poll_fn(|cx| Pin::new(&mut self).poll_next(cx)).await;
        }
    }

    /// Tells whether the queue is polled rather than asleep.
    fn spins(&self) -> bool {
        match self.mode {
            CompletionMode::Poll => true,
            CompletionMode::Event => false,
            CompletionMode::Hybrid { window } => self.environment.now().since(self.last) < window,
        }
    }

    fn attend(&mut self, polls: bool) {
        if self.attends != polls {
            self.attends = polls;
            self.source.attend(polls);
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.attend(false);
    }
}

impl Stream for CompletionQueue {
    type Item = WorkCompletion;

    /// Never ends.
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<WorkCompletion>> {
        loop {
            if self.attends {
                match self.source.has_news() {
                    // The fabric's own threads do what is left of earlier news.
                    Some(false) => {}
                    Some(true) => {
                        self.pause.note_news();
                        self.source.advance();
                    }
                    None => self.source.advance(),
                }
            }
            if let Some(completed) = self.source.poll() {
                self.pause.note_news();
                if matches!(self.mode, CompletionMode::Hybrid { .. }) {
                    self.last = self.environment.now();
                }
                return Poll::Ready(Some(completed.resolve()));
            }
            if self.spins() {
                if !self.attends {
                    self.attend(true);
                    continue;
                }
                let Self { pause, source, .. } = &mut *self;
                if pause.waits(&**source) {
                    continue;
                }
                look_again(cx);
                return Poll::Pending;
            }
            self.attend(false);
            if self.source.poll_event(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

/// What a task that polls does between two looks: it lets others have its thread and its core.
///
/// To offer the core takes longer than all else between two looks, and to go back to the runtime takes longer than many
/// looks. So the task offers a core that nobody wanted only now and then, and keeps a thread that nobody wants.
struct Pause {
    /// How often in succession there was no news, and the runtime came back at once.
    quiet: u32,
    /// When the task went back to the runtime.
    left: Instant,
    /// When the core was offered last.
    offered: Instant,
    /// Whether another thread has taken it.
    was_taken: bool,
}

impl Pause {
    fn new() -> Self {
        let now = Instant::now();
        Self { quiet: 0, left: now, offered: now, was_taken: true }
    }

    fn note_news(&mut self) {
        self.quiet = 0;
    }

    /// Waits a little. Returns true if there is news meanwhile, and false if the task is to go back to the runtime.
    fn waits(&mut self, source: &dyn CompletionSource) -> bool {
        let now = Instant::now();
        self.quiet = if now.duration_since(self.left) < ROUND_TIME { self.quiet.saturating_add(1) } else { 1 };
        let unoffered = now.duration_since(self.offered);
        let has_news = if self.quiet == 1 && unoffered < OFFER_AT_LEAST_EVERY {
            // After news, other tasks of the runtime run first.
            false
        } else if self.was_taken || unoffered > OFFER_EVERY {
            self.offer_core(now);
            false
        } else {
            self.quiet >= QUIET_ROUNDS && looks_for_news(source, now)
        };
        self.left = Instant::now();
        has_news
    }

    fn offer_core(&mut self, now: Instant) {
        std::thread::yield_now();
        self.offered = Instant::now();
        self.was_taken = self.offered.duration_since(now) > OFFER_TIME;
    }
}

/// Looks for news, for a while; returns whether there is any.
fn looks_for_news(source: &dyn CompletionSource, begun: Instant) -> bool {
    while begun.elapsed() < LOOKS_TIME {
        for _ in 0..LOOKS {
            match source.has_news() {
                Some(false) => std::hint::spin_loop(),
                Some(true) => return true,
                None => return false,
            }
        }
    }
    false
}

/// How long a task polls between two offers of its core, if nobody took it at the last one.
const OFFER_EVERY: Duration = Duration::from_micros(10);
/// How long it polls at most, if there is always news.
const OFFER_AT_LEAST_EVERY: Duration = Duration::from_micros(50);
/// An offer that takes longer was taken.
const OFFER_TIME: Duration = Duration::from_micros(3);
/// If the runtime takes longer to come back, it had other tasks to poll.
const ROUND_TIME: Duration = Duration::from_micros(2);
/// Rounds without news before a task keeps the thread.
const QUIET_ROUNDS: u32 = 3;
/// For how long it keeps it.
const LOOKS_TIME: Duration = Duration::from_micros(2);
/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// Has the task polled again, after the runtime has looked at its sockets.
///
/// A task that wakes itself is polled dozens of times before a runtime of Tokio looks at them again.
fn look_again(cx: &mut Context<'_>) {
    let yielded = std::pin::pin!(tokio::task::yield_now());
    let _ = yielded.poll(cx);
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// The completion queue of software fabrics, which [`push`](Self::push) their completions.
pub struct SoftwareCompletions {
    completed: Mutex<VecDeque<Completed>>,
    waker: AtomicWaker,
    reserved: AtomicU32,
    capacity: u32,
    /// What carries out requests, if a polling task can do that itself.
    engine: Option<Arc<dyn DrivenEngine>>,
}

/// The engine of a software fabric, which polling tasks can drive.
pub(crate) trait DrivenEngine: Send + Sync {
    /// Carries out some of the requests at hand.
    fn advance(&self);

    /// Tells whether there are requests at hand, as far as that is seen at a glance.
    fn has_news(&self) -> bool;

    /// Learns that one more task drives the engine, or one less.
    fn attend(&self, polls: bool);
}

impl fmt::Debug for SoftwareCompletions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftwareCompletions").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl SoftwareCompletions {
    /// Creates an empty queue that admits reservations of up to `capacity` entries.
    pub fn new(capacity: u32) -> Self {
        let (completed, waker, reserved) = (Mutex::default(), AtomicWaker::new(), AtomicU32::new(0));
        Self { completed, waker, reserved, capacity, engine: None }
    }

    /// Has polling tasks drive the engine that carries out requests.
    pub(crate) fn driving(self, engine: Arc<dyn DrivenEngine>) -> Self {
        Self { engine: Some(engine), ..self }
    }

    /// Appends a completion and wakes the task that waits for one. It fits if room for it was reserved.
    pub fn push(&self, completed: Completed) {
        self.push_unannounced(completed);
        self.announce();
    }

    /// Appends a completion; no task needs to see it before [`announce`](Self::announce) is called.
    #[inline]
    pub fn push_unannounced(&self, completed: Completed) {
        self.completed.lock().unwrap_or_else(PoisonError::into_inner).push_back(completed);
    }

    /// Wakes the task that waits for completions.
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

    fn has_news(&self) -> Option<bool> {
        self.engine.as_ref().map(|engine| engine.has_news())
    }

    fn advance(&self) {
        self.engine.iter().for_each(|engine| engine.advance());
    }

    fn attend(&self, polls: bool) {
        self.engine.iter().for_each(|engine| engine.attend(polls));
    }
}
