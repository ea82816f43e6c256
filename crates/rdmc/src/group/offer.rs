//! Messages as receivers get them: offered, under way, whole.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::FutureExt;
use rdmc_fabric::{Buffer, BufferMut, FabricError, Memory};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

#[cfg(doc)]
use super::GroupSpec;
use super::error::GroupFailure;
use super::fates::Fate;
use super::{Group, OwnedFuture};
use crate::certificate::Digest;
use crate::transfer::Progress;

/// A received message: read only, without a copy.
///
/// When the message and everything made from it are dropped, its memory goes back to the pool, or to the application
/// that supplied it. Where members [share](crate::DeliveryMode::Shared) objects, the object is unmapped then.
///
/// `&message[..]` is a [`tokio::io::AsyncRead`] and a [`std::io::Read`]. An
/// [`ArrivalReader`](crate::ArrivalReader) reads a message while it arrives.
#[derive(Clone)]
pub struct Message {
    number: u64,
    header: Option<Arc<[u8]>>,
    buffer: Buffer,
    digest: Option<Digest>,
    fate: Arc<Fate>,
}

impl Message {
    pub(super) fn new(number: u64, buffer: Buffer, digest: Option<Digest>, fate: Fate) -> Self {
        Self { number, header: None, buffer, digest, fate: Arc::new(fate) }
    }

    /// Returns the header with which the message was sent; empty unless the group has
    /// [headers](crate::GroupSpec::headers).
    pub fn header(&self) -> &[u8] {
        self.header.as_deref().unwrap_or_default()
    }

    pub(super) fn set_header(&mut self, header: Arc<[u8]>) {
        self.header = Some(header);
    }

    /// Tells the root that the application has stored the message: written it to disk, or whatever the members of the
    /// group understand by that. [`Receipt::stored`](crate::Receipt::stored) waits for it.
    ///
    /// If the message and its clones are dropped before, the root learns that it is not stored. So keep a clone when you
    /// turn the message into bytes, and store those.
    pub fn stored(&self) {
        self.fate.store();
    }

    /// Returns the message's place in the group's order, from 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the digest of the content, computed from the blocks as they arrived; `None` unless the group [checks
    /// blocks](crate::GroupSpec::check_blocks).
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns the bytes as the fabric's shared memory, which can be sent on without a copy.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// Returns the bytes, without a copy.
    ///
    /// They keep the whole message's memory from its pool. A message of one block, however short, has the memory of a
    /// block. Copy bytes that you keep for long, or receive them into the application's memory.
    pub fn into_bytes(self) -> Bytes {
        self.buffer.into()
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Message> for Bytes {
    fn from(message: Message) -> Self {
        message.into_bytes()
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message").field("number", &self.number).field("len", &self.len()).finish()
    }
}

/// A message that is about to be received: its size is known. Its memory is not, unless it was
/// [provided](crate::OfferReceiver::provide).
///
/// The group receives nothing more until the application accepts or refuses the offer. Dropping it refuses it.
pub struct Offer {
    number: u64,
    size: u64,
    /// `None` if the memory is the pool's.
    answer: Option<oneshot::Sender<OfferReply>>,
    /// It has memory: what was provided for it, or that with which it was accepted before, which holds some of it.
    begun: bool,
    pub(super) delivery: Arrival,
}

/// The application's reply to an offer.
pub(super) enum OfferReply {
    Memory(BufferMut),
    /// Memory that may hold parts of the message.
    Partial(BufferMut),
    KeepMemory,
    Refuse(String),
}

/// A message under way, as a future.
///
/// # Cancel safety
/// Dropping it loses the message for the application. The member receives and relays it all the same.
pub struct Arrival {
    pub(super) group: Arc<Group>,
    message: oneshot::Receiver<Message>,
    header: Option<Arc<[u8]>>,
    /// Waits for the group's failure when the message does not come.
    failing: Exclusive<Option<OwnedFuture<GroupFailure>>>,
    /// `None` if the application only gets the message when it is whole.
    pub(super) progress: Option<Progress>,
    _ahead: OwnedSemaphorePermit,
}

impl Arrival {
    pub(super) fn new(
        group: Arc<Group>,
        message: oneshot::Receiver<Message>,
        progress: Option<Progress>,
        ahead: OwnedSemaphorePermit,
    ) -> Self {
        Self { group, message, header: None, failing: Exclusive::default(), progress, _ahead: ahead }
    }

    /// Returns a handle of the message's progress at this member.
    pub fn progress(&self) -> Progress {
        self.progress.clone().expect("messages that were accepted are counted")
    }
}

impl Future for Arrival {
    type Output = Result<Message, GroupFailure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.failing.content().is_none() {
            match self.message.poll_unpin(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(mut message)) => {
                    self.header.take().into_iter().for_each(|header| message.set_header(header));
                    return Poll::Ready(Ok(message));
                }
                Poll::Ready(Err(_)) => *self.failing.content() = Some(failure_of(&self.group)),
            }
        }
        let failing = self.failing.content().as_mut().expect("set above");
        failing.poll_unpin(cx).map(Err)
    }
}

impl Offer {
    pub(super) fn new(
        number: u64,
        size: u64,
        answer: Option<oneshot::Sender<OfferReply>>,
        begun: bool,
        delivery: Arrival,
    ) -> Self {
        Self { number, size, answer, begun, delivery }
    }

    /// Returns the message's place in the group's order, from 0.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the message's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the header with which the message was sent; empty unless the group has [headers](GroupSpec::headers).
    pub fn header(&self) -> &[u8] {
        self.delivery.header.as_deref().unwrap_or_default()
    }

    pub(super) fn set_header(&mut self, header: Arc<[u8]>) {
        self.delivery.header = Some(header);
    }

    /// Receives the message into `memory`, which must have exactly the message's size.
    ///
    /// # Panics
    /// If the length differs.
    pub fn accept(mut self, memory: BufferMut) -> Arrival {
        assert_eq!(memory.len() as u64, self.size, "the memory must have the message's size");
        self.answer(OfferReply::Memory(memory));
        self.delivery
    }

    /// Receives the message into memory that is not registered yet, such as a `Vec` or a mapped file, of exactly the
    /// message's size. It is the application's own, and does not count towards the pool.
    ///
    /// # Errors
    /// The memory is read only ([`FabricError::Memory`]), or the fabric cannot register it. The offer is refused then,
    /// which ends the group.
    ///
    /// # Panics
    /// If the length differs.
    pub fn accept_into(self, memory: impl Into<Memory>) -> Result<Arrival, FabricError> {
        let memory = self.delivery.group.node().fabric.register(memory.into())?;
        let memory = memory.into_mut().map_err(|memory| FabricError::Memory {
            len: memory.len(),
            source: io::Error::new(io::ErrorKind::PermissionDenied, "it is read only"),
        })?;
        Ok(self.accept(memory))
    }

    /// Receives the missing blocks of the message into `memory`, which must have exactly the message's size and may
    /// hold any of its blocks already, each in its place.
    ///
    /// In a [delta](GroupSpec::delta) group, blocks that equal the root's stay, and this member sends them to members
    /// that lack them. All other blocks are overwritten. In another group all blocks are overwritten. Messages of more
    /// than 65,536 blocks are sent in full.
    ///
    /// # Panics
    /// If the length differs.
    pub fn accept_partial(mut self, memory: BufferMut) -> Arrival {
        assert_eq!(memory.len() as u64, self.size, "the memory must have the message's size");
        self.answer(OfferReply::Partial(memory));
        self.delivery
    }

    fn answer(&mut self, with: OfferReply) {
        if let Some(answer) = self.answer.take() {
            // Fails only if the group has just failed, which the delivery reports.
            let _ = answer.send(with);
        }
    }

    /// Receives the message into the memory that it has already:
    ///
    /// - the memory that was [provided](crate::OfferReceiver::provide) for it;
    /// - the memory with which it was accepted in the group that this one
    ///   [continues](crate::Recover::with_offers). The rest of the message arrives there.
    ///
    /// # Errors
    /// Returns the offer if no memory of its size was provided. In a group that continues another, if it was not
    /// accepted there, if no block had arrived, or if that memory is still in use.
    #[expect(clippy::result_large_err, reason = "the error is the offer that the caller had")]
    pub fn stay(mut self) -> Result<Arrival, Self> {
        if !self.begun {
            return Err(self);
        }
        self.answer(OfferReply::KeepMemory);
        Ok(self.delivery)
    }

    /// Refuses the message, which ends the group for all members.
    pub fn refuse(mut self, reason: &str) {
        self.answer(OfferReply::Refuse(reason.chars().take(REASON_MAX).collect()));
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offer").field("number", &self.number).field("size", &self.size).finish_non_exhaustive()
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrival").finish_non_exhaustive()
    }
}

/// A value that is only reached by `&mut`, so that a handle is `Sync` whatever the value is.
#[derive(Default)]
pub(super) struct Exclusive<T>(Mutex<T>);

impl<T> Exclusive<T> {
    pub(super) fn content(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a future of the group's failure that owns everything it needs.
pub(super) fn failure_of(group: &Arc<Group>) -> OwnedFuture<GroupFailure> {
    let group = group.clone();
    async move { group.end.failed().await }.boxed()
}

/// Longest reason for a refusal, in characters.
pub(super) const REASON_MAX: usize = 1000;
