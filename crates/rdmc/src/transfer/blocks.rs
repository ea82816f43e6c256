//! The blocks of one message at one member: where they go, and which are held.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use futures::task::AtomicWaker;
use rdmc_fabric::{Buffer, BufferMut};
use rdmc_schedule::BlockIndex;

use super::Shape;

/// The blocks of one message.
pub(crate) struct Blocks {
    shape: Shape,
    content: Content,
    /// Whoever waits in [`held`](Self::held): the relay, alone.
    waiting: AtomicWaker,
}

enum Content {
    /// Everything is held from the start: the root's message, or one that is a single block.
    Whole(Buffer),
    Parts(Mutex<Vec<Part>>),
}

/// One block.
enum Part {
    /// Its place waits to be posted.
    Place(BufferMut),
    /// Its place is posted.
    Posted,
    /// It is here, but not in its place yet.
    Staged { bytes: Buffer, place: BufferMut },
    /// It is here, and on its way into its place.
    Moving { bytes: Buffer },
    /// It is in its place.
    Held(Buffer),
}

impl Blocks {
    /// Holds a whole message.
    pub(crate) fn whole_message(shape: Shape, message: Buffer) -> Self {
        Self { shape, content: Content::Whole(message), waiting: AtomicWaker::new() }
    }

    /// Makes places for a message in memory of exactly its size.
    ///
    /// `staged` is a block that has arrived elsewhere.
    pub(crate) fn to_receive(shape: Shape, mut memory: BufferMut, staged: Option<(BlockIndex, Buffer)>) -> Self {
        debug_assert_eq!(memory.len() as u64, shape.size);
        let mut parts: Vec<Part> =
            (0..shape.count.0).map(|block| Part::Place(memory.split_to(shape.len(BlockIndex(block))))).collect();
        if let Some((block, bytes)) = staged {
            let part = &mut parts[block.index()];
            let Part::Place(place) = std::mem::replace(part, Part::Posted) else { unreachable!("all are places") };
            *part = Part::Staged { bytes, place };
        }
        Self { shape, content: Content::Parts(Mutex::new(parts)), waiting: AtomicWaker::new() }
    }

    /// Takes a block's place out, to be posted.
    pub(crate) fn place(&self, block: BlockIndex) -> BufferMut {
        match std::mem::replace(&mut self.parts()[block.index()], Part::Posted) {
            Part::Place(place) => place,
            _ => panic!("the schedule names block {block} twice"),
        }
    }

    /// Notes that a block has arrived in its place.
    pub(crate) fn hold(&self, block: BlockIndex, bytes: Buffer) {
        self.parts()[block.index()] = Part::Held(bytes);
        self.waiting.wake();
    }

    /// Waits until a block is held. One waiter at a time.
    pub(crate) async fn held(&self, block: BlockIndex) -> Buffer {
        std::future::poll_fn(|cx| {
            self.waiting.register(cx.waker());
            self.if_held(block).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    fn if_held(&self, block: BlockIndex) -> Option<Buffer> {
        match &self.content {
            Content::Whole(message) => {
                let from = usize::try_from(self.shape.offset(block)).expect("the message is in memory");
                Some(message.slice(from..from + self.shape.len(block)))
            }
            Content::Parts(_) => match &self.parts()[block.index()] {
                Part::Staged { bytes, .. } | Part::Moving { bytes } | Part::Held(bytes) => Some(bytes.clone()),
                Part::Place(_) | Part::Posted => None,
            },
        }
    }

    /// Copies the block that was staged into its place, giving way between pieces.
    pub(crate) async fn place_staged<F: Future<Output = ()>>(&self, bytes: &Buffer, give_way: impl Fn() -> F) {
        let Content::Parts(_) = &self.content else { return };
        let staged = |part: &Part| matches!(part, Part::Staged { .. });
        let taken = {
            let mut parts = self.parts();
            parts.iter().position(staged).map(|at| {
                match std::mem::replace(&mut parts[at], Part::Moving { bytes: bytes.clone() }) {
                    Part::Staged { place, .. } => (at, place),
                    _ => unreachable!("it was found staged"),
                }
            })
        };
        let Some((at, mut place)) = taken else { return };
        for (room, piece) in place.chunks_mut(COPY_PIECE).zip(bytes.chunks(COPY_PIECE)) {
            room.copy_from_slice(piece);
            give_way().await;
        }
        self.parts()[at] = Part::Held(place.freeze());
    }

    /// Returns the whole message.
    ///
    /// # Panics
    /// If a block is not in its place.
    pub(crate) fn whole(&self) -> Buffer {
        if let Content::Whole(message) = &self.content {
            return message.clone();
        }
        let parts = self.parts();
        let mut blocks = parts.iter().map(|part| match part {
            Part::Held(bytes) => bytes.clone(),
            _ => panic!("a message is whole when every block is in its place"),
        });
        let mut whole = blocks.next().expect("a message has a block");
        for block in blocks {
            whole.try_append(block).expect("the places were cut from one piece");
        }
        whole
    }

    fn parts(&self) -> MutexGuard<'_, Vec<Part>> {
        match &self.content {
            Content::Parts(parts) => parts.lock().unwrap_or_else(PoisonError::into_inner),
            Content::Whole(_) => panic!("a message that is held is not received"),
        }
    }
}

/// Bytes copied before other work of the task gets a turn.
const COPY_PIECE: usize = 128 << 10;
