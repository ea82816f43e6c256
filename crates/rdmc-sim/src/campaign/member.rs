//! The application of one member of one group of a case.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Poll;

use futures::StreamExt;
use futures::future::{BoxFuture, Either, FutureExt, select};
use futures::stream::FuturesUnordered;
use rdmc::{
    Certificate, GroupFailure, GroupStats, Memory, Message, Node, OfferReceiver, Payload, Receiver, SendError, Sender,
};

use super::case::{Behaviour, Case, GroupCase, MemberCase, SendFuture};
use super::observation::{Corruptions, Delivered, Ending, MemberObservation, Outcome, SeenReceipt};
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

    async fn close(self) -> Result<Certificate, GroupFailure> {
        match self {
            Self::Pool(receiver) => Receiver::close(receiver).await,
            Self::Offers(receiver) => receiver.close().await,
        }
    }
}

/// Both answers of a receipt, when they are there.
type AwaitedReceipt = BoxFuture<'static, SeenReceipt>;

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
            match (self.rank, self.me().offers) {
                (0, _) => self.send_all().await,
                (_, supplies_memory) => self.receive(supplies_memory).await,
            }
        }
        // This drops its handle of the node.
        self.note(|member, now_ns| member.ended_ns = Some(now_ns));
    }

    // The root.

    async fn send_all(&self) {
        let created = self.join(self.node.create_group(self.group().spec(self.me()))).await;
        let Some(sender) = created else { return };
        let mut sends: FuturesUnordered<BoxFuture<'static, Option<AwaitedReceipt>>> = FuturesUnordered::new();
        let mut receipts: FuturesUnordered<AwaitedReceipt> = FuturesUnordered::new();
        for (number, message) in self.group().messages.iter().enumerate() {
            if self.me().behaviour == (Behaviour::DropHandle { after: number }) {
                break;
            }
            self.running.sleep(self.me().pause_ns).await;
            while sends.len() >= self.group().sends_ahead.max(1) {
                receipts.extend(sends.next().await.flatten());
            }
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
                Poll::Pending => sends.push(send),
                Poll::Ready(receipt) => receipts.extend(receipt),
            }
        }
        if let Behaviour::DropHandle { .. } = self.me().behaviour {
            drop(sender);
            while let Some(receipt) = sends.next().await {
                receipts.extend(receipt);
            }
            self.note_receipts(receipts).await;
            return self.note_close(Outcome::Dropped);
        }
        while let Some(receipt) = sends.next().await {
            receipts.extend(receipt);
        }
        futures::join!(self.close(sender.close()), self.note_receipts(receipts));
    }

    async fn note_receipts(&self, mut receipts: FuturesUnordered<AwaitedReceipt>) {
        while let Some(receipt) = receipts.next().await {
            self.note(|member, _| member.receipts.push(receipt));
        }
        self.note(|member, _| member.receipts.sort_by_key(|receipt| receipt.number));
    }

    /// Returns the future of one send, which notes its ending, and returns its receipt if the root awaits receipts.
    fn sending(
        &self,
        sender: &Sender,
        payload: Payload,
        number: usize,
        drop_after_ns: Option<u64>,
    ) -> BoxFuture<'static, Option<AwaitedReceipt>> {
        let (running, group, wants_receipt) = (self.running.clone(), self.group, self.group().receipts);
        let send = sender.send(payload);
        async move {
            let mut receipt = None;
            let outcome = match dropped_after(&running, drop_after_ns, send).await {
                None => Outcome::Dropped,
                Some(Ok(sent)) => {
                    receipt = wants_receipt.then(|| SeenReceipt::of(sent).boxed());
                    Outcome::Done
                }
                Some(Err(SendError::Failed(failure) | SendError::NotQueued(failure))) => (&failure).into(),
                Some(Err(error)) => Outcome::Error(error.to_string()),
            };
            let at_ns = running.now_ns();
            running.note(group, 0, |member| member.sends[number] = Some(Ending { at_ns, outcome }));
            receipt
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

    async fn receive(&self, supplies_memory: bool) {
        let spec = self.group().spec(self.me());
        let joined = if supplies_memory {
            self.join(self.node.join_group_with_offers(spec)).await.map(Incoming::Offers)
        } else {
            self.join(self.node.join_group(spec)).await.map(Incoming::Pool)
        };
        let Some(mut incoming) = joined else { return };
        let mut held = VecDeque::new();
        for taken in 0.. {
            match self.me().behaviour {
                Behaviour::DropHandle { after } if after == taken => return self.note_close(Outcome::Dropped),
                Behaviour::Refuse { after } if after == taken => {
                    incoming.refuse("it cannot go on");
                    return self.note_close(Outcome::Dropped);
                }
                Behaviour::CloseEarly { after } if after == taken => break,
                _ => {}
            }
            let next = self.next(&mut incoming, taken).await;
            if !self.take(next, &mut held).await {
                let spoke = incoming.speaks_after_its_end();
                self.note(|member, _| member.spoke_after_end = spoke);
                break;
            }
        }
        drop(held);
        let corruptions = self.corruptions(&incoming.stats());
        self.note(|member, _| member.corruptions = Some(corruptions));
        self.close(incoming.close()).await;
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

    fn corruptions(&self, stats: &GroupStats) -> Corruptions {
        let node_of = |rank: rdmc::Rank| self.group().members[rank.index()].node;
        Corruptions {
            found: stats.blocks_corrupted,
            healed: stats.blocks_healed,
            last_from: stats.last_corruption.map(|corruption| node_of(corruption.from)),
        }
    }

    // All members.

    /// Notes the next item; returns whether more items may follow.
    async fn take(&self, next: NextMessage, held: &mut VecDeque<Message>) -> bool {
        let (number, size, message) = match next {
            NextMessage::End => {
                self.note(|member, at_ns| member.stream = Some(Ending { at_ns, outcome: Outcome::Done }));
                return false;
            }
            NextMessage::Failed(failure) => {
                self.note(|member, at_ns| member.stream = Some(Ending { at_ns, outcome: (&failure).into() }));
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

    async fn join<T>(&self, joining: impl Future<Output = Result<T, rdmc::GroupError>>) -> Option<T> {
        let drop_after_ns = match self.me().behaviour {
            Behaviour::DropJoin { after_ns } => Some(after_ns),
            _ => None,
        };
        let joined = dropped_after(&self.running, drop_after_ns, Box::pin(joining)).await;
        let outcome = joined.as_ref().map_or(Outcome::Dropped, Outcome::of_join);
        self.note(|member, at_ns| member.joined = Some(Ending { at_ns, outcome }));
        joined?.ok()
    }

    async fn close(&self, closing: impl Future<Output = Result<Certificate, GroupFailure>>) {
        self.note(|member, now_ns| member.closing_ns = Some(now_ns));
        let drop_after_ns = match self.me().behaviour {
            Behaviour::DropClose { after_ns } => Some(after_ns),
            _ => None,
        };
        let closed = dropped_after(&self.running, drop_after_ns, Box::pin(closing)).await;
        self.note_close(closed.as_ref().map_or(Outcome::Dropped, Into::into));
    }

    fn note_close(&self, outcome: Outcome) {
        self.note(|member, at_ns| member.closed = Some(Ending { at_ns, outcome }));
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
