//! The data channel of a session: queue pairs of one fabric, used as one.
//!
//! Over TCP, several queue pairs are several connections; over a device, each repeats its own packets. On a path that
//! loses packets each recovers by itself, and all together lose less of their rate. On short paths over shared memory
//! and devices one is enough.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdmc_fabric::{
    Buffer, BufferMut, Capabilities, CompletionQueue, ConnectError, Endpoint, Fabric, FabricError, Operation, Peer,
    QueuePair, QueuePairConfig, Received, RemoteMemory, Role, WorkError,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The queue pairs of one session, over one connection.
pub(crate) struct Channel {
    streams: Vec<Stream>,
    connected: watch::Sender<bool>,
}

struct Stream {
    queue_pair: QueuePair,
    /// Bytes that are under way.
    under_way: Arc<AtomicU64>,
    /// Requests that may be posted.
    room: Arc<Semaphore>,
}

impl Channel {
    /// Creates queue pairs that are not yet connected, and the queue of their completions. If `is_written`, the other
    /// end writes to this one.
    pub(crate) fn new(
        fabric: &dyn Fabric,
        streams: u16,
        is_written: bool,
    ) -> Result<(Self, CompletionQueue), FabricError> {
        let config = queue_pair_config(is_written);
        let capabilities = fabric.capabilities();
        let completions = config.requests_max() * u32::from(streams);
        let completions = fabric.create_completion_queue(completions, capabilities.completion_mode)?;
        let source = completions.source();
        let streams = (0..streams).map(|_| {
            let queue_pair = fabric.create_queue_pair(&source, config)?;
            Ok(Stream { queue_pair, under_way: Arc::default(), room: Arc::new(Semaphore::new(DEPTH as usize)) })
        });
        let streams = streams.collect::<Result<_, FabricError>>()?;
        Ok((Self { streams, connected: watch::Sender::new(false) }, completions))
    }

    /// Returns how many streams a channel over a fabric may have.
    pub(crate) fn streams_max(capabilities: &Capabilities) -> u16 {
        let most = capabilities.completions_max / queue_pair_config(true).requests_max();
        u16::try_from(most).unwrap_or(u16::MAX).max(1)
    }

    /// Returns what the other end needs to connect.
    pub(crate) fn endpoints(&self) -> Vec<Vec<u8>> {
        self.streams.iter().map(|stream| stream.queue_pair.endpoint().as_bytes().to_vec()).collect()
    }

    /// Bounds the bytes per second that the other end reads, before the queue pairs are connected. Each of them gets an
    /// equal part.
    ///
    /// The other end asks for no more than that by itself, but in pieces. A fabric that can spaces their packets.
    pub(crate) fn pace(&self, bytes_per_second: Option<u64>) {
        let part = bytes_per_second.map(|rate| rate.div_ceil(self.streams.len() as u64));
        self.streams.iter().for_each(|stream| stream.queue_pair.pace(part));
    }

    /// Connects all queue pairs to those of the other end, which does the same. Requests wait for that.
    ///
    /// # Errors
    /// The first error of any. The other end has another number of queue pairs: [`ConnectError::BadEndpoint`].
    pub(crate) async fn connect(
        &self,
        role: Role,
        address: Option<IpAddr>,
        endpoints: Vec<Vec<u8>>,
    ) -> Result<(), ConnectError> {
        if endpoints.len() != self.streams.len() {
            return Err(ConnectError::BadEndpoint);
        }
        let connecting = self.streams.iter().zip(endpoints).map(async |(stream, endpoint)| {
            stream.queue_pair.connect(Peer { endpoint: Endpoint::new(endpoint)?, role, address }).await
        });
        futures::future::try_join_all(connecting).await?;
        self.connected.send_replace(true);
        Ok(())
    }

    /// Posts a read of the other end's memory; waits for the connection, and while too many requests are posted.
    ///
    /// # Cancel safety
    /// A dropped future posts nothing.
    pub(crate) async fn read(&self, into: BufferMut, from: RemoteMemory) -> UnderWay<BufferMut> {
        let (queue_pair, share) = self.idlest(into.len()).await;
        UnderWay { operation: queue_pair.read(into, from), _share: share }
    }

    /// Posts a write to the other end's memory, which takes one of the other end's receives; waits as
    /// [`read`](Self::read) does.
    ///
    /// # Cancel safety
    /// A dropped future posts nothing.
    pub(crate) async fn write(&self, data: Buffer, to: RemoteMemory, imm: u32) -> UnderWay<()> {
        let (queue_pair, share) = self.idlest(data.len()).await;
        UnderWay { operation: queue_pair.write(data, to, Some(imm)), _share: share }
    }

    /// Posts receives for the other end's writes, as many as it may have posted.
    pub(crate) fn receive_writes(&self) -> impl Iterator<Item = Receives<'_>> {
        self.streams.iter().map(|Stream { queue_pair, .. }| {
            let posted = (0..DEPTH).map(|_| queue_pair.receive(BufferMut::empty())).collect();
            Receives { queue_pair, posted }
        })
    }

    /// Waits for a place for a request of `len` bytes on the stream with the fewest bytes under way.
    async fn idlest(&self, len: usize) -> (&QueuePair, Share) {
        let mut connected = self.connected.subscribe();
        connected.wait_for(|connected| *connected).await.expect("the channel lives as long as this future");
        let idlest = self.streams.iter().min_by_key(|stream| stream.under_way.load(Ordering::Relaxed));
        let stream = idlest.expect("a channel has at least one stream");
        let room = stream.room.clone().acquire_owned().await.expect("nobody closes it");
        let len = len as u64;
        stream.under_way.fetch_add(len, Ordering::Relaxed);
        (&stream.queue_pair, Share { under_way: stream.under_way.clone(), len, _room: room })
    }

    pub(crate) fn close(&self) {
        self.streams.iter().for_each(|stream| stream.queue_pair.close());
    }
}

/// A request that was posted.
pub(crate) struct UnderWay<T> {
    operation: Operation<T>,
    _share: Share,
}

impl<T> UnderWay<T> {
    /// Waits for its completion.
    pub(crate) async fn done(self) -> Result<T, WorkError> {
        self.operation.await
    }
}

/// The receives of one stream.
pub(crate) struct Receives<'a> {
    queue_pair: &'a QueuePair,
    posted: VecDeque<Operation<Received>>,
}

impl Receives<'_> {
    /// Waits for the next write of the other end, and returns its immediate.
    pub(crate) async fn next(&mut self) -> Result<Option<u32>, WorkError> {
        let first = self.posted.front_mut().expect("a stream has receives");
        let received = first.await?;
        self.posted.pop_front();
        self.posted.push_back(self.queue_pair.receive(received.buffer));
        Ok(received.imm)
    }
}

/// The part of a stream that a request takes.
struct Share {
    under_way: Arc<AtomicU64>,
    len: u64,
    _room: OwnedSemaphorePermit,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.under_way.fetch_sub(self.len, Ordering::Relaxed);
    }
}

fn queue_pair_config(is_written: bool) -> QueuePairConfig {
    let receive_depth = if is_written { DEPTH } else { 1 };
    QueuePairConfig { send_depth: DEPTH, receive_depth, ..QueuePairConfig::default() }
}

/// Most requests that are posted to one queue pair.
const DEPTH: u32 = 512;
