//! The number of steps, the paper's formula, and the rule of every simple algorithm.

use rdmc_schedule::{Algorithm, BlockCount, BlockIndex, Hop, Rank, Schedule, Step};

#[test]
fn the_number_of_steps_is_that_of_the_table() {
    for members in 1..=300_u32 {
        for blocks in [1, 2, 3, 7, 16, 1000, u32::MAX] {
            let (n, k) = (u64::from(members), u64::from(blocks));
            let ceil_log = u64::from(members.next_power_of_two().ilog2());
            let least = if n == 1 { 0 } else { k - 1 + ceil_log };
            let expected = [
                (Algorithm::Sequential, k * (n - 1)),
                (Algorithm::Chain, if n == 1 { 0 } else { k + n - 2 }),
                (Algorithm::BinomialTree, k * ceil_log),
                (Algorithm::BinomialPipeline, least),
                (Algorithm::Circulant, least),
                (Algorithm::TwoTree, two_tree_steps(members, k)),
                (Algorithm::Fanout, k * (n - 1)),
            ];
            for (algorithm, steps) in expected {
                let schedule = Schedule::new(&algorithm, members, BlockCount(blocks)).unwrap();
                assert_eq!(schedule.steps(), steps, "{algorithm}, n = {n}, k = {k}");
            }
        }
    }
}

/// The latest member is on the last row, behind edges of the same kind only if the row is full, or all but one place.
fn two_tree_steps(members: u32, blocks: u64) -> u64 {
    let Some(row) = (members - 1).checked_ilog2() else { return 0 };
    let is_full = [members + 1, members].contains(&(2 << row));
    blocks + u64::from(2 * row) - u64::from(!is_full)
}

#[test]
fn for_powers_of_two_the_binomial_pipeline_is_the_papers_formula() {
    for dimensions in 1..=8 {
        let members = 1 << dimensions;
        for blocks in (1..=16).chain([40, 100]) {
            let schedule = Schedule::new(&Algorithm::BinomialPipeline, members, BlockCount(blocks)).unwrap();
            for rank in 0..members {
                let steps = 0..schedule.steps();
                let expected = steps.filter_map(|step| paper_send(rank, step, dimensions, blocks));
                let sends = schedule.sends(Rank(rank));
                assert!(sends.eq(expected), "n = {members}, k = {blocks}, rank {rank}");
            }
        }
    }
}

/// DSN §4.4: what `rank` of 2^`dimensions` members sends in `step`.
fn paper_send(rank: u32, step: u64, dimensions: u32, blocks: u32) -> Option<Hop> {
    let shift = u32::try_from(step % u64::from(dimensions)).unwrap();
    let mask = (1 << dimensions) - 1;
    let rotated = (rank >> shift | rank << (dimensions - shift)) & mask;
    let due = match rotated {
        0 => i64::try_from(step).unwrap(),
        1 => return None,
        _ => i64::try_from(step).unwrap() - i64::from(dimensions) + i64::from(rotated.trailing_zeros()),
    };
    let due = u32::try_from(due).ok()?;
    Some(Hop { step: Step(step), peer: Rank(rank ^ (1 << shift)), block: BlockIndex(due.min(blocks - 1)) })
}

#[test]
fn sequential_serves_one_member_after_the_other() {
    let schedule = Schedule::new(&Algorithm::Sequential, 4, BlockCount(5)).unwrap();
    let expected = (0..15).map(|step| transfer(u64::from(step), 1 + step / 5, step % 5));
    assert!(schedule.sends(Rank::ROOT).eq(expected));
}

#[test]
fn the_fan_out_gives_each_block_to_everybody() {
    let schedule = Schedule::new(&Algorithm::Fanout, 4, BlockCount(5)).unwrap();
    let sends = (0..15).map(|step| transfer(u64::from(step), 1 + step % 3, step / 3));
    assert!(schedule.sends(Rank::ROOT).eq(sends));
    let receives = (0..5).map(|block| transfer(u64::from(3 * block + 1), 0, block));
    assert!(schedule.receives(Rank(2)).eq(receives));
    assert_eq!(schedule.sends(Rank(2)).count(), 0);
}

#[test]
fn chain_passes_each_block_to_the_next_rank() {
    let schedule = Schedule::new(&Algorithm::Chain, 6, BlockCount(5)).unwrap();
    let expected = (0..5).map(|block| transfer(u64::from(3 + block), 4, block));
    assert!(schedule.sends(Rank(3)).eq(expected));
    assert_eq!(schedule.sends(Rank(5)).count(), 0);
}

#[test]
fn binomial_tree_doubles_the_holders_of_the_whole_message() {
    let schedule = Schedule::new(&Algorithm::BinomialTree, 8, BlockCount(2)).unwrap();
    let expected = [transfer(2, 3, 0), transfer(3, 3, 1), transfer(4, 5, 0), transfer(5, 5, 1)];
    assert!(schedule.sends(Rank(1)).eq(expected));
}

fn transfer(step: u64, peer: u32, block: u32) -> Hop {
    Hop { step: Step(step), peer: Rank(peer), block: BlockIndex(block) }
}
