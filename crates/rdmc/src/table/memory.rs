//! Memory from which one-sided writes are sent, again and again.

use std::io;

use rdmc_fabric::{Buffer, BufferMut, Fabric, MemoryRegion};

/// Memory for one write at a time.
///
/// It is allocated at the first write, and used again when the fabric holds it no more. If the fabric still holds it,
/// as it may although the bytes have arrived, other memory takes its place.
pub(super) struct WriteMemory {
    len: usize,
    /// What was written last.
    written: Option<Buffer>,
}

impl WriteMemory {
    /// Makes memory for writes of at most `len` bytes.
    pub(super) fn new(len: usize) -> Self {
        Self { len: len.max(LEN_MIN), written: None }
    }

    /// Returns what was written last.
    pub(super) fn written(&self) -> Option<Buffer> {
        self.written.clone()
    }

    /// Returns what is to be written: as many bytes as `encode` returns, from the beginning of the memory that it gets.
    pub(super) fn write(&mut self, fabric: &dyn Fabric, encode: impl FnOnce(&mut [u8]) -> usize) -> io::Result<Buffer> {
        let again = self.written.take().and_then(|written| {
            let rest = self.len - written.len();
            written.try_widen(0, rest).ok()
        });
        let mut memory = match again {
            Some(memory) => memory,
            None => fabric.allocate(self.len).map_err(io::Error::other).and_then(writable)?,
        };
        let len = encode(&mut memory);
        memory.truncate(len);
        let written = memory.freeze();
        self.written = Some(written.clone());
        Ok(written)
    }
}

fn writable(region: MemoryRegion) -> io::Result<BufferMut> {
    region.into_mut().map_err(|_| io::Error::other("a fabric allocates memory that cannot be written"))
}

/// Least bytes that are allocated: fabrics share or register whole pages.
const LEN_MIN: usize = 4 << 10;
