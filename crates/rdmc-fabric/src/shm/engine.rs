//! The copy engine of a node: the thread that carries out the peers' requests.
//!
//! It sleeps until a peer notifies it. It copies one piece of one request at a time, and queue pairs take turns. So a
//! grant for the next block does not wait behind a long block.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{io, thread};

use super::bell::{Doorbell, LINES};
use super::queue_pair::{ShmQueuePair, TurnOutcome};
use crate::sync::lock;

/// The part of the engine that other threads use.
pub(super) struct Engine {
    bell: Doorbell,
    /// The queue pairs on each line that has any.
    lines: Mutex<Lines>,
    stopping: AtomicBool,
}

#[derive(Default)]
struct Lines {
    next: u32,
    /// Whether the engine has ended.
    dead: bool,
    queue_pairs: HashMap<u32, Vec<Arc<ShmQueuePair>>>,
}

impl Engine {
    pub(super) fn new(bell: Doorbell) -> Arc<Self> {
        Arc::new(Self { bell, lines: Mutex::default(), stopping: AtomicBool::new(false) })
    }

    /// Returns the line for the next queue pair. If all lines are in use, queue pairs share lines.
    pub(super) fn next_line(&self) -> u32 {
        let mut lines = lock(&self.lines);
        lines.next = (lines.next + 1) % LINES;
        lines.next
    }

    /// Starts the thread.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        let engine = self.clone();
        thread::Builder::new().name("rdmc-shm".into()).spawn(move || engine.run()).map(drop)
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
        self.notify(line);
    }

    /// Makes the engine look at the queue pairs of a line.
    pub(super) fn notify(&self, line: u32) {
        self.bell.notify(line);
    }

    /// Ends the thread when no queue pairs are left.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.bell.wake();
    }

    fn run(&self) {
        let _guard = EndAllOnPanic(self);
        let mut busy: VecDeque<Arc<ShmQueuePair>> = VecDeque::new();
        // Queue pairs that wait for a receive, and until when.
        let mut waiting: Vec<(Instant, Arc<ShmQueuePair>)> = Vec::new();
        let (mut looked_at_all, mut look_after) = (Instant::now(), LOOK_AT_ALL_MIN);
        loop {
            self.bell.take(|line| {
                look_after = LOOK_AT_ALL_MIN;
                let lines = lock(&self.lines);
                let queue_pairs = lines.queue_pairs.get(&line).into_iter().flatten();
                busy.extend(queue_pairs.filter(|queue_pair| queue_pair.enqueue()).cloned());
            });
            if let Some(queue_pair) = busy.pop_front() {
                queue_pair.dequeued();
                waiting.retain(|(_, other)| !Arc::ptr_eq(other, &queue_pair));
                match queue_pair.take_turn() {
                    TurnOutcome::More => {
                        if queue_pair.enqueue() {
                            busy.push_back(queue_pair);
                        }
                    }
                    TurnOutcome::Idle => {}
                    TurnOutcome::Until(limit) => waiting.push((limit, queue_pair)),
                    TurnOutcome::Ended => self.remove(&queue_pair),
                }
                continue;
            }
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let now = Instant::now();
            for (_, late) in waiting.extract_if(.., |(limit, _)| *limit <= now) {
                if late.enqueue() {
                    busy.push_back(late);
                }
            }
            if now >= looked_at_all + look_after {
                looked_at_all = now;
                look_after = (look_after * 4).min(LOOK_AT_ALL_MAX);
                let lines = lock(&self.lines);
                let queue_pairs = lines.queue_pairs.values().flatten();
                busy.extend(queue_pairs.filter(|queue_pair| queue_pair.enqueue()).cloned());
            }
            if busy.is_empty() {
                let limits = waiting.iter().map(|(limit, _)| *limit);
                let any = !lock(&self.lines).queue_pairs.is_empty();
                let limit = limits.chain(any.then_some(looked_at_all + look_after)).min();
                let limit = limit.map(|limit| limit.saturating_duration_since(now));
                self.bell.sleep(limit, || self.stopping.load(Ordering::SeqCst));
            }
        }
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

/// Ends all queue pairs if the engine panics, so that no task waits for ever.
struct EndAllOnPanic<'a>(&'a Engine);

impl Drop for EndAllOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let queue_pairs = {
                let mut lines = lock(&self.0.lines);
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
