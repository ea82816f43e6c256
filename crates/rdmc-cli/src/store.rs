//! The receiver's directory: where files arrive under a temporary name and take their own when they are whole.
//!
//! Everything is reached through a [`Dir`], which no path can leave, not even through a symbolic link.

use std::ffi::OsString;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use cap_std::ambient_authority;
use cap_std::fs::{Dir, OpenOptions};
use rdmc::Memory;
use rustix::fs::{FallocateFlags, Timespec, Timestamps};
use rustix::io::Errno;

use crate::manifest::{Entry, Kind, Manifest};
use crate::size::Bytes;

/// The directory below which everything is put.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    dir: Arc<Dir>,
    no_overwrite: bool,
    fsync: bool,
}

impl Store {
    /// Opens the directory, which must exist.
    pub(crate) fn open(path: &Path, no_overwrite: bool, fsync: bool) -> anyhow::Result<Self> {
        let dir = Dir::open_ambient_dir(path, ambient_authority())
            .with_context(|| format!("the directory {} cannot be used", path.display()))?;
        Ok(Self { dir: Arc::new(dir), no_overwrite, fsync })
    }

    /// Returns the bytes that can be stored.
    pub(crate) fn free_bytes(&self) -> io::Result<u64> {
        let space = rustix::fs::fstatvfs(&*self.dir)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// Checks a manifest against what is there already.
    pub(crate) fn check(&self, manifest: &Manifest) -> anyhow::Result<()> {
        for entry in &manifest.entries {
            let path = entry.path.to_path();
            let found = match entry.kind {
                // A link to a directory inside will do.
                Kind::Directory => self.dir.metadata(&path),
                Kind::File { .. } => self.dir.symlink_metadata(&path),
            };
            match (found, entry.kind) {
                (Err(error), _) if error.kind() == io::ErrorKind::NotFound => {}
                (Err(error), _) => bail!("{}: {error}", entry.path),
                (Ok(found), Kind::Directory) if !found.is_dir() => bail!("{} exists and is no directory", entry.path),
                (Ok(found), Kind::File { .. }) if found.is_dir() => bail!("{} exists and is a directory", entry.path),
                (Ok(_), Kind::File { .. }) if self.no_overwrite => bail!("{} exists (--no-overwrite)", entry.path),
                (Ok(_), _) => {}
            }
        }
        Ok(())
    }

    /// Makes the directories that are not there.
    pub(crate) fn make_directories(&self, manifest: &Manifest) -> anyhow::Result<()> {
        for entry in manifest.directories() {
            match self.dir.create_dir(entry.path.to_path()) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => bail!("{}: {error}", entry.path),
                _ => {}
            }
        }
        Ok(())
    }

    /// Gives the directories their modes and times, inner ones first.
    pub(crate) fn finish_directories(&self, manifest: &Manifest) -> anyhow::Result<()> {
        for entry in manifest.directories().rev() {
            let finish = || -> io::Result<()> {
                let dir = self.dir.open(entry.path.to_path())?.into_std();
                if self.fsync {
                    dir.sync_all()?;
                }
                keep_metadata(&dir, entry)
            };
            finish().with_context(|| entry.path.to_string())?;
        }
        Ok(())
    }

    /// Makes the temporary file for an entry, with its space reserved.
    pub(crate) fn begin(&self, entry: &Entry, size: u64) -> anyhow::Result<Arrival> {
        let (parents, name) = entry.path.split();
        let begin = || -> io::Result<Arrival> {
            let parent = match parents.as_os_str().is_empty() {
                true => self.dir.clone(),
                false => Arc::new(self.dir.open_dir(&parents)?),
            };
            let (file, temporary) = temporary_file(&parent)?;
            let arrival =
                Arrival { parent, file, temporary: Some(temporary), name: name.to_owned(), fsync: self.fsync };
            reserve(&arrival.file, size)?;
            Ok(arrival)
        };
        begin().map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                anyhow::anyhow!("no space for {} ({}): {error}", entry.path, Bytes(size))
            }
            _ => anyhow::anyhow!("{}: {error}", entry.path),
        })
    }
}

/// A file that is arriving; its temporary file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Arrival {
    parent: Arc<Dir>,
    file: std::fs::File,
    temporary: Option<OsString>,
    name: OsString,
    fsync: bool,
}

impl Arrival {
    /// Maps the file, for its bytes to be received into.
    pub(crate) fn memory(&self, size: u64) -> anyhow::Result<Memory> {
        let len = usize::try_from(size).context("the file is longer than the address space")?;
        // SAFETY: the file was made here, under a random name, and is read only when the mapping is gone.
        #[expect(unsafe_code, reason = "the file is mapped, to be received into without a copy")]
        let memory = unsafe { Memory::map_file_mut(&self.file, len) }?;
        Ok(memory)
    }

    /// Writes the whole file, where it was not received into a mapping.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, 0)
    }

    /// Gives the file its mode, its time and its name. Nothing may be written to the mapping any more.
    pub(crate) fn keep(mut self, entry: &Entry) -> io::Result<()> {
        keep_metadata(&self.file, entry)?;
        if self.fsync {
            self.file.sync_all()?;
        }
        let temporary = self.temporary.as_ref().expect("taken only at the end");
        self.parent.rename(temporary, &self.parent, &self.name)?;
        self.temporary = None;
        if self.fsync {
            self.parent.open(".")?.sync_all()?;
        }
        Ok(())
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = self.parent.remove_file(temporary)
        {
            tracing::warn!(?temporary, %error, "the temporary file could not be removed");
        }
    }
}

/// Applies the lowest nine bits of the mode, and the modification time.
fn keep_metadata(file: &std::fs::File, entry: &Entry) -> io::Result<()> {
    file.set_permissions(std::fs::Permissions::from_mode(entry.mode & 0o777))?;
    let mtime = Timespec { tv_sec: entry.mtime_s, tv_nsec: entry.mtime_ns.into() };
    let unchanged = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    rustix::fs::futimens(file, &Timestamps { last_access: unchanged, last_modification: mtime })?;
    Ok(())
}

/// Makes a file that nobody else has, readable by its owner alone until it is whole.
fn temporary_file(parent: &Dir) -> io::Result<(std::fs::File, OsString)> {
    use cap_std::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    for _ in 0..TEMPORARY_NAMES_MAX {
        // Seeded from the operating system; a guessed name is no danger, as an existing file is never opened.
        let name = OsString::from(format!(".rdmc-{:016x}.part", RandomState::new().build_hasher().finish()));
        match parent.open_with(&name, &options) {
            Ok(file) => return Ok((file.into_std(), name)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no free temporary name was found"))
}

/// Reserves space, so that a full disk is an error now and not a fault while the mapping is written.
fn reserve(mut file: &std::fs::File, size: u64) -> io::Result<()> {
    if size == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let zeros = vec![0; ZEROS_LEN];
            let mut left = size;
            while left > 0 {
                let len = usize::try_from(left).map_or(ZEROS_LEN, |left| left.min(ZEROS_LEN));
                file.write_all(&zeros[..len])?;
                left -= len as u64;
            }
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Names tried before giving up.
const TEMPORARY_NAMES_MAX: u32 = 16;
/// Bytes written at once where space cannot be reserved otherwise.
const ZEROS_LEN: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::manifest::EntryPath;

    fn entry(names: &[&str], kind: Kind, mode: u32) -> Entry {
        let path = EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
        Entry { path, kind, mode, mtime_s: 1_000_000_000, mtime_ns: 123_456_789 }
    }

    fn store(dir: &tempfile::TempDir, no_overwrite: bool) -> Store {
        Store::open(dir.path(), no_overwrite, true).unwrap()
    }

    #[test]
    fn a_file_takes_its_name_with_mode_and_time_but_no_special_bits() {
        let dir = tempfile::tempdir().unwrap();
        let entry = entry(&["file"], Kind::File { size: 10 }, 0o6751);
        let arrival = store(&dir, false).begin(&entry, 10).unwrap();
        assert_eq!(arrival.memory(10).unwrap().len(), 10);
        assert!(!dir.path().join("file").exists());
        arrival.keep(&entry).unwrap();
        let found = std::fs::metadata(dir.path().join("file")).unwrap();
        assert_eq!((found.mode() & 0o7777, found.len()), (0o751, 10));
        assert_eq!((found.mtime(), found.mtime_nsec()), (1_000_000_000, 123_456_789));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_does_not_arrive_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(store(&dir, false).begin(&entry(&["file"], Kind::File { size: 10 }, 0o600), 10).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn directories_get_their_modes_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (outer, inner) = (entry(&["d"], Kind::Directory, 0o555), entry(&["d", "e"], Kind::Directory, 0o700));
        let manifest = Manifest { entries: vec![outer, inner] };
        let store = store(&dir, false);
        store.make_directories(&manifest).unwrap();
        store.make_directories(&manifest).unwrap();
        store.finish_directories(&manifest).unwrap();
        let found = std::fs::metadata(dir.path().join("d")).unwrap();
        assert_eq!((found.mode() & 0o777, found.mtime()), (0o555, 1_000_000_000));
    }

    #[test]
    fn a_link_does_not_lead_out() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(outside.path(), dir.path().join("d")).unwrap();
        let inside = entry(&["d", "file"], Kind::File { size: 1 }, 0o600);
        let manifest = Manifest { entries: vec![entry(&["d"], Kind::Directory, 0o700), inside.clone()] };
        assert!(store(&dir, false).check(&manifest).is_err());
        assert!(store(&dir, false).begin(&inside, 1).is_err());
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_exists_is_replaced_unless_that_is_forbidden() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"old").unwrap();
        let manifest = Manifest { entries: vec![entry(&["file"], Kind::File { size: 0 }, 0o600)] };
        store(&dir, false).check(&manifest).unwrap();
        assert!(store(&dir, true).check(&manifest).unwrap_err().to_string().contains("--no-overwrite"));
        let directory = Manifest { entries: vec![entry(&["file"], Kind::Directory, 0o700)] };
        assert!(store(&dir, false).check(&directory).is_err());
    }

    #[test]
    fn more_than_the_disk_holds_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let size = 1 << 60;
        let error = store(&dir, false).begin(&entry(&["file"], Kind::File { size }, 0o600), size).unwrap_err();
        assert!(error.to_string().contains("file"), "{error}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
