//! Many short messages in one multicast, which costs little more than one of them.

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
use crate::group::error::{GroupFailure, SendError};
use crate::group::offer::Message;
use crate::group::receiver::Receiver;
use crate::group::sender::{Multicast, Sender};

/// Packs small messages at the root of a group: a [`Sink`] of messages that leave together, in batches.
///
/// Throughput then exceeds a million messages per second. Without it, a multicast of one byte takes as long as waking
/// every member. The sender collects messages while two batches are in flight, and sends them as one message of the
/// group. Every member unpacks them with a [`BatchReceiver`]. A batch leaves when it is flushed, or when more is fed
/// after it holds [64 KiB](Self::batch_bytes).
///
/// A batch is one message of the group's [certificate](crate::Certificate), statistics and recovery. It arrives whole
/// or not at all. A batch takes at least one block, so blocks should not be much longer than batches
/// ([`GroupSpec::block_size`](crate::GroupSpec::block_size)). Long messages are allowed, but each is copied once; for a
/// group of long messages use its [`Sender`].
///
/// # Cancel safety
/// Messages that were fed stay. If a flush is dropped, the next flush resumes it. Dropping the sender loses the
/// messages that it has collected. Batches in flight are sent, unless dropping the [`Sender`] abandons the group.
///
/// # Errors
/// Those of [`Sender::send`]. Messages that have not left stay collected: send them again, or [take them
/// back](Self::into_parts). If the group failed, [recovering](GroupFailure::recover) it completes the batches that were
/// in flight.
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
    /// Packs messages for a group; the handle may be owned, borrowed or shared.
    pub fn new(sender: S) -> Self {
        Self { sender, collected: Vec::new(), batch_bytes: BATCH_BYTES, leaving: VecDeque::new() }
    }

    /// Sets the length in bytes at which a batch leaves; default 64 KiB.
    ///
    /// Each message counts with 1 to 10 bytes for its length. A batch is longer by the rest of its last message. Every
    /// member must have that much memory in its pool ([`pool_bytes_max`](crate::NodeBuilder::pool_bytes_max)).
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
        // By now it is known which batches the group did not take.
        let mut cx = Context::from_waker(Waker::noop());
        while !self.leaving.is_empty() && self.poll_leaving(&mut cx, 0).is_ready() {}
        (self.sender, unpack_all(self.collected.into()))
    }

    /// Sends the collected messages as a batch: it gets its place in the group's order.
    fn depart(&mut self, cx: &mut Context<'_>) -> Result<(), SendError> {
        let batch = Bytes::from(std::mem::take(&mut self.collected));
        let multicast = self.sender.borrow().enqueue(batch.clone());
        self.leaving.push_back(PendingBatch { batch, multicast });
        // An error that is there at once is returned at once. A batch that is not done is polled by the task that
        // waits.
        let last = self.leaving.len() - 1;
        match self.leaving[last].multicast.poll_unpin(cx) {
            Poll::Ready(sent) => self.settle(last, sent.map(drop)),
            Poll::Pending => Ok(()),
        }
    }

    /// Waits until at most `most` batches are in flight.
    fn poll_leaving(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Result<(), SendError>> {
        while self.leaving.len() > most {
            let sent = ready!(self.leaving[0].multicast.poll_unpin(cx));
            self.settle(0, sent.map(drop))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Removes a batch that has left. If the group did not take it, it is collected again with all that follow it.
    fn settle(&mut self, at: usize, sent: Result<(), SendError>) -> Result<(), SendError> {
        let stays = matches!(&sent, Err(error) if !matches!(error, SendError::Failed(_)));
        if stays {
            // If the group did not take this one, it did not take the later ones either.
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
    /// Flushes, and closes the group: `Ok` if and only if every message reached every member and every member agrees.
    ///
    /// # Cancel safety
    /// If the future is dropped before all batches have left, the group is abandoned. Later, it is closed all the same.
    ///
    /// # Errors
    /// [`SendError::Failed`] if the group failed before every member had every message; its certificate says what
    /// arrived. Messages that have not left then are lost, so flush first to keep them. With the other errors of
    /// [`Sender::send`] the group is abandoned.
    pub async fn close(mut self) -> Result<Certificate, SendError> {
        match self.flush().await {
            // The group's own failure says more.
            Ok(()) | Err(SendError::Failed(_) | SendError::NotQueued(_) | SendError::Closed) => {}
            Err(error) => return Err(error),
        }
        Ok(self.sender.close().await?)
    }
}

/// Each item is a message. The group's handle says more about a failure.
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

/// Unpacks the batches of a [`BatchSender`]: a stream of its short messages, in their order.
///
/// Messages are parts of their batch, not copies. One of them keeps the memory of the whole batch, and at least a
/// block. Copy those that you keep for long. The stream ends as that of the [`Receiver`]. After a message that is not a
/// batch it goes on with the next one.
///
/// # Cancel safety
/// No message is lost.
pub struct BatchReceiver<R = Receiver> {
    receiver: R,
    /// The rest of the last batch.
    rest: Bytes,
    /// Its number.
    batch: u64,
}

/// A batch could not be unpacked.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The group failed.
    #[error(transparent)]
    Group(#[from] GroupFailure),
    /// A message of the group is not a batch: its root must send with a [`BatchSender`] alone.
    #[error("message {number} of the group is not a batch: its root must send with a BatchSender alone")]
    NoBatch {
        /// Its number in the group's order.
        number: u64,
    },
}

impl<R> BatchReceiver<R> {
    /// Unpacks the messages of a [`Receiver`], which may be owned or borrowed.
    pub fn new(receiver: R) -> Self {
        Self { receiver, rest: Bytes::new(), batch: 0 }
    }

    /// Returns the receiver.
    pub fn receiver(&self) -> &R {
        &self.receiver
    }

    /// Returns the receiver, and the messages of the last batch that were not taken.
    pub fn into_parts(self) -> (R, Vec<Bytes>) {
        (self.receiver, unpack_all(self.rest))
    }
}

impl BatchReceiver {
    /// Closes the group as [`Receiver::close`] does; drops messages that were not taken.
    ///
    /// # Cancel safety
    /// As of [`Receiver::close`].
    ///
    /// # Errors
    /// As of [`Receiver::close`].
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

/// Writes a message's length, seven bits to a byte and the lowest first, and its bytes.
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

/// Takes the first message of a batch; returns `None` if the batch does not begin with one.
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

/// Takes the messages of a batch, up to bytes that are not a message.
fn unpack_all(mut batch: Bytes) -> Vec<Bytes> {
    std::iter::from_fn(|| unpack(&mut batch)).collect()
}

/// Default length of a batch in bytes: short enough for one block, and to be collected while the one before it is sent.
const BATCH_BYTES: usize = 64 << 10;
/// Batches in flight at once: one that the members receive, and one behind it.
const LEAVING_MAX: usize = 2;
/// Most bytes of a length.
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
