//! Every promise of docs/GUARANTEES.md names tests that exist, and the tier in which each runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A test that a promise names: `name`, `name` (also TIER, …) or `name` (only TIER, …).
///
/// A test without a tier runs with every change. With `also` it runs with every change in a short form and in the tiers
/// in full, with `only` in the tiers alone.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    name: String,
    only: bool,
    tiers: BTreeSet<String>,
}

#[test]
fn every_promise_names_tests_that_exist_and_the_tiers_that_run_them() {
    let root = root();
    let promises = read(&root.join("docs/GUARANTEES.md"));
    let tiers = tests_of_tiers(&root);
    let mut sources = String::new();
    ["crates", "integration-tests", "fuzz", "xtask"].iter().for_each(|dir| read_sources(&root.join(dir), &mut sources));
    let (mut promise, mut count, mut is_tests) = (0, 0, false);
    for line in promises.lines() {
        if let Some((number, _)) = line.split_once(". **") {
            assert!(promise == 0 || count > 0, "promise {promise} names no test");
            (promise, count) = (promise + 1, 0);
            assert_eq!(number, promise.to_string(), "promises are numbered in order");
        }
        is_tests = line.trim() == "Tests:" || is_tests && !line.trim().is_empty();
        let listed = line.trim().strip_prefix("- `").filter(|_| is_tests);
        let Some(named) = listed.map(|text| named(text, promise)) else { continue };
        count += 1;
        let name = &named.name;
        let is_there = [format!("fn {name}("), format!("{name},"), format!("{name};"), format!("\"{name}\"")];
        assert!(is_there.iter().any(|text| sources.contains(text)), "promise {promise}: there is no test {name}");
        let runs_in: BTreeSet<String> =
            tiers.iter().filter(|(_, tests)| tests.contains(name)).map(|(tier, _)| tier.clone()).collect();
        assert_eq!(named.tiers, runs_in, "promise {promise}: the tiers of {name}, by xtask/tiers.toml on the right");
        assert_eq!(named.only, runs_only_in_tiers(&sources, name), "promise {promise}: `only` or not, {name}");
    }
    assert!(promise > 10 && count > 0);
}

/// Every test that a tier runs by name exists, and none is left out of all runs.
#[test]
fn what_does_not_run_with_every_change_runs_in_a_tier() {
    let root = root();
    let mut sources = String::new();
    ["crates", "integration-tests"].iter().for_each(|dir| read_sources(&root.join(dir), &mut sources));
    let in_tiers: BTreeSet<String> = tests_of_tiers(&root).into_values().flatten().collect();
    let mut lines = sources.lines().map(str::trim);
    let mut ignored = Vec::new();
    while lines.any(|line| line.starts_with("#[ignore")) {
        let function = lines.find(|line| line.contains("fn ")).expect("a function is ignored");
        let name = &function[function.find("fn ").expect("it is there") + 3..];
        ignored.push(name[..name.find('(').expect("it has parameters")].to_owned());
    }
    let forgotten: Vec<String> = ignored.into_iter().filter(|name| !in_tiers.contains(name)).collect();
    assert!(forgotten.is_empty(), "{forgotten:?} are ignored, and no tier of xtask/tiers.toml lists them");
}

/// Reads the rest of a line behind "- `".
fn named(text: &str, promise: usize) -> Named {
    let (name, rest) = text.split_once('`').unwrap_or_else(|| panic!("promise {promise}: {text}"));
    let malformed = || panic!("promise {promise}: behind {name} stands neither (also TIER) nor (only TIER): {rest}");
    let (only, tiers) = match rest.trim().strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        None if rest.trim().is_empty() => (false, ""),
        None => malformed(),
        Some(inside) => match inside.split_once(' ') {
            Some(("also", tiers)) => (false, tiers),
            Some(("only", tiers)) => (true, tiers),
            _ => malformed(),
        },
    };
    let tiers = tiers.split(", ").filter(|tier| !tier.is_empty()).map(str::to_owned).collect();
    Named { name: name.to_owned(), only, tiers }
}

/// Reads which tests each tier runs by name.
fn tests_of_tiers(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let tiers: toml::Value = toml::from_str(&read(&root.join("xtask/tiers.toml"))).expect("it is TOML");
    let list = |value: &toml::Value, key: &str| value.get(key).and_then(|list| list.as_array().cloned());
    let tests = |tier: &toml::Value| {
        let steps = list(tier, "steps").expect("a tier has steps");
        let tests = steps.iter().filter_map(|step| list(step, "tests")).flatten();
        tests.map(|test| test.as_str().expect("a test's name").to_owned()).collect()
    };
    let tiers = list(&tiers, "tier").expect("there are tiers");
    tiers.iter().map(|tier| (tier["name"].as_str().expect("a tier's name").to_owned(), tests(tier))).collect()
}

/// Tells whether a test does not run with every change.
fn runs_only_in_tiers(sources: &str, name: &str) -> bool {
    let function = format!("fn {name}(");
    sources.find(&function).is_some_and(|at| {
        let attributes = sources[..at].rsplit("\n\n").next().unwrap_or_default();
        attributes.contains("#[ignore")
    })
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read_sources(dir: &Path, sources: &mut String) {
    for entry in std::fs::read_dir(dir).expect("a directory of the sources") {
        let path = entry.expect("a directory of the sources").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" {
            read_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&read(&path));
        }
    }
}
