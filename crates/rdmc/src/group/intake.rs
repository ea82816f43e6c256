//! How a message begins at a receiving member: its size is learnt, its memory is got.

use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{Buffer, BufferMut};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::receiver::{Answer, Delivery, Offer};
use super::recovery::{Interrupted, Resumption};
use super::{Events, Group};
use crate::failure::{FailureCause, with_sources};
use crate::transfer::{Blocks, Plan, Shape, Transfer, Trouble, Turn, Turnstile, give_way};

/// Where the memory of messages comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryFrom {
    Pool,
    Application,
}

/// The beginning of messages: learns the size, gets the memory.
pub(super) struct Intake {
    group: Arc<Group>,
    memory: MemoryFrom,
    offers: mpsc::Sender<Offer>,
    ahead: Arc<Semaphore>,
    receive_turns: Turnstile,
    /// Sizes by message number, where first blocks do not tell them.
    announcements: Option<mpsc::Receiver<(u64, u64)>>,
    /// What is to be completed first.
    resumption: Resumption,
}

/// A message that has begun.
pub(super) struct Begun {
    pub(super) transfer: Transfer,
    pub(super) first_is_here: bool,
    pub(super) turn: Turn,
}

impl Intake {
    pub(super) fn new(
        group: Arc<Group>,
        memory: MemoryFrom,
        events: &mut Events,
        offers: mpsc::Sender<Offer>,
        resumption: Resumption,
    ) -> Self {
        let announcements = events.announcements.take().filter(|_| group.first_source().is_none());
        let ahead = Arc::new(Semaphore::new(MESSAGES_AHEAD));
        Self { group, memory, offers, ahead, receive_turns: Turnstile::default(), announcements, resumption }
    }

    /// Returns the number of all messages, if there is no root any more.
    pub(super) fn all(&self) -> Option<u64> {
        self.resumption.orphaned.then_some(self.resumption.next)
    }

    /// Waits for message `number` to begin.
    pub(super) async fn start(mut self, number: u64) -> Result<(Self, Begun), Trouble> {
        if let Some(interrupted) = self.resumption.messages.pop_front() {
            return self.resume(interrupted).await;
        }
        if self.resumption.orphaned {
            return std::future::pending().await;
        }
        let ahead = self.ahead.clone().acquire_owned().await.expect("it is never closed");
        let mut turn = self.receive_turns.next();
        turn.wait().await;
        let (size, staged) = match self.group.first_source() {
            Some(_) => {
                let (size, bytes) = self.first_block().await?;
                (size, Some(bytes))
            }
            None => (self.announced_size(number).await?, None),
        };
        let shape = Shape::new(size, self.group.block_size())
            .ok_or_else(|| self.malformed("a message with too many blocks"))?;
        self.group.begin(size).await;
        let first = staged.map(|bytes| self.check_first(shape, bytes)).transpose()?;
        let (deliver, message) = oneshot::channel();
        let delivery = Delivery::new(self.group.clone(), message, ahead);
        let blocks = self.places(number, shape, first.as_ref(), delivery).await?;
        let plan = Plan::Schedule(self.group.schedule(shape.count));
        let transfer = Transfer::new(self.group.clone(), number, plan, Arc::new(blocks), Some(deliver));
        Ok((self, Begun { transfer, first_is_here: first.is_some(), turn }))
    }

    /// Begins with a message that was interrupted.
    async fn resume(mut self, interrupted: Interrupted) -> Result<(Self, Begun), Trouble> {
        let Interrupted { number, shape, repair } = interrupted;
        let mut turn = self.receive_turns.next();
        turn.wait().await;
        let (blocks, deliver) = if number < self.resumption.held {
            // The application was given it. Others may lack it.
            self.group.begin_whole(shape.size).await;
            let kept = self.group.retained().message(number);
            let kept = kept.ok_or_else(|| self.out_of_memory("a message that was delivered is not kept"))?;
            let blocks = kept.into_blocks(&*self.group.node().fabric);
            (blocks.map_err(|error| self.out_of_memory(&with_sources(&error)))?, None)
        } else {
            let ahead = self.ahead.clone().acquire_owned().await.expect("it is never closed");
            self.group.begin(shape.size).await;
            let (deliver, message) = oneshot::channel();
            let delivery = Delivery::new(self.group.clone(), message, ahead);
            (self.resumed_places(number, shape, delivery).await?, Some(deliver))
        };
        let transfer = Transfer::new(self.group.clone(), number, Plan::Repair(repair), blocks, deliver);
        Ok((self, Begun { transfer, first_is_here: false, turn }))
    }

    /// Gets the memory for the rest of a message that was interrupted, and offers it: that which it had, if that can be.
    async fn resumed_places(&self, number: u64, shape: Shape, delivery: Delivery) -> Result<Arc<Blocks>, Trouble> {
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
        let memory = match self.memory {
            MemoryFrom::Pool => {
                self.offer(Offer::new(number, shape.size, None, same, delivery)).await?;
                None
            }
            MemoryFrom::Application => {
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
                    None => self.pool(self.len_of(shape)?).await?,
                };
                Ok(Arc::new(match kept {
                    Some(kept) => kept.move_to(memory, give_way).await,
                    None => Blocks::to_receive(shape, memory, None),
                }))
            }
        }
    }

    /// Waits for what the application says to an offer: memory, or none if it stays with what it gave before.
    async fn answer(&self, answered: oneshot::Receiver<Answer>) -> Result<Option<BufferMut>, Trouble> {
        match answered.await {
            Ok(Answer::Memory(memory)) => Ok(Some(memory)),
            Ok(Answer::Stay) => Ok(None),
            Ok(Answer::Refuse(reason)) => Err(Trouble::Own(FailureCause::Refused { reason })),
            Err(_) => {
                let reason = "the application dropped the offer".to_owned();
                Err(Trouble::Own(FailureCause::Refused { reason }))
            }
        }
    }

    /// Receives the block that comes before the message's size is known, into memory of its own.
    async fn first_block(&self) -> Result<(u64, Buffer), Trouble> {
        let source = self.group.first_source().expect("asked only where there is one");
        let neighbour = self.group.neighbour(source);
        let staging = self.group.node().pool.lend_staging(self.group.block_size() as usize);
        let staging = staging.map_err(|error| self.out_of_memory(&with_sources(&error)))?;
        self.group.ingress().free_for(source).await;
        let room = neighbour.room_to_grant().await;
        let (arriving, granted) = neighbour.grant(staging, room);
        neighbour.tell_if_due();
        self.group.ingress().occupy(source, arriving.nearly_done());
        let received = arriving.await.map_err(|error| Trouble::Work { with: source, error })?;
        drop(granted);
        self.group.count_received(received.len);
        let imm = received.imm.ok_or_else(|| self.malformed("a block without an immediate"))?;
        let mut buffer = received.buffer;
        buffer.truncate(received.len);
        Ok((neighbour.message_size(imm), buffer.freeze()))
    }

    /// Checks the first block against the schedule; returns which one it is.
    fn check_first(&self, shape: Shape, bytes: Buffer) -> Result<(rdmc_schedule::BlockIndex, Buffer), Trouble> {
        let schedule = self.group.schedule(shape.count);
        let first = schedule.receives(self.group.rank()).next().expect("a member receives every block");
        if bytes.len() == shape.len(first.block) {
            return Ok((first.block, bytes));
        }
        let what = format!("{} bytes as the first block of a message of {}", bytes.len(), shape.size);
        Err(self.malformed(&what))
    }

    async fn announced_size(&mut self, number: u64) -> Result<u64, Trouble> {
        let announcements = self.announcements.as_mut().expect("kept where there is no first source");
        match announcements.recv().await {
            Some((announced, size)) if announced == number => Ok(size),
            Some((announced, _)) => {
                let what = format!("announced message {announced} where {number} was due");
                Err(Trouble::Protocol { by: rdmc_schedule::Rank::ROOT, what })
            }
            None => std::future::pending().await,
        }
    }

    /// Gets the memory for a message, from the pool or the application, and offers it.
    async fn places(
        &self,
        number: u64,
        shape: Shape,
        first: Option<&(rdmc_schedule::BlockIndex, Buffer)>,
        delivery: Delivery,
    ) -> Result<Blocks, Trouble> {
        let size = self.len_of(shape)?;
        match self.memory {
            MemoryFrom::Pool => {
                let blocks = match first {
                    // The only block is the message: no copy.
                    Some((_, bytes)) if shape.count.0 == 1 => Blocks::whole_message(shape, bytes.clone()),
                    _ => Blocks::to_receive(shape, self.pool(size).await?, first.cloned()),
                };
                self.offer(Offer::new(number, shape.size, None, false, delivery)).await?;
                Ok(blocks)
            }
            MemoryFrom::Application => {
                let (answer, answered) = oneshot::channel();
                self.offer(Offer::new(number, shape.size, Some(answer), false, delivery)).await?;
                let memory = self.answer(answered).await?.expect("only a message that has begun can stay where it is");
                Ok(Blocks::to_receive(shape, memory, first.cloned()))
            }
        }
    }

    fn len_of(&self, shape: Shape) -> Result<usize, Trouble> {
        usize::try_from(shape.size).map_err(|_| self.out_of_memory("a message longer than the address space"))
    }

    async fn offer(&self, offer: Offer) -> Result<(), Trouble> {
        self.offers.send(offer).await.map_err(|_| Trouble::Own(FailureCause::Abandoned))
    }

    async fn pool(&self, len: usize) -> Result<BufferMut, Trouble> {
        self.group.node().pool.lend(len).await.map_err(|error| self.out_of_memory(&with_sources(&error)))
    }

    fn out_of_memory(&self, what: &str) -> Trouble {
        Trouble::Own(FailureCause::Resources { what: what.to_owned() })
    }

    fn malformed(&self, what: &str) -> Trouble {
        let by = self.group.first_source().unwrap_or(rdmc_schedule::Rank::ROOT);
        Trouble::Protocol { by, what: format!("sent {what}") }
    }
}

/// How often, and after which pauses, memory is asked for that a group that has failed may still be using.
const RESUME_ATTEMPTS: u32 = 50;
const RESUME_PAUSE: Duration = Duration::from_millis(2);
/// Messages begun and not yet taken by the application.
pub(super) const MESSAGES_AHEAD: usize = 4;
