//! Tests of several senders that send to the same receivers at the same time.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::path::Path;
use std::process::Child;

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::pattern;
use crate::program::{Receiver, begins, code, command, finish, signal, wait_until};

/// The receivers take different times to put a file in place. So transfers that overlapped would often end in another
/// order at one receiver than at the other.
#[test]
fn senders_of_one_name_at_the_same_time_leave_the_same_file_at_all_receivers() {
    let receivers = [Receiver::start(&[]), Receiver::start(&["--fsync"])];
    for round in 0..50 {
        let sources = [0; 2].map(|_| TempDir::new().unwrap());
        let contents = [2 * round, 2 * round + 1].map(|seed| pattern(300_000, seed));
        let senders = [0, 1].map(|at| {
            let path = sources[at].path().join("file");
            std::fs::write(&path, &contents[at]).unwrap();
            let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
            start_send(&path, &to, &["--wait", "--timeout", "60"])
        });
        let ends = senders.map(finish);
        let left = receivers.each_ref().map(|receiver| std::fs::read(receiver.dir.path().join("file")).unwrap());
        assert!(left[0] == left[1] && contents.contains(&left[0]), "round {round}: {ends:?}");
        assert!(ends.iter().all(|sent| code(sent) == 0), "round {round}: {ends:?}");
    }
}

/// A short transfer of a name that a long one writes waits for it. The receiver reports the first attempt as declined.
#[test]
fn a_sender_waits_while_another_one_sends_a_file_of_the_same_name() {
    let sources = [0; 2].map(|_| TempDir::new().unwrap());
    let receiver = Receiver::start(&[]);
    let names = [("file", 16 << 20), ("file", 1000), ("other", 1000)];
    let paths = [0, 1, 1].map(|at| sources[at].path()).into_iter().zip(names).map(|(source, (name, len))| {
        let path = source.join(name);
        std::fs::write(&path, pattern(len, 7)).unwrap();
        path
    });
    let [long, short, other] = paths.collect::<Vec<_>>().try_into().unwrap();
    let first = start_send(&long, &receiver.address, &["--block-size", "512"]);
    wait_until("the file begins to arrive", || begins(&receiver));
    let second = start_send(&short, &receiver.address, &["--wait", "--timeout", "60"]);
    // Other names do not wait.
    assert_eq!(code(&finish(start_send(&other, &receiver.address, &[]))), 0);
    for sent in [first, second].map(finish) {
        assert_eq!(code(&sent), 0, "{sent:?}");
    }
    assert_eq!(std::fs::read(receiver.dir.path().join("file")).unwrap(), pattern(1000, 7));
    signal(&receiver.child, "INT");
    let (_, said) = receiver.finish_telling();
    let events = said.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let reasons = events.filter_map(|event| event["reason"].as_str().map(str::to_owned));
    assert!(reasons.into_iter().any(|reason| reason == "busy with another transfer of file"), "{said}");
}

/// Two senders do not wait. One that loses is refused as busy, and all receivers have the file of the same sender.
#[test]
fn of_two_senders_that_do_not_wait_the_loser_is_told_that_the_receivers_are_busy() {
    let receivers = [Receiver::start(&[]), Receiver::start(&["--fsync"])];
    for round in 0..50 {
        let sources = [0; 2].map(|_| TempDir::new().unwrap());
        let contents = [2 * round, 2 * round + 1].map(|seed| pattern(300_000, seed));
        let senders = [0, 1].map(|at| {
            let path = sources[at].path().join(format!("file{round}"));
            std::fs::write(&path, &contents[at]).unwrap();
            let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
            start_send(&path, &to, &["--json"])
        });
        let ends = senders.map(finish);
        for sent in &ends {
            let told = String::from_utf8_lossy(&sent.stdout);
            let busy = || told.contains(r#""cause":"busy""#) && told.contains("with --wait, rdmc send waits for it");
            assert!(code(sent) == 0 || code(sent) == 4 && busy(), "round {round}: {ends:?}");
        }
        let left = receivers.each_ref().map(|receiver| std::fs::read(receiver.dir.path().join(format!("file{round}"))));
        let left = left.map(Result::ok);
        assert!(left[0] == left[1], "round {round}: {ends:?}");
        let sent = [0, 1].map(|at| code(&ends[at]) == 0);
        let held = [0, 1].map(|at| left[0].as_ref() == Some(&contents[at]));
        assert!(if sent == [true, true] { held != [false, false] } else { held == sent }, "round {round}: {ends:?}");
    }
}

#[test]
fn twenty_four_sends_at_once_all_arrive_if_they_wait() {
    let receivers = [Receiver::start(&[]), Receiver::start(&[])];
    let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
    let sources = [0; 24].map(|_| TempDir::new().unwrap());
    let path = |at: usize| sources[at].path().join(format!("file{at}"));
    let senders: Vec<Child> = (0..sources.len())
        .map(|at| {
            std::fs::write(path(at), pattern(200_000, at as u64)).unwrap();
            start_send(&path(at), &to, &["--wait", "--timeout", "100"])
        })
        .collect();
    for sent in senders.into_iter().map(finish) {
        assert_eq!(code(&sent), 0, "{sent:?}");
    }
    for (receiver, at) in receivers.iter().flat_map(|receiver| (0..sources.len()).map(move |at| (receiver, at))) {
        let arrived = std::fs::read(receiver.dir.path().join(format!("file{at}"))).unwrap();
        assert!(arrived == pattern(200_000, at as u64), "file{at}");
    }
}

#[test]
fn a_sender_that_waits_finds_a_receiver_that_starts_later() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, b"bytes").unwrap();
    let first = Receiver::start(&[]);
    let address = first.address.clone();
    signal(&first.child, "INT");
    first.finish();
    // Without a receiver the time passes, or the first refusal ends the program.
    let refused = finish(start_send(&path, &address, &[]));
    assert_eq!(code(&refused), 4, "{refused:?}");
    let refused = finish(start_send(&path, &address, &["--wait", "--timeout", "1"]));
    assert_eq!(code(&refused), 4, "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("trying again"), "{refused:?}");
    let sender = start_send(&path, &address, &["--wait", "--timeout", "100"]);
    let receiver = Receiver::start_at(&address, &["--once"]);
    assert_eq!(code(&finish(sender)), 0);
    let (exit, dir) = receiver.finish();
    assert_eq!((exit, std::fs::read(dir.path().join("file")).unwrap()), (0, b"bytes".to_vec()));
}

fn start_send(path: &Path, to: &str, options: &[&str]) -> Child {
    command(&["send", "--to", to]).args(options).arg(path).spawn().unwrap()
}
