//! The verdict that a leader draws from the reports.

use std::collections::{BTreeMap, BTreeSet};

use super::leading::all_confirmed;
use super::{Agreement, RECORDS_REPORTED_MAX, ROOT};
use crate::certificate::MessageRecord;
use crate::failure::FailureCause;
use crate::wire::end::{Ballot, Evidence, Outcome, Report, Verdict};

impl Agreement {
    /// Chooses the outcome to propose.
    pub(super) fn choose(&self, reports: &BTreeMap<u32, Report>, quorum: bool) -> Outcome {
        let highest = |accepted: Vec<&(Ballot, Outcome)>| {
            accepted.into_iter().max_by_key(|(ballot, _)| *ballot).map(|(_, outcome)| outcome.clone())
        };
        let of_quorum = highest(reports.values().filter_map(|report| report.accepted.of_quorum.as_ref()).collect());
        let accepted = of_quorum
            .filter(|_| quorum)
            .or_else(|| highest(reports.values().flat_map(|report| report.accepted.all()).collect()));
        match accepted {
            Some(outcome) if quorum => return outcome,
            // An outcome of a minority says so.
            Some(Outcome::Failed(verdict)) => return Outcome::Failed(Verdict { quorum, ..verdict }),
            _ => {}
        }
        match self.progress.messages {
            Some(messages) if quorum && all_confirmed(&self.confirmed(reports), self.members) => {
                Outcome::Closed { messages }
            }
            _ => Outcome::Failed(self.verdict(reports, quorum)),
        }
    }

    /// Returns the members that have confirmed: each reports for itself, and the root for all.
    fn confirmed(&self, reports: &BTreeMap<u32, Report>) -> BTreeSet<u32> {
        let said = reports.iter().flat_map(|(by, report)| {
            report.progress.confirmed.iter().copied().filter(move |rank| *by == ROOT || rank == by)
        });
        said.chain(self.progress.confirmed.iter().copied()).collect()
    }

    /// Finds which members have failed, and which messages each member has, from the reports.
    pub(super) fn verdict(&self, reports: &BTreeMap<u32, Report>, quorum: bool) -> Verdict {
        let confirmed = self.confirmed(reports);
        let begun = reports.values().map(|report| report.progress.begun).max().unwrap_or(0);
        let held = (0..self.members).map(|rank| match reports.get(&rank) {
            Some(report) => Some(report.progress.held.min(begun)),
            // The root has every message that it began.
            None if rank == ROOT => Some(begun),
            None => self.progress.messages.filter(|_| confirmed.contains(&rank)),
        });
        let held: Vec<Option<u64>> = held.collect();
        let records = records_to_tell(reports);
        Verdict { failed: self.failed(reports), quorum, begun, held, records }
    }

    fn failed(&self, reports: &BTreeMap<u32, Report>) -> Vec<(u32, FailureCause)> {
        let mut failed: BTreeMap<u32, FailureCause> = BTreeMap::new();
        for (rank, evidence) in &self.evidence {
            if let Some(cause) = &evidence.own {
                failed.insert(*rank, cause.clone());
            }
        }
        let accusations = self.accusations();
        let worst = |rank: u32| {
            let of_rank = accusations.iter().filter(|accusation| accusation.accused == rank);
            of_rank.min_by_key(|accusation| accusation.cause.evidence_rank()).map(|it| it.cause.clone())
        };
        // Some may have been lost after they reported.
        for rank in self.others().filter(|rank| !reports.contains_key(rank) || self.has_lost(*rank)) {
            // A member that has not joined has not failed, unless another one waits for it.
            let lost = (!self.absent.contains(&rank)).then_some(FailureCause::ConnectionLost);
            let cause = worst(rank).into_iter().chain(lost).min_by_key(FailureCause::evidence_rank);
            if let Some(cause) = cause {
                failed.entry(rank).or_insert(cause);
            }
        }
        // A member that waits for others has no fault because of that.
        for late in accusations.iter().filter(|it| it.cause == FailureCause::NotJoined) {
            failed.entry(late.accused).or_insert(FailureCause::NotJoined);
        }
        let (mended, standing): (Vec<_>, Vec<_>) = accusations.iter().partition(|it| self.has_mended(it));
        let mut name_the_fewest = |mut open: Vec<&Accusation>| {
            loop {
                open.retain(|it| !failed.contains_key(&it.accused) && !failed.contains_key(&it.accuser));
                let Some(rank) = most_involved(&open) else { break };
                // It may only have accused others itself: then it is what it says of them.
                let said = || open.iter().find(|it| it.accuser == rank && it.cause.is_connection_loss());
                let cause = worst(rank).or_else(|| said().map(|it| it.cause.clone()));
                failed.insert(rank, cause.unwrap_or(FailureCause::ConnectionLost));
            }
            failed.is_empty()
        };
        // Two members that have found each other again are named only if there is no other.
        if name_the_fewest(standing) {
            name_the_fewest(mended);
        }
        if failed.is_empty() {
            let rank = self.alarmed_by.unwrap_or(self.me);
            let what = "stopped the group without saying why".to_owned();
            failed.insert(rank, FailureCause::Protocol { what });
        }
        let mut failed: Vec<_> = failed.into_iter().collect();
        failed.sort_by_key(|(rank, cause)| (cause.evidence_rank(), *rank));
        failed
    }

    fn accusations(&self) -> Vec<Accusation> {
        let of = |(accuser, evidence): (&u32, &Evidence)| {
            let against = evidence.against.iter().map(|(accused, cause)| {
                // The connections of a member that dies break in any order: the first that breaks does not tell why.
                let is_lost = matches!(cause, FailureCause::DataConnection { .. }) && evidence.lost.contains(accused);
                let cause = if is_lost { FailureCause::ConnectionLost } else { cause.clone() };
                Accusation { accuser: *accuser, accused: *accused, cause }
            });
            against.collect::<Vec<_>>()
        };
        self.evidence.iter().flat_map(of).collect()
    }

    /// Tells whether the two had lost each other and have found each other again.
    fn has_mended(&self, accusation: &Accusation) -> bool {
        accusation.cause.is_connection_loss() && self.reach_each_other(accusation.accuser, accusation.accused)
    }
}

/// Returns the records from the first that differs among members: of a message that some lack, or of one that the root
/// was still sending and has not summed completely.
fn records_to_tell(reports: &BTreeMap<u32, Report>) -> Vec<MessageRecord> {
    let mut from = reports.values().map(|report| report.progress.held).min().unwrap_or(0);
    let mut records: BTreeMap<u64, MessageRecord> = BTreeMap::new();
    for record in reports.values().flat_map(|report| &report.progress.records) {
        let known = records.entry(record.number).or_insert_with(|| record.clone());
        if known.digest != record.digest {
            from = from.min(record.number);
            known.digest = known.digest.or(record.digest);
        }
    }
    records.split_off(&from).into_values().take(RECORDS_REPORTED_MAX).collect()
}

/// One member accuses another.
struct Accusation {
    accuser: u32,
    accused: u32,
    cause: FailureCause,
}

/// Returns the member with the most accusers and accused; of several the one that is accused of the worst, or has the
/// highest rank.
fn most_involved(open: &[&Accusation]) -> Option<u32> {
    let mut at_odds: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut at_fault: BTreeMap<u32, usize> = BTreeMap::new();
    for accusation in open {
        at_odds.entry(accusation.accuser).or_default().insert(accusation.accused);
        at_odds.entry(accusation.accused).or_default().insert(accusation.accuser);
        if accusation.cause.blames_the_accused() {
            *at_fault.entry(accusation.accused).or_default() += 1;
        }
    }
    let fault = |rank: u32| at_fault.get(&rank).copied().unwrap_or(0);
    at_odds.iter().max_by_key(|(rank, others)| (others.len(), fault(**rank), **rank)).map(|(rank, _)| *rank)
}
