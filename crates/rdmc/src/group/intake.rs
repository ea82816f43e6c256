//! The beginning of a message at a receiving member: it learns the size and gets the memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Either};
use rdmc_fabric::{Buffer, BufferMut, ObjectDescriptor};
use rdmc_schedule::{BlockIndex, Rank};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::continuation::{InterruptedMessage, Resumption};
use super::offer::{Arrival, Exclusive, Message, Offer, OfferReply};
use super::short::Incoming;
use super::{Group, GroupSpec};
use crate::checksum::{Checksum, yield_now};
use crate::failure::{FailureCause, with_sources};
use crate::sync::lock;
use crate::table::{IncomingRing, Slot, ring};
use crate::transfer::waits::WaitReason;
use crate::transfer::{
    Blocks, FirstArrival, FirstBlock, FirstContent, FirstReceive, HopPlan, ProgressCounter, Shape, Transfer,
    TransferError, Turn, Turnstile,
};

/// The source of the memory of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemorySource {
    Pool,
    Application,
}

/// The beginning of messages: learns the size, gets the memory.
pub(super) struct Intake {
    group: Arc<Group>,
    memory: MemorySource,
    incoming: mpsc::Sender<Incoming>,
    /// Memory that the application has provided for some messages.
    provided: Arc<ProvidedMemory>,
    ahead: Arc<Semaphore>,
    receive_turns: Turnstile,
    /// Sizes by message number, where first blocks do not carry them.
    announcements: mpsc::Receiver<(u64, u64)>,
    /// The messages to complete first.
    resumption: Resumption,
    /// Messages that came in a slot with others, and have not begun.
    packed: VecDeque<Buffer>,
    /// In a group with a ring, the first block of the next message that comes in blocks. Its receive is posted before
    /// the slot comes, so that the sender need not wait.
    first_ahead: Exclusive<Option<FirstAhead>>,
}

/// A first block that is waited for before its message is known.
enum FirstAhead {
    Coming { from: Rank, block: BoxFuture<'static, FirstArrival> },
    Here(FirstArrival),
}

/// What has told the size of a message.
enum SizeSource {
    Block(FirstBlock),
    /// The first block is still to come.
    Announcement(Shape, FirstAhead),
}

/// What has begun.
pub(super) enum Begun {
    Transfer(StartedTransfer),
    /// So many short messages, which are delivered.
    Short(u64),
}

/// A message that has begun.
pub(super) struct StartedTransfer {
    pub(super) transfer: Transfer,
    /// What is still to come; `None` if the message is whole.
    pub(super) rest: Option<BlocksToCome>,
}

/// The blocks of a message that are still to come.
pub(super) struct BlocksToCome {
    pub(super) first: FirstReceive,
    pub(super) turn: Turn,
}

impl FirstAhead {
    /// Receives the first block, if it is still to come. Returns only if that fails.
    async fn failed(ahead: &mut Option<Self>) -> TransferError {
        if let Some(Self::Coming { block, .. }) = ahead {
            let arrival = block.await;
            if let Some(error) = arrival.failure() {
                return error;
            }
            *ahead = Some(Self::Here(arrival));
        }
        std::future::pending().await
    }

    fn into_arrival(self) -> BoxFuture<'static, FirstArrival> {
        match self {
            Self::Coming { block, .. } => block,
            Self::Here(arrival) => std::future::ready(arrival).boxed(),
        }
    }
}

impl StartedTransfer {
    fn in_blocks(transfer: Transfer, first: FirstReceive, turn: Turn) -> Begun {
        Begun::Transfer(Self { transfer, rest: Some(BlocksToCome { first, turn }) })
    }
}

impl Intake {
    pub(super) fn new(
        group: Arc<Group>,
        memory: MemorySource,
        announcements: mpsc::Receiver<(u64, u64)>,
        incoming: mpsc::Sender<Incoming>,
        provided: Arc<ProvidedMemory>,
        resumption: Resumption,
    ) -> Self {
        Self {
            group,
            memory,
            incoming,
            provided,
            ahead: Arc::new(Semaphore::new(MESSAGES_AHEAD)),
            receive_turns: Turnstile::default(),
            announcements,
            resumption,
            packed: VecDeque::new(),
            first_ahead: Exclusive::default(),
        }
    }

    /// Returns the number of all messages if the root is gone, else `None`.
    pub(super) fn all(&self) -> Option<u64> {
        self.group.membership.prior.root_gone.then_some(self.resumption.next)
    }

    /// Waits for message `number` to begin, and perhaps short ones after it.
    pub(super) async fn start(mut self, number: u64) -> Result<(Self, Begun), TransferError> {
        if let Some(interrupted) = self.resumption.messages.pop_front() {
            return self.resume(interrupted).await;
        }
        if self.group.membership.prior.root_gone {
            return std::future::pending().await;
        }
        let group = self.group.clone();
        let ring = group.status.table.incoming();
        let mut ahead = self.ahead(if ring.is_some() { 1 } else { AHEAD_BY_LONG }).await;
        let mut turn = self.receive_turns.next();
        turn.wait().await;
        let (mut in_slot, mut coming) = (false, None);
        let (shape, first) = match (ring, self.group.first_source()) {
            (Some(ring), source) => match self.next_in_ring(number, ring, source).await? {
                None if self.takes_short_together() => {
                    let count = self.take_short(number, ahead).await?;
                    turn.end();
                    return Ok((self, Begun::Short(count)));
                }
                None => {
                    in_slot = true;
                    let first = self.next_short()?;
                    (first.shape, Some(first))
                }
                Some(shape) => {
                    ahead.merge(self.ahead(AHEAD_BY_LONG - 1).await);
                    (shape, self.first_block_ahead(number, shape).await?)
                }
            },
            (None, Some(source)) => match self.first_block_or_size(number, source).await? {
                SizeSource::Block(first) => (self.checked(first.shape)?, Some(first)),
                SizeSource::Announcement(shape, block) => {
                    coming = Some(block);
                    (shape, None)
                }
            },
            (None, None) => {
                let size = self.announced_size(number, None).await?;
                (self.shape_of(size)?, None)
            }
        };
        self.check_header(number, shape)?;
        self.group.end.begin(shape.size).await;
        let (deliver, progress, delivery) = self.arrival(shape, ahead);
        if self.group.is_delta() {
            let (blocks, plan) = self.delta_blocks(number, shape, delivery).await?;
            let transfer = self.group.transfer(number, plan, Arc::new(blocks), Some(deliver)).counted(progress);
            return Ok((self, StartedTransfer::in_blocks(transfer, FirstReceive::Due, turn)));
        }
        let is_here = first.is_some();
        let checksum = first.as_ref().and_then(|first| Some((first.block, first.checksum?)));
        let blocks = {
            let blocks = std::pin::pin!(self.message_blocks(number, shape, first, delivery));
            futures::select_biased! {
                blocks = blocks.fuse() => blocks?,
                error = FirstAhead::failed(&mut coming).fuse() => return Err(error),
            }
        };
        if let Some((block, checksum)) = checksum {
            blocks.note_checksum(block, checksum);
        }
        let plan = match in_slot {
            true => HopPlan::Nothing,
            false => HopPlan::Schedule(self.group.schedule(shape.count)),
        };
        let transfer = self.group.transfer(number, plan, Arc::new(blocks), Some(deliver)).counted(progress);
        if in_slot {
            turn.end();
            return Ok((self, Begun::Transfer(StartedTransfer { transfer, rest: None })));
        }
        let first = match coming {
            Some(coming) => FirstReceive::Posted(coming.into_arrival()),
            None if is_here => FirstReceive::Done,
            None => FirstReceive::Due,
        };
        Ok((self, StartedTransfer::in_blocks(transfer, first, turn)))
    }

    /// Makes what the application gets of a message under way, and what delivers and counts it.
    fn arrival(
        &self,
        shape: Shape,
        ahead: OwnedSemaphorePermit,
    ) -> (oneshot::Sender<Message>, Option<ProgressCounter>, Arrival) {
        let (deliver, message) = oneshot::channel();
        // From the pool, the application only gets messages that are whole.
        let progress = (self.memory == MemorySource::Application).then(|| ProgressCounter::new(shape.size));
        let handle = progress.as_ref().map(ProgressCounter::handle);
        (deliver, progress, Arrival::new(self.group.clone(), message, handle, ahead))
    }

    /// Waits until the application has taken enough messages.
    async fn ahead(&self, shares: u32) -> OwnedSemaphorePermit {
        self.ahead.clone().acquire_many_owned(shares).await.expect("it is never closed")
    }

    /// Waits for message `number` in the ring; returns the shape of a message that comes in blocks, or has messages
    /// `packed`. Asks `source`, if it sends this member the first block of every message in blocks, for the next one.
    async fn next_in_ring(
        &mut self,
        number: u64,
        ring: &IncomingRing,
        source: Option<Rank>,
    ) -> Result<Option<Shape>, TransferError> {
        if self.packed.is_empty() {
            let mut first_ahead = self.ask_for_first_block(number, source)?;
            let size = {
                let slot = std::pin::pin!(self.next_slot(number, ring));
                futures::select_biased! {
                    size = slot.fuse() => size?,
                    error = FirstAhead::failed(&mut first_ahead).fuse() => return Err(error),
                }
            };
            *self.first_ahead.content() = first_ahead;
            if let Some(size) = size {
                return Ok(Some(self.shape_of(size)?));
            }
        }
        Ok(None)
    }

    /// Takes the next message that came in a slot, as the first block of one that comes in blocks.
    fn next_short(&mut self) -> Result<FirstBlock, TransferError> {
        let (whole, shape) = self.next_packed()?;
        let checksum = if self.group.exchange().checks_blocks { Some(Checksum::of(&whole)) } else { None };
        let content = FirstContent::Staged(whole);
        Ok(FirstBlock { shape, block: BlockIndex(0), content, checksum })
    }

    fn next_packed(&mut self) -> Result<(Buffer, Shape), TransferError> {
        let whole = self.packed.pop_front().expect("a slot without a size has messages");
        let shape = self.shape_of(whole.len() as u64)?;
        if !self.group.fits_a_slot(shape.size) {
            return Err(TransferError::sent(Rank::ROOT, "a long message in a slot of short ones"));
        }
        Ok((whole, shape))
    }

    /// Tells whether the messages of a slot are delivered together, since the application only gets them whole.
    fn takes_short_together(&self) -> bool {
        let spec = &self.group.membership.spec;
        self.memory == MemorySource::Pool && !spec.is_shared() && !spec.delta
    }

    /// Delivers short messages, of which `number` is the first: as many as may be `ahead` of the application. Returns
    /// how many.
    async fn take_short(&mut self, number: u64, mut ahead: OwnedSemaphorePermit) -> Result<u64, TransferError> {
        let most = self.packed.len().min(1 + self.ahead.available_permits()).min(TOGETHER_MAX);
        let more = u32::try_from(most - 1).expect("a slot is short");
        ahead.merge(self.ahead(more).await);
        let mut short = Vec::with_capacity(most);
        for at in number..number + most as u64 {
            let (whole, shape) = self.next_packed()?;
            self.check_header(at, shape)?;
            short.push((whole, shape));
        }
        self.group.take_short(number, short, ahead, &self.incoming).await?;
        Ok(most as u64)
    }

    /// Takes the first block that was asked for, or asks for it.
    fn ask_for_first_block(&mut self, number: u64, source: Option<Rank>) -> Result<Option<FirstAhead>, TransferError> {
        let asked = self.first_ahead.content().take();
        let Some(from) = source.filter(|_| asked.is_none()) else { return Ok(asked) };
        let (group, staging) = (self.group.clone(), self.staging(self.group.block_size() as usize)?);
        let block = async move { FirstArrival::receive(group.exchange(), number, from, staging, || ()).await };
        Ok(Some(FirstAhead::Coming { from, block: block.boxed() }))
    }

    /// Waits for the first block of a message that comes in blocks, if it was asked for.
    async fn first_block_ahead(&mut self, number: u64, shape: Shape) -> Result<Option<FirstBlock>, TransferError> {
        let arrival = match self.first_ahead.content().take() {
            Some(FirstAhead::Coming { from, block }) => {
                self.group.exchange().waiting(WaitReason::Arriving, from, block).await.0
            }
            Some(FirstAhead::Here(arrival)) => arrival,
            None => return Ok(None),
        };
        arrival.check_as(self.group.exchange(), &*self.group, number, shape).await.map(Some)
    }

    /// Waits for the next slot, of message `number` and perhaps later ones; returns the size of a message that comes in
    /// blocks, or takes the messages in it.
    async fn next_slot(&mut self, number: u64, ring: &IncomingRing) -> Result<Option<u64>, TransferError> {
        let table = &self.group.status.table;
        let memory = |len| self.staging(len);
        let slot = match table.next_slot(ring, memory).await? {
            Some(slot) => slot,
            None => {
                let take = |bytes: &[u8]| table.slot_again(ring, bytes, memory);
                self.group.healing.fetch_slot(ring.read() - 1, number, take).await?
            }
        };
        // The root may write it again.
        self.group.status.report_read(ring);
        match slot {
            Slot::InBlocks(size) => return Ok(Some(size)),
            Slot::Message(whole) => self.packed.push_back(whole.freeze()),
            Slot::Messages(packed) => {
                let packed = packed.freeze();
                let places = ring::unpack(&packed).filter(|places| !places.is_empty());
                let what = "a slot whose messages cannot be told apart";
                let places = places.ok_or_else(|| TransferError::sent(Rank::ROOT, what))?;
                self.packed.extend(places.into_iter().map(|place| packed.slice(place)));
            }
        }
        Ok(None)
    }

    fn shape_of(&self, size: u64) -> Result<Shape, TransferError> {
        let shape = Shape::new(size, self.group.block_size());
        self.checked(shape.ok_or_else(|| self.malformed("a message with too many blocks"))?)
    }

    /// Resumes a message that was interrupted.
    async fn resume(mut self, interrupted: InterruptedMessage) -> Result<(Self, Begun), TransferError> {
        let InterruptedMessage { number, shape, repair } = interrupted;
        self.check_header(number, shape)?;
        let mut turn = self.receive_turns.next();
        turn.wait().await;
        let (blocks, deliver, progress) = if number < self.group.membership.prior.delivered {
            // The application has it. Others may lack it.
            let kept = self.group.retained().message(number);
            self.group.status.begin_whole(shape.size).await;
            let kept = kept.ok_or_else(|| self.out_of_memory("a message that was delivered is not kept"))?;
            let blocks = kept.into_blocks(&*self.group.node().fabric);
            (blocks.map_err(|error| self.out_of_memory(&with_sources(&error)))?, None, None)
        } else {
            let ahead = self.ahead(AHEAD_BY_LONG).await;
            self.group.end.begin(shape.size).await;
            let (deliver, progress, delivery) = self.arrival(shape, ahead);
            (self.resumed_blocks(number, shape, delivery).await?, Some(deliver), progress)
        };
        let transfer = self.group.transfer(number, HopPlan::Repair(repair), blocks, deliver).counted(progress);
        Ok((self, StartedTransfer::in_blocks(transfer, FirstReceive::Due, turn)))
    }

    /// Gets the memory for the rest of an interrupted message and offers it: the memory that it had before, if
    /// possible.
    async fn resumed_blocks(&self, number: u64, shape: Shape, delivery: Arrival) -> Result<Arc<Blocks>, TransferError> {
        let retained = self.group.retained();
        let mut same = retained.resume(number);
        for _ in 0..RESUME_ATTEMPTS {
            if same || retained.message(number).is_none_or(|kept| kept.here().is_empty()) {
                break;
            }
            // Work of the group that has failed may not be flushed yet.
            self.group.node().environment.sleep(RESUME_PAUSE).await;
            same = retained.resume(number);
        }
        let memory = match self.memory_of(number) {
            MemorySource::Pool => {
                self.offer(Offer::new(number, shape.size, None, same, delivery)).await?;
                None
            }
            MemorySource::Application => {
                let (answer, answered) = oneshot::channel();
                self.offer(Offer::new(number, shape.size, Some(answer), same, delivery)).await?;
                self.answer(answered).await?
            }
        };
        let kept = retained.message(number).map(|kept| kept.into_blocks(&*self.group.node().fabric)).transpose();
        let kept = kept.map_err(|error| self.out_of_memory(&with_sources(&error)))?;
        match (kept, memory) {
            (Some(kept), None) if same => Ok(kept),
            (kept, memory) => {
                let memory = match memory {
                    Some(memory) => memory,
                    // The pool may be full of messages that are kept until this one is complete.
                    None if kept.is_some() => self.staging(self.len_of(shape)?)?,
                    None => self.pool(self.len_of(shape)?).await?,
                };
                Ok(Arc::new(match kept {
                    Some(kept) => kept.move_to(memory, yield_now).await,
                    None => Blocks::to_receive(shape, memory, None),
                }))
            }
        }
    }

    /// Waits for the application's reply to an offer: memory, or `None` if it keeps the memory that it gave before.
    async fn answer(&self, answered: oneshot::Receiver<OfferReply>) -> Result<Option<BufferMut>, TransferError> {
        Ok(self.answer_or_parts(answered).await?.map(|(memory, _)| memory))
    }

    /// Waits as [`answer`](Self::answer) does; tells also whether the memory may hold parts of the message.
    async fn answer_or_parts(
        &self,
        answered: oneshot::Receiver<OfferReply>,
    ) -> Result<Option<(BufferMut, bool)>, TransferError> {
        match answered.await {
            Ok(OfferReply::Memory(memory)) => Ok(Some((memory, false))),
            Ok(OfferReply::Partial(memory)) => Ok(Some((memory, true))),
            Ok(OfferReply::KeepMemory) => Ok(None),
            Ok(OfferReply::Refuse(reason)) => Err(TransferError::Local(FailureCause::Refused { reason })),
            Err(_) => {
                let reason = "the application dropped the offer".to_owned();
                Err(TransferError::Local(FailureCause::Refused { reason }))
            }
        }
    }

    /// Receives the first block: into the memory that was provided for the message, or into memory of its own, since
    /// the message's size is not known yet. The root may announce the size of a message whose first block it sends. If
    /// that comes first, the block is still to come.
    async fn first_block_or_size(&mut self, number: u64, source: Rank) -> Result<SizeSource, TransferError> {
        let group = self.group.clone();
        let exchange = group.exchange();
        let mut announced = None;
        while announced.is_none()
            && let Ok(next) = self.announcements.try_recv()
        {
            // The first blocks of those before have told their sizes.
            announced = Some(next).filter(|(message, _)| *message >= number);
        }
        // Other memory may still serve when the size is known.
        let provided = self.provided.take(number, |memory| FirstBlock::has_place_in(exchange, memory));
        if let Some(memory) = provided {
            let first = FirstBlock::receive_in_place(exchange, &*group, number, source, memory).await?;
            return Ok(SizeSource::Block(first));
        }
        let (staging, (posted, is_posted)) = (self.staging(self.group.block_size() as usize)?, oneshot::channel());
        let receiving = group.clone();
        let mut block = async move {
            let posted = || _ = posted.send(());
            FirstArrival::receive(receiving.exchange(), number, source, staging, posted).await
        }
        .boxed();
        let announced = async {
            // Later receives may not be posted before. Only the root can be blamed for an announcement.
            if is_posted.await.is_err() || !source.is_root() {
                std::future::pending::<()>().await;
            }
            let size = self.announced_size(number, announced).await?;
            let shape = self.shape_of(size)?;
            if shape.count.0 == 1 {
                // Nothing but the block is to come.
                std::future::pending::<()>().await;
            }
            Ok::<_, TransferError>(shape)
        };
        let early = futures::select_biased! {
            early = (&mut block).fuse() => Either::Left(early),
            shape = std::pin::pin!(announced.fuse()) => Either::Right(shape?),
        };
        Ok(match early {
            Either::Left(arrival) => SizeSource::Block(arrival.check(exchange, &*group, None).await?),
            Either::Right(shape) => SizeSource::Announcement(shape, FirstAhead::Coming { from: source, block }),
        })
    }

    /// Checks the shape of a message: where objects are shared, only descriptors are possible.
    fn checked(&self, shape: Shape) -> Result<Shape, TransferError> {
        match self.group.membership.spec.is_shared() && shape.size != ObjectDescriptor::LEN as u64 {
            true => Err(self.malformed(&format!("a message of {} bytes where objects are shared", shape.size))),
            false => Ok(shape),
        }
    }

    /// Waits for the announcement of a message's size, which may be the `next` announcement.
    async fn announced_size(&mut self, number: u64, mut next: Option<(u64, u64)>) -> Result<u64, TransferError> {
        loop {
            let announced = match next.take() {
                Some(next) => Some(next),
                None => self.announcements.recv().await,
            };
            match announced {
                Some((announced, size)) if announced == number => return Ok(size),
                // Its first block told its size before.
                Some((announced, _)) if announced < number && self.group.first_source().is_some() => {}
                Some((announced, _)) => {
                    let what = format!("announced message {announced} where {number} was due");
                    return Err(TransferError::Protocol { by: Rank::ROOT, what });
                }
                None => std::future::pending().await,
            }
        }
    }

    /// Gets the memory for a message, from the pool or the application, and offers it.
    async fn message_blocks(
        &self,
        number: u64,
        shape: Shape,
        first: Option<FirstBlock>,
        delivery: Arrival,
    ) -> Result<Blocks, TransferError> {
        let size = self.len_of(shape)?;
        let staged = match first {
            Some(FirstBlock { content: FirstContent::InPlace(blocks), .. }) => {
                return self.provided_blocks(number, blocks, delivery).await;
            }
            Some(FirstBlock { content: FirstContent::Staged(bytes), block, .. }) => Some((block, bytes)),
            None => None,
        };
        if let Some(memory) = self.provided.take(number, |_| true).filter(|memory| memory.len() == size) {
            let blocks = Blocks::to_receive(shape, memory, staged);
            return self.provided_blocks(number, blocks, delivery).await;
        }
        match self.memory_of(number) {
            MemorySource::Pool => {
                let blocks = match staged {
                    // The only block is the message: no copy.
                    Some((_, bytes)) if shape.count.0 == 1 => Blocks::whole_message(shape, bytes),
                    _ => Blocks::to_receive(shape, self.pool(size).await?, staged),
                };
                self.offer(Offer::new(number, shape.size, None, false, delivery)).await?;
                Ok(blocks)
            }
            MemorySource::Application => {
                let (answer, answered) = oneshot::channel();
                self.offer(Offer::new(number, shape.size, Some(answer), false, delivery)).await?;
                let memory = self.answer(answered).await?.expect("only a message that has begun can stay where it is");
                Ok(Blocks::to_receive(shape, memory, staged))
            }
        }
    }

    /// Offers a message in the memory that was provided for it, unless the application now prefers other memory.
    async fn provided_blocks(&self, number: u64, blocks: Blocks, delivery: Arrival) -> Result<Blocks, TransferError> {
        let (answer, answered) = oneshot::channel();
        self.offer(Offer::new(number, blocks.shape().size, Some(answer), true, delivery)).await?;
        match self.answer(answered).await? {
            None => Ok(blocks),
            Some(memory) => Ok(blocks.move_to(memory, yield_now).await),
        }
    }

    /// Gets the memory for a message of a delta group, reports which blocks it holds, and learns the hops.
    async fn delta_blocks(
        &self,
        number: u64,
        shape: Shape,
        delivery: Arrival,
    ) -> Result<(Blocks, HopPlan), TransferError> {
        let (memory, is_partial) = match self.memory {
            MemorySource::Pool => {
                let memory = self.pool(self.len_of(shape)?).await?;
                self.offer(Offer::new(number, shape.size, None, false, delivery)).await?;
                (memory, false)
            }
            MemorySource::Application => {
                let (answer, answered) = oneshot::channel();
                self.offer(Offer::new(number, shape.size, Some(answer), false, delivery)).await?;
                let answer = self.answer_or_parts(answered).await?;
                answer.expect("only a message that has begun can stay where it is")
            }
        };
        let beginning = self.group.delta.report_parts(number, shape, is_partial.then_some(&memory[..])).await?;
        Ok((Blocks::to_complete(shape, memory, beginning.here), beginning.plan))
    }

    fn check_header(&self, number: u64, shape: Shape) -> Result<(), TransferError> {
        match self.group.is_header(number) && shape.size > GroupSpec::HEADER_LEN_MAX as u64 {
            true => Err(self.malformed("a header that is too long")),
            false => Ok(()),
        }
    }

    /// Returns where the memory of a message comes from. A header is not offered.
    fn memory_of(&self, number: u64) -> MemorySource {
        if self.group.is_header(number) { MemorySource::Pool } else { self.memory }
    }

    fn len_of(&self, shape: Shape) -> Result<usize, TransferError> {
        usize::try_from(shape.size).map_err(|_| self.out_of_memory("a message longer than the address space"))
    }

    async fn offer(&self, mut offer: Offer) -> Result<(), TransferError> {
        if self.group.is_header(offer.number()) {
            return Ok(());
        }
        if let Some(header) = self.group.header_of(offer.number()) {
            offer.set_header(self.group.retained().headers.get(header).await);
        }
        self.incoming.send(Incoming::Offer(offer)).await.map_err(|_| TransferError::Local(FailureCause::Abandoned))
    }

    /// Gets memory that does not count towards the pool's limit.
    fn staging(&self, len: usize) -> Result<BufferMut, TransferError> {
        self.group.node().pool.lend_staging(len).map_err(|error| self.out_of_memory(&with_sources(&error)))
    }

    async fn pool(&self, len: usize) -> Result<BufferMut, TransferError> {
        self.group.node().pool.lend(len).await.map_err(|error| self.out_of_memory(&with_sources(&error)))
    }

    fn out_of_memory(&self, what: &str) -> TransferError {
        TransferError::Local(FailureCause::Resources { what: what.to_owned() })
    }

    fn malformed(&self, what: &str) -> TransferError {
        let by = match self.group.status.table.incoming() {
            Some(_) => Rank::ROOT,
            None => self.group.first_source().unwrap_or(Rank::ROOT),
        };
        TransferError::sent(by, what)
    }
}

/// Memory that the application has provided, by the number of the message.
#[derive(Debug, Default)]
pub(super) struct ProvidedMemory(Mutex<BTreeMap<u64, BufferMut>>);

impl ProvidedMemory {
    pub(super) fn add(&self, number: u64, memory: BufferMut) {
        let before = lock(&self.0).insert(number, memory);
        // It leaves the lock before it is dropped, because its memory may call its lender.
        drop(before);
    }

    /// Takes the memory for a message if it is `suitable`; drops that for the messages before.
    fn take(&self, number: u64, suitable: impl FnOnce(&BufferMut) -> bool) -> Option<BufferMut> {
        let mut provided = lock(&self.0);
        let later = provided.split_off(&number);
        let passed_over = std::mem::replace(&mut *provided, later);
        let memory = if provided.get(&number).is_some_and(suitable) { provided.remove(&number) } else { None };
        drop(provided);
        drop(passed_over);
        memory
    }
}

/// Attempts, and pauses between them, to get memory that a failed group may still be using.
const RESUME_ATTEMPTS: u32 = 50;
const RESUME_PAUSE: Duration = Duration::from_millis(2);
/// Short messages of a ring that have begun and are not taken by the application, at most.
pub(super) const MESSAGES_AHEAD: usize = 128;
/// Most short messages that are delivered together, so that more are received while the application takes them.
const TOGETHER_MAX: usize = MESSAGES_AHEAD / 2;
/// In place of how many of these any other message counts.
const AHEAD_BY_LONG: u32 = 32;
