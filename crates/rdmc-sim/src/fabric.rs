//! The fabric `sim`: a modelled node's access to the network.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use rdmc_fabric::{
    Capabilities, Completed, CompletionMode, CompletionQueue, CompletionSource, Environment, Expose, ExposedRegion,
    Fabric, FabricError, Memory, MemoryRegion, QueuePair, QueuePairConfig, SoftwareCompletions,
};

use crate::environment::SimEnvironment;
use crate::model::WaitMode;
use crate::queue_pair::SimQueuePair;
use crate::simulation::{NodeIndex, lock};
use crate::world::World;

/// One node's access to a modelled network, made by [`World::fabric`].
pub struct SimFabric {
    world: World,
    node: NodeIndex,
    environment: Arc<SimEnvironment>,
}

impl SimFabric {
    pub(crate) fn new(world: World, node: NodeIndex) -> Self {
        let environment = Arc::new(SimEnvironment::new(world.clone(), node));
        Self { world, node, environment }
    }
}

impl fmt::Debug for SimFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimFabric").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Fabric for SimFabric {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("sim");
        // Bits flip only as an injected fault, and checking blocks takes no virtual time.
        capabilities.protects_blocks = true;
        let model = self.world.model();
        capabilities.needs_pacing = true;
        capabilities.port_rate = Some(model.port_mbps * 125_000 / model.payload_scale);
        capabilities.tells_near = model.nic.notice_bytes > 0;
        capabilities.completion_mode = match model.host.completion {
            WaitMode::Poll => CompletionMode::Poll,
            WaitMode::Hybrid => CompletionMode::HYBRID,
            WaitMode::Event => CompletionMode::Event,
        };
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        Ok(MemoryRegion::new(memory, Box::new(())))
    }

    /// Allocates on the heap: a world has very many small regions.
    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.register(Memory::from(vec![0; len]))
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        let exposures = &self.world.0.nodes[self.node.index()].exposures;
        Ok(exposures.expose(&*self.environment, memory))
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        let mode = match mode {
            CompletionMode::Poll => WaitMode::Poll,
            CompletionMode::Hybrid { .. } => WaitMode::Hybrid,
            _ => WaitMode::Event,
        };
        let thread = lock(&self.world.0.nodes[self.node.index()].host).add_thread();
        let inner = SoftwareCompletions::new(capacity);
        let source = Arc::new(SimCompletions { inner, mode, thread, world: self.world.clone(), node: self.node });
        // The model accounts for polling. A queue that really polled would stop virtual time.
        Ok(CompletionQueue::new(source, self.environment.clone(), CompletionMode::Event))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let raw = SimQueuePair::create(&self.world, self.node, &*self.environment, completions, config)?;
        Ok(QueuePair::new(raw, config))
    }
}

/// The completions of one queue, and the kind of waiting.
pub(crate) struct SimCompletions {
    inner: SoftwareCompletions,
    pub(crate) mode: WaitMode,
    /// The thread of the node's software that drains it.
    pub(crate) thread: usize,
    world: World,
    node: NodeIndex,
}

impl SimCompletions {
    /// Returns the source as a queue of this fabric; `None` for other fabrics.
    pub(crate) fn of(source: &Arc<dyn CompletionSource>) -> Option<&Self> {
        let any: &dyn std::any::Any = &**source;
        any.downcast_ref()
    }

    pub(crate) fn push(&self, completed: Completed) {
        self.inner.push(completed);
    }
}

impl CompletionSource for SimCompletions {
    fn poll(&self) -> Option<Completed> {
        let completed = self.inner.poll()?;
        self.world.0.begin_operation(self.node);
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

impl World {
    /// Delivers completions to a node's software at the time at which it acts on them.
    pub(crate) fn deliver(&self, node: NodeIndex, completions: &Arc<dyn CompletionSource>, done: Vec<Completed>) {
        let &SimCompletions { mode, thread, .. } =
            SimCompletions::of(completions).expect("checked when the queue pair was made");
        let now_ns = self.0.executor.now_ns();
        let acts_at_ns = {
            let mut random = lock(&self.0.random);
            let mut host = lock(&self.0.nodes[node.index()].host);
            host.thread(thread).take_completion(now_ns, mode, &self.0.model.host, &mut random)
        };
        let completions = completions.clone();
        let push = move || {
            let queue = SimCompletions::of(&completions).expect("checked when the queue pair was made");
            done.into_iter().for_each(|completed| queue.push(completed));
        };
        if acts_at_ns > now_ns { self.0.executor.call_at(acts_at_ns, push) } else { push() }
    }
}
