//! What was seen while a case was played, as plain data.

use rdmc::{Certificate, FailureCause, GroupError, GroupFailure, Rank};

/// What every member saw of a case, and what was left behind. Times are virtual, since all nodes were connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Tells whether two plays did the same things at the same times.
    pub digest: u64,
    /// Why the play did not come to its end, if it did not.
    pub stalled: Option<String>,
    /// What the members saw, in the order of the case's groups.
    pub groups: Vec<GroupObservation>,
    /// The faults of the case that happened, in the order in which they did.
    pub faults: Vec<FaultObservation>,
    /// The blocks of which a bit has changed on the way, in the order in which they arrived.
    pub flipped: Vec<Flipped>,
    /// When the world was healed, in ns.
    pub healed_ns: Option<u64>,
    /// When the last member had come to its end, in ns.
    pub ended_ns: Option<u64>,
    /// How many operations each node had begun then, since all nodes were connected.
    pub operations: Vec<u64>,
    /// What was left at each node after all.
    pub left: Vec<Left>,
}

/// What the members of one group saw, in rank order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupObservation {
    /// The members.
    pub members: Vec<MemberObservation>,
}

/// What one member saw of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberObservation {
    /// When it began to create or join the group, in ns.
    pub joining_ns: Option<u64>,
    /// How that ended.
    pub joined: Option<Seen>,
    /// At the root: how the sends ended, by message; none of one that was not polled or not reached.
    pub sends: Vec<Option<Seen>>,
    /// What was delivered, in order.
    pub delivered: Vec<Delivered>,
    /// How the stream of messages ended.
    pub stream: Option<Seen>,
    /// Whether the stream said anything after its end.
    pub spoke_after_end: bool,
    /// What it was told of blocks that came corrupted, when the stream had ended.
    pub corruptions: Option<Corruptions>,
    /// When it called close, in ns.
    pub closing_ns: Option<u64>,
    /// How the close ended.
    pub closed: Option<Seen>,
    /// When its application had nothing more to do, in ns.
    pub ended_ns: Option<u64>,
    /// When its node died, in ns.
    pub died_ns: Option<u64>,
}

/// What a member was told of blocks that came corrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Corruptions {
    /// How many.
    pub found: u64,
    /// How many of them were fetched anew.
    pub healed: u64,
    /// The node from which the last one came.
    pub last_from: Option<u32>,
}

/// A block of which a bit has changed on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flipped {
    /// The node that sent it.
    pub from: u32,
    /// The node to which it came.
    pub to: u32,
}

/// How something ended, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// In ns.
    pub at_ns: u64,
    /// How.
    pub outcome: Outcome,
}

/// How something ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Well.
    Done,
    /// The application dropped it.
    Dropped,
    /// With a failure that names a member.
    Failed(Blame),
    /// With an error that names none.
    Error(String),
}

/// What a failure says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Blame {
    /// The group's number.
    pub group: u64,
    /// Whom it names.
    pub named: Vec<Named>,
    /// Whether those who agreed on it were a quorum.
    pub quorum: bool,
    /// Messages that were begun.
    pub begun: u64,
    /// How many of them each rank has, as far as that is known.
    pub held: Vec<Option<u64>>,
}

/// A member that a failure names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Named {
    /// The member's rank.
    pub rank: u32,
    /// The member's node.
    pub node: u32,
    /// What is said of it.
    pub cause: String,
    /// Whether it is said that a block came from it corrupted.
    pub corrupted: bool,
}

/// A message that was delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// In ns.
    pub at_ns: u64,
    /// Its number.
    pub number: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The digest of its bytes; none if the application did not want them.
    pub digest: Option<u64>,
}

/// A fault that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultObservation {
    /// Its place in the case.
    pub fault: usize,
    /// When, in ns.
    pub at_ns: u64,
    /// When it was over, in ns; none of one that lasts.
    pub until_ns: Option<u64>,
}

/// What was left at a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Bytes of the pool that were lent when no handle of a group was left; 0 of a node that died or left.
    pub pool_bytes_lent: u64,
    /// Tasks, when no handle of the node was left either.
    pub tasks: usize,
    /// Queue pairs, then.
    pub queue_pairs: usize,
}

impl MemberObservation {
    /// Returns all failures it was told, in the order in which an application asks.
    pub fn blames(&self) -> impl Iterator<Item = &Blame> {
        let seen = self.joined.iter().chain(self.sends.iter().flatten()).chain(&self.stream).chain(&self.closed);
        seen.filter_map(|seen| match &seen.outcome {
            Outcome::Failed(blame) => Some(blame),
            _ => None,
        })
    }

    /// Tells whether its close succeeded.
    pub fn closed_well(&self) -> bool {
        self.closed.as_ref().is_some_and(|seen| seen.outcome == Outcome::Done)
    }
}

impl Outcome {
    /// Returns the digest of a message's bytes.
    pub(super) fn digest_of(bytes: &[u8]) -> u64 {
        let mut digest = 0xCBF2_9CE4_8422_2325 ^ bytes.len() as u64;
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            digest = (digest ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(31);
        }
        digest
    }

    /// Puts down how creating or joining a group ended.
    pub(super) fn of_join<T>(result: &Result<T, GroupError>) -> Self {
        match result {
            Ok(_) => Self::Done,
            Err(GroupError::Failed(failure)) => failure.into(),
            Err(error) => Self::Error(error.to_string()),
        }
    }
}

impl From<&GroupFailure> for Outcome {
    fn from(failure: &GroupFailure) -> Self {
        let certificate = &failure.certificate;
        let named = failure.failed.iter().map(|failed| Named {
            rank: failed.member.0,
            node: failed.node.0,
            cause: failed.cause.to_string(),
            corrupted: matches!(failed.cause, FailureCause::Corrupted { .. }),
        });
        Self::Failed(Blame {
            group: failure.group().0,
            named: named.collect(),
            quorum: failure.quorum,
            begun: certificate.messages(),
            held: (0..).map(Rank).take(certificate.members().len()).map(|rank| certificate.held_by(rank)).collect(),
        })
    }
}

impl From<&Result<Certificate, GroupFailure>> for Outcome {
    fn from(result: &Result<Certificate, GroupFailure>) -> Self {
        match result {
            Ok(certificate) if certificate.is_complete() => Self::Done,
            Ok(certificate) => Self::Error(format!("closed, but {certificate}")),
            Err(failure) => failure.into(),
        }
    }
}
