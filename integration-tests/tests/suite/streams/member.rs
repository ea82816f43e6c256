//! A member of a group in a process of its own, which records what it sees.

use std::collections::VecDeque;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesOrdered, FuturesUnordered};
use rdmc::{
    Cluster, Delivery, Fabric, GroupError, GroupFailure, GroupSpec, Message, Node, NodeId, Receipt, ReceiptError,
    Receiver, RecoveryError, SendError, Sender, ShmFabric, Shutdown, TcpFabric,
};
use serde::{Deserialize, Serialize};

use super::record::{Failure, Note, Record, StoredAt, numbers};
use crate::cluster::pattern;
use crate::fleet::Draw;

/// Variable that makes the test below the process of a member; its value is a [`Part`].
pub(super) const MEMBER: &str = "RDMC_TEST_STREAM_MEMBER";
/// The test below.
pub(super) const TEST: &str = "streams::member::a_member_in_a_process_of_its_own";

/// The part of one process in a round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) addresses: Vec<String>,
    pub(super) rank: u32,
    pub(super) record: PathBuf,
    pub(super) stream: Stream,
}

/// What all processes of a round agree on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Stream {
    pub(super) seed: u64,
    pub(super) shm: bool,
    pub(super) stable: bool,
    /// Whether survivors of a failure go on.
    pub(super) recovers: bool,
    pub(super) slots: u32,
    /// Bytes of a slot.
    pub(super) bytes: u32,
    /// One message of so many is long.
    pub(super) long_each: u64,
    pub(super) sends_ahead: usize,
    /// Messages that a receiver keeps before it stores the oldest.
    pub(super) keeps: usize,
}

impl Stream {
    /// Returns a message: most fit into a slot.
    fn content(&self, number: u64) -> Vec<u8> {
        let mut draw = Draw(self.seed ^ number.rotate_left(32));
        let bound = if draw.below(self.long_each) == 0 { LONG_MAX } else { u64::from(self.bytes) + 1 };
        let len = usize::try_from(draw.below(bound)).expect("it is short");
        pattern(len, self.seed ^ number)
    }

    fn spec(&self, cluster: &Cluster) -> GroupSpec {
        let delivery = if self.stable { Delivery::Stable } else { Delivery::Immediate };
        let spec = GroupSpec::new(1, cluster.nodes()).block_size(BLOCK).delivery(delivery);
        spec.ring(self.slots, self.bytes).formation_limit(FORMATION_LIMIT)
    }
}

/// As a test it does nothing. In its own process it is a member of a group.
#[test]
fn a_member_in_a_process_of_its_own() {
    let Ok(part) = std::env::var(MEMBER) else { return };
    let part: Part = serde_json::from_str(&part).expect("the test has written it");
    let closing = Arc::new(AtomicBool::new(false));
    std::thread::spawn({
        let closing = closing.clone();
        move || {
            // A byte asks the root to close the group. The end of the pipe is that of the process that started this.
            while std::io::stdin().read(&mut [0]).is_ok_and(|read| read > 0) {
                closing.store(true, Ordering::Release);
            }
            std::process::exit(1);
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("there are threads").block_on(async {
        let cluster = Cluster::new((0u32..).zip(part.addresses.iter().cloned())).key(part.stream.seed.into());
        let fabric: Arc<dyn Fabric> =
            if part.stream.shm { ShmFabric::new().expect("processes share memory here") } else { TcpFabric::new() };
        let node = Node::builder(NodeId(part.rank), cluster.clone()).fabric(fabric);
        let node = node.connect_limit(CONNECT_LIMIT).start().await.expect("it starts");
        let spec = part.stream.spec(&cluster);
        let member = Member { record: Record::create(&part.record), part, closing };
        match member.part.rank {
            0 => member.send(node.create_group(spec).await.expect("the group forms")).await,
            _ => member.receive(node.join_group(spec).await.expect("the group forms")).await,
        }
        node.shutdown(Shutdown::Drain { limit: DRAIN_LIMIT }).await;
        member.record.note(&Note::Ended);
    });
}

struct Member {
    part: Part,
    record: Record,
    closing: Arc<AtomicBool>,
}

impl Member {
    /// Notes a failure, and recovers from it and those that follow, if the round wants that.
    async fn go_on(&self, mut failure: GroupFailure) -> Option<rdmc::Recovery> {
        loop {
            self.record.note(&Note::Failed(Failure::from(&failure)));
            if !self.part.stream.recovers {
                return None;
            }
            match failure.recover().await {
                Ok(recovery) => {
                    recovery.lost.first().iter().for_each(|lost| self.record.note(&Note::Lost(lost.number)));
                    return Some(recovery);
                }
                Err(RecoveryError::Group(GroupError::Failed(next))) => failure = next,
                Err(other) => {
                    self.record.note(&Note::Excluded(other.to_string()));
                    return None;
                }
            }
        }
    }

    // A receiver.

    async fn receive(&self, mut receiver: Receiver) {
        let mut kept = VecDeque::new();
        loop {
            self.record.note(&Note::Formed(numbers(receiver.members())));
            let failure = loop {
                match receiver.next().await {
                    Some(Ok(message)) => {
                        self.take(message, &mut kept);
                    }
                    Some(Err(failure)) => break failure,
                    None => {
                        kept.drain(..).for_each(|message| self.settle(message));
                        match receiver.close().await {
                            Ok(certificate) => return self.record.note(&Note::closed(&certificate)),
                            Err(failure) => break failure,
                        }
                    }
                }
            };
            let Some(recovery) = self.go_on(failure).await else { return };
            receiver = recovery.into_receiver().expect("only the root gets a sender");
        }
    }

    fn take(&self, message: Message, kept: &mut VecDeque<Message>) {
        let is_right = message[..] == self.part.stream.content(message.number());
        self.record.note(&Note::Got { number: message.number(), is_right });
        kept.push_back(message);
        if kept.len() > self.part.stream.keeps {
            kept.pop_front().into_iter().for_each(|message| self.settle(message));
        }
    }

    /// Stores a message, or lets it go.
    fn settle(&self, message: Message) {
        let number = message.number();
        if number % LETS_GO_EACH == u64::from(self.part.rank) {
            self.record.note(&Note::LetsGo(number));
        } else {
            self.record.note(&Note::Stores(number));
            message.stored();
        }
    }

    // The root.

    async fn send(&self, mut sender: Sender) {
        let mut next = 0;
        loop {
            self.record.note(&Note::Formed(numbers(sender.members())));
            let Err(failure) = self.send_from(&mut next, sender).await else { return };
            let Some(recovery) = self.go_on(failure).await else { return };
            sender = recovery.into_sender().expect("the root goes on as the root");
        }
    }

    /// Sends messages from `next` on until it is asked to close the group. After a failure `next` is the first message
    /// that was not queued.
    async fn send_from(&self, next: &mut u64, sender: Sender) -> Result<(), GroupFailure> {
        let mut sends = FuturesOrdered::new();
        let mut receipts: FuturesUnordered<BoxFuture<'_, ()>> = FuturesUnordered::new();
        let mut failed = None;
        loop {
            let ends = failed.is_some() || self.closing.load(Ordering::Acquire);
            while !ends && sends.len() < self.part.stream.sends_ahead && receipts.len() < RECEIPTS_MAX {
                let number = *next;
                sends.push_back(sender.enqueue(self.part.stream.content(number)).map(move |sent| (number, sent)));
                *next += 1;
            }
            if ends && sends.is_empty() {
                break;
            }
            futures::select_biased! {
                sent = sends.select_next_some() => match sent {
                    (number, Ok(receipt)) => {
                        assert_eq!(receipt.number(), number, "a failure neither skips nor repeats a message");
                        receipts.push(self.await_receipt(receipt).boxed());
                    }
                    (_, Err(SendError::Failed(failure))) => failed = Some(failure),
                    (number, Err(SendError::NotQueued(failure))) => {
                        *next = number.min(*next);
                        failed = Some(failure);
                    }
                    (_, Err(other)) => panic!("{other}"),
                },
                () = receipts.select_next_some() => {}
            }
        }
        // Receivers store the last messages when the group is about to be closed.
        let closed = async {
            match failed {
                Some(failure) => Err(failure),
                None => sender.close().await,
            }
        };
        let (closed, ()) = futures::join!(closed, receipts.collect());
        closed.map(|certificate| self.record.note(&Note::closed(&certificate)))
    }

    /// Awaits one of a receipt's answers, both or none.
    async fn await_receipt(&self, receipt: Receipt) {
        let number = receipt.number();
        let delivered = async {
            let answer = receipt.delivered().await.map_err(|error| match error {
                ReceiptError::Failed { nodes, .. } => numbers(&nodes),
                other => panic!("{other}"),
            });
            self.record.note(&Note::Delivered(number, answer));
        };
        let stored = async {
            let answer = match receipt.stored().await {
                Ok(()) => StoredAt::All,
                Err(ReceiptError::NotStored { nodes }) => StoredAt::NotAt(numbers(&nodes)),
                Err(ReceiptError::Failed { nodes, .. }) => StoredAt::Failed(numbers(&nodes)),
                // A connection broke at the very end.
                Err(_) => StoredAt::Failed(Vec::new()),
            };
            self.record.note(&Note::Stored(number, answer));
        };
        match number % 4 {
            0 => {}
            1 => delivered.await,
            2 => stored.await,
            _ => {
                futures::join!(delivered, stored);
            }
        }
    }
}

const BLOCK: u32 = 16 << 10;
/// Bound of the bytes of a long message.
const LONG_MAX: u64 = 100_000;
/// Receipts that the root awaits at once: more than receivers keep messages.
const RECEIPTS_MAX: usize = 64;
/// Each receiver lets one of so many messages go without storing it.
const LETS_GO_EACH: u64 = 16;
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
const FORMATION_LIMIT: Duration = Duration::from_secs(60);
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
