//! The queue pair: posts work, returns futures.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::fabric::{ConnectError, Endpoint, Peer, QueuePairConfig, RawQueuePair};
use crate::memory::{Buffer, BufferMut};
use crate::remote::RemoteMemory;
use crate::work::{Inspector, Operation, QueuePairId, Received, Signaling, Slot, Work, WorkError, WorkRequest};

/// A reliable connected queue pair.
///
/// Posting takes effect at the call; the returned [`Operation`] is the future of the completion. Requests are carried
/// out in the order in which they were posted. Dropping the queue pair closes it.
pub struct QueuePair {
    raw: Arc<dyn RawQueuePair>,
    config: QueuePairConfig,
    sends: Arc<AtomicU32>,
    receives: Arc<AtomicU32>,
    closes_on_drop: bool,
}

impl QueuePair {
    /// Wraps a fabric's queue pair; called by fabrics.
    pub fn new(raw: Arc<dyn RawQueuePair>, config: QueuePairConfig) -> Self {
        Self { raw, config, sends: Arc::default(), receives: Arc::default(), closes_on_drop: true }
    }

    /// Wraps this queue pair's implementation in another one; called by decorators.
    #[must_use]
    pub fn map_raw(mut self, wrap: impl FnOnce(Arc<dyn RawQueuePair>) -> Arc<dyn RawQueuePair>) -> Self {
        // The inner pair lives on inside the wrapper; only the wrapper closes it.
        self.closes_on_drop = false;
        Self::new(wrap(self.raw.clone()), self.config)
    }

    /// Returns the number that tells it apart in completions and logs.
    pub fn id(&self) -> QueuePairId {
        self.raw.id()
    }

    /// Returns where the peer can reach this end; to be handed over by the control plane.
    pub fn endpoint(&self) -> Endpoint {
        self.raw.endpoint()
    }

    /// Returns what carries it, where the fabric chooses that for each pair of ends: the name of another fabric, once it is
    /// connected.
    pub fn carrier(&self) -> Option<&'static str> {
        self.raw.carrier()
    }

    /// Connects to the peer; both ends do this.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the queue pair unusable; close it.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(&self, peer: Peer) -> Result<(), ConnectError> {
        self.raw.connect(peer).await
    }

    /// Sends `data` into the peer's next receive; completes when the peer has taken it.
    pub fn send(&self, data: Buffer, imm: Option<u32>) -> Operation<()> {
        Operation::plain(self.post(Work::Send { data, imm }))
    }

    /// Does what [`send`](Self::send) does where more is posted behind it at once: saves the completion, and a call of
    /// the device, where the fabric can.
    ///
    /// It may not leave before a later send, write or read is posted or [`flush`](Self::flush) is called, and may end
    /// late, as with [`write_unsignaled`](Self::write_unsignaled).
    pub fn send_with_more(&self, data: Buffer, imm: Option<u32>) -> Operation<()> {
        Operation::plain(self.post_with(Work::Send { data, imm }, Signaling::MoreToCome))
    }

    /// Lets out what [`send_with_more`](Self::send_with_more) holds back.
    pub fn flush(&self) {
        self.raw.flush();
    }

    /// Posts `into` for the peer's next send or write with immediate. Allowed before the connection is made.
    pub fn receive(&self, into: BufferMut) -> Operation<Received> {
        Operation::receive(self.post(Work::Receive { into }))
    }

    /// Does what [`receive`](Self::receive) does; `inspector` looks at the bytes as they come, as far as the fabric shows them.
    pub fn receive_inspected(&self, into: BufferMut, inspector: Arc<dyn Inspector>) -> Operation<Received> {
        let slot = self.post_as(Work::Receive { into }, Signaling::Signaled, Some(inspector));
        Operation::receive(slot)
    }

    /// Writes `data` into the peer's memory; with `imm` it also consumes and completes a receive of the peer.
    ///
    /// The length written is that of `data`, wherever in the peer's region `to` begins; the peer checks the bounds. A
    /// write of no bytes succeeds at the end of the region too; whether its key is looked at is left to the fabric.
    pub fn write(&self, data: Buffer, to: RemoteMemory, imm: Option<u32>) -> Operation<()> {
        let to = RemoteMemory { len: data.len() as u64, ..to };
        Operation::plain(self.post(Work::Write { data, to, imm }))
    }

    /// Does what [`write`](Self::write) does, and saves the completion where the fabric can.
    ///
    /// The operation may end only with a later request: at the latest with the next signaled one, when
    /// [`UNSIGNALED_MAX`] more unsignaled ones were posted, or when the queue is full. Whoever awaits it earlier may wait
    /// for ever. For small writes that come in numbers, whose fate shows in the queue pair's.
    pub fn write_unsignaled(&self, data: Buffer, to: RemoteMemory, imm: Option<u32>) -> Operation<()> {
        let to = RemoteMemory { len: data.len() as u64, ..to };
        Operation::plain(self.post_with(Work::Write { data, to, imm }, Signaling::Unsignaled))
    }

    /// Reads the peer's memory at `from` into `into`, as many bytes as that has; the peer checks the bounds, as
    /// those of a write.
    pub fn read(&self, into: BufferMut, from: RemoteMemory) -> Operation<BufferMut> {
        let from = RemoteMemory { len: into.len() as u64, ..from };
        Operation::read(self.post(Work::Read { into, from }))
    }

    /// Breaks the connection: everything posted, here and at the peer, is flushed.
    pub fn close(&self) {
        self.raw.close();
    }

    fn post(&self, work: Work) -> Arc<Slot> {
        self.post_with(work, Signaling::Signaled)
    }

    fn post_with(&self, work: Work, signaling: Signaling) -> Arc<Slot> {
        self.post_as(work, signaling, None)
    }

    fn post_as(&self, work: Work, signaling: Signaling, inspector: Option<Arc<dyn Inspector>>) -> Arc<Slot> {
        let (outstanding, depth) = match work {
            Work::Receive { .. } => (&self.receives, self.config.receive_depth),
            _ => (&self.sends, self.config.send_depth),
        };
        let grow = |count: u32| (count < depth).then_some(count + 1);
        let Ok(before) = outstanding.fetch_update(Ordering::AcqRel, Ordering::Acquire, grow) else {
            return Slot::refused(WorkError::QueueFull { depth });
        };
        // Nothing could be posted behind it, on which its completion might wait.
        let signaling = if before + 1 == depth { Signaling::Signaled } else { signaling };
        let (request, slot) = WorkRequest::new(work, signaling, inspector, self.raw.id(), outstanding.clone());
        self.raw.post(request);
        slot
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if self.closes_on_drop {
            self.raw.close();
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// Draws the next queue pair number of this process.
pub fn next_queue_pair_id() -> QueuePairId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    QueuePairId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Unsignaled requests in a row after which a fabric reports a completion all the same.
pub const UNSIGNALED_MAX: u32 = 16;
