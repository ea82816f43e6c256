//! Work requests, what becomes of them, and the futures that wait for it.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::memory::{Buffer, BufferMut};
use crate::remote::RemoteMemory;

/// What a work request asks a queue pair to do, with the memory it owns until it is completed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Work {
    /// Sends bytes into the next receive that the peer posted.
    Send {
        /// The bytes.
        data: Buffer,
        /// A number handed to the peer with the completion of its receive.
        imm: Option<u32>,
    },
    /// Takes the bytes of the peer's next send, or the immediate of its next write with immediate.
    Receive {
        /// Where to put them.
        into: BufferMut,
    },
    /// Writes bytes into the peer's memory, one-sided.
    Write {
        /// The bytes.
        data: Buffer,
        /// Where to put them.
        to: RemoteMemory,
        /// With a number, the write also consumes a receive at the peer and completes it.
        imm: Option<u32>,
    },
    /// Reads bytes out of the peer's memory, one-sided.
    Read {
        /// Where to put them.
        into: BufferMut,
        /// Where to find them; of the same length.
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

    /// Returns the length in bytes of the memory that goes with it.
    pub fn len(&self) -> usize {
        match self {
            Self::Send { data, .. } | Self::Write { data, .. } => data.len(),
            Self::Receive { into } | Self::Read { into, .. } => into.len(),
        }
    }

    /// Tells whether no memory goes with it.
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

/// Why work failed. Any of these breaks the queue pair, as reliable connections do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum WorkError {
    /// The queue pair was broken or closed before this work was done; an earlier completion tells why.
    #[error("flushed because the queue pair is broken or closed")]
    Flushed,
    /// The peer's send is longer than the memory posted for it.
    #[error("the peer sent {} into a receive of {room}", describe_len(*.got))]
    LocalLength {
        /// Bytes the peer sent, where the fabric knows.
        got: Option<u64>,
        /// Bytes posted for them.
        room: u64,
    },
    /// The peer's receive is too small, or the request makes no sense to it.
    #[error("the peer could not take the request: its receive is too small")]
    RemoteInvalidRequest,
    /// Wrong key, out of bounds, or an access the peer did not allow.
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
    /// More work was posted than the queue holds; this one was not posted, the queue pair is not affected.
    #[error("the queue holds no more than {depth} work requests")]
    QueueFull {
        /// The configured depth.
        depth: u32,
    },
    /// The memory of the request could not be read or written: a mapped file was shortened, or the memory is not
    /// registered with this fabric.
    #[error("the memory of the request could not be read or written")]
    LocalProtection,
    /// A device failed the work for a reason of its own.
    #[error("the device failed the request: {status} (vendor's code {vendor:#x})")]
    Device {
        /// The device's reason, in the words of the verbs.
        status: &'static str,
        /// What else its vendor says.
        vendor: u32,
    },
}

fn describe_len(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "more bytes than there is room for".into(), |bytes| format!("{bytes} bytes"))
}

/// What a successful receive brought.
#[derive(Debug)]
pub struct Received {
    /// The memory that was posted, all of it; the first `len` bytes are new.
    pub buffer: BufferMut,
    /// Bytes received, 0 for a write with immediate (its bytes are where the peer wrote them).
    pub len: usize,
    /// The peer's immediate.
    pub imm: Option<u32>,
}

/// Looks at the bytes of a receive as they come.
///
/// What looks at a large message after it has arrived fetches it from memory once more. A fabric that has the bytes in the
/// processor's cache, since it copied them into their place, shows them then. It may show all of them or only the first
/// ones, and shows none if a device put them into their place: what was not shown is left to whoever posted the receive.
pub trait Inspector: fmt::Debug + Send + Sync {
    /// Looks at the next bytes, which begin where those before them ended.
    ///
    /// Called by the fabric's task before the receive completes, and not after; also for one that fails later. It must not
    /// block.
    fn inspect(&self, bytes: &[u8]);
}

/// The outcome of one work request as the completion queue reports it.
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    /// The queue pair it was posted to.
    pub queue_pair: QueuePairId,
    /// What was asked.
    pub opcode: Opcode,
    /// Bytes moved, or why they were not.
    pub result: Result<usize, WorkError>,
    /// The peer's immediate, for receives.
    pub imm: Option<u32>,
}

/// Tells queue pairs of one process apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueuePairId(pub u64);

impl fmt::Display for QueuePairId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qp{}", self.0)
    }
}

/// A posted work request as a fabric holds it.
///
/// It owns the memory until it is completed. A request that is dropped without being completed resolves its future
/// with [`WorkError::Flushed`], so that no bug of a fabric leaves somebody waiting.
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
    /// Nobody waits for its completion by itself.
    Unsignaled,
    /// As above, and more is posted at once.
    MoreToCome,
}

impl WorkRequest {
    pub(crate) fn new(
        work: Work,
        signaling: Signaling,
        inspector: Option<Arc<dyn Inspector>>,
        queue_pair: QueuePairId,
        depth: Arc<AtomicU32>,
    ) -> (Self, Arc<Slot>) {
        let slot = Arc::new(Slot { state: Mutex::default(), depth: Some(depth), inspector });
        (Self { work: Some(work), signaling, queue_pair, slot: slot.clone() }, slot)
    }

    /// Tells whether the completion may wait for that of a later request.
    pub fn is_unsignaled(&self) -> bool {
        self.signaling != Signaling::Signaled
    }

    /// Tells whether it may be held back until a later request is posted or
    /// [`flush`](crate::RawQueuePair::flush) is called, to save a doorbell.
    pub fn has_more_behind(&self) -> bool {
        self.signaling == Signaling::MoreToCome
    }

    /// Returns what is asked.
    pub fn work(&self) -> &Work {
        self.work.as_ref().expect("only completion takes the work out")
    }

    /// Returns what is asked, with the memory to be filled.
    pub fn work_mut(&mut self) -> &mut Work {
        self.work.as_mut().expect("only completion takes the work out")
    }

    /// Returns who looks at the bytes of a receive as they come, if somebody does: a fabric that has them at hand shows them.
    pub fn inspector(&self) -> Option<&Arc<dyn Inspector>> {
        self.slot.inspector.as_ref()
    }

    /// Notes that the work is nearly done: a fabric that knows calls it when few bytes are still to come.
    pub fn nearly_done(&self) {
        self.slot.near();
    }

    /// Returns a handle that does the same after the request was put away.
    pub fn nearing(&self) -> Nearing {
        Nearing(self.slot.clone())
    }

    /// Ends the request: what the completion queue will report, and resolve the future with.
    ///
    /// `result` is the number of bytes moved; `imm` the peer's immediate, for receives.
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

/// Tells an operation that it is nearly done.
#[derive(Debug)]
pub struct Nearing(Arc<Slot>);

impl Nearing {
    /// Notes that few bytes are still to come.
    pub fn mark(self) {
        self.0.near();
    }
}

/// A completed work request on its way through a completion queue.
///
/// One that is dropped on the way, since the queue is gone, resolves its future all the same.
#[derive(Debug)]
pub struct Completed {
    report: WorkCompletion,
    work: Option<Work>,
    slot: Arc<Slot>,
}

impl Completed {
    /// Returns what the completion queue will report.
    pub fn report(&self) -> WorkCompletion {
        self.report
    }

    /// Wakes whoever waits for the operation and returns the report.
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

/// The meeting place of a request's completion and its future.
#[derive(Debug)]
pub(crate) struct Slot {
    state: Mutex<SlotState>,
    depth: Option<Arc<AtomicU32>>,
    /// Here, as requests are moved about.
    inspector: Option<Arc<dyn Inspector>>,
}

#[derive(Debug, Default)]
struct SlotState {
    /// Few bytes are still to come, or none.
    near: bool,
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
    /// Makes the slot of a request that was never posted.
    pub(crate) fn refused(error: WorkError) -> Arc<Self> {
        let outcome = Some(Outcome { result: Err(error), imm: None, memory: None });
        let state = Mutex::new(SlotState { near: true, outcome, ..Default::default() });
        Arc::new(Self { state, depth: None, inspector: None })
    }

    fn resolve(&self, result: Result<usize, WorkError>, imm: Option<u32>, work: Work) {
        if let Some(depth) = &self.depth {
            depth.fetch_sub(1, Ordering::AcqRel);
        }
        let memory = match work {
            Work::Receive { into } | Work::Read { into, .. } if result.is_ok() => Some(into),
            _ => None,
        };
        let outcome = Outcome { result, imm, memory };
        let (abandoned, wakers) = {
            let mut state = self.lock();
            state.near = true;
            // Memory that nobody waits for goes out of the lock before it goes back to its lender.
            let abandoned = if state.abandoned { Some(outcome) } else { state.outcome.replace(outcome) };
            (abandoned, [state.near_waker.take(), state.waker.take()])
        };
        drop(abandoned);
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    fn near(&self) {
        let waker = {
            let mut state = self.lock();
            state.near = true;
            state.near_waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

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

/// Has the task be woken, if it was not to be already.
fn note_waker(noted: &mut Option<Waker>, cx: &Context<'_>) {
    match noted {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *noted = Some(cx.waker().clone()),
    }
}

/// A posted operation: a future of its work completion.
///
/// The work was posted when the operation was made, not when it is first polled. `T` is what success brings: nothing
/// for sends and writes, [`Received`] for receives, the filled memory for reads.
///
/// # Cancel safety
/// Dropping the operation does not take the work back: the fabric keeps the memory until the completion arrives and
/// gives it back to its owner then. What was received is lost to the caller.
#[must_use = "the outcome tells whether the memory may be used"]
pub struct Operation<T> {
    slot: Arc<Slot>,
    convert: fn(Outcome) -> Result<T, WorkError>,
}

impl<T> Operation<T> {
    /// Waits until the operation is nearly done, or has ended.
    ///
    /// For a send, few of its bytes are still to be taken by the peer: the port is about to be free for a send to
    /// somebody else. For a receive, few are still to come: the next sender may be told to begin. What is still under
    /// way by then hides the latency of telling. Fabrics that cannot tell report it with the completion. Of several
    /// such futures of one operation the last one polled is woken.
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
pub struct NearlyDone(Arc<Slot>);

impl NearlyDone {
    /// Tells whether it has come.
    pub fn is_reached(&self) -> bool {
        self.0.lock().near
    }
}

impl Future for NearlyDone {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.near {
            return Poll::Ready(());
        }
        note_waker(&mut state.near_waker, cx);
        Poll::Pending
    }
}

impl<T> Future for Operation<T> {
    type Output = Result<T, WorkError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.slot.poll_outcome(cx).map(self.convert)
    }
}

impl<T> Drop for Operation<T> {
    fn drop(&mut self) {
        // The outcome goes first out of the lock, then out of scope: its memory may call its lender.
        let outcome = {
            let mut state = self.slot.lock();
            state.abandoned = true;
            state.outcome.take()
        };
        drop(outcome);
    }
}

impl<T> fmt::Debug for Operation<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("nearly_done", &self.slot.lock().near).finish_non_exhaustive()
    }
}

impl Operation<()> {
    pub(crate) fn plain(slot: Arc<Slot>) -> Self {
        Self { slot, convert: |outcome| outcome.result.map(|_| ()) }
    }
}

impl Operation<Received> {
    pub(crate) fn receive(slot: Arc<Slot>) -> Self {
        Self {
            slot,
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
            slot,
            convert: |outcome| {
                outcome.result?;
                Ok(outcome.memory.expect("a successful read has its memory"))
            },
        }
    }
}
