//! The connection of two members by which their rows travel.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use rdmc_fabric::{
    BufferMut, CompletionSource, ConnectError, Endpoint, Expose, ExposedRegion, Fabric, FabricError, Memory, Operation,
    Peer, QueuePair, QueuePairConfig, Received, RemoteAccess, RemoteMemory, Role, WorkError,
};
use rdmc_schedule::Rank;

use super::Row;
use crate::wire::TableEndpoint;

/// A queue pair, and the place of the other member's row here. The other member can write nothing else.
pub(crate) struct Link {
    pub(super) rank: Rank,
    fabric: Arc<dyn Fabric>,
    queue_pair: QueuePair,
    /// The other member's row.
    theirs: ExposedRegion,
    /// The place of this member's row at the other.
    mine: OnceLock<RemoteMemory>,
}

impl Link {
    pub(crate) fn new(
        fabric: Arc<dyn Fabric>,
        completions: &Arc<dyn CompletionSource>,
        rank: Rank,
    ) -> Result<Self, FabricError> {
        let config = QueuePairConfig { send_depth: 1, receive_depth: ROWS_EXPECTED, ..Default::default() };
        let queue_pair = fabric.create_queue_pair(completions, config)?;
        let place = fabric.allocate(Row::LEN)?.into_mut().expect("a fabric allocates writable memory");
        let theirs = fabric.expose(Expose::Mutable(place, RemoteAccess::WRITE))?;
        Ok(Self { rank, fabric, queue_pair, theirs, mine: OnceLock::new() })
    }

    /// Returns what the other member needs to connect.
    pub(crate) fn endpoint(&self) -> TableEndpoint {
        TableEndpoint { queue_pair: self.queue_pair.endpoint().as_bytes().to_vec(), row: self.theirs.remote().encode() }
    }

    /// Connects to what the other member offered. `address` is that of its control connection.
    pub(crate) async fn connect(
        &self,
        role: Role,
        address: Option<IpAddr>,
        TableEndpoint { queue_pair, row }: TableEndpoint,
    ) -> Result<(), ConnectError> {
        self.mine.set(RemoteMemory::decode(row)).map_err(|_| ConnectError::WrongState)?;
        self.queue_pair.connect(Peer { endpoint: Endpoint::new(queue_pair)?, role, address }).await
    }

    pub(super) fn expect_rows(&self) -> VecDeque<Operation<Received>> {
        (0..ROWS_EXPECTED).map(|_| self.expect_row()).collect()
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

    /// Writes the row of this member, `me`, to the other; waits until it is there.
    pub(super) async fn write(&self, row: Row, salt: u64, me: Rank) -> Result<(), WorkError> {
        let bytes = Memory::from(row.encode(salt, me).to_vec());
        let Ok(bytes) = self.fabric.register(bytes) else { return Err(WorkError::LocalProtection) };
        let place = *self.mine.get().expect("rows travel after the connection is made");
        let place = RemoteMemory { len: Row::LEN as u64, ..place };
        self.queue_pair.write(bytes.into_shared(), place, Some(0)).await
    }

    pub(super) fn close(&self) {
        self.queue_pair.close();
    }
}

/// Receives posted for rows. At most one write is unacknowledged, but an acknowledgement may come before the receive is
/// posted again.
const ROWS_EXPECTED: u32 = 4;
