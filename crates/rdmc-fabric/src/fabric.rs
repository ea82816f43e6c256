//! What a fabric is: the one trait between the runtime and whatever moves the bytes.

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

/// One node's access to a network: makes memory regions, completion queues and queue pairs.
///
/// A queue pair is reliable and connected: first in, first out; a receive completes after its bytes are in place; a
/// send completes when the other end has taken it; an error breaks the queue pair and flushes everything posted.
///
/// A fabric that wraps another one implements [`FabricDecorator`](crate::FabricDecorator) instead, which forwards every
/// method. The default methods below are for fabrics that move bytes themselves.
pub trait Fabric: Send + Sync + fmt::Debug {
    /// Returns what this fabric can do, as data.
    fn capabilities(&self) -> Capabilities;

    /// Returns where code above gets time, tasks, randomness and control connections.
    fn environment(&self) -> Arc<dyn Environment>;

    /// Registers memory.
    ///
    /// # Errors
    /// The device's or the operating system's refusal.
    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError>;

    /// Allocates and registers `len` zeroed bytes, in the way that suits the fabric.
    ///
    /// # Errors
    /// As [`register`](Self::register), or out of memory.
    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.register(Memory::anonymous(len).map_err(|source| FabricError::Memory { len, source })?)
    }

    /// Opens memory to one-sided operations of peers.
    ///
    /// # Errors
    /// The device's refusal.
    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError>;

    /// Makes a completion queue with room for `capacity` completions.
    ///
    /// # Errors
    /// The capacity exceeds what the device offers.
    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError>;

    /// Makes a queue pair, not yet connected, whose completions go to `completions`.
    ///
    /// # Errors
    /// The completion queue has no room for the depths asked for, or belongs to another fabric.
    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError>;

    /// Lets peers attach an object, where [objects are shared](Capabilities::shares_objects).
    ///
    /// # Errors
    /// The fabric shares none, or the operating system refuses.
    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        let _ = object;
        Err(FabricError::Device { what: "an object that is shared", source: io::ErrorKind::Unsupported.into() })
    }

    /// Attaches an object that a peer shares: the result is the peer's memory, which nobody can change. It takes 10 seconds at most.
    ///
    /// Whoever receives a descriptor looks at its length first: so many bytes of address space are taken.
    ///
    /// # Cancel safety
    /// Dropped, nothing is mapped and no descriptor left open.
    ///
    /// # Errors
    /// The peer cannot be asked or shares the object no more, what it hands over could still change or has another length, the
    /// operating system refuses to map it, or the fabric shares none.
    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        let _ = object;
        let fabric = self.capabilities().name;
        Box::pin(async move { Err(AttachError::Unsupported { fabric }) })
    }
}

/// What a fabric can do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The fabric's short name, such as `tcp`: 1 to 32 graphic ASCII characters.
    pub name: &'static str,
    /// Which other nodes can be reached, if not all that have the same fabric: those that say the same here. 1 to 16 graphic
    /// ASCII characters.
    pub reach: Option<String>,
    /// Longest single transfer in bytes.
    pub message_len_max: u64,
    /// How completions are best waited for, where the user does not say.
    pub completion_mode: CompletionMode,
    /// Whether sending `Bytes` or mapped files needs no registration worth mentioning.
    pub registers_cheaply: bool,
    /// Whether mapped files can be received into: a device that writes by itself cannot tell a file system so.
    pub receives_into_files: bool,
    /// Whether the fabric itself finds bits that change on the way between two hosts' memories. What it says is the same on
    /// every node, since members of a group must come to the same conclusion.
    pub protects_blocks: bool,
    /// Most entries of a completion queue.
    pub completions_max: u32,
    /// Bytes that are worth having under way to one neighbour. Where processors copy them, more of them displace each other
    /// from the caches. Fabrics that [save completions](crate::QueuePair::send_with_more) leave it unbounded.
    pub ahead_bytes: u64,
    /// Whether peers can have [objects](SharedObject) in common: those to whom queue pairs are [carried](crate::QueuePair::carrier)
    /// by shared memory, or all where the fabric does not choose.
    pub shares_objects: bool,
}

impl Capabilities {
    /// Describes a fabric; called by fabrics.
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
    /// How long a send of the peer waits here for a receive to be posted.
    pub receiver_not_ready: Duration,
}

impl QueuePairConfig {
    /// Returns how many requests can be outstanding at once, of either kind: as many completions have to find room.
    pub fn requests_max(&self) -> u32 {
        self.send_depth.saturating_add(self.receive_depth)
    }
}

impl Default for QueuePairConfig {
    /// 128 requests on either side; a peer's send waits one second for a receive.
    fn default() -> Self {
        Self { send_depth: 128, receive_depth: 128, receiver_not_ready: Duration::from_secs(1) }
    }
}

/// Where a queue pair can be reached: opaque to all but its fabric, and secret, since it lets in whoever knows it.
///
/// Travels through the control plane only.
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

/// Which end opens the connection, where the fabric has such a thing; the two ends of a pair differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// This end opens it.
    Active,
    /// The other end opens it.
    Passive,
}

/// The other end of a connection to be made.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Where its queue pair can be reached.
    pub endpoint: Endpoint,
    /// Which end opens the connection.
    pub role: Role,
    /// The address under which the control plane reaches the peer, for endpoints that do not know their own.
    pub address: Option<IpAddr>,
}

/// A queue pair as a fabric implements it; [`QueuePair`] is what users hold.
///
/// A queue pair that wraps another one implements [`QueuePairDecorator`](crate::QueuePairDecorator) instead.
pub trait RawQueuePair: Send + Sync {
    /// Returns the number that its completions carry.
    fn id(&self) -> QueuePairId;

    /// Returns where this end can be reached.
    fn endpoint(&self) -> Endpoint;

    /// Connects to the peer.
    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>>;

    /// Takes a work request. Receives may be posted before the connection is made; anything posted to a broken queue
    /// pair is flushed.
    fn post(&self, request: WorkRequest);

    /// Lets out requests that were held back because [more were to come](WorkRequest::has_more_behind).
    fn flush(&self) {}

    /// Returns what carries it, where the fabric chooses that for each pair of ends: the name of another fabric, once it is
    /// connected.
    fn carrier(&self) -> Option<&'static str> {
        None
    }

    /// Breaks the queue pair: everything posted is flushed, the peer learns of it.
    fn close(&self);
}

/// A fabric refused to make something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The completion queue could overflow; make it larger.
    #[error("completion queue of {capacity} entries has {reserved} reserved and no room for {wanted} more")]
    CompletionQueueFull {
        /// Entries in all.
        capacity: u32,
        /// Entries reserved by other queue pairs.
        reserved: u32,
        /// Entries the new queue pair needs.
        wanted: u32,
    },
    /// Memory could not be allocated or registered.
    #[error("{len} bytes of memory could not be allocated or registered")]
    Memory {
        /// Bytes asked for.
        len: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The completion queue belongs to another fabric.
    #[error("the completion queue belongs to another fabric")]
    ForeignCompletionQueue,
    /// More was asked for than the device offers; ask for less.
    #[error("{wanted} {what} were asked for, the device offers {max}")]
    Limit {
        /// What there is too little of.
        what: &'static str,
        /// How much was asked for.
        wanted: u64,
        /// How much there is.
        max: u64,
    },
    /// The device refused to make something.
    #[error("the device refused to make {what}")]
    Device {
        /// What it was to make.
        what: &'static str,
        /// What it said.
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
    /// The peer is not there or refused.
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
    /// The peer was to be connected to, but its fabric listens nowhere.
    #[error("the peer listens at no address; all fabrics of a node must share one rendezvous")]
    PeerNotListening,
    /// This end was to be connected to, but listens nowhere.
    #[error("this node listens at no address, so nobody can connect to it")]
    NotListening,
}
