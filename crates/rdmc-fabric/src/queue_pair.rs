//! The queue pair: posts work, returns futures.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fabric::{ConnectError, Endpoint, Peer, QueuePairConfig, RawQueuePair};
use crate::memory::{Buffer, BufferMut};
use crate::remote::RemoteMemory;
use crate::work::{
    Operation, QueuePairId, ReceiveOptions, Received, Signaling, Slot, Work, WorkError, WorkQueue, WorkRequest,
};

/// A reliable connected queue pair.
///
/// Posting takes effect at the call; the returned [`Operation`] is the future of the completion. Requests are carried
/// out in the order in which they were posted. Dropping the queue pair closes it.
pub struct QueuePair {
    raw: Arc<dyn RawQueuePair>,
    config: QueuePairConfig,
    sends: Arc<WorkQueue>,
    receives: Arc<WorkQueue>,
    closes_on_drop: bool,
}

impl QueuePair {
    /// Wraps a fabric's queue pair; fabrics call it.
    pub fn new(raw: Arc<dyn RawQueuePair>, config: QueuePairConfig) -> Self {
        Self { raw, config, sends: Arc::default(), receives: Arc::default(), closes_on_drop: true }
    }

    /// Wraps this queue pair's implementation in another one; decorators call it.
    #[must_use]
    pub fn map_raw(mut self, wrap: impl FnOnce(Arc<dyn RawQueuePair>) -> Arc<dyn RawQueuePair>) -> Self {
        // The inner pair lives on inside the wrapper; only the wrapper closes it.
        self.closes_on_drop = false;
        Self::new(wrap(self.raw.clone()), self.config)
    }

    /// Returns the number that identifies it in completions and logs.
    pub fn id(&self) -> QueuePairId {
        self.raw.id()
    }

    /// Returns the address of this end, for the control plane to give to the peer.
    pub fn endpoint(&self) -> Endpoint {
        self.raw.endpoint()
    }

    /// Returns the name of the fabric that carries this queue pair, once it is connected. `None` if the fabric does not
    /// choose a carrier for each pair.
    pub fn carrier(&self) -> Option<&'static str> {
        self.raw.carrier()
    }

    /// Bounds the bytes of payload that leave this end in a second, those that the peer reads included. `None` is no
    /// bound. Call it before [`connect`](Self::connect); later calls have no effect.
    ///
    /// The fabric `tcp` has the kernel space its packets (`SO_MAX_PACING_RATE`, on Linux). So a long read does not leave
    /// in one burst, which a policer on the path would drop. Other fabrics ignore it.
    pub fn pace(&self, bytes_per_second: Option<u64>) {
        self.raw.pace(bytes_per_second);
    }

    /// Connects to the peer; both ends call it.
    ///
    /// # Cancel safety
    /// If the future is dropped, the queue pair is unusable; close it.
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

    /// Sends like [`send`](Self::send), if more is posted at once. Where the fabric can, it saves the completion and a
    /// call of the device.
    ///
    /// The bytes may stay here until a later send, write or read is posted or [`flush`](Self::flush) is called. The
    /// operation may end late, as with [`write_unsignaled`](Self::write_unsignaled).
    pub fn send_with_more(&self, data: Buffer, imm: Option<u32>) -> Operation<()> {
        Operation::plain(self.post_with(Work::Send { data, imm }, Signaling::MoreToCome))
    }

    /// Sends what [`send_with_more`](Self::send_with_more) holds back.
    pub fn flush(&self) {
        self.raw.flush();
    }

    /// Posts `into` for the peer's next send or write with immediate. Allowed before the connection is made.
    pub fn receive(&self, into: BufferMut) -> Operation<Received> {
        into.note_receive();
        Operation::receive(self.post(Work::Receive { into }))
    }

    /// Receives like [`receive`](Self::receive), with more that is asked of the fabric.
    pub fn receive_with(&self, into: BufferMut, options: ReceiveOptions) -> Operation<Received> {
        into.note_receive();
        Operation::receive(self.post_as(Work::Receive { into }, Signaling::Signaled, options))
    }

    /// Writes `data` into the peer's memory; with `imm` it also consumes and completes a receive of the peer.
    ///
    /// The write has the length of `data`, wherever in the peer's region `to` begins; the peer checks the bounds. A
    /// write of no bytes also succeeds at the end of the region. Whether its key is checked depends on the fabric.
    pub fn write(&self, data: Buffer, to: RemoteMemory, imm: Option<u32>) -> Operation<()> {
        let to = RemoteMemory { len: data.len() as u64, ..to };
        Operation::plain(self.post(Work::Write { data, to, imm }))
    }

    /// Writes like [`write`](Self::write), and saves the completion where the fabric can.
    /// The operation may end only with a later request: with the next signaled one, after [`UNSIGNALED_MAX`] more
    /// unsignaled ones, or when the queue is full. A task that awaits it earlier may wait for ever. It is meant for
    /// many small writes, whose failure shows as that of the queue pair.
    pub fn write_unsignaled(&self, data: Buffer, to: RemoteMemory, imm: Option<u32>) -> Operation<()> {
        let to = RemoteMemory { len: data.len() as u64, ..to };
        Operation::plain(self.post_with(Work::Write { data, to, imm }, Signaling::Unsignaled))
    }

    /// Reads the peer's memory at `from` and fills `into`; the peer checks the bounds.
    pub fn read(&self, into: BufferMut, from: RemoteMemory) -> Operation<BufferMut> {
        let from = RemoteMemory { len: into.len() as u64, ..from };
        Operation::read(self.post(Work::Read { into, from }))
    }

    /// Breaks the connection; everything posted at both ends is flushed.
    pub fn close(&self) {
        self.raw.close();
    }

    fn post(&self, work: Work) -> Arc<Slot> {
        self.post_with(work, Signaling::Signaled)
    }

    fn post_with(&self, work: Work, signaling: Signaling) -> Arc<Slot> {
        self.post_as(work, signaling, ReceiveOptions::default())
    }

    fn post_as(&self, work: Work, signaling: Signaling, options: ReceiveOptions) -> Arc<Slot> {
        let (queue, depth) = match work {
            Work::Receive { .. } => (&self.receives, self.config.receive_depth),
            _ => (&self.sends, self.config.send_depth),
        };
        let Some(before) = queue.count(depth) else { return Slot::refused(WorkError::QueueFull { depth }) };
        // The queue is full: no request can be posted behind this one to bring its completion.
        let signaling = if before + 1 == depth { Signaling::Signaled } else { signaling };
        let (request, slot) = WorkRequest::new(work, signaling, options, self.raw.id(), queue);
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

/// Returns the next queue pair number of this process.
pub fn next_queue_pair_id() -> QueuePairId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    QueuePairId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Unsignaled requests in a row after which a fabric nevertheless reports a completion.
pub const UNSIGNALED_MAX: u32 = 16;
