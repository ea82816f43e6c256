//! The byte stream of a data connection, in clear text or inside TLS.
//!
//! Without encryption, payloads are read directly into their destination and written directly from their memory. With
//! encryption they pass once through the buffers of TLS.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Poll, ready};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio_rustls::TlsStream;

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
    pub(super) from: &'a mut Incoming,
    pub(super) closed: &'a mut watch::Receiver<bool>,
}

impl Reader<'_> {
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
            let read = match self.from {
                Incoming::Plain(from) => from.try_read(piece),
                Incoming::Encrypted { from, .. } => unless_closed(self.closed, from.read(piece)).await?,
            };
            match read {
                Ok(0) => return Err(EndReason::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => {
                    if let Some(inspector) = inspector {
                        inspector.inspect(&room[..n]);
                    }
                    room = &mut room[n..];
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable().await?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads into exposed memory; its lock is held for one system call at a time.
    pub(super) async fn fill_grant(&mut self, grant: &ExposureGrant) -> Result<(), EndReason> {
        let mut done = 0;
        while done < grant.len() {
            let left = grant.len() - done;
            let read = match self.from {
                Incoming::Plain(from) => grant.with_bytes_mut(done, left, |room| from.try_read(room)),
                Incoming::Encrypted { from, .. } => {
                    let read = poll_fn(|cx| {
                        let into = |room: &mut [u8]| {
                            let mut room = ReadBuf::new(room);
                            ready!(Pin::new(&mut *from).poll_read(cx, &mut room))?;
                            Poll::Ready(Ok(room.filled().len()))
                        };
                        grant.with_bytes_mut(done, left, into).map_or(Poll::Ready(None), |read| read.map(Some))
                    });
                    unless_closed(self.closed, read).await?
                }
            };
            match read.expect("write access was checked") {
                Ok(0) => return Err(EndReason::Lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable().await?,
                Err(error) => return Err(error.into()),
            }
        }
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

    /// Waits until there is something to read. TLS has already waited by itself.
    async fn readable(&mut self) -> Result<(), EndReason> {
        match self.from {
            Incoming::Plain(from) => Ok(unless_closed(self.closed, from.readable()).await??),
            Incoming::Encrypted { .. } => Ok(()),
        }
    }
}

/// Writes until the queue pair is closed.
pub(super) struct Writer<'a> {
    pub(super) to: &'a mut Outgoing,
    pub(super) closed: &'a mut watch::Receiver<bool>,
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
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error.into()),
            }
        }
        self.flush().await
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

/// Most bytes of one read that an inspector sees, so that they are in the second-level cache then.
const INSPECTED_LEN: usize = 128 << 10;
