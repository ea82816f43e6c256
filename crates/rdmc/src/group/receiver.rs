//! The receivers' side of a group.

use std::fmt;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::{FusedFuture, FutureExt};
use futures::stream::{FuturesUnordered, Stream, StreamExt};
use rdmc_fabric::{Buffer, BufferMut};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::intake::{Intake, MESSAGES_AHEAD, MemorySource, StartedTransfer};
use super::recovery::{Continuation, LostMessage, Recovered, Recovery, RecoveryError};
use super::{FormedGroup, Grants, Group, GroupSpec, MemberRole, OwnedFuture, form, start, take_grants};
use crate::certificate::{Certificate, Digest};
use crate::failure::{FailureCause, GroupError, GroupFailure};
use crate::node::{NodeId, NodeShared};
use crate::stats::GroupStats;
use crate::transfer::{TransferError, Turnstile};

/// A received message: read only, without a copy.
///
/// When the message and everything made from it are dropped, its memory goes back to the pool, or to the application
/// that supplied it. Where members [share](crate::DeliveryMode::Shared) objects, the object is unmapped then.
#[derive(Clone)]
pub struct Message {
    number: u64,
    buffer: Buffer,
    digest: Option<Digest>,
}

impl Message {
    pub(crate) fn new(number: u64, buffer: Buffer, digest: Option<Digest>) -> Self {
        Self { number, buffer, digest }
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

/// A receiver's handle of a group: a stream of messages in the root's order, in memory of the pool.
///
/// The stream ends with `None` when the root has closed the group and every message was taken, or with the group's
/// failure. A few messages are received ahead. While they are not taken, the root and the other members wait.
///
/// Dropping it without [`close`](Self::close) abandons the group: the others learn that this member has left. So give
/// `&mut` of it to combinators that drop a stream when it ends, such as `select_all`.
pub struct Receiver {
    offers: OfferReceiver,
    current: Option<Delivery>,
}

/// A receiver's handle of a group: it supplies the memory for each message.
///
/// Dropping it without [`close`](Self::close) abandons the group: the others learn that this member has left.
pub struct OfferReceiver {
    group: Arc<Group>,
    offers: mpsc::Receiver<Offer>,
    confirm: Option<oneshot::Sender<()>>,
    /// Set when no more offers come.
    complete: Arc<AtomicBool>,
    /// Waits for the group's failure when the offers end without being complete.
    failing: Exclusive<Option<OwnedFuture<GroupFailure>>>,
    failure_reported: bool,
}

/// A message that is about to be received: its size is known, its memory is not.
///
/// The group receives nothing more until the application accepts or refuses the offer. Dropping it refuses it.
pub struct Offer {
    number: u64,
    size: u64,
    /// `None` if the memory is the pool's.
    answer: Option<oneshot::Sender<OfferReply>>,
    /// The memory with which it was accepted before holds some of it already, and can be used further.
    begun: bool,
    delivery: Delivery,
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
pub struct Delivery {
    group: Arc<Group>,
    message: oneshot::Receiver<Message>,
    /// Waits for the group's failure when the message does not come.
    failing: Exclusive<Option<OwnedFuture<GroupFailure>>>,
    _ahead: OwnedSemaphorePermit,
}

impl Delivery {
    pub(super) fn new(group: Arc<Group>, message: oneshot::Receiver<Message>, ahead: OwnedSemaphorePermit) -> Self {
        Self { group, message, failing: Exclusive::default(), _ahead: ahead }
    }
}

impl Future for Delivery {
    type Output = Result<Message, GroupFailure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.failing.content().is_none() {
            match self.message.poll_unpin(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(message)) => return Poll::Ready(Ok(message)),
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
        delivery: Delivery,
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

    /// Receives the message into `memory`, which must have exactly the message's size.
    ///
    /// # Panics
    /// If the length differs.
    pub fn accept(mut self, memory: BufferMut) -> Delivery {
        assert_eq!(memory.len() as u64, self.size, "the memory must have the message's size");
        self.answer(OfferReply::Memory(memory));
        self.delivery
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
    pub fn accept_partial(mut self, memory: BufferMut) -> Delivery {
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

    /// Receives the rest of the message into the memory with which it was accepted in the group that this one
    /// [continues](GroupFailure::recover_with_offers).
    ///
    /// # Errors
    /// Returns the offer if it was not accepted there, if no block had arrived, or if that memory is still in use.
    pub fn stay(mut self) -> Result<Delivery, Self> {
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

impl OfferReceiver {
    /// Waits for the next message; returns `None` when the group is closed and every message was taken.
    ///
    /// # Cancel safety
    /// No offer is lost.
    ///
    /// # Errors
    /// The group's failure, once; then `None`.
    pub async fn next_offer(&mut self) -> Option<Result<Offer, GroupFailure>> {
        std::future::poll_fn(|cx| self.poll_offer(cx)).await
    }

    /// Agrees to the end of the group, waits until every member has every message, and returns the certificate.
    ///
    /// Refuses messages that were not taken; take all until `None` first.
    ///
    /// # Cancel safety
    /// If the future is dropped before it has agreed, the group is abandoned. Later, it is closed all the same.
    ///
    /// # Errors
    /// The group's failure; its certificate says what arrived.
    pub async fn close(mut self) -> Result<Certificate, GroupFailure> {
        while let Some(offer) = self.next_offer().await {
            drop(offer?);
        }
        self.agree().await
    }

    /// Ends the group because this member cannot go on; the others learn at most 1000 characters of the reason.
    pub fn refuse(self, reason: &str) {
        let reason = reason.chars().take(REASON_MAX).collect();
        self.group.declare(FailureCause::Refused { reason });
    }

    /// Waits until the group fails; may wait for ever.
    ///
    /// Take the messages that have arrived: a group that [continues](GroupFailure::recover) this one does not send them
    /// again.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn failed(&self) -> GroupFailure {
        self.group.failed().await
    }

    /// Returns the members in rank order.
    pub fn members(&self) -> &[NodeId] {
        &self.group.members
    }

    /// Returns the group's counters at this member.
    pub fn stats(&self) -> GroupStats {
        self.group.stats()
    }

    fn poll_offer(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Offer, GroupFailure>>> {
        match self.offers.poll_recv(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(offer)) => Poll::Ready(Some(Ok(offer))),
            Poll::Ready(None) if self.failure_reported || self.complete.load(Ordering::Acquire) => Poll::Ready(None),
            Poll::Ready(None) => {
                let group = &self.group;
                let failing = self.failing.content().get_or_insert_with(|| failure_of(group));
                let Poll::Ready(failure) = failing.poll_unpin(cx) else { return Poll::Pending };
                self.failure_reported = true;
                Poll::Ready(Some(Err(failure)))
            }
        }
    }

    async fn agree(mut self) -> Result<Certificate, GroupFailure> {
        let confirm = self.confirm.take().expect("only agreeing takes it, once");
        // Fails only if the group has stopped, which the outcome reports.
        let _ = confirm.send(());
        self.group.ended().await
    }
}

impl Receiver {
    /// Agrees to the end of the group, waits until every member has every message, and returns the certificate.
    ///
    /// Drops messages that were not taken.
    ///
    /// # Cancel safety
    /// If the future is dropped before it has agreed, the group is abandoned. Later, it is closed all the same.
    ///
    /// # Errors
    /// The group's failure; its certificate says what arrived.
    pub async fn close(mut self) -> Result<Certificate, GroupFailure> {
        while let Some(message) = self.next().await {
            drop(message?);
        }
        self.offers.agree().await
    }

    /// Ends the group because this member cannot go on; the others learn at most 1000 characters of the reason.
    pub fn refuse(self, reason: &str) {
        self.offers.refuse(reason);
    }

    /// Waits until the group fails; may wait for ever.
    ///
    /// Take the messages that have arrived: a group that [continues](GroupFailure::recover) this one does not send them
    /// again.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn failed(&self) -> GroupFailure {
        self.offers.failed().await
    }

    /// Returns the members in rank order.
    pub fn members(&self) -> &[NodeId] {
        self.offers.members()
    }

    /// Returns the group's counters at this member.
    pub fn stats(&self) -> GroupStats {
        self.offers.stats()
    }
}

impl Stream for Receiver {
    type Item = Result<Message, GroupFailure>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(delivery) = &mut self.current {
                let Poll::Ready(outcome) = delivery.poll_unpin(cx) else { return Poll::Pending };
                self.current = None;
                if outcome.is_err() {
                    // The failure is reported once.
                    self.offers.failure_reported = true;
                    self.offers.offers.close();
                    while self.offers.offers.try_recv().is_ok() {}
                }
                return Poll::Ready(Some(outcome));
            }
            match self.offers.poll_offer(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(offer))) => self.current = Some(offer.delivery),
                Poll::Ready(Some(Err(failure))) => return Poll::Ready(Some(Err(failure))),
                Poll::Ready(None) => return Poll::Ready(None),
            }
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("group", &self.offers.group.id).finish_non_exhaustive()
    }
}

impl fmt::Debug for OfferReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OfferReceiver").field("group", &self.group.id).finish_non_exhaustive()
    }
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offer").field("number", &self.number).field("size", &self.size).finish_non_exhaustive()
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").finish_non_exhaustive()
    }
}

pub(crate) async fn join(node: Arc<NodeShared>, spec: GroupSpec) -> Result<Receiver, GroupError> {
    let offers = join_from(node, spec, MemorySource::Pool).await?;
    Ok(Receiver { offers, current: None })
}

pub(crate) async fn join_with_offers(node: Arc<NodeShared>, spec: GroupSpec) -> Result<OfferReceiver, GroupError> {
    join_from(node, spec, MemorySource::Application).await
}

/// Continues a failed group at a receiver.
pub(crate) async fn go_on(node: Arc<NodeShared>, continuation: Continuation) -> Result<Recovery, RecoveryError> {
    let (offers, lost) = go_on_from(node, continuation, MemorySource::Pool).await?;
    Ok(Recovery { handle: Recovered::Receiver(Receiver { offers, current: None }), lost })
}

pub(crate) async fn go_on_with_offers(
    node: Arc<NodeShared>,
    continuation: Continuation,
) -> Result<Recovery<OfferReceiver>, RecoveryError> {
    let (offers, lost) = go_on_from(node, continuation, MemorySource::Application).await?;
    Ok(Recovery { handle: Recovered::Receiver(offers), lost })
}

async fn go_on_from(
    node: Arc<NodeShared>,
    continuation: Continuation,
    memory: MemorySource,
) -> Result<(OfferReceiver, Vec<LostMessage>), RecoveryError> {
    if memory == MemorySource::Application {
        continuation.spec.check_offers()?;
    }
    let spec = continuation.spec.clone();
    let mut formed = form(node, spec, MemberRole::Survivor(Box::new(continuation))).await?;
    let lost = std::mem::take(&mut formed.resumption.lost);
    Ok((start_receiving(formed, memory), lost))
}

async fn join_from(node: Arc<NodeShared>, spec: GroupSpec, memory: MemorySource) -> Result<OfferReceiver, GroupError> {
    if memory == MemorySource::Application {
        spec.check_offers()?;
    }
    Ok(start_receiving(form(node, spec, MemberRole::Receiver).await?, memory))
}

fn start_receiving(formed: FormedGroup, memory: MemorySource) -> OfferReceiver {
    let FormedGroup { group, announcements, grants, resumption } = formed;
    // One more than can be under way, so that the engine never waits for the application to take an offer.
    let (offers, taken) = mpsc::channel(MESSAGES_AHEAD + 1);
    let (confirm, confirmed) = oneshot::channel();
    let intake = Intake::new(group.clone(), memory, announcements, offers, resumption);
    let complete = Arc::new(AtomicBool::new(false));
    start(group.clone(), run(group.clone(), intake, grants, confirmed, complete.clone()));
    OfferReceiver {
        group,
        offers: taken,
        confirm: Some(confirm),
        complete,
        failing: Exclusive::default(),
        failure_reported: false,
    }
}

/// A value that is only reached by `&mut`, so that a handle is `Sync` whatever the value is.
#[derive(Default)]
struct Exclusive<T>(Mutex<T>);

impl<T> Exclusive<T> {
    fn content(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a future of the group's failure that owns everything it needs.
fn failure_of(group: &Arc<Group>) -> OwnedFuture<GroupFailure> {
    let group = group.clone();
    async move { group.failed().await }.boxed()
}

/// A member's engine: receives message after message until the root closes the group.
async fn run(
    group: Arc<Group>,
    intake: Intake,
    grants: Grants,
    confirm: oneshot::Receiver<()>,
    complete: Arc<AtomicBool>,
) -> Result<(), TransferError> {
    let abandoned = || TransferError::Local(FailureCause::Abandoned);
    let mut grants = take_grants(&group, grants);
    let mut confirm = confirm.fuse();
    let mut running = FuturesUnordered::new();
    let mut relay_turns = Turnstile::default();
    let mut started = group.prior.base;
    // If the root is gone, the interrupted messages are all.
    let all = intake.all();
    let mut starting: futures::future::Fuse<OwnedFuture<_>> = intake.start(started).boxed().fuse();
    let mut closing = std::pin::pin!(group.closing().fuse());
    let mut messages = all;
    let mut confirmed = false;
    loop {
        if messages == Some(started) && running.is_empty() {
            break;
        }
        futures::select_biased! {
            error = grants.select_next_some() => return Err(error),
            outcome = running.select_next_some() => {
                let outcome: Result<(), TransferError> = outcome;
                outcome?;
            }
            begun = starting => {
                let (intake, begun): (Intake, StartedTransfer) = begun?;
                running.push(begun.transfer.run(begun.first_is_here, begun.turn, relay_turns.next()));
                started += 1;
                starting = intake.start(started).boxed().fuse();
            }
            all = closing => {
                if all < started || messages.is_some_and(|messages| messages != all) {
                    let what = format!("closed the group after {all} messages, but sent {started}");
                    return Err(TransferError::Protocol { by: rdmc_schedule::Rank::ROOT, what });
                }
                messages = Some(all);
            }
            agreed = confirm => {
                agreed.map_err(|_| abandoned())?;
                confirmed = true;
            }
        }
    }
    // The application sees the end of the stream, and agrees to the close when it has stored its messages.
    complete.store(true, Ordering::Release);
    drop(starting);
    if !confirmed {
        confirm.await.map_err(|_| abandoned())?;
    }
    match all {
        Some(messages) if group.rank().is_root() => group.close(messages),
        _ => {
            if !closing.is_terminated() && closing.await != started {
                let what = "closed the group after another number of messages than there are".to_owned();
                return Err(TransferError::Protocol { by: rdmc_schedule::Rank::ROOT, what });
            }
            group.confirm();
        }
    }
    Ok(())
}

/// Longest reason for a refusal, in characters.
const REASON_MAX: usize = 1000;
