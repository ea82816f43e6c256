//! Leading a ballot: gathering reports, proposing an outcome, deciding it.

use std::collections::{BTreeMap, BTreeSet};

use rdmc_fabric::Timestamp;

use super::{Agreement, ROOT};
use crate::wire::end::{Ballot, EndFrame, Outcome, Report};

/// A ballot that this member leads.
#[derive(Debug)]
pub(super) enum Lead {
    Gathering {
        ballot: Ballot,
        reports: BTreeMap<u32, Report>,
        /// When it stops waiting for further evidence.
        settled_at: Option<Timestamp>,
    },
    Proposing {
        ballot: Ballot,
        outcome: Outcome,
        /// Whether a quorum has promised.
        quorum: bool,
        asked: BTreeSet<u32>,
        accepted: BTreeSet<u32>,
    },
}

/// Whether there is more to do after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepResult {
    Again,
    Wait,
}

impl Agreement {
    pub(super) fn advance(&mut self, now: Timestamp) {
        while self.decided.is_none() && self.step(now) == StepResult::Again {}
    }

    fn step(&mut self, now: Timestamp) -> StepResult {
        if self.give_up_at.is_some_and(|at| now >= at) {
            self.decide_alone();
            if let Some((ballot, outcome)) = self.decided.clone() {
                // Members that are cut off with this one need not find another outcome.
                self.send_all(&EndFrame::Decided { ballot, outcome });
            }
            return StepResult::Wait;
        }
        match self.lead.take() {
            None => self.take_the_lead(now),
            Some(Lead::Gathering { ballot, reports, settled_at }) => self.gather(ballot, reports, settled_at, now),
            Some(Lead::Proposing { ballot, outcome, quorum, asked, accepted }) => {
                self.propose(ballot, outcome, quorum, asked, accepted)
            }
        }
    }

    fn take_the_lead(&mut self, now: Timestamp) -> StepResult {
        if !self.wedged {
            let confirmed = &self.progress.confirmed;
            // Counted, as the root of a large group looks often.
            let ready = self.finished && self.promised == Ballot::CLOSE && confirmed.len() + 1 == self.members as usize;
            let Some(messages) = self.progress.messages.filter(|_| ready) else { return StepResult::Wait };
            let others = self.others().collect();
            return self.put_forward(Ballot::CLOSE, Outcome::Closed { messages }, others, true);
        }
        if self.leader() != self.me || now < self.retry_at {
            return StepResult::Wait;
        }
        let ballot = Ballot { attempt: self.promised.attempt.saturating_add(1), leader: self.me };
        self.promised = ballot;
        for rank in self.others().filter(|rank| self.is_reachable(*rank)).collect::<Vec<_>>() {
            self.send(rank, EndFrame::Gather { ballot });
        }
        let reports = BTreeMap::from([(self.me, self.report())]);
        self.lead = Some(Lead::Gathering { ballot, reports, settled_at: None });
        StepResult::Again
    }

    fn gather(
        &mut self,
        ballot: Ballot,
        reports: BTreeMap<u32, Report>,
        settled_at: Option<Timestamp>,
        now: Timestamp,
    ) -> StepResult {
        let silent = self.others().any(|rank| self.is_reachable(rank) && !reports.contains_key(&rank));
        if silent {
            self.lead = Some(Lead::Gathering { ballot, reports, settled_at: None });
            return StepResult::Wait;
        }
        let quorum = is_quorum(self.members, reports.len(), reports.contains_key(&ROOT));
        if !quorum && self.leader() != self.me {
            // Another member can reach more of the members.
            self.retry_at = now + self.patience.outbid;
            return StepResult::Wait;
        }
        // A minority may still hear from the others; and if two have lost each other, this member may lose one soon.
        if !quorum || self.are_at_odds(&reports) {
            let settled_at = settled_at.unwrap_or(now + self.patience.settling);
            if now < settled_at {
                self.lead = Some(Lead::Gathering { ballot, reports, settled_at: Some(settled_at) });
                return StepResult::Wait;
            }
        }
        let outcome = self.choose(&reports, quorum);
        let asked = reports.into_keys().filter(|rank| *rank != self.me).collect();
        self.put_forward(ballot, outcome, asked, quorum)
    }

    /// Tells whether two members that have reported have lost each other.
    fn are_at_odds(&self, reports: &BTreeMap<u32, Report>) -> bool {
        let takes_part = |rank: u32| {
            let goes_on = self.evidence.get(&rank).is_none_or(|evidence| evidence.own.is_none());
            goes_on && reports.contains_key(&rank) && !self.has_lost(rank)
        };
        self.evidence
            .iter()
            .filter(|(rank, _)| takes_part(**rank))
            .any(|(_, evidence)| evidence.lost.iter().any(|rank| takes_part(*rank)))
    }

    fn put_forward(&mut self, ballot: Ballot, outcome: Outcome, asked: BTreeSet<u32>, quorum: bool) -> StepResult {
        self.accepted.put(ballot, outcome.clone(), quorum);
        for &rank in &asked {
            self.outgoing.push((rank, EndFrame::Propose { ballot, outcome: outcome.clone(), quorum }));
        }
        self.lead = Some(Lead::Proposing { ballot, outcome, quorum, asked, accepted: BTreeSet::from([self.me]) });
        StepResult::Again
    }

    /// Repeats the frames that were not answered, to the members for which `of` is true.
    pub(super) fn repeat(&mut self, of: impl Fn(u32) -> bool) {
        let unanswered = |answered: &dyn Fn(u32) -> bool| -> Vec<u32> {
            self.others().filter(|rank| of(*rank) && self.is_reachable(*rank) && !answered(*rank)).collect()
        };
        let (to, frame) = match &self.lead {
            Some(Lead::Gathering { ballot, reports, .. }) => {
                (unanswered(&|rank| reports.contains_key(&rank)), EndFrame::Gather { ballot: *ballot })
            }
            Some(Lead::Proposing { ballot, outcome, quorum, asked, accepted }) => {
                let to = unanswered(&|rank| !asked.contains(&rank) || accepted.contains(&rank));
                (to, EndFrame::Propose { ballot: *ballot, outcome: outcome.clone(), quorum: *quorum })
            }
            None => return,
        };
        self.outgoing.extend(to.into_iter().map(|rank| (rank, frame.clone())));
    }

    fn propose(
        &mut self,
        ballot: Ballot,
        outcome: Outcome,
        promised: bool,
        asked: BTreeSet<u32>,
        accepted: BTreeSet<u32>,
    ) -> StepResult {
        let missing = asked.iter().filter(|rank| !accepted.contains(rank) && self.is_reachable(**rank)).count();
        let quorum = is_quorum(self.members, accepted.len(), accepted.contains(&ROOT));
        let enough = match &outcome {
            Outcome::Closed { .. } => quorum,
            Outcome::Failed(verdict) => missing == 0 && (quorum || !verdict.quorum),
        };
        if enough {
            self.send_all(&EndFrame::Decided { ballot, outcome: outcome.clone() });
            self.decided = Some((ballot, outcome));
            return StepResult::Wait;
        }
        if missing > 0 {
            self.lead = Some(Lead::Proposing { ballot, outcome, quorum: promised, asked, accepted });
            return StepResult::Wait;
        }
        // Some were lost meanwhile: another attempt counts the members that are left.
        if self.wedged { StepResult::Again } else { StepResult::Wait }
    }

    pub(super) fn stand_back(&mut self, now: Timestamp) {
        self.lead = None;
        self.retry_at = now + self.patience.outbid;
    }

    /// Decides without the others, since no leader does.
    pub(super) fn decide_alone(&mut self) {
        let reports = BTreeMap::from([(self.me, self.report())]);
        let ballot = Ballot { attempt: self.promised.attempt.saturating_add(1), leader: self.me };
        self.decided = Some((ballot, Outcome::Failed(self.verdict(&reports, false))));
    }

    /// Returns the member that leads, as far as this one knows.
    pub(super) fn leader(&self) -> u32 {
        let mut best = None;
        for rank in 0..self.members {
            let gone = self.evidence.get(&rank).is_some_and(|evidence| evidence.own.is_some());
            if gone || (rank != self.me && !self.is_reachable(rank)) {
                continue;
            }
            let reached = (0..self.members).filter(|other| self.reach_each_other(rank, *other)).count();
            if is_quorum(self.members, reached, self.reach_each_other(rank, ROOT)) {
                return rank;
            }
            best.get_or_insert(rank);
        }
        best.unwrap_or(self.me)
    }

    /// Tells whether two members reach each other, as far as this one knows.
    pub(super) fn reach_each_other(&self, a: u32, b: u32) -> bool {
        let has_lost =
            |of: u32, rank: u32| self.evidence.get(&of).is_some_and(|evidence| evidence.lost.contains(&rank));
        a == b || !(has_lost(a, b) || has_lost(b, a))
    }
}

impl Lead {
    pub(super) fn ballot(&self) -> Ballot {
        match self {
            Self::Gathering { ballot, .. } | Self::Proposing { ballot, .. } => *ballot,
        }
    }
}

/// Tells whether every member except the root has confirmed.
pub(super) fn all_confirmed(confirmed: &BTreeSet<u32>, members: u32) -> bool {
    (1..members).all(|rank| confirmed.contains(&rank))
}

/// Tells whether so many members may decide for all: of two disjoint sets at most one is a quorum.
fn is_quorum(members: u32, count: usize, with_root: bool) -> bool {
    let twice = 2 * count as u64;
    twice > u64::from(members) || (twice == u64::from(members) && with_root)
}
