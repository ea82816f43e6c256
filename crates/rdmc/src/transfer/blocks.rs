//! The blocks of one message at one member: their destinations, and which are held.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;
use rdmc_fabric::{Buffer, BufferMut};
use rdmc_schedule::{BlockIndex, BlockSet};

use super::Shape;
use crate::certificate::Digest;
use crate::checksum::Checksum;
use crate::sync::lock;

/// The blocks of one message.
pub(crate) struct Blocks {
    shape: Shape,
    content: Content,
    /// Checksums of the blocks that were checked, or summed to be sent.
    checksums: Mutex<Vec<Option<Checksum>>>,
    /// The task that waits in [`held`](Self::held): the relay alone.
    waiting: AtomicWaker,
}

enum Content {
    /// All blocks are held from the start: the root's message, unless it is read from a source, or a message of a
    /// single block.
    Whole(Buffer),
    Parts(Mutex<Vec<BlockState>>),
}

/// The state of one block.
enum BlockState {
    /// Its destination waits to be posted.
    Empty(BufferMut),
    /// Its destination is posted.
    Posted,
    /// It is here, but not in its destination yet.
    Staged { bytes: Buffer, destination: BufferMut },
    /// It is here, and on its way into its destination.
    Moving { bytes: Buffer },
    /// It is in its destination.
    Held(Buffer),
}

impl Blocks {
    /// Makes the blocks of a whole message.
    pub(crate) fn whole_message(shape: Shape, message: Buffer) -> Self {
        Self::new(shape, Content::Whole(message), Vec::new())
    }

    /// Divides memory of exactly a message's size into destinations.
    ///
    /// `staged` is a block that has arrived elsewhere.
    pub(crate) fn to_receive(shape: Shape, mut memory: BufferMut, staged: Option<(BlockIndex, Buffer)>) -> Self {
        debug_assert_eq!(memory.len() as u64, shape.size);
        let parts: Vec<BlockState> =
            (0..shape.count.0).map(|block| BlockState::Empty(memory.split_to(shape.len(BlockIndex(block))))).collect();
        let blocks = Self::new(shape, Content::Parts(Mutex::new(parts)), Vec::new());
        if let Some((block, bytes)) = staged {
            blocks.stage(block, bytes);
        }
        blocks
    }

    /// Divides memory of exactly a message's size into destinations; the blocks `here` are in place already.
    pub(crate) fn to_complete(
        shape: Shape,
        mut memory: BufferMut,
        here: impl IntoIterator<Item = (BlockIndex, Checksum)>,
    ) -> Self {
        debug_assert_eq!(memory.len() as u64, shape.size);
        let mut here = here.into_iter().peekable();
        let mut checksums = vec![None; shape.count.get() as usize];
        let parts = (0..shape.count.0).map(BlockIndex).map(|block| {
            let destination = memory.split_to(shape.len(block));
            match here.next_if(|(next, _)| *next == block) {
                Some((_, checksum)) => {
                    checksums[block.index()] = Some(checksum);
                    BlockState::Held(destination.freeze())
                }
                None => BlockState::Empty(destination),
            }
        });
        let parts = parts.collect();
        Self::new(shape, Content::Parts(Mutex::new(parts)), checksums)
    }

    fn new(shape: Shape, content: Content, checksums: Vec<Option<Checksum>>) -> Self {
        Self { shape, content, checksums: Mutex::new(checksums), waiting: AtomicWaker::new() }
    }

    /// Notes the checksum of a block.
    pub(crate) fn note_checksum(&self, block: BlockIndex, checksum: Checksum) {
        let mut checksums = lock(&self.checksums);
        if checksums.is_empty() {
            checksums.resize(self.shape.count.get() as usize, None);
        }
        checksums[block.index()] = Some(checksum);
    }

    /// Returns the checksum of a block, if it was noted.
    pub(crate) fn checksum(&self, block: BlockIndex) -> Option<Checksum> {
        lock(&self.checksums).get(block.index()).copied().flatten()
    }

    /// Returns the digest of the whole message, if all checksums were noted.
    pub(crate) fn digest(&self) -> Option<Digest> {
        let checksums = lock(&self.checksums).iter().copied().collect::<Option<Vec<_>>>()?;
        let all = checksums.len() == self.shape.count.get() as usize;
        all.then(|| Digest::of_checksums(self.shape.size, self.shape.block_size, checksums))
    }

    /// Takes a block's destination out, to be posted.
    pub(crate) fn take_destination(&self, block: BlockIndex) -> BufferMut {
        match std::mem::replace(&mut self.parts()[block.index()], BlockState::Posted) {
            BlockState::Empty(destination) => destination,
            _ => panic!("the schedule names block {block} twice"),
        }
    }

    /// Notes that a block has arrived in its destination.
    pub(crate) fn hold(&self, block: BlockIndex, bytes: Buffer) {
        self.parts()[block.index()] = BlockState::Held(bytes);
        self.waiting.wake();
    }

    /// Notes that a block whose destination was not posted has arrived elsewhere.
    pub(crate) fn stage(&self, block: BlockIndex, bytes: Buffer) {
        let destination = self.take_destination(block);
        self.parts()[block.index()] = BlockState::Staged { bytes, destination };
        self.waiting.wake();
    }

    /// Waits until a block is held. One waiter at a time.
    pub(crate) async fn held(&self, block: BlockIndex) -> Buffer {
        std::future::poll_fn(|cx| self.poll_held(block, cx)).await;
        self.if_held(block).expect("a block that is held stays")
    }

    /// Tells whether a block is held; if not, the task is woken when it is.
    pub(crate) fn poll_held(&self, block: BlockIndex, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_held(block) {
            return Poll::Ready(());
        }
        self.waiting.register(cx.waker());
        if self.is_held(block) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Tells whether a block is held.
    pub(crate) fn is_held(&self, block: BlockIndex) -> bool {
        match &self.content {
            Content::Whole(_) => true,
            Content::Parts(_) => self.parts()[block.index()].bytes().is_some(),
        }
    }

    /// Returns a block if it is held.
    pub(crate) fn if_held(&self, block: BlockIndex) -> Option<Buffer> {
        match &self.content {
            Content::Whole(message) => {
                let from = in_memory(self.shape.offset(block));
                Some(message.slice(from..from + self.shape.len(block)))
            }
            Content::Parts(_) => self.parts()[block.index()].bytes().cloned(),
        }
    }

    /// Copies the block that was staged into its destination, if there is one, giving way between pieces.
    pub(crate) async fn copy_staged<F: Future<Output = ()>>(&self, yield_now: impl Fn() -> F) {
        let Content::Parts(_) = &self.content else { return };
        let staged = |part: &BlockState| matches!(part, BlockState::Staged { .. });
        let taken = {
            let mut parts = self.parts();
            parts.iter().position(staged).map(|at| match std::mem::replace(&mut parts[at], BlockState::Posted) {
                BlockState::Staged { bytes, destination } => {
                    parts[at] = BlockState::Moving { bytes: bytes.clone() };
                    (at, bytes, destination)
                }
                _ => unreachable!("it was found staged"),
            })
        };
        let Some((at, bytes, mut destination)) = taken else { return };
        copy(&bytes, &mut destination, &yield_now).await;
        self.parts()[at] = BlockState::Held(destination.freeze());
    }

    /// Returns the whole message.
    ///
    /// # Panics
    /// If a block is not in its destination.
    pub(crate) fn whole(&self) -> Buffer {
        if let Content::Whole(message) = &self.content {
            return message.clone();
        }
        let parts = self.parts();
        let mut blocks = parts.iter().map(|part| match part {
            BlockState::Held(bytes) => bytes.clone(),
            _ => panic!("a message is whole when every block is in its destination"),
        });
        let mut whole = blocks.next().expect("a message has a block");
        for block in blocks {
            whole.try_append(block).expect("the destinations were cut from one piece");
        }
        whole
    }

    // Interrupted messages.

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the message if it was whole from the start and has at most `max` bytes.
    pub(crate) fn short(&self, max: usize) -> Option<&Buffer> {
        match &self.content {
            Content::Whole(message) if message.len() <= max && !message.may_change() => Some(message),
            _ => None,
        }
    }

    /// Returns the blocks that are here. For a message in flight the result is outdated at once.
    pub(crate) fn here(&self) -> BlockSet {
        let Content::Parts(_) = &self.content else { return BlockSet::full(self.shape.count) };
        let mut here = BlockSet::empty(self.shape.count);
        for (part, block) in self.parts().iter().zip(0..) {
            if part.bytes().is_some() {
                here.insert(BlockIndex(block));
            }
        }
        here
    }

    /// Makes destinations for the missing blocks, in the memory into which the message was to be received.
    ///
    /// # Errors
    /// Returns the blocks while another holder, such as work that is not flushed yet, has some of the memory, or if
    /// no block is in its destination.
    pub(crate) fn resume(self) -> Result<Self, Self> {
        let parts = match self.content {
            Content::Whole(_) => return Ok(self),
            Content::Parts(parts) => parts.into_inner().unwrap_or_else(PoisonError::into_inner),
        };
        let checksums = self.checksums.into_inner().unwrap_or_else(PoisonError::into_inner);
        let refused = |parts| Self::new(self.shape, Content::Parts(Mutex::new(parts)), checksums);
        let placed =
            parts.iter().filter(|part| !matches!(part, BlockState::Posted | BlockState::Moving { .. })).count();
        let anchor = parts.iter().zip(0..).find_map(|(part, block)| match part {
            BlockState::Held(bytes) if !bytes.is_empty() => Some((bytes, BlockIndex(block))),
            _ => None,
        });
        let Some((anchor, at)) = anchor.filter(|(bytes, _)| bytes.holders() == placed) else {
            return Err(refused(parts));
        };
        let anchor = anchor.clone();
        // Only these parts hold any of the memory: without them the anchor is alone.
        let known: Vec<Option<Option<Buffer>>> = parts.into_iter().map(BlockState::into_known).collect();
        let (before, len) = (in_memory(self.shape.offset(at)), self.shape.len(at));
        let memory = anchor.try_widen(before, in_memory(self.shape.size) - before - len);
        let mut memory = memory.expect("it is held alone, and was received into");
        let destination = |(known, block): (Option<Option<Buffer>>, u32)| {
            let destination = memory.split_to(self.shape.len(BlockIndex(block)));
            match known {
                None => BlockState::Empty(destination),
                Some(None) => BlockState::Held(destination.freeze()),
                Some(Some(bytes)) => BlockState::Staged { bytes, destination },
            }
        };
        let parts = known.into_iter().zip(0..).map(destination).collect();
        Ok(refused(parts))
    }

    /// Makes destinations for the missing blocks in `memory`, and copies the blocks that are here into it.
    pub(crate) async fn move_to<F: Future<Output = ()>>(
        &self,
        mut memory: BufferMut,
        yield_now: impl Fn() -> F,
    ) -> Self {
        let mut parts = Vec::with_capacity(self.shape.count.0 as usize);
        for block in (0..self.shape.count.0).map(BlockIndex) {
            let mut destination = memory.split_to(self.shape.len(block));
            parts.push(match self.if_held(block) {
                None => BlockState::Empty(destination),
                Some(bytes) => {
                    copy(&bytes, &mut destination, &yield_now).await;
                    BlockState::Held(destination.freeze())
                }
            });
        }
        Self::new(self.shape, Content::Parts(Mutex::new(parts)), lock(&self.checksums).clone())
    }

    fn parts(&self) -> MutexGuard<'_, Vec<BlockState>> {
        match &self.content {
            Content::Parts(parts) => lock(parts),
            Content::Whole(_) => panic!("a message that is held is not received"),
        }
    }
}

impl BlockState {
    /// Returns the block, if it is here.
    fn bytes(&self) -> Option<&Buffer> {
        match self {
            Self::Staged { bytes, .. } | Self::Moving { bytes } | Self::Held(bytes) => Some(bytes),
            Self::Empty(_) | Self::Posted => None,
        }
    }

    /// Drops the destination. Returns `None` if the block is not here, and its bytes if they are elsewhere.
    fn into_known(self) -> Option<Option<Buffer>> {
        match self {
            Self::Staged { bytes, .. } | Self::Moving { bytes } => Some(Some(bytes)),
            Self::Held(_) => Some(None),
            Self::Empty(_) | Self::Posted => None,
        }
    }
}

/// Copies a block, giving way between pieces.
async fn copy<F: Future<Output = ()>>(bytes: &Buffer, destination: &mut BufferMut, yield_now: &impl Fn() -> F) {
    for (room, piece) in destination.chunks_mut(COPY_PIECE).zip(bytes.chunks(COPY_PIECE)) {
        room.copy_from_slice(piece);
        yield_now().await;
    }
}

fn in_memory(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the message is in memory")
}

/// Bytes copied before other work of the task gets a turn.
const COPY_PIECE: usize = 128 << 10;
