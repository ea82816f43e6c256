//! The connection of two members by which their rows travel.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rdmc_fabric::{
    Buffer, BufferMut, CompletionSource, ConnectError, Endpoint, Expose, ExposedRegion, Fabric, FabricError, Operation,
    Peer, QueuePair, QueuePairConfig, Received, RemoteAccess, RemoteMemory, Role, WorkError,
};
use rdmc_schedule::Rank;

use super::Row;
use super::memory::WriteMemory;
use super::ring::{IncomingRing, RingShape};
use crate::sync::lock;
use crate::wire::TableEndpoint;

/// A queue pair, and the place of the other member's row here. The other member can write nothing else.
pub(crate) struct Link {
    pub(super) rank: Rank,
    fabric: Arc<dyn Fabric>,
    queue_pair: QueuePair,
    /// The memory from which this member's row is written, in turn: a write may begin while the one before it is
    /// outstanding.
    memory: Mutex<[WriteMemory; 2]>,
    /// The other member's row.
    theirs: ExposedRegion,
    /// The place of this member's row at the other.
    mine: OnceLock<RemoteMemory>,
    /// At a receiver: the ring into which the root writes.
    pub(super) ring: Option<IncomingRing>,
    /// At the root: the place of the receiver's ring.
    remote_ring: OnceLock<RemoteMemory>,
    writes_ring: bool,
    rows_expected: u32,
}

impl Link {
    /// Queue pairs to a member.
    pub(crate) const QUEUE_PAIRS: u16 = 1;

    pub(crate) fn new(
        fabric: Arc<dyn Fabric>,
        completions: &Arc<dyn CompletionSource>,
        rank: Rank,
        ring: Option<(RingShape, RingEnd)>,
    ) -> Result<Self, FabricError> {
        let (written, expected) = match ring {
            Some((shape, RingEnd::Writes)) => (shape.slots, 0),
            Some((shape, RingEnd::Reads)) => (0, shape.slots),
            None => (0, 0),
        };
        let (writes_ring, rows_expected) = (written > 0, ROWS_EXPECTED + expected);
        let send_depth = ROWS_WRITTEN + written;
        let config = QueuePairConfig {
            send_depth,
            receive_depth: rows_expected,
            receiver_not_ready: ROW_WAITS,
            ..Default::default()
        };
        let queue_pair = fabric.create_queue_pair(completions, config)?;
        let place = fabric.allocate(Row::LEN)?.into_mut().expect("a fabric allocates writable memory");
        let theirs = fabric.expose(Expose::Mutable(place, RemoteAccess::WRITE))?;
        let ring = match ring {
            Some((shape, RingEnd::Reads)) => {
                let slots = fabric.allocate(shape.len())?.into_mut().expect("a fabric allocates writable memory");
                let region = fabric.expose(Expose::Mutable(slots, RemoteAccess::WRITE))?;
                Some(IncomingRing::new(shape, region))
            }
            _ => None,
        };
        let (mine, remote_ring) = (OnceLock::new(), OnceLock::new());
        let memory = Mutex::new([(); 2].map(|()| WriteMemory::new(Row::LEN)));
        Ok(Self { rank, fabric, queue_pair, memory, theirs, mine, ring, remote_ring, writes_ring, rows_expected })
    }

    /// Returns what the other member needs to connect.
    pub(crate) fn endpoint(&self) -> TableEndpoint {
        TableEndpoint {
            queue_pair: self.queue_pair.endpoint().as_bytes().to_vec(),
            row: self.theirs.remote().encode(),
            ring: self.ring.as_ref().map(|ring| ring.region().remote().encode()),
        }
    }

    /// Connects to what the other member offered. `address` is that of its control connection.
    pub(crate) async fn connect(
        &self,
        role: Role,
        address: Option<IpAddr>,
        TableEndpoint { queue_pair, row, ring }: TableEndpoint,
    ) -> Result<(), ConnectError> {
        self.mine.set(RemoteMemory::decode(row)).map_err(|_| ConnectError::WrongState)?;
        match ring {
            Some(ring) if self.writes_ring => {
                self.remote_ring.set(RemoteMemory::decode(ring)).map_err(|_| ConnectError::WrongState)?;
            }
            None if self.writes_ring => return Err(ConnectError::WrongState),
            _ => {}
        }
        self.queue_pair.connect(Peer { endpoint: Endpoint::new(queue_pair)?, role, address }).await
    }

    pub(super) fn expect_rows(&self) -> VecDeque<Operation<Received>> {
        (0..self.rows_expected).map(|_| self.expect_row()).collect()
    }

    /// Posts the receive that the next write of a row consumes.
    pub(super) fn expect_row(&self) -> Operation<Received> {
        self.queue_pair.receive(BufferMut::empty())
    }

    /// Reads the other member's row; `None` if it cannot be read now.
    pub(super) fn read(&self, salt: u64) -> Option<Row> {
        let mut bytes = [0; Row::LEN];
        self.theirs.read_at(0, &mut bytes).expect("the region has the length of a row");
        Row::decode(&bytes, salt, self.rank)
    }

    /// Writes the row of this member, `me`, to the other.
    pub(super) fn write(&self, row: Row, salt: u64, me: Rank, report: Report) -> Result<Operation<()>, WorkError> {
        let encode = |memory: &mut [u8]| {
            memory[..Row::LEN].copy_from_slice(&row.encode(salt, me));
            Row::LEN
        };
        let bytes = {
            let mut memory = lock(&self.memory);
            memory.swap(0, 1);
            memory[0].write(&*self.fabric, encode).map_err(|error| {
                tracing::warn!(%error, "no memory for the status of this member");
                WorkError::LocalProtection
            })?
        };
        let place = *self.mine.get().expect("rows travel after the connection is made");
        let place = RemoteMemory { len: Row::LEN as u64, ..place };
        Ok(self.post(bytes, place, ROW_IMM, report))
    }

    /// At the root: writes a slot of the receiver's ring.
    pub(super) fn write_slot(&self, slot: Buffer, place: usize, report: Report) -> Operation<()> {
        let ring = self.remote_ring.get().expect("messages travel after the connection is made");
        let place = ring.slice(place as u64, slot.len() as u64);
        self.post(slot, place, RING_IMM, report)
    }

    fn post(&self, bytes: Buffer, place: RemoteMemory, imm: u32, report: Report) -> Operation<()> {
        match report {
            Report::AtOnce => self.queue_pair.write(bytes, place, Some(imm)),
            Report::Later => self.queue_pair.write_unsignaled(bytes, place, Some(imm)),
        }
    }

    pub(super) fn close(&self) {
        self.queue_pair.close();
    }
}

/// When a write is to be reported as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    AtOnce,
    /// With a later one: nobody waits for it, and so nobody is woken by it.
    Later,
}

/// Which end of a ring a member has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingEnd {
    Writes,
    Reads,
}

/// The immediate of a write of a row.
const ROW_IMM: u32 = 0;
/// The immediate of a write into the ring.
pub(super) const RING_IMM: u32 = 1;
/// Most writes of rows that are unacknowledged.
const ROWS_WRITTEN: u32 = 2;
/// Receives posted for rows: as many as are unacknowledged, and more, because a device acknowledges a write although the
/// process that is to post the next receive does not run.
const ROWS_EXPECTED: u32 = 4;
/// How long a write waits for such a process. Whether that lives is for others to judge.
const ROW_WAITS: Duration = Duration::from_secs(60);
