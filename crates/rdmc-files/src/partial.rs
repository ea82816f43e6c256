//! Parts of files: what has arrived of files that are not complete. They stay when a transfer is interrupted, so that
//! the next transfer brings only the rest.
//!
//! All parts are in one directory below the receiver's, [`DIR`]. It exists only while it contains something, and only
//! its owner may enter it. The name of a part follows from the path and size of its file. A file whose part another
//! transfer has open gets another part. Each transfer that is under way or interrupted has a mark.
//!
//! Parts and marks are locked while they are in use, if the file system has locks. The sender compares parts with its
//! own bytes, so that nothing depends on how a transfer has ended.
//!
//! A part that no later transfer can find has a random name, and is called a stray. Its transfer removes it. If that
//! process was killed, another one removes it after a day.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use cap_std::fs::{Dir, DirBuilder, DirBuilderExt, Metadata, MetadataExt as _, OpenOptions, OpenOptionsExt};
use rustix::fs::{AtFlags, FlockOperation, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::manifest::{Entry, Manifest};

/// The directory of parts.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    root: Arc<Dir>,
}

/// A temporary file with nothing, some or all bytes of a file. When it is dropped, it is removed unless it is to stay.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) file: File,
    dir: Dir,
    name: OsString,
    /// Whether an earlier transfer has left it.
    pub(crate) found: bool,
    /// Whether a later transfer finds it by its name.
    lasting: bool,
    /// The directory of parts, if it is in there.
    parts: Option<Parts>,
    stays: bool,
}

/// The mark of a transfer under way. When it is dropped, the mark is removed, unless some bytes of the transfer stay.
#[derive(Debug)]
pub(crate) struct TransferMark {
    parts: Parts,
    name: OsString,
    /// The mark's file, locked.
    _mark: File,
    /// Whether some bytes of the transfer are here.
    some: AtomicBool,
    done: AtomicBool,
}

impl Parts {
    pub(crate) fn new(root: Arc<Dir>) -> Self {
        Self { root }
    }

    /// Returns the bytes that interrupted transfers have left for later ones, and that no transfer uses; `None` if
    /// there is nothing.
    pub(crate) fn kept(&self) -> Option<u64> {
        let (mut count, mut bytes) = (0, 0);
        self.visit_unused(
            |name| !is_stray(name),
            |_, found| {
                count += 1;
                bytes += found.blocks() * 512;
                false
            },
        );
        (count > 0).then_some(bytes)
    }

    /// Removes what no transfer uses and what did not change for so long; strays after a day at most.
    pub(crate) fn remove_unused(&self, for_at_least: Duration) {
        self.visit_unused(any, |name, found| {
            let limit = if is_stray(name) { for_at_least.min(STRAYS_KEPT_FOR) } else { for_at_least };
            age(found) >= limit
        });
        self.remove_if_empty();
    }

    /// Removes the unused parts of files, whatever their sizes were.
    pub(crate) fn forget<'a>(&self, files: impl IntoIterator<Item = &'a Entry>) {
        // Usually there is no part.
        let hashes = || files.into_iter().map(|entry| hash_of(entry).into_bytes()).collect::<HashSet<_>>();
        let paths = LazyCell::new(hashes);
        self.visit_unused(|name| path_of(name).is_some_and(|path| paths.contains(path)), |_, _| true);
    }

    /// Removes the unused parts of these files, whatever their sizes were, and their mark.
    pub(crate) fn forget_all(&self, manifest: &Manifest) {
        // Usually there is no such directory.
        if !self.dir().is_ok_and(|dir| dir.is_some()) {
            return;
        }
        let paths: HashSet<Vec<u8>> = manifest.files().map(|(entry, _)| hash_of(entry).into_bytes()).collect();
        let mark = mark_of(manifest);
        let is_theirs = |name: &OsStr| name == mark || path_of(name).is_some_and(|path| paths.contains(path));
        self.visit_unused(is_theirs, |_, _| true);
        self.remove_if_empty();
    }

    fn visit_unused(&self, which: impl Fn(&OsStr) -> bool, removes: impl FnMut(&OsStr, &Metadata) -> bool) {
        if let Ok(Some(dir)) = self.dir() {
            visit_unused(&dir, which, removes);
        }
    }

    /// Tells whether there is a part of this file.
    pub(crate) fn have(&self, entry: &Entry, size: u64) -> bool {
        let found = self.dir().ok().flatten().and_then(|dir| dir.symlink_metadata(name_of(entry, size)).ok());
        found.is_some_and(|found| found.is_file() && found.len() == size)
    }

    /// Makes the mark of a transfer. The paths of the files identify the transfer, so that it continues an interrupted
    /// one.
    pub(crate) fn begin(&self, manifest: &Manifest) -> io::Result<TransferMark> {
        let name = mark_of(manifest);
        let mark = self.in_dir(|dir| Ok(dir.open_with(&name, &options())?.into_std()))?;
        // Another transfer of these files may have it locked.
        lock(&mark);
        mark.set_modified(SystemTime::now())?;
        let (some, done) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(TransferMark { parts: self.clone(), name, _mark: mark, some, done })
    }

    /// Opens the part of a file, or makes it. If another transfer has it open, this makes a stray.
    pub(crate) fn open(&self, entry: &Entry, size: u64) -> io::Result<Part> {
        let name = name_of(entry, size);
        self.in_dir(|dir| {
            for _ in 0..ATTEMPTS_MAX {
                let file = match dir.open_with(&name, &options()) {
                    Ok(file) => file.into_std(),
                    // A part gets the file's mode just before it is moved into place. If it is old, its process was
                    // killed at that moment.
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                        if age(&dir.symlink_metadata(&name)?) < RENAMED_WITHIN {
                            break;
                        }
                        dir.remove_file(&name)?;
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                if !lock(&file) {
                    // It may be locked only while another process looks at it.
                    std::thread::sleep(PAUSE);
                    continue;
                }
                if is_named(dir, &name, &file) && file.metadata()?.is_file() && file.metadata()?.nlink() == 1 {
                    let found = file.metadata()?.len() == size && size > 0;
                    if !found {
                        file.set_len(0)?;
                    }
                    let (dir, name, parts) = (dir.try_clone()?, name.clone(), Some(self.clone()));
                    return Ok(Part { file, dir, name, found, lasting: true, parts, stays: false });
                }
            }
            new_part(dir, Some(self.clone()))
        })
    }

    /// Does `work` in the directory. Makes the directory if needed, because another transfer may just have removed it.
    fn in_dir<T>(&self, work: impl Fn(&Dir) -> io::Result<T>) -> io::Result<T> {
        let mut attempts = 0..ATTEMPTS_MAX;
        loop {
            let made = self.root.create_dir_with(DIR, DirBuilder::new().mode(0o700));
            let is_there = |error: io::Error| match error.kind() {
                io::ErrorKind::AlreadyExists => Ok(()),
                _ => Err(error),
            };
            let made = made.or_else(is_there);
            let done = made.and_then(|()| self.dir()?.ok_or(io::ErrorKind::NotFound.into())).and_then(|dir| work(&dir));
            match done {
                Err(error) if error.kind() == io::ErrorKind::NotFound && attempts.next().is_some() => {}
                done => return done,
            }
        }
    }

    /// Returns the directory if it exists.
    ///
    /// # Errors
    /// It is not a directory, or others can reach what is in it.
    pub(crate) fn dir(&self) -> io::Result<Option<Dir>> {
        match self.root.symlink_metadata(DIR) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(io::Error::other(format!("{DIR} is not a directory"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        let dir = self.root.open_dir(DIR)?;
        let found = dir.dir_metadata()?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            return Err(io::Error::other(format!("other users can access {DIR}")));
        }
        Ok(Some(dir))
    }

    fn remove_if_empty(&self) {
        // It is not empty while other transfers use it.
        let _ = self.root.remove_dir(DIR);
    }
}

impl Part {
    /// Makes a stray in another directory.
    pub(crate) fn elsewhere(dir: &Dir) -> io::Result<Self> {
        new_part(dir, None)
    }

    /// Sets whether the part stays when it is dropped. A stray never stays.
    pub(crate) fn stay(&mut self, stays: bool) {
        self.stays = stays && self.lasting;
    }

    /// Gives the file its name. If `replaces`, it may replace another file.
    pub(crate) fn rename(&mut self, to: &Dir, name: &OsStr, replaces: bool) -> io::Result<()> {
        if !is_named(&self.dir, &self.name, &self.file) {
            return Err(io::Error::other("its temporary file was removed or replaced"));
        }
        if replaces {
            self.dir.rename(&self.name, to, name)?;
        } else {
            match rustix::fs::renameat_with(&self.dir, &self.name, to, name, RenameFlags::NOREPLACE) {
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => self.link(to, name)?,
                renamed => renamed?,
            }
        }
        // Nothing has the temporary name any more.
        self.stays = true;
        Ok(())
    }

    /// Gives the file its name if the file system cannot rename without replacing.
    fn link(&self, to: &Dir, name: &OsStr) -> io::Result<()> {
        match rustix::fs::linkat(&self.dir, &self.name, to, name, AtFlags::empty()) {
            Ok(()) => self.dir.remove_file(&self.name),
            // The file system has no links either: a file that appears between these two calls is replaced.
            Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP) => match to.symlink_metadata(name) {
                Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.dir.rename(&self.name, to, name),
                Err(error) => Err(error),
            },
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // It may have been moved into place, or removed by another process.
        if !self.stays
            && is_named(&self.dir, &self.name, &self.file)
            && let Err(error) = self.dir.remove_file(&self.name)
        {
            tracing::warn!(name = ?self.name, %error, "the temporary file could not be removed");
        }
        self.parts.iter().for_each(Parts::remove_if_empty);
    }
}

impl TransferMark {
    /// Notes that some bytes of the transfer are here.
    pub(crate) fn note_some(&self) {
        self.some.store(true, Ordering::Release);
    }

    /// Removes what other transfers have left of files that are in place now.
    pub(crate) fn note_files<'a>(&self, files: impl IntoIterator<Item = &'a Entry>) {
        self.note_some();
        self.parts.forget(files);
    }

    /// Notes that every file is in place.
    pub(crate) fn note_done(&self) {
        self.done.store(true, Ordering::Release);
    }
}

impl Drop for TransferMark {
    fn drop(&mut self) {
        if self.done.load(Ordering::Acquire) || !self.some.load(Ordering::Acquire) {
            if let Ok(Some(dir)) = self.parts.dir() {
                let _ = dir.remove_file(&self.name);
            }
            self.parts.remove_if_empty();
        }
    }
}

/// Removes from a directory the unused strays that did not change for so long.
pub(crate) fn remove_strays(dir: &Dir, for_at_least: Duration) {
    let user = rustix::process::geteuid().as_raw();
    let removes = |_: &OsStr, found: &Metadata| found.is_file() && found.uid() == user && age(found) >= for_at_least;
    visit_unused(dir, is_stray, removes);
}

/// Tells whether a directory takes names for one that differ only in upper and lower case. It makes a file to find out.
///
/// # Errors
/// No file can be made.
pub(crate) fn folds_case(dir: &Dir) -> io::Result<bool> {
    let probe = Part::elsewhere(dir)?;
    Ok(dir.symlink_metadata(probe.name.to_ascii_uppercase()).is_ok())
}

/// Tells whether a name is that of a stray.
pub(crate) fn is_stray(name: &OsStr) -> bool {
    let digits = name.as_bytes().strip_prefix(STRAY.as_bytes()).and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
    digits.is_some_and(|digits| digits.len() == 16 && digits.iter().all(u8::is_ascii_hexdigit))
}

/// Tells whether a name is that of parts or of a stray, which nobody is to see.
pub(crate) fn is_hidden(name: &OsStr) -> bool {
    name == DIR || is_stray(name)
}

/// Locks each unused file with a wanted name, and removes it if `removes` says so.
fn visit_unused(dir: &Dir, which: impl Fn(&OsStr) -> bool, mut removes: impl FnMut(&OsStr, &Metadata) -> bool) {
    for entry in dir.entries().into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !which(&name) {
            continue;
        }
        let Ok(found) = entry.metadata() else { continue };
        let _locked = match entry.open_with(options().create(false)).map(cap_std::fs::File::into_std) {
            Ok(file) if lock(&file) && is_named(dir, &name, &file) => Some(file),
            Ok(_) => continue,
            // It may be about to be moved into place, with a mode that forbids to open it.
            Err(_) if age(&found) < RENAMED_WITHIN => continue,
            Err(_) => None,
        };
        if removes(&name, &found)
            && let Err(error) = dir.remove_file(&name)
        {
            tracing::warn!(?name, %error, "a part of an interrupted transfer could not be removed");
        }
    }
}

/// Accepts every name.
fn any(_: &OsStr) -> bool {
    true
}

/// Returns how long ago a file changed. The time of the last write does not tell: a part that is almost complete has
/// the sender's.
fn age(found: &Metadata) -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_secs(u64::try_from(found.ctime()).unwrap_or(0)))
}

/// Makes a stray that only its owner can read until it is complete.
fn new_part(dir: &Dir, parts: Option<Parts>) -> io::Result<Part> {
    for _ in 0..ATTEMPTS_MAX {
        // Seeded by the operating system. A guessed name does no harm, because an existing file is never opened.
        let name = OsString::from(format!("{STRAY}{:016x}{SUFFIX}", RandomState::new().build_hasher().finish()));
        match dir.open_with(&name, options().create(false).create_new(true)) {
            Ok(file) => {
                let (file, dir) = (file.into_std(), dir.try_clone()?);
                lock(&file);
                return Ok(Part { file, dir, name, found: false, lasting: false, parts, stays: false });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no free temporary name was found"))
}

/// Returns the options to open files here: for reading and writing, made if missing, never a link or a pipe.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    options.read(true).write(true).create(true).mode(0o600).custom_flags(flags);
    options
}

/// Tells whether a name is that of an open file.
fn is_named(dir: &Dir, name: &OsStr, file: &File) -> bool {
    let (named, open) = (dir.symlink_metadata(name), file.metadata());
    named.is_ok_and(|named| open.is_ok_and(|open| (named.dev(), named.ino()) == (open.dev(), open.ino())))
}

/// Returns the name of a file's part.
fn name_of(entry: &Entry, size: u64) -> OsString {
    OsString::from(format!("{}-{size:x}{SUFFIX}", hash_of(entry)))
}

/// Returns the beginning of the names of a file's parts.
fn hash_of(entry: &Entry) -> String {
    let mut hash = blake3::Hasher::new();
    add_path(&mut hash, entry);
    hash.finalize().to_hex()[..HASH_LEN].to_owned()
}

/// Returns the beginning of a part's name, which identifies the path.
fn path_of(name: &OsStr) -> Option<&[u8]> {
    let (path, rest) = name.as_bytes().split_at_checked(HASH_LEN)?;
    (rest.starts_with(b"-") && rest.ends_with(SUFFIX.as_bytes())).then_some(path)
}

/// Returns the name of a transfer's mark.
fn mark_of(manifest: &Manifest) -> OsString {
    let mut hash = blake3::Hasher::new();
    manifest.files().for_each(|(entry, _)| add_path(&mut hash, entry));
    OsString::from(format!("{}.transfer", &hash.finalize().to_hex()[..HASH_LEN]))
}

fn add_path(hash: &mut blake3::Hasher, entry: &Entry) {
    hash.update(&(entry.path.0.len() as u64).to_le_bytes());
    for name in &entry.path.0 {
        hash.update(&(name.len() as u64).to_le_bytes()).update(name);
    }
}

/// Locks a file while it is open. Tells whether no other process has it locked. On file systems without locks it always
/// succeeds.
fn lock(file: &File) -> bool {
    !matches!(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK))
}

/// Name of the directory of parts. No file of a transfer may have it.
pub(crate) const DIR: &str = ".rdmc-partial";
/// How long the parts of an interrupted transfer are kept.
pub(crate) const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long strays are left alone, for file systems without locks.
pub(crate) const STRAYS_KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// How long a part with its final mode may take to be moved into place.
const RENAMED_WITHIN: Duration = Duration::from_secs(60);
/// Beginning of the names of strays, and end of the names of all parts.
const STRAY: &str = ".rdmc-";
const SUFFIX: &str = ".part";
/// Number of hexadecimal digits of a path's hash in a name.
const HASH_LEN: usize = 32;
/// Greatest number of attempts.
const ATTEMPTS_MAX: u32 = 16;
/// How long to wait for a process that only looks at a part.
const PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests;
