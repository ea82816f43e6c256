//! A member that this one exchanges blocks with: queue pairs, grants and windows.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rdmc_fabric::{
    Buffer, BufferMut, ConnectError, Endpoint, Expose, ExposedRegion, Fabric, FabricError, Memory, Operation, Peer,
    QueuePair, QueuePairConfig, Received, RemoteAccess, RemoteMemory, Role, UNSIGNALED_MAX,
};
use rdmc_schedule::Rank;

use super::GroupSpec;
use crate::count::Count;
use crate::mesh::frame::GroupFrame;
use crate::node::{NodeId, NodeShared};
use crate::sync::lock;
use crate::transfer::{IncrementalChecksum, TransferError};

/// A neighbour in a group's schedule.
///
/// Blocks travel on one queue pair, grants on another, so that a grant never consumes the receive of a block. A grant
/// is the *ready_for_block* of the paper: a one-sided write of the number of blocks granted so far into a cell at the
/// sender, with an immediate that wakes it.
pub(crate) struct Neighbour {
    pub(crate) rank: Rank,
    pub(crate) node: NodeId,
    /// Whether this member is the one from which the neighbour gets the first block of every message.
    pub(crate) learns_size_here: bool,
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
    /// Of these, the blocks that have arrived. At most [`GRANTS_AHEAD`] have not.
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
}

impl Neighbour {
    pub(crate) fn new(
        node: &NodeShared,
        rank: Rank,
        id: NodeId,
        learns_size_here: bool,
        block_size: u32,
    ) -> Result<Self, FabricError> {
        let fabric = node.fabric.clone();
        let worthwhile = fabric.capabilities().ahead_bytes / u64::from(block_size.max(1));
        let queue_pair = |send_depth, receive_depth| {
            let config = QueuePairConfig { send_depth, receive_depth, ..Default::default() };
            fabric.create_queue_pair(&node.completions, config)
        };
        // Each send may have a size before it.
        let data = queue_pair(2 * UNACKNOWLEDGED_MAX, GRANTS_AHEAD)?;
        let ready = queue_pair(GRANT_WRITES_MAX, GRANTS_AHEAD + 2)?;
        let cells = fabric.allocate(CELLS_LEN)?.into_mut().expect("a fabric allocates writable memory");
        let cells = fabric.expose(Expose::Mutable(cells, RemoteAccess::WRITE))?;
        Ok(Self {
            rank,
            node: id,
            learns_size_here,
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
            sends_ahead: worthwhile.clamp(2, UNACKNOWLEDGED_MAX.into()),
        })
    }

    /// Returns the frame with which the neighbour connects; this member has `told` the neighbour of so many messages.
    pub(crate) fn offer(&self, spec: [u8; 32], told: u32) -> GroupFrame {
        GroupFrame::Offer {
            spec,
            told,
            data: self.data.endpoint().as_bytes().to_vec(),
            ready: self.ready.endpoint().as_bytes().to_vec(),
            cells: self.cells.remote().encode(),
        }
    }

    /// Connects both queue pairs to what the neighbour offered.
    pub(crate) async fn connect(
        &self,
        node: &NodeShared,
        data: Vec<u8>,
        ready: Vec<u8>,
        cells: [u8; 24],
    ) -> Result<(), ConnectError> {
        let role = if node.mesh.me() < self.node { Role::Active } else { Role::Passive };
        let address = node.mesh.address(self.node);
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

    /// Tells whether one more block may be granted now.
    pub(crate) fn has_room_to_grant(&self) -> bool {
        self.arrived.get() >= self.due_to_grant() && lock(&self.granting).len() < GRANT_WRITES_MAX as usize
    }

    /// Waits until one more block may be granted. One task waits at a time: grants are given in order.
    pub(crate) async fn room_to_grant(&self) {
        self.arrived.reaches(self.due_to_grant()).await;
        // The neighbour acts on a grant before it acknowledges it: acknowledgements may be far behind.
        while let Some(oldest) = self.oldest_grant_if_full() {
            // A grant that is lost breaks the queue pair, which the neighbour notices.
            let _ = oldest.await;
        }
    }

    /// Returns how many blocks must have arrived before one more is granted.
    fn due_to_grant(&self) -> u64 {
        (self.given.load(Ordering::Relaxed) + 1).saturating_sub(GRANTS_AHEAD.into())
    }

    fn oldest_grant_if_full(&self) -> Option<Operation<()>> {
        let mut granting = lock(&self.granting);
        if granting.len() < GRANT_WRITES_MAX as usize { None } else { granting.pop_front() }
    }

    /// Posts the destination of the next block from this neighbour, for which there [is room](Self::room_to_grant). The
    /// grant is still to be announced. `summing` sums the block as it arrives.
    pub(crate) fn grant(
        &self,
        destination: BufferMut,
        summing: Option<Arc<IncrementalChecksum>>,
    ) -> (Operation<Received>, GrantGuard<'_>) {
        let arriving = match summing {
            Some(summing) => self.data.receive_inspected(destination, summing),
            None => self.data.receive(destination),
        };
        self.given.fetch_add(1, Ordering::Relaxed);
        (arriving, GrantGuard { neighbour: self })
    }

    /// Announces all grants to the neighbour, once half of those that it knows are used up.
    ///
    /// In a run of blocks from one neighbour a write announces several grants, in time. A single grant is announced at
    /// once.
    pub(crate) fn announce_grants_if_due(&self) {
        let (given, told) = (self.given.load(Ordering::Relaxed), self.told.load(Ordering::Relaxed));
        // Grants of a transfer that failed count as used up, told or not.
        let unused = told.saturating_sub(self.arrived.get());
        if given == told || unused > u64::from(GRANTS_AHEAD / 2) {
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

    /// Returns the message size that the immediate of a first block stands for.
    pub(crate) fn message_size(&self, imm: u32) -> u64 {
        if imm & SIZE_IN_CELL == 0 { u64::from(imm) } else { self.message_size_told() }
    }

    /// Reads the size that was written before the last first block.
    pub(crate) fn message_size_told(&self) -> u64 {
        self.cells.read_u64(SIZE_CELL).expect("the cell lies in the region")
    }

    // Sending blocks.

    /// Tells whether one more send may be unacknowledged now.
    pub(crate) fn has_room_to_send(&self) -> bool {
        self.acknowledged.get() >= self.due_to_send()
    }

    /// Waits until one more send may be unacknowledged. One task waits at a time: blocks are sent in order.
    pub(crate) async fn room_to_send(&self) {
        self.acknowledged.reaches(self.due_to_send()).await;
    }

    /// Returns how many blocks must be acknowledged before one more is sent.
    fn due_to_send(&self) -> u64 {
        (self.sent.load(Ordering::Relaxed) + 1).saturating_sub(self.sends_ahead)
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

    /// Checks that the neighbour can share objects with this member, if the group needs it.
    pub(crate) fn check_sharing(&self, spec: &GroupSpec) -> Result<(), String> {
        let can_share = self.data.carrier().is_none() || self.shares_memory();
        if spec.is_shared() && !can_share { Err("no memory is shared with it".to_owned()) } else { Ok(()) }
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
        (0..GRANTS_AHEAD + 2).map(|_| self.ready.receive(BufferMut::empty())).collect()
    }

    /// Takes the neighbour's grants until its connection breaks.
    pub(crate) async fn take_grants(&self, mut posted: VecDeque<Operation<Received>>) -> TransferError {
        while let Some(next) = posted.pop_front() {
            if let Err(error) = next.await {
                return TransferError::Work { with: self.rank, error };
            }
            posted.push_back(self.ready.receive(BufferMut::empty()));
            let granted = self.cells.read_u64(GRANTS_CELL).expect("the cell lies in the region");
            if granted > self.used.load(Ordering::Acquire) + u64::from(GRANTS_AHEAD) {
                let what = format!("granted {granted} blocks, more than it may");
                return TransferError::Protocol { by: self.rank, what };
            }
            self.granted.raise_to(granted);
        }
        unreachable!("each receive that is taken is posted again");
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

/// Blocks that one neighbour may send ahead. Two hide the latency of a grant; with 32, one write grants sixteen.
pub(crate) const GRANTS_AHEAD: u32 = 32;
/// Unacknowledged sends to one neighbour, at most.
const UNACKNOWLEDGED_MAX: u32 = 63;
/// Unacknowledged writes of grants to one neighbour, at most.
const GRANT_WRITES_MAX: u32 = 31;
const _: () = assert!(GRANT_WRITES_MAX > UNSIGNALED_MAX, "a write that is awaited must be able to complete");
const _: () = assert!(UNACKNOWLEDGED_MAX > UNSIGNALED_MAX, "a send that is awaited must be able to complete");
/// Bytes of one cell.
const CELL_LEN: usize = 8;
/// Where the neighbour writes how many blocks it has granted.
const GRANTS_CELL: usize = 0;
/// Where the neighbour writes a message's size before its first block.
const SIZE_CELL: usize = CELL_LEN;
/// Bytes of all cells.
const CELLS_LEN: usize = 2 * CELL_LEN;
/// In the immediate of a first block: the size does not fit and stands in the cell.
const SIZE_IN_CELL: u32 = 1 << 31;
