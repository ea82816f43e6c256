//! The messages between processes of one host when they meet: a few bytes and descriptors over a Unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// A request of the connecting process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Joins the queue pair that waits for `to`. Three descriptors come along: of the rings, and two of the bell of the
    /// node `name`.
    Meet { to: u128, from: u128, name: u128 },
    /// Requests the descriptor of an object.
    Open { object: u64 },
    /// Requests the descriptor of a sealed object.
    Attach { token: u128 },
    /// Keeps the connection, whose end means that the node is gone. Requests for objects may follow on it.
    Stay,
}

impl Request {
    pub(crate) const LEN: usize = 49;

    pub(crate) fn encode(self) -> [u8; Self::LEN] {
        let (kind, numbers) = match self {
            Self::Meet { to, from, name } => (1, [to, from, name]),
            Self::Open { object } => (2, [object.into(), 0, 0]),
            Self::Stay => (3, [0, 0, 0]),
            Self::Attach { token } => (4, [token, 0, 0]),
        };
        let mut out = [kind; Self::LEN];
        for (field, number) in out[1..].chunks_exact_mut(16).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        out
    }

    /// Decodes a request; returns `None` unless [`encode`](Self::encode) makes such a request.
    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let number = |at: usize| u128::from_le_bytes(std::array::from_fn(|i| bytes[1 + 16 * at + i]));
        let request = match bytes[0] {
            1 => Self::Meet { to: number(0), from: number(1), name: number(2) },
            2 => Self::Open { object: u64::try_from(number(0)).ok()? },
            3 => Self::Stay,
            4 => Self::Attach { token: number(0) },
            _ => return None,
        };
        (request.encode() == *bytes).then_some(request)
    }
}

/// The response to a request. Descriptors come along unless the response is `Unknown`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// Granted, with both descriptors of the other end's bell, or with a file.
    Granted,
    /// Granted, with memory of this length in bytes.
    Memory(u64),
    /// No such queue pair or object exists.
    Unknown,
}

impl Response {
    pub(super) const LEN: usize = 9;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let (kind, len) = match self {
            Self::Granted => (1, 0),
            Self::Memory(len) => (2, len),
            Self::Unknown => (3, 0),
        };
        let mut out = [kind; Self::LEN];
        out[1..].copy_from_slice(&len.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: [u8; Self::LEN]) -> Option<Self> {
        match bytes[0] {
            1 => Some(Self::Granted),
            2 => Some(Self::Memory(u64::from_le_bytes(std::array::from_fn(|i| bytes[1 + i])))),
            3 => Some(Self::Unknown),
            _ => None,
        }
    }
}

/// Sends a few bytes, with descriptors.
pub(super) async fn send(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = stream.async_io(Interest::WRITABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
    });
    // The socket's buffer has room for far more bytes.
    if sent.await? == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Waits until there is something to receive, or until the connection ends.
///
/// A stream also counts as readable after all bytes were received, until a read finds none.
pub(super) async fn wait_readable(stream: &UnixStream) -> io::Result<()> {
    let look = || {
        rustix::net::recv(stream, &mut [0u8; 1][..], RecvFlags::PEEK)?;
        Ok(())
    };
    stream.async_io(Interest::READABLE, look).await
}

/// Receives exactly `LEN` bytes, and the descriptors that come with them.
pub(super) async fn receive<const LEN: usize>(stream: &UnixStream) -> io::Result<([u8; LEN], Vec<OwnedFd>)> {
    let (mut bytes, mut files, mut filled) = ([0; LEN], Vec::new(), 0);
    while filled < LEN {
        let room = &mut bytes[filled..];
        let received = stream.async_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let room = &mut [IoSliceMut::new(room)];
            let message = rustix::net::recvmsg(stream, room, &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for sent in control.drain() {
                if let RecvAncillaryMessage::ScmRights(sent) = sent {
                    files.extend(sent);
                }
            }
            Ok(message.bytes)
        });
        match received.await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => filled += n,
        }
        if files.len() > FILES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
        }
    }
    Ok((bytes, files))
}

/// Most descriptors that come with one message.
const FILES_MAX: usize = 3;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_survive_encoding(to: u128, from: u128, name: u128, object: u64) {
            let attach = Request::Attach { token: to };
            for request in [Request::Meet { to, from, name }, Request::Open { object }, Request::Stay, attach] {
                prop_assert_eq!(Request::decode(&request.encode()), Some(request));
            }
        }
    }

    #[tokio::test]
    async fn nothing_arrives_behind_what_was_received() {
        use futures::FutureExt;

        let (near, far) = UnixStream::pair().unwrap();
        for _ in 0..3 {
            send(&far, &[7; Request::LEN], &[]).await.unwrap();
            wait_readable(&near).await.unwrap();
            receive::<{ Request::LEN }>(&near).await.unwrap();
            assert!(wait_readable(&near).now_or_never().is_none());
        }
        drop(far);
        wait_readable(&near).await.unwrap();
        assert!(receive::<{ Request::LEN }>(&near).await.is_err());
    }

    #[test]
    fn answers_survive_encoding() {
        for answer in [Response::Granted, Response::Memory(u64::MAX), Response::Unknown] {
            assert_eq!(Response::decode(answer.encode()), Some(answer));
        }
        assert_eq!(Response::decode([0; Response::LEN]), None);
    }
}
