//! Receipts: what has become of a message at all members.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use rdmc_schedule::Rank;
use tokio::sync::oneshot;

use super::Group;
use super::error::GroupFailure;
use crate::id::NodeId;
use crate::sync::lock;

/// Answers for a message that was sent: whether all members have it, and whether their applications have stored it.
///
/// [`Sender::send`](crate::Sender::send) returns it. It may be dropped, or awaited at any time and any number of times,
/// also by other tasks. Like a handle it keeps the group's resources, also after the end of the group.
///
/// # Examples
/// ```
/// # use futures::StreamExt;
/// # use rdmc::{Cluster, GroupSpec, MemNetwork, Node, NodeId};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let network = MemNetwork::new();
/// # let cluster = Cluster::new([(0, "a"), (1, "b")]);
/// # let node = |id| Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric()).start();
/// # let (a, b) = futures::try_join!(node(0), node(1))?;
/// # let spec = GroupSpec::new(1, cluster.nodes());
/// # let (root, mut at_b) = futures::try_join!(a.create_group(spec.clone()), b.join_group(spec))?;
/// let storing = async {
///     let message = at_b.next().await.expect("a message")?;
///     // Write it to disk here.
///     message.stored();
///     Ok::<_, rdmc::GroupFailure>(())
/// };
/// let sending = async {
///     let receipt = root.send("an object").await?;
///     receipt.stored().await?; // now it is on all disks
///     Ok::<_, Box<dyn std::error::Error>>(())
/// };
/// let (stored, sent) = futures::join!(storing, sending);
/// # stored?;
/// # sent?;
/// # Ok(())
/// # }
/// ```
pub struct Receipt {
    group: Arc<Group>,
    slip: ReceiptSlip,
}

impl Receipt {
    pub(super) fn new(group: Arc<Group>, slip: ReceiptSlip) -> Self {
        Self { group, slip }
    }

    /// Returns the message's place in the group's order, from 0.
    pub fn number(&self) -> u64 {
        self.slip.number
    }

    /// Waits until every member has the message, so that its application can take it.
    ///
    /// The first time that a receipt is awaited, the members are asked to tell the root at once what they have. It takes
    /// a round trip. Later receipts only take the way back.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// [`ReceiptError::Failed`] if the group failed before that was known.
    pub async fn delivered(&self) -> Result<(), ReceiptError> {
        let (status, number) = (&self.group.status, self.number());
        status.ask(number);
        futures::select_biased! {
            () = status.stable().reaches(number + 1).fuse() => Ok(()),
            ended = std::pin::pin!(self.group.end.ended().fuse()) => match ended {
                Ok(_) => Ok(()),
                Err(_) if status.stable().get() > number => Ok(()),
                Err(failure) => {
                    let has = |rank: &Rank| {
                        failure.certificate.has(*rank, number) == Some(true)
                            || status.table.row(*rank).received > number
                    };
                    let nodes = self.nodes(self.ranks().filter(has));
                    Err(ReceiptError::Failed { failure, nodes })
                }
            },
        }
    }

    /// Waits until the application of every receiver has called [`Message::stored`](crate::Message::stored).
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// [`ReceiptError::NotStored`] if applications let the message go, or closed the group, without saying that it is
    /// stored. [`ReceiptError::Failed`] if the group failed before that was known. [`ReceiptError::Unknown`] if it was
    /// closed, but what a member said of the message was lost on the way.
    pub async fn stored(&self) -> Result<(), ReceiptError> {
        let (status, number) = (&self.group.status, self.number());
        status.ask(number);
        let ended = futures::select_biased! {
            () = status.settled.reaches(number + 1).fuse() => None,
            ended = std::pin::pin!(self.group.end.ended().fuse()) => Some(ended),
        };
        let (not_stored, unsettled) = (self.slip.let_go_by(), status.unsettled(number));
        match ended {
            Some(Err(failure)) if !unsettled.is_empty() => {
                let stored = |rank: &Rank| !rank.is_root() && !unsettled.contains(rank) && !not_stored.contains(rank);
                let nodes = self.nodes(self.ranks().filter(stored));
                Err(ReceiptError::Failed { failure, nodes })
            }
            _ if !not_stored.is_empty() => Err(ReceiptError::NotStored { nodes: self.nodes(not_stored) }),
            _ if !unsettled.is_empty() => Err(ReceiptError::Unknown { nodes: self.nodes(unsettled) }),
            _ => Ok(()),
        }
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..).map(Rank).take(self.group.membership.members.len())
    }

    fn nodes(&self, ranks: impl IntoIterator<Item = Rank>) -> Vec<NodeId> {
        ranks.into_iter().map(|rank| self.group.membership.members[rank.index()]).collect()
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receipt").field("number", &self.number()).finish_non_exhaustive()
    }
}

/// What was awaited of a message has not come about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiptError {
    /// The group failed before it was known of all members.
    #[error("{failure}; of the message it is known at {} members", nodes.len())]
    Failed {
        /// The group's failure.
        #[source]
        failure: GroupFailure,
        /// The members of which it is known: those that have the message, or receivers that have stored it, whichever
        /// was awaited. Others may as well.
        nodes: Vec<NodeId>,
    },
    /// The group was closed, but the root did not hear whether these members have stored the message, because a
    /// connection broke at the very end.
    #[error("the group is closed, but what {} said of the message was lost", list(nodes))]
    Unknown {
        /// These members.
        nodes: Vec<NodeId>,
    },
    /// Some members let the message go, or closed the group, without saying that it is stored.
    #[error("{} did not say that the message is stored", list(nodes))]
    NotStored {
        /// These members.
        nodes: Vec<NodeId>,
    },
}

fn list(nodes: &[NodeId]) -> String {
    let nodes: Vec<String> = nodes.iter().map(|node| format!("node {node}")).collect();
    nodes.join(", ")
}

/// The receipts that the root's application holds, or may get, and who has let their messages go.
#[derive(Debug, Default)]
pub(super) struct ReceiptBook(Mutex<BTreeMap<u64, Vec<Rank>>>);

impl ReceiptBook {
    /// Begins a receipt.
    pub(super) fn slip(self: &Arc<Self>, number: u64) -> ReceiptSlip {
        lock(&self.0).insert(number, Vec::new());
        ReceiptSlip { book: self.clone(), number }
    }

    pub(super) fn note_let_go(&self, by: Rank, messages: Range<u64>) {
        lock(&self.0).range_mut(messages).for_each(|(_, let_go)| let_go.push(by));
    }
}

/// A receipt in the book.
#[derive(Debug)]
pub(super) struct ReceiptSlip {
    book: Arc<ReceiptBook>,
    number: u64,
}

impl ReceiptSlip {
    fn let_go_by(&self) -> Vec<Rank> {
        lock(&self.book.0).get(&self.number).cloned().unwrap_or_default()
    }
}

impl Drop for ReceiptSlip {
    fn drop(&mut self) {
        lock(&self.book.0).remove(&self.number);
    }
}

/// The receipt of a message that has begun. The application gets it when the message is sent, or when this is dropped
/// because the group has ended.
pub(super) struct PendingReceipt(Option<(oneshot::Sender<SentMessage>, ReceiptSlip)>);

/// What a request to send has led to.
pub(super) struct SentMessage {
    pub(super) slip: ReceiptSlip,
    /// The root sends nothing more of it.
    pub(super) is_complete: bool,
}

impl PendingReceipt {
    pub(super) fn new(done: oneshot::Sender<SentMessage>, slip: ReceiptSlip) -> Self {
        Self(Some((done, slip)))
    }

    /// Gives the receipt to the application.
    pub(super) fn hand_over(&mut self, is_complete: bool) {
        if let Some((done, slip)) = self.0.take() {
            // Fails only if the application no longer waits.
            let _ = done.send(SentMessage { slip, is_complete });
        }
    }
}

impl Drop for PendingReceipt {
    fn drop(&mut self) {
        self.hand_over(false);
    }
}
