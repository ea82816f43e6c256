//! Recovery after a failure: the survivors form a group that completes the interrupted messages.
//!
//! Members retain the messages that not all of them have (`retained.rs`). Each survivor tells all others which blocks
//! of the interrupted messages it holds. From that all compute the same [`Repair`](rdmc_schedule::Repair), and only
//! missing blocks travel, each from any survivor that holds it. Then the group goes on as any other if its root is
//! among the survivors. Else it closes.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures::future::FutureExt;
use rdmc_schedule::Rank;

#[cfg(doc)]
use super::GroupSpec;
use super::continuation::{Continuation, LostMessage};
use super::error::{GroupError, GroupFailure};
use super::membership::PriorProgress;
use super::receiver::{OfferReceiver, Receiver};
use super::sender::Sender;
use super::{OwnedFuture, receiver, sender};
use crate::failure::FailureCause;
use crate::resources::NodeResources;

/// A group that continues a failed one among its survivors; made by [`GroupFailure::recover`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Recovery<R = Receiver> {
    /// This member's handle of the new group.
    pub handle: Recovered<R>,
    /// The messages that cannot be completed, in order: those of which the survivors lack blocks, and all that follow.
    /// The same at every survivor. Always empty if the root is among the survivors.
    pub lost: Vec<LostMessage>,
}

/// A member's handle of a group that continues another.
#[derive(Debug)]
pub enum Recovered<R = Receiver> {
    /// The root's, which goes on sending.
    Sender(Sender),
    /// That of any other member, and of all members when the root is gone.
    Receiver(R),
}

impl<R> Recovery<R> {
    async fn of_root(node: Arc<NodeResources>, continuation: Continuation) -> Result<Self, RecoveryError> {
        let sender = Box::pin(sender::go_on(node, continuation)).await?;
        Ok(Self { handle: Recovered::Sender(sender), lost: Vec::new() })
    }

    /// Returns the handle of the root, or `None` at other members.
    pub fn into_sender(self) -> Option<Sender> {
        match self.handle {
            Recovered::Sender(sender) => Some(sender),
            Recovered::Receiver(_) => None,
        }
    }

    /// Returns the handle of a receiver, or `None` at the root.
    pub fn into_receiver(self) -> Option<R> {
        match self.handle {
            Recovered::Sender(_) => None,
            Recovered::Receiver(receiver) => Some(receiver),
        }
    }
}

/// A failed group could not be recovered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoveryError {
    /// The group was formed [without recovery](GroupSpec::recoverable).
    #[error("the group was formed without recovery")]
    Off,
    /// The members that agreed on the failure were no quorum: the others may go on without them.
    #[error("most members of the group cannot be reached, and may go on without this one")]
    NoQuorum,
    /// This member is one of those that failed: the others go on without it.
    #[error("this member is one of those that failed: it {cause}")]
    Excluded {
        /// Why it failed.
        cause: FailureCause,
    },
    /// Another call has recovered the group.
    #[error("the group was recovered before")]
    Taken,
    /// The last handle of the node was dropped.
    #[error("the node was dropped")]
    NodeDropped,
    /// The new group could not be formed. If it is [`GroupError::Failed`], its failure can be recovered from in turn.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// Recovers a failed group; made by [`GroupFailure::recover`].
///
/// # Cancel safety
/// If it is dropped before it is polled, nothing has begun. Later, the new group is abandoned: the others learn that
/// this member has left.
#[must_use = "futures do nothing unless they are polled"]
pub struct Recover<R = Receiver> {
    failure: GroupFailure,
    recover: fn(GroupFailure) -> OwnedFuture<Result<Recovery<R>, RecoveryError>>,
    recovering: Option<OwnedFuture<Result<Recovery<R>, RecoveryError>>>,
}

impl Recover {
    /// Supplies the memory for each message, if this member is a receiver.
    ///
    /// For a message that it had accepted before, it may [stay](crate::Offer::stay) with the memory that it gave then.
    pub fn with_offers(self) -> Recover<OfferReceiver> {
        Recover { failure: self.failure, recover: |failure| recover_with_offers(failure).boxed(), recovering: None }
    }
}

impl<R> Future for Recover<R> {
    type Output = Result<Recovery<R>, RecoveryError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { failure, recover, recovering } = &mut *self;
        recovering.get_or_insert_with(|| recover(failure.clone())).poll_unpin(cx)
    }
}

impl<R> fmt::Debug for Recover<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recover").field("group", &self.failure.group()).finish_non_exhaustive()
    }
}

async fn recover_from_pool(failure: GroupFailure) -> Result<Recovery, RecoveryError> {
    let (node, continuation) = failure.continuation().await?;
    if continuation.is_led_here() {
        return Recovery::of_root(node, continuation).await;
    }
    let (receiver, lost) = Box::pin(receiver::go_on(node, continuation)).await?;
    Ok(Recovery { handle: Recovered::Receiver(receiver), lost })
}

async fn recover_with_offers(failure: GroupFailure) -> Result<Recovery<OfferReceiver>, RecoveryError> {
    let (node, continuation) = failure.continuation().await?;
    if continuation.is_led_here() {
        return Recovery::of_root(node, continuation).await;
    }
    let (receiver, lost) = Box::pin(receiver::go_on_with_offers(node, continuation)).await?;
    Ok(Recovery { handle: Recovered::Receiver(receiver), lost })
}

impl GroupFailure {
    /// Forms the group of the survivors, which completes the messages that the failed group had begun.
    ///
    /// All survivors call it, within the [formation limit](GroupSpec::formation_limit). If a survivor does not, the new
    /// group fails. The new group has a number of its own, derived from the old one, and the survivors as members, in
    /// the same order. Its messages continue those that were delivered: each receiver gets the messages that it lacks,
    /// once and in order. Only missing blocks travel, from any member that has them.
    ///
    /// If the root is among the survivors it gets a [`Sender`]. The group completes messages that were in flight or
    /// queued; do not send them again. A [`Multicast`](crate::Multicast) that failed with
    /// [`SendError::NotQueued`](crate::SendError::NotQueued) was polled too late for that. If the root is gone every
    /// survivor gets a [`Receiver`]. Its stream ends after all messages that the survivors can complete;
    /// [`Recovery::lost`] lists the others. A receiver that supplies the memory for each message recovers [with
    /// offers](Recover::with_offers).
    ///
    /// The memory of messages that some members lack is kept while the failure or a clone of it lives, until the group
    /// is recovered. A root that [reads](Sender::send_from) a message from its source goes on reading meanwhile, and
    /// recovers when it has read all of it.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is polled, nothing has begun. Later, the new group is abandoned: the others
    /// learn that this member has left.
    ///
    /// # Errors
    /// See [`RecoveryError`]. When the new group fails in turn, its own failure can be recovered from, and nothing is
    /// lost.
    pub fn recover(&self) -> Recover {
        Recover { failure: self.clone(), recover: |failure| recover_from_pool(failure).boxed(), recovering: None }
    }

    /// Returns how the group continues at this member.
    async fn continuation(&self) -> Result<(Arc<NodeResources>, Continuation), RecoveryError> {
        let shared = &*self.recovery.0;
        if !shared.spec.recoverable {
            return Err(RecoveryError::Off);
        }
        if !self.quorum {
            return Err(RecoveryError::NoQuorum);
        }
        if let Some(own) = self.failed.iter().find(|failed| failed.member == shared.rank) {
            return Err(RecoveryError::Excluded { cause: own.cause.clone() });
        }
        let node = shared.node.upgrade().ok_or(RecoveryError::NodeDropped)?;
        // The retained messages must not change any more.
        shared.retained.until_idle().await.map_err(|cause| RecoveryError::Excluded { cause })?;
        if shared.taken.swap(true, Ordering::AcqRel) {
            return Err(RecoveryError::Taken);
        }
        let old: Vec<Rank> =
            (0..).map(Rank).take(shared.spec.members.len()).filter(|rank| !self.names(*rank)).collect();
        let before = shared.prior;
        let held = |rank: &Rank| self.certificate.held_by(*rank).unwrap_or(before.base);
        let base = old.iter().map(held).min().unwrap_or(before.base);
        let delivered = if shared.spec.is_stable() { base } else { held(&shared.rank) };
        let prior = PriorProgress {
            base,
            begun: self.certificate.messages().max(before.begun),
            delivered: delivered.max(before.delivered),
            root_gone: before.root_gone || !old.contains(&Rank::ROOT),
        };
        let continuation = Continuation {
            spec: shared.spec.of_survivors(&old),
            prior,
            records: self.certificate.records().to_vec(),
            shared: self.recovery.0.clone(),
            handed_over: AtomicBool::new(false),
        };
        Ok((node, continuation))
    }
}
