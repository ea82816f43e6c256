//! Where the bytes of a flow come from and go to: a TCP connection, or a flow of another session.

use std::io;
use std::net::Shutdown;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::pipe::PipeEnd;

/// The connection of a flow.
pub(super) enum Socket {
    Tcp(TcpStream),
    Pipe(PipeEnd),
}

impl Socket {
    /// Makes that of a TCP connection. It is reset when it is dropped, unless it is [settled](Self::settle) before.
    ///
    /// This holds if the process is killed, too: otherwise the system would end the connection in good order, and its
    /// other end would take a part of the bytes for all.
    pub(super) fn of(stream: TcpStream) -> Self {
        // If that fails, the connection is gone already.
        drop(stream.set_zero_linger());
        Self::Tcp(stream)
    }

    /// Prepares it for a flow.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn prepare(&self) -> io::Result<()> {
        let Self::Tcp(stream) = self else { return Ok(()) };
        stream.set_nodelay(true)?;
        // A host that has vanished does not keep its flow for ever.
        SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await?,
            Self::Pipe(end) => end.readable().await,
        }
        Ok(())
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await?,
            Self::Pipe(end) => end.writable().await,
        }
        Ok(())
    }

    pub(super) fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(into),
            Self::Pipe(end) => end.try_read(into),
        }
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Pipe(end) => end.try_write(bytes),
        }
    }

    /// Tells the other end that the direction has ended.
    pub(super) fn shut(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => SockRef::from(stream).shutdown(Shutdown::Write),
            Self::Pipe(end) => end.shut(),
        }
    }

    /// Waits until it has an error, such as a reset, also while nothing is read from it.
    pub(super) async fn broken(&self) -> io::Error {
        match self {
            Self::Tcp(stream) => match stream.ready(Interest::ERROR).await.and_then(|_| stream.take_error()) {
                Ok(Some(error)) | Err(error) => return error,
                // A read or a write has taken the error.
                Ok(None) => {}
            },
            Self::Pipe(end) => end.reset_seen().await,
        }
        io::ErrorKind::ConnectionReset.into()
    }

    /// Lets it end in good order when it is dropped.
    pub(super) fn settle(&self) {
        if let Self::Tcp(stream) = self {
            // If that fails, the connection is gone already.
            drop(SockRef::from(stream).set_linger(None));
        }
    }

    /// Resets it: a TCP connection when it is dropped, a pipe at once.
    pub(super) fn reset(&self) {
        match self {
            // If that fails, the connection is gone already.
            Self::Tcp(stream) => drop(stream.set_zero_linger()),
            Self::Pipe(end) => end.reset(),
        }
    }
}

/// After this time of silence the system asks a socket's other end whether it is there.
const KEEPALIVE: Duration = Duration::from_secs(60);
