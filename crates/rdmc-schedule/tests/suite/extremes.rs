//! The largest group and the longest message: nothing may overflow, and nothing may be walked through in vain.

use rdmc_schedule::{Algorithm, BlockCount, BlockIndex, Hop, Hybrid, MEMBERS_MAX, Racks, Rank, Schedule, Spine, Step};

const RANKS: [u32; 9] = [0, 1, 2, 3, 255, 32_767, 32_768, 65_534, 65_535];

fn largest(algorithm: &Algorithm) -> Schedule {
    Schedule::new(algorithm, MEMBERS_MAX, BlockCount(u32::MAX)).unwrap()
}

fn all_kinds() -> Vec<Algorithm> {
    let racks = Racks::from_sizes(&[255; 257]).unwrap();
    let alone = Racks::from_sizes(&vec![1; MEMBERS_MAX as usize]).unwrap();
    let hybrids = Spine::ALL.map(|spine| Algorithm::Hybrid(Hybrid::new(racks.clone(), spine)));
    let of_one = Algorithm::Hybrid(Hybrid::new(alone, Spine::Cascade));
    Algorithm::ALL_FLAT.into_iter().chain(hybrids).chain([of_one]).collect()
}

#[test]
fn the_last_rank_of_the_longest_sequential_schedule_starts_at_once() {
    let schedule = largest(&Algorithm::Sequential);
    let first = Hop { step: Step(65_534 * u64::from(u32::MAX)), peer: Rank::ROOT, block: BlockIndex(0) };
    assert_eq!(schedule.receives(Rank(65_535)).next(), Some(first));
    assert_eq!(schedule.sends(Rank(65_535)).next(), None);
    assert_eq!(schedule.steps(), 65_535 * u64::from(u32::MAX));
}

#[test]
fn first_hops_of_the_largest_schedules_agree_at_both_ends() {
    for algorithm in all_kinds() {
        let members = match &algorithm {
            Algorithm::Hybrid(hybrid) => hybrid.racks.members(),
            _ => MEMBERS_MAX,
        };
        let schedule = Schedule::new(&algorithm, members, BlockCount(u32::MAX)).unwrap();
        for rank in RANKS.into_iter().filter(|&rank| rank < members) {
            // Where a member serves its peers one after the other, the wanted one may be 2³² sends away.
            let one_by_one = matches!(algorithm, Algorithm::Sequential | Algorithm::BinomialTree | Algorithm::Fanout);
            for receive in schedule.receives(Rank(rank)).take(if one_by_one { 0 } else { 100 }) {
                let counterpart = Hop { peer: Rank(rank), ..receive };
                let mut sends = schedule.sends(receive.peer).take(400);
                assert!(sends.any(|send| send == counterpart), "{algorithm}: {rank} {receive:?}");
            }
            for send in schedule.sends(Rank(rank)).take(100) {
                let counterpart = Hop { peer: Rank(rank), ..send };
                let mut receives = schedule.receives(send.peer).take(400);
                assert!(receives.any(|receive| receive == counterpart), "{algorithm}: {rank} {send:?}");
            }
        }
    }
}

#[test]
fn members_that_never_send_say_so_at_once() {
    for (algorithm, members, rank) in [
        (Algorithm::BinomialPipeline, 2, 1),
        (Algorithm::Circulant, 2, 1),
        (Algorithm::Chain, 2, 1),
        (Algorithm::BinomialTree, 2, 1),
        (Algorithm::BinomialTree, MEMBERS_MAX, 65_535),
        (Algorithm::Hybrid(Hybrid::new(Racks::from_sizes(&[1, 1]).unwrap(), Spine::BinomialPipeline)), 2, 1),
        (Algorithm::Hybrid(Hybrid::new(Racks::from_sizes(&[1, 2]).unwrap(), Spine::BinomialPipeline)), 3, 2),
        (Algorithm::Hybrid(Hybrid::new(Racks::from_sizes(&[1, 1]).unwrap(), Spine::Cascade)), 2, 1),
        (Algorithm::Hybrid(Hybrid::new(Racks::from_sizes(&[1, 2]).unwrap(), Spine::Cascade)), 3, 2),
    ] {
        let schedule = Schedule::new(&algorithm, members, BlockCount(u32::MAX)).unwrap();
        assert_eq!(schedule.sends(Rank(rank)).next(), None, "{algorithm}");
    }
}
