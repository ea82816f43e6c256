//! One member's part in one multicast: the heart (DSN §4.2, §4.4).
//!
//! A [`Transfer`] receives the blocks that the schedule names for this member, in the schedule's order, and sends the
//! blocks that it names, in the schedule's order. It sends a block when the member holds it, when the next member has
//! sent *ready_for_block* and when the port is about to be free. It waits for nothing else, so members need no common
//! clock.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, try_join};
use rdmc_fabric::{Buffer, Received, WorkError};
use rdmc_schedule::{Algorithm, BlockCount, BlockIndex, Hop, Rank};

use crate::certificate::Digest;
use crate::checksum::{BlockIdentity, Checksum, yield_now};
use crate::failure::FailureCause;

mod arrival;
mod blocks;
pub(crate) mod distance;
pub(crate) mod exchange;
mod first;
mod in_flight;
pub(crate) mod limit;
pub(crate) mod neighbour;
mod pending;
mod plan;
mod port;
mod progress;
mod turn;
pub(crate) mod waits;

use arrival::{ArrivedBlock, BlockArrival, DueBlock, ExpectedBlock};
pub(crate) use blocks::Blocks;
use exchange::Exchange;
pub(crate) use first::{FirstArrival, FirstBlock, FirstContent, FirstReceive};
use in_flight::{BlockTraffic, InFlight, IncomingBlocks, OutgoingBlocks, SentBlock};
use neighbour::Neighbour;
use pending::PendingHops;
pub(crate) use plan::HopPlan;
pub(crate) use port::Port;
pub use progress::Progress;
pub(crate) use progress::ProgressCounter;
pub(crate) use turn::{Turn, Turnstile};
use waits::WaitReason;

/// The division of a message into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) size: u64,
    pub(crate) block_size: u32,
    pub(crate) count: BlockCount,
}

impl Shape {
    /// Divides a message of `size` bytes; returns `None` if it has too many blocks. An empty message has one block.
    pub(crate) fn new(size: u64, block_size: u32) -> Option<Self> {
        let count = u32::try_from(size.div_ceil(u64::from(block_size)).max(1)).ok()?;
        (count <= BLOCKS_MAX).then_some(Self { size, block_size, count: BlockCount(count) })
    }

    /// Returns the length of a block in bytes; the last one may be shorter.
    pub(crate) fn len(&self, block: BlockIndex) -> usize {
        let rest = self.size - self.offset(block);
        usize::try_from(rest.min(u64::from(self.block_size))).expect("a block's length is a u32")
    }

    /// Returns the offset of a block's first byte in the message.
    pub(crate) fn offset(&self, block: BlockIndex) -> u64 {
        u64::from(block.0) * u64::from(self.block_size)
    }
}

/// A member cannot go on.
#[derive(Debug)]
pub(crate) enum TransferError {
    /// An operation on a neighbour's queue pair failed.
    Work { with: Rank, error: WorkError },
    /// A member violated the protocol.
    Protocol { by: Rank, what: String },
    /// A block came corrupted from a member, and no member has it whole.
    Corrupted { by: Rank, message: u64, block: BlockIndex },
    /// A member did not hand over the object of a message.
    Unattached { by: Rank, what: String },
    /// This member itself cannot, or will not, go on.
    Local(FailureCause),
}

impl TransferError {
    /// A member sent what it may not.
    pub(crate) fn sent(by: Rank, what: impl fmt::Display) -> Self {
        Self::Protocol { by, what: format!("sent {what}") }
    }
}

/// A block that may leave.
struct Departure {
    send: Hop,
    block: Buffer,
    /// Its seal, if blocks are checked.
    seal: Option<u32>,
    waited_for_ready: Duration,
}

/// What a transfer needs of the group that it is part of.
pub(crate) trait Owner: Send + Sync {
    /// Fetches a block anew that came corrupted from `by`, into the beginning of `memory`.
    ///
    /// `identity` may be wrong if the block is the `first` of its message, since the message's size came with it.
    fn heal<'a>(
        &'a self,
        by: Rank,
        identity: BlockIdentity,
        first: bool,
        memory: &'a mut [u8],
    ) -> BoxFuture<'a, Result<HealedBlock, TransferError>>;

    /// Takes the digest of a message that this member had from the start.
    fn note_digest(&self, message: u64, digest: Option<Digest>);
}

/// A block that was fetched anew.
pub(crate) struct HealedBlock {
    pub(crate) shape: Shape,
    pub(crate) block: BlockIndex,
    pub(crate) checksum: Checksum,
}

/// Delivers a message that is whole, with its digest if blocks are checked.
pub(crate) type Deliver =
    Box<dyn FnOnce(Buffer, Option<Digest>) -> BoxFuture<'static, Result<(), TransferError>> + Send + Sync>;

/// One member's part in one multicast.
pub(crate) struct Transfer {
    exchange: Arc<Exchange>,
    owner: Arc<dyn Owner>,
    number: u64,
    shape: Shape,
    plan: HopPlan,
    blocks: Arc<Blocks>,
    /// `None` if this member has the message from the start.
    deliver: Option<Deliver>,
    /// If the application can ask for it.
    progress: Option<ProgressCounter>,
}

impl Transfer {
    pub(crate) fn new(
        exchange: Arc<Exchange>,
        owner: Arc<dyn Owner>,
        number: u64,
        plan: HopPlan,
        blocks: Arc<Blocks>,
        deliver: Option<Deliver>,
    ) -> Self {
        let shape = blocks.shape();
        exchange.distance.note_message(shape.count);
        Self { exchange, owner, number, shape, plan, blocks, deliver, progress: None }
    }

    /// Tells whether the message is delivered when it is whole: else this member had it before.
    pub(crate) fn delivers(&self) -> bool {
        self.deliver.is_some()
    }

    /// Counts the transfer's bytes: at the root those that it sends, elsewhere those that are here.
    pub(crate) fn counted(self, progress: Option<ProgressCounter>) -> Self {
        if let (Some(progress), Some(_)) = (&progress, &self.deliver) {
            progress.note_blocks(&self.blocks);
        }
        Self { progress, ..self }
    }

    /// Runs until this member holds every block and has sent every block that it is to send.
    /// Returns the message's size in bytes.
    ///
    /// The turns keep messages in order: the next one is received when all receives of this one are posted, and sent
    /// on when all sends of this one have left.
    pub(crate) async fn run(
        mut self,
        first: FirstReceive,
        receive_turn: Turn,
        relay_turn: Turn,
    ) -> Result<u64, TransferError> {
        let deliver = self.deliver.take();
        let holds_from_the_start = deliver.is_none();
        // Its blocks are summed as they are sent. The root announces the end of the group with the digest.
        let sums_all = holds_from_the_start && self.exchange.rank.is_root();
        let received = async {
            let is_posted = !matches!(first, FirstReceive::Due);
            try_join!(self.receive_blocks(is_posted, receive_turn), self.settle_first_block(first))?;
            if let Some(deliver) = deliver {
                let digest = self.digest().await?;
                deliver(self.blocks.whole(), digest).await?;
                self.progress.iter().for_each(ProgressCounter::complete);
            }
            Ok(())
        };
        try_join!(received, self.relay_blocks(relay_turn, sums_all))?;
        if holds_from_the_start && !sums_all {
            self.owner.note_digest(self.number, self.digest().await?);
        }
        self.progress.iter().for_each(ProgressCounter::complete);
        Ok(self.shape.size)
    }

    /// Completes a message that this member has whole, and that every member gets without the schedule. Returns the
    /// message's size in bytes.
    pub(crate) async fn complete(mut self) -> Result<u64, TransferError> {
        self.blocks.copy_staged(yield_now).await;
        let digest = self.digest().await?;
        match self.deliver.take() {
            Some(deliver) => deliver(self.blocks.whole(), digest).await?,
            None => self.owner.note_digest(self.number, digest),
        }
        self.progress.iter().for_each(ProgressCounter::complete);
        Ok(self.shape.size)
    }

    /// Posts the receives of the schedule, each with its block's destination, as far ahead as the senders may be.
    async fn receive_blocks(&self, first_is_posted: bool, turn: Turn) -> Result<(), TransferError> {
        let mut arriving = InFlight::new(IncomingBlocks::new(self));
        let mut untold: Vec<&Neighbour> = Vec::new();
        let hops = self.plan.receives(self.exchange.rank).skip(usize::from(first_is_posted));
        let mut receives = PendingHops::new(Box::new(hops));
        loop {
            let free = self.runs_free();
            if free {
                receives.look_ahead(HOPS_AHEAD);
            }
            let Some(next) = receives.first() else { break };
            let mut found = self.find_receive(&receives, next, free);
            if found.is_none() {
                arriving.settle().await?;
                found = self.find_receive(&receives, next, free);
            }
            let receive = match found {
                Some(receive) => receive,
                None => {
                    // One write announces all grants that could be given at once.
                    untold.drain(..).for_each(Neighbour::announce_grants_if_due);
                    let occupant = match free {
                        // Its window is full.
                        true => next.peer,
                        false => self.exchange.ingress.occupant().unwrap_or(next.peer),
                    };
                    let room = arriving.unless_failing(self.room_to_receive(&receives, next, free));
                    self.exchange.waiting(WaitReason::Arriving, occupant, room).await.0?
                }
            };
            receives.remove(receive.peer);
            let neighbour = self.exchange.neighbour(receive.peer);
            let destination = self.blocks.take_destination(receive.block);
            let turn = (self.number, receive.step);
            let arriving_block = self.exchange.receive(receive.peer, turn, destination);
            if !untold.iter().any(|other| std::ptr::eq(*other, neighbour)) {
                untold.push(neighbour);
            }
            if neighbour.has_many_to_announce() {
                neighbour.announce_grants_if_due();
            }
            arriving.blocks.push(receive.block, arriving_block);
        }
        // A distant sender would wait a round trip for the last grants.
        let announce = if self.runs_free() { Neighbour::announce_grants } else { Neighbour::announce_grants_if_due };
        untold.into_iter().for_each(announce);
        turn.end();
        self.all_of(arriving, WaitReason::Arriving).await
    }

    /// Returns the receive that may be posted now, if there is one: that of `next`, or if the port runs `free`, that of
    /// any neighbour.
    fn find_receive(&self, receives: &PendingHops, next: Hop, free: bool) -> Option<Hop> {
        let has_room = |receive: &Hop| {
            self.exchange.neighbour(receive.peer).has_room_to_grant(self.exchange.distance.window(free))
        };
        match free {
            true => receives.first_that(has_room),
            false => Some(next).filter(|next| {
                self.exchange.ingress.is_free_for(next.peer, (self.number, next.step)) && has_room(next)
            }),
        }
    }

    /// Waits until a receive may be posted, and returns it.
    async fn room_to_receive(&self, receives: &PendingHops, next: Hop, free: bool) -> Hop {
        if !free {
            self.exchange.room_in_step(next.peer, (self.number, next.step)).await;
            return next;
        }
        let any = poll_fn(|cx| {
            let window = self.exchange.distance.window(true);
            // Each registers the task.
            let mut has_room = |hop: &Hop| self.exchange.neighbour(hop.peer).poll_room_to_grant(window, cx).is_ready();
            receives.neighbours_next().find(|hop| has_room(hop)).map_or(Poll::Pending, Poll::Ready)
        });
        let any = any.await;
        self.find_receive(receives, next, free).unwrap_or(any)
    }

    /// Checks a block that has arrived and passes it to the relay; returns the work that is left until then, if any.
    fn take_arrived(
        &self,
        expected: ExpectedBlock,
        block: BlockIndex,
        outcome: Result<Received, WorkError>,
    ) -> Result<Option<BoxFuture<'_, Result<(), TransferError>>>, TransferError> {
        let due = DueBlock::Known(self.shape, block);
        match self.exchange.take_arrived(&*self.owner, expected, self.number, due, outcome)? {
            BlockArrival::Checked(arrived) => self.hold(arrived),
            BlockArrival::Unsettled(settling) => {
                return Ok(Some(async { settling.await.map(|arrived| self.hold(arrived)) }.boxed()));
            }
        }
        Ok(None)
    }

    fn hold(&self, ArrivedBlock { block, buffer, checksum, .. }: ArrivedBlock) {
        if let Some(checksum) = checksum {
            self.blocks.note_checksum(block, checksum);
        }
        self.blocks.hold(block, buffer.freeze());
        self.progress.iter().for_each(|progress| progress.count_here(self.shape, block));
    }

    fn identity_of(&self, block: BlockIndex) -> BlockIdentity {
        BlockIdentity { message: self.number, size: self.shape.size, block }
    }

    /// Returns the seal with which a block travels if blocks are checked.
    async fn seal(&self, block: BlockIndex, bytes: &Buffer) -> Result<u32, TransferError> {
        Ok(self.checksum(block, bytes).await?.seal(self.identity_of(block)))
    }

    /// Returns a block's checksum. Received blocks were verified when they came; the root computes its own here, once.
    async fn checksum(&self, block: BlockIndex, bytes: &Buffer) -> Result<Checksum, TransferError> {
        checksum_of(&self.blocks, block, bytes).await
    }

    /// Returns the digest of the message, if blocks are checked and all are here.
    async fn digest(&self) -> Result<Option<Digest>, TransferError> {
        if !self.exchange.checks_blocks {
            return Ok(None);
        }
        // Not all were summed if this member sends none, or if the message was kept as a short copy.
        for block in (0..self.shape.count.0).map(BlockIndex) {
            if self.blocks.checksum(block).is_none() {
                self.checksum(block, &self.blocks.held(block).await).await?;
            }
        }
        Ok(self.blocks.digest())
    }

    /// Awaits the first block, if it is still to come, and copies it to its destination, which was not known when its
    /// receive was posted. Meanwhile the others arrive.
    ///
    /// Until it is copied, it is relayed from where it is.
    async fn settle_first_block(&self, first: FirstReceive) -> Result<(), TransferError> {
        if let FirstReceive::Posted(arrival) = first {
            let arrived = arrival.await.check_announced(&self.exchange, &*self.owner, self.shape).await?;
            let FirstContent::Staged(bytes) = arrived.content else { unreachable!("no place was provided") };
            if let Some(checksum) = arrived.checksum {
                self.blocks.note_checksum(arrived.block, checksum);
            }
            self.blocks.stage(arrived.block, bytes);
            self.progress.iter().for_each(|progress| progress.count_here(self.shape, arrived.block));
        }
        // Receives and the first relay are posted before the copy begins.
        yield_now().await;
        self.blocks.copy_staged(yield_now).await;
        Ok(())
    }

    /// Sends the blocks that the schedule names, each when it is held and the receiver is ready for it.
    ///
    /// If it `sums_all`, the message's digest is known when the turn ends.
    async fn relay_blocks(&self, mut turn: Turn, sums_all: bool) -> Result<(), TransferError> {
        turn.wait().await;
        let mut leaving = InFlight::new(OutgoingBlocks::new(self));
        let mut sends = PendingHops::new(self.plan.sends(self.exchange.rank));
        let (limit, mut copies) = (&self.exchange.limit, None);
        loop {
            let free = self.runs_free();
            if free {
                sends.look_ahead(HOPS_AHEAD);
            }
            let Some(next) = sends.first() else { break };
            let Departure { send, block, seal, waited_for_ready } = match free {
                false => self.departure_in_step(next, &mut leaving).await?,
                true => self.departure_of_any(&sends, next, &mut leaving).await?,
            };
            sends.remove(send.peer);
            let neighbour = self.exchange.neighbour(send.peer);
            let bytes = block.len();
            if limit.is_set() {
                let copies = *copies.get_or_insert_with(|| self.copies());
                if limit.try_pass(bytes, copies, self.exchange.now()).is_err() {
                    neighbour.flush();
                    let passes = limit.pass(bytes, copies, &*self.exchange.environment);
                    self.exchange.waits.pacing(leaving.unless_failing(passes)).await?;
                }
            }
            self.exchange.count_sent(bytes, waited_for_ready);
            self.exchange.waits.block_due(send.peer, || self.exchange.now());
            let tells_size = !self.plan.is_repair() && neighbour.note_size_told(self.number);
            let (operation, unacknowledged) = if tells_size {
                neighbour.send_first_block(block, self.shape.size, seal)
            } else {
                let in_a_run = !free && sends.goes_on_with(send.peer);
                neighbour.send_block(block, seal.unwrap_or(send.block.0), in_a_run)
            };
            self.exchange.egress.occupy(send.peer, (self.number, send.step), operation.nearly_done());
            tracing::trace!(
                step = send.step.0,
                to = %send.peer,
                block = send.block.0,
                ?waited_for_ready,
                "sending block"
            );
            let sent = SentBlock { step: send.step, bytes, unacknowledged };
            leaving.blocks.push(send.peer, operation, sent);
        }
        if sums_all {
            self.owner.note_digest(self.number, self.digest().await?);
        }
        turn.end();
        self.all_of(leaving, WaitReason::Leaving).await
    }

    /// Returns how often each byte of the message leaves this member, while the message passes.
    fn copies(&self) -> f64 {
        match self.exchange.algorithm {
            // One copy leaves after the other.
            Algorithm::Sequential | Algorithm::BinomialTree => 1.0,
            _ => self.plan.sends(self.exchange.rank).count() as f64 / f64::from(self.shape.count.0),
        }
    }

    /// Waits until the block of the schedule's next hop is held, its receiver is ready for it, and the port is about to
    /// be free.
    async fn departure_in_step<'a>(
        &'a self,
        send: Hop,
        leaving: &mut InFlight<OutgoingBlocks<'a>>,
    ) -> Result<Departure, TransferError> {
        let (neighbour, egress) = (self.exchange.neighbour(send.peer), &self.exchange.egress);
        // Blocks sent to this neighbour before leave at the latest when this one has to wait.
        let block = match self.blocks.if_held(send.block) {
            Some(block) => block,
            None => {
                neighbour.flush();
                leaving.unless_failing(self.blocks.held(send.block)).await?
            }
        };
        let seal = match self.exchange.checks_blocks {
            true => Some(self.seal(send.block, &block).await?),
            false => None,
        };
        let mut waited_for_ready = Duration::ZERO;
        if !neighbour.try_ready_for_block() {
            neighbour.flush();
            let ready = leaving.unless_failing(neighbour.ready_for_block());
            waited_for_ready = self.waiting(WaitReason::Ready, send.peer, ready).await?;
        }
        let window = self.exchange.distance.window(false);
        let turn = (self.number, send.step);
        let has_room = || egress.is_free_for(send.peer, turn) && neighbour.has_room_to_send(window);
        if !has_room() {
            leaving.settle().await?;
        }
        if !has_room() {
            neighbour.flush();
            let occupant = egress.occupant().unwrap_or(send.peer);
            let free = leaving.unless_failing(async {
                egress.free_for(send.peer, turn).await;
                neighbour.room_to_send(window).await;
            });
            self.waiting(WaitReason::Leaving, occupant, free).await?;
        }
        Ok(Departure { send, block, seal, waited_for_ready })
    }

    /// Waits until the block of any neighbour's next hop is held and the neighbour is ready for it; `next` is the first
    /// of these hops. The port carries the blocks of several neighbours at once.
    async fn departure_of_any<'a>(
        &'a self,
        sends: &PendingHops,
        next: Hop,
        leaving: &mut InFlight<OutgoingBlocks<'a>>,
    ) -> Result<Departure, TransferError> {
        let mut waited_for_ready = Duration::ZERO;
        let window = self.exchange.distance.window(true);
        let can_go = |hop: &Hop| {
            let neighbour = self.exchange.neighbour(hop.peer);
            self.blocks.is_held(hop.block) && neighbour.is_ready_for_block() && neighbour.has_room_to_send(window)
        };
        let send = loop {
            if let Some(send) = sends.first_that(can_go) {
                break send;
            }
            leaving.settle().await?;
            // The ports may have kept in step until now, with blocks of a run held back.
            self.exchange.neighbour(next.peer).flush();
            let any = poll_fn(|cx| {
                // Each registers the task.
                let goes = |hop: Hop| {
                    let neighbour = self.exchange.neighbour(hop.peer);
                    self.blocks.poll_held(hop.block, cx).is_ready()
                        && neighbour.poll_ready_for_block(cx).is_ready()
                        && neighbour.poll_room_to_send(window, cx).is_ready()
                };
                if sends.neighbours_next().any(goes) { Poll::Ready(()) } else { Poll::Pending }
            });
            // The neighbours, if not the port, would be idle: the first hop tells why.
            let neighbour = self.exchange.neighbour(next.peer);
            let any = leaving.unless_failing(any);
            if !self.blocks.is_held(next.block) {
                any.await?;
            } else if neighbour.is_ready_for_block() {
                self.waiting(WaitReason::Leaving, next.peer, any).await?;
            } else {
                waited_for_ready += self.waiting(WaitReason::Ready, next.peer, any).await?;
            }
        };
        let is_ready = self.exchange.neighbour(send.peer).try_ready_for_block();
        debug_assert!(is_ready, "no other transfer uses up grants");
        let block = self.blocks.if_held(send.block).expect("it was held");
        let seal = match self.exchange.checks_blocks {
            true => Some(self.seal(send.block, &block).await?),
            false => None,
        };
        Ok(Departure { send, block, seal, waited_for_ready })
    }

    /// Waits until all blocks in flight are through.
    async fn all_of<B: BlockTraffic>(&self, mut blocks: InFlight<B>, what: WaitReason) -> Result<(), TransferError> {
        loop {
            blocks.settle().await?;
            let Some(with) = blocks.oldest() else { return blocks.all().await };
            if !self.runs_free() {
                return blocks.all().await;
            }
            self.waiting(what, with, blocks.next()).await?;
        }
    }

    /// Tells whether the ports carry the blocks of all neighbours at once.
    fn runs_free(&self) -> bool {
        self.exchange.distance.runs_free(self.shape.count)
    }

    /// Notes that a neighbour has received a block.
    fn block_sent(&self, to: Rank, bytes: usize, outcome: Result<(), WorkError>) -> Result<(), TransferError> {
        self.exchange.waits.block_taken(to, 1, || self.exchange.now());
        if self.exchange.rank.is_root() {
            self.exchange.distance.count_block(bytes, || self.exchange.now());
        }
        let sends = || self.plan.sends(self.exchange.rank);
        let due = || sends().map(|hop| self.shape.len(hop.block) as u64).sum();
        self.progress.iter().for_each(|progress| progress.count_sent(bytes, due));
        outcome.map_err(|error| TransferError::Work { with: to, error })
    }

    /// Awaits `wait`, which is for a neighbour, and returns how long it took.
    async fn waiting(
        &self,
        what: WaitReason,
        on: Rank,
        wait: impl Future<Output = Result<(), TransferError>>,
    ) -> Result<Duration, TransferError> {
        let (outcome, waited) = self.exchange.waiting(what, on, wait).await;
        outcome.map(|()| waited)
    }
}

/// Returns the checksum of a block; computes it if it is not known.
pub(crate) async fn checksum_of(blocks: &Blocks, block: BlockIndex, bytes: &Buffer) -> Result<Checksum, TransferError> {
    if let Some(checksum) = blocks.checksum(block) {
        return Ok(checksum);
    }
    let checksum = Checksum::of_shared_yielding(bytes).await.map_err(|error| {
        let what = format!("the memory of a block could not be read: {error}");
        TransferError::Local(FailureCause::Resources { what })
    })?;
    blocks.note_checksum(block, checksum);
    Ok(checksum)
}

/// Most blocks of a message. What a member keeps about each, about 90 bytes, must not need much memory, since the
/// sender of the first block tells how many there are.
pub(crate) const BLOCKS_MAX: u32 = 1 << 20;
/// Hops to which a port that runs free looks ahead. With more hops, a neighbour that is not ready delays the others
/// later.
const HOPS_AHEAD: usize = 2048;
