//! A queue pair as users of the fabric hold it: a connection, and the meeting that makes and ends it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{
    ConnectError, Endpoint, FabricError, Meeting, Peer, QueuePairConfig, QueuePairId, RawQueuePair, WorkError,
    WorkRequest, next_queue_pair_id,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::completion::Completions;
use crate::connection::{Connection, EXTRA_SENDS};
use crate::endpoint::{VerbsEndpoint, receiver_not_ready};
use crate::fabric::Shared;
use crate::qp::LocalAttributes;

pub(crate) struct VerbsQueuePair {
    connection: Arc<Connection>,
    completions: Arc<Completions>,
    meeting: Meeting,
    local: LocalAttributes,
    shared: Arc<Shared>,
    reserved: u32,
    this: Weak<Self>,
}

impl VerbsQueuePair {
    pub(crate) fn create(
        shared: &Arc<Shared>,
        completions: Arc<Completions>,
        config: QueuePairConfig,
    ) -> Result<Arc<Self>, FabricError> {
        use rdmc_fabric::CompletionSource as _;
        let attributes = &shared.device.attributes;
        let wanted = config.send_depth.saturating_add(EXTRA_SENDS).max(config.receive_depth);
        let max = u32::try_from(attributes.max_qp_wr).unwrap_or(0);
        let reserved = config.requests_max();
        completions.reserve(reserved)?;
        let entries = Connection::entries(config);
        let connection = if wanted > max {
            Err(FabricError::Limit { what: "work requests of a queue pair", wanted: wanted.into(), max: max.into() })
        } else {
            completions.grow(entries).and_then(|()| {
                let id = next_queue_pair_id();
                let made = Connection::create(&shared.device, &completions, id, config, shared.config.inline_bytes);
                made.map_err(|source| {
                    completions.shrink(entries);
                    FabricError::Device { what: "a queue pair", source }
                })
            })
        };
        let connection = connection.inspect_err(|_| completions.release(reserved))?;
        let mut psn = [0; 4];
        rdmc_fabric::Environment::fill_random(&*shared.environment, &mut psn);
        let (receiver_not_ready_timer, receiver_not_ready_retries) = receiver_not_ready(config.receiver_not_ready);
        let reads_max = attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom).clamp(0, READS_MAX);
        let local = LocalAttributes {
            psn: u32::from_le_bytes(psn) & PSN_MASK,
            mtu: u8::try_from(shared.device.port.active_mtu).unwrap_or(1).clamp(1, 5),
            reads_max: u8::try_from(reads_max).expect("clamped"),
            receiver_not_ready_timer,
            receiver_not_ready_retries,
        };
        let meeting = shared.rendezvous.meeting(&*shared.environment);
        Ok(Arc::new_cyclic(|this| Self {
            connection,
            completions,
            meeting,
            local,
            shared: shared.clone(),
            reserved,
            this: this.clone(),
        }))
    }

    /// Meets the peer, readies the queue pair, and agrees with the peer that both are ready.
    async fn establish(&self, peer: Peer) -> Result<TcpStream, ConnectError> {
        let remote = VerbsEndpoint::decode(&peer.endpoint)?;
        if remote.ethernet != self.shared.device.choice.ethernet {
            return Err(ConnectError::Unreachable(std::io::Error::other(
                "one port is InfiniBand, the other Ethernet: they are not on one network",
            )));
        }
        let mut stream = self.meeting.meet(remote.place, peer.role, peer.address).await?;
        stream.set_nodelay(true).map_err(ConnectError::Unreachable)?;
        let (connection, local, shared) = (self.connection.clone(), self.local, self.shared.clone());
        // The kernel may take a while to resolve the path to the peer.
        let prepared = tokio::task::spawn_blocking(move || connection.prepare(&remote, &local, &shared.config)).await;
        prepared.map_err(std::io::Error::other).and_then(|done| done).map_err(ConnectError::Unreachable)?;
        let mut closed = self.meeting.closed();
        let agreed = async {
            stream.write_all(&[READY]).await?;
            stream.read_u8().await
        };
        let agreed = tokio::select! {
            biased;
            _ = closed.wait_for(|&closed| closed) => return Err(ConnectError::WrongState),
            agreed = agreed => agreed.map_err(ConnectError::Unreachable)?,
        };
        if agreed == READY { Ok(stream) } else { Err(ConnectError::BadEndpoint) }
    }

    /// Holds the meeting's connection until either end closes. By its end the peer learns of a close here, and this end
    /// learns of the peer's close or death.
    async fn hold(self: Arc<Self>, mut stream: TcpStream) {
        let mut byte = [0; 1];
        tokio::select! {
            biased;
            () = self.connection.broken() => {}
            ended = stream.read(&mut byte) => {
                tracing::debug!(qp = %self.connection.id, ?ended, "the peer closed the queue pair or is gone");
                if self.connection.has_sends() {
                    // If the peer broke because of a request, the device reports the reason, which is more precise.
                    let _ = tokio::time::timeout(REFUSAL_GRACE, self.connection.broken()).await;
                }
            }
        }
        self.end(WorkError::ConnectionLost);
    }

    fn end(&self, cause: WorkError) {
        self.connection.break_with(cause);
        self.meeting.close();
    }
}

impl RawQueuePair for VerbsQueuePair {
    fn id(&self) -> QueuePairId {
        self.connection.id
    }

    fn endpoint(&self) -> Endpoint {
        let choice = &self.shared.device.choice;
        VerbsEndpoint {
            place: self.meeting.place(),
            qp_num: self.connection.qp_num(),
            psn: self.local.psn,
            lid: self.shared.device.port.lid,
            gid: choice.gid.gid.octets(),
            ethernet: choice.ethernet,
            mtu: self.local.mtu,
            reads_max: self.local.reads_max,
            receiver_not_ready_retries: self.local.receiver_not_ready_retries,
        }
        .encode()
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let this = self.this.upgrade().expect("the caller holds the queue pair");
        Box::pin(async move {
            let stream = this.establish(peer).await?;
            if !this.connection.connected() {
                return Err(ConnectError::WrongState);
            }
            tokio::spawn(this.hold(stream));
            Ok(())
        })
    }

    fn post(&self, request: WorkRequest) {
        self.connection.post(request);
    }

    fn flush(&self) {
        self.connection.flush();
    }

    fn close(&self) {
        self.end(WorkError::Flushed);
    }
}

impl Drop for VerbsQueuePair {
    fn drop(&mut self) {
        use rdmc_fabric::CompletionSource as _;
        self.connection.abandon();
        self.completions.release(self.reserved);
    }
}

/// What each end sends when its queue pair is ready.
const READY: u8 = 1;
/// How long the device may take to report why the peer broke a connection with outstanding sends.
const REFUSAL_GRACE: Duration = Duration::from_millis(50);
/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0xff_ffff;
/// Most reads of one queue pair under way at once.
const READS_MAX: i32 = 16;
