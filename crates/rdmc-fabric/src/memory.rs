//! Registered memory and its owners.
//!
//! A [`MemoryRegion`] owns memory that a fabric may read and write. It is lent out as a [`BufferMut`], an exclusively
//! owned range. A `BufferMut` splits into disjoint ranges; each moves into an operation and comes back with its
//! completion. A filled range freezes into a [`Buffer`], which is shared and read only. So the application can read a
//! block that has arrived while the runtime sends it on. When the last range of a lease is gone, the whole region
//! returns to its lender: memory is never freed while a device still writes it.
//!
//! The module holds raw pointers because different owners write ranges of one allocation at the same time. Soundness
//! rests on one invariant: **at any time, every byte of a region belongs to at most one `BufferMut` or to any number of
//! `Buffer`s, never to both.**

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Bound, Deref, DerefMut, Range, RangeBounds};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;

use crate::sync::lock;

mod shared;

#[cfg(target_os = "linux")]
pub(crate) use shared::sealable::anonymous_file;
pub use shared::{AttachError, ObjectDescriptor, ObjectShare, SharedObject, SharedObjectMut};

/// Memory that is not yet registered with a fabric.
///
/// Its address never changes while it lives, and no other code writes it.
pub struct Memory {
    ptr: NonNull<u8>,
    len: usize,
    writable: bool,
    /// The file that is mapped, from its beginning.
    file: Option<File>,
    /// If pages are allocated ahead.
    ahead: Option<Arc<PagesAhead>>,
    /// Keeps the allocation alive. A file's mapping for writing is an `Arc<MmapRaw>`.
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: `Memory` owns its bytes (the owner is `Send`), and the pointer is only a view of them.
unsafe impl Send for Memory {}
// SAFETY: through `&Memory` no byte can be read or written; only the exclusive and shared ranges below hand them out.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `len` bytes of zeroed anonymous memory. The system allocates each page when it is first touched.
    ///
    /// # Errors
    /// The operating system refuses, for example because it is out of address space.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self::from(Vec::new()));
        }
        let map = memmap2::MmapOptions::new().len(len).map_anon()?;
        Ok(Self::from_map(map))
    }

    /// Maps the first `len` bytes of `file` for writing: received bytes are in the file at once.
    ///
    /// The file must be at least `len` bytes long, and its blocks should be reserved in advance. A full disk causes a
    /// fault of the mapping, not an error value.
    ///
    /// # Errors
    /// The file is too short or cannot be mapped for writing.
    ///
    /// # Safety
    /// While the memory lives, no other code may read, write, map or shorten the file.
    pub unsafe fn map_file_mut(file: &File, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self::from(Vec::new()));
        }
        require_len(file, len)?;
        let map = Arc::new(memmap2::MmapOptions::new().len(len).map_raw(file)?);
        let ptr = NonNull::new(map.as_mut_ptr()).expect("a mapping is never at null");
        Ok(Self { file: Some(file.try_clone()?), ..Self::new(ptr, len, true, Box::new(map)) })
    }

    /// Has pages of a [mapped](Self::map_file_mut) file allocated ahead of the bytes that arrive there, in another
    /// thread, 8 MiB ahead. Otherwise a page is allocated when its first byte arrives, which takes longer, and waits
    /// while the file system is busy. It ends at the latest with the result, which the caller keeps.
    ///
    /// It is for new files. Pages count as changed when they are allocated, and are read from the disk if they have
    /// content. Returns `None` for other memory, for files of at most a MiB, and outside a Tokio runtime. Does nothing
    /// on systems that cannot do it: Linux can since 5.14.
    pub fn allocate_ahead(&mut self) -> Option<AllocatingAhead> {
        let map = self.writable_map().filter(|map| map.len() > ALLOCATED_AT_ONCE)?.clone();
        let runtime = tokio::runtime::Handle::try_current().ok()?;
        let pages = Arc::new(PagesAhead { map, next: AtomicUsize::new(0), ended: Mutex::new(false), runtime });
        pages.note_receive(0, 0);
        self.ahead = Some(pages.clone());
        Some(AllocatingAhead(pages))
    }

    /// Maps the first `len` bytes of `file` for reading, to be sent without a copy.
    ///
    /// The fabric `tcp` lets the kernel read the mapping, so the operation fails if the file is shortened meanwhile.
    /// Code that touched the bytes itself would be killed.
    ///
    /// # Errors
    /// The file is too short or cannot be mapped.
    ///
    /// # Safety
    /// While the memory lives, no code may write or shorten the file. Alternatively, no code may use the bytes as a
    /// slice, here or in what they are copied to, and rely on their staying the same.
    pub unsafe fn map_file(file: &File, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self::from(Vec::new()));
        }
        require_len(file, len)?;
        // SAFETY: by the contract of this function no code writes or shortens the file; its length was checked above.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(file) }?;
        let ptr = NonNull::from(&map[..]).cast();
        Ok(Self { file: Some(file.try_clone()?), ..Self::new(ptr, len, false, Box::new(map)) })
    }

    /// Takes memory that other code owns, for fabrics that allocate in their own way.
    ///
    /// # Safety
    /// For as long as `owner` lives, `ptr` must be valid for reads of `len` initialised bytes, and for writes if
    /// `writable`. No other code may write them, nor read them if `writable`.
    pub unsafe fn from_raw(ptr: NonNull<u8>, len: usize, writable: bool, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self::new(ptr, len, writable, owner)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tells whether the memory may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns the file whose first bytes are mapped, if it is a file's memory; for fabrics.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Returns the address of the first byte, for fabrics to register; dangling if there are no bytes.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// Returns the mapped file, if other code may change it.
    fn changing_file(&self) -> Option<&File> {
        self.file.as_ref().filter(|_| !self.writable)
    }

    /// Returns the mapping of a file for writing.
    fn writable_map(&self) -> Option<&Arc<memmap2::MmapRaw>> {
        self.owner.downcast_ref()
    }

    fn from_map(mut map: memmap2::MmapMut) -> Self {
        let ptr = NonNull::from(&mut map[..]).cast();
        Self::new(ptr, map.len(), true, Box::new(map))
    }

    /// Joins bytes with their owner; `from_raw` says what must hold.
    fn new(ptr: NonNull<u8>, len: usize, writable: bool, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { ptr, len, writable, file: None, ahead: None, owner }
    }
}

impl From<Vec<u8>> for Memory {
    fn from(vec: Vec<u8>) -> Self {
        let len = vec.len();
        let raw: *mut [u8] = Box::into_raw(vec.into_boxed_slice());
        let ptr = NonNull::new(raw.cast::<u8>()).expect("a box is never null");
        Self::new(ptr, len, true, Box::new(RawBox(raw)))
    }
}

impl From<Bytes> for Memory {
    fn from(bytes: Bytes) -> Self {
        let ptr = NonNull::from(&bytes[..]).cast();
        Self::new(ptr, bytes.len(), false, Box::new(bytes))
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).field("writable", &self.writable).finish_non_exhaustive()
    }
}

/// Ends the allocation of pages [ahead](Memory::allocate_ahead) when it is dropped. After that, nothing but received
/// bytes changes the file or its times.
#[derive(Debug)]
#[must_use]
pub struct AllocatingAhead(Arc<PagesAhead>);

impl Drop for AllocatingAhead {
    /// Waits for the pages that are being allocated, a MiB at most.
    fn drop(&mut self) {
        *lock(&self.0.ended) = true;
    }
}

/// The pages of a file's mapping that are allocated before bytes arrive there.
struct PagesAhead {
    map: Arc<memmap2::MmapRaw>,
    /// The offset up to which pages are allocated, or are about to be.
    next: AtomicUsize,
    /// Held while pages are allocated.
    ended: Mutex<bool>,
    runtime: tokio::runtime::Handle,
}

impl PagesAhead {
    /// Has pages allocated ahead of a range into which bytes are about to be received, if few are.
    fn note_receive(self: &Arc<Self>, start: usize, end: usize) {
        let (next, len) = (self.next.load(Ordering::Relaxed), self.map.len());
        if next >= len.min(end.saturating_add(AHEAD / 2)) {
            return;
        }
        // Pages before the range were passed over. They are allocated when bytes arrive.
        let (from, to) = (next.max(start), len.min(end.saturating_add(AHEAD)));
        if self.next.compare_exchange(next, to, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let pages = self.clone();
            self.runtime.spawn_blocking(move || {
                let mut parts = (from..to).step_by(ALLOCATED_AT_ONCE).map(|at| at..to.min(at + ALLOCATED_AT_ONCE));
                while parts.next().is_some_and(|part| pages.allocate(part)) {}
            });
        }
    }

    /// Allocates pages; returns whether there is more to do.
    fn allocate(&self, Range { start, end }: Range<usize>) -> bool {
        let ended = lock(&self.ended);
        if *ended {
            return false;
        }
        let outcome = allocate(&self.map, start, end - start);
        if let Err(error) = &outcome {
            tracing::debug!(%error, "pages of a file cannot be allocated ahead");
            self.next.store(self.map.len(), Ordering::Relaxed);
        }
        outcome.is_ok()
    }
}

impl fmt::Debug for PagesAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagesAhead").field("next", &self.next).finish_non_exhaustive()
    }
}

/// Allocates pages of a file for writing. Their bytes stay as they are.
#[cfg(target_os = "linux")]
fn allocate(map: &memmap2::MmapRaw, at: usize, len: usize) -> io::Result<()> {
    map.advise_range(memmap2::Advice::PopulateWrite, at, len)
}

#[cfg(not(target_os = "linux"))]
fn allocate(_: &memmap2::MmapRaw, _: usize, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Bytes of pages that are allocated ahead.
const AHEAD: usize = 8 << 20;
/// Bytes of pages that are allocated with one call.
const ALLOCATED_AT_ONCE: usize = 1 << 20;

/// A boxed slice held by pointer, so that moving the owner does not assert uniqueness over the bytes.
struct RawBox(*mut [u8]);

// SAFETY: the pointer is the only owner of a `Box<[u8]>`, which is `Send`.
unsafe impl Send for RawBox {}
// SAFETY: `&RawBox` gives access to nothing.
unsafe impl Sync for RawBox {}

impl Drop for RawBox {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and is given back exactly once, here.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

fn require_len(file: &File, len: usize) -> io::Result<()> {
    let have = file.metadata()?.len();
    if have < len as u64 {
        let text = format!("file has {have} bytes, {len} are to be mapped");
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
    }
    Ok(())
}

/// Memory registered with one fabric, owned as a whole.
///
/// A device needs the registration to reach the memory. A software fabric keeps nothing, a verbs fabric its memory
/// region object. The registration ends when the region is dropped, before the memory itself is given back.
pub struct MemoryRegion {
    /// Dropped first: the device forgets the memory before it is freed.
    registration: Box<dyn Any + Send + Sync>,
    memory: Memory,
}

impl MemoryRegion {
    /// Joins memory with the fabric's registration; fabrics call it.
    pub fn new(memory: Memory, registration: Box<dyn Any + Send + Sync>) -> Self {
        Self { registration, memory }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// Tells whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.memory.len == 0
    }

    /// Tells whether a fabric may write into the region.
    pub fn is_writable(&self) -> bool {
        self.memory.writable
    }

    /// Returns the fabric's registration of the region, if it is a `T`.
    pub fn registration<T: Any>(&self) -> Option<&T> {
        self.registration.downcast_ref()
    }

    /// Lends the whole region for writing; it is freed when the last range of the lease is gone.
    ///
    /// # Errors
    /// Gives the region back if it is read only.
    pub fn into_mut(self) -> Result<BufferMut, Self> {
        if self.memory.writable { Ok(BufferMut::lease(self, None)) } else { Err(self) }
    }

    /// Shares the whole region for reading.
    pub fn into_shared(self) -> Buffer {
        BufferMut::lease(self, None).freeze()
    }

    /// Lends the whole region for writing; `lender` gets it back when the last range of the lease is gone.
    ///
    /// # Errors
    /// Gives the region back if it is read only.
    pub fn lend(self, lender: Arc<dyn Lender>) -> Result<BufferMut, Self> {
        if self.memory.writable { Ok(BufferMut::lease(self, Some(lender))) } else { Err(self) }
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// The lender of a region, such as a pool.
pub trait Lender: Send + Sync {
    /// Takes the region back; no ranges of it are left.
    ///
    /// The task that drops the last range calls it: it must not block.
    fn take_back(&self, region: MemoryRegion);
}

struct Lease {
    region: Option<MemoryRegion>,
    lender: Option<Arc<dyn Lender>>,
}

impl Lease {
    fn region(&self) -> &MemoryRegion {
        self.region.as_ref().expect("only drop takes the region out")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let (Some(lender), Some(region)) = (self.lender.take(), self.region.take()) {
            lender.take_back(region);
        }
    }
}

/// An exclusively owned range of registered memory.
///
/// Splits into disjoint ranges like `BytesMut`; moves into the operation that fills it.
pub struct BufferMut {
    lease: Arc<Lease>,
    start: usize,
    len: usize,
}

impl BufferMut {
    /// Returns the range of no bytes, which needs no registration.
    pub fn empty() -> Self {
        Self { lease: empty_lease(), start: 0, len: 0 }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits off and returns the first `at` bytes; `self` keeps the rest.
    ///
    /// # Panics
    /// If `at` is greater than the length.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "split at {at} of {} bytes", self.len);
        let front = Self { lease: self.lease.clone(), start: self.start, len: at };
        self.start += at;
        self.len -= at;
        front
    }

    /// Shortens the range to `len` bytes; the rest is unused until the lease ends. Does nothing if the range is
    /// shorter.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Makes the range shared and read only.
    pub fn freeze(self) -> Buffer {
        Buffer { lease: self.lease, start: self.start, len: self.len }
    }

    /// Returns the fabric's registration of the range's region.
    pub fn registration<T: Any>(&self) -> Option<&T> {
        self.lease.region().registration()
    }

    /// Returns the address of the first byte, for fabrics.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.lease.region().memory.ptr.as_ptr().wrapping_add(self.start)
    }

    /// Notes that this range is about to be received into.
    pub(crate) fn note_receive(&self) {
        if let Some(pages) = &self.lease.region().memory.ahead {
            pages.note_receive(self.start, self.start + self.len);
        }
    }

    fn lease(region: MemoryRegion, lender: Option<Arc<dyn Lender>>) -> Self {
        let len = region.len();
        Self { lease: Arc::new(Lease { region: Some(region), lender }), start: 0, len }
    }
}

impl Deref for BufferMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        range_of(&self.lease, self.start, self.len)
    }
}

impl DerefMut for BufferMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        let ptr = self.as_mut_ptr();
        // SAFETY: `start + len <= region.len()` by construction, so the range lies in one live allocation, held by
        // the lease; its bytes are initialised and, as only writable regions are lent as `BufferMut`, writable; the
        // module's invariant makes this the only handle to these bytes, and `&mut self` the only borrow.
        unsafe { std::slice::from_raw_parts_mut(ptr, self.len) }
    }
}

impl fmt::Debug for BufferMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferMut").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

/// A shared, read-only range of registered memory; cheap to clone and to slice.
#[derive(Clone)]
pub struct Buffer {
    lease: Arc<Lease>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Returns the range of no bytes, which needs no registration.
    pub fn empty() -> Self {
        BufferMut::empty().freeze()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a part of the range, without a copy.
    ///
    /// # Panics
    /// If the bounds lie outside the range.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let from = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n + 1,
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(&n) => n + 1,
            Bound::Excluded(&n) => n,
            Bound::Unbounded => self.len,
        };
        assert!(from <= to && to <= self.len, "slice {from}..{to} of {} bytes", self.len);
        Self { lease: self.lease.clone(), start: self.start + from, len: to - from }
    }

    /// Tells whether the bytes may change or vanish, as those of a [mapped file](Memory::map_file) do when it is
    /// written or shortened. Such bytes should be read by [`copy_to`](Self::copy_to).
    pub fn may_change(&self) -> bool {
        self.lease.region().memory.changing_file().is_some()
    }

    /// Copies the bytes from index `from` on into `into`; the kernel copies those of a mapped file.
    ///
    /// # Errors
    /// The file was shortened, or cannot be read.
    ///
    /// # Panics
    /// If the range has fewer bytes.
    pub fn copy_to(&self, from: usize, into: &mut [u8]) -> io::Result<()> {
        assert!(from <= self.len && into.len() <= self.len - from, "{} bytes at {from} of {}", into.len(), self.len);
        match self.lease.region().memory.changing_file() {
            Some(file) => file.read_exact_at(into, (self.start + from) as u64),
            None => {
                into.copy_from_slice(&self[from..from + into.len()]);
                Ok(())
            }
        }
    }

    /// Appends `next`, if it follows in the same lease.
    ///
    /// # Errors
    /// Gives `next` back if it does not follow.
    pub fn try_append(&mut self, next: Self) -> Result<(), Self> {
        if !Arc::ptr_eq(&self.lease, &next.lease) || self.start + self.len != next.start {
            return Err(next);
        }
        self.len += next.len;
        Ok(())
    }

    /// Returns how many ranges of its lease are held, including this one.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.lease)
    }

    /// Takes the range back for writing, with the `before` bytes in front of it and the `after` bytes behind it, if no
    /// other range of its lease is held.
    ///
    /// What is written there stays, also in parts that no range holds any more.
    ///
    /// # Errors
    /// Gives the range back if other ranges of the lease are held, if the wider range lies outside the region, or if
    /// the region is read only.
    pub fn try_widen(mut self, before: usize, after: usize) -> Result<BufferMut, Self> {
        let start = self.start.checked_sub(before);
        let len = self.len.checked_add(before).and_then(|len| len.checked_add(after));
        let (Some(start), Some(len)) = (start, len) else { return Err(self) };
        let writable = |lease: &Lease| {
            let region = lease.region();
            region.memory.writable && start.checked_add(len).is_some_and(|end| end <= region.len())
        };
        // Each range has a share of the lease: with no other share, all of the region is free to be written.
        match Arc::get_mut(&mut self.lease).is_some_and(|lease| writable(lease)) {
            true => Ok(BufferMut { lease: self.lease, start, len }),
            false => Err(self),
        }
    }

    /// Returns the fabric's registration of the range's region.
    pub fn registration<T: Any>(&self) -> Option<&T> {
        self.lease.region().registration()
    }

    /// Turns the range, which must not change, into memory that can be registered again.
    fn into_memory(self) -> Memory {
        debug_assert!(!self.may_change(), "others may write it");
        let (ptr, len) = (NonNull::from(&self[..]).cast(), self.len);
        Memory::new(ptr, len, false, Box::new(self))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        range_of(&self.lease, self.start, self.len)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Buffer> for Bytes {
    /// Shares the memory; nothing is copied.
    fn from(buffer: Buffer) -> Self {
        if buffer.is_empty() { Bytes::new() } else { Bytes::from_owner(buffer) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

fn range_of(lease: &Lease, start: usize, len: usize) -> &[u8] {
    if len == 0 {
        return &[];
    }
    let ptr = lease.region().memory.ptr.as_ptr().wrapping_add(start);
    // SAFETY: `start + len <= region.len()` by construction, so the range lies in one live allocation, which the lease
    // holds; its bytes are initialised; the caller is the `BufferMut` that owns the range, borrowed, or one of its
    // `Buffer`s, so by the module's invariant no code writes it while the result lives.
    unsafe { std::slice::from_raw_parts(ptr, len) }
}

fn empty_lease() -> Arc<Lease> {
    static EMPTY: OnceLock<Arc<Lease>> = OnceLock::new();
    EMPTY
        .get_or_init(|| {
            let region = MemoryRegion::new(Memory::from(Vec::new()), Box::new(()));
            Arc::new(Lease { region: Some(region), lender: None })
        })
        .clone()
}

#[cfg(test)]
mod tests;
