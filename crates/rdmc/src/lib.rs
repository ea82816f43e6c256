//! Reliable multicast of large objects, at the speed of the network, from async Rust.

#![forbid(unsafe_code)]

mod failure;
mod group;
mod mesh;
mod node;
mod pool;
mod scope;
mod stats;
mod transfer;

pub use failure::{FailureCause, GroupError, GroupFailure, SendError, StartError};
pub use group::receiver::{Delivery, Message, Offer, OfferReceiver, Receiver};
pub use group::sender::{Multicast, Payload, Sender};
pub use group::{GroupId, GroupSpec};
pub use mesh::invite::{Invitation, InviteError, InviteFailure, invite};
pub use mesh::listener::Listener;
pub use node::{Cluster, Node, NodeBuilder, NodeId};
pub use pool::PoolError;
pub use rdmc_fabric::{
    Buffer, BufferMut, CompletionMode, Elapsed, Fabric, MemFabric, MemNetwork, Memory, MemoryRegion, TcpConfig,
    TcpFabric,
};
pub use rdmc_schedule::{Algorithm, Hybrid, Racks, RacksError, Rank, ScheduleError, Spine};
pub use stats::{GroupStats, NodeStats};
