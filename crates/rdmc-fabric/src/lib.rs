//! The verbs vocabulary as async Rust.
//!
//! RDMA hardware is programmed by posting work requests to queue pairs and by taking work completions from completion
//! queues. This crate expresses that in Rust:
//!
//! - A [`QueuePair`] posts sends, receives, one-sided writes and reads. Each is an [`Operation`], a future.
//! - A [`CompletionQueue`], shared by many queue pairs, is a stream of [`WorkCompletion`]s. The one task that drains it
//!   resolves the operations through their wakers.
//! - A [`MemoryRegion`] is registered memory. It is lent out as [`BufferMut`]s, which move into operations and come
//!   back as [`Buffer`]s. An [`ExposedRegion`] is memory that peers reach with a key.
//! - A [`Fabric`] creates all of these. [`MemFabric`] joins nodes of one process, `ShmFabric` (on Linux) joins
//!   processes of one host, and [`TcpFabric`] joins nodes anywhere. Other fabrics are crates of their own and pass the
//!   same conformance suite.
//!
//! Every fabric makes the promises of reliable connections. A queue pair is first in, first out. A receive completes
//! after its bytes are in place, a send when the other end has taken it. Any error breaks the queue pair. A broken
//! queue pair flushes everything posted, so no future waits for ever.

mod completion;
#[cfg(feature = "conformance")]
pub mod conformance;
mod decorator;
mod environment;
mod fabric;
mod fault;
mod flows;
pub mod frames;
#[cfg(feature = "fuzzing")]
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
    ControlListener, ControlStream, DataAcceptor, Displacement, Elapsed, Environment, RefusalLog, RefusalSum, Scope,
    Spawner, StrangerPlace, Strangers, Timestamp, TokioEnvironment, UnknownNonce,
};
pub use fabric::{
    Capabilities, ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig, RawQueuePair, Role,
};
pub use fault::{Fault, FaultFabric, Posting};
pub use flows::{FlowSource, FlowSpec, FlowTarget, FlowVerb};
pub use mem::{MemFabric, MemNetwork};
pub use memory::{
    AllocatingAhead, AttachError, Buffer, BufferMut, Lender, Memory, MemoryRegion, ObjectDescriptor, ObjectShare,
    SharedObject, SharedObjectMut,
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
    Completed, Inspector, Nearing, NearlyDone, Opcode, Operation, QueuePairId, ReceiveOptions, Received, Work,
    WorkCompletion, WorkError, WorkRequest,
};
