//! The receivers' side of a group.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures::future::{FusedFuture, FutureExt};
use futures::stream::{FuturesUnordered, Stream, StreamExt};
use rdmc_fabric::BufferMut;
use tokio::sync::{mpsc, oneshot};

use super::continuation::{Continuation, LostMessage};
use super::error::{GroupError, GroupFailure};
use super::forming::{FormedGroup, Grants, MemberRole, form};
use super::intake::{Begun, BlocksToCome, Intake, MESSAGES_AHEAD, MemorySource, ProvidedMemory, StartedTransfer};
use super::offer::{Arrival, Exclusive, Message, Offer, REASON_MAX, failure_of};
use super::short::{Incoming, WholeMessages};
use super::{Group, GroupSpec, OwnedFuture, start, take_grants};
use crate::certificate::Certificate;
use crate::failure::FailureCause;
use crate::id::NodeId;
use crate::resources::NodeResources;
use crate::stats::GroupStats;
use crate::transfer::{TransferError, Turnstile};

/// A receiver's handle of a group: a stream of messages in the root's order, in memory of the pool.
///
/// The stream ends with `None` when the root has closed the group and every message was taken, or with the group's
/// failure. A few messages are received ahead. While they are not taken, the root and the other members wait.
///
/// Dropping it without [`close`](Self::close) abandons the group: the others learn that this member has left. So give
/// `&mut` of it to combinators that drop a stream when it ends, such as `select_all`.
pub struct Receiver {
    offers: OfferReceiver,
    current: Option<Arrival>,
    whole: WholeMessages,
}

/// A receiver's handle of a group: it supplies the memory for each message.
///
/// Dropping it without [`close`](Self::close) abandons the group: the others learn that this member has left.
pub struct OfferReceiver {
    group: Arc<Group>,
    incoming: mpsc::Receiver<Incoming>,
    provided: Arc<ProvidedMemory>,
    confirm: Option<oneshot::Sender<()>>,
    /// Set when no more offers come.
    complete: Arc<AtomicBool>,
    /// Waits for the group's failure when the offers end without being complete.
    failing: Exclusive<Option<OwnedFuture<GroupFailure>>>,
    failure_reported: bool,
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
        let next = std::future::poll_fn(|cx| self.poll_incoming(cx)).await?;
        Some(next.map(|incoming| match incoming {
            Incoming::Offer(offer) => offer,
            Incoming::Whole(_) => unreachable!("the application supplies the memory of all messages"),
        }))
    }

    /// Provides memory for message `number`, counted from 0, if the application knows its size ahead (DSN §4.6).
    ///
    /// If the message has exactly the memory's size, its blocks arrive there from the first one on, without a copy, and
    /// its offer can [`stay`](Offer::stay). Else the message is offered as usual, and the memory is dropped.
    ///
    /// Call it before the offer of the message before is answered, and for the first message right after joining.
    /// Later, the first block is copied. So is a message of one block that is shorter than the group's blocks. Memory
    /// that comes after the message's own offer is dropped with the next message. A second call for the same message
    /// replaces the memory of the first, unless that is in use.
    ///
    /// It is not used in [delta](GroupSpec::delta) groups, for messages that are completed for a group that failed, and
    /// for [headers](GroupSpec::headers), which have the even numbers. With a [ring](GroupSpec::ring) the first block
    /// is copied.
    pub fn provide(&mut self, number: u64, memory: BufferMut) {
        if !self.group.is_header(number) {
            self.provided.add(number, memory);
        }
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
        self.group.end.declare(FailureCause::Refused { reason });
    }

    /// Waits until the group fails; may wait for ever.
    ///
    /// Take the messages that have arrived: a group that [continues](GroupFailure::recover) this one does not send them
    /// again.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn failed(&self) -> GroupFailure {
        self.group.end.failed().await
    }

    /// Returns the members in rank order.
    pub fn members(&self) -> &[NodeId] {
        &self.group.membership.members
    }

    /// Returns the group's counters at this member. Until the group is closed, blocks may still leave for others,
    /// although all messages are taken.
    pub fn stats(&self) -> GroupStats {
        self.group.stats()
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Incoming, GroupFailure>>> {
        match self.incoming.poll_recv(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(incoming)) => Poll::Ready(Some(Ok(incoming))),
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
        self.group.end.ended().await
    }
}

impl Receiver {
    fn new(offers: OfferReceiver) -> Self {
        Self { offers, current: None, whole: WholeMessages::default() }
    }

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

    /// Returns the group's counters at this member. Until the group is closed, blocks may still leave for others,
    /// although all messages are taken.
    pub fn stats(&self) -> GroupStats {
        self.offers.stats()
    }
}

impl Stream for Receiver {
    type Item = Result<Message, GroupFailure>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(message) = self.whole.next() {
                return Poll::Ready(Some(Ok(message)));
            }
            if let Some(delivery) = &mut self.current {
                let Poll::Ready(outcome) = delivery.poll_unpin(cx) else { return Poll::Pending };
                self.current = None;
                if outcome.is_err() {
                    // The failure is reported once.
                    self.offers.failure_reported = true;
                    self.offers.incoming.close();
                    while self.offers.incoming.try_recv().is_ok() {}
                }
                return Poll::Ready(Some(outcome));
            }
            match self.offers.poll_incoming(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(Incoming::Offer(offer)))) => self.current = Some(offer.delivery),
                Poll::Ready(Some(Ok(Incoming::Whole(whole)))) => self.whole = whole,
                Poll::Ready(Some(Err(failure))) => return Poll::Ready(Some(Err(failure))),
                Poll::Ready(None) => return Poll::Ready(None),
            }
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("group", &self.offers.group.membership.id).finish_non_exhaustive()
    }
}

impl fmt::Debug for OfferReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OfferReceiver").field("group", &self.group.membership.id).finish_non_exhaustive()
    }
}

/// Joins a group; made by [`Node::join_group`](crate::Node::join_group).
///
/// # Cancel safety
/// If it is dropped before it is polled, nothing has begun. Later, the group is abandoned: the others learn that this
/// member has left.
#[must_use = "futures do nothing unless they are polled"]
pub struct JoinGroup<R = Receiver> {
    node: Arc<NodeResources>,
    spec: GroupSpec,
    join: fn(Arc<NodeResources>, GroupSpec) -> OwnedFuture<Result<R, GroupError>>,
    joining: Option<OwnedFuture<Result<R, GroupError>>>,
}

impl JoinGroup {
    pub(crate) fn new(node: Arc<NodeResources>, spec: GroupSpec) -> Self {
        let join = |node, spec| {
            let joined = join_from(node, spec, MemorySource::Pool);
            async { Ok(Receiver::new(joined.await?)) }.boxed()
        };
        Self { node, spec, join, joining: None }
    }

    /// Supplies the memory for each message, or refuses the message.
    ///
    /// # Errors
    /// From the future: [`GroupError::SharedOffers`] if members [share](crate::DeliveryMode::Shared) objects.
    pub fn with_offers(self) -> JoinGroup<OfferReceiver> {
        let join = |node, spec| join_from(node, spec, MemorySource::Application).boxed();
        JoinGroup { node: self.node, spec: self.spec, join, joining: None }
    }
}

impl<R> Future for JoinGroup<R> {
    type Output = Result<R, GroupError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { node, spec, join, joining } = &mut *self;
        joining.get_or_insert_with(|| join(node.clone(), spec.clone())).poll_unpin(cx)
    }
}

impl<R> fmt::Debug for JoinGroup<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinGroup").field("spec", &self.spec).finish_non_exhaustive()
    }
}

/// Continues a failed group at a receiver; returns also the messages that cannot be completed.
pub(crate) async fn go_on(
    node: Arc<NodeResources>,
    continuation: Continuation,
) -> Result<(Receiver, Vec<LostMessage>), GroupError> {
    let (offers, lost) = go_on_from(node, continuation, MemorySource::Pool).await?;
    Ok((Receiver::new(offers), lost))
}

/// Continues as [`go_on`] does, at a receiver that supplies the memory for each message.
pub(crate) async fn go_on_with_offers(
    node: Arc<NodeResources>,
    continuation: Continuation,
) -> Result<(OfferReceiver, Vec<LostMessage>), GroupError> {
    go_on_from(node, continuation, MemorySource::Application).await
}

async fn go_on_from(
    node: Arc<NodeResources>,
    continuation: Continuation,
    memory: MemorySource,
) -> Result<(OfferReceiver, Vec<LostMessage>), GroupError> {
    if memory == MemorySource::Application {
        continuation.spec.check_offers()?;
    }
    let spec = continuation.spec.clone();
    let mut formed = Box::pin(form(node, spec, MemberRole::Survivor(Box::new(continuation)))).await?;
    let lost = std::mem::take(&mut formed.resumption.lost);
    Ok((start_receiving(formed, memory), lost))
}

async fn join_from(
    node: Arc<NodeResources>,
    spec: GroupSpec,
    memory: MemorySource,
) -> Result<OfferReceiver, GroupError> {
    if memory == MemorySource::Application {
        spec.check_offers()?;
    }
    Ok(start_receiving(Box::pin(form(node, spec, MemberRole::Receiver)).await?, memory))
}

fn start_receiving(formed: FormedGroup, memory: MemorySource) -> OfferReceiver {
    let FormedGroup { group, announcements, grants, rows, resumption } = formed;
    // One more than can be under way, so that the engine never waits for the application to take an offer.
    let (incoming, taken) = mpsc::channel(MESSAGES_AHEAD + 1);
    let (confirm, confirmed) = oneshot::channel();
    let provided = Arc::<ProvidedMemory>::default();
    let intake = Intake::new(group.clone(), memory, announcements, incoming, provided.clone(), resumption);
    let complete = Arc::new(AtomicBool::new(false));
    start(group.clone(), run(group.clone(), intake, grants, confirmed, complete.clone()), rows);
    OfferReceiver {
        group,
        incoming: taken,
        provided,
        confirm: Some(confirm),
        complete,
        failing: Exclusive::default(),
        failure_reported: false,
    }
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
    let mut started = group.membership.prior.base;
    // If the root is gone, the interrupted messages are all.
    let all = intake.all();
    let mut starting: futures::future::Fuse<OwnedFuture<_>> = intake.start(started).boxed().fuse();
    let mut closing = std::pin::pin!(group.end.closing().fuse());
    let has_all = async {
        // The digests of messages that were interrupted are known when they are sent on.
        if !group.membership.prior.interrupted().is_empty() {
            std::future::pending::<()>().await;
        }
        group.end.has_all().await;
    };
    let mut has_all = std::pin::pin!(has_all.fuse());
    let mut messages = all;
    let mut confirmed = false;
    loop {
        if messages == Some(started) && (running.is_empty() || has_all.is_terminated()) {
            break;
        }
        futures::select_biased! {
            error = grants.select_next_some() => return Err(error),
            outcome = running.select_next_some() => {
                let outcome: Result<(), TransferError> = outcome;
                outcome?;
            }
            begun = starting => {
                let (intake, begun): (Intake, Begun) = begun?;
                match begun {
                    Begun::Short(count) => started += count,
                    Begun::Transfer(StartedTransfer { transfer, rest }) => {
                        let rest = rest.map(|rest| (rest, relay_turns.next()));
                        let (group, number) = (&group, started);
                        running.push(async move {
                            let is_kept = !transfer.delivers();
                            let size = match rest {
                                None => transfer.complete().await?,
                                Some((BlocksToCome { first, turn }, relay_turn)) => {
                                    transfer.run(first, turn, relay_turn).await?
                                }
                            };
                            if is_kept {
                                group.message_completed(number, size);
                            }
                            Ok(())
                        });
                        started += 1;
                    }
                }
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
            // The others need not wait until the last blocks that this member sends are acknowledged.
            () = has_all => {}
        }
    }
    // The application sees the end of the stream, and agrees to the close when it has stored its messages.
    complete.store(true, Ordering::Release);
    drop(starting);
    let relaying = async {
        while !running.is_empty() {
            futures::select_biased! {
                error = grants.select_next_some() => return Err(error),
                outcome = running.select_next_some() => outcome?,
            }
        }
        Ok(())
    };
    let agreeing = async {
        if !confirmed {
            confirm.await.map_err(|_| abandoned())?;
        }
        match all {
            Some(messages) if group.rank().is_root() => group.end.close(messages),
            _ => {
                if !closing.is_terminated() && closing.await != started {
                    let what = "closed the group after another number of messages than there are".to_owned();
                    return Err(TransferError::Protocol { by: rdmc_schedule::Rank::ROOT, what });
                }
                group.status.finish();
                group.end.confirm();
            }
        }
        Ok(())
    };
    futures::try_join!(relaying, agreeing).map(drop)
}
