//! What happens in transfers, as values.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::mpsc;

use crate::announcement::WirePlan;
use crate::blame::FailedPeer;
use crate::error::TransferError;
use crate::fabric::FabricInUse;

/// Something that happened. A stream yields each event once.
///
/// As JSON an event is an object with the field `event`, the variant's name in lower case with hyphens, and the fields below. More
/// variants and fields may come; those that are here stay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Event {
    /// A receiver listens. It is the first event of every receiver.
    #[non_exhaustive]
    Listening {
        /// The address that senders connect to.
        address: String,
        /// The directory that files are put into.
        dir: String,
        /// Whether only this host can reach the address.
        loopback_only: bool,
        /// What a sender must have to be let in.
        security: Proof,
        /// The names of the offered fabrics, best first.
        fabrics: Vec<&'static str>,
        /// The RDMA device, if one is offered.
        device: Option<String>,
    },
    /// Something works, but the user should know about it.
    #[non_exhaustive]
    Warning {
        /// What it is.
        message: String,
    },
    /// An offer ended before the first file: this receiver or another one declined it, or the sender withdrew it.
    #[non_exhaustive]
    Declined {
        /// The sender's address, if it is known.
        from: Option<String>,
        /// Why.
        reason: String,
    },
    /// A transfer begins: all have agreed to the list of files.
    #[non_exhaustive]
    Started {
        /// Which way it goes.
        direction: Direction,
        /// The receivers' addresses, or the sender's if it is known.
        peers: Vec<String>,
        /// How many receivers take part.
        receivers: usize,
        /// How many files travel.
        files: u64,
        /// The sum of their sizes.
        bytes: u64,
        /// What moves the bytes. Its fields stand among those of the event.
        #[serde(flatten)]
        over: FabricInUse,
        /// How the blocks travel. Its fields stand among those of the event.
        #[serde(flatten)]
        how: PlanInUse,
    },
    /// How far a transfer is; comes about every 100 ms.
    #[non_exhaustive]
    Progress {
        /// Bytes that were sent or received.
        bytes: u64,
        /// Bytes of all files.
        total: u64,
        /// Whether everything was sent or received, and is only confirmed. It is not part of the JSON.
        #[serde(skip)]
        confirming: bool,
    },
    /// A file was sent, or is complete and in its place.
    #[non_exhaustive]
    File {
        /// Its path below the destination; control characters are escaped.
        path: String,
        /// Its size.
        bytes: u64,
    },
    /// Something cannot be sent: a symbolic link, a device or a socket.
    #[non_exhaustive]
    Skipped {
        /// Where it is; control characters are escaped.
        path: String,
    },
    /// Peers have failed, and the others go on.
    #[non_exhaustive]
    GoingOn {
        /// Those that failed.
        failed: Vec<FailedPeer>,
        /// How many receivers are left.
        receivers: usize,
    },
    /// A transfer is done: every receiver that is left has everything.
    #[non_exhaustive]
    Done {
        /// How many receivers are left.
        receivers: usize,
        /// How many files there are.
        files: u64,
        /// The sum of their sizes.
        bytes: u64,
        /// How many things could not be sent; 0 at receivers.
        skipped: usize,
        /// How long it took since it began.
        seconds: f64,
        /// At a receiver, the bytes that have arrived, digests included: fewer than `bytes` if it had parts already.
        #[serde(skip_serializing_if = "Option::is_none")]
        received: Option<u64>,
    },
    /// A transfer to this receiver failed. A sender fails with the outcome of its stream instead.
    Failed(TransferError),
}

/// An event at a receiver, and the transfer that it belongs to.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReceiverEvent {
    /// The transfer; `None` if the event belongs to the receiver itself.
    pub session: Option<SessionNumber>,
    /// What happened.
    pub event: Event,
}

/// A number that a receiver gives to each invitation, in their order from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionNumber(pub u64);

/// Which way a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From this host.
    Sending,
    /// To this host.
    Receiving,
}

/// What a sender must have to be let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proof {
    /// Nothing: everybody is let in.
    None,
    /// The shared key.
    Key,
    /// A certificate of the authority.
    Certificate,
}

/// How the blocks of a transfer travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanInUse {
    /// The name of the algorithm.
    pub algorithm: String,
    /// The size of a block in bytes.
    pub block_size: u32,
}

impl From<&WirePlan> for PlanInUse {
    fn from(plan: &WirePlan) -> Self {
        Self { algorithm: plan.algorithm.to_string(), block_size: plan.block_size }
    }
}

/// Where events go: to the stream that drives the work.
///
/// The queue has no bound of its own. The stream empties it before it lets the work go on, so that it holds what one step says.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::UnboundedSender<ReceiverEvent>,
    session: Option<SessionNumber>,
}

impl Events {
    /// Makes one, and where its events come out.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<ReceiverEvent>) {
        let (queue, events) = mpsc::unbounded_channel();
        (Self { queue, session: None }, events)
    }

    /// Makes one for the events of a session.
    pub(crate) fn of(&self, session: SessionNumber) -> Self {
        Self { queue: self.queue.clone(), session: Some(session) }
    }

    /// Says what happened.
    pub(crate) fn say(&self, event: Event) {
        // Fails only while the stream is dropped, which wants no more.
        let _ = self.queue.send(ReceiverEvent { session: self.session, event });
    }

    /// Starts to tell how far a transfer of `total` bytes is.
    pub(crate) fn progress(&self, total: u64) -> Progress {
        Progress { events: self.clone(), total, confirming: AtomicBool::new(false) }
    }
}

/// Tells how far a transfer is.
#[derive(Debug)]
pub(crate) struct Progress {
    events: Events,
    total: u64,
    confirming: AtomicBool,
}

impl Progress {
    /// Says that `bytes` of the total are done.
    pub(crate) fn set(&self, bytes: u64) {
        let confirming = self.confirming.load(Ordering::Relaxed);
        self.events.say(Event::Progress { bytes: bytes.min(self.total), total: self.total, confirming });
    }

    /// Notes that what follows only confirms.
    pub(crate) fn confirms(&self) {
        self.confirming.store(true, Ordering::Relaxed);
    }
}

/// How often [`Progress::set`] is worth calling.
pub(crate) const TICK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
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
            over: FabricInUse { fabric: "tcp".into(), reason: "asked for".into() },
            how: PlanInUse { algorithm: "chain".into(), block_size: 4 },
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
                r#"{"event":"listening","address":"127.0.0.1:7471","dir":"/in","loopback_only":true,"security":"key","fabrics":["verbs","tcp"],"device":"rxe0"}"#,
            ),
            (Event::Warning { message: "open".into() }, r#"{"event":"warning","message":"open"}"#),
            (
                Event::Declined { from: None, reason: "full".into() },
                r#"{"event":"declined","from":null,"reason":"full"}"#,
            ),
            (
                started,
                r#"{"event":"started","direction":"sending","peers":["h:1"],"receivers":1,"files":2,"bytes":3,"fabric":"tcp","fabric_reason":"asked for","algorithm":"chain","block_size":4}"#,
            ),
            (Event::Progress { bytes: 1, total: 3, confirming: true }, r#"{"event":"progress","bytes":1,"total":3}"#),
            (Event::File { path: "a/b".into(), bytes: 3 }, r#"{"event":"file","path":"a/b","bytes":3}"#),
            (Event::Skipped { path: "link".into() }, r#"{"event":"skipped","path":"link"}"#),
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
