//! Seals, and what is refused.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;

/// An anonymous file of these bytes with these seals.
fn file(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC);
    let file = File::from(file.expect("there are anonymous files"));
    file.write_all_at(bytes, 0).expect("it is only memory");
    rustix::fs::fcntl_add_seals(&file, seals).expect("no process has it mapped");
    file.into()
}

const SEALED: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn nobody_can_change_an_object_that_was_sealed() {
    let object = SharedObject::copy_of(&[7; 10_000]).unwrap();
    let file = object.file();
    assert!(file.write_all_at(&[1], 0).is_err() && file.set_len(5).is_err() && file.set_len(20_000).is_err());
    // SAFETY: it cannot be mapped for writing, which is what is tried.
    assert!(unsafe { memmap2::MmapOptions::new().len(10_000).map_mut(&**file) }.is_err());
    assert!(
        rustix::fs::fallocate(
            file,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            0,
            4096
        )
        .is_err()
    );
    assert!(object.iter().all(|&byte| byte == 7));
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn an_object_outlives_its_handle_in_its_buffers() {
    let object = SharedObject::copy_of(b"hello").unwrap();
    let attached = SharedObject::attach(object.file().try_clone().unwrap().into(), 5).unwrap();
    let buffer = object.to_buffer();
    drop(object);
    assert_eq!((&buffer[..], &attached[..]), (&b"hello"[..], &b"hello"[..]));
    assert!(buffer.try_widen(0, 0).is_err(), "it is not to be written");
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn what_could_still_change_or_has_another_length_is_not_mapped() {
    let unsound = |file: OwnedFd, len: u64| match SharedObject::attach(file, len) {
        Err(AttachError::Unsound { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW] {
        assert!(unsound(file(b"hello", SEALED.difference(missing)), 5).contains("not sealed"));
    }
    // Mappings made before can write on.
    let future = SEALED.difference(SealFlags::WRITE).union(SealFlags::FUTURE_WRITE);
    assert!(unsound(file(b"hello", future), 5).contains("not sealed"));
    assert!(unsound(file(b"hello", SEALED), 6).contains("length"));
    assert!(unsound(file(b"hello", SEALED), 4).contains("length"));
    assert!(unsound(file(b"hello", SEALED), u64::MAX).contains("length"));
    assert!(unsound(tempfile::tempfile().unwrap().into(), 0).contains("not sealed"));
    let (pipe, _other_end) = io::pipe().unwrap();
    assert!(unsound(pipe.into(), 0).contains("not sealed"));
    assert_eq!(SharedObject::attach(file(b"hello", SEALED), 5).unwrap()[..], *b"hello");
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn no_bytes_are_an_object_too() {
    let object = SharedObject::copy_of(b"").unwrap();
    assert!(object.is_empty());
    let attached = SharedObject::attach(object.file().try_clone().unwrap().into(), 0).unwrap();
    assert!(attached.is_empty());
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_file_is_copied_as_it_is() {
    let source = tempfile::tempfile().unwrap();
    source.write_all_at(b"hello", 0).unwrap();
    let object = SharedObject::copy_of_file(&source).unwrap();
    source.write_all_at(b"J", 0).unwrap();
    assert_eq!(object[..], *b"hello");
}
