//! What members say to each other about the end of their group.

use serde::{Deserialize, Serialize};

use crate::certificate::{Digest, MessageRecord};
use crate::failure::FailureCause;

/// A frame about the end of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EndFrame {
    /// From the root: these are all messages, and what their digests come down to, if they have any.
    Closing { messages: u64, digest: Option<Digest> },
    /// To the root: this member has them all, and its application agrees to the end.
    Confirm { messages: u64 },
    /// To all: this member does no further work in the group, because of this, or because it heard of trouble.
    Wedged(Evidence),
    /// From who leads: promise to take no lower ballot, and report.
    Gather { ballot: Ballot },
    /// The promise.
    Report { ballot: Ballot, report: Box<Report> },
    /// From who leads: this is to be the outcome. Whether it has promises of a quorum is said beside.
    Propose { ballot: Ballot, outcome: Outcome, quorum: bool },
    /// To who leads: this member takes it for the outcome, unless a higher ballot brings another.
    Accepted { ballot: Ballot },
    /// To who leads: this member has promised a higher ballot.
    Outbid { promised: Ballot },
    /// This node is not in the group: it has not joined yet, or it has left before there was an outcome.
    Absent { left: bool },
    /// This is the outcome.
    Decided { ballot: Ballot, outcome: Outcome },
}

/// An attempt to bring about an outcome. Of two with the same number the lower rank's is the higher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ballot {
    pub(crate) attempt: u32,
    /// The rank of the member that leads it.
    pub(crate) leader: u32,
}

impl Ballot {
    /// The root's, by which it closes a group to which nothing happens.
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

/// What a member has against itself and others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Evidence {
    /// Why it cannot go on itself.
    pub(crate) own: Option<FailureCause>,
    /// The ranks that it cannot reach now.
    pub(crate) lost: Vec<u32>,
    /// The ranks with which something is, or was, wrong.
    pub(crate) against: Vec<(u32, FailureCause)>,
}

/// A member's state in the group when it stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) evidence: Evidence,
    pub(crate) progress: Progress,
    pub(crate) accepted: Accepted,
}

/// The outcomes that a member has accepted, and in which ballots.
///
/// They are kept apart, since a quorum must learn of what another may have decided, whatever a minority did later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Accepted {
    /// In the highest ballot with promises of a quorum.
    pub(crate) of_quorum: Option<(Ballot, Outcome)>,
    /// In the highest with those of a minority.
    pub(crate) of_minority: Option<(Ballot, Outcome)>,
}

impl Accepted {
    /// Notes an outcome; a ballot is never lower than those before.
    pub(super) fn put(&mut self, ballot: Ballot, outcome: Outcome, quorum: bool) {
        let place = if quorum { &mut self.of_quorum } else { &mut self.of_minority };
        *place = Some((ballot, outcome));
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &(Ballot, Outcome)> {
        self.of_quorum.iter().chain(&self.of_minority)
    }
}

/// How far a member has come in the group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Messages it knows of, from the first.
    pub(crate) begun: u64,
    /// Of these, how many it has whole, from the first.
    pub(crate) held: u64,
    /// All messages of the group, once the root closes it.
    pub(crate) messages: Option<u64>,
    /// The ranks of which it knows that they have confirmed.
    pub(crate) confirmed: Vec<u32>,
    /// The latest messages it knows of, in order.
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
    pub(super) fn is_of_quorum(&self) -> bool {
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
    /// Whether those who agreed were most of the members.
    pub(crate) quorum: bool,
    /// Messages that were begun, as far as anybody knows.
    pub(crate) begun: u64,
    /// For each rank how many messages it has, from the first; none if nobody knows.
    pub(crate) held: Vec<Option<u64>>,
    /// Messages that some member may lack, or whose digests it may lack, as far as anybody knows them.
    pub(crate) records: Vec<MessageRecord>,
}
