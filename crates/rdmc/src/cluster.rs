//! The nodes that know each other.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::NodeId;
use crate::security::{Fingerprint, Identities, Identity, host};

/// Lists the nodes that know each other, with the addresses of their control planes.
///
/// All nodes of a cluster need the same list. A process that has ended can be started again as the same node: the others
/// connect to it, and it can be in new groups. Two processes must not be one node at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    key: u128,
    pub(crate) nodes: BTreeMap<NodeId, String>,
    /// Names that are not the hosts of addresses.
    names: BTreeMap<NodeId, String>,
    /// The credential that node 0 has shown, if it has invited this one.
    inviting: Option<Fingerprint>,
}

impl Cluster {
    /// Makes a cluster of nodes listening at `host:port` addresses.
    ///
    /// # Examples
    /// ```
    /// let cluster = rdmc::Cluster::new([(0, "10.0.0.1:7400"), (1, "10.0.0.2:7400")]);
    /// assert_eq!(cluster.len(), 2);
    /// ```
    pub fn new<A: Into<String>>(nodes: impl IntoIterator<Item = (u32, A)>) -> Self {
        let nodes = nodes.into_iter().map(|(id, address)| (NodeId(id), address.into())).collect();
        Self::from_parts(0, nodes)
    }

    /// Sets the key that connections must show: clusters with different keys on the same machines do not mix.
    ///
    /// The key guards against mistakes alone. Without [`Security`](crate::Security) it crosses the network unencrypted.
    #[must_use]
    pub fn key(mut self, key: u128) -> Self {
        self.key = key;
        self
    }

    /// Sets the name that a node's certificate must have, a DNS name or an IP address; default: the host in its
    /// address.
    ///
    /// Nodes with the same name can stand in for each other. Without certificates names have no effect.
    ///
    /// # Examples
    /// ```
    /// use rdmc::{Cluster, NodeId};
    ///
    /// let two_on_a_host = Cluster::new([(0, "10.0.0.1:7400"), (1, "10.0.0.1:7401")])
    ///     .name(NodeId(0), "zero.example")
    ///     .name(NodeId(1), "one.example");
    /// # assert_eq!(two_on_a_host.len(), 2);
    /// ```
    #[must_use]
    pub fn name(mut self, node: NodeId, name: impl Into<String>) -> Self {
        self.names.insert(node, name.into());
        self
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Tells whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the nodes' numbers in ascending order.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.nodes.keys().copied().collect()
    }

    pub(crate) fn from_parts(key: u128, nodes: BTreeMap<NodeId, String>) -> Self {
        Self { key, nodes, names: BTreeMap::new(), inviting: None }
    }

    /// Binds node 0 to the credential that it showed when it invited.
    pub(crate) fn invited_by(mut self, inviting: Option<Fingerprint>) -> Self {
        self.inviting = inviting;
        self
    }

    /// Leaves out nodes that do not take part.
    pub(crate) fn without(mut self, missing: &BTreeSet<NodeId>) -> Self {
        self.nodes.retain(|node, _| !missing.contains(node));
        self
    }

    /// Returns the key that connections must show.
    pub(crate) fn shared_key(&self) -> u128 {
        self.key
    }

    /// Returns the identity that each node must prove.
    pub(crate) fn identities(&self) -> Identities {
        let identity = |(&node, address): (&NodeId, &String)| match self.inviting {
            Some(inviting) if node == NodeId(0) => (node, Identity::Certificate(inviting)),
            _ => (node, Identity::Name(self.names.get(&node).map_or(host(address), String::as_str).to_owned())),
        };
        self.nodes.iter().map(identity).collect()
    }
}
