//! The hybrid with a leader for each rack: a spine from rack to rack, and the binomial pipeline inside each rack (DSN
//! §4.3). The one without leaders is in `rack_trees.rs`.
//!
//! A rack runs the pipeline over *logical* blocks: logical block i is the i-th one that its leader gets. Step j of
//! the rack runs as soon as the leader holds logical block j, and once the leader has them all, one step after the
//! other. So a rack's steps keep their order, which is all that the pipeline asks for.

use std::iter::Peekable;
use std::sync::Arc;

use crate::algorithm::Spine;
use crate::hop::{BlockIndex, Hop, Rank, Step};
use crate::pipeline::{self, Cube};
use crate::racks::Racks;
use crate::walk::{PeerBlock, Side, Walk, capped};
use crate::{cascade, simple};

/// The spines that bring the blocks to one leader of each rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaderSpine {
    Chain,
    BinomialPipeline,
    Cascade,
}

impl LeaderSpine {
    /// Returns the spine; `None` if it is that of [`rack_trees`](crate::rack_trees).
    pub(crate) fn of(spine: Spine) -> Option<LeaderSpine> {
        match spine {
            Spine::Chain => Some(LeaderSpine::Chain),
            Spine::BinomialPipeline => Some(LeaderSpine::BinomialPipeline),
            Spine::Cascade => Some(LeaderSpine::Cascade),
            Spine::TwoTree => None,
        }
    }
}

/// Lists the hops that `rank` sends or receives on both levels.
pub(crate) fn levels(racks: &Arc<Racks>, kind: LeaderSpine, blocks: u32, rank: u32, side: Side) -> Levels {
    let rack = racks.rack_of(Rank(rank)).expect("ranks are checked where they come in");
    let ranks = racks.ranks_of(rack);
    let place = ranks.partition_point(|&other| other < rank);
    let place = count(&ranks[..place]);
    let start = match kind {
        LeaderSpine::Cascade => cascade::start(racks, rack),
        _ => 0,
    };
    let spine = match kind {
        LeaderSpine::Cascade => cascade::walk(racks, blocks, rack, start, place, side),
        _ if place > 0 => simple::idle(),
        LeaderSpine::Chain => simple::chain(racks.count(), blocks, rack, side),
        LeaderSpine::BinomialPipeline => pipeline::walk(racks.count(), blocks, rack, side),
    };
    let peers = match (kind, side) {
        (LeaderSpine::Cascade, Side::Receive) => SpinePeers::MembersOf(rack.saturating_sub(1)),
        _ => SpinePeers::Leaders,
    };
    let spine = SpineLevel { walk: spine, peers, racks: Arc::clone(racks) };
    let rack = RackLevel {
        walk: pipeline::walk(count(ranks), blocks, place, side),
        clock: RackClock::new(racks, kind, blocks, rack, start),
        racks: Arc::clone(racks),
        rack,
    };
    Levels { spine: spine.peekable(), rack: rack.peekable() }
}

/// Returns the number of steps until the last rack, and the spine, have done their last one. O(racks).
pub(crate) fn steps(racks: &Racks, kind: LeaderSpine, blocks: u32) -> u64 {
    let leaders = racks.count();
    let spine = match kind {
        LeaderSpine::Chain => simple::chain_steps(leaders, blocks),
        LeaderSpine::BinomialPipeline => Cube::new(leaders, blocks).steps(),
        LeaderSpine::Cascade => cascade::steps(racks, blocks),
    };
    let mut start = 0;
    (0..leaders)
        .filter_map(|rack| {
            let clock = RackClock::new(racks, kind, blocks, rack, start);
            start += cascade::delay(racks, rack);
            let last = Cube::new(racks.size(rack), blocks).steps().checked_sub(1)?;
            Some(clock.step(last) + 1)
        })
        .fold(spine, u64::max)
}

/// A member's hops in step order; in the same step those of the spine come before those of the rack.
#[derive(Clone, Debug)]
pub(crate) struct Levels {
    spine: Peekable<SpineLevel>,
    rack: Peekable<RackLevel>,
}

impl Iterator for Levels {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        let spine_first = match (self.spine.peek(), self.rack.peek()) {
            (Some(spine), Some(rack)) => spine.step <= rack.step,
            (spine, _) => spine.is_some(),
        };
        if spine_first { self.spine.next() } else { self.rack.next() }
    }
}

/// A member's hops to or from other racks, in step order.
#[derive(Clone, Debug)]
struct SpineLevel {
    walk: Walk,
    peers: SpinePeers,
    racks: Arc<Racks>,
}

/// The meaning of the peers of a walk on the spine.
#[derive(Clone, Copy, Debug)]
enum SpinePeers {
    /// The leaders of the racks of that number.
    Leaders,
    /// The members at that place of a rack.
    MembersOf(u32),
}

impl Iterator for SpineLevel {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        let (step, PeerBlock { peer, block }) = self.walk.next()?;
        let peer = match self.peers {
            SpinePeers::Leaders => self.racks.ranks_of(peer)[0],
            SpinePeers::MembersOf(rack) => self.racks.ranks_of(rack)[peer as usize],
        };
        Some(Hop { step: Step(step), peer: Rank(peer), block: BlockIndex(block) })
    }
}

/// A member's hops to or from others in its rack, in step order.
#[derive(Clone, Debug)]
struct RackLevel {
    walk: Walk,
    clock: RackClock,
    racks: Arc<Racks>,
    rack: u32,
}

impl Iterator for RackLevel {
    type Item = Hop;

    fn next(&mut self) -> Option<Hop> {
        let (rack_step, PeerBlock { peer, block }) = self.walk.next()?;
        Some(Hop {
            step: Step(self.clock.step(rack_step)),
            peer: Rank(self.racks.ranks_of(self.rack)[peer as usize]),
            block: BlockIndex(self.clock.block(block)),
        })
    }
}

/// Maps a rack's own steps and logical blocks to those of the whole schedule.
#[derive(Clone, Debug)]
struct RackClock {
    blocks: u32,
    leader: LeaderArrivals,
}

/// How the blocks arrive at the leader of a rack.
#[derive(Clone, Debug)]
enum LeaderArrivals {
    /// In order, one a step; the leader holds the first from step `first` on. The root counts as such a leader, since
    /// it needs no more than that.
    InOrder { first: u64 },
    /// As the pipeline on the spine brings them.
    Pipeline { spine: Cube, place: u32 },
}

impl RackClock {
    /// Returns the clock of a rack that, if the spine is the cascade, begins in step `start`.
    fn new(racks: &Racks, spine: LeaderSpine, blocks: u32, rack: u32, start: u64) -> RackClock {
        let leader = match (rack, spine) {
            (0, _) => LeaderArrivals::InOrder { first: 0 },
            (_, LeaderSpine::Cascade) => LeaderArrivals::InOrder { first: start },
            (_, LeaderSpine::Chain) => LeaderArrivals::InOrder { first: u64::from(rack) },
            (_, LeaderSpine::BinomialPipeline) => {
                LeaderArrivals::Pipeline { spine: Cube::new(racks.count(), blocks), place: rack }
            }
        };
        RackClock { blocks, leader }
    }

    /// Returns the step of the whole schedule in which step `rack_step` of the rack runs; strictly increasing.
    fn step(&self, rack_step: u64) -> u64 {
        let newest = capped(rack_step, self.blocks);
        let held = match &self.leader {
            LeaderArrivals::InOrder { first } => first + u64::from(newest),
            LeaderArrivals::Pipeline { spine, place } => spine.arrival(*place, newest) + 1,
        };
        held + (rack_step - u64::from(newest))
    }

    /// Returns the block of the message that is the rack's logical block `nth`.
    fn block(&self, nth: u32) -> u32 {
        match &self.leader {
            LeaderArrivals::InOrder { .. } => nth,
            LeaderArrivals::Pipeline { spine, place } => {
                let arrival = spine.arrival(*place, nth);
                let hop = spine.receive(*place, arrival);
                hop.expect("a block arrives in the step of an arrival").block
            }
        }
    }
}

fn count(ranks: &[u32]) -> u32 {
    u32::try_from(ranks.len()).expect("groups are small")
}
