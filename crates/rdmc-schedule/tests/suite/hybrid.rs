//! A schedule among racks, and one inside each rack; racks that are found.

use std::collections::HashSet;
use std::time::Duration;

use rdmc_schedule::{Algorithm, BlockCount, Hybrid, Racks, Rank, Schedule, Spine, first_source, neighbours};

use crate::neighbours::check_neighbours;
use crate::timetable::{Timetable, crosses_racks};

/// A small generator of numbers that look random, the same ones in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from((self.0 >> 33) % u64::from(limit)).unwrap()
    }

    /// Draws racks, `most` at most.
    fn racks(&mut self, members: u32, most: u32) -> Racks {
        let racks = 1 + self.below(most);
        let assignment: Vec<u32> = (0..members).map(|_| self.below(racks)).collect();
        Racks::from_assignment(&assignment).unwrap()
    }
}

fn check(racks: &Racks, block_counts: impl IntoIterator<Item = u32>) {
    for blocks in block_counts {
        for spine in Spine::ALL {
            let algorithm = Algorithm::Hybrid(Hybrid::new(racks.clone(), spine));
            let timetable = Timetable::checked(&algorithm, racks.members(), blocks);
            let between = timetable.crossings.iter().filter(|crossing| crosses_racks(racks, crossing));
            let mut count = 0;
            for crossing in between {
                let is_leader = |rank| racks.leader(racks.rack_of(Rank(rank)).unwrap()) == Some(Rank(rank));
                let (to_leader, from_leader) = match spine {
                    Spine::TwoTree => (true, true),
                    Spine::Cascade => (is_leader(crossing.to), true),
                    _ => (is_leader(crossing.to), is_leader(crossing.from)),
                };
                assert!(to_leader && from_leader, "{racks:?}: {crossing:?}");
                count += 1;
            }
            assert_eq!(count, (racks.count() - 1) * blocks, "each block enters each rack once");
        }
    }
}

#[test]
fn equal_racks_up_to_9_by_9_deliver_every_block_once() {
    for racks in 1..=9 {
        for size in 1..=9 {
            check(&Racks::from_sizes(&vec![size; racks]).unwrap(), 1..=16);
        }
    }
}

#[test]
fn random_assignments_deliver_every_block_once() {
    let mut dice = Dice(1);
    for members in 1..=70 {
        for _ in 0..4 {
            check(&dice.racks(members, members), [1, 2, 3, 5, 8, 16, 40]);
        }
    }
}

#[test]
fn large_racks_deliver_every_block_once() {
    let sizes: Vec<u32> = (1..=32).chain([1, 100, 1, 371]).collect();
    check(&Racks::from_sizes(&sizes).unwrap(), [1000]);
}

#[test]
fn neighbours_and_first_sources_are_exact() {
    let mut dice = Dice(2);
    for members in 1..=40 {
        let racks = dice.racks(members, members);
        for spine in Spine::ALL {
            let algorithm = Algorithm::Hybrid(Hybrid::new(racks.clone(), spine));
            let block_counts: Vec<u32> = (1..=26).chain([100]).collect();
            check_neighbours(&algorithm, members, &block_counts);
            for rank in (1..members).filter(|_| spine != Spine::TwoTree) {
                assert_ne!(first_source(&algorithm, members, Rank(rank)), Ok(None));
            }
        }
    }
}

#[test]
fn one_rack_is_the_binomial_pipeline_and_racks_of_one_are_the_spine() {
    for members in 1..=20 {
        for blocks in 1..=16 {
            let crossings = |algorithm: &Algorithm| Timetable::checked(algorithm, members, blocks).crossings;
            let pipeline = crossings(&Algorithm::BinomialPipeline);
            let hybrid = |sizes: &[u32], spine| {
                let racks = Racks::from_sizes(sizes).unwrap();
                crossings(&Algorithm::Hybrid(Hybrid::new(racks, spine)))
            };
            let alone = vec![1; members as usize];
            assert_eq!(hybrid(&[members], Spine::Chain), pipeline);
            assert_eq!(hybrid(&[members], Spine::BinomialPipeline), pipeline);
            assert_eq!(hybrid(&alone, Spine::BinomialPipeline), pipeline);
            assert_eq!(hybrid(&alone, Spine::Chain), crossings(&Algorithm::Chain));
            assert_eq!(hybrid(&[members], Spine::Cascade), pipeline);
            assert_eq!(hybrid(&alone, Spine::Cascade), crossings(&Algorithm::Chain));
        }
    }
}

#[test]
fn the_roots_rack_does_not_wait_for_the_spine() {
    let racks = Racks::from_sizes(&[4, 4]).unwrap();
    let hybrid = Algorithm::Hybrid(Hybrid::new(racks.clone(), Spine::Chain));
    let inside = |crossing: &&_| !crosses_racks(&racks, crossing);
    let timetable = Timetable::checked(&hybrid, 8, 5);
    let in_first_rack = timetable.crossings.iter().filter(inside).filter(|crossing| crossing.to < 4);
    let alone = Timetable::checked(&Algorithm::BinomialPipeline, 4, 5);
    assert!(in_first_rack.eq(&alone.crossings));
    // The second rack runs one step behind the first.
    assert_eq!(timetable.schedule.steps(), alone.schedule.steps() + 1);
}

#[test]
fn leaders_send_on_the_spine_first() {
    let racks = Racks::from_sizes(&[2, 2]).unwrap();
    let hybrid = Algorithm::Hybrid(Hybrid::new(racks, Spine::Chain));
    let timetable = Timetable::checked(&hybrid, 4, 2);
    let sends = timetable.schedule.sends(Rank::ROOT);
    let seen: Vec<_> = sends.map(|send| (send.step.0, send.peer.0, send.block.0)).collect();
    assert_eq!(seen, [(0, 2, 0), (0, 1, 0), (1, 2, 1), (1, 1, 1)]);
}

#[test]
fn the_cascade_takes_one_block_a_step_from_every_port() {
    let mut dice = Dice(3);
    for members in 1..=80 {
        let racks = dice.racks(members, members.min(9));
        let algorithm = Algorithm::Hybrid(Hybrid::new(racks.clone(), Spine::Cascade));
        for blocks in [1, 2, 3, 5, 8, 16, 40] {
            let timetable = Timetable::checked(&algorithm, members, blocks);
            let mut sends = HashSet::new();
            let mut receives = HashSet::new();
            for crossing in &timetable.crossings {
                assert!(receives.insert((crossing.to, crossing.step)), "{racks:?}: {crossing:?}");
                // In the closing step of racks whose size is no power of two, and of the last block alone, there may be
                // two.
                let size = racks.members_of(racks.rack_of(Rank(crossing.from)).unwrap()).len();
                let first = sends.insert((crossing.from, crossing.step));
                assert!(first || (!size.is_power_of_two() && crossing.block + 1 == blocks), "{racks:?}: {crossing:?}");
            }
        }
    }
}

#[test]
fn two_trees_by_racks_take_one_block_a_step_from_every_port_and_two_children_at_most() {
    let mut dice = Dice(4);
    for members in 1..=80 {
        let racks = dice.racks(members, members.min(20));
        let algorithm = Algorithm::Hybrid(Hybrid::new(racks.clone(), Spine::TwoTree));
        for blocks in [1, 2, 3, 8, 40] {
            let timetable = Timetable::checked(&algorithm, members, blocks);
            let mut sends = HashSet::new();
            for crossing in &timetable.crossings {
                assert!(sends.insert((crossing.from, crossing.step)), "{racks:?}: {crossing:?}");
            }
        }
        for rank in 0..members {
            let found = neighbours(&algorithm, members, Rank(rank)).unwrap();
            assert!(found.sends_to.len() <= 2 && found.receives_from.len() <= 2, "{racks:?}: {rank} {found:?}");
        }
    }
}

#[test]
fn two_trees_by_racks_are_hardly_deeper_than_two_trees() {
    for (racks, size) in [(1, 8), (2, 4), (4, 4), (8, 8), (16, 8), (64, 1), (3, 40), (100, 3)] {
        let sizes = vec![size; racks];
        let racks = Racks::from_sizes(&sizes).unwrap();
        let members = racks.members();
        let blocks = BlockCount(1000);
        let steps = |algorithm: &Algorithm| Schedule::new(algorithm, members, blocks).unwrap().steps();
        let (flat, by_racks) = (steps(&Algorithm::TwoTree), steps(&Hybrid::new(racks, Spine::TwoTree).into()));
        assert!(by_racks <= flat + 2 * u64::from(members.ilog2()), "{sizes:?}: {by_racks} against {flat} steps");
    }
}

#[test]
fn racks_are_found_by_round_trips_even_if_some_are_measured_badly() {
    let mut dice = Dice(5);
    for members in [4, 8, 13, 40] {
        for count in 2..=3.min(members / 2) {
            let assignment: Vec<u32> = (0..members).map(|_| dice.below(count)).collect();
            let mut round_trip = |inside: u64| {
                // Up to a half more, and one of twenty takes ten times as long.
                let us = inside + u64::from(dice.below(100)) * inside / 200;
                Some(Duration::from_micros(if dice.below(20) == 0 { 10 * us } else { us }))
            };
            let measured: Vec<Vec<_>> = (0..members)
                .map(|a| {
                    let near = |b: u32| assignment[a as usize] == assignment[b as usize];
                    (0..members).map(|b| round_trip(if near(b) { 100 } else { 2000 })).collect()
                })
                .collect();
            let found = Racks::by_round_trips(members, |a, b| measured[a.index()][b.index()]);
            let expected = Racks::from_assignment(&assignment).unwrap();
            let some = expected.count() > 1 && expected.count() < members;
            assert_eq!(found, some.then_some(expected), "{assignment:?}");
        }
    }
}

#[test]
fn members_that_are_equally_far_from_each_other_have_no_racks() {
    let mut dice = Dice(6);
    for members in [0, 1, 2, 3, 8, 30] {
        let all_alike = |_, _| Some(Duration::from_millis(2));
        assert_eq!(Racks::by_round_trips(members, all_alike), None);
        assert_eq!(Racks::by_round_trips(members, |_, _| None), None);
        let noisy: Vec<u64> = (0..members * members).map(|_| 20 + u64::from(dice.below(60))).collect();
        let at = |a: Rank, b: Rank| Duration::from_micros(noisy[a.index() * members as usize + b.index()]);
        assert_eq!(Racks::by_round_trips(members, |a, b| Some(at(a, b))), None);
    }
}

#[test]
fn in_the_cascade_a_rack_begins_as_soon_as_the_one_before_it_has_a_block_and_a_port() {
    let racks = Racks::from_sizes(&[4, 1, 6, 2]).unwrap();
    let algorithm = Algorithm::Hybrid(Hybrid::new(racks, Spine::Cascade));
    let timetable = Timetable::checked(&algorithm, 13, 10);
    let arrivals: Vec<_> = [4, 5, 11].map(|leader| timetable.arrival(leader, 0).unwrap()).into();
    // Two dimensions and one step to hand the block over, then none, then two again.
    assert_eq!(arrivals, [2, 3, 6]);
    // The last rack takes its 10 blocks from step 7 on.
    assert_eq!(timetable.schedule.steps(), 7 + 10);
}
