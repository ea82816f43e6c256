//! Messages of which receivers have parts already: only the missing blocks travel.
//!
//! The root announces a message. Each other member answers with the checksums of the blocks in the memory that its
//! application gave, if that may hold some of them. The root compares these with its own, and tells all members which
//! blocks each member has. From that all compute the same [`Repair`], as after a failure. So a block is used only if it
//! equals the root's, whichever member it comes from.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rdmc_schedule::{BlockCount, BlockIndex, BlockSet, Rank, Repair};
use tokio::sync::oneshot;

use super::membership::Membership;
use crate::checksum::Checksum;
use crate::sync::lock;
use crate::transfer::exchange::Exchange;
use crate::transfer::{Blocks, HopPlan, Shape, TransferError, checksum_of};
use crate::wire::GroupFrame;

/// The answers of members about messages that are about to begin.
pub(super) struct Delta {
    membership: Arc<Membership>,
    exchange: Arc<Exchange>,
    state: Mutex<DeltaState>,
}

#[derive(Default)]
struct DeltaState {
    /// At the root: the announced messages, until all members have answered.
    asked: BTreeMap<u64, PendingComparison>,
    /// At another member: the message for which it has answered.
    answered: Option<AnsweredMessage>,
}

/// An announced message, for which answers are due.
struct PendingComparison {
    blocks: BlockCount,
    answers: Vec<BlockChecksums>,
    complete: oneshot::Sender<ChecksumsByRank>,
}

/// A member's answer so far.
#[derive(Clone, Default)]
struct BlockChecksums {
    checksums: Vec<u8>,
    is_whole: bool,
}

/// The checksums of the blocks that members have, by rank, each [`CHECKSUM_LEN`] bytes; empty if a member has no
/// blocks.
pub(super) type ChecksumsByRank = Vec<Vec<u8>>;

/// A message for which this member waits to learn which blocks each member has.
struct AnsweredMessage {
    message: u64,
    blocks: BlockCount,
    had: Vec<BlockSet>,
    complete: oneshot::Sender<Vec<BlockSet>>,
}

/// How a message begins at a member that has reported its blocks.
pub(super) struct DeltaStart {
    pub(super) plan: HopPlan,
    /// The blocks that are here, with their checksums.
    pub(super) here: Vec<(BlockIndex, Checksum)>,
}

impl Delta {
    pub(super) fn new(membership: Arc<Membership>, exchange: Arc<Exchange>) -> Self {
        Self { membership, exchange, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, DeltaState> {
        lock(&self.state)
    }

    // At the root.

    /// Announces a message; the answers come when all members have answered.
    pub(super) fn ask_for_parts(&self, message: u64, shape: Shape) -> oneshot::Receiver<ChecksumsByRank> {
        let (complete, answers) = oneshot::channel();
        let mut all = vec![BlockChecksums::default(); self.membership.members.len()];
        all[self.membership.rank.index()].is_whole = true;
        let asked = PendingComparison { blocks: shape.count, answers: all, complete };
        self.lock().asked.insert(message, asked);
        self.finish_asking(message);
        self.membership.post_to_others(&GroupFrame::Announce { message, size: shape.size });
        answers
    }

    /// Takes a frame about a message that is about to begin.
    ///
    /// # Errors
    /// How the frame violates the protocol.
    pub(super) fn receive(&self, from: Rank, frame: GroupFrame) -> Result<(), &'static str> {
        match frame {
            GroupFrame::Have { message, checksums, is_whole } => self.receive_have(from, message, &checksums, is_whole),
            GroupFrame::Parts { message, member, blocks } => self.receive_parts(message, member, &blocks),
            GroupFrame::Begin { message } => self.receive_begin(message),
            _ => Err("sent a frame that is not due"),
        }
    }

    /// Takes a piece of a member's answer.
    fn receive_have(&self, from: Rank, message: u64, checksums: &[u8], is_whole: bool) -> Result<(), &'static str> {
        {
            let mut state = self.lock();
            let asked =
                state.asked.get_mut(&message).ok_or("reports blocks of a message that is not about to begin")?;
            let answer = &mut asked.answers[from.index()];
            let len = answer.checksums.len() + checksums.len();
            let all = asked.blocks.get() as usize * CHECKSUM_LEN;
            if answer.is_whole
                || len > all
                || (is_whole && len != all && len != 0)
                || asked.blocks.get() > COMPARED_MAX && len != 0
            {
                return Err("reports more or fewer blocks than a message has");
            }
            answer.checksums.extend(checksums);
            answer.is_whole = is_whole;
        }
        self.finish_asking(message);
        Ok(())
    }

    fn finish_asking(&self, message: u64) {
        let mut state = self.lock();
        if state.asked.get(&message).is_some_and(|asked| asked.answers.iter().all(|answer| answer.is_whole))
            && let Some(asked) = state.asked.remove(&message)
        {
            // Fails only if the group has failed.
            let _ = asked.complete.send(asked.answers.into_iter().map(|answer| answer.checksums).collect());
        }
    }

    /// Waits for the answers of all members, compares them with the message, and tells all members the result.
    pub(super) async fn begin(
        &self,
        message: u64,
        blocks: &Blocks,
        answers: oneshot::Receiver<ChecksumsByRank>,
    ) -> Result<HopPlan, TransferError> {
        let shape = blocks.shape();
        let Ok(answers) = answers.await else { return std::future::pending().await };
        let mut had = vec![BlockSet::empty(shape.count); answers.len()];
        if answers.iter().any(|checksums| !checksums.is_empty()) {
            for block in (0..shape.count.get()).map(BlockIndex) {
                let ours = checksum_of(blocks, block, &blocks.held(block).await).await?.0.to_le_bytes();
                let at = block.index() * CHECKSUM_LEN..(block.index() + 1) * CHECKSUM_LEN;
                for (checksums, had) in answers.iter().zip(&mut had) {
                    if checksums.get(at.clone()) == Some(&ours) {
                        had.insert(block);
                    }
                }
            }
        }
        had[self.membership.rank.index()] = BlockSet::full(shape.count);
        for &member in self.membership.members.iter().filter(|member| **member != self.membership.node.mesh.me()) {
            for (had, rank) in
                had.iter().zip(0..).filter(|(had, rank)| *rank != self.membership.rank.0 && !had.is_empty())
            {
                let parts = GroupFrame::Parts { message, member: rank, blocks: had.encode() };
                self.membership.send(member, parts).await;
            }
            self.membership.send(member, GroupFrame::Begin { message }).await;
        }
        Ok(self.plan(shape, &had))
    }

    /// Plans the hops of a message of which members have these blocks; all members compute the same plan.
    fn plan(&self, shape: Shape, had: &[BlockSet]) -> HopPlan {
        let nothing = had.iter().zip(0..).all(|(had, rank)| Rank(rank).is_root() || had.is_empty());
        let lacking: u64 =
            had.iter().map(|had| u64::from(shape.count.get() - had.len().get().min(shape.count.get()))).sum();
        // If planning takes too long while others wait, the message is sent as if no member had any block.
        let repair = (!nothing && lacking <= LACKING_MAX).then(|| Repair::new(had));
        match repair {
            Some(Ok(repair)) => HopPlan::Repair(repair),
            _ => HopPlan::Schedule(self.exchange.schedule(shape.count)),
        }
    }

    // At the other members.

    /// Reports to the root which blocks are in `memory`, if it may hold any, and waits to learn which blocks each
    /// member has.
    pub(super) async fn report_parts(
        &self,
        message: u64,
        shape: Shape,
        memory: Option<&[u8]>,
    ) -> Result<DeltaStart, TransferError> {
        let mut checksums = Vec::new();
        for block in memory
            .filter(|_| shape.count.get() <= COMPARED_MAX)
            .into_iter()
            .flat_map(|memory| memory.chunks(shape.block_size as usize))
        {
            checksums.push(Checksum::of_yielding(block).await);
        }
        let (complete, had) = oneshot::channel();
        let mut all = vec![BlockSet::empty(shape.count); self.membership.members.len()];
        all[Rank::ROOT.index()] = BlockSet::full(shape.count);
        self.lock().answered = Some(AnsweredMessage { message, blocks: shape.count, had: all, complete });
        let root = self.membership.members[Rank::ROOT.index()];
        let encoded: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.0.to_le_bytes()).collect();
        let mut rest = encoded.as_slice();
        loop {
            let (piece, behind) = rest.split_at(rest.len().min(ANSWER_PIECE));
            rest = behind;
            let is_whole = rest.is_empty();
            let have = GroupFrame::Have { message, checksums: piece.to_vec(), is_whole };
            self.membership.send(root, have).await;
            if is_whole {
                break;
            }
        }
        let Ok(had) = had.await else { return std::future::pending().await };
        let mine = &had[self.membership.rank.index()];
        if checksums.is_empty() && !mine.is_empty() {
            let what = "says that a member has blocks that it does not have".to_owned();
            return Err(TransferError::Protocol { by: Rank::ROOT, what });
        }
        let plan = self.plan(shape, &had);
        let here = checksums
            .into_iter()
            .zip((0..).map(BlockIndex))
            .filter(|(_, block)| plan.is_repair() && mine.contains(*block));
        Ok(DeltaStart { here: here.map(|(checksum, block)| (block, checksum)).collect(), plan })
    }

    /// Takes the root's report of the blocks that a member has.
    fn receive_parts(&self, message: u64, member: u32, blocks: &[u8]) -> Result<(), &'static str> {
        let mut state = self.lock();
        let answered = state.answered.as_mut().filter(|answered| answered.message == message);
        let answered = answered.ok_or("reports a member's blocks of a message that is not about to begin")?;
        let blocks = BlockSet::decode(answered.blocks, blocks).map_err(|_| "reports malformed blocks of a member")?;
        match answered.had.get_mut(Rank(member).index()) {
            Some(had) if had.is_empty() => *had = blocks,
            _ => return Err("reports a member's blocks twice, or those of a rank without a member"),
        }
        Ok(())
    }

    /// Notes that a message begins.
    fn receive_begin(&self, message: u64) -> Result<(), &'static str> {
        let answered = self.lock().answered.take_if(|answered| answered.message == message);
        let answered = answered.ok_or("begins a message that is not about to begin")?;
        // Fails only if the group has failed.
        let _ = answered.complete.send(answered.had);
        Ok(())
    }
}

/// Bytes of a checksum in an answer.
const CHECKSUM_LEN: usize = 16;
/// Most bytes of checksums in a frame.
const ANSWER_PIECE: usize = 512 << 10;
/// Most blocks of a message for which a member reports its blocks: the answer is 1 MiB.
const COMPARED_MAX: u32 = 1 << 16;
/// Most blocks that all members together may lack for a repair: it is planned in about a second.
const LACKING_MAX: u64 = 1 << 20;
