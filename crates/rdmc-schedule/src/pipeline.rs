//! The binomial pipeline, for any number of members (DSN §4.4; Draft, App. A).
//!
//! The members stand on the vertices of a hypercube with d = ⌊log₂ n⌋ dimensions; step j runs along dimension
//! j mod d. Vertex v holds member v and, when n is no power of two, possibly a *twin*, member v + 2^d − 1; the
//! root never has one. A vertex *climbs* in the steps along the dimensions of its set bits: it gets its newest block
//! then. Of two twins one, the *front*, takes the block that arrives at the vertex. The other, the *back*, sends the
//! block that leaves the vertex. They swap after every climb. Meanwhile the front passes its latest block on to the
//! back. A member that is alone on its vertex is front and back at once.
//!
//! When n is no power of two, one closing step follows, in which twins send each other the blocks that they miss.

use crate::walk::{PeerBlock, Side, StepSource, Walk, capped};

/// Lists the hops that `rank` sends or receives.
pub(crate) fn walk(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let cube = Cube::new(members, blocks);
    let window = match (side, rank) {
        (Side::Receive, 0) => 0..0,
        // The other member of a pair has no member to send to.
        (Side::Send, 1) if members == 2 => 0..0,
        _ => 0..cube.steps(),
    };
    Walk::new(StepSource::Cube(CubeSide { cube, rank, side }), window)
}

/// One member's sending or receiving side.
#[derive(Clone, Debug)]
pub(crate) struct CubeSide {
    cube: Cube,
    rank: u32,
    side: Side,
}

impl CubeSide {
    /// Returns the hop in `step`, which must lie below [`Cube::steps`]. O(1).
    pub(crate) fn peer_block(&self, step: u64) -> Option<PeerBlock> {
        match self.side {
            Side::Send => self.cube.send(self.rank, step),
            Side::Receive => self.cube.receive(self.rank, step),
        }
    }
}

/// The hypercube of n members, and the k blocks that cross it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cube {
    members: u32,
    blocks: u32,
    dimensions: u32,
}

impl Cube {
    pub(crate) fn new(members: u32, blocks: u32) -> Cube {
        Cube { members, blocks, dimensions: members.ilog2() }
    }

    /// Returns k − 1 + ⌈log₂ n⌉, or 0 for the root alone.
    pub(crate) fn steps(self) -> u64 {
        match self.members {
            1 => 0,
            _ => u64::from(self.blocks) - 1 + self.round() + u64::from(!self.is_full()),
        }
    }

    /// Returns the hop that `rank` sends in `step`.
    fn send(self, rank: u32, step: u64) -> Option<PeerBlock> {
        let vertex = self.vertex(rank);
        let (front, back) = self.pair(vertex, step);
        if self.is_closing(step) {
            if self.blocks > 1 {
                return self.give_to_twin(vertex, rank, step);
            }
            let across = vertex ^ 1;
            self.twin(across)?;
            let peer = self.pair(across, step).0;
            (rank == back).then_some(PeerBlock { peer, block: 0 })
        } else if rank == back {
            let across = vertex ^ self.axis(step);
            let block = self.arriving(across, step)?;
            let peer = self.pair(across, step).0;
            Some(PeerBlock { peer, block })
        } else {
            debug_assert_eq!(rank, front);
            self.give_to_twin(vertex, rank, step)
        }
    }

    /// Returns the hop that `rank` receives in `step`.
    pub(crate) fn receive(self, rank: u32, step: u64) -> Option<PeerBlock> {
        let vertex = self.vertex(rank);
        let (front, back) = self.pair(vertex, step);
        if self.is_closing(step) {
            let twin = self.twin(vertex)?;
            if self.blocks > 1 {
                let giver = if rank == twin { vertex } else { twin };
                let block = self.give_to_twin(vertex, giver, step)?.block;
                return Some(PeerBlock { peer: giver, block });
            }
            let peer = self.pair(vertex ^ 1, step).1;
            (rank == front).then_some(PeerBlock { peer, block: 0 })
        } else if rank == front {
            let block = self.arriving(vertex, step)?;
            let peer = self.pair(vertex ^ self.axis(step), step).1;
            Some(PeerBlock { peer, block })
        } else {
            debug_assert_eq!(rank, back);
            let block = self.give_to_twin(vertex, front, step)?.block;
            Some(PeerBlock { peer: front, block })
        }
    }

    /// Returns the step in which `rank`, not the root, gets the `nth` (counted from 0) of its k blocks.
    ///
    /// Every member gets one early block, when its vertex climbs its highest dimension for the first time or, for
    /// the twin that was not in front then, with the second round; the others come one a step.
    pub(crate) fn arrival(self, rank: u32, nth: u32) -> u64 {
        let vertex = self.vertex(rank);
        let first_arrival = u64::from(vertex.ilog2());
        let twinned = self.twin(vertex).is_some();
        if nth == 0 && self.pair(vertex, first_arrival).0 == rank {
            first_arrival
        } else {
            self.round() + u64::from(nth) - u64::from(!twinned)
        }
    }

    /// Returns the member that gets `block` from the root, in the step of that number; the root itself if it is alone.
    pub(crate) fn first_taker(self, block: u32) -> u32 {
        match self.members {
            1 => 0,
            _ => self.pair(self.axis(block.into()), block.into()).0,
        }
    }

    /// Tells whether `rank` ever is a [first taker](Self::first_taker).
    pub(crate) fn takes_from_root(self, rank: u32) -> bool {
        self.members == 1 || self.vertex(rank).is_power_of_two()
    }

    /// Returns the hop from `giver`, one of two twins, to the other one in `step`: its own latest block from another
    /// vertex, if it has one.
    fn give_to_twin(self, vertex: u32, giver: u32, step: u64) -> Option<PeerBlock> {
        let twin = self.twin(vertex)?;
        let taker = if giver == twin { vertex } else { twin };
        let previous = step.checked_sub(1)?;
        let arrival = if giver != self.pair(vertex, step).0 {
            // The back was in front until the last climb.
            self.last_climb(vertex, step)?
        } else if self.climbs(vertex, previous) {
            // The twins have just swapped: the front was in front before, until the climb before the last.
            self.last_climb(vertex, previous)?
        } else {
            previous
        };
        let block = self.arriving(vertex, arrival)?;
        Some(PeerBlock { peer: taker, block })
    }

    /// Returns the block that arrives at `vertex` from the one across, in a step before the closing one.
    ///
    /// When the vertex climbs, it is the newest: the block due at the vertex's next climb, a round earlier. Otherwise
    /// it is one that is a round old.
    fn arriving(self, vertex: u32, step: u64) -> Option<u32> {
        if vertex == 0 {
            return None;
        }
        let due = if self.climbs(vertex, step) {
            step + 1 + u64::from(self.rotated(vertex, step + 1).trailing_zeros())
        } else {
            step
        };
        Some(capped(due.checked_sub(self.round())?, self.blocks))
    }

    /// Returns the members of `vertex` that are front and back in `step`.
    fn pair(self, vertex: u32, step: u64) -> (u32, u32) {
        let Some(twin) = self.twin(vertex) else {
            return (vertex, vertex);
        };
        let in_whole_rounds = match (step / self.round()) % 2 {
            0 => 0,
            _ => vertex.count_ones(),
        };
        let in_this_round = (vertex & (self.axis(step) - 1)).count_ones();
        match (in_whole_rounds + in_this_round) % 2 {
            0 => (vertex, twin),
            _ => (twin, vertex),
        }
    }

    /// Returns the last step before `step` in which `vertex`, not the root's, climbed.
    fn last_climb(self, vertex: u32, step: u64) -> Option<u64> {
        let since = self.dimensions - self.rotated(vertex, step).ilog2();
        step.checked_sub(u64::from(since))
    }

    fn climbs(self, vertex: u32, step: u64) -> bool {
        vertex & self.axis(step) != 0
    }

    /// Returns `vertex` with its bits in the order in which the steps from `step` on run along them.
    fn rotated(self, vertex: u32, step: u64) -> u32 {
        let by = self.axis(step).trailing_zeros();
        (vertex >> by | vertex << (self.dimensions - by)) & (self.vertices() - 1)
    }

    /// Returns the bit in which the two vertices at the ends of an edge differ in `step`.
    fn axis(self, step: u64) -> u32 {
        1 << (step % self.round())
    }

    fn is_closing(self, step: u64) -> bool {
        !self.is_full() && step + 1 == self.steps()
    }

    fn vertex(self, rank: u32) -> u32 {
        match rank.checked_sub(self.vertices()) {
            None => rank,
            Some(nth_twin) => nth_twin + 1,
        }
    }

    fn twin(self, vertex: u32) -> Option<u32> {
        let twin = vertex + self.vertices() - 1;
        (vertex > 0 && twin < self.members).then_some(twin)
    }

    fn vertices(self) -> u32 {
        1 << self.dimensions
    }

    fn is_full(self) -> bool {
        self.members == self.vertices()
    }

    /// Returns how many steps pass until one runs along the same dimension again.
    fn round(self) -> u64 {
        u64::from(self.dimensions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_are_the_steps_in_which_a_member_receives() {
        for members in 2..=140 {
            for blocks in 1..=16 {
                let cube = Cube::new(members, blocks);
                for rank in 1..members {
                    let arrivals = (0..blocks).map(|nth| cube.arrival(rank, nth));
                    let steps = (0..cube.steps()).filter(|&step| cube.receive(rank, step).is_some());
                    assert!(arrivals.eq(steps), "n = {members}, k = {blocks}, rank {rank}");
                }
            }
        }
    }
}
