//! The memory and files that a node shares by number, and the sealed objects that it shares by token. Peers get
//! descriptors for reading only.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::map::read_only;
use crate::sync::lock;

/// A shared object.
pub(super) enum Object {
    /// Memory that can never become shorter.
    Memory { file: File, len: u64 },
    /// A file that is opened for reading only. Other code may change and shorten it, so peers read it and do not map
    /// it.
    File(File),
}

/// The shared objects of one node. Numbers and tokens are random, so that a process must be told one to know it.
#[derive(Default)]
pub(super) struct Objects {
    numbered: Mutex<HashMap<u64, Object>>,
    sealed: Mutex<HashMap<u128, Arc<File>>>,
}

/// Returns bytes that are impossible to guess.
pub(super) fn random<const LEN: usize>() -> [u8; LEN] {
    let mut bytes = [0; LEN];
    getrandom::fill(&mut bytes).expect("the operating system provides randomness");
    bytes
}

impl Objects {
    /// Shares an object until it is forgotten, and returns its number.
    pub(super) fn share(&self, object: Object) -> u64 {
        let number = u64::from_le_bytes(random());
        lock(&self.numbered).insert(number, object);
        number
    }

    pub(super) fn forget(&self, number: u64) {
        lock(&self.numbered).remove(&number);
    }

    /// Opens an object for a peer: returns a descriptor for reading only, and the length of memory.
    pub(super) fn open(&self, number: u64) -> io::Result<(OwnedFd, Option<u64>)> {
        match lock(&self.numbered).get(&number) {
            Some(Object::Memory { file, len }) => Ok((read_only(file)?, Some(*len))),
            Some(Object::File(file)) => Ok((file.try_clone()?.into(), None)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Shares a sealed file until it is withdrawn, and returns its token.
    pub(super) fn publish(&self, file: Arc<File>) -> u128 {
        let token = u128::from_le_bytes(random());
        lock(&self.sealed).insert(token, file);
        token
    }

    pub(super) fn withdraw(&self, token: u128) {
        let file = lock(&self.sealed).remove(&token);
        drop(file);
    }

    /// Opens a sealed file for a peer: returns a descriptor for reading only, and its length.
    pub(super) fn open_sealed(&self, token: u128) -> io::Result<(OwnedFd, u64)> {
        let file = lock(&self.sealed).get(&token).cloned().ok_or(io::ErrorKind::NotFound)?;
        Ok((read_only(&file)?, file.metadata()?.len()))
    }
}
