//! The agreement of a group's members on its end: closed, with every message at every member, or failed.
//!
//! There is one outcome, the same for all members. They agree on it as in Paxos. A member *leads* a *ballot*. It asks
//! the others to promise to accept no lower one, and to report. It proposes an outcome: that of the highest ballot
//! which one of them has accepted, if there is one. When they have accepted it, it is decided.
//!
//! - Ballot zero is the root's. When all members have confirmed that they have every message, and the root has done
//!   its own work, it proposes that the group is closed, without asking for promises.
//! - A member with evidence of a failure *wedges*: it does no further work in the group and tells all others, which do
//!   the same. The lowest rank that can reach most members leads. Its verdict names the members that it cannot reach
//!   and those that declared that they cannot go on. Where members accuse each other, it names the fewest that explain
//!   all accusations.
//! - A group is closed only if a *quorum* accepts that: more than half of the members, or half of them with the root. A
//!   minority that is cut off never reports success. A failure needs the members that can be reached.
//! - Promises and accepted outcomes stay until the group is forgotten; nodes answer for groups that have ended.
//!
//! This is a state machine without a clock or a network. [`Agreement`] takes events and frames. It returns the frames
//! to send ([`take_frames`](Agreement::take_frames)) and the time of its next turn ([`deadline`](Agreement::deadline)).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use rdmc_fabric::Timestamp;

use crate::certificate::{Digest, MessageRecord};
use crate::failure::FailureCause;

mod chain;
mod leading;
mod silence;
mod verdict;

use crate::wire::end::{Accepted, Ballot, EndFrame, Evidence, Outcome, Progress, Report};
use chain::DigestChain;
use leading::Lead;
use silence::SilenceTracker;

/// One member's part in the agreement on the end of a group.
#[derive(Debug)]
pub(crate) struct Agreement {
    me: u32,
    members: u32,
    patience: Patience,
    /// Without the records.
    progress: Progress,
    records: VecDeque<MessageRecord>,
    /// The digests of the messages that this member has.
    digests: DigestChain,
    /// The root's digest of all messages; `None` if messages have no digests.
    roots_digest: Option<Digest>,
    /// The evidence of members against themselves and others, by the member that gave it.
    evidence: BTreeMap<u32, Evidence>,
    /// Members that are not in the group, or not yet.
    absent: BTreeSet<u32>,
    silence: SilenceTracker,
    wedged: bool,
    /// The first member that reported a failure.
    alarmed_by: Option<u32>,
    promised: Ballot,
    accepted: Accepted,
    lead: Option<Lead>,
    decided: Option<(Ballot, Outcome)>,
    /// At the root: it has done all its work, so the group may be closed.
    finished: bool,
    /// When it may lead again after it was outbid.
    retry_at: Timestamp,
    /// When to ask the others again.
    ask_at: Timestamp,
    give_up_at: Option<Timestamp>,
    outgoing: Vec<(u32, EndFrame)>,
}

/// How long an agreement waits for others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// How long a leader waits for further evidence: a minority for frames of the others, any leader for its own
    /// connections to members that others have lost.
    pub(crate) settling: Duration,
    /// How long a leader that was outbid waits for the other's outcome.
    pub(crate) outbid: Duration,
    /// How long the agreement may take in all, from the first evidence of a failure.
    pub(crate) all: Duration,
}

impl Agreement {
    pub(crate) fn new(me: u32, members: u32, patience: Patience) -> Self {
        Self {
            me,
            members,
            patience,
            progress: Progress::default(),
            records: VecDeque::new(),
            digests: DigestChain::after(0),
            roots_digest: None,
            evidence: BTreeMap::new(),
            absent: BTreeSet::new(),
            silence: SilenceTracker::default(),
            wedged: false,
            alarmed_by: None,
            promised: Ballot::CLOSE,
            accepted: Accepted::default(),
            lead: None,
            decided: None,
            finished: false,
            retry_at: Timestamp::ZERO,
            ask_at: Timestamp::ZERO,
            give_up_at: None,
            outgoing: Vec::new(),
        }
    }

    /// Begins after the first `messages` messages, which every member has, with their records.
    pub(crate) fn continuing(mut self, messages: u64, records: impl IntoIterator<Item = MessageRecord>) -> Self {
        self.progress.begun = messages;
        self.progress.held = messages;
        self.digests = DigestChain::after(messages);
        self.records = records.into_iter().filter(|record| record.number < messages).collect();
        self
    }

    // Progress of this member.

    /// Notes that a message has begun, in order; returns false if this member does no further work.
    pub(crate) fn begin(&mut self, size: u64) -> bool {
        if self.stopped() {
            return false;
        }
        self.records.push_back(MessageRecord { number: self.progress.begun, size, digest: None });
        self.progress.begun += 1;
        if self.records.len() > RECORDS_MAX {
            self.records.pop_front();
        }
        true
    }

    /// Notes that this member has one message more, in order; returns false if others already know that it does not.
    pub(crate) fn hold(&mut self) -> bool {
        if self.stopped() {
            return false;
        }
        debug_assert!(self.progress.held < self.progress.begun);
        self.progress.held += 1;
        true
    }

    /// Notes the digest of a message that this member has, in any order; `None` if messages have no digests.
    pub(crate) fn note_digest(&mut self, message: u64, digest: Option<Digest>) {
        let Some(digest) = digest else { return };
        self.digests.add(message, digest);
        if let Some(record) = self.records.iter_mut().rev().find(|record| record.number == message) {
            record.digest = Some(digest);
        }
    }

    /// At the root: announces that the group ends after so many messages, whose digests are known. The group is not
    /// closed before [`close`](Self::close).
    pub(crate) fn announce_close(&mut self, messages: u64) {
        if !self.stopped() && self.progress.messages.is_none() {
            self.progress.messages = Some(messages);
            self.send_all(&EndFrame::Closing { messages, digest: self.digests.of(messages) });
        }
    }

    /// At the root: closes the group after so many messages.
    pub(crate) fn close(&mut self, messages: u64, now: Timestamp) {
        self.announce_close(messages);
        self.finished = true;
        self.advance(now);
    }

    /// At another member: confirms that it has the same messages as the root, and that its application agrees to the
    /// end.
    pub(crate) fn confirm(&mut self, now: Timestamp) {
        let Some(messages) = self.progress.messages.filter(|_| !self.stopped()) else { return };
        if self.digests.of(messages) != self.roots_digest {
            return self.declare(FailureCause::Diverged, now);
        }
        self.progress.confirmed.push(self.me);
        self.send(ROOT, EndFrame::Confirm { messages });
        self.advance(now);
    }

    // Failures.

    /// Declares that this member cannot go on.
    pub(crate) fn declare(&mut self, cause: FailureCause, now: Timestamp) {
        if self.decided.is_none() {
            self.evidence.entry(self.me).or_default().own.get_or_insert(cause);
            self.alarm(now);
        }
    }

    /// Ends the agreement here, since this node leaves the mesh. Without an outcome it knows only its own cause.
    pub(crate) fn depart(&mut self) {
        if self.decided.is_none() {
            let own = self.evidence.entry(self.me).or_default().own.get_or_insert(FailureCause::Abandoned).clone();
            self.decide_alone();
            if let Some((_, Outcome::Failed(verdict))) = &mut self.decided {
                verdict.failed = vec![(self.me, own)];
            }
        }
    }

    /// Notes that the control connection to a member was lost.
    pub(crate) fn lose(&mut self, rank: u32, cause: FailureCause, now: Timestamp) {
        if self.decided.is_some() || rank == self.me || self.has_lost(rank) {
            return;
        }
        let own = self.evidence.entry(self.me).or_default();
        own.lost.push(rank);
        own.accuse(rank, cause);
        self.alarm(now);
    }

    /// Notes that the control connection to a member was made anew; repeats the frames of the time without it.
    pub(crate) fn reconnect(&mut self, rank: u32, now: Timestamp) {
        if !self.wedged || self.decided.is_some() {
            return;
        }
        self.evidence.entry(self.me).or_default().lost.retain(|lost| *lost != rank);
        self.send_all(&EndFrame::Wedged(self.own_evidence()));
        self.repeat(|other| other == rank);
        self.advance(now);
    }

    /// Accuses members. After the group has stopped, further errors prove nothing.
    pub(crate) fn accuse(&mut self, accused: impl IntoIterator<Item = (u32, FailureCause)>, now: Timestamp) {
        if self.stopped() {
            return;
        }
        let accused: Vec<_> = accused.into_iter().filter(|(rank, _)| *rank != self.me).collect();
        if accused.is_empty() {
            return;
        }
        let own = self.evidence.entry(self.me).or_default();
        accused.into_iter().for_each(|(rank, cause)| own.accuse(rank, cause));
        self.alarm(now);
    }

    /// Does the work that is due now.
    pub(crate) fn elapse(&mut self, now: Timestamp) {
        if self.wedged && self.decided.is_none() && now >= self.ask_at {
            self.count_out_silent(now);
            // The member that was to send the outcome may have ended; and frames may have been lost.
            self.ask_at = now + self.patience.outbid;
            self.send_all(&EndFrame::Wedged(self.own_evidence()));
            self.repeat(|_| true);
        }
        self.advance(now);
    }

    // Frames.

    /// Takes a frame.
    ///
    /// # Errors
    /// How the frame violates the protocol.
    pub(crate) fn receive(&mut self, from: u32, frame: EndFrame, now: Timestamp) -> Result<(), &'static str> {
        if let Some((ballot, outcome)) = self.decided.clone() {
            if frame.wants_the_outcome() {
                self.send(from, EndFrame::Decided { ballot, outcome });
            }
            return Ok(());
        }
        if let Err(what) = self.check(from, &frame) {
            if matches!(frame, EndFrame::Report { .. }) {
                self.count_out(from, FailureCause::Protocol { what: what.to_owned() });
                self.advance(now);
            }
            return Err(what);
        }
        self.silence.note_heard(from, now);
        match frame {
            EndFrame::Closing { messages, digest } => {
                self.progress.messages = Some(messages);
                self.roots_digest = digest;
            }
            EndFrame::Confirm { .. } => {
                // Too late, if reports are being made: the member will report it itself.
                if !self.wedged && !self.progress.confirmed.contains(&from) {
                    self.progress.confirmed.push(from);
                }
            }
            EndFrame::Wedged(evidence) => self.receive_wedged(from, evidence, now),
            EndFrame::Gather { ballot } => self.promise(from, ballot, now),
            EndFrame::Report { ballot, report } => {
                if let Some(Lead::Gathering { ballot: mine, reports, .. }) = &mut self.lead
                    && *mine == ballot
                {
                    reports.insert(from, (*report).clone());
                    self.evidence.insert(from, report.evidence);
                }
            }
            EndFrame::Propose { ballot, outcome, quorum } => self.consider(from, ballot, outcome, quorum, now),
            EndFrame::Accepted { ballot } => {
                if let Some(Lead::Proposing { ballot: mine, accepted, .. }) = &mut self.lead
                    && *mine == ballot
                {
                    accepted.insert(from);
                }
            }
            EndFrame::Outbid { promised } => {
                if self.lead.as_ref().is_some_and(|lead| lead.ballot() < promised) {
                    self.promised = self.promised.max(promised);
                    self.stand_back(now);
                }
            }
            EndFrame::Absent { left } => {
                self.absent.insert(from);
                if left {
                    self.evidence.entry(from).or_default().own.get_or_insert(FailureCause::Abandoned);
                    self.wedge(now);
                }
            }
            EndFrame::Decided { ballot, outcome } => self.learn(from, ballot, outcome),
        }
        self.advance(now);
        Ok(())
    }

    // Results.

    /// Takes the frames to send, in order, with the ranks of their receivers.
    pub(crate) fn take_frames(&mut self) -> Vec<(u32, EndFrame)> {
        std::mem::take(&mut self.outgoing)
    }

    /// Returns when to call [`elapse`](Self::elapse), if nothing happens before.
    pub(crate) fn deadline(&self) -> Option<Timestamp> {
        if self.decided.is_some() || !self.wedged {
            return None;
        }
        let lead = match &self.lead {
            Some(Lead::Gathering { settled_at, .. }) => *settled_at,
            Some(Lead::Proposing { .. }) => None,
            None => (self.leader() == self.me).then_some(self.retry_at),
        };
        lead.into_iter().chain(self.give_up_at).chain([self.ask_at]).min()
    }

    /// Tells whether this member does no further work in the group.
    pub(crate) fn stopped(&self) -> bool {
        self.wedged || self.decided.is_some()
    }

    /// Returns how many messages this member knows of.
    pub(crate) fn begun(&self) -> u64 {
        self.progress.begun
    }

    /// Returns how many messages this member has, from the first.
    pub(crate) fn held(&self) -> u64 {
        self.progress.held
    }

    /// Returns the number of messages, once the root closes the group.
    pub(crate) fn messages(&self) -> Option<u64> {
        self.progress.messages
    }

    /// Returns the outcome and its ballot, once there is one.
    pub(crate) fn outcome(&self) -> Option<&(Ballot, Outcome)> {
        self.decided.as_ref()
    }

    /// Returns the latest messages that this member knows of.
    pub(crate) fn records(&self) -> impl Iterator<Item = &MessageRecord> {
        self.records.iter()
    }

    // Wedging.

    /// Stops, if that has not happened, and sends this member's evidence to all others.
    fn alarm(&mut self, now: Timestamp) {
        self.wedge(now);
        self.send_all(&EndFrame::Wedged(self.own_evidence()));
        self.advance(now);
    }

    fn wedge(&mut self, now: Timestamp) -> bool {
        let first = !self.wedged;
        if first {
            self.wedged = true;
            self.silence = SilenceTracker::since(now);
            self.ask_at = now + self.patience.outbid;
            self.give_up_at = Some(now + self.patience.all);
        }
        first
    }

    fn receive_wedged(&mut self, from: u32, evidence: Evidence, now: Timestamp) {
        self.evidence.insert(from, evidence);
        self.alarmed_by.get_or_insert(from);
        let was_absent = self.absent.remove(&from);
        if let (true, Some(Lead::Gathering { ballot, .. })) = (was_absent, &self.lead) {
            let ballot = *ballot;
            self.send(from, EndFrame::Gather { ballot });
        }
        if self.wedge(now) {
            // The member that told this one may die before it has told all.
            self.alarm(now);
        }
    }

    // Following.

    fn promise(&mut self, from: u32, ballot: Ballot, now: Timestamp) {
        if ballot < self.promised {
            return self.send(from, EndFrame::Outbid { promised: self.promised });
        }
        self.promised = ballot;
        if self.lead.is_some() {
            self.stand_back(now);
        }
        // The report says how far this member has come: it must not come further.
        self.wedge(now);
        let report = Box::new(self.report());
        self.send(from, EndFrame::Report { ballot, report });
    }

    fn consider(&mut self, from: u32, ballot: Ballot, outcome: Outcome, quorum: bool, now: Timestamp) {
        if ballot < self.promised {
            return self.send(from, EndFrame::Outbid { promised: self.promised });
        }
        self.promised = ballot;
        if self.lead.is_some() {
            self.stand_back(now);
        }
        self.accepted.put(ballot, outcome, quorum);
        self.send(from, EndFrame::Accepted { ballot });
    }

    fn learn(&mut self, from: u32, ballot: Ballot, outcome: Outcome) {
        let overtakes = |(higher, accepted): &(Ballot, Outcome)| {
            *higher > ballot && self.is_reachable(higher.leader) && higher.leader != self.me && *accepted != outcome
        };
        let overtaken = !outcome.is_of_quorum() && self.accepted.all().any(overtakes);
        if overtaken {
            // The leader of that higher ballot knows that this member has accepted its outcome, and may have decided
            // it. The sender of this one has ended: it answers no ballot any more.
            self.silence.expect_nothing(from);
            return;
        }
        if let Outcome::Failed(verdict) = &outcome {
            // The leader may not reach them.
            let unheard = (0..).zip(&verdict.held).filter(|(_, held)| held.is_none()).map(|(rank, _)| rank);
            let unheard = unheard.chain(verdict.failed.iter().map(|(rank, _)| *rank));
            let unheard: BTreeSet<u32> = unheard.filter(|rank| *rank != self.me && *rank != from).collect();
            for rank in unheard {
                self.send(rank, EndFrame::Decided { ballot, outcome: outcome.clone() });
            }
        }
        let lead = self.lead.take();
        // A member that has accepted an outcome in a ballot of this member takes none of a lower one.
        let ballot = lead.as_ref().map_or(ballot, |lead| ballot.max(lead.ballot()));
        if lead.is_some() {
            self.send_all(&EndFrame::Decided { ballot, outcome: outcome.clone() });
        }
        self.decided = Some((ballot, outcome));
    }

    /// Checks that a frame does not violate the protocol.
    fn check(&self, from: u32, frame: &EndFrame) -> Result<(), &'static str> {
        let leads = |ballot: &Ballot| ballot.leader == from && ballot.attempt <= ATTEMPTS_MAX;
        let right = match frame {
            EndFrame::Closing { messages, .. } => from == ROOT && self.progress.begun <= *messages,
            EndFrame::Confirm { messages } => self.me == ROOT && self.progress.messages == Some(*messages),
            EndFrame::Wedged(evidence) => self.is_sound(evidence),
            EndFrame::Gather { ballot } => leads(ballot) && *ballot != Ballot::CLOSE,
            EndFrame::Report { report, .. } => {
                self.is_sound(&report.evidence)
                    && report.progress.confirmed.len() <= self.members as usize
                    && report.progress.confirmed.iter().all(|rank| *rank < self.members)
                    && report.progress.records.len() <= RECORDS_REPORTED_MAX
                    && report.accepted.all().all(|(_, outcome)| self.is_possible(outcome))
            }
            EndFrame::Propose { ballot, outcome, .. } => leads(ballot) && self.is_possible(outcome),
            EndFrame::Decided { outcome, .. } => self.is_possible(outcome),
            EndFrame::Outbid { promised } => promised.attempt <= ATTEMPTS_MAX,
            EndFrame::Accepted { .. } | EndFrame::Absent { .. } => true,
        };
        if right { Ok(()) } else { Err("said something about the end of the group that cannot be") }
    }

    fn is_sound(&self, evidence: &Evidence) -> bool {
        let (lost, against) = (&evidence.lost, &evidence.against);
        let causes = evidence.own.iter().chain(against.iter().map(|(_, cause)| cause));
        if causes.map(FailureCause::text_len).any(|len| len > TEXT_LEN_MAX) {
            return false;
        }
        lost.len().max(against.len()) <= self.members as usize
            && lost.iter().chain(against.iter().map(|(rank, _)| rank)).all(|rank| *rank < self.members)
    }

    fn is_possible(&self, outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Closed { messages } => {
                self.progress.messages == Some(*messages)
                    && (self.me == ROOT || self.progress.confirmed.contains(&self.me))
            }
            Outcome::Failed(verdict) => {
                !verdict.failed.is_empty()
                    && verdict.failed.len() <= self.members as usize
                    && verdict.failed.iter().all(|(rank, _)| *rank < self.members)
                    && verdict.held.len() == self.members as usize
                    && verdict.records.len() <= RECORDS_REPORTED_MAX
            }
        }
    }

    // Parts.

    fn report(&self) -> Report {
        let evidence = self.own_evidence();
        let from = self.records.len().saturating_sub(RECORDS_REPORTED_MAX);
        let records = self.records.range(from..).cloned().collect();
        Report { evidence, progress: Progress { records, ..self.progress.clone() }, accepted: self.accepted.clone() }
    }

    fn own_evidence(&self) -> Evidence {
        self.evidence.get(&self.me).cloned().unwrap_or_default()
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.me;
        (0..self.members).filter(move |rank| *rank != me)
    }

    /// Tells whether a member is expected to answer.
    fn is_reachable(&self, rank: u32) -> bool {
        !self.has_lost(rank) && !self.absent.contains(&rank) && !self.silence.is_counted_out(rank)
    }

    fn has_lost(&self, rank: u32) -> bool {
        self.evidence.get(&self.me).is_some_and(|own| own.lost.contains(&rank))
    }

    fn send(&mut self, to: u32, frame: EndFrame) {
        self.outgoing.push((to, frame));
    }

    fn send_all(&mut self, frame: &EndFrame) {
        self.outgoing.extend(self.others().map(|rank| (rank, frame.clone())));
    }
}

impl Evidence {
    fn accuse(&mut self, rank: u32, cause: FailureCause) {
        if self.against.iter().all(|(known, _)| *known != rank) {
            self.against.push((rank, cause));
        }
    }
}

impl EndFrame {
    /// Tells whether the member that sends this does not know the outcome.
    pub(crate) fn wants_the_outcome(&self) -> bool {
        matches!(self, Self::Wedged(_) | Self::Gather { .. } | Self::Propose { .. })
    }
}

/// Most attempts of all members together. A leader waits longer than the attempt before can take, so there are few.
const ATTEMPTS_MAX: u32 = 1 << 30;
/// Longest text of a cause in bytes: a reason has a thousand characters at most.
const TEXT_LEN_MAX: usize = 4 << 10;
/// The root's rank.
const ROOT: u32 = 0;
/// Most messages whose sizes and digests are remembered.
pub(crate) const RECORDS_MAX: usize = 64 << 10;
/// Most of these that are reported when the group fails: the latest.
const RECORDS_REPORTED_MAX: usize = 128;

#[cfg(test)]
pub(crate) mod tests;
