//! What the two ends of a remote transfer say to each other: metadata of the session, and notes of slabs.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::error::{Kind, Problem};
use crate::manifest::{EntryPath, Manifest};

/// The first words of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    magic: [u8; 4],
    version: u16,
    pub(crate) request: Request,
}

/// What a client wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Files and directories of the server; an empty path is all of its directory.
    Get { paths: Vec<EntryPath> },
    /// To put files into a directory of the server; an empty path is the server's own.
    Put { into: EntryPath },
    /// That the server gets files of the server at `from`, and puts them into a directory of its own.
    Fetch { from: String, paths: Vec<EntryPath>, into: EntryPath },
    /// To read and write one file of the server.
    Open { path: EntryPath, how: OpenHow },
}

/// How a file is opened. At least one of `read` and `write` is set; the others after it need `write`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenHow {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) truncate: bool,
    pub(crate) create: bool,
    pub(crate) create_new: bool,
    /// What the server sends at once, as the stream 0.
    pub(crate) first: Option<ReadRange>,
}

/// Bytes of a file that a client asks for: `start <= end <= OFFSET_MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// What comes with a slab.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Note {
    /// Of the producer: a part of the encoded manifest.
    Manifest { last: bool },
    /// Of the consumer: a part of the encoded list of [known files](KnownFile).
    Known { last: bool },
    /// Of the producer: what is in the slab, in order.
    Items(Vec<Item>),
}

/// Files follow each other in the order of the manifest. One ends before the next begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Item {
    /// The next bytes of the slab belong to a file.
    Data {
        /// The file's number among the files of the manifest.
        file: u32,
        offset: u64,
        len: u32,
    },
    /// A file is complete, with these bytes that the consumer has already.
    Done { file: u32, had: u64 },
    /// A file cannot be read: nothing more of it comes.
    Failed { file: u32, reason: String },
    /// Something that the manifest does not have was left out. It stands between files.
    Skipped { path: EntryPath, reason: String },
}

/// What a consumer may have of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownFile {
    pub(crate) file: u32,
    /// The XXH3 of each of its blocks, in 128 bits.
    pub(crate) sums: Vec<u128>,
}

/// The last message of a consumer at a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// What a server that fetches says to its client. A message of the session has a list of these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FetchNews {
    Listed {
        files: u64,
        bytes: u64,
    },
    Progress {
        bytes: u64,
    },
    File {
        path: String,
        bytes: u64,
    },
    Skipped {
        path: String,
        reason: String,
    },
    /// All is done. Nothing more is said.
    Done {
        files: u64,
        bytes: u64,
        moved: u64,
        skipped: u64,
        resumed: u64,
    },
}

impl Opening {
    pub(crate) fn encode(request: Request) -> Vec<u8> {
        let opening = Self { magic: MAGIC, version: VERSION, request };
        postcard::to_stdvec(&opening).expect("plain data in memory is always encoded")
    }

    /// Decodes and checks the first words of a client.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Request, Problem> {
        let head = postcard::take_from_bytes::<([u8; 4], u16)>(bytes);
        let refused = |what: String| Err(Kind::Request.problem(what));
        match head {
            Ok(((MAGIC, VERSION), _)) => {}
            Ok(((MAGIC, version), _)) => {
                return refused(format!("it speaks version {version} of remote files, this server version {VERSION}"));
            }
            _ => return refused(NO_FILES.to_owned()),
        }
        let opening: Self = postcard::from_bytes(bytes)?;
        let paths = match &opening.request {
            Request::Get { paths } => paths.as_slice(),
            Request::Put { into } => std::slice::from_ref(into),
            Request::Fetch { paths, into, .. } => {
                check(into)?;
                paths
            }
            Request::Open { path, how } => {
                if let Some(flaw) = how.flaw() {
                    return refused(flaw.to_owned());
                }
                std::slice::from_ref(path)
            }
        };
        paths.iter().try_for_each(check)?;
        Ok(opening.request)
    }
}

impl OpenHow {
    /// Returns what is wrong with it.
    pub(crate) fn flaw(&self) -> Option<&'static str> {
        let Self { read, write, truncate, create, create_new, first } = *self;
        if !read && !write {
            return Some("a file is opened for reading, writing or both");
        }
        if !write && (truncate || create || create_new) {
            return Some("only a file that is opened for writing is created or truncated");
        }
        match first {
            Some(_) if !read => Some("a file that is not opened for reading is not read"),
            Some(range) if !range.is_valid() => Some(OUT_OF_RANGE),
            _ => None,
        }
    }
}

impl ReadRange {
    /// Makes the range of `len` bytes from `start`, or of those up to the greatest offset.
    pub(crate) fn new(start: u64, len: u64) -> Self {
        Self { start, end: start.saturating_add(len).min(OFFSET_MAX) }
    }

    pub(crate) fn is_valid(self) -> bool {
        self.start <= self.end && self.end <= OFFSET_MAX
    }

    pub(crate) fn len(self) -> u64 {
        self.end - self.start
    }
}

fn check(path: &EntryPath) -> Result<(), Problem> {
    match path.0.is_empty() {
        true => Ok(()),
        false => path.check().map_err(|flaw| Kind::Request.problem(flaw)),
    }
}

/// Decodes the note of a slab, or another value of a peer.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Problem> {
    postcard::from_bytes(bytes).map_err(|error| Problem::from(error).context("the other end sends something else"))
}

/// Returns the greatest length of the list of known files of a manifest, in bytes.
pub(crate) fn known_len_max(manifest: &Manifest) -> usize {
    manifest.files().map(|(_, size)| known_file_len_max(size)).fold(0, usize::saturating_add).min(KNOWN_LEN_MAX)
}

/// Returns the greatest length of a known file of `size` bytes in that list, in bytes.
pub(crate) fn known_file_len_max(size: u64) -> usize {
    let blocks = usize::try_from(size.div_ceil(KNOWN_BLOCK as u64)).unwrap_or(usize::MAX);
    blocks.saturating_mul(SUM_LEN_MAX).saturating_add(KNOWN_FILE_LEN)
}

/// Encodes a list of known files: one after the other.
pub(crate) fn encode_known(known: &[KnownFile]) -> Vec<u8> {
    let add = |bytes, file| postcard::to_extend(file, bytes).expect("plain data in memory is always encoded");
    known.iter().fold(Vec::new(), add)
}

/// Decodes a list of known files of a manifest.
pub(crate) fn decode_known(mut bytes: &[u8], manifest: &Manifest) -> Result<HashMap<u32, Vec<u128>>, Problem> {
    let sizes: Vec<u64> = manifest.files().map(|(_, size)| size).collect();
    let (mut known, mut next) = (HashMap::new(), 0);
    while !bytes.is_empty() {
        let (KnownFile { file, sums }, rest) = postcard::take_from_bytes(bytes)?;
        let size = sizes.get(file as usize).filter(|_| file >= next);
        if size.is_none_or(|size| sums.len() as u64 != size.div_ceil(KNOWN_BLOCK as u64)) {
            return Err(Problem::local("the other end has files that were not listed"));
        }
        known.insert(file, sums);
        (bytes, next) = (rest, file + 1);
    }
    Ok(known)
}

/// Cuts a text to the length of a reason.
pub(crate) fn shortened(mut text: String) -> String {
    while text.len() > REASON_LEN_MAX {
        text.pop();
    }
    text
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(value).expect("plain data in memory is always encoded")
}

const MAGIC: [u8; 4] = *b"rfil";
const VERSION: u16 = 2;
const NO_FILES: &str = "this is a server of files (`rdmc serve`), and was asked for something else";
/// Length of a block whose sum tells whether the consumer has it, in bytes.
pub(crate) const KNOWN_BLOCK: usize = 1 << 20;
/// Greatest length of the list of known files, in bytes: of 4 TiB.
const KNOWN_LEN_MAX: usize = 96 << 20;
/// Most bytes of an encoded sum, and of a known file without its sums.
const SUM_LEN_MAX: usize = 19;
const KNOWN_FILE_LEN: usize = 16;
/// Most bytes of the items of a slab, before the last one is added.
pub(crate) const ITEMS_LEN_MAX: usize = 48 << 10;
/// Most bytes of an item without its reason.
pub(crate) const ITEM_LEN_MAX: usize = 24;
/// Most bytes of a reason.
pub(crate) const REASON_LEN_MAX: usize = 1024;
/// Greatest offset in an open file, in bytes: that of the system.
pub(crate) const OFFSET_MAX: u64 = i64::MAX as u64;
pub(crate) const OUT_OF_RANGE: &str = "offsets in a file are at most 2^63 - 1, and ranges do not end before they start";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_note_fits() {
        let data = Item::Data { file: u32::MAX, offset: u64::MAX, len: u32::MAX };
        assert!(encode(&data).len() <= ITEM_LEN_MAX);
        let failed = Item::Failed { file: u32::MAX, reason: "x".repeat(REASON_LEN_MAX) };
        let items = |last| [vec![data.clone(); ITEMS_LEN_MAX / ITEM_LEN_MAX], vec![last]].concat();
        assert!(encode(&Note::Items(items(failed))).len() <= 64 << 10);
        // A directory that has the longest path, and a link in it.
        let path = EntryPath([vec![vec![b'x']; 1536], vec![vec![b'x'; 255]]].concat());
        let skipped = Item::Skipped { path, reason: "x".repeat(REASON_LEN_MAX) };
        assert!(encode(&Note::Items(items(skipped))).len() <= 64 << 10);
    }

    #[test]
    fn known_files_are_those_of_the_manifest() {
        let (manifest, _) = Manifest::of_sizes(&[1, 0, 3 << 20]);
        let known = |file, sums| KnownFile { file, sums: vec![u128::MAX; sums] };
        let decoded = |known: &[KnownFile]| decode_known(&encode_known(known), &manifest);
        let all = [known(0, 1), known(1, 0), known(2, 3)];
        assert_eq!(decoded(&all).unwrap().len(), 3);
        assert!(encode_known(&all).len() <= known_len_max(&manifest));
        for wrong in [known(0, 0), known(0, 2), known(2, 4), known(3, 0)] {
            assert!(decoded(&[wrong]).is_err());
        }
        assert!(decoded(&[known(2, 3), known(0, 1)]).is_err() && decoded(&[known(0, 1), known(0, 1)]).is_err());
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        let path = |names: &[&str]| EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
        let how = OpenHow { read: true, ..OpenHow::default() };
        for names in [&["..", "etc"][..], &["a", ".."], &["/etc"], &["."]] {
            let from = "host:1".to_owned();
            let fetch = |paths: Vec<EntryPath>, into| Request::Fetch { from: from.clone(), paths, into };
            let requests = [
                Request::Get { paths: vec![path(names)] },
                Request::Put { into: path(names) },
                fetch(vec![path(&[]), path(names)], path(&[])),
                fetch(Vec::new(), path(names)),
                Request::Open { path: path(names), how },
            ];
            for request in requests {
                assert!(Opening::decode(&Opening::encode(request)).is_err(), "{names:?}");
            }
        }
        let opening = Opening::encode(Request::Get { paths: vec![path(&[]), path(&["a", "b"])] });
        assert!(Opening::decode(&opening).is_ok());
    }

    #[test]
    fn a_file_is_opened_in_a_way_that_has_a_meaning_or_refused() {
        let path = EntryPath(vec![b"a".to_vec()]);
        let is_decoded = |how| Opening::decode(&Opening::encode(Request::Open { path: path.clone(), how })).is_ok();
        let none = OpenHow::default();
        let first = |start, end| Some(ReadRange { start, end });
        let (read, write) = (OpenHow { read: true, ..none }, OpenHow { write: true, ..none });
        for right in [
            OpenHow { first: first(5, OFFSET_MAX), ..read },
            OpenHow { create: true, truncate: true, create_new: true, ..write },
        ] {
            assert!(is_decoded(right), "{right:?}");
        }
        for wrong in [
            none,
            OpenHow { create: true, ..read },
            OpenHow { create_new: true, ..read },
            OpenHow { truncate: true, ..read },
            OpenHow { first: first(0, 5), ..write },
            OpenHow { first: first(5, 4), ..read },
            OpenHow { first: first(0, OFFSET_MAX + 1), ..read },
        ] {
            assert!(!is_decoded(wrong), "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_opening_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Opening::decode(&bytes);
            let _ = decode::<Note>(&bytes);
            let _ = decode_known(&bytes, &Manifest::of_sizes(&[1, 0, 3 << 20]).0);
        }
    }
}
