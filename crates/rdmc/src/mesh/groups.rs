//! The groups that a node's control connections serve: open groups, groups to come, and groups that have ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::{GroupEvent, InboxEvent};
use crate::failure::FailureCause;
use crate::id::{GroupId, NodeId};
use crate::wire::end::{Ballot, EndFrame, Outcome, Verdict};
use crate::wire::{self, Frame, GroupFrame};

/// The groups of a node.
#[derive(Default)]
pub(super) struct Groups {
    open: BTreeMap<GroupId, OpenGroup>,
    /// The number of open groups of each node, this one included.
    partners: BTreeMap<NodeId, u32>,
    /// Frames of groups that this node has not joined yet, oldest first.
    early: VecDeque<EarlyFrame>,
    /// The groups among these of which frames were forgotten.
    forgotten: BTreeSet<GroupId>,
    /// Groups that have ended here: their late frames are dropped.
    ended: BTreeMap<GroupId, EndedGroup>,
    /// The same, oldest first.
    ended_in_order: VecDeque<GroupId>,
    restarts: Restarts,
}

/// The restarts of nodes so far.
#[derive(Default)]
struct Restarts {
    count: u64,
    /// The latest one of each node that was started again, by this count.
    latest: BTreeMap<NodeId, u64>,
}

impl Restarts {
    /// Tells whether a node was started again after so many restarts.
    fn since(&self, before: u64, node: NodeId) -> bool {
        self.latest.get(&node).is_some_and(|latest| *latest > before)
    }
}

struct EarlyFrame {
    group: GroupId,
    from: NodeId,
    frame: GroupFrame,
    /// Its length on the wire.
    bytes: usize,
}

struct EndedGroup {
    members: Arc<[NodeId]>,
    /// How it ended, if this node knows.
    outcome: Option<(Ballot, Outcome)>,
    /// Restarts of nodes before it was opened.
    restarts_before: u64,
}

struct OpenGroup {
    events: mpsc::Sender<InboxEvent>,
    members: Arc<[NodeId]>,
    /// Restarts of nodes before it was opened.
    restarts_before: u64,
    /// Members that were started again since, and want to be in it.
    refused: BTreeSet<NodeId>,
}

/// Where a frame goes.
pub(super) enum FrameRoute {
    ToGroup(mpsc::Sender<InboxEvent>, GroupFrame),
    /// The frame is answered with this one.
    ToPeer(EndFrame),
    Nowhere,
}

impl Groups {
    /// Returns where a frame goes.
    pub(super) fn route(&mut self, group: GroupId, from: NodeId, frame: GroupFrame) -> FrameRoute {
        let asks = matches!(&frame, GroupFrame::End(frame) if frame.wants_the_outcome());
        // A node that forms a group that has ended wants to know that as well.
        let wants_to_hear = asks || matches!(frame, GroupFrame::Offer { .. });
        if let Some(open) = self.open.get_mut(&group) {
            if self.restarts.since(open.restarts_before, from) {
                if wants_to_hear && open.members.contains(&from) {
                    open.refused.insert(from);
                }
                return FrameRoute::Nowhere;
            }
            return FrameRoute::ToGroup(open.events.clone(), frame);
        }
        if let Some(ended) = self.ended.get(&group) {
            return match &ended.outcome {
                _ if !wants_to_hear || !ended.members.contains(&from) => FrameRoute::Nowhere,
                _ if self.restarts.since(ended.restarts_before, from) => {
                    FrameRoute::ToPeer(refusal(&ended.members, from))
                }
                Some((ballot, outcome)) => {
                    FrameRoute::ToPeer(EndFrame::Decided { ballot: *ballot, outcome: outcome.clone() })
                }
                None => FrameRoute::ToPeer(EndFrame::Absent { left: true }),
            };
        }
        let concerns_members_only = asks && !matches!(frame, GroupFrame::End(EndFrame::Wedged(_)));
        if !concerns_members_only {
            self.keep_early(group, from, frame);
        }
        if asks { FrameRoute::ToPeer(EndFrame::Absent { left: false }) } else { FrameRoute::Nowhere }
    }

    /// Keeps a frame for a group that may be joined later. If a node has sent too many, its oldest group is forgotten.
    fn keep_early(&mut self, group: GroupId, from: NodeId, frame: GroupFrame) {
        let bytes = wire::encode_unchecked(&Frame::Group { group, frame: frame.clone() }).len();
        self.early.push_back(EarlyFrame { group, from, frame, bytes });
        loop {
            let of_node = || self.early.iter().filter(|early| early.from == from);
            if of_node().count() <= EARLY_MAX && of_node().map(|early| early.bytes).sum::<usize>() <= EARLY_BYTES_MAX {
                return;
            }
            let Some(oldest) = of_node().map(|early| early.group).next() else { return };
            tracing::warn!(node = %from, group = %oldest, "its frames for a group that was not joined are forgotten");
            self.early.retain(|early| early.from != from || early.group != oldest);
            if self.forgotten.len() < ENDED_MAX {
                self.forgotten.insert(oldest);
            }
        }
    }

    /// Opens a group; returns its early events, its later ones, and whether some early ones were forgotten. Returns
    /// `None` if its number was used before.
    pub(super) fn open(
        &mut self,
        group: GroupId,
        members: &Arc<[NodeId]>,
    ) -> Option<(VecDeque<GroupEvent>, mpsc::Receiver<InboxEvent>, bool)> {
        if self.ended.contains_key(&group) || self.open.contains_key(&group) {
            return None;
        }
        let (events, inbox) = mpsc::channel(INBOX_MAX);
        let restarts_before = self.restarts.count;
        self.open
            .insert(group, OpenGroup { events, members: members.clone(), restarts_before, refused: BTreeSet::new() });
        members.iter().for_each(|&node| *self.partners.entry(node).or_default() += 1);
        let mut early = VecDeque::new();
        self.early.retain(|known| {
            if known.group == group {
                early.push_back(GroupEvent::Frame(known.from, known.frame.clone()));
            }
            known.group != group
        });
        Some((early, inbox, self.forgotten.remove(&group)))
    }

    /// Closes a group. Returns what to tell the members that were started again and want to be in it.
    pub(super) fn end(&mut self, group: GroupId, outcome: Option<(Ballot, Outcome)>) -> Vec<(NodeId, EndFrame)> {
        // Otherwise it has ended before.
        let Some(open) = self.open.remove(&group) else { return Vec::new() };
        for &node in &*open.members {
            let others = self.partners.remove(&node).unwrap_or(0).saturating_sub(1);
            if others > 0 {
                self.partners.insert(node, others);
            }
        }
        let told = open.refused.iter().map(|&node| (node, refusal(&open.members, node))).collect();
        let OpenGroup { members, restarts_before, .. } = open;
        self.ended.insert(group, EndedGroup { members, outcome, restarts_before });
        self.ended_in_order.push_back(group);
        if self.ended_in_order.len() > ENDED_MAX
            && let Some(oldest) = self.ended_in_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
        told
    }

    /// Notes that a node was started again: the groups so far are not those of the new process.
    pub(super) fn note_restart(&mut self, node: NodeId) {
        self.restarts.count += 1;
        self.restarts.latest.insert(node, self.restarts.count);
    }

    /// Tells whether a node was started again since a group was opened: the new process gets none of its frames.
    pub(super) fn is_without(&self, group: GroupId, node: NodeId) -> bool {
        let open = self.open.get(&group).map(|open| open.restarts_before);
        let before = open.or_else(|| Some(self.ended.get(&group)?.restarts_before));
        before.is_some_and(|before| self.restarts.since(before, node))
    }

    /// Returns the outcomes of the latest groups with the node as a member.
    pub(super) fn latest_of(&self, node: NodeId) -> impl Iterator<Item = (GroupId, EndFrame)> {
        let known = self.ended_in_order.iter().rev().filter_map(|group| Some((*group, self.ended.get(group)?)));
        let latest = known.filter_map(|(group, ended)| Some((group, ended, ended.outcome.as_ref()?)));
        let is_of_node = move |ended: &EndedGroup| {
            ended.members.contains(&node) && !self.restarts.since(ended.restarts_before, node)
        };
        let of_node = latest.take(LATEST_MAX).filter(move |(_, ended, _)| is_of_node(ended));
        of_node.map(|(group, _, (ballot, outcome))| {
            (group, EndFrame::Decided { ballot: *ballot, outcome: outcome.clone() })
        })
    }

    /// Forgets a node's frames for groups that are not joined.
    pub(super) fn forget_early(&mut self, of: NodeId) {
        self.early.retain(|early| early.from != of);
    }

    /// Returns the groups that this node has not joined, and the nodes that form them with it.
    pub(super) fn awaited(&self) -> BTreeSet<(GroupId, NodeId)> {
        let offers = self.early.iter().filter(|early| matches!(early.frame, GroupFrame::Offer { .. }));
        offers.map(|early| (early.group, early.from)).collect()
    }

    /// Returns the inboxes of all open groups.
    pub(super) fn listening(&self) -> Vec<mpsc::Sender<InboxEvent>> {
        self.open.values().map(|open| open.events.clone()).collect()
    }

    /// Tells whether no group is open.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Tells whether a node is in a group with this one.
    pub(super) fn has_partner(&self, node: NodeId) -> bool {
        self.partners.contains_key(&node)
    }
}

/// Tells a node that was started again that it cannot be in a group of its earlier life.
fn refusal(members: &[NodeId], node: NodeId) -> EndFrame {
    let failed = (0..).zip(members).filter(|(_, member)| **member == node).map(|(rank, _)| rank);
    let verdict = Verdict {
        failed: failed.map(|rank| (rank, FailureCause::Restarted)).collect(),
        quorum: false,
        begun: 0,
        held: vec![None; members.len()],
        records: Vec::new(),
    };
    EndFrame::Decided { ballot: Ballot::CLOSE, outcome: Outcome::Failed(verdict) }
}

/// Events that wait to be taken by one group.
const INBOX_MAX: usize = 256;
/// Frames of one node kept for groups not yet joined.
const EARLY_MAX: usize = 2 << 10;
/// Bytes of them.
const EARLY_BYTES_MAX: usize = 16 << 20;
/// Ended groups that are remembered.
const ENDED_MAX: usize = 4 << 10;
/// Ended groups whose outcomes a leaving node sends.
const LATEST_MAX: usize = 16;
