//! Files as they arrive: each in a temporary file, or several short ones together from memory. They take their places
//! when they are complete.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cap_std::fs::{Dir, MetadataExt};
use rdmc::{AllocatingAhead, Memory};
use rustix::fs::{FallocateFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::{MODE_BITS, Store, exists, looks_the_same, open_the_same, refused};
use crate::error::{Context, Problem};
use crate::manifest::{Entry, EntryKind};
use crate::mapping;
use crate::partial::{Part, TransferMark};
use crate::reservation::Reservation;
use crate::size::ByteSize;
use crate::wording::Wording;
use crate::words::printable;

impl Store {
    /// Makes the temporary file for an entry, and reserves its space.
    ///
    /// In a delta transfer the file begins with bytes that are here already: a part, the file in place if size and time
    /// are equal, or the file from `before` a failure, whose memory may still be in use.
    pub(crate) fn begin(
        &self,
        entry: &Entry,
        size: u64,
        before: Option<IncomingFile>,
    ) -> Result<IncomingFile, Problem> {
        self.try_to_begin(entry, size, before).map_err(|error| self.not_stored(entry, size, &error))
    }

    /// Says why a file cannot be stored.
    fn not_stored(&self, entry: &Entry, size: u64, error: &io::Error) -> Problem {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Problem::local(format!(
                "no space for {} ({}): {error}; {}, then run {} again",
                entry.path,
                ByteSize(size),
                self.no_space(),
                self.wording.sender
            )),
            io::ErrorKind::FileTooLarge => Problem::local(format!(
                "{} ({}) is longer than the file system or the limit of {} (ulimit -f) allows: {error}",
                entry.path,
                ByteSize(size),
                self.wording.receiver
            )),
            _ => refused(entry, format!(": {error}")),
        }
    }

    fn try_to_begin(&self, entry: &Entry, size: u64, before: Option<IncomingFile>) -> io::Result<IncomingFile> {
        let (parents, name) = entry.path.split();
        let parent = self.parent(&parents)?;
        // The file exists as long as it is open.
        let before = before.map(IncomingFile::remove).transpose()?;
        // A part cannot be moved to another file system.
        let near = are_near(&parent, &self.dir)?;
        // An empty file has no part.
        let part = match self.mark.is_some() && near && size > 0 {
            true => self.parts.open(entry, size).or_else(|_| Part::elsewhere(&parent))?,
            false => Part::elsewhere(&parent)?,
        };
        let mut incoming = self.incoming(parent, name, part);
        if incoming.part.found {
            self.note_taken(size);
            incoming.begins();
            return Ok(incoming);
        }
        self.taking_space(|| reserve(&incoming.part.file, size))?;
        // One that replaces an equal file gives its space back, and one that begins again has taken it already.
        if before.is_none() && !incoming.replaces_equal(entry, size) {
            self.note_taken(size);
        }
        if self.delta && size > 0 {
            let source = before.or_else(|| self.in_place(entry, size));
            // A failed copy costs only network traffic.
            incoming.part.found = source.is_some_and(|source| copy(&source, &incoming.part.file, size).is_ok());
        }
        Ok(incoming)
    }

    /// Puts into place short files that have arrived together, one behind the other. Returns how many are in place, and
    /// why the next one is not.
    pub(crate) fn place_all(&self, files: &[(Entry, u64)], mut bytes: &[u8]) -> (usize, Result<(), Problem>) {
        let mut places = Places { store: self, parts: self.parts_dir(), last: None };
        let place = |(entry, size): &(Entry, u64)| {
            let content = bytes.split_off(..usize::try_from(*size)?).ok_or_else(|| refused(entry, " is incomplete"))?;
            let written = places.begin(entry).and_then(|incoming| {
                self.taking_space(|| incoming.write(content))?;
                Ok(incoming)
            });
            let incoming = written.map_err(|error| self.not_stored(entry, *size, &error))?;
            if !incoming.replaces_equal(entry, *size) {
                self.note_taken(*size);
            }
            incoming.move_into_place(entry)
        };
        let mut outcomes = files.iter().map(place).enumerate();
        let failed = outcomes.find_map(|(at, outcome)| outcome.err().map(|problem| (at, problem)));
        let synced = places.sync();
        let (placed, outcome) = failed.map_or((files.len(), synced), |(at, problem)| (at, Err(problem)));
        if placed > 0 {
            self.mark.iter().for_each(|mark| mark.note_files(files[..placed].iter().map(|(entry, _)| entry)));
        }
        (placed, outcome)
    }

    /// Opens the directory of parts, which is there while the transfer has a mark.
    fn parts_dir(&self) -> Option<Dir> {
        self.mark.as_ref().and_then(|_| self.parts.dir().ok().flatten())
    }

    /// In a delta transfer, reads what is here of short files that arrive together. Tells whether there is something.
    pub(crate) fn read_known(&self, files: &[(Entry, u64)], mut bytes: &mut [u8]) -> Result<bool, Problem> {
        let mut has_some = false;
        for (entry, size) in files.iter().filter(|_| self.delta) {
            let place = bytes.split_off_mut(..usize::try_from(*size)?).expect("there is room for all");
            let known = self.known(entry, *size).filter(|_| *size > 0);
            // What cannot be read costs only network traffic.
            has_some |= known.is_some_and(|known| known.read_exact_at(place, 0).is_ok());
        }
        Ok(has_some)
    }

    /// Does what takes space. If there is none, removes parts that nothing uses, and tries again.
    fn taking_space(&self, work: impl Fn() -> io::Result<()>) -> io::Result<()> {
        match work() {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.parts.remove_unused(Duration::ZERO);
                work()
            }
            done => done,
        }
    }

    fn note_taken(&self, bytes: u64) {
        self.reservation.iter().for_each(|reservation| reservation.note_taken(bytes));
    }

    fn incoming(&self, parent: Arc<Dir>, name: &OsStr, part: Part) -> IncomingFile {
        let (name, mark, reservation) = (name.to_owned(), self.mark.clone(), self.reservation.clone());
        let (fsync, replaces, wording) = (self.fsync, !self.no_overwrite, self.wording);
        IncomingFile {
            parent,
            part,
            name,
            fsync,
            syncs_parent: fsync,
            replaces,
            mark,
            allocating: None,
            _reservation: reservation,
            wording,
        }
    }
}

/// Tells whether two directories are in one file system.
fn are_near(one: &Dir, other: &Dir) -> io::Result<bool> {
    Ok(one.dir_metadata()?.dev() == other.dir_metadata()?.dev())
}
/// Where short files of one message go, one after the other. They often follow each other in one directory.
struct Places<'a> {
    store: &'a Store,
    /// The directory of parts, where files are written before they take their places.
    parts: Option<Dir>,
    last: Option<Place>,
}

struct Place {
    path: PathBuf,
    dir: Arc<Dir>,
    /// Whether files of the directory of parts can be moved there.
    near: bool,
}

impl Places<'_> {
    /// Makes a temporary file, which never stays.
    fn begin(&mut self, entry: &Entry) -> io::Result<IncomingFile> {
        let (path, name) = entry.path.split();
        if self.last.as_ref().is_none_or(|last| last.path != path) {
            self.sync().map_err(|problem| io::Error::other(problem.reason()))?;
            let dir = self.store.parent(&path)?;
            let near = self.parts.as_ref().map_or(Ok(false), |parts| are_near(parts, &dir))?;
            self.last = Some(Place { path, dir, near });
        }
        let Place { dir, near, .. } = self.last.as_ref().expect("it was just found");
        let part = Part::elsewhere(self.parts.as_ref().filter(|_| *near).unwrap_or(dir))?;
        let mut incoming = self.store.incoming(dir.clone(), name, part);
        incoming.syncs_parent = false;
        Ok(incoming)
    }

    /// Forces the names of files to the disk, if that is wanted.
    fn sync(&self) -> Result<(), Problem> {
        match &self.last {
            Some(Place { path, dir, .. }) if self.store.fsync => {
                let synced = dir.open(".").and_then(|dir| dir.sync_all());
                synced.with_context(|| printable(&path.to_string_lossy()))
            }
            _ => Ok(()),
        }
    }
}

/// A file that arrives.
///
/// When it is dropped, it is removed, unless it has bytes and parts stay.
#[derive(Debug)]
pub(crate) struct IncomingFile {
    parent: Arc<Dir>,
    part: Part,
    name: OsString,
    fsync: bool,
    /// Whether its directory is forced to the disk, too.
    syncs_parent: bool,
    /// Whether it may replace another file.
    replaces: bool,
    mark: Option<Arc<TransferMark>>,
    /// Allocates pages of a new file ahead, while it is received.
    allocating: Option<AllocatingAhead>,
    /// Kept until the file is in place or dropped, which may be after the end of its transfer.
    _reservation: Option<Arc<Reservation>>,
    wording: Wording,
}

impl IncomingFile {
    /// Tells whether the file may have bytes already.
    pub(crate) fn has_some(&self) -> bool {
        self.part.found
    }

    /// Maps the file for receiving.
    pub(crate) fn memory(&mut self, size: u64) -> Result<Memory, Problem> {
        let len = usize::try_from(size).context("the file is longer than the address space")?;
        let mut memory = mapping::to_receive(&self.part.file, len)?;
        if !self.has_some() {
            self.allocating = memory.allocate_ahead();
        }
        Ok(memory)
    }

    /// Tells whether a file is in place whose size and time are those of the entry.
    fn replaces_equal(&self, entry: &Entry, size: u64) -> bool {
        self.parent.symlink_metadata(&self.name).is_ok_and(|found| looks_the_same(&found, entry, size))
    }

    /// Reads the bytes that the file has already, if it is not mapped.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.part.file.read_exact_at(bytes, 0)
    }

    /// Writes all bytes, if the file is not mapped.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.part.file.write_all_at(bytes, 0)
    }

    /// Writes bytes at a place of the file, if it is not mapped.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.part.file.write_all_at(bytes, offset)
    }

    /// Notes that bytes begin to arrive in the file.
    pub(crate) fn begins(&mut self) {
        if let Some(mark) = &self.mark {
            self.part.stay(true);
            mark.note_some();
        }
    }

    /// Removes the file, because its bytes are wrong.
    pub(crate) fn discard(mut self) {
        self.part.stay(false);
    }

    /// Removes the file, and returns it open.
    fn remove(mut self) -> io::Result<std::fs::File> {
        self.part.stay(false);
        self.part.file.try_clone()
    }

    /// Sets the file's mode and time, and moves it into place. Nothing may write to the mapping any more.
    pub(crate) fn keep(self, entry: &Entry) -> Result<(), Problem> {
        let mark = self.mark.clone();
        self.move_into_place(entry)?;
        mark.iter().for_each(|mark| mark.note_files([entry]));
        Ok(())
    }

    fn move_into_place(mut self, entry: &Entry) -> Result<(), Problem> {
        // It would change the file's time.
        drop(self.allocating.take());
        match self.put_in_place(entry) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !self.replaces => {
                // An interrupted transfer may have put it there.
                if !self.is_in_place(entry) {
                    return Err(exists(entry, &self.wording));
                }
                self.part.stay(false);
            }
            placed => placed.with_context(|| entry.path.to_string())?,
        }
        if self.syncs_parent {
            let synced = self.parent.open(".").and_then(|dir| dir.sync_all());
            synced.with_context(|| entry.path.to_string())?;
        }
        Ok(())
    }

    fn put_in_place(&mut self, entry: &Entry) -> io::Result<()> {
        let size = self.part.file.metadata()?.len();
        if entry.kind != (EntryKind::File { size }) {
            return Err(io::Error::other(format!("the temporary file has {size} bytes")));
        }
        if self.fsync {
            self.part.file.sync_all()?;
        }
        keep_metadata(&self.part.file, entry)?;
        match self.part.rename(&self.parent, &self.name, self.replaces) {
            // It is another mount of the same file system.
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
                let mut part = Part::elsewhere(&self.parent)?;
                copy(&self.part.file, &part.file, size)?;
                if self.fsync {
                    part.file.sync_all()?;
                }
                keep_metadata(&part.file, entry)?;
                part.rename(&self.parent, &self.name, self.replaces)?;
                self.part.stay(false);
                Ok(())
            }
            renamed => renamed,
        }
    }

    /// Tells whether the file in place has the same size, time and bytes.
    fn is_in_place(&self, entry: &Entry) -> bool {
        let EntryKind::File { size } = entry.kind else { return false };
        let found = open_the_same(&self.parent, Path::new(&self.name), entry, size);
        found.is_some_and(|found| have_the_same(&found, &self.part.file, size).unwrap_or(false))
    }
}

/// Copies a file's bytes. It shares no blocks, because a later write to a shared block might find no space.
fn copy(from: &std::fs::File, to: &std::fs::File, size: u64) -> io::Result<()> {
    let mut bytes = vec![0; PIECE_LEN];
    pieces(size).try_for_each(|(at, len)| {
        from.read_exact_at(&mut bytes[..len], at)?;
        to.write_all_at(&bytes[..len], at)
    })
}

/// Tells whether two files have the same bytes.
fn have_the_same(one: &std::fs::File, other: &std::fs::File, size: u64) -> io::Result<bool> {
    let (mut left, mut right) = (vec![0; PIECE_LEN], vec![0; PIECE_LEN]);
    for (at, len) in pieces(size) {
        one.read_exact_at(&mut left[..len], at)?;
        other.read_exact_at(&mut right[..len], at)?;
        if left[..len] != right[..len] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Cuts a file into pieces: their offsets and lengths.
fn pieces(size: u64) -> impl Iterator<Item = (u64, usize)> {
    let len = move |at| usize::try_from(size - at).map_or(PIECE_LEN, |left| left.min(PIECE_LEN));
    (0..size).step_by(PIECE_LEN).map(move |at| (at, len(at)))
}

/// Sets the modification time, and the lowest nine bits of the mode.
pub(super) fn keep_metadata(file: &std::fs::File, entry: &Entry) -> io::Result<()> {
    file.set_permissions(std::fs::Permissions::from_mode(entry.mode & MODE_BITS))?;
    let mtime = Timespec { tv_sec: entry.mtime_s, tv_nsec: entry.mtime_ns.into() };
    let unchanged = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    rustix::fs::futimens(file, &Timestamps { last_access: unchanged, last_modification: mtime })?;
    Ok(())
}

/// Reserves space. A full disk is an error now, and would be a fault while the mapping is written.
fn reserve(file: &std::fs::File, size: u64) -> io::Result<()> {
    if size == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let zeros = vec![0; PIECE_LEN];
            pieces(size).try_for_each(|(at, len)| file.write_all_at(&zeros[..len], at))
        }
        outcome => Ok(outcome?),
    }
}
/// Length of a piece in bytes.
const PIECE_LEN: usize = 1 << 20;
