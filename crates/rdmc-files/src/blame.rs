//! The peers that have failed in a transfer, for people and for programs.

use std::fmt;
use std::io::ErrorKind;
use std::time::Duration;

use rdmc::{FailedMember, FailureCause, GroupFailure, InviteFailure};
use serde::Serialize;

use crate::wording::Wording;
use crate::words::printable;

/// A sender or receiver that has failed. Its display names the peer and says what happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedPeer {
    node: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    cause: PeerFailure,
    message: String,
}

/// The cause of a peer's failure. As JSON it is the variant's name in lower case with hyphens, such as
/// `connection-lost`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum PeerFailure {
    /// Its connection broke.
    ConnectionLost,
    /// It was silent for longer than the detection time.
    Unresponsive,
    /// It could not exchange blocks with another member.
    DataConnection,
    /// It left the group.
    Left,
    /// It refused the invitation or a message.
    Refused,
    /// It held the others up for longer than the sender allows.
    TooSlow,
    /// It did not join the group in time.
    NotJoined,
    /// It formed the group with another specification.
    OtherGroup,
    /// It sent what the protocol does not allow.
    Protocol,
    /// It passed on a corrupted block that no other member could supply.
    Corrupted,
    /// Its messages have other digests than the sender's.
    Diverged,
    /// It lacked memory or other resources.
    Resources,
    /// It could not be reached.
    Unreachable,
    /// It closed the connection before it answered the invitation.
    Closed,
    /// It is busy with other transfers.
    Busy,
    /// The program at its address speaks another protocol.
    Stranger,
    /// It speaks another version of the protocol.
    OtherVersion,
    /// It does not offer a fabric that all nodes offer.
    OtherFabrics,
    /// It did not answer the invitation in time.
    Silent,
    /// It is not trusted, or does not trust this host.
    Insecure,
    /// A cause that is not in this list.
    Other,
}

impl FailedPeer {
    /// Describes a member of a group by its node and its cause.
    pub(crate) fn new(failed: &FailedMember, address: Option<String>) -> Self {
        let message = match &failed.cause {
            FailureCause::Refused { reason } => refusal(reason),
            cause @ FailureCause::Unresponsive { .. } => format!("{cause} (a longer detection time tolerates more)"),
            cause => cause.to_string(),
        };
        Self { node: failed.node.0, address, cause: PeerFailure::of(&failed.cause), message: printable(&message) }
    }

    /// Describes a receiver that did not accept an invitation.
    pub(crate) fn uninvited(node: u32, address: &str, failure: &InviteFailure, wording: &Wording) -> Self {
        let cause = match failure {
            InviteFailure::Unreachable(_) => PeerFailure::Unreachable,
            InviteFailure::Closed(_) => PeerFailure::Closed,
            InviteFailure::Busy => PeerFailure::Busy,
            InviteFailure::Stranger(_) => PeerFailure::Stranger,
            InviteFailure::OtherVersion { .. } => PeerFailure::OtherVersion,
            InviteFailure::Refused { reason } if reason.starts_with(BUSY) => PeerFailure::Busy,
            InviteFailure::Refused { .. } => PeerFailure::Refused,
            InviteFailure::OtherFabrics { .. } | InviteFailure::NotForAll { .. } => PeerFailure::OtherFabrics,
            InviteFailure::Silent(_) => PeerFailure::Silent,
            InviteFailure::Insecure(_) => PeerFailure::Insecure,
            _ => PeerFailure::Other,
        };
        let message = match failure {
            InviteFailure::Refused { reason } => refusal(reason),
            failure => failure.to_string(),
        };
        let remedy = remedy(failure, wording).map_or_else(String::new, |remedy| format!("; {remedy}"));
        Self { node, address: Some(address.to_owned()), cause, message: printable(&message) + &remedy }
    }

    /// Returns the peer's number: 0 is the sender, and the receivers count from 1 in the sender's order.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// Returns the address of a receiver; `None` in failures that a receiver reports.
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Returns what happened to it, for programs.
    pub fn cause(&self) -> PeerFailure {
        self.cause
    }

    /// Returns what happened to it, for people. Control characters are escaped.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for FailedPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.address, self.node) {
            (Some(address), _) => write!(f, "{} {}", printable(address), self.message),
            (None, 0) => write!(f, "the sender {}", self.message),
            (None, number) => write!(f, "receiver {number} {}", self.message),
        }
    }
}

impl PeerFailure {
    /// Tells whether the peer may accept if it is invited again soon.
    pub(crate) fn may_pass(self) -> bool {
        matches!(self, Self::Busy | Self::Closed | Self::Unreachable)
    }

    /// Tells whether a peer may fail so because the sender's file changed while it was sent. A connection breaks if
    /// bytes of the file cannot be read any more.
    pub(crate) fn may_follow_from_a_changed_file(self) -> bool {
        let is_wrong = matches!(self, Self::Refused | Self::Corrupted | Self::Diverged | Self::Resources);
        is_wrong || matches!(self, Self::ConnectionLost | Self::DataConnection)
    }

    fn of(cause: &FailureCause) -> Self {
        match cause {
            FailureCause::ConnectionLost => Self::ConnectionLost,
            FailureCause::Unresponsive { .. } => Self::Unresponsive,
            FailureCause::DataConnection { .. } => Self::DataConnection,
            FailureCause::Abandoned => Self::Left,
            FailureCause::Refused { reason } if reason.starts_with(BUSY) => Self::Busy,
            FailureCause::Refused { .. } => Self::Refused,
            FailureCause::TooSlow { .. } => Self::TooSlow,
            FailureCause::NotJoined => Self::NotJoined,
            FailureCause::SpecMismatch => Self::OtherGroup,
            FailureCause::Protocol { .. } => Self::Protocol,
            FailureCause::Corrupted { .. } => Self::Corrupted,
            FailureCause::Diverged => Self::Diverged,
            FailureCause::Resources { .. } => Self::Resources,
            FailureCause::Unreachable { .. } => Self::Unreachable,
            _ => Self::Other,
        }
    }
}

/// Returns a remedy against a failed invitation.
fn remedy(failure: &InviteFailure, wording: &Wording) -> Option<String> {
    let Wording { fabric, no_shm, encrypt, .. } = wording;
    match failure {
        InviteFailure::Unreachable(error) if error.kind() == ErrorKind::ConnectionRefused => {
            Some(wording.not_listening.to_owned())
        }
        // Another program may listen there, or it is about to end.
        InviteFailure::Closed(_) => Some(wording.not_listening.to_owned()),
        InviteFailure::OtherFabrics { offers, asked } => {
            let encrypts = |names: &[String]| names.iter().any(|name| name.ends_with("+tls"));
            if encrypts(offers) != encrypts(asked) {
                return Some(format!("{encrypt} must be set at both ends or at neither"));
            }
            Some(format!("leave {fabric} at auto on both sides, without {no_shm}, to use a fabric that both have"))
        }
        InviteFailure::NotForAll { .. } => {
            Some(format!("leave {fabric} at auto at all receivers, without {no_shm}, to use a fabric that all have"))
        }
        _ => None,
    }
}

/// Says that a peer refused, or that it is busy.
pub(crate) fn refusal(reason: &str) -> String {
    if reason.starts_with(BUSY) { format!("is {reason}") } else { format!("refused: {reason}") }
}

/// Names the peers that failed, and says what happened to them.
pub fn explain(failed: &[FailedPeer]) -> String {
    let told: Vec<String> = failed.iter().take(FAILED_SHOWN_MAX).map(ToString::to_string).collect();
    match failed.len().checked_sub(FAILED_SHOWN_MAX) {
        Some(more @ 1..) => format!("{}; and {more} more", told.join("; ")),
        _ => told.join("; "),
    }
}

/// Describes failed members whose addresses are not known.
pub(crate) fn peers(failed: &[FailedMember]) -> Vec<FailedPeer> {
    failed.iter().map(|failed| FailedPeer::new(failed, None)).collect()
}

/// Says why this receiver ends although the others go on.
pub(crate) fn given_up(cause: &FailureCause, wording: &Wording) -> String {
    let why = match cause {
        FailureCause::TooSlow { held_up } => {
            let (held_up, option) = (held_up.as_millis(), wording.evict_after);
            format!("it was too slow, and held the others up for {held_up} ms ({option})")
        }
        cause => format!("it {cause}"),
    };
    format!("the others have given up this receiver: {why}")
}

/// Returns for how long at least this process was stopped before a failure, if that may be why it has lost the others;
/// `None` if it ran, or a member failed in another way.
pub(crate) fn stopped_before(failure: &GroupFailure) -> Option<Duration> {
    let follows = |failed: &FailedMember| {
        matches!(
            failed.cause,
            FailureCause::ConnectionLost
                | FailureCause::Unresponsive { .. }
                | FailureCause::Unreachable { .. }
                | FailureCause::DataConnection { .. }
                | FailureCause::Abandoned
                | FailureCause::NotJoined
        )
    };
    failure.stalled().filter(|_| failure.failed.iter().all(follows))
}

/// Says that this process was stopped.
pub(crate) fn stopped_for(at_least: Duration) -> String {
    let (seconds, tenths) = (at_least.as_secs(), at_least.subsec_millis() / 100);
    format!(
        "this process was stopped for at least {seconds}.{tenths} s (a signal, a suspended machine or too much load), \
         so that the others may have given it up"
    )
}

/// Says at a receiver that cannot reach several others that they may have gone on.
pub(crate) const CUT_OFF: &str =
    "they may have gone on without this receiver, if it was cut off or stopped for too long";

/// Says what brings this receiver the missing files.
pub(crate) fn what_next(keeps_parts: bool, wording: &Wording) -> String {
    let Wording { sender, receiver, .. } = wording;
    let travels = if keeps_parts { ": only what is missing here travels" } else { "" };
    format!("with {receiver} running here, run {sender} again{travels}")
}

/// Says what to do at a sender that cannot reach the others, or that the others have given up.
pub(crate) fn sender_cut_off(Wording { sender, .. }: &Wording) -> String {
    format!(
        "without this sender the others may have completed what had reached them; run {sender} again: only what is \
         missing travels"
    )
}

/// Says what brings failed receivers the missing files.
pub(crate) fn send_again(Wording { sender, receiver, .. }: &Wording) -> String {
    format!("with {receiver} running there, run {sender} again: what was kept there does not travel again")
}

/// Beginning of a refusal because of another transfer. The sender recognizes such refusals by it. A refusal of a file
/// whose path begins with these words is mistaken for one.
pub(crate) const BUSY: &str = "busy with another transfer";
/// Greatest number of failed peers that a message names.
const FAILED_SHOWN_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use rdmc::{NodeId, Rank};

    use super::*;
    use crate::error::{Kind, TransferError};

    #[test]
    fn who_was_given_up_is_told_why_and_what_to_do() {
        let wording = Wording { evict_after: "rdmc send --evict-after", ..Wording::default() };
        let slow = FailureCause::TooSlow { held_up: Duration::from_millis(1250) };
        let told = given_up(&slow, &wording);
        assert!(told.contains("too slow") && told.contains("1250 ms") && told.contains("--evict-after"), "{told}");
        assert!(given_up(&FailureCause::NotJoined, &wording).ends_with("it did not join in time"));
        let stopped = stopped_for(Duration::from_millis(3290));
        assert!(stopped.starts_with("this process was stopped for at least 3.2 s ("), "{stopped}");
        assert!(what_next(true, &wording).ends_with("only what is missing here travels"));
        assert!(what_next(false, &wording).ends_with("run the sender again"));
    }

    #[test]
    fn an_error_knows_whose_it_is() {
        let failed = |node, cause| FailedMember { member: Rank(node), node: NodeId(node), cause };
        let refused = FailureCause::Refused { reason: "full\n".into() };
        let peers = [
            FailedPeer::new(&failed(0, FailureCause::ConnectionLost), None),
            FailedPeer::new(&failed(2, FailureCause::NotJoined), None),
            FailedPeer::new(&failed(3, refused), Some("host:7471".into())),
        ];
        let told =
            "the sender was lost: its connection broke; receiver 2 did not join in time; host:7471 refused: full\\n";
        assert_eq!(explain(&peers), told);
        let many = vec![peers[1].clone(); 6];
        assert!(explain(&many).ends_with("; receiver 2 did not join in time; and 2 more"));
        let error = TransferError::from(Kind::Partial.blaming(explain(&peers), peers.to_vec()).context("sending"));
        assert_eq!((error.failed(), error.code()), (&peers[..], 3));
        assert_eq!(error.to_string(), format!("partial delivery: sending: {told}"));
        assert!(TransferError::from(Kind::Partial.problem("nobody's")).failed().is_empty());
        let line = serde_json::to_string(&peers[2]).unwrap();
        assert_eq!(line, r#"{"node":3,"address":"host:7471","cause":"refused","message":"refused: full\\n"}"#);
    }
}
