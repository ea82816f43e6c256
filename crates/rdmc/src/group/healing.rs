//! Fetches corrupted blocks anew, over the mesh: another path than the one that corrupted them.
//!
//! The member that finds a corrupted block asks one holder after the other, the root first, piece by piece. A holder
//! keeps no state for it: it looks up each piece among the messages that it retains (`retained.rs`).

use std::sync::{Arc, Mutex};

use rdmc_fabric::Buffer;
use rdmc_schedule::{BlockIndex, Rank};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::membership::Membership;
use super::retained::{RetainedMessage, RetainedMessages};
use crate::checksum::{BlockIdentity, Checksum};
use crate::stats::Corruption;
use crate::sync::lock;
use crate::transfer::exchange::Exchange;
use crate::transfer::{Blocks, HealedBlock, Shape, TransferError, checksum_of};
use crate::wire::{BlockPiece, GroupFrame, PIECE_LEN_MAX, PieceRequest};

/// A member's state for fetching blocks, and for supplying them.
pub(super) struct Healing {
    membership: Arc<Membership>,
    exchange: Arc<Exchange>,
    retained: Arc<RetainedMessages>,
    /// One block at a time.
    turn: Semaphore,
    pending: Mutex<Option<PendingFetch>>,
    asked: mpsc::Sender<FetchRequest>,
    /// At the root of a group that does not check blocks: the last checksum that was computed, and its message and
    /// block. Such a group has no digests, so its blocks do not note it.
    computed: Mutex<Option<((u64, BlockIndex), Checksum)>>,
}

/// A member's request for a piece of a block.
pub(super) type FetchRequest = (Rank, PieceRequest);

struct PendingFetch {
    from: Rank,
    wanted: PieceRequest,
    answer: oneshot::Sender<Option<BlockPiece>>,
}

impl Healing {
    pub(super) fn new(
        membership: Arc<Membership>,
        exchange: Arc<Exchange>,
        retained: Arc<RetainedMessages>,
    ) -> (Self, mpsc::Receiver<FetchRequest>) {
        let (asked, asking) = mpsc::channel(ASKED_MAX);
        let (turn, pending, computed) = (Semaphore::new(1), Mutex::default(), Mutex::default());
        (Self { membership, exchange, retained, turn, pending, asked, computed }, asking)
    }

    /// Notes that a block came corrupted from `by`, and [fetches it anew](crate::transfer::Owner::heal).
    pub(super) async fn fetch_anew(
        &self,
        by: Rank,
        identity: BlockIdentity,
        first: bool,
        memory: &mut [u8],
    ) -> Result<HealedBlock, TransferError> {
        self.count_corrupted(by, identity);
        let _turn = self.turn.acquire().await.expect("it is never closed");
        let count = u32::try_from(self.membership.members.len()).expect("checked when the group was formed");
        let others = (1..count).map(Rank).filter(|rank| *rank != by);
        let from = [Rank::ROOT].into_iter().chain((!by.is_root()).then_some(by)).chain(others);
        let mut bad = 0;
        for holder in from.filter(|holder| *holder != self.membership.rank) {
            match self.fetch(holder, identity, first, memory).await {
                FetchOutcome::Whole(healed) => {
                    let (message, block) = (identity.message, healed.block.0);
                    let span = &self.membership.span;
                    tracing::info!(parent: span, message, block, from = %holder, "a corrupted block is healed");
                    self.exchange.counters.healed();
                    self.membership.node.counters.healed();
                    return Ok(healed);
                }
                FetchOutcome::Bad => bad += 1,
                FetchOutcome::Nothing => {}
            }
            if bad == BAD_MAX {
                break;
            }
        }
        Err(TransferError::Corrupted { by, message: identity.message, block: identity.block })
    }

    /// Counts and logs a corrupted block.
    fn count_corrupted(&self, from: Rank, identity: BlockIdentity) {
        let BlockIdentity { message, block, .. } = identity;
        let (span, to) = (&self.membership.span, self.membership.rank);
        tracing::warn!(parent: span, %from, %to, message, block = block.0, "a block came corrupted");
        let corruption = Corruption { from, to, message, block: block.0 };
        self.exchange.counters.corrupted(corruption);
        self.membership.node.counters.corrupted(corruption);
    }

    /// Fetches a block from one member.
    async fn fetch(&self, holder: Rank, identity: BlockIdentity, first: bool, memory: &mut [u8]) -> FetchOutcome {
        let message = identity.message;
        let mut wanted = PieceRequest { message, block: (!first).then_some(identity.block.0), offset: 0 };
        let mut known: Option<(u64, u32, u128)> = None;
        loop {
            let Some(piece) = self.ask(holder, wanted).await else { return FetchOutcome::Nothing };
            let BlockPiece { size, block, checksum, bytes } = piece;
            let as_expected = match known {
                Some(known) => known == (size, block, checksum),
                None => first || (size, block) == (identity.size, identity.block.0),
            };
            let due = |shape: &Shape| match first {
                true => self.exchange.first_received(*shape, self.membership.rank) == Some(BlockIndex(block)),
                false => block < shape.count.0,
            };
            let shape = Shape::new(size, self.membership.spec.block_size).filter(|shape| as_expected && due(shape));
            let Some(shape) = shape else { return FetchOutcome::Bad };
            let len = shape.len(BlockIndex(block));
            let offset = wanted.offset as usize;
            let Some(room) = memory.get_mut(..len).and_then(|block| block.get_mut(offset..)) else {
                return FetchOutcome::Bad;
            };
            if bytes.len() != room.len().min(PIECE_LEN_MAX) {
                return FetchOutcome::Bad;
            }
            room[..bytes.len()].copy_from_slice(&bytes);
            if bytes.len() == room.len() {
                let (block, checksum) = (BlockIndex(block), Checksum(checksum));
                let whole = Checksum::of_yielding(&memory[..len]).await == checksum;
                return if whole {
                    FetchOutcome::Whole(HealedBlock { shape, block, checksum })
                } else {
                    FetchOutcome::Bad
                };
            }
            known = Some((size, block, checksum));
            wanted.block = Some(block);
            wanted.offset += u32::try_from(bytes.len()).expect("it is part of a block");
        }
    }

    /// Asks a member for a piece of a block; returns `None` if it does not have the piece, or does not answer.
    async fn ask(&self, holder: Rank, wanted: PieceRequest) -> Option<BlockPiece> {
        let (answer, answered) = oneshot::channel();
        *lock(&self.pending) = Some(PendingFetch { from: holder, wanted, answer });
        self.membership.send(self.membership.members[holder.index()], GroupFrame::Fetch(wanted)).await;
        let answered = self.membership.node.environment.timeout(self.membership.node.mesh.detection(), answered).await;
        answered.ok()?.ok()?
    }

    /// Takes a member's answer to a request. An answer that comes too late is dropped.
    pub(super) fn take_piece(&self, from: Rank, wanted: PieceRequest, piece: Option<BlockPiece>) {
        let mut pending = lock(&self.pending);
        if let Some(PendingFetch { answer, .. }) = pending.take_if(|it| (it.from, it.wanted) == (from, wanted)) {
            // Fails only if the task no longer waits.
            let _ = answer.send(piece);
        }
    }

    /// Queues a member's request. A member that does not wait for answers gets no more of them than fit in the queue.
    pub(super) fn queue_fetch(&self, from: Rank, wanted: PieceRequest) {
        let _ = self.asked.try_send((from, wanted));
    }

    /// Supplies pieces of blocks, one after the other, for ever.
    pub(super) async fn supply(&self, mut asked: mpsc::Receiver<FetchRequest>) {
        while let Some((from, wanted)) = asked.recv().await {
            let to = self.membership.members[from.index()];
            let frame = GroupFrame::Piece { wanted, piece: self.piece(from, wanted).await };
            // Pieces that are not written yet take memory: one at a time.
            let written = async {
                self.membership.send(to, frame).await;
                self.membership.node.mesh.flush(&[to]).await;
            };
            let _ = self.membership.node.environment.timeout(self.membership.node.mesh.detection(), written).await;
        }
    }

    /// Returns a piece of a block, if this member has it.
    async fn piece(&self, asker: Rank, wanted: PieceRequest) -> Option<BlockPiece> {
        let kept = self.retained.message(wanted.message)?;
        let shape = kept.shape();
        let block = match wanted.block {
            Some(block) => BlockIndex(block),
            None => self.exchange.first_received(shape, asker)?,
        };
        if block.0 >= shape.count.0 {
            return None;
        }
        let offset = wanted.offset as usize;
        let mut piece = vec![0; shape.len(block).checked_sub(offset)?.min(PIECE_LEN_MAX)];
        let Checksum(checksum) = match kept {
            RetainedMessage::Blocks(blocks) => {
                let bytes = blocks.if_held(block)?;
                bytes.copy_to(offset, &mut piece).ok()?;
                self.checksum(wanted.message, &blocks, block, &bytes).await?
            }
            RetainedMessage::Short(short) => {
                let (bytes, checksum) = short.block(block);
                let len = piece.len();
                piece.copy_from_slice(&bytes[offset..offset + len]);
                checksum
            }
        };
        Some(BlockPiece { size: shape.size, block: block.0, checksum, bytes: piece })
    }

    /// Returns the checksum of a block that is here; at a receiver only if the block was checked.
    ///
    /// At the root a block has no checksum yet before it is sent, or if the group does not check blocks. A receiver may
    /// ask for it all the same, because its slot of the ring came corrupted.
    async fn checksum(&self, message: u64, blocks: &Blocks, block: BlockIndex, bytes: &Buffer) -> Option<Checksum> {
        if !self.membership.rank.is_root() {
            return blocks.checksum(block);
        }
        if self.exchange.checks_blocks {
            return checksum_of(blocks, block, bytes).await.ok();
        }
        let known = lock(&self.computed).filter(|(of, _)| *of == (message, block));
        if let Some((_, checksum)) = known {
            return Some(checksum);
        }
        let checksum = Checksum::of_shared_yielding(bytes).await.ok()?;
        *lock(&self.computed) = Some(((message, block), checksum));
        Some(checksum)
    }
}

/// The outcome of asking one member for a block.
enum FetchOutcome {
    Whole(HealedBlock),
    /// It sent something else than the block.
    Bad,
    /// It does not have it, or does not answer.
    Nothing,
}

/// Members that may send something else than the block before it is given up.
const BAD_MAX: u32 = 3;
/// Requests of others that wait for an answer.
const ASKED_MAX: usize = 64;
