//! Failures of groups, and errors of their handles.

use std::fmt;
use std::io;
use std::time::Duration;

use rdmc_fabric::FabricError;
use rdmc_schedule::{Rank, ScheduleError};
use serde::Serialize;

use super::continuation::RecoveryState;
use super::spec::{GroupSpec, InvalidSpec};
use crate::certificate::{Abbreviated, Certificate};
use crate::failure::FailedMember;
use crate::id::{GroupId, NodeId};
use crate::pool::PoolError;

/// The group failed: terminal, and the same for every survivor.
///
/// After a failure the group does no further operation. Groups without the members that failed are untouched (DSN §3).
/// Members that can still reach each other agree on the failure before any of them reports it.
///
/// It can be written, to a log for instance, but not read: only the member's own value can [recover](Self::recover).
#[derive(Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error(
    "group {} failed: {}{}{}",
    certificate.group,
    self.first(),
    self.more(),
    if *quorum { "" } else { "; most of its members cannot be reached" }
)]
#[non_exhaustive]
pub struct GroupFailure {
    /// The members that failed, the most telling causes first; never empty.
    pub failed: Vec<FailedMember>,
    /// Whether the members that agreed on this were a quorum: more than half of the members, or half of them with the
    /// root. A minority that is cut off names the members that it cannot reach; these may have agreed on another end.
    pub quorum: bool,
    /// Which member has which message. For members that failed it is often not known.
    pub certificate: Certificate,
    /// The state from which [`recover`](Self::recover) goes on.
    #[serde(skip)]
    pub(crate) recovery: RecoveryState,
}

impl GroupFailure {
    /// Returns the group's number.
    pub fn group(&self) -> GroupId {
        self.certificate.group
    }

    /// Returns the failed member with the most telling cause.
    pub fn first(&self) -> &FailedMember {
        self.failed.first().expect("a group fails because of a member")
    }

    /// Tells whether the member is one of those that failed.
    pub fn names(&self, member: Rank) -> bool {
        self.failed.iter().any(|failed| failed.member == member)
    }

    /// Returns for how long at least this member's own process did not run shortly before the group failed; `None` if
    /// it ran.
    ///
    /// A process does not run while it is stopped or suspended, while its machine is overloaded, or while its program
    /// keeps the runtime busy. If that takes two fifths of the [detection time](crate::NodeBuilder::detection), others
    /// may give the member up, and it may take those for lost that have done so. It is known within a detection time.
    /// Only this member knows it: it is not part of the agreement, and does not affect equality.
    pub fn stalled(&self) -> Option<Duration> {
        self.recovery.stalled()
    }

    fn more(&self) -> String {
        match self.failed.len() - 1 {
            0 => String::new(),
            1 => format!("; and {}", self.failed[1]),
            more => format!("; and {more} others"),
        }
    }
}

impl fmt::Debug for GroupFailure {
    /// Writes what a log line needs: of many failed members only how many there are, and the first and the last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupFailure")
            .field("failed", &Abbreviated(&self.failed))
            .field("quorum", &self.quorum)
            .field("certificate", &self.certificate)
            .finish_non_exhaustive()
    }
}

/// A group could not be created or joined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The list of members is empty or longer than a schedule allows, or the racks do not fit.
    #[error("invalid combination of members and algorithm")]
    Schedule(#[from] ScheduleError),
    /// A node is listed twice as a member.
    #[error("node {node} is a member twice")]
    DuplicateMember {
        /// The node.
        node: NodeId,
    },
    /// A member is not in this node's cluster.
    #[error("node {node} is not in the cluster")]
    UnknownNode {
        /// The node.
        node: NodeId,
    },
    /// The root joins, or another member creates: call the other method.
    #[error("this node is rank {rank}: rank 0 creates a group, every other member joins it")]
    WrongRole {
        /// This node's rank.
        rank: Rank,
    },
    /// This node is not in the list of members.
    #[error("this node ({node}) is not a member of the group")]
    NotMember {
        /// This node.
        node: NodeId,
    },
    /// The block size is zero or above the limit.
    #[error("block size of {bytes} bytes is not between 1 and {max}")]
    BlockSize {
        /// Bytes asked for.
        bytes: u64,
        /// Largest block size in bytes.
        max: u64,
    },
    /// The block size exceeds the longest message of the fabric: choose a smaller one.
    #[error("block size of {bytes} bytes exceeds the fabric {fabric}'s limit of {max} bytes")]
    BlockTooLong {
        /// Bytes asked for.
        bytes: u64,
        /// The fabric's longest message in bytes.
        max: u64,
        /// The fabric.
        fabric: &'static str,
    },
    /// The fabric cannot [share objects](crate::DeliveryMode::Shared): members must be on one host, on the fabric
    /// `shm`, or get private copies.
    #[error(
        "node {node} cannot share objects by the fabric {fabric}: let all members be processes of one host on the \
         fabric shm, or deliver private copies"
    )]
    SharesNoObjects {
        /// This node.
        node: NodeId,
        /// Its fabric.
        fabric: &'static str,
    },
    /// Shared objects have no parts to compare: leave [delta](crate::GroupSpec::delta) off, or deliver private copies.
    #[error("shared objects have no parts to compare: leave delta off, or deliver private copies")]
    SharedDelta,
    /// Shared objects bring their own memory: join without offers, or deliver private copies.
    #[error("shared objects bring their own memory: join the group without offers, or deliver private copies")]
    SharedOffers,
    /// The [ring](crate::GroupSpec::ring) has too few or too many slots, or slots of no bytes or too many.
    #[error(
        "a ring of {slots} slots of {bytes} bytes is not one of {} to {} slots of 1 to {} bytes",
        GroupSpec::RING_SLOTS_MIN,
        GroupSpec::RING_SLOTS_MAX,
        GroupSpec::RING_BYTES_MAX
    )]
    Ring {
        /// Slots asked for.
        slots: u32,
        /// Bytes of a slot asked for.
        bytes: u32,
    },
    /// Members of a [delta](crate::GroupSpec::delta) group compare blocks of every message: leave the ring off.
    #[error("members of a delta group compare the blocks of every message: leave delta or the ring off")]
    RingDelta,
    /// There are no [headers](crate::GroupSpec::headers) in [delta](crate::GroupSpec::delta) groups, and where members
    /// [share](crate::DeliveryMode::Shared) objects.
    #[error("delta groups and shared objects have no headers: leave headers off, or these")]
    Headers,
    /// The [share](crate::GroupSpec::share) is zero or too large.
    #[error("a share of {weight} is not between 1 and {max}")]
    Share {
        /// The weight.
        weight: u32,
        /// The largest one.
        max: u32,
    },
    /// At a [bound](crate::GroupSpec::rate_max) of zero bytes a second nothing is ever sent: leave it off.
    #[error("at 0 bytes a second nothing is ever sent: leave the bound off, or choose a rate")]
    RateMax,
    /// A group of this node has used the number before.
    #[error("group number {group} was used before")]
    GroupIdUsed {
        /// The number.
        group: GroupId,
    },
    /// The node is [shutting down](crate::Node::shutdown).
    #[error("the node is shutting down")]
    ShuttingDown,
    /// The fabric could not make queue pairs.
    #[error("the fabric refused a resource")]
    Fabric(#[from] FabricError),
    /// The group failed while it was formed.
    #[error(transparent)]
    Failed(#[from] GroupFailure),
}

impl From<InvalidSpec> for GroupError {
    fn from(invalid: InvalidSpec) -> Self {
        match invalid {
            InvalidSpec::BlockSize { bytes } => Self::BlockSize { bytes, max: GroupSpec::BLOCK_SIZE_MAX.into() },
            InvalidSpec::DuplicateMember { node } => Self::DuplicateMember { node },
            InvalidSpec::Ring { slots, bytes } => Self::Ring { slots, bytes },
            InvalidSpec::RingDelta => Self::RingDelta,
            InvalidSpec::Headers => Self::Headers,
            InvalidSpec::Share { weight } => Self::Share { weight, max: GroupSpec::SHARE_MAX },
            InvalidSpec::RateMax => Self::RateMax,
            InvalidSpec::SharedDelta => Self::SharedDelta,
        }
    }
}

/// A message was not sent completely.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The group failed; some members may have the message. [Recovering](GroupFailure::recover) completes it.
    #[error(transparent)]
    Failed(#[from] GroupFailure),
    /// The group failed before the message was queued: no member has any of it, and recovering does not send it.
    #[error("the message was not queued: {0}")]
    NotQueued(#[source] GroupFailure),
    /// The message has more than [`BLOCKS_MAX`](crate::GroupSpec::BLOCKS_MAX) blocks: choose a larger block size.
    #[error(
        "{size} bytes are more than {max} blocks of {block_size} bytes; choose blocks of {} bytes or more",
        size.div_ceil((*max).into())
    )]
    TooManyBlocks {
        /// Bytes of the message.
        size: u64,
        /// Bytes of a block.
        block_size: u32,
        /// Most blocks a message can have.
        max: u32,
    },
    /// The group was closed before the message was sent.
    #[error("the group was closed before the message was sent")]
    Closed,
    /// The members [share](crate::DeliveryMode::Shared) objects, and the message is not one: send a
    /// [`SharedObject`](rdmc_fabric::SharedObject), or form the group for private copies.
    #[error("the members of the group share objects: send a SharedObject, or form the group for private delivery")]
    NotAnObject,
    /// The group was formed without [headers](crate::GroupSpec::headers).
    #[error("the group has no headers: form it with GroupSpec::headers")]
    NoHeaders,
    /// The header is too long: put more into the message.
    #[error("a header of {bytes} bytes is longer than {max} bytes: put more of it into the message")]
    HeaderTooLong {
        /// Bytes of the header.
        bytes: usize,
        /// Most bytes of a header.
        max: usize,
    },
    /// The source of the message could not be read, or ended before the message. The message was not queued; the group
    /// goes on.
    #[error("the source of the message could not be read")]
    Unreadable(#[source] io::Error),
    /// The pool has no memory for a message that is read from a source.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The fabric could not register the memory or share the object.
    #[error("the memory to send could not be registered")]
    Memory(#[from] FabricError),
}
