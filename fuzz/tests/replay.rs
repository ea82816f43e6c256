//! Checks that every target holds for its corpus and for earlier findings.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Once;

use rdmc_fuzz::{TARGETS, Target};

#[test]
fn every_target_holds_for_its_corpus() {
    for target in TARGETS {
        assert!(replay(target, "corpus") > 0, "{} has no corpus", target.name);
    }
}

#[test]
fn what_was_once_found_is_mended() {
    for target in TARGETS {
        replay(target, "regressions");
    }
}

/// With `RDMC_FUZZ_CORPUS=write`, writes the corpus first.
#[test]
fn the_corpus_is_what_the_encoders_make() {
    for target in TARGETS {
        let dir = directory("corpus").join(target.name);
        let made: BTreeMap<String, Vec<u8>> = (target.seeds)().into_iter().collect();
        assert!(
            made.values().map(Vec::len).sum::<usize>() <= CORPUS_BYTES_MAX,
            "the corpus of {} is long",
            target.name
        );
        if std::env::var_os("RDMC_FUZZ_CORPUS").is_some_and(|how| how == "write") {
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(&dir).unwrap();
            made.iter().for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes).unwrap());
        }
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let found = files(&dir).into_iter().map(|path| (name(&path), std::fs::read(path).unwrap())).collect();
        assert!(made == found, "the corpus of {} differs: RDMC_FUZZ_CORPUS=write writes it anew", target.name);
    }
}

#[test]
fn every_target_has_a_binary_and_every_directory_a_target() {
    let names: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    let binaries: BTreeSet<String> = files(&directory("fuzz_targets")).into_iter().map(stem).collect();
    assert_eq!(names, binaries);
    for kept in ["corpus", "regressions"] {
        let known: BTreeSet<String> = files(&directory(kept)).into_iter().map(stem).collect();
        assert!(known.is_subset(&names), "{known:?}");
    }
}

/// Runs a target on all inputs of its directory, and returns their number.
fn replay(target: &Target, kept: &str) -> usize {
    static COUNTING: Once = Once::new();
    COUNTING.call_once(|| {
        // A runtime catches the panic of a task, so count it.
        let told = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.set(PANICS.get() + 1);
            told(info);
        }));
    });
    let inputs = files(&directory(kept).join(target.name));
    for path in &inputs {
        println!("{}", path.display());
        (target.run)(&std::fs::read(path).expect("it was listed"));
        assert_eq!(PANICS.get(), 0, "a task has panicked");
    }
    inputs.len()
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Lists the files of a directory, in order; none if there is no directory.
fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return BTreeSet::new() };
    let paths = entries.map(|entry| entry.expect("a directory can be listed").path());
    paths.filter(|path| path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."))).collect()
}

thread_local! {
    /// Panics of this thread, which also runs the tasks of its targets.
    static PANICS: Cell<usize> = const { Cell::new(0) };
}

/// Most bytes of a target's corpus.
const CORPUS_BYTES_MAX: usize = 8 << 10;
