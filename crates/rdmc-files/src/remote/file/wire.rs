//! What the two ends of an open file say to each other: metadata of the session, notes of slabs, and messages.

use std::io;

use serde::{Deserialize, Serialize};

use super::RemoteFileMetadata;
use crate::remote::wire::{ReadRange, shortened};
use crate::words::printable;

/// The server's answer to a request to open a file, as the session's metadata.
pub(crate) type Opened = Result<RemoteFileMetadata, FileError>;

/// The note of a client's slab for an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FileCommand {
    /// Send these bytes as a new stream; the present one ends. The number of each stream is one more than the last.
    Read { stream: u64, range: ReadRange },
    /// The present stream may go on to this offset.
    ReadOn { end: u64 },
    /// Write the bytes of the slab. The present stream ends.
    Write { offset: u64 },
    /// Say that all before is done; if `sync`, it is on the disk then.
    Flush { sync: bool },
}

/// The note of a server's slab with the next bytes of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileBytes {
    pub(crate) stream: u64,
    /// The file ends after these bytes, and so does the stream.
    pub(crate) last: bool,
}

/// A message of a server about an open file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FileNews {
    /// A flush is done.
    Done(RemoteFileMetadata),
    /// An operation has failed, and the file is closed.
    Failed(FileError),
}

/// An error of the server's file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileError {
    /// The place in [`ERROR_KINDS`]; any other for other kinds.
    kind: u8,
    reason: String,
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        let kind = ERROR_KINDS.iter().zip(0..).find(|(kind, _)| **kind == error.kind());
        Self { kind: kind.map_or(u8::MAX, |(_, place)| place), reason: shortened(error.to_string()) }
    }
}

impl FileError {
    pub(crate) fn kind(&self) -> io::ErrorKind {
        ERROR_KINDS.get(usize::from(self.kind)).copied().unwrap_or(io::ErrorKind::Other)
    }

    /// Returns the reason, for people.
    pub(crate) fn reason(&self) -> String {
        printable(&self.reason)
    }
}

/// The kinds of errors that both ends know. New ones come last.
const ERROR_KINDS: [io::ErrorKind; 13] = [
    io::ErrorKind::NotFound,
    io::ErrorKind::PermissionDenied,
    io::ErrorKind::AlreadyExists,
    io::ErrorKind::InvalidInput,
    io::ErrorKind::IsADirectory,
    io::ErrorKind::NotADirectory,
    io::ErrorKind::ReadOnlyFilesystem,
    io::ErrorKind::StorageFull,
    io::ErrorKind::QuotaExceeded,
    io::ErrorKind::FileTooLarge,
    io::ErrorKind::InvalidFilename,
    io::ErrorKind::ExecutableFileBusy,
    io::ErrorKind::StaleNetworkFileHandle,
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::remote::wire::{REASON_LEN_MAX, decode, encode};

    #[test]
    fn the_kind_of_an_error_travels_and_its_reason_is_cut() {
        for kind in ERROR_KINDS {
            let error = FileError::from(io::Error::new(kind, "\u{1}é".repeat(REASON_LEN_MAX)));
            assert_eq!(decode::<FileError>(&encode(&error)).unwrap().kind(), kind);
            assert!(error.reason.len() <= REASON_LEN_MAX && error.reason().starts_with("\\u{1}é"));
        }
        let other = FileError::from(io::Error::new(io::ErrorKind::TimedOut, "late"));
        assert_eq!(other.kind(), io::ErrorKind::Other);
    }

    proptest! {
        #[test]
        fn any_bytes_are_what_an_end_says_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode::<Opened>(&bytes);
            let _ = decode::<FileCommand>(&bytes);
            let _ = decode::<FileBytes>(&bytes);
            let _ = decode::<FileNews>(&bytes);
        }
    }
}
