//! The byte stream of a data connection, in clear text or inside TLS.
//!
//! Without encryption, payloads are read directly into their destination and written directly from their memory. With
//! encryption they pass once through the buffers of TLS.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio_rustls::TlsStream;

use super::losses::LossWatch;
use super::queue_pair::EndReason;
use crate::software::ExposureGrant;
use crate::work::Inspector;

/// The connection of two queue pairs.
pub(super) enum Connection {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl Connection {
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Encrypted(stream) => stream.get_ref().0,
        }
    }

    pub(super) fn into_split(self) -> io::Result<(Incoming, Outgoing)> {
        match self {
            Self::Plain(stream) => {
                let (from, to) = stream.into_split();
                Ok((Incoming::Plain(from), Outgoing::Plain(to)))
            }
            Self::Encrypted(stream) => {
                // The halves do not expose the socket.
                let socket = socket2::SockRef::from(stream.get_ref().0).try_clone()?;
                let socket = TcpStream::from_std(socket.into())?;
                let (from, to) = tokio::io::split(stream);
                Ok((Incoming::Encrypted { from, socket }, Outgoing::Encrypted(to)))
            }
        }
    }
}

/// The receiving half of the connection.
pub(super) enum Incoming {
    Plain(OwnedReadHalf),
    Encrypted {
        from: ReadHalf<Box<TlsStream<TcpStream>>>,
        /// Used only to detect that the connection is broken.
        socket: TcpStream,
    },
}

impl Incoming {
    fn poll_read(&mut self, cx: &mut Context<'_>, room: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut room = ReadBuf::new(room);
        ready!(match self {
            Self::Plain(from) => Pin::new(from).poll_read(cx, &mut room),
            Self::Encrypted { from, .. } => Pin::new(from).poll_read(cx, &mut room),
        })?;
        Poll::Ready(Ok(room.filled().len()))
    }

    /// Reads and discards bytes until the peer closes the connection.
    pub(super) async fn drain(&mut self) {
        let mut rest = [0; 4096];
        loop {
            let read = match self {
                Self::Plain(from) => from.read(&mut rest).await,
                Self::Encrypted { from, .. } => from.read(&mut rest).await,
            };
            if !matches!(read, Ok(n) if n > 0) {
                return;
            }
        }
    }
}

/// The sending half of the connection.
pub(super) enum Outgoing {
    Plain(OwnedWriteHalf),
    Encrypted(WriteHalf<Box<TlsStream<TcpStream>>>),
}

impl Outgoing {
    /// Closes this direction.
    pub(super) async fn shutdown(&mut self) {
        // An error means that the peer is gone.
        let _ = match self {
            Self::Plain(to) => to.shutdown().await,
            Self::Encrypted(to) => to.shutdown().await,
        };
    }
}

/// Reads until the queue pair is closed.
pub(super) struct Reader<'a> {
    from: &'a mut Incoming,
    closed: &'a mut watch::Receiver<bool>,
    /// Bytes that were received together with those before: frames and short payloads come several in a call.
    ahead: Box<[u8; AHEAD_LEN]>,
    /// The range of these that is not used yet.
    unused: Range<usize>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(from: &'a mut Incoming, closed: &'a mut watch::Receiver<bool>) -> Self {
        Self { from, closed, ahead: Box::new([0; AHEAD_LEN]), unused: 0..0 }
    }

    pub(super) async fn fill(&mut self, room: &mut [u8]) -> Result<(), EndReason> {
        self.fill_inspected(room, None).await
    }

    /// Reads, and shows the bytes to the inspector while they are in the cache.
    pub(super) async fn fill_inspected(
        &mut self,
        mut room: &mut [u8],
        inspector: Option<&dyn Inspector>,
    ) -> Result<(), EndReason> {
        while !room.is_empty() {
            let at_once = if inspector.is_some() { room.len().min(INSPECTED_LEN) } else { room.len() };
            let piece = &mut room[..at_once];
            let n = match self.take(piece) {
                0 if piece.len() < AHEAD_LEN => {
                    self.read_ahead().await?;
                    continue;
                }
                0 => {
                    let read = poll_fn(|cx| self.from.poll_read(cx, piece));
                    received(unless_closed(self.closed, read).await?)?
                }
                taken => taken,
            };
            if let Some(inspector) = inspector {
                inspector.inspect(&room[..n]);
            }
            room = &mut room[n..];
        }
        Ok(())
    }

    /// Reads bytes that mean nothing.
    pub(super) async fn skip(&mut self, mut len: usize) -> Result<(), EndReason> {
        while len > 0 {
            if self.unused.is_empty() {
                self.read_ahead().await?;
            }
            let skipped = len.min(self.unused.len());
            self.unused.start += skipped;
            len -= skipped;
        }
        Ok(())
    }

    /// Reads into exposed memory; its lock is held for one system call at a time.
    pub(super) async fn fill_grant(&mut self, grant: &ExposureGrant) -> Result<(), EndReason> {
        let mut done = 0;
        while done < grant.len() {
            let left = grant.len() - done;
            done += match grant.with_bytes_mut(done, left, |room| self.take(room)).expect(CHECKED) {
                0 if left < AHEAD_LEN => {
                    self.read_ahead().await?;
                    continue;
                }
                0 => {
                    let read = poll_fn(|cx| {
                        grant.with_bytes_mut(done, left, |room| self.from.poll_read(cx, room)).expect(CHECKED)
                    });
                    received(unless_closed(self.closed, read).await?)?
                }
                taken => taken,
            };
        }
        Ok(())
    }

    /// Copies bytes that were received ahead; returns how many.
    fn take(&mut self, room: &mut [u8]) -> usize {
        let len = room.len().min(self.unused.len());
        room[..len].copy_from_slice(&self.ahead[self.unused.start..self.unused.start + len]);
        self.unused.start += len;
        len
    }

    /// Receives bytes ahead, when all before are used.
    async fn read_ahead(&mut self) -> Result<(), EndReason> {
        let read = poll_fn(|cx| self.from.poll_read(cx, &mut self.ahead[..]));
        self.unused = 0..received(unless_closed(self.closed, read).await?)?;
        Ok(())
    }

    /// Waits for an event other than the peer's bytes, unless the connection breaks; without a read, a break would go
    /// unnoticed.
    pub(super) async fn unless_reset<T>(&self, wait: impl Future<Output = T>) -> Result<T, EndReason> {
        let broken = async {
            #[cfg(any(target_os = "linux", target_os = "android"))]
            let _ = match &*self.from {
                Incoming::Plain(from) => from.ready(tokio::io::Interest::ERROR).await,
                Incoming::Encrypted { socket, .. } => socket.ready(tokio::io::Interest::ERROR).await,
            };
            #[cfg(not(any(target_os = "linux", target_os = "android")))]
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            done = wait => Ok(done),
            () = broken => Err(EndReason::Lost(io::ErrorKind::ConnectionReset.into())),
        }
    }
}

/// Returns how many bytes were received; the connection has ended if there are none.
fn received(read: io::Result<usize>) -> Result<usize, EndReason> {
    match read? {
        0 => Err(EndReason::Lost(io::ErrorKind::UnexpectedEof.into())),
        n => Ok(n),
    }
}

/// Writes until the queue pair is closed.
pub(super) struct Writer<'a> {
    pub(super) to: &'a mut Outgoing,
    pub(super) closed: &'a mut watch::Receiver<bool>,
    /// While the congestion control may change.
    pub(super) losses: Option<LossWatch>,
}

impl Writer<'_> {
    /// Tells whether bytes are encrypted before they are written.
    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self.to, Outgoing::Encrypted(_))
    }

    pub(super) async fn write_both(&mut self, mut head: &[u8], mut tail: &[u8]) -> Result<(), EndReason> {
        while !head.is_empty() || !tail.is_empty() {
            let both = [IoSlice::new(head), IoSlice::new(tail)];
            let written = match self.to {
                Outgoing::Plain(to) if head.is_empty() => to.try_write(tail),
                Outgoing::Plain(to) => to.try_write_vectored(&both),
                Outgoing::Encrypted(to) => unless_closed(self.closed, to.write_vectored(&both)).await?,
            };
            match written {
                Ok(n) => {
                    let of_head = n.min(head.len());
                    head = &head[of_head..];
                    tail = &tail[n - of_head..];
                    self.look_for_losses();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error.into()),
            }
        }
        self.flush().await
    }

    /// Writes exposed memory; its lock is held for one system call at a time.
    pub(super) async fn write_grant(&mut self, grant: &ExposureGrant) -> Result<(), EndReason> {
        let mut done = 0;
        while done < grant.len() {
            let left = grant.len() - done;
            let written = match self.to {
                Outgoing::Plain(to) => grant.with_bytes(done, left, |bytes| to.try_write(bytes)),
                Outgoing::Encrypted(to) => {
                    let write =
                        poll_fn(|cx| grant.with_bytes(done, left, |bytes| Pin::new(&mut *to).poll_write(cx, bytes)));
                    unless_closed(self.closed, write).await?
                }
            };
            match written {
                Ok(n) => {
                    done += n;
                    self.look_for_losses();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error.into()),
            }
        }
        self.flush().await
    }

    fn look_for_losses(&mut self) {
        self.losses.take_if(|losses| !losses.look());
    }

    /// Sends the bytes that TLS may hold back.
    async fn flush(&mut self) -> Result<(), EndReason> {
        match self.to {
            Outgoing::Plain(_) => Ok(()),
            Outgoing::Encrypted(to) => Ok(unless_closed(self.closed, to.flush()).await??),
        }
    }

    /// Waits until there is room to write. TLS has already waited by itself.
    async fn writable(&mut self) -> Result<(), EndReason> {
        match self.to {
            Outgoing::Plain(to) => Ok(unless_closed(self.closed, to.writable()).await??),
            Outgoing::Encrypted(_) => Ok(()),
        }
    }
}

/// Waits for `io`, unless the queue pair is closed first.
async fn unless_closed<T>(closed: &mut watch::Receiver<bool>, io: impl Future<Output = T>) -> Result<T, EndReason> {
    tokio::select! {
        biased;
        done = io => Ok(done),
        _ = closed.wait_for(|&closed| closed) => Err(EndReason::Closed),
    }
}

const CHECKED: &str = "write access was checked";
/// Most bytes that are received ahead. Of a long payload, so many are copied once more.
const AHEAD_LEN: usize = 8 << 10;
/// Most bytes of one read that an inspector sees, so that they are in the second-level cache then.
const INSPECTED_LEN: usize = 128 << 10;
