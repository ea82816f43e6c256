//! The records that members write of a stream.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use rdmc::{Certificate, GroupFailure, NodeId, Rank};
use serde::{Deserialize, Serialize};

/// A line of a member's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Note {
    /// The member has formed a group of these members.
    Formed(Vec<u32>),
    /// Its application got a message.
    Got { number: u64, is_right: bool },
    /// Its application is about to say that the message is stored.
    Stores(u64),
    /// Its application is about to let the message go.
    LetsGo(u64),
    /// At the root: whether all members have a message; else the members that have it.
    Delivered(u64, Result<(), Vec<u32>>),
    /// At the root: whether all receivers have stored a message.
    Stored(u64, StoredAt),
    /// The group failed.
    Failed(Failure),
    /// The first message that the survivors cannot complete.
    Lost(u64),
    /// The failure cannot be recovered from, for this reason.
    Excluded(String),
    /// The group was closed.
    Closed { members: Vec<u32>, messages: u64 },
    /// The process is about to end.
    Ended,
}

/// What a receipt says about storing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum StoredAt {
    All,
    /// These have let the message go.
    NotAt(Vec<u32>),
    /// The group failed; these have stored it.
    Failed(Vec<u32>),
}

/// A failure as a member got it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    /// The members of the group.
    pub(super) members: Vec<u32>,
    pub(super) named: Vec<u32>,
    pub(super) quorum: bool,
    pub(super) begun: u64,
    /// How many messages each member has; `None` if no member knows.
    pub(super) held: Vec<Option<u64>>,
}

impl Note {
    pub(super) fn closed(certificate: &Certificate) -> Self {
        Self::Closed { members: numbers(certificate.members()), messages: certificate.messages() }
    }
}

impl From<&GroupFailure> for Failure {
    fn from(failure: &GroupFailure) -> Self {
        let certificate = &failure.certificate;
        let ranks = (0..).map(Rank).take(certificate.members().len());
        Self {
            members: numbers(certificate.members()),
            named: failure.failed.iter().map(|failed| failed.node.0).collect(),
            quorum: failure.quorum,
            begun: certificate.messages(),
            held: ranks.map(|rank| certificate.held_by(rank)).collect(),
        }
    }
}

pub(super) fn numbers(nodes: &[NodeId]) -> Vec<u32> {
    nodes.iter().map(|node| node.0).collect()
}

/// A member's record: a file that outlives the process.
pub(super) struct Record(File);

impl Record {
    pub(super) fn create(path: &Path) -> Self {
        Self(File::create(path).expect("the directory is there"))
    }

    /// Writes a line. What happens after this returns comes after it, even if the process is killed.
    pub(super) fn note(&self, note: &Note) {
        let line = serde_json::to_string(note).expect("it is plain data") + "\n";
        (&self.0).write_all(line.as_bytes()).expect("the disk has room");
    }
}

/// Reads a record. A process that is killed may leave half a line.
pub(super) fn read(path: &Path) -> Vec<Note> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).expect("a line of a record")).collect()
}
