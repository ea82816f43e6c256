//! Short messages, many in one: what a multicast costs besides its bytes is paid once for all of them.

use std::borrow::Borrow;
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes};
use futures::future::FutureExt;
use futures::sink::{Sink, SinkExt};
use futures::stream::{Stream, StreamExt};
use thiserror::Error;

use crate::certificate::Certificate;
use crate::failure::{GroupFailure, SendError};
use crate::group::receiver::{Message, Receiver};
use crate::group::sender::{Multicast, Sender};

/// The root's handle of a group for short messages: a [`Sink`] that packs what is fed to it into multicasts.
///
/// A multicast of one byte takes as long as it takes to wake every member; of messages by the thousand that is nearly all they
/// cost. Here those that wait are sent together, as one message of the group, and every member takes them apart with a
/// [`BatchReceiver`]. What is fed leaves when it is flushed, or when more is fed after [64 KiB](Self::batch_bytes) have come
/// together; while two batches are under way, the next one is collected.
///
/// The group counts batches: they are the messages of its [certificate](crate::Certificate), its statistics and its recovery, and
/// arrive whole or not at all. Each comes to its receivers in a block of its own at least, so blocks should not be much longer than
/// batches ([`GroupSpec::block_size`](crate::GroupSpec::block_size)). Long messages may be among the short ones, but are copied once; a
/// group for long ones is better off with its [`Sender`].
///
/// # Errors
/// Those of [`Sender::send`]. What has not left then is collected still: it can be sent again, or [taken back](Self::into_parts).
/// What was under way when the group failed is completed if the group is [recovered](GroupFailure::recover).
///
/// # Cancel safety
/// What was fed stays. A flush that is dropped is gone on with by the next one. Dropped, what is collected is lost; batches under way
/// are sent all the same, unless the group is abandoned because the [`Sender`] goes with it.
///
/// # Examples
/// ```
/// use bytes::Bytes;
/// use futures::{SinkExt, StreamExt};
/// use rdmc::{BatchReceiver, BatchSender, Cluster, GroupSpec, MemNetwork, Node, NodeId};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let network = MemNetwork::new();
/// # let cluster = Cluster::new([(0, "a"), (1, "b")]);
/// # let node = |id| Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric()).start();
/// # let (a, b) = futures::try_join!(node(0), node(1))?;
/// # let spec = GroupSpec::new(1, cluster.nodes());
/// # let (root, member) = futures::try_join!(a.create_group(spec.clone()), b.join_group(spec))?;
/// let mut root = BatchSender::new(root);
/// let mut member = BatchReceiver::new(member);
/// let sent = async {
///     for number in 0..1000u32 {
///         root.feed(Bytes::copy_from_slice(&number.to_le_bytes())).await?;
///     }
///     root.close().await.map_err(Box::<dyn std::error::Error>::from)
/// };
/// let received = async {
///     let mut numbers = 0;
///     while let Some(message) = member.next().await {
///         assert_eq!(message?[..], u32::to_le_bytes(numbers));
///         numbers += 1;
///     }
///     assert_eq!(numbers, 1000);
///     Ok(member.close().await?)
/// };
/// futures::try_join!(sent, received)?;
/// # Ok(())
/// # }
/// ```
pub struct BatchSender<S = Sender> {
    sender: S,
    collected: Vec<u8>,
    batch_bytes: usize,
    /// Batches that have their place in the group's order.
    leaving: VecDeque<PendingBatch>,
}

struct PendingBatch {
    batch: Bytes,
    multicast: Multicast,
}

impl<S: Borrow<Sender>> BatchSender<S> {
    /// Packs messages for a group, whose handle may be owned, borrowed or shared.
    pub fn new(sender: S) -> Self {
        Self { sender, collected: Vec::new(), batch_bytes: BATCH_BYTES, leaving: VecDeque::new() }
    }

    /// Has a batch leave when so many bytes have come together, with what each message takes besides (1 to 10 bytes for its length);
    /// default 64 KiB. It is longer by the rest of its last message. Every member must have that much memory in its pool
    /// ([`pool_bytes_max`](crate::NodeBuilder::pool_bytes_max)).
    #[must_use]
    pub fn batch_bytes(self, bytes: usize) -> Self {
        Self { batch_bytes: bytes, ..self }
    }

    /// Returns the group's handle.
    pub fn sender(&self) -> &Sender {
        self.sender.borrow()
    }

    /// Returns the group's handle, and the messages that have not left.
    pub fn into_parts(mut self) -> (S, Vec<Bytes>) {
        // Of what the group did not take any more it is known by now.
        let mut cx = Context::from_waker(Waker::noop());
        while !self.leaving.is_empty() && self.poll_leaving(&mut cx, 0).is_ready() {}
        (self.sender, unpack_all(self.collected.into()))
    }

    /// Gives what was collected its place in the group's order.
    fn depart(&mut self, cx: &mut Context<'_>) -> Result<(), SendError> {
        let batch = Bytes::from(std::mem::take(&mut self.collected));
        let multicast = self.sender.borrow().send_at_once(batch.clone());
        self.leaving.push_back(PendingBatch { batch, multicast });
        // An error that is there at once is told at once. A first one that is not yet done is looked at by whoever waits for it.
        let last = self.leaving.len() - 1;
        match self.leaving[last].multicast.poll_unpin(cx) {
            Poll::Ready(sent) => self.settle(last, sent),
            Poll::Pending => Ok(()),
        }
    }

    /// Waits until no more than so many batches are under way.
    fn poll_leaving(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Result<(), SendError>> {
        while self.leaving.len() > most {
            let sent = ready!(self.leaving[0].multicast.poll_unpin(cx));
            self.settle(0, sent)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Lets go of a batch that has left; what the group did not take is collected again, with all behind it.
    fn settle(&mut self, at: usize, sent: Result<(), SendError>) -> Result<(), SendError> {
        let stays = matches!(&sent, Err(error) if !matches!(error, SendError::Failed(_)));
        if stays {
            // If the group took none of this one, it took none of the later ones either.
            let mut all: Vec<u8> = self.leaving.drain(at..).flat_map(|leaving| leaving.batch).collect();
            all.append(&mut self.collected);
            self.collected = all;
        } else {
            self.leaving.remove(at);
        }
        sent
    }
}

impl BatchSender {
    /// Flushes, and closes the group: `Ok` if and only if every message reached every member and every member agrees to the end.
    ///
    /// # Cancel safety
    /// Dropped before everything has left, the group is abandoned; later, it is closed all the same.
    ///
    /// # Errors
    /// [`SendError::Failed`] if the group failed before everybody had everything, with what did and did not arrive; what has not left
    /// then is lost, so flush first if it is to be kept. The others of [`Sender::send`], with which the group is abandoned.
    pub async fn close(mut self) -> Result<Certificate, SendError> {
        match self.flush().await {
            // Of a failure the group tells more.
            Ok(()) | Err(SendError::Failed(_) | SendError::NotQueued(_) | SendError::Closed) => {}
            Err(error) => return Err(error),
        }
        Ok(self.sender.close().await?)
    }
}

/// What is fed is a message each. Of a failure the group's handle tells more.
impl<S: Borrow<Sender> + Unpin> Sink<Bytes> for BatchSender<S> {
    type Error = SendError;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        if !self.collected.is_empty() && self.collected.len() >= self.batch_bytes {
            ready!(self.poll_leaving(cx, LEAVING_MAX - 1))?;
            self.depart(cx)?;
        }
        Poll::Ready(Ok(()))
    }

    fn start_send(mut self: Pin<&mut Self>, message: Bytes) -> Result<(), SendError> {
        if self.collected.capacity() == 0 {
            let room = self.batch_bytes.min(BATCH_BYTES).saturating_add(message.len() + LENGTH_MAX);
            self.collected.reserve(room);
        }
        pack(&mut self.collected, &message);
        Ok(())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        if !self.collected.is_empty() {
            ready!(self.poll_leaving(cx, LEAVING_MAX - 1))?;
            self.depart(cx)?;
        }
        self.poll_leaving(cx, 0)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        self.poll_flush(cx)
    }
}

impl<S> fmt::Debug for BatchSender<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (collected, leaving) = (self.collected.len(), self.leaving.len());
        f.debug_struct("BatchSender").field("collected", &collected).field("leaving", &leaving).finish_non_exhaustive()
    }
}

/// A member's handle of a group whose root sends with a [`BatchSender`]: a stream of its short messages, in their order.
///
/// They are parts of the batch that they came in, not copies: its memory is kept as long as one of them is, a whole block for a batch of
/// one block. What is to be kept for long is better copied. The stream ends as that of the [`Receiver`]; after a message that is no batch it
/// goes on with the next one.
///
/// # Cancel safety
/// No message is lost.
pub struct BatchReceiver<R = Receiver> {
    receiver: R,
    /// What has not been taken of the last batch.
    rest: Bytes,
    /// Its number.
    batch: u64,
}

/// Why a batch is not taken apart.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The group has failed.
    #[error(transparent)]
    Group(#[from] GroupFailure),
    /// A message of the group is no batch. Its root has to send with a [`BatchSender`], and with nothing else.
    #[error("message {number} of the group is no batch; its root has to send with a BatchSender alone")]
    NoBatch {
        /// Its number in the group's order.
        number: u64,
    },
}

impl<R> BatchReceiver<R> {
    /// Takes apart what a [`Receiver`] brings, which may be owned or borrowed.
    pub fn new(receiver: R) -> Self {
        Self { receiver, rest: Bytes::new(), batch: 0 }
    }

    /// Returns what it takes apart.
    pub fn receiver(&self) -> &R {
        &self.receiver
    }

    /// Returns what it takes apart, and the messages that have not been taken of the last batch.
    pub fn into_parts(self) -> (R, Vec<Bytes>) {
        (self.receiver, unpack_all(self.rest))
    }
}

impl BatchReceiver {
    /// Does as [`Receiver::close`]: agrees to the end of the group; messages not yet taken are dropped.
    ///
    /// # Cancel safety
    /// The same.
    ///
    /// # Errors
    /// The same.
    pub async fn close(self) -> Result<Certificate, GroupFailure> {
        self.receiver.close().await
    }
}

impl<R> Stream for BatchReceiver<R>
where
    R: Stream<Item = Result<Message, GroupFailure>> + Unpin,
{
    type Item = Result<Bytes, BatchError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if !self.rest.is_empty() {
                let Some(message) = unpack(&mut self.rest) else {
                    self.rest = Bytes::new();
                    return Poll::Ready(Some(Err(BatchError::NoBatch { number: self.batch })));
                };
                return Poll::Ready(Some(Ok(message)));
            }
            match ready!(self.receiver.poll_next_unpin(cx)) {
                // A batch holds a message at least.
                Some(Ok(batch)) if batch.is_empty() => {
                    return Poll::Ready(Some(Err(BatchError::NoBatch { number: batch.number() })));
                }
                Some(Ok(batch)) => {
                    self.batch = batch.number();
                    self.rest = batch.into_bytes();
                }
                Some(Err(failure)) => return Poll::Ready(Some(Err(failure.into()))),
                None => return Poll::Ready(None),
            }
        }
    }
}

impl<R> fmt::Debug for BatchReceiver<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchReceiver").field("rest", &self.rest.len()).finish_non_exhaustive()
    }
}

/// Writes a message's length, seven bits in a byte and the lowest first, and its bytes.
fn pack(batch: &mut Vec<u8>, message: &[u8]) {
    let mut left = message.len();
    loop {
        let [bits, ..] = left.to_le_bytes();
        left >>= 7;
        if left == 0 {
            batch.push(bits);
            break;
        }
        batch.push(bits | 0x80);
    }
    batch.extend_from_slice(message);
}

/// Takes the first message of a batch; none if there is none.
fn unpack(batch: &mut Bytes) -> Option<Bytes> {
    let mut len = 0usize;
    for (place, byte) in batch.iter().enumerate().take(LENGTH_MAX) {
        let bits = usize::from(byte & 0x7f);
        let shifted =
            bits.checked_shl(7 * u32::try_from(place).ok()?).filter(|shifted| shifted >> (7 * place) == bits)?;
        len |= shifted;
        if byte & 0x80 == 0 {
            let end = (place + 1).checked_add(len).filter(|&end| end <= batch.len())?;
            let mut message = batch.split_to(end);
            message.advance(place + 1);
            return Some(message);
        }
    }
    None
}

/// Takes the messages of a batch, up to what is none.
fn unpack_all(mut batch: Bytes) -> Vec<Bytes> {
    std::iter::from_fn(|| unpack(&mut batch)).collect()
}

/// Bytes that are collected for a batch by default: few enough to be one block, and to come while the one before is under way.
const BATCH_BYTES: usize = 64 << 10;
/// Batches under way at once: one that the members have, and one behind it.
const LEAVING_MAX: usize = 2;
/// Bytes of a length, at most.
const LENGTH_MAX: usize = 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unpacked(mut batch: Bytes) -> Option<Vec<Bytes>> {
        let mut messages = Vec::new();
        while !batch.is_empty() {
            messages.push(unpack(&mut batch)?);
        }
        Some(messages)
    }

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked(lengths in proptest::collection::vec(0usize..300, 0..50)) {
            let messages: Vec<Vec<u8>> = lengths.iter().map(|len| vec![len.to_le_bytes()[0]; *len]).collect();
            let mut batch = Vec::new();
            messages.iter().for_each(|message| pack(&mut batch, message));
            prop_assert_eq!(unpacked(batch.into()).unwrap(), messages);
        }

        #[test]
        fn of_any_bytes_no_more_is_taken_than_there_are(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let len = bytes.len();
            if let Some(messages) = unpacked(bytes.into()) {
                prop_assert!(messages.iter().map(|message| message.len() + 1).sum::<usize>() <= len);
            }
        }
    }

    #[test]
    fn lengths_that_cannot_be_are_none() {
        for bytes in [
            &[5, 1, 2][..],
            &[0x80],
            &[0xff; 9],
            &[0xff; 10],
            &[0xff; 11],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        ] {
            assert_eq!(unpack(&mut Bytes::copy_from_slice(bytes)), None, "{bytes:?}");
        }
    }
}
