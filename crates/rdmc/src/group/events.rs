//! The group's side of the mesh: a task that takes the frames of others, from the start of forming the group.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use futures::future::FutureExt;
use rdmc_schedule::Rank;
use tokio::sync::mpsc;

use super::Group;
use super::continuation::Holdings;
use super::healing::{FetchRequest, Fetched};
use crate::failure::FailureCause;
use crate::id::NodeId;
use crate::mesh::{GroupEvent, Inbox};
use crate::sync::lock;
use crate::wire::end::EndFrame;
use crate::wire::{BlockEndpoints, GroupFrame, TableEndpoint};

/// The events of a group, and where they go.
pub(super) struct EventRouting {
    pub(super) inbox: Inbox,
    pub(super) announced: mpsc::Sender<(u64, u64)>,
    pub(super) offered: mpsc::Sender<(Rank, OfferedEndpoints)>,
    /// The members to connect to that have not offered their queue pairs.
    pub(super) unheard: BTreeSet<Rank>,
    /// The blocks that members have reported before they offered their queue pairs.
    pub(super) holdings: Arc<Mutex<Holdings>>,
}

/// A member's queue pairs, and what this one may write there, as in [`GroupFrame::Offer`].
pub(super) struct OfferedEndpoints {
    pub(super) spec: [u8; 32],
    pub(super) blocks: Option<BlockEndpoints>,
    pub(super) table: Option<TableEndpoint>,
}

impl Group {
    /// Takes the events of the mesh, and answers requests for pieces, until the group has ended; then takes the events
    /// that came before the mesh knew that.
    pub(super) async fn listen(&self, mut routing: EventRouting, asked: mpsc::Receiver<FetchRequest>) {
        {
            let listening = async {
                while self.end.outcome().is_none() {
                    if let Some(event) = self.end.next_event(&mut routing.inbox).await {
                        self.take_event(event, &mut routing);
                    }
                }
            };
            futures::select_biased! {
                () = std::pin::pin!(listening.fuse()) => {}
                () = std::pin::pin!(self.healing.supply(asked, self.status.table.outgoing()).fuse()) => {}
            }
        }
        while let Some(event) = routing.inbox.next().await {
            self.take_event(event, &mut routing);
        }
    }

    /// Loses members that another one has accused of being unreachable, if this one has never reached them either. The
    /// verdict must not depend on whose time to connect is over first.
    fn join_in(&self, accusations: &[(u32, FailureCause)]) {
        for (rank, cause) in accusations {
            let node = self.membership.members.get(*rank as usize);
            let unreachable = node.filter(|_| matches!(cause, FailureCause::Unreachable { .. }));
            if let Some(cause) = unreachable.and_then(|node| self.membership.node.mesh.why_never_met(*node)) {
                self.end.lose(Rank(*rank), cause);
            }
        }
    }

    fn take_event(&self, event: GroupEvent, routing: &mut EventRouting) {
        let rank = self.membership.rank_of(event.node());
        match (event, rank) {
            (GroupEvent::Frame(from, _), None) => {
                let span = &self.membership.span;
                tracing::warn!(parent: span, node = %from, "a node that is no member talks to the group");
            }
            (GroupEvent::Frame(from, GroupFrame::Offer { spec, told, blocks, table }), Some(rank)) => {
                if !routing.unheard.remove(&rank) {
                    return self.blame(from, "offered queue pairs to a member that it does not connect to, or twice");
                }
                let heard = lock(&routing.holdings).told_by(rank);
                if heard != told as usize && !routing.inbox.lost_early_frames() {
                    return self.blame(from, "says that it told of another number of messages than it did");
                }
                if heard != told as usize {
                    // It came long before this member was here to take it.
                    let what = format!("the blocks that node {from} holds of interrupted messages were forgotten");
                    self.end.declare(FailureCause::Resources { what });
                }
                // Fails only if forming the group has ended.
                let _ = routing.offered.try_send((rank, OfferedEndpoints { spec, blocks, table }));
            }
            (GroupEvent::Frame(from, GroupFrame::Holding { message, size, blocks }), Some(rank)) => {
                let holding = (message, size, &blocks[..]);
                let noted = lock(&routing.holdings).note(
                    rank,
                    &self.membership.prior.interrupted(),
                    self.block_size(),
                    holding,
                );
                self.blame_if(from, noted);
            }
            (GroupEvent::Lost(_, cause), Some(rank)) => self.end.lose(rank, cause),
            (GroupEvent::Connected(_), Some(rank)) => self.end.reconnected(rank),
            (GroupEvent::Frame(from, GroupFrame::End(frame)), Some(rank)) => {
                if let (EndFrame::Confirm { messages }, true) = (&frame, self.membership.rank.is_root()) {
                    // First, so that who learns that the group is closed also knows this.
                    if self.end.messages() == Some(*messages) {
                        self.status.note_confirmed(rank, *messages);
                    }
                }
                if let EndFrame::Wedged(evidence) = &frame {
                    self.join_in(&evidence.against);
                }
                self.blame_if(from, self.end.receive_end_frame(rank, frame))
            }
            (GroupEvent::Frame(from, GroupFrame::Announce { message, size }), Some(Rank::ROOT)) => {
                // If the engine takes no more of them, it has ended and the group is about to fail.
                if let Err(mpsc::error::TrySendError::Full(_)) = routing.announced.try_send((message, size)) {
                    self.blame(from, "announced more messages than it may");
                }
            }
            (GroupEvent::Frame(from, GroupFrame::LetGo { first, count }), Some(rank))
                if self.membership.rank.is_root() =>
            {
                self.blame_if(from, self.status.take_let_go(rank, first, count))
            }
            (GroupEvent::Frame(_, GroupFrame::RepeatRow), Some(_)) => self.status.table.publish(),
            (GroupEvent::Frame(from, frame @ GroupFrame::Have { .. }), Some(rank))
                if self.membership.rank.is_root() =>
            {
                self.blame_if(from, self.delta.receive(rank, frame));
            }
            (
                GroupEvent::Frame(from, frame @ (GroupFrame::Parts { .. } | GroupFrame::Begin { .. })),
                Some(Rank::ROOT),
            ) => {
                self.blame_if(from, self.delta.receive(Rank::ROOT, frame));
            }
            (GroupEvent::Frame(_, GroupFrame::Fetch(wanted)), Some(rank)) => {
                self.healing.queue_fetch(rank, Fetched::Piece(wanted));
            }
            (GroupEvent::Frame(_, GroupFrame::FetchSlot { slot }), Some(rank)) => {
                self.healing.queue_fetch(rank, Fetched::Slot(slot));
            }
            (GroupEvent::Frame(_, GroupFrame::Slot { slot, bytes }), Some(Rank::ROOT)) => {
                self.healing.take_slot(slot, bytes);
            }
            (GroupEvent::Frame(_, GroupFrame::Piece { wanted, piece }), Some(rank)) => {
                self.healing.take_piece(rank, wanted, piece);
            }
            (GroupEvent::Frame(_, GroupFrame::WaitTimes { on }), Some(rank)) if self.membership.rank.is_root() => {
                self.pace.receive_wait_times(rank, on);
            }
            (GroupEvent::Frame(_, GroupFrame::Allot { rate }), Some(member)) if self.membership.rank.is_root() => {
                self.allotments.take(member, rate);
            }
            (GroupEvent::Frame(from, GroupFrame::Slow { member }), Some(Rank::ROOT)) => {
                self.blame_if(from, self.pace.receive_slow(member))
            }
            (GroupEvent::Frame(from, GroupFrame::RunFree { from_blocks }), Some(Rank::ROOT)) => {
                self.blame_if(from, self.exchange.distance.take_decision(from_blocks));
            }
            (GroupEvent::Frame(from, _), Some(_)) => self.blame(from, "sent a frame that is not due"),
            (GroupEvent::Lost(..) | GroupEvent::Connected(_), None) => {}
        }
    }

    fn blame_if(&self, node: NodeId, outcome: Result<(), &'static str>) {
        if let Err(what) = outcome {
            self.blame(node, what);
        }
    }

    fn blame(&self, node: NodeId, what: &str) {
        if let Some(rank) = self.membership.rank_of(node) {
            self.end.accuse(rank, FailureCause::Protocol { what: what.to_owned() });
        }
    }
}
