//! Tests of `rdmc send` and `rdmc recv` when a process dies or gives up in the middle: the others go on.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::path::PathBuf;
use std::process::Child;

use rdmc::{GroupSpec, Listener, TcpFabric};
use tempfile::TempDir;

use crate::cluster::{pattern, poll_and_drop, watched};
use crate::program::{Receiver, assert_all_have, begins, code, command, events, finish, text, tree, wait_until};

#[test]
fn a_receiver_killed_in_the_middle_is_named_and_the_others_get_everything() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 2, 3 << 20);
    let mut receivers: Vec<_> = (0..4).map(|_| Receiver::start(&["--once"])).collect();
    let sender = start_send(&files, &receivers, &["--json"]);
    let mut victim = receivers.remove(1);
    wait_until("the file begins to arrive", || begins(&victim));
    victim.child.kill().unwrap();
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    let told = text(&sent.stderr);
    assert!(told.contains(&victim.address) && told.contains("the other 3 receivers have everything"), "{told}");
    assert!(told.contains("with rdmc recv running there, run rdmc send again"), "{told}");
    let said = events(&sent);
    let going_on: Vec<_> = said.iter().filter(|event| event["event"] == "going-on").collect();
    assert_eq!((going_on.len(), going_on[0]["receivers"].as_u64()), (1, Some(3)), "{said:?}");
    assert_eq!(said.iter().filter(|event| event["event"] == "file").count(), 2, "{said:?}");
    assert_all_have(receivers, &source);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_fails_while_the_group_forms_is_named_after_the_start_of_the_transfer() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 1 << 20);
    let receivers: Vec<_> = (0..2).map(|_| Receiver::start(&["--once", "--no-shm"])).collect();
    let listener = Listener::bind(TcpFabric::new(), "127.0.0.1:0").await.unwrap();
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).chain([listener.local_address()]);
    let to = to.collect::<Vec<_>>().join(",");
    let mut sender = command(&["send", "--fabric", "tcp", "--json", "--to", &to]);
    let sender = sender.args(&files).spawn().unwrap();
    let node = watched(async { listener.next_invitation().await.accept().await.unwrap().start().await.unwrap() }).await;
    // It leaves the group of the files before that is formed.
    let left = poll_and_drop(node.join_group(GroupSpec::new(2, node.nodes())), 1).await;
    assert!(left.is_none_or(|joined| joined.is_err()));
    let sent = tokio::task::spawn_blocking(move || finish(sender)).await.unwrap();
    assert_eq!(code(&sent), 3, "{sent:?}");
    let said = events(&sent);
    let at = |name: &str| said.iter().position(|event| event["event"] == name).expect("it is said");
    assert!(at("started") < at("going-on"), "{said:?}");
    assert_eq!(said[at("going-on")]["failed"][0]["node"], 3, "{said:?}");
    assert_all_have(receivers, &source);
    drop(node);
}

#[test]
fn receivers_killed_one_after_the_other_are_all_named() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 3, 2 << 20);
    let mut receivers: Vec<_> = (0..5).map(|_| Receiver::start(&["--once"])).collect();
    let sender = start_send(&files, &receivers, &[]);
    let mut victims = [receivers.remove(3), receivers.remove(0)];
    wait_until("the first file begins to arrive", || begins(&victims[0]));
    victims[0].child.kill().unwrap();
    wait_until("a file has arrived", || victims[1].dir.path().join("0").exists());
    victims[1].child.kill().unwrap();
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    let told = text(&sent.stderr);
    assert!(victims.iter().all(|victim| told.contains(&victim.address)), "{told}");
    assert!(told.contains("the other 3 receivers have everything"), "{told}");
    assert_all_have(receivers, &source);
}

#[test]
fn with_on_failure_fail_a_receiver_killed_in_the_middle_ends_it_for_all_and_the_others_clean_up() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 16 << 20);
    let mut receivers: Vec<_> = (0..3).map(|_| Receiver::start(&["--once", "--discard-parts"])).collect();
    let sender = start_send(&files, &receivers, &["--on-failure", "fail"]);
    let mut victim = receivers.remove(1);
    wait_until("the file begins to arrive", || begins(&victim));
    victim.child.kill().unwrap();
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    assert!(text(&sent.stderr).contains(&victim.address), "{sent:?}");
    for receiver in receivers {
        let (exit, dir) = receiver.finish();
        assert_eq!(exit, 3);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn when_the_sender_is_killed_the_receivers_end_with_the_same_files_and_nothing_else() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 6, 1 << 20);
    let receivers: Vec<_> = (0..4).map(|_| Receiver::start(&["--once"])).collect();
    let mut sender = start_send(&files, &receivers, &[]);
    wait_until("a file has arrived", || receivers[2].dir.path().join("1").exists());
    sender.kill().unwrap();
    finish(sender);
    let sent = tree(source.path());
    let ended: Vec<_> = receivers.into_iter().map(end).collect();
    for (exit, said, dir) in &ended {
        let found = tree(dir.path());
        assert_eq!(*exit, 3, "{said}");
        assert!(found.len() >= 2 && found.iter().all(|(name, file)| sent.get(name) == Some(file)), "{found:?}");
        assert_eq!(found, tree(ended[0].2.path()));
        assert!(said.contains(&format!("; {} of 6 files complete", found.len())), "{said}");
    }
}

#[test]
fn a_receiver_that_cannot_go_on_does_not_stop_the_others() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 3, 1 << 20);
    let mut receivers: Vec<_> = (0..3).map(|_| Receiver::start(&["--once"])).collect();
    let sender = start_send(&files, &receivers, &[]);
    let refusing = receivers.remove(2);
    wait_until("the first file begins to arrive", || begins(&refusing));
    // No file can take the name of a directory.
    std::fs::create_dir(refusing.dir.path().join("0")).unwrap();
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    let told = text(&sent.stderr);
    assert!(told.contains(&format!("{} refused: 0: ", refusing.address)), "{told}");
    assert!(told.contains("the other 2 receivers have everything"), "{told}");
    assert_all_have(receivers, &source);
    let (exit, said, dir) = end(refusing);
    assert_eq!(exit, 1, "{said}");
    assert!(tree(dir.path()).keys().all(|name| name.extension().is_none()), "{:?}", tree(dir.path()));
}

/// Writes `count` files of `bytes` bytes; their names are numbers.
pub(crate) fn write_files(source: &TempDir, count: u64, bytes: usize) -> Vec<PathBuf> {
    let write = |number: u64| {
        let path = source.path().join(number.to_string());
        std::fs::write(&path, pattern(bytes, number + 1)).unwrap();
        path
    };
    (0..count).map(write).collect()
}

/// Starts to send in small blocks, so that the transfer takes a while.
pub(crate) fn start_send(files: &[PathBuf], receivers: &[Receiver], options: &[&str]) -> Child {
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    command(&["send", "--to", &to, "--block-size", "512"]).args(options).args(files).spawn().unwrap()
}

/// Waits for the end, and returns the exit code, the output and the directory.
pub(crate) fn end(mut receiver: Receiver) -> (i32, String, TempDir) {
    let dir = std::mem::replace(&mut receiver.dir, TempDir::new().unwrap());
    let (exit, said) = receiver.finish_telling();
    (exit, said, dir)
}
