//! How a group continues after a failure: what its members had, and how the interrupted messages are completed.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdmc_schedule::{Algorithm, BlockSet, Hybrid, Racks, Rank, Repair, RepairError};

use super::membership::{Membership, PriorProgress};
use super::retained::RetainedMessages;
use super::{Group, GroupSpec};
use crate::certificate::MessageRecord;
use crate::id::{GroupId, NodeId};
use crate::resources::NodeResources;
use crate::transfer::{BLOCKS_MAX, Shape};
use crate::wire::GroupFrame;

/// The state from which a failed group is recovered at one member.
///
/// Always compares equal, so that it does not affect the equality of [`GroupFailure`].
#[derive(Clone)]
pub(crate) struct RecoveryState(pub(super) Arc<RecoveryShared>);

pub(super) struct RecoveryShared {
    pub(super) node: Weak<NodeResources>,
    pub(super) spec: GroupSpec,
    pub(super) rank: Rank,
    pub(super) prior: PriorProgress,
    pub(super) retained: Arc<RetainedMessages>,
    pub(super) taken: AtomicBool,
    /// For how long the node's process did not run before the group failed.
    stalled: Option<Duration>,
}

impl RecoveryState {
    pub(super) fn new(membership: &Membership, retained: &Arc<RetainedMessages>) -> Self {
        Self(Arc::new(RecoveryShared {
            node: Arc::downgrade(&membership.node),
            spec: membership.spec.clone(),
            rank: membership.rank,
            prior: membership.prior,
            retained: retained.clone(),
            taken: AtomicBool::new(false),
            stalled: membership.node.mesh.stalled(),
        }))
    }

    pub(crate) fn stalled(&self) -> Option<Duration> {
        self.0.stalled
    }
}

impl PartialEq for RecoveryState {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for RecoveryState {}

impl fmt::Debug for RecoveryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecoveryState").finish_non_exhaustive()
    }
}

/// A message that cannot be completed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LostMessage {
    /// Its place in the group's order, from 0.
    pub number: u64,
    /// Its size in bytes; `None` if no survivor knows it.
    pub size: Option<u64>,
    /// How many of its blocks no survivor holds; `None` if no survivor knows how many blocks it has. Zero if it only
    /// follows a message that is lost.
    pub blocks_missing: Option<u32>,
}

/// How a group continues at one member.
pub(crate) struct Continuation {
    pub(super) spec: GroupSpec,
    pub(super) prior: PriorProgress,
    pub(super) records: Vec<MessageRecord>,
    pub(super) shared: Arc<RecoveryShared>,
    pub(super) handed_over: AtomicBool,
}

impl Drop for Continuation {
    fn drop(&mut self) {
        // Another call may use what this one has not used.
        if !*self.handed_over.get_mut() {
            self.shared.taken.store(false, Ordering::Release);
        }
    }
}

impl Continuation {
    pub(super) fn is_led_here(&self) -> bool {
        self.shared.rank.is_root() && !self.prior.root_gone
    }

    /// Hashes the progress on which survivors must agree besides the specification.
    pub(super) fn add_to(&self, hash: &mut blake3::Hasher) {
        let PriorProgress { base, begun, root_gone, .. } = self.prior;
        hash.update(&base.to_le_bytes());
        hash.update(&begun.to_le_bytes());
        hash.update(&[u8::from(root_gone)]);
    }

    /// Hands the retained messages over to the new group.
    pub(super) fn hand_over(&self, retained: &RetainedMessages) {
        self.handed_over.store(true, Ordering::Release);
        for (number, kept) in self.shared.retained.take() {
            if number >= self.prior.base {
                retained.inherit(number, kept);
            }
        }
        retained.queue(self.shared.retained.take_queued());
        for (number, header) in self.shared.retained.headers.take() {
            retained.headers.add(number, header);
        }
    }
}

impl GroupSpec {
    /// Hashes everything on which members must agree.
    pub(super) fn digest(&self, continuation: Option<&Continuation>) -> [u8; 32] {
        let mut hash = blake3::Hasher::new();
        hash.update(&[u8::from(self.recoverable), u8::from(self.delta)]);
        if let Some(continuation) = continuation {
            continuation.add_to(&mut hash);
        }
        if self.is_shared() {
            hash.update(b"shared objects");
        }
        if let Some(ring) = self.ring {
            hash.update(b"ring").update(&ring.slots.to_le_bytes()).update(&ring.bytes.to_le_bytes());
        }
        if self.is_stable() {
            hash.update(b"stable delivery");
        }
        if self.headers {
            hash.update(b"headers");
        }
        if let Some(weight) = self.share {
            hash.update(b"share").update(&weight.to_le_bytes());
        }
        hash.update(&self.id.0.to_le_bytes());
        hash.update(&self.block_size.to_le_bytes());
        hash.update(&[u8::from(self.check_blocks == Some(true))]);
        hash.update(self.algorithm.to_string().as_bytes());
        for (&member, rank) in self.members.iter().zip(0..) {
            hash.update(&member.0.to_le_bytes());
            if let Algorithm::Hybrid(hybrid) = &self.algorithm {
                hash.update(&hybrid.racks.rack_of(Rank(rank)).unwrap_or(u32::MAX).to_le_bytes());
            }
        }
        hash.finalize().into()
    }

    /// Returns the specification of the group that continues among the members of these ranks.
    pub(super) fn of_survivors(&self, old: &[Rank]) -> Self {
        let members: Vec<NodeId> = old.iter().map(|rank| self.members[rank.index()]).collect();
        let mut hash = blake3::Hasher::new();
        hash.update(b"rdmc continuation").update(&self.id.0.to_le_bytes());
        for member in &members {
            hash.update(&member.0.to_le_bytes());
        }
        let mut id = [0; 8];
        hash.finalize_xof().fill(&mut id);
        let algorithm = match &self.algorithm {
            Algorithm::Hybrid(hybrid) => {
                let racks: Vec<u32> = old.iter().map(|rank| hybrid.racks.rack_of(*rank).unwrap_or(0)).collect();
                Racks::from_assignment(&racks)
                    .map_or(Algorithm::BinomialPipeline, |racks| Hybrid::new(racks, hybrid.spine).into())
            }
            flat => flat.clone(),
        };
        Self { id: GroupId(u64::from_le_bytes(id)), members, algorithm, ..self.clone() }
    }
}

// Holdings of the members.

/// The blocks of interrupted messages that each member holds.
#[derive(Default)]
pub(crate) struct Holdings(BTreeMap<Rank, BTreeMap<u64, (Shape, BlockSet)>>);

impl Holdings {
    /// Returns for how many messages a member has reported its blocks.
    pub(super) fn told_by(&self, rank: Rank) -> usize {
        self.0.get(&rank).map_or(0, BTreeMap::len)
    }

    /// Notes a member's report about one of the messages that are due.
    ///
    /// # Errors
    /// How the report violates the protocol.
    pub(super) fn note(
        &mut self,
        from: Rank,
        due: &Range<u64>,
        block_size: u32,
        (message, size, blocks): (u64, u64, &[u8]),
    ) -> Result<(), &'static str> {
        if !due.contains(&message) {
            return Err("told of blocks of a message that is not to be completed");
        }
        let shape =
            Shape::new(size, block_size).ok_or("told of blocks of a message that is too long to be completed")?;
        let blocks = BlockSet::decode(shape.count, blocks).map_err(|_| "told of blocks in a malformed way")?;
        match self.0.entry(from).or_default().insert(message, (shape, blocks)) {
            None => Ok(()),
            Some(_) => Err("told twice which blocks of a message it holds"),
        }
    }
}

/// The messages that a group completes before it goes on.
#[derive(Default)]
pub(crate) struct Resumption {
    pub(super) messages: VecDeque<InterruptedMessage>,
    /// The number of the first message that is sent as usual; the number of all messages if the root is gone.
    pub(super) next: u64,
    pub(super) lost: Vec<LostMessage>,
}

/// A group with a root cannot complete an interrupted message.
pub(crate) enum Irrecoverable {
    /// There are too many blocks to plan for.
    TooLong { message: u64 },
    /// A member's report contradicts those of others, or the blocks that it must have.
    Contradiction { by: Rank, what: String },
}

/// A message to complete.
pub(crate) struct InterruptedMessage {
    pub(super) number: u64,
    pub(super) shape: Shape,
    pub(super) repair: Repair,
}

impl Group {
    /// Returns the frames that report which blocks of the interrupted messages are here.
    pub(super) fn holdings(&self) -> Vec<GroupFrame> {
        let kept = self.membership.prior.interrupted().filter_map(|number| {
            let kept = self.retained.message(number)?;
            let size = kept.shape().size;
            Some(GroupFrame::Holding { message: number, size, blocks: kept.here().encode() })
        });
        kept.collect()
    }

    /// Plans how the interrupted messages are completed.
    ///
    /// # Errors
    /// Not all can be completed although the root is there.
    pub(super) fn resumption(&self, mut holdings: Holdings) -> Result<Resumption, Irrecoverable> {
        let mut resumption = Resumption { next: self.membership.prior.begun, ..Resumption::default() };
        for number in self.membership.prior.interrupted() {
            let mut known: Option<(Rank, Shape)> = None;
            for (rank, held) in &holdings.0 {
                let Some((shape, _)) = held.get(&number) else { continue };
                let (_, first) = *known.get_or_insert((*rank, *shape));
                if first != *shape {
                    let what = format!("says that message {number} has {} bytes, not {}", shape.size, first.size);
                    return Err(Irrecoverable::Contradiction { by: *rank, what });
                }
            }
            let Some((_, shape)) = known else {
                if !self.membership.prior.root_gone {
                    // The root has it: it is too long to be reported.
                    return Err(Irrecoverable::TooLong { message: number });
                }
                resumption.lost.push(LostMessage { number, size: None, blocks_missing: None });
                continue;
            };
            let sets: Vec<BlockSet> = (0..self.membership.spec.count())
                .map(|rank| {
                    let held = holdings.0.get_mut(&Rank(rank)).and_then(|held| held.remove(&number));
                    held.map_or_else(|| BlockSet::empty(shape.count), |(_, blocks)| blocks)
                })
                .collect();
            let blocks_missing = match Repair::new(&sets) {
                // Messages after a lost one are not delivered: order is promised.
                Ok(repair) if resumption.lost.is_empty() => {
                    resumption.messages.push_back(InterruptedMessage { number, shape, repair });
                    continue;
                }
                Ok(_) => Some(0),
                Err(RepairError::Lost { blocks }) => Some(blocks.len().0),
                Err(_) => None,
            };
            resumption.lost.push(LostMessage { number, size: Some(shape.size), blocks_missing });
        }
        if let Some(first) = resumption.lost.first() {
            let message = first.number;
            match first.blocks_missing {
                _ if self.membership.prior.root_gone => {}
                None if first.size.is_some() => return Err(Irrecoverable::TooLong { message }),
                _ => {
                    let what = format!("has dropped message {message}, which some members lack");
                    return Err(Irrecoverable::Contradiction { by: Rank::ROOT, what });
                }
            }
            resumption.next = first.number;
        }
        Ok(resumption)
    }

    /// Notes the blocks that this member holds itself.
    pub(super) fn own_holdings(&self, frames: &[GroupFrame], holdings: &mut Holdings) {
        for frame in frames {
            if let GroupFrame::Holding { message, size, blocks } = frame {
                let noted = holdings.note(
                    self.membership.rank,
                    &self.membership.prior.interrupted(),
                    self.membership.spec.block_size,
                    (*message, *size, blocks),
                );
                debug_assert!(noted.is_ok(), "this member's own reports are well formed");
            }
        }
    }
}

const _: () = assert!(BLOCKS_MAX as usize / 8 + 64 < crate::wire::LINK_FRAME_LEN_MAX, "a report fits into one frame");
