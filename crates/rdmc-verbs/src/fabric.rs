//! The fabric `verbs` and its settings.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{
    Capabilities, CompletionMode, CompletionQueue, CompletionSource, Environment, Expose, ExposedRegion, Fabric,
    FabricError, Memory, MemoryRegion, QueuePair, QueuePairConfig, Rendezvous, TokioEnvironment,
};
use tokio::sync::oneshot;

use crate::completion::Completions;
use crate::device::Device;
use crate::devices::{self, GidInfo};
use crate::error::VerbsError;
use crate::memory::{Exposed, Registration};
use crate::queue_pair::VerbsQueuePair;
use crate::sys;

/// Settings of a [`VerbsFabric`]. By default it chooses an active port, preferably one with RoCE v2 and an IPv4
/// address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsConfig {
    /// The device's name, such as `mlx5_0`. Default `None`, any device.
    pub device: Option<String>,
    /// The port's number, from 1. Default `None`, any active port.
    pub port: Option<u8>,
    /// The address's index in the port's table. Default `None`, the best address.
    pub gid_index: Option<u8>,
    /// The address that the port must have; for RoCE it is the address of its network interface. Default `None`, any
    /// address.
    pub address: Option<IpAddr>,
    /// How long a packet may go unacknowledged before it is retransmitted; rounded up to 4.096 µs times a power of two.
    ///
    /// Default 250 ms, which is rounded up to 268 ms. That is longer than any pause of a busy host, so a retransmission
    /// means a loss. At most 2.4 hours; longer values count as 2.4 hours.
    pub acknowledgement_timeout: Duration,
    /// Most retransmissions of a packet before the connection is lost, at most 7, the default. With it, an adapter
    /// notices in about two seconds that the peer's host or link is gone.
    ///
    /// Soft-RoCE takes 7 for no limit. So with 7 the fabric looks too: the connection is lost if no send completes for
    /// 30 seconds (or 64 acknowledgement timeouts if they are longer) and four more for each MB of the sixteen oldest
    /// sends. It does not look if the peer's [`receiver_not_ready`](rdmc_fabric::QueuePairConfig::receiver_not_ready)
    /// is longer than four seconds.
    pub retries: u8,
    /// Longest message in bytes that is copied into the work request instead of being fetched by the device. Default
    /// 64, which holds a grant. Most devices offer more, at the price of longer queues. If a device refuses this
    /// length, it sends nothing inline, and the fabric warns.
    pub inline_bytes: u32,
    /// The service level on InfiniBand, the priority on Ethernet, at most 15. Default 0.
    pub service_level: u8,
    /// The traffic class of global routes; for RoCE v2 it is the IP header's DSCP and ECN bits. Default 0.
    pub traffic_class: u8,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            device: None,
            port: None,
            gid_index: None,
            address: None,
            acknowledgement_timeout: Duration::from_millis(250),
            retries: 7,
            inline_bytes: 64,
            service_level: 0,
            traffic_class: 0,
        }
    }
}

/// One node's access to an RDMA network through libibverbs.
///
/// It must be created and used inside one Tokio runtime with I/O and time enabled. Control connections and the meetings
/// of queue pairs use TCP; blocks and grants use the device.
pub struct VerbsFabric {
    shared: Arc<Shared>,
}

/// The state that the fabric and its queue pairs share.
pub(crate) struct Shared {
    pub(crate) device: Arc<Device>,
    pub(crate) config: VerbsConfig,
    pub(crate) environment: Arc<TokioEnvironment>,
    pub(crate) rendezvous: Arc<Rendezvous>,
    /// Dropping it ends the task that takes the device's events.
    _events: oneshot::Sender<()>,
}

impl VerbsFabric {
    /// Opens the device that the configuration names, or else the best one.
    ///
    /// # Errors
    /// See [`VerbsError`]; each error names the problem and the remedy.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn open(config: VerbsConfig) -> Result<Arc<Self>, VerbsError> {
        Self::open_with_rendezvous(config, Rendezvous::new())
    }

    /// Opens the device like [`open`](Self::open), with a rendezvous that other fabrics of the node share. One of them
    /// listens for all.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn open_with_rendezvous(config: VerbsConfig, rendezvous: Arc<Rendezvous>) -> Result<Arc<Self>, VerbsError> {
        if config.retries > 7 {
            return Err(VerbsError::Setting { setting: "retries", bounds: "at most 7" });
        }
        if config.service_level > 15 {
            return Err(VerbsError::Setting { setting: "service_level", bounds: "at most 15" });
        }
        let library = sys::library().map_err(|reason| VerbsError::Library { reason })?;
        let choice = devices::choose(&devices::devices().map_err(VerbsError::System)?, &config)?;
        let device = Device::open(library, choice)?;
        let events = device.take_events().map_err(|source| {
            let device = device.choice.device.clone();
            VerbsError::Device { device, action: "await the device's events", source }
        })?;
        let environment = Arc::new(TokioEnvironment::with_data_acceptor(rendezvous.clone()));
        let (choice, port) = (&device.choice, &device.port);
        tracing::info!(
            device = choice.device,
            port = choice.port,
            gid = %choice.gid.address(),
            kind = %choice.gid.kind,
            mtu = 128u32 << port.active_mtu.clamp(1, 5),
            "RDMA device opened"
        );
        let shared = Shared { device, config, environment, rendezvous, _events: events };
        Ok(Arc::new(Self { shared: Arc::new(shared) }))
    }

    /// Returns the name of the device in use.
    pub fn device(&self) -> &str {
        &self.shared.device.choice.device
    }

    /// Returns the number of the port in use.
    pub fn port(&self) -> u8 {
        self.shared.device.choice.port
    }

    /// Returns the address in use.
    pub fn gid(&self) -> GidInfo {
        self.shared.device.choice.gid
    }
}

impl fmt::Debug for VerbsFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsFabric").field("choice", &self.shared.device.choice).finish_non_exhaustive()
    }
}

impl Fabric for VerbsFabric {
    fn capabilities(&self) -> Capabilities {
        let device = &self.shared.device;
        let mut capabilities = Capabilities::new("verbs");
        capabilities.message_len_max = device.port.max_msg_sz.into();
        capabilities.completion_mode = CompletionMode::Event;
        capabilities.registers_cheaply = false;
        capabilities.receives_into_files = false;
        capabilities.needs_pacing = true;
        // Every packet carries a checksum of the bytes that no switch changes.
        capabilities.protects_blocks = true;
        capabilities.completions_max = u32::try_from(device.attributes.max_cqe).unwrap_or(0);
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.shared.environment.clone()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        let registration = Registration::new(&self.shared.device, &memory)?;
        Ok(MemoryRegion::new(memory, Box::new(registration)))
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        Ok(ExposedRegion::new(Box::new(Exposed::new(&self.shared.device, memory)?)))
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        let max = self.capabilities().completions_max;
        if capacity > max {
            let what = "entries of a completion queue";
            return Err(FabricError::Limit { what, wanted: capacity.into(), max: max.into() });
        }
        let source = Completions::create(&self.shared.device, capacity)?;
        Ok(CompletionQueue::new(Arc::new(source), self.environment(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let completions = Completions::of(completions)
            .filter(|found| found.is_of(&self.shared.device))
            .ok_or(FabricError::ForeignCompletionQueue)?;
        Ok(QueuePair::new(VerbsQueuePair::create(&self.shared, completions, config)?, config))
    }
}
