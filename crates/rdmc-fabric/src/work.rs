//! Work requests, their completions, and the futures that wait for them.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use crate::memory::{Buffer, BufferMut};
use crate::remote::RemoteMemory;

/// The work that a request asks of a queue pair, with the memory that it owns until it is completed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Work {
    /// Sends bytes into the next receive that the peer posted.
    Send {
        /// The bytes.
        data: Buffer,
        /// A number that the peer gets with the completion of its receive.
        imm: Option<u32>,
    },
    /// Takes the bytes of the peer's next send, or the immediate of its next write with immediate.
    Receive {
        /// The memory for them.
        into: BufferMut,
    },
    /// Writes bytes into the peer's memory, one-sided.
    Write {
        /// The bytes.
        data: Buffer,
        /// The memory of the peer.
        to: RemoteMemory,
        /// With an immediate, the write also consumes and completes a receive of the peer.
        imm: Option<u32>,
    },
    /// Reads bytes out of the peer's memory, one-sided.
    Read {
        /// The memory for them.
        into: BufferMut,
        /// The memory of the peer, of the same length.
        from: RemoteMemory,
    },
}

impl Work {
    /// Returns the kind of work.
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Send { .. } => Opcode::Send,
            Self::Receive { .. } => Opcode::Receive,
            Self::Write { .. } => Opcode::Write,
            Self::Read { .. } => Opcode::Read,
        }
    }

    /// Returns the length in bytes of the request's memory.
    pub fn len(&self) -> usize {
        match self {
            Self::Send { data, .. } | Self::Write { data, .. } => data.len(),
            Self::Receive { into } | Self::Read { into, .. } => into.len(),
        }
    }

    /// Tells whether the request's memory is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// A two-sided send.
    Send,
    /// The other side of a send, or of a write with immediate.
    Receive,
    /// A one-sided write.
    Write,
    /// A one-sided read.
    Read,
}

/// Why work failed. Each of these breaks the queue pair, as on reliable connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum WorkError {
    /// The queue pair was broken or closed before this work was done; an earlier completion has the reason.
    #[error("flushed because the queue pair is broken or closed")]
    Flushed,
    /// The peer's send is longer than the memory posted for it.
    #[error("the peer sent {} into a receive of {room}", describe_len(*.got))]
    LocalLength {
        /// Bytes that the peer sent, where the fabric knows.
        got: Option<u64>,
        /// Bytes of the memory posted.
        room: u64,
    },
    /// The peer's receive is too small, or the request is invalid for it.
    #[error("the peer could not take the request: its receive is too small")]
    RemoteInvalidRequest,
    /// The key is wrong, the range is out of bounds, or the peer does not allow the access.
    #[error("the peer refused access to its memory: wrong key, out of bounds or not allowed")]
    RemoteAccess,
    /// The peer posted no receive within the time that the queue pair waits for one.
    #[error("the peer posted no receive in time")]
    ReceiverNotReady,
    /// The connection to the peer was lost.
    #[error("the connection to the peer was lost")]
    ConnectionLost,
    /// The peer broke the fabric's protocol.
    #[error("the peer broke the protocol of the fabric")]
    Protocol,
    /// The queue is full: this work was not posted. The queue pair is not affected.
    #[error("the queue holds no more than {depth} work requests")]
    QueueFull {
        /// The configured depth.
        depth: u32,
    },
    /// The memory of the request could not be read or written: a mapped file was shortened, or the memory is not
    /// registered with this fabric.
    #[error("the memory of the request could not be read or written")]
    LocalProtection,
    /// The device failed the work for another reason.
    #[error("the device failed the request: {status} (vendor's code {vendor:#x})")]
    Device {
        /// The status of the verbs.
        status: &'static str,
        /// The vendor's code.
        vendor: u32,
    },
}

fn describe_len(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "more bytes than there is room for".into(), |bytes| format!("{bytes} bytes"))
}

/// The result of a successful receive.
#[derive(Debug)]
pub struct Received {
    /// All of the memory that was posted; the first `len` bytes are new.
    pub buffer: BufferMut,
    /// Bytes received; 0 for a write with immediate, whose bytes are elsewhere in exposed memory.
    pub len: usize,
    /// The peer's immediate.
    pub imm: Option<u32>,
}

/// Inspects the bytes of a receive as they arrive.
///
/// Code that reads a large message after it has arrived fetches it from memory once more. A fabric that has just copied
/// the bytes shows them while they are in the processor's cache. It may show all bytes or only the first ones. It shows
/// none if a device wrote them. The task that posted the receive reads the rest itself.
pub trait Inspector: fmt::Debug + Send + Sync {
    /// Inspects the next bytes, which follow those of the previous call.
    ///
    /// The fabric's task calls it before the receive completes, never after; the receive may still fail. It must not
    /// block.
    fn inspect(&self, bytes: &[u8]);
}

/// What else may be asked of a receive.
#[derive(Clone, Debug, Default)]
pub struct ReceiveOptions {
    /// Sees the bytes as they arrive, as far as the fabric shows them.
    pub inspector: Option<Arc<dyn Inspector>>,
    /// The receive is [nearly done](Operation::nearly_done) when at most so many bytes are still to come. `None` leaves
    /// the number to the fabric. Ignored by fabrics that [cannot tell](crate::Capabilities::tells_near), and between
    /// processes of one host.
    ///
    /// With the bytes that arrive in a round trip, what the next sender is told then is under way meanwhile. The peer's
    /// send is nearly done then or later.
    pub near_bytes: Option<u32>,
}

/// The outcome of one work request as the completion queue reports it.
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    /// The queue pair it was posted to.
    pub queue_pair: QueuePairId,
    /// The kind of work.
    pub opcode: Opcode,
    /// Bytes moved, or the error.
    pub result: Result<usize, WorkError>,
    /// The peer's immediate, for receives.
    pub imm: Option<u32>,
}

/// Identifies a queue pair of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueuePairId(pub u64);

impl fmt::Display for QueuePairId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qp{}", self.0)
    }
}

/// A posted work request as a fabric holds it.
///
/// It owns the memory until it is completed. If it is dropped without being completed, its future resolves with
/// [`WorkError::Flushed`]. So no bug of a fabric leaves a task waiting.
#[derive(Debug)]
pub struct WorkRequest {
    work: Option<Work>,
    signaling: Signaling,
    queue_pair: QueuePairId,
    slot: Arc<Slot>,
}

/// How a request is to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signaling {
    /// Its completion is reported when it is done.
    Signaled,
    /// Its completion may wait for that of a later request.
    Unsignaled,
    /// As `Unsignaled`, and more requests follow at once.
    MoreToCome,
}

impl WorkRequest {
    #[inline]
    pub(crate) fn new(
        work: Work,
        signaling: Signaling,
        options: ReceiveOptions,
        queue_pair: QueuePairId,
        queue: &Arc<WorkQueue>,
    ) -> (Self, Arc<Slot>) {
        let slot = queue.slot(options);
        (Self { work: Some(work), signaling, queue_pair, slot: slot.clone() }, slot)
    }

    /// Tells whether the completion may wait for that of a later request.
    pub fn is_unsignaled(&self) -> bool {
        self.signaling != Signaling::Signaled
    }

    /// Tells whether the request may be held back to save a doorbell, until a later request is posted or
    /// [`flush`](crate::RawQueuePair::flush) is called.
    pub fn has_more_behind(&self) -> bool {
        self.signaling == Signaling::MoreToCome
    }

    /// Returns the work.
    pub fn work(&self) -> &Work {
        self.work.as_ref().expect("only completion takes the work out")
    }

    /// Returns the work, with the memory to be filled.
    pub fn work_mut(&mut self) -> &mut Work {
        self.work.as_mut().expect("only completion takes the work out")
    }

    /// Returns the inspector of a receive. A fabric that has the bytes at hand shows them to it.
    pub fn inspector(&self) -> Option<&Arc<dyn Inspector>> {
        self.slot.options.inspector.as_ref()
    }

    /// Returns how many bytes may be still to come when a receive is to be marked as nearly done; `None` if it does not
    /// say.
    pub fn near_bytes(&self) -> Option<u32> {
        self.slot.options.near_bytes
    }

    /// Marks the work as nearly done; a fabric that can tell calls it when few bytes are still to come.
    pub fn nearly_done(&self) {
        self.slot.near();
    }

    /// Marks work that is just being posted as nearly done. No task waits for that yet.
    pub(crate) fn nearly_done_from_the_start(&self) {
        self.slot.near.store(true, Ordering::Release);
    }

    /// Returns a handle with the same effect, for a fabric that has put the request away.
    pub fn nearing(&self) -> Nearing {
        Nearing(self.slot.clone())
    }

    /// Ends the request; the completion queue reports the result and resolves the future with it.
    ///
    /// `result` is the number of bytes moved; `imm` is the peer's immediate, for receives.
    #[inline]
    pub fn complete(mut self, result: Result<usize, WorkError>, imm: Option<u32>) -> Completed {
        let work = self.work.take().expect("a request is completed once");
        let report = WorkCompletion { queue_pair: self.queue_pair, opcode: work.opcode(), result, imm };
        Completed { report, work: Some(work), slot: self.slot.clone() }
    }
}

impl Drop for WorkRequest {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.slot.resolve(Err(WorkError::Flushed), None, work);
        }
    }
}

/// Marks an operation as nearly done.
#[derive(Debug)]
pub struct Nearing(Arc<Slot>);

impl Nearing {
    /// Marks the operation: few bytes are still to come.
    pub fn mark(self) {
        self.0.near();
    }
}

/// A completed work request on its way through a completion queue.
///
/// If it is dropped on the way because the queue is gone, it still resolves its future.
#[derive(Debug)]
pub struct Completed {
    report: WorkCompletion,
    work: Option<Work>,
    slot: Arc<Slot>,
}

impl Completed {
    /// Returns the report for the completion queue.
    pub fn report(&self) -> WorkCompletion {
        self.report
    }

    /// Wakes the task that waits for the operation and returns the report.
    pub(crate) fn resolve(self) -> WorkCompletion {
        self.report
    }
}

impl Drop for Completed {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.slot.resolve(self.report.result, self.report.imm, work);
        }
    }
}

/// The requests of one kind that a queue pair has posted: its receives, or all others.
#[derive(Debug, Default)]
pub(crate) struct WorkQueue {
    outstanding: AtomicU32,
    /// Slots for later requests, so that a request allocates nothing.
    spare: Mutex<Vec<Arc<Slot>>>,
}

impl WorkQueue {
    /// Counts one more request, of at most `depth`; returns how many there were, or `None` if the queue is full.
    pub(crate) fn count(&self, depth: u32) -> Option<u32> {
        let grow = |count: u32| (count < depth).then_some(count + 1);
        self.outstanding.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow).ok()
    }

    fn slot(self: &Arc<Self>, options: ReceiveOptions) -> Arc<Slot> {
        let spare = self.spare().pop();
        let mut slot = spare.unwrap_or_else(|| Slot::new(SlotState::default()));
        let fresh = Arc::get_mut(&mut slot).expect("nobody shares a spare slot");
        fresh.queue = Some(self.clone());
        fresh.options = options;
        slot
    }

    /// Keeps a slot whose operation has ended, unless it is still shared.
    fn keep(mut slot: Arc<Slot>) {
        let Some(ended) = Arc::get_mut(&mut slot) else { return };
        let Some(queue) = ended.queue.take() else { return };
        ended.options.inspector = None;
        *ended.near.get_mut() = false;
        let state = ended.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A task may have been told at once that it was near.
        state.near_waker = None;
        debug_assert!(state.outcome.is_none() && !state.abandoned, "its outcome was taken");
        let mut spare = queue.spare();
        if spare.len() < SPARE_SLOTS {
            spare.push(slot);
        }
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Slot>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state that a request and its future share.
#[derive(Debug)]
pub(crate) struct Slot {
    state: Mutex<SlotState>,
    /// At most few bytes are still to come.
    near: AtomicBool,
    /// The queue to which the request was posted, if it was.
    queue: Option<Arc<WorkQueue>>,
    /// They are stored here because requests are moved about.
    options: ReceiveOptions,
}

#[derive(Debug, Default)]
struct SlotState {
    outcome: Option<Outcome>,
    abandoned: bool,
    waker: Option<Waker>,
    near_waker: Option<Waker>,
}

#[derive(Debug)]
struct Outcome {
    result: Result<usize, WorkError>,
    imm: Option<u32>,
    memory: Option<BufferMut>,
}

impl Slot {
    fn new(state: SlotState) -> Arc<Self> {
        let near = AtomicBool::new(state.outcome.is_some());
        Arc::new(Self { state: Mutex::new(state), near, queue: None, options: ReceiveOptions::default() })
    }

    /// Creates the slot of a request that was never posted.
    pub(crate) fn refused(error: WorkError) -> Arc<Self> {
        let outcome = Some(Outcome { result: Err(error), imm: None, memory: None });
        Self::new(SlotState { outcome, ..Default::default() })
    }

    #[inline]
    fn resolve(&self, result: Result<usize, WorkError>, imm: Option<u32>, work: Work) {
        if let Some(queue) = &self.queue {
            queue.outstanding.fetch_sub(1, Ordering::AcqRel);
        }
        let memory = match work {
            Work::Receive { into } | Work::Read { into, .. } if result.is_ok() => Some(into),
            _ => None,
        };
        let outcome = Outcome { result, imm, memory };
        let mut abandoned = None;
        let (near_waker, waker) = {
            let mut state = self.lock();
            self.near.store(true, Ordering::Release);
            if state.abandoned {
                abandoned = Some(outcome);
            } else {
                debug_assert!(state.outcome.is_none(), "a request ends once");
                state.outcome = Some(outcome);
            }
            (state.near_waker.take(), state.waker.take())
        };
        // Abandoned memory leaves the lock before it goes back to its lender.
        drop(abandoned);
        near_waker.into_iter().chain(waker).for_each(Waker::wake);
    }

    fn near(&self) {
        self.near.store(true, Ordering::Release);
        let waker = self.lock().near_waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn is_near(&self) -> bool {
        self.near.load(Ordering::Acquire)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn poll_outcome(&self, cx: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.lock();
        match state.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                note_waker(&mut state.waker, cx);
                Poll::Pending
            }
        }
    }
}

/// Notes the task's waker, unless the same one is noted already.
fn note_waker(noted: &mut Option<Waker>, cx: &Context<'_>) {
    match noted {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *noted = Some(cx.waker().clone()),
    }
}

/// A posted operation: a future of its work completion.
///
/// The work was posted when the operation was created, not when it is first polled. `T` is the result of success: `()`
/// for sends and writes, [`Received`] for receives, the filled memory for reads.
///
/// # Cancel safety
/// Dropping the operation does not cancel the work. The fabric keeps the memory until the completion arrives and then
/// gives it back to its owner. The caller loses the received bytes.
#[must_use = "the outcome tells whether the memory may be used"]
pub struct Operation<T> {
    /// `None` after the outcome was taken.
    slot: Option<Arc<Slot>>,
    convert: fn(Outcome) -> Result<T, WorkError>,
}

impl<T> Operation<T> {
    /// Waits until the operation is nearly done, or has ended.
    ///
    /// For a send, the peer has still to take few bytes: the port will soon be free for a send to another neighbour.
    /// For a receive, few bytes are still to come: the next sender may be told to begin. The bytes still under way hide
    /// the latency of that message. A fabric that cannot tell marks the operation at its completion. If an operation
    /// has several such futures, the last one polled is woken.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub fn nearly_done(&self) -> NearlyDone {
        NearlyDone(self.slot.clone())
    }
}

/// The moment at which an operation is nearly done, made by [`Operation::nearly_done`].
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct NearlyDone(Option<Arc<Slot>>);

impl NearlyDone {
    /// Tells whether the moment has come.
    pub fn is_reached(&self) -> bool {
        self.0.as_ref().is_none_or(|slot| slot.is_near())
    }
}

impl Future for NearlyDone {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(slot) = self.0.as_ref().filter(|slot| !slot.is_near()) else { return Poll::Ready(()) };
        let mut state = slot.lock();
        note_waker(&mut state.near_waker, cx);
        // Marking comes before the waker is taken.
        if slot.is_near() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl<T> Future for Operation<T> {
    type Output = Result<T, WorkError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(slot) = &self.slot else { return Poll::Pending };
        let outcome = ready!(slot.poll_outcome(cx));
        self.slot.take().into_iter().for_each(WorkQueue::keep);
        Poll::Ready((self.convert)(outcome))
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        let Some(slot) = &self.slot else { return };
        // The outcome leaves the lock before it is dropped, because its memory may call its lender.
        let outcome = {
            let mut state = slot.lock();
            state.abandoned = true;
            state.outcome.take()
        };
        drop(outcome);
    }
}

impl<T> fmt::Debug for Operation<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("nearly_done", &self.nearly_done().is_reached()).finish_non_exhaustive()
    }
}

impl Operation<()> {
    pub(crate) fn plain(slot: Arc<Slot>) -> Self {
        Self { slot: Some(slot), convert: |outcome| outcome.result.map(|_| ()) }
    }
}

impl Operation<Received> {
    pub(crate) fn receive(slot: Arc<Slot>) -> Self {
        Self {
            slot: Some(slot),
            convert: |outcome| {
                let len = outcome.result?;
                let buffer = outcome.memory.expect("a successful receive has its memory");
                Ok(Received { buffer, len, imm: outcome.imm })
            },
        }
    }
}

impl Operation<BufferMut> {
    pub(crate) fn read(slot: Arc<Slot>) -> Self {
        Self {
            slot: Some(slot),
            convert: |outcome| {
                outcome.result?;
                Ok(outcome.memory.expect("a successful read has its memory"))
            },
        }
    }
}

/// Slots that a queue keeps, at most: about 9 KiB.
const SPARE_SLOTS: usize = 64;

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn post(queue: &Arc<WorkQueue>) -> (WorkRequest, Operation<Received>) {
        queue.count(4).expect("there is room");
        let into = BufferMut::empty();
        let options = ReceiveOptions { near_bytes: Some(7), ..Default::default() };
        let work = Work::Receive { into };
        let (request, slot) = WorkRequest::new(work, Signaling::Signaled, options, QueuePairId(1), queue);
        (request, Operation::receive(slot))
    }

    fn end(request: WorkRequest, operation: &mut Operation<Received>) {
        request.complete(Ok(0), Some(3)).resolve();
        let received = operation.now_or_never().expect("it has ended");
        assert_eq!(received.map(|received| received.imm), Ok(Some(3)));
    }

    #[test]
    fn a_slot_serves_one_request_after_the_other() {
        let queue = Arc::new(WorkQueue::default());
        let mut last = None;
        for _ in 0..3 {
            let (request, mut operation) = post(&queue);
            let slot = operation.slot.as_ref().map(Arc::as_ptr);
            assert!(last.is_none() || last == slot);
            last = slot;
            assert!(!operation.nearly_done().is_reached() && (&mut operation).now_or_never().is_none());
            assert_eq!(request.near_bytes(), Some(7));
            request.nearly_done();
            assert!(operation.nearly_done().is_reached());
            end(request, &mut operation);
            assert!(operation.nearly_done().is_reached());
            assert_eq!((queue.outstanding.load(Ordering::Relaxed), queue.spare().len()), (0, 1));
        }
        // A spare slot does not keep its queue.
        assert_eq!(Arc::strong_count(&queue), 1);
    }

    #[test]
    fn a_slot_that_is_still_looked_at_serves_no_other_request() {
        let queue = Arc::new(WorkQueue::default());
        let (request, mut operation) = post(&queue);
        let nearly_done = operation.nearly_done();
        end(request, &mut operation);
        assert!(queue.spare().is_empty());
        let (later, other) = post(&queue);
        assert!(nearly_done.is_reached() && !other.nearly_done().is_reached());
        // Nor does one whose operation was dropped before its end was seen.
        later.complete(Ok(0), None).resolve();
        drop(other);
        assert!(queue.spare().is_empty());
    }

    #[tokio::test]
    async fn whoever_waits_for_work_to_be_nearly_done_is_woken_from_another_thread() {
        let queue = Arc::new(WorkQueue::default());
        for _ in 0..200 {
            let (request, mut operation) = post(&queue);
            let nearly_done = operation.nearly_done();
            let marking = std::thread::spawn(move || {
                request.nearly_done();
                request
            });
            nearly_done.await;
            end(marking.join().expect("it does not panic"), &mut operation);
        }
    }
}
