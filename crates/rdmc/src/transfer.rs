//! One member's part in one multicast: the heart (DSN §4.2, §4.4).
//!
//! A [`Transfer`] receives the blocks that the schedule names for this member, in the schedule's order, and sends the
//! blocks that it names, in the schedule's order. It sends a block when the member holds it, when the next member has
//! sent *ready_for_block* and when the port is about to be free. It waits for nothing else, so members need no common
//! clock.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, try_join};
use rdmc_fabric::{Buffer, BufferMut, Received, WorkError};
use rdmc_schedule::{BlockCount, BlockIndex, Rank};
use tokio::sync::oneshot;

use crate::certificate::Digest;
use crate::failure::FailureCause;
use crate::group::Group;
use crate::group::neighbour::Neighbour;
use crate::group::pace::WaitReason;
use crate::group::receiver::Message;

mod blocks;
mod checksum;
mod in_flight;
mod plan;
mod port;
mod turn;

pub(crate) use blocks::Blocks;
pub(crate) use checksum::{BlockIdentity, Checksum, IncrementalChecksum, yield_now};
use in_flight::{InFlight, IncomingBlocks, OutgoingBlocks};
pub(crate) use plan::HopPlan;
pub(crate) use port::Port;
pub(crate) use turn::{Turn, Turnstile};

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
        Some(Self { size, block_size, count: BlockCount(count) })
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

/// A block that is to arrive.
struct ExpectedBlock {
    receive: rdmc_schedule::Hop,
    /// Its checksum as it arrives, if blocks are checked.
    summing: Option<Arc<IncrementalChecksum>>,
}

/// One member's part in one multicast.
pub(crate) struct Transfer {
    group: Arc<Group>,
    number: u64,
    shape: Shape,
    plan: HopPlan,
    blocks: Arc<Blocks>,
    /// Delivers the message to a receiver's application.
    deliver: Option<oneshot::Sender<Message>>,
}

impl Transfer {
    pub(crate) fn new(
        group: Arc<Group>,
        number: u64,
        plan: HopPlan,
        blocks: Arc<Blocks>,
        deliver: Option<oneshot::Sender<Message>>,
    ) -> Self {
        group.retained().keep(number, &blocks);
        Self { group, number, shape: blocks.shape(), plan, blocks, deliver }
    }

    /// Runs until this member holds every block and has sent every block that it is to send.
    ///
    /// The turns keep messages in order: the next one is received when all receives of this one are posted, and sent
    /// on when all sends of this one have left. `first_is_here` if the first block has arrived already.
    pub(crate) async fn run(
        mut self,
        first_is_here: bool,
        receive_turn: Turn,
        relay_turn: Turn,
    ) -> Result<(), TransferError> {
        let deliver = self.deliver.take();
        let holds_from_the_start = deliver.is_none();
        let received = async {
            try_join!(self.receive_blocks(first_is_here, receive_turn), self.copy_first_block())?;
            if let Some(deliver) = deliver {
                let digest = self.digest().await?;
                let whole = self.blocks.whole();
                let content = self.group.content(self.number, &whole).await?;
                self.group.deliver(deliver, Message::new(self.number, content), &whole, digest);
            }
            Ok(())
        };
        try_join!(received, self.relay_blocks(relay_turn))?;
        if holds_from_the_start {
            // Its blocks were summed as they were sent.
            self.group.note_digest(self.number, self.digest().await?);
        }
        self.group.message_completed(self.number, self.shape.size);
        Ok(())
    }

    /// Posts the receives of the schedule, each with its block's destination, as far ahead as the senders may be.
    async fn receive_blocks(&self, first_is_here: bool, turn: Turn) -> Result<(), TransferError> {
        let mut arriving = InFlight::new(IncomingBlocks::new(self));
        let mut untold: Option<&Neighbour> = None;
        for receive in self.plan.receives(self.group.rank()).skip(usize::from(first_is_here)) {
            let (neighbour, ingress) = (self.group.neighbour(receive.peer), self.group.ingress());
            let has_room = || ingress.is_free_for(receive.peer) && neighbour.has_room_to_grant();
            if !has_room() {
                arriving.settle().await?;
            }
            if !has_room() {
                // One write announces all grants that could be given at once.
                untold.take().inspect(|neighbour| neighbour.announce_grants_if_due());
                let occupant = ingress.occupant().unwrap_or(receive.peer);
                let room = async {
                    ingress.free_for(receive.peer).await;
                    neighbour.room_to_grant().await;
                };
                self.group.waiting(WaitReason::Arriving, occupant, arriving.unless_failing(room)).await.0?;
            }
            let summing = self.group.checks_blocks().then(IncrementalChecksum::new);
            let (operation, granted) = neighbour.grant(self.blocks.take_destination(receive.block), summing.clone());
            ingress.occupy(receive.peer, operation.nearly_done());
            if let Some(other) = untold.replace(neighbour).filter(|other| !std::ptr::eq(*other, neighbour)) {
                other.announce_grants_if_due();
            }
            arriving.blocks.push(ExpectedBlock { receive, summing }, (operation, granted));
        }
        untold.inspect(|neighbour| neighbour.announce_grants_if_due());
        turn.end();
        arriving.all().await
    }

    /// Checks a block that has arrived and passes it to the relay; returns the work that is left until then, if any.
    fn take_arrived(
        &self,
        expected: ExpectedBlock,
        outcome: Result<Received, WorkError>,
    ) -> Result<Option<BoxFuture<'_, Result<(), TransferError>>>, TransferError> {
        let ExpectedBlock { receive: rdmc_schedule::Hop { step, peer: by, block, .. }, summing } = expected;
        let Received { buffer, len, imm } = outcome.map_err(|error| TransferError::Work { with: by, error })?;
        // The one block whose immediate may be the message's size was taken before the transfer began.
        let seal = imm.filter(|imm| summing.is_some() || *imm == block.0);
        let Some(seal) = seal else {
            return Err(TransferError::Protocol {
                by,
                what: format!("sent block {imm:?} where block {block} was due"),
            });
        };
        let due = self.shape.len(block);
        if len != due {
            return Err(TransferError::Protocol {
                by,
                what: format!("sent {len} bytes as block {block} of {due} bytes"),
            });
        }
        tracing::trace!(step = step.0, from = %by, block = block.0, "block received");
        self.group.count_received(len);
        if let Some(summing) = summing {
            match summing.checksum_at_once(&buffer) {
                Some(checksum) if checksum.seal(self.identity_of(block)) == seal => {
                    self.blocks.note_checksum(block, checksum);
                }
                _ => return Ok(Some(self.verify(by, block, buffer, summing, seal).boxed())),
            }
        }
        self.blocks.hold(block, buffer.freeze());
        Ok(None)
    }

    /// Sums a block, and fetches it anew if it is corrupted.
    async fn verify(
        &self,
        by: Rank,
        block: BlockIndex,
        mut buffer: BufferMut,
        summing: Arc<IncrementalChecksum>,
        seal: u32,
    ) -> Result<(), TransferError> {
        let mut checksum = summing.checksum_of(&buffer).await;
        let identity = self.identity_of(block);
        if checksum.seal(identity) != seal {
            checksum = self.group.heal(by, identity, false, &mut buffer).await?.checksum;
        }
        self.blocks.note_checksum(block, checksum);
        self.blocks.hold(block, buffer.freeze());
        Ok(())
    }

    fn identity_of(&self, block: BlockIndex) -> BlockIdentity {
        BlockIdentity { message: self.number, size: self.shape.size, block }
    }

    /// Returns the seal with which a block travels, if blocks are checked.
    async fn seal(&self, block: BlockIndex, bytes: &Buffer) -> Result<Option<u32>, TransferError> {
        if !self.group.checks_blocks() {
            return Ok(None);
        }
        Ok(Some(self.checksum(block, bytes).await?.seal(self.identity_of(block))))
    }

    /// Returns a block's checksum. Received blocks were verified when they came; the root computes its own here, once.
    async fn checksum(&self, block: BlockIndex, bytes: &Buffer) -> Result<Checksum, TransferError> {
        checksum_of(&self.blocks, block, bytes).await
    }

    /// Returns the digest of the message, if blocks are checked and all are here.
    async fn digest(&self) -> Result<Option<Digest>, TransferError> {
        if !self.group.checks_blocks() {
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

    /// Copies the block that came before its destination was known, while the others arrive.
    ///
    /// Until then it is relayed from where it is.
    async fn copy_first_block(&self) -> Result<(), TransferError> {
        // Receives and the first relay are posted before the copy begins.
        yield_now().await;
        self.blocks.copy_staged(yield_now).await;
        Ok(())
    }

    /// Sends the blocks that the schedule names, each when it is held and the receiver is ready for it.
    async fn relay_blocks(&self, mut turn: Turn) -> Result<(), TransferError> {
        turn.wait().await;
        if !self.plan.is_repair() && !self.group.is_delta() {
            self.group.announce(self.number, self.shape.size).await;
        }
        let mut leaving = InFlight::new(OutgoingBlocks::new(self));
        let mut sizes_told = std::collections::BTreeSet::new();
        let mut sends = self.plan.sends(self.group.rank()).peekable();
        while let Some(send) = sends.next() {
            let (neighbour, egress) = (self.group.neighbour(send.peer), self.group.egress());
            // Blocks sent to this neighbour before leave at the latest when this one has to wait.
            let (block, waited_for_block) = match self.blocks.if_held(send.block) {
                Some(block) => (block, Duration::ZERO),
                None => {
                    neighbour.flush();
                    let began = self.group.now();
                    let block = leaving.unless_failing(self.blocks.held(send.block)).await?;
                    (block, self.group.now().since(began))
                }
            };
            let seal = self.seal(send.block, &block).await?;
            let mut waited_for_ready = Duration::ZERO;
            if !neighbour.try_ready_for_block() {
                neighbour.flush();
                let ready = leaving.unless_failing(neighbour.ready_for_block());
                waited_for_ready = self.waiting(WaitReason::Ready, send.peer, ready).await?;
            }
            let mut waited_for_port = Duration::ZERO;
            let has_room = || egress.is_free_for(send.peer) && neighbour.has_room_to_send();
            if !has_room() {
                leaving.settle().await?;
            }
            if !has_room() {
                neighbour.flush();
                let occupant = egress.occupant().unwrap_or(send.peer);
                let free = leaving.unless_failing(async {
                    egress.free_for(send.peer).await;
                    neighbour.room_to_send().await;
                });
                waited_for_port = self.waiting(WaitReason::Leaving, occupant, free).await?;
            }
            self.group.count_sent(block.len(), waited_for_ready);
            self.group.pace().block_due(send.peer, || self.group.now());
            let tells_size = !self.plan.is_repair() && neighbour.learns_size_here && sizes_told.insert(send.peer);
            let (operation, sent) = if tells_size {
                neighbour.send_first_block(block, self.shape.size, seal)
            } else {
                let in_a_run = sends.peek().is_some_and(|next| next.peer == send.peer);
                neighbour.send_block(block, seal.unwrap_or(send.block.0), in_a_run)
            };
            egress.occupy(send.peer, operation.nearly_done());
            tracing::trace!(
                step = send.step.0,
                to = %send.peer,
                block = send.block.0,
                ?waited_for_block,
                ?waited_for_ready,
                ?waited_for_port,
                "sending block"
            );
            leaving.blocks.push(send.peer, (operation, sent));
        }
        turn.end();
        leaving.all().await
    }

    /// Notes that a neighbour has received a block.
    fn block_sent(&self, to: Rank, outcome: Result<(), WorkError>) -> Result<(), TransferError> {
        self.group.pace().block_taken(to, 1, || self.group.now());
        outcome.map_err(|error| TransferError::Work { with: to, error })
    }

    /// Awaits `wait`, which is for a neighbour, and returns how long it took.
    async fn waiting(
        &self,
        what: WaitReason,
        on: Rank,
        wait: impl Future<Output = Result<(), TransferError>>,
    ) -> Result<Duration, TransferError> {
        let (outcome, waited) = self.group.waiting(what, on, wait).await;
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
