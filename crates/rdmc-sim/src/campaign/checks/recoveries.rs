//! The checker of groups that continue others after failures.

use std::collections::{BTreeMap, BTreeSet};

use super::super::case::{Behaviour, Case, GroupCase};
use super::super::observation::{
    GroupObservation, MemberObservation, NamedMember, Observation, Outcome, RecoveryObservation, ReportedFailure,
};
use super::super::suspects::Suspects;
use super::{Content, groups, may_be_all, receipts_of_group};

/// Groups that continue others keep the promises that are made of groups, and survivors can go on.
pub(super) fn recoveries_go_on(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen).filter(|(group, _)| group.recovers) {
        let suspects = Suspects::of(case, seen, group);
        let mut continued: BTreeMap<&[u32], Vec<Part<'_>>> = BTreeMap::new();
        for (rank, member) in of_group.members.iter().enumerate() {
            for (at, recovery) in member.recoveries.iter().enumerate() {
                let node = group.members[rank].node;
                let behaviour = group.members[rank].behaviour;
                let part = Part { rank, node, behaviour, member, at, recovery };
                part.recovered(&suspects).map_err(|what| format!("group {}: {what}", group.id))?;
                if !matches!(recovery.recovered.outcome, Outcome::Error(_)) {
                    continued.entry(&recovery.members).or_default().push(part);
                }
            }
        }
        for (members, parts) in continued {
            let of_group = Continued { members, parts, group, first: of_group, suspects: &suspects };
            of_group.check().map_err(|what| format!("group {}, continued by {members:?}: {what}", group.id))?;
        }
    }
    Ok(())
}

/// What a member saw of a group that continues another.
struct Part<'a> {
    /// Its rank in the first group.
    rank: usize,
    node: u32,
    behaviour: Behaviour,
    member: &'a MemberObservation,
    /// Number of recoveries before this one.
    at: usize,
    recovery: &'a RecoveryObservation,
}

/// A group that continues another, by its members.
struct Continued<'a> {
    members: &'a [u32],
    parts: Vec<Part<'a>>,
    group: &'a GroupCase,
    first: &'a GroupObservation,
    suspects: &'a Suspects,
}

impl Part<'_> {
    /// A survivor of a quorum can recover, unless it has come to harm.
    fn recovered(&self, suspects: &Suspects) -> Result<(), String> {
        let Outcome::Error(error) = &self.recovery.recovered.outcome else { return Ok(()) };
        let failure = match self.at.checked_sub(1) {
            Some(before) => self.member.recoveries[before].reported_failures().next(),
            None => self.member.reported_failures().next(),
        };
        let survives = failure.is_some_and(|failure| self.survives(failure));
        match survives && !suspects.causes.contains(&self.node) && !suspects.partitioned.contains(&self.node) {
            true => Err(format!("rank {} cannot recover from {failure:?}: {error}", self.rank)),
            false => Ok(()),
        }
    }

    fn survives(&self, failure: &ReportedFailure) -> bool {
        failure.quorum && !failure.named.iter().any(|named| named.node == self.node)
    }

    fn failure(&self) -> Option<&ReportedFailure> {
        self.recovery.reported_failures().next()
    }

    /// Returns how many messages it delivered until the end of this group.
    fn delivered(&self) -> usize {
        self.member.delivered_until(self.at + 1).len()
    }

    fn takes_all(&self) -> bool {
        self.rank > 0 && !matches!(self.behaviour, Behaviour::CloseEarly { .. })
    }
}

impl Continued<'_> {
    fn check(&self) -> Result<(), String> {
        self.failures_name_suspects()?;
        self.outcomes_agree()?;
        self.closes_follow_full_delivery()?;
        self.losses_agree()?;
        if self.group.stable {
            self.delivery_is_atomic()?;
        }
        self.receipts_are_true()
    }

    fn has_root(&self) -> bool {
        self.members.contains(&self.group.members[0].node)
    }

    fn failures_name_suspects(&self) -> Result<(), String> {
        for part in &self.parts {
            let partitioned = self.suspects.partitioned.contains(&part.node);
            let may_be = |named: &NamedMember| {
                let is_member = self.members.get(named.rank as usize) == Some(&named.node);
                is_member && (partitioned && !named.corrupted || self.suspects.may_be_named(named))
            };
            let wrong = |failure: &&ReportedFailure| failure.named.is_empty() || !failure.named.iter().all(may_be);
            if let Some(failure) = part.recovery.reported_failures().find(wrong) {
                let suspects = self.suspects;
                return Err(format!("rank {} got {failure:?}, which names others than {suspects:?}", part.rank));
            }
        }
        Ok(())
    }

    /// A member has one outcome, survivors that were never partitioned for long have the same, and at most one outcome
    /// has a quorum.
    fn outcomes_agree(&self) -> Result<(), String> {
        let mut told: BTreeSet<Option<&ReportedFailure>> = BTreeSet::new();
        let mut by_quorum = told.clone();
        for part in &self.parts {
            let outcomes: BTreeSet<Option<&ReportedFailure>> = part
                .recovery
                .reported_failures()
                .map(Some)
                .chain(part.recovery.closed_well().then_some(None))
                .collect();
            if outcomes.len() > 1 {
                return Err(format!("rank {} has several outcomes: {outcomes:?}", part.rank));
            }
            by_quorum.extend(outcomes.iter().filter(|outcome| outcome.is_none_or(|failure| failure.quorum)));
            if !self.suspects.partitioned.contains(&part.node) {
                told.extend(outcomes);
            }
        }
        match told.len() > 1 || by_quorum.len() > 1 {
            true => Err(format!("members have different outcomes: {told:?}, {by_quorum:?}")),
            false => Ok(()),
        }
    }

    /// If one close succeeds, every member has called close, and those that take all messages have the same. If the
    /// root is one of them, they have every message.
    fn closes_follow_full_delivery(&self) -> Result<(), String> {
        let Some(closed) = self.parts.iter().find(|part| part.recovery.closed_well()) else { return Ok(()) };
        let closing = self.parts.iter().filter(|part| part.recovery.closing_ns.is_some());
        if closing.count() < self.members.len() {
            return Err(format!("rank {} closed well before all called close", closed.rank));
        }
        let taken = || self.parts.iter().filter(|part| part.takes_all());
        let counts: BTreeSet<usize> = taken().map(Part::delivered).collect();
        if counts.len() > 1 {
            return Err(format!("it was closed well after {counts:?} messages"));
        }
        let Some(part) = taken().next().filter(|_| self.has_root()) else { return Ok(()) };
        let delivered: Vec<_> = part.member.delivered.iter().map(Content::of).collect();
        match may_be_all(self.group, self.first, &delivered) {
            true => Ok(()),
            false => {
                Err(format!("rank {} closed well, but rank {} got only {}", closed.rank, part.rank, delivered.len()))
            }
        }
    }

    /// All survivors learn the same of messages that are lost, and nothing is lost if the root is there.
    fn losses_agree(&self) -> Result<(), String> {
        let joined = self.parts.iter().filter(|part| part.recovery.recovered.outcome == Outcome::Done);
        let lost: BTreeSet<Option<u64>> = joined.map(|part| part.recovery.lost).collect();
        match lost.len() > 1 || self.has_root() && lost.iter().any(Option::is_some) {
            true => Err(format!("survivors learn that messages from {lost:?} on are lost")),
            false => Ok(()),
        }
    }

    /// With stable delivery, survivors of a failure have delivered the same messages, and no member more.
    fn delivery_is_atomic(&self) -> Result<(), String> {
        let receivers = || self.parts.iter().filter(|part| part.takes_all());
        let survivors = receivers().filter(|part| part.failure().is_some_and(|failure| part.survives(failure)));
        let cuts: BTreeSet<usize> = survivors.map(Part::delivered).collect();
        let Some(cut) = cuts.first() else { return Ok(()) };
        match cuts.len() > 1 || receivers().any(|part| part.delivered() > *cut) {
            true => {
                let all: Vec<_> = receivers().map(|part| (part.rank, part.delivered())).collect();
                Err(format!("survivors delivered {cuts:?} messages, and the ranks {all:?}"))
            }
            false => Ok(()),
        }
    }

    fn receipts_are_true(&self) -> Result<(), String> {
        let failures: Vec<_> = self.parts.iter().filter_map(Part::failure).collect();
        let receipts = self.parts.iter().flat_map(|part| &part.recovery.receipts);
        receipts_of_group(self.group, self.first, self.members, receipts, &failures)
    }
}
