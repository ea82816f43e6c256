//! The engine of a node, which carries out the peers' requests.
//!
//! The node's task and tasks that poll carry out short requests themselves, so that no thread has to be woken between a
//! peer's request and the task that waits for it. Long ones are handed over to a thread, so that the copies take no
//! time of the runtime. Either copies one piece of one request at a time, and queue pairs take turns. So a grant for
//! the next block does not wait behind a long block.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;

use super::bell::{Doorbell, LINES};
use super::queue_pair::{PIECE_LEN, ShmQueuePair, TurnOutcome};
use crate::completion::DrivenEngine;
use crate::sync::lock;

/// The engine of a node; whoever has the lock of its agenda drives it.
pub(super) struct Engine {
    bell: Doorbell,
    /// The queue pairs on each line that has any.
    lines: Mutex<Lines>,
    agenda: Mutex<Agenda>,
    /// Number of tasks that poll. While there are any, the bell is not armed.
    pollers: AtomicU32,
    thread: OnceLock<Thread>,
    stopping: AtomicBool,
}

#[derive(Default)]
struct Lines {
    next: u32,
    /// Whether the engine has ended.
    dead: bool,
    queue_pairs: BTreeMap<u32, Vec<Arc<ShmQueuePair>>>,
}

/// The queue pairs that the engine is to look at.
struct Agenda {
    busy: VecDeque<Arc<ShmQueuePair>>,
    /// Queue pairs that wait for a receive, and until when.
    waiting: Vec<(Instant, Arc<ShmQueuePair>)>,
    looked_at_all: Instant,
    look_after: Duration,
}

/// Who drives the engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    /// A task, which must not take long, since it has `begun`.
    Task {
        begun: Instant,
    },
    Thread,
}

impl Engine {
    pub(super) fn new(bell: Doorbell) -> Arc<Self> {
        let (looked_at_all, look_after) = (Instant::now(), LOOK_AT_ALL_MIN);
        let agenda = Agenda { busy: VecDeque::new(), waiting: Vec::new(), looked_at_all, look_after };
        Arc::new(Self {
            bell,
            lines: Mutex::default(),
            agenda: Mutex::new(agenda),
            pollers: AtomicU32::new(0),
            thread: OnceLock::new(),
            stopping: AtomicBool::new(false),
        })
    }

    /// Returns the line for the next queue pair. If all lines are in use, queue pairs share lines.
    pub(super) fn next_line(&self) -> u32 {
        let mut lines = lock(&self.lines);
        lines.next = (lines.next + 1) % LINES;
        lines.next
    }

    /// Starts the thread, and a task of the current runtime that serves the bell.
    pub(super) fn start(self: &Arc<Self>, bytes: &UnixStream) -> io::Result<()> {
        let bytes = tokio::net::UnixStream::from_std(bytes.try_clone()?)?;
        let engine = self.clone();
        let thread = thread::Builder::new().name("rdmc-shm".into()).spawn(move || engine.run())?;
        self.thread.set(thread.thread().clone()).expect("it is started once");
        tokio::spawn(self.clone().answer(bytes));
        Ok(())
    }

    /// Serves a queue pair until it ends.
    pub(super) fn add(&self, queue_pair: Arc<ShmQueuePair>) {
        let line = queue_pair.line;
        let mut lines = lock(&self.lines);
        if lines.dead {
            drop(lines);
            return queue_pair.abandon();
        }
        lines.queue_pairs.entry(line).or_default().push(queue_pair);
        drop(lines);
        self.bell.mark(line);
        // Also beside tasks that poll: from now on the thread looks at it from time to time.
        self.hand_over();
    }

    /// Makes the engine look at the queue pairs of a line.
    pub(super) fn notify(&self, line: u32) {
        self.bell.mark(line);
        if self.pollers.load(Ordering::SeqCst) == 0 {
            self.hand_over();
        }
    }

    /// Ends the thread; the task ends with the bell's socket.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.hand_over();
    }

    /// Makes the thread drive the engine.
    fn hand_over(&self) {
        self.thread.get().inspect(|thread| thread.unpark());
    }

    /// Drives the engine whenever a peer has sent a byte.
    async fn answer(self: Arc<Self>, mut bytes: tokio::net::UnixStream) {
        // Until the node has ended, or a peer has closed the socket.
        while let Ok(1..) = bytes.read(&mut [0; BYTES_AT_ONCE]).await {
            self.bell.disarm();
            self.advance();
            // A peer that sends bytes without a pause must not keep other tasks waiting.
            tokio::task::consume_budget().await;
        }
        if !self.stopping.load(Ordering::SeqCst) {
            tracing::warn!("a peer has broken the bell of this node; other peers' requests may wait for seconds");
        }
    }

    /// The thread.
    fn run(&self) {
        loop {
            let limit = {
                let mut agenda = lock(&self.agenda);
                loop {
                    self.take_turns(&mut agenda, Driver::Thread);
                    if self.stopping.load(Ordering::SeqCst) {
                        return;
                    }
                    let limit = self.look_around(&mut agenda);
                    if agenda.busy.is_empty() {
                        break limit;
                    }
                }
            };
            if self.rests() {
                let beside = (self.pollers.load(Ordering::SeqCst) > 0).then_some(REST_BESIDE_POLLERS);
                match limit.into_iter().chain(beside).min() {
                    Some(limit) => thread::park_timeout(limit),
                    None => thread::park(),
                }
            }
        }
    }

    /// Gives turns to the queue pairs with news until there are none, or until the thread is to go on.
    fn take_turns(&self, agenda: &mut Agenda, driver: Driver) -> bool {
        let _guard = EndAllOnPanic::new(self);
        let (most, mut left) = match driver {
            Driver::Task { .. } => (TASK_PIECE_LEN, TASK_TURNS_MAX),
            Driver::Thread => (PIECE_LEN, usize::MAX),
        };
        let mut has_more = false;
        loop {
            self.collect(agenda);
            let Some(queue_pair) = agenda.busy.front() else { return true };
            if let Driver::Task { begun } = driver
                && (has_more || left == 0 || (left < TASK_TURNS_MAX && begun.elapsed() >= TASK_TIME_MAX))
            {
                return false;
            }
            queue_pair.dequeued();
            let queue_pair = agenda.busy.pop_front().expect("it was seen");
            agenda.waiting.retain(|(_, other)| !Arc::ptr_eq(other, &queue_pair));
            let outcome = queue_pair.take_turn(most);
            left -= 1;
            has_more = matches!(outcome, TurnOutcome::More);
            match outcome {
                TurnOutcome::More => {
                    if queue_pair.enqueue() {
                        agenda.busy.push_back(queue_pair);
                    }
                }
                TurnOutcome::Idle => {}
                TurnOutcome::Until(limit) => {
                    agenda.waiting.push((limit, queue_pair));
                    if driver != Driver::Thread {
                        // It knows of no limit but its own.
                        self.hand_over();
                    }
                }
                TurnOutcome::Ended => self.remove(&queue_pair),
            }
        }
    }

    /// Moves the queue pairs with news to the agenda.
    fn collect(&self, agenda: &mut Agenda) {
        self.bell.take(|line| {
            if agenda.look_after > LOOK_AT_ALL_MIN {
                // The thread, which looks at all, has to look earlier.
                agenda.look_after = LOOK_AT_ALL_MIN;
                self.hand_over();
            }
            let lines = lock(&self.lines);
            let queue_pairs = lines.queue_pairs.get(&line).into_iter().flatten();
            agenda.busy.extend(queue_pairs.filter(|queue_pair| queue_pair.enqueue()).cloned());
        });
    }

    /// Notes the queue pairs whose wait has ended, and from time to time all of them. Returns when to look again.
    fn look_around(&self, agenda: &mut Agenda) -> Option<Duration> {
        let now = Instant::now();
        for (_, late) in agenda.waiting.extract_if(.., |(limit, _)| *limit <= now) {
            if late.enqueue() {
                agenda.busy.push_back(late);
            }
        }
        let lines = lock(&self.lines);
        if now >= agenda.looked_at_all + agenda.look_after {
            agenda.looked_at_all = now;
            agenda.look_after = (agenda.look_after * 4).min(LOOK_AT_ALL_MAX);
            let queue_pairs = lines.queue_pairs.values().flatten();
            agenda.busy.extend(queue_pairs.filter(|queue_pair| queue_pair.enqueue()).cloned());
        }
        let limits = agenda.waiting.iter().map(|(limit, _)| *limit);
        let look_at_all = (!lines.queue_pairs.is_empty()).then_some(agenda.looked_at_all + agenda.look_after);
        let limit = limits.chain(look_at_all).min();
        limit.map(|limit| limit.saturating_duration_since(now))
    }

    /// Tells whether the caller need not look again, because a task polls or the bell is armed. The caller has just
    /// released the agenda; while it had it, others may have left news to it.
    fn rests(&self) -> bool {
        self.pollers.load(Ordering::SeqCst) > 0 || self.bell.arm()
    }

    fn remove(&self, ended: &Arc<ShmQueuePair>) {
        let mut lines = lock(&self.lines);
        if let Some(queue_pairs) = lines.queue_pairs.get_mut(&ended.line) {
            queue_pairs.retain(|queue_pair| !Arc::ptr_eq(queue_pair, ended));
            if queue_pairs.is_empty() {
                lines.queue_pairs.remove(&ended.line);
            }
        }
    }
}

impl DrivenEngine for Engine {
    fn advance(&self) {
        let begun = Instant::now();
        let driver = Driver::Task { begun };
        for round in 0..TASK_ROUNDS_MAX {
            if round > 0 && begun.elapsed() >= TASK_TIME_MAX {
                break;
            }
            let mut agenda = match self.agenda.try_lock() {
                Ok(agenda) => agenda,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // Another one drives it, and looks again when it has done.
                Err(TryLockError::WouldBlock) => return,
            };
            if !self.take_turns(&mut agenda, driver) {
                return self.hand_over();
            }
            drop(agenda);
            if self.rests() {
                return;
            }
        }
        self.hand_over();
    }

    fn has_news(&self) -> bool {
        self.bell.has_news()
    }

    fn attend(&self, polls: bool) {
        if polls {
            self.pollers.fetch_add(1, Ordering::SeqCst);
            self.bell.disarm();
        } else if self.pollers.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.advance();
        }
    }
}

/// Ends all queue pairs if the engine panics, so that no task waits for ever.
struct EndAllOnPanic<'a> {
    engine: &'a Engine,
    /// A task that panics may drop a completion queue, which drives the engine.
    panicking: bool,
}

impl<'a> EndAllOnPanic<'a> {
    fn new(engine: &'a Engine) -> Self {
        Self { engine, panicking: thread::panicking() }
    }
}

impl Drop for EndAllOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() && !self.panicking {
            let queue_pairs = {
                let mut lines = lock(&self.engine.lines);
                lines.dead = true;
                std::mem::take(&mut lines.queue_pairs)
            };
            queue_pairs.into_values().flatten().for_each(|queue_pair| queue_pair.abandon());
        }
    }
}

/// How long the engine goes without a look at all queue pairs, because a peer may have spoilt the bell.
const LOOK_AT_ALL_MIN: Duration = Duration::from_secs(1);
/// The longest such time without any notification; it grows fourfold each time, up to this.
const LOOK_AT_ALL_MAX: Duration = Duration::from_secs(16);
/// Most bytes that a task copies in one turn. Copying them takes about as long as to wake the thread and to be woken by
/// it.
const TASK_PIECE_LEN: usize = 512 << 10;
/// For how long a task drives the engine before the thread goes on; the last turn may take longer.
const TASK_TIME_MAX: Duration = Duration::from_micros(100);
/// How often a task looks for more news before the thread goes on.
const TASK_ROUNDS_MAX: usize = 8;
/// Most bytes of the bell that are taken at once.
const BYTES_AT_ONCE: usize = 64;
/// How long the thread rests at most while tasks poll: one of them may have stopped without giving up its queue.
const REST_BESIDE_POLLERS: Duration = Duration::from_millis(50);
/// Most turns that a task gives before the thread goes on.
const TASK_TURNS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_panics_while_it_polls_ends_no_queue_pair() {
        struct Polls<'a>(&'a Engine);
        impl Drop for Polls<'_> {
            fn drop(&mut self) {
                self.0.attend(false);
            }
        }
        let (bell, ..) = Doorbell::create().unwrap();
        let engine = Engine::new(bell);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            engine.attend(true);
            let _polls = Polls(&engine);
            panic!("for another reason");
        }));
        assert!(panicked.is_err() && !lock(&engine.lines).dead);
    }
}
