use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;
use crate::manifest::EntryPath;

fn entry(names: &[&str], kind: EntryKind, mode: u32) -> Entry {
    let path = EntryPath(names.iter().map(|name| name.as_bytes().to_vec()).collect());
    Entry { path, kind, mode, mtime_s: 1_000_000_000, mtime_ns: 123_456_789 }
}

fn wording() -> Wording {
    let directory = "let this user write there, or choose another one with --dir";
    Wording { no_overwrite: "--no-overwrite", choose_directory: directory, ..Wording::default() }
}

fn store(dir: &tempfile::TempDir, no_overwrite: bool) -> Store {
    Store::open(dir.path(), wording()).unwrap().overwrite(!no_overwrite).fsync(true)
}

#[test]
fn a_file_takes_its_name_with_mode_and_time_but_no_special_bits() {
    let dir = tempfile::tempdir().unwrap();
    let entry = entry(&["file"], EntryKind::File { size: 10 }, 0o6751);
    let mut arrival = store(&dir, false).begin(&entry, 10, None).unwrap();
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
    drop(store(&dir, false).begin(&entry(&["file"], EntryKind::File { size: 10 }, 0o600), 10, None).unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn directories_get_their_modes_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (outer, inner) = (entry(&["d"], EntryKind::Directory, 0o555), entry(&["d", "e"], EntryKind::Directory, 0o700));
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
    let inside = entry(&["d", "file"], EntryKind::File { size: 1 }, 0o600);
    let manifest = Manifest { entries: vec![entry(&["d"], EntryKind::Directory, 0o700), inside.clone()] };
    assert!(store(&dir, false).check(&manifest).is_err());
    assert!(store(&dir, false).begin(&inside, 1, None).is_err());
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn what_exists_is_replaced_unless_that_is_forbidden() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"old").unwrap();
    let manifest = Manifest { entries: vec![entry(&["file"], EntryKind::File { size: 0 }, 0o600)] };
    store(&dir, false).check(&manifest).unwrap();
    assert!(store(&dir, true).check(&manifest).unwrap_err().to_string().contains("--no-overwrite"));
    let directory = Manifest { entries: vec![entry(&["file"], EntryKind::Directory, 0o700)] };
    assert!(store(&dir, false).check(&directory).is_err());
}

#[test]
fn what_appears_while_a_file_arrives_is_not_replaced_if_that_is_forbidden() {
    let dir = tempfile::tempdir().unwrap();
    let entry = entry(&["file"], EntryKind::File { size: 3 }, 0o600);
    let arrive = |no_overwrite, appears: Option<&[u8; 3]>| {
        let arrival = store(&dir, no_overwrite).begin(&entry, 3, None).unwrap();
        arrival.write(b"new").unwrap();
        appears.into_iter().for_each(|bytes| std::fs::write(dir.path().join("file"), bytes).unwrap());
        let kept = arrival.keep(&entry).map_err(|error| error.to_string());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        (kept, std::fs::read(dir.path().join("file")).unwrap())
    };
    let refused = || Err("file exists (--no-overwrite)".to_owned());
    assert_eq!(arrive(true, Some(b"old")), (refused(), b"old".to_vec()));
    // Also if it has the same bytes, and another time.
    assert_eq!(arrive(true, Some(b"new")), (refused(), b"new".to_vec()));
    assert_eq!(arrive(false, Some(b"old")), (Ok(()), b"new".to_vec()));
    // It is the same, in bytes and time.
    assert_eq!(arrive(true, None), (Ok(()), b"new".to_vec()));
}

#[test]
fn a_directory_that_files_cannot_be_put_into_is_an_error_at_once() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    let manifest = Manifest {
        entries: vec![
            entry(&["d"], EntryKind::Directory, 0o700),
            entry(&["d", "file"], EntryKind::File { size: 1 }, 0o600),
        ],
    };
    let (forbid, below) = (std::fs::Permissions::from_mode(0o555), dir.path().join("d"));
    std::fs::set_permissions(&below, forbid.clone()).unwrap();
    if std::fs::write(below.join("x"), b"").is_ok() {
        // Nothing is forbidden to root but this.
        let error = Store::open(Path::new("/sys"), wording()).unwrap_err().to_string();
        assert!(error.contains("the directory /sys: ") && error.contains("--dir"), "{error}");
        return;
    }
    let error = store(&dir, false).check(&manifest).unwrap_err().to_string();
    assert!(error.contains("d in the directory: "), "{error}");
    std::fs::set_permissions(dir.path(), forbid).unwrap();
    let error = Store::open(dir.path(), wording()).unwrap_err().to_string();
    assert!(error.contains(&format!("the directory {}: ", dir.path().display())), "{error}");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&below, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_file_that_is_in_place_leaves_no_part_of_another_version_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let interrupt = || {
        let old = entry(&["file"], EntryKind::File { size: 4 }, 0o600);
        let before = store(&dir, false).for_transfer(&Manifest { entries: vec![old.clone()] }, false);
        let mut part = before.begin(&old, 4, None).unwrap();
        part.begins();
        drop((part, before));
        assert!(store(&dir, false).has_parts());
    };
    let new = entry(&["file"], EntryKind::File { size: 3 }, 0o600);
    let manifest = Manifest { entries: vec![new.clone()] };
    for keep in [true, false] {
        interrupt();
        let next = store(&dir, false).keep_parts(keep).for_transfer(&manifest, false);
        assert_eq!(dir.path().join(partial::DIR).exists(), keep);
        next.begin(&new, 3, None).unwrap().keep(&new).unwrap();
        next.done();
        drop(next);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn what_is_in_place_needs_room_for_some_files_only() {
    // The files travel each alone, or all together.
    for (unit, four) in [(257 << 10, 112), (1, 100)] {
        let dir = tempfile::tempdir().unwrap();
        let sizes = [1_u64, 100, 10, 1, 1, 50, 7].map(|size| size * unit);
        let named = |at: usize| entry(&[&format!("{at}")], EntryKind::File { size: sizes[at] }, 0o600);
        let manifest = Manifest { entries: (0..sizes.len()).map(named).collect() };
        let store = store(&dir, false);
        assert_eq!(store.bytes_needed(&manifest, [4]), [170 * unit]);
        // The last one is not here.
        for (entry, size) in manifest.entries[..6].iter().zip(sizes) {
            store.begin(entry, size, None).unwrap().keep(entry).unwrap();
        }
        assert_eq!(store.bytes_needed(&manifest, [4]), [(7 + four) * unit]);
        let reserved = store.reserve(&manifest).unwrap();
        let within = |free| reserved.clone().within(&manifest, || Ok(free));
        assert!(!within((7 + four) * unit).unwrap().receives_one_by_one());
        let least = reserved.bytes_needed(&manifest, [1]);
        assert_eq!(least, [107 * unit]);
        if four > 100 {
            // One file at a time needs least.
            let [almost, least] = [7 + four - 1, 7 + 100].map(|files| within(files * unit).unwrap());
            assert!(almost.receives_one_by_one() && least.receives_one_by_one());
        }
        let error = within(107 * unit - 1).unwrap_err().to_string();
        assert!(error.contains("do not fit into the"), "{error}");
    }
}

#[test]
fn short_files_take_their_places_until_one_cannot_and_the_next_transfer_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let named = |name: &&str| match *name {
        "d" => entry(&["d"], EntryKind::Directory, 0o700),
        "e" => entry(&["d", "e"], EntryKind::File { size: 2 }, 0o640),
        name => entry(&[name], EntryKind::File { size: 2 }, 0o640),
    };
    let manifest = Manifest { entries: ["d", "e", "f", "g", "h"].iter().map(named).collect() };
    let files: Vec<_> = manifest.files().map(|(entry, size)| (entry.clone(), size)).collect();
    let transfer = || store(&dir, true).for_transfer(&manifest, false);
    let first = transfer();
    first.make_directories(&manifest).unwrap();
    std::fs::write(dir.path().join("g"), "other").unwrap();
    let (placed, outcome) = first.place_all(&files, b"eeffgghh");
    let problem = outcome.unwrap_err().to_string();
    assert!(placed == 2 && problem.contains("g exists"), "{placed} {problem}");
    assert_eq!(std::fs::read(dir.path().join("d/e")).unwrap(), b"ee");
    let found = std::fs::metadata(dir.path().join("f")).unwrap();
    assert_eq!((found.mode() & 0o777, found.mtime()), (0o640, 1_000_000_000));
    drop(first);
    // Nothing but the mark of the transfer is left, so that the next one compares.
    assert_eq!(std::fs::read_dir(dir.path().join(partial::DIR)).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    std::fs::remove_file(dir.path().join("g")).unwrap();
    let store = store(&dir, true);
    assert!(store.has_parts());
    store.check(&manifest).unwrap();
    let second = store.for_transfer(&manifest, true);
    let mut known = [b'.'; 8];
    assert!(second.read_known(&files, &mut known).unwrap());
    assert_eq!(known, *b"eeff....");
    let (placed, outcome) = second.place_all(&files, b"eeffgghh");
    assert_eq!((placed, outcome), (4, Ok(())));
    second.done();
    drop((store, second));
    assert!(!dir.path().join(partial::DIR).exists());
}

#[test]
fn two_transfers_are_not_promised_the_same_space() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(&dir, false);
    let files = ["one", "two"].map(|name| entry(&[name], EntryKind::File { size: 60 }, 0o600));
    let asks = |file: &Entry, free| {
        let manifest = Manifest { entries: vec![file.clone()] };
        store.reserve(&manifest).unwrap().within(&manifest, || Ok(free))
    };
    let first = asks(&files[0], 100).unwrap();
    let busy = asks(&files[1], 100).unwrap_err();
    assert_eq!(busy.kind, Kind::Busy);
    assert!(busy.reason().contains("another transfer that takes 60 B"), "{}", busy.reason());
    assert_eq!(asks(&files[1], 50).unwrap_err().kind, Kind::Local);
    // It has taken its space, so that less is free.
    let incoming = first.begin(&files[0], 60, None).unwrap();
    assert_eq!(asks(&files[1], 40).unwrap_err().kind, Kind::Local);
    assert!(asks(&files[1], 60).is_ok());
    drop((incoming, first));
    // To replace an equal file takes no space for long.
    let small = entry(&["small"], EntryKind::File { size: 5 }, 0o600);
    store.begin(&small, 5, None).unwrap().keep(&small).unwrap();
    let manifest = Manifest { entries: vec![small.clone(), files[0].clone()] };
    let both = store.reserve(&manifest).unwrap().within(&manifest, || Ok(100)).unwrap();
    both.begin(&small, 5, None).unwrap().keep(&small).unwrap();
    assert_eq!(store.reservations.promised(), 65);
}

#[test]
fn more_than_the_disk_holds_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let size = 1 << 60;
    let error = store(&dir, false).begin(&entry(&["file"], EntryKind::File { size }, 0o600), size, None).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn what_was_interrupted_is_here_again_and_what_is_in_place_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let entries = ["a", "b"].map(|name| entry(&[name], EntryKind::File { size: 4 }, 0o600));
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
    let part = ".rdmc-0123456789abcdef.part";
    for names in [&[".rdmc-partial"][..], &[".RDMC-partial", "x"], &[part], &["d", part]] {
        let manifest = Manifest { entries: vec![entry(names, EntryKind::File { size: 0 }, 0o600)] };
        assert!(store(&dir, false).check(&manifest).is_err());
    }
}

#[test]
fn a_file_is_written_by_one_transfer_at_a_time_whatever_leads_to_it() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
    std::os::unix::fs::symlink("a/b", dir.path().join("link")).unwrap();
    let file = |names: &[&str]| entry(names, EntryKind::File { size: 3 }, 0o600);
    let directory = |names: &[&str]| entry(names, EntryKind::Directory, 0o700);
    let direct = [directory(&["a"]), directory(&["a", "b"]), file(&["a", "b", "file"])];
    let linked = [directory(&["link"]), file(&["link", "file"])];
    let (direct, linked) = (Manifest { entries: direct.into() }, Manifest { entries: linked.into() });
    let store = store(&dir, false);
    for (first, second) in [(&direct, &linked), (&linked, &direct), (&direct, &direct)] {
        let reserved = store.reserve(first).unwrap();
        let refused = store.reserve(second).unwrap_err();
        assert_eq!(refused.reason(), "busy with another transfer of a/b/file");
        // A file that is still being put in place keeps its name.
        let arrival = reserved.begin(first.entries.last().unwrap(), 3, None).unwrap();
        drop(reserved);
        assert!(store.reserve(second).is_err());
        drop(arrival);
        drop(store.reserve(second).unwrap());
    }
}

#[test]
fn a_link_to_the_receivers_own_directory_leads_to_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(".", dir.path().join("here")).unwrap();
    let file = |names: &[&str]| entry(names, EntryKind::File { size: 3 }, 0o600);
    let direct = Manifest { entries: vec![file(&["file"])] };
    let linked = Manifest { entries: vec![entry(&["here"], EntryKind::Directory, 0o700), file(&["here", "file"])] };
    let store = store(&dir, false);
    let reserved = store.reserve(&linked).unwrap();
    assert_eq!(store.reserve(&direct).unwrap_err().reason(), "busy with another transfer of file");
    drop(reserved);
    drop(store.reserve(&direct).unwrap());
}

#[test]
fn names_that_differ_only_in_case_are_refused_only_where_they_are_one_file() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("probe"), b"").unwrap();
    let folds = dir.path().join("PROBE").exists();
    let file = |names: &[&str]| entry(names, EntryKind::File { size: 3 }, 0o600);
    let alike = [entry(&["new"], EntryKind::Directory, 0o700), file(&["new", "Makefile"]), file(&["new", "makefile"])];
    let manifest = Manifest { entries: alike.into() };
    assert_eq!(store(&dir, false).check(&manifest).is_err(), folds);
    // Two transfers of such names disturb each other there, too.
    let [one, other] = ["Makefile", "makefile"].map(|name| Manifest { entries: vec![file(&[name])] });
    for folds_case in [true, false] {
        let store = Store { folds_case, ..store(&dir, false) };
        let reserved = store.reserve(&one).unwrap();
        assert_eq!(store.reserve(&other).is_err(), folds_case);
        drop(reserved);
    }
}

#[test]
fn figures_of_a_lack_of_space_differ() {
    assert_eq!(too_large(3 << 30, 1 << 30), "3 GiB do not fit into the free 1 GiB of the directory's file system");
    let text = too_large((3 << 30) + 1, 3 << 30);
    assert_eq!(text, "3221225473 bytes do not fit into the 3221225472 free bytes of the directory's file system");
}

#[test]
fn a_directory_that_cannot_hold_files_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let places = ["file", "missing", "missing/below"].map(|name| dir.path().join(name));
    for place in places.iter().map(PathBuf::as_path).chain(["/proc", "/sys"].map(Path::new)) {
        let error = Store::open(place, wording()).unwrap_err().to_string();
        assert!(error.contains(&place.display().to_string()), "{error}");
    }
}
