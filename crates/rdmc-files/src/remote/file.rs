//! One file of a server, open as long as its session.
//!
//! The client's slabs have commands and what it writes, so that the server does all in order. The server's slabs have
//! the bytes of *streams*: it goes on reading the file from where the client has asked, and the session holds it back.
//! A client that reads elsewhere asks for another stream, and throws away what still arrives of the last one.

use std::fmt;
use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use rdmc_wan::OpenError;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};

use super::RemoteSettings;
use super::client::{RemoteLocation, connect};
use super::wire::{OFFSET_MAX, OpenHow, ReadRange, Request, decode};
use crate::error::chain;
use client::{Client, FIRST_AHEAD, Work};
use wire::Opened;

mod client;
pub(super) mod served;
pub(super) mod wire;

/// A file of a [server](super::RemoteServer) that is read and written in place: `AsyncRead`, `AsyncWrite` and
/// `AsyncSeek`, as `tokio::fs::File`.
///
/// - **Reading.** The server sends ahead, so that sequential reads wait for no round trip. It begins with as much as is
///   read at once, and sends four times as much ahead whenever half is read, up to the
///   [ring](RemoteSettings::in_flight). At the end of the file a read returns 0 bytes; the next one asks again.
/// - **Seeking** by itself costs nothing. The first read elsewhere costs a round trip, and waits for what is in flight.
///   A read inside the present slab, or at most 4 MiB further on in what was asked for, costs no round trip.
///   `SeekFrom::End` counts from the length of [`metadata`](Self::metadata).
/// - **Writing** goes into the file itself, past its end too; [`put`](super::put) instead replaces a file as a whole.
///   Bytes leave in slabs of 1 MiB. A read through the same `RemoteFile` sees them.
/// - **Flushing** sends the rest, and waits until the server has written everything: other readers see it then. It
///   costs a round trip. `tokio::io::copy` flushes whenever its source has nothing ready.
/// - **Shutting down** flushes, closes the file, and waits until the session has ended. Nothing more can be read then.
/// - **Dropping** a file that is not flushed may lose what was written last; the server then reports a failure.
///
/// Nothing locks the file. What others write may be seen or not, since up to a ring of bytes was read ahead. Memory is
/// bounded by the rings of each end. The server counts an open file among its 64 transfers.
///
/// # Cancel safety
/// If a future of a read, flush or shutdown is dropped, the next call goes on with it. A write whose future is dropped
/// has written nothing.
///
/// # Errors
/// An error of the server's file system, or of the session, closes the file: later calls return the same error. An
/// error of a write comes with a later call, at the latest with a flush or shutdown.
///
/// | kind | cause |
/// |---|---|
/// | that of the server's system, as `NotFound` or `StorageFull` | an operation failed there |
/// | `PermissionDenied` | also: the server is not writable, or the path leads out of its directory |
/// | the same, and the file is still open | it was not opened for reading, or for writing |
/// | `ConnectionRefused` | nothing listens there, or the server refuses the session |
/// | `ConnectionReset` | the connection was lost and could not be resumed, or no data connection could be made |
/// | `TimedOut`, `UnexpectedEof` | nothing that speaks the protocol answers there |
/// | `ConnectionAborted` | the server ended the session |
/// | `InvalidInput` | the options or a position make no sense |
/// | `InvalidData` | the server broke the protocol |
/// | `BrokenPipe` | the file was shut down |
///
/// # Examples
/// ```no_run
/// # async fn example() -> anyhow::Result<()> {
/// use rdmc_files::{RemoteFile, RemoteLocation, RemoteSettings};
/// use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
///
/// let location = RemoteLocation::parse("node2/model.bin", 7471).map_err(anyhow::Error::msg)?;
/// let options = RemoteFile::options().read(true).write(true);
/// let mut file = options.open(&location, &RemoteSettings::default()).await?;
/// let mut header = [0; 64];
/// file.read_exact(&mut header).await?;
/// file.seek(std::io::SeekFrom::End(0)).await?;
/// file.write_all(b"appended").await?;
/// file.shutdown().await?;
/// # Ok(())
/// # }
/// ```
pub struct RemoteFile {
    // A mutex, so that the file is `Sync`.
    state: Mutex<State>,
    position: u64,
    /// Applies when the work under way has ended.
    seek: Option<SeekFrom>,
    metadata: RemoteFileMetadata,
    how: OpenHow,
}

enum State {
    Idle(Box<Client>),
    Busy(BoxFuture<'static, (Option<Box<Client>>, io::Result<()>)>),
    Closed,
    Failed(io::ErrorKind, String),
}

/// How a [`RemoteFile`] is opened: as `tokio::fs::OpenOptions`. By default nothing is set.
#[derive(Clone, Copy, Debug, Default)]
pub struct RemoteFileOptions {
    how: OpenHow,
    read_from: Option<u64>,
}

/// What a server says of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteFileMetadata {
    len: u64,
    mode: u32,
    mtime_s: i64,
    mtime_ns: u32,
}

impl RemoteFile {
    /// Opens a file for reading from its beginning. The server begins to send with its answer.
    ///
    /// # Cancel safety
    /// If the future is dropped, the file is not open.
    ///
    /// # Errors
    /// See [the type](Self#errors).
    pub async fn open(location: &RemoteLocation, settings: &RemoteSettings) -> io::Result<Self> {
        Self::options().read(true).read_from(0).open(location, settings).await
    }

    /// Opens a file for writing, makes it if it does not exist, and truncates it.
    ///
    /// # Cancel safety
    /// If the future is dropped, the file is not open, but the server may have truncated it.
    ///
    /// # Errors
    /// See [the type](Self#errors).
    pub async fn create(location: &RemoteLocation, settings: &RemoteSettings) -> io::Result<Self> {
        Self::options().write(true).create(true).truncate(true).open(location, settings).await
    }

    /// Returns options of which none is set.
    pub fn options() -> RemoteFileOptions {
        RemoteFileOptions::default()
    }

    /// Returns what the server has said last: when the file was opened, or with the last flush. The length includes
    /// what was written here since.
    pub fn metadata(&self) -> RemoteFileMetadata {
        self.metadata
    }

    /// Flushes, and waits until the server has forced the file to the disk. Asks for the [`metadata`](Self::metadata)
    /// again.
    ///
    /// # Cancel safety
    /// If the future is dropped, the next call goes on with it.
    ///
    /// # Errors
    /// See [the type](Self#errors).
    pub async fn sync_all(&mut self) -> io::Result<()> {
        let mut is_begun = false;
        std::future::poll_fn(|cx| {
            ready!(self.poll_settled(cx))?;
            if !is_begun {
                is_begun = true;
                self.begin(Work::Flush { sync: true })?;
                ready!(self.poll_settled(cx))?;
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Shuts the file down, as `AsyncWriteExt::shutdown` does.
    ///
    /// # Cancel safety
    /// If the future is dropped, what was written last may be lost.
    ///
    /// # Errors
    /// See [the type](Self#errors).
    pub async fn close(mut self) -> io::Result<()> {
        std::future::poll_fn(|cx| Pin::new(&mut self).poll_shutdown(cx)).await
    }

    fn state(&mut self) -> &mut State {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ready when no work is under way, and the last seek was applied.
    fn poll_settled(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let state = self.state();
        if let State::Busy(work) = state {
            *state = match ready!(work.as_mut().poll(cx)) {
                (_, Err(error)) => State::Failed(error.kind(), error.to_string()),
                (Some(client), Ok(())) => State::Idle(client),
                (None, Ok(())) => State::Closed,
            };
        }
        match state {
            State::Failed(kind, text) => return Poll::Ready(Err(io::Error::new(*kind, text.clone()))),
            State::Idle(client) => {
                if let Some(news) = client.news.take() {
                    self.metadata = news;
                }
            }
            State::Busy(_) | State::Closed => {}
        }
        if let Some(seek) = self.seek.take() {
            self.position = self.target(seek)?;
        }
        Poll::Ready(Ok(()))
    }

    fn target(&self, seek: SeekFrom) -> io::Result<u64> {
        let target = match seek {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
            SeekFrom::End(by) => self.metadata.len.checked_add_signed(by),
        };
        target.filter(|target| *target <= OFFSET_MAX).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "a position in a file is from 0 to 2^63 - 1: seek to another one",
            )
        })
    }

    /// Begins work when the last one has ended.
    fn begin(&mut self, work: Work) -> io::Result<()> {
        let state = self.state();
        match std::mem::replace(state, State::Closed) {
            State::Idle(client) => {
                *state = State::Busy(Box::pin(client.run(work)));
                Ok(())
            }
            other => {
                *state = other;
                Err(io::Error::new(io::ErrorKind::BrokenPipe, "the file is closed"))
            }
        }
    }
}

impl RemoteFileOptions {
    /// Sets whether the file is read.
    #[must_use]
    pub fn read(mut self, read: bool) -> Self {
        self.how.read = read;
        self
    }

    /// Sets whether the file is written. The server must be [writable](super::RemoteServerBuilder::writable). One that
    /// does not [overwrite](RemoteSettings::overwrite) files opens only new ones for this.
    #[must_use]
    pub fn write(mut self, write: bool) -> Self {
        self.how.write = write;
        self
    }

    /// Sets whether the file loses its bytes when it is opened; needs `write`.
    #[must_use]
    pub fn truncate(mut self, truncate: bool) -> Self {
        self.how.truncate = truncate;
        self
    }

    /// Sets whether the file is made if it does not exist; needs `write`. Its directory must exist.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.how.create = create;
        self
    }

    /// Sets whether the file is made, and must not exist before; needs `write`.
    #[must_use]
    pub fn create_new(mut self, create_new: bool) -> Self {
        self.how.create_new = create_new;
        self
    }

    /// Sets that the file is read from `offset`, in bytes. That is the first position, and the server sends up to 4 MiB
    /// with its answer, which saves a round trip; needs `read`. By default nothing moves before the first read.
    #[must_use]
    pub fn read_from(mut self, offset: u64) -> Self {
        self.read_from = Some(offset);
        self
    }

    /// Opens the file, by one exchange.
    ///
    /// # Cancel safety
    /// If the future is dropped, the file is not open, but the server may have made or truncated it.
    ///
    /// # Errors
    /// See [`RemoteFile`](RemoteFile#errors).
    pub async fn open(self, location: &RemoteLocation, settings: &RemoteSettings) -> io::Result<RemoteFile> {
        let first = self.read_from.map(|start| ReadRange::new(start, FIRST_AHEAD));
        let how = OpenHow { first, ..self.how };
        if let Some(flaw) = how.flaw() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, flaw));
        }
        let request = Request::Open { path: location.path.clone(), how };
        let fabrics = settings.open_towards(&location.address).await;
        let fabrics = fabrics.map_err(|problem| io::Error::new(io::ErrorKind::InvalidInput, problem.to_string()))?;
        let session = connect(fabrics, &location.address, settings, request).await.map_err(not_connected)?;
        let opened: Opened = decode(session.handle.metadata())
            .map_err(|problem| io::Error::new(io::ErrorKind::InvalidData, format!("{location}: {problem}")))?;
        let metadata =
            opened.map_err(|error| io::Error::new(error.kind(), format!("{location}: {}", error.reason())))?;
        let client = Client::new(session, location.to_string(), first);
        Ok(RemoteFile {
            state: Mutex::new(State::Idle(Box::new(client))),
            position: self.read_from.unwrap_or(0),
            seek: None,
            metadata,
            how,
        })
    }
}

impl RemoteFileMetadata {
    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is no container")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the type and permission bits.
    pub fn mode(&self) -> u32 {
        self.mode
    }

    /// Returns the time of the last modification; `None` if this system cannot represent it.
    pub fn modified(&self) -> Option<SystemTime> {
        let seconds = Duration::from_secs(self.mtime_s.unsigned_abs());
        let whole = match self.mtime_s {
            0.. => SystemTime::UNIX_EPOCH.checked_add(seconds),
            _ => SystemTime::UNIX_EPOCH.checked_sub(seconds),
        };
        whole?.checked_add(Duration::from_nanos(self.mtime_ns.into()))
    }
}

impl AsyncRead for RemoteFile {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.how.read {
            return Poll::Ready(Err(not_open_for("reading")));
        }
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            ready!(self.poll_settled(cx))?;
            let at = self.position;
            if let State::Idle(client) = self.state()
                && let Some(bytes) = client.read(at)
            {
                let now = bytes.len().min(buf.remaining());
                buf.put_slice(&bytes[..now]);
                self.position += now as u64;
                return Poll::Ready(Ok(()));
            }
            self.begin(Work::Read { at, want: buf.remaining() })?;
        }
    }
}

impl AsyncWrite for RemoteFile {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.how.write {
            return Poll::Ready(Err(not_open_for("writing")));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        loop {
            ready!(self.poll_settled(cx))?;
            let at = self.position;
            if OFFSET_MAX - at < bytes.len() as u64 {
                return Poll::Ready(Err(io::ErrorKind::FileTooLarge.into()));
            }
            if let State::Idle(client) = self.state()
                && let Some(now) = client.write(at, bytes)
            {
                self.position += now as u64;
                self.metadata.len = self.metadata.len.max(self.position);
                return Poll::Ready(Ok(now));
            }
            self.begin(Work::Write)?;
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.poll_settled(cx))?;
            match self.state() {
                State::Idle(client) if client.is_unflushed() => self.begin(Work::Flush { sync: false })?,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.poll_settled(cx))?;
            match self.state() {
                State::Closed => return Poll::Ready(Ok(())),
                _ => self.begin(Work::Close)?,
            }
        }
    }
}

impl AsyncSeek for RemoteFile {
    fn start_seek(mut self: Pin<&mut Self>, position: SeekFrom) -> io::Result<()> {
        self.seek = Some(position);
        Ok(())
    }

    fn poll_complete(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        ready!(self.poll_settled(cx))?;
        Poll::Ready(Ok(self.position))
    }
}

impl fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteFile")
            .field("position", &self.position)
            .field("metadata", &self.metadata)
            .finish_non_exhaustive()
    }
}

fn not_open_for(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("the file is not open for {what}"))
}

fn not_connected(error: OpenError) -> io::Error {
    let kind = match &error {
        OpenError::Unreachable { source, .. } | OpenError::Handshake { source, .. } => source.kind(),
        OpenError::Refused { .. } => io::ErrorKind::ConnectionRefused,
        OpenError::Invalid(_) => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, chain(&error))
}

#[cfg(test)]
mod tests;
