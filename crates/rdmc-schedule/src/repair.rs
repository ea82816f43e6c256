//! The hops that complete a message of which several members hold parts.

use std::cmp::Reverse;
use std::error::Error;
use std::fmt;
use std::iter::FusedIterator;
use std::ops::Range;
use std::sync::Arc;

use self::classes::HolderClasses;
use self::pairing::Pairing;
use crate::hop::{BlockCount, BlockIndex, Hop, Rank, Step};
use crate::schedule::{MEMBERS_MAX, Neighbours, peers};

pub use self::block_set::BlockSet;
pub use self::wire::BlockSetError;

mod bits;
mod block_set;
mod classes;
mod pairing;
mod wire;

/// Most blocks of a message for which a repair is planned: an encoded [`BlockSet`] is then 2 MiB and a byte at most.
pub const REPAIR_BLOCKS_MAX: u32 = 1 << 24;

/// Most hops of a repair; it keeps 24 bytes for each.
pub const REPAIR_HOPS_MAX: u64 = 1 << 26;

/// Plans the hops until n members that hold some of a message's k blocks hold all of them.
///
/// It completes a message that was interrupted, among the members that are left. Ranks are theirs, and no member is
/// special. Each member gets every block that it misses exactly once, and nothing else moves. As in a
/// [`Schedule`](crate::Schedule), both ends compute the same hops. In a step a member sends at most one block and
/// receives at most one, and does not send a block in the step in which it gets it. The same holdings give the same
/// repair everywhere.
///
/// # How it is found
/// The plan is made step by step, without looking ahead. The members that miss most choose first. Each chooses a holder
/// of the rarest block that it can get. A choice is moved to another holder when that lets one more member receive (a
/// matching by augmenting paths). Then each pair moves the rarest block that it can. A member that gets a block passes
/// it on from the next step.
///
/// # Steps
/// No repair has fewer steps than a member misses blocks. Nor does it have fewer than u − 1 + ⌈log₂ n⌉ when a single
/// member holds u blocks. Nothing close to these bounds is promised. In all situations tried, repairs of interrupted
/// schedules (n ≤ 17, k ≤ 40, one or two members gone) took at most 2 steps more, and mostly none. One full and n − 1
/// empty members take k − 1 + ⌈log₂ n⌉ steps, as the binomial pipeline does, and up to 3 more for n ≤ 70 and k ≤ 100.
///
/// Unlike in a schedule, a member of a long repair exchanges blocks with most others, in both directions.
///
/// # Cost
/// Let c be the number of different sets of members that hold a block: a few dozen when blocks have spread in order, at
/// most k. Planning takes O(n k / 64) to begin if holdings are long runs, else O(n k). Then it takes O(n log n + c) for
/// a step, and usually O(c ⌈n / 64⌉) for a hop. A hop whose receiver makes others move takes up to n times that, but no
/// more than 4096 members are asked to move in a step. So 64 members take about a second if one has 16,384 blocks and
/// 63 have none, which is a million hops. They take a few seconds if each has an arbitrary half of the blocks.
///
/// Memory is 24 bytes for each hop, which clones share, and while it is planned about c n / 4 bytes and 4 for each
/// block.
///
/// # Examples
/// The root of a message of 3 blocks is gone. One member holds blocks 0 and 1, another one 1 and 2, a third nothing:
/// ```
/// use rdmc_schedule::{BlockCount, BlockIndex, BlockSet, Rank, Repair};
///
/// let mut holdings = [(); 3].map(|()| BlockSet::empty(BlockCount(3)));
/// for (rank, block) in [(0, 0), (0, 1), (1, 1), (1, 2)] {
///     holdings[rank].insert(BlockIndex(block));
/// }
/// let repair = Repair::new(&holdings)?;
/// assert_eq!(repair.steps(), 3);
/// let third: Vec<String> = repair.receives(Rank(2)).map(|got| format!("{}<{}", got.block, got.peer)).collect();
/// assert_eq!(third, ["0<0", "1<0", "2<1"]);
/// # Ok::<(), rdmc_schedule::RepairError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Repair {
    blocks: BlockCount,
    steps: u32,
    sends: Arc<[Vec<PackedHop>]>,
    receives: Arc<[Vec<PackedHop>]>,
}

impl Repair {
    /// Plans the repair from the blocks that each rank holds.
    ///
    /// # Errors
    /// The number of members is not in 1 ..= [`MEMBERS_MAX`], the sets are not of one message of 1 ..=
    /// [`REPAIR_BLOCKS_MAX`] blocks, more than [`REPAIR_HOPS_MAX`] blocks are missing at all members together, or no
    /// member holds one of the blocks. All members find the same error.
    pub fn new(holdings: &[BlockSet]) -> Result<Repair, RepairError> {
        let (members, blocks) = check_shape(holdings)?;
        let needs: Vec<u32> = holdings.iter().map(|held| blocks.get() - held.len().get()).collect();
        let hops = needs.iter().map(|&need| u64::from(need)).sum();
        if hops > REPAIR_HOPS_MAX {
            return Err(RepairError::TooManyHops { got: hops });
        }
        let classes = HolderClasses::new(holdings, members).map_err(|blocks| RepairError::Lost { blocks })?;
        let mut draft = Draft::new(classes, needs);
        while draft.add_step() {}
        Ok(Repair { blocks, steps: draft.steps, sends: draft.sends.into(), receives: draft.receives.into() })
    }

    /// Returns the number of members.
    #[must_use]
    pub fn members(&self) -> u32 {
        u32::try_from(self.receives.len()).expect("there are at most MEMBERS_MAX members")
    }

    /// Returns the number of blocks in the message.
    #[must_use]
    pub fn blocks(&self) -> BlockCount {
        self.blocks
    }

    /// Returns the number of steps, each with at least one hop; 0 if every member holds every block.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps.into()
    }

    /// Lists the hops that `rank` sends, in step order.
    ///
    /// The iterator owns all it needs, which it shares with the repair; an item takes O(1).
    ///
    /// # Panics
    /// If `rank` is not below [`members`](Repair::members).
    #[must_use]
    pub fn sends(&self, rank: Rank) -> RepairHops {
        RepairHops::new(&self.sends, rank)
    }

    /// Lists the hops that `rank` receives, in step order: every block that it misses, once.
    ///
    /// The iterator owns all it needs, which it shares with the repair; an item takes O(1).
    ///
    /// # Panics
    /// If `rank` is not below [`members`](Repair::members).
    #[must_use]
    pub fn receives(&self, rank: Rank) -> RepairHops {
        RepairHops::new(&self.receives, rank)
    }

    /// Lists the members that `rank` sends to and receives from in this repair, in O(h log h) for its h hops.
    ///
    /// # Panics
    /// If `rank` is not below [`members`](Repair::members).
    #[must_use]
    pub fn neighbours(&self, rank: Rank) -> Neighbours {
        Neighbours { sends_to: peers(self.sends(rank)), receives_from: peers(self.receives(rank)) }
    }
}

/// Lists one member's hops in a repair, in step order; made by [`Repair::sends`] and [`Repair::receives`].
#[derive(Clone, Debug)]
pub struct RepairHops {
    lists: Arc<[Vec<PackedHop>]>,
    rank: usize,
    left: Range<usize>,
}

impl RepairHops {
    fn new(lists: &Arc<[Vec<PackedHop>]>, rank: Rank) -> RepairHops {
        let (rank, members) = (rank.index(), lists.len());
        assert!(rank < members, "rank {rank} is no member of a group of {members}");
        RepairHops { lists: Arc::clone(lists), rank, left: 0..lists[rank].len() }
    }
}

impl Iterator for RepairHops {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        let PackedHop { step, peer, block } = self.lists[self.rank][self.left.next()?];
        Some(Hop { step: Step(step.into()), peer: Rank(peer), block: BlockIndex(block) })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for RepairHops {}

impl FusedIterator for RepairHops {}

/// A [`Hop`] in less memory.
#[derive(Clone, Copy, Debug)]
struct PackedHop {
    step: u32,
    peer: u32,
    block: u32,
}

/// A repair as far as it is planned.
#[derive(Debug)]
struct Draft {
    classes: HolderClasses,
    /// How many blocks each member still misses.
    needs: Vec<u32>,
    sent: Vec<u32>,
    sends: Vec<Vec<PackedHop>>,
    receives: Vec<Vec<PackedHop>>,
    steps: u32,
}

impl Draft {
    fn new(classes: HolderClasses, needs: Vec<u32>) -> Draft {
        let receives = needs.iter().map(|&need| Vec::with_capacity(need as usize)).collect();
        Draft { classes, sent: vec![0; needs.len()], sends: vec![Vec::new(); needs.len()], receives, needs, steps: 0 }
    }

    /// Adds a step; returns false if no member misses a block.
    fn add_step(&mut self) -> bool {
        let needy = self.needy();
        if needy.is_empty() {
            return false;
        }
        let mut pairing = Pairing::new(&self.classes, &self.sent, self.steps as usize);
        for &receiver in &needy {
            if pairing.is_full() {
                break;
            }
            pairing.choose(receiver);
        }
        let senders = pairing.senders();
        for receiver in needy {
            if let Some(sender) = senders[receiver as usize] {
                self.add(sender, receiver);
            }
        }
        self.classes.settle();
        self.steps += 1;
        true
    }

    /// Lists the members that miss a block, those that miss most first; equals take turns.
    fn needy(&self) -> Vec<u32> {
        let members = self.needs.len() as u64;
        let turn = |rank: u32| (u64::from(rank) + u64::from(self.steps)) % members;
        let mut needy: Vec<u32> = (0..).zip(&self.needs).filter(|(_, need)| **need > 0).map(|(rank, _)| rank).collect();
        needy.sort_unstable_by_key(|&rank| (Reverse(self.needs[rank as usize]), turn(rank)));
        needy
    }

    fn add(&mut self, sender: u32, receiver: u32) {
        let block = self.classes.give(sender, receiver).expect("a pair has a block to move");
        let (from, to) = (sender as usize, receiver as usize);
        self.sends[from].push(PackedHop { step: self.steps, peer: receiver, block });
        self.receives[to].push(PackedHop { step: self.steps, peer: sender, block });
        self.sent[from] += 1;
        self.needs[to] -= 1;
    }
}

/// A repair cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RepairError {
    /// The number of members is not in 1 ..= [`MEMBERS_MAX`].
    Members {
        /// The number of holdings given.
        got: usize,
    },
    /// The number of blocks is not in 1 ..= [`REPAIR_BLOCKS_MAX`].
    Blocks {
        /// The number of blocks of the message.
        got: BlockCount,
    },
    /// A member's holdings are of a message of another number of blocks than those of rank 0.
    BlocksMismatch {
        /// The first such member.
        rank: Rank,
        /// The number of blocks there.
        got: BlockCount,
        /// The number of blocks of rank 0's message.
        want: BlockCount,
    },
    /// More than [`REPAIR_HOPS_MAX`] blocks are missing at all members together.
    TooManyHops {
        /// How many are missing.
        got: u64,
    },
    /// No member holds some of the blocks, so these members cannot complete the message.
    Lost {
        /// Exactly these blocks.
        blocks: BlockSet,
    },
}

impl fmt::Display for RepairError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RepairError::Members { got } => write!(f, "a group has 1 to {MEMBERS_MAX} members, not {got}"),
            RepairError::Blocks { got } => {
                write!(f, "a message that is repaired has 1 to {REPAIR_BLOCKS_MAX} blocks, not {got}")
            }
            RepairError::BlocksMismatch { rank, got, want } => {
                write!(f, "rank {rank} holds blocks of a message of {got}, rank 0 of one of {want}")
            }
            RepairError::TooManyHops { got } => {
                write!(f, "a repair has at most {REPAIR_HOPS_MAX} hops, not {got}")
            }
            RepairError::Lost { blocks } => {
                write!(f, "no member holds {} of the {} blocks", blocks.len(), blocks.blocks())?;
                blocks.held().next().map_or(Ok(()), |first| write!(f, ", the first of them block {first}"))
            }
        }
    }
}

impl Error for RepairError {}

fn check_shape(holdings: &[BlockSet]) -> Result<(u32, BlockCount), RepairError> {
    let members = u32::try_from(holdings.len()).ok().filter(|members| (1..=MEMBERS_MAX).contains(members));
    let members = members.ok_or(RepairError::Members { got: holdings.len() })?;
    let want = holdings[0].blocks();
    if !(1..=REPAIR_BLOCKS_MAX).contains(&want.get()) {
        return Err(RepairError::Blocks { got: want });
    }
    match (0..).zip(holdings).find(|(_, held)| held.blocks() != want) {
        Some((rank, held)) => Err(RepairError::BlocksMismatch { rank: Rank(rank), got: held.blocks(), want }),
        None => Ok((members, want)),
    }
}
