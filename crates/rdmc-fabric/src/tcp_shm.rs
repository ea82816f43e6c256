//! The fabric `tcp+shm`: for each pair of queue pairs, shared memory within this host, and TCP to all other nodes.
//!
//! Both ends encode in their endpoint their host, network namespace and user. If these are the same, the end that opens
//! connections tries shared memory first, and TCP if it reaches no process. Two copies of one virtual machine, for
//! example, have the same values and share no memory. The other end waits for either connection.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use futures::future::{BoxFuture, Either, TryFutureExt, select};

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource};
use crate::decorator::FabricDecorator;
use crate::environment::Environment;
use crate::fabric::{
    Capabilities, ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig, RawQueuePair, Role,
};
use crate::queue_pair::{QueuePair, next_queue_pair_id};
use crate::rendezvous::Rendezvous;
use crate::shm::{Host, ShmFabric};
use crate::software::{Exposures, PostedWork};
use crate::sync::lock;
use crate::tcp::{TcpConfig, TcpFabric};
use crate::work::{QueuePairId, WorkError, WorkRequest};

/// One node's access to processes of its host by shared memory, and to other nodes by TCP.
///
/// It must be used inside a Tokio runtime with I/O and time enabled. It does not encrypt.
pub struct TcpShmFabric {
    tcp: Arc<TcpFabric>,
    shm: Arc<ShmFabric>,
}

impl TcpShmFabric {
    /// Creates a fabric.
    ///
    /// # Errors
    /// [`FabricError::Device`] if the system has no anonymous files to share, if it cannot tell which host this is, or
    /// if the configuration asks for encryption.
    pub fn new(config: TcpConfig) -> Result<Arc<Self>, FabricError> {
        Self::with_rendezvous(config, Rendezvous::new())
    }

    /// Creates a fabric whose TCP connections arrive at a rendezvous that other fabrics of the node share.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_rendezvous(config: TcpConfig, rendezvous: Arc<Rendezvous>) -> Result<Arc<Self>, FabricError> {
        if config.encrypt {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "encrypted connections cannot use shared memory");
            return Err(FabricError::Device { what: "the fabric tcp+shm", source });
        }
        let exposures: Arc<Exposures> = Arc::default();
        let shm = ShmFabric::with_environment(Arc::default(), exposures.clone())?;
        let tcp = TcpFabric::with_exposures(config, rendezvous, exposures);
        Ok(Arc::new(Self { tcp, shm }))
    }
}

impl fmt::Debug for TcpShmFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpShmFabric").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

/// Memory and objects are those of `shm`; completions and control connections are those of `tcp`.
impl FabricDecorator for TcpShmFabric {
    fn inner(&self) -> &dyn Fabric {
        &*self.shm
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("tcp+shm");
        capabilities.tells_near = true;
        capabilities.yields_to_loss = self.tcp.capabilities().yields_to_loss;
        capabilities.shares_objects = true;
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.tcp.environment()
    }

    fn connect_ahead(&self, address: &str, connections: u16) {
        self.tcp.connect_ahead(address, connections);
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        Ok(CompletionQueue::new(self.shm.completions(capacity), self.tcp.environment(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        // Room for completions is reserved once, for both.
        let reserved = config.requests_max();
        let raw = TcpShmQueuePair(Arc::new(State {
            waiting: PostedWork::new(next_queue_pair_id(), completions, reserved)?,
            tcp: self.tcp.raw_queue_pair(completions, config, 0)?,
            shm: self.shm.raw_queue_pair(completions, config, 0)?,
            host: self.shm.host(),
            chosen: Mutex::new(None),
        }));
        Ok(QueuePair::new(Arc::new(raw), config))
    }
}

/// A queue pair whose carrier is chosen when it is connected.
struct TcpShmQueuePair(Arc<State>);

struct State {
    /// The work posted before that.
    waiting: PostedWork,
    tcp: Arc<dyn RawQueuePair>,
    shm: Arc<dyn RawQueuePair>,
    host: Host,
    chosen: Mutex<Option<Carrier>>,
}

#[derive(Clone)]
struct Carrier {
    raw: Arc<dyn RawQueuePair>,
    name: &'static str,
}

impl RawQueuePair for TcpShmQueuePair {
    fn id(&self) -> QueuePairId {
        self.0.waiting.id
    }

    fn endpoint(&self) -> Endpoint {
        let state = &self.0;
        TcpShmEndpoint { host: state.host, shm: state.shm.endpoint(), tcp: state.tcp.endpoint() }.encode()
    }

    fn pace(&self, bytes_per_second: Option<u64>) {
        self.0.tcp.pace(bytes_per_second);
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let state = self.0.clone();
        Box::pin(async move { state.connect(peer).await })
    }

    fn post(&self, request: WorkRequest) {
        let chosen = lock(&self.0.chosen);
        match &*chosen {
            None => self.0.waiting.post(request),
            Some(carrier) => {
                let raw = carrier.raw.clone();
                drop(chosen);
                raw.post(request);
            }
        }
    }

    fn flush(&self) {
        if let Some(carrier) = self.0.carrier() {
            carrier.raw.flush();
        }
    }

    fn carrier(&self) -> Option<&'static str> {
        self.0.carrier().map(|carrier| carrier.name)
    }

    fn close(&self) {
        self.0.waiting.break_with(WorkError::Flushed);
        self.0.tcp.close();
        self.0.shm.close();
    }
}

impl State {
    fn carrier(&self) -> Option<Carrier> {
        lock(&self.chosen).clone()
    }

    async fn connect(&self, peer: Peer) -> Result<(), ConnectError> {
        if self.carrier().is_some() {
            return Err(ConnectError::WrongState);
        }
        match self.meet(peer).await? {
            Transport::SharedMemory => self.choose("shm", &self.shm, &self.tcp),
            Transport::Tcp => self.choose("tcp", &self.tcp, &self.shm),
        }
        Ok(())
    }

    /// Connects one of the two queue pairs.
    async fn meet(&self, peer: Peer) -> Result<Transport, ConnectError> {
        let TcpShmEndpoint { host, shm, tcp } = TcpShmEndpoint::decode(&peer.endpoint)?;
        let by = |endpoint: Endpoint| Peer { endpoint, ..peer.clone() };
        let via_tcp = self.tcp.connect(by(tcp)).map_ok(|()| Transport::Tcp);
        if host != self.host {
            return via_tcp.await;
        }
        let via_shm = self.shm.connect(by(shm)).map_ok(|()| Transport::SharedMemory);
        if peer.role == Role::Active {
            return match via_shm.await {
                Err(ConnectError::Unreachable(error)) => {
                    tracing::debug!(%error, "a peer that seems to be on this host shares no memory");
                    via_tcp.await
                }
                met => met,
            };
        }
        match select(via_shm, via_tcp).await {
            // An end that does not listen can be reached by shared memory only.
            Either::Right((Err(ConnectError::NotListening), via_shm)) => via_shm.await,
            // The peer tries TCP next.
            Either::Left((Err(ConnectError::Unreachable(_)), via_tcp)) => via_tcp.await,
            Either::Left((met, _)) | Either::Right((met, _)) => met,
        }
    }

    /// Lets `raw` carry out the posted work and all later work.
    fn choose(&self, name: &'static str, raw: &Arc<dyn RawQueuePair>, other: &Arc<dyn RawQueuePair>) {
        other.close();
        let mut chosen = lock(&self.chosen);
        // If the queue pair was closed meanwhile, all of it is flushed.
        while let Ok(Some(receive)) = self.waiting.try_take_receive() {
            raw.post(receive);
        }
        while let Some(request) = self.waiting.try_take_send() {
            raw.post(request);
        }
        *chosen = Some(Carrier { raw: raw.clone(), name });
        if self.waiting.is_broken() {
            raw.close();
        }
    }
}

/// The carrier whose queue pair is connected.
enum Transport {
    SharedMemory,
    Tcp,
}

/// The endpoints of both carriers.
struct TcpShmEndpoint {
    host: Host,
    shm: Endpoint,
    tcp: Endpoint,
}

impl TcpShmEndpoint {
    fn encode(&self) -> Endpoint {
        let mut out = ENDPOINT_TAG.to_vec();
        out.extend(self.host.as_bytes());
        let shm = self.shm.as_bytes();
        out.push(u8::try_from(shm.len()).expect("it is short"));
        out.extend(shm);
        out.extend(self.tcp.as_bytes());
        Endpoint::new(out).expect("both are short")
    }

    fn decode(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        let parts = || {
            let rest = endpoint.as_bytes().strip_prefix(ENDPOINT_TAG)?;
            let (host, rest) = rest.split_first_chunk()?;
            let (&len, rest) = rest.split_first()?;
            let (shm, tcp) = rest.split_at_checked(len.into())?;
            Some((Host::from_bytes(*host), shm.to_vec(), tcp.to_vec()))
        };
        let (host, shm, tcp) = parts().ok_or(ConnectError::BadEndpoint)?;
        Ok(Self { host, shm: Endpoint::new(shm)?, tcp: Endpoint::new(tcp)? })
    }
}

/// The first bytes of an encoded endpoint: fabric and version.
const ENDPOINT_TAG: &[u8] = b"mix1";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_both_endpoints_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [ENDPOINT_TAG, &bytes].concat();
            let endpoint = Endpoint::new(bytes).unwrap();
            if let Ok(both) = TcpShmEndpoint::decode(&endpoint) {
                prop_assert_eq!(both.encode(), endpoint);
            }
        }
    }
}
