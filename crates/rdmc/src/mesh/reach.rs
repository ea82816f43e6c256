//! Which nodes this one reaches: waiting for them, and telling which are missing and why.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdmc_fabric::ControlStream;

use super::{Mesh, MeshState};
use crate::failure::FailureCause;
use crate::id::NodeId;

/// A node that takes connections, as seen when the last one was opened.
#[derive(Clone, Copy)]
pub(super) struct Reached {
    address: Option<IpAddr>,
    /// The operating system's measurement; `None` if it does not measure.
    round_trip: Option<Duration>,
}

impl Reached {
    pub(super) fn by(stream: &dyn ControlStream) -> Self {
        Self { address: stream.peer_address(), round_trip: stream.round_trip() }
    }
}

impl Mesh {
    /// Returns where a node listens, if the round trip to it is known and takes at least so long. Only for a node to
    /// which this one opens the connections.
    pub(crate) fn distant_peer(&self, node: NodeId, at_least: Duration) -> Option<SocketAddr> {
        let (_, port) = self.0.members.get(&node)?.rsplit_once(':')?;
        let address = self.reached_from(node, at_least)?.address?;
        Some(SocketAddr::new(address, port.parse().ok()?))
    }

    /// Tells whether the round trip to a node is known and takes at least so long. Only for a node to which this one
    /// opens the connections.
    pub(crate) fn is_distant(&self, node: NodeId, at_least: Duration) -> bool {
        self.reached_from(node, at_least).is_some()
    }

    fn reached_from(&self, node: NodeId, at_least: Duration) -> Option<Reached> {
        let reached = self.lock().reached.get(&node).copied()?;
        (reached.round_trip? >= at_least).then_some(reached)
    }

    /// Waits until every other node is connected.
    pub(crate) async fn complete(&self) {
        // Counted, since a node of a large cluster checks very often. The links are those of members.
        self.until(|state| state.links.len() + 1 >= self.0.members.len()).await;
    }

    /// Waits until a condition holds that changes with the connections.
    pub(super) async fn until(&self, condition: impl Fn(&MeshState) -> bool) {
        let mut changes = self.0.changes.subscribe();
        while !condition(&self.lock()) {
            changes.changed().await.expect("the sender lives in self");
        }
    }

    /// Waits until a node is connected, or this one has opened a connection to it.
    pub(crate) async fn contact_with(&self, node: NodeId) {
        self.until(|state| state.reached.contains_key(&node) || state.links.contains_key(&node)).await;
    }

    /// Waits until a node is connected.
    pub(crate) async fn connection_to(&self, node: NodeId) {
        self.until(|state| state.links.contains_key(&node)).await;
    }

    /// Waits until all these nodes are connected, or were and are lost.
    pub(crate) async fn connections_to(&self, nodes: &[NodeId]) {
        let was_met = |state: &MeshState, node| node == self.0.me || state.histories.contains_key(&node);
        self.until(|state| nodes.iter().all(|&node| was_met(state, node))).await;
    }

    /// Waits until this node leaves.
    pub(crate) async fn left(&self) {
        self.until(|state| state.leaving).await;
    }

    /// Tells whether a node is this one, or is connected.
    pub(crate) fn is_connected(&self, node: NodeId) -> bool {
        node == self.0.me || self.lock().links.contains_key(&node)
    }

    /// Waits until this process could not open a connection because it has too many descriptors open.
    pub(crate) async fn out_of_descriptors(&self) {
        self.until(|state| state.out_of_descriptors).await;
    }

    pub(super) fn note_if_out_of_descriptors(&self, error: &io::Error) {
        if matches!(error.raw_os_error(), Some(ENFILE | EMFILE)) {
            self.lock().out_of_descriptors = true;
            self.0.changes.send_modify(|count| *count += 1);
        }
    }

    /// Returns the nodes that are not connected, or only those that never were, if there are any.
    ///
    /// The other nodes may only have given these up sooner than this node.
    pub(crate) fn missing(&self) -> Vec<NodeId> {
        let never_met = self.never_met();
        if !never_met.is_empty() {
            return never_met;
        }
        let state = self.lock();
        let missing = |node: &NodeId| *node != self.0.me && !state.links.contains_key(node);
        self.0.members.keys().copied().filter(missing).collect()
    }

    /// Returns the nodes that were never connected.
    pub(crate) fn never_met(&self) -> Vec<NodeId> {
        let state = self.lock();
        let never_met = |node: &NodeId| *node != self.0.me && !state.histories.contains_key(node);
        self.0.members.keys().copied().filter(never_met).collect()
    }

    /// Returns the last problem with any node that is not connected.
    pub(crate) fn problem(&self) -> String {
        let missing = self.missing();
        let state = self.lock();
        let problem = missing.iter().find_map(|node| Some(format!("node {node}: {}", state.problems.get(node)?)));
        problem.unwrap_or_else(|| "they did not connect".to_owned())
    }

    /// Returns why this node, which does not reach some others, can be in no group with them: names them by their
    /// addresses, with the last problem of each.
    pub(crate) fn isolation(&self) -> FailureCause {
        let missing = self.missing();
        let state = self.lock();
        let told = missing.iter().take(MISSING_NAMED_MAX).map(|node| {
            let address = &self.0.members[node];
            match state.problems.get(node) {
                Some(problem) if problem.starts_with(address.as_str()) => problem.clone(),
                Some(problem) => format!("{address}: {problem}"),
                None => format!("{address}: it did not connect"),
            }
        });
        let told = told.collect::<Vec<_>>().join(", ");
        let told = told.chars().take(PROBLEM_CHARS_MAX).collect::<String>();
        FailureCause::DataConnection { what: format!("no connection to {told} (all members must reach each other)") }
    }
}

/// Errors of the operating system: too many open files in all, and in this process.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
/// Most nodes that are named as not reached.
const MISSING_NAMED_MAX: usize = 4;
/// Most characters about them.
const PROBLEM_CHARS_MAX: usize = 600;
