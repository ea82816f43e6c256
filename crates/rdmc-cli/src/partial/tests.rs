use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;
use crate::manifest::{EntryPath, Kind};

fn parts(dir: &Path) -> Parts {
    Parts::new(Arc::new(Dir::open_ambient_dir(dir, cap_std::ambient_authority()).unwrap()))
}

fn entry(names: &[&str]) -> Entry {
    let path = EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
    Entry { path, kind: Kind::File { size: 4 }, mode: 0o600, mtime_s: 1, mtime_ns: 2 }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir.join(DIR)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// Leaves `bytes` of a file of 4.
fn interrupted(parts: &Parts, bytes: &[u8]) {
    let ongoing = parts.begin(&Manifest::default()).unwrap();
    let mut part = parts.open(&entry(&["a", "b"]), 4).unwrap();
    part.file.set_len(4).unwrap();
    part.file.write_all_at(bytes, 0).unwrap();
    part.stay(true);
    ongoing.note_some();
}

#[test]
fn a_part_is_found_again_by_its_path_and_size() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    interrupted(&parts, b"some");
    assert_eq!(names(dir.path()).len(), 2);
    assert!(parts.kept().is_some());
    for (path, size, found) in
        [(&["a", "c"][..], 4, false), (&["ab"], 4, false), (&["a", "b"], 5, false), (&["a", "b"], 4, true)]
    {
        assert_eq!(parts.open(&entry(path), size).unwrap().found, found, "{path:?} {size}");
    }
}

#[test]
fn two_who_receive_the_same_do_not_share_a_part() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    let (first, second) = (parts.open(&entry(&["a"]), 4).unwrap(), parts.open(&entry(&["a"]), 4).unwrap());
    assert_ne!(first.name, second.name);
    drop((first, second));
    assert!(parts.kept().is_none() && !dir.path().join(DIR).exists());
}

#[test]
fn a_name_that_was_taken_over_is_left_to_whoever_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let (parts, name) = (parts(dir.path()), name_of(&entry(&["a"]), 4));
    let mut first = parts.open(&entry(&["a"]), 4).unwrap();
    std::fs::remove_file(dir.path().join(DIR).join(&name)).unwrap();
    let second = parts.open(&entry(&["a"]), 4).unwrap();
    assert_eq!((&first.name, &second.name), (&name, &name));
    let root = Dir::open_ambient_dir(dir.path(), cap_std::ambient_authority()).unwrap();
    assert!(first.rename(&root, OsStr::new("whole")).is_err());
    drop(first);
    assert!(dir.path().join(DIR).join(&name).exists() && !dir.path().join("whole").exists());
}

#[test]
fn a_directory_that_others_can_reach_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    std::fs::create_dir(dir.path().join(DIR)).unwrap();
    std::fs::set_permissions(dir.path().join(DIR), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(parts.open(&entry(&["a"]), 4).is_err() && parts.begin(&Manifest::default()).is_err());
    std::fs::remove_dir(dir.path().join(DIR)).unwrap();
    std::os::unix::fs::symlink("/tmp", dir.path().join(DIR)).unwrap();
    assert!(parts.open(&entry(&["a"]), 4).is_err() && parts.kept().is_none());
}

#[test]
fn what_is_no_file_is_no_part() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    interrupted(&parts, b"some");
    let path = dir.path().join(DIR).join(name_of(&entry(&["a", "b"]), 4));
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(parts.open(&entry(&["a", "b"]), 4).is_err());
}

#[test]
fn a_transfer_that_is_done_or_brought_nothing_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    let manifest = Manifest { entries: vec![entry(&["a"])] };
    drop(parts.begin(&manifest).unwrap());
    assert!(!dir.path().join(DIR).exists());
    let ongoing = parts.begin(&manifest).unwrap();
    ongoing.note_some();
    drop(ongoing);
    assert_eq!(names(dir.path()).len(), 1);
    let ongoing = parts.begin(&manifest).unwrap();
    ongoing.note_some();
    ongoing.note_done();
    drop(ongoing);
    assert!(!dir.path().join(DIR).exists());
}

#[test]
fn old_parts_are_removed_unless_somebody_uses_them() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    interrupted(&parts, b"some");
    parts.remove_unused(KEPT_FOR);
    assert_eq!(names(dir.path()).len(), 2);
    let mut part = parts.open(&entry(&["a", "b"]), 4).unwrap();
    part.stay(true);
    parts.remove_unused(Duration::ZERO);
    assert_eq!(names(dir.path()), [name_of(&entry(&["a", "b"]), 4).into_string().unwrap()]);
    drop(part);
    parts.remove_unused(Duration::ZERO);
    assert!(!dir.path().join(DIR).exists());
}
