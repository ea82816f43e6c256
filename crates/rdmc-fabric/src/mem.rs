//! The fabric `mem`: nodes of one process, joined by memory copies.
//!
//! It is meant for tests, examples and embedding. Each direction of a queue pair has a task that carries out its
//! requests one by one. Control connections are in-process pipes. Nodes of different networks cannot reach each other.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::mpsc;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource, SoftwareCompletions};
use crate::environment::{ControlListener, ControlStream, Environment, Timestamp, TokioEnvironment};
use crate::fabric::{Capabilities, ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig, RawQueuePair};
use crate::memory::{AttachError, Buffer, Memory, MemoryRegion, ObjectDescriptor, ObjectShare, SharedObject};
use crate::queue_pair::{QueuePair, next_queue_pair_id};
use crate::remote::{Expose, ExposedRegion};
use crate::software::{Exposures, Pairing, PostedWork, YieldBudget};
use crate::sync::lock;
use crate::work::{QueuePairId, Work, WorkError, WorkRequest};

/// A network inside this process; each node of it has a [`MemFabric`].
///
/// # Examples
/// ```
/// let network = rdmc_fabric::MemNetwork::new();
/// let (a, b) = (network.fabric(), network.fabric());
/// # drop((a, b));
/// ```
#[derive(Clone, Default)]
pub struct MemNetwork {
    shared: Arc<NetworkShared>,
}

#[derive(Default)]
struct NetworkShared {
    listeners: Mutex<BTreeMap<String, mpsc::Sender<DuplexStream>>>,
    queue_pairs: Mutex<HashMap<u128, Weak<MemQueuePair>>>,
    next_port: AtomicU16,
    /// The shared objects of all nodes, by token.
    objects: Mutex<HashMap<u128, Buffer>>,
}

impl MemNetwork {
    /// Creates a network without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a node's access to the network.
    pub fn fabric(&self) -> Arc<MemFabric> {
        let environment = MemEnvironment { tokio: TokioEnvironment::new(), network: self.shared.clone() };
        Arc::new(MemFabric {
            environment: Arc::new(environment),
            network: self.shared.clone(),
            exposures: Arc::default(),
        })
    }
}

impl fmt::Debug for MemNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemNetwork").finish_non_exhaustive()
    }
}

/// One node's access to a [`MemNetwork`].
pub struct MemFabric {
    environment: Arc<MemEnvironment>,
    network: Arc<NetworkShared>,
    exposures: Arc<Exposures>,
}

impl fmt::Debug for MemFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemFabric").finish_non_exhaustive()
    }
}

impl Fabric for MemFabric {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("mem");
        capabilities.tells_near = true;
        capabilities.shares_objects = true;
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        Ok(MemoryRegion::new(memory, Box::new(())))
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        Ok(self.exposures.expose(&*self.environment, memory))
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        let source = Arc::new(SoftwareCompletions::new(capacity));
        Ok(CompletionQueue::new(source, self.environment.clone(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let reserved = config.requests_max();
        let posted = PostedWork::new(next_queue_pair_id(), completions, reserved)?;
        let environment: &dyn Environment = &*self.environment;
        let shared = Arc::new_cyclic(|this| MemQueuePair {
            posted,
            nonce: environment.random_u128(),
            config,
            environment: self.environment.clone(),
            network: self.network.clone(),
            exposures: self.exposures.clone(),
            pairing: Pairing::default(),
            this: this.clone(),
        });
        lock(&self.network.queue_pairs).insert(shared.nonce, Arc::downgrade(&shared));
        Ok(QueuePair::new(shared, config))
    }

    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        let environment: &dyn Environment = &*self.environment;
        let token = environment.random_u128();
        lock(&self.network.objects).insert(token, object.to_buffer());
        let descriptor = ObjectDescriptor { len: object.len() as u64, owner: 0, token };
        let published = Published { network: self.network.clone(), token };
        Ok(ObjectShare::new(descriptor, Box::new(published)))
    }

    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        let found = lock(&self.network.objects).get(&object.token).cloned();
        let (len, what) = (object.len, "it has another length");
        Box::pin(async move {
            match found {
                Some(bytes) if bytes.len() as u64 == len => Ok(bytes),
                Some(_) => Err(AttachError::Unsound { len, what }),
                None => Err(AttachError::NotShared),
            }
        })
    }
}

/// An object that nodes of the network can attach.
struct Published {
    network: Arc<NetworkShared>,
    token: u128,
}

impl Drop for Published {
    fn drop(&mut self) {
        let object = lock(&self.network.objects).remove(&self.token);
        drop(object);
    }
}

struct MemQueuePair {
    posted: PostedWork,
    nonce: u128,
    config: QueuePairConfig,
    environment: Arc<MemEnvironment>,
    network: Arc<NetworkShared>,
    exposures: Arc<Exposures>,
    pairing: Pairing<MemQueuePair>,
    this: Weak<MemQueuePair>,
}

impl RawQueuePair for MemQueuePair {
    fn id(&self) -> QueuePairId {
        self.posted.id
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::new(self.nonce.to_le_bytes().to_vec()).expect("16 bytes are within the limit")
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let connected = self.connect_now(&peer);
        Box::pin(async move { connected })
    }

    fn post(&self, request: WorkRequest) {
        self.posted.post(request);
    }

    fn close(&self) {
        self.break_both(WorkError::Flushed);
        lock(&self.network.queue_pairs).remove(&self.nonce);
    }
}

impl MemQueuePair {
    fn connect_now(&self, peer: &Peer) -> Result<(), ConnectError> {
        let nonce = peer.endpoint.as_bytes().try_into().map_err(|_| ConnectError::BadEndpoint)?;
        let nonce = u128::from_le_bytes(nonce);
        let found = lock(&self.network.queue_pairs).get(&nonce).and_then(Weak::upgrade);
        let found = found.ok_or(ConnectError::BadNonce)?;
        if self.posted.is_broken() {
            return Err(ConnectError::WrongState);
        }
        self.pairing.join(&self.this, &found, &found.pairing)?;
        if found.posted.is_broken() {
            // The peer closed in between, and may not have seen this queue pair.
            self.break_both(WorkError::ConnectionLost);
        }
        let this = self.this.upgrade().expect("the caller holds the queue pair");
        self.environment.spawn(Box::pin(async move { this.carry_out_all().await }));
        Ok(())
    }

    /// Carries out posted requests until the queue pair breaks.
    async fn carry_out_all(&self) {
        let mut budget = YieldBudget::default();
        while !self.posted.is_broken() {
            match self.posted.try_take_send() {
                Some(request) => self.carry_out(request, &mut budget).await,
                None => self.posted.sends_changed().await,
            }
        }
    }

    async fn carry_out(&self, mut request: WorkRequest, budget: &mut YieldBudget) {
        let Some(peer) = self.pairing.peer() else {
            self.posted.finish(request, Err(WorkError::ConnectionLost));
            return self.break_both(WorkError::ConnectionLost);
        };
        let result = match request.work_mut() {
            Work::Send { data, imm } => peer.take_in(Some(data), *imm, budget).await,
            Work::Write { data, to, imm } => match peer.exposures.open(*to, true) {
                Ok(grant) => {
                    for at in (0..data.len()).step_by(COPY_CHUNK) {
                        let chunk = &data[at..data.len().min(at + COPY_CHUNK)];
                        let copy = |room: &mut [u8]| room.copy_from_slice(chunk);
                        grant.with_bytes_mut(at, chunk.len(), copy);
                        budget.spend(chunk.len()).await;
                    }
                    match imm {
                        Some(_) => peer.take_in(None, *imm, budget).await.map(|_| data.len()),
                        None => Ok(data.len()),
                    }
                }
                Err(error) => Err(error),
            },
            Work::Read { into, from } => match peer.exposures.open(*from, false) {
                Ok(grant) => {
                    let len = into.len();
                    for at in (0..len).step_by(COPY_CHUNK) {
                        let room = &mut into[at..len.min(at + COPY_CHUNK)];
                        let copied = room.len();
                        let copy = |bytes: &[u8]| room.copy_from_slice(bytes);
                        grant.with_bytes(at, copied, copy);
                        budget.spend(copied).await;
                    }
                    Ok(len)
                }
                Err(error) => Err(error),
            },
            Work::Receive { .. } => unreachable!("receives are queued apart"),
        };
        let result = if self.posted.is_broken() { Err(WorkError::Flushed) } else { result };
        self.posted.finish(request, result);
        if result.is_err() {
            self.break_both(WorkError::Flushed);
        }
    }

    /// Takes a peer's send, or without data the immediate of its write. Returns the bytes taken, or the error for the
    /// sender.
    async fn take_in(
        &self,
        data: Option<&[u8]>,
        imm: Option<u32>,
        budget: &mut YieldBudget,
    ) -> Result<usize, WorkError> {
        let limit = self.config.receiver_not_ready;
        let mut receive = match self.posted.take_receive(&*self.environment, limit).await {
            Ok(receive) => receive,
            Err(WorkError::Flushed) => return Err(WorkError::ConnectionLost),
            Err(error) => return Err(error),
        };
        let data = data.unwrap_or(&[]);
        let inspector = receive.inspector();
        let Work::Receive { into } = receive.work_mut() else { unreachable!("only receives are queued here") };
        if data.len() > into.len() {
            let error = WorkError::LocalLength { got: Some(data.len() as u64), room: into.len() as u64 };
            receive.finish(Err(error), None);
            return Err(WorkError::RemoteInvalidRequest);
        }
        for (room, chunk) in into.chunks_mut(COPY_CHUNK).zip(data.chunks(COPY_CHUNK)) {
            room[..chunk.len()].copy_from_slice(chunk);
            if let Some(inspector) = &inspector {
                inspector.inspect(&room[..chunk.len()]);
            }
            budget.spend(chunk.len()).await;
        }
        let result = if self.posted.is_broken() { Err(WorkError::Flushed) } else { Ok(data.len()) };
        receive.finish(result, imm);
        result.map_err(|_| WorkError::ConnectionLost)
    }

    fn break_both(&self, cause: WorkError) {
        if self.posted.break_with(cause) {
            for other in self.pairing.others() {
                other.posted.break_with(WorkError::ConnectionLost);
            }
        }
    }
}

/// Tokio's clock and tasks; control connections inside the process.
struct MemEnvironment {
    tokio: TokioEnvironment,
    network: Arc<NetworkShared>,
}

impl fmt::Debug for MemEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemEnvironment").finish_non_exhaustive()
    }
}

impl Environment for MemEnvironment {
    fn now(&self) -> Timestamp {
        self.tokio.now()
    }

    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
        self.tokio.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.tokio.spawn(task);
    }

    fn give_way(&self) -> BoxFuture<'static, ()> {
        self.tokio.give_way()
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        self.tokio.fill_random(bytes);
    }

    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
        let address = match address.strip_suffix(":0") {
            Some(host) => format!("{host}:{}", self.network.next_port.fetch_add(1, Ordering::Relaxed) + 1),
            None => address.to_owned(),
        };
        let (connected, incoming) = mpsc::channel(ACCEPTED_MAX);
        let mut listeners = lock(&self.network.listeners);
        let result = if listeners.get(&address).is_some_and(|listener| !listener.is_closed()) {
            Err(io::Error::new(io::ErrorKind::AddrInUse, format!("a node already listens at {address}")))
        } else {
            listeners.insert(address.clone(), connected);
            Ok(Box::new(MemControlListener { incoming, address }) as Box<dyn ControlListener>)
        };
        Box::pin(async move { result })
    }

    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        let listener = lock(&self.network.listeners).get(address).cloned();
        let refused = io::Error::new(io::ErrorKind::ConnectionRefused, format!("no node listens at {address}"));
        Box::pin(async move {
            let (near, far) = tokio::io::duplex(CONTROL_BUFFER);
            match listener {
                Some(listener) if listener.send(far).await.is_ok() => {
                    Ok(Box::new(MemControlStream(near)) as Box<dyn ControlStream>)
                }
                _ => Err(refused),
            }
        })
    }
}

struct MemControlListener {
    incoming: mpsc::Receiver<DuplexStream>,
    address: String,
}

impl ControlListener for MemControlListener {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        Box::pin(async move {
            match self.incoming.recv().await {
                Some(stream) => Ok(Box::new(MemControlStream(stream)) as Box<dyn ControlStream>),
                None => Err(io::Error::other("the network was dropped")),
            }
        })
    }

    fn local_address(&self) -> String {
        self.address.clone()
    }
}

struct MemControlStream(DuplexStream);

impl ControlStream for MemControlStream {
    fn peer_address(&self) -> Option<IpAddr> {
        None
    }
}

impl AsyncRead for MemControlStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for MemControlStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Bytes copied before other tasks of the thread get a turn.
const COPY_CHUNK: usize = 256 << 10;
/// Control connections that wait to be accepted.
const ACCEPTED_MAX: usize = 64;
/// Most bytes that a control connection holds in each direction.
const CONTROL_BUFFER: usize = 64 << 10;
