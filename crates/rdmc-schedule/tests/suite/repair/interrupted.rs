//! What schedules leave when they are stopped and members are gone.

use rdmc_schedule::{Algorithm, BlockCount, BlockIndex, Rank, Repair, RepairError, Schedule};

use crate::repair::{checked, fewest_steps, holdings};

/// Returns the holders of each block after `steps` steps, as a bit for each rank.
fn stopped(schedule: &Schedule, steps: u64) -> Vec<u32> {
    let mut holders = vec![1; schedule.blocks().get() as usize];
    for rank in (1..schedule.members()).map(Rank) {
        for receive in schedule.receives(rank).take_while(|receive| receive.step.0 < steps) {
            holders[receive.block.index()] |= 1 << rank.0;
        }
    }
    holders
}

/// The holders when the members in `gone` have left and the others have closed their ranks.
fn without(holders: &[u32], members: u32, gone: &[u32]) -> Vec<u32> {
    let left: Vec<u32> = (0..members).filter(|rank| !gone.contains(rank)).collect();
    let close_ranks = |holders: &u32| (0..).zip(&left).map(|(new, old)| (holders >> old & 1) << new).sum();
    holders.iter().map(close_ranks).collect()
}

/// What came of many situations.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    repaired: u32,
    lost: u32,
    /// The sum of the steps that the repairs take.
    steps: u64,
    /// The sum of the bounds below which there is no repair.
    fewest: u64,
    excess_max: u64,
}

impl Tally {
    fn count(&mut self, members: u32, holders: &[u32]) {
        let holdings = holdings(members, holders);
        if holders.contains(&0) {
            let lost = (0..).map(BlockIndex).zip(holders).filter(|(_, holders)| **holders == 0).map(|(block, _)| block);
            match Repair::new(&holdings) {
                Err(RepairError::Lost { blocks }) => assert!(blocks.held().eq(lost)),
                other => panic!("blocks are lost, but {other:?}"),
            }
            self.lost += 1;
            return;
        }
        let steps = checked(&holdings).steps();
        let fewest = fewest_steps(members, holders);
        let missing_max = holdings.iter().map(|held| held.missing().count() as u64).max().unwrap();
        let doublings = u64::from(members.next_power_of_two().ilog2());
        assert!(10 * steps <= 11 * missing_max + 10 * doublings, "{steps} steps for {missing_max}: {holders:?}");
        self.repaired += 1;
        self.steps += steps;
        self.fewest += fewest;
        self.excess_max = self.excess_max.max(steps - fewest);
    }
}

/// Stops a schedule at `stops` steps or all that it has, and takes the root from it, another member, both, and two
/// neighbours; the other member is each in turn.
fn tally(algorithm: &Algorithm, stops: usize) -> Tally {
    let mut tally = Tally::default();
    for members in 2..=17_u32 {
        for blocks in [1, 2, 3, 5, 8, 17, 40] {
            let schedule = Schedule::new(algorithm, members, BlockCount(blocks)).unwrap();
            let stride = usize::try_from(schedule.steps()).unwrap().div_ceil(stops);
            for (turn, stop) in (0..).zip((0..=schedule.steps()).step_by(stride)) {
                let holders = stopped(&schedule, stop);
                let other = 1 + turn % (members - 1);
                let next = (other + 1) % members;
                let alone: [&[u32]; 2] = [&[0], &[other]];
                let pairs: [&[u32]; 2] = [&[0, other], &[other, next]];
                let pairs = pairs.into_iter().filter(|_| members > 2);
                for gone in alone.into_iter().chain(pairs) {
                    let left = members - u32::try_from(gone.len()).unwrap();
                    tally.count(left, &without(&holders, members, gone));
                }
            }
        }
    }
    tally
}

#[test]
fn stopped_pipelines_are_completed_in_few_steps() {
    let expected = Tally { repaired: 3678, lost: 2532, steps: 36_620, fewest: 36_049, excess_max: 2 };
    assert_eq!(tally(&Algorithm::BinomialPipeline, usize::MAX), expected);
    let expected = Tally { repaired: 3693, lost: 2517, steps: 37_064, fewest: 36_219, excess_max: 2 };
    assert_eq!(tally(&Algorithm::Circulant, usize::MAX), expected);
}

#[test]
fn stopped_schedules_of_other_kinds_are_completed_in_few_steps() {
    let expected = Tally { repaired: 6356, lost: 642, steps: 71_459, fewest: 69_621, excess_max: 2 };
    assert_eq!(tally(&Algorithm::Sequential, STOPS), expected);
    let expected = Tally { repaired: 4327, lost: 1415, steps: 26_688, fewest: 26_116, excess_max: 2 };
    assert_eq!(tally(&Algorithm::Chain, STOPS), expected);
    let expected = Tally { repaired: 4993, lost: 965, steps: 57_681, fewest: 55_776, excess_max: 2 };
    assert_eq!(tally(&Algorithm::BinomialTree, STOPS), expected);
}

/// Slow schedules have many steps, and those next to each other leave much the same.
const STOPS: usize = 20;
