//! A changed byte makes a tier due, and no crate that a tier compiles can be forgotten.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::record::RECORD;
use super::tier::{COMMON, TIERS};
use super::*;

/// A repository with one tier, which covers the directory `covered`.
struct Repository {
    dir: TempDir,
}

impl Repository {
    fn new() -> Self {
        let repository = Self { dir: TempDir::new().unwrap() };
        repository.write(
            TIERS,
            "[[tier]]\nname = \"heavy\"\nproves = \"much\"\npackages = []\ncovers = [\"covered\"]\n\
             [[tier.steps]]\nrun = [\"sh\", \"-c\", \"test ! -e broken && echo run >> runs && echo 'sum: well'\"]\n\
             result = \"sum: \"\n",
        );
        for common in ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml", ".cargo/config.toml"] {
            repository.write(common, "the same for all");
        }
        repository.write("covered/source.rs", "fn heavy() {}");
        repository.write("elsewhere/source.rs", "fn light() {}");
        repository.git(&["init", "--quiet"]);
        repository.git(&["add", "--all"]);
        repository
    }

    fn git(&self, arguments: &[&str]) {
        assert!(Command::new("git").args(arguments).current_dir(&self.dir).status().unwrap().success());
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Runs the command; returns whether all is proven, and how often the tier has run so far.
    fn prove(&self, tiers: &[&str], check: bool) -> (bool, usize) {
        let tiers = tiers.iter().map(|tier| (*tier).to_owned()).collect();
        let root = Some(self.dir.path().to_owned());
        let proven = prove(&Options { tiers, all: false, check, root }).unwrap();
        (proven, std::fs::read_to_string(self.path("runs")).map_or(0, |runs| runs.lines().count()))
    }
}

#[test]
fn a_changed_byte_in_a_covered_file_makes_the_tier_due() {
    let repository = Repository::new();
    assert_eq!(repository.prove(&[], true), (false, 0), "nothing is proven yet");
    assert_eq!(repository.prove(&[], false), (true, 1));
    assert_eq!(repository.prove(&[], false), (true, 1), "it is not due");
    let mut runs = 1;
    let mut is_due_after = |what: &str, change: &dyn Fn()| {
        change();
        assert_eq!(repository.prove(&[], true), (false, runs), "{what}");
        runs += 1;
        assert_eq!(repository.prove(&[], false), (true, runs), "{what}");
        assert_eq!(repository.prove(&[], true), (true, runs), "{what}");
    };
    is_due_after("a changed byte", &|| repository.write("covered/source.rs", "fn heavy() { }"));
    is_due_after("a new file", &|| {
        repository.write("covered/new.rs", "");
        repository.git(&["add", "covered/new.rs"]);
    });
    is_due_after("a file with another name", &|| repository.git(&["mv", "covered/new.rs", "covered/newer.rs"]));
    is_due_after("a file less", &|| std::fs::remove_file(repository.path("covered/newer.rs")).unwrap());
    is_due_after("a file that became a program", &|| {
        use std::os::unix::fs::PermissionsExt;
        let permissions = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(repository.path("covered/source.rs"), permissions).unwrap();
    });
    is_due_after("another lock file", &|| repository.write("Cargo.lock", "other versions"));
    is_due_after("another compiler", &|| repository.write("rust-toolchain.toml", "another"));
    is_due_after("other steps", &|| {
        let tiers = std::fs::read_to_string(repository.path(TIERS)).unwrap();
        repository.write(TIERS, &tiers.replace("much", "more"));
    });
}

#[test]
fn what_a_tier_does_not_cover_does_not_make_it_due() {
    let repository = Repository::new();
    assert_eq!(repository.prove(&[], false), (true, 1));
    repository.write("elsewhere/source.rs", "fn lighter() {}");
    repository.write("covered/untracked.rs", "");
    assert_eq!(repository.prove(&[], false), (true, 1));
    assert_eq!(repository.prove(&["heavy"], false), (true, 2), "it runs when it is named");
}

#[test]
fn a_wrong_record_costs_a_run_and_a_failure_costs_the_record() {
    let repository = Repository::new();
    assert_eq!(repository.prove(&[], false), (true, 1));
    let record = std::fs::read_to_string(repository.path(RECORD)).unwrap();
    assert!(record.contains("result = \"sum: well; "), "{record}");
    let (begin, end) = record.split_once("content = \"").unwrap();
    let forged = format!("{begin}content = \"{}{}", if end.starts_with('0') { '1' } else { '0' }, &end[1..]);
    repository.write(RECORD, &forged);
    assert_eq!(repository.prove(&[], false), (true, 2));
    repository.write("broken", "");
    assert_eq!(repository.prove(&["heavy"], false), (false, 2));
    assert_eq!(repository.prove(&[], true), (false, 2), "what failed is not proven any more");
}

#[test]
fn a_tier_that_does_not_exist_or_covers_nothing_is_an_error() {
    let repository = Repository::new();
    let options = |tiers| Options { tiers, all: false, check: true, root: Some(repository.dir.path().to_owned()) };
    let unknown = prove(&options(vec!["light".to_owned()])).unwrap_err().to_string();
    assert_eq!(unknown, "there is no tier light; there are: heavy");
    let tiers = std::fs::read_to_string(repository.path(TIERS)).unwrap();
    repository.write(TIERS, &tiers.replace("[\"covered\"]", "[\"covered\", \"gone\"]"));
    let gone = prove(&options(Vec::new())).unwrap_err().to_string();
    assert_eq!(gone, "the tier heavy covers gone, where git tracks no file");
}

#[test]
fn every_tier_covers_the_crates_that_its_packages_use() {
    let root = workspace();
    for tier in Tier::read_all(root).unwrap() {
        let covered: BTreeSet<PathBuf> =
            COMMON.into_iter().chain(tier.covers.iter().map(String::as_str)).map(|path| root.join(path)).collect();
        let crates = crates_of(&root.join(&tier.manifest));
        let lock = Path::new(&tier.manifest).with_file_name("Cargo.lock");
        assert!(is_covered(&root.join(&lock), &covered), "{}: {} is not covered", tier.name, lock.display());
        let mut open: Vec<String> = tier.packages.clone();
        assert!(!open.is_empty(), "{}: it compiles no package", tier.name);
        let mut seen = BTreeSet::new();
        while let Some(name) = open.pop() {
            let package = crates.get(&name).unwrap_or_else(|| panic!("{}: there is no package {name}", tier.name));
            assert!(is_covered(&package.dir, &covered), "{}: {name} is used and not covered", tier.name);
            // The tests of a package are compiled where it is named; those of what it uses are not.
            let used = package.uses.iter().filter(|(_, for_tests)| !for_tests || tier.packages.contains(&name));
            open.extend(used.map(|(used, _)| used.clone()).filter(|used| seen.insert(used.clone())));
        }
    }
}

/// A crate of ours.
struct Crate {
    dir: PathBuf,
    /// The crates of ours that it uses, and whether its tests alone do.
    uses: Vec<(String, bool)>,
}

/// Reads which crates of ours a workspace and the workspaces beside it have.
fn crates_of(manifest: &Path) -> BTreeMap<String, Crate> {
    let mut crates = BTreeMap::new();
    for manifest in [workspace().join("Cargo.toml"), manifest.to_owned()] {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--manifest-path"])
            .arg(&manifest)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        for package in metadata["packages"].as_array().unwrap() {
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let ours = dependencies.filter(|dependency| dependency["path"].is_string());
            let uses = ours.map(|used| (used["name"].as_str().unwrap().to_owned(), used["kind"] == "dev")).collect();
            let dir = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned();
            crates.insert(package["name"].as_str().unwrap().to_owned(), Crate { dir, uses });
        }
    }
    crates
}

/// Tells whether a path or a directory above it is covered.
fn is_covered(path: &Path, covered: &BTreeSet<PathBuf>) -> bool {
    path.ancestors().any(|above| covered.contains(above))
}
