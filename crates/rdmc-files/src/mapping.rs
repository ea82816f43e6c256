//! Files as registered memory: the only unsafe code of this crate, because other processes share a file with its
//! mapping.
#![expect(unsafe_code, reason = "a mapping shares its bytes with whatever else has the file open")]

use std::fs::File;
use std::io;

use rdmc::Memory;

/// Maps the first `len` bytes of a source file, to be sent without a copy.
pub(crate) fn to_send(file: &File, len: usize) -> io::Result<Memory> {
    // SAFETY: the kernel or a device reads the bytes to send them. A process that changes the file meanwhile changes
    // what is sent. The digest is made of what is read from the file, and shows that change.
    unsafe { Memory::map_file(file, len) }
}

/// Maps the first `len` bytes of a temporary file of this crate, to be received into without a copy.
pub(crate) fn to_receive(file: &File, len: usize) -> io::Result<Memory> {
    // SAFETY: the file has a random name that nobody knows, or is locked in a directory that only its owner can enter.
    // This crate reads it through the file system only when the mapping is gone.
    unsafe { Memory::map_file_mut(file, len) }
}
