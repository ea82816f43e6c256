//! The sender's files. This module finds them, and reads them to make their digests.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use rdmc::{DigestHasher, Memory, Message, Node};
use rustix::fs::OFlags;

use crate::announcement::{DIGEST_LEN, UNDER_WAY_MAX};
use crate::blame::FailedPeer;
use crate::error::{Context, Kind, Problem};
use crate::manifest::{Entry, EntryKind, EntryPath, Manifest};
use crate::mapping;
use crate::partial;

/// The files and directories to send.
#[derive(Debug, Default)]
pub(crate) struct SourceTree {
    pub(crate) manifest: Manifest,
    /// The path of each entry of the manifest.
    pub(crate) paths: Vec<PathBuf>,
    /// Things that cannot be sent.
    pub(crate) skipped: Vec<Skipped>,
    /// Whether it is for clients of a server.
    is_served: bool,
}

/// Something that is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub(crate) at: PathBuf,
    /// Where it would arrive.
    pub(crate) path: EntryPath,
    pub(crate) reason: String,
}

impl Skipped {
    /// A symbolic link or a special file inside a directory.
    pub(crate) fn special(at: PathBuf, path: EntryPath) -> Self {
        Self { at, path, reason: "it is a symbolic link, a device, a socket or a pipe".to_owned() }
    }
}

impl SourceTree {
    /// Walks through files and directories in the order of their names.
    pub(crate) fn find(arguments: &[PathBuf]) -> Result<Self, Problem> {
        let mut source = Self::default();
        for argument in arguments {
            let metadata = std::fs::metadata(argument).with_context(|| format!("{}", argument.display()))?;
            if !metadata.is_file() && !metadata.is_dir() {
                let what = "is neither a file nor a directory; write what it contains to a file, and send that";
                return Err(Kind::Request.problem(format!("{} {what}", argument.display())));
            }
            let name = match argument.file_name() {
                Some(name) => name.to_owned(),
                // `.` and `..` arrive under the names of their directories.
                None => match argument.canonicalize()?.file_name() {
                    Some(name) => name.to_owned(),
                    None => {
                        return Err(
                            Kind::Request.problem(format!("{} has no name to arrive under", argument.display()))
                        );
                    }
                },
            };
            let path = EntryPath(vec![name.as_bytes().to_vec()]);
            if source.manifest.entries.iter().any(|entry| entry.path == path) {
                return Err(Kind::Request.problem(format!("two of the files are called {path}")));
            }
            source.add(argument.clone(), path, &metadata)?;
        }
        source.manifest.check().of_kind(Kind::Request)?;
        Ok(source)
    }

    /// Walks through files and directories that arrive under these names, beside what is skipped already. Leaves out
    /// parts of interrupted transfers, and skips directories that cannot be read. A file that cannot be read is found
    /// out when its turn comes.
    pub(crate) fn find_served(arguments: Vec<(PathBuf, Vec<u8>)>, skipped: Vec<Skipped>) -> Result<Self, Problem> {
        let mut source = Self { is_served: true, skipped, ..Self::default() };
        for (at, name) in arguments {
            let path = EntryPath(vec![name]);
            let metadata = std::fs::metadata(&at).with_context(|| path.to_string())?;
            source.add(at, path, &metadata)?;
        }
        source.manifest.check().of_kind(Kind::Request)?;
        Ok(source)
    }

    fn add(&mut self, at: PathBuf, path: EntryPath, metadata: &Metadata) -> Result<(), Problem> {
        let kind = if metadata.is_dir() {
            EntryKind::Directory
        } else if metadata.is_file() {
            EntryKind::File { size: metadata.len() }
        } else {
            self.skipped.push(Skipped::special(at, path));
            return Ok(());
        };
        let mtime_ns = u32::try_from(metadata.mtime_nsec()).context("the time of its last change is malformed")?;
        let entry = Entry { path, kind, mode: metadata.mode() & 0o777, mtime_s: metadata.mtime(), mtime_ns };
        let path = entry.path.clone();
        self.manifest.entries.push(entry);
        self.paths.push(at.clone());
        if kind != EntryKind::Directory {
            if self.is_served {
                return Ok(());
            }
            // Fails before a receiver is invited.
            return open_at_once(&at).map(drop).with_context(|| format!("{}", at.display()));
        }
        let listed = std::fs::read_dir(&at).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let mut listed = match listed {
            Ok(listed) => listed,
            Err(error) if self.is_served => {
                self.skipped.push(Skipped { at, path, reason: format!("the directory cannot be read: {error}") });
                return Ok(());
            }
            Err(error) => return Err(error).with_context(|| format!("{}", at.display())),
        };
        listed.sort_by_key(std::fs::DirEntry::file_name);
        for inner in listed {
            if self.is_served && partial::is_hidden(&inner.file_name()) {
                continue;
            }
            let mut names = path.0.clone();
            names.push(inner.file_name().as_bytes().to_vec());
            let path = EntryPath(names);
            // Links are not followed.
            let metadata = match inner.metadata() {
                // It was deleted since the directory was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) if self.is_served => {
                    self.skipped.push(Skipped {
                        at: inner.path(),
                        path,
                        reason: format!("it cannot be read: {error}"),
                    });
                    continue;
                }
                found => found.with_context(|| format!("{}", inner.path().display()))?,
            };
            self.add(inner.path(), path, &metadata)?;
        }
        Ok(())
    }

    /// Tells whether it is for clients of a server.
    pub(crate) fn is_served(&self) -> bool {
        self.is_served
    }

    /// Returns the name of something that is left out, as this end's user knows it.
    pub(crate) fn shown(&self, skipped: &Skipped) -> String {
        match self.is_served {
            true => skipped.path.to_string(),
            false => skipped.at.display().to_string(),
        }
    }

    /// Returns the files in the manifest's order, with their paths, entries and sizes.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Path, &Entry, u64)> {
        self.manifest.entries.iter().zip(&self.paths).filter_map(|(entry, path)| match entry.kind {
            EntryKind::File { size } => Some((path.as_path(), entry, size)),
            EntryKind::Directory => None,
        })
    }
}

/// Opens a file to be read. A pipe that has taken its place does not wait for a writer.
fn open_at_once(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)
}

/// A file that is open to be sent. It was not changed between finding and opening it.
#[derive(Debug)]
pub(crate) struct SourceFile {
    file: File,
    /// What messages call it.
    path: PathBuf,
    size: u64,
    stamp: Stamp,
}

impl SourceFile {
    /// Opens a file, which messages call `shown`.
    pub(crate) fn open(path: &Path, shown: PathBuf, entry: &Entry, size: u64) -> Result<Self, Problem> {
        let named = || format!("{}", shown.display());
        let file = open_at_once(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => changed(&shown, "it was deleted"),
            _ => Problem::from(error).context(named()),
        })?;
        let metadata = file.metadata().with_context(named)?;
        if !metadata.is_file() {
            return Err(changed(&shown, "it is no longer a file"));
        }
        let now = Stamp::of(&metadata);
        let listed = Stamp { len: size, mtime: (entry.mtime_s, entry.mtime_ns.into()), ..now };
        match now.change_since(listed) {
            Some(what) => Err(changed(&shown, &what)),
            None => Ok(Self { stamp: now, path: shown, file, size }),
        }
    }

    /// Returns how the file was changed since it was opened; `None` if it was not, even if it was deleted.
    fn change(&self) -> Option<String> {
        self.file.metadata().ok().and_then(|metadata| Stamp::of(&metadata).change_since(self.stamp))
    }

    /// Returns the problem of a file that was changed since it was opened; `None` if it was not.
    pub(crate) fn problem(&self) -> Option<Problem> {
        self.change().map(|what| changed(&self.path, &what))
    }

    /// Maps the file to be sent without a copy.
    pub(crate) fn map(&self) -> Result<Memory, Problem> {
        let named = || format!("{}", self.path.display());
        let len = usize::try_from(self.size).map_err(|_| Problem::local(TOO_LONG)).with_context(named)?;
        mapping::to_send(&self.file, len).with_context(named)
    }

    /// Reads bytes of the file.
    ///
    /// # Errors
    /// The system's, or the file is shorter now.
    pub(crate) fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    /// Returns a function that copies the file's bytes into memory.
    pub(crate) fn reader(&self) -> io::Result<impl FnOnce(&mut [u8]) -> io::Result<()> + Send + use<>> {
        let file = self.file.try_clone()?;
        Ok(move |to: &mut [u8]| file.read_exact_at(to, 0))
    }

    /// Computes the digest by reading the file. Fails if the file was changed.
    pub(crate) fn digest(&self, mut hasher: FileHasher) -> Result<[u8; DIGEST_LEN], Problem> {
        let mut chunk = vec![0; READ_LEN];
        let mut total = 0;
        loop {
            let len = self.file.read_at(&mut chunk, total).with_context(|| format!("{}", self.path.display()))?;
            if len == 0 {
                break;
            }
            hasher.update(&chunk[..len]);
            total += len as u64;
        }
        match self.problem() {
            Some(problem) => Err(problem),
            None if total != self.size => Err(changed(&self.path, "its length changed")),
            None => Ok(hasher.finish()),
        }
    }
}

/// Reads short files that travel together, and computes their digest. Fails if one was changed.
pub(crate) fn pack(
    files: &[(PathBuf, Entry, u64)],
    mut hasher: FileHasher,
) -> Result<(Bytes, [u8; DIGEST_LEN]), Problem> {
    let mut packed = Vec::new();
    for (path, entry, size) in files {
        let file = SourceFile::open(path, path.clone(), entry, *size)?;
        let from = packed.len();
        packed.resize(from + usize::try_from(*size)?, 0);
        let read = file.read_at(&mut packed[from..], 0);
        // A file that was truncated has an end too soon.
        file.problem().map_or(Ok(()), Err)?;
        read.with_context(|| format!("{}", path.display()))?;
    }
    hasher.update(&packed);
    Ok((packed.into(), hasher.finish()))
}

/// Computes the digest of a message with files, which travels behind it.
pub(crate) enum FileHasher {
    /// That of the group's message. Receivers have computed it from the blocks as they came.
    OfMessage(Box<DigestHasher>),
    /// BLAKE3, where no blocks are checked.
    OfContent(Box<blake3::Hasher>),
}

impl FileHasher {
    /// Chooses the digest for messages in blocks of `block_size` bytes on a node's fabric.
    pub(crate) fn new(node: &Node, block_size: u32) -> Self {
        match node.capabilities().protects_blocks {
            false => Self::OfMessage(Box::new(DigestHasher::new(block_size))),
            true => Self::OfContent(Box::default()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::OfMessage(hasher) => hasher.update(bytes),
            Self::OfContent(hasher) => drop(hasher.update(bytes)),
        }
    }

    fn finish(self) -> [u8; DIGEST_LEN] {
        match self {
            Self::OfMessage(hasher) => hasher.finish().0,
            Self::OfContent(hasher) => hasher.finalize().into(),
        }
    }
}

/// Tells whether a file that has arrived has this digest.
pub(crate) fn has_digest(file: &Message, digest: &[u8]) -> bool {
    let own = file.digest().map_or_else(|| blake3::hash(file).into(), |digest| digest.0);
    own[..] == *digest
}

/// The files that were sent last. If one is changed while it is sent, chance decides who finds wrong bytes, and what it
/// takes them for.
#[derive(Debug, Default)]
pub(crate) struct RecentFiles {
    files: VecDeque<Arc<SourceFile>>,
    changed: Option<Arc<SourceFile>>,
}

impl RecentFiles {
    /// Adds a file, and forgets one that was sent long ago.
    pub(crate) fn add(&mut self, file: Arc<SourceFile>) {
        if self.files.len() == RECENT_MAX {
            self.changed = self.changed.take().or(self.files.pop_front().filter(|oldest| oldest.change().is_some()));
        }
        self.files.push_back(file);
    }

    /// Blames a problem on a recent file that was changed, if there is one. Receivers that found wrong bytes, or could
    /// not get the bytes, are not blamed for it.
    pub(crate) fn blamed_for(&self, problem: Problem) -> Problem {
        if problem.kind == Kind::Stopped {
            return problem;
        }
        let Some(changed) = self.changed() else { return problem };
        let follows = |peer: &FailedPeer| peer.cause().may_follow_from_a_changed_file();
        let all_follow = !problem.failed().is_empty() && problem.failed().iter().all(follows);
        if all_follow || problem == changed {
            return changed;
        }
        Kind::Integrity.blaming(format!("{}; {}", changed.reason_alone(), problem.reason()), problem.failed().to_vec())
    }

    /// Returns the problem of a recent file that was changed, if there is one.
    pub(crate) fn changed(&self) -> Option<Problem> {
        self.changed.iter().chain(&self.files).find_map(|file| file.problem())
    }
}

/// What changes when a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    /// Seconds and nanoseconds of the last change of the content.
    mtime: (i64, i64),
    /// The same of the last change of anything, which no process can set.
    ctime: (i64, i64),
    links: u64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let mtime = (metadata.mtime(), metadata.mtime_nsec());
        let ctime = (metadata.ctime(), metadata.ctime_nsec());
        Self { len: metadata.len(), mtime, ctime, links: metadata.nlink() }
    }

    /// Returns what has happened to the file; `None` if nothing did, or only its number of links changed. A rename and a
    /// new mode count as changes.
    fn change_since(&self, before: Self) -> Option<String> {
        let (was, is) = (before.len, self.len);
        match is.cmp(&was) {
            Ordering::Less => return Some(format!("it was truncated from {was} to {is} bytes")),
            Ordering::Greater => return Some(format!("it has grown from {was} to {is} bytes")),
            Ordering::Equal => {}
        }
        if self.mtime != before.mtime {
            return Some("it was written to".to_owned());
        }
        let touched = self.ctime != before.ctime && self.links == before.links;
        touched.then(|| "its metadata changed".to_owned())
    }
}

fn changed(path: &Path, what: &str) -> Problem {
    let path = path.display();
    Kind::Integrity.problem(format!("{path} changed while it was being sent: {what}; {REMEDY}"))
}

/// What to do about a file that was changed.
const REMEDY: &str = "send it again when nothing changes it";
/// Error of a file that cannot be mapped.
const TOO_LONG: &str = "the file is longer than the address space";
/// Number of recent files: as many as are under way at once.
const RECENT_MAX: usize = UNDER_WAY_MAX;
/// Number of bytes read at once for a digest.
const READ_LEN: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use rdmc::{FailedMember, FailureCause, NodeId, Rank};

    use super::*;
    use crate::error::TransferError;

    fn code(problem: Problem) -> u8 {
        TransferError::from(problem).code()
    }

    fn hasher() -> FileHasher {
        FileHasher::OfMessage(Box::new(DigestHasher::new(1 << 20)))
    }

    #[test]
    fn a_tree_is_found_in_order_and_links_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("tree");
        std::fs::create_dir_all(root.join("empty")).unwrap();
        std::fs::write(root.join("b"), b"b").unwrap();
        std::fs::write(root.join("a"), b"").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", root.join("link")).unwrap();
        let source = SourceTree::find(&[root]).unwrap();
        let paths: Vec<_> = source.manifest.entries.iter().map(|entry| entry.path.to_string()).collect();
        assert_eq!(paths, ["tree", "tree/a", "tree/b", "tree/empty"]);
        assert_eq!(source.skipped.len(), 1);
    }

    #[test]
    fn a_server_skips_a_directory_that_cannot_be_read_and_a_sender_fails() {
        let dir = tempfile::tempdir().unwrap();
        let metadata = std::fs::metadata(dir.path()).unwrap();
        // Whoever may read every directory cannot list a file.
        let unreadable = dir.path().join("unreadable");
        std::fs::write(&unreadable, b"").unwrap();
        let path = EntryPath(vec![b"unreadable".to_vec()]);
        let mut served = SourceTree::find_served(Vec::new(), Vec::new()).unwrap();
        served.add(unreadable.clone(), path.clone(), &metadata).unwrap();
        assert_eq!((served.manifest.entries.len(), served.skipped.len()), (1, 1));
        let Skipped { path: skipped, reason, .. } = &served.skipped[0];
        assert!(*skipped == path && reason.contains("the directory cannot be read: Not a directory"), "{reason}");
        let error = SourceTree::default().add(unreadable, path, &metadata).unwrap_err();
        assert!(error.reason_alone().contains("Not a directory"), "{error}");
    }

    #[test]
    fn files_of_the_same_name_are_a_usage_error() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["x", "y"].map(|name| dir.path().join(name).join("same"));
        for path in &paths {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"").unwrap();
        }
        assert_eq!(code(SourceTree::find(&paths).unwrap_err()), 2);
    }

    #[test]
    fn a_special_file_is_skipped_in_a_directory_and_a_usage_error_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        for path in [&socket, &link, Path::new("/dev/null")] {
            let error = TransferError::from(SourceTree::find(&[path.to_owned()]).unwrap_err());
            assert_eq!(error.code(), 2);
            let said = error.to_string();
            assert!(said.contains(&path.display().to_string()) && said.contains("to a file, and send that"), "{said}");
        }
        let found = SourceTree::find(&[dir.path().to_owned()]).unwrap();
        assert_eq!((found.skipped.len(), found.files().count()), (2, 0));
    }

    #[test]
    fn a_file_that_changed_is_an_integrity_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"one").unwrap();
        let source = SourceTree::find(std::slice::from_ref(&path)).unwrap();
        let (at, entry, size) = source.files().next().unwrap();
        let open = SourceFile::open(at, at.to_owned(), entry, size).unwrap();
        std::fs::write(&path, b"three").unwrap();
        assert_eq!(code(open.digest(hasher()).unwrap_err()), 5);
        assert_eq!(code(SourceFile::open(at, at.to_owned(), entry, size).unwrap_err()), 5);
        std::fs::remove_file(&path).unwrap();
        let gone = TransferError::from(SourceFile::open(at, at.to_owned(), entry, size).unwrap_err());
        assert!(gone.code() == 5 && gone.to_string().contains(&path.display().to_string()), "{gone}");
        assert!(gone.to_string().contains("it was deleted"), "{gone}");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let pipe = TransferError::from(SourceFile::open(at, at.to_owned(), entry, size).unwrap_err());
        assert!(pipe.code() == 5 && pipe.to_string().contains("it is no longer a file"), "{pipe}");
    }

    #[test]
    fn a_short_file_that_changed_before_it_is_read_is_an_integrity_error() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["one", "two"].map(|name| dir.path().join(name));
        let changes: [fn(&Path); 4] = [
            |path| std::fs::write(path, b"longer").unwrap(),
            |path| std::fs::write(path, b"tw").unwrap(),
            |path| File::options().write(true).open(path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap(),
            |path| std::fs::remove_file(path).unwrap(),
        ];
        for change in changes {
            std::fs::write(&paths[0], b"one").unwrap();
            std::fs::write(&paths[1], b"two").unwrap();
            let source = SourceTree::find(&paths).unwrap();
            let files: Vec<_> = source.files().map(|(at, entry, size)| (at.to_owned(), entry.clone(), size)).collect();
            let (packed, digest) = pack(&files, hasher()).unwrap();
            let mut whole = hasher();
            whole.update(b"onetwo");
            assert_eq!((&packed[..], digest), (&b"onetwo"[..], whole.finish()));
            change(&paths[1]);
            let problem = pack(&files, hasher()).unwrap_err();
            assert!(problem.reason_alone().contains("/two changed while it was being sent"), "{problem}");
            assert_eq!(code(problem), 5);
        }
    }

    #[test]
    fn a_change_is_called_by_its_name_and_a_deleted_file_that_is_open_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let change = |change: &dyn Fn(&File)| {
            std::fs::write(&path, b"three").unwrap();
            let source = SourceTree::find(std::slice::from_ref(&path)).unwrap();
            let (at, entry, size) = source.files().next().unwrap();
            let open = SourceFile::open(at, at.to_owned(), entry, size).unwrap();
            change(&File::options().write(true).open(&path).unwrap());
            (open.change(), open.digest(hasher()).is_ok())
        };
        let failed = |what: &str| (Some(what.to_owned()), false);
        assert_eq!(change(&|file| file.set_len(2).unwrap()), failed("it was truncated from 5 to 2 bytes"));
        assert_eq!(change(&|file| file.set_len(7).unwrap()), failed("it has grown from 5 to 7 bytes"));
        let later = std::time::UNIX_EPOCH;
        assert_eq!(change(&|file| file.set_modified(later).unwrap()), failed("it was written to"));
        let touched = change(&|file| file.set_permissions(Permissions::from_mode(0o640)).unwrap());
        assert_eq!(touched, failed("its metadata changed"));
        assert_eq!(change(&|_| std::fs::remove_file(&path).unwrap()), (None, true));
    }

    #[test]
    fn what_comes_of_a_file_that_changed_is_blamed_on_it() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["changed", "other"].map(|name| dir.path().join(name));
        paths.iter().for_each(|path| std::fs::write(path, b"one").unwrap());
        let source = SourceTree::find(&paths).unwrap();
        let files: Vec<_> = source
            .files()
            .map(|(at, entry, size)| Arc::new(SourceFile::open(at, at.to_owned(), entry, size).unwrap()))
            .collect();
        let mut recent = RecentFiles::default();
        files.iter().for_each(|file| recent.add(file.clone()));
        let lost = || Kind::Partial.problem("10.0.0.2:7471 was lost");
        assert_eq!(code(recent.blamed_for(lost())), 3);
        let cause = FailureCause::Refused { reason: "integrity error: changed arrived with a wrong digest".into() };
        let peer = FailedPeer::new(&FailedMember { member: Rank(1), node: NodeId(1), cause }, Some("host:1".into()));
        let refused = || Kind::Integrity.blaming(format!("host:1 {}", peer.message()), vec![peer.clone()]);
        assert_eq!(recent.blamed_for(refused()), refused());
        std::fs::write(&paths[0], b"three").unwrap();
        // Also when others were sent since.
        for others in [0, RECENT_MAX] {
            (0..others).for_each(|_| recent.add(files[1].clone()));
            let blamed = TransferError::from(recent.blamed_for(lost()));
            assert_eq!(blamed.code(), 5);
            let told = "/changed changed while it was being sent: it has grown from 3 to 5 bytes; send it again when \
                        nothing changes it; 10.0.0.2:7471 was lost";
            assert!(blamed.to_string().ends_with(told), "{blamed}");
            assert_eq!(recent.blamed_for(refused()), files[0].problem().unwrap());
        }
        let known = files[0].digest(hasher()).unwrap_err();
        assert_eq!(recent.blamed_for(known.clone()), known);
        let stopped = Kind::Stopped.problem("");
        assert_eq!(recent.blamed_for(stopped.clone()), stopped);
    }
}
