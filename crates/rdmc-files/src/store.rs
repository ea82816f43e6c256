//! The receiver's directory. Files arrive there under temporary names, and take their own names when they are complete.
//!
//! Everything is reached through a [`Dir`]. No path can leave it, not even through a symbolic link.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fmt::Display;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::ambient_authority;
use cap_std::fs::{Dir, Metadata, MetadataExt, OpenOptions, OpenOptionsExt};
use rustix::fs::{Access, AtFlags, OFlags};

use crate::announcement::UNDER_WAY_MAX;
use crate::blame::BUSY;
use crate::error::{Context, Kind, Problem};
use crate::manifest::{Entry, EntryKind, Manifest, to_path};
use crate::partial::{self, KEPT_FOR, Part, Parts, STRAYS_KEPT_FOR, TransferMark};
use crate::reservation::{PathsWritten, Promised, Reservation, Reservations, Written};
use crate::size::ByteSize;
use crate::units::{Unit, Units};
use crate::wording::Wording;
use crate::words::{count, printable};

mod incoming;

pub(crate) use incoming::IncomingFile;
use incoming::keep_metadata;

/// The directory of a receiver, with its settings.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    dir: Arc<Dir>,
    /// Whether the file system ignores upper and lower case in names.
    folds_case: bool,
    no_overwrite: bool,
    fsync: bool,
    parts: Parts,
    /// Whether parts stay when a transfer is interrupted.
    keeps_parts: bool,
    /// The mark of the transfer, if its parts may stay.
    mark: Option<Arc<TransferMark>>,
    /// Whether only missing blocks travel.
    delta: bool,
    /// Whether space is so short that a file must be in place before the next one begins.
    one_by_one: bool,
    /// What the transfers under way write.
    reservations: Reservations,
    /// The paths of the transfer.
    reservation: Option<Arc<Reservation>>,
    wording: Wording,
}

impl Store {
    /// Says that a directory cannot be opened.
    pub(crate) fn unusable(path: &Path, error: &io::Error) -> Problem {
        Self::unusable_called(&path.display().to_string(), error)
    }

    fn unusable_called(shown: &str, error: &io::Error) -> Problem {
        let remedy = if error.kind() == io::ErrorKind::NotFound { "; create it first" } else { "" };
        Problem::local(format!("the directory {shown} cannot be used: {error}{remedy}"))
    }

    /// Opens the directory. It must exist, and this user must be allowed to put files into it.
    pub(crate) fn open(path: &Path, wording: Wording) -> Result<Self, Problem> {
        Self::open_called(path, &path.display().to_string(), wording)
    }

    /// Does the same for a directory which messages call `shown`.
    pub(crate) fn open_called(path: &Path, shown: &str, wording: Wording) -> Result<Self, Problem> {
        let dir = Dir::open_ambient_dir(path, ambient_authority());
        let dir = dir.map_err(|error| Self::unusable_called(shown, &error))?;
        let folds_case = partial::folds_case(&dir);
        match &folds_case {
            Err(error) if !is_full(error) => {
                let remedy = wording.choose_directory;
                let what = format!("cannot put files into the directory {shown}: {error}; {remedy}");
                return Err(Problem::local(what));
            }
            // A full disk may have room when a transfer comes.
            _ => partial::remove_strays(&dir, STRAYS_KEPT_FOR),
        }
        let dir = Arc::new(dir);
        let parts = Parts::new(dir.clone());
        let (no_overwrite, fsync, keeps_parts) = (false, false, true);
        let reservations = Reservations::default();
        let (mark, delta, one_by_one, reservation) = (None, false, false, None);
        let folds_case = folds_case.unwrap_or(false);
        Ok(Self {
            dir,
            folds_case,
            no_overwrite,
            fsync,
            parts,
            keeps_parts,
            mark,
            delta,
            one_by_one,
            reservations,
            reservation,
            wording,
        })
    }

    /// Sets whether files may replace others.
    pub(crate) fn overwrite(mut self, overwrite: bool) -> Self {
        self.no_overwrite = !overwrite;
        self
    }

    /// Sets whether files are forced to the disk before they take their names.
    pub(crate) fn fsync(mut self, fsync: bool) -> Self {
        self.fsync = fsync;
        self
    }

    /// Sets whether parts of files stay when a transfer is interrupted.
    pub(crate) fn keep_parts(mut self, keep: bool) -> Self {
        self.keeps_parts = keep;
        self
    }

    /// Tells whether there are parts from interrupted transfers. Removes old ones first.
    pub(crate) fn has_parts(&self) -> bool {
        self.parts.remove_unused(KEPT_FOR);
        self.keeps_parts && self.parts.kept().is_some()
    }

    /// Returns how messages call the settings.
    pub(crate) fn wording(&self) -> &Wording {
        &self.wording
    }

    /// Tells whether parts stay when a transfer is interrupted.
    pub(crate) fn keeps_parts(&self) -> bool {
        self.keeps_parts
    }

    /// Returns the store with the paths of a manifest reserved: no other transfer writes them while the returned store,
    /// one of its clones or one of its files exists.
    ///
    /// # Errors
    /// Another transfer writes one of them.
    pub(crate) fn reserve(&self, manifest: &Manifest) -> Result<Self, Problem> {
        let reserved = self.reservations.reserve(self.paths_written(manifest));
        let busy = |taken: PathBuf| format!("{BUSY} of {}", printable(&taken.to_string_lossy()));
        let reservation = reserved.map_err(|taken| Kind::Busy.problem(busy(taken)))?;
        Ok(Self { reservation: Some(Arc::new(reservation)), ..self.clone() })
    }

    /// Lists what a transfer writes, by paths without symbolic links, which may lead to one directory in two ways.
    fn paths_written(&self, manifest: &Manifest) -> PathsWritten {
        let mut places: HashMap<&[Vec<u8>], PathBuf> = HashMap::new();
        let mut paths = PathsWritten::new();
        let reserved = |path: &Path| match self.folds_case {
            true => PathBuf::from(path.to_string_lossy().to_lowercase()),
            false => path.to_owned(),
        };
        for entry in &manifest.entries {
            let (name, parents) = entry.path.0.split_last().expect("a checked path has a component");
            let parent = places.get(parents).cloned().unwrap_or_default();
            let path = parent.join(OsStr::from_bytes(name));
            if entry.kind != EntryKind::Directory {
                paths.insert(reserved(&path), Written::File);
                continue;
            }
            let is_link = self.dir.symlink_metadata(&path).is_ok_and(|found| found.is_symlink());
            let place = if is_link { self.dir.canonicalize(&path).unwrap_or(path) } else { path };
            // The receiver's own directory is `.`, which would make another path of each name in it.
            let place = place.strip_prefix(".").map(Path::to_owned).unwrap_or(place);
            if !place.as_os_str().is_empty() {
                paths.insert(reserved(&place), Written::Directory { mode: entry.mode & MODE_BITS });
            }
            places.insert(&entry.path.0, place);
        }
        paths
    }

    /// Returns the store for the files of one transfer. If `delta`, only missing blocks travel.
    pub(crate) fn for_transfer(&self, manifest: &Manifest, delta: bool) -> Self {
        if !self.keeps_parts {
            self.parts.forget_all(manifest);
        }
        let mark = self.keeps_parts.then(|| self.parts.begin(manifest)).transpose().unwrap_or_else(|error| {
            tracing::warn!(%error, "no parts will stay if this transfer is interrupted");
            None
        });
        Self { mark: mark.map(Arc::new), delta, ..self.clone() }
    }

    /// Notes that every file of the transfer is in place.
    pub(crate) fn done(&self) {
        self.mark.iter().for_each(|mark| mark.note_done());
    }

    /// Tells whether the directory was removed. Only on file systems that count no links does it try to make a file.
    fn is_removed(&self) -> bool {
        rustix::fs::fstat(&*self.dir).is_ok_and(|stat| stat.st_nlink == 0)
            && Part::elsewhere(&self.dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }

    /// Checks that the files of a manifest can be stored beside those of the transfers under way, and that the
    /// directory still exists. Parts of interrupted transfers count as free. If space is short, the returned store asks
    /// for one file at a time.
    pub(crate) fn with_room(self, manifest: &Manifest) -> Result<Self, Problem> {
        if self.is_removed() {
            let Wording { directory, receiver, .. } = self.wording;
            let what = format!("{directory} was removed: start {receiver} again with an existing one");
            return Err(Problem::local(what));
        }
        let (parts, dir) = (self.parts.clone(), self.dir.clone());
        self.within(manifest, || {
            let space = rustix::fs::fstatvfs(&*dir).context("the free space is unknown")?;
            Ok(space.f_bavail.saturating_mul(space.f_frsize).saturating_add(parts.kept().unwrap_or(0)))
        })
    }

    /// Checks that the files of a manifest can be stored in so many bytes.
    fn within(self, manifest: &Manifest, free: impl Fn() -> Result<u64, Problem>) -> Result<Self, Problem> {
        let [least, most] = self.bytes_needed(manifest, [1, ARRIVING_MAX]);
        let reservation = self.reservation.as_ref().expect("its paths are reserved first");
        let one_by_one = match reservation.promise(least, most, free)? {
            Promised::All => false,
            Promised::Least => true,
            Promised::Nothing { free, others } if least <= free => {
                let (others, left) = (ByteSize(others), free.saturating_sub(others));
                return Err(Kind::Busy.problem(format!("{BUSY} that takes {others}: {}", too_large(least, left))));
            }
            Promised::Nothing { free, .. } => return Err(Problem::local(too_large(least, free))),
        };
        Ok(Self { one_by_one, ..self })
    }

    /// Tells whether space is so short that a file must be in place before the next one begins.
    pub(crate) fn receives_one_by_one(&self) -> bool {
        self.one_by_one
    }

    /// Checks that there are inodes for the files and directories that are missing. Some file systems do not count them.
    pub(crate) fn check_inodes(&self, manifest: &Manifest) -> Result<(), Problem> {
        let space = rustix::fs::fstatvfs(&*self.dir).context("the free space is unknown")?;
        if space.f_files == 0 || manifest.entries.len() as u64 <= space.f_favail {
            return Ok(());
        }
        let is_missing = |entry: &&Entry| {
            let has_part = matches!(entry.kind, EntryKind::File { size } if self.parts.have(entry, size));
            !has_part && self.dir.symlink_metadata(entry.path.to_path()).is_err()
        };
        let missing = manifest.entries.iter().filter(is_missing).count() as u64;
        if missing <= space.f_favail {
            return Ok(());
        }
        let (missing, free) = (count(missing, "inode"), space.f_favail);
        Err(Problem::local(format!("this transfer needs {missing}, but the directory's file system has {free} free")))
    }

    /// Returns why a file finds no space.
    fn no_space(&self) -> &'static str {
        let space = rustix::fs::fstatvfs(&*self.dir);
        match space.is_ok_and(|space| space.f_files > 0 && space.f_favail == 0) {
            true => "no inodes are left: remove files from the directory's file system",
            false => "free space in the directory's file system",
        }
    }

    /// Returns how many bytes the files of a manifest need if so many units are received at once, for each number in
    /// `arriving`. The space of parts counts as free.
    ///
    /// A file in place is freed when the new one replaces it, so that only the files that arrive are there twice.
    fn bytes_needed<const N: usize>(&self, manifest: &Manifest, arriving: [usize; N]) -> [u64; N] {
        let sum = |sizes: &[u64]| sizes.iter().copied().fold(0, u64::saturating_add);
        let missing = self.missing_directories(manifest);
        let is_there =
            |entry: &Entry, size| !missing.contains(entry.path.parents()) && self.replaces_equal(entry, size);
        let sizes = manifest.files().map(|(entry, size)| if is_there(entry, size) { (0, size) } else { (size, 0) });
        let (added, replaced): (Vec<u64>, Vec<u64>) = sizes.unzip();
        // Short files that arrive together take their places one after the other.
        let largest = |unit: &Unit| replaced[unit.files.clone()].iter().copied().max().unwrap_or(0);
        let replaced: Vec<u64> = Units::of(manifest).iter().map(largest).collect();
        arriving.map(|arriving| {
            let at_once = replaced.windows(replaced.len().clamp(1, arriving)).map(sum).max().unwrap_or(0);
            sum(&added).saturating_add(at_once)
        })
    }

    /// Tells whether a file is in place whose size and time are those of the entry.
    fn replaces_equal(&self, entry: &Entry, size: u64) -> bool {
        self.dir.symlink_metadata(entry.path.to_path()).is_ok_and(|found| looks_the_same(&found, entry, size))
    }

    /// Returns the listed directories that are not here, so that nothing in them is looked for.
    fn missing_directories<'a>(&self, manifest: &'a Manifest) -> HashSet<&'a [Vec<u8>]> {
        let mut missing = HashSet::new();
        for Entry { path, .. } in manifest.directories() {
            let found = || self.dir.symlink_metadata(path.to_path());
            if missing.contains(path.parents()) || found().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
                missing.insert(&path.0[..]);
            }
        }
        missing
    }

    /// Checks a manifest against what is in the directory.
    pub(crate) fn check(&self, manifest: &Manifest) -> Result<(), Problem> {
        let going_on = self.no_overwrite && self.has_parts();
        let missing = self.missing_directories(manifest);
        let mut parents = HashSet::new();
        for entry in &manifest.entries {
            if entry.path.0.iter().any(|name| partial::is_stray(OsStr::from_bytes(name))) {
                return Err(refused(entry, ": the receiver gives such names to incomplete files"));
            }
            if entry.path.0.first().is_some_and(|first| first.eq_ignore_ascii_case(partial::DIR.as_bytes())) {
                return Err(refused(entry, ": the receiver keeps parts of files under this name"));
            }
            if missing.contains(entry.path.parents()) {
                continue;
            }
            let path = entry.path.to_path();
            let found = match entry.kind {
                // A symbolic link to a directory inside is accepted.
                EntryKind::Directory => self.dir.metadata(&path),
                EntryKind::File { .. } => self.dir.symlink_metadata(&path),
            };
            if found.is_err() || entry.kind != EntryKind::Directory {
                parents.insert(entry.path.parents());
            }
            match (found, entry.kind) {
                (Err(error), _) if error.kind() == io::ErrorKind::NotFound => {}
                (Err(error), _)
                    if error.raw_os_error().is_none()
                        && self.dir.symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) =>
                {
                    return Err(refused(entry, " is a symbolic link out of the receiver's directory"));
                }
                (Err(error), _) => return Err(refused(entry, format!(": {error}"))),
                (Ok(found), EntryKind::Directory) if !found.is_dir() => {
                    return Err(refused(entry, " exists and is no directory"));
                }
                (Ok(found), EntryKind::File { .. }) if found.is_dir() => {
                    return Err(refused(entry, " exists and is a directory"));
                }
                // An interrupted transfer has put it there.
                (Ok(found), EntryKind::File { size }) if going_on && looks_the_same(&found, entry, size) => {}
                (Ok(_), EntryKind::File { .. }) if self.no_overwrite => return Err(exists(entry, &self.wording)),
                (Ok(_), _) => {}
            }
        }
        self.check_case(manifest)?;
        parents.into_iter().try_for_each(|parent| self.check_parent(&to_path(parent)))
    }

    /// Checks that names which differ only in upper and lower case are different files here.
    fn check_case(&self, manifest: &Manifest) -> Result<(), Problem> {
        let mut probed = HashSet::new();
        for entry in manifest.folded_alike() {
            let parents = entry.path.split().0;
            // Directories that are made get this from the one that they are made in.
            let existing =
                parents.ancestors().find_map(|path| self.parent(path).ok().map(|dir| (path.to_owned(), dir)));
            let Some((path, dir)) = existing else { continue };
            // If no file can be made, it is better to refuse than to mix up two files.
            if probed.insert(path) && partial::folds_case(&dir).unwrap_or(true) {
                let what =
                    "another path differs from it only in upper and lower case, and they are the same file there";
                return Err(refused(entry, format!(": {what}")));
            }
        }
        Ok(())
    }

    /// Checks that files can be put into a directory of a transfer, if it exists. Removes strays from it.
    fn check_parent(&self, path: &Path) -> Result<(), Problem> {
        let Ok(dir) = self.parent(path) else { return Ok(()) };
        let allowed = rustix::fs::accessat(&*dir, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS);
        if let Err(error) = allowed.map_err(io::Error::from)
            && is_forbidden(error.kind())
        {
            let of_it = if path.as_os_str().is_empty() { String::new() } else { format!("{} in ", path.display()) };
            let (of_it, directory) = (printable(&of_it), self.wording.directory);
            return Err(Problem::local(format!("cannot put files into {of_it}{directory}: {error}")));
        }
        partial::remove_strays(&dir, STRAYS_KEPT_FOR);
        Ok(())
    }

    /// Opens a directory of the transfer.
    fn parent(&self, path: &Path) -> io::Result<Arc<Dir>> {
        match path.as_os_str().is_empty() {
            true => Ok(self.dir.clone()),
            false => Ok(Arc::new(self.dir.open_dir(path)?)),
        }
    }

    /// Makes the missing directories.
    pub(crate) fn make_directories(&self, manifest: &Manifest) -> Result<(), Problem> {
        for entry in manifest.directories() {
            match self.dir.create_dir(entry.path.to_path()) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(refused(entry, format!(": {error}")));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Sets modes and times of the directories, inner ones first.
    pub(crate) fn finish_directories(&self, manifest: &Manifest) -> Result<(), Problem> {
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

    /// Opens what is here of a file: its part, or the file in place if its size and time are those of the entry.
    pub(crate) fn known(&self, entry: &Entry, size: u64) -> Option<std::fs::File> {
        if self.mark.is_some() && self.parts.have(entry, size) {
            let mut part = self.parts.open(entry, size).ok().filter(|part| part.found)?;
            part.stay(true);
            return part.file.try_clone().ok();
        }
        self.in_place(entry, size)
    }

    /// Opens the file in place, if its size and time are those of the entry.
    fn in_place(&self, entry: &Entry, size: u64) -> Option<std::fs::File> {
        open_the_same(&self.dir, &entry.path.to_path(), entry, size)
    }
}

/// Opens a file, if its size and time are those of the entry.
fn open_the_same(dir: &Dir, path: &Path, entry: &Entry, size: u64) -> Option<std::fs::File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = dir.open_with(path, OpenOptions::new().read(true).custom_flags(flags)).ok()?;
    file.metadata().is_ok_and(|found| looks_the_same(&found, entry, size)).then(|| file.into_std())
}

/// Makes a problem with an entry; `what` follows its path.
fn refused(entry: &Entry, what: impl Display) -> Problem {
    Problem::local(format!("{}{what}", entry.path))
}

/// Makes the problem of a file that must not be replaced.
fn exists(entry: &Entry, wording: &Wording) -> Problem {
    refused(entry, format!(" exists ({})", wording.no_overwrite))
}

/// Says that files do not fit, in figures that differ.
fn too_large(needed: u64, free: u64) -> String {
    let [short, other] = [needed, free].map(|bytes| ByteSize(bytes).to_string());
    match short == other {
        true => format!("{needed} bytes do not fit into the {free} free bytes of the directory's file system"),
        false => format!("{short} do not fit into the free {other} of the directory's file system"),
    }
}

/// Tells whether a file finds no space.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Tells whether waiting cannot help against an error.
fn is_forbidden(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Tells whether size and time of a file are those of an entry.
fn looks_the_same(found: &Metadata, entry: &Entry, size: u64) -> bool {
    let time = (found.mtime(), found.mtime_nsec());
    found.is_file() && found.len() == size && time == (entry.mtime_s, entry.mtime_ns.into())
}

/// Greatest number of units under way at once, each with its digest.
const ARRIVING_MAX: usize = UNDER_WAY_MAX / 2;
/// The bits of a mode that are applied.
const MODE_BITS: u32 = 0o777;

#[cfg(test)]
mod tests;
