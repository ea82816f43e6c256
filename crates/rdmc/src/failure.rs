//! What can go wrong, as values.

use rdmc_fabric::{ConnectError, FabricError};
use rdmc_schedule::{Rank, ScheduleError};
use serde::{Deserialize, Serialize};

use crate::group::GroupId;
use crate::node::NodeId;

/// Why a group ended before its time: terminal, and told to every survivor.
///
/// After a failure the group does no further operation; groups that do not contain the member are untouched
/// (DSN §3). The member that is named is the one that is gone or that could not go on, not the one that noticed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("group {group} failed: member {member} (node {node}) {cause}")]
pub struct GroupFailure {
    /// The group.
    pub group: GroupId,
    /// The member's rank.
    #[serde(with = "rank")]
    pub member: Rank,
    /// The member's node.
    pub node: NodeId,
    /// What happened to it.
    pub cause: FailureCause,
}

/// What happened to the member that a [`GroupFailure`] names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum FailureCause {
    /// Its connection was lost: it died, was cut off or ended without closing the group.
    #[error("was lost: its connection broke")]
    ConnectionLost,
    /// It dropped its handle of the group before the group was closed.
    #[error("left the group without closing it")]
    Abandoned,
    /// Its application refused a message.
    #[error("refused a message: {reason}")]
    Refused {
        /// What the application said.
        reason: String,
    },
    /// It did not take part in forming the group in time.
    #[error("did not join in time")]
    NotJoined,
    /// It formed the group with other members, another algorithm or another block size.
    #[error("has another specification of the group")]
    SpecMismatch,
    /// It sent what no member sends.
    #[error("broke the protocol: {what}")]
    Protocol {
        /// What was wrong.
        what: String,
    },
    /// It could not get memory or other resources for its part.
    #[error("ran out of resources: {what}")]
    Resources {
        /// What was missing.
        what: String,
    },
}

/// `Rank` on the wire: its number.
mod rank {
    use rdmc_schedule::Rank;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(rank: &Rank, serializer: S) -> Result<S::Ok, S::Error> {
        rank.0.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Rank, D::Error> {
        u32::deserialize(deserializer).map(Rank)
    }
}

/// A group could not be created or joined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The list of members is empty, has a node twice or is longer than a schedule allows; or the racks do not fit.
    #[error("the group's members and algorithm do not go together")]
    Schedule(#[from] ScheduleError),
    /// A node stands in the list of members twice.
    #[error("node {node} is a member twice")]
    DuplicateMember {
        /// The node.
        node: NodeId,
    },
    /// A member is not in the cluster this node belongs to.
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
    /// The block size is above what the fabric sends at once: choose a smaller one.
    #[error("block size of {bytes} bytes is more than the {max} that the fabric {fabric} sends at once")]
    BlockTooLong {
        /// Bytes asked for.
        bytes: u64,
        /// The fabric's longest message in bytes.
        max: u64,
        /// The fabric.
        fabric: &'static str,
    },
    /// The number was used by a group of this node before; numbers are not used twice.
    #[error("group number {group} was used before")]
    GroupIdUsed {
        /// The number.
        group: GroupId,
    },
    /// The fabric could not make queue pairs.
    #[error("the fabric refused a resource")]
    Fabric(#[from] FabricError),
    /// A neighbour could not be connected.
    #[error("member {member} could not be connected")]
    Connect {
        /// The neighbour.
        member: Rank,
        /// Why.
        source: ConnectError,
    },
    /// The group failed while it was formed.
    #[error(transparent)]
    Failed(#[from] GroupFailure),
}

/// A message was not sent to the end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The group failed; some members may have the message.
    #[error(transparent)]
    Failed(#[from] GroupFailure),
    /// The message has more than 2^32 − 1 blocks: choose a larger block size.
    #[error("a message of {size} bytes has more than {max} blocks of {block_size} bytes")]
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
    /// The memory could not be registered with the fabric.
    #[error("the memory to be sent could not be registered")]
    Memory(#[from] FabricError),
}

/// A node could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The node itself is not in the cluster.
    #[error("node {node} is not in the cluster it was given")]
    NotInCluster {
        /// The node.
        node: NodeId,
    },
    /// Nothing can listen at the node's address.
    #[error("cannot listen at {address}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// Some nodes did not connect in time.
    #[error("no connection to {} within the time limit; last problem: {problem}", missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))]
    Unreachable {
        /// The nodes that are missing.
        missing: Vec<NodeId>,
        /// The last problem that was seen with one of them.
        problem: String,
    },
    /// The fabric refused a resource.
    #[error("the fabric refused a resource")]
    Fabric(#[from] FabricError),
}

/// Tells an error with its causes, for those to whom only text can be passed on.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
