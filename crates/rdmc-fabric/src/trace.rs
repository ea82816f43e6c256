//! A decorator that reports posts and completions.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource};
use crate::decorator::{FabricDecorator, QueuePairDecorator};
use crate::environment::{Environment, Timestamp};
use crate::fabric::{Fabric, FabricError, QueuePairConfig, RawQueuePair};
use crate::queue_pair::QueuePair;
use crate::work::{Completed, Opcode, QueuePairId, Work, WorkCompletion, WorkRequest};

/// An event on a traced fabric.
#[derive(Clone, Copy, Debug)]
pub struct TraceEvent {
    /// The time, by the environment's clock.
    pub at: Timestamp,
    /// The event.
    pub kind: TraceKind,
}

/// The kinds of traced events.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TraceKind {
    /// A work request was posted. A request that a full queue refuses is not reported.
    Posted {
        /// The queue pair it was posted to.
        queue_pair: QueuePairId,
        /// The kind of work.
        opcode: Opcode,
        /// Length in bytes of the request's memory.
        len: usize,
        /// The request's immediate.
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
    /// Wraps `inner`. The tasks that post requests or drain a completion queue call `sink`, which must not block.
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

impl FabricDecorator for TraceFabric {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        let inner = self.inner.create_completion_queue(capacity, mode)?.source();
        let source = Arc::new(TraceSource { inner, tracer: self.tracer.clone() });
        Ok(CompletionQueue::new(source, self.inner.environment(), mode))
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

    fn advance(&self) {
        self.inner.advance();
    }

    fn has_news(&self) -> Option<bool> {
        self.inner.has_news()
    }

    fn attend(&self, polls: bool) {
        self.inner.attend(polls);
    }
}

struct TraceQueuePair {
    inner: Arc<dyn RawQueuePair>,
    tracer: Arc<Tracer>,
}

impl QueuePairDecorator for TraceQueuePair {
    fn inner(&self) -> &dyn RawQueuePair {
        &*self.inner
    }

    fn post(&self, request: WorkRequest) {
        let work = request.work();
        let imm = match work {
            Work::Send { imm, .. } | Work::Write { imm, .. } => *imm,
            _ => None,
        };
        let (queue_pair, opcode, len) = (self.inner.id(), work.opcode(), work.len());
        self.tracer.note(TraceKind::Posted { queue_pair, opcode, len, imm });
        self.inner.post(request);
    }
}
