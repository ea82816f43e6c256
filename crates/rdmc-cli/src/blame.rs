//! Who has failed in a transfer, for people and for programs.

use std::fmt;
use std::io::ErrorKind;

use rdmc::{FailedMember, FailureCause, InviteFailure};
use serde::Serialize;

use crate::cli::LISTEN;
use crate::exit::Exit;
use crate::manifest::printable;

/// A sender or receiver that has failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct FailedPeer {
    /// 0 is the sender, and the receivers have the numbers from 1 in its order.
    node: u32,
    /// Where a receiver listens; the sender alone knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    cause: &'static str,
    /// What happened to it, to be read.
    message: String,
}

impl FailedPeer {
    /// Describes a member of a group, in which it has the number of its node.
    pub(crate) fn new(failed: &FailedMember, address: Option<String>) -> Self {
        let message = match &failed.cause {
            FailureCause::Refused { reason } => format!("refused: {reason}"),
            cause => cause.to_string(),
        };
        Self { node: failed.node.0, address, cause: name_of(&failed.cause), message: printable(&message) }
    }

    /// Describes a receiver that did not accept an invitation.
    pub(crate) fn uninvited(node: u32, address: &str, failure: &InviteFailure) -> Self {
        let cause = match failure {
            InviteFailure::Unreachable(_) => "unreachable",
            InviteFailure::Stranger(_) => "stranger",
            InviteFailure::Refused { .. } => "refused",
            InviteFailure::OtherFabrics { .. } | InviteFailure::NotForAll { .. } => "other-fabrics",
            InviteFailure::Silent(_) => "silent",
            InviteFailure::Insecure(_) => "insecure",
            _ => OTHER,
        };
        let remedy = remedy(failure).map_or_else(String::new, |remedy| format!("; {remedy}"));
        Self { node, address: Some(address.to_owned()), cause, message: printable(&failure.to_string()) + &remedy }
    }
}

/// Returns what may help against a failed invitation.
fn remedy(failure: &InviteFailure) -> Option<String> {
    match failure {
        InviteFailure::Unreachable(error) if error.kind() == ErrorKind::ConnectionRefused => Some(format!(
            "does rdmc recv run there? It listens at {LISTEN}, for this host only, unless --listen says otherwise"
        )),
        InviteFailure::OtherFabrics { offers, asked } => {
            let encrypts = |names: &[String]| names.iter().any(|name| name.ends_with("+tls"));
            if encrypts(offers) != encrypts(asked) {
                return Some("blocks are encrypted by both or by neither: --encrypt".to_owned());
            }
            Some("leave --fabric at auto on both sides, and --no-shm away, to use what both have".to_owned())
        }
        InviteFailure::NotForAll { .. } => {
            Some("leave --fabric at auto, and --no-shm away, at all receivers to use what all have".to_owned())
        }
        _ => None,
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

/// Returns the name by which programs know a cause.
fn name_of(cause: &FailureCause) -> &'static str {
    match cause {
        FailureCause::ConnectionLost => "connection-lost",
        FailureCause::Unresponsive { .. } => "unresponsive",
        FailureCause::DataConnection { .. } => "data-connection",
        FailureCause::Abandoned => "left",
        FailureCause::Refused { .. } => "refused",
        FailureCause::TooSlow { .. } => "too-slow",
        FailureCause::NotJoined => "not-joined",
        FailureCause::SpecMismatch => "other-group",
        FailureCause::Protocol { .. } => "protocol",
        FailureCause::Corrupted { .. } => "corrupted",
        FailureCause::Diverged => "diverged",
        FailureCause::Resources { .. } => "resources",
        _ => OTHER,
    }
}

/// Says who failed, and what happened to them.
pub(crate) fn explain(failed: &[FailedPeer]) -> String {
    let told: Vec<String> = failed.iter().take(FAILED_SHOWN_MAX).map(ToString::to_string).collect();
    match failed.len().checked_sub(FAILED_SHOWN_MAX) {
        Some(more @ 1..) => format!("{}; and {more} more", told.join("; ")),
        _ => told.join("; "),
    }
}

/// Says why a receiver has to end, to whoever has started it, when the others have agreed to go on without it.
pub(crate) fn given_up(cause: &FailureCause) -> String {
    let why = match cause {
        FailureCause::TooSlow { held_up } => {
            format!("it was too slow, and held the others up for {} ms (rdmc send --evict-after)", held_up.as_millis())
        }
        cause => format!("it {cause}"),
    };
    format!("this receiver was given up by the others: {why}")
}

/// What a receiver is told that cannot reach several others: they may have agreed to go on without it.
pub(crate) const CUT_OFF: &str =
    "they may have gone on without this receiver, if it was cut off or stopped for too long";

/// Says what brings a receiver the rest.
pub(crate) fn what_next(keeps_parts: bool) -> &'static str {
    match keeps_parts {
        true => "with rdmc recv running here, run rdmc send again: only what is missing here travels",
        false => "with rdmc recv running here, run rdmc send again",
    }
}

/// What a sender is told that cannot reach the others, or was given up by them.
pub(crate) const SENDER_CUT_OFF: &str = "the others may have gone on without this sender, as far as something had come; run \
                                         rdmc send again: only what is missing travels";

/// What brings receivers that were lost the rest.
pub(crate) const SEND_AGAIN: &str =
    "with rdmc recv running there, run rdmc send again: what was kept there does not travel again";

/// An error that is somebody's.
#[derive(Debug)]
pub(crate) struct Blame {
    pub(crate) message: String,
    pub(crate) failed: Vec<FailedPeer>,
}

impl Blame {
    /// Returns whose error it is, if that is known.
    pub(crate) fn of(error: &anyhow::Error) -> Vec<FailedPeer> {
        error.downcast_ref().map_or_else(Vec::new, |Self { failed, .. }| failed.clone())
    }
}

impl Exit {
    /// Makes an error of this kind that is somebody's.
    pub(crate) fn blaming(self, message: String, failed: Vec<FailedPeer>) -> anyhow::Error {
        anyhow::Error::new(Blame { message, failed }).context(self)
    }
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Blame {}

/// Peers that failed, of which people are told.
const FAILED_SHOWN_MAX: usize = 4;
/// The name of causes that came later than this list.
const OTHER: &str = "other";

#[cfg(test)]
mod tests {
    use rdmc::{NodeId, Rank};

    use super::*;

    #[test]
    fn who_was_given_up_is_told_why_and_what_to_do() {
        let slow = FailureCause::TooSlow { held_up: std::time::Duration::from_millis(1250) };
        let told = given_up(&slow);
        assert!(told.contains("too slow") && told.contains("1250 ms") && told.contains("--evict-after"), "{told}");
        assert!(given_up(&FailureCause::NotJoined).ends_with("it did not join in time"));
        assert!(what_next(true).ends_with("only what is missing here travels"));
        assert!(what_next(false).ends_with("run rdmc send again"));
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
        let error = Exit::Partial.blaming(explain(&peers), peers.to_vec()).context("sending");
        assert_eq!((Blame::of(&error), Exit::code_of(&error)), (peers.to_vec(), 3));
        assert_eq!(format!("{error:#}"), format!("sending: partial delivery: {told}"));
        assert!(Blame::of(&Exit::Partial.error("nobody's")).is_empty());
        let line = serde_json::to_string(&peers[2]).unwrap();
        assert_eq!(line, r#"{"node":3,"address":"host:7471","cause":"refused","message":"refused: full\\n"}"#);
    }
}
