//! The frames in which members agree on the end of their group.

use serde::{Deserialize, Serialize};

use crate::certificate::{Digest, MessageRecord};
use crate::failure::FailureCause;

/// A frame about the end of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EndFrame {
    /// From the root: the number of all messages, and the digest of them all, if messages have digests.
    Closing { messages: u64, digest: Option<Digest> },
    /// To the root: this member has them all, and its application agrees to the end.
    Confirm { messages: u64 },
    /// To all: this member does no further work in the group, because of this evidence or of that of others.
    Wedged(Evidence),
    /// From a leader: promise to accept no lower ballot, and report.
    Gather { ballot: Ballot },
    /// The promise.
    Report { ballot: Ballot, report: Box<Report> },
    /// From a leader: the proposed outcome, and whether it has the promises of a quorum.
    Propose { ballot: Ballot, outcome: Outcome, quorum: bool },
    /// To a leader: this member accepts the outcome, unless a higher ballot brings another.
    Accepted { ballot: Ballot },
    /// To a leader: this member has promised a higher ballot.
    Outbid { promised: Ballot },
    /// This node is not in the group: it has not joined yet, or it has left before there was an outcome.
    Absent { left: bool },
    /// The outcome.
    Decided { ballot: Ballot, outcome: Outcome },
}

/// An attempt at an outcome. Of two with the same number the lower rank's is the higher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ballot {
    pub(crate) attempt: u32,
    /// The rank of the member that leads it.
    pub(crate) leader: u32,
}

impl Ballot {
    /// The root's ballot, by which it closes a group without failures.
    pub(crate) const CLOSE: Self = Self { attempt: 0, leader: 0 };
}

impl Ord for Ballot {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.attempt.cmp(&other.attempt).then(other.leader.cmp(&self.leader))
    }
}

impl PartialOrd for Ballot {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// A member's evidence against itself and others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Evidence {
    /// Why it cannot go on itself.
    pub(crate) own: Option<FailureCause>,
    /// The ranks that it cannot reach now.
    pub(crate) lost: Vec<u32>,
    /// The ranks that it accuses, and their causes.
    pub(crate) against: Vec<(u32, FailureCause)>,
}

/// A member's state in the group when it stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) evidence: Evidence,
    pub(crate) progress: Progress,
    pub(crate) accepted: Accepted,
}

/// The outcomes that a member has accepted, and their ballots.
///
/// They are kept apart: a quorum must learn of an outcome that another quorum may have decided, whatever a minority
/// accepted later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Accepted {
    /// In the highest ballot with promises of a quorum.
    pub(crate) of_quorum: Option<(Ballot, Outcome)>,
    /// In the highest ballot with promises of a minority.
    pub(crate) of_minority: Option<(Ballot, Outcome)>,
}

impl Accepted {
    /// Notes an outcome; a ballot is never lower than those before.
    pub(crate) fn put(&mut self, ballot: Ballot, outcome: Outcome, quorum: bool) {
        let place = if quorum { &mut self.of_quorum } else { &mut self.of_minority };
        *place = Some((ballot, outcome));
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &(Ballot, Outcome)> {
        self.of_quorum.iter().chain(&self.of_minority)
    }
}

/// How far a member has come in the group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// The number of messages that it knows, from the first.
    pub(crate) begun: u64,
    /// Of these, the number that it has whole, from the first.
    pub(crate) held: u64,
    /// The number of all messages of the group, once the root closes it.
    pub(crate) messages: Option<u64>,
    /// The ranks that have confirmed, as far as it knows.
    pub(crate) confirmed: Vec<u32>,
    /// The latest messages that it knows, in order.
    pub(crate) records: Vec<MessageRecord>,
}

/// How a group ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// Every member has every message.
    Closed { messages: u64 },
    /// It failed.
    Failed(Verdict),
}

impl Outcome {
    /// Tells whether only a quorum can have decided it.
    pub(crate) fn is_of_quorum(&self) -> bool {
        match self {
            Self::Closed { .. } => true,
            Self::Failed(verdict) => verdict.quorum,
        }
    }
}

/// How a group failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Verdict {
    /// The members that failed, the most telling causes first; never empty.
    pub(crate) failed: Vec<(u32, FailureCause)>,
    /// Whether the members that agreed were a quorum.
    pub(crate) quorum: bool,
    /// Messages that were begun, as far as any member knows.
    pub(crate) begun: u64,
    /// For each rank the number of messages that it has, from the first; `None` if no member knows.
    pub(crate) held: Vec<Option<u64>>,
    /// Messages that some member may lack, or whose digests it may lack, as far as any member knows them.
    pub(crate) records: Vec<MessageRecord>,
}
