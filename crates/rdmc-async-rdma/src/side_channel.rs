//! The side channel: the TCP connection beside each queue pair.

use std::collections::VecDeque;
use std::io;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::frame::Frame;

/// Splits a connection; everything that precedes the frames must have passed.
pub(crate) fn split(stream: TcpStream) -> (FrameReader, FrameWriter) {
    let (from, to) = stream.into_split();
    (FrameReader { from, buffer: [0; BUFFER_LEN], filled: 0 }, FrameWriter { to, unwritten: VecDeque::new() })
}

/// Reads the peer's frames.
pub(crate) struct FrameReader {
    from: OwnedReadHalf,
    buffer: [u8; BUFFER_LEN],
    filled: usize,
}

impl FrameReader {
    /// Returns the next frame; `None` at the end of the channel.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// Those of the connection; `InvalidData` for bytes that are not a frame.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(bytes) = self.buffer[..self.filled].first_chunk() {
                let frame = Frame::decode(bytes).ok_or(io::ErrorKind::InvalidData)?;
                self.buffer.copy_within(Frame::LEN..self.filled, 0);
                self.filled -= Frame::LEN;
                return Ok(Some(frame));
            }
            self.from.readable().await?;
            match self.from.try_read(&mut self.buffer[self.filled..]) {
                Ok(0) if self.filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.filled += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Writes frames to the peer, in order.
pub(crate) struct FrameWriter {
    to: OwnedWriteHalf,
    /// Encoded frames that are not yet written.
    unwritten: VecDeque<u8>,
}

impl FrameWriter {
    /// Queues a frame for the next [`flush`](Self::flush).
    pub(crate) fn queue(&mut self, frame: Frame) {
        self.unwritten.extend(frame.encode());
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.unwritten.is_empty()
    }

    /// Tells whether so much is unwritten that nothing should be added, because the peer does not read.
    pub(crate) fn is_full(&self) -> bool {
        self.unwritten.len() >= UNWRITTEN_MAX
    }

    /// Writes the queued frames.
    ///
    /// # Cancel safety
    /// The next call writes the rest.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        while !self.unwritten.is_empty() {
            self.to.writable().await?;
            match self.to.try_write(self.unwritten.as_slices().0) {
                Ok(len) => drop(self.unwritten.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Discards what is unwritten, since the peer does not read it.
    pub(crate) fn discard(&mut self) {
        self.unwritten.clear();
    }

    /// Closes this direction of the channel, behind everything that was written.
    pub(crate) async fn shutdown(&mut self) {
        // Fails only if the connection has ended, as it should.
        let _ = self.to.shutdown().await;
    }
}

/// Most bytes of one read.
const BUFFER_LEN: usize = 64 * Frame::LEN;
/// Unwritten bytes above which nothing more is announced or sent.
const UNWRITTEN_MAX: usize = 64 << 10;
