//! What a node shares with its peers, by number: descriptors of memory and of files, handed out for reading.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use super::map::read_only;
use crate::sync::lock;

/// Something that is shared.
pub(super) enum Object {
    /// Memory, which never becomes shorter.
    Memory { file: File, len: u64 },
    /// A file, opened for reading alone, which others may change and shorten: it is read, not mapped.
    File(File),
}

/// What one node shares. The numbers are random: whoever was not told one does not guess it.
#[derive(Default)]
pub(super) struct Objects(Mutex<HashMap<u64, Object>>);

impl Objects {
    /// Shares an object until it is forgotten, and returns its number.
    pub(super) fn share(&self, object: Object) -> u64 {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).expect("the operating system provides randomness");
        let number = u64::from_le_bytes(bytes);
        lock(&self.0).insert(number, object);
        number
    }

    pub(super) fn forget(&self, number: u64) {
        lock(&self.0).remove(&number);
    }

    /// Opens an object for a peer: a descriptor by which it can be read alone, and the length of memory.
    pub(super) fn open(&self, number: u64) -> io::Result<(OwnedFd, Option<u64>)> {
        match lock(&self.0).get(&number) {
            Some(Object::Memory { file, len }) => Ok((read_only(file)?, Some(*len))),
            Some(Object::File(file)) => Ok((file.try_clone()?.into(), None)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}
