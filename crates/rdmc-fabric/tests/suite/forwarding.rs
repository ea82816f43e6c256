//! Every method of `Fabric` and `RawQueuePair` reaches the inner one through each decorator.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use futures::future::{BoxFuture, join};
use rdmc_fabric::{
    AttachError, Buffer, Capabilities, CompletionMode, CompletionQueue, CompletionSource, ConnectError, Endpoint,
    Environment, Expose, ExposedRegion, Fabric, FabricDecorator, FabricError, Fault, FaultFabric, MemNetwork, Memory,
    MemoryRegion, ObjectDescriptor, ObjectShare, Peer, QueuePair, QueuePairConfig, QueuePairDecorator, QueuePairId,
    RawQueuePair, Role, SharedObject, TraceFabric, WorkRequest,
};

/// The names of the methods that were called.
type Calls = Arc<Mutex<BTreeSet<&'static str>>>;

/// A fabric that notes which of its methods are called.
#[derive(Debug)]
struct Recorder {
    inner: Arc<dyn Fabric>,
    calls: Calls,
    queue_pair_calls: Calls,
}

impl Recorder {
    fn note(&self, method: &'static str) -> &dyn Fabric {
        self.calls.lock().unwrap().insert(method);
        &*self.inner
    }
}

#[deny(clippy::missing_trait_methods)]
impl Fabric for Recorder {
    fn capabilities(&self) -> Capabilities {
        self.note("capabilities").capabilities()
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.note("environment").environment()
    }

    fn connect_ahead(&self, address: &str, connections: u16) {
        self.note("connect_ahead").connect_ahead(address, connections);
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        self.note("register").register(memory)
    }

    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.note("allocate").allocate(len)
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        self.note("expose").expose(memory)
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        self.note("create_completion_queue").create_completion_queue(capacity, mode)
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let queue_pair = self.note("create_queue_pair").create_queue_pair(completions, config)?;
        let calls = self.queue_pair_calls.clone();
        Ok(queue_pair.map_raw(|inner| Arc::new(QueuePairRecorder { inner, calls })))
    }

    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        self.note("share").share(object)
    }

    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        self.note("attach").attach(object)
    }
}

/// A queue pair that notes which of its methods are called.
struct QueuePairRecorder {
    inner: Arc<dyn RawQueuePair>,
    calls: Calls,
}

impl QueuePairRecorder {
    fn note(&self, method: &'static str) -> &dyn RawQueuePair {
        self.calls.lock().unwrap().insert(method);
        &*self.inner
    }
}

#[deny(clippy::missing_trait_methods)]
impl RawQueuePair for QueuePairRecorder {
    fn id(&self) -> QueuePairId {
        self.note("id").id()
    }

    fn endpoint(&self) -> Endpoint {
        self.note("endpoint").endpoint()
    }

    fn pace(&self, bytes_per_second: Option<u64>) {
        self.note("pace").pace(bytes_per_second);
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        self.note("connect").connect(peer)
    }

    fn post(&self, request: WorkRequest) {
        self.note("post").post(request);
    }

    fn flush(&self) {
        self.note("flush").flush();
    }

    fn carrier(&self) -> Option<&'static str> {
        self.note("carrier");
        Some("recorded")
    }

    fn close(&self) {
        self.note("close").close();
    }
}

/// A decorator that overrides no more than it must to wrap queue pairs.
#[derive(Debug)]
struct Plain(Arc<dyn Fabric>);

impl FabricDecorator for Plain {
    fn inner(&self) -> &dyn Fabric {
        &*self.0
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let queue_pair = self.0.create_queue_pair(completions, config)?;
        Ok(queue_pair.map_raw(|inner| Arc::new(PlainQueuePair(inner))))
    }
}

struct PlainQueuePair(Arc<dyn RawQueuePair>);

impl QueuePairDecorator for PlainQueuePair {
    fn inner(&self) -> &dyn RawQueuePair {
        &*self.0
    }
}

/// Returns the methods that a trait of the crate declares.
fn methods_of(declaration: &str) -> BTreeSet<&'static str> {
    let source = include_str!("../../src/fabric.rs");
    let (_, body) = source.split_once(declaration).expect("the trait is declared there");
    let lines = body.lines().take_while(|line| *line != "}");
    let methods = lines.filter_map(|line| line.trim().strip_prefix("fn ")?.split('(').next());
    methods.collect()
}

/// Calls every method through `decorate` and checks that the inner fabric has seen each.
async fn forwards_all(decorate: impl Fn(Arc<dyn Fabric>) -> Arc<dyn Fabric>) {
    let (calls, queue_pair_calls) = (Calls::default(), Calls::default());
    let recorder = Arc::new(Recorder {
        inner: MemNetwork::new().fabric(),
        calls: calls.clone(),
        queue_pair_calls: queue_pair_calls.clone(),
    });
    let fabric = decorate(recorder);
    // Calls that created the decorator do not count.
    calls.lock().unwrap().clear();

    assert_eq!(fabric.capabilities().name, "mem");
    let queue = fabric.create_completion_queue(1024, CompletionMode::Event).unwrap();
    let queue_pair = || fabric.create_queue_pair(&queue.source(), QueuePairConfig::default()).unwrap();
    let (a, b) = (queue_pair(), queue_pair());
    fabric.environment().spawn(Box::pin(queue.drain()));
    fabric.connect_ahead("127.0.0.1:1", 1);
    let allocated = fabric.allocate(5).unwrap().into_mut().unwrap();
    let registered = fabric.register(Memory::from(b"hello".to_vec())).unwrap().into_shared();
    fabric.expose(Expose::Frozen(registered.clone())).unwrap();
    let share = fabric.share(&SharedObject::copy_of(b"shared").unwrap()).unwrap();
    assert_eq!(fabric.attach(share.descriptor()).await.unwrap()[..], *b"shared");

    assert_ne!(a.id(), b.id());
    a.pace(Some(1 << 30));
    let peer = |of: &QueuePair, role| Peer { endpoint: of.endpoint(), role, address: None };
    let (at_a, at_b) = join(a.connect(peer(&b, Role::Active)), b.connect(peer(&a, Role::Passive))).await;
    at_a.and(at_b).unwrap();
    assert_eq!(a.carrier(), Some("recorded"));
    let received = b.receive(allocated);
    let sent = a.send_with_more(registered, None);
    a.flush();
    assert_eq!(received.await.unwrap().buffer[..], *b"hello");
    a.close();
    drop(sent);

    assert_eq!(*calls.lock().unwrap(), methods_of("pub trait Fabric"));
    assert_eq!(*queue_pair_calls.lock().unwrap(), methods_of("pub trait RawQueuePair"));
}

#[tokio::test]
async fn a_plain_decorator_forwards_every_method() {
    forwards_all(|inner| Arc::new(Plain(inner))).await;
}

#[tokio::test]
async fn a_fault_fabric_forwards_every_method() {
    forwards_all(|inner| FaultFabric::new(inner, |_| Fault::None)).await;
}

#[tokio::test]
async fn a_trace_fabric_forwards_every_method() {
    forwards_all(|inner| TraceFabric::new(inner, |_| {})).await;
}

#[tokio::test]
async fn decorators_around_decorators_forward_every_method() {
    forwards_all(|inner| FaultFabric::new(TraceFabric::new(Arc::new(Plain(inner)), |_| {}), |_| Fault::None)).await;
}
