//! Faults of every member of small groups at each of its operations.

use rdmc_sim::campaign::exhaustive::{self, Bounds, Harm, Survey};
use rdmc_sim::campaign::{Case, Fault, FaultCase, When, play};

use crate::proof;

fn survey(bounds: &Bounds) {
    let Survey { histories, operations, report } = exhaustive::run(bounds);
    eprintln!("{histories} histories of {operations} operations, {} plays", report.played);
    for failure in report.failures.iter().take(SHOWN) {
        eprintln!(
            "{failure}{}\nreplay: rdmc sim campaign --case FILE, with these lines in FILE",
            failure.case.to_json()
        );
    }
    assert_eq!(report.failures.len(), 0, "of {} plays", report.played);
    assert!(operations > 0);
}

/// `rdmc sim campaign --exhaustive` plays all of `Bounds::all()`.
#[test]
fn members_may_come_to_harm_at_every_operation() {
    let short = Bounds { members: 2..=3, blocks: 2..=2, harms: Harm::ALL.to_vec() };
    let full = Bounds { members: 2..=4, blocks: 1..=3, harms: Harm::ALL.to_vec() };
    survey(&proof::amount("members_may_come_to_harm_at_every_operation", short, full));
}

#[test]
fn every_operation_is_reached() {
    let bounds = Bounds { members: 3..=3, blocks: 2..=2, harms: Vec::new() };
    for history in bounds.histories() {
        let counts = play(&history).expect("the case can be played").operations;
        for (node, count) in (0..).zip(counts) {
            assert!(count > 20, "node {node} begins {count} operations");
            let dies_before = |count| {
                let fault = FaultCase { when: When::Operation { node, count }, fault: Fault::Kill { node } };
                play(&Case { faults: vec![fault], ..history.clone() }).expect("the case can be played")
            };
            let seen = dies_before(count - 1);
            assert_eq!((seen.faults.len(), seen.operations[node as usize] >= count), (1, true));
            assert_eq!(dies_before(count).faults.len(), 0, "there is no such operation");
        }
    }
}

/// Number of failures that are printed.
const SHOWN: usize = 3;
