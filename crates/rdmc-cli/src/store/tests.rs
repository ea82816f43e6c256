use std::os::unix::fs::MetadataExt;

use super::*;
use crate::manifest::EntryPath;

fn entry(names: &[&str], kind: Kind, mode: u32) -> Entry {
    let path = EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
    Entry { path, kind, mode, mtime_s: 1_000_000_000, mtime_ns: 123_456_789 }
}

fn store(dir: &tempfile::TempDir, no_overwrite: bool) -> Store {
    Store::open(dir.path(), no_overwrite, true).unwrap()
}

#[test]
fn a_file_takes_its_name_with_mode_and_time_but_no_special_bits() {
    let dir = tempfile::tempdir().unwrap();
    let entry = entry(&["file"], Kind::File { size: 10 }, 0o6751);
    let arrival = store(&dir, false).begin(&entry, 10, None).unwrap();
    assert_eq!(arrival.memory(10).unwrap().len(), 10);
    assert!(!dir.path().join("file").exists());
    arrival.keep(&entry).unwrap();
    let found = std::fs::metadata(dir.path().join("file")).unwrap();
    assert_eq!((found.mode() & 0o7777, found.len()), (0o751, 10));
    assert_eq!((found.mtime(), found.mtime_nsec()), (1_000_000_000, 123_456_789));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_file_that_does_not_arrive_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    drop(store(&dir, false).begin(&entry(&["file"], Kind::File { size: 10 }, 0o600), 10, None).unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn directories_get_their_modes_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (outer, inner) = (entry(&["d"], Kind::Directory, 0o555), entry(&["d", "e"], Kind::Directory, 0o700));
    let manifest = Manifest { entries: vec![outer, inner] };
    let store = store(&dir, false);
    store.make_directories(&manifest).unwrap();
    store.make_directories(&manifest).unwrap();
    store.finish_directories(&manifest).unwrap();
    let found = std::fs::metadata(dir.path().join("d")).unwrap();
    assert_eq!((found.mode() & 0o777, found.mtime()), (0o555, 1_000_000_000));
}

#[test]
fn a_link_does_not_lead_out() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(outside.path(), dir.path().join("d")).unwrap();
    let inside = entry(&["d", "file"], Kind::File { size: 1 }, 0o600);
    let manifest = Manifest { entries: vec![entry(&["d"], Kind::Directory, 0o700), inside.clone()] };
    assert!(store(&dir, false).check(&manifest).is_err());
    assert!(store(&dir, false).begin(&inside, 1, None).is_err());
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn what_exists_is_replaced_unless_that_is_forbidden() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"old").unwrap();
    let manifest = Manifest { entries: vec![entry(&["file"], Kind::File { size: 0 }, 0o600)] };
    store(&dir, false).check(&manifest).unwrap();
    assert!(store(&dir, true).check(&manifest).unwrap_err().to_string().contains("--no-overwrite"));
    let directory = Manifest { entries: vec![entry(&["file"], Kind::Directory, 0o700)] };
    assert!(store(&dir, false).check(&directory).is_err());
}

#[test]
fn more_than_the_disk_holds_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let size = 1 << 60;
    let error = store(&dir, false).begin(&entry(&["file"], Kind::File { size }, 0o600), size, None).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_was_interrupted_is_here_again_and_what_is_in_place_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let entries = ["a", "b"].map(|name| entry(&[name], Kind::File { size: 4 }, 0o600));
    let manifest = Manifest { entries: entries.to_vec() };
    let again = |delta| store(&dir, false).for_transfer(&manifest, delta);
    let interrupted = again(false);
    let whole = interrupted.begin(&entries[0], 4, None).unwrap();
    whole.write(b"done").unwrap();
    whole.keep(&entries[0]).unwrap();
    let mut part = interrupted.begin(&entries[1], 4, None).unwrap();
    part.write(b"some").unwrap();
    part.begins();
    drop((part, interrupted));
    assert!(store(&dir, false).has_parts());
    let next = again(true);
    for (entry, had) in entries.iter().zip([b"done", b"some"]) {
        let arrival = next.begin(entry, 4, None).unwrap();
        let mut bytes = [0; 4];
        arrival.read(&mut bytes).unwrap();
        assert_eq!((arrival.has_some(), &bytes), (true, had));
        arrival.keep(entry).unwrap();
    }
    // What differs in its time is not the same.
    let newer = Entry { mtime_s: 1, ..entries[0].clone() };
    assert!(!next.begin(&newer, 4, None).unwrap().has_some());
    next.done();
    drop(next);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn nothing_arrives_under_the_name_of_the_directory_of_parts() {
    let dir = tempfile::tempdir().unwrap();
    for names in [&[".rdmc-partial"][..], &[".RDMC-partial", "x"]] {
        let manifest = Manifest { entries: vec![entry(names, Kind::File { size: 0 }, 0o600)] };
        assert!(store(&dir, false).check(&manifest).is_err());
    }
}
