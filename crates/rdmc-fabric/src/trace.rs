//! A decorator that tells what is posted and what completes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource};
use crate::environment::{Environment, Timestamp};
use crate::fabric::{Capabilities, ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig, RawQueuePair};
use crate::memory::{AttachError, Buffer, Memory, MemoryRegion, ObjectDescriptor, ObjectShare, SharedObject};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion};
use crate::work::{Completed, Opcode, QueuePairId, Work, WorkCompletion, WorkRequest};

/// Something that happened on a traced fabric.
#[derive(Clone, Copy, Debug)]
pub struct TraceEvent {
    /// When, by the environment's clock.
    pub at: Timestamp,
    /// What.
    pub kind: TraceKind,
}

/// The kinds of traced events.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TraceKind {
    /// A work request was posted. Requests refused because the queue was full never are.
    Posted {
        /// The queue pair it was posted to.
        queue_pair: QueuePairId,
        /// What is asked.
        opcode: Opcode,
        /// Length in bytes of the memory that goes with it.
        len: usize,
        /// The immediate that goes with it.
        imm: Option<u32>,
    },
    /// A work completion was taken from its queue.
    Completed(WorkCompletion),
}

/// A fabric that reports: wraps another one and calls `sink` for every post and every completion.
///
/// # Examples
/// ```
/// use std::sync::mpsc;
/// use rdmc_fabric::{MemNetwork, TraceFabric};
///
/// let (events, trace) = mpsc::channel();
/// let fabric = TraceFabric::new(MemNetwork::new().fabric(), move |event| {
///     let _ = events.send(event);
/// });
/// # drop((fabric, trace));
/// ```
pub struct TraceFabric {
    inner: Arc<dyn Fabric>,
    tracer: Arc<Tracer>,
}

struct Tracer {
    environment: Arc<dyn Environment>,
    sink: Box<dyn Fn(TraceEvent) + Send + Sync>,
}

impl Tracer {
    fn note(&self, kind: TraceKind) {
        (self.sink)(TraceEvent { at: self.environment.now(), kind });
    }
}

impl TraceFabric {
    /// Wraps `inner`; `sink` is called by whoever posts and by whoever drains a completion queue, and must not block.
    ///
    /// Queue pairs of this fabric take completion queues of this fabric, not of `inner`.
    pub fn new(inner: Arc<dyn Fabric>, sink: impl Fn(TraceEvent) + Send + Sync + 'static) -> Arc<Self> {
        let tracer = Tracer { environment: inner.environment(), sink: Box::new(sink) };
        Arc::new(Self { inner, tracer: Arc::new(tracer) })
    }
}

impl fmt::Debug for TraceFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceFabric").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Fabric for TraceFabric {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.inner.environment()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        self.inner.register(memory)
    }

    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.inner.allocate(len)
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        self.inner.expose(memory)
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        let inner = self.inner.create_completion_queue(capacity, mode)?.source();
        let source = Arc::new(TraceSource { inner, tracer: self.tracer.clone() });
        Ok(CompletionQueue::new(source, self.environment(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let any: &dyn Any = &**completions;
        let traced: &TraceSource = any.downcast_ref().ok_or(FabricError::ForeignCompletionQueue)?;
        let queue_pair = self.inner.create_queue_pair(&traced.inner, config)?;
        Ok(queue_pair.map_raw(|inner| Arc::new(TraceQueuePair { inner, tracer: self.tracer.clone() })))
    }

    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        self.inner.share(object)
    }

    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        self.inner.attach(object)
    }
}

struct TraceSource {
    inner: Arc<dyn CompletionSource>,
    tracer: Arc<Tracer>,
}

impl CompletionSource for TraceSource {
    fn poll(&self) -> Option<Completed> {
        let completed = self.inner.poll()?;
        self.tracer.note(TraceKind::Completed(completed.report()));
        Some(completed)
    }

    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.inner.poll_event(cx)
    }

    fn reserve(&self, entries: u32) -> Result<(), FabricError> {
        self.inner.reserve(entries)
    }

    fn release(&self, entries: u32) {
        self.inner.release(entries);
    }
}

struct TraceQueuePair {
    inner: Arc<dyn RawQueuePair>,
    tracer: Arc<Tracer>,
}

impl RawQueuePair for TraceQueuePair {
    fn id(&self) -> QueuePairId {
        self.inner.id()
    }

    fn endpoint(&self) -> Endpoint {
        self.inner.endpoint()
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        self.inner.connect(peer)
    }

    fn post(&self, request: WorkRequest) {
        let work = request.work();
        let imm = match work {
            Work::Send { imm, .. } | Work::Write { imm, .. } => *imm,
            _ => None,
        };
        let (queue_pair, opcode, len) = (self.id(), work.opcode(), work.len());
        self.tracer.note(TraceKind::Posted { queue_pair, opcode, len, imm });
        self.inner.post(request);
    }

    fn flush(&self) {
        self.inner.flush();
    }

    fn carrier(&self) -> Option<&'static str> {
        self.inner.carrier()
    }

    fn close(&self) {
        self.inner.close();
    }
}
