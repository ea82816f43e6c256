//! Repairs: what is missing moves once, by the rules of every schedule, in few steps.

mod block_set;
mod exhaustive;
mod interrupted;
mod property;
mod shape;

use std::collections::BTreeSet;

use rdmc_schedule::{BlockCount, BlockIndex, BlockSet, Hop, Rank, Repair};

use crate::timetable::Crossing;

/// Makes the holdings of each member from the holders of each block, given as a bit for each rank.
pub(crate) fn holdings(members: u32, holders: &[u32]) -> Vec<BlockSet> {
    let blocks = BlockCount(u32::try_from(holders.len()).unwrap());
    let mut sets = vec![BlockSet::empty(blocks); members as usize];
    for (block, holders) in (0..).map(BlockIndex).zip(holders) {
        for set in sets.iter_mut().zip(0..).filter(|(_, rank)| holders >> rank & 1 == 1).map(|(set, _)| set) {
            set.insert(block);
        }
    }
    sets
}

/// Plans the repair and checks from both sides all that must hold of it.
pub(crate) fn checked(holdings: &[BlockSet]) -> Repair {
    let repair = Repair::new(holdings).unwrap();
    let sent = crossings(&repair, |from| {
        let crossing = move |send: Hop| Crossing { step: send.step.0, from, to: send.peer.0, block: send.block.0 };
        repair.sends(Rank(from)).map(crossing).collect()
    });
    let received = crossings(&repair, |to| {
        let crossing = move |got: Hop| Crossing { step: got.step.0, from: got.peer.0, to, block: got.block.0 };
        repair.receives(Rank(to)).map(crossing).collect()
    });
    assert_eq!(sent, received, "both ends agree");

    let mut held = holdings.to_vec();
    for step in sent.chunk_by(|one, next| one.step == next.step) {
        let (mut senders, mut receivers) = (BTreeSet::new(), BTreeSet::new());
        for crossing in step {
            assert!(senders.insert(crossing.from), "sends twice: {crossing:?}");
            assert!(receivers.insert(crossing.to), "receives twice: {crossing:?}");
            let source = &held[crossing.from as usize];
            assert!(source.contains(BlockIndex(crossing.block)), "sent before it was held: {crossing:?}");
        }
        for crossing in step {
            let new = held[crossing.to as usize].insert(BlockIndex(crossing.block));
            assert!(new, "a block comes once, and only where it is missing: {crossing:?}");
        }
    }
    assert!(held.iter().all(BlockSet::is_full), "everybody gets every block");
    let used: BTreeSet<u64> = sent.iter().map(|crossing| crossing.step).collect();
    assert!(used.into_iter().eq(0..repair.steps()), "something moves in every step");
    repair
}

/// Returns a number of steps below which there is no plan.
pub(crate) fn fewest_steps(members: u32, holders: &[u32]) -> u64 {
    if members == 1 {
        return 0;
    }
    let missing = (0..members).map(|rank| count(holders, |holders| holders >> rank & 1 == 0)).max();
    // What only a few hold must leave them, as many blocks in a step as they are, and the last one must spread.
    let spreading = |group: u32| {
        let (only_there, size) = (count(holders, |holders| holders & !group == 0), u64::from(group.count_ones()));
        let doublings = u64::from(members).div_ceil(size).next_power_of_two().ilog2();
        if only_there == 0 { 0 } else { only_there.div_ceil(size) - 1 + u64::from(doublings) }
    };
    let groups: Vec<u32> = match members {
        0..=6 => (1..(1 << members) - 1).collect(),
        _ => (0..members).flat_map(|one| (0..=one).map(move |other| 1 << one | 1 << other)).collect(),
    };
    groups.into_iter().map(spreading).chain(missing).max().unwrap()
}

fn count(holders: &[u32], which: impl Fn(u32) -> bool) -> u64 {
    holders.iter().filter(|holders| which(**holders)).count() as u64
}

fn crossings(repair: &Repair, list: impl Fn(u32) -> Vec<Crossing>) -> Vec<Crossing> {
    let mut crossings = Vec::new();
    for rank in 0..repair.members() {
        let own = list(rank);
        assert!(own.is_sorted_by(|one, next| one.step < next.step), "hops come in step order: rank {rank}");
        crossings.extend(own);
    }
    crossings.sort_unstable();
    crossings
}
