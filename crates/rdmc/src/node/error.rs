//! Why a node could not be started.

use std::time::Duration;

use rdmc_fabric::FabricError;

use crate::detection::DetectionError;
use crate::id::NodeId;

/// A node could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// No fabric was chosen: call [`NodeBuilder::fabric`](crate::NodeBuilder::fabric).
    #[error("a node needs a fabric: choose one with NodeBuilder::fabric")]
    NoFabric,
    /// The node itself is not in the cluster.
    #[error("node {node} is not in its own cluster")]
    NotInCluster {
        /// The node.
        node: NodeId,
    },
    /// The detection time is too short or too long.
    #[error(transparent)]
    Detection(#[from] DetectionError),
    /// A node of a cluster formed by invitation was given another detection time than that of the inviting node.
    #[error("a detection time of {got:?} where the inviting node chose {invited:?} for all nodes")]
    DetectionInvited {
        /// The inviting node's.
        invited: Duration,
        /// The time asked for.
        got: Duration,
    },
    /// A port of 0 bytes a second carries nothing: leave [`NodeBuilder::port_rate`](crate::NodeBuilder::port_rate) off.
    #[error("a port of 0 bytes a second carries nothing: leave its rate off, or give the right one")]
    PortRate,
    /// The node cannot listen at its address.
    #[error("cannot listen at {address}")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// Some nodes did not connect in time.
    #[error(
        "no connection to {} within the time limit; last problem: {problem}",
        missing.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    Unreachable {
        /// The nodes that are missing.
        missing: Vec<NodeId>,
        /// The last problem with one of them.
        problem: String,
    },
    /// A node of a cluster formed by invitation gave up after all had accepted.
    #[error("node {node} gave up after all had accepted")]
    GaveUp {
        /// The node.
        node: NodeId,
    },
    /// This node was shut down, or dropped, before all were connected.
    #[error("the node was shut down before all were connected")]
    ShutDown,
    /// The fabric refused a resource.
    #[error("the fabric refused a resource")]
    Fabric(#[from] FabricError),
}
