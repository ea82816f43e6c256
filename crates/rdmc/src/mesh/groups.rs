//! The groups that a node's control connections serve: those it is in, those to come, and those that have ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::GroupEvent;
use super::frame::GroupFrame;
use crate::group::GroupId;
use crate::group::agreement::frame::{Ballot, EndFrame, Outcome};
use crate::node::NodeId;

/// The groups of a node.
#[derive(Default)]
pub(super) struct Groups {
    open: BTreeMap<GroupId, Open>,
    /// Frames of groups that this node has not joined yet, oldest first.
    early: VecDeque<(GroupId, NodeId, GroupFrame)>,
    /// Groups that ended here, and how, if this node was there: late frames of theirs get no further.
    ended: BTreeMap<GroupId, Option<(Ballot, Outcome)>>,
    /// The same, oldest first.
    ended_in_order: VecDeque<GroupId>,
    /// The members of the latest that ended with an outcome, oldest first.
    latest: VecDeque<(GroupId, Arc<[NodeId]>)>,
}

struct Open {
    events: mpsc::Sender<GroupEvent>,
    members: Arc<[NodeId]>,
}

/// What is to become of a frame.
pub(super) enum Destined {
    ToGroup(mpsc::Sender<GroupEvent>, GroupFrame),
    /// It is answered.
    ToPeer(EndFrame),
    Nowhere,
    /// The peer has said too much of groups that this node has not joined.
    TooMany,
}

impl Groups {
    /// Says what is to become of a frame.
    pub(super) fn destine(&mut self, group: GroupId, from: NodeId, frame: GroupFrame) -> Destined {
        if let Some(open) = self.open.get(&group) {
            return Destined::ToGroup(open.events.clone(), frame);
        }
        let asks = matches!(&frame, GroupFrame::End(frame) if frame.wants_the_outcome());
        match self.ended.get(&group) {
            Some(Some((ballot, outcome))) if asks => {
                return Destined::ToPeer(EndFrame::Decided { ballot: *ballot, outcome: outcome.clone() });
            }
            Some(None) if asks => return Destined::ToPeer(EndFrame::Absent { left: true }),
            Some(_) => return Destined::Nowhere,
            None => {}
        }
        let concerns_members_only = asks && !matches!(frame, GroupFrame::End(EndFrame::Trouble(_)));
        if !concerns_members_only {
            if self.early.iter().filter(|(_, by, _)| *by == from).count() >= EARLY_MAX {
                return Destined::TooMany;
            }
            self.early.push_back((group, from, frame));
        }
        if asks { Destined::ToPeer(EndFrame::Absent { left: false }) } else { Destined::Nowhere }
    }

    /// Starts to listen for a group; returns what was said of it before, or none if its number was used.
    pub(super) fn open(
        &mut self,
        group: GroupId,
        members: &Arc<[NodeId]>,
    ) -> Option<(VecDeque<GroupEvent>, mpsc::Receiver<GroupEvent>)> {
        if self.ended.contains_key(&group) || self.open.contains_key(&group) {
            return None;
        }
        let (events, inbox) = mpsc::channel(INBOX_MAX);
        self.open.insert(group, Open { events, members: members.clone() });
        let mut early = VecDeque::new();
        self.early.retain(|(of, from, frame)| {
            if *of == group {
                early.push_back(GroupEvent::Frame(*from, frame.clone()));
            }
            *of != group
        });
        Some((early, inbox))
    }

    /// Stops listening for a group.
    pub(super) fn end(&mut self, group: GroupId, outcome: Option<(Ballot, Outcome)>) {
        let open = self.open.remove(&group);
        if self.ended.contains_key(&group) {
            return;
        }
        if let (Some(open), true) = (open, outcome.is_some()) {
            self.latest.push_back((group, open.members));
            if self.latest.len() > LATEST_MAX {
                self.latest.pop_front();
            }
        }
        self.ended.insert(group, outcome);
        self.ended_in_order.push_back(group);
        if self.ended_in_order.len() > ENDED_MAX
            && let Some(oldest) = self.ended_in_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }

    /// Returns how the latest groups have ended of which the node is a member.
    pub(super) fn latest_of(&self, node: NodeId) -> impl Iterator<Item = (GroupId, EndFrame)> {
        let of_node = self.latest.iter().filter(move |(_, members)| members.contains(&node));
        of_node.filter_map(|(group, _)| {
            let (ballot, outcome) = self.ended.get(group)?.as_ref()?;
            Some((*group, EndFrame::Decided { ballot: *ballot, outcome: outcome.clone() }))
        })
    }

    /// Forgets what a node said of groups that are not joined.
    pub(super) fn forget_early(&mut self, of: NodeId) {
        self.early.retain(|(_, from, _)| *from != of);
    }

    /// Returns where the groups listen.
    pub(super) fn listening(&self) -> Vec<mpsc::Sender<GroupEvent>> {
        self.open.values().map(|open| open.events.clone()).collect()
    }

    /// Returns the nodes that are in a group with this one.
    pub(super) fn partners(&self) -> BTreeSet<NodeId> {
        self.open.values().flat_map(|open| open.members.iter().copied()).collect()
    }
}

/// Events that wait to be taken by one group.
const INBOX_MAX: usize = 256;
/// Frames of one node kept for groups not yet joined.
const EARLY_MAX: usize = 2 << 10;
/// Ended groups that are remembered.
const ENDED_MAX: usize = 4 << 10;
/// Of these, how many a node that leaves tells of.
const LATEST_MAX: usize = 16;
