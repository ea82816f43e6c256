//! The other nodes of the cluster, as the application follows them: connected, lost, connected again.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use futures::stream::Stream;

use super::{Mesh, MeshShared, MeshState};
use crate::failure::FailureCause;
use crate::id::NodeId;

/// What happened to another node of the cluster; see [`Node::members`](crate::Node::members).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemberEvent {
    /// The node is connected. This is the first event of each node.
    Joined(NodeId),
    /// The connection to the node was lost, for this cause. The groups that both are in fail.
    Lost(NodeId, FailureCause),
    /// The node is connected again. New groups can have it as a member; the groups from before have failed.
    Returned {
        /// The node.
        node: NodeId,
        /// Another process is the node now. It has nothing of what the one before it had in memory.
        restarted: bool,
    },
}

impl MemberEvent {
    /// Returns the node that it is about.
    pub fn node(&self) -> NodeId {
        match self {
            Self::Joined(node) | Self::Lost(node, _) | Self::Returned { node, .. } => *node,
        }
    }
}

impl fmt::Display for MemberEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Joined(node) => write!(f, "node {node} is connected"),
            Self::Lost(node, cause) => write!(f, "node {node} {cause}"),
            Self::Returned { node, restarted: false } => write!(f, "node {node} is connected again"),
            Self::Returned { node, restarted: true } => write!(f, "node {node} was started again and is connected"),
        }
    }
}

/// The events of the other nodes; made by [`Node::members`](crate::Node::members).
///
/// It does not keep the node alive. It ends when the node is shut down, or its last handle is dropped.
///
/// # Cancel safety
/// A future of the next event may be dropped; no event is lost.
pub struct MemberEvents {
    mesh: Weak<MeshShared>,
    subscription: u64,
    /// The changes of the mesh that this has seen.
    changes: u64,
    /// The nodes of which there was an event.
    known: BTreeMap<NodeId, KnownMember>,
    /// At most two for each node: no more are added before these are taken.
    due: VecDeque<MemberEvent>,
}

/// What the events so far say of a node.
struct KnownMember {
    /// The serial number of its connection.
    serial: u64,
    incarnation: u64,
    connected: bool,
}

/// The connections to one node so far.
pub(super) struct LinkHistory {
    /// The serial number of the latest one.
    pub(super) serial: u64,
    /// The life of the node in which it was made.
    pub(super) incarnation: u64,
    /// How the last one that has ended was lost.
    pub(super) loss: Option<FailureCause>,
}

/// Those that follow the members, each with the task that waits for the next event.
#[derive(Default)]
pub(super) struct Subscriptions {
    waiting: BTreeMap<u64, Option<Waker>>,
    next: u64,
}

impl Subscriptions {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    fn add(&mut self) -> u64 {
        self.next += 1;
        self.waiting.insert(self.next, None);
        self.next
    }

    /// Takes the tasks that wait, to be woken without the lock.
    pub(super) fn take_waiting(&mut self) -> Vec<Waker> {
        self.waiting.values_mut().filter_map(Option::take).collect()
    }
}

impl Drop for Subscriptions {
    /// Wakes those that wait: the mesh is gone, and their streams end.
    fn drop(&mut self) {
        self.take_waiting().into_iter().for_each(Waker::wake);
    }
}

impl Mesh {
    /// Follows the other nodes. Until the stream is dropped, all of them are asked for signs of life.
    pub(crate) fn members(&self) -> MemberEvents {
        let events = {
            let mut state = self.lock();
            let (known, due) = (BTreeMap::new(), VecDeque::new());
            let subscription = state.subscriptions.add();
            let mut events = MemberEvents { mesh: Arc::downgrade(&self.0), subscription, changes: 0, known, due };
            if !state.leaving {
                events.look(&state);
            }
            events
        };
        // The task that asks for signs of life may wait for its first group.
        self.0.changes.send_modify(|count| *count += 1);
        events
    }
}

impl MemberEvents {
    /// Adds what has changed since the last look.
    ///
    /// Of a node that was lost and came back several times meanwhile, there is one loss and one return.
    fn look(&mut self, state: &MeshState) {
        if std::mem::replace(&mut self.changes, state.link_changes) == state.link_changes {
            return;
        }
        for (&node, history) in &state.histories {
            let connected = state.links.contains_key(&node);
            let LinkHistory { serial, incarnation, .. } = *history;
            match self.known.get_mut(&node) {
                None if connected => {
                    self.due.push_back(MemberEvent::Joined(node));
                    self.known.insert(node, KnownMember { serial, incarnation, connected });
                }
                None => {}
                Some(known) => {
                    if known.connected && (!connected || known.serial != serial) {
                        let cause = history.loss.clone().unwrap_or(FailureCause::ConnectionLost);
                        self.due.push_back(MemberEvent::Lost(node, cause));
                        known.connected = false;
                    }
                    if !known.connected && connected {
                        let restarted = known.incarnation != incarnation;
                        self.due.push_back(MemberEvent::Returned { node, restarted });
                        *known = KnownMember { serial, incarnation, connected };
                    }
                }
            }
        }
    }
}

impl Stream for MemberEvents {
    type Item = MemberEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.due.is_empty() {
            let Some(mesh) = this.mesh.upgrade().map(Mesh) else { return Poll::Ready(None) };
            let mut state = mesh.lock();
            if state.leaving {
                return Poll::Ready(None);
            }
            this.look(&state);
            if this.due.is_empty() {
                let waiting = state.subscriptions.waiting.insert(this.subscription, Some(cx.waker().clone()));
                drop(state);
                drop(waiting);
                return Poll::Pending;
            }
        }
        Poll::Ready(this.due.pop_front())
    }
}

impl Drop for MemberEvents {
    fn drop(&mut self) {
        if let Some(mesh) = self.mesh.upgrade().map(Mesh) {
            let waiting = mesh.lock().subscriptions.waiting.remove(&self.subscription);
            drop(waiting);
        }
    }
}

impl fmt::Debug for MemberEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberEvents").finish_non_exhaustive()
    }
}
