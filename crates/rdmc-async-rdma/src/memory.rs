//! Memory that the device reads and writes.
//!
//! `async-rdma` registers only memory that it allocates itself: a [`Region`]. Memory that the fabric allocated is a
//! region, and is sent and received in place. Other memory is copied through a region for each request. Exposures are
//! regions of their own too, since they need their own bounds and access rights.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use async_rdma::{AccessFlag, LocalMr, LocalMrReadAccess, MrAccess};
use enumflags2::BitFlags;
use rdmc_fabric::{
    Buffer, BufferMut, Expose, ExposedMemory, FabricError, Memory, MemoryRegion, RemoteAccess, RemoteMemory,
};
use rustix::mm::{Advice, madvise};

use crate::device::Device;
use crate::frame::ReceiveBuffer;

/// An allocation of `async-rdma`; deregistered and freed when it is dropped and the device is done with it.
#[derive(Debug)]
pub(crate) struct Region {
    mr: LocalMr,
    key: u32,
    /// What can reach it: other regions with the same token.
    domain: Arc<()>,
}

impl Region {
    /// Wraps an allocation that nothing has used yet.
    pub(crate) fn new(mr: LocalMr, domain: Arc<()>) -> Self {
        // Asked for once, since asking takes a lock that operations hold.
        let key = mr.rkey();
        Self { mr, key, domain }
    }

    /// Copies `bytes` into a new region.
    fn copy_of(device: &Device, bytes: &[u8], access: BitFlags<AccessFlag>) -> Result<Self, FabricError> {
        let region = device.allocate(bytes.len(), access)?;
        // SAFETY: the region is as long as `bytes`, initialised, and so new that no other code knows it.
        unsafe { region.ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(region)
    }

    /// Copies the first bytes out. The device must be done with them.
    pub(crate) fn copy_to(&self, out: &mut [u8]) {
        assert!(out.len() <= self.mr.length(), "no more is taken out of a region than it holds");
        // SAFETY: the range lies inside the region, whose bytes are initialised; `out` is memory of its own.
        unsafe { self.ptr().copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
    }

    /// Returns a part of the region, for an operation that reads it.
    pub(crate) fn slice(&self, range: Range<usize>) -> impl LocalMrReadAccess {
        assert!(range.start <= range.end && range.end <= self.mr.length(), "a part lies inside its region");
        // SAFETY: the bounds were checked above. (`get` would do so too, but refuses to make an empty part.)
        unsafe { self.mr.get_unchecked(range) }
    }

    /// Returns the whole allocation, for an operation that writes it.
    pub(crate) fn mr_mut(&mut self) -> &mut LocalMr {
        &mut self.mr
    }

    pub(crate) fn is_of(&self, device: &Device) -> bool {
        Arc::ptr_eq(&self.domain, device.domain())
    }

    fn ptr(&self) -> *mut u8 {
        self.mr.as_ptr_unchecked().cast_mut()
    }

    fn address(&self) -> u64 {
        self.mr.addr() as u64
    }

    /// Returns the pages that hold nothing else than this region.
    fn whole_pages(&self) -> (*mut c_void, usize) {
        let page_len = rustix::param::page_size();
        let before = self.ptr().align_offset(page_len);
        let len = self.mr.length().saturating_sub(before) / page_len * page_len;
        (self.ptr().wrapping_add(before).cast(), len)
    }
}

impl Drop for Region {
    /// Takes the pages from the process, but not from the device. `async-rdma` frees an allocation before it tells the
    /// device. What a peer writes in that time would land in the allocator's lists or in the memory's next user; now it
    /// lands in pages that only the device still has.
    fn drop(&mut self) {
        let (pages, len) = self.whole_pages();
        if len == 0 {
            return;
        }
        // SAFETY: the pages hold nothing but this region, which nobody reads any more, and stay mapped. Requests that
        // the device still has use the pages that it was told of.
        if let Err(error) = unsafe { madvise(pages, len, Advice::LinuxDontNeed) } {
            tracing::debug!(%error, "pages of a region could not be replaced before they are freed");
        }
    }
}

/// Allocates memory that is sent from and received into in place.
pub(crate) fn allocate(device: &Device, len: usize) -> Result<MemoryRegion, FabricError> {
    if len == 0 {
        return Ok(MemoryRegion::new(Memory::from(Vec::new()), Box::new(())));
    }
    // Peers write their messages into it.
    let region = Arc::new(device.allocate(len, AccessFlag::LocalWrite | AccessFlag::RemoteWrite)?);
    let ptr = NonNull::new(region.ptr()).expect("an allocation is never null");
    // SAFETY: the region holds `len` zeroed bytes for as long as it lives; nothing in this crate touches them but on
    // behalf of a request that owns the range. A peer to which a range was announced may write it later than it should:
    // peers are trusted with that, as the README says.
    let memory = unsafe { Memory::from_raw(ptr, len, true, Box::new(region.clone())) };
    Ok(MemoryRegion::new(memory, Box::new(region)))
}

/// Bytes of a send or write: a part of a region.
pub(crate) struct Source {
    region: Arc<Region>,
    range: Range<usize>,
}

impl Source {
    /// Finds the bytes of `data` in memory of the device, or copies them there.
    pub(crate) fn of(device: &Device, data: &Buffer) -> Result<Self, FabricError> {
        if data.is_empty() {
            return Ok(Self { region: device.scratch().clone(), range: 0..0 });
        }
        if let Some(region) = data.registration::<Arc<Region>>().filter(|region| region.is_of(device)) {
            let start = data.as_ptr().addr() - region.mr.addr();
            return Ok(Self { region: region.clone(), range: start..start + data.len() });
        }
        let region = Region::copy_of(device, data, AccessFlag::LocalWrite.into())?;
        Ok(Self { region: Arc::new(region), range: 0..data.len() })
    }

    pub(crate) fn slice(&self) -> impl LocalMrReadAccess {
        self.region.slice(self.range.clone())
    }
}

/// The memory of a receive, open to the peer.
pub(crate) struct Target {
    buffer: ReceiveBuffer,
    /// Where the bytes arrive if the receive's own memory is not the device's.
    bounce: Option<Region>,
}

impl Target {
    pub(crate) fn of(device: &Device, into: &mut BufferMut) -> Result<Self, FabricError> {
        if into.is_empty() {
            return Ok(Self { buffer: ReceiveBuffer::default(), bounce: None });
        }
        let (address, len) = (into.as_mut_ptr() as u64, into.len() as u64);
        if let Some(region) = into.registration::<Arc<Region>>().filter(|region| region.is_of(device)) {
            return Ok(Self { buffer: ReceiveBuffer { key: region.key, address, len }, bounce: None });
        }
        let region = device.allocate(into.len(), AccessFlag::LocalWrite | AccessFlag::RemoteWrite)?;
        Ok(Self { buffer: ReceiveBuffer { key: region.key, address: region.address(), len }, bounce: Some(region) })
    }

    pub(crate) fn buffer(&self) -> ReceiveBuffer {
        self.buffer
    }

    /// Copies the received bytes to the receive's own memory, if they are elsewhere.
    pub(crate) fn deliver(&self, arrived: &mut [u8]) {
        if let Some(region) = &self.bounce {
            region.copy_to(arrived);
        }
    }
}

/// Memory that peers reach with a key: a copy of what was exposed, with bounds and rights of its own.
pub(crate) struct Exposed {
    region: Region,
    len: usize,
    writable: bool,
    /// What was exposed; it goes back to its lender with the exposure.
    _memory: Expose,
}

impl Exposed {
    pub(crate) fn new(device: &Device, memory: Expose) -> Result<Self, FabricError> {
        let (bytes, allowed): (&[u8], _) = match &memory {
            Expose::Mutable(memory, allowed) => (memory, *allowed),
            Expose::Frozen(memory) => (memory, RemoteAccess::READ),
            _ => return Err(FabricError::Memory { len: 0, source: std::io::ErrorKind::Unsupported.into() }),
        };
        let mut access = BitFlags::from(AccessFlag::LocalWrite);
        // A region has at least one byte; an empty exposure lets no peer reach it.
        let allowed = if bytes.is_empty() { RemoteAccess::default() } else { allowed };
        access.set(AccessFlag::RemoteRead, allowed.read);
        access.set(AccessFlag::RemoteWrite, allowed.write);
        let region = Region::copy_of(device, bytes, access)?;
        let (len, writable) = (bytes.len(), matches!(memory, Expose::Mutable(..)));
        Ok(Self { region, len, writable, _memory: memory })
    }
}

impl ExposedMemory for Exposed {
    fn remote(&self) -> RemoteMemory {
        RemoteMemory { key: self.region.key.into(), address: self.region.address(), len: self.len as u64 }
    }

    // Peers read and write at any moment, so the owner's accesses are volatile ones: old or new bytes, whole words.

    fn read_at(&self, offset: usize, out: &mut [u8]) {
        let from = self.region.ptr().wrapping_add(offset);
        let (words, bytes) = out.split_at_mut(words_len(from, out.len()));
        for (at, word) in words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: the caller checked the range; the pointer is aligned; any bytes are a value.
            *word = unsafe { from.cast::<u64>().wrapping_add(at).read_volatile() }.to_ne_bytes();
        }
        let from = from.wrapping_add(words.len());
        for (at, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: the caller checked the range.
            *byte = unsafe { from.wrapping_add(at).read_volatile() };
        }
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) -> bool {
        if !self.writable {
            return false;
        }
        let to = self.region.ptr().wrapping_add(offset);
        let (words, bytes) = bytes.split_at(words_len(to, bytes.len()));
        for (at, word) in words.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the caller checked the range; the pointer is aligned; nothing borrows the region's bytes.
            unsafe { to.cast::<u64>().wrapping_add(at).write_volatile(u64::from_ne_bytes(*word)) };
        }
        let to = to.wrapping_add(words.len());
        for (at, &byte) in bytes.iter().enumerate() {
            // SAFETY: the caller checked the range; nothing borrows the region's bytes.
            unsafe { to.wrapping_add(at).write_volatile(byte) };
        }
        true
    }
}

/// Returns how many of `len` bytes at `ptr` can be accessed in words of eight.
fn words_len(ptr: *const u8, len: usize) -> usize {
    if ptr.cast::<u64>().is_aligned() { len / 8 * 8 } else { 0 }
}
