//! A member that this one exchanges blocks with: queue pairs, grants and windows.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use rdmc_fabric::{
    Buffer, BufferMut, CompletionSource, ConnectError, Endpoint, Environment, Expose, ExposedRegion, Fabric,
    FabricError, Memory, Operation, Peer, QueuePair, QueuePairConfig, ReceiveOptions, Received, RemoteAccess,
    RemoteMemory, Role, UNSIGNALED_MAX,
};
use rdmc_schedule::Rank;

use super::TransferError;
use crate::count::Count;
use crate::id::NodeId;
use crate::sync::lock;
use crate::wire::BlockEndpoints;

/// A neighbour in a group's schedule.
///
/// Blocks travel on one queue pair, grants on another, so that a grant never consumes the receive of a block. A grant
/// is the *ready_for_block* of the paper: a one-sided write of the number of blocks granted so far into a cell at the
/// sender, with an immediate that wakes it.
pub(crate) struct Neighbour {
    pub(crate) rank: Rank,
    pub(crate) node: NodeId,
    sends: Sends,
    /// The number of the last message whose size was told to it, plus 1.
    size_told_of: AtomicU64,
    fabric: Arc<dyn Fabric>,
    data: QueuePair,
    ready: QueuePair,
    /// The cells that the neighbour writes.
    cells: ExposedRegion,
    /// The cells at the neighbour that this member writes.
    remote_cells: OnceLock<RemoteMemory>,
    /// Grants that the neighbour has not acknowledged, oldest first.
    granting: Mutex<VecDeque<Operation<()>>>,
    /// Blocks granted to the neighbour so far: their destinations are posted.
    given: AtomicU64,
    /// Of these, the blocks whose grants were written to the neighbour.
    told: AtomicU64,
    /// Of these, the blocks that have arrived. At most `depth` have not.
    arrived: Count,
    /// Blocks the neighbour has granted so far.
    granted: Count,
    /// Of these, the blocks that are sent, or about to be.
    used: AtomicU64,
    /// Blocks sent to the neighbour so far.
    sent: AtomicU64,
    /// Of these, the blocks that the neighbour has acknowledged. At most `sends_ahead` are not.
    acknowledged: Count,
    sends_ahead: u64,
    /// Blocks under way in one direction, at most.
    depth: u64,
}

/// What a member sends to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sends {
    Nothing,
    Blocks,
    /// Also the size of every message, with the first block that the neighbour gets of it.
    BlocksAndSizes,
}

/// How many blocks may be under way from one neighbour to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depth(u32);

impl Depth {
    /// Shares the entries of a node's completion queue among `neighbours`; many groups must find room in it.
    pub(crate) fn shared(completions: u32, neighbours: usize) -> Self {
        let neighbours = u32::try_from(neighbours.max(1)).unwrap_or(u32::MAX);
        Self((completions / GROUPS_MIN / ENTRIES / neighbours).clamp(DEPTH_MIN, DEPTH_MAX))
    }
}

impl Neighbour {
    /// Queue pairs to a neighbour: one for blocks, one for grants.
    pub(crate) const QUEUE_PAIRS: u16 = 2;

    pub(crate) fn new(
        fabric: Arc<dyn Fabric>,
        completions: &Arc<dyn CompletionSource>,
        rank: Rank,
        node: NodeId,
        sends: Sends,
        block_size: u32,
        Depth(depth): Depth,
    ) -> Result<Self, FabricError> {
        let worthwhile = fabric.capabilities().ahead_bytes / u64::from(block_size.max(1));
        let queue_pair = |send_depth, receive_depth, warm_up| {
            let config = QueuePairConfig { send_depth, receive_depth, warm_up, ..Default::default() };
            fabric.create_queue_pair(completions, config)
        };
        // The first send of a message may have a size before it.
        let data = queue_pair(depth + SIZES_MAX, depth, sends != Sends::Nothing)?;
        let ready = queue_pair(GRANT_WRITES_MAX + 1, GRANT_RECEIVES, false)?;
        let cells = fabric.allocate(CELLS_LEN)?.into_mut().expect("a fabric allocates writable memory");
        let cells = fabric.expose(Expose::Mutable(cells, RemoteAccess::WRITE))?;
        Ok(Self {
            rank,
            node,
            sends,
            size_told_of: AtomicU64::new(0),
            fabric,
            data,
            ready,
            cells,
            remote_cells: OnceLock::new(),
            granting: Mutex::default(),
            given: AtomicU64::new(0),
            told: AtomicU64::new(0),
            arrived: Count::default(),
            granted: Count::default(),
            used: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            acknowledged: Count::default(),
            sends_ahead: worthwhile.clamp(2, depth.into()),
            depth: depth.into(),
        })
    }

    /// Returns what the neighbour needs to connect.
    pub(crate) fn endpoints(&self) -> BlockEndpoints {
        BlockEndpoints {
            data: self.data.endpoint().as_bytes().to_vec(),
            ready: self.ready.endpoint().as_bytes().to_vec(),
            cells: self.cells.remote().encode(),
        }
    }

    /// Connects both queue pairs to what the neighbour offered. `address` is that of its control connection.
    pub(crate) async fn connect(
        &self,
        role: Role,
        address: Option<IpAddr>,
        BlockEndpoints { data, ready, cells }: BlockEndpoints,
    ) -> Result<(), ConnectError> {
        let peer = |endpoint: Vec<u8>| Ok(Peer { endpoint: Endpoint::new(endpoint)?, role, address });
        self.remote_cells.set(RemoteMemory::decode(cells)).map_err(|_| ConnectError::WrongState)?;
        let (data, ready) = (peer(data)?, peer(ready)?);
        futures::try_join!(self.data.connect(data), self.ready.connect(ready))?;
        Ok(())
    }

    /// Breaks both connections.
    pub(crate) fn close(&self) {
        self.data.close();
        self.ready.close();
    }

    // Receiving blocks.

    /// Tells whether one more block may be granted now, of at most `window` under way.
    pub(crate) fn has_room_to_grant(&self, window: u64) -> bool {
        self.arrived.get() >= self.due_to_grant(window) && lock(&self.granting).len() < GRANT_WRITES_MAX as usize
    }

    /// Tells whether one more block may be granted, of at most `window` under way; if not, the task is woken when it
    /// may.
    pub(crate) fn poll_room_to_grant(&self, window: u64, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.arrived.poll_reaches(self.due_to_grant(window), cx));
        // The neighbour acts on a grant before it acknowledges it: acknowledgements may be far behind.
        let mut granting = lock(&self.granting);
        while granting.len() >= GRANT_WRITES_MAX as usize {
            let oldest = granting.front_mut().expect("it is full");
            // A grant that is lost breaks the queue pair, which the neighbour notices.
            let _ = ready!(oldest.poll_unpin(cx));
            granting.pop_front();
        }
        Poll::Ready(())
    }

    /// Waits until one more block may be granted, of at most `window` under way. One task waits at a time: grants are
    /// given in order.
    pub(crate) async fn room_to_grant(&self, window: u64) {
        poll_fn(|cx| self.poll_room_to_grant(window, cx)).await;
    }

    /// Returns how many blocks must have arrived before one more is granted.
    fn due_to_grant(&self, window: u64) -> u64 {
        (self.given.load(Ordering::Relaxed) + 1).saturating_sub(window.min(self.depth))
    }

    /// Posts the destination of the next block from this neighbour, for which there [is room](Self::room_to_grant). The
    /// grant is still to be announced.
    pub(crate) fn grant(
        &self,
        destination: BufferMut,
        options: ReceiveOptions,
    ) -> (Operation<Received>, GrantGuard<'_>) {
        let arriving = self.data.receive_with(destination, options);
        self.given.fetch_add(1, Ordering::Relaxed);
        (arriving, GrantGuard { neighbour: self })
    }

    /// Announces all grants to the neighbour, once they are as many as those that it knows and has not used up.
    ///
    /// In a run of blocks from one neighbour a write announces several grants, in time. A single grant is announced at
    /// once. As each write doubles the unused grants that the neighbour knows, few writes wait for it.
    pub(crate) fn announce_grants_if_due(&self) {
        let (given, told) = (self.given.load(Ordering::Relaxed), self.told.load(Ordering::Relaxed));
        // Grants of a transfer that failed count as used up, told or not.
        let unused = told.saturating_sub(self.arrived.get());
        if given - told >= unused {
            self.announce_grants();
        }
    }

    /// Announces all grants to the neighbour.
    pub(crate) fn announce_grants(&self) {
        let (given, told) = (self.given.load(Ordering::Relaxed), self.told.load(Ordering::Relaxed));
        if given == told {
            return;
        }
        self.told.store(given, Ordering::Relaxed);
        match self.small(&given.to_le_bytes()) {
            Ok(count_bytes) => {
                #[expect(clippy::cast_possible_truncation, reason = "the immediate is the count's low half")]
                let imm = given as u32;
                // Of GRANT_WRITES_MAX such writes the oldest is awaited, which by then is behind a signaled one.
                let grant = self.ready.write_unsignaled(count_bytes, self.cell(GRANTS_CELL), Some(imm));
                lock(&self.granting).push_back(grant);
            }
            // Without memory for eight bytes the neighbour would wait for ever: closing tells it.
            Err(_) => self.ready.close(),
        }
    }

    /// Tells whether so many grants are to be announced that the neighbour should not wait for more.
    pub(crate) fn has_many_to_announce(&self) -> bool {
        self.given.load(Ordering::Relaxed) - self.told.load(Ordering::Relaxed) >= ANNOUNCED_AT_ONCE
    }

    /// Returns the message's size that came with its first block: in the immediate, if it fits and the immediate is not
    /// the block's seal; else in a cell that was written before.
    pub(crate) fn message_size(&self, imm: u32, is_seal: bool) -> u64 {
        match is_seal || imm & SIZE_IN_CELL != 0 {
            true => self.cells.read_u64(SIZE_CELL).expect("the cell lies in the region"),
            false => u64::from(imm),
        }
    }

    /// Tells whether the immediate of a first block may be that of a message of this size.
    pub(crate) fn may_tell_size(imm: u32, size: u64) -> bool {
        imm & SIZE_IN_CELL != 0 || u64::from(imm) == size
    }

    // Sending blocks.

    /// Tells whether one more send may be unacknowledged now, of at most twice `window`.
    pub(crate) fn has_room_to_send(&self, window: u64) -> bool {
        self.acknowledged.get() >= self.due_to_send(window)
    }

    /// Waits until one more send may be unacknowledged. One task waits at a time: blocks are sent in order.
    pub(crate) async fn room_to_send(&self, window: u64) {
        self.acknowledged.reaches(self.due_to_send(window)).await;
    }

    /// Returns how many blocks must be acknowledged before one more is sent. An acknowledgement may come later than the
    /// next grant.
    fn due_to_send(&self, window: u64) -> u64 {
        (self.sent.load(Ordering::Relaxed) + 1).saturating_sub(self.sends_ahead.min(2 * window))
    }

    /// Tells whether the neighbour has sent a *ready_for_block* that is not used up.
    pub(crate) fn is_ready_for_block(&self) -> bool {
        self.granted.get() > self.used.load(Ordering::Acquire)
    }

    /// Registers the task to be woken by the neighbour's next *ready_for_block*.
    pub(crate) fn poll_ready_for_block(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.granted.poll_reaches(self.used.load(Ordering::Acquire) + 1, cx)
    }

    /// Registers the task to be woken when one more send may be unacknowledged.
    pub(crate) fn poll_room_to_send(&self, window: u64, cx: &mut Context<'_>) -> Poll<()> {
        self.acknowledged.poll_reaches(self.due_to_send(window), cx)
    }

    /// Uses up the neighbour's next *ready_for_block* if it has arrived; returns whether it had.
    pub(crate) fn try_ready_for_block(&self) -> bool {
        let ready = self.granted.get() > self.used.load(Ordering::Acquire);
        if ready {
            self.used.fetch_add(1, Ordering::AcqRel);
        }
        ready
    }

    /// Waits for the neighbour's next *ready_for_block* and uses it up. One task waits at a time: blocks are sent in
    /// order.
    pub(crate) async fn ready_for_block(&self) {
        let used = self.used.fetch_add(1, Ordering::AcqRel);
        self.granted.reaches(used + 1).await;
    }

    /// Notes that the next block that is sent tells the size of a message, if it is to; returns whether it is. It is if
    /// it is the first that the neighbour gets of the message. Messages are sent one after the other.
    pub(crate) fn note_size_told(&self, message: u64) -> bool {
        let learns = self.sends == Sends::BlocksAndSizes && self.size_told_of.load(Ordering::Relaxed) != message + 1;
        if learns {
            self.size_told_of.store(message + 1, Ordering::Relaxed);
        }
        learns
    }

    /// Sends a block with its index, or its seal, for which there [is room](Self::room_to_send).
    ///
    /// With `in_a_run` more blocks follow to this neighbour. This one may leave, and complete, with them, or leave by a
    /// [`flush`](Self::flush).
    pub(crate) fn send_block(&self, bytes: Buffer, imm: u32, in_a_run: bool) -> (Operation<()>, SendGuard<'_>) {
        let leaving = match in_a_run {
            true => self.data.send_with_more(bytes, Some(imm)),
            false => self.data.send(bytes, Some(imm)),
        };
        (leaving, self.count_sent())
    }

    fn count_sent(&self) -> SendGuard<'_> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        SendGuard { neighbour: self }
    }

    /// Tells whether the fabric has chosen shared memory for this neighbour among others.
    pub(crate) fn shares_memory(&self) -> bool {
        self.data.carrier() == Some("shm")
    }

    /// Tells whether the neighbour can share objects with this member, if the fabric can.
    pub(crate) fn can_share(&self) -> bool {
        self.data.carrier().is_none() || self.shares_memory()
    }

    /// Sends out the blocks of a run that is interrupted.
    pub(crate) fn flush(&self) {
        self.data.flush();
    }

    /// Sends the first block that the neighbour gets of a message, with the message's size, and its seal if it has one.
    pub(crate) fn send_first_block(
        &self,
        bytes: Buffer,
        size: u64,
        seal: Option<u32>,
    ) -> (Operation<()>, SendGuard<'_>) {
        let imm = match (seal, u32::try_from(size)) {
            (None, Ok(size)) if size & SIZE_IN_CELL == 0 => size,
            _ => {
                if let Ok(size_bytes) = self.small(&size.to_le_bytes()) {
                    // First in, first out: the size is in place before the block arrives.
                    drop(self.data.write(size_bytes, self.cell(SIZE_CELL), None));
                } else {
                    self.data.close();
                }
                seal.unwrap_or(SIZE_IN_CELL)
            }
        };
        (self.data.send(bytes, Some(imm)), self.count_sent())
    }

    /// Posts the receives that the neighbour's grants consume. Before the connection is made.
    pub(crate) fn expect_grants(&self) -> VecDeque<Operation<Received>> {
        (0..GRANT_RECEIVES).map(|_| self.ready.receive(BufferMut::empty())).collect()
    }

    /// Takes the neighbour's grants until its connection breaks.
    pub(crate) async fn take_grants(&self, mut posted: VecDeque<Operation<Received>>) -> TransferError {
        while let Some(next) = posted.pop_front() {
            if let Err(error) = next.await {
                return TransferError::Work { with: self.rank, error };
            }
            posted.push_back(self.ready.receive(BufferMut::empty()));
            let granted = self.cells.read_u64(GRANTS_CELL).expect("the cell lies in the region");
            if granted > self.used.load(Ordering::Acquire) + u64::from(DEPTH_MAX) {
                let what = format!("granted {granted} blocks, more than it may");
                return TransferError::Protocol { by: self.rank, what };
            }
            self.granted.raise_to(granted);
        }
        unreachable!("each receive that is taken is posted again");
    }

    /// Measures the time of a write to the neighbour and its acknowledgement, the software at both ends included;
    /// `None` if the connection breaks.
    pub(crate) async fn round_trip(&self, environment: &dyn Environment) -> Option<Duration> {
        let began = environment.now();
        let probe = self.small(&0_u64.to_le_bytes()).ok()?;
        self.ready.write(probe, self.cell(PROBE_CELL), None).await.ok()?;
        Some(environment.now().since(began))
    }

    fn cell(&self, at: usize) -> RemoteMemory {
        self.remote_cells.get().expect("blocks travel after the connection is made").slice(at as u64, CELL_LEN as u64)
    }

    fn small(&self, bytes: &[u8]) -> Result<Buffer, FabricError> {
        Ok(self.fabric.register(Memory::from(bytes.to_vec()))?.into_shared())
    }
}

/// A grant that is not used up. Drop it when its block has arrived.
pub(crate) struct GrantGuard<'a> {
    neighbour: &'a Neighbour,
}

impl Drop for GrantGuard<'_> {
    fn drop(&mut self) {
        self.neighbour.arrived.increment();
        self.neighbour.announce_grants_if_due();
    }
}

/// A block that is not acknowledged. Drop it when it is.
pub(crate) struct SendGuard<'a> {
    neighbour: &'a Neighbour,
}

impl Drop for SendGuard<'_> {
    fn drop(&mut self) {
        self.neighbour.acknowledged.increment();
    }
}

/// Blocks under way from one neighbour to another: between these, as completion queues have room. The grants for them
/// cover distance: 64 MiB in the shortest blocks, a GiB in blocks of 1 MiB.
const DEPTH_MIN: u32 = 32;
const DEPTH_MAX: u32 = 1024;
/// Grants that are announced while more are given.
const ANNOUNCED_AT_ONCE: u64 = 16;
/// Groups with many neighbours for which a completion queue has room.
const GROUPS_MIN: u32 = 128;
/// Entries of the completion queue for each block of the depth, about.
const ENTRIES: u32 = 3;
/// Unacknowledged writes of grants to one neighbour, at most.
const GRANT_WRITES_MAX: u32 = 31;
/// Receives posted for a neighbour's writes of grants. A write announces as many grants as are unused, or more, so no
/// more than log₂ [`DEPTH_MAX`] + 2 of them can have unused grants.
const GRANT_RECEIVES: u32 = 34;
const _: () = assert!(GRANT_RECEIVES > DEPTH_MAX.ilog2() + 2, "a write of grants finds a receive");
/// Sizes of messages under way to one neighbour, at most.
const SIZES_MAX: u32 = 32;
const _: () = assert!(GRANT_WRITES_MAX > UNSIGNALED_MAX, "a write that is awaited must be able to complete");
const _: () = assert!(DEPTH_MIN > UNSIGNALED_MAX, "a send that is awaited must be able to complete");
/// Bytes of one cell.
const CELL_LEN: usize = 8;
/// Where the neighbour writes how many blocks it has granted.
const GRANTS_CELL: usize = 0;
/// Where the neighbour writes a message's size before its first block.
const SIZE_CELL: usize = CELL_LEN;
/// Where the neighbour writes to measure the round trip.
const PROBE_CELL: usize = 2 * CELL_LEN;
/// Bytes of all cells.
const CELLS_LEN: usize = 3 * CELL_LEN;
/// In the immediate of a first block: the size does not fit and stands in the cell.
const SIZE_IN_CELL: u32 = 1 << 31;
