//! Träff's schedule on a circulant graph (arXiv 2312.11236), for any number of members.
//!
//! Members stand on a circle. Rounds repeat in phases of q = ⌈log₂ n⌉; in round i of each every member sends to
//! the one `skips[i]` further on, where the skips are n halved again and again, rounding up. Which block that is
//! follows from a table of q small numbers per receiver, one phase adding q to each of them.

use crate::simple::stages;
use crate::walk::{PeerBlock, Side, StepSource, Walk, capped};

/// Lists what `rank` sends or receives; O(log² n) once, then O(1) a step.
pub(crate) fn walk(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let circle = Circle::new(members);
    let lanes = Lanes::new(&circle, blocks, rank, side);
    let window = match lanes.lanes.iter().any(Option::is_some) {
        true => 0..steps(members, blocks),
        false => 0..0,
    };
    Walk::new(StepSource::Lanes(Box::new(lanes)), window)
}

/// Returns k − 1 + ⌈log₂ n⌉, or 0 for the root alone.
pub(crate) fn steps(members: u32, blocks: u32) -> u64 {
    match members {
        1 => 0,
        _ => u64::from(blocks) - 1 + u64::from(stages(members)),
    }
}

/// Holds one member's sending or receiving side: the peer and the first block of each round of a phase.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    lanes: [Option<Lane>; ROUNDS_MAX],
    rounds: u32,
    /// Rounds of the first phase that are left out, so that the last block ends a phase.
    skipped: u32,
    blocks: u32,
}

/// The traffic of the rounds that are congruent modulo q.
#[derive(Clone, Copy, Debug)]
struct Lane {
    peer: u32,
    /// The block that moves in step 0 if it is this lane's; blocks below 0 do not move.
    block_at_start: i32,
}

impl Lanes {
    fn new(circle: &Circle, blocks: u32, rank: u32, side: Side) -> Lanes {
        let mut lanes = [None; ROUNDS_MAX];
        for (round, lane) in lanes.iter_mut().enumerate().take(circle.rounds) {
            let (peer, receiver) = match side {
                Side::Send => {
                    let next = circle.after(rank, round);
                    (next, next)
                }
                Side::Receive => (circle.before(rank, round), rank),
            };
            // No member sends to the root, which has every block.
            *lane = (receiver != 0)
                .then(|| Lane { peer, block_at_start: circle.receive_table(receiver)[round] - small(round) });
        }
        let rounds = stages(circle.members);
        let past_phase = (blocks - 1).checked_rem(rounds).unwrap_or(0);
        Lanes { lanes, rounds, skipped: if past_phase == 0 { 0 } else { rounds - past_phase }, blocks }
    }

    /// Returns the hop in `step`, which must lie below [`steps`]. O(1).
    pub(crate) fn peer_block(&self, step: u64) -> Option<PeerBlock> {
        let round = (step + u64::from(self.skipped)) % u64::from(self.rounds);
        let lane = self.lanes[usize::try_from(round).expect("a phase is a few rounds long")]?;
        let block = step.checked_add_signed(i64::from(lane.block_at_start))?;
        Some(PeerBlock { peer: lane.peer, block: capped(block, self.blocks) })
    }
}

/// The circle of n members and its q distances.
struct Circle {
    members: u32,
    rounds: usize,
    /// `skips[rounds]` is n, each one before it is half of it rounded up, `skips[0]` is 1.
    skips: [u32; ROUNDS_MAX + 1],
}

impl Circle {
    fn new(members: u32) -> Circle {
        let rounds = stages(members) as usize;
        let mut skips = [0; ROUNDS_MAX + 1];
        skips[rounds] = members;
        for round in (0..rounds).rev() {
            skips[round] = skips[round + 1].div_ceil(2);
        }
        Circle { members, rounds, skips }
    }

    fn after(&self, rank: u32, round: usize) -> u32 {
        (rank + self.skips[round]) % self.members
    }

    fn before(&self, rank: u32, round: usize) -> u32 {
        (rank + self.members - self.skips[round]) % self.members
    }

    /// Returns, for each round of the first phase, the block that `rank`, not the root, takes, counted from the
    /// phase's first.
    ///
    /// One of them, the base block, is its own round's and at least 0; the others are −q .. −1. All are distinct
    /// modulo q.
    fn receive_table(&self, rank: u32) -> [i32; ROUNDS_MAX] {
        let base = self.base_block(rank);
        let mut search =
            Search { circle: self, rank, free: [true; ROUNDS_MAX + 1], chosen: [0; ROUNDS_MAX], chosen_len: 0 };
        search.free[base] = false;
        search.extend(0, 2 * self.members, self.rounds);
        debug_assert!(search.is_complete());
        search.chosen.map(|skip| if skip == self.rounds { small(base) } else { small(skip) - small(self.rounds) })
    }

    /// Returns the index of the smallest term when `rank` is written greedily as a sum of distinct skips, or q if
    /// there is no term.
    fn base_block(&self, rank: u32) -> usize {
        let mut rest = rank;
        for round in (0..self.rounds).rev() {
            if self.skips[round] == rest {
                return round;
            }
            if self.skips[round] < rest {
                rest -= self.skips[round];
            }
        }
        self.rounds
    }
}

/// The search for the blocks that one rank takes, round by round.
///
/// Block e reaches a rank over a sum of distinct skips that ends in `skips[e]`. For each round in turn the search
/// takes the largest free e with such a sum within reach of the rank that speaks in that round.
struct Search<'a> {
    circle: &'a Circle,
    rank: u32,
    free: [bool; ROUNDS_MAX + 1],
    chosen: [usize; ROUNDS_MAX],
    chosen_len: usize,
}

impl Search<'_> {
    /// Tries to go on from the sum `at` by one more skip, none larger than `skips[top]`, staying below `bound`.
    ///
    /// A sum that is in reach of the following round too is first gone on from, since that may lead nearer. The depth
    /// is at most q + 1.
    fn extend(&mut self, at: u32, mut bound: u32, top: usize) {
        for skip in (0..=top).rev() {
            let to = at + self.circle.skips[skip];
            if !self.free[skip] || to >= bound || to > self.reach(0) {
                continue;
            }
            if to <= self.reach(1) && skip > 0 {
                self.extend(to, bound, skip - 1);
            }
            if self.is_complete() || at > self.reach(1) {
                return;
            }
            self.chosen[self.chosen_len] = skip;
            self.chosen_len += 1;
            self.free[skip] = false;
            bound = to;
            if self.is_complete() {
                return;
            }
        }
    }

    /// Returns the largest sum in reach of the next undecided round, or of the one that comes `later`.
    fn reach(&self, later: usize) -> u32 {
        self.circle.members + self.rank - self.circle.skips[self.chosen_len + later]
    }

    fn is_complete(&self) -> bool {
        self.chosen_len == self.circle.rounds
    }
}

fn small(round: usize) -> i32 {
    i32::try_from(round).expect("a phase is a few rounds long")
}

/// ⌈log₂ n⌉ for the largest group.
const ROUNDS_MAX: usize = crate::schedule::MEMBERS_MAX.ilog2() as usize;
