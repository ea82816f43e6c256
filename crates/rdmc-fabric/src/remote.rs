//! Memory that peers may reach by one-sided operations.

use std::fmt;
use std::io;

use crate::memory::{Buffer, BufferMut};

/// What a peer may do with exposed memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteAccess {
    /// It may read.
    pub read: bool,
    /// It may write.
    pub write: bool,
}

impl RemoteAccess {
    /// Reading only.
    pub const READ: Self = Self { read: true, write: false };
    /// Writing only.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Reading and writing.
    pub const READ_WRITE: Self = Self { read: true, write: true };
}

/// The address and key of a peer's exposed memory; it travels through the control plane only.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RemoteMemory {
    /// The secret that opens the memory: an rkey, or 64 random bits on software fabrics.
    pub key: u64,
    /// The address of the first byte, as the peer counts.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
}

impl RemoteMemory {
    /// Bytes of the encoded form.
    pub const ENCODED_LEN: usize = 24;

    /// Returns the part of `len` bytes at `offset`; the peer checks the bounds.
    #[must_use]
    pub fn slice(self, offset: u64, len: u64) -> Self {
        Self { key: self.key, address: self.address.wrapping_add(offset), len }
    }

    /// Encodes for the control plane: key, address, length, little endian.
    pub fn encode(self) -> [u8; Self::ENCODED_LEN] {
        let mut out = [0; Self::ENCODED_LEN];
        out[..8].copy_from_slice(&self.key.to_le_bytes());
        out[8..16].copy_from_slice(&self.address.to_le_bytes());
        out[16..].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    /// Decodes the result of [`encode`](Self::encode); all bytes are valid.
    pub fn decode(bytes: [u8; Self::ENCODED_LEN]) -> Self {
        let field = |at: usize| {
            let mut field = [0; 8];
            field.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(field)
        };
        Self { key: field(0), address: field(8), len: field(16) }
    }
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is a secret and stays out of logs.
        f.debug_struct("RemoteMemory").field("address", &self.address).field("len", &self.len).finish_non_exhaustive()
    }
}

/// Memory to be exposed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Expose {
    /// Memory that peers may write, and also read if [`RemoteAccess`] allows it.
    Mutable(BufferMut, RemoteAccess),
    /// Memory that peers may only read; the application may read it too.
    Frozen(Buffer),
}

/// Local access to exposed memory, as a fabric implements it.
pub trait ExposedMemory: Send + Sync {
    /// Returns what peers need to reach the memory.
    fn remote(&self) -> RemoteMemory;
    /// Copies bytes out; the caller has checked the range.
    fn read_at(&self, offset: usize, out: &mut [u8]);
    /// Copies bytes in; the caller has checked the range. Returns false if the memory is frozen.
    fn write_at(&self, offset: usize, bytes: &[u8]) -> bool;
}

/// A region that peers may reach; dropping it revokes the key.
///
/// Since peers may write at any moment, the owner sees the bytes only by copying them.
pub struct ExposedRegion {
    memory: Box<dyn ExposedMemory>,
}

impl ExposedRegion {
    /// Wraps a fabric's implementation; fabrics call it.
    pub fn new(memory: Box<dyn ExposedMemory>) -> Self {
        Self { memory }
    }

    /// Returns what a peer needs to reach the memory.
    pub fn remote(&self) -> RemoteMemory {
        self.memory.remote()
    }

    /// Copies bytes from the region.
    ///
    /// # Errors
    /// The range lies outside the region.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        self.check(offset, out.len())?;
        self.memory.read_at(offset, out);
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// The range lies outside the region, or the region is frozen.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        self.check(offset, bytes.len())?;
        if self.memory.write_at(offset, bytes) {
            Ok(())
        } else {
            Err(io::Error::new(io::ErrorKind::PermissionDenied, "the exposed memory is frozen"))
        }
    }

    /// Reads the little-endian number at `offset`.
    ///
    /// # Errors
    /// The range lies outside the region.
    pub fn read_u64(&self, offset: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read_at(offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn check(&self, offset: usize, len: usize) -> io::Result<()> {
        let room = self.memory.remote().len;
        let end = (offset as u64).saturating_add(len as u64);
        if end <= room {
            return Ok(());
        }
        let text = format!("{len} bytes at {offset} lie outside an exposed region of {room}");
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}

impl fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposedRegion").field("remote", &self.memory.remote()).finish()
    }
}
