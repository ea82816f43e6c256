//! A block on its way in: its receive, and the checks when it is here.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use rdmc_fabric::{BufferMut, Inspector, Operation, ReceiveOptions, Received, WorkError};
use rdmc_schedule::{BlockIndex, Rank, Step};

use super::exchange::Exchange;
use super::neighbour::{GrantGuard, Neighbour};
use super::port::PortTurn;
use super::{HealedBlock, Owner, Shape, TransferError};
use crate::checksum::{BlockIdentity, Checksum, IncrementalChecksum};

/// A block that is to arrive.
pub(super) struct ExpectedBlock {
    pub(super) from: Rank,
    pub(super) step: Step,
    /// The checksum of a long block as it arrives, if blocks are checked.
    summing: Option<Arc<IncrementalChecksum>>,
}

/// Which block was to arrive.
#[derive(Clone, Copy)]
pub(super) enum DueBlock {
    /// The first block of a message. The message's size comes with it.
    First,
    /// The first block of a message whose size came before it. The cell for sizes may have that of a later message.
    Announced(Shape),
    /// A block of a message of known size.
    Known(Shape, BlockIndex),
}

/// A block that arrives into its destination.
pub(super) struct ArrivingBlock<'a> {
    pub(super) operation: Operation<Received>,
    pub(super) granted: GrantGuard<'a>,
    pub(super) expected: ExpectedBlock,
}

/// A block that has arrived.
pub(super) enum BlockArrival<'a> {
    Checked(ArrivedBlock),
    /// It is still being summed, or fetched anew.
    Unsettled(BoxFuture<'a, Result<ArrivedBlock, TransferError>>),
}

/// A block that has arrived as it was sent.
pub(super) struct ArrivedBlock {
    pub(super) shape: Shape,
    pub(super) block: BlockIndex,
    /// Its bytes alone.
    pub(super) buffer: BufferMut,
    /// If blocks are checked.
    pub(super) checksum: Option<Checksum>,
}

impl Exchange {
    /// Waits until the next receive from a neighbour may be posted if ports keep in step: its port is about to be free.
    pub(super) async fn room_in_step(&self, from: Rank, turn: PortTurn) {
        self.ingress.free_for(from, turn).await;
        self.neighbour(from).room_to_grant(self.distance.window(false)).await;
    }

    /// Posts the receive of the next block from a neighbour for which there is room. The grant is still to be
    /// announced.
    pub(super) fn receive(&self, from: Rank, turn: PortTurn, destination: BufferMut) -> ArrivingBlock<'_> {
        let sums_while_it_comes = self.checks_blocks && destination.len() > SUMMED_AT_ONCE;
        let summing = sums_while_it_comes.then(IncrementalChecksum::new);
        let inspector = summing.clone().map(|summing| summing as Arc<dyn Inspector>);
        let options = ReceiveOptions { inspector, near_bytes: self.distance.near_bytes() };
        let (operation, granted) = self.neighbour(from).grant(destination, options);
        self.ingress.occupy(from, turn, operation.nearly_done());
        ArrivingBlock { operation, granted, expected: ExpectedBlock { from, step: turn.1, summing } }
    }

    /// Takes a block of message `message` that has arrived and checks it; a corrupted one is fetched anew.
    pub(super) fn take_arrived<'a>(
        &self,
        owner: &'a dyn Owner,
        ExpectedBlock { from, summing, .. }: ExpectedBlock,
        message: u64,
        due: DueBlock,
        outcome: Result<Received, WorkError>,
    ) -> Result<BlockArrival<'a>, TransferError> {
        let Received { buffer, len, imm } = outcome.map_err(|error| TransferError::Work { with: from, error })?;
        self.count_received(len);
        let imm = imm.ok_or_else(|| TransferError::sent(from, "a block without an immediate"))?;
        let (size, known) = match due {
            DueBlock::Known(shape, block) => {
                self.distance.count_block(len, || self.now());
                // Whatever its bytes are.
                ArrivedBlock::check_len(from, shape, block, len)?;
                (shape.size, Some((shape, block)))
            }
            DueBlock::Announced(shape) => {
                let block = self.first_of(shape);
                ArrivedBlock::check_len(from, shape, block, len)?;
                (shape.size, Some((shape, block)))
            }
            DueBlock::First => {
                let size = self.neighbour(from).message_size(imm, self.checks_blocks);
                (size, Shape::new(size, self.block_size).map(|shape| (shape, self.first_of(shape))))
            }
        };
        if !self.checks_blocks {
            let (shape, block) = known.ok_or_else(|| TransferError::sent(from, "a message with too many blocks"))?;
            match due {
                DueBlock::Known(..) if imm != block.0 => {
                    return Err(TransferError::sent(from, format_args!("block {imm} where block {block} was due")));
                }
                DueBlock::Announced(_) if !Neighbour::may_tell_size(imm, size) => {
                    let what = format_args!("a message of {imm} bytes, and announced one of {size}");
                    return Err(TransferError::sent(from, what));
                }
                // The immediate is the message's size.
                _ => {}
            }
            return ArrivedBlock::new(from, shape, block, buffer, len, None).map(BlockArrival::Checked);
        }
        let is_first = matches!(due, DueBlock::First);
        let identity = BlockIdentity { message, size, block: known.map_or(BlockIndex(0), |(_, block)| block) };
        let is_intact = move |checksum: Checksum| known.filter(|_| checksum.seal(identity) == imm);
        let checksum = match &summing {
            Some(summing) => summing.checksum_at_once(&buffer[..len]),
            None => Some(Checksum::of(&buffer[..len])),
        };
        if let Some(checksum) = checksum
            && let Some((shape, block)) = is_intact(checksum)
        {
            return ArrivedBlock::new(from, shape, block, buffer, len, Some(checksum)).map(BlockArrival::Checked);
        }
        // A sum that is known already is wrong.
        let still_to_sum = summing.filter(|_| checksum.is_none());
        let settling = async move {
            let mut buffer = buffer;
            if let Some(summing) = still_to_sum {
                let checksum = summing.checksum_of(&buffer[..len]).await;
                if let Some((shape, block)) = is_intact(checksum) {
                    return ArrivedBlock::new(from, shape, block, buffer, len, Some(checksum));
                }
            }
            // Its bytes came corrupted, or the message's size did.
            let HealedBlock { shape, block, checksum } = owner.heal(from, identity, is_first, &mut buffer).await?;
            ArrivedBlock::new(from, shape, block, buffer, shape.len(block), Some(checksum))
        };
        Ok(BlockArrival::Unsettled(settling.boxed()))
    }
}

impl ArrivedBlock {
    /// Takes a block of `len` bytes that may have more room, which must have the length of its place in the message.
    fn new(
        from: Rank,
        shape: Shape,
        block: BlockIndex,
        mut buffer: BufferMut,
        len: usize,
        checksum: Option<Checksum>,
    ) -> Result<Self, TransferError> {
        Self::check_len(from, shape, block, len)?;
        buffer.truncate(len);
        tracing::trace!(%from, block = block.0, "block received");
        Ok(Self { shape, block, buffer, checksum })
    }

    fn check_len(from: Rank, shape: Shape, block: BlockIndex, len: usize) -> Result<(), TransferError> {
        match shape.len(block) {
            due if due == len => Ok(()),
            due => Err(TransferError::sent(from, format_args!("{len} bytes as block {block}, which has {due}"))),
        }
    }
}

/// Longest block that is summed after it has arrived. It is in the fastest cache then.
const SUMMED_AT_ONCE: usize = 16 << 10;
