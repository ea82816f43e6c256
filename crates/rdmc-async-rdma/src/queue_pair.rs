//! A queue pair as users of the fabric hold it: posted work, and the connection.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{
    CompletionSource, ConnectError, Endpoint, FabricError, Meeting, MeetingPlace, Peer, QueuePairConfig, QueuePairId,
    RawQueuePair, SoftwareCompletions, Work, WorkError, WorkRequest, next_queue_pair_id,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Notify, OwnedSemaphorePermit};

use crate::connection::Connection;
use crate::fabric::Shared;
use crate::frame::Hello;

pub(crate) struct AsyncRdmaQueuePair {
    id: QueuePairId,
    completions: Arc<dyn CompletionSource>,
    reserved: u32,
    config: QueuePairConfig,
    meeting: Meeting,
    shared: Arc<Shared>,
    posted: Mutex<Posted>,
    /// Work was posted, or the queue pair closed.
    changed: Notify,
    /// Room in the device's completion queue, held until the device is done with the queue pair.
    _permit: OwnedSemaphorePermit,
    this: Weak<Self>,
}

/// Posted work that the connection has not taken yet.
#[derive(Default)]
struct Posted {
    phase: Phase,
    sends: VecDeque<WorkRequest>,
    receives: VecDeque<WorkRequest>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// Work is collected.
    #[default]
    Unconnected,
    /// A connection takes it.
    Connected,
    /// Work is flushed. The connection ends the requests that it has.
    Closed,
}

impl AsyncRdmaQueuePair {
    pub(crate) fn create(
        shared: &Arc<Shared>,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<Arc<Self>, FabricError> {
        if software(completions).is_none() {
            return Err(FabricError::ForeignCompletionQueue);
        }
        let max = shared.config.queue_pairs_max.into();
        let permit = shared.queue_pairs.clone().try_acquire_owned();
        let permit = permit.map_err(|_| FabricError::Limit { what: "queue pairs", wanted: max + 1, max })?;
        let reserved = config.requests_max();
        completions.reserve(reserved)?;
        let meeting = shared.rendezvous.meeting(&*shared.environment);
        Ok(Arc::new_cyclic(|this| Self {
            id: next_queue_pair_id(),
            completions: completions.clone(),
            reserved,
            config,
            meeting,
            shared: shared.clone(),
            posted: Mutex::default(),
            changed: Notify::new(),
            _permit: permit,
            this: this.clone(),
        }))
    }

    /// Ends a request.
    pub(crate) fn complete(&self, request: WorkRequest, result: Result<usize, WorkError>, imm: Option<u32>) {
        let queue = software(&self.completions).expect("checked when the queue pair was made");
        queue.push(request.complete(result, imm));
    }

    /// Moves posted work to the connection's queues; returns false if the queue pair is closed.
    pub(crate) fn take(&self, sends: &mut VecDeque<WorkRequest>, receives: &mut VecDeque<WorkRequest>) -> bool {
        let mut posted = self.lock();
        sends.append(&mut posted.sends);
        receives.append(&mut posted.receives);
        posted.phase == Phase::Connected
    }

    /// Does what [`take`](Self::take) does for the last time: work that is posted later is flushed.
    pub(crate) fn take_last(&self, sends: &mut VecDeque<WorkRequest>, receives: &mut VecDeque<WorkRequest>) {
        self.lock().phase = Phase::Closed;
        self.take(sends, receives);
    }

    /// Waits until work was posted or the queue pair was closed. Only one task may wait at a time.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Meets the peer and readies the device's queue pair.
    async fn establish(self: &Arc<Self>, peer: Peer) -> Result<Connection, ConnectError> {
        let place = MeetingPlace::of_endpoint(&peer.endpoint, ENDPOINT_TAG)?;
        let stream = self.meeting.meet(place, peer.role, peer.address).await?;
        let mut closed = self.meeting.closed();
        tokio::select! {
            biased;
            _ = closed.wait_for(|&closed| closed) => Err(ConnectError::WrongState),
            agreed = tokio::time::timeout(HANDSHAKE_LIMIT, self.agree(stream)) => {
                agreed.unwrap_or_else(|late| Err(ConnectError::Unreachable(late.into())))
            }
        }
    }

    /// Exchanges what both ends need to know, and waits until both are ready.
    async fn agree(self: &Arc<Self>, mut stream: TcpStream) -> Result<Connection, ConnectError> {
        let unreachable = ConnectError::Unreachable;
        stream.set_nodelay(true).map_err(unreachable)?;
        let prepared = self.shared.device.prepare().await.map_err(unreachable)?;
        let own = Hello {
            address: prepared.address(),
            packet_len: self.shared.config.packet_len,
            receiver_not_ready: self.config.receiver_not_ready,
        };
        stream.write_all(&own.encode()).await.map_err(unreachable)?;
        let mut theirs = [0; Hello::LEN];
        stream.read_exact(&mut theirs).await.map_err(unreachable)?;
        let theirs = Hello::decode(&theirs).ok_or(ConnectError::BadEndpoint)?;
        if theirs.packet_len != own.packet_len {
            let text = format!("packet_len is {} here and {} at the peer", own.packet_len, theirs.packet_len);
            return Err(unreachable(io::Error::other(text)));
        }
        let rdma = prepared.connect(theirs.address).await.map_err(unreachable)?;
        // Neither end writes to a queue pair that is not ready.
        stream.write_u8(READY).await.map_err(unreachable)?;
        if stream.read_u8().await.map_err(unreachable)? != READY {
            return Err(ConnectError::BadEndpoint);
        }
        Ok(Connection::new(self.clone(), self.shared.device.clone(), rdma, stream, theirs.receiver_not_ready))
    }

    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RawQueuePair for AsyncRdmaQueuePair {
    fn id(&self) -> QueuePairId {
        self.id
    }

    fn endpoint(&self) -> Endpoint {
        self.meeting.place().to_endpoint(ENDPOINT_TAG)
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let this = self.this.upgrade().expect("the caller holds the queue pair");
        Box::pin(async move {
            let connection = this.establish(peer).await?;
            {
                let mut posted = this.lock();
                if posted.phase != Phase::Unconnected {
                    return Err(ConnectError::WrongState);
                }
                posted.phase = Phase::Connected;
            }
            tokio::spawn(connection.run());
            Ok(())
        })
    }

    fn post(&self, request: WorkRequest) {
        let mut posted = self.lock();
        if posted.phase == Phase::Closed {
            drop(posted);
            return self.complete(request, Err(WorkError::Flushed), None);
        }
        match request.work() {
            Work::Receive { .. } => posted.receives.push_back(request),
            _ => posted.sends.push_back(request),
        }
        drop(posted);
        self.changed.notify_one();
    }

    fn close(&self) {
        let unconnected = {
            let mut posted = self.lock();
            let phase = std::mem::replace(&mut posted.phase, Phase::Closed);
            (phase == Phase::Unconnected)
                .then(|| (std::mem::take(&mut posted.sends), std::mem::take(&mut posted.receives)))
        };
        let (sends, receives) = unconnected.unwrap_or_default();
        for request in sends.into_iter().chain(receives) {
            self.complete(request, Err(WorkError::Flushed), None);
        }
        self.changed.notify_one();
        self.meeting.close();
    }
}

impl Drop for AsyncRdmaQueuePair {
    fn drop(&mut self) {
        self.completions.release(self.reserved);
    }
}

fn software(source: &Arc<dyn CompletionSource>) -> Option<&SoftwareCompletions> {
    let any: &dyn Any = &**source;
    any.downcast_ref()
}

/// First bytes of an encoded endpoint: fabric and version.
const ENDPOINT_TAG: &[u8] = b"ard1";
/// What each end sends when its queue pair is ready.
const READY: u8 = 1;
/// How long two queue pairs may take to be ready after they have met.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);
