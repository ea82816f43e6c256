//! Tests of the cost model's choice of algorithm and block size, which all members follow.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::pattern;
use crate::program::{Receiver, code, command, finish, text, tree};

#[test]
fn how_blocks_travel_is_chosen_for_the_fabric_unless_it_is_given() {
    let source = TempDir::new().unwrap();
    let file = source.path().join("file");
    std::fs::write(&file, pattern(5 << 20, 1)).unwrap();
    // The algorithms on shared memory, where there is such a fabric, and on TCP.
    let (fanout, two_tree) = (Some("fanout"), Some("two-tree"));
    let cases: [(&[&str], Option<&str>, Option<&str>); 4] = [
        (&[], fanout, two_tree),
        (&["--algorithm", "auto", "--block-size", "auto"], fanout, two_tree),
        (&["--algorithm", "chain"], Some("chain"), Some("chain")),
        (&["--block-size", "128k"], None, None),
    ];
    for (options, here, between) in cases {
        for (fabric, algorithm) in [("shm", here), ("tcp", between)] {
            if fabric == "shm" && !cfg!(target_os = "linux") {
                continue;
            }
            let receivers = [0; 3].map(|_| Receiver::start(&["--once", "--fabric", fabric]));
            let told = send_to(&receivers, &[&["--fabric", fabric], options].concat(), &file);
            assert_eq!(told["fabric"], fabric);
            if let Some(algorithm) = algorithm {
                assert_eq!(told["algorithm"], algorithm, "{options:?} {fabric}");
            }
            let block_size = told["block_size"].as_u64().unwrap();
            assert!((32 << 10..=2 << 20).contains(&block_size), "{told}");
            assert!(!options.contains(&"128k") || block_size == 128 << 10, "{told}");
            for receiver in receivers {
                assert_eq!(tree(receiver.dir.path()), tree(source.path()));
                let (exit, said) = receiver.finish_telling();
                assert_eq!(exit, 0);
                let here = started(&said);
                assert_eq!((&here["algorithm"], &here["block_size"]), (&told["algorithm"], &told["block_size"]));
            }
        }
    }
}

#[test]
fn a_receiver_is_told_what_its_sender_insists_on() {
    let source = TempDir::new().unwrap();
    let file = source.path().join("file");
    std::fs::write(&file, pattern(5 << 20, 1)).unwrap();
    // Blocks for ports of usual speed, and for fast ports.
    let block_sizes = [["--port-rate", "2.5G"], ["--port-rate", "100G"]].map(|options| {
        let receivers = [0; 3].map(|_| Receiver::start(&["--once"]));
        let told = send_to(&receivers, &[&["--fabric", "tcp", "--path-rtt", "0.1ms"], &options[..]].concat(), &file);
        assert_eq!((&told["fabric"], &told["fabric_reason"]), (&"tcp".into(), &"--fabric tcp".into()));
        for receiver in receivers {
            let (exit, said) = receiver.finish_telling();
            assert_eq!(exit, 0);
            let reason = started(&said)["fabric_reason"].as_str().unwrap().to_owned();
            assert!(!cfg!(target_os = "linux") || reason.ends_with("127.0.0.1 has no tcp+shm"), "{reason}");
        }
        told["block_size"].as_u64().unwrap()
    });
    assert!(block_sizes[0] < block_sizes[1], "{block_sizes:?}");
}

#[test]
fn a_sender_that_is_told_of_racks_sends_by_racks() {
    let source = TempDir::new().unwrap();
    let file = source.path().join("file");
    std::fs::write(&file, pattern(5 << 20, 1)).unwrap();
    for (racks, expected) in [("0,2/1,3", "[[0,2],[1,3]]"), ("none", "null")] {
        let receivers = [0; 3].map(|_| Receiver::start(&["--once"]));
        let told = send_to(&receivers, &["--fabric", "tcp", "--path-rtt", "1ms", "--racks", racks], &file);
        assert_eq!(told["racks"].to_string(), expected);
        let algorithm = if racks == "none" { "two-tree" } else { "hybrid(two-tree)" };
        assert_eq!(told["algorithm"], algorithm);
        for receiver in receivers {
            assert_eq!(std::fs::read(receiver.dir.path().join("file")).unwrap(), pattern(5 << 20, 1));
            let (exit, said) = receiver.finish_telling();
            assert_eq!(exit, 0);
            let here = started(&said);
            assert_eq!((&here["algorithm"], &here["racks"]), (&told["algorithm"], &told["racks"]));
        }
    }
}

#[test]
fn a_sender_says_what_its_choice_assumes_and_which_options_have_no_effect() {
    let source = TempDir::new().unwrap();
    let file = source.path().join("file");
    std::fs::write(&file, pattern(100_000, 1)).unwrap();
    let told = |fabric: &str, options: &[&str]| {
        let receivers = [0; 3].map(|_| Receiver::start(&["--once", "--fabric", fabric]));
        let to = receivers.each_ref().map(|receiver| receiver.address.clone()).join(",");
        let sent =
            finish(command(&["send", "--fabric", fabric, "--to", &to]).args(options).arg(&file).spawn().unwrap());
        assert_eq!(code(&sent), 0, "{sent:?}");
        format!("{}{}", text(&sent.stdout), text(&sent.stderr))
    };
    let explained = told("tcp", &["--port-rate", "200M", "--path-rtt", "60s", "--racks", "2,2", "--block-size", "1k"]);
    let basis = "chosen for ports of 200 Mbit/s (given), 60.0 s to the farthest and back";
    assert!(explained.contains(basis) && explained.contains("warning: blocks of 1 KiB are short"), "{explained}");
    assert!(!explained.contains("no effect"), "{explained}");
    let given = told("tcp", &["--algorithm", "chain", "--block-size", "64k"]);
    assert!(!given.contains("chosen for") && !given.contains("warning"), "{given}");
    if cfg!(target_os = "linux") {
        let shared = told("shm", &["--port-rate", "200M", "--path-rtt", "60s", "--racks", "2,2"]);
        for option in ["--racks (or RDMC_RACKS)", "--port-rate (or RDMC_PORT_RATE)", "--path-rtt (or RDMC_PATH_RTT)"] {
            assert!(shared.contains(&format!("warning: {option} has no effect")), "{shared}");
        }
        assert!(!shared.contains("chosen for") && !shared.contains("farthest"), "{shared}");
    }
}

#[test]
fn racks_that_do_not_suit_the_receivers_are_usage_errors() {
    for (arguments, said) in [
        (["--racks", "2,2"], "the racks hold 4 members, but there are 3"),
        (["--racks", "some"], "\"some\" is no number; give the sizes"),
        (["--spine", "chain"], "needs --algorithm hybrid"),
    ] {
        let sent = finish(command(&["send", "--to", "10.0.0.2,10.0.0.3", "file"]).args(arguments).spawn().unwrap());
        assert_eq!(code(&sent), 2, "{sent:?}");
        assert!(text(&sent.stderr).contains(said), "{sent:?}");
    }
}

/// Sends a file, and returns the sender's event of the start.
fn send_to(receivers: &[Receiver], options: &[&str], file: &Path) -> Value {
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    let sent = finish(command(&["send", "--json", "--to", &to]).args(options).arg(file).spawn().expect("rdmc starts"));
    assert_eq!(code(&sent), 0, "{options:?}: {sent:?}");
    started(&text(&sent.stdout))
}

/// Returns the event of the start of a transfer.
fn started(said: &str) -> Value {
    let mut events = said.lines().map(|line| serde_json::from_str::<Value>(line).expect("every line is an object"));
    events.find(|event| event["event"] == "started").expect("it began")
}
