//! The list of files and directories of a transfer, and the checks that make it safe to write them.
//!
//! A manifest comes from another host, so nothing in it is trusted. [`Manifest::decode`] accepts it only if every path
//! stays below the destination, whatever the file system folds or forbids.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::words::printable;

/// The files and directories of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// In the order in which they are sent. A directory comes before its entries.
    pub entries: Vec<Entry>,
}

/// A file or a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its path below the destination.
    pub path: EntryPath,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits; only the lowest nine are applied.
    pub mode: u32,
    /// Time of the last modification, in seconds since 1970.
    pub mtime_s: i64,
    /// Nanoseconds beyond those seconds, below 1,000,000,000.
    pub mtime_ns: u32,
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A file.
    File {
        /// Its length in bytes.
        size: u64,
    },
}

/// A path below the destination, by its components.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct EntryPath(pub Vec<Vec<u8>>);

impl<'de> Deserialize<'de> for EntryPath {
    /// Stops at an empty component and at the first one too many: such components take far more memory than they have
    /// bytes.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct("EntryPath", Components)
    }
}

/// Reads the components of a path.
struct Components;

impl<'de> Visitor<'de> for Components {
    type Value = EntryPath;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the components of a path")
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<EntryPath, D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<EntryPath, A::Error> {
        let mut path = Vec::new();
        while let Some(name) = names.next_element::<Vec<u8>>()? {
            if name.is_empty() || path.len() == DEPTH_MAX {
                return Err(A::Error::custom("a path has an empty component, or too many"));
            }
            path.push(name);
        }
        Ok(EntryPath(path))
    }
}

impl EntryPath {
    /// Returns the path for the operating system.
    pub fn to_path(&self) -> PathBuf {
        to_path(&self.0)
    }

    /// Returns the components before the last one.
    pub(crate) fn parents(&self) -> &[Vec<u8>] {
        self.0.split_last().map_or(&[], |(_, parents)| parents)
    }

    /// Splits off the last component.
    ///
    /// # Panics
    /// If the path has no component, which [`Manifest::check`] does not accept.
    pub fn split(&self) -> (PathBuf, &OsStr) {
        let (name, parents) = self.0.split_last().expect("a checked path has a component");
        (to_path(parents), OsStr::from_bytes(name))
    }

    /// Checks that the path stays below the destination.
    pub(crate) fn check(&self) -> Result<(), Flaw> {
        let flaw = |what| Err(Flaw { path: self.to_string(), what });
        if self.0.is_empty() {
            return flaw("it is empty");
        }
        if self.0.len() > DEPTH_MAX {
            return flaw("it is too deep");
        }
        if self.0.iter().map(|name| name.len() + 1).sum::<usize>() > PATH_LEN_MAX {
            return flaw("it is too long");
        }
        for name in &self.0 {
            match name.as_slice() {
                b"" => return flaw("a component is empty"),
                b"." | b".." => return flaw("it points elsewhere"),
                name if name.iter().any(|&byte| byte == b'/' || byte == 0) => {
                    return flaw("a component has a slash or a NUL");
                }
                name if name.len() > NAME_LEN_MAX => return flaw("a component is too long"),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the path as a file system that folds case sees it.
    fn folded(&self) -> Vec<String> {
        self.0.iter().map(|name| String::from_utf8_lossy(name).to_lowercase()).collect()
    }
}

/// Joins components to a path for the operating system.
pub(crate) fn to_path(names: &[Vec<u8>]) -> PathBuf {
    names.iter().map(|name| OsStr::from_bytes(name)).collect()
}

impl fmt::Display for EntryPath {
    /// Escapes control characters, so that a name from another host cannot steer this terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joined = self.0.join(&b'/');
        f.write_str(&printable(&String::from_utf8_lossy(&joined)))
    }
}

impl Manifest {
    /// Decodes and checks a manifest.
    ///
    /// # Errors
    /// The bytes encode no manifest, or an entry is unacceptable.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let manifest: Self = postcard::from_bytes(bytes).map_err(ManifestError::Malformed)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Encodes the manifest.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("plain data in memory is always encoded")
    }

    /// Checks each path, and all against each other.
    ///
    /// # Errors
    /// The first entry that is unacceptable.
    pub fn check(&self) -> Result<(), Flaw> {
        let mut seen: BTreeMap<&[Vec<u8>], &Entry> = BTreeMap::new();
        let mut total = 0u64;
        for entry in &self.entries {
            entry.path.check()?;
            let flaw = |what| Flaw { path: entry.path.to_string(), what };
            let parents = entry.path.parents();
            if !parents.is_empty() {
                let parent = seen.get(parents).ok_or_else(|| flaw("its directory does not precede it"))?;
                if parent.kind != EntryKind::Directory {
                    return Err(flaw("its parent is not a directory"));
                }
            }
            if let EntryKind::File { size } = entry.kind {
                total = total.checked_add(size).ok_or_else(|| flaw("the sizes add up to more than 2^64"))?;
            }
            if entry.mtime_ns >= 1_000_000_000 {
                return Err(flaw("its time is malformed"));
            }
            if seen.insert(&entry.path.0, entry).is_some() {
                return Err(flaw("it is listed twice"));
            }
        }
        Ok(())
    }

    /// Returns the entries that differ from an earlier one only in upper and lower case. A file system that folds case
    /// has one name for both.
    pub fn folded_alike(&self) -> impl Iterator<Item = &Entry> {
        let mut seen = BTreeSet::new();
        self.entries.iter().filter(move |entry| !seen.insert(entry.path.folded()))
    }

    /// Returns the files in order, with their sizes.
    pub fn files(&self) -> impl Iterator<Item = (&Entry, u64)> {
        self.entries.iter().filter_map(|entry| match entry.kind {
            EntryKind::File { size } => Some((entry, size)),
            EntryKind::Directory => None,
        })
    }

    /// Returns the directories in order.
    pub fn directories(&self) -> impl DoubleEndedIterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.kind == EntryKind::Directory)
    }

    /// Returns the number of files, and the sum of their sizes in bytes.
    pub fn totals(&self) -> (u64, u64) {
        self.files().fold((0, 0), |(files, bytes), (_, size)| (files + 1, bytes + size))
    }
}

#[cfg(test)]
impl Manifest {
    /// Makes files `file0`, `file1`, … of these sizes, and their contents.
    pub(crate) fn of_sizes(sizes: &[usize]) -> (Self, Vec<bytes::Bytes>) {
        let entries = sizes.iter().zip(0..).map(|(size, at)| Entry {
            path: EntryPath(vec![format!("file{at}").into_bytes()]),
            kind: EntryKind::File { size: *size as u64 },
            mode: 0o600,
            mtime_s: 1,
            mtime_ns: 2,
        });
        let contents = sizes.iter().map(|size| (0..=250).cycle().take(*size).collect());
        (Self { entries: entries.collect() }, contents.collect())
    }
}

/// Error of bytes that are not accepted as a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// They encode no manifest.
    #[error(transparent)]
    Malformed(postcard::Error),
    /// An entry is unacceptable.
    #[error(transparent)]
    Unacceptable(#[from] Flaw),
}

/// What makes an entry of a manifest unacceptable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    path: String,
    what: &'static str,
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the path {:?} is not acceptable: {}", self.path, self.what)
    }
}

impl std::error::Error for Flaw {}

/// Greatest length of an encoded manifest, in bytes.
pub const LEN_MAX: u64 = 64 << 20;
/// Greatest number of components of a path.
const DEPTH_MAX: usize = 128;
/// Greatest length of a path in bytes, separators included.
const PATH_LEN_MAX: usize = 3072;
/// Greatest length of a component in bytes.
const NAME_LEN_MAX: usize = 255;

#[cfg(test)]
mod tests {
    use std::path::{Component, Path};

    use proptest::prelude::*;

    use super::*;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        let names = path.split('|').map(|name| name.as_bytes().to_vec()).collect();
        Entry { path: EntryPath(names), kind, mode: 0o644, mtime_s: 0, mtime_ns: 0 }
    }

    fn checked(entries: &[(&str, EntryKind)]) -> Result<(), Flaw> {
        Manifest { entries: entries.iter().map(|&(path, kind)| entry(path, kind)).collect() }.check()
    }

    const FILE: EntryKind = EntryKind::File { size: 1 };

    #[test]
    fn a_tree_with_parents_first_is_accepted() {
        checked(&[
            ("a", EntryKind::Directory),
            ("a|b", FILE),
            ("a|c", EntryKind::Directory),
            ("a|c|...", FILE),
            ("x", FILE),
        ])
        .unwrap();
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        let long = "n".repeat(256);
        for path in ["", ".", "..", "a|..", "a||b", "/etc", "a/b", "..|a", "nul\0", "a|.", long.as_str()] {
            checked(&[("a", EntryKind::Directory), (path, FILE)]).expect_err(path);
        }
        let deep = Entry { path: EntryPath(vec![b"d".to_vec(); DEPTH_MAX + 1]), ..entry("a", FILE) };
        assert!(Manifest { entries: vec![deep] }.check().is_err());
        let empty = Entry { path: EntryPath(Vec::new()), ..entry("a", FILE) };
        assert!(Manifest { entries: vec![empty] }.check().is_err());
    }

    #[test]
    fn names_that_collide_are_refused() {
        checked(&[("a", FILE), ("a", FILE)]).unwrap_err();
        checked(&[("a", EntryKind::Directory), ("a", EntryKind::Directory)]).unwrap_err();
        checked(&[("a", EntryKind::Directory), ("A|x", FILE)]).unwrap_err();
    }

    #[test]
    fn names_that_a_file_system_may_take_for_one_are_known() {
        let alike = |entries: &[(&str, EntryKind)]| {
            checked(entries).unwrap();
            let entries = entries.iter().map(|&(path, kind)| entry(path, kind)).collect();
            Manifest { entries }.folded_alike().map(|entry| entry.path.to_string()).collect::<Vec<_>>()
        };
        let (file, directory) = (FILE, EntryKind::Directory);
        assert_eq!(alike(&[("Makefile", file), ("b", file), ("makefile", file)]), ["makefile"]);
        assert_eq!(alike(&[("a", directory), ("A", directory), ("a|x", file), ("A|x", file)]), ["A", "A/x"]);
        assert!(alike(&[("a", directory), ("a|a", file), ("b", file)]).is_empty());
    }

    #[test]
    fn what_lies_in_no_listed_directory_is_refused() {
        checked(&[("a|b", FILE)]).unwrap_err();
        checked(&[("a|b", FILE), ("a", EntryKind::Directory)]).unwrap_err();
        checked(&[("a", FILE), ("a|b", FILE)]).unwrap_err();
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let huge = EntryKind::File { size: u64::MAX };
        checked(&[("a", huge)]).unwrap();
        checked(&[("a", huge), ("b", FILE)]).unwrap_err();
    }

    #[test]
    fn paths_that_cost_more_memory_than_bytes_are_not_read_to_their_end() {
        let read = |names: Vec<Vec<u8>>| {
            let entry = Entry { path: EntryPath(names), ..entry("a", FILE) };
            postcard::from_bytes::<Manifest>(&Manifest { entries: vec![entry] }.encode())
        };
        assert!(read(vec![b"d".to_vec(); DEPTH_MAX]).is_ok());
        assert!(read(vec![b"d".to_vec(); DEPTH_MAX + 1]).is_err());
        assert!(read(vec![b"d".to_vec(), Vec::new()]).is_err());
    }

    #[test]
    fn control_characters_are_not_shown_raw() {
        let path = entry("a\x1b[2J|b\n", FILE).path;
        assert_eq!(path.to_string(), "a\\u{1b}[2J/b\\n");
    }

    fn names() -> impl Strategy<Value = Vec<u8>> {
        let hostile = prop::sample::select(vec![
            "",
            ".",
            "..",
            "/",
            "a/b",
            "../x",
            "/etc/passwd",
            "\0",
            "a\0b",
            "a",
            "A",
            "b",
            "dir",
            "...",
            "..\\",
        ]);
        prop_oneof![
            3 => hostile.prop_map(|name| name.as_bytes().to_vec()),
            1 => prop::collection::vec(any::<u8>(), 0..300),
        ]
    }

    fn entries() -> impl Strategy<Value = Entry> {
        let kind = prop_oneof![Just(EntryKind::Directory), any::<u64>().prop_map(|size| EntryKind::File { size })];
        let path = prop::collection::vec(names(), 0..5);
        (path, kind, any::<u32>(), any::<i64>(), any::<u32>()).prop_map(|(path, kind, mode, mtime_s, mtime_ns)| Entry {
            path: EntryPath(path),
            kind,
            mode,
            mtime_s,
            mtime_ns,
        })
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_stays_below_the_destination(entries in prop::collection::vec(entries(), 0..8)) {
            let bytes = Manifest { entries }.encode();
            if let Ok(manifest) = Manifest::decode(&bytes) {
                let mut seen = BTreeSet::new();
                for entry in &manifest.entries {
                    let path = entry.path.to_path();
                    prop_assert!(path.components().all(|part| matches!(part, Component::Normal(_))));
                    prop_assert_eq!(path.components().count(), entry.path.0.len());
                    prop_assert!(Path::new("/d").join(&path).starts_with("/d"));
                    prop_assert!(seen.insert(path));
                }
            }
        }

        #[test]
        fn bytes_from_anywhere_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let _ = Manifest::decode(&bytes);
        }
    }
}
