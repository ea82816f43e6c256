//! Names, errors and what is refused.

use rdmc_schedule::{
    Algorithm, BlockCount, Hybrid, MEMBERS_MAX, Racks, RacksError, Rank, Receives, Schedule, ScheduleError, Sends,
    Spine, first_source, neighbours,
};

#[test]
fn names_of_flat_algorithms_round_trip() {
    for algorithm in Algorithm::ALL_FLAT {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    assert_eq!(Algorithm::default(), Algorithm::BinomialPipeline);
}

#[test]
fn hybrids_are_displayed_and_not_parsed() {
    let racks = Racks::from_sizes(&[1]).unwrap();
    let name = |spine| Algorithm::Hybrid(Hybrid::new(racks.clone(), spine)).to_string();
    assert_eq!(name(Spine::Chain), "hybrid(chain)");
    assert_eq!(name(Spine::BinomialPipeline), "hybrid(binomial-pipeline)");
    assert_eq!(name(Spine::Cascade), "hybrid(cascade)");
    assert_eq!(name(Spine::TwoTree), "hybrid(two-tree)");
    assert!(Spine::ALL.into_iter().all(|spine| Spine::in_name(&name(spine)) == Some(spine)));
    let error = "hybrid(chain)".parse::<Algorithm>().unwrap_err();
    let expected = "unknown algorithm \"hybrid(chain)\", known are sequential, chain, binomial-tree, \
                    binomial-pipeline, circulant, two-tree, fanout";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn impossible_groups_and_messages_are_refused() {
    for algorithm in Algorithm::ALL_FLAT {
        for got in [0, MEMBERS_MAX + 1, u32::MAX] {
            let error = ScheduleError::Members { got };
            assert_eq!(Schedule::new(&algorithm, got, BlockCount(1)).unwrap_err(), error);
            assert_eq!(neighbours(&algorithm, got, Rank(0)).unwrap_err(), error);
            assert_eq!(first_source(&algorithm, got, Rank(0)).unwrap_err(), error);
        }
        assert_eq!(Schedule::new(&algorithm, 2, BlockCount(0)).unwrap_err(), ScheduleError::NoBlocks);
        let error = ScheduleError::NotAMember { rank: Rank(8), members: 8 };
        assert_eq!(neighbours(&algorithm, 8, Rank(8)).unwrap_err(), error);
        assert_eq!(first_source(&algorithm, 8, Rank(8)).unwrap_err(), error);
    }
}

#[test]
fn racks_must_match_the_group() {
    let racks = Racks::from_sizes(&[2, 3]).unwrap();
    let hybrid = Algorithm::Hybrid(Hybrid::new(racks, Spine::Chain));
    let error = ScheduleError::RacksMismatch { got: 5, want: 6 };
    assert_eq!(Schedule::new(&hybrid, 6, BlockCount(1)).unwrap_err(), error);
}

#[test]
fn racks_are_numbered_in_the_order_of_their_leaders() {
    let racks = Racks::from_assignment(&[9, 4, 9, 4, 0, 4]).unwrap();
    assert_eq!((racks.members(), racks.count()), (6, 3));
    let members: Vec<Vec<u32>> = (0..3).map(|rack| racks.members_of(rack).map(|rank| rank.0).collect()).collect();
    assert_eq!(members, [vec![0, 2], vec![1, 3, 5], vec![4]]);
    for rack in 0..3 {
        assert_eq!(racks.leader(rack), racks.members_of(rack).next());
        assert!(racks.members_of(rack).all(|rank| racks.rack_of(rank) == Some(rack)));
    }
    assert_eq!((racks.leader(3), racks.rack_of(Rank(6))), (None, None));
    assert_eq!(racks.members_of(u32::MAX).len(), 0);
}

#[test]
fn lists_that_describe_no_racks_are_refused() {
    assert_eq!(Racks::from_sizes(&[]), Err(RacksError::NoMembers));
    assert_eq!(Racks::from_assignment(&[]), Err(RacksError::NoMembers));
    assert_eq!(Racks::from_sizes(&[3, 0, 1]), Err(RacksError::EmptyRack { rack: 1 }));
    assert_eq!(Racks::from_sizes(&[u32::MAX, u32::MAX]), Err(RacksError::TooManyMembers));
    assert_eq!(Racks::from_assignment(&[0; 65_537]), Err(RacksError::TooManyMembers));
    assert!(Racks::from_sizes(&[1; 65_536]).is_ok());
}

#[test]
#[should_panic(expected = "rank 3 is no member of a group of 3")]
fn asking_for_the_part_of_somebody_else_is_a_bug() {
    let schedule = Schedule::new(&Algorithm::Chain, 3, BlockCount(1)).unwrap();
    let _ = schedule.sends(Rank(3));
}

#[test]
fn iterators_can_move_to_other_tasks() {
    fn check<T: Clone + std::fmt::Debug + Send + Sync + 'static>() {}
    check::<Sends>();
    check::<Receives>();
    check::<Schedule>();
}
