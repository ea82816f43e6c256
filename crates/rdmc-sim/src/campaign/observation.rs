//! Observations of a play, as plain data.

use std::collections::BTreeSet;

use rdmc::{Certificate, FailureCause, GroupError, GroupFailure, NodeId, Rank, Receipt, ReceiptError};

/// The observations of all members of a case, and the resources still in use afterwards.
///
/// Times are virtual and count from the moment at which all nodes are connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Digest of all events and their times: equal plays have equal digests.
    pub digest: u64,
    /// Why the play did not end; `None` if it ended.
    pub stalled: Option<String>,
    /// The observations of the groups, in the order of the case.
    pub groups: Vec<GroupObservation>,
    /// The faults that happened, in their order.
    pub faults: Vec<FaultObservation>,
    /// The blocks with a flipped bit, in the order of their arrival, and behind them the slots of rings.
    pub flipped: Vec<FlippedBlock>,
    /// When the world was healed, in ns.
    pub healed_ns: Option<u64>,
    /// When the last member ended, in ns.
    pub ended_ns: Option<u64>,
    /// Number of operations of each node until then.
    pub operations: Vec<u64>,
    /// The resources of each node that were still in use at the end.
    pub still_in_use: Vec<ResourcesInUse>,
}

/// The observations of the members of one group, in rank order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupObservation {
    /// The members.
    pub members: Vec<MemberObservation>,
}

/// The observations of one member of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberObservation {
    /// When it began to create or join the group, in ns.
    pub joining_ns: Option<u64>,
    /// How the joining ended.
    pub joined: Option<Ending>,
    /// At the root: how the sends ended, by message. `None` for a send that was not polled or not reached.
    pub sends: Vec<Option<Ending>>,
    /// At the root: the messages in the order in which it sent them. A message that was not queued is there once it is
    /// sent again.
    pub order: Vec<usize>,
    /// At the root: the receipts that it awaited.
    pub receipts: Vec<SeenReceipt>,
    /// The messages that it read while they arrived, in order.
    pub reads: Vec<SeenRead>,
    /// The delivered messages, in order, also those of groups that continue the first one.
    pub delivered: Vec<Delivered>,
    /// The messages that its application said to be stored.
    pub stored: BTreeSet<u64>,
    /// How the stream of messages ended.
    pub stream: Option<Ending>,
    /// Whether the stream returned an item after its end.
    pub spoke_after_end: bool,
    /// The counts of corrupted blocks at the end of the stream.
    pub corruptions: Option<Corruptions>,
    /// When it called close, in ns.
    pub closing_ns: Option<u64>,
    /// How the close ended.
    pub closed: Option<Ending>,
    /// The groups of survivors in which it went on after failures, in order, and at last the one that it could not
    /// join.
    pub recoveries: Vec<RecoveryObservation>,
    /// When its application ended, in ns.
    pub ended_ns: Option<u64>,
    /// When its node died, in ns.
    pub died_ns: Option<u64>,
}

/// The observations of a member of a group that continues another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryObservation {
    /// The nodes of the members: those that the failure does not name.
    pub members: Vec<u32>,
    /// How the recovery ended.
    pub recovered: Ending,
    /// The first message that the survivors cannot complete.
    pub lost: Option<u64>,
    /// Number of messages that were delivered before.
    pub delivered_before: usize,
    /// At the root: the receipts that it awaited.
    pub receipts: Vec<SeenReceipt>,
    /// How the stream of messages ended.
    pub stream: Option<Ending>,
    /// When it called close, in ns.
    pub closing_ns: Option<u64>,
    /// How the close ended.
    pub closed: Option<Ending>,
}

/// What a member read of a message while it arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenRead {
    /// The message's number.
    pub number: u64,
    /// The message's size in bytes.
    pub size: u64,
    /// Number of bytes that it read.
    pub read: u64,
    /// The digest of these bytes.
    pub digest: u64,
    /// Whether the reader came to its end: the message was delivered.
    pub ended: bool,
}

/// A receipt that the root awaited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenReceipt {
    /// The message.
    pub number: u64,
    /// Whether all members had it; else the nodes that are known to have it.
    pub delivered: Result<(), Vec<u32>>,
    /// Whether all receivers had stored it.
    pub stored: SeenStored,
}

/// What a receipt said about storing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeenStored {
    /// All receivers have stored the message.
    Everywhere,
    /// These nodes did not say so.
    NotAt(Vec<u32>),
    /// The group failed; these nodes have stored it.
    Failed(Vec<u32>),
}

/// A member's counts of corrupted blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Corruptions {
    /// Number of corrupted blocks.
    pub found: u64,
    /// Number of corrupted blocks that were fetched again.
    pub healed: u64,
    /// The node that sent the last one.
    pub last_from: Option<u32>,
}

/// A block, or the slot of a ring, with a bit that flipped on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlippedBlock {
    /// The node that sent it.
    pub from: u32,
    /// The node that received it.
    pub to: u32,
}

/// The outcome of an operation and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The time in ns.
    pub at_ns: u64,
    /// The outcome.
    pub outcome: Outcome,
}

/// The outcome of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Success.
    Done,
    /// The application dropped the future.
    Dropped,
    /// The source of the message could not be read, and the message was not sent.
    Unreadable,
    /// A failure that names members.
    Failed(ReportedFailure),
    /// An error that names no member.
    Error(String),
}

/// A group failure as a member got it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReportedFailure {
    /// The group's number.
    pub group: u64,
    /// The members that it names.
    pub named: Vec<NamedMember>,
    /// Whether a quorum agreed on it.
    pub quorum: bool,
    /// Number of messages that were begun.
    pub begun: u64,
    /// Number of messages that each rank has; `None` if unknown.
    pub held: Vec<Option<u64>>,
}

/// A member that a failure names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedMember {
    /// The member's rank.
    pub rank: u32,
    /// The member's node.
    pub node: u32,
    /// The cause that the failure reports for it.
    pub cause: String,
    /// Whether the cause is a corrupted block from it.
    pub corrupted: bool,
    /// Whether the cause is a message that it could not read from its source.
    pub unreadable: bool,
}

/// A delivered message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// The time in ns.
    pub at_ns: u64,
    /// Its number.
    pub number: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The digest of its bytes; `None` if the application dropped it.
    pub digest: Option<u64>,
    /// The digests of its header, as it came with the offer and with the message.
    pub headers: Vec<u64>,
}

/// A fault that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultObservation {
    /// Its index in the case.
    pub fault: usize,
    /// Its time in ns.
    pub at_ns: u64,
    /// Its end in ns; `None` if the fault does not end.
    pub until_ns: Option<u64>,
}

/// The resources of a node that are still in use after all members have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourcesInUse {
    /// Bytes of the pool that are lent when all handles of groups are dropped; 0 for a node that died or left.
    pub pool_bytes_lent: u64,
    /// Number of tasks when the handles of the node are dropped too.
    pub tasks: usize,
    /// Number of queue pairs at the same time.
    pub queue_pairs: usize,
}

impl MemberObservation {
    /// Returns all failures that the member got, in the order of the application's calls.
    pub fn reported_failures(&self) -> impl Iterator<Item = &ReportedFailure> {
        let seen = self.joined.iter().chain(self.sends.iter().flatten()).chain(&self.stream).chain(&self.closed);
        seen.filter_map(|seen| match &seen.outcome {
            Outcome::Failed(blame) => Some(blame),
            _ => None,
        })
    }

    /// Returns whether its close succeeded.
    pub fn closed_well(&self) -> bool {
        self.closed.as_ref().is_some_and(|seen| seen.outcome == Outcome::Done)
    }

    /// Returns the messages that were delivered until the end of the first group and of `recoveries` that continue it.
    pub fn delivered_until(&self, recoveries: usize) -> &[Delivered] {
        let count = self.recoveries.get(recoveries).map_or(self.delivered.len(), |next| next.delivered_before);
        &self.delivered[..count]
    }
}

impl RecoveryObservation {
    pub(super) fn new(failure: &GroupFailure, recovered: Ending, lost: Option<u64>, delivered_before: usize) -> Self {
        let survivors = (0..).map(Rank).zip(failure.certificate.members()).filter(|(rank, _)| !failure.names(*rank));
        Self {
            members: survivors.map(|(_, node)| node.0).collect(),
            recovered,
            lost,
            delivered_before,
            receipts: Vec::new(),
            stream: None,
            closing_ns: None,
            closed: None,
        }
    }

    /// Returns all failures of the group that the member got.
    pub fn reported_failures(&self) -> impl Iterator<Item = &ReportedFailure> {
        let seen = [&self.recovered].into_iter().chain(&self.stream).chain(&self.closed);
        seen.filter_map(|seen| match &seen.outcome {
            Outcome::Failed(blame) => Some(blame),
            _ => None,
        })
    }

    /// Returns whether its close succeeded.
    pub fn closed_well(&self) -> bool {
        self.closed.as_ref().is_some_and(|seen| seen.outcome == Outcome::Done)
    }
}

impl SeenReceipt {
    /// Awaits both answers of a receipt.
    pub(super) async fn of(receipt: Receipt) -> Self {
        let nodes = |nodes: Vec<NodeId>| nodes.into_iter().map(|node| node.0).collect();
        let (delivered, stored) = futures::join!(receipt.delivered(), receipt.stored());
        Self {
            number: receipt.number(),
            delivered: delivered.map_err(|error| match error {
                ReceiptError::Failed { nodes: known, .. } | ReceiptError::NotStored { nodes: known, .. } => {
                    nodes(known)
                }
                _ => Vec::new(),
            }),
            stored: match stored {
                Ok(()) => SeenStored::Everywhere,
                Err(ReceiptError::NotStored { nodes: not, .. }) => SeenStored::NotAt(nodes(not)),
                Err(ReceiptError::Failed { nodes: known, .. }) => SeenStored::Failed(nodes(known)),
                Err(_) => SeenStored::Failed(Vec::new()),
            },
        }
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

    /// Returns the outcome of creating or joining a group.
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
        let named = failure.failed.iter().map(|failed| NamedMember {
            rank: failed.member.0,
            node: failed.node.0,
            cause: failed.cause.to_string(),
            corrupted: matches!(failed.cause, FailureCause::Corrupted { .. }),
            unreadable: matches!(failed.cause, FailureCause::Unreadable { .. }),
        });
        Self::Failed(ReportedFailure {
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
