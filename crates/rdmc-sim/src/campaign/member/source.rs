//! A source in virtual time, from which the root reads a message.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{BoxFuture, FutureExt};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::Notify;

use super::super::case::{BrokenSource, Case, GroupCase, SourceCase};
use super::super::play::RunningCase;

/// Gives the bytes of a message in pieces, with a pause before each.
pub(super) struct SourceReader {
    running: Arc<RunningCase>,
    source: SourceCase,
    content: Vec<u8>,
    given: usize,
    /// Bytes that are read before the message has its place.
    first: u64,
    /// Notified when they are given.
    begun: Arc<Notify>,
    pause: Option<BoxFuture<'static, ()>>,
}

impl SourceReader {
    pub(super) fn new(
        running: Arc<RunningCase>,
        group: &GroupCase,
        message: usize,
        source: SourceCase,
        begun: Arc<Notify>,
    ) -> Self {
        let mut content = Case::content(group.id, message, group.messages[message].size);
        if let Some(after) = source.broken.and_then(|broken| usize::try_from(broken.after()).ok()) {
            content.truncate(after);
        }
        Self { running, source, content, given: 0, first: group.read_first(message), begun, pause: None }
    }

    /// Gives the next piece.
    fn give(&mut self, room: &mut ReadBuf<'_>) -> io::Result<()> {
        let left = &self.content[self.given..];
        let piece = &left[..left.len().min(self.source.piece as usize).min(room.remaining())];
        if let (true, Some(BrokenSource::Fails { .. })) = (piece.is_empty(), self.source.broken) {
            return Err(io::Error::other("the source is broken"));
        }
        room.put_slice(piece);
        self.given += piece.len();
        if self.given as u64 >= self.first {
            self.begun.notify_one();
        }
        Ok(())
    }
}

impl AsyncRead for SourceReader {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let (running, pause_ns) = (this.running.clone(), this.source.pause_ns);
        let pause = this.pause.get_or_insert_with(|| async move { running.sleep(pause_ns).await }.boxed());
        std::task::ready!(pause.poll_unpin(cx));
        this.pause = None;
        Poll::Ready(this.give(room))
    }
}
