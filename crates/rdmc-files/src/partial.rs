//! What has arrived of files that are not whole: kept when a transfer is interrupted, so that the next one brings the rest.
//!
//! Everything is in one directory below the receiver's, [`DIR`], which is there only as long as something is in it, and which
//! nobody but its owner may look into. A file has its part there, under a name that follows from its path and size, unless
//! somebody else has that part open; and each transfer under way, or interrupted, has a mark. Whoever uses one of these has it
//! locked, where the file system has locks. The sender compares what is here with its own bytes, so that nothing depends on how
//! a transfer has ended.
//!
//! A part that cannot be found again has a random name. It goes with whoever made it; after a day, if that was killed.

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

/// A file of which nothing, some or everything is here. Dropped, it goes, unless it is to stay.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) file: File,
    dir: Dir,
    name: OsString,
    /// Whether it was here before.
    pub(crate) found: bool,
    /// Whether it is found again by its name.
    lasting: bool,
    /// The directory of parts, if it is there.
    parts: Option<Parts>,
    stays: bool,
}

/// A transfer under way. Dropped, its mark goes, unless it was interrupted when some of it was here.
#[derive(Debug)]
pub(crate) struct Ongoing {
    parts: Parts,
    name: OsString,
    /// The mark, locked.
    _mark: File,
    /// Whether some of it is here.
    some: AtomicBool,
    done: AtomicBool,
}

impl Parts {
    pub(crate) fn new(root: Arc<Dir>) -> Self {
        Self { root }
    }

    /// Returns the bytes that are here of interrupted transfers, and that nobody uses; none if nothing is.
    pub(crate) fn kept(&self) -> Option<u64> {
        let (mut count, mut bytes) = (0, 0);
        self.visit_unused(any, |_, found| {
            count += 1;
            bytes += found.blocks() * 512;
            false
        });
        (count > 0).then_some(bytes)
    }

    /// Removes what nobody uses, if it was not changed for so long; after a day, if it cannot be found again.
    pub(crate) fn remove_unused(&self, for_at_least: Duration) {
        self.visit_unused(any, |name, found| {
            let limit = if is_stray(name) { for_at_least.min(STRAYS_KEPT_FOR) } else { for_at_least };
            age(found) >= limit
        });
        self.remove_if_empty();
    }

    /// Removes what is here of a file, of whatever size, unless somebody uses it.
    pub(crate) fn forget(&self, entry: &Entry) {
        let path = hash_of(entry);
        self.visit_unused(|name| path_of(name) == Some(path.as_bytes()), |_, _| true);
    }

    /// Removes what earlier transfers have left of these files, of whatever size, unless somebody uses it.
    pub(crate) fn forget_all(&self, manifest: &Manifest) {
        // Mostly there is nothing.
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

    /// Tells whether a file's part is here.
    pub(crate) fn have(&self, entry: &Entry, size: u64) -> bool {
        let found = self.dir().ok().flatten().and_then(|dir| dir.symlink_metadata(name_of(entry, size)).ok());
        found.is_some_and(|found| found.is_file() && found.len() == size)
    }

    /// Notes that a transfer begins, which is known by the paths of its files: it ends an earlier one of these.
    pub(crate) fn begin(&self, manifest: &Manifest) -> io::Result<Ongoing> {
        let name = mark_of(manifest);
        let mark = self.in_dir(|dir| Ok(dir.open_with(&name, &options())?.into_std()))?;
        // Another transfer of these files may have it.
        lock(&mark);
        mark.set_modified(SystemTime::now())?;
        let (some, done) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Ongoing { parts: self.clone(), name, _mark: mark, some, done })
    }

    /// Opens the part of a file, or makes it. If somebody has it open, the file gets another one, which is not found again.
    pub(crate) fn open(&self, entry: &Entry, size: u64) -> io::Result<Part> {
        let name = name_of(entry, size);
        self.in_dir(|dir| {
            for _ in 0..ATTEMPTS_MAX {
                let file = match dir.open_with(&name, &options()) {
                    Ok(file) => file.into_std(),
                    // Its owner may not write it: it is about to take its name, or was when somebody was killed.
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
                    // For a moment it may be somebody who only looks.
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

    /// Does something in the directory, which is made if it is not there; another transfer that ends may just remove it.
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

    /// Returns the directory, if it is there.
    ///
    /// # Errors
    /// It is none, or others can reach what is in it.
    fn dir(&self) -> io::Result<Option<Dir>> {
        match self.root.symlink_metadata(DIR) {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(io::Error::other(format!("{DIR} is no directory"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        let dir = self.root.open_dir(DIR)?;
        let found = dir.dir_metadata()?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            return Err(io::Error::other(format!("{DIR} is not this user's alone")));
        }
        Ok(Some(dir))
    }

    fn remove_if_empty(&self) {
        // It is not empty while other transfers use it.
        let _ = self.root.remove_dir(DIR);
    }
}

impl Part {
    /// Makes one in another directory, which is not found again.
    pub(crate) fn elsewhere(dir: &Dir) -> io::Result<Self> {
        new_part(dir, None)
    }

    /// Says whether it is to stay when it is dropped, if it can be found again.
    pub(crate) fn stay(&mut self, stays: bool) {
        self.stays = stays && self.lasting;
    }

    /// Gives the file its name, which another file may have only if it `replaces` that.
    pub(crate) fn rename(&mut self, to: &Dir, name: &OsStr, replaces: bool) -> io::Result<()> {
        if !is_named(&self.dir, &self.name, &self.file) {
            return Err(io::Error::other("its temporary file was removed or replaced"));
        }
        if replaces {
            return self.dir.rename(&self.name, to, name);
        }
        match rustix::fs::renameat_with(&self.dir, &self.name, to, name, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => self.link(to, name),
            renamed => Ok(renamed?),
        }
    }

    /// Gives the file its name where the file system does not rename without replacing.
    fn link(&self, to: &Dir, name: &OsStr) -> io::Result<()> {
        match rustix::fs::linkat(&self.dir, &self.name, to, name, AtFlags::empty()) {
            Ok(()) => self.dir.remove_file(&self.name),
            // Nor has it links: what appears between these two calls is replaced.
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
        // It may have taken its name, or somebody have removed it.
        if !self.stays
            && is_named(&self.dir, &self.name, &self.file)
            && let Err(error) = self.dir.remove_file(&self.name)
        {
            tracing::warn!(name = ?self.name, %error, "the temporary file could not be removed");
        }
        self.parts.iter().for_each(Parts::remove_if_empty);
    }
}

impl Ongoing {
    /// Notes that some of the transfer is here.
    pub(crate) fn note_some(&self) {
        self.some.store(true, Ordering::Release);
    }

    /// Removes what other transfers have left of a file that is in place now.
    pub(crate) fn note_file(&self, entry: &Entry) {
        self.note_some();
        self.parts.forget(entry);
    }

    /// Notes that everything is here.
    pub(crate) fn note_done(&self) {
        self.done.store(true, Ordering::Release);
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        if self.done.load(Ordering::Acquire) || !self.some.load(Ordering::Acquire) {
            if let Ok(Some(dir)) = self.parts.dir() {
                let _ = dir.remove_file(&self.name);
            }
            self.parts.remove_if_empty();
        }
    }
}

/// Removes from a directory the parts that nobody can find again and nobody uses, if they were not changed for so long.
pub(crate) fn remove_strays(dir: &Dir, for_at_least: Duration) {
    let user = rustix::process::geteuid().as_raw();
    let removes = |_: &OsStr, found: &Metadata| found.is_file() && found.uid() == user && age(found) >= for_at_least;
    visit_unused(dir, is_stray, removes);
}

/// Tells whether a name is one of parts that cannot be found again.
pub(crate) fn is_stray(name: &OsStr) -> bool {
    let digits = name.as_bytes().strip_prefix(STRAY.as_bytes()).and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
    digits.is_some_and(|digits| digits.len() == 16 && digits.iter().all(u8::is_ascii_hexdigit))
}

/// Looks at what nobody uses under such names, and nobody can use while it is looked at; removes what is not wanted.
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
            // It may be about to take its name, and have the mode already that keeps it from being opened.
            Err(_) if age(&found) < RENAMED_WITHIN => continue,
            Err(_) => None,
        };
        if removes(&name, &found)
            && let Err(error) = dir.remove_file(&name)
        {
            tracing::warn!(?name, %error, "what an interrupted transfer left cannot be removed");
        }
    }
}

/// Takes every name.
fn any(_: &OsStr) -> bool {
    true
}

/// Returns for how long something was not changed. The time of its last write says nothing: a part that was about to be
/// whole has it from the sender.
fn age(found: &Metadata) -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_secs(u64::try_from(found.ctime()).unwrap_or(0)))
}

/// Makes a file that nobody else has, readable by its owner alone until it is whole.
fn new_part(dir: &Dir, parts: Option<Parts>) -> io::Result<Part> {
    for _ in 0..ATTEMPTS_MAX {
        // Seeded from the operating system; a guessed name is no danger, as an existing file is never opened.
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

/// How files are opened here: to be read and written, made if they are not there, and no others than that.
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

/// Returns how the names of a file's parts begin.
fn hash_of(entry: &Entry) -> String {
    let mut hash = blake3::Hasher::new();
    add_path(&mut hash, entry);
    hash.finalize().to_hex()[..HASH_LEN].to_owned()
}

/// Returns with what the name of a part begins.
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

/// Locks a file as long as it is open; tells whether nobody else has it locked. Some file systems have no locks.
fn lock(file: &File) -> bool {
    !matches!(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK))
}

/// The directory's name, which no file of a transfer may have.
pub(crate) const DIR: &str = ".rdmc-partial";
/// How long the parts of an interrupted transfer are kept.
pub(crate) const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long parts of which nobody knows are left to whoever may have made them, where the file system has no locks.
pub(crate) const STRAYS_KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// How long it may take until a part that has its mode has its name.
const RENAMED_WITHIN: Duration = Duration::from_secs(60);
/// How the names of parts begin that cannot be found again, and how those of all parts end.
const STRAY: &str = ".rdmc-";
const SUFFIX: &str = ".part";
/// Hexadecimal digits of a path in a name.
const HASH_LEN: usize = 32;
/// How often something is tried.
const ATTEMPTS_MAX: u32 = 16;
/// How long to wait for somebody who only looks at what is here.
const PAUSE: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests;
