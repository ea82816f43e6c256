//! The first block of a message, which brings the message's size.

use rdmc_fabric::{Buffer, BufferMut, Received, WorkError};
use rdmc_schedule::{BlockIndex, Rank, Step};

use super::arrival::{ArrivedBlock, ArrivingBlock, BlockArrival, DueBlock, ExpectedBlock};
use super::exchange::Exchange;
use super::{Blocks, Owner, Shape, TransferError};
use crate::checksum::Checksum;

/// Memory for the first block of a message, with the size of a block.
pub(crate) enum FirstPlace {
    /// Its destination is not known yet.
    Elsewhere(BufferMut),
    /// It is in the memory of a message of the size that is expected.
    Expected(Blocks),
}

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

impl FirstPlace {
    /// Tells whether `memory` has a whole block at the place of the first block of a message of its size. So the first
    /// block of a message of any other size has room there too.
    pub(crate) fn is_within(exchange: &Exchange, memory: &BufferMut) -> bool {
        let shape = Shape::new(memory.len() as u64, exchange.block_size);
        shape.is_some_and(|shape| shape.len(exchange.first_of(shape)) == exchange.block_size as usize)
    }

    /// Returns the place for the first block of a message of its size in `memory`, which [has one](Self::is_within).
    pub(crate) fn within(exchange: &Exchange, memory: BufferMut) -> Self {
        let shape = Shape::new(memory.len() as u64, exchange.block_size).expect("it has a place");
        Self::Expected(Blocks::to_receive(shape, memory, None))
    }
}

impl FirstBlock {
    /// Receives the first block of a message from `source` into `place`. The message's size comes with it.
    pub(crate) async fn receive(
        exchange: &Exchange,
        owner: &dyn Owner,
        message: u64,
        source: Rank,
        place: FirstPlace,
    ) -> Result<Self, TransferError> {
        let (destination, provided) = match place {
            FirstPlace::Elsewhere(staging) => (staging, None),
            FirstPlace::Expected(blocks) => (blocks.take_destination(exchange.first_of(blocks.shape())), Some(blocks)),
        };
        let arrival = FirstArrival::receive(exchange, message, source, destination).await;
        arrival.check(exchange, owner, provided).await
    }
}

/// A first block that has arrived and is not checked.
pub(crate) struct FirstArrival {
    expected: ExpectedBlock,
    message: u64,
    due: DueBlock,
    outcome: Result<Received, WorkError>,
}

impl FirstArrival {
    /// Receives the first block of message `message`, or of the first one after it that comes in blocks.
    pub(crate) async fn receive(exchange: &Exchange, message: u64, source: Rank, destination: BufferMut) -> Self {
        let turn = (message, Step(0));
        match exchange.distance.runs_free(exchange.distance.latest()) {
            true => exchange.neighbour(source).room_to_grant(exchange.distance.window(true)).await,
            false => exchange.room_in_step(source, turn).await,
        }
        let ArrivingBlock { operation, granted, expected } = exchange.receive(source, turn, destination);
        exchange.neighbour(source).announce_grants_if_due();
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

    async fn check(
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
