//! Situations with a name, neighbours, and what is refused.

use std::collections::BTreeSet;

use rdmc_schedule::{
    BlockCount, BlockIndex, BlockSet, MEMBERS_MAX, Neighbours, REPAIR_BLOCKS_MAX, Rank, Repair, RepairError, RepairHops,
};

use crate::repair::checked;

fn empty(blocks: u32) -> BlockSet {
    BlockSet::empty(BlockCount(blocks))
}

fn full(blocks: u32) -> BlockSet {
    BlockSet::full(BlockCount(blocks))
}

#[test]
fn one_full_and_many_empty_members_take_about_as_long_as_the_pipeline() {
    for (blocks, excess_max) in [(1, 0), (10, 1), (100, 3)] {
        for members in 2..=70_usize {
            let mut holdings = vec![empty(blocks); members];
            holdings[members / 3] = full(blocks);
            let excess = checked(&holdings).steps() - u64::from(blocks - 1 + members.next_power_of_two().ilog2());
            assert!(excess <= excess_max, "n = {members}, k = {blocks}: {excess} steps more");
        }
    }
}

#[test]
fn holders_share_the_load_of_members_with_nothing() {
    for empties in 1..=4 {
        let mut holdings = vec![full(100); 9];
        holdings[3..3 + empties].fill(empty(100));
        let repair = checked(&holdings);
        assert_eq!(repair.steps(), 100, "{empties} have nothing");
        let holders = (0..9).map(Rank).filter(|rank| holdings[rank.index()].is_full());
        let sent: Vec<usize> = holders.map(|rank| repair.sends(rank).len()).collect();
        let (least, most) = (sent.iter().min().unwrap(), sent.iter().max().unwrap());
        assert!(most - least <= 1, "{empties} have nothing: {sent:?}");
    }
}

#[test]
fn a_common_prefix_costs_nothing() {
    let mut holdings = vec![empty(1000); 8];
    for (held, own) in holdings.iter_mut().zip(990..) {
        (0..990).chain([own]).for_each(|block| assert!(held.insert(BlockIndex(block))));
    }
    holdings[0] = full(1000);
    assert_eq!(checked(&holdings).steps(), 9);
}

#[test]
fn nobody_moves_when_everybody_has_everything() {
    for members in [1, 2, 65] {
        let repair = checked(&vec![full(7); members]);
        assert_eq!((repair.members() as usize, repair.blocks(), repair.steps()), (members, BlockCount(7), 0));
        assert_eq!(repair.neighbours(Rank(0)), Neighbours::default());
    }
}

#[test]
fn groups_beyond_a_word_of_members_are_repaired() {
    let mut holdings = vec![empty(20); 300];
    for block in 0..20 {
        holdings[15 * block as usize].insert(BlockIndex(block));
    }
    // Most miss 20, and a block needs 9 steps to reach 300.
    assert_eq!(checked(&holdings).steps(), 23);
}

#[test]
fn the_largest_group_is_repaired() {
    let mut holdings = vec![empty(1); MEMBERS_MAX as usize];
    holdings[40_000] = full(1);
    assert_eq!(Repair::new(&holdings).unwrap().steps(), 16);
}

#[test]
fn neighbours_are_those_with_a_transfer() {
    let mut holdings = vec![empty(12); 9];
    holdings[2] = full(12);
    (0..12).step_by(2).for_each(|block| assert!(holdings[7].insert(BlockIndex(block))));
    let repair = checked(&holdings);
    for rank in (0..9).map(Rank) {
        let ranks = |hops: RepairHops| hops.map(|hop| hop.peer).collect::<BTreeSet<_>>();
        let neighbours = repair.neighbours(rank);
        assert!(neighbours.sends_to.into_iter().eq(ranks(repair.sends(rank))));
        assert!(neighbours.receives_from.into_iter().eq(ranks(repair.receives(rank))));
    }
}

#[test]
fn lost_blocks_are_named() {
    let mut holdings = vec![empty(130); 3];
    holdings[1] = full(130);
    assert!(Repair::new(&holdings).is_ok());
    holdings[1] = empty(130);
    (0..130).filter(|block| ![5, 63, 64, 129].contains(block)).for_each(|block| {
        holdings[block as usize % 3].insert(BlockIndex(block));
    });
    let error = Repair::new(&holdings).unwrap_err();
    assert_eq!(error.to_string(), "no member holds 4 of the 130 blocks, the first of them block 5");
    let RepairError::Lost { blocks } = error else { panic!("{error:?}") };
    assert!(blocks.held().eq([5, 63, 64, 129].map(BlockIndex)));
}

#[test]
fn what_no_group_holds_is_refused() {
    let refused = |holdings: &[BlockSet]| Repair::new(holdings).unwrap_err();
    assert_eq!(refused(&[]), RepairError::Members { got: 0 });
    assert_eq!(refused(&vec![full(1); 65_537]), RepairError::Members { got: 65_537 });
    assert_eq!(refused(&[empty(0)]), RepairError::Blocks { got: BlockCount(0) });
    let got = REPAIR_BLOCKS_MAX + 1;
    assert_eq!(refused(&[full(got)]), RepairError::Blocks { got: BlockCount(got) });
    let mismatch = RepairError::BlocksMismatch { rank: Rank(2), got: BlockCount(4), want: BlockCount(5) };
    assert_eq!(refused(&[full(5), empty(5), full(4), full(3)]), mismatch);
    let mut holdings = vec![empty(REPAIR_BLOCKS_MAX); 6];
    holdings[0] = full(REPAIR_BLOCKS_MAX);
    assert_eq!(refused(&holdings), RepairError::TooManyHops { got: 5 << 24 });
}

#[test]
#[should_panic(expected = "rank 3 is no member of a group of 3")]
fn asking_for_the_part_of_somebody_else_in_a_repair_is_a_bug() {
    let _ = Repair::new(&[full(1), full(1), full(1)]).unwrap().sends(Rank(3));
}

#[test]
fn hops_of_a_repair_can_move_to_other_tasks() {
    fn check<T: Clone + std::fmt::Debug + Send + Sync + 'static>() {}
    check::<Repair>();
    check::<RepairHops>();
    check::<BlockSet>();
}
