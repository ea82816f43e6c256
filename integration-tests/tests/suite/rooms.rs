//! Tests of the sources: imports between crates point down only.

use std::collections::BTreeMap;
use std::process::Command;

mod circles;

/// The rooms that each room may use.
const ARROWS: [(&str, &[&str]); 9] = [
    ("rdmc-schedule", &[]),
    ("rdmc-fabric", &[]),
    ("rdmc", &["rdmc-schedule", "rdmc-fabric"]),
    ("rdmc-verbs", &["rdmc-fabric"]),
    ("rdmc-sim", &["rdmc", "rdmc-schedule", "rdmc-fabric", "rdmc-wan"]),
    ("rdmc-files", &["rdmc", "rdmc-schedule", "rdmc-fabric", "rdmc-verbs", "rdmc-wan"]),
    // Of the runtime, only its security.
    ("rdmc-wan", &["rdmc", "rdmc-fabric"]),
    // Members choose fabrics as senders of files do. Flows use single verbs of a fabric.
    ("rdmc-bench", &["rdmc", "rdmc-sim", "rdmc-files", "rdmc-fabric", "rdmc-verbs"]),
    // The ports of the demo are a decorator of fabrics.
    (
        "rdmc-cli",
        &["rdmc", "rdmc-schedule", "rdmc-fabric", "rdmc-verbs", "rdmc-sim", "rdmc-files", "rdmc-wan", "rdmc-bench"],
    ),
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
