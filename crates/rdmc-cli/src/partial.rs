//! What has arrived of files that are not whole: kept when a transfer is interrupted, so that the next one brings the rest.
//!
//! Everything is in one directory below the receiver's, [`DIR`], which is there only as long as something is in it. Each file
//! has its part there, under a name that follows from its path and size; and each transfer under way, or interrupted, has a
//! mark. The sender compares what is here with its own bytes, so that nothing depends on how a transfer has ended.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cap_std::fs::{Dir, DirBuilder, DirBuilderExt, OpenOptions, OpenOptionsExt};
use rustix::fs::FlockOperation;

use crate::manifest::{Entry, Manifest};

/// The directory of parts.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    root: Arc<Dir>,
    /// Whether nothing is kept.
    discard: bool,
}

/// A file of which nothing, some or everything is here; nobody else has it open.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) file: File,
    dir: Dir,
    name: OsString,
    /// Whether it was here before.
    pub(crate) found: bool,
    stays: bool,
    /// If it is there.
    parts: Option<Parts>,
}

/// A transfer under way. Dropped, its mark goes, unless it was interrupted when some of it was here.
#[derive(Debug)]
pub(crate) struct Ongoing {
    parts: Parts,
    mark: OsString,
    /// Whether some of it is here.
    some: AtomicBool,
    done: AtomicBool,
}

impl Parts {
    pub(crate) fn new(root: Arc<Dir>, discard: bool) -> Self {
        Self { root, discard }
    }

    /// Returns the bytes that interrupted transfers have here; none if there are no such.
    pub(crate) fn kept(&self) -> Option<u64> {
        let entries = self.dir().ok().flatten()?.entries().ok()?.flatten();
        let bytes = entries.filter_map(|entry| entry.metadata().ok());
        let (count, bytes) = bytes.fold((0, 0), |(count, bytes), found| {
            use cap_std::fs::MetadataExt;
            (count + 1, bytes + found.blocks() * 512)
        });
        (count > 0).then_some(bytes)
    }

    /// Removes what nobody uses, if nobody has for so long.
    pub(crate) fn remove_unused(&self, for_at_least: Duration) {
        let Ok(Some(dir)) = self.dir() else { return };
        for entry in dir.entries().into_iter().flatten().flatten() {
            let age = entry.metadata().and_then(|found| found.modified());
            let age = age.ok().and_then(|modified| modified.into_std().elapsed().ok());
            if age.is_some_and(|age| age >= for_at_least) && entry.open().is_ok_and(|file| lock(&file.into_std())) {
                let _ = entry.remove_file();
            }
        }
        self.remove_if_empty();
    }

    /// Notes that a transfer begins, which is known by the paths of its files: it ends an earlier one of these.
    pub(crate) fn begin(&self, manifest: &Manifest) -> io::Result<Ongoing> {
        let mut hash = blake3::Hasher::new();
        manifest.files().for_each(|(entry, _)| add_path(&mut hash, entry));
        let mark = OsString::from(format!("{}.transfer", &hash.finalize().to_hex()[..32]));
        let marked = self.in_dir(|dir| dir.open_with(&mark, OpenOptions::new().write(true).create(true).mode(0o600)));
        marked?;
        let (some, done) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Ongoing { parts: self.clone(), mark, some, done })
    }

    /// Opens the part of a file, or makes it; `anew` if what is there may not be used.
    ///
    /// Another one has none if somebody has it open.
    pub(crate) fn open(&self, entry: &Entry, size: u64, anew: bool) -> io::Result<Part> {
        let name = name_of(entry, size);
        self.in_dir(|dir| {
            if anew
                && let Err(error) = dir.remove_file(&name)
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
            for _ in 0..ATTEMPTS_MAX {
                let mut options = OpenOptions::new();
                let file = dir.open_with(&name, options.read(true).write(true).create(true).mode(0o600))?.into_std();
                if !lock(&file) {
                    break;
                }
                let (found, named) = (file.metadata()?, dir.symlink_metadata(&name));
                let same = named.is_ok_and(|named| cap_std::fs::MetadataExt::ino(&named) == found.ino());
                if same && found.is_file() && found.nlink() == 1 {
                    let whole = found.len() == size && size > 0;
                    if !whole {
                        file.set_len(0)?;
                    }
                    let (dir, name, parts) = (dir.try_clone()?, name.clone(), Some(self.clone()));
                    return Ok(Part { file, dir, name, found: whole, stays: false, parts });
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
            let made =
                made.or_else(|error| if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) });
            let done = made.and_then(|()| self.dir()?.ok_or(io::ErrorKind::NotFound.into())).and_then(|dir| work(&dir));
            match done {
                Err(error) if error.kind() == io::ErrorKind::NotFound && attempts.next().is_some() => {}
                done => return done,
            }
        }
    }

    fn dir(&self) -> io::Result<Option<Dir>> {
        match self.root.symlink_metadata(DIR) {
            Ok(found) if found.is_dir() => self.root.open_dir(DIR).map(Some),
            Ok(_) => Err(io::Error::other(format!("{DIR} is no directory"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn remove_if_empty(&self) {
        // It is not empty while other transfers use it.
        let _ = self.root.remove_dir(DIR);
    }
}

impl Part {
    /// Makes one in another directory, which no other transfer finds.
    pub(crate) fn elsewhere(dir: &Dir) -> io::Result<Self> {
        new_part(dir, None)
    }

    /// Has it stay when it is dropped.
    pub(crate) fn stay(&mut self, stays: bool) {
        self.stays = stays;
    }

    /// Gives the file its name.
    pub(crate) fn rename(mut self, to: &Dir, name: &OsStr) -> io::Result<()> {
        self.dir.rename(&self.name, to, name)?;
        self.stays = true;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.stays
            && let Err(error) = self.dir.remove_file(&self.name)
        {
            tracing::warn!(name = ?self.name, %error, "the temporary file could not be removed");
        }
        self.parts.iter().for_each(Parts::remove_if_empty);
    }
}

impl Ongoing {
    /// Notes that some of the transfer is here; tells whether it is to stay.
    pub(crate) fn has_some(&self) -> bool {
        self.some.store(!self.parts.discard, Ordering::Release);
        !self.parts.discard
    }

    /// Notes that everything is here.
    pub(crate) fn done(&self) {
        self.done.store(true, Ordering::Release);
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        if self.done.load(Ordering::Acquire) || !self.some.load(Ordering::Acquire) {
            if let Ok(Some(dir)) = self.parts.dir() {
                let _ = dir.remove_file(&self.mark);
            }
            self.parts.remove_if_empty();
        }
    }
}

/// Makes a file that nobody else has, readable by its owner alone until it is whole.
fn new_part(dir: &Dir, parts: Option<Parts>) -> io::Result<Part> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    for _ in 0..ATTEMPTS_MAX {
        // Seeded from the operating system; a guessed name is no danger, as an existing file is never opened.
        let name = OsString::from(format!(".rdmc-{:016x}.part", RandomState::new().build_hasher().finish()));
        match dir.open_with(&name, &options) {
            Ok(file) => {
                let (file, dir) = (file.into_std(), dir.try_clone()?);
                return Ok(Part { file, dir, name, found: false, stays: false, parts });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no free temporary name was found"))
}

/// Returns the name of a file's part.
fn name_of(entry: &Entry, size: u64) -> OsString {
    let mut hash = blake3::Hasher::new();
    hash.update(&size.to_le_bytes());
    add_path(&mut hash, entry);
    OsString::from(format!("{}.part", &hash.finalize().to_hex()[..32]))
}

fn add_path(hash: &mut blake3::Hasher, entry: &Entry) {
    hash.update(&(entry.path.0.len() as u64).to_le_bytes());
    for name in &entry.path.0 {
        hash.update(&(name.len() as u64).to_le_bytes()).update(name);
    }
}

fn lock(file: &File) -> bool {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// The directory's name, which no file of a transfer may have.
pub(crate) const DIR: &str = ".rdmc-partial";
/// How long the parts of an interrupted transfer are kept.
pub(crate) const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// Names tried before giving up.
const ATTEMPTS_MAX: u32 = 16;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;
    use crate::manifest::{EntryPath, Kind};

    fn parts(dir: &Path, discard: bool) -> Parts {
        let root = Dir::open_ambient_dir(dir, cap_std::ambient_authority()).unwrap();
        Parts::new(Arc::new(root), discard)
    }

    fn entry(names: &[&str]) -> Entry {
        let path = EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
        Entry { path, kind: Kind::File { size: 4 }, mode: 0o600, mtime_s: 1, mtime_ns: 2 }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir.join(DIR)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    /// Leaves `bytes` of a file of 4.
    fn interrupted(parts: &Parts, bytes: &[u8]) {
        let ongoing = parts.begin(&Manifest::default()).unwrap();
        let mut part = parts.open(&entry(&["a", "b"]), 4, false).unwrap();
        part.file.set_len(4).unwrap();
        part.file.write_all_at(bytes, 0).unwrap();
        part.stay(ongoing.has_some());
    }

    #[test]
    fn a_part_is_found_again_by_its_path_and_size() {
        let dir = tempfile::tempdir().unwrap();
        let parts = parts(dir.path(), false);
        interrupted(&parts, b"some");
        assert_eq!(names(dir.path()).len(), 2);
        assert!(parts.kept().is_some());
        for (path, size, found) in
            [(&["a", "c"][..], 4, false), (&["ab"], 4, false), (&["a", "b"], 5, false), (&["a", "b"], 4, true)]
        {
            assert_eq!(parts.open(&entry(path), size, false).unwrap().found, found, "{path:?} {size}");
        }
    }

    #[test]
    fn two_who_receive_the_same_do_not_share_a_part() {
        let dir = tempfile::tempdir().unwrap();
        let parts = parts(dir.path(), false);
        let (first, second) =
            (parts.open(&entry(&["a"]), 4, false).unwrap(), parts.open(&entry(&["a"]), 4, false).unwrap());
        assert_ne!(first.name, second.name);
        drop((first, second));
        assert!(parts.kept().is_none() && !dir.path().join(DIR).exists());
    }

    #[test]
    fn a_part_that_is_made_anew_is_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let parts = parts(dir.path(), false);
        interrupted(&parts, b"some");
        let old = File::open(dir.path().join(DIR).join(name_of(&entry(&["a", "b"]), 4))).unwrap();
        let part = parts.open(&entry(&["a", "b"]), 4, true).unwrap();
        assert!(!part.found);
        assert_ne!(part.file.metadata().unwrap().ino(), old.metadata().unwrap().ino());
    }

    #[test]
    fn a_transfer_that_is_done_or_brought_nothing_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let parts = parts(dir.path(), false);
        let manifest = Manifest { entries: vec![entry(&["a"])] };
        drop(parts.begin(&manifest).unwrap());
        assert!(!dir.path().join(DIR).exists());
        let ongoing = parts.begin(&manifest).unwrap();
        ongoing.has_some();
        drop(ongoing);
        assert_eq!(names(dir.path()).len(), 1);
        let ongoing = parts.begin(&manifest).unwrap();
        ongoing.has_some();
        ongoing.done();
        drop(ongoing);
        assert!(!dir.path().join(DIR).exists());
    }

    #[test]
    fn what_is_to_be_discarded_is() {
        let dir = tempfile::tempdir().unwrap();
        interrupted(&parts(dir.path(), true), b"some");
        assert!(!dir.path().join(DIR).exists());
    }

    #[test]
    fn old_parts_are_removed_unless_somebody_uses_them() {
        let dir = tempfile::tempdir().unwrap();
        let parts = parts(dir.path(), false);
        interrupted(&parts, b"some");
        parts.remove_unused(KEPT_FOR);
        assert_eq!(names(dir.path()).len(), 2);
        let mut part = parts.open(&entry(&["a", "b"]), 4, false).unwrap();
        part.stay(true);
        parts.remove_unused(Duration::ZERO);
        assert_eq!(names(dir.path()), [name_of(&entry(&["a", "b"]), 4).into_string().unwrap()]);
        drop(part);
        parts.remove_unused(Duration::ZERO);
        assert!(!dir.path().join(DIR).exists());
    }
}
