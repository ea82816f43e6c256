//! Every block once, nothing sent before it is held, both ends agree, one port each way.

use rdmc_schedule::Algorithm;

use crate::timetable::Timetable;

#[test]
fn every_flat_schedule_up_to_70_members_and_16_blocks_delivers_every_block_once() {
    for algorithm in Algorithm::ALL_FLAT {
        for members in 1..=70 {
            for blocks in 1..=16 {
                Timetable::checked(&algorithm, members, blocks);
            }
        }
    }
}

#[test]
fn large_groups_and_messages_deliver_every_block_once() {
    for algorithm in Algorithm::ALL_FLAT {
        Timetable::checked(&algorithm, 512, 1000);
        Timetable::checked(&algorithm, 1000, 1000);
    }
}

#[test]
fn the_root_alone_has_nothing_to_do() {
    for algorithm in Algorithm::ALL_FLAT {
        for blocks in [1, 2, 1000] {
            let timetable = Timetable::checked(&algorithm, 1, blocks);
            assert_eq!(timetable.schedule.steps(), 0);
            assert!(timetable.crossings.is_empty());
        }
    }
}
