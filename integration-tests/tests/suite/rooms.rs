//! Tests of the sources: imports between crates point down only, and promises have tests.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The rooms that each room may use.
const ARROWS: [(&str, &[&str]); 6] = [
    ("rdmc-schedule", &[]),
    ("rdmc-fabric", &[]),
    ("rdmc", &["rdmc-schedule", "rdmc-fabric"]),
    ("rdmc-verbs", &["rdmc-fabric"]),
    ("rdmc-sim", &["rdmc", "rdmc-schedule", "rdmc-fabric"]),
    ("rdmc-cli", &["rdmc", "rdmc-schedule", "rdmc-fabric", "rdmc-verbs", "rdmc-sim"]),
];

#[test]
fn imports_between_crates_point_down_only() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let mut seen = 0;
    for package in metadata["packages"].as_array().expect("a list of packages") {
        let name = package["name"].as_str().expect("a name");
        let dependencies = package["dependencies"].as_array().expect("a list of dependencies");
        // It is under the GPL, and has its own workspace.
        assert!(dependencies.iter().all(|other| other["name"] != "rdmc-async-rdma"), "{name} uses rdmc-async-rdma");
        if package["publish"].as_array().is_some_and(Vec::is_empty) {
            continue; // Examples, tests and benches may use everything else.
        }
        let allowed = allowed.get(name).unwrap_or_else(|| panic!("crate {name} has no room: add it to ARROWS"));
        seen += 1;
        for dependency in dependencies {
            let other = dependency["name"].as_str().expect("a name");
            // A crate may use its own test support in its tests.
            let own = other == name && dependency["kind"] == "dev";
            let ours = other == "rdmc" || other.starts_with("rdmc-");
            assert!(!ours || own || allowed.contains(&other), "{name} must not use {other}");
        }
    }
    assert!(seen >= 4, "the workspace has at least its four first crates, {seen} were found");
}

#[test]
fn every_promise_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let promises = std::fs::read_to_string(root.join("docs/GUARANTEES.md")).unwrap();
    let mut sources = String::new();
    for dir in ["crates", "integration-tests", "fuzz"] {
        read_sources(&root.join(dir), &mut sources);
    }
    let mut promise = 0;
    let mut tests = 0;
    for line in promises.lines() {
        if let Some((number, _)) = line.split_once(". **") {
            assert!(promise == 0 || tests > 0, "promise {promise} names no test");
            promise += 1;
            tests = 0;
            assert_eq!(number, promise.to_string(), "promises are numbered in order");
        }
        // A line of tests contains nothing else; it may be an item of a list.
        let words = line.trim().trim_start_matches("- ").split(' ');
        let names = words.map(|word| word.strip_prefix('`').and_then(|word| word.strip_suffix('`')));
        let Some(names) = names.collect::<Option<Vec<_>>>() else { continue };
        for name in names {
            let is_there = [format!("fn {name}("), format!("{name},"), format!("{name};"), format!("\"{name}\"")];
            assert!(is_there.iter().any(|text| sources.contains(text)), "promise {promise}: there is no test {name}");
            tests += 1;
        }
    }
    assert!(promise > 10 && tests > 0);
}

fn read_sources(dir: &Path, sources: &mut String) {
    for entry in std::fs::read_dir(dir).expect("a directory of the sources") {
        let path = entry.expect("a directory of the sources").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" {
            read_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&std::fs::read_to_string(&path).expect("it is text"));
        }
    }
}
