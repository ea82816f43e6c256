//! The root's side of a group.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{Buffer, BufferMut, Memory, SharedObject};
use rdmc_schedule::Repair;
use tokio::io::AsyncRead;
use tokio::sync::oneshot;

use super::continuation::{Continuation, Resumption};
use super::delta::ChecksumsByRank;
use super::error::{GroupError, GroupFailure, SendError};
use super::forming::{FormedGroup, Grants, MemberRole, form};
use super::queue::{QueueSlot, RequestQueue, RequestSender, RootRequest};
use super::receipt::{PendingReceipt, Receipt, SentMessage};
use super::retained::{UNSTABLE_MAX, UNSTABLE_OBJECTS_MAX};
use super::short::ShortMessages;
use super::source::{QueuedContent, Source, shape_to_send};
use super::{Group, GroupSpec, start, take_grants};
use crate::certificate::Certificate;
use crate::failure::FailureCause;
use crate::id::NodeId;
use crate::resources::NodeResources;
use crate::stats::GroupStats;
use crate::table::ring;
use crate::transfer::{Blocks, FirstReceive, HopPlan, Progress, ProgressCounter, Shape, TransferError, Turnstile};

/// The root's handle of a group: sends messages to all members.
///
/// Clones send to the same group, in the order in which their messages are queued. Dropping the last clone without
/// [`close`](Self::close) abandons the group: the root completes the messages that have begun, then the members learn
/// that it has left.
#[derive(Clone)]
pub struct Sender {
    group: Arc<Group>,
    requests: RequestSender,
}

/// The content of a message: pool memory, `Bytes`, a mapped file or a sealed object.
///
/// Fabrics that register memory cheaply send all of them without a copy. Several `Bytes`, such as a header and a body,
/// become one message by one copy: `Payload::from([header, body])`, or `Payload::from` of a `Vec<Bytes>`.
#[derive(Debug)]
#[non_exhaustive]
pub enum Payload {
    /// Registered memory.
    Buffer(Buffer),
    /// Memory that is not registered yet, such as a mapped file.
    Memory(Memory),
    /// An object that all members share, where [the group shares objects](crate::DeliveryMode::Shared). In other groups
    /// its bytes are sent.
    Object(SharedObject),
}

impl Payload {
    /// Returns the length in bytes.
    fn len(&self) -> u64 {
        let len = match self {
            Self::Buffer(buffer) => buffer.len(),
            Self::Memory(memory) => memory.len(),
            Self::Object(object) => object.len(),
        };
        len as u64
    }
}

impl From<Buffer> for Payload {
    fn from(buffer: Buffer) -> Self {
        Self::Buffer(buffer)
    }
}

impl From<BufferMut> for Payload {
    fn from(buffer: BufferMut) -> Self {
        Self::Buffer(buffer.freeze())
    }
}

impl From<Memory> for Payload {
    fn from(memory: Memory) -> Self {
        Self::Memory(memory)
    }
}

impl From<SharedObject> for Payload {
    fn from(object: SharedObject) -> Self {
        Self::Object(object)
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self::Memory(bytes.into())
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Memory(bytes.into())
    }
}

impl From<Vec<Bytes>> for Payload {
    /// Joins the parts to one message. They are copied into new memory, once; a single part is not copied.
    fn from(parts: Vec<Bytes>) -> Self {
        join(parts)
    }
}

impl<const N: usize> From<[Bytes; N]> for Payload {
    /// Joins the parts, such as a header and a body, to one message. They are copied into new memory, once; a single
    /// part is not copied.
    fn from(parts: [Bytes; N]) -> Self {
        join(parts)
    }
}

impl From<&'static [u8]> for Payload {
    fn from(bytes: &'static [u8]) -> Self {
        Bytes::from_static(bytes).into()
    }
}

impl From<&'static str> for Payload {
    fn from(text: &'static str) -> Self {
        text.as_bytes().into()
    }
}

/// Joins parts to one payload.
fn join(parts: impl IntoIterator<Item = Bytes>) -> Payload {
    let parts: Vec<Bytes> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    match <[Bytes; 1]>::try_from(parts) {
        Ok([only]) => only.into(),
        Err(parts) => parts.concat().into(),
    }
}

pub(crate) async fn create(node: Arc<NodeResources>, spec: GroupSpec) -> Result<Sender, GroupError> {
    Ok(start_sending(Box::pin(form(node, spec, MemberRole::Root)).await?))
}

/// Continues a failed group at its root.
pub(crate) async fn go_on(node: Arc<NodeResources>, continuation: Continuation) -> Result<Sender, GroupError> {
    let spec = continuation.spec.clone();
    Ok(start_sending(Box::pin(form(node, spec, MemberRole::Survivor(Box::new(continuation)))).await?))
}

fn start_sending(formed: FormedGroup) -> Sender {
    let FormedGroup { group, grants, rows, resumption, .. } = formed;
    let (requests, queue) = RequestQueue::new(group.retained.clone());
    start(group.clone(), run(group.clone(), queue, grants, resumption), rows);
    Sender { group, requests }
}

impl Sender {
    /// Sends a message to every member.
    ///
    /// The future completes when the root sends nothing more of the message, although some members may still receive
    /// from others (DSN §4.6). The [`Receipt`] that it returns tells when every member has the message, and when every
    /// application has stored it. In a [recoverable](GroupSpec::recoverable) group, and where blocks are
    /// [checked](GroupSpec::check_blocks), the memory is kept until every member has the message. Any number of futures
    /// may be awaited at once. They are carried out and completed in the order in which they were first polled, a few at
    /// a time. [`enqueue`](Self::enqueue) does not wait for a poll.
    ///
    /// # Cancel safety
    /// If the future is dropped before it is polled or before its turn, nothing is sent. Later, the message is sent all
    /// the same.
    ///
    /// # Errors
    /// [`SendError::Failed`] if the group fails meanwhile, [`SendError::NotQueued`] if it fails before;
    /// [`SendError::NotAnObject`] if members [share](crate::DeliveryMode::Shared) objects and the payload is not one.
    pub fn send(&self, payload: impl Into<Payload>) -> Multicast {
        let payload = payload.into();
        let (group, requests) = (self.group.clone(), self.requests.clone());
        let (counter, progress) = self.counted(payload.len());
        let sent = async move {
            let (_slot, completed) = queue(&group, &requests, None, payload, counter)?.unzip();
            complete(&group, completed, true).await
        };
        Multicast { sent: sent.boxed(), progress }
    }

    /// Sends as [`send`](Self::send) does, but the message has its place in the order when this returns. There is no
    /// limit to the messages that wait: await the futures.
    ///
    /// # Cancel safety
    /// Dropping the future does not take the message back.
    ///
    /// # Errors
    /// As of [`send`](Self::send), from the future.
    pub fn enqueue(&self, payload: impl Into<Payload>) -> Multicast {
        self.enqueue_with(None, payload.into())
    }

    fn enqueue_with(&self, header: Option<Bytes>, payload: Payload) -> Multicast {
        let (counter, progress) = self.counted(payload.len());
        let queued = queue(&self.group, &self.requests, header, payload, counter);
        let group = self.group.clone();
        let completed = queued.map(|queued| {
            let (slot, completed) = queued.unzip();
            slot.into_iter().for_each(QueueSlot::detach);
            completed
        });
        let sent = async move { complete(&group, completed?, true).await };
        Multicast { sent: sent.boxed(), progress }
    }

    /// Sends a message of `len` bytes while it is read from `reader`, such as the body of a request.
    ///
    /// The future gets `len` bytes of the node's [pool](crate::NodeBuilder::pool_bytes_max) and reads the first block.
    /// Then the message takes its place in the order, as in [`send`](Self::send). When its turn comes, a task reads the
    /// others, and each block leaves when it is here. A source that is slow holds the later messages of the group up.
    /// Bytes after the first `len` are not read.
    ///
    /// The message is read whole before it takes its place if it is short, that is of one block or for the
    /// [ring](GroupSpec::ring), and in [delta](GroupSpec::delta) groups and those with [headers](GroupSpec::headers).
    ///
    /// # Cancel safety
    /// If the future is dropped before the message takes its place or before its turn, nothing is sent. Later, the
    /// message is read and sent all the same.
    ///
    /// # Errors
    /// - [`SendError::Unreadable`] if the reader fails, or ends early, before the message takes its place. The group
    ///   goes on. Later, the group fails with [`FailureCause::Unreadable`] at this member.
    /// - [`SendError::Pool`] if the pool can never lend `len` bytes.
    /// - As of [`send`](Self::send). [`SendError::NotQueued`] also if the group fails before the message's turn.
    ///   [Recovering](GroupFailure::recover) sends the messages that are queued behind it all the same. If the group
    ///   fails later, this member goes on reading, so that recovering can complete the message, and waits for that. If
    ///   the source fails then, this member is not among those that go on.
    /// - [`SendError::NotAnObject`] where members [share](crate::DeliveryMode::Shared) objects.
    pub fn send_from(&self, reader: impl AsyncRead + Send + 'static, len: u64) -> Multicast {
        self.read_and_send(None, Source::new(reader, len), len)
    }

    /// Sends as [`send_from`](Self::send_from) does, with a header as of [`send_with`](Self::send_with).
    ///
    /// The message is read whole before it takes its place with its header: a message must follow its header, and a
    /// source can break off.
    ///
    /// # Cancel safety
    /// If the future is dropped before its turn, nothing is sent. Later, header and message are sent all the same.
    ///
    /// # Errors
    /// As of [`send_from`](Self::send_from); [`SendError::NoHeaders`] and [`SendError::HeaderTooLong`], before anything
    /// is read.
    pub fn send_from_with(
        &self,
        header: impl Into<Bytes>,
        reader: impl AsyncRead + Send + 'static,
        len: u64,
    ) -> Multicast {
        self.read_and_send(Some(header.into()), Source::new(reader, len), len)
    }

    fn read_and_send(&self, header: Option<Bytes>, source: Source, len: u64) -> Multicast {
        let (group, requests) = (self.group.clone(), self.requests.clone());
        let (counter, progress) = self.counted(len);
        let sent = async move {
            check_header(&group, header.as_ref())?;
            let begun = futures::select_biased! {
                begun = std::pin::pin!(source.begin(&group).fuse()) => begun?,
                _ = std::pin::pin!(group.end.ended().fuse()) => return Err(not_queued(&group).await),
            };
            let (message, shape) = begun;
            let is_whole = matches!(message, QueuedContent::Whole(_));
            let (_slot, completed) = put(&group, &requests, header, (message, shape), counter)?.unzip();
            // If it has not begun, the rest of it is gone with its source.
            complete(&group, completed, is_whole).await
        };
        Multicast { sent: sent.boxed(), progress }
    }

    /// Sends as [`enqueue`](Self::enqueue) does, with a header of at most [`GroupSpec::HEADER_LEN_MAX`] bytes that
    /// receivers get with the [offer](crate::Offer::header) of the message. In a group with
    /// [headers](GroupSpec::headers), messages that are sent without one have an empty header.
    ///
    /// # Cancel safety
    /// Dropping the future does not take the message back.
    ///
    /// # Errors
    /// As of [`send`](Self::send), from the future; [`SendError::NoHeaders`] and [`SendError::HeaderTooLong`].
    pub fn send_with(&self, header: impl Into<Bytes>, payload: impl Into<Payload>) -> Multicast {
        self.enqueue_with(Some(header.into()), payload.into())
    }

    /// Closes the group: `Ok` if and only if every message reached every member and every member agrees to the end.
    ///
    /// Returns the certificate. Messages that clones send later are not [queued](SendError::Closed).
    ///
    /// # Cancel safety
    /// If the future is dropped before it is polled, the group is abandoned. Later, it is closed all the same.
    ///
    /// # Errors
    /// The group's failure, if it failed before every member had every message; its certificate says what arrived.
    pub async fn close(self) -> Result<Certificate, GroupFailure> {
        // After all earlier requests; it stays if this future is dropped.
        self.requests.close();
        self.group.end.ended().await
    }

    /// Waits until the group fails; may wait for ever.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn failed(&self) -> GroupFailure {
        self.group.end.failed().await
    }

    /// Returns the members in rank order; the first is this node.
    pub fn members(&self) -> &[NodeId] {
        &self.group.membership.members
    }

    /// Returns the group's counters at the root.
    pub fn stats(&self) -> GroupStats {
        self.group.stats()
    }

    /// Makes what counts a message of so many bytes, and where the application sees it.
    fn counted(&self, size: u64) -> (Option<ProgressCounter>, MulticastProgress) {
        if self.group.membership.spec.is_shared() || self.group.fits_a_slot(size) {
            return (None, MulticastProgress::AtOnce { size, counter: OnceCell::new() });
        }
        let counter = ProgressCounter::new(size);
        let handle = counter.handle_unwatched();
        (Some(counter), MulticastProgress::InBlocks(handle))
    }
}

/// Queues a message; returns `None` if the group has ended.
fn queue(
    group: &Group,
    requests: &RequestSender,
    header: Option<Bytes>,
    payload: Payload,
    progress: Option<ProgressCounter>,
) -> Result<Option<(QueueSlot, oneshot::Receiver<SentMessage>)>, SendError> {
    check_header(group, header.as_ref())?;
    let (message, shape) = shaped(group, payload)?;
    put(group, requests, header, (QueuedContent::Whole(message), shape), progress)
}

/// Checks that the group has headers, if one is given, and its length.
fn check_header(group: &Group, header: Option<&Bytes>) -> Result<(), SendError> {
    let max = GroupSpec::HEADER_LEN_MAX;
    match header {
        Some(_) if !group.membership.spec.headers => Err(SendError::NoHeaders),
        Some(header) if header.len() > max => Err(SendError::HeaderTooLong { bytes: header.len(), max }),
        _ => Ok(()),
    }
}

/// Registers a payload and divides it into blocks.
fn shaped(group: &Group, payload: Payload) -> Result<(Buffer, Shape), SendError> {
    let message = group.register_payload(payload)?;
    let shape = shape_to_send(group, message.len() as u64)?;
    Ok((message, shape))
}

/// Puts a message into the queue, with an empty header if the group has headers and none is given; returns `None` if
/// the group has ended.
fn put(
    group: &Group,
    requests: &RequestSender,
    header: Option<Bytes>,
    message: (QueuedContent, Shape),
    progress: Option<ProgressCounter>,
) -> Result<Option<(QueueSlot, oneshot::Receiver<SentMessage>)>, SendError> {
    let header = header.or_else(|| group.membership.spec.headers.then(Bytes::new));
    let header = header.map(|header| shaped(group, header.into())).transpose()?;
    // The queue may still be open after the end is known, while the engine has not had its turn.
    if group.end.outcome().is_some() {
        return Ok(None);
    }
    let (done, completed) = oneshot::channel();
    Ok(requests.send(header, message, done, progress).map(|slot| (slot, completed)))
}

/// Waits until a message is sent, and returns its receipt. `None` for a group that had ended before the message was
/// queued. A message that has not begun when the group fails can be `kept` for a group that continues this one.
async fn complete(
    group: &Arc<Group>,
    queued: Option<oneshot::Receiver<SentMessage>>,
    kept: bool,
) -> Result<Receipt, SendError> {
    let Some(completed) = queued else { return Err(not_queued(group).await) };
    match completed.await {
        Ok(SentMessage { slip, is_complete: true }) => Ok(Receipt::new(group.clone(), slip)),
        // A group that has closed has carried every message that was begun.
        Ok(SentMessage { slip, .. }) => {
            group.end.ended().await.map(|_| Receipt::new(group.clone(), slip)).map_err(SendError::Failed)
        }
        Err(_) if kept => Err(group.end.ended().await.err().map_or(SendError::Closed, SendError::Failed)),
        Err(_) => Err(not_queued(group).await),
    }
}

async fn not_queued(group: &Group) -> SendError {
    group.end.ended().await.err().map_or(SendError::Closed, SendError::NotQueued)
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("group", &self.group.membership.id).finish_non_exhaustive()
    }
}

/// The future of one multicast, made by [`Sender::send`] or [`Sender::enqueue`].
#[must_use = "what send returns does nothing unless it is polled"]
pub struct Multicast {
    sent: BoxFuture<'static, Result<Receipt, SendError>>,
    progress: MulticastProgress,
}

/// Where the progress of a multicast is counted.
enum MulticastProgress {
    InBlocks(Progress),
    /// The message leaves as a whole: it is done when the future completes.
    AtOnce {
        size: u64,
        counter: OnceCell<ProgressCounter>,
    },
}

impl Multicast {
    /// Returns a handle of the message's progress at the root. A message that leaves as a whole, by the ring or as an
    /// object that members share, is done when this future completes.
    pub fn progress(&self) -> Progress {
        match &self.progress {
            MulticastProgress::InBlocks(progress) => progress.watched(),
            MulticastProgress::AtOnce { size, counter } => counter.get_or_init(|| ProgressCounter::new(*size)).handle(),
        }
    }
}

impl Future for Multicast {
    type Output = Result<Receipt, SendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let sent = std::task::ready!(self.sent.poll_unpin(cx));
        if let MulticastProgress::AtOnce { counter, .. } = &mut self.progress
            && let Some(counter) = counter.take()
            && sent.is_ok()
        {
            counter.complete();
        }
        Poll::Ready(sent)
    }
}

impl fmt::Debug for Multicast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Multicast").finish_non_exhaustive()
    }
}

/// The root's engine: carries out requests in order until the group is closed.
async fn run(
    group: Arc<Group>,
    mut queue: RequestQueue,
    grants: Grants,
    mut resumption: Resumption,
) -> Result<(), TransferError> {
    let mut grants = take_grants(&group, grants);
    let mut running = FuturesUnordered::new();
    let mut messages = group.membership.prior.base;
    let mut completed = OrderedCompletions { next: messages, early: BTreeMap::new() };
    let mut relay_turns = Turnstile::default();
    let mut receive_turns = Turnstile::default();
    let close = loop {
        let room = running.len() < TRANSFERS_MAX;
        futures::select_biased! {
            error = grants.select_next_some() => return Err(error),
            outcome = running.select_next_some() => completed.add(outcome)?,
            next = next_message(&group, &mut resumption, &mut queue, messages, room).fuse() => match next? {
                NextStep::Message { repair, blocks, source, done, progress } => {
                    // The rest of a message that is read from a source would go with the source.
                    if repair.is_none() && source.is_none() {
                        queue.starting.push_back((blocks.whole(), blocks.shape()));
                    }
                    group.status.begin_whole(blocks.shape().size).await;
                    queue.starting.clear();
                    group.retained().keep(messages, &blocks);
                    if let Some(source) = source {
                        source.read_rest(&group, messages, blocks.clone());
                    }
                    if repair.is_none() {
                        group.write_size(&blocks)?;
                        if !group.is_delta() {
                            // Before its turn, so that members can be ready for it when those before have left.
                            group.announce(messages, blocks.shape().size);
                        }
                    }
                    let (group, number) = (&group, messages);
                    let done = done.map(|done| PendingReceipt::new(done, group.status.receipts.slip(number)));
                    let planned = PlanSource::new(group, messages, repair, blocks.shape());
                    let (receive_turn, relay_turn) = (receive_turns.next(), relay_turns.next());
                    running.push(async move {
                        let plan = planned.plan(group, number, &blocks).await?;
                        let transfer = group.transfer(number, plan, blocks, None).counted(progress);
                        let size = transfer.run(FirstReceive::Due, receive_turn, relay_turn).await?;
                        group.message_completed(number, size);
                        Ok((number, done))
                    });
                    messages += 1;
                }
                NextStep::Short(taken) => {
                    let (whole, done): (Vec<_>, Vec<_>) = taken.into_iter().unzip();
                    let short = ShortMessages::copy(&group, &whole)?;
                    queue.starting.extend(whole);
                    group.begin_short(messages, &short).await;
                    queue.starting.clear();
                    // Before the messages leave: a receiver may say at once that it has let one of them go.
                    let receipts = (messages..).zip(done).map(|(number, done)| {
                        (number, done.map(|done| PendingReceipt::new(done, group.status.receipts.slip(number))))
                    });
                    let receipts: Vec<_> = receipts.collect();
                    group.write_short(&short)?;
                    for (number, done) in receipts {
                        completed.add(Ok((number, done)))?;
                        messages = number + 1;
                    }
                }
                NextStep::End { closed } => break closed,
            },
        }
    };
    let mut last = relay_turns.next();
    let mut on_its_way = std::pin::pin!(last.wait().fuse());
    while !running.is_empty() {
        futures::select_biased! {
            error = grants.select_next_some() => return Err(error),
            outcome = running.select_next_some() => completed.add(outcome)?,
            // So that members can agree to the end as soon as they have the last message.
            () = on_its_way => if close {
                group.end.announce_close(messages);
            },
        }
    }
    if !close {
        return Err(TransferError::Local(FailureCause::Abandoned));
    }
    group.end.close(messages);
    Ok(())
}

/// A message that was taken from the queue.
type QueuedMessage = ((Buffer, Shape), Option<oneshot::Sender<SentMessage>>);

/// The next step of the root's engine.
enum NextStep {
    Message {
        repair: Option<Repair>,
        blocks: Arc<Blocks>,
        /// What has the rest of the blocks.
        source: Option<Source>,
        done: Option<oneshot::Sender<SentMessage>>,
        progress: Option<ProgressCounter>,
    },
    /// One or several messages for one slot of the ring.
    Short(Vec<QueuedMessage>),
    End {
        closed: bool,
    },
}

/// Waits for the next message; interrupted messages come first.
async fn next_message(
    group: &Group,
    resumption: &mut Resumption,
    queue: &mut RequestQueue,
    number: u64,
    room: bool,
) -> Result<NextStep, TransferError> {
    if !room {
        return std::future::pending().await;
    }
    if let Some(interrupted) = resumption.messages.pop_front() {
        let kept =
            group.retained().message(interrupted.number).map(|kept| kept.into_blocks(&*group.membership.node.fabric));
        if let Some(Ok(blocks)) = kept {
            return Ok(NextStep::Message {
                repair: Some(interrupted.repair),
                blocks,
                source: None,
                done: None,
                progress: None,
            });
        }
        let what = format!("message {} cannot be registered again", interrupted.number);
        group.end.declare(FailureCause::Resources { what });
        return std::future::pending().await;
    }
    let unstable_max = if group.membership.spec.is_shared() { UNSTABLE_OBJECTS_MAX } else { UNSTABLE_MAX };
    group.retained().room(number, unstable_max).await;
    loop {
        if queue.next_is_message().await {
            group.room_for_slot().await?;
        }
        return Ok(match queue.take() {
            Some(RootRequest::Send { message, shape, done, progress, .. }) => match message {
                QueuedContent::Whole(message) if group.fits_a_slot(shape.size) => {
                    let most = group.retained().room_left(number, unstable_max).min(PACKED_MAX);
                    NextStep::Short(take_short(group, queue, ((message, shape), done), most))
                }
                message => {
                    let (blocks, source) = message.into_blocks(shape);
                    NextStep::Message { repair: None, blocks, source, done, progress }
                }
            },
            Some(RootRequest::Close) => NextStep::End { closed: true },
            None if queue.has_ended() => NextStep::End { closed: false },
            // It was taken back meanwhile.
            None => continue,
        });
    }
}

/// Takes the short messages that wait behind the first one, as many as fit into its slot and at most `most` in all.
fn take_short(group: &Group, queue: &mut RequestQueue, first: QueuedMessage, most: usize) -> Vec<QueuedMessage> {
    let mut packed = ring::packed_len([first.0.0.len()].into_iter());
    let mut taken = vec![first];
    let mut fits = |size: u64| {
        let len = usize::try_from(size).ok().filter(|_| group.fits_a_slot(size));
        let grown = len.map(|len| packed + ring::COUNT_LEN + len).filter(|grown| *grown <= group.slot_len_max());
        packed = grown.unwrap_or(packed);
        grown.is_some()
    };
    while taken.len() < most {
        let next = queue.take_if(|shape| fits(shape.size));
        let Some(RootRequest::Send { message: QueuedContent::Whole(message), shape, done, .. }) = next else { break };
        taken.push(((message, shape), done));
    }
    taken
}

/// The source of a message's plan.
enum PlanSource {
    Known(HopPlan),
    /// The answers of all members about the blocks that they have.
    Asked(oneshot::Receiver<ChecksumsByRank>),
}

impl PlanSource {
    fn new(group: &Group, message: u64, repair: Option<Repair>, shape: Shape) -> Self {
        match repair {
            Some(repair) => Self::Known(HopPlan::Repair(repair)),
            None if group.is_delta() => Self::Asked(group.delta.ask_for_parts(message, shape)),
            None => Self::Known(HopPlan::Schedule(group.schedule(shape.count))),
        }
    }

    async fn plan(self, group: &Group, message: u64, blocks: &Blocks) -> Result<HopPlan, TransferError> {
        match self {
            Self::Known(plan) => Ok(plan),
            Self::Asked(answers) => group.delta.begin(message, blocks, answers).await,
        }
    }
}

/// Completes the futures of messages that are sent, in the order of the messages.
struct OrderedCompletions {
    next: u64,
    early: BTreeMap<u64, Option<PendingReceipt>>,
}

impl OrderedCompletions {
    fn add(&mut self, outcome: Result<(u64, Option<PendingReceipt>), TransferError>) -> Result<(), TransferError> {
        let (number, done) = outcome?;
        if number != self.next {
            self.early.insert(number, done);
            return Ok(());
        }
        let mut next = Some(done);
        while let Some(done) = next {
            self.next += 1;
            done.into_iter().for_each(|mut receipt: PendingReceipt| receipt.hand_over(true));
            next = self.early.remove(&self.next);
        }
        Ok(())
    }
}

/// Most messages of one slot.
const PACKED_MAX: usize = 256;
/// Messages in flight at once.
const TRANSFERS_MAX: usize = 4;
