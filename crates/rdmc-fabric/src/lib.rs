//! The verbs vocabulary as async Rust.
//!
//! RDMA hardware is programmed by posting work requests to queue pairs and taking work completions from completion
//! queues. This crate says the same in Rust's terms:
//!
//! - a [`QueuePair`] posts sends, receives, one-sided writes and reads; each is an [`Operation`], a future;
//! - a [`CompletionQueue`], shared by many queue pairs, is a stream of [`WorkCompletion`]s; the one task that drains it
//!   resolves the operations through their wakers;
//! - a [`MemoryRegion`] is registered memory, lent out as [`BufferMut`]s that move into operations and come back as
//!   [`Buffer`]s; an [`ExposedRegion`] is memory that peers reach with a key;
//! - a [`Fabric`] makes all of these. [`MemFabric`] joins nodes of one process, `ShmFabric` (on Linux) processes of one
//!   host, [`TcpFabric`] nodes anywhere. Others live in crates of their own and pass the same conformance suite.
//!
//! What all fabrics promise is what reliable connections promise: first in, first out per queue pair; a receive
//! completes after its bytes are in place; a send completes when the other end has taken it; any error breaks the
//! queue pair, and a broken queue pair flushes everything posted, so that no future is left waiting.

mod completion;
#[cfg(feature = "conformance")]
pub mod conformance;
mod decorator;
mod environment;
mod fabric;
mod fault;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod mem;
mod memory;
mod queue_pair;
mod remote;
mod rendezvous;
#[cfg(target_os = "linux")]
mod shm;
mod software;
mod sync;
mod tcp;
#[cfg(target_os = "linux")]
mod tcp_shm;
pub mod tls;
mod trace;
mod work;

pub use completion::{CompletionMode, CompletionQueue, CompletionSource, SoftwareCompletions};
pub use decorator::{FabricDecorator, QueuePairDecorator};
pub use environment::{
    ControlListener, ControlStream, DataAcceptor, Displacement, Elapsed, Environment, RefusalLog, RefusalSum,
    StrangerPlace, Strangers, Timestamp, TokioEnvironment, UnknownNonce,
};
pub use fabric::{
    Capabilities, ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig, RawQueuePair, Role,
};
pub use fault::{Fault, FaultFabric, Posting};
pub use mem::{MemFabric, MemNetwork};
pub use memory::{
    AttachError, Buffer, BufferMut, Lender, Memory, MemoryRegion, ObjectDescriptor, ObjectShare, SharedObject,
    SharedObjectMut,
};
pub use queue_pair::{QueuePair, UNSIGNALED_MAX, next_queue_pair_id};
pub use remote::{Expose, ExposedMemory, ExposedRegion, RemoteAccess, RemoteMemory};
pub use rendezvous::{Meeting, MeetingPlace, Rendezvous};
#[cfg(target_os = "linux")]
pub use shm::ShmFabric;
pub use software::{ExposureGrant, Exposures, Pairing};
pub use tcp::{TcpConfig, TcpFabric};
#[cfg(target_os = "linux")]
pub use tcp_shm::TcpShmFabric;
pub use trace::{TraceEvent, TraceFabric, TraceKind};
pub use work::{
    Completed, Inspector, Nearing, NearlyDone, Opcode, Operation, QueuePairId, Received, Work, WorkCompletion,
    WorkError, WorkRequest,
};
