//! The TCP connection that goes with each queue pair.

use std::collections::VecDeque;
use std::io;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::frame::Frame;

/// Splits a connection over which everything before the frames has been said.
pub(crate) fn leash(stream: TcpStream) -> (Listener, Speaker) {
    let (from, to) = stream.into_split();
    (Listener { from, buffer: [0; BUFFER_LEN], filled: 0 }, Speaker { to, unsaid: VecDeque::new() })
}

/// The end that takes the peer's frames.
pub(crate) struct Listener {
    from: OwnedReadHalf,
    buffer: [u8; BUFFER_LEN],
    filled: usize,
}

impl Listener {
    /// Takes the next frame; none at the end of the leash.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// Those of the connection; `InvalidData` for what is no frame.
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

/// The end that says frames to the peer, in order.
pub(crate) struct Speaker {
    to: OwnedWriteHalf,
    /// Encoded frames that are not yet written.
    unsaid: VecDeque<u8>,
}

impl Speaker {
    /// Says a frame, with the next [`flush`](Self::flush).
    pub(crate) fn say(&mut self, frame: Frame) {
        self.unsaid.extend(frame.encode());
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.unsaid.is_empty()
    }

    /// Tells whether so much is unsaid that nothing should be added: the peer does not listen.
    pub(crate) fn is_full(&self) -> bool {
        self.unsaid.len() >= UNSAID_MAX
    }

    /// Writes what is unsaid.
    ///
    /// # Cancel safety
    /// What was not written is written by the next call.
    ///
    /// # Errors
    /// Those of the connection.
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        while !self.unsaid.is_empty() {
            self.to.writable().await?;
            match self.to.try_write(self.unsaid.as_slices().0) {
                Ok(len) => drop(self.unsaid.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Gives up what is unsaid, since the peer does not hear it.
    pub(crate) fn give_up(&mut self) {
        self.unsaid.clear();
    }

    /// Lets the peer see the end of the leash, behind everything that was said.
    pub(crate) async fn end(&mut self) {
        // Fails only if the connection has ended, as it should.
        let _ = self.to.shutdown().await;
    }
}

/// Bytes read at once at most.
const BUFFER_LEN: usize = 64 * Frame::LEN;
/// Unsaid bytes above which no more is announced or sent.
const UNSAID_MAX: usize = 64 << 10;
