//! All small situations.

use crate::repair::{checked, fewest_steps, holdings};

/// Checks every way in which `members` can hold `blocks` blocks between them, and counts those that take 0, 1, …
/// steps more than the fewest thinkable.
fn excesses(members: u32, blocks: usize, order: Order) -> Vec<u32> {
    let mut excesses = Vec::new();
    every_holding(&mut Vec::new(), members, blocks, order, &mut |holders| {
        let repair = checked(&holdings(members, holders));
        let excess = usize::try_from(repair.steps() - fewest_steps(members, holders)).unwrap();
        excesses.resize(excesses.len().max(excess + 1), 0);
        excesses[excess] += 1;
    });
    excesses
}

/// Which of the holdings that differ only in the order of their blocks are tried.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Any,
    Ascending,
}

fn every_holding(holders: &mut Vec<u32>, members: u32, blocks: usize, order: Order, visit: &mut impl FnMut(&[u32])) {
    if holders.len() == blocks {
        return visit(holders);
    }
    let first = holders.last().copied().filter(|_| order == Order::Ascending).unwrap_or(1);
    for next in first..1 << members {
        holders.push(next);
        every_holding(holders, members, blocks, order, visit);
        holders.pop();
    }
}

#[test]
fn up_to_four_members_repair_up_to_three_blocks_in_the_fewest_steps() {
    for members in 1..=4 {
        for blocks in 1..=3 {
            let cases = ((1 << members) - 1_u32).pow(blocks);
            assert_eq!(excesses(members, blocks as usize, Order::Any), [cases], "n = {members}, k = {blocks}");
        }
    }
}

#[test]
fn all_holdings_of_few_blocks_are_repaired_close_to_the_bound() {
    let expected: [(u32, usize, &[u32]); 6] = [
        (4, 4, &[3060]),
        (5, 2, &[486, 10]),
        (5, 3, &[5376, 80]),
        (5, 4, &[45_995, 381]),
        (6, 2, &[2001, 15]),
        (6, 3, &[43_560, 120]),
    ];
    for (members, blocks, expected) in expected {
        assert_eq!(excesses(members, blocks, Order::Ascending), expected, "n = {members}, k = {blocks}");
    }
}
