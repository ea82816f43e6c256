//! The end that has the file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt};
use rdmc_wan::{Session, SessionError, SessionHandle, Slab, SlabMut, SlabSender};
use rustix::fs::OFlags;

use super::RemoteFileMetadata;
use super::wire::{FileBytes, FileCommand, FileNews};
use crate::error::Problem;
use crate::manifest::EntryPath;
use crate::remote::wire::{OFFSET_MAX, OUT_OF_RANGE, OpenHow, ReadRange, decode, encode};
use crate::remote::{Tally, blocking};

/// A file that is open for a client.
pub(in crate::remote) struct ServedFile {
    file: Arc<File>,
    path: EntryPath,
    how: OpenHow,
    /// Whether it is forced to the disk with each flush.
    fsync: bool,
    /// What is known of the file since it was opened.
    pub(in crate::remote) metadata: RemoteFileMetadata,
    /// The number of the last stream.
    number: u64,
    /// What is still to be read for it.
    stream: Option<ReadRange>,
}

impl ServedFile {
    /// Opens a file of a directory, `at` a place without symbolic links.
    pub(in crate::remote) fn open(
        dir: &Dir,
        at: &Path,
        path: EntryPath,
        how: OpenHow,
        fsync: bool,
    ) -> io::Result<Self> {
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let mut options = OpenOptions::new();
        options.read(how.read).write(how.write).create(how.create).create_new(how.create_new).custom_flags(flags);
        let file = dir.open_with(at, &options)?.into_std();
        let kind = file.metadata()?.file_type();
        if kind.is_dir() {
            return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
        }
        if !kind.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a device, a socket or a pipe"));
        }
        if how.truncate {
            file.set_len(0)?;
        }
        let metadata = metadata(&file)?;
        Ok(Self { file: Arc::new(file), path, how, fsync, metadata, number: 0, stream: how.first })
    }

    /// Reads and writes for the client of a session, until it closes the file.
    pub(in crate::remote) async fn with(mut self, session: Session) -> (Result<(), Problem>, Tally) {
        let mut tally = Tally::unheard();
        let outcome = self.serve(session, &mut tally).await;
        (outcome, tally)
    }

    async fn serve(&mut self, session: Session, tally: &mut Tally) -> Result<(), Problem> {
        let Session { mut sender, mut receiver, handle, .. } = session;
        let served = async {
            loop {
                let stream = self.stream.filter(|range| range.len() > 0);
                let room = async {
                    match stream {
                        Some(range) => (range, sender.slab().await),
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    slab = receiver.next() => match slab? {
                        Some(slab) => self.obey(slab, &handle, tally).await?,
                        None => break,
                    },
                    (range, slab) = room => match unless_closed(slab)? {
                        Some(slab) => self.send(range, slab, &mut sender, &handle, tally).await?,
                        None => self.stream = None,
                    },
                }
            }
            let file = self.file.clone();
            let RemoteFileMetadata { len, .. } = blocking(move || Ok(metadata(&file)?)).await?;
            tally.file(&self.path, len);
            Ok(())
        };
        // Before the sender is dropped, which would give another reason.
        served.await.inspect_err(|problem: &Problem| handle.abort(&problem.told()))?;
        unless_closed(sender.finish().await).map(drop)
    }

    /// Does what a slab of the client says.
    async fn obey(&mut self, slab: Slab, handle: &SessionHandle, tally: &mut Tally) -> Result<(), Problem> {
        match decode(&slab.note)? {
            FileCommand::Read { stream, range } => {
                if !self.how.read {
                    return Err(Problem::local("the client reads a file that it has not opened for reading"));
                }
                if stream.checked_sub(1) != Some(self.number) {
                    return Err(Problem::local("the client asks for streams out of order"));
                }
                if !range.is_valid() {
                    return Err(Problem::local(OUT_OF_RANGE));
                }
                (self.number, self.stream) = (stream, Some(range));
            }
            FileCommand::ReadOn { end } => {
                // The stream may have found the end of the file meanwhile.
                if let Some(range) = &mut self.stream {
                    if !(range.end..=OFFSET_MAX).contains(&end) {
                        return Err(Problem::local(OUT_OF_RANGE));
                    }
                    range.end = end;
                }
            }
            FileCommand::Write { offset } => {
                if !self.how.write {
                    return Err(Problem::local("the client writes to a file that it has not opened for writing"));
                }
                let len = slab.bytes.len() as u64;
                if offset.checked_add(len).is_none_or(|end| end > OFFSET_MAX) {
                    return Err(Problem::local(OUT_OF_RANGE));
                }
                self.stream = None;
                let file = self.file.clone();
                let written = blocking(move || Ok(file.write_all_at(&slab.bytes, offset))).await?;
                or_told(written, handle).await?;
                tally.moved(len);
            }
            FileCommand::Flush { sync } => {
                let (file, syncs) = (self.file.clone(), self.how.write && (sync || self.fsync));
                let flushed = blocking(move || {
                    let synced = if syncs { file.sync_all() } else { Ok(()) };
                    Ok(synced.and_then(|()| metadata(&file)))
                });
                let metadata = or_told(flushed.await?, handle).await?;
                unless_closed(handle.send_message(encode(&FileNews::Done(metadata))).await)?;
            }
        }
        Ok(())
    }

    /// Sends the first bytes of what is to be read for the stream.
    async fn send(
        &mut self,
        range: ReadRange,
        mut slab: SlabMut,
        sender: &mut SlabSender,
        handle: &SessionHandle,
        tally: &mut Tally,
    ) -> Result<(), Problem> {
        let want = usize::try_from(range.len()).unwrap_or(usize::MAX).min(slab.len());
        let (file, offset) = (self.file.clone(), range.start);
        let read = blocking(move || {
            let read = read_at(&file, &mut slab[..want], offset);
            Ok((slab, read))
        });
        let (slab, read) = read.await?;
        let len = or_told(read, handle).await?;
        let last = len < want;
        self.stream = (!last).then_some(ReadRange { start: offset + len as u64, ..range });
        tally.moved(len as u64);
        let note = FileBytes { stream: self.number, last };
        unless_closed(sender.send(slab, len, encode(&note)).await).map(drop)
    }
}

/// Tells the client of an error.
async fn or_told<T>(outcome: io::Result<T>, handle: &SessionHandle) -> Result<T, Problem> {
    match outcome {
        Ok(value) => Ok(value),
        Err(error) => {
            let problem = Problem::local(&error);
            handle.send_message(encode(&FileNews::Failed(error.into()))).await?;
            Err(problem)
        }
    }
}

/// Returns `None` if the client has closed the file, so that nothing more is for it.
fn unless_closed<T>(outcome: Result<T, SessionError>) -> Result<Option<T>, Problem> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(SessionError::Stopped | SessionError::Closed) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads until the memory is full, or the file ends.
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < bytes.len() {
        match file.read_at(&mut bytes[len..], offset + len as u64) {
            Ok(0) => break,
            Ok(now) => len += now,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

fn metadata(file: &File) -> io::Result<RemoteFileMetadata> {
    let found = file.metadata()?;
    Ok(RemoteFileMetadata {
        len: found.len(),
        mode: found.mode(),
        mtime_s: found.mtime(),
        mtime_ns: u32::try_from(found.mtime_nsec()).unwrap_or(0),
    })
}
