//! The frames to one node: a queue, and its writer.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use rdmc_fabric::ControlStream;
use tokio::io::{AsyncWrite, AsyncWriteExt, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::sync::lock;
use crate::wire::FrameCheck;

/// The frames that wait to be written to one node, in order.
pub(super) struct Outbox {
    queue: mpsc::UnboundedSender<QueuedFrame>,
    /// Bytes that senders that can wait may add.
    room: Arc<Semaphore>,
    /// Bytes that wait.
    waiting: Arc<AtomicUsize>,
    write_end: IdleWriteEnd,
}

struct QueuedFrame {
    /// A frame without its check value, or nothing.
    bytes: Vec<u8>,
    written: Option<oneshot::Sender<()>>,
    _room: Option<OwnedSemaphorePermit>,
}

/// Writes the queued frames.
pub(super) struct OutboxWriter {
    queued: mpsc::UnboundedReceiver<QueuedFrame>,
    waiting: Arc<AtomicUsize>,
    write_end: IdleWriteEnd,
}

/// The write end, while the writer does not write. `None` while it writes, and when it has ended.
type IdleWriteEnd = Arc<Mutex<Option<WriteEnd>>>;

/// The write end of a connection, used by any task that has a frame to write.
struct WriteEnd {
    to: WriteHalf<Box<dyn ControlStream>>,
    check: FrameCheck,
    /// The rest of a frame that was not taken at once: the writer writes it first.
    unsent: Vec<u8>,
    /// It takes no more bytes until the writer has written to it.
    stuck: bool,
}

/// A frame cannot be queued.
#[derive(Debug)]
pub(super) struct PostError;

/// Makes a queue of frames, and its writer.
pub(super) fn open(to: WriteHalf<Box<dyn ControlStream>>) -> (Arc<Outbox>, OutboxWriter) {
    let (queue, queued) = mpsc::unbounded_channel();
    let waiting = Arc::<AtomicUsize>::default();
    let write_end = WriteEnd { to, check: FrameCheck::default(), unsent: Vec::new(), stuck: false };
    let write_end = Arc::new(Mutex::new(Some(write_end)));
    let room = Arc::new(Semaphore::new(ROOM_BYTES as usize));
    let outbox = Outbox { queue, room, waiting: waiting.clone(), write_end: write_end.clone() };
    (Arc::new(outbox), OutboxWriter { queued, waiting, write_end })
}

impl Outbox {
    /// Adds a frame; fails if too many bytes wait or the connection has ended.
    pub(super) fn post(&self, bytes: Vec<u8>) -> Result<(), PostError> {
        let len = bytes.len();
        if self.waiting.fetch_add(len, Ordering::Relaxed) + len > WAITING_BYTES_MAX {
            self.waiting.fetch_sub(len, Ordering::Relaxed);
            return Err(PostError);
        }
        self.queue.send(QueuedFrame { bytes, written: None, _room: None }).map_err(|_| PostError)
    }

    /// Writes a frame at once if possible, without waking the writer; else adds it, which fails as [`Self::post`] does.
    ///
    /// Frames that were added before may come after it.
    pub(super) fn post_now(&self, bytes: Vec<u8>) -> Result<(), PostError> {
        let left = match &mut *lock(&self.write_end) {
            Some(write_end) if !write_end.stuck => {
                if write_end.write_now(&bytes) {
                    return Ok(());
                }
                // The writer writes the rest.
                Vec::new()
            }
            _ => bytes,
        };
        self.post(left)
    }

    /// Adds a frame when there is room.
    pub(super) async fn send(&self, bytes: Vec<u8>) {
        let bytes_of_it = u32::try_from(bytes.len()).unwrap_or(ROOM_BYTES).clamp(1, ROOM_BYTES);
        let room = self.room.clone().acquire_many_owned(bytes_of_it).await.expect("the outbox never closes it");
        self.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
        // Fails only if the connection has ended: the groups get an event of that.
        let _ = self.queue.send(QueuedFrame { bytes, written: None, _room: Some(room) });
    }

    /// Waits until the operating system has everything that was added before, or the connection has ended.
    pub(super) async fn flush(&self) {
        let (written, wait) = oneshot::channel();
        if self.queue.send(QueuedFrame { bytes: Vec::new(), written: Some(written), _room: None }).is_ok() {
            let _ = wait.await;
        }
    }

    /// Returns how many bytes wait for the writer, without the rest of a frame that it is to write.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

impl OutboxWriter {
    /// Writes queued frames, many at once if they are there, until the connection ends.
    pub(super) async fn run(mut self) -> io::Result<()> {
        let mut batch = Vec::new();
        while self.queued.recv_many(&mut batch, BATCH_MAX).await > 0 {
            let mut write_end = lock(&self.write_end).take().expect("it is here when the writer does not write");
            write_end.write_rest().await?;
            for outgoing in batch.iter_mut().filter(|outgoing| !outgoing.bytes.is_empty()) {
                let len = outgoing.bytes.len();
                write_end.check.seal(&mut outgoing.bytes);
                write_end.to.write_all(&outgoing.bytes).await?;
                self.waiting.fetch_sub(len, Ordering::Relaxed);
            }
            write_end.to.flush().await?;
            write_end.stuck = false;
            *lock(&self.write_end) = Some(write_end);
            for written in batch.drain(..).filter_map(|outgoing| outgoing.written) {
                let _ = written.send(());
            }
        }
        Ok(())
    }
}

impl Drop for OutboxWriter {
    /// Closes the connection, even if the outbox lives.
    fn drop(&mut self) {
        lock(&self.write_end).take();
    }
}

impl WriteEnd {
    /// Seals a frame and writes as much of it as the connection takes at once; returns whether all was written.
    fn write_now(&mut self, frame: &[u8]) -> bool {
        self.unsent.extend(frame);
        self.check.seal(&mut self.unsent);
        // If the connection takes no more, the writer tries again and is woken then.
        let mut cx = Context::from_waker(Waker::noop());
        match Pin::new(&mut self.to).poll_write(&mut cx, &self.unsent) {
            Poll::Ready(Ok(len)) => _ = self.unsent.drain(..len),
            Poll::Ready(Err(_)) | Poll::Pending => {}
        }
        self.stuck =
            !self.unsent.is_empty() || !matches!(Pin::new(&mut self.to).poll_flush(&mut cx), Poll::Ready(Ok(())));
        !self.stuck
    }

    /// Writes the rest of a frame that could not be written at once.
    async fn write_rest(&mut self) -> io::Result<()> {
        self.to.write_all(&self.unsent).await?;
        self.unsent.clear();
        Ok(())
    }
}

/// Most bytes that wait to be written to one node, which is given up if there are more.
const WAITING_BYTES_MAX: usize = 16 << 20;
/// Most bytes that wait to be written to one node, of senders that can wait.
const ROOM_BYTES: u32 = 4 << 20;
/// Frames that are written at once.
const BATCH_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use tokio::io::DuplexStream;

    use super::*;
    use crate::id::GroupId;
    use crate::mesh::tests::Stream;
    use crate::wire::{self, Frame, GroupFrame};

    /// Opens an outbox whose connection holds so many bytes that are not yet read.
    fn outbox(room: usize) -> (Arc<Outbox>, OutboxWriter, DuplexStream) {
        let (near, far) = tokio::io::duplex(room);
        let near: Box<dyn ControlStream> = Box::new(Stream { stream: near, deaf: None });
        let (_, to) = tokio::io::split(near);
        let (outbox, writer) = open(to);
        (outbox, writer, far)
    }

    fn announced(message: u64) -> Frame {
        Frame::Group { group: GroupId(7), frame: GroupFrame::Announce { message, size: 0 } }
    }

    #[tokio::test]
    async fn what_is_posted_now_does_not_wait_for_the_writer() {
        let (outbox, _writer, mut far) = outbox(64);
        outbox.post_now(wire::encode_unchecked(&Frame::Ping)).unwrap();
        let frame = wire::read_next(&mut far, &mut FrameCheck::default()).await.unwrap();
        assert_eq!(frame, Some(Frame::Ping));
    }

    #[tokio::test]
    async fn what_a_connection_does_not_take_at_once_is_written_by_the_writer() {
        for room in 1..40 {
            let (outbox, writer, mut far) = outbox(room);
            outbox.post(wire::encode_unchecked(&announced(1))).unwrap();
            for _ in 0..5 {
                outbox.post_now(wire::encode_unchecked(&Frame::Ping)).unwrap();
            }
            outbox.post(wire::encode_unchecked(&announced(2))).unwrap();
            let hear = async {
                let (mut check, mut frames) = (FrameCheck::default(), Vec::new());
                for _ in 0..7 {
                    frames.push(wire::read_next(&mut far, &mut check).await.unwrap().expect("seven frames"));
                }
                // The first that does not find room goes to the writer, and those that follow queue behind it.
                let before = (room / 9 + 1).min(5);
                let mut expected = vec![Frame::Ping; 5];
                expected.insert(before, announced(1));
                expected.push(announced(2));
                assert_eq!(frames, expected, "{room}");
                // When nothing is left, it goes on as before.
                outbox.flush().await;
                outbox.post_now(wire::encode_unchecked(&Frame::Pong)).unwrap();
                assert_eq!(wire::read_next(&mut far, &mut check).await.unwrap(), Some(Frame::Pong), "{room}");
                drop(outbox);
            };
            let (written, ()) = futures::join!(writer.run(), hear);
            written.unwrap();
        }
    }

    #[tokio::test]
    async fn what_waits_for_a_writer_that_has_no_turn_is_counted() {
        let (outbox, _writer, _far) = outbox(64);
        for _ in 0..1000 {
            outbox.post_now(wire::encode_unchecked(&Frame::Ping)).unwrap();
        }
        // Seven were taken, and the rest of the eighth is kept.
        assert_eq!(outbox.waiting(), (1000 - 8) * wire::encode_unchecked(&Frame::Ping).len());
    }

    #[tokio::test]
    async fn a_connection_is_closed_with_its_writer() {
        let (outbox, writer, mut far) = outbox(64);
        drop(writer);
        assert!(matches!(outbox.post_now(wire::encode_unchecked(&Frame::Ping)), Err(PostError)));
        assert!(wire::read_next(&mut far, &mut FrameCheck::default()).await.unwrap().is_none());
    }
}
