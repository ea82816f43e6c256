//! The neighbours of a member, and the source of its first block, over all numbers of blocks.

use std::collections::BTreeSet;

use rdmc_schedule::{Algorithm, Rank, Spine, first_source, neighbours};

use crate::timetable::Timetable;

/// Compares what is said of all numbers of blocks with what schedules of many numbers do.
pub(crate) fn check_neighbours(algorithm: &Algorithm, members: u32, block_counts: &[u32]) {
    let mut sends_to = vec![BTreeSet::new(); members as usize];
    let mut receives_from = sends_to.clone();
    let mut first_sources = sends_to.clone();
    for &blocks in block_counts {
        let mut first = vec![None; members as usize];
        for crossing in Timetable::checked(algorithm, members, blocks).crossings {
            sends_to[crossing.from as usize].insert(Rank(crossing.to));
            receives_from[crossing.to as usize].insert(Rank(crossing.from));
            first[crossing.to as usize].get_or_insert(Rank(crossing.from));
        }
        for (sources, first) in first_sources.iter_mut().zip(first) {
            sources.extend(first);
        }
    }
    for rank in (0..members).map(Rank) {
        let what = || format!("{algorithm}, n = {members}, rank {rank}");
        let neighbours = neighbours(algorithm, members, rank).unwrap();
        assert!(neighbours.sends_to.iter().eq(&sends_to[rank.index()]), "{}", what());
        assert!(neighbours.receives_from.iter().eq(&receives_from[rank.index()]), "{}", what());

        let sources = &first_sources[rank.index()];
        let only = sources.first().copied().filter(|_| sources.len() == 1);
        let found = first_source(algorithm, members, rank).unwrap();
        // Members inside the second tree are to learn early of a message.
        let of_trees = match algorithm {
            Algorithm::Hybrid(hybrid) => hybrid.spine == Spine::TwoTree,
            other => *other == Algorithm::TwoTree,
        };
        let is_exempt = of_trees && found.is_none();
        assert!(found == only || is_exempt, "{}: {found:?} of {sources:?}", what());
    }
}

#[test]
fn neighbours_and_first_sources_are_exact() {
    for algorithm in Algorithm::ALL_FLAT {
        let block_counts: Vec<u32> = match algorithm {
            Algorithm::BinomialPipeline | Algorithm::Circulant => (1..=34).chain([100]).collect(),
            _ => (1..=4).collect(),
        };
        for members in 1..=70 {
            check_neighbours(&algorithm, members, &block_counts);
        }
    }
}

#[test]
fn every_receiver_has_a_fixed_first_source_except_in_circulants_and_two_trees() {
    for algorithm in Algorithm::ALL_FLAT.into_iter().filter(|algorithm| *algorithm != Algorithm::TwoTree) {
        for members in 2..=200_u32 {
            assert_eq!(first_source(&algorithm, members, Rank::ROOT), Ok(None));
            let fixed = (1..members).filter(|&rank| first_source(&algorithm, members, Rank(rank)).unwrap().is_some());
            let expected = match algorithm {
                Algorithm::Circulant => members.next_power_of_two().ilog2(),
                _ => members - 1,
            };
            assert_eq!(fixed.count(), expected as usize, "{algorithm}, n = {members}");
        }
    }
}

#[test]
fn in_two_trees_members_have_two_parents_and_two_children_at_most() {
    for members in (2..=300).chain([65_535, 65_536]) {
        let inner = (members - 1) / 2;
        for rank in (0..members).step_by(1 + members as usize / 300) {
            let found = neighbours(&Algorithm::TwoTree, members, Rank(rank)).unwrap();
            assert!(found.receives_from.len() <= 2 && found.sends_to.len() <= 2, "n = {members}: {found:?}");
            let sends = rank <= 2 * inner && members > 1;
            assert_eq!(found.sends_to.is_empty(), !sends && rank > 0, "n = {members}, rank {rank}: {found:?}");
            // The sender of a single block is that of the first tree.
            let first = first_source(&Algorithm::TwoTree, members, Rank(rank)).unwrap();
            assert!(first.is_none_or(|first| found.receives_from.contains(&first)), "n = {members}, rank {rank}");
        }
    }
}

#[test]
fn the_binomial_pipeline_has_at_most_twice_as_many_neighbours_as_dimensions_and_the_twin() {
    for members in [2, 3, 5, 64, 100, 1000, 65_535, 65_536] {
        for rank in (0..members).step_by(1 + members as usize / 100) {
            let found = neighbours(&Algorithm::BinomialPipeline, members, Rank(rank)).unwrap();
            let all: BTreeSet<Rank> = found.sends_to.into_iter().chain(found.receives_from).collect();
            let limit = if members.is_power_of_two() { members.ilog2() } else { 2 * members.ilog2() + 1 };
            assert!(all.len() <= limit as usize, "n = {members}, rank {rank}: {all:?}");
        }
    }
}
