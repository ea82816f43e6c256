//! The application of one member of one group of a case.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;

use futures::StreamExt;
use futures::future::{BoxFuture, Either, FutureExt, select};
use futures::stream::FuturesUnordered;
use rdmc::{
    Certificate, GroupError, GroupFailure, GroupStats, Memory, Message, Node, NodeId, OfferReceiver, Payload, Receiver,
    Recovered, RecoveryError, SendError, Sender,
};

use super::case::{Behaviour, Case, GroupCase, MemberCase, SendFuture};
use super::observation::{
    Corruptions, Delivered, Ending, MemberObservation, Outcome, RecoveryObservation, SeenReceipt,
};
use super::play::RunningCase;

/// The application of one member.
pub(super) struct Participant {
    running: Arc<RunningCase>,
    node: Node,
    group: usize,
    rank: usize,
}

/// A receiving member's handle.
enum Incoming {
    /// The pool supplies the memory.
    Pool(Receiver),
    /// The application supplies the memory.
    Offers(OfferReceiver),
}

impl Incoming {
    fn refuse(self, reason: &str) {
        match self {
            Self::Pool(receiver) => receiver.refuse(reason),
            Self::Offers(receiver) => receiver.refuse(reason),
        }
    }

    /// Returns whether the stream returns an item after its end.
    fn speaks_after_its_end(&mut self) -> bool {
        match self {
            Self::Pool(receiver) => !matches!(receiver.next().now_or_never(), Some(None)),
            Self::Offers(receiver) => !matches!(receiver.next_offer().now_or_never(), Some(None)),
        }
    }

    fn stats(&self) -> GroupStats {
        match self {
            Self::Pool(receiver) => receiver.stats(),
            Self::Offers(receiver) => receiver.stats(),
        }
    }

    fn members(&self) -> &[NodeId] {
        match self {
            Self::Pool(receiver) => receiver.members(),
            Self::Offers(receiver) => receiver.members(),
        }
    }

    async fn close(self) -> Result<Certificate, GroupFailure> {
        match self {
            Self::Pool(receiver) => Receiver::close(receiver).await,
            Self::Offers(receiver) => receiver.close().await,
        }
    }
}

/// A member's handle.
enum Handle {
    Root(Sender),
    Receiver(Incoming),
}

impl Handle {
    fn of<R>(recovered: Recovered<R>, incoming: impl FnOnce(R) -> Incoming) -> Self {
        match recovered {
            Recovered::Sender(sender) => Self::Root(sender),
            Recovered::Receiver(receiver) => Self::Receiver(incoming(receiver)),
        }
    }
}

/// How far an application has come, over all groups that continue each other.
#[derive(Default)]
struct Progress {
    /// At the root: the first message that is not queued.
    next: usize,
    /// Messages that a receiver has taken.
    taken: usize,
    held: VecDeque<Message>,
}

/// The root's sends under way in one group.
#[derive(Default)]
struct Sends {
    under_way: FuturesUnordered<BoxFuture<'static, Sent>>,
    receipts: FuturesUnordered<AwaitedReceipt>,
    /// The first message that the group could not queue any more.
    not_queued: Option<usize>,
}

/// What has become of a send.
struct Sent {
    receipt: Option<AwaitedReceipt>,
    /// The message, if the group could not queue it.
    not_queued: Option<usize>,
}

/// Both answers of a receipt, when they are there.
type AwaitedReceipt = BoxFuture<'static, SeenReceipt>;

impl Sends {
    fn take(&mut self, sent: Sent) {
        self.receipts.extend(sent.receipt);
        self.not_queued = self.not_queued.into_iter().chain(sent.not_queued).min();
    }

    /// Waits until fewer than `count` are under way.
    async fn fewer_than(&mut self, count: usize) {
        while self.under_way.len() >= count
            && let Some(sent) = self.under_way.next().await
        {
            self.take(sent);
        }
    }
}

/// The next item of a stream of messages.
enum NextMessage {
    Message(Message),
    /// A message of this number and size that the application drops.
    Lost(u64, u64),
    Failed(GroupFailure),
    End,
}

impl Participant {
    pub(super) fn new(running: Arc<RunningCase>, node: Node, group: usize, rank: usize) -> Self {
        Self { running, node, group, rank }
    }

    /// Does what the case says until the member ends.
    pub(super) async fn act(self) {
        self.running.sleep(self.me().begins_ns).await;
        if self.me().behaviour != Behaviour::Absent {
            self.note(|member, now_ns| member.joining_ns = Some(now_ns));
            self.take_part().await;
        }
        // This drops its handle of the node.
        self.note(|member, now_ns| member.ended_ns = Some(now_ns));
    }

    /// Takes part in the group, and in those that continue it.
    async fn take_part(&self) {
        let spec = self.group().spec(self.me());
        let mut joined = match (self.rank, self.me().offers) {
            (0, _) => self.join(self.node.create_group(spec), Handle::Root).await,
            (_, true) => {
                let joining = self.node.join_group(spec).with_offers();
                self.join(joining, |receiver| Handle::Receiver(Incoming::Offers(receiver))).await
            }
            (_, false) => {
                self.join(self.node.join_group(spec), |receiver| Handle::Receiver(Incoming::Pool(receiver))).await
            }
        };
        let mut progress = Progress::default();
        while let Some(handle) = joined {
            let failure = match handle {
                Ok(Handle::Root(sender)) => self.send_all(sender, &mut progress).await,
                Ok(Handle::Receiver(incoming)) => self.receive(incoming, &mut progress).await,
                Err(failure) => Some(failure),
            };
            joined = match failure {
                Some(failure) if self.group().recovers => self.recover(failure).await,
                _ => None,
            };
        }
    }

    /// Recovers from a failure. Returns `None` if that cannot be, and a failure if the group of the survivors fails
    /// while it is formed.
    async fn recover(&self, failure: GroupFailure) -> Option<Result<Handle, GroupFailure>> {
        let recovered = if self.rank > 0 && self.me().offers {
            let recovered = failure.recover().with_offers().await;
            recovered.map(|recovery| (recovery.lost, Handle::of(recovery.handle, Incoming::Offers)))
        } else {
            let recovered = failure.recover().await;
            recovered.map(|recovery| (recovery.lost, Handle::of(recovery.handle, Incoming::Pool)))
        };
        let outcome = match &recovered {
            Ok(_) => Outcome::Done,
            Err(RecoveryError::Group(GroupError::Failed(next))) => next.into(),
            Err(error) => Outcome::Error(error.to_string()),
        };
        let lost = recovered.as_ref().ok().and_then(|(lost, _)| Some(lost.first()?.number));
        self.note(|member, at_ns| {
            let recovered = Ending { at_ns, outcome };
            member.recoveries.push(RecoveryObservation::new(&failure, recovered, lost, member.delivered.len()));
        });
        match recovered {
            Ok((_, handle)) => Some(Ok(handle)),
            Err(RecoveryError::Group(GroupError::Failed(next))) => Some(Err(next)),
            Err(_) => None,
        }
    }

    // The root.

    /// Sends the messages that are not queued, and closes the group; returns its failure.
    async fn send_all(&self, sender: Sender, progress: &mut Progress) -> Option<GroupFailure> {
        let mut sends = Sends::default();
        // A group that continues this one gets the rest.
        while !(self.group().recovers && sends.not_queued.is_some())
            && let Some(message) = self.group().messages.get(progress.next)
            && self.me().behaviour != (Behaviour::DropHandle { after: progress.next })
        {
            self.running.sleep(self.me().pause_ns).await;
            sends.fewer_than(self.group().sends_ahead.max(1)).await;
            let number = progress.next;
            progress.next += 1;
            let payload = self.payload(number, message.size).await;
            let mut send = match message.future {
                SendFuture::NeverPolled => {
                    drop(sender.send(payload));
                    continue;
                }
                SendFuture::Completes => self.sending(&sender, payload, number, None),
                SendFuture::Dropped { after_ns } => self.sending(&sender, payload, number, Some(after_ns)),
            };
            // Sends are first polled in the order of the messages.
            match futures::poll!(&mut send) {
                Poll::Pending => sends.under_way.push(send),
                Poll::Ready(sent) => sends.take(sent),
            }
        }
        if let Behaviour::DropHandle { .. } = self.me().behaviour {
            drop(sender);
            sends.fewer_than(1).await;
            self.note_receipts(sends.receipts).await;
            self.note_close(Outcome::Dropped);
            return None;
        }
        sends.fewer_than(1).await;
        progress.next = sends.not_queued.unwrap_or(progress.next);
        futures::join!(self.close(sender.close()), self.note_receipts(sends.receipts)).0
    }

    async fn note_receipts(&self, mut receipts: FuturesUnordered<AwaitedReceipt>) {
        while let Some(receipt) = receipts.next().await {
            self.note(|member, _| {
                let receipts = match member.recoveries.last_mut() {
                    Some(recovery) => &mut recovery.receipts,
                    None => &mut member.receipts,
                };
                receipts.push(receipt);
                receipts.sort_by_key(|receipt| receipt.number);
            });
        }
    }

    /// Returns the future of one send, which notes its ending.
    fn sending(
        &self,
        sender: &Sender,
        payload: Payload,
        number: usize,
        drop_after_ns: Option<u64>,
    ) -> BoxFuture<'static, Sent> {
        let (running, group, wants_receipt) = (self.running.clone(), self.group, self.group().receipts);
        let send = sender.send(payload);
        async move {
            let mut sent_message = Sent { receipt: None, not_queued: None };
            let outcome = match dropped_after(&running, drop_after_ns, send).await {
                None => Outcome::Dropped,
                Some(Ok(sent)) => {
                    sent_message.receipt = wants_receipt.then(|| SeenReceipt::of(sent).boxed());
                    Outcome::Done
                }
                Some(Err(SendError::Failed(failure))) => (&failure).into(),
                Some(Err(SendError::NotQueued(failure))) => {
                    sent_message.not_queued = Some(number);
                    (&failure).into()
                }
                Some(Err(error)) => Outcome::Error(error.to_string()),
            };
            let at_ns = running.now_ns();
            running.note(group, 0, |member| {
                // The failure of a group that continues another is seen by other calls too.
                if member.recoveries.is_empty() || outcome == Outcome::Done {
                    member.sends[number] = Some(Ending { at_ns, outcome });
                }
            });
            sent_message
        }
        .boxed()
    }

    async fn payload(&self, number: usize, size: u64) -> Payload {
        let content = Case::content(self.group().id, number, size);
        if self.group().sends_from_pool
            && let Ok(mut buffer) = self.node.allocate(content.len()).await
        {
            buffer.copy_from_slice(&content);
            return buffer.into();
        }
        content.into()
    }

    // A member that receives.

    /// Takes the messages of a group, and closes it; returns its failure.
    async fn receive(&self, mut incoming: Incoming, progress: &mut Progress) -> Option<GroupFailure> {
        loop {
            let taken = progress.taken;
            match self.me().behaviour {
                Behaviour::DropHandle { after } if after == taken => {
                    self.note_close(Outcome::Dropped);
                    return None;
                }
                Behaviour::Refuse { after } if after == taken => {
                    incoming.refuse("it cannot go on");
                    self.note_close(Outcome::Dropped);
                    return None;
                }
                Behaviour::CloseEarly { after } if after == taken => break,
                _ => {}
            }
            let next = self.next(&mut incoming, taken).await;
            if !self.take(next, &mut progress.held).await {
                let spoke = incoming.speaks_after_its_end();
                self.note(|member, _| member.spoke_after_end |= spoke);
                break;
            }
            progress.taken += 1;
        }
        progress.held.clear();
        self.note_corruptions(&incoming);
        self.close(incoming.close()).await
    }

    async fn next(&self, incoming: &mut Incoming, taken: usize) -> NextMessage {
        match incoming {
            Incoming::Pool(receiver) => match self.patiently(receiver, |receiver| receiver.next().boxed()).await {
                None => NextMessage::End,
                Some(Ok(message)) => NextMessage::Message(message),
                Some(Err(failure)) => NextMessage::Failed(failure),
            },
            Incoming::Offers(receiver) => self.next_offered(receiver, taken).await,
        }
    }

    async fn next_offered(&self, receiver: &mut OfferReceiver, taken: usize) -> NextMessage {
        loop {
            let offer = match self.patiently(receiver, |receiver| receiver.next_offer().boxed()).await {
                None => return NextMessage::End,
                Some(Err(failure)) => return NextMessage::Failed(failure),
                Some(Ok(offer)) => offer,
            };
            let (number, size) = (offer.number(), offer.size());
            match self.me().behaviour {
                // The stream reports the failure next.
                Behaviour::RefuseOffer { message } if message == taken => offer.refuse("it is not wanted"),
                Behaviour::DropOffer { message } if message == taken => drop(offer),
                behaviour => {
                    let memory = self.node.register(self.memory(number, size)).expect("the fabric registers anything");
                    let memory = memory.into_mut().expect("the memory is the member's own");
                    let delivery = match self.me().has {
                        Some(_) => offer.accept_partial(memory),
                        None => offer.accept(memory),
                    };
                    if behaviour == (Behaviour::DropDelivery { message: taken }) {
                        return NextMessage::Lost(number, size);
                    }
                    // The receiver reports a failure too.
                    if let Ok(message) = delivery.await {
                        return NextMessage::Message(message);
                    }
                }
            }
        }
    }

    /// Returns the memory for a message, with the parts that this member has.
    fn memory(&self, number: u64, size: u64) -> Memory {
        let GroupCase { id, messages, block_size, .. } = self.group();
        let Some(parts) = self.me().has else {
            return vec![0; usize::try_from(size).expect("messages of a campaign are short")].into();
        };
        // A send that was not executed has no number. So this may be another message of the same size, with other
        // bytes.
        let place = (0_usize..).zip(messages).find(|(at, message)| *at as u64 >= number && message.size == size);
        let content = Case::content(*id, place.map_or(0, |(at, _)| at), size);
        parts.memory(number, *block_size, content).into()
    }

    /// Adds the counts of a group to those of the groups before it.
    fn note_corruptions(&self, incoming: &Incoming) {
        let (stats, members) = (incoming.stats(), incoming.members());
        let last_from = stats.last_corruption.map(|corruption| members[corruption.from.index()].0);
        self.note(|member, _| {
            let before = member.corruptions.unwrap_or_default();
            member.corruptions = Some(Corruptions {
                found: before.found + stats.blocks_corrupted,
                healed: before.healed + stats.blocks_healed,
                last_from: last_from.or(before.last_from),
            });
        });
    }

    // All members.

    /// Notes the next item; returns whether more items may follow.
    async fn take(&self, next: NextMessage, held: &mut VecDeque<Message>) -> bool {
        let (number, size, message) = match next {
            NextMessage::End => {
                self.note_stream(Outcome::Done);
                return false;
            }
            NextMessage::Failed(failure) => {
                self.note_stream((&failure).into());
                return false;
            }
            NextMessage::Lost(number, size) => (number, size, None),
            NextMessage::Message(message) => (message.number(), message.len() as u64, Some(message)),
        };
        let digest = message.as_ref().map(|message| Outcome::digest_of(message));
        let lets_go_each = self.me().lets_go_each;
        let stores = lets_go_each == 0 || number % lets_go_each != 0;
        self.note(|member, at_ns| {
            member.delivered.push(Delivered { at_ns, number, size, digest });
            if stores && message.is_some() {
                member.stored.insert(number);
            }
        });
        message.iter().filter(|_| stores).for_each(Message::stored);
        held.extend(message);
        if held.len() > self.me().holds {
            held.pop_front();
        }
        self.running.sleep(self.me().pause_ns).await;
        true
    }

    /// Waits for the next item; with [`Behaviour::DropNext`] it drops the future and makes a new one.
    async fn patiently<R, T>(&self, receiver: &mut R, next: impl Fn(&mut R) -> BoxFuture<'_, T>) -> T {
        let Behaviour::DropNext { mut after_ns } = self.me().behaviour else { return next(receiver).await };
        loop {
            if let Some(output) = dropped_after(&self.running, Some(after_ns), next(receiver)).await {
                return output;
            }
            after_ns = after_ns.saturating_mul(2);
        }
    }

    /// Joins the group. Returns `None` if this member does not take part, and a failure if the group fails while it is
    /// formed.
    async fn join<T>(
        &self,
        joining: impl Future<Output = Result<T, GroupError>>,
        handle: impl FnOnce(T) -> Handle,
    ) -> Option<Result<Handle, GroupFailure>> {
        let drop_after_ns = match self.me().behaviour {
            Behaviour::DropJoin { after_ns } => Some(after_ns),
            _ => None,
        };
        let joined = dropped_after(&self.running, drop_after_ns, Box::pin(joining)).await;
        let outcome = joined.as_ref().map_or(Outcome::Dropped, Outcome::of_join);
        self.note(|member, at_ns| member.joined = Some(Ending { at_ns, outcome }));
        match joined? {
            Ok(joined) => Some(Ok(handle(joined))),
            Err(GroupError::Failed(failure)) => Some(Err(failure)),
            Err(_) => None,
        }
    }

    /// Closes the group; returns its failure.
    async fn close(&self, closing: impl Future<Output = Result<Certificate, GroupFailure>>) -> Option<GroupFailure> {
        self.note(|member, now_ns| match member.recoveries.last_mut() {
            Some(recovery) => recovery.closing_ns = Some(now_ns),
            None => member.closing_ns = Some(now_ns),
        });
        let drop_after_ns = match self.me().behaviour {
            Behaviour::DropClose { after_ns } => Some(after_ns),
            _ => None,
        };
        let closed = dropped_after(&self.running, drop_after_ns, Box::pin(closing)).await;
        self.note_close(closed.as_ref().map_or(Outcome::Dropped, Into::into));
        closed?.err()
    }

    fn note_close(&self, outcome: Outcome) {
        self.note(|member, at_ns| {
            let closed = match member.recoveries.last_mut() {
                Some(recovery) => &mut recovery.closed,
                None => &mut member.closed,
            };
            *closed = Some(Ending { at_ns, outcome });
        });
    }

    fn note_stream(&self, outcome: Outcome) {
        self.note(|member, at_ns| {
            let stream = match member.recoveries.last_mut() {
                Some(recovery) => &mut recovery.stream,
                None => &mut member.stream,
            };
            *stream = Some(Ending { at_ns, outcome });
        });
    }

    fn note(&self, write: impl FnOnce(&mut MemberObservation, u64)) {
        let now_ns = self.running.now_ns();
        self.running.note(self.group, self.rank, |member| write(member, now_ns));
    }

    fn group(&self) -> &GroupCase {
        &self.running.case.groups[self.group]
    }

    fn me(&self) -> &MemberCase {
        &self.group().members[self.rank]
    }
}

/// Awaits a future for at most `after_ns` of virtual time; returns `None` if it drops the future.
async fn dropped_after<T>(running: &RunningCase, after_ns: Option<u64>, future: impl Future<Output = T>) -> Option<T> {
    let Some(after_ns) = after_ns else { return Some(future.await) };
    match select(std::pin::pin!(future), std::pin::pin!(running.sleep(after_ns))).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}
