//! Memory that processes share: mapped anonymous files, and the atomic numbers in them.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{OFlags, SealFlags};

use crate::memory::anonymous_file;

/// Mapped memory of an anonymous file that can never become shorter.
pub(super) struct Mapping {
    map: MmapRaw,
}

impl Mapping {
    /// Creates a file of `len` zero bytes and maps it. The system allocates each page when it is first touched.
    pub(super) fn create(len: usize) -> io::Result<(Self, File)> {
        let file = anonymous_file()?;
        file.set_len(len as u64)?;
        // No process can shorten it, so no process that has mapped it can be killed for touching it.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        advise_large_pages(&map);
        Ok((Self { map }, file))
    }

    /// Maps `len` bytes of a peer's file for reading and writing.
    pub(super) fn attach(file: OwnedFd, len: usize) -> io::Result<Self> {
        check(&file, len)?;
        Ok(Self { map: MmapOptions::new().len(len).map_raw(&file)? })
    }

    /// Maps `len` bytes of a peer's file for reading.
    pub(super) fn attach_to_read(file: OwnedFd, len: usize) -> io::Result<Self> {
        check(&file, len)?;
        let map = MmapOptions::new().len(len).map_raw_read_only(&file)?;
        advise_large_pages(&map);
        Ok(Self { map })
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Gives the pages of a range back to the system, for all processes that have mapped it. They read as zeros from
    /// then on.
    pub(super) fn remove(&self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len()), "a range outside the mapping");
        let start = self.as_mut_ptr().wrapping_add(offset).cast();
        // SAFETY: the range lies in this mapping, and its owner no longer uses it.
        let removed = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxRemove) };
        if let Err(error) = removed {
            tracing::debug!(%error, len, "unused shared memory could not be given back");
            // The next owner finds zeros in this case too.
            // SAFETY: as above.
            unsafe { start.cast::<u8>().write_bytes(0, len) };
        }
    }

    /// Returns the number at offset `at`, which both sides change.
    pub(super) fn number(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + size_of::<AtomicU64>() <= self.len(), "a number outside the mapping");
        // SAFETY: aligned and inside the mapping, which lives as long as the reference; other code accesses it by
        // atomics only.
        unsafe { &*self.as_mut_ptr().wrapping_add(at).cast::<AtomicU64>() }
    }

    /// Returns the 32-bit number at offset `at`, which both sides change.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + size_of::<AtomicU32>() <= self.len(), "a number outside the mapping");
        // SAFETY: as above.
        unsafe { &*self.as_mut_ptr().wrapping_add(at).cast::<AtomicU32>() }
    }
}

/// Requests large pages, where the host offers them for shared memory; elsewhere it refuses.
fn advise_large_pages(map: &MmapRaw) {
    if map.len() >= LARGE_PAGE {
        let _ = map.advise(Advice::HugePage);
    }
}

/// Opens another descriptor of the same file, which can be read and mapped for reading only.
pub(super) fn read_only(file: &File) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())?)
}

/// Refuses a peer's file that is too short, or that could become so.
fn check(file: &OwnedFd, len: usize) -> io::Result<()> {
    let sealed = rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let long_enough = u64::try_from(rustix::fs::fstat(file)?.st_size).is_ok_and(|size| size >= len as u64);
    if sealed && long_enough && len > 0 {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's shared memory is too short, or could be shortened"))
}

/// Bytes of a large page.
pub(super) const LARGE_PAGE: usize = 2 << 20;
