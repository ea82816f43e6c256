//! Registered memory and exposed memory.

use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rdmc_fabric::{Buffer, BufferMut, Expose, ExposedMemory, FabricError, Memory, RemoteMemory};

use crate::device::Device;
use crate::error::LockedMemoryLimit;
use crate::sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_mr};

/// A memory region object of the device.
pub(crate) struct Mr {
    device: Arc<Device>,
    mr: NonNull<ibv_mr>,
}

// SAFETY: memory regions of libibverbs may be used from any thread; after creation they are only read.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers a range.
    ///
    /// # Safety
    /// The range must stay valid memory of the process, writable if `access` says so, until the result is dropped.
    unsafe fn register(device: &Arc<Device>, ptr: *mut u8, len: usize, access: c_int) -> Result<Self, FabricError> {
        // SAFETY: the protection domain is open; the range is valid by the contract of this function.
        let mr = unsafe { (device.library.ibv_reg_mr)(device.pd.as_ptr(), ptr.cast(), len, access) };
        match NonNull::new(mr) {
            Some(mr) => {
                device.regions.fetch_add(1, Ordering::Relaxed);
                Ok(Self { device: device.clone(), mr })
            }
            None => Err(FabricError::Memory { len, source: explain(io::Error::last_os_error(), len, device) }),
        }
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the object is initialised and lives until `self` is dropped.
        unsafe { self.mr.as_ref() }.lkey
    }

    fn rkey(&self) -> u32 {
        // SAFETY: the object is initialised and lives until `self` is dropped.
        unsafe { self.mr.as_ref() }.rkey
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the object came from `ibv_reg_mr` and is given back once.
        let code = unsafe { (self.device.library.ibv_dereg_mr)(self.mr.as_ptr()) };
        if code != 0 {
            tracing::warn!(code, "a memory region could not be deregistered");
        }
        self.device.regions.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tells the limit on locked memory from other causes of a failed registration, such as too many regions.
fn explain(error: io::Error, len: usize, device: &Device) -> io::Error {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match (error.kind(), limit) {
        (io::ErrorKind::OutOfMemory, Some(max)) => io::Error::new(error.kind(), LockedMemoryLimit { len, max }),
        _ => {
            let (have, max) = (device.regions.load(Ordering::Relaxed), device.attributes.max_mr);
            let counts = format!("{error}; the device offers {max} memory regions, of which this process has {have}");
            io::Error::new(error.kind(), counts)
        }
    }
}

/// The registration of memory that the fabric may send from and receive into.
pub(crate) struct Registration {
    device: Arc<Device>,
    ptr: *mut u8,
    len: usize,
    access: c_int,
    /// Created at once, except for memory so short that it is usually sent inline.
    mr: OnceLock<Mr>,
    making: Mutex<()>,
}

// SAFETY: the pointer is not dereferenced here; it is given to the device.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `memory`, which the caller keeps at least as long as the result.
    pub(crate) fn new(device: &Arc<Device>, memory: &Memory) -> Result<Self, FabricError> {
        let access = if memory.is_writable() { IBV_ACCESS_LOCAL_WRITE } else { 0 };
        let registration = Self {
            device: device.clone(),
            ptr: memory.as_ptr().cast_mut(),
            len: memory.len(),
            access,
            mr: OnceLock::new(),
            making: Mutex::new(()),
        };
        if memory.len() > DEFERRED_LEN_MAX {
            registration.mr()?;
        }
        Ok(registration)
    }

    /// Returns the device's object; creates it if that was deferred.
    pub(crate) fn mr(&self) -> Result<&Mr, FabricError> {
        if let Some(mr) = self.mr.get() {
            return Ok(mr);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if self.mr.get().is_none() {
            // SAFETY: the memory outlives the registration, which drops the object, as `new` asks.
            let mr = unsafe { Mr::register(&self.device, self.ptr, self.len, self.access) }?;
            let _ = self.mr.set(mr);
        }
        Ok(self.mr.get().expect("it was set above"))
    }

    pub(crate) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }
}

/// Memory that peers reach with a key.
pub(crate) struct Exposed {
    /// Dropped first: the key is revoked before the memory goes back.
    mr: Mr,
    ptr: *mut u8,
    len: usize,
    memory: Exposure,
}

enum Exposure {
    Mutable { _memory: BufferMut },
    Frozen { _memory: Buffer },
}

// SAFETY: the pointer is into memory that `memory` owns, and is dereferenced as the methods below describe.
unsafe impl Send for Exposed {}
// SAFETY: the owner's accesses are volatile copies, so that they may coincide with those of peers and of each other: a
// reader sees old or new bytes, and whole aligned words.
unsafe impl Sync for Exposed {}

impl Exposed {
    pub(crate) fn new(device: &Arc<Device>, memory: Expose) -> Result<Self, FabricError> {
        let (ptr, len, access, memory) = match memory {
            Expose::Mutable(mut memory, allowed) => {
                let mut access = IBV_ACCESS_LOCAL_WRITE;
                if allowed.read {
                    access |= IBV_ACCESS_REMOTE_READ;
                }
                if allowed.write {
                    access |= IBV_ACCESS_REMOTE_WRITE;
                }
                (memory.as_mut_ptr(), memory.len(), access, Exposure::Mutable { _memory: memory })
            }
            Expose::Frozen(memory) => {
                let ptr = memory.as_ptr().cast_mut();
                (ptr, memory.len(), IBV_ACCESS_REMOTE_READ, Exposure::Frozen { _memory: memory })
            }
            _ => return Err(FabricError::Memory { len: 0, source: io::ErrorKind::Unsupported.into() }),
        };
        // SAFETY: the range is owned by `memory`, which is dropped after the object, and only a mutable one is written.
        let mr = unsafe { Mr::register(device, ptr, len, access) }?;
        Ok(Self { mr, ptr, len, memory })
    }
}

impl ExposedMemory for Exposed {
    fn remote(&self) -> RemoteMemory {
        RemoteMemory { key: self.mr.rkey().into(), address: self.ptr as u64, len: self.len as u64 }
    }

    fn read_at(&self, offset: usize, out: &mut [u8]) {
        let from = self.ptr.wrapping_add(offset);
        let (words, tail) = out.as_chunks_mut::<8>();
        let aligned = from.cast::<u64>().is_aligned();
        for (at, word) in words.iter_mut().enumerate() {
            let from = from.wrapping_add(at * 8);
            *word = if aligned {
                // SAFETY: the caller checked the range, the pointer is aligned; any bytes are a value.
                unsafe { from.cast::<u64>().read_volatile() }.to_ne_bytes()
            } else {
                std::array::from_fn(|byte| read_byte(from.wrapping_add(byte)))
            };
        }
        let from = from.wrapping_add(words.len() * 8);
        for (at, byte) in tail.iter_mut().enumerate() {
            *byte = read_byte(from.wrapping_add(at));
        }
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) -> bool {
        if matches!(self.memory, Exposure::Frozen { .. }) {
            return false;
        }
        let to = self.ptr.wrapping_add(offset);
        let (words, tail) = bytes.as_chunks::<8>();
        if to.cast::<u64>().is_aligned() {
            for (at, word) in words.iter().enumerate() {
                // SAFETY: the caller checked the range, the pointer is aligned, the memory is mutable.
                unsafe { to.wrapping_add(at * 8).cast::<u64>().write_volatile(u64::from_ne_bytes(*word)) };
            }
            write_bytes(to.wrapping_add(words.len() * 8), tail);
        } else {
            write_bytes(to, bytes);
        }
        true
    }
}

fn read_byte(from: *const u8) -> u8 {
    // SAFETY: called for bytes of ranges that were checked, of memory that the caller owns.
    unsafe { from.read_volatile() }
}

fn write_bytes(to: *mut u8, bytes: &[u8]) {
    for (at, &byte) in bytes.iter().enumerate() {
        // SAFETY: called for ranges that were checked, of mutable memory that the caller owns.
        unsafe { to.wrapping_add(at).write_volatile(byte) };
    }
}

/// Memory up to this length in bytes is registered when the device first needs it. Grants and sizes, which are sent
/// inline, never need it.
const DEFERRED_LEN_MAX: usize = 64;
