//! Targets for what a receiver of files gets from another host: the announcement of a transfer, the list of its files.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use rdmc::{Algorithm, Hybrid, NodeId, Racks, Spine};
use rdmc_files::fuzzing::Announcement;
use rdmc_files::manifest::{Entry, EntryKind, EntryPath, LEN_MAX, Manifest};

use crate::allocation::{PER_BYTE, bounded};
use crate::{Seed, named};

/// Checks that an announcement survives another round trip within its bounds, and yields groups or an error.
pub fn announcement(bytes: &[u8]) {
    let Some(told) = bounded(bytes.len(), PER_BYTE, || Announcement::decode(bytes)) else { return };
    assert_eq!(Announcement::decode(&told.encode()).expect("it was encoded here"), told);
    assert!(told.manifest_len() <= LEN_MAX);
    let manifest = bounded(bytes.len(), PER_BYTE, || told.manifest());
    assert!(manifest.is_none_or(|manifest| manifest.encode().len() as u64 <= told.manifest_len()));
    assert!(told.block_sizes().iter().all(|size| (1..=rdmc::GroupSpec::BLOCK_SIZE_MAX).contains(size)));
    for on_one_host in [false, true] {
        for members in [1, 2, 3, 8] {
            let nodes: Vec<NodeId> = (0..members).map(NodeId).collect();
            drop(bounded(bytes.len(), PER_BYTE, || told.groups(nodes, on_one_host)));
        }
    }
}

/// Checks that a list of files survives another round trip. No path leaves the directory or equals another path.
pub fn manifest(bytes: &[u8]) {
    let Ok(manifest) = bounded(bytes.len(), PER_BYTE, || Manifest::decode(bytes)) else { return };
    assert_eq!(Manifest::decode(&manifest.encode()).expect("it was encoded here"), manifest);
    let sizes: u128 = manifest.files().map(|(_, size)| u128::from(size)).sum();
    let (files, bytes) = manifest.totals();
    assert_eq!((files, u128::from(bytes)), (manifest.files().count() as u64, sizes));
    let mut seen = BTreeSet::new();
    for Entry { path, .. } in &manifest.entries {
        let relative = path.to_path();
        assert!(relative.components().all(|part| matches!(part, Component::Normal(_))), "{path} leads elsewhere");
        assert_eq!(relative.components().count(), path.0.len());
        assert!(Path::new("/d").join(&relative).starts_with("/d"), "{path} leads out");
        let (parents, name) = path.split();
        assert_eq!(parents.join(name), relative);
        assert!(seen.insert(relative.clone()), "{path} stands there twice");
        assert!(!path.to_string().contains(char::is_control), "{path:?} steers the terminal");
    }
}

/// Seeds of [`announcement`].
pub fn announcement_seeds() -> Vec<Seed> {
    let racks = Racks::from_sizes(&[2, 1]).expect("two racks");
    let hybrid = Algorithm::Hybrid(Hybrid::new(racks, Spine::Chain));
    let list = listed().encode();
    let announced = |network: &Algorithm, host: &Algorithm| {
        Announcement::new([(network, 1 << 20), (host, 4 << 20)], &listed(), list.len() as u64)
    };
    let flat = announced(&Algorithm::BinomialPipeline, &Algorithm::Fanout);
    let short = flat.clone().with_manifest(&list);
    let hybrid = announced(&hybrid, &hybrid);
    named([("flat", flat.encode()), ("short", short.encode()), ("hybrid", hybrid.encode())])
}

/// Seeds of [`manifest`].
pub fn manifest_seeds() -> Vec<Seed> {
    let path = EntryPath(vec![b"..".to_vec(), b"/etc/passwd".to_vec()]);
    let hostile =
        Entry { path, kind: EntryKind::File { size: u64::MAX }, mode: 0o7777, mtime_s: -1, mtime_ns: u32::MAX };
    named([
        ("empty", Manifest::default().encode()),
        ("tree", listed().encode()),
        ("hostile", Manifest { entries: vec![hostile] }.encode()),
    ])
}

fn listed() -> Manifest {
    let entry = |path: &str, kind, mode| {
        let path = EntryPath(path.split('/').map(|name| name.as_bytes().to_vec()).collect());
        Entry { path, kind, mode, mtime_s: 1_000_000_000, mtime_ns: 999_999_999 }
    };
    let entries = vec![
        entry("dir", EntryKind::Directory, 0o755),
        entry("dir/file", EntryKind::File { size: 1 << 33 }, 0o644),
        entry("dir/inner", EntryKind::Directory, 0o700),
        entry("dir/inner/none", EntryKind::File { size: 0 }, 0o600),
        entry("file", EntryKind::File { size: 17 }, 0o4755),
    ];
    Manifest { entries }
}
