//! The fabric `shm`: processes of one host, joined by shared memory.
//!
//! Memory that the fabric allocates lies in anonymous files, which peers map for reading. A request is an entry in a
//! ring of shared memory; it names the location of its bytes. The peer's copy engine, a thread of the fabric, copies
//! the bytes once, to their destination, and counts the entry. No end makes a system call for that unless the other end
//! sleeps. Bytes that the peer cannot map pass through a small staging memory. The peer reads files with system calls.
//!
//! Queue pairs meet over Unix sockets of the abstract namespace, which belong to no file system. Both ends must have
//! the same user and network namespace, and must know each other's nonce. If a process dies, the kernel ends its
//! connections. It frees the memory when no process has it mapped any more.
//!
//! Peers can read all memory that the fabric allocates, also that of other groups. Processes of one user can do so
//! anyway.

use std::fmt;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt};

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource, SoftwareCompletions};
use crate::environment::{Environment, TokioEnvironment};
use crate::fabric::{Capabilities, Fabric, FabricError, QueuePairConfig, RawQueuePair};
use crate::memory::{AttachError, Buffer, Memory, MemoryRegion, ObjectDescriptor, ObjectShare, SharedObject};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion};
use crate::rendezvous::Rendezvous;
use crate::software::Exposures;

mod arena;
mod attach;
mod bell;
mod copy;
mod engine;
mod host;
mod map;
mod node;
mod objects;
mod queue_pair;
pub(crate) mod ring;
pub(crate) mod wire;

use arena::SharedFile;
pub(crate) use host::Host;
use node::Node;
use objects::Objects;
use queue_pair::ShmQueuePair;

/// One node's access to other processes of its host by shared memory.
///
/// It must be used inside a Tokio runtime with I/O and time enabled. Its environment has control connections over TCP.
pub struct ShmFabric {
    node: Arc<Node>,
    environment: Arc<TokioEnvironment>,
    host: Host,
}

impl ShmFabric {
    /// Creates a fabric.
    ///
    /// # Errors
    /// [`FabricError::Device`] if the system has no anonymous files to share, or cannot tell which host this is.
    pub fn new() -> Result<Arc<Self>, FabricError> {
        Self::with_environment(Arc::new(TokioEnvironment::new()), Arc::default())
    }

    /// Creates a fabric for a node with several fabrics: its control connections arrive at the same port as the
    /// rendezvous's connections.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_rendezvous(rendezvous: Arc<Rendezvous>) -> Result<Arc<Self>, FabricError> {
        Self::with_environment(Arc::new(TokioEnvironment::with_data_acceptor(rendezvous)), Arc::default())
    }

    /// Creates a fabric that shares its exposed memory with other fabrics of the node.
    pub(crate) fn with_environment(
        environment: Arc<TokioEnvironment>,
        exposures: Arc<Exposures>,
    ) -> Result<Arc<Self>, FabricError> {
        let host = Host::this().map_err(|source| FabricError::Device { what: "a name of this host", source })?;
        let node = Node::new(exposures).map_err(|source| FabricError::Device { what: "shared memory", source })?;
        Ok(Arc::new(Self { node, environment, host }))
    }

    /// Returns this host.
    pub(crate) fn host(&self) -> Host {
        self.host
    }

    /// Starts to serve processes of this host, unless it has started before.
    fn start(&self) -> Result<(), FabricError> {
        let refused = |source| FabricError::Device { what: "a socket for processes of this host", source };
        self.node.start().map_err(refused)
    }

    /// Creates the source of a completion queue.
    pub(crate) fn completions(&self, capacity: u32) -> Arc<SoftwareCompletions> {
        Arc::new(SoftwareCompletions::new(capacity).driving(self.node.engine.clone()))
    }

    /// Creates a queue pair that reserves `reserved` completions.
    pub(crate) fn raw_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
        reserved: u32,
    ) -> Result<Arc<dyn RawQueuePair>, FabricError> {
        self.start()?;
        Ok(ShmQueuePair::create(self.node.clone(), &*self.environment, completions, config, reserved)?)
    }

    /// Returns the number of refused connections: from another user, without a valid nonce, or for memory that is not
    /// shared.
    pub fn refused_connections(&self) -> u64 {
        self.node.refused()
    }
}

impl fmt::Debug for ShmFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmFabric").finish_non_exhaustive()
    }
}

impl Fabric for ShmFabric {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("shm");
        capabilities.reach = Some(self.host.to_string());
        // Only the host's memory lies between the two ends.
        capabilities.protects_blocks = true;
        capabilities.ahead_bytes = AHEAD_BYTES;
        capabilities.tells_near = true;
        capabilities.shares_objects = true;
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        let shared = memory.file().and_then(|file| {
            let file =
                map::read_only(file).inspect_err(|error| tracing::debug!(%error, "a file is not shared")).ok()?;
            let file = SharedFile::new(&self.node.objects, file.into());
            Some(Shared::File { base: memory.as_ptr() as usize, file })
        });
        Ok(match shared {
            Some(shared) => MemoryRegion::new(memory, Box::new(shared)),
            None => MemoryRegion::new(memory, Box::new(())),
        })
    }

    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        let refused = |source| FabricError::Memory { len, source };
        if len < SHARED_LEN_MIN {
            return self.register(Memory::anonymous(len).map_err(refused)?);
        }
        let allocation = self.node.arena.allocate(len).map_err(refused)?;
        let (object, offset) = allocation.location();
        let (base, objects) = (allocation.as_mut_ptr() as usize, self.node.objects.clone());
        let shared = Shared::Memory { base, object, offset, objects };
        Ok(MemoryRegion::new(allocation.into_memory(len), Box::new(shared)))
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        Ok(self.node.exposures.expose(&*self.environment, memory))
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        Ok(CompletionQueue::new(self.completions(capacity), self.environment.clone(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let reserved = config.requests_max();
        let raw = self.raw_queue_pair(completions, config, reserved)?;
        Ok(QueuePair::new(raw, config))
    }

    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        self.start()?;
        Ok(attach::share(&self.node, object))
    }

    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        attach::attach(object).boxed()
    }
}

/// The fabric's registration of memory that peers can reach.
enum Shared {
    /// Memory that they map.
    Memory { base: usize, object: u64, offset: usize, objects: Arc<Objects> },
    /// A file that they read.
    File { base: usize, file: SharedFile },
}

impl Shared {
    /// Returns the object's number and the offset of `data` in it. Returns `None` if `data` lies outside this memory,
    /// if the memory is not shared in `objects`, or if `data` is too short to open a file for it.
    fn locate(&self, data: &Buffer, objects: &Arc<Objects>) -> Option<(u64, u64)> {
        let at = data.as_ptr() as usize;
        let (object, base, offset, shared_in) = match self {
            Self::Memory { base, object, offset, objects } => (*object, *base, *offset, objects),
            Self::File { .. } if data.len() < FILE_LEN_MIN => return None,
            Self::File { base, file } => (file.number, *base, 0, file.objects()),
        };
        let location = (object, (at.checked_sub(base)? + offset) as u64);
        Arc::ptr_eq(shared_in, objects).then_some(location)
    }
}

/// Most bytes that are worth having under way to one neighbour.
const AHEAD_BYTES: u64 = 16 << 20;
/// Shorter ranges of files are copied here, because the peer must request a file's descriptor before it can read.
const FILE_LEN_MIN: usize = 64 << 10;
/// Shorter memory is not shared: its bytes travel in entries.
const SHARED_LEN_MIN: usize = 4 << 10;
