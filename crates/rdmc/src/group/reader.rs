//! A message that is read while it arrives.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::future::FutureExt;
use rdmc_fabric::Buffer;
use tokio::io::{AsyncRead, ReadBuf};

use super::error::GroupFailure;
use super::offer::{Arrival, Message};

/// Reads a message while it arrives; made by [`Arrival::into_reader`].
///
/// It yields the blocks that are here up to the first one that is missing, each after its check if the group [checks
/// blocks](crate::GroupSpec::check_blocks), and waits for the next. The end comes once the message would be delivered,
/// and not before: bytes that were read belong to a delivered message only from then on. With [stable
/// delivery](crate::Delivery::Stable) no byte comes earlier.
///
/// # Cancel safety
/// Dropping it is like dropping the [`Arrival`]: this member receives and relays the message all the same.
///
/// # Errors
/// If the group fails first, an [`io::Error`] whose source is the [`GroupFailure`]. A group that
/// [continues](GroupFailure::recover) this one offers the message again, from its first byte. It can
/// [stay](crate::Offer::stay) where it is once this reader is dropped, or has returned the error.
///
/// # Examples
/// ```no_run
/// # async fn store(node: rdmc::Node, mut offers: rdmc::OfferReceiver) -> Result<(), Box<dyn std::error::Error>> {
/// while let Some(offer) = offers.next_offer().await {
///     let offer = offer?;
///     let memory = node.allocate(offer.size() as usize).await?;
///     let mut reader = offer.accept(memory).into_reader();
///     let mut out = tokio::io::sink();
///     tokio::io::copy(&mut reader, &mut out).await?;
///     reader.into_message().await?.stored();
/// }
/// # Ok(())
/// # }
/// ```
pub struct ArrivalReader {
    message: ReadMessage,
    is_stable: bool,
    /// Bytes that were read.
    read: u64,
    /// The rest of the block that is being read.
    block: Buffer,
}

enum ReadMessage {
    UnderWay(Arrival),
    Delivered(Message),
    Failed(GroupFailure),
}

impl Arrival {
    /// Reads the message while it arrives.
    pub fn into_reader(self) -> ArrivalReader {
        let is_stable = self.group.membership.spec.is_stable();
        ArrivalReader { message: ReadMessage::UnderWay(self), is_stable, read: 0, block: Buffer::empty() }
    }
}

impl ArrivalReader {
    /// Waits for the whole message, whether or not all of it was read.
    ///
    /// # Cancel safety
    /// Dropping it loses the message for the application.
    ///
    /// # Errors
    /// The group's failure, if the message was not delivered before.
    pub async fn into_message(self) -> Result<Message, GroupFailure> {
        match self.message {
            ReadMessage::UnderWay(arrival) => arrival.await,
            ReadMessage::Delivered(message) => Ok(message),
            ReadMessage::Failed(failure) => Err(failure),
        }
    }

    /// Notes the message's delivery or failure, if it is known by now.
    fn settle(&mut self, cx: &mut Context<'_>) {
        let ReadMessage::UnderWay(arrival) = &mut self.message else { return };
        self.message = match arrival.poll_unpin(cx) {
            Poll::Pending => return,
            Poll::Ready(Ok(message)) => ReadMessage::Delivered(message),
            Poll::Ready(Err(failure)) => ReadMessage::Failed(failure),
        };
        // The message has it too. After a failure its memory must be free.
        self.block = Buffer::empty();
    }
}

impl AsyncRead for ArrivalReader {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        this.settle(cx);
        let before = room.filled().len();
        match &this.message {
            ReadMessage::Failed(failure) => return Poll::Ready(Err(io::Error::other(failure.clone()))),
            ReadMessage::Delivered(message) => {
                let rest = usize::try_from(this.read).ok().and_then(|read| message.get(read..)).unwrap_or_default();
                room.put_slice(&rest[..rest.len().min(room.remaining())]);
            }
            ReadMessage::UnderWay(_) if this.is_stable => return Poll::Pending,
            ReadMessage::UnderWay(arrival) => {
                let mut read = this.read;
                while room.remaining() > 0 {
                    if this.block.is_empty() {
                        let Some(block) = arrival.progress.as_ref().and_then(|it| it.poll_bytes_from(read, cx)) else {
                            break;
                        };
                        this.block = block;
                    }
                    let len = this.block.len().min(room.remaining());
                    room.put_slice(&this.block[..len]);
                    this.block = this.block.slice(len..);
                    read += len as u64;
                }
                if this.block.is_empty() {
                    this.block = Buffer::empty();
                }
                if room.filled().len() == before && room.remaining() > 0 {
                    return Poll::Pending;
                }
            }
        }
        this.read += (room.filled().len() - before) as u64;
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for ArrivalReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArrivalReader").field("read", &self.read).finish_non_exhaustive()
    }
}
