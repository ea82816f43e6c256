//! The public face: a schedule, and what one member does in it.

use std::error::Error;
use std::fmt;
use std::iter::FusedIterator;

use crate::algorithm::Algorithm;
use crate::circulant;
use crate::hop::{BlockCount, BlockIndex, Hop, Rank, Step};
use crate::hybrid::{self, Levels};
use crate::pipeline::{self, Cube};
use crate::simple;
use crate::walk::{PeerBlock, Side, Walk};

/// The largest group: ranks fit 16 bits.
pub const MEMBERS_MAX: u32 = 65_536;

/// Who sends which block to whom in which step, for n members and a message of k blocks.
///
/// In every schedule each member but the root receives every block exactly once, nothing is sent before the step
/// after its arrival, both ends of a transfer compute the same one, and in one step a member sends at most one
/// block and receives at most one (members in the hybrid: one on each of the two levels).
///
/// A schedule is a few numbers, whatever n and k are; only the hybrid's racks, which are shared, take O(n) memory.
/// Cloning is cheap.
///
/// # Examples
/// ```
/// use rdmc_schedule::{Algorithm, BlockCount, BlockIndex, Rank, Schedule, Step, Hop};
///
/// let schedule = Schedule::new(&Algorithm::BinomialPipeline, 8, BlockCount(3))?;
/// assert_eq!(schedule.steps(), 5);
/// let first = schedule.receives(Rank(5)).next();
/// let expected = Hop { step: Step(2), peer: Rank(1), block: BlockIndex(0) };
/// assert_eq!(first, Some(expected));
/// # Ok::<(), rdmc_schedule::ScheduleError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    algorithm: Algorithm,
    members: u32,
    blocks: BlockCount,
    steps: u64,
}

impl Schedule {
    /// Chooses the schedule for a group of `members`, the root included, and a message of `blocks`.
    ///
    /// Takes O(1), or for the hybrid O(racks).
    ///
    /// # Errors
    /// When `members` is not in 1 ..= [`MEMBERS_MAX`], `blocks` is 0, or the hybrid's racks are for another number of
    /// members.
    pub fn new(algorithm: &Algorithm, members: u32, blocks: BlockCount) -> Result<Schedule, ScheduleError> {
        check_members(algorithm, members)?;
        let k = blocks.get();
        if k == 0 {
            return Err(ScheduleError::NoBlocks);
        }
        let steps = match algorithm {
            Algorithm::Sequential | Algorithm::Fanout => simple::sequential_steps(members, k),
            Algorithm::Chain => simple::chain_steps(members, k),
            Algorithm::BinomialTree => simple::tree_steps(members, k),
            Algorithm::BinomialPipeline => Cube::new(members, k).steps(),
            Algorithm::Circulant => circulant::steps(members, k),
            Algorithm::Hybrid(hybrid) => hybrid::steps(hybrid, k),
        };
        Ok(Schedule { algorithm: algorithm.clone(), members, blocks, steps })
    }

    /// Returns the number of members, the root included.
    #[must_use]
    pub fn members(&self) -> u32 {
        self.members
    }

    /// Returns the number of blocks in the message.
    #[must_use]
    pub fn blocks(&self) -> BlockCount {
        self.blocks
    }

    /// Returns the algorithm the schedule follows.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Returns the number of steps, the last one with a transfer included; 0 for the root alone, below 2⁴⁸ always.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Lists what `rank` sends, in step order; a transfer to another rack comes before one in the same step
    /// inside its own.
    ///
    /// The iterator owns all it needs, in O(log n) memory, and is made in O(log² n) at most, or for the
    /// hybrid in O(racks). An item takes O(1)
    /// amortised, O(log n) at most, and allocates nothing: however long the schedule, long idle stretches are
    /// skipped, not walked.
    ///
    /// # Panics
    /// If `rank` is not below [`members`](Schedule::members).
    #[must_use]
    pub fn sends(&self, rank: Rank) -> Sends {
        Sends(self.member_side(rank, Side::Send))
    }

    /// Lists what `rank` receives, in step order: nothing if it is the root, else every block once.
    ///
    /// The iterator owns all it needs, in O(log n) memory, and is made in O(log² n) at most, or for the
    /// hybrid in O(racks). An item takes O(1)
    /// amortised, O(log n) at most, and allocates nothing: however long the schedule, long idle stretches are
    /// skipped, not walked.
    ///
    /// # Panics
    /// If `rank` is not below [`members`](Schedule::members).
    #[must_use]
    pub fn receives(&self, rank: Rank) -> Receives {
        let hops = self.member_side(rank, Side::Receive);
        let left = if rank.is_root() { 0 } else { self.blocks.get() };
        Receives { hops, left }
    }

    fn member_side(&self, rank: Rank, side: Side) -> MemberSide {
        let (n, k, rank) = (self.members, self.blocks.get(), rank.0);
        assert!(rank < n, "rank {rank} is no member of a group of {n}");
        MemberSide::Flat(match &self.algorithm {
            Algorithm::Sequential => simple::sequential(n, k, rank, side),
            Algorithm::Fanout => simple::fanout(n, k, rank, side),
            Algorithm::Chain => simple::chain(n, k, rank, side),
            Algorithm::BinomialTree => simple::tree(n, k, rank, side),
            Algorithm::BinomialPipeline => pipeline::walk(n, k, rank, side),
            Algorithm::Circulant => circulant::walk(n, k, rank, side),
            Algorithm::Hybrid(hybrid) => {
                return MemberSide::Hybrid(Box::new(hybrid::levels(hybrid, k, rank, side)));
            }
        })
    }
}

/// What one member sends, in step order; made by [`Schedule::sends`].
#[derive(Clone, Debug)]
pub struct Sends(MemberSide);

impl Iterator for Sends {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        self.0.next()
    }
}

impl FusedIterator for Sends {}

/// What one member receives, in step order; made by [`Schedule::receives`].
#[derive(Clone, Debug)]
pub struct Receives {
    hops: MemberSide,
    left: u32,
}

impl Iterator for Receives {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        self.left = self.left.checked_sub(1)?;
        let hop = self.hops.next();
        debug_assert!(hop.is_some(), "every member receives every block");
        hop
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.left as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Receives {}

impl FusedIterator for Receives {}

/// One member's side of a schedule.
#[derive(Clone, Debug)]
enum MemberSide {
    Flat(Walk),
    Hybrid(Box<Levels>),
}

impl MemberSide {
    fn next(&mut self) -> Option<Hop> {
        match self {
            MemberSide::Flat(walk) => {
                let (step, PeerBlock { peer, block }) = walk.next()?;
                Some(Hop { step: Step(step), peer: Rank(peer), block: BlockIndex(block) })
            }
            MemberSide::Hybrid(levels) => levels.next(),
        }
    }
}

/// Whom one member has to do with, over messages of any number of blocks; both lists ascend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Neighbours {
    /// The members that it gives blocks to.
    pub sends_to: Vec<Rank>,
    /// The members that it takes blocks from.
    pub receives_from: Vec<Rank>,
}

/// Lists the members that `rank` ever sends to or receives from, whatever the number of blocks.
///
/// The lists are exact: there is a message for every neighbour listed, and none for any other one. They are O(log
/// n) long and computed in O(log² n), but for the root of the sequential schedule and of the fan-out, whose neighbours are
/// all the others.
///
/// # Errors
/// When the algorithm cannot serve so many members, or `rank` is none of them.
///
/// # Examples
/// ```
/// use rdmc_schedule::{Algorithm, Rank, neighbours};
///
/// let corner = neighbours(&Algorithm::BinomialPipeline, 8, Rank(1))?;
/// assert_eq!(corner.sends_to, [Rank(3), Rank(5)]);
/// assert_eq!(corner.receives_from, [Rank(0), Rank(3), Rank(5)]);
/// # Ok::<(), rdmc_schedule::ScheduleError>(())
/// ```
pub fn neighbours(algorithm: &Algorithm, members: u32, rank: Rank) -> Result<Neighbours, ScheduleError> {
    // In the pipelined schedules the same edges come back every two rounds.
    let blocks = match algorithm {
        Algorithm::Sequential | Algorithm::Fanout | Algorithm::Chain | Algorithm::BinomialTree => 1,
        _ => 4 * (simple::stages(members.max(1)) + 1),
    };
    let schedule = member_schedule(algorithm, members, rank, BlockCount(blocks))?;
    Ok(Neighbours { sends_to: peers(schedule.sends(rank)), receives_from: peers(schedule.receives(rank)) })
}

/// Returns the member that gives `rank` its first block whatever the number of blocks is, or `None` if there is no
/// such fixed member.
///
/// There is none for the root, and none in the circulant schedule unless the root itself is the fixed source, as it
/// is for the O(log n) members that it sends to. In all other schedules every member but the root has one. It is
/// where a receiver that does not know the size of the message yet must expect the first block from (DSN §4.2).
/// O(log² n).
///
/// # Errors
/// When the algorithm cannot serve so many members, or `rank` is none of them.
///
/// # Examples
/// ```
/// use rdmc_schedule::{Algorithm, Rank, first_source};
///
/// assert_eq!(first_source(&Algorithm::BinomialPipeline, 8, Rank(5))?, Some(Rank(1)));
/// assert_eq!(first_source(&Algorithm::Circulant, 8, Rank(5))?, None);
/// # Ok::<(), rdmc_schedule::ScheduleError>(())
/// ```
pub fn first_source(algorithm: &Algorithm, members: u32, rank: Rank) -> Result<Option<Rank>, ScheduleError> {
    if *algorithm == Algorithm::Circulant {
        let from = neighbours(algorithm, members, rank)?.receives_from;
        return Ok(from.into_iter().find(|source| source.is_root()));
    }
    let schedule = member_schedule(algorithm, members, rank, BlockCount(1))?;
    Ok(schedule.receives(rank).next().map(|first| first.peer))
}

/// Why there is no such schedule; the caller must ask for another one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The number of members is not in 1 ..= [`MEMBERS_MAX`].
    Members {
        /// The number asked for.
        got: u32,
    },
    /// A message has at least one block, which may be empty.
    NoBlocks,
    /// The racks of the hybrid algorithm hold another number of members than the group.
    RacksMismatch {
        /// The members in the racks.
        got: u32,
        /// The members of the group.
        want: u32,
    },
    /// The rank is not below the number of members.
    NotAMember {
        /// The rank asked for.
        rank: Rank,
        /// The members of the group.
        members: u32,
    },
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScheduleError::Members { got } => {
                write!(f, "a group has 1 to {MEMBERS_MAX} members, not {got}")
            }
            ScheduleError::NoBlocks => write!(f, "a message has at least one block"),
            ScheduleError::RacksMismatch { got, want } => {
                write!(f, "the racks hold {got} members, the group has {want}")
            }
            ScheduleError::NotAMember { rank, members } => {
                write!(f, "rank {rank} is no member of a group of {members}")
            }
        }
    }
}

impl Error for ScheduleError {}

fn member_schedule(
    algorithm: &Algorithm,
    members: u32,
    rank: Rank,
    blocks: BlockCount,
) -> Result<Schedule, ScheduleError> {
    let schedule = Schedule::new(algorithm, members, blocks)?;
    if rank.0 >= members {
        return Err(ScheduleError::NotAMember { rank, members });
    }
    Ok(schedule)
}

fn check_members(algorithm: &Algorithm, members: u32) -> Result<(), ScheduleError> {
    if members == 0 || members > MEMBERS_MAX {
        return Err(ScheduleError::Members { got: members });
    }
    match algorithm {
        Algorithm::Hybrid(hybrid) if hybrid.racks.members() != members => {
            Err(ScheduleError::RacksMismatch { got: hybrid.racks.members(), want: members })
        }
        _ => Ok(()),
    }
}

pub(crate) fn peers(hops: impl Iterator<Item = Hop>) -> Vec<Rank> {
    let mut peers: Vec<Rank> = hops.map(|hop| hop.peer).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}
