//! A schedule, and one member's part in it.

use std::error::Error;
use std::fmt;
use std::iter::FusedIterator;

use crate::algorithm::{Algorithm, Hybrid, Spine};
use crate::circulant;
use crate::hop::{BlockCount, BlockIndex, Hop, Rank, Step};
use crate::hybrid::{self, LeaderSpine, Levels};
use crate::pipeline::{self, Cube};
use crate::simple;
use crate::two_tree;
use crate::walk::{PeerBlock, Side, Walk};

/// The largest group: ranks fit 16 bits.
pub const MEMBERS_MAX: u32 = 65_536;

/// Lists the hops of a message of k blocks among n members, step by step.
///
/// In every schedule:
/// - each member except the root receives every block exactly once;
/// - no member sends a block before the step after its arrival;
/// - both ends of a hop compute the same hop;
/// - in one step a member sends at most one block and receives at most one (in the hybrid: one on each level).
///
/// A schedule is a few numbers, whatever n and k are. Only the hybrid's racks, which are shared, take O(n) memory.
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
    /// Takes O(1), or for the hybrid O(racks), with [`Spine::TwoTree`] O(members).
    ///
    /// # Errors
    /// `members` is not in 1 ..= [`MEMBERS_MAX`], `blocks` is 0, or the hybrid's racks are for another number of
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
            Algorithm::TwoTree => two_tree::steps(members, k),
            Algorithm::Hybrid(Hybrid { racks, spine }) => match LeaderSpine::of(*spine) {
                Some(spine) => hybrid::steps(racks, spine, k),
                None => racks.trees().steps(k),
            },
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

    /// Returns the algorithm that the schedule follows.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Returns the number of steps, up to the last one with a hop; 0 for the root alone, always below 2⁴⁸.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Lists the hops that `rank` sends, in step order; in the same step a hop to another rack comes first.
    ///
    /// The iterator owns all it needs, in O(log n) memory. It is made in O(log² n) at most, or for the hybrid in
    /// O(racks). An item takes O(1) amortised, O(log n) at most, and allocates nothing: idle stretches are skipped.
    ///
    /// # Panics
    /// If `rank` is not below [`members`](Schedule::members).
    #[must_use]
    pub fn sends(&self, rank: Rank) -> Sends {
        Sends(self.member_side(rank, Side::Send))
    }

    /// Lists the hops that `rank` receives, in step order: none if it is the root, else every block once.
    ///
    /// The iterator owns all it needs, in O(log n) memory. It is made in O(log² n) at most, or for the hybrid in
    /// O(racks). An item takes O(1) amortised, O(log n) at most, and allocates nothing: idle stretches are skipped.
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
            Algorithm::TwoTree => two_tree::walk(n, k, rank, side),
            Algorithm::Hybrid(Hybrid { racks, spine }) => match LeaderSpine::of(*spine) {
                Some(spine) => return MemberSide::Hybrid(Box::new(hybrid::levels(racks, spine, k, rank, side))),
                None => racks.trees().walk(k, rank, side),
            },
        })
    }
}

/// Lists the hops that one member sends, in step order; made by [`Schedule::sends`].
#[derive(Clone, Debug)]
pub struct Sends(MemberSide);

impl Iterator for Sends {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        self.0.next()
    }
}

impl FusedIterator for Sends {}

/// Lists the hops that one member receives, in step order; made by [`Schedule::receives`].
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

/// The members with which one member exchanges blocks, in messages of any number of blocks; both lists ascend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Neighbours {
    /// The members to which it sends blocks.
    pub sends_to: Vec<Rank>,
    /// The members from which it receives blocks.
    pub receives_from: Vec<Rank>,
}

/// Lists the members that `rank` ever sends to or receives from, whatever the number of blocks.
///
/// The lists are exact: some message needs each neighbour listed, and no message needs another one. They are O(log n)
/// long and computed in O(log² n), except for the root of the sequential schedule and of the fan-out, whose neighbours
/// are all other members.
///
/// # Errors
/// The algorithm cannot serve so many members, or `rank` is not one of them.
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

/// Returns the member that sends `rank` its first block in messages of any number of blocks, or `None` if that member
/// is not fixed.
///
/// The root has none. In the circulant schedule only the O(log n) members to which the root sends have one, the root.
/// With two trees, those of the hybrid included, the members inside the first have one, if it reaches them before the
/// second. In all other schedules every member except the root has one. A receiver that does not know the size of the
/// message yet must expect its first block from this member (DSN §4.2). O(log² n).
///
/// # Errors
/// The algorithm cannot serve so many members, or `rank` is not one of them.
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
    Ok(match algorithm {
        _ if rank.is_root() => None,
        Algorithm::TwoTree => two_tree::first_source(members, rank.0).map(Rank),
        Algorithm::Hybrid(Hybrid { racks, spine: Spine::TwoTree }) => racks.trees().first_source(rank.0).map(Rank),
        _ => schedule.receives(rank).next().map(|first| first.peer),
    })
}

/// There is no such schedule; the caller must ask for another one.
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
