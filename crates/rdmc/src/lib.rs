//! Reliable multicast of large objects, at the speed of the network, from async Rust.
//!
//! One member of a group, the root, sends. All others receive, and every receiver passes on the blocks that it has. So
//! the object reaches many members in hardly more time than one. This is RDMC (Behrens, Jha, Birman, Tremel, "RDMC: A
//! Reliable RDMA Multicast for Large Objects", DSN 2018): multicast out of reliable unicast, by schedules that every
//! member computes for itself.
//!
//! - A [`Node`] is a process's membership in a [`Cluster`] of nodes that know each other. A [`Fabric`] moves the bytes:
//!   [`TcpFabric`] anywhere, `ShmFabric` between processes of a Linux host, [`MemFabric`] inside a process, and those
//!   of other crates.
//! - A cluster is a list of addresses, or it is formed on the fly by [`invite`] and a [`Listener`]. These also choose
//!   the best of the [`Fabrics`] that all nodes have.
//! - A [`GroupSpec`] describes a group, and all its members know it. The root's handle is a [`Sender`]. The others have
//!   a [`Receiver`], a stream of [`Message`]s, or an [`OfferReceiver`], which supplies the memory for each message.
//!   Groups form concurrently and overlap freely.
//! - [`Sender::send`] returns the future of one multicast; it completes when the root's memory is free again. A
//!   [`BatchSender`] packs short messages. [`Sender::close`] succeeds if and only if every message reached every
//!   member.
//! - Every failure is one typed value, [`GroupFailure`]; every survivor gets the same.
//!
//! # Examples
//! Three members in one process; on several machines only the fabric and the addresses differ.
//! ```
//! use futures::StreamExt;
//! use rdmc::{Cluster, GroupSpec, MemNetwork, Node, NodeId};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let network = MemNetwork::new();
//! let cluster = Cluster::new([(0, "a"), (1, "b"), (2, "c")]);
//! let node = |id| Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric()).start();
//! let (a, b, c) = futures::try_join!(node(0), node(1), node(2))?;
//!
//! let spec = GroupSpec::new(1, cluster.nodes());
//! let (root, mut at_b, mut at_c) =
//!     futures::try_join!(a.create_group(spec.clone()), b.join_group(spec.clone()), c.join_group(spec))?;
//! root.send(vec![7; 5_000_000]).await?;
//! assert_eq!(at_b.next().await.expect("a message")?.len(), 5_000_000);
//! assert_eq!(at_c.next().await.expect("a message")?[4_999_999], 7);
//! futures::try_join!(root.close(), at_b.close(), at_c.close())?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod batch;
mod certificate;
mod checksum;
mod cluster;
mod count;
mod detection;
mod fabrics;
mod failure;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod id;
mod invite;
mod invite_failure;
mod mesh;
mod node;
mod pool;
mod resources;
mod round_trips;
mod security;
mod shares;
mod stats;
mod sync;
mod table;
mod transfer;
mod wire;
mod woken;

pub use batch::{BatchError, BatchReceiver, BatchSender};
pub use certificate::{Certificate, Digest, DigestHasher, MessageRecord};
pub use cluster::Cluster;
pub use detection::DetectionError;
pub use fabrics::{FabricChoice, Fabrics, FabricsError, PassedOver};
pub use failure::{FailedMember, FailureCause};
pub use group::GroupSpec;
pub use group::continuation::LostMessage;
pub use group::error::{GroupError, GroupFailure, SendError};
pub use group::offer::{Arrival, Message, Offer};
pub use group::reader::ArrivalReader;
pub use group::receipt::{Receipt, ReceiptError};
pub use group::receiver::{JoinGroup, OfferReceiver, Receiver};
pub use group::recovery::{Recover, Recovered, Recovery, RecoveryError};
pub use group::sender::{Multicast, Payload, Sender};
pub use group::spec::{Delivery, DeliveryMode, SlowReceivers};
pub use id::{GroupId, NodeId};
pub use invite::{Invitation, InvitationWithdrawn, InviteOptions, ReachedListeners, invite, reach_listeners};
pub use invite_failure::{InviteError, InviteFailure};
pub use mesh::listener::{Bind, Listener};
pub use mesh::members::{MemberEvent, MemberEvents};
pub use node::{Joining, Node, NodeBuilder, Shutdown, StartError};
pub use pool::PoolError;
pub use rdmc_fabric::{
    AllocatingAhead, Buffer, BufferMut, Capabilities, CompletionMode, Elapsed, Fabric, FabricError, MemFabric,
    MemNetwork, Memory, MemoryRegion, Rendezvous, SharedObject, SharedObjectMut, TcpConfig, TcpFabric,
};
#[cfg(target_os = "linux")]
pub use rdmc_fabric::{ShmFabric, TcpShmFabric};
pub use rdmc_schedule::{Algorithm, CostModel, Hybrid, Plan, Racks, RacksError, Rank, ScheduleError, Spine};
pub use security::{Distrust, Security, SecurityError};
pub use stats::{Corruption, GroupStats, ListenerStats, NodeStats};
pub use transfer::Progress;
