//! The events of transfers.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::mpsc;

use crate::announcement::WirePlan;
use crate::blame::FailedPeer;
use crate::costs;
use crate::error::TransferError;
use crate::fabric::FabricInUse;
use crate::manifest::EntryPath;
use crate::words::printable;

/// An event of a transfer or of a receiver.
///
/// As JSON an event is an object. Its field `event` is the variant's name in lower case with hyphens; the other fields
/// are those below. Later versions may add variants and fields, and keep these.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// A receiver listens. This is the first event of every receiver.
    #[non_exhaustive]
    Listening {
        /// The address that senders connect to.
        address: String,
        /// The directory that receives the files.
        dir: String,
        /// Whether only this host can reach the address.
        loopback_only: bool,
        /// What a sender must prove.
        security: Proof,
        /// The names of the offered fabrics, best first.
        fabrics: Vec<&'static str>,
        /// The RDMA device, if one is offered.
        device: Option<String>,
    },
    /// The user should know about something that works nevertheless.
    #[non_exhaustive]
    Warning {
        /// What to know.
        message: String,
    },
    /// An offer ended before the first file: a receiver declined it, or the sender withdrew it.
    #[non_exhaustive]
    Declined {
        /// The sender's address, if it is known.
        from: Option<String>,
        /// Why.
        reason: String,
    },
    /// A transfer begins. All have agreed to the list of files, and have formed the group that carries them.
    #[non_exhaustive]
    Started {
        /// The direction.
        direction: Direction,
        /// The receivers' addresses, or the sender's if it is known.
        peers: Vec<String>,
        /// Number of receivers.
        receivers: usize,
        /// Number of files.
        files: u64,
        /// Sum of the files' sizes.
        bytes: u64,
        /// The fabric. Its fields are fields of the event.
        #[serde(flatten)]
        fabric: FabricInUse,
        /// The plan. Its fields are fields of the event.
        #[serde(flatten)]
        plan: PlanInUse,
        /// Only at the sender: the network for which the plan was chosen. Its fields are fields of the event.
        #[serde(flatten)]
        path: Option<PathInUse>,
    },
    /// The progress of a transfer; comes about every 100 ms.
    #[non_exhaustive]
    Progress {
        /// Bytes that were sent or received so far.
        bytes: u64,
        /// Sum of the files' sizes.
        total: u64,
        /// Whether all bytes have travelled and only the end is to be confirmed. Not part of the JSON.
        #[serde(skip)]
        confirming: bool,
    },
    /// A file was sent, or is complete and in place.
    #[non_exhaustive]
    File {
        /// Its path below the destination, with control characters escaped.
        path: String,
        /// The bytes of the path in hexadecimal, if they are not UTF-8; `path` then has replacement characters.
        #[serde(skip_serializing_if = "Option::is_none")]
        path_bytes: Option<String>,
        /// Its size in bytes.
        bytes: u64,
    },
    /// Something cannot be sent: a symbolic link, a device, a socket or a pipe.
    #[non_exhaustive]
    Skipped {
        /// Its path, with control characters escaped.
        path: String,
        /// The bytes of the path in hexadecimal, if they are not UTF-8; `path` then has replacement characters.
        #[serde(skip_serializing_if = "Option::is_none")]
        path_bytes: Option<String>,
    },
    /// Peers have failed, and the others go on.
    #[non_exhaustive]
    GoingOn {
        /// The peers that failed.
        failed: Vec<FailedPeer>,
        /// Number of remaining receivers.
        receivers: usize,
    },
    /// A transfer is done. Every remaining receiver has everything.
    #[non_exhaustive]
    Done {
        /// Number of remaining receivers.
        receivers: usize,
        /// Number of files.
        files: u64,
        /// Sum of the files' sizes.
        bytes: u64,
        /// Number of things that could not be sent; 0 at receivers.
        skipped: usize,
        /// Duration since the beginning.
        seconds: f64,
        /// Only at a receiver: bytes of the files that have arrived. It is less than `bytes` if the receiver had parts
        /// of files.
        #[serde(skip_serializing_if = "Option::is_none")]
        received: Option<u64>,
    },
    /// A transfer to this receiver failed. A failed transfer of a sender has an outcome instead of this event.
    Failed(TransferError),
}

/// An event of a receiver, and its transfer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReceiverEvent {
    /// The transfer; `None` for events of the receiver itself.
    pub session: Option<SessionNumber>,
    /// The event.
    pub event: Event,
}

/// Number of a transfer at a receiver. Invitations are numbered in their order, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionNumber(pub u64);

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From this host.
    Sending,
    /// To this host.
    Receiving,
}

/// What a sender must prove to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proof {
    /// Nothing.
    None,
    /// That it knows the shared key.
    Key,
    /// That it has a certificate of the authority.
    Certificate,
}

/// The plan by which the blocks of a transfer travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanInUse {
    /// Name of the algorithm.
    pub algorithm: String,
    /// Size of a block in bytes.
    pub block_size: u32,
    /// The members of each rack, if blocks travel by racks. 0 is the sender, 1 the first receiver.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub racks: Vec<Vec<u32>>,
}

/// What a plan assumes of the network.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PathInUse {
    /// The round trip to the farthest receiver in ms, as given or measured.
    pub round_trip_ms: f64,
    /// The rate of each member's port in bits per second: as given, of the sender's network device, or the default.
    pub port_rate_bits: u64,
}

impl From<costs::Path> for PathInUse {
    fn from(costs::Path { port_rate, round_trip }: costs::Path) -> Self {
        Self { round_trip_ms: round_trip.as_secs_f64() * 1e3, port_rate_bits: port_rate.bits_per_second() }
    }
}

impl From<&WirePlan> for PlanInUse {
    fn from(plan: &WirePlan) -> Self {
        Self { algorithm: plan.algorithm.to_string(), block_size: plan.block_size, racks: plan.algorithm.racks() }
    }
}

/// The queue from the work to its stream of events.
///
/// It has no bound of its own. The stream empties it before it polls the work again, so that it holds the events of one
/// poll.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::UnboundedSender<ReceiverEvent>,
    session: Option<SessionNumber>,
}

impl Events {
    /// Makes the queue and its other end.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<ReceiverEvent>) {
        let (queue, events) = mpsc::unbounded_channel();
        (Self { queue, session: None }, events)
    }

    /// Returns the queue for the events of a session.
    pub(crate) fn of(&self, session: SessionNumber) -> Self {
        Self { queue: self.queue.clone(), session: Some(session) }
    }

    /// Puts an event into the queue.
    pub(crate) fn say(&self, event: Event) {
        // Fails only if the stream is being dropped.
        let _ = self.queue.send(ReceiverEvent { session: self.session, event });
    }

    /// Starts to report the progress of a transfer of `total` bytes.
    pub(crate) fn progress(&self, total: u64) -> Progress {
        Progress { events: self.clone(), total, confirming: AtomicBool::new(false) }
    }
}

impl Event {
    /// Makes the event of a file that was sent, or is in place.
    pub(crate) fn file(path: &EntryPath, bytes: u64) -> Self {
        let path_bytes = unless_utf8(&path.0.join(&b'/'));
        Self::File { path: path.to_string(), path_bytes, bytes }
    }

    /// Makes the event of something that cannot be sent.
    pub(crate) fn skipped(path: &Path) -> Self {
        let path_bytes = unless_utf8(path.as_os_str().as_bytes());
        Self::Skipped { path: printable(&path.to_string_lossy()), path_bytes }
    }
}

/// Returns bytes in hexadecimal; `None` if they are UTF-8.
fn unless_utf8(bytes: &[u8]) -> Option<String> {
    let hex = || bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    std::str::from_utf8(bytes).is_err().then(hex)
}

/// Reports the progress of a transfer.
#[derive(Debug)]
pub(crate) struct Progress {
    events: Events,
    total: u64,
    confirming: AtomicBool,
}

impl Progress {
    /// Reports that `bytes` of the total have travelled.
    pub(crate) fn set(&self, bytes: u64) {
        let confirming = self.confirming.load(Ordering::Relaxed);
        self.events.say(Event::Progress { bytes: bytes.min(self.total), total: self.total, confirming });
    }

    /// Notes that all bytes have travelled.
    pub(crate) fn confirms(&self) {
        self.confirming.store(true, Ordering::Relaxed);
    }
}

/// Interval between reports of progress.
pub(crate) const TICK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use rdmc::{FailedMember, FailureCause, NodeId, Rank};

    use super::*;
    use crate::error::Kind;

    /// The names are a contract: docs and scripts rely on them.
    #[test]
    fn events_are_objects_with_the_documented_fields() {
        let cause = FailureCause::NotJoined;
        let failed = FailedPeer::new(&FailedMember { member: Rank(2), node: NodeId(2), cause }, Some("h:1".into()));
        let peer = r#"{"node":2,"address":"h:1","cause":"not-joined","message":"did not join in time"}"#;
        let started = Event::Started {
            direction: Direction::Sending,
            peers: vec!["h:1".into()],
            receivers: 1,
            files: 2,
            bytes: 3,
            fabric: FabricInUse { fabric: "tcp".into(), reason: "asked for".into() },
            plan: PlanInUse { algorithm: "chain".into(), block_size: 4, racks: Vec::new() },
            path: Some(PathInUse { round_trip_ms: 0.25, port_rate_bits: 10_000_000_000 }),
        };
        let done = |received| Event::Done { receivers: 1, files: 2, bytes: 3, skipped: 0, seconds: 0.5, received };
        let expected = [
            (
                Event::Listening {
                    address: "127.0.0.1:7471".into(),
                    dir: "/in".into(),
                    loopback_only: true,
                    security: Proof::Key,
                    fabrics: vec!["verbs", "tcp"],
                    device: Some("rxe0".into()),
                },
                concat!(
                    r#"{"event":"listening","address":"127.0.0.1:7471","dir":"/in","loopback_only":true,"#,
                    r#""security":"key","fabrics":["verbs","tcp"],"device":"rxe0"}"#,
                ),
            ),
            (Event::Warning { message: "open".into() }, r#"{"event":"warning","message":"open"}"#),
            (
                Event::Declined { from: None, reason: "full".into() },
                r#"{"event":"declined","from":null,"reason":"full"}"#,
            ),
            (
                started,
                concat!(
                    r#"{"event":"started","direction":"sending","peers":["h:1"],"receivers":1,"files":2,"bytes":3,"#,
                    r#""fabric":"tcp","fabric_reason":"asked for","algorithm":"chain","block_size":4,"round_trip_ms":0.25,"#,
                    r#""port_rate_bits":10000000000}"#,
                ),
            ),
            (Event::Progress { bytes: 1, total: 3, confirming: true }, r#"{"event":"progress","bytes":1,"total":3}"#),
            (Event::file(&EntryPath(vec![b"a".into(), b"b".into()]), 3), r#"{"event":"file","path":"a/b","bytes":3}"#),
            (
                Event::file(&EntryPath(vec![b"a".into(), vec![0xe4, b'\n']]), 3),
                concat!(r#"{"event":"file","path":"a/"#, "\u{fffd}", r#"\\n","path_bytes":"612fe40a","bytes":3}"#),
            ),
            (Event::skipped(Path::new("link")), r#"{"event":"skipped","path":"link"}"#),
            (
                Event::skipped(Path::new(OsStr::from_bytes(&[0xff]))),
                concat!(r#"{"event":"skipped","path":""#, "\u{fffd}", r#"","path_bytes":"ff"}"#),
            ),
            (
                Event::GoingOn { failed: vec![failed.clone()], receivers: 1 },
                &format!(r#"{{"event":"going-on","failed":[{peer}],"receivers":1}}"#),
            ),
            (done(None), r#"{"event":"done","receivers":1,"files":2,"bytes":3,"skipped":0,"seconds":0.5}"#),
            (
                done(Some(9)),
                r#"{"event":"done","receivers":1,"files":2,"bytes":3,"skipped":0,"seconds":0.5,"received":9}"#,
            ),
            (
                Event::Failed(Kind::Partial.blaming("lost", vec![failed]).into()),
                &format!(r#"{{"event":"failed","code":3,"message":"partial delivery: lost","failed":[{peer}]}}"#),
            ),
        ];
        for (event, object) in expected {
            assert_eq!(serde_json::to_string(&event).unwrap(), object);
        }
    }
}
