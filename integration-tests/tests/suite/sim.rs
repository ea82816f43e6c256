//! Tests of `rdmc sim` as a user runs it.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{code, rdmc};

fn scenario(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("examples/scenarios").join(name)
}

/// Runs `rdmc sim` with these arguments, and returns exit code, stdout and stderr.
fn sim(arguments: &[&str]) -> (i32, String, String) {
    let output = rdmc(&[&["sim"], arguments].concat());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (code(&output), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_scenario_gives_the_same_times_and_trace_for_the_same_seed() {
    let dir = TempDir::new().unwrap();
    let file = scenario("faults.toml");
    let play = |trace: &str| {
        let trace = dir.path().join(trace);
        let path = trace.display().to_string();
        let (exit, said, _) =
            sim(&["--scenario", &file.display().to_string(), "--seed", "5", "--trace", &path, "--json"]);
        assert_eq!(exit, 0, "{said}");
        (serde_json::from_str::<Value>(&said).unwrap(), std::fs::read_to_string(trace).unwrap())
    };
    let (first, trace) = play("a.json");
    assert_eq!(play("b.json"), (first.clone(), trace.clone()));
    // One group lost a member, the other did not.
    assert!(first["groups"][0]["failure"].as_str().unwrap().contains("node 2"), "{first}");
    assert_eq!(first["groups"][1]["failure"], Value::Null);
    let delivered = first["groups"][1]["messages"][0]["delivered_at_ns"].as_array().unwrap();
    assert_eq!(delivered.len(), 3);
    let trace: Value = serde_json::from_str(&trace).unwrap();
    let spans = trace["traceEvents"].as_array().unwrap();
    let names = |kind: &str| spans.iter().filter(|it| it["ph"] == kind).count();
    assert!(names("X") >= 2 * 3 * 16, "every block is drawn at both ports");
    assert!(names("i") >= 1, "the fault is drawn");
}

#[test]
fn what_makes_no_sense_is_named_with_the_remedy() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("wrong.toml");
    let path = file.display().to_string();
    let cluster = "[cluster]\nnodes = 4\nport_mbps = 1000\nlatency_ns = 10\n";
    for (text, named) in [
        ("[cluster]\nnodes = 4\n".to_owned(), "port_mbps"),
        ("groups = []\n[cluster]\nnodes = 0\nport_mbps = 1\nlatency_ns = 1\n".to_owned(), "nodes must be from 1 to"),
        (format!("{cluster}speed = 3\n"), "speed"),
        (format!("{cluster}[[groups]]\nmembers = [0, 9]\nmessages = []\n"), "there is no node 9"),
        (format!("{cluster}[[groups]]\nalgorithm = \"fast\"\nmessages = []\n"), "binomial-pipeline"),
        (format!("groups = []\n{cluster}[[events]]\nwhat = \"kill\"\nat_us = 1\nnode = 4\n"), "there is no node 4"),
    ] {
        std::fs::write(&file, &text).unwrap();
        let (exit, _, said) = sim(&["--scenario", &path]);
        assert_eq!(exit, 2, "{text}: {said}");
        assert!(said.contains(named) && said.contains("wrong.toml"), "{text}: {said}");
    }
    std::fs::write(&file, b"\x7fELF\xff\xfe").unwrap();
    for arguments in [&["--scenario"][..], &["campaign", "--case"]] {
        let (exit, _, said) = sim(&[arguments, &[path.as_str()]].concat());
        assert!(exit == 2 && said.contains("wrong.toml"), "{said}");
    }
    let (exit, _, said) = sim(&["--scenario", "/nowhere.toml"]);
    assert!(exit == 1 && said.contains("/nowhere.toml"), "{said}");
    assert_eq!(sim(&["figure", "99"]).0, 2);
    assert_eq!(sim(&["campaign", "--seeds", "5..5"]).0, 2);
}

#[test]
fn an_experiment_writes_tables_and_pictures() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("new/figures");
    let (exit, said, _) = sim(&["figure", "5", "--out", &out.display().to_string()]);
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("agrees: "), "{said}");
    // Only rows of Table 1 are in the reviewed list of differences.
    assert!(said.lines().filter(|line| line.contains("DIFFERS")).all(|line| line.contains("Table 1")), "{said}");
    assert!(std::fs::read(out.join("figure-5.png")).unwrap().starts_with(b"\x89PNG"));
    assert!(std::fs::read_to_string(out.join("figure-5.svg")).unwrap().starts_with("<svg"));
    let table = std::fs::read_to_string(out.join("figure-5-table-1.csv")).unwrap();
    assert_eq!(table.lines().count(), 8);
}

#[test]
fn a_campaign_plays_its_seeds() {
    let (exit, said, _) = sim(&["campaign", "--seeds", "100..150"]);
    assert_eq!(exit, 0, "{said}");
    assert!(said.contains("50 cases, none failed"), "{said}");
}
