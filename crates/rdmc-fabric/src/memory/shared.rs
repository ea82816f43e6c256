//! Objects that no process can change any more, so that any number of processes can have the same memory.
//!
//! On Linux an object is a sealed anonymous file: the kernel refuses to write, shorten or lengthen it, for its creator
//! too. So its mapping can be lent as a slice although other processes have it. A peer's object is checked before it is
//! mapped. On other systems an object is memory of this process, which peers cannot reach.

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt;

use super::{Buffer, BufferMut, Memory, MemoryRegion};

/// An object that is still being filled; [`seal`](Self::seal) makes a [`SharedObject`] of it.
///
/// It derefs to its bytes, which are zeros at first. The system allocates each page when it is first touched.
///
/// # Examples
/// ```
/// use rdmc_fabric::SharedObjectMut;
///
/// # fn main() -> std::io::Result<()> {
/// let mut object = SharedObjectMut::new(5)?;
/// object.copy_from_slice(b"hello");
/// let object = object.seal()?;
/// assert_eq!(object[..], *b"hello");
/// # Ok(())
/// # }
/// ```
pub struct SharedObjectMut {
    memory: BufferMut,
    #[cfg(target_os = "linux")]
    file: File,
}

impl SharedObjectMut {
    /// Creates an object of `len` zero bytes.
    ///
    /// # Errors
    /// The operating system refuses: it is out of memory, of address space, or of descriptors. An object takes one
    /// descriptor.
    pub fn new(len: usize) -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        let (memory, file) = sealable::create(len)?;
        #[cfg(not(target_os = "linux"))]
        let memory = Memory::anonymous(len)?;
        let region = MemoryRegion::new(memory, Box::new(()));
        let memory = region.into_mut().expect("it was made to be written");
        Ok(Self {
            memory,
            #[cfg(target_os = "linux")]
            file,
        })
    }

    /// Makes the object unchangeable, also for this process.
    ///
    /// # Errors
    /// The operating system refuses while a device still reads the object's pages; it waits for that for a fraction of
    /// a second.
    pub fn seal(self) -> io::Result<SharedObject> {
        #[cfg(target_os = "linux")]
        {
            let len = self.memory.len();
            // The only mapping by which it could be written.
            drop(self.memory);
            sealable::seal(&self.file)?;
            SharedObject::map(self.file, len)
        }
        #[cfg(not(target_os = "linux"))]
        Ok(SharedObject { bytes: self.memory.freeze() })
    }
}

impl Deref for SharedObjectMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory
    }
}

impl DerefMut for SharedObjectMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl fmt::Debug for SharedObjectMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedObjectMut").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// An object that no process can change and that other processes of the host can map; cheap to clone.
///
/// It derefs to its bytes. The system gets the memory back when no process has it mapped any more.
#[derive(Clone)]
pub struct SharedObject {
    bytes: Buffer,
    #[cfg(target_os = "linux")]
    file: std::sync::Arc<File>,
}

impl SharedObject {
    /// Creates an object of these bytes, which are copied once.
    ///
    /// # Errors
    /// As [`SharedObjectMut::new`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Self> {
        let mut object = SharedObjectMut::new(bytes.len())?;
        object.copy_from_slice(bytes);
        object.seal()
    }

    /// Creates an object of the file's present content, which is read once, with blocking calls.
    ///
    /// # Errors
    /// The file cannot be read, is shortened meanwhile, or does not fit into memory; or as [`SharedObjectMut::new`].
    pub fn copy_of_file(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mut object = SharedObjectMut::new(len)?;
        file.read_exact_at(&mut object, 0)?;
        object.seal()
    }

    /// Returns the bytes as a buffer, without a copy. They stay mapped while the buffer lives.
    pub fn to_buffer(&self) -> Buffer {
        self.bytes.clone()
    }
}

#[cfg(target_os = "linux")]
impl SharedObject {
    /// Maps a sealed file.
    fn map(file: File, len: usize) -> io::Result<Self> {
        let bytes = sealable::map(&file, len)?;
        Ok(Self { bytes, file: std::sync::Arc::new(file) })
    }

    /// Returns the sealed file, for peers.
    pub(crate) fn file(&self) -> &std::sync::Arc<File> {
        &self.file
    }

    /// Checks and maps a peer's object of `len` bytes.
    pub(crate) fn attach(file: std::os::fd::OwnedFd, len: u64) -> Result<Buffer, AttachError> {
        let file = File::from(file);
        sealable::check(&file, len)?;
        let len = usize::try_from(len).map_err(|_| AttachError::Here(io::ErrorKind::OutOfMemory.into()))?;
        sealable::map(&file, len).map_err(AttachError::Here)
    }
}

impl Deref for SharedObject {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsRef<[u8]> for SharedObject {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<SharedObject> for Memory {
    /// Shares the memory, to be sent like any other; nothing is copied.
    fn from(object: SharedObject) -> Self {
        object.to_buffer().into_memory()
    }
}

impl fmt::Debug for SharedObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedObject").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// What a peer needs to attach an object.
///
/// A process that knows it, and that the fabric lets in, can attach the object. So it travels through queue pairs and
/// the control plane only.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ObjectDescriptor {
    /// Bytes of the object.
    pub len: u64,
    /// The node that shares it, in its fabric's terms.
    pub owner: u128,
    /// A random number of this share.
    pub token: u128,
}

impl ObjectDescriptor {
    /// Bytes of an encoded descriptor.
    pub const LEN: usize = 44;
    const TAG: [u8; 4] = *b"obj1";

    /// Encodes it: a tag, then the numbers, little endian.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&Self::TAG);
        out[4..12].copy_from_slice(&self.len.to_le_bytes());
        out[12..28].copy_from_slice(&self.owner.to_le_bytes());
        out[28..].copy_from_slice(&self.token.to_le_bytes());
        out
    }

    /// Decodes a peer's descriptor; `None` if the bytes are not one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let number = |at: usize| u128::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let len = u64::from_le_bytes(std::array::from_fn(|i| bytes[4 + i]));
        (bytes[..4] == Self::TAG).then(|| Self { len, owner: number(12), token: number(28) })
    }
}

impl fmt::Debug for ObjectDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectDescriptor({} bytes)", self.len)
    }
}

/// Lets peers attach an object for as long as it lives.
///
/// A peer that has attached the object keeps it when this is dropped.
#[must_use = "the object is shared for as long as this lives"]
pub struct ObjectShare {
    descriptor: ObjectDescriptor,
    _published: Box<dyn Any + Send + Sync>,
}

impl ObjectShare {
    /// Joins a descriptor with a value whose drop ends the sharing; fabrics call it.
    pub fn new(descriptor: ObjectDescriptor, published: Box<dyn Any + Send + Sync>) -> Self {
        Self { descriptor, _published: published }
    }

    /// Returns the descriptor for peers.
    pub fn descriptor(&self) -> ObjectDescriptor {
        self.descriptor
    }
}

impl fmt::Debug for ObjectShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectShare").field("descriptor", &self.descriptor).finish_non_exhaustive()
    }
}

/// An object of a peer could not be attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The fabric shares no objects.
    #[error("the fabric {fabric} shares no objects")]
    Unsupported {
        /// The fabric's name.
        fabric: &'static str,
    },
    /// The owner is not there, refused, or did not answer in time.
    #[error("the owner of the object could not be asked for it")]
    Unreachable(#[source] io::Error),
    /// The owner does not share the object, or no longer does.
    #[error("the owner does not share the object any more")]
    NotShared,
    /// The owner handed over something else, which was not mapped.
    #[error("the owner did not hand over a sealed object of {len} bytes: {what}")]
    Unsound {
        /// Bytes that the object should have.
        len: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// This process could not map the object: memory, address space or descriptors are used up.
    #[error("the object could not be mapped")]
    Here(#[source] io::Error),
}

/// Anonymous files that can be sealed.
#[cfg(target_os = "linux")]
pub(crate) mod sealable {
    use std::fs::File;
    use std::io;

    use memmap2::{Advice, MmapOptions};
    use rustix::fs::{MemfdFlags, SealFlags};

    use super::super::{Buffer, Memory, MemoryRegion};
    use super::AttachError;

    /// Creates an empty anonymous file.
    pub(crate) fn anonymous_file() -> io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems insist on this flag, older ones do not know it.
        let file = rustix::fs::memfd_create("rdmc", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create("rdmc", flags))?;
        Ok(file.into())
    }

    /// Creates a file of `len` zero bytes, and maps it for writing.
    pub(super) fn create(len: usize) -> io::Result<(Memory, File)> {
        let file = anonymous_file()?;
        file.set_len(len as u64)?;
        if len == 0 {
            return Ok((Memory::from(Vec::new()), file));
        }
        // SAFETY: no other code knows the file before it is sealed, and it is long enough.
        let map = unsafe { MmapOptions::new().len(len).map_mut(&file) }?;
        // A process that is forked to run a program keeps all other mappings until it runs it, and sealing cannot wait
        // for that.
        map.advise(Advice::DontFork)?;
        if len >= LARGE_PAGE {
            // Large pages, where the host offers them for shared memory; elsewhere it refuses.
            let _ = map.advise(Advice::HugePage);
        }
        Ok((Memory::from_map(map), file))
    }

    /// Makes a file unchangeable, if no process has it mapped for writing.
    pub(super) fn seal(file: &File) -> io::Result<()> {
        Ok(rustix::fs::fcntl_add_seals(file, seals() | SealFlags::SEAL)?)
    }

    /// Maps the first `len` bytes of a sealed file of at least that length.
    pub(super) fn map(file: &File, len: usize) -> io::Result<Buffer> {
        if len == 0 {
            return Ok(Buffer::empty());
        }
        // SAFETY: the callers have set or checked the seals by which no process can write or shorten the file, and its
        // length.
        let map = unsafe { MmapOptions::new().len(len).map(file) }?;
        if len >= LARGE_PAGE {
            let _ = map.advise(Advice::HugePage);
        }
        let ptr = std::ptr::NonNull::from(&map[..]).cast();
        // SAFETY: the mapping is the owner, has `len` bytes that no process writes, and does not move when it is boxed.
        let memory = unsafe { Memory::from_raw(ptr, len, false, Box::new(map)) };
        Ok(MemoryRegion::new(memory, Box::new(())).into_shared())
    }

    /// Refuses a file that could change, or that does not have exactly `len` bytes: reading it could kill this process.
    pub(super) fn check(file: &File, len: u64) -> Result<(), AttachError> {
        let unsound = |what| Err(AttachError::Unsound { len, what });
        match rustix::fs::fcntl_get_seals(file) {
            Ok(found) if found.contains(seals()) => {}
            _ => return unsound("it is not sealed against writing, shortening and lengthening"),
        }
        // Reserved large pages may be missing when they are touched.
        if rustix::fs::fstatfs(file).map_err(|error| AttachError::Here(error.into()))?.f_type != TMPFS_MAGIC {
            return unsound("it is not ordinary memory");
        }
        let found = rustix::fs::fstat(file).map_err(|error| AttachError::Here(error.into()))?.st_size;
        if u64::try_from(found).is_ok_and(|found| found == len) {
            return Ok(());
        }
        unsound("it has another length")
    }

    fn seals() -> SealFlags {
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW
    }

    /// The file system of anonymous files.
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    /// Bytes of a large page.
    const LARGE_PAGE: usize = 2 << 20;
}

#[cfg(all(test, target_os = "linux"))]
mod tests;

#[cfg(test)]
mod descriptor_tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn descriptors_survive_encoding(len: u64, owner: u128, token: u128) {
            let descriptor = ObjectDescriptor { len, owner, token };
            prop_assert_eq!(ObjectDescriptor::decode(&descriptor.encode()), Some(descriptor));
            prop_assert_eq!(ObjectDescriptor::decode(&descriptor.encode()[1..]), None);
        }
    }
}
