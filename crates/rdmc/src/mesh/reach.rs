//! Which nodes this one reaches: waiting for them, telling which are missing and why, and waiting for them no longer.

use std::collections::btree_map::Entry;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdmc_fabric::ControlStream;

use super::{GroupEvent, Mesh, MeshState, notify};
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

    /// Waits until every other node is connected, or this one [goes on without it](Self::go_on_without).
    pub(crate) async fn complete(&self) {
        // Counted, since a node of a large cluster checks very often. The links are those of members.
        self.until(|state| state.links.len() + state.unreachable.len() + 1 >= self.0.members.len()).await;
    }

    /// Has groups wait no longer for nodes that were never connected: they take them for lost, until they are
    /// connected.
    ///
    /// # Cancel safety
    /// Not safe: some groups would not learn it.
    pub(crate) async fn go_on_without(&self, nodes: &[NodeId]) {
        for &node in nodes {
            let (groups, serial, cause) = {
                let mut state = self.lock();
                let cause = self.unreachable(&state, node);
                let state = &mut *state;
                if state.has_met(node) {
                    continue;
                }
                let Entry::Vacant(vacant) = state.unreachable.entry(node) else { continue };
                vacant.insert(cause.clone());
                // If it is connected meanwhile, that is later.
                let serial = state.next_serial;
                state.next_serial += 1;
                (state.groups.listening(), serial, cause)
            };
            self.0.changes.send_modify(|count| *count += 1);
            tracing::debug!(node = %node, %cause, "not waited for any longer");
            notify(&groups, serial, &GroupEvent::Lost(node, cause)).await;
        }
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

    /// Waits until all these nodes are connected, or were and are lost, or this one goes on without them.
    pub(crate) async fn connections_to(&self, nodes: &[NodeId]) {
        let was_met =
            |state: &MeshState, node| node == self.0.me || state.has_met(node) || state.unreachable.contains_key(&node);
        self.until(|state| nodes.iter().all(|&node| was_met(state, node))).await;
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
        let never_met = |node: &NodeId| *node != self.0.me && !state.has_met(*node);
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
            let (address, problem) = (&self.0.members[node], self.problem_with(&state, *node));
            format!("{address}: {problem}")
        });
        let told = told.collect::<Vec<_>>().join(", ");
        let told = told.chars().take(PROBLEM_CHARS_MAX).collect::<String>();
        FailureCause::DataConnection { what: format!("no connection to {told} (all members must reach each other)") }
    }

    /// Returns why a node is not reached, if it was never connected.
    pub(crate) fn why_never_met(&self, node: NodeId) -> Option<FailureCause> {
        let state = self.lock();
        let never_met = node != self.0.me && !state.has_met(node);
        never_met.then(|| self.unreachable(&state, node))
    }

    fn unreachable(&self, state: &MeshState, node: NodeId) -> FailureCause {
        let what = self.problem_with(state, node).chars().take(UNREACHABLE_CHARS_MAX).collect();
        FailureCause::Unreachable { what }
    }

    /// Returns the last problem with a node, without its address.
    fn problem_with(&self, state: &MeshState, node: NodeId) -> String {
        let problem = state.problems.get(&node).map_or("it did not connect", String::as_str);
        let with_address = self.0.members.get(&node).and_then(|address| problem.strip_prefix(address.as_str()));
        let problem = with_address.and_then(|problem| problem.strip_prefix(": ")).unwrap_or(problem);
        problem.to_owned()
    }
}

impl MeshState {
    /// Tells whether a node was ever connected.
    fn has_met(&self, node: NodeId) -> bool {
        self.histories.contains_key(&node)
    }
}

/// Errors of the operating system: too many open files in all, and in this process.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
/// Most nodes that are named as not reached.
const MISSING_NAMED_MAX: usize = 4;
/// Most characters about them.
const PROBLEM_CHARS_MAX: usize = 600;
/// Most characters about one node that groups go on without: with many nodes, all of them travel together.
const UNREACHABLE_CHARS_MAX: usize = 120;
