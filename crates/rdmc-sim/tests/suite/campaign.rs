//! Campaigns: drawn cases, plays, checkers and shrinking.

use std::collections::BTreeSet;
use std::time::Instant;

use rdmc_sim::ClusterModel;
use rdmc_sim::campaign::{
    self, AlgorithmCase, Behaviour, BrokenSource, CHECKERS, Case, Corruptions, Delivered, Fault, FaultCase,
    FlippedBlock, GroupCase, MemberCase, MemberObservation, MessageCase, Milestone, NamedMember, Observation, Outcome,
    PartsCase, ReportedFailure, RingCase, SendFuture, SourceCase, When, judge, play, shrink,
};

use crate::proof;

/// The seeds of the variable `RDMC_CAMPAIGN_SEEDS`, as in `0..1000000`, or those of the short or full form.
fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("RDMC_CAMPAIGN_SEEDS") else {
        return proof::amount("every_seed_keeps_every_promise", 0..SEEDS_SHORT, 0..SEEDS);
    };
    let (start, end) = text.split_once("..").expect("a range of seeds, as in 0..1000");
    start.parse().expect("a number")..end.parse().expect("a number")
}

#[test]
fn every_seed_keeps_every_promise() {
    let seeds = seeds();
    let began = Instant::now();
    let report = campaign::run(seeds.clone());
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("{} seeds in {seconds:.1} s, {:.0} a second", report.played, report.played as f64 / seconds);
    for failure in &report.failures {
        eprintln!("seed {}: {}: {}", failure.seed, failure.checker, failure.what);
    }
    for failure in report.failures.iter().take(SHOWN) {
        let smallest = judge(&failure.shrunk(PLAYS)).expect("it still fails");
        eprintln!("shrunk: {smallest}{}\n", smallest.case.to_json());
    }
    let failed: Vec<u64> = report.failures.iter().map(|failure| failure.seed).collect();
    assert!(failed.is_empty(), "{} of the seeds {seeds:?} fail: {failed:?}", failed.len());
}

#[test]
fn the_same_case_is_always_seen_the_same() {
    for seed in 0..100 {
        let case = Case::draw(seed);
        assert_eq!(case, Case::draw(seed));
        let again = Case::from_json(&case.to_json()).unwrap();
        assert_eq!(case, again);
        let (first, second) = (play(&case).unwrap(), play(&again).unwrap());
        assert_eq!(first.digest, second.digest, "seed {seed}");
        assert_eq!(first, second, "seed {seed}");
    }
}

#[test]
fn a_case_is_the_same_when_it_is_read_again_whatever_its_numbers() {
    let mut case = Case::draw(0);
    case.model.control.loss = 0.481_837_925_201_105_24;
    assert_eq!(Case::from_json(&case.to_json()).unwrap(), case);
}

#[test]
fn seeds_draw_everything_there_is() {
    let cases: Vec<Case> = (0..3_000).map(Case::draw).collect();
    let groups = || cases.iter().flat_map(|case| &case.groups);
    let name = |what: &dyn std::fmt::Debug| format!("{what:?}").split(' ').next().unwrap_or_default().to_owned();
    let faults: BTreeSet<_> = cases.iter().flat_map(|case| &case.faults).map(|it| name(&it.fault)).collect();
    let behaviours: BTreeSet<_> =
        groups().flat_map(|group| &group.members).map(|member| name(&member.behaviour)).collect();
    let algorithms: BTreeSet<_> = groups().map(|group| name(&group.algorithm)).collect();
    let futures: BTreeSet<_> = groups().flat_map(|group| &group.messages).map(|it| name(&it.future)).collect();
    assert_eq!((faults.len(), behaviours.len(), algorithms.len(), futures.len()), (16, 12, 7, 3));
    let kinds: BTreeSet<_> = groups().map(|group| (group.recoverable, group.checks, group.delta)).collect();
    assert_eq!(kinds.len(), 8);
    let later: BTreeSet<_> = groups().map(|group| (group.recovers, group.stable, group.ring.is_some())).collect();
    assert_eq!(later.len(), 8);
    let headers: BTreeSet<_> = groups().map(|group| (group.headers, group.recovers, group.ring.is_some())).collect();
    assert_eq!(headers.len(), 8);
    let messages = || groups().flat_map(|group| &group.messages);
    let sources: BTreeSet<_> =
        messages().map(|it| it.source.map(|source| source.broken.map(|broken| name(&broken)))).collect();
    assert_eq!(sources.len(), 4);
    assert!(groups().flat_map(|group| &group.members).any(|member| member.reads_at_once > 0));
    let parts: BTreeSet<_> = groups()
        .flat_map(|group| group.members.iter().map(|member| (group.delta, member.has.map(|has| has.percent))))
        .collect();
    assert_eq!(parts.len(), 12);
    let nodes: BTreeSet<_> = cases.iter().map(|case| case.model.nodes).collect();
    assert!(nodes.into_iter().eq(2..=16));
    let counts: BTreeSet<_> = cases.iter().map(|case| case.groups.len()).collect();
    assert!(counts.into_iter().eq(1..=3));
    let off_block = |size: u64, block: u64| if size < 2 { size.to_string() } else { name(&(size % block).cmp(&1)) };
    let sizes = groups()
        .flat_map(|group| group.messages.iter().map(|message| off_block(message.size, u64::from(group.block_size))));
    assert!(
        sizes.collect::<BTreeSet<_>>().is_superset(&["0", "1", "Less", "Equal", "Greater"].map(str::to_owned).into())
    );
}

/// Returns a case of one group without faults.
fn case(algorithm: AlgorithmCase, members: &[u32], sizes: &[u64]) -> Case {
    let member = |&node: &u32| MemberCase {
        node,
        begins_ns: 0,
        offers: false,
        has: None,
        pause_ns: 0,
        holds: 0,
        lets_go_each: 0,
        reads_at_once: 0,
        behaviour: Behaviour::Ordinary,
    };
    let group = GroupCase {
        id: 1,
        members: members.iter().map(member).collect(),
        algorithm,
        block_size: 256,
        formation_limit_ns: 2_000_000_000,
        messages: sizes.iter().map(|&size| MessageCase { size, future: SendFuture::Completes, source: None }).collect(),
        sends_ahead: 1,
        sends_from_pool: false,
        recoverable: true,
        recovers: false,
        checks: false,
        delta: false,
        stable: false,
        receipts: false,
        ring: None,
        headers: false,
        share: None,
        rate_max: None,
    };
    let nodes = members.iter().max().map_or(1, |most| most + 1);
    Case {
        seed: 1,
        model: ClusterModel::new(nodes, 1_000, 1_000),
        pool_bytes_max: 1 << 30,
        groups: vec![group],
        faults: Vec::new(),
        heal_ns: 60_000_000_000,
        joins: false,
    }
}

fn at(ns: u64, fault: Fault) -> FaultCase {
    FaultCase { when: When::At { ns }, fault }
}

fn quiet() -> Case {
    case(AlgorithmCase::Chain, &[0, 1], &[1_000, 2_000])
}

/// Returns the checker that a quiet case violates after a change of its observation.
fn violated(change: impl FnOnce(&mut Observation)) -> Option<&'static str> {
    let case = quiet();
    let mut seen = play(&case).expect("the case can be played");
    change(&mut seen);
    CHECKERS.iter().find(|checker| (checker.check)(&case, &seen).is_err()).map(|checker| checker.name)
}

#[test]
fn checkers_see_what_is_wrong() {
    assert_eq!(violated(|_| {}), None);
    let (whole, honest) = (Some("messages are whole and in order"), Some("a close succeeds only after full delivery"));
    assert_eq!(violated(|seen| seen.groups[0].members[1].delivered.swap(0, 1)), whole);
    assert_eq!(violated(|seen| seen.groups[0].members[1].delivered = Vec::new()), honest);
    assert_eq!(violated(|seen| seen.groups[0].members[1].delivered.rotate_left(1)), whole);
    let spoil = |message: &mut Delivered| message.digest = Some(7);
    assert_eq!(violated(|seen| spoil(&mut seen.groups[0].members[1].delivered[0])), whole);
    assert_eq!(
        violated(|seen| {
            let message = seen.groups[0].members[1].delivered[1].clone();
            seen.groups[0].members[1].delivered.push(message);
        }),
        whole
    );
    assert_eq!(violated(|seen| seen.groups[0].members[1].delivered.truncate(1)), honest);
    assert_eq!(violated(|seen| seen.groups[0].members[1].closing_ns = None), honest);
    assert_eq!(violated(|seen| seen.groups[0].members[1].ended_ns = None), Some("every member ends"));
    assert_eq!(violated(|seen| seen.still_in_use[0].queue_pairs = 1), Some("no resources remain in use"));
    assert_eq!(violated(|seen| seen.groups[0].members[1].spoke_after_end = true), Some("a stream ends once"));
    let healed = Some("corrupted blocks are found and healed");
    assert_eq!(violated(|seen| seen.flipped.push(FlippedBlock { from: 0, to: 1 })), healed);
    let found = Corruptions { found: 1, healed: 1, last_from: Some(0) };
    let flipped = |from, corruptions| {
        violated(|seen| {
            seen.flipped.push(FlippedBlock { from, to: 1 });
            seen.groups[0].members[1].corruptions = Some(corruptions);
        })
    };
    assert_eq!(flipped(0, found), None);
    assert_eq!(flipped(1, found), healed);
    assert_eq!(flipped(0, Corruptions { healed: 0, ..found }), healed);
    assert_eq!(violated(|seen| seen.groups[0].members[1].corruptions = Some(found)), healed);
    let named =
        vec![NamedMember { rank: 1, node: 1, cause: "was lost".to_owned(), corrupted: false, unreadable: false }];
    let blame = ReportedFailure { group: 1, named, quorum: true, begun: 2, held: vec![Some(2), None] };
    let accuse = |seen: &mut Observation| {
        let closed = seen.groups[0].members[0].closed.as_mut().unwrap();
        closed.outcome = Outcome::Failed(blame);
    };
    assert_eq!(violated(accuse), Some("no failure without a cause"));
}

/// Returns a case with headers whose last message is read from a source. The first receiver reads messages while they
/// arrive.
fn reading() -> Case {
    let mut case = case(AlgorithmCase::Chain, &[0, 1, 2], &[1_000, 2_000, 300, 5_000]);
    let group = &mut case.groups[0];
    group.headers = true;
    group.messages[3].source = Some(SourceCase { piece: 100, pause_ns: 1_000, broken: None });
    (group.members[1].offers, group.members[1].reads_at_once) = (true, 100);
    case
}

#[test]
fn checkers_see_what_is_wrong_with_headers_and_readers() {
    let violated = |change: &dyn Fn(&mut [MemberObservation])| {
        let case = reading();
        let mut seen = play(&case).expect("the case can be played");
        change(&mut seen.groups[0].members);
        CHECKERS.iter().find(|checker| (checker.check)(&case, &seen).is_err()).map(|checker| checker.name)
    };
    assert_eq!(violated(&|_| {}), None);
    let headers = Some("headers belong to their messages");
    let swaps = |members: &mut [MemberObservation]| {
        let [first, second, ..] = &mut members[2].delivered[..] else { panic!("they are delivered") };
        std::mem::swap(&mut first.headers, &mut second.headers);
    };
    assert_eq!(violated(&swaps), headers);
    assert_eq!(violated(&|members| members[1].delivered[0].headers[0] = 7), headers);
    let reads = Some("readers get the bytes of their messages");
    assert_eq!(violated(&|members| members[1].reads[0].digest = 7), reads);
    assert_eq!(violated(&|members| members[1].reads[0].read = 7), reads);
    let unreadable =
        |members: &mut [MemberObservation]| members[0].sends[3].as_mut().unwrap().outcome = Outcome::Unreadable;
    assert_eq!(violated(&unreadable), Some("sources break as promised"));
}

#[test]
fn a_source_that_breaks_fails_the_send_and_later_the_group() {
    for (headers, delta) in [(false, false), (true, false), (false, true)] {
        for after in [0, 255, 256, 4_999] {
            for broken in [BrokenSource::Ends { after }, BrokenSource::Fails { after }] {
                let mut case = reading();
                let group = &mut case.groups[0];
                (group.headers, group.delta) = (headers, delta);
                group.messages[3].source.as_mut().unwrap().broken = Some(broken);
                // The other messages are whole.
                group.messages.push(group.messages[0]);
                assert_eq!(judge(&case), None);
                let members = &play(&case).unwrap().groups[0].members;
                let sent = members[0].sends[3].as_ref().map(|sent| &sent.outcome);
                if headers || delta || after < 256 {
                    assert_eq!(sent, Some(&Outcome::Unreadable));
                    assert!(members.iter().all(|member| member.closed_well()), "{case}");
                } else {
                    let named = |member: &MemberObservation| {
                        let failure = member.reported_failures().next().expect("the group fails");
                        failure.named.iter().map(|named| (named.rank, named.unreadable)).collect::<Vec<_>>()
                    };
                    assert!(members.iter().all(|member| named(member) == [(0, true)]), "{case}");
                }
            }
        }
    }
}

/// The source of a message that has not begun when the group fails is gone, and the root sends it again.
#[test]
fn messages_that_are_queued_behind_a_source_keep_their_places_in_a_recovery() {
    let order = |at_ns| {
        let mut case = recovering(3);
        let group = &mut case.groups[0];
        group.sends_ahead = 32;
        group.messages[7].source = Some(SourceCase { piece: 256, pause_ns: 0, broken: None });
        case.faults = vec![at(at_ns, Fault::Kill { node: 3 })];
        assert_eq!(judge(&case), None);
        play(&case).unwrap().groups[0].members[0].order.clone()
    };
    let orders: Vec<_> = (0..20).map(|step| order(step * 20_000)).collect();
    assert!(orders.iter().any(|order| !order.is_sorted()), "{orders:?}");
}

#[test]
fn short_messages_that_are_read_from_sources_do_not_keep_the_memory_of_the_pool() {
    let mut case = case(AlgorithmCase::Chain, &[0, 1], &[4_000; 3]);
    for message in &mut case.groups[0].messages {
        message.source = Some(SourceCase { piece: 256, pause_ns: 0, broken: None });
    }
    case.pool_bytes_max = 4_096;
    assert_eq!(judge(&case), None);
}

/// Plays a group of two whose receiver dies; returns the violated checker if all failures name the root for a corrupted
/// block.
fn violated_by_corruption(flipped: &[FlippedBlock]) -> Option<&'static str> {
    let mut case = quiet();
    case.faults = vec![at(1, Fault::ResetControl { a: 0, b: 1 }), at(20_000, Fault::Kill { node: 1 })];
    let mut seen = play(&case).expect("the case can be played");
    seen.flipped = flipped.to_vec();
    for member in &mut seen.groups[0].members {
        let seen = [&mut member.joined, &mut member.stream, &mut member.closed].into_iter().flatten();
        for seen in seen.chain(member.sends.iter_mut().flatten()) {
            let Outcome::Failed(blame) = &mut seen.outcome else { continue };
            let cause = "passed on a block".to_owned();
            blame.named = vec![NamedMember { rank: 0, node: 0, cause, corrupted: true, unreadable: false }];
        }
    }
    CHECKERS.iter().find(|checker| (checker.check)(&case, &seen).is_err()).map(|checker| checker.name)
}

/// Returns a case whose survivors recover from the death of a member.
fn recovering(dies: u32) -> Case {
    let mut case = case(AlgorithmCase::Chain, &[0, 1, 2, 3], &[3_000; 12]);
    let group = &mut case.groups[0];
    (group.recovers, group.stable, group.receipts, group.sends_ahead) = (true, true, true, 2);
    case.faults = vec![at(200_000, Fault::Kill { node: dies })];
    case
}

#[test]
fn survivors_recover_and_get_the_rest() {
    for dies in 0..4 {
        for (stable, ring) in [(false, None), (true, None), (true, Some(RingCase { slots: 4, bytes: 100 }))] {
            let mut case = recovering(dies);
            (case.groups[0].stable, case.groups[0].ring) = (stable, ring);
            assert_eq!(judge(&case), None);
            let seen = play(&case).unwrap();
            for (_, member) in (0..4).zip(&seen.groups[0].members).filter(|(node, _)| *node != dies) {
                let [recovery] = &member.recoveries[..] else { panic!("{member:#?}") };
                assert!(recovery.closed_well() && recovery.delivered_before < 12, "{member:#?}");
            }
        }
    }
}

#[test]
fn checkers_see_what_is_wrong_with_a_recovery() {
    let violated = |change: &dyn Fn(&mut Observation)| {
        let case = recovering(3);
        let mut seen = play(&case).expect("the case can be played");
        change(&mut seen);
        CHECKERS.iter().find(|checker| (checker.check)(&case, &seen).is_err()).map(|checker| checker.name)
    };
    assert_eq!(violated(&|_| {}), None);
    let goes_on = Some("survivors go on");
    assert_eq!(violated(&|seen| seen.groups[0].members[1].delivered.truncate(11)), goes_on);
    assert_eq!(violated(&|seen| seen.groups[0].members[1].recoveries[0].closing_ns = None), goes_on);
    assert_eq!(violated(&|seen| seen.groups[0].members[1].recoveries[0].lost = Some(7)), goes_on);
    let fails = |seen: &mut Observation| {
        seen.groups[0].members[2].recoveries[0].recovered.outcome =
            Outcome::Error("it was recovered before".to_owned());
    };
    assert_eq!(violated(&fails), goes_on);
    let receipt = |seen: &mut Observation| {
        assert!(!seen.groups[0].members[0].recoveries[0].receipts.is_empty(), "it sends after the recovery");
        seen.groups[0].members[2].stored.clear();
    };
    assert!(matches!(violated(&receipt), Some("receipts are true" | "survivors go on")));
    let earlier = |seen: &mut Observation| seen.groups[0].members[1].recoveries[0].delivered_before -= 1;
    assert_eq!(violated(&earlier), Some("stable delivery is atomic"));
}

#[test]
fn who_is_said_to_have_passed_on_a_corrupted_block_has_done_so() {
    assert_eq!(violated_by_corruption(&[FlippedBlock { from: 0, to: 1 }]), None);
    assert_eq!(violated_by_corruption(&[]), Some("failures name the failed members"));
    assert_eq!(violated_by_corruption(&[FlippedBlock { from: 1, to: 0 }]), Some("failures name the failed members"));
}

#[test]
fn a_killed_member_is_named_by_all_survivors() {
    for node in 0..4 {
        let mut case = case(AlgorithmCase::BinomialPipeline, &[0, 1, 2, 3], &[10_000; 32]);
        case.faults = vec![at(500_000, Fault::Kill { node })];
        let seen = play(&case).unwrap();
        for member in seen.groups[0].members.iter().filter(|member| member.died_ns.is_none()) {
            let named = member.reported_failures().flat_map(|blame| &blame.named).map(|named| named.node);
            assert_eq!(named.collect::<BTreeSet<_>>(), BTreeSet::from([node]));
        }
        assert_eq!(judge(&case), None);
    }
}

#[test]
fn all_know_within_the_detection_time_that_a_member_has_vanished() {
    for node in 0..3 {
        let mut case = case(AlgorithmCase::Chain, &[0, 1, 2], &[100_000; 8]);
        case.faults = vec![at(1_000_000, Fault::Vanish { node })];
        let seen = play(&case).unwrap();
        for member in seen.groups[0].members.iter().filter(|member| member.died_ns.is_none()) {
            assert!(member.ended_ns.unwrap() <= 2_001_000_000, "{seen:#?}");
        }
        assert_eq!(judge(&case), None);
    }
}

/// Also if the node that begins the steps of the failure detection vanishes.
#[test]
fn all_know_so_when_they_have_fallen_into_step() {
    const PAUSE_NS: u64 = 50_000_000;
    for node in 0..3 {
        for at_ns in (500_000_000..1_700_000_000).step_by(70_000_000) {
            let mut case = case(AlgorithmCase::Chain, &[0, 1, 2], &[1000; 60]);
            // Keeps the group alive. The root waits for its end only after it has sent everything.
            case.groups[0].members[0].pause_ns = PAUSE_NS;
            case.faults = vec![at(at_ns, Fault::Vanish { node })];
            let seen = play(&case).unwrap();
            for member in seen.groups[0].members[1..].iter().filter(|member| member.died_ns.is_none()) {
                let ended = member.ended_ns.unwrap();
                assert!((at_ns..=at_ns + 2_000_000_000).contains(&ended), "{node} {at_ns} {ended}");
            }
            assert_eq!(judge(&case), None);
        }
    }
}

#[test]
fn a_root_that_announces_to_a_member_about_to_fail_is_not_blamed() {
    let mut case = case(AlgorithmCase::Circulant, &[0, 3, 1, 2], &[0]);
    case.groups[0].members[1].behaviour = Behaviour::Refuse { after: 0 };
    assert_eq!(judge(&case), None);
}

#[test]
fn a_member_that_cannot_be_connected_has_not_joined() {
    let mut case = case(AlgorithmCase::Chain, &[0, 1, 2], &[]);
    case.groups[0].members[1].begins_ns = 300_000;
    case.faults = vec![at(50_000, Fault::Cut { a: 1, b: 2, for_ns: 40_000_000_000 })];
    case.faults.push(at(1_000_000, Fault::Vanish { node: 2 }));
    assert_eq!(judge(&case), None);
}

#[test]
fn a_process_that_was_stopped_while_a_group_was_formed_blames_nobody() {
    let mut case = case(AlgorithmCase::Sequential, &[1, 0], &[]);
    case.faults = vec![at(4_000, Fault::Stop { node: 0, for_ns: 3_000_000_000 })];
    assert_eq!(judge(&case), None);
}

#[test]
fn a_group_that_fails_at_the_root_when_all_have_confirmed_closes_well_at_nobody() {
    let mut case = case(AlgorithmCase::Sequential, &[1, 2, 0], &[]);
    let stop = Fault::Stop { node: 1, for_ns: 40_000_000_000 };
    let formed = When::Milestone { group: 1, node: 1, milestone: Milestone::Joined, delay_ns: 3_000 };
    case.faults = vec![FaultCase { when: formed, fault: stop }, at(20_000_000, Fault::Kill { node: 0 })];
    assert_eq!(judge(&case), None);
}

#[test]
fn what_waits_for_a_port_that_stands_still_leaves_when_it_goes_on() {
    let mut case = case(AlgorithmCase::Sequential, &[1, 0], &[0, 0, 0, 256]);
    case.faults = vec![at(1, Fault::LimitPort { node: 0, mbps: 0, for_ns: 1_000_000_000 })];
    assert_eq!(judge(&case), None);
    let seen = play(&case).unwrap();
    assert!((1_000_000_000..1_100_000_000).contains(&seen.ended_ns.unwrap()), "{seen:?}");
}

#[test]
fn bits_that_change_are_healed_on_every_edge() {
    for (immediate, blocks) in [(false, 1), (true, 1), (false, u64::MAX)] {
        let mut case = case(AlgorithmCase::BinomialPipeline, &[0, 1, 2, 3, 4], &[2_000, 0, 1]);
        case.groups[0].checks = true;
        case.faults = (1..5).map(|node| at(0, Fault::FlipBits { node, bit: 77, immediate, blocks })).collect();
        assert_eq!(judge(&case), None);
        let seen = play(&case).unwrap();
        let found = seen.groups[0].members.iter().filter_map(|member| member.corruptions).map(|it| it.found);
        assert_eq!(found.collect::<Vec<_>>(), [blocks.min(10); 4]);
        assert!(seen.groups[0].members.iter().all(|member| member.closed_well()));
    }
}

#[test]
fn slots_and_rows_that_change_are_healed() {
    // The root keeps the longest message in its blocks.
    let sizes = [0, 1, 50, 51, 40_000, 7];
    for (recoverable, checks) in [(true, false), (false, true), (true, true)] {
        for slots in [1, 3, u64::MAX] {
            let mut case = case(AlgorithmCase::BinomialPipeline, &[0, 1, 2, 3, 4], &sizes);
            let group = &mut case.groups[0];
            (group.recoverable, group.checks, group.receipts) = (recoverable, checks, true);
            group.ring = Some(RingCase { slots: 2, bytes: 50 });
            case.faults = (1..5).map(|node| at(0, Fault::FlipSlots { node, bit: 77, slots })).collect();
            case.faults.extend((0..5).map(|node| at(0, Fault::FlipRows { node, bit: 99, rows: 3 })));
            assert_eq!(judge(&case), None);
            let seen = play(&case).unwrap();
            let found = seen.groups[0].members.iter().filter_map(|member| member.corruptions).map(|it| it.found);
            assert_eq!(found.collect::<Vec<_>>(), [slots.min(sizes.len() as u64); 4]);
            assert!(seen.groups[0].members.iter().all(|member| member.closed_well()));
        }
    }
}

/// Whether the row comes again late says nothing about the member that writes it.
#[test]
fn a_row_that_changes_before_its_way_stands_still_blames_nobody() {
    for at_ns in (10_000..400_000).step_by(10_000) {
        let mut case = case(AlgorithmCase::Chain, &[0, 1], &[1_000; 20]);
        case.groups[0].stable = true;
        case.faults = vec![
            at(at_ns, Fault::FlipRows { node: 1, bit: 5, rows: 2 }),
            at(at_ns + 10_000, Fault::LimitPort { node: 0, mbps: 0, for_ns: 5_000_000_000 }),
        ];
        assert_eq!(judge(&case), None);
    }
}

#[test]
fn bits_do_not_change_where_nobody_looks() {
    let mut case = quiet();
    case.faults = vec![at(0, Fault::FlipBits { node: 1, bit: 0, immediate: false, blocks: 1 })];
    assert!(play(&case).is_err());
    case.groups[0].ring = Some(RingCase { slots: 2, bytes: 50 });
    case.faults = vec![at(0, Fault::FlipSlots { node: 1, bit: 0, slots: 1 })];
    assert!(play(&case).is_ok());
    case.groups[0].recoverable = false;
    assert!(play(&case).is_err());
}

#[test]
fn members_that_have_parts_get_the_rest() {
    for percent in [0, 50, 100] {
        let mut case = case(AlgorithmCase::Circulant, &[0, 1, 2, 3], &[5_000, 0, 300]);
        case.groups[0].delta = true;
        for (member, seed) in case.groups[0].members[1..].iter_mut().zip(0..) {
            (member.offers, member.has) = (true, Some(PartsCase { percent, seed }));
        }
        assert_eq!(judge(&case), None);
        assert!(play(&case).unwrap().groups[0].members.iter().all(|member| member.closed_well()));
    }
}

#[test]
fn a_case_shrinks_to_what_matters() {
    let kills = |case: &Case| {
        let seen = play(case).unwrap();
        seen.faults.iter().any(|seen| matches!(case.faults[seen.fault].fault, Fault::Kill { .. }))
    };
    let mut plays = 0;
    let case = (0..).map(Case::draw).find(|case| case.faults.len() > 3 && kills(case)).unwrap();
    let smallest = shrink(&case, 1_000, |case| {
        plays += 1;
        kills(case)
    });
    assert!(plays <= 1_000);
    assert_eq!((smallest.faults.len(), smallest.groups.len()), (1, 1));
    // No fault happens after all members have ended: a milestone may need more members, and a message.
    assert!(smallest.model.nodes <= 5 && smallest.groups[0].members.len() <= 4, "{smallest}");
    assert!(smallest.groups[0].messages.len() <= 1, "{smallest}");
}

#[test]
fn what_makes_no_sense_is_not_played() {
    let mut case = quiet();
    case.groups[0].members[0].node = 99;
    assert!(play(&case).is_err());
    assert_eq!(judge(&case).unwrap().checker, "the case can be played");
}

/// Seeds of the full form.
const SEEDS: u64 = 100_000;
/// Seeds of the short form.
const SEEDS_SHORT: u64 = 10_000;
/// Number of failures that are shrunk and printed.
const SHOWN: usize = 3;
/// Limit of plays to shrink one.
const PLAYS: usize = 300;
