use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;

use super::*;
use crate::manifest::{EntryKind, EntryPath};

fn parts(dir: &Path) -> Parts {
    Parts::new(Arc::new(Dir::open_ambient_dir(dir, cap_std::ambient_authority()).unwrap()))
}

fn entry(names: &[&str]) -> Entry {
    let path = EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
    Entry { path, kind: EntryKind::File { size: 4 }, mode: 0o600, mtime_s: 1, mtime_ns: 2 }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir.join(DIR)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// Leaves `bytes` of a file of 4.
fn interrupted(parts: &Parts, bytes: &[u8]) {
    let mark = parts.begin(&Manifest::default()).unwrap();
    let mut part = parts.open(&entry(&["a", "b"]), 4).unwrap();
    part.file.set_len(4).unwrap();
    part.file.write_all_at(bytes, 0).unwrap();
    part.stay(true);
    mark.note_some();
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
    assert!(first.rename(&root, OsStr::new("whole"), true).is_err());
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
fn parts_of_a_file_go_whatever_their_size_unless_somebody_uses_them() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    let (this, other) = (entry(&["a"]), entry(&["b"]));
    let keep = |entry, size| {
        let mut part = parts.open(entry, size).unwrap();
        part.file.set_len(size).unwrap();
        part.stay(true);
        part
    };
    drop([keep(&this, 4), keep(&this, 5), keep(&other, 4)]);
    let used = keep(&this, 6);
    parts.forget([&this]);
    let mut left = [name_of(&this, 6), name_of(&other, 4)].map(|name| name.into_string().unwrap());
    let mut found = names(dir.path());
    left.sort();
    found.sort();
    assert_eq!(found, left);
    drop(used);
    let manifest = Manifest { entries: vec![this, other] };
    let mark = parts.begin(&manifest).unwrap();
    mark.note_some();
    drop(mark);
    parts.forget_all(&manifest);
    assert!(!dir.path().join(DIR).exists());
}

#[test]
fn parts_of_those_who_were_killed_are_removed_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let root = Dir::open_ambient_dir(dir.path(), cap_std::ambient_authority()).unwrap();
    let here = |name: &str| dir.path().join(name).exists();
    let killed = ".rdmc-0123456789abcdef.part";
    let others = ["x.part", ".rdmc-0123.part", ".rdmc-0123456789abcdeg.part", "0123456789abcdef"];
    for name in others.iter().chain([&killed]) {
        std::fs::write(dir.path().join(name), b"some").unwrap();
    }
    std::fs::create_dir(dir.path().join(".rdmc-fedcba9876543210.part")).unwrap();
    let used = Part::elsewhere(&root).unwrap();
    remove_strays(&root, STRAYS_KEPT_FOR);
    assert!(here(killed));
    remove_strays(&root, Duration::ZERO);
    assert!(!here(killed) && others.iter().all(|name| here(name)) && here(".rdmc-fedcba9876543210.part"));
    assert!(here(used.name.to_str().unwrap()));
}

#[test]
fn a_file_that_has_appeared_is_not_replaced_unless_that_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let root = Dir::open_ambient_dir(dir.path(), cap_std::ambient_authority()).unwrap();
    let (to, part) = (OsStr::new("file"), || Part::elsewhere(&root).unwrap());
    for linked in [false, true] {
        let place = |mut part: Part| if linked { part.link(&root, to) } else { part.rename(&root, to, false) };
        place(part()).unwrap();
        std::fs::write(dir.path().join(to), b"appeared").unwrap();
        assert_eq!(place(part()).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(dir.path().join(to)).unwrap(), b"appeared");
        part().rename(&root, to, true).unwrap();
        assert_eq!(std::fs::read(dir.path().join(to)).unwrap(), b"");
        std::fs::remove_file(dir.path().join(to)).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
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
    let mark = parts.begin(&manifest).unwrap();
    mark.note_some();
    drop(mark);
    assert_eq!(names(dir.path()).len(), 1);
    let mark = parts.begin(&manifest).unwrap();
    mark.note_some();
    mark.note_done();
    drop(mark);
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

/// As a process leaves it that is killed while it stores short files.
#[test]
fn a_stray_beside_parts_is_of_no_use_to_a_later_transfer() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path());
    std::fs::DirBuilder::new().mode(0o700).create(dir.path().join(DIR)).unwrap();
    std::fs::write(dir.path().join(DIR).join(".rdmc-0123456789abcdef.part"), "x").unwrap();
    assert_eq!(parts.kept(), None);
    std::fs::write(dir.path().join(DIR).join("some.transfer"), "").unwrap();
    assert_eq!(parts.kept(), Some(0));
}
