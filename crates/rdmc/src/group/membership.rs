//! The members of a group and how to reach them: what its parts have in common.

use std::ops::Range;
use std::sync::Arc;

use rdmc_fabric::Timestamp;
use rdmc_schedule::Rank;

use super::GroupSpec;
use crate::id::{GroupId, NodeId};
use crate::resources::NodeResources;
use crate::wire::GroupFrame;

/// A member's place in a group.
pub(crate) struct Membership {
    pub(super) id: GroupId,
    pub(super) rank: Rank,
    /// In rank order.
    pub(super) members: Arc<[NodeId]>,
    pub(super) spec: GroupSpec,
    pub(super) prior: PriorProgress,
    pub(super) node: Arc<NodeResources>,
    pub(super) span: tracing::Span,
}

impl Membership {
    pub(super) fn now(&self) -> Timestamp {
        self.node.environment.now()
    }

    pub(super) fn rank_of(&self, node: NodeId) -> Option<Rank> {
        let position = self.members.iter().position(|&member| member == node)?;
        u32::try_from(position).ok().map(Rank)
    }

    /// Queues a frame to a member.
    pub(super) fn post(&self, to: NodeId, frame: GroupFrame) {
        self.node.mesh.post(to, self.id, frame);
    }

    /// Queues a frame to the root.
    pub(super) fn post_to_root(&self, frame: GroupFrame) {
        self.post(self.members[Rank::ROOT.index()], frame);
    }

    /// At the root: queues a frame to all other members.
    pub(super) fn post_to_others(&self, frame: &GroupFrame) {
        for &member in &self.members[1..] {
            self.post(member, frame.clone());
        }
    }

    /// Sends a frame to a member, when there is room for it.
    pub(super) async fn send(&self, to: NodeId, frame: GroupFrame) {
        self.node.mesh.send(to, self.id, frame).await;
    }
}

/// The progress of a member before its group was formed, as numbers of messages from the first. Zero, unless the group
/// continues another one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PriorProgress {
    /// Messages that every member has.
    pub(super) base: u64,
    /// Messages that were begun, whole or not.
    pub(super) begun: u64,
    /// Messages that this member's application has.
    pub(super) delivered: u64,
    /// The root is gone: the group only completes the interrupted messages.
    pub(super) root_gone: bool,
}

impl PriorProgress {
    /// Returns the messages that are completed before the group goes on.
    pub(super) fn interrupted(&self) -> Range<u64> {
        self.base..self.begun
    }
}
