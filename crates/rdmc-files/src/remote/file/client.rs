//! The end that reads and writes: what it has asked for, and what of that is here.

use std::io;

use futures::FutureExt;
use rdmc_wan::{Session, SessionError, SessionHandle, Slab, SlabMut, SlabReceiver, SlabSender};

use super::RemoteFileMetadata;
use super::wire::{FileBytes, FileCommand, FileError, FileNews};
use crate::error::Problem;
use crate::remote::wire::{OFFSET_MAX, ReadRange, decode, encode};

/// The client's end of an open file. Dropping it closes the file; if something is unflushed, the session fails.
pub(super) struct Client {
    /// The file, for people.
    name: String,
    /// `None` when the file is being closed, or has failed.
    ends: Option<Ends>,
    handle: SessionHandle,
    /// The number of the last stream.
    number: u64,
    /// The last stream, until its end.
    stream: Option<Stream>,
    /// A slab of the stream, and its offset in the file.
    slab: Option<(u64, Slab)>,
    /// The end of the file, if the stream has found it.
    end: Option<u64>,
    filling: Option<Filling>,
    is_unflushed: bool,
    /// What the server has said, if it was not yet seen.
    pub(super) news: Option<RemoteFileMetadata>,
}

struct Ends {
    sender: SlabSender,
    receiver: SlabReceiver,
}

/// Bytes that the server reads for this end.
struct Stream {
    /// What has not arrived.
    range: ReadRange,
    /// How many bytes it was asked to go ahead.
    ahead: u64,
}

/// A slab that is being filled with what is written.
struct Filling {
    slab: SlabMut,
    offset: u64,
    len: usize,
}

/// What takes time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Gets the bytes at an offset, of which so many are wanted at once.
    Read {
        at: u64,
        want: usize,
    },
    /// Makes room for what is written.
    Write,
    Flush {
        sync: bool,
    },
    Close,
}

/// Why work has failed.
enum Failure {
    Session(SessionError),
    Server(FileError),
    /// The server has broken the protocol.
    Protocol(Problem),
}

impl Client {
    pub(super) fn new(session: Session, name: String, first: Option<ReadRange>) -> Self {
        let Session { sender, receiver, handle, .. } = session;
        Self {
            name,
            ends: Some(Ends { sender, receiver }),
            handle,
            number: 0,
            stream: first.map(|range| Stream { range, ahead: range.len() }),
            slab: None,
            end: None,
            filling: None,
            is_unflushed: false,
            news: None,
        }
    }

    pub(super) fn is_unflushed(&self) -> bool {
        self.is_unflushed
    }

    /// Returns the bytes at an offset that are here: at least one, or none at the end of the file. `None` if
    /// [`Work::Read`] must get them.
    pub(super) fn read(&mut self, at: u64) -> Option<&[u8]> {
        if let Some((offset, slab)) = &self.slab
            && let Some(bytes) = slice_from(*offset, slab, at)
        {
            return Some(bytes);
        }
        // Told once, since the file may grow.
        self.end.take_if(|end| *end <= at).map(|_| &[][..])
    }

    /// Takes bytes to be written, and returns how many. `None` if [`Work::Write`] must make room.
    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) -> Option<usize> {
        let filling = self.filling.as_mut()?;
        if filling.len == 0 {
            filling.offset = at;
        }
        let room = &mut filling.slab[filling.len..];
        if filling.offset + filling.len as u64 != at || room.is_empty() {
            return None;
        }
        let now = bytes.len().min(room.len());
        room[..now].copy_from_slice(&bytes[..now]);
        filling.len += now;
        self.is_unflushed = true;
        // What was read ahead may be other bytes now.
        (self.stream, self.slab, self.end) = (None, None, None);
        Some(now)
    }

    /// Does work; returns `None` in place of a client that has closed the file, or failed.
    pub(super) async fn run(mut self: Box<Self>, work: Work) -> (Option<Box<Self>>, io::Result<()>) {
        let outcome = match work {
            Work::Read { at, want } => self.fetch(at, want).await,
            Work::Write => self.make_room().await,
            Work::Flush { sync } => self.flush(sync).await,
            Work::Close => self.close().await,
        };
        match outcome {
            Ok(()) => ((!matches!(work, Work::Close)).then_some(self), Ok(())),
            Err(failure) => {
                let error = self.explain(failure).await;
                // Not in good order.
                self.ends = None;
                (None, Err(error))
            }
        }
    }

    async fn fetch(&mut self, at: u64, want: usize) -> Result<(), Failure> {
        self.send_filled().await?;
        if at == OFFSET_MAX {
            self.end = Some(at);
        }
        while !self.has(at) {
            // Its memory goes back to the ring.
            self.slab = None;
            self.ask_for(at, want).await?;
            let slab = self.ends().receiver.next().await?;
            let slab = slab.ok_or_else(|| Problem::local("the server sends nothing more"))?;
            let FileBytes { stream: number, last } = decode(&slab.note)?;
            if number < self.number {
                continue;
            }
            let len = slab.bytes.len() as u64;
            let stream = self.stream.as_mut().filter(|stream| number == self.number && len <= stream.range.len());
            let stream = stream.ok_or_else(|| Problem::local("the server sends bytes that were not asked for"))?;
            if len == 0 && !last {
                return Err(Problem::local("the server sends a slab without bytes").into());
            }
            let offset = stream.range.start;
            stream.range.start += len;
            if last {
                self.end = Some(offset + len);
                self.stream = None;
            }
            self.slab = Some((offset, slab));
        }
        Ok(())
    }

    fn has(&self, at: u64) -> bool {
        let is_here = self.slab.as_ref().is_some_and(|(offset, slab)| slice_from(*offset, slab, at).is_some());
        is_here || self.end.is_some_and(|end| end <= at)
    }

    /// Sees to it that a stream brings the bytes at an offset, and those behind them before they are read.
    async fn ask_for(&mut self, at: u64, want: usize) -> Result<(), Failure> {
        let command = match &mut self.stream {
            Some(Stream { range, ahead })
                if (range.start..=range.start.saturating_add(SKIPPED_MAX).min(range.end)).contains(&at) =>
            {
                if range.end - at > *ahead / 2 {
                    return Ok(());
                }
                *ahead = ahead.saturating_mul(AHEAD_GROWTH);
                let ReadRange { end, .. } = ReadRange::new(at, *ahead);
                if end == range.end {
                    return Ok(());
                }
                range.end = end;
                FileCommand::ReadOn { end }
            }
            _ => {
                let ahead = AHEAD_MIN.max(want as u64);
                let range = ReadRange::new(at, ahead);
                self.number += 1;
                (self.stream, self.end) = (Some(Stream { range, ahead }), None);
                FileCommand::Read { stream: self.number, range }
            }
        };
        self.command(command).await
    }

    async fn make_room(&mut self) -> Result<(), Failure> {
        self.send_filled().await?;
        if self.filling.is_none() {
            let slab = self.ends().sender.slab().await?;
            self.filling = Some(Filling { slab, offset: 0, len: 0 });
        }
        Ok(())
    }

    async fn flush(&mut self, sync: bool) -> Result<(), Failure> {
        self.send_filled().await?;
        self.command(FileCommand::Flush { sync }).await?;
        match decode(&self.handle.next_message().await?)? {
            FileNews::Done(metadata) => {
                self.news = Some(metadata);
                self.is_unflushed = false;
                Ok(())
            }
            FileNews::Failed(error) => Err(Failure::Server(error)),
        }
    }

    async fn close(&mut self) -> Result<(), Failure> {
        if self.is_unflushed {
            self.flush(false).await?;
        }
        let Ends { sender, receiver } = self.ends.take().expect("a file is closed once");
        // What is in flight would hold up the end.
        drop(receiver);
        sender.finish().await?;
        Ok(self.handle.ended().await?)
    }

    /// Sends what was written and is here.
    async fn send_filled(&mut self) -> Result<(), Failure> {
        if let Some(Filling { slab, offset, len }) = self.filling.take_if(|filling| filling.len > 0) {
            self.ends().sender.send(slab, len, encode(&FileCommand::Write { offset })).await?;
        }
        Ok(())
    }

    async fn command(&mut self, command: FileCommand) -> Result<(), Failure> {
        let sender = &mut self.ends().sender;
        let slab = sender.slab().await?;
        Ok(sender.send(slab, 0, encode(&command)).await?)
    }

    async fn explain(&self, failure: Failure) -> io::Error {
        let (kind, reason) = match failure {
            Failure::Server(error) => (error.kind(), error.reason()),
            Failure::Protocol(problem) => {
                self.handle.abort(&problem.told());
                (io::ErrorKind::InvalidData, problem.reason())
            }
            Failure::Session(error) => match self.last_news().await {
                Some(error) => (error.kind(), error.reason()),
                None => {
                    let error = io::Error::from(error);
                    (error.kind(), error.to_string())
                }
            },
        };
        io::Error::new(kind, format!("{}: {reason}", self.name))
    }

    /// Returns what the server has said before it has ended the session.
    async fn last_news(&self) -> Option<FileError> {
        while let Ok(message) = self.handle.next_message().await {
            if let Ok(FileNews::Failed(error)) = decode(&message) {
                return Some(error);
            }
        }
        None
    }

    fn ends(&mut self) -> &mut Ends {
        self.ends.as_mut().expect("a file that is closed does no work")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(Ends { sender, .. }) = self.ends.take()
            && !self.is_unflushed
        {
            // It needs no more than to be polled once.
            let _ = sender.finish().now_or_never();
        }
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Protocol(problem)
    }
}

/// Returns the bytes of a slab from an offset in the file on, if it has any.
fn slice_from(offset: u64, slab: &Slab, at: u64) -> Option<&[u8]> {
    let skipped = usize::try_from(at.checked_sub(offset)?).ok()?;
    slab.bytes.get(skipped..).filter(|bytes| !bytes.is_empty())
}

/// How much comes with the server's answer, in bytes: the ring of a session that has not grown.
pub(super) const FIRST_AHEAD: u64 = 4 << 20;
/// How much a stream is asked for at first, in bytes. So much travels with its announcement.
const AHEAD_MIN: u64 = 16 << 10;
/// By how much a stream goes further ahead, when half is read.
const AHEAD_GROWTH: u64 = 4;
/// How many bytes are thrown away before another stream is asked for.
const SKIPPED_MAX: u64 = 4 << 20;
