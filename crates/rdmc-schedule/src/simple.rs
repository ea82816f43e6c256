//! The algorithms that move a message's blocks in order: sequential, chain and binomial tree (DSN §4.3), and the
//! fan-out.

use std::ops::Range;

use crate::walk::{PeerBlock, Side, StepSource, Walk};

/// The message's blocks in order, once for every peer, in consecutive steps.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    start: u64,
    blocks: u32,
    peers: RunPeers,
}

/// The member at the other end of the message's lap-th crossing.
#[derive(Clone, Copy, Debug)]
enum RunPeers {
    /// One member; there is one lap only.
    One(u32),
    /// Every rank from 1 on.
    Everyone,
    /// The ranks at distance 2^stage from `rank`, from `stage` on.
    Doubling { rank: u32, stage: u64 },
}

impl Run {
    /// Returns the hop in `step`, which must lie in the window of this run.
    pub(crate) fn peer_block(&self, step: u64) -> PeerBlock {
        let lap = (step - self.start) / u64::from(self.blocks);
        let block = (step - self.start) % u64::from(self.blocks);
        let peer = match self.peers {
            RunPeers::One(peer) => peer,
            RunPeers::Everyone => 1 + small(lap),
            RunPeers::Doubling { rank, stage } => rank + (1 << (stage + lap)),
        };
        PeerBlock { peer, block: small(block) }
    }
}

/// Lists a sequential side: in step j the root sends block j mod k to member 1 + j div k.
pub(crate) fn sequential(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let k = u64::from(blocks);
    match (side, rank) {
        (Side::Send, 0) => run(RunPeers::Everyone, blocks, 0..sequential_steps(members, blocks)),
        (Side::Receive, 1..) => {
            let before = u64::from(rank - 1);
            run(RunPeers::One(0), blocks, before * k..(before + 1) * k)
        }
        _ => idle(),
    }
}

/// The message's blocks in order, each to every receiver; or, from the view of one receiver, each from the root.
#[derive(Clone, Debug)]
pub(crate) struct Fan {
    receivers: u32,
    /// The receiver that is asked about, or `None` for the root.
    receiver: Option<u32>,
}

impl Fan {
    /// Returns the `index`th hop and its step.
    pub(crate) fn peer_block(&self, index: u64) -> (u64, PeerBlock) {
        let receivers = u64::from(self.receivers);
        match self.receiver {
            None => (index, PeerBlock { peer: 1 + small(index % receivers), block: small(index / receivers) }),
            Some(rank) => (index * receivers + u64::from(rank - 1), PeerBlock { peer: 0, block: small(index) }),
        }
    }
}

/// Lists a fan-out's side: in step j the root sends block j div (n − 1) to member 1 + j mod (n − 1).
pub(crate) fn fanout(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let receivers = members - 1;
    match (side, rank) {
        (Side::Send, 0) if receivers > 0 => {
            Walk::new(StepSource::Fan(Fan { receivers, receiver: None }), 0..sequential_steps(members, blocks))
        }
        (Side::Receive, 1..) => Walk::new(StepSource::Fan(Fan { receivers, receiver: Some(rank) }), 0..blocks.into()),
        _ => idle(),
    }
}

/// Lists a chain's side: in step j member i sends block j − i to member i + 1.
pub(crate) fn chain(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let (peer, start) = match side {
        Side::Send if rank + 1 < members => (rank + 1, rank),
        Side::Receive if rank > 0 => (rank - 1, rank - 1),
        _ => return idle(),
    };
    let start = u64::from(start);
    run(RunPeers::One(peer), blocks, start..start + u64::from(blocks))
}

/// Lists a binomial tree's side: in stage s, which is k steps long, every member i < 2^s sends the whole message to
/// i + 2^s.
pub(crate) fn tree(members: u32, blocks: u32, rank: u32, side: Side) -> Walk {
    let k = u64::from(blocks);
    match side {
        Side::Receive => match rank.checked_ilog2() {
            None => idle(),
            Some(stage) => {
                let start = u64::from(stage) * k;
                run(RunPeers::One(rank - (1 << stage)), blocks, start..start + k)
            }
        },
        Side::Send => {
            let stage = u64::from(rank.checked_ilog2().map_or(0, |stage| stage + 1));
            let end = u64::from(stages(members - rank));
            let peers = RunPeers::Doubling { rank, stage };
            run(peers, blocks, stage * k..end.max(stage) * k)
        }
    }
}

pub(crate) fn sequential_steps(members: u32, blocks: u32) -> u64 {
    u64::from(members - 1) * u64::from(blocks)
}

pub(crate) fn chain_steps(members: u32, blocks: u32) -> u64 {
    match members {
        1 => 0,
        _ => u64::from(blocks) + u64::from(members) - 2,
    }
}

pub(crate) fn tree_steps(members: u32, blocks: u32) -> u64 {
    u64::from(stages(members)) * u64::from(blocks)
}

/// Returns ⌈log₂ reach⌉: how many powers of two, from 1 on, are below `reach`.
pub(crate) fn stages(reach: u32) -> u32 {
    match reach {
        1 => 0,
        _ => (reach - 1).ilog2() + 1,
    }
}

fn run(peers: RunPeers, blocks: u32, window: Range<u64>) -> Walk {
    let start = window.start;
    Walk::new(StepSource::Run(Run { start, blocks, peers }), window)
}

/// Lists no hops.
pub(crate) fn idle() -> Walk {
    run(RunPeers::One(0), 1, 0..0)
}

fn small(number: u64) -> u32 {
    u32::try_from(number).expect("blocks and ranks are 32-bit numbers")
}
