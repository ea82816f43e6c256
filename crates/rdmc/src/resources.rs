//! What a node has, and its groups share: mesh, fabric, completion queue, memory, counters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use futures::future::BoxFuture;
use rdmc_fabric::{CompletionSource, Environment, Fabric};

use crate::fabrics::FabricChoice;
use crate::failure::FailureCause;
use crate::id::GroupId;
use crate::mesh::Mesh;
use crate::mesh::listener::Listener;
use crate::pool::Pool;
use crate::round_trips::RoundTrips;
use crate::shares::PortShares;
use crate::stats::Counters;
use crate::sync::lock;
use rdmc_fabric::Scope;

/// What a node's groups share.
pub(crate) struct NodeResources {
    pub(crate) mesh: Mesh,
    pub(crate) fabric: Arc<dyn Fabric>,
    pub(crate) choice: Option<FabricChoice>,
    pub(crate) environment: Arc<dyn Environment>,
    pub(crate) completions: Arc<dyn CompletionSource>,
    /// Entries of the completion queue.
    pub(crate) completions_max: u32,
    pub(crate) pool: Pool,
    pub(crate) counters: Arc<Counters>,
    pub(crate) groups: OpenGroups,
    pub(crate) round_trips: RoundTrips,
    pub(crate) port: Arc<PortShares>,
    /// Kept while the node may be dialled.
    pub(crate) _listener: Option<Listener>,
    pub(crate) scope: Scope,
}

/// A group of a node, as far as the node's shutdown needs to know it.
pub(crate) trait OpenGroup: Send + Sync {
    fn id(&self) -> GroupId;

    /// Tells the others that this member cannot, or will not, go on.
    fn declare(&self, cause: FailureCause);

    /// Ends the group here, since its node leaves the mesh.
    fn depart(&self);

    /// Returns how the group ended; `None` if it has not.
    fn state(&self) -> Option<GroupEnding>;

    /// Waits until the group has ended.
    fn ended(&self) -> BoxFuture<'_, ()>;
}

/// How a group has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupEnding {
    Closed,
    Failed,
}

/// The groups of a node.
#[derive(Default)]
pub(crate) struct OpenGroups(Mutex<GroupRegistry>);

#[derive(Default)]
struct GroupRegistry {
    closed: bool,
    groups: BTreeMap<GroupId, Weak<dyn OpenGroup>>,
}

impl OpenGroups {
    /// Adds a group; returns false if the node takes no more groups.
    pub(crate) fn add(&self, group: Weak<dyn OpenGroup>, id: GroupId) -> bool {
        let mut registry = self.lock();
        registry.groups.retain(|_, known| known.strong_count() > 0);
        if !registry.closed {
            registry.groups.insert(id, group);
        }
        !registry.closed
    }

    /// Takes no more groups; returns the groups of the node.
    pub(crate) fn close(&self) -> Vec<Arc<dyn OpenGroup>> {
        let mut registry = self.lock();
        registry.closed = true;
        registry.groups.values().filter_map(Weak::upgrade).collect()
    }

    fn lock(&self) -> MutexGuard<'_, GroupRegistry> {
        lock(&self.0)
    }
}
