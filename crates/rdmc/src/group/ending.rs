//! The end of a group: connects its [`Agreement`] to the mesh and to the tasks that wait for the end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::future::FutureExt;
use rdmc_fabric::{Buffer, Timestamp, WorkError};
use rdmc_schedule::Rank;
use tokio::sync::{oneshot, watch};

use super::agreement::{Agreement, Patience, RECORDS_MAX};
use super::continuation::{Continuation, RecoveryState};
use super::error::GroupFailure;
use super::membership::Membership;
use super::offer::Message;
use super::retained::RetainedMessages;
use crate::certificate::{Certificate, Digest, MessageRecord};
use crate::failure::{FailedMember, FailureCause};
use crate::id::NodeId;
use crate::mesh::{GroupEvent, Inbox};
use crate::sync::lock;
use crate::transfer::TransferError;
use crate::wire::GroupFrame;
use crate::wire::end::{Ballot, EndFrame, Outcome, Verdict};
use crate::woken::WhenWoken;

/// How a group ended.
pub(crate) type GroupResult = Result<Certificate, GroupFailure>;

/// The end of a group, from the view of one member.
pub(super) struct GroupEnd {
    membership: Arc<Membership>,
    retained: Arc<RetainedMessages>,
    state: Mutex<EndState>,
    status: watch::Sender<EndStatus>,
    outcome: watch::Sender<Option<GroupResult>>,
}

/// A whole message, and to whom it goes.
pub(super) type WaitingMessage = (oneshot::Sender<Message>, Message);

struct EndState {
    agreement: Agreement,
    /// Messages that are whole, while one before them is not.
    early: BTreeMap<u64, WaitingMessage>,
    /// With stable delivery: messages that this member has, but perhaps not all.
    unstable: VecDeque<WaitingMessage>,
    /// How many messages all members are known to have.
    stable: u64,
    concluded: bool,
}

/// The state of the end that other tasks wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EndStatus {
    /// All messages of the group, once the root closes it.
    messages: Option<u64>,
    /// This member has all of them.
    has_all: bool,
    /// No further work is to be done.
    stopped: bool,
    /// When the agreement is to be asked again.
    deadline: Option<Timestamp>,
}

impl GroupEnd {
    pub(super) fn new(
        membership: Arc<Membership>,
        retained: Arc<RetainedMessages>,
        continuation: Option<&Continuation>,
    ) -> Self {
        let (rank, members) = (membership.rank, membership.spec.count());
        let detection = membership.node.mesh.detection();
        let patience = Patience { settling: detection / 8, outbid: detection / 2, all: detection * 4 };
        let mut agreement = Agreement::new(rank.0, members, patience);
        if let Some(Continuation { prior, records, .. }) = continuation {
            agreement = agreement.continuing(prior.base, records.iter().cloned());
        }
        Self {
            membership,
            retained,
            state: Mutex::new(EndState {
                agreement,
                early: BTreeMap::new(),
                unstable: VecDeque::new(),
                stable: 0,
                concluded: false,
            }),
            status: watch::Sender::default(),
            outcome: watch::Sender::new(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, EndState> {
        lock(&self.state)
    }

    // Progress of this member.

    /// Notes that a message has begun. Waits for ever if the group does no further work.
    pub(crate) async fn begin(&self, size: u64) {
        if !self.act(|state, _| state.agreement.begin(size)) {
            std::future::pending::<()>().await;
        }
    }

    /// Notes that a message has begun, and that this member has it whole.
    pub(super) async fn begin_whole(&self, size: u64) {
        self.begin(size).await;
        self.act(|state, _| state.agreement.hold());
    }

    /// Notes that messages have begun, with these sizes and digests, and that this member has them whole. Waits for
    /// ever if the group does no further work.
    pub(super) async fn begin_all_whole(&self, first: u64, messages: impl IntoIterator<Item = (u64, Option<Digest>)>) {
        let goes_on = self.act(|state, _| state.begin_all(first, messages).inspect(|count| state.hold(*count)));
        if goes_on.is_none() {
            std::future::pending::<()>().await;
        }
    }

    /// Notes that whole messages have begun, which follow each other. Gives them to `deliver`, and tells it whether the
    /// application gets them at once. Else they wait for those before them or for other members, and `deliver` returns
    /// to whom they go then. Waits for ever if the group does no further work.
    pub(super) async fn take_whole(
        &self,
        first: u64,
        messages: Vec<Message>,
        deliver: impl FnOnce(Vec<Message>, bool) -> Result<Vec<WaitingMessage>, TransferError>,
    ) -> Result<(), TransferError> {
        let is_stable = self.membership.spec.is_stable();
        // What is not taken is dropped when nothing is locked.
        let mut messages = Some(messages);
        let taken = self.act(|state, _| {
            let begun = messages.iter().flatten().map(|message| (message.len() as u64, message.digest()));
            let count = state.begin_all(first, begun)?;
            let at_once = !is_stable && first == state.agreement.held();
            if at_once {
                state.hold(count);
            }
            let waiting = match deliver(messages.take()?, at_once) {
                Ok(waiting) => waiting,
                Err(error) => return Some(Err(error)),
            };
            state.early.extend(waiting.into_iter().map(|(to, message)| (message.number(), (to, message))));
            state.deliver_early(is_stable);
            Some(Ok(()))
        });
        match taken {
            Some(taken) => taken,
            None => std::future::pending().await,
        }
    }

    /// Delivers a whole message, or the object that it describes, to the application, after the messages before it.
    ///
    /// Once others may know that this member does not have it, the application does not get it either.
    pub(crate) fn deliver(
        &self,
        to: oneshot::Sender<Message>,
        message: Message,
        whole: &Buffer,
        digest: Option<Digest>,
    ) {
        self.retained.shorten(message.number(), whole);
        self.act(|state, _| {
            state.agreement.note_digest(message.number(), digest);
            state.early.insert(message.number(), (to, message));
            state.deliver_early(self.membership.spec.is_stable());
        });
    }

    /// With stable delivery: delivers the messages that all members have.
    pub(super) fn deliver_stable(&self, messages: u64) {
        self.act(|state, _| {
            state.stable = messages.max(state.stable);
            state.deliver_stable();
        });
    }

    /// Returns how many messages this member has, from the first.
    pub(super) fn held(&self) -> u64 {
        self.lock().agreement.held()
    }

    /// Returns the number of all messages, once the root closes the group.
    pub(super) fn messages(&self) -> Option<u64> {
        self.lock().agreement.messages()
    }

    /// Returns how many messages have begun here.
    pub(super) fn begun(&self) -> u64 {
        self.lock().agreement.begun()
    }

    /// Notes the digest of a whole message, if there is one.
    pub(super) fn note_own_digest(&self, message: u64, digest: Option<Digest>) {
        self.act(|state, _| state.agreement.note_digest(message, digest));
    }

    /// At the root: announces the end of the group while its last messages are on their way.
    pub(super) fn announce_close(&self, messages: u64) {
        self.act(|state, _| state.agreement.announce_close(messages));
    }

    /// At the root: closes the group.
    pub(super) fn close(&self, messages: u64) {
        self.act(|state, now| state.agreement.close(messages, now));
    }

    /// At a member: confirms that it has everything.
    pub(super) fn confirm(&self) {
        self.act(|state, now| state.agreement.confirm(now));
    }

    // Failures.

    /// Tells the others that this member cannot, or will not, go on.
    pub(crate) fn declare(&self, cause: FailureCause) {
        self.act(|state, now| state.agreement.declare(cause, now));
    }

    /// Ends the group here, since its node leaves the mesh. How it ends elsewhere is not known, and the others are not
    /// told.
    pub(crate) fn depart(&self) {
        if self.outcome().is_none() {
            self.membership.node.mesh.leave_group(self.membership.id);
            self.act(|state, _| state.agreement.depart());
        }
    }

    pub(super) fn accuse(&self, member: Rank, cause: FailureCause) {
        tracing::debug!(parent: &self.membership.span, %member, %cause, "trouble");
        self.act(|state, now| state.agreement.accuse([(member.0, cause)], now));
    }

    /// Accuses several members at once: each of them is to be known as a cause.
    pub(super) fn accuse_all(&self, accused: Vec<(Rank, FailureCause)>) {
        let accused = accused.into_iter().map(|(member, cause)| (member.0, cause));
        self.act(|state, now| state.agreement.accuse(accused, now));
    }

    pub(super) fn lose(&self, member: Rank, cause: FailureCause) {
        self.act(|state, now| state.agreement.lose(member.0, cause, now));
    }

    pub(super) fn reconnected(&self, member: Rank) {
        self.act(|state, now| state.agreement.reconnect(member.0, now));
    }

    pub(super) fn receive_end_frame(&self, from: Rank, frame: EndFrame) -> Result<(), &'static str> {
        self.act(|state, now| state.agreement.receive(from.0, frame, now))
    }

    /// Accuses the member that caused an error of a transfer, or declares the failure of this one.
    pub(super) fn report(&self, error: TransferError) {
        match error {
            TransferError::Local(cause) => self.declare(cause),
            TransferError::Protocol { by, what } => self.accuse(by, FailureCause::Protocol { what }),
            TransferError::Unattached { by, what } => self.accuse(by, FailureCause::DataConnection { what }),
            TransferError::Corrupted { by, message, block } => {
                self.accuse(by, FailureCause::Corrupted { message, block: block.0 });
            }
            TransferError::Work { with, error } => match error {
                WorkError::LocalProtection => {
                    let what = "the memory of a block could not be read or written".to_owned();
                    self.declare(FailureCause::Resources { what });
                }
                WorkError::Device { .. } | WorkError::QueueFull { .. } => {
                    self.declare(FailureCause::Resources { what: error.to_string() });
                }
                error if may_come_from_the_dying(&error) => {
                    // Flushed work says no more than that the connection was lost.
                    let error = if error == WorkError::Flushed { WorkError::ConnectionLost } else { error };
                    self.accuse(with, FailureCause::DataConnection { what: error.to_string() });
                }
                error => self.accuse(with, FailureCause::Protocol { what: error.to_string() }),
            },
        }
    }

    // Waiting for the end.

    /// Returns how the group ended, or `None` if it has not.
    pub(crate) fn outcome(&self) -> Option<GroupResult> {
        self.outcome.borrow().clone()
    }

    /// Waits until the group has ended.
    pub(crate) async fn ended(&self) -> GroupResult {
        let mut outcome = self.outcome.subscribe();
        let outcome = outcome.wait_for(Option::is_some).await.expect("the sender lives in self");
        outcome.clone().expect("waited for one")
    }

    /// Waits until the group fails, which may be never.
    pub(crate) async fn failed(&self) -> GroupFailure {
        match self.ended().await {
            Err(failure) => failure,
            Ok(_) => std::future::pending().await,
        }
    }

    /// Tells whether this member is to do no further work.
    pub(super) fn has_stopped(&self) -> bool {
        self.status.borrow().stopped
    }

    /// Waits until this member is to do no further work.
    pub(super) async fn stopped(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| status.stopped).await.expect("the sender lives in self");
    }

    /// At a member: waits until the root closes the group; returns the number of messages.
    pub(super) async fn closing(&self) -> u64 {
        let mut status = self.status.subscribe();
        let closed = std::pin::pin!(status.wait_for(|status| status.messages.is_some()));
        let status = WhenWoken::new(closed).await.expect("the sender lives in self");
        status.messages.expect("waited for it")
    }

    /// At a member: waits until the root closes the group and this member has all its messages.
    pub(super) async fn has_all(&self) {
        let mut status = self.status.subscribe();
        let has_all = std::pin::pin!(status.wait_for(|status| status.has_all));
        let _ = WhenWoken::new(has_all).await.expect("the sender lives in self");
    }

    /// Waits for `limit`, in steps: a process that was stopped goes on in one of them. In the others it reads the
    /// frames that came meanwhile, before it gives a member up.
    pub(super) async fn wait_in_steps(&self, limit: Duration) {
        for _ in 0..PATIENCE_STEPS {
            self.membership.node.environment.sleep(limit / PATIENCE_STEPS).await;
        }
    }

    /// Waits for the next event of the mesh; returns `None` if the agreement has had its turn instead.
    pub(super) async fn next_event(&self, inbox: &mut Inbox) -> Option<GroupEvent> {
        let mut status = self.status.subscribe();
        let deadline = status.borrow_and_update().deadline;
        let elapsed = async {
            match deadline {
                Some(at) => self.membership.node.environment.sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        futures::select_biased! {
            event = inbox.next().fuse() => match event {
                Some(event) => Some(event),
                // The mesh knows the outcome, and forgets the group.
                None => {
                    let _ = self.ended().await;
                    None
                }
            },
            () = elapsed.fuse() => {
                self.act(|state, now| state.agreement.elapse(now));
                None
            }
            _ = status.changed().fuse() => None,
        }
    }

    // The agreement.

    /// Takes a step in the agreement and carries out its results.
    fn act<T>(&self, step: impl FnOnce(&mut EndState, Timestamp) -> T) -> T {
        let now = self.membership.now();
        let mut state = self.lock();
        let result = step(&mut state, now);
        // Queued while the state is locked: frames arrive in the order of the steps.
        let mut told = Vec::new();
        for (rank, frame) in state.agreement.take_frames() {
            let node = self.membership.members[rank as usize];
            if matches!(frame, EndFrame::Decided { .. }) {
                told.push(node);
            }
            self.membership.post(node, GroupFrame::End(frame));
        }
        let agreement = &state.agreement;
        let messages = agreement.messages();
        let has_all = messages.is_some_and(|messages| agreement.held() >= messages);
        let (stopped, deadline) = (agreement.stopped(), agreement.deadline());
        let status = EndStatus { messages, has_all, stopped, deadline };
        if let (false, Some((ballot, outcome))) = (state.concluded, state.agreement.outcome().cloned()) {
            state.concluded = true;
            state.stable = self.cut(&outcome).max(state.stable);
            state.deliver_stable();
            self.conclude(&state.agreement, ballot, outcome, told);
        }
        // While the state is locked: an older status must not replace a newer one.
        self.status.send_if_modified(|known| {
            let changed = *known != status;
            *known = status;
            changed
        });
        // Messages that this member has reported as missing are not delivered any more: tasks that wait learn that.
        let undeliverable = if status.stopped { std::mem::take(&mut state.early) } else { BTreeMap::new() };
        let discarded = if state.concluded { std::mem::take(&mut state.unstable) } else { VecDeque::new() };
        drop(state);
        drop((undeliverable, discarded));
        result
    }

    /// Publishes how the group has ended; this member has `told` the outcome to other members.
    fn conclude(&self, agreement: &Agreement, ballot: Ballot, outcome: Outcome, told: Vec<NodeId>) {
        let ended = match &outcome {
            Outcome::Closed { messages } => {
                let held = self.membership.members.iter().map(|_| Some(*messages)).collect();
                let records = agreement.records().cloned().collect();
                Ok(self.certificate(*messages, held, records))
            }
            Outcome::Failed(verdict) => Err(self.failure(agreement, verdict)),
        };
        match &ended {
            Ok(certificate) => {
                tracing::info!(parent: &self.membership.span, %certificate, "group closed");
                self.retained.clear();
            }
            Err(failure) => {
                if failure.failed.iter().all(|failed| failed.cause == FailureCause::Abandoned) {
                    // Somebody does not need it any more.
                    tracing::info!(parent: &self.membership.span, %failure, "group left");
                } else {
                    tracing::error!(parent: &self.membership.span, %failure, "group failed");
                }
                if !self.membership.spec.recoverable || !failure.quorum || failure.names(self.membership.rank) {
                    // This member cannot go on.
                    self.retained.clear();
                }
                self.membership.node.counters.groups_failed.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.membership.node.mesh.conclude_group(self.membership.id, ballot, outcome);
        if told.is_empty() {
            self.outcome.send_replace(Some(ended));
            return;
        }
        // They depend on this member's frames, which must be written before the application may end the process.
        let (outcome, node) = (self.outcome.clone(), self.membership.node.clone());
        let environment = node.environment.clone();
        environment.spawn(Box::pin(async move {
            let _ = node.environment.timeout(FLUSH_LIMIT, node.mesh.flush(&told)).await;
            outcome.send_replace(Some(ended));
        }));
    }

    /// Returns how many messages all survivors deliver if delivery is stable. No member has delivered more.
    fn cut(&self, outcome: &Outcome) -> u64 {
        match outcome {
            Outcome::Closed { messages } => *messages,
            Outcome::Failed(verdict) if verdict.quorum => {
                let survivors = (0..).zip(&verdict.held);
                let survivors = survivors.filter(|(rank, _)| verdict.failed.iter().all(|(failed, _)| failed != rank));
                survivors.map(|(_, held)| held.unwrap_or(0)).min().unwrap_or(0)
            }
            // Others may have agreed on less.
            Outcome::Failed(_) => 0,
        }
    }

    fn failure(&self, agreement: &Agreement, verdict: &Verdict) -> GroupFailure {
        // Every member has the same records of the messages that all have. The verdict has the others.
        let lacking = verdict.held.iter().flatten().min().copied().unwrap_or(0);
        let told_from = verdict.records.first().map_or(lacking, |first| first.number.min(lacking));
        // Members that have begun more messages have forgotten more.
        let known = verdict.begun.saturating_sub(RECORDS_MAX as u64)..told_from;
        let known = agreement.records().filter(|record| known.contains(&record.number));
        let records = known.chain(&verdict.records).cloned().collect();
        let failed = verdict.failed.iter().map(|(rank, cause)| FailedMember {
            member: Rank(*rank),
            node: self.membership.members[*rank as usize],
            cause: cause.clone(),
        });
        GroupFailure {
            failed: failed.collect(),
            quorum: verdict.quorum,
            certificate: self.certificate(verdict.begun, verdict.held.clone().into(), records),
            recovery: RecoveryState::new(&self.membership, &self.retained),
        }
    }

    fn certificate(&self, messages: u64, held: Arc<[Option<u64>]>, records: Arc<[MessageRecord]>) -> Certificate {
        Certificate { group: self.membership.id, members: self.membership.members.clone(), messages, held, records }
    }
}

impl EndState {
    /// Notes that messages have begun, with these sizes and digests; returns how many. `None`, and notes nothing, if
    /// this member does no further work.
    fn begin_all(&mut self, first: u64, messages: impl IntoIterator<Item = (u64, Option<Digest>)>) -> Option<u64> {
        if self.agreement.stopped() {
            return None;
        }
        let begun = self.agreement.begun();
        for (number, (size, digest)) in (first..).zip(messages) {
            self.agreement.begin(size);
            self.agreement.note_digest(number, digest);
        }
        Some(self.agreement.begun() - begun)
    }

    /// Notes that this member has so many messages more, while it works.
    fn hold(&mut self, count: u64) {
        (0..count).for_each(|_| {
            self.agreement.hold();
        });
    }

    /// Delivers the messages that are whole while no message before them is missing.
    fn deliver_early(&mut self, is_stable: bool) {
        while let Some(next) = self.early.first_entry() {
            if *next.key() != self.agreement.held() || !self.agreement.hold() {
                break;
            }
            let next = next.remove();
            if is_stable {
                self.unstable.push_back(next);
            } else {
                hand_over(next);
            }
        }
        self.deliver_stable();
    }

    /// Delivers the messages that all members are known to have.
    fn deliver_stable(&mut self) {
        while self.unstable.front().is_some_and(|(_, message)| message.number() < self.stable) {
            self.unstable.pop_front().into_iter().for_each(hand_over);
        }
    }
}

fn hand_over((to, message): WaitingMessage) {
    // Fails only if the application no longer waits.
    let _ = to.send(message);
}

/// Tells whether a process may cause the error by dying: its memory may go before its connections do.
fn may_come_from_the_dying(error: &WorkError) -> bool {
    matches!(
        error,
        WorkError::Flushed | WorkError::ConnectionLost | WorkError::RemoteInvalidRequest | WorkError::RemoteAccess
    )
}

/// Steps into which a limit is divided.
const PATIENCE_STEPS: u32 = 4;
/// How long the last frames of a group may take to be written.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_a_peer_refuses_do_not_prove_that_it_broke_the_protocol() {
        for error in [WorkError::RemoteInvalidRequest, WorkError::RemoteAccess, WorkError::ConnectionLost] {
            assert!(may_come_from_the_dying(&error), "{error}");
        }
        for error in [WorkError::Protocol, WorkError::LocalLength { got: None, room: 0 }, WorkError::ReceiverNotReady] {
            assert!(!may_come_from_the_dying(&error), "{error}");
        }
    }
}
