//! The progress of a transfer, as the application sees it.
//!
//! A transfer counts its bytes where the application can ask for them. It wakes tasks only if they wait.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Context;

use futures::task::AtomicWaker;
use rdmc_fabric::Buffer;
use rdmc_schedule::BlockIndex;
use tokio::sync::Notify;

use super::{Blocks, Shape};

/// The progress of one message at this member, made by [`Multicast::progress`](crate::Multicast::progress) at the root
/// and by [`Arrival::progress`](crate::Arrival::progress) at a receiver.
///
/// It is for display. That all bytes are done says nothing about other members, or about the end of the group. A handle
/// may outlive the message, and holds none of its memory.
///
/// # Examples
/// ```no_run
/// # async fn show(root: rdmc::Sender, object: Vec<u8>) -> Result<(), Box<dyn std::error::Error>> {
/// let multicast = root.send(object);
/// let mut progress = multicast.progress();
/// let shown = async {
///     while let Some(done) = progress.changed().await {
///         println!("{done} of {} bytes", progress.total());
///     }
/// };
/// let (receipt, ()) = futures::join!(multicast, shown);
/// # receipt?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Progress {
    state: Arc<ProgressState>,
    /// The bytes that the last change returned.
    seen: u64,
}

struct ProgressState {
    total: u64,
    /// Bytes that have arrived; at the root, bytes that it has sent.
    counted: AtomicU64,
    /// What `counted` is in the end; 0 while it is not known.
    due: AtomicU64,
    /// [`RUNNING`], [`COMPLETE`] or [`BROKEN_OFF`].
    stage: AtomicU8,
    /// The application has a handle.
    watched: AtomicBool,
    /// A task waits in [`Progress::changed`], or was about to.
    waiting: AtomicBool,
    changed: Notify,
    /// At a receiver: the blocks, once they have memory.
    blocks: OnceLock<Weak<Blocks>>,
    /// At a receiver: the task that reads the message as it arrives.
    reading: AtomicWaker,
}

impl Progress {
    /// Returns the message's size in bytes.
    pub fn total(&self) -> u64 {
        self.state.total
    }

    /// Returns how many bytes are done, at most [`total`](Self::total).
    ///
    /// At a receiver, these are the bytes of the blocks that are here, and checked if the group checks blocks. At the
    /// root, it is the share of its sends that neighbours have taken, in bytes of the message. It reaches the total when
    /// the root sends nothing more.
    pub fn done(&self) -> u64 {
        let state = &*self.state;
        if state.stage.load(Ordering::SeqCst) == COMPLETE {
            return state.total;
        }
        match (state.counted.load(Ordering::SeqCst), state.due.load(Ordering::SeqCst)) {
            (_, 0) => 0,
            (counted, due) => {
                let done = u128::from(state.total) * u128::from(counted) / u128::from(due);
                u64::try_from(done).map_or(state.total, |done| done.min(state.total))
            }
        }
    }

    /// Waits until [`done`](Self::done) differs from what the last call returned, at first from 0, and returns it.
    /// Returns `None` once the transfer has ended here: all is done, or the group has failed.
    ///
    /// It may return after every block. A display that is drawn less often asks [`done`](Self::done) by a timer.
    ///
    /// # Cancel safety
    /// No change is lost.
    pub async fn changed(&mut self) -> Option<u64> {
        loop {
            let changed = self.state.changed.notified();
            self.state.waiting.store(true, Ordering::SeqCst);
            // In this order, so that the last change is seen before the end.
            let has_ended = self.state.stage.load(Ordering::SeqCst) != RUNNING;
            let done = self.done();
            if done != self.seen {
                self.seen = done;
                return Some(done);
            }
            if has_ended {
                return None;
            }
            changed.await;
        }
    }

    /// Returns a handle for the application.
    pub(crate) fn watched(&self) -> Self {
        self.state.watched.store(true, Ordering::Relaxed);
        self.clone()
    }

    /// Returns a block from its byte `from` on if it is here; if not, wakes the task when more is here. One task at a
    /// time.
    pub(crate) fn poll_bytes_from(&self, from: u64, cx: &mut Context<'_>) -> Option<Buffer> {
        self.bytes_from(from).or_else(|| {
            self.state.reading.register(cx.waker());
            self.bytes_from(from)
        })
    }

    fn bytes_from(&self, from: u64) -> Option<Buffer> {
        let blocks = self.state.blocks.get()?.upgrade()?;
        let shape = blocks.shape();
        let block = u32::try_from(from / u64::from(shape.block_size)).ok().filter(|_| from < shape.size)?;
        let bytes = blocks.if_held(BlockIndex(block))?;
        let start = usize::try_from(from - shape.offset(BlockIndex(block))).expect("it lies within the block");
        Some(bytes.slice(start..))
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("done", &self.done()).field("total", &self.total()).finish_non_exhaustive()
    }
}

/// Counts the bytes of one transfer. Dropping it ends the progress.
pub(crate) struct ProgressCounter(Arc<ProgressState>);

impl ProgressCounter {
    /// Begins to count a message of so many bytes.
    pub(crate) fn new(total: u64) -> Self {
        Self(Arc::new(ProgressState {
            total,
            counted: AtomicU64::new(0),
            due: AtomicU64::new(0),
            stage: AtomicU8::new(RUNNING),
            watched: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            changed: Notify::new(),
            blocks: OnceLock::new(),
            reading: AtomicWaker::new(),
        }))
    }

    /// Returns a handle for the application.
    pub(crate) fn handle(&self) -> Progress {
        self.handle_unwatched().watched()
    }

    /// Returns a handle that the application does not have yet.
    pub(crate) fn handle_unwatched(&self) -> Progress {
        Progress { state: self.0.clone(), seen: 0 }
    }

    /// At a receiver: notes the blocks of the message, some of which may be here.
    pub(super) fn note_blocks(&self, blocks: &Arc<Blocks>) {
        let shape = blocks.shape();
        let here: u64 = blocks.here().held().map(|block| shape.len(block) as u64).sum();
        self.0.due.store(shape.size, Ordering::SeqCst);
        // The application gets it once.
        let _ = self.0.blocks.set(Arc::downgrade(blocks));
        self.0.counted.fetch_add(here, Ordering::SeqCst);
        self.wake();
    }

    /// At a receiver: counts a block that is here now.
    pub(super) fn count_here(&self, shape: Shape, block: BlockIndex) {
        self.0.counted.fetch_add(shape.len(block) as u64, Ordering::SeqCst);
        self.wake();
    }

    /// Counts bytes that were sent, unless what is here counts. `due` tells how many there are to send in all.
    pub(super) fn count_sent(&self, bytes: usize, due: impl FnOnce() -> u64) {
        if self.0.blocks.get().is_some() {
            return;
        }
        // Before the bytes are counted, so that who is told of them can tell the share.
        if self.0.watched.load(Ordering::Relaxed) && self.0.due.load(Ordering::Relaxed) == 0 {
            self.0.due.store(due(), Ordering::SeqCst);
        }
        self.0.counted.fetch_add(bytes as u64, Ordering::SeqCst);
        self.wake();
    }

    /// Notes that all is done.
    pub(crate) fn complete(&self) {
        self.end(COMPLETE);
    }

    fn end(&self, stage: u8) {
        if self.0.stage.compare_exchange(RUNNING, stage, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.wake();
        }
    }

    fn wake(&self) {
        if self.0.waiting.load(Ordering::SeqCst) && self.0.waiting.swap(false, Ordering::SeqCst) {
            self.0.changed.notify_waiters();
        }
        if self.0.blocks.get().is_some() {
            self.0.reading.wake();
        }
    }
}

impl Drop for ProgressCounter {
    fn drop(&mut self) {
        self.end(BROKEN_OFF);
    }
}

const RUNNING: u8 = 0;
const COMPLETE: u8 = 1;
const BROKEN_OFF: u8 = 2;

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_change_is_returned_once_and_the_end_after_the_last_one() {
        let counter = ProgressCounter::new(10);
        let (mut first, mut second) = (counter.handle(), counter.handle());
        assert!(first.changed().now_or_never().is_none());
        counter.count_sent(5, || 20);
        assert_eq!((first.changed().await, second.changed().await, second.done()), (Some(2), Some(2), 2));
        let mut waits = Box::pin(first.changed());
        assert!((&mut waits).now_or_never().is_none());
        counter.count_sent(5, || unreachable!("it is known"));
        assert_eq!(waits.await, Some(5));
        counter.complete();
        drop(counter);
        assert_eq!((first.changed().await, first.changed().await), (Some(10), None));
        assert_eq!((second.changed().await, second.changed().await), (Some(10), None));
    }

    #[tokio::test]
    async fn a_transfer_that_is_broken_off_wakes_all_that_wait_and_stays_where_it_was() {
        let counter = ProgressCounter::new(10);
        let (mut first, mut second) = (counter.handle(), counter.handle());
        counter.count_sent(5, || 20);
        assert_eq!((first.changed().await, second.changed().await), (Some(2), Some(2)));
        let waits = futures::future::join(first.changed(), second.changed());
        let ((one, other), ()) = futures::join!(waits, async { drop(counter) });
        assert_eq!((one, other, first.done()), (None, None, 2));
    }

    #[test]
    fn without_a_handle_nothing_is_asked_of_the_plan() {
        let counter = ProgressCounter::new(10);
        counter.count_sent(5, || unreachable!("no application has a handle"));
        let late = counter.handle();
        assert_eq!(late.done(), 0);
        counter.count_sent(5, || 20);
        assert_eq!(late.done(), 5);
    }
}
