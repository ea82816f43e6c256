//! Exhaustive campaigns: faults of every member of small groups at each of its operations.
//!
//! A *history* is a group with a number of members that sends one message with a number of blocks, by one algorithm or
//! as a delta group whose members already have parts; or three messages with stable delivery, without and with a ring;
//! or three with a ring in a group whose survivors recover, with immediate and with stable delivery, or with headers;
//! or three in such a group of which the root reads one from a source, and receivers read all while they arrive. A
//! history is played once without a fault, which counts the operations of each member. It is then played once for each member,
//! each of its operations and each [`Harm`], which replaces the operation. Both plays are equal up to that operation.
//! So these are all points at which other members can observe the loss of a member.

use std::ops::RangeInclusive;

use super::case::{
    AlgorithmCase, Behaviour, Case, Fault, FaultCase, GroupCase, MemberCase, MessageCase, PartsCase, RingCase,
    SendFuture, SourceCase, SpineCase, When,
};
use super::play::play;
use super::{Report, judge_all};
use crate::model::ClusterModel;

/// The bounds of an exhaustive campaign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Members of the group, the root included.
    pub members: RangeInclusive<u32>,
    /// Blocks of the message.
    pub blocks: RangeInclusive<u32>,
    /// The faults of the members.
    pub harms: Vec<Harm>,
}

/// A fault of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Harm {
    /// Its process dies.
    Dies,
    /// Its host loses its power.
    Vanishes,
    /// Its process stops, for less than the detection time.
    Pauses,
    /// Its process stops until the others have ended.
    Stops,
}

impl Harm {
    /// All faults.
    pub const ALL: [Self; 4] = [Self::Dies, Self::Vanishes, Self::Pauses, Self::Stops];

    fn fault(self, node: u32) -> Fault {
        match self {
            Self::Dies => Fault::Kill { node },
            Self::Vanishes => Fault::Vanish { node },
            Self::Pauses => Fault::Stop { node, for_ns: PAUSE_NS },
            Self::Stops => Fault::Stop { node, for_ns: HEAL_NS },
        }
    }
}

impl Bounds {
    /// Returns the bounds of the promised campaign: up to 5 members, up to 4 blocks, every fault.
    pub fn all() -> Self {
        Self { members: 2..=5, blocks: 1..=4, harms: Harm::ALL.to_vec() }
    }

    /// Returns all histories, each as a case without a fault.
    pub fn histories(&self) -> Vec<Case> {
        let shapes = self.members.clone().flat_map(|members| self.blocks.clone().map(move |blocks| (members, blocks)));
        let of_shape = |(members, blocks)| {
            let whole = algorithms(members).into_iter().map(move |it| history(members, blocks, it));
            let pipeline = || history(members, blocks, AlgorithmCase::BinomialPipeline);
            let many = || with_ring(several(pipeline()));
            let stable_ones = [stable(several(pipeline())), stable(many())];
            whole
                .chain([rest_of(pipeline())])
                .chain(stable_ones)
                .chain([recovering(many()), recovering(stable(many()))])
                .chain([recovering(with_headers(many())), recovering(streamed(several(pipeline())))])
        };
        shapes.flat_map(of_shape).collect()
    }
}

/// The results of an exhaustive campaign.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Survey {
    /// Number of histories.
    pub histories: u64,
    /// Number of operations of all members of all histories without a fault.
    pub operations: u64,
    /// The results of all plays, including those without a fault.
    pub report: Report,
}

/// Plays everything within bounds on all processors of this machine.
///
/// The result depends only on the bounds.
pub fn run(bounds: &Bounds) -> Survey {
    let histories = bounds.histories();
    let (mut operations, mut members) = (0, Vec::new());
    for history in &histories {
        // A history that cannot be played is reported below.
        let counts = play(history).map(|seen| seen.operations).unwrap_or_default();
        for (node, count) in (0..).zip(counts) {
            members.push((operations, history, node));
            operations += count;
        }
    }
    let (quiet, harms) = (histories.len() as u64, bounds.harms.len() as u64);
    let played = quiet + operations * harms;
    let failures = judge_all(played, |number| {
        let Some(number) = number.checked_sub(quiet) else { return histories[index(number)].clone() };
        let (operation, harm) = (number / harms, bounds.harms[index(number % harms)]);
        let (first, history, node) = members[members.partition_point(|(first, ..)| *first <= operation) - 1];
        let when = When::Operation { node, count: operation - first };
        Case { faults: vec![FaultCase { when, fault: harm.fault(node) }], ..history.clone() }
    });
    Survey { histories: quiet, operations, report: Report { played, failures } }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("an index")
}

fn history(count: u32, blocks: u32, algorithm: AlgorithmCase) -> Case {
    let member = |node| MemberCase {
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
    // The last block is short.
    let size = u64::from(blocks * BLOCK_BYTES - 1);
    let group = GroupCase {
        id: 1,
        members: (0..count).map(member).collect(),
        algorithm,
        block_size: BLOCK_BYTES,
        formation_limit_ns: FORMATION_LIMIT_NS,
        messages: vec![MessageCase { size, future: SendFuture::Completes, source: None }],
        sends_ahead: 1,
        sends_from_pool: false,
        recoverable: true,
        recovers: false,
        checks: false,
        delta: false,
        stable: false,
        receipts: true,
        ring: None,
        headers: false,
        share: None,
        rate_max: None,
    };
    Case {
        seed: 1,
        model: ClusterModel::new(count, 1_000, 1_000),
        pool_bytes_max: 1 << 30,
        groups: vec![group],
        faults: Vec::new(),
        heal_ns: HEAL_NS,
        joins: false,
    }
}

/// Makes a delta group of a history: members have parts of its message. The rest is the same for all algorithms.
fn rest_of(mut history: Case) -> Case {
    for group in &mut history.groups {
        group.delta = true;
        for (member, seed) in group.members.iter_mut().skip(1).zip(0..) {
            (member.offers, member.has) = (true, Some(PartsCase { percent: 50, seed }));
        }
    }
    history
}

/// Makes the group of a history deliver its messages when all members have them.
fn stable(mut history: Case) -> Case {
    history.groups.iter_mut().for_each(|group| group.stable = true);
    history
}

/// Makes the survivors of a history's group go on.
fn recovering(mut history: Case) -> Case {
    history.groups.iter_mut().for_each(|group| (group.recovers, group.receipts) = (true, true));
    history
}

/// Lets the root of a history send three messages at once.
fn several(mut history: Case) -> Case {
    for group in &mut history.groups {
        group.messages = vec![group.messages[0]; 3];
        group.sends_ahead = 3;
    }
    history
}

/// Gives the group of a history a ring: its first message is in a slot, the others come in blocks.
fn with_ring(mut history: Case) -> Case {
    for group in &mut history.groups {
        group.ring = Some(RingCase { slots: 2, bytes: BLOCK_BYTES });
        group.messages[0].size = 1;
    }
    history
}

/// Gives the messages of a history headers: a short one, a longer one, and the longest.
fn with_headers(mut history: Case) -> Case {
    history.groups.iter_mut().for_each(|group| group.headers = true);
    history
}

/// Lets the root of a history read the second message while it sends it, and receivers while it arrives.
fn streamed(mut history: Case) -> Case {
    for group in &mut history.groups {
        group.messages[1].source = Some(SourceCase { piece: BLOCK_BYTES, pause_ns: SOURCE_PAUSE_NS, broken: None });
        for member in group.members.iter_mut().skip(1) {
            (member.offers, member.reads_at_once) = (true, BLOCK_BYTES as usize);
        }
    }
    history
}

/// Returns every algorithm; ranks alternate between two racks.
fn algorithms(members: u32) -> Vec<AlgorithmCase> {
    let racks: Vec<u32> = (0..members).map(|rank| rank % 2).collect();
    let hybrids = SpineCase::ALL.map(|spine| AlgorithmCase::Hybrid { racks: racks.clone(), spine });
    let flat = [
        AlgorithmCase::Sequential,
        AlgorithmCase::Chain,
        AlgorithmCase::BinomialTree,
        AlgorithmCase::BinomialPipeline,
        AlgorithmCase::Circulant,
        AlgorithmCase::TwoTree,
    ];
    flat.into_iter().chain(hybrids).collect()
}

/// Bytes of a block.
const BLOCK_BYTES: u32 = 256;
/// Pause of a source before each piece, in ns: longer than a block takes.
const SOURCE_PAUSE_NS: u64 = 10_000;
/// Limit of the time to form the group, in ns.
const FORMATION_LIMIT_NS: u64 = 30_000_000_000;
/// When the world is healed, in ns: long after the other members have detected a silent one.
const HEAL_NS: u64 = 60_000_000_000;
/// Duration of a stop below the detection time, in ns.
const PAUSE_NS: u64 = 100_000_000;
