//! The application of one member of one group of a case.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::task::Poll;

use futures::StreamExt;
use futures::future::{BoxFuture, Either, FutureExt, select};
use futures::stream::FuturesUnordered;
use rdmc::{
    Arrival, Certificate, GroupError, GroupFailure, GroupStats, Memory, Message, Multicast, Node, NodeId,
    OfferReceiver, Payload, Receiver, Recovered, RecoveryError, SendError, Sender,
};
use tokio::io::AsyncReadExt;
use tokio::sync::Notify;

use super::case::{Behaviour, Case, GroupCase, MemberCase, SendFuture};
use super::observation::{
    Corruptions, Delivered, Ending, MemberObservation, Outcome, RecoveryObservation, SeenRead, SeenReceipt,
};
use super::play::RunningCase;

mod source;

use source::SourceReader;

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
struct Progress {
    /// At the root: the messages that are not queued.
    left: BTreeSet<usize>,
    /// Messages that a receiver has taken.
    taken: usize,
    held: VecDeque<Message>,
}

/// The root's sends under way in one group.
#[derive(Default)]
struct Sends {
    under_way: FuturesUnordered<BoxFuture<'static, Sent>>,
    receipts: FuturesUnordered<AwaitedReceipt>,
    /// The messages that the group could not queue any more.
    not_queued: BTreeSet<usize>,
}

/// What has become of the send of a message.
struct Sent {
    message: usize,
    receipt: Option<AwaitedReceipt>,
    /// Whether the group could not queue it.
    not_queued: bool,
}

/// Both answers of a receipt, when they are there.
type AwaitedReceipt = BoxFuture<'static, SeenReceipt>;

impl Sends {
    fn take(&mut self, sent: Sent) {
        self.receipts.extend(sent.receipt);
        self.not_queued.extend(sent.not_queued.then_some(sent.message));
    }

    /// Waits until fewer than `count` are under way.
    async fn fewer_than(&mut self, count: usize) {
        while self.under_way.len() >= count
            && let Some(sent) = self.under_way.next().await
        {
            self.take(sent);
        }
    }

    /// Waits until a message that is read from its source has its place in the order, or is not sent.
    async fn until_placed(&mut self, message: usize, placed: impl Future<Output = ()>) {
        let mut placed = std::pin::pin!(placed);
        while let Either::Left((Some(sent), _)) = select(self.under_way.next(), placed.as_mut()).await {
            let is_placed = sent.message == message;
            self.take(sent);
            if is_placed {
                break;
            }
        }
    }
}

/// The next item of a stream of messages.
enum NextMessage {
    Message {
        message: Message,
        /// The digest of the header of its offer.
        offered: Option<u64>,
    },
    /// A message of this number and size, and with this digest of its header, that the application drops.
    Lost(u64, u64, u64),
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
        let left = (0..self.group().messages.len()).collect();
        let mut progress = Progress { left, taken: 0, held: VecDeque::new() };
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
        while (!self.group().recovers || sends.not_queued.is_empty())
            && let Some(&message) = progress.left.first()
            && self.me().behaviour != (Behaviour::DropHandle { after: message })
        {
            self.running.sleep(self.me().pause_ns).await;
            sends.fewer_than(self.group().sends_ahead.max(1)).await;
            progress.left.remove(&message);
            let begun = Arc::new(Notify::new());
            let send = self.multicast(&sender, message, &begun).await;
            self.note(|member, _| member.order.push(message));
            let drop_after_ns = match self.group().messages[message].future {
                SendFuture::NeverPolled => continue,
                SendFuture::Completes => None,
                SendFuture::Dropped { after_ns } => Some(after_ns),
            };
            let mut send = self.sending(send, message, drop_after_ns);
            // Sends are first polled in the order of the messages.
            match futures::poll!(&mut send) {
                Poll::Ready(sent) => sends.take(sent),
                Poll::Pending => {
                    sends.under_way.push(send);
                    if self.group().messages[message].source.is_some() {
                        // Time goes on when the root has done all that it can: the message has its place then.
                        let placed = begun.notified().then(|()| self.running.sleep(1));
                        sends.until_placed(message, placed).await;
                    }
                }
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
        progress.left.append(&mut sends.not_queued);
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

    /// Returns the multicast of a message. `begun` is notified when its source has given what is read before the
    /// message has its place.
    async fn multicast(&self, sender: &Sender, message: usize, begun: &Arc<Notify>) -> Multicast {
        let size = self.group().messages[message].size;
        if let Some(source) = self.group().messages[message].source {
            let reader = SourceReader::new(self.running.clone(), self.group(), message, source, begun.clone());
            return sender.send_from(reader, size);
        }
        let payload = self.payload(message, size).await;
        match self.group().header(message) {
            header if header.is_empty() => sender.send(payload),
            header => sender.send_with(header, payload),
        }
    }

    /// Returns the future of one send, which notes its ending.
    fn sending(&self, send: Multicast, message: usize, drop_after_ns: Option<u64>) -> BoxFuture<'static, Sent> {
        let (running, group, wants_receipt) = (self.running.clone(), self.group, self.group().receipts);
        async move {
            let mut sent_message = Sent { message, receipt: None, not_queued: false };
            let outcome = match dropped_after(&running, drop_after_ns, send).await {
                None => Outcome::Dropped,
                Some(Ok(sent)) => {
                    sent_message.receipt = wants_receipt.then(|| SeenReceipt::of(sent).boxed());
                    Outcome::Done
                }
                Some(Err(SendError::Failed(failure))) => (&failure).into(),
                Some(Err(SendError::NotQueued(failure))) => {
                    sent_message.not_queued = true;
                    (&failure).into()
                }
                Some(Err(SendError::Unreadable(_))) => Outcome::Unreadable,
                Some(Err(error)) => Outcome::Error(error.to_string()),
            };
            let at_ns = running.now_ns();
            running.note(group, 0, |member| {
                if sent_message.not_queued {
                    member.order.retain(|sent| *sent != message);
                }
                // The failure of a group that continues another is seen by other calls too.
                if member.recoveries.is_empty() || matches!(outcome, Outcome::Done | Outcome::Unreadable) {
                    member.sends[message] = Some(Ending { at_ns, outcome });
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
                Some(Ok(message)) => NextMessage::Message { message, offered: None },
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
            let (number, size, offered) = (offer.number(), offer.size(), Outcome::digest_of(offer.header()));
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
                        return NextMessage::Lost(number, size, offered);
                    }
                    let delivered = match self.me().reads_at_once {
                        0 => delivery.await,
                        at_once => self.read(delivery, (number, size), at_once).await,
                    };
                    // The receiver reports a failure too.
                    if let Ok(message) = delivered {
                        return NextMessage::Message { message, offered: Some(offered) };
                    }
                }
            }
        }
    }

    /// Reads a message while it arrives.
    async fn read(
        &self,
        arrival: Arrival,
        (number, size): (u64, u64),
        at_once: usize,
    ) -> Result<Message, GroupFailure> {
        let (mut reader, mut bytes, mut piece) = (arrival.into_reader(), Vec::new(), vec![0; at_once]);
        let ended = loop {
            match reader.read(&mut piece).await {
                Ok(0) => break true,
                Ok(read) => bytes.extend(&piece[..read]),
                Err(_) => break false,
            }
        };
        let (read, digest) = (bytes.len() as u64, Outcome::digest_of(&bytes));
        self.note(|member, _| member.reads.push(SeenRead { number, size, read, digest, ended }));
        reader.into_message().await
    }

    /// Returns the memory for a message, with the parts that this member has.
    fn memory(&self, number: u64, size: u64) -> Memory {
        let GroupCase { id, messages, block_size, .. } = self.group();
        let Some(parts) = self.me().has else {
            return vec![0; usize::try_from(size).expect("messages of a campaign are short")].into();
        };
        // A send that was not executed has no number. So this may be another message of the same size, with other
        // bytes.
        let first = number / self.group().numbers_each();
        let place = (0_usize..).zip(messages).find(|(at, message)| *at as u64 >= first && message.size == size);
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
        let (number, size, headers, message) = match next {
            NextMessage::End => {
                self.note_stream(Outcome::Done);
                return false;
            }
            NextMessage::Failed(failure) => {
                self.note_stream((&failure).into());
                return false;
            }
            NextMessage::Lost(number, size, offered) => (number, size, vec![offered], None),
            NextMessage::Message { message, offered } => {
                let headers = offered.into_iter().chain([Outcome::digest_of(message.header())]).collect();
                (message.number(), message.len() as u64, headers, Some(message))
            }
        };
        let digest = message.as_ref().map(|message| Outcome::digest_of(message));
        let lets_go_each = self.me().lets_go_each;
        let lets_go = lets_go_each > 0 && (number / self.group().numbers_each()).is_multiple_of(lets_go_each);
        self.note(|member, at_ns| {
            member.delivered.push(Delivered { at_ns, number, size, digest, headers });
            if !lets_go && message.is_some() {
                member.stored.insert(number);
            }
        });
        message.iter().filter(|_| !lets_go).for_each(Message::stored);
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
