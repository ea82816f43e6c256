//! Agreements of whole groups over a network that delivers, delays and loses as a seed says.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proptest::prelude::*;
use rdmc_fabric::Timestamp;

use super::{Agreement, Patience};
use crate::certificate::{Digest, MessageRecord};
use crate::failure::FailureCause;
use crate::wire::end::{Accepted, Ballot, EndFrame, Evidence, Outcome, Progress, Report, Verdict};

/// A group whose members agree over connections that deliver in order, in an order among them that chance decides.
struct Network {
    members: Vec<Agreement>,
    channels: BTreeMap<(u32, u32), VecDeque<EndFrame>>,
    dead: BTreeSet<u32>,
    declared: BTreeSet<u32>,
    cut: BTreeSet<(u32, u32)>,
    /// A member that receives and sends nothing, although its node is there.
    mute: Option<u32>,
    /// Members that have not noticed the loss of another one.
    unnoticed: Vec<(u32, u32)>,
    now: Timestamp,
    state: u64,
}

/// The faults that may happen to the members of a network.
#[derive(Clone, Copy, Debug)]
struct Fate {
    deaths: u32,
    cuts: u32,
    mends: u32,
    refusals: u32,
}

impl Fate {
    const NOTHING: Self = Self { deaths: 0, cuts: 0, mends: 0, refusals: 0 };
}

impl Network {
    fn new(count: u32, seed: u64) -> Self {
        Self {
            members: (0..count).map(|me| Agreement::new(me, count, PATIENCE)).collect(),
            channels: BTreeMap::new(),
            dead: BTreeSet::new(),
            declared: BTreeSet::new(),
            cut: BTreeSet::new(),
            mute: None,
            unnoticed: Vec::new(),
            now: Timestamp::ZERO,
            state: seed | 1,
        }
    }

    fn chance(&mut self, below: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        usize::try_from(self.state % below.max(1) as u64).unwrap()
    }

    fn count(&self) -> u32 {
        u32::try_from(self.members.len()).unwrap()
    }

    fn alive(&self) -> Vec<u32> {
        (0..self.count()).filter(|rank| !self.dead.contains(rank) && self.mute != Some(*rank)).collect()
    }

    fn at(&mut self, rank: u32, step: impl FnOnce(&mut Agreement, Timestamp)) {
        let now = self.now;
        let member = &mut self.members[rank as usize];
        step(member, now);
        for (to, frame) in member.take_frames() {
            assert_ne!(to, rank, "a member talks to itself: {frame:?}");
            if self.mute != Some(to) && !self.dead.contains(&to) && !self.cut.contains(&pair(rank, to)) {
                self.channels.entry((rank, to)).or_default().push_back(frame);
            }
        }
    }

    fn deliver(&mut self, from: u32, to: u32) {
        let Some(frame) = self.channels.get_mut(&(from, to)).and_then(VecDeque::pop_front) else { return };
        if self.dead.contains(&to) {
            return;
        }
        self.at(to, |member, now| {
            member.receive(from, frame.clone(), now).unwrap_or_else(|what| panic!("{from} to {to}: {frame:?}: {what}"));
        });
    }

    /// A member dies; its last frames may be lost.
    fn kill(&mut self, rank: u32) {
        self.dead.insert(rank);
        for other in self.alive() {
            let kept = self.chance(3);
            let said = self.channels.entry((rank, other)).or_default();
            said.truncate(if kept == 0 { 0 } else { said.len().div_ceil(kept) });
            self.unnoticed.push((other, rank));
        }
    }

    /// Two members reach each other no more.
    fn cut(&mut self, a: u32, b: u32) {
        if a == b || !self.cut.insert(pair(a, b)) {
            return;
        }
        self.channels.remove(&(a, b));
        self.channels.remove(&(b, a));
        self.unnoticed.extend([(a, b), (b, a)]);
    }

    /// A member works in its group.
    fn work(&mut self, rank: u32, messages: u64) {
        let held = self.members[rank as usize].progress.held;
        let confirmed = self.members[rank as usize].progress.confirmed.contains(&rank);
        let root_holds = self.members[0].progress.held;
        let told = self.members[rank as usize].messages();
        self.at(rank, |member, now| match rank {
            0 if held < messages => {
                let _ = member.begin(held) && member.hold();
            }
            0 if told.is_none() => member.close(messages, now),
            _ if rank > 0 && held < root_holds => {
                let _ = member.begin(held) && member.hold();
            }
            _ if rank > 0 && told == Some(held) && !confirmed => member.confirm(now),
            _ => {}
        });
    }

    /// Lets everything happen, with so many faults, until nothing more happens.
    fn run(&mut self, messages: u64, fate: Fate, faults_after: usize) {
        let mut faults = fate;
        for step in 0..STEPS_MAX {
            if step >= faults_after {
                self.strike(&mut faults);
            }
            let waiting: Vec<_> =
                self.channels.iter().filter(|(_, frames)| !frames.is_empty()).map(|it| *it.0).collect();
            let alive = self.alive();
            match self.chance(4) {
                0 if !self.unnoticed.is_empty() => {
                    let at = self.chance(self.unnoticed.len());
                    let (observer, lost) = self.unnoticed[at];
                    // The frames of the lost one are taken before its end.
                    let heard = self.channels.get(&(lost, observer)).is_none_or(VecDeque::is_empty);
                    if heard {
                        self.unnoticed.swap_remove(at);
                        if !self.dead.contains(&observer) {
                            self.at(observer, |member, now| member.lose(lost, FailureCause::ConnectionLost, now));
                        }
                    }
                }
                1 if !alive.is_empty() => {
                    let rank = alive[self.chance(alive.len())];
                    self.work(rank, messages);
                }
                _ if !waiting.is_empty() => {
                    let (from, to) = waiting[self.chance(waiting.len())];
                    self.deliver(from, to);
                }
                _ => {}
            }
            let quiet = self.channels.values().all(VecDeque::is_empty) && self.unnoticed.is_empty();
            if quiet && alive.iter().all(|rank| self.outcome(*rank).is_some()) {
                return;
            }
            let deadlines = alive.iter().filter_map(|rank| self.members[*rank as usize].deadline());
            if let (true, Some(at)) = (quiet, deadlines.min()) {
                self.now = self.now.max(at);
                for rank in alive {
                    self.at(rank, Agreement::elapse);
                }
            }
        }
        let open: Vec<_> = self.alive().into_iter().filter(|rank| self.outcome(*rank).is_none()).collect();
        panic!("no outcome at {open:?}: {:#?}", self.members);
    }

    /// Two members reach each other again.
    fn mend(&mut self, a: u32, b: u32) {
        if self.unnoticed.iter().any(|(one, other)| pair(*one, *other) == (a, b)) || !self.cut.remove(&(a, b)) {
            return;
        }
        for (one, other) in [(a, b), (b, a)] {
            if !self.dead.contains(&one) && !self.dead.contains(&other) {
                self.at(one, |member, now| member.reconnect(other, now));
            }
        }
    }

    fn strike(&mut self, faults: &mut Fate) {
        let alive = self.alive();
        if alive.len() < 2 || self.chance(6) > 0 {
            return;
        }
        let one = alive[self.chance(alive.len())];
        let other = alive[self.chance(alive.len())];
        match self.chance(4) {
            3 if faults.mends > 0 => {
                if let Some((a, b)) = self.cut.first().copied() {
                    faults.mends -= 1;
                    self.mend(a, b);
                }
            }
            0 if faults.deaths > 0 => {
                faults.deaths -= 1;
                self.kill(one);
            }
            1 if faults.cuts > 0 => {
                faults.cuts -= 1;
                self.cut(one, other);
            }
            2 if faults.refusals > 0 && self.members[one as usize].outcome().is_none() => {
                faults.refusals -= 1;
                self.declared.insert(one);
                self.at(one, |member, now| member.declare(FailureCause::Abandoned, now));
            }
            _ => {}
        }
    }

    fn outcome(&self, rank: u32) -> Option<&Outcome> {
        self.members[rank as usize].outcome().map(|(_, outcome)| outcome)
    }

    // Invariants.

    fn a_close_is_true(&self, messages: u64) {
        for rank in 0..self.count() {
            if let Some(Outcome::Closed { .. }) = self.outcome(rank) {
                for member in &self.members {
                    assert_eq!(member.progress.held, messages, "{rank} closed well");
                }
            }
        }
    }

    fn quorums_agree(&self) {
        let by_quorum = |outcome: &&Outcome| match outcome {
            Outcome::Closed { .. } => true,
            Outcome::Failed(verdict) => verdict.quorum,
        };
        let outcomes: Vec<_> = (0..self.count()).filter_map(|rank| self.outcome(rank)).filter(by_quorum).collect();
        assert!(outcomes.windows(2).all(|two| two[0] == two[1]), "{outcomes:#?}");
    }

    fn survivors_agree(&self) {
        let outcomes: Vec<_> = self.alive().into_iter().filter_map(|rank| self.outcome(rank)).collect();
        assert!(outcomes.windows(2).all(|two| two[0] == two[1]), "{outcomes:#?}");
    }

    fn reports_are_true(&self) {
        for rank in self.alive() {
            let Some(Outcome::Failed(verdict)) = self.outcome(rank) else { continue };
            for (member, held) in self.members.iter().zip(&verdict.held) {
                // Of a root that died only that is known which others had heard of.
                let held = held.filter(|held| member.me != 0 || *held != verdict.begun);
                let held_then = held.unwrap_or(member.progress.held);
                assert_eq!(held_then, member.progress.held, "{rank} was told so of {}", member.me);
            }
        }
    }

    fn the_guilty_are_named(&self) {
        for rank in self.alive() {
            let Some(Outcome::Failed(verdict)) = self.outcome(rank) else { continue };
            for (named, cause) in &verdict.failed {
                let guilty = self.dead.contains(named) || self.declared.contains(named);
                assert!(guilty, "{rank} was told that {named} {cause}");
            }
        }
    }
}

fn pair(a: u32, b: u32) -> (u32, u32) {
    (a.min(b), a.max(b))
}

const STEPS_MAX: usize = 200_000;

const PATIENCE: Patience =
    Patience { settling: Duration::from_millis(250), outbid: Duration::from_secs(1), all: Duration::from_secs(8) };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30_000))]

    #[test]
    fn survivors_of_deaths_are_told_the_same(
        count in 1u32..8, deaths in 0u32..4, refusals in 0u32..2, messages in 0u64..4, after in 0usize..300, seed: u64,
    ) {
        let mut network = Network::new(count, seed);
        network.run(messages, Fate { deaths, refusals, ..Fate::NOTHING }, after);
        network.survivors_agree();
        prop_assert!(network.now < Timestamp::ZERO + PATIENCE.all, "somebody had to give up");
        network.a_close_is_true(messages);
        network.reports_are_true();
        network.the_guilty_are_named();
    }

    #[test]
    fn of_two_sides_one_at_most_is_a_quorum(
        count in 2u32..8, deaths in 0u32..2, cuts in 1u32..8, mends in 0u32..4, messages in 0u64..3,
        after in 0usize..300, seed: u64,
    ) {
        let mut network = Network::new(count, seed);
        network.run(messages, Fate { deaths, cuts, mends, refusals: 1 }, after);
        network.quorums_agree();
        network.a_close_is_true(messages);
        prop_assert!(network.now < Timestamp::ZERO + PATIENCE.all, "somebody had to give up");
    }

    #[test]
    fn frames_from_anybody_do_no_harm(count in 2u32..5, said in proptest::collection::vec((0u32..5, frames()), 0..40)) {
        let mut network = Network::new(count, 1);
        for (from, frame) in said {
            let from = 1 + from % (count - 1);
            network.at(0, |member, now| _ = member.receive(from, frame, now));
            network.channels.clear();
            prop_assert!(!matches!(network.outcome(0), Some(Outcome::Closed { .. })), "nobody has confirmed");
        }
    }
}

#[test]
fn a_group_to_which_nothing_happens_is_closed() {
    for count in 1..20 {
        let mut network = Network::new(count, 7);
        network.run(3, Fate::NOTHING, 0);
        assert!((0..count).all(|rank| network.outcome(rank) == Some(&Outcome::Closed { messages: 3 })));
        assert_eq!(network.now, Timestamp::ZERO, "nobody waits");
    }
}

#[test]
fn survivors_that_are_most_do_not_wait() {
    for count in 3..12 {
        for dead in 0..count {
            let mut network = Network::new(count, 7);
            network.kill(dead);
            network.run(3, Fate::NOTHING, 0);
            assert_eq!(network.now, Timestamp::ZERO, "{count} members without {dead}");
        }
    }
}

#[test]
fn who_is_cut_off_from_most_is_named_by_all() {
    let count = 5;
    for lonely in 0..count {
        for friend in (0..count).filter(|friend| *friend != lonely) {
            let mut network = Network::new(count, 3);
            let others: Vec<u32> = (0..count).filter(|rank| ![lonely, friend].contains(rank)).collect();
            for other in others {
                network.cut(lonely, other);
            }
            network.run(2, Fate::NOTHING, 0);
            network.survivors_agree();
            let Some(Outcome::Failed(verdict)) = network.outcome(friend) else { panic!("it failed") };
            assert_eq!(verdict.failed.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [lonely]);
        }
    }
}

#[test]
fn who_finds_the_others_again_is_told_the_same() {
    for count in 2..6 {
        for other in 1..count {
            let mut network = Network::new(count, 9);
            network.cut(0, other);
            for (observer, lost) in std::mem::take(&mut network.unnoticed) {
                network.at(observer, |member, now| member.lose(lost, FailureCause::ConnectionLost, now));
            }
            network.mend(0, other);
            network.run(2, Fate::NOTHING, 0);
            network.survivors_agree();
            let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
            assert!(verdict.quorum && verdict.failed.iter().all(|(rank, _)| [0, other].contains(rank)));
        }
    }
}

#[test]
fn who_breaks_the_protocol_is_named_before_who_says_so() {
    for (accuser, accused) in [(0, 1), (1, 0)] {
        let mut network = Network::new(2, 3);
        let what = "sent nonsense".to_owned();
        network.at(accuser, |member, now| member.accuse([(accused, FailureCause::Protocol { what })], now));
        network.run(0, Fate::NOTHING, 0);
        network.survivors_agree();
        let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
        assert_eq!(verdict.failed[0].0, accused);
    }
}

#[test]
fn who_dies_is_lost_in_whatever_order_its_connections_break() {
    for (accusers, seed) in [(vec![0], 1), (vec![1], 2), (vec![0, 1], 3), (vec![0, 1, 3], 4), (vec![3], 5)] {
        let mut network = Network::new(4, seed);
        network.kill(2);
        for accuser in accusers {
            let what = "the connection to the peer was lost".to_owned();
            network.at(accuser, |member, now| member.accuse([(2, FailureCause::DataConnection { what })], now));
        }
        network.run(0, Fate::NOTHING, 0);
        network.survivors_agree();
        let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
        assert_eq!(verdict.failed, [(2, FailureCause::ConnectionLost)]);
    }
}

#[test]
fn who_leaves_before_there_is_an_outcome_names_nobody_else() {
    let mut network = Network::new(3, 3);
    network.at(0, |member, now| member.declare(FailureCause::Abandoned, now));
    network.at(0, |member, now| member.lose(1, FailureCause::ConnectionLost, now));
    network.at(0, |member, _| member.depart());
    let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
    assert_eq!(verdict.failed, [(0, FailureCause::Abandoned)]);
    assert!(!verdict.quorum && verdict.held[1..] == [None, None]);
}

#[test]
fn who_has_ended_without_the_others_is_not_waited_for() {
    // Member 0 has ended alone when member 1 finds it again. Member 1 has accepted another outcome, and leads.
    let mut network = Network::new(4, 6_684_034_265_202_688_508);
    network.run(0, Fate { deaths: 1, cuts: 3, mends: 2, refusals: 1 }, 41);
    network.quorums_agree();
    assert_eq!(network.outcome(1), network.outcome(2));
    assert!(network.now < Timestamp::ZERO + PATIENCE.all, "somebody had to give up");
}

#[test]
fn who_answers_nothing_is_counted_out() {
    for (count, mute) in [(3, 0), (3, 1), (3, 2), (5, 0), (5, 3)] {
        let mut network = Network::new(count, 3);
        network.mute = Some(mute);
        let declarer = (mute + 1) % count;
        network.declared.insert(declarer);
        network.at(declarer, |member, now| member.declare(FailureCause::Abandoned, now));
        network.run(0, Fate::NOTHING, 0);
        network.survivors_agree();
        assert!(network.now < Timestamp::ZERO + PATIENCE.all, "somebody had to give up");
        let Some(Outcome::Failed(verdict)) = network.outcome(declarer) else { panic!("it failed") };
        let named: BTreeSet<u32> = verdict.failed.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(named, BTreeSet::from([declarer, mute]));
    }
}

#[test]
fn who_reports_what_cannot_be_is_not_waited_for() {
    let mut network = Network::new(3, 3);
    network.at(0, |member, now| member.declare(FailureCause::Abandoned, now));
    network.deliver(0, 1);
    network.at(1, |member, now| {
        let ballot = Ballot { attempt: 1, leader: 1 };
        let progress = Progress { confirmed: vec![7], ..Progress::default() };
        let report = Box::new(Report { progress, ..Report::default() });
        assert!(member.receive(2, EndFrame::Report { ballot, report }, now).is_err());
    });
    assert!(!network.members[1].is_reachable(2));
}

#[test]
fn what_a_quorum_has_accepted_is_not_forgotten_for_a_minority() {
    let verdict = |quorum| Verdict {
        failed: vec![(0, FailureCause::ConnectionLost)],
        quorum,
        begun: 0,
        held: vec![None; 4],
        records: Vec::new(),
    };
    let (now, of_quorum, of_minority) =
        (Timestamp::ZERO, Outcome::Failed(verdict(true)), Outcome::Failed(verdict(false)));
    let mut member = Agreement::new(3, 4, PATIENCE);
    let propose = |attempt, leader, outcome: &Outcome, quorum| {
        let ballot = Ballot { attempt, leader };
        EndFrame::Propose { ballot, outcome: outcome.clone(), quorum }
    };
    member.receive(1, propose(1, 1, &of_quorum, true), now).unwrap();
    member.receive(2, propose(2, 2, &of_minority, false), now).unwrap();
    let reports = BTreeMap::from([(3, member.report())]);
    assert_eq!(member.choose(&reports, true), of_quorum);
    assert_eq!(member.choose(&reports, false), of_minority);
}

#[test]
fn what_a_quorum_has_decided_is_learnt_whatever_a_minority_had_proposed() {
    let verdict = Verdict {
        failed: vec![(2, FailureCause::ConnectionLost)],
        quorum: true,
        begun: 0,
        held: vec![Some(0), Some(0), None, Some(0)],
        records: Vec::new(),
    };
    let (now, decided) = (Timestamp::ZERO, Outcome::Failed(verdict.clone()));
    let mut member = Agreement::new(3, 4, PATIENCE);
    let other = Outcome::Failed(Verdict { quorum: false, failed: vec![(0, FailureCause::ConnectionLost)], ..verdict });
    let (higher, ballot) = (Ballot { attempt: 5, leader: 2 }, Ballot { attempt: 1, leader: 0 });
    member.receive(2, EndFrame::Propose { ballot: higher, outcome: other, quorum: false }, now).unwrap();
    member.receive(0, EndFrame::Decided { ballot, outcome: decided.clone() }, now).unwrap();
    assert_eq!(member.outcome().map(|(_, outcome)| outcome), Some(&decided));
}

#[test]
fn all_that_did_not_join_are_named() {
    let mut network = Network::new(4, 3);
    network.at(0, |member, now| member.accuse([1, 3].map(|rank| (rank, FailureCause::NotJoined)), now));
    network.run(0, Fate::NOTHING, 0);
    network.survivors_agree();
    let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
    assert_eq!(verdict.failed, [(1, FailureCause::NotJoined), (3, FailureCause::NotJoined)]);
}

#[test]
fn who_has_other_messages_than_the_root_does_not_confirm_and_is_named() {
    for odd in 1..3 {
        let mut network = Network::new(3, 7);
        for rank in 0..3 {
            network.at(rank, |member, _| {
                assert!(member.begin(5) && member.hold());
                member.note_digest(0, Some(Digest([u8::from(rank == odd); 32])));
            });
        }
        network.run(1, Fate::NOTHING, 0);
        network.survivors_agree();
        let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
        assert_eq!(verdict.failed, [(odd, FailureCause::Diverged)]);
    }
}

#[test]
fn a_digest_that_some_know_is_told_to_all() {
    let mut network = Network::new(3, 7);
    for rank in 0..3 {
        network.at(rank, |member, _| {
            for message in 0..3 {
                assert!(member.begin(5) && member.hold());
                // The root has not sent the second one to the end.
                if (rank, message) != (0, 1) {
                    member.note_digest(message, Some(Digest([7; 32])));
                }
            }
        });
    }
    network.at(2, |member, now| member.declare(FailureCause::Abandoned, now));
    network.run(0, Fate::NOTHING, 0);
    network.survivors_agree();
    let Some(Outcome::Failed(verdict)) = network.outcome(0) else { panic!("it failed") };
    let told: Vec<_> = verdict.records.iter().map(|record| (record.number, record.digest)).collect();
    assert_eq!(told, [(1, Some(Digest([7; 32]))), (2, Some(Digest([7; 32])))]);
}

/// Frames of all kinds.
pub(crate) fn frames() -> impl Strategy<Value = EndFrame> {
    let text = "[a-z0-9.:]{0,20}";
    let cause = prop_oneof![
        Just(FailureCause::ConnectionLost),
        Just(FailureCause::Abandoned),
        Just(FailureCause::Unresponsive { silence: Duration::from_millis(5) }),
        text.prop_map(|reason| FailureCause::Refused { reason }),
    ];
    let accusations = || proptest::collection::vec((0u32..6, cause.clone()), 0..4);
    let evidence = || {
        (proptest::option::of(cause.clone()), proptest::collection::vec(0u32..6, 0..4), accusations())
            .prop_map(|(own, lost, against)| Evidence { own, lost, against })
    };
    let ballot = || (0u32..4, 0u32..6).prop_map(|(attempt, leader)| Ballot { attempt, leader });
    let digest = || proptest::option::of(any::<[u8; 32]>().prop_map(Digest));
    let record = (any::<u64>(), any::<u64>(), digest()).prop_map(|(number, size, digest)| MessageRecord {
        number,
        size,
        digest,
    });
    let records = || proptest::collection::vec(record.clone(), 0..4);
    let held = proptest::collection::vec(proptest::option::of(any::<u64>()), 0..6);
    let verdict = (accusations(), any::<bool>(), any::<u64>(), held, records())
        .prop_map(|(failed, quorum, begun, held, records)| Verdict { failed, quorum, begun, held, records });
    let outcome =
        prop_oneof![(0u64..4).prop_map(|messages| Outcome::Closed { messages }), verdict.prop_map(Outcome::Failed),];
    let progress = (
        any::<u64>(),
        any::<u64>(),
        proptest::option::of(0u64..4),
        proptest::collection::vec(0u32..6, 0..6),
        records(),
    )
        .prop_map(|(begun, held, messages, confirmed, records)| Progress {
            begun,
            held,
            messages,
            confirmed,
            records,
        });
    let accepted = || proptest::option::of((ballot(), outcome.clone()));
    let accepted = (accepted(), accepted()).prop_map(|(of_quorum, of_minority)| Accepted { of_quorum, of_minority });
    let report = (evidence(), progress, accepted).prop_map(|(evidence, progress, accepted)| Report {
        evidence,
        progress,
        accepted,
    });
    prop_oneof![
        (any::<u64>(), digest()).prop_map(|(messages, digest)| EndFrame::Closing { messages, digest }),
        any::<u64>().prop_map(|messages| EndFrame::Confirm { messages }),
        evidence().prop_map(EndFrame::Wedged),
        ballot().prop_map(|ballot| EndFrame::Gather { ballot }),
        (ballot(), report).prop_map(|(ballot, report)| EndFrame::Report { ballot, report: Box::new(report) }),
        (ballot(), outcome.clone(), any::<bool>()).prop_map(|(ballot, outcome, quorum)| EndFrame::Propose {
            ballot,
            outcome,
            quorum
        }),
        ballot().prop_map(|ballot| EndFrame::Accepted { ballot }),
        ballot().prop_map(|promised| EndFrame::Outbid { promised }),
        any::<bool>().prop_map(|left| EndFrame::Absent { left }),
        (ballot(), outcome).prop_map(|(ballot, outcome)| EndFrame::Decided { ballot, outcome }),
    ]
}
