//! Tests of the program on RDMA devices, in the machine of `cargo xtask lab`. Elsewhere these tests are skipped.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::pattern;
use crate::program::{Receiver, assert_all_have, code, command, events, finish, rdmc, text};
use crate::requirement::skip;

mod conditions;
mod sessions;

#[test]
fn processes_on_devices_of_their_own_get_every_byte_by_every_algorithm() {
    let Some(lab) = Lab::enter(8) else { return };
    let flat = ["sequential", "chain", "binomial-tree", "binomial-pipeline", "circulant"];
    let mut choices: Vec<(u32, Vec<&str>)> = Vec::new();
    for nodes in [2, 3, 4, 5, 8] {
        choices.extend(flat.map(|name| (nodes, vec!["--algorithm", name])));
    }
    for (racks, spine) in [("3,1,4", "chain"), ("4,4", "binomial-pipeline"), ("3,4,1", "cascade")] {
        choices.push((8, vec!["--algorithm", "hybrid", "--racks", racks, "--spine", spine]));
    }
    for (nodes, choice) in choices {
        let count = nodes.to_string();
        let demo = ["demo", "--fabric", "verbs", "--size", "8MiB", "--json", "--nodes", &count];
        let output = rdmc(&[&demo[..], &choice].concat());
        assert_eq!(code(&output), 0, "{choice:?} {nodes}: {output:?}");
        let rounds: Vec<_> = events(&output).into_iter().filter(|event| event["event"] == "round").collect();
        assert!(!rounds.is_empty());
        for round in rounds {
            assert_eq!((&round["fabric"], &round["digests_ok"]), (&"verbs".into(), &(nodes - 1).into()), "{round}");
            let expected = lab.nodes.min(nodes as usize);
            assert_eq!(round["devices"].as_array().map(Vec::len), Some(expected), "{round}");
        }
    }
}

#[test]
fn a_file_and_a_directory_arrive_at_three_receivers() {
    let Some(_lab) = Lab::enter(4) else { return };
    let source = TempDir::new().unwrap();
    let (file, root) = (source.path().join("file"), source.path().join("tree"));
    std::fs::create_dir_all(root.join("deep/empty")).unwrap();
    std::fs::write(&file, pattern((8 << 20) + 1, 1)).unwrap();
    for (name, len) in [("nothing", 0), ("byte", 1), ("deep/many", 3_000_000)] {
        std::fs::write(root.join(name), pattern(len, 2)).unwrap();
    }
    let receivers = receivers(&[2, 3, 4], &["--once"]);
    let sent = send(&[&file, &root], &receivers, &[]);
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_eq!(started(&sent)["fabric"], "verbs", "{sent:?}");
    assert_all_have(receivers, &source);
}

#[test]
fn a_receiver_killed_under_posted_work_ends_the_transfer_everywhere_and_is_named() {
    let Some(_lab) = Lab::enter(4) else { return };
    // More bytes than the sender sends before it reports progress.
    let (_source, file) = source_of(128 << 20);
    for (algorithm, victim) in [("binomial-pipeline", 2), ("chain", 0), ("circulant", 1)] {
        let mut receivers = receivers(&[2, 3, 4], &["--once"]);
        let mut sender = send_command(&[&file], &receivers);
        let mut sender =
            sender.args(["--algorithm", algorithm, "--block-size", "4k", "--on-failure", "fail"]).spawn().unwrap();
        let mut lines = BufReader::new(sender.stdout.take().unwrap()).lines();
        let under_way = |line: &String| {
            let event: Value = serde_json::from_str(line).unwrap();
            event["event"] == "progress" && event["bytes"].as_u64() > Some(0)
        };
        assert!(lines.by_ref().map(Result::unwrap).any(|line| under_way(&line)), "{algorithm}: it makes no progress");
        let name = format!("receiver {} was lost", victim + 1);
        let mut victim = receivers.remove(victim);
        victim.child.kill().unwrap();
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        let exit = sender.wait().unwrap().code();
        let said = rest.last().map(String::as_str).unwrap_or_default();
        assert_eq!(exit, Some(3), "{algorithm}: {said}");
        assert!(said.contains(&victim.address), "{algorithm}: {said}");
        for receiver in receivers {
            let (exit, said) = receiver.finish_telling();
            assert_eq!(exit, 3, "{algorithm}: {said}");
            assert!(said.contains(&name), "{algorithm}: {said}");
        }
    }
}

/// The machine for one test alone, because a test changes the network for all.
struct Lab {
    /// The number of its nodes.
    nodes: usize,
    _alone: MutexGuard<'static, ()>,
}

impl Lab {
    /// Returns the machine if it is a lab with at least `nodes` nodes and RoCE devices; otherwise prints why not.
    fn enter(nodes: usize) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let variable = |name| std::env::var(name).unwrap_or_default();
        let found = variable("RDMC_LAB_NODES").parse().unwrap_or(0);
        if found < nodes || variable("RDMC_LAB_DRIVER") != "rxe" {
            skip("rdma", &format!("this is no lab with {nodes} RoCE devices; run `cargo xtask lab test`"));
            return None;
        }
        Some(Self { nodes: found, _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner) })
    }
}

/// Starts receivers on the devices of these nodes.
fn receivers(nodes: &[u32], options: &[&str]) -> Vec<Receiver> {
    let start = |node| {
        let (address, device) = (format!("10.77.0.{node}:0"), format!("rxe{node}"));
        let verbs = ["--fabric", "verbs", "--device", &device];
        Receiver::start_at(&address, &[&verbs[..], options].concat())
    };
    nodes.iter().map(start).collect()
}

/// Makes a directory with a file of `len` bytes to send.
fn source_of(len: usize) -> (TempDir, PathBuf) {
    let source = TempDir::new().unwrap();
    let file = source.path().join("file");
    std::fs::write(&file, pattern(len, 1)).unwrap();
    (source, file)
}

/// Prepares to send from node 1.
fn send_command(files: &[&PathBuf], receivers: &[Receiver]) -> Command {
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    let mut command = command(&["send", "--to", &to, "--json", "--fabric", "verbs", "--device", "rxe1"]);
    command.args(files);
    command
}

/// Sends from node 1.
fn send(files: &[&PathBuf], receivers: &[Receiver], options: &[&str]) -> Output {
    finish(send_command(files, receivers).args(options).spawn().unwrap())
}

/// Returns the event of the start of a transfer at the sender.
fn started(sent: &Output) -> Value {
    events(sent).into_iter().find(|event| event["event"] == "started").expect("it began")
}

/// Runs a program of the lab, which must succeed. Spaces separate the words.
fn run(line: &str) {
    let words: Vec<&OsStr> = line.split(' ').map(OsStr::new).collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
}

/// Runs a closure when it is dropped, so that a test does not leave its network to another test.
struct Undo<F: FnMut()>(F);

impl<F: FnMut()> Drop for Undo<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Returns the sum of counters of the devices of these nodes.
fn counters(nodes: RangeInclusive<usize>, names: &[&str]) -> u64 {
    let mut sum = 0;
    for node in nodes {
        let dir = format!("/sys/class/infiniband/rxe{node}/ports/1/hw_counters");
        for name in names {
            sum += std::fs::read_to_string(Path::new(&dir).join(name)).unwrap().trim().parse::<u64>().unwrap();
        }
    }
    sum
}
