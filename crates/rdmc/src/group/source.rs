//! Messages that the root reads from a source while it sends them.
//!
//! The root reads the first block before the message takes its place in the order. When the message has begun, a task
//! reads the others, and the transfer waits for them as a relay waits for blocks that have not arrived.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use futures::future::FutureExt;
use rdmc_fabric::Buffer;
use rdmc_schedule::BlockIndex;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::error::SendError;
use super::offer::REASON_MAX;
use super::retained::OpenSources;
use super::{Group, GroupSpec};
use crate::checksum::yield_now;
use crate::failure::{FailureCause, with_sources};
use crate::transfer::{Blocks, Shape};

/// The source of a message.
pub(super) struct Source {
    reader: Pin<Box<dyn AsyncRead + Send>>,
    len: u64,
    read: u64,
}

/// A message as it waits for its turn.
pub(super) enum QueuedContent {
    Whole(Buffer),
    /// Its first block is here, and the source has the others.
    Begun(Arc<Blocks>, Source),
}

impl QueuedContent {
    /// Returns the blocks of the message, and the source that has the rest of them.
    pub(super) fn into_blocks(self, shape: Shape) -> (Arc<Blocks>, Option<Source>) {
        match self {
            Self::Whole(message) => (Arc::new(Blocks::whole_message(shape, message)), None),
            Self::Begun(blocks, source) => (blocks, Some(source)),
        }
    }

    /// Returns the message if it is whole.
    pub(super) fn into_whole(self) -> Option<Buffer> {
        match self {
            Self::Whole(message) => Some(message),
            Self::Begun(..) => None,
        }
    }
}

impl Source {
    pub(super) fn new(reader: impl AsyncRead + Send + 'static, len: u64) -> Self {
        Self { reader: Box::pin(reader), len, read: 0 }
    }

    /// Gets the memory for the message and reads the first block, or all if the message is to be whole before it
    /// begins.
    pub(super) async fn begin(mut self, group: &Group) -> Result<(QueuedContent, Shape), SendError> {
        let spec = &group.membership.spec;
        if spec.is_shared() {
            return Err(SendError::NotAnObject);
        }
        let shape = shape_to_send(group, self.len)?;
        let len = usize::try_from(self.len).unwrap_or(usize::MAX);
        let mut memory = group.node().pool.lend(len).await?;
        // A root without receivers sends nothing, and would not wait for the rest.
        let is_whole_first = shape.count.get() == 1
            || spec.delta
            // If the group fails behind the header, the message must be here for a group that continues this one.
            || spec.headers
            || spec.count() == 1;
        if is_whole_first {
            for piece in memory.chunks_mut(group.block_size() as usize) {
                self.fill(piece).await.map_err(SendError::Unreadable)?;
                yield_now().await;
            }
            return Ok((QueuedContent::Whole(memory.freeze()), shape));
        }
        let blocks = Arc::new(Blocks::to_receive(shape, memory, None));
        self.read_block(&blocks, BlockIndex(0)).await.map_err(SendError::Unreadable)?;
        Ok((QueuedContent::Begun(blocks, self), shape))
    }

    /// Reads the rest of message `number`, which has begun, in a task of its own. If that fails, the group fails.
    ///
    /// After another failure it goes on as long as the group may be recovered.
    pub(super) fn read_rest(mut self, group: &Arc<Group>, number: u64, blocks: Arc<Blocks>) {
        let retained = group.retained();
        let (sources, unwanted) = (retained.sources.clone(), retained.until_unwanted());
        sources.open();
        let mut reading = Reading { group: Arc::downgrade(group), sources, number, outcome: None };
        let task = async move {
            let rest = async {
                for block in (1..blocks.shape().count.get()).map(BlockIndex) {
                    self.read_block(&blocks, block).await?;
                    yield_now().await;
                }
                Ok(())
            };
            futures::select_biased! {
                outcome = std::pin::pin!(rest.fuse()) => reading.end(outcome, &blocks),
                () = std::pin::pin!(unwanted.fuse()) => {}
            }
        };
        group.node().environment.spawn(task.boxed());
    }

    async fn read_block(&mut self, blocks: &Blocks, block: BlockIndex) -> io::Result<()> {
        let mut place = blocks.take_destination(block);
        self.fill(&mut place).await?;
        blocks.hold(block, place.freeze());
        Ok(())
    }

    async fn fill(&mut self, mut place: &mut [u8]) -> io::Result<()> {
        while !place.is_empty() {
            let read = self.reader.read(place).await?;
            if read == 0 {
                let what = format!("it ended after {} of {} bytes", self.read, self.len);
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
            self.read += read as u64;
            place = &mut place[read..];
        }
        Ok(())
    }
}

/// Divides a message of so many bytes into blocks.
pub(super) fn shape_to_send(group: &Group, size: u64) -> Result<Shape, SendError> {
    let block_size = group.block_size();
    let too_many = SendError::TooManyBlocks { size, block_size, max: GroupSpec::BLOCKS_MAX };
    Shape::new(size, block_size).ok_or(too_many)
}

/// A source that is being read. Dropping it reports how that has ended.
struct Reading {
    group: Weak<Group>,
    sources: Arc<OpenSources>,
    number: u64,
    /// `None` if the reader panics, or its task is dropped.
    outcome: Option<io::Result<()>>,
}

impl Reading {
    fn end(&mut self, outcome: io::Result<()>, blocks: &Blocks) {
        // A short message is kept without its memory, for which later messages may wait.
        if let (Ok(()), Some(group)) = (&outcome, self.group.upgrade()) {
            group.retained().shorten(self.number, &blocks.whole());
        }
        self.outcome = Some(outcome);
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let what = match self.outcome.take() {
            Some(Ok(())) => return self.sources.close(None),
            Some(Err(error)) => with_sources(&error),
            None => "the task that reads it has ended".to_owned(),
        };
        let what = what.chars().take(REASON_MAX).collect();
        let cause = FailureCause::Unreadable { message: self.number, what };
        self.sources.close(Some(cause.clone()));
        if let Some(group) = self.group.upgrade() {
            group.end.declare(cause);
        }
    }
}
