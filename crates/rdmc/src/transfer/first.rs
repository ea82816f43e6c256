//! The first block of a message, which brings the message's size.

use rdmc_fabric::{Buffer, BufferMut, Received};
use rdmc_schedule::{BlockIndex, Rank, Step};

use super::exchange::{ArrivingBlock, Exchange};
use super::{Blocks, HealedBlock, Owner, Shape, TransferError};
use crate::checksum::{BlockIdentity, Checksum};

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
    /// Receives the first block of a message from `source` into `place`.
    pub(crate) async fn receive(
        exchange: &Exchange,
        owner: &dyn Owner,
        message: u64,
        source: Rank,
        place: FirstPlace,
    ) -> Result<Self, TransferError> {
        let (destination, expected) = match place {
            FirstPlace::Elsewhere(staging) => (staging, None),
            FirstPlace::Expected(blocks) => (blocks.take_destination(exchange.first_of(blocks.shape())), Some(blocks)),
        };
        let neighbour = exchange.neighbour(source);
        let turn = (message, Step(0));
        let runs_free = exchange.distance.runs_free(exchange.distance.latest());
        if !runs_free {
            exchange.ingress.free_for(source, turn).await;
        }
        neighbour.room_to_grant(exchange.distance.window(runs_free)).await;
        let ArrivingBlock { operation, granted, summing } = exchange.receive(source, turn, destination);
        neighbour.announce_grants_if_due();
        let arrived = operation.await.map_err(|error| TransferError::Work { with: source, error })?;
        let Received { mut buffer, mut len, imm } = arrived;
        drop(granted);
        exchange.count_received(len);
        let malformed = |what: String| TransferError::Protocol { by: source, what: format!("sent {what}") };
        let imm = imm.ok_or_else(|| malformed("a block without an immediate".to_owned()))?;
        let size = neighbour.message_size(imm, exchange.checks_blocks);
        let shape = Shape::new(size, exchange.block_size);
        let (shape, block, checksum) = match summing {
            None => {
                let shape = shape.ok_or_else(|| malformed("a message with too many blocks".to_owned()))?;
                (shape, exchange.first_of(shape), None)
            }
            Some(summing) => {
                let checksum = summing.checksum_of(&buffer[..len]).await;
                let block = shape.map_or(BlockIndex(0), |shape| exchange.first_of(shape));
                let identity = BlockIdentity { message, size, block };
                match shape.filter(|_| checksum.seal(identity) == imm) {
                    Some(shape) => (shape, block, Some(checksum)),
                    None => {
                        // Block or size came corrupted: both are fetched anew.
                        let healed = owner.heal(source, identity, true, &mut buffer).await?;
                        let HealedBlock { shape, block, checksum } = healed;
                        len = shape.len(block);
                        (shape, block, Some(checksum))
                    }
                }
            }
        };
        if len != shape.len(block) {
            return Err(malformed(format!("{len} bytes as the first block of a message of {}", shape.size)));
        }
        let content = match expected.filter(|blocks| blocks.shape() == shape) {
            Some(blocks) => {
                blocks.hold(block, buffer.freeze());
                FirstContent::InPlace(blocks)
            }
            None => {
                buffer.truncate(len);
                FirstContent::Staged(buffer.freeze())
            }
        };
        Ok(Self { shape, block, content, checksum })
    }
}

impl Exchange {
    /// Returns the first block that a member receives of a message; `None` at the root.
    pub(crate) fn first_received(&self, shape: Shape, rank: Rank) -> Option<BlockIndex> {
        self.schedule(shape.count).receives(rank).next().map(|receive| receive.block)
    }

    /// Returns the first block that this member receives of a message.
    fn first_of(&self, shape: Shape) -> BlockIndex {
        self.first_received(shape, self.rank).expect("a member that is not the root receives every block")
    }
}
