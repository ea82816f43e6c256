//! The traits between the runtime and the code that moves the bytes: the fabric and its queue pairs.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource};
use crate::environment::Environment;
use crate::memory::{AttachError, Buffer, Memory, MemoryRegion, ObjectDescriptor, ObjectShare, SharedObject};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion};
use crate::work::{QueuePairId, WorkRequest};

/// One node's access to a network: creates memory regions, completion queues and queue pairs.
///
/// A queue pair is reliable and connected: first in, first out. A receive completes after its bytes are in place, a
/// send when the other end has taken it. An error breaks the queue pair and flushes everything posted.
///
/// A fabric that wraps another one implements [`FabricDecorator`](crate::FabricDecorator) instead, which forwards every
/// method. The default methods below are for fabrics that move bytes themselves.
pub trait Fabric: Send + Sync + fmt::Debug {
    /// Returns what this fabric can do, as data.
    fn capabilities(&self) -> Capabilities;

    /// Returns the source of time, tasks, randomness and control connections for the code above.
    fn environment(&self) -> Arc<dyn Environment>;

    /// Registers memory.
    ///
    /// # Errors
    /// The device or the operating system refuses.
    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError>;

    /// Says that so many queue pairs will connect soon, as active ends, to the node that listens at `address`
    /// (`host:port`).
    ///
    /// A fabric that meets peers at that port opens connections now, so that a round trip passes meanwhile. Those that
    /// are not used within 5 s are closed. The default does nothing.
    fn connect_ahead(&self, address: &str, connections: u16) {
        let _ = (address, connections);
    }

    /// Allocates and registers `len` zeroed bytes, in the way that suits the fabric.
    ///
    /// # Errors
    /// As [`register`](Self::register), or the system is out of memory.
    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.register(Memory::anonymous(len).map_err(|source| FabricError::Memory { len, source })?)
    }

    /// Opens memory to one-sided operations of peers.
    ///
    /// # Errors
    /// The device refuses.
    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError>;

    /// Creates a completion queue with room for `capacity` completions.
    ///
    /// # Errors
    /// The capacity exceeds the device's limit.
    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError>;

    /// Creates a queue pair, not yet connected, whose completions go to `completions`.
    ///
    /// # Errors
    /// The completion queue has no room for the requested depths, or belongs to another fabric.
    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError>;

    /// Lets peers attach an object, if the fabric [shares objects](Capabilities::shares_objects).
    ///
    /// # Errors
    /// The fabric shares no objects, or the operating system refuses.
    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        let _ = object;
        Err(FabricError::Device { what: "a shared object", source: io::ErrorKind::Unsupported.into() })
    }

    /// Attaches an object that a peer shares, in at most 10 seconds. The result is the peer's memory, which no process
    /// can change.
    ///
    /// The caller checks the descriptor's length first: the object takes that much address space.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing stays mapped and no descriptor stays open.
    ///
    /// # Errors
    /// The peer cannot be asked or no longer shares the object. The peer's memory could still change or has another
    /// length. The operating system refuses to map it. The fabric shares no objects.
    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        let _ = object;
        let fabric = self.capabilities().name;
        Box::pin(async move { Err(AttachError::Unsupported { fabric }) })
    }
}

/// The properties of a fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The fabric's short name, such as `tcp`: 1 to 32 graphic ASCII characters.
    pub name: &'static str,
    /// The part of the network that the fabric reaches: 1 to 16 graphic ASCII characters. Nodes reach each other if
    /// they have the same value. `None` if all nodes with this fabric reach each other.
    pub reach: Option<String>,
    /// Longest message in bytes.
    pub message_len_max: u64,
    /// The best completion mode, used if the user chooses none.
    pub completion_mode: CompletionMode,
    /// Whether sending `Bytes` or mapped files needs no registration that costs time.
    pub registers_cheaply: bool,
    /// Whether mapped files can be received into. A device that writes by itself cannot inform the file system.
    pub receives_into_files: bool,
    /// Whether the fabric itself detects bits that change between two hosts' memories. It has the same value on every
    /// node, because the members of a group must come to the same conclusion.
    pub protects_blocks: bool,
    /// Most entries of a completion queue.
    pub completions_max: u32,
    /// Most bytes that are worth having under way to one neighbour. Where processors copy them, more bytes displace
    /// each other from the caches. Fabrics that [save completions](crate::QueuePair::send_with_more) set no bound.
    pub ahead_bytes: u64,
    /// The rate of the node's port in bytes per second in each direction, where the fabric knows it.
    pub port_rate: Option<u64>,
    /// Whether the fabric tells when work is [nearly done](crate::Operation::nearly_done), before its completion.
    /// Devices do not.
    pub tells_near: bool,
    /// Whether the fabric sends at the rate of its port, however little the path carries, and repeats what was lost, as
    /// devices do. On long paths somebody above it should pace what it sends.
    pub needs_pacing: bool,
    /// Whether a lost packet slows a queue pair down for many round trips, as it does with most congestion controls of
    /// TCP. On long paths several queue pairs then carry more than a single one does.
    pub yields_to_loss: bool,
    /// Whether peers can have [objects](SharedObject) in common. A fabric that chooses a
    /// [carrier](crate::QueuePair::carrier) shares objects with the peers that shared memory carries, any other fabric
    /// with all peers.
    pub shares_objects: bool,
}

impl Capabilities {
    /// Returns what nodes compare to find a fabric that both have: the name, and the [reach](Self::reach) if it has
    /// one.
    pub fn place(&self) -> String {
        match &self.reach {
            Some(reach) => format!("{}/{reach}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Describes a fabric; fabrics call it.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            reach: None,
            message_len_max: u64::MAX,
            completion_mode: CompletionMode::Event,
            registers_cheaply: true,
            receives_into_files: true,
            protects_blocks: false,
            completions_max: u32::MAX,
            ahead_bytes: u64::MAX,
            port_rate: None,
            tells_near: false,
            needs_pacing: false,
            yields_to_loss: false,
            shares_objects: false,
        }
    }
}

/// The limits of one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairConfig {
    /// Most sends, writes and reads outstanding at once.
    pub send_depth: u32,
    /// Most receives outstanding at once.
    pub receive_depth: u32,
    /// How long a peer's send waits for a receive to be posted here.
    pub receiver_not_ready: Duration,
    /// Whether long sends will come soon, so that the path may be made ready for them. Default false.
    ///
    /// On [`TcpFabric`](crate::TcpFabric) it means [padding](crate::TcpConfig::padded_from), elsewhere nothing.
    pub warm_up: bool,
}

impl QueuePairConfig {
    /// Returns the most requests of both kinds outstanding at once, which is also the number of completions to reserve.
    pub fn requests_max(&self) -> u32 {
        self.send_depth.saturating_add(self.receive_depth)
    }
}

impl Default for QueuePairConfig {
    /// 128 requests of each kind; a peer's send waits one second for a receive.
    fn default() -> Self {
        Self { send_depth: 128, receive_depth: 128, receiver_not_ready: Duration::from_secs(1), warm_up: false }
    }
}

/// The address of a queue pair: opaque to all but its fabric, and secret, since it grants access to the queue pair.
///
/// It travels through the control plane only.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint(Vec<u8>);

impl Endpoint {
    /// Longest encoded endpoint in bytes.
    pub const LEN_MAX: usize = 256;

    /// Wraps bytes from a fabric or from the control plane.
    ///
    /// # Errors
    /// [`ConnectError::BadEndpoint`] if there are more than [`LEN_MAX`](Self::LEN_MAX).
    pub fn new(bytes: Vec<u8>) -> Result<Self, ConnectError> {
        if bytes.len() <= Self::LEN_MAX { Ok(Self(bytes)) } else { Err(ConnectError::BadEndpoint) }
    }

    /// Returns the bytes, for the control plane.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({} bytes)", self.0.len())
    }
}

/// Which end opens the connection, where one end does; the two ends of a pair differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// This end opens it.
    Active,
    /// The other end opens it.
    Passive,
}

/// The other end of a connection that is to be made.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The address of its queue pair.
    pub endpoint: Endpoint,
    /// Which end opens the connection.
    pub role: Role,
    /// The address at which the control plane reaches the peer, for endpoints that do not know their own.
    pub address: Option<IpAddr>,
}

/// A queue pair as a fabric implements it; users hold a [`QueuePair`].
///
/// A queue pair that wraps another one implements [`QueuePairDecorator`](crate::QueuePairDecorator) instead.
pub trait RawQueuePair: Send + Sync {
    /// Returns the number that its completions carry.
    fn id(&self) -> QueuePairId;

    /// Returns the address of this end.
    fn endpoint(&self) -> Endpoint;

    /// Bounds the bytes of payload that leave in a second, from when the pair is connected. A fabric that cannot does
    /// nothing.
    fn pace(&self, bytes_per_second: Option<u64>) {
        let _ = bytes_per_second;
    }

    /// Connects to the peer.
    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>>;

    /// Posts a work request. Receives may be posted before the connection is made. A broken queue pair flushes
    /// everything posted to it.
    fn post(&self, request: WorkRequest);

    /// Sends the requests that were held back because [more follow](WorkRequest::has_more_behind).
    fn flush(&self) {}

    /// Returns the name of the fabric that carries this queue pair, once it is connected. `None` if the fabric does not
    /// choose a carrier for each pair.
    fn carrier(&self) -> Option<&'static str> {
        None
    }

    /// Breaks the queue pair: everything posted is flushed, and the peer learns of it.
    fn close(&self);
}

/// A fabric refused to create an object or a memory region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The completion queue could overflow; make it larger.
    #[error("completion queue of {capacity} entries has {reserved} reserved and no room for {wanted} more")]
    CompletionQueueFull {
        /// All entries.
        capacity: u32,
        /// Entries that other queue pairs have reserved.
        reserved: u32,
        /// Entries that the new queue pair needs.
        wanted: u32,
    },
    /// Memory could not be allocated or registered.
    #[error("{len} bytes of memory could not be allocated or registered")]
    Memory {
        /// Bytes asked for.
        len: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The completion queue belongs to another fabric.
    #[error("the completion queue belongs to another fabric")]
    ForeignCompletionQueue,
    /// The request exceeds a limit of the device; the caller must request less.
    #[error("{wanted} {what} requested, but the device offers {max}")]
    Limit {
        /// The limited resource.
        what: &'static str,
        /// The amount requested.
        wanted: u64,
        /// The limit.
        max: u64,
    },
    /// The device refused to create a resource.
    #[error("the device refused to make {what}")]
    Device {
        /// The resource.
        what: &'static str,
        /// The device's error.
        source: io::Error,
    },
}

/// A queue pair could not be connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The endpoint is not one of this fabric; the peer uses another fabric or another version.
    #[error("the peer's endpoint is not one of this fabric")]
    BadEndpoint,
    /// The peer is not there or refused the connection.
    #[error("the peer could not be reached")]
    Unreachable(#[source] io::Error),
    /// The peer did not prove that it is the one expected.
    #[error("the peer did not present the expected nonce")]
    BadNonce,
    /// The peer encrypts its data connections, this end does not.
    #[error("the peer encrypts its data connections and this node does not: both must, or neither")]
    PeerEncrypting,
    /// This end encrypts its data connections, the peer does not.
    #[error("this node encrypts its data connections and the peer does not: both must, or neither")]
    PeerNotEncrypting,
    /// The two ends did not agree on an encrypted connection.
    #[error("the connection could not be encrypted")]
    Encryption(#[source] io::Error),
    /// The queue pair is connected, closed or broken already.
    #[error("the queue pair is not in a state to be connected")]
    WrongState,
    /// The peer must accept the connection, but its fabric does not listen.
    #[error("the peer's fabric listens at no address; all fabrics of a node must share one rendezvous")]
    PeerNotListening,
    /// This end must accept the connection, but does not listen.
    #[error("this node listens at no address, so no peer can connect to it")]
    NotListening,
}
