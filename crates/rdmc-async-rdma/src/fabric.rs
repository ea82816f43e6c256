//! The fabric `async-rdma` and its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{
    Capabilities, CompletionMode, CompletionQueue, CompletionSource, Environment, Expose, ExposedRegion, Fabric,
    FabricError, Memory, MemoryRegion, QueuePair, QueuePairConfig, Rendezvous, SoftwareCompletions, TokioEnvironment,
};
use tokio::sync::Semaphore;

use crate::device::Device;
use crate::error::AsyncRdmaError;
use crate::memory::{self, Exposed};
use crate::queue_pair::AsyncRdmaQueuePair;

/// Settings of an [`AsyncRdmaFabric`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AsyncRdmaConfig {
    /// The device's name, such as `mlx5_0`. Default `None`, the first one.
    pub device: Option<String>,
    /// The port's number, from 1. Default 1.
    pub port: u8,
    /// The address's index in the port's table. Default 1, which on Soft-RoCE is the first IPv4 address.
    pub gid_index: u8,
    /// Bytes of a packet: a power of two from 256 to 4096 that the port carries, the same at all nodes. Default 1024,
    /// the largest that fits an Ethernet frame of 1500 bytes.
    pub packet_len: u16,
    /// How long a packet may go unacknowledged before it is retransmitted; rounded up to 4.096 µs times a power of two.
    /// Default 250 ms.
    pub acknowledgement_timeout: Duration,
    /// Most retransmissions of a packet before the connection is lost, at most 7. Default 6, since Soft-RoCE takes 7
    /// for no limit.
    pub retries: u8,
    /// Most queue pairs at once. They share a completion queue with 33 entries for each. Default 900, which fits
    /// Soft-RoCE's limit of 32767 entries.
    pub queue_pairs_max: u32,
}

impl Default for AsyncRdmaConfig {
    fn default() -> Self {
        Self {
            device: None,
            port: 1,
            gid_index: 1,
            packet_len: 1024,
            acknowledgement_timeout: Duration::from_millis(250),
            retries: 6,
            queue_pairs_max: 900,
        }
    }
}

/// One node's access to an RDMA network through `async-rdma`.
///
/// Must be made and used inside one Tokio runtime with I/O and time enabled.
pub struct AsyncRdmaFabric {
    shared: Arc<Shared>,
}

/// What the fabric and its queue pairs share.
pub(crate) struct Shared {
    pub(crate) device: Arc<Device>,
    pub(crate) config: AsyncRdmaConfig,
    pub(crate) environment: Arc<TokioEnvironment>,
    pub(crate) rendezvous: Arc<Rendezvous>,
    /// Room in the device's completion queue, in queue pairs.
    pub(crate) queue_pairs: Arc<Semaphore>,
}

impl AsyncRdmaFabric {
    /// Opens the device that the configuration names.
    ///
    /// # Cancel safety
    /// If the future is dropped, the device is closed.
    ///
    /// # Errors
    /// See [`AsyncRdmaError`].
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn open(config: AsyncRdmaConfig) -> Result<Arc<Self>, AsyncRdmaError> {
        Self::open_with_rendezvous(config, Rendezvous::new()).await
    }

    /// Opens the device like [`open`](Self::open), with a rendezvous that other fabrics of the node share. One of them
    /// listens for all.
    ///
    /// # Cancel safety
    /// As [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub async fn open_with_rendezvous(
        config: AsyncRdmaConfig,
        rendezvous: Arc<Rendezvous>,
    ) -> Result<Arc<Self>, AsyncRdmaError> {
        let device = Device::open(&config).await?;
        let environment = Arc::new(TokioEnvironment::with_data_acceptor(rendezvous.clone()));
        let queue_pairs = Arc::new(Semaphore::new(config.queue_pairs_max as usize));
        let shared = Shared { device, config, environment, rendezvous, queue_pairs };
        Ok(Arc::new(Self { shared: Arc::new(shared) }))
    }
}

impl fmt::Debug for AsyncRdmaFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncRdmaFabric").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Fabric for AsyncRdmaFabric {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("async-rdma");
        capabilities.message_len_max = MESSAGE_LEN_MAX as u64;
        capabilities.registers_cheaply = false;
        capabilities.needs_pacing = true;
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.shared.environment.clone()
    }

    /// Takes memory without registering it. `async-rdma` registers only what it allocates, so each request on this
    /// memory is copied.
    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        Ok(MemoryRegion::new(memory, Box::new(())))
    }

    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        memory::allocate(&self.shared.device, len)
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        Ok(ExposedRegion::new(Box::new(Exposed::new(&self.shared.device, memory)?)))
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        Ok(CompletionQueue::new(Arc::new(SoftwareCompletions::new(capacity)), self.environment(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        Ok(QueuePair::new(AsyncRdmaQueuePair::create(&self.shared, completions, config)?, config))
    }
}

/// Longest message in bytes: `async-rdma` counts in 32 bits, and devices take 2 GiB or a little less.
pub(crate) const MESSAGE_LEN_MAX: usize = 1 << 30;
