//! Fetches corrupted blocks anew, over the mesh: another path than the one that corrupted them.
//!
//! The member that finds a corrupted block asks one holder after the other, the root first, piece by piece. A holder
//! keeps no state for it: it looks up each piece among the messages that it retains (`retained.rs`).

use std::sync::{Arc, Mutex};

use rdmc_schedule::{BlockIndex, Rank};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::membership::Membership;
use super::retained::{RetainedMessage, RetainedMessages};
use crate::checksum::{BlockIdentity, Checksum};
use crate::stats::Corruption;
use crate::sync::lock;
use crate::table::OutgoingRing;
use crate::transfer::exchange::Exchange;
use crate::transfer::{HealedBlock, Shape, TransferError};
use crate::wire::{BlockPiece, GroupFrame, PIECE_LEN_MAX, PieceRequest};

/// A member's state for fetching blocks, and for supplying them.
pub(super) struct Healing {
    membership: Arc<Membership>,
    exchange: Arc<Exchange>,
    retained: Arc<RetainedMessages>,
    /// One block at a time.
    turn: Semaphore,
    pending: Mutex<Option<PendingFetch>>,
    /// The slot of the ring that this member waits for.
    pending_slot: Mutex<Option<PendingSlot>>,
    asked: mpsc::Sender<FetchRequest>,
}

/// A member's request for a piece of a block, or for a slot of the ring.
pub(super) type FetchRequest = (Rank, Fetched);

/// What a member asks for.
#[derive(Clone, Copy)]
pub(super) enum Fetched {
    Piece(PieceRequest),
    Slot(u64),
}

struct PendingFetch {
    from: Rank,
    wanted: PieceRequest,
    answer: oneshot::Sender<Option<BlockPiece>>,
}

struct PendingSlot {
    slot: u64,
    answer: oneshot::Sender<Option<Vec<u8>>>,
}

impl Healing {
    pub(super) fn new(
        membership: Arc<Membership>,
        exchange: Arc<Exchange>,
        retained: Arc<RetainedMessages>,
    ) -> (Self, mpsc::Receiver<FetchRequest>) {
        let (asked, asking) = mpsc::channel(ASKED_MAX);
        let (turn, pending, pending_slot) = (Semaphore::new(1), Mutex::default(), Mutex::default());
        (Self { membership, exchange, retained, turn, pending, pending_slot, asked }, asking)
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
                    self.count_healed();
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

    /// At a receiver: notes that a slot of the ring came corrupted, that of message `message` and perhaps of later
    /// ones, and asks the root for it until `take` makes something of it.
    pub(super) async fn fetch_slot<T>(
        &self,
        slot: u64,
        message: u64,
        mut take: impl FnMut(&[u8]) -> Result<Option<T>, TransferError>,
    ) -> Result<T, TransferError> {
        let (environment, root) = (&*self.membership.node.environment, self.membership.members[0]);
        self.count_corrupted(Rank::ROOT, BlockIdentity { message, size: 0, block: BlockIndex(0) });
        for _ in 0..BAD_MAX {
            let (answer, answered) = oneshot::channel();
            *lock(&self.pending_slot) = Some(PendingSlot { slot, answer });
            self.membership.send(root, GroupFrame::FetchSlot { slot }).await;
            let answered = environment.timeout(self.membership.node.mesh.detection(), answered).await;
            let Ok(Ok(Some(bytes))) = answered else { continue };
            if let Some(taken) = take(&bytes)? {
                tracing::info!(parent: &self.membership.span, slot, message, "a corrupted slot is healed");
                self.count_healed();
                return Ok(taken);
            }
        }
        Err(TransferError::Corrupted { by: Rank::ROOT, message, block: BlockIndex(0) })
    }

    /// Takes the root's answer. An answer that comes too late is dropped.
    pub(super) fn take_slot(&self, slot: u64, bytes: Option<Vec<u8>>) {
        let pending = lock(&self.pending_slot).take_if(|pending| pending.slot == slot);
        if let Some(PendingSlot { answer, .. }) = pending {
            // Fails only if the task no longer waits.
            let _ = answer.send(bytes);
        }
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

    fn count_healed(&self) {
        self.exchange.counters.healed();
        self.membership.node.counters.healed();
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
    pub(super) fn queue_fetch(&self, from: Rank, wanted: Fetched) {
        let _ = self.asked.try_send((from, wanted));
    }

    /// Supplies pieces of blocks, and slots of the `ring`, one after the other, for ever.
    pub(super) async fn supply(&self, mut asked: mpsc::Receiver<FetchRequest>, ring: Option<&OutgoingRing>) {
        while let Some((from, wanted)) = asked.recv().await {
            let to = self.membership.members[from.index()];
            let frame = match wanted {
                Fetched::Piece(wanted) => GroupFrame::Piece { wanted, piece: self.piece(from, wanted) },
                Fetched::Slot(slot) => {
                    let bytes = ring.and_then(|ring| ring.slot(slot)).map(|bytes| bytes.to_vec());
                    GroupFrame::Slot { slot, bytes }
                }
            };
            // Pieces that are not written yet take memory: one at a time.
            let written = async {
                self.membership.send(to, frame).await;
                self.membership.node.mesh.flush(&[to]).await;
            };
            let _ = self.membership.node.environment.timeout(self.membership.node.mesh.detection(), written).await;
        }
    }

    /// Returns a piece of a block, if this member has it.
    fn piece(&self, asker: Rank, wanted: PieceRequest) -> Option<BlockPiece> {
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
                blocks.if_held(block)?.copy_to(offset, &mut piece).ok()?;
                blocks.checksum(block)?
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
