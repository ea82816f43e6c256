//! The first block of a message, which brings the message's size.

use futures::future::BoxFuture;
use rdmc_fabric::{Buffer, BufferMut, Received, WorkError};
use rdmc_schedule::{BlockIndex, Rank, Step};

use super::arrival::{ArrivedBlock, ArrivingBlock, BlockArrival, DueBlock, ExpectedBlock};
use super::exchange::Exchange;
use super::{Blocks, Owner, Shape, TransferError};
use crate::checksum::Checksum;

/// The first block of a message.
pub(crate) struct FirstBlock {
    pub(crate) shape: Shape,
    pub(crate) block: BlockIndex,
    pub(crate) content: FirstContent,
    /// If blocks are checked.
    pub(crate) checksum: Option<Checksum>,
}

/// Where the first block has arrived.
pub(crate) enum FirstContent {
    /// Before its destination was known.
    Staged(Buffer),
    /// In its destination.
    InPlace(Blocks),
}

impl FirstBlock {
    /// Tells whether `memory` has a whole block at the place of the first block of a message of its size. So the first
    /// block of a message of any other size has room there too.
    pub(crate) fn has_place_in(exchange: &Exchange, memory: &BufferMut) -> bool {
        let shape = Shape::new(memory.len() as u64, exchange.block_size);
        shape.is_some_and(|shape| shape.len(exchange.first_of(shape)) == exchange.block_size as usize)
    }

    /// Receives the first block of a message from `source` into its [place](Self::has_place_in) in `memory`. The
    /// message's size comes with it.
    pub(crate) async fn receive_in_place(
        exchange: &Exchange,
        owner: &dyn Owner,
        message: u64,
        source: Rank,
        memory: BufferMut,
    ) -> Result<Self, TransferError> {
        let shape = Shape::new(memory.len() as u64, exchange.block_size).expect("it has a place");
        let blocks = Blocks::to_receive(shape, memory, None);
        let destination = blocks.take_destination(exchange.first_of(shape));
        let arrival = FirstArrival::receive(exchange, message, source, destination, || ()).await;
        arrival.check(exchange, owner, Some(blocks)).await
    }
}

/// How far the receive of a message's first block is when the message's memory is there.
pub(crate) enum FirstReceive {
    /// It is posted with the others.
    Due,
    /// It is posted: the message's size came before the block.
    Posted(BoxFuture<'static, FirstArrival>),
    /// The block has arrived.
    Done,
}

/// A first block that has arrived and is not checked.
pub(crate) struct FirstArrival {
    expected: ExpectedBlock,
    message: u64,
    due: DueBlock,
    outcome: Result<Received, WorkError>,
}

impl FirstArrival {
    /// Receives the first block of message `message`, or of the first one after it that comes in blocks. Calls `posted`
    /// when its receive is posted, so that later ones may be.
    pub(crate) async fn receive(
        exchange: &Exchange,
        message: u64,
        source: Rank,
        destination: BufferMut,
        posted: impl FnOnce(),
    ) -> Self {
        let turn = (message, Step(0));
        match exchange.distance.runs_free(exchange.distance.latest()) {
            true => exchange.neighbour(source).room_to_grant(exchange.distance.window(true)).await,
            false => exchange.room_in_step(source, turn).await,
        }
        let ArrivingBlock { operation, granted, expected } = exchange.receive(source, turn, destination);
        exchange.neighbour(source).announce_grants_if_due();
        posted();
        let outcome = operation.await;
        drop(granted);
        Self { expected, message, due: DueBlock::First, outcome }
    }

    /// Returns why it did not arrive.
    pub(crate) fn failure(&self) -> Option<TransferError> {
        let error = *self.outcome.as_ref().err()?;
        Some(TransferError::Work { with: self.expected.from, error })
    }

    /// Checks the block of a message whose number and size came in another way.
    pub(crate) async fn check_as(
        mut self,
        exchange: &Exchange,
        owner: &dyn Owner,
        message: u64,
        shape: Shape,
    ) -> Result<FirstBlock, TransferError> {
        (self.message, self.due) = (message, DueBlock::Known(shape, exchange.first_of(shape)));
        self.check(exchange, owner, None).await
    }

    /// Checks the block of a message whose size was announced.
    pub(crate) async fn check_announced(
        mut self,
        exchange: &Exchange,
        owner: &dyn Owner,
        shape: Shape,
    ) -> Result<FirstBlock, TransferError> {
        self.due = DueBlock::Announced(shape);
        self.check(exchange, owner, None).await
    }

    /// Checks the block; it is in its place if that was `provided`.
    pub(crate) async fn check(
        self,
        exchange: &Exchange,
        owner: &dyn Owner,
        provided: Option<Blocks>,
    ) -> Result<FirstBlock, TransferError> {
        let ArrivedBlock { shape, block, buffer, checksum } =
            match exchange.take_arrived(owner, self.expected, self.message, self.due, self.outcome)? {
                BlockArrival::Checked(arrived) => arrived,
                BlockArrival::Unsettled(settling) => settling.await?,
            };
        let content = match provided.filter(|blocks| blocks.shape() == shape) {
            Some(blocks) => {
                blocks.hold(block, buffer.freeze());
                FirstContent::InPlace(blocks)
            }
            None => FirstContent::Staged(buffer.freeze()),
        };
        Ok(FirstBlock { shape, block, content, checksum })
    }
}
