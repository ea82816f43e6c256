//! Tests of the ends of `rdmc send` and `recv`, and of their reports to people and to programs.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rdmc::Fabric;
use serde_json::Value;
use tempfile::TempDir;

use crate::program::{
    Receiver, assert_all_have, begins, code, command, exit_of, finish, signal, text, tree, wait_until,
};
use crate::survivors::{end, start_send, write_files};

/// Parses the output of a receiver.
fn events(said: &str) -> Vec<Value> {
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_offer_that_is_declined_for_its_list_of_files_is_no_transfer() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 2, 5000);
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once", "--no-overwrite"])];
    std::fs::write(receivers[1].dir.path().join("1"), b"old").unwrap();
    let sent = finish(start_send(&files, &receivers, &[]));
    assert_eq!(code(&sent), 4, "{sent:?}");
    assert!(text(&sent.stderr).contains(&format!("{} refused: 1 exists (--no-overwrite)", receivers[1].address)));
    // Both receivers still wait, whichever of them declined.
    let sent = finish(start_send(&files[..1], &receivers, &[]));
    assert_eq!(code(&sent), 0, "{sent:?}");
    let told = [format!("{} refused: 1 exists", receivers[1].address), "1 exists (--no-overwrite)".to_owned()];
    for (receiver, told) in receivers.into_iter().zip(told) {
        let (exit, said, dir) = end(receiver);
        assert_eq!(exit, 0, "{said}");
        assert_eq!(std::fs::read(dir.path().join("0")).unwrap(), std::fs::read(&files[0]).unwrap());
        let said = events(&said);
        let declined: Vec<_> = said.iter().filter(|event| event["event"] == "declined").collect();
        assert!(declined.len() == 1 && declined[0]["reason"].as_str().unwrap().starts_with(&told), "{said:?}");
        assert!(said.iter().all(|event| event["event"] != "failed"), "{said:?}");
    }
}

#[test]
fn a_file_that_appears_while_it_is_sent_is_not_replaced_if_that_is_forbidden() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 2, 3 << 20);
    let mut receivers: Vec<_> = (0..2).map(|_| Receiver::start(&["--once", "--no-overwrite"])).collect();
    let sender = start_send(&files, &receivers, &[]);
    wait_until("the file begins to arrive", || begins(&receivers[1]));
    std::fs::write(receivers[1].dir.path().join("0"), b"appeared").unwrap();
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    let refusing = receivers.remove(1);
    let told = format!("{} refused: 0 exists (--no-overwrite)", refusing.address);
    assert!(text(&sent.stderr).contains(&told), "{sent:?}");
    assert_all_have(receivers, &source);
    let (exit, said, dir) = end(refusing);
    assert_eq!(exit, 1, "{said}");
    assert!(said.contains("\"message\":\"0 exists (--no-overwrite)\""), "{said}");
    assert_eq!(std::fs::read(dir.path().join("0")).unwrap(), b"appeared");
}

#[test]
fn a_receiver_of_many_transfers_that_is_interrupted_says_so_once() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 8 << 20);
    let receiver = Receiver::start(&[]);
    let sender = start_send(&files, std::slice::from_ref(&receiver), &[]);
    wait_until("the file begins to arrive", || begins(&receiver));
    signal(&receiver.child, "INT");
    assert_eq!(code(&finish(sender)), 3);
    let (exit, said, _dir) = end(receiver);
    assert_eq!(exit, 130, "{said}");
    let said = events(&said);
    let failed: Vec<_> = said.iter().filter(|event| event["event"] == "failed").collect();
    assert!(failed.len() == 1 && failed[0]["code"] == 130, "{said:?}");
}

#[test]
fn a_special_file_that_is_named_itself_is_a_usage_error() {
    let sent = finish(command(&["send", "/dev/null", "--to", "127.0.0.1:1"]).spawn().unwrap());
    assert_eq!(code(&sent), 2);
    assert!(text(&sent.stderr).contains("/dev/null is neither a file nor a directory"), "{sent:?}");
}

/// Kills one of four receivers when it has a file. Returns the sender's output, the victim, and the number of files of
/// each other receiver.
fn kill_one(options: &[&str]) -> (Output, String, Vec<usize>) {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 5, 1 << 20);
    let mut receivers: Vec<_> = (0..4).map(|_| Receiver::start(&["--once", "--discard-parts"])).collect();
    let sender = start_send(&files, &receivers, &[&["--json"], options].concat());
    let mut victim = receivers.remove(1);
    wait_until("a file has arrived", || victim.dir.path().join("0").exists());
    victim.child.kill().unwrap();
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    let complete = receivers.into_iter().map(|receiver| tree(end(receiver).2.path()).len()).collect();
    (sent, victim.address.clone(), complete)
}

#[test]
fn a_receiver_that_accepts_and_is_never_connected_does_not_stop_the_others() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 3, 1 << 20);
    let receivers: Vec<_> = (0..2).map(|_| Receiver::start(&["--once"])).collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(rdmc::Listener::bind(rdmc::TcpFabric::new() as Arc<dyn Fabric>, "127.0.0.1:0"));
    let listener = listener.unwrap();
    let victim = listener.local_address().to_owned();
    let accepting = runtime.spawn(async move { listener.next_invitation().await.accept().await.map(drop) });
    let to = [&receivers[0].address, &victim, &receivers[1].address].map(String::as_str).join(",");
    let sender = command(&["send", "--fabric", "tcp", "--json", "--to", &to]).args(&files).spawn().unwrap();
    let sent = finish(sender);
    runtime.block_on(accepting).unwrap().expect("it accepts");
    assert_eq!(code(&sent), 3, "{sent:?}");
    let said = events(&text(&sent.stdout));
    let failed = said.iter().find(|event| event["event"] == "failed").expect("it is told");
    let failed = failed["failed"].as_array().expect("it is a list");
    assert_eq!((failed.len(), &failed[0]["node"], &failed[0]["address"]), (1, &2.into(), &victim.as_str().into()));
    assert_eq!(failed[0]["cause"], "unreachable", "{failed:?}");
    assert_all_have(receivers, &source);
}

#[test]
fn who_ends_it_for_all_is_told_what_the_others_have() {
    let (sent, _, complete) = kill_one(&["--on-failure", "fail"]);
    let (least, most) = (complete.iter().min().unwrap(), complete.iter().max().unwrap());
    let some = if least == most { least.to_string() } else { format!("{least} to {most}") };
    let told = text(&sent.stderr);
    let remedy = "with rdmc recv running there, run rdmc send again: what was kept there does not travel again";
    let ending = format!("; the other 3 receivers have {some} of 5 files; {remedy}\n");
    assert!(told.ends_with(&ending), "{told}, {complete:?}");
}

#[test]
fn programs_are_told_by_fields_who_takes_part_and_who_has_failed() {
    let (sent, victim, _) = kill_one(&[]);
    let said = events(&text(&sent.stdout));
    let event = |name: &str| said.iter().find(|event| event["event"] == name).expect("it is told").clone();
    let started = event("started");
    assert_eq!((&started["direction"], started["peers"].as_array().unwrap().len()), (&"sending".into(), 4));
    assert_eq!(started["peers"][1], victim);
    for failed in [event("going-on"), event("failed")] {
        let failed = failed["failed"].as_array().expect("it is a list");
        assert_eq!((failed.len(), &failed[0]["node"], &failed[0]["address"]), (1, &2.into(), &victim.as_str().into()));
        // The cause depends on which connection breaks first.
        let (cause, message) = (failed[0]["cause"].as_str().unwrap(), failed[0]["message"].as_str().unwrap());
        assert!(["connection-lost", "data-connection"].contains(&cause) && !message.is_empty(), "{cause}: {message}");
    }
    assert_eq!(event("failed")["code"], 3);
}

/// The sender names the file, whichever member finds the change first.
#[test]
fn a_file_that_changes_in_whatever_way_is_named_by_the_sender() {
    // Long enough to be still under way when the test sees it begin, on a busy machine, too.
    const LEN: usize = 32 << 20;
    let changes: [fn(&Path); 3] = [
        |path| File::options().write(true).open(path).unwrap().set_len(1000).unwrap(),
        |path| File::options().append(true).open(path).unwrap().write_all(b"more").unwrap(),
        |path| std::fs::write(path, vec![0; LEN]).unwrap(),
    ];
    for (change, block_size, on_failure) in
        [(0, "512", "repair"), (0, "64k", "fail"), (1, "512", "repair"), (2, "64k", "repair"), (2, "512", "fail")]
    {
        let source = TempDir::new().unwrap();
        let files = write_files(&source, 2, LEN);
        let receivers = [0; 3].map(|_| Receiver::start(&["--once"]));
        let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
        let arguments = ["send", "--to", &to, "--block-size", block_size, "--on-failure", on_failure];
        let sender = command(&arguments).args(&files).spawn().unwrap();
        wait_until("the file begins to arrive", || begins(&receivers[0]));
        // The second file may be under way, too, or not opened yet.
        files.iter().for_each(|path| changes[change](path));
        let sent = finish(sender);
        let told = text(&sent.stderr);
        assert_eq!(code(&sent), 5, "{change} {told}");
        let named = files.iter().any(|path| told.contains(&format!("{} changed while", path.display())));
        assert!(named, "{change} {told}");
        receivers.into_iter().for_each(|receiver| assert_ne!(end(receiver).0, 0));
    }
}

/// Changes something in a directory.
type Change = fn(&Path);

/// The sender calls the file as the user has called it, says how it changed, and blames no receiver.
#[test]
fn a_source_that_changes_is_blamed_itself_and_the_change_has_a_name() {
    const LEN: usize = 32 << 20;
    let changes: [(Change, &str); 4] = [
        (
            |dir| File::options().write(true).open(dir.join("0")).unwrap().set_len(1000).unwrap(),
            "it was truncated from",
        ),
        (
            |dir| File::options().append(true).open(dir.join("0")).unwrap().write_all(b"more").unwrap(),
            "it has grown from",
        ),
        (|dir| std::fs::write(dir.join("0"), vec![0; LEN]).unwrap(), "it "),
        (|dir| std::fs::remove_file(dir.join("2")).unwrap(), "it was deleted"),
    ];
    for ((change, told), name) in changes.into_iter().zip(["0", "0", "0", "2"]) {
        let source = TempDir::new().unwrap();
        write_files(&source, 1, LEN);
        // Each is too long to travel together with others.
        for other in 1..12 {
            std::fs::write(source.path().join(other.to_string()), vec![1; 257 << 10]).unwrap();
        }
        let receivers = [0; 2].map(|_| Receiver::start(&["--once"]));
        let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
        // The first file is under way, the last ones are not open yet.
        let names = (3..12).map(|name| name.to_string()).chain(["2".to_owned()]);
        let names = ["0".to_owned(), "1".to_owned()].into_iter().chain(names);
        let mut sender = command(&["send", "--json", "--to", &to, "--block-size", "512"]);
        let sender = sender.args(names).current_dir(source.path()).spawn().unwrap();
        wait_until("the file begins to arrive", || begins(&receivers[0]));
        change(source.path());
        let sent = finish(sender);
        assert_eq!(code(&sent), 5, "{told} {sent:?}");
        let failed = events(&text(&sent.stdout)).pop().unwrap();
        let message = failed["message"].as_str().unwrap();
        let begins = format!("{name} changed while it was being sent: {told}");
        assert!(message.contains(&begins) && message.contains("send it again"), "{failed}");
        assert!(!message.contains("refused") && !message.contains("127.0.0.1"), "{failed}");
        assert_eq!(failed["failed"].as_array().unwrap().len(), 0, "{failed}");
    }
}

/// A process that was stopped for longer than the others wait says so itself, and blames none of them.
#[test]
fn a_sender_or_a_receiver_that_was_stopped_says_so_itself() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 32 << 20);
    for stops_sender in [true, false] {
        let mut receivers = [0; 3].map(|_| Receiver::start(&["--once"]));
        let sender = start_send(&files, &receivers, &["--json", "--detection", "0.5"]);
        wait_until("the file begins to arrive", || begins(&receivers[2]));
        signal(if stops_sender { &sender } else { &receivers[2].child }, "STOP");
        // The others have gone on without it when they end.
        for receiver in &mut receivers[..2] {
            let exit = exit_of(&mut receiver.child);
            assert_eq!(exit, if stops_sender { 3 } else { 0 });
        }
        if stops_sender {
            signal(&sender, "CONT");
        }
        let sent = finish(sender);
        assert_eq!(code(&sent), 3, "{sent:?}");
        let failed = events(&text(&sent.stdout)).pop().unwrap();
        let [_, _, last] = receivers;
        if stops_sender {
            let message = failed["message"].as_str().unwrap();
            assert!(message.contains("this process was stopped for at least"), "{failed}");
            assert!(!message.contains("127.0.0.1"), "{failed}");
            assert_eq!(failed["failed"].as_array().unwrap().len(), 0, "{failed}");
            continue;
        }
        assert_eq!(failed["failed"][0]["address"], last.address, "{failed}");
        signal(&last.child, "CONT");
        let (exit, said, _) = end(last);
        let failed = events(&said).pop().unwrap();
        assert_eq!(exit, 3, "{failed}");
        assert!(failed["message"].as_str().unwrap().contains("this process was stopped for at least"), "{failed}");
    }
}

#[test]
fn receivers_that_were_all_stopped_say_so_themselves() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 32 << 20);
    let receivers = [0; 2].map(|_| Receiver::start(&["--once"]));
    let sender = start_send(&files, &receivers, &["--detection", "0.5"]);
    wait_until("the file begins to arrive", || begins(&receivers[1]));
    receivers.iter().for_each(|receiver| signal(&receiver.child, "STOP"));
    let sent = finish(sender);
    assert_eq!(code(&sent), 3, "{sent:?}");
    receivers.iter().for_each(|receiver| signal(&receiver.child, "CONT"));
    for receiver in receivers {
        let (exit, said, _) = end(receiver);
        let failed = events(&said).pop().unwrap();
        assert_eq!(exit, 3, "{failed}");
        assert!(failed["message"].as_str().unwrap().contains("this process was stopped for at least"), "{failed}");
    }
}

/// The detection time is the sender's choice for all. With a long one a process may stop for a while.
#[test]
fn with_a_long_detection_time_a_sender_may_stop_for_a_while() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 32 << 20);
    let receivers = [0; 2].map(|_| Receiver::start(&["--once"]));
    let sender = start_send(&files, &receivers, &["--detection", "60"]);
    wait_until("the file begins to arrive", || begins(&receivers[0]));
    signal(&sender, "STOP");
    // Longer than the default.
    std::thread::sleep(Duration::from_secs(3));
    signal(&sender, "CONT");
    let sent = finish(sender);
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_all_have(receivers, &source);
    for wrong in ["0", "0.01", "3601", "-1", "soon"] {
        let sent = command(&["send", "--to", "127.0.0.1:1", "--detection", wrong]).args(&files).spawn().unwrap();
        let sent = finish(sent);
        assert!(code(&sent) == 2 && text(&sent.stderr).contains("--detection"), "{wrong}: {sent:?}");
    }
}

/// A sender that reaches its own limit of open files fails with exit code 1 and blames no receiver.
#[test]
fn a_sender_that_may_open_too_few_files_fails_by_itself_and_names_the_limit() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, 100_000);
    let receivers = [0; 4].map(|_| Receiver::start(&[]));
    let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
    let mut limited = 0;
    for limit in (11..40).step_by(2) {
        for fabric in ["tcp", "auto"] {
            let limit = limit.to_string();
            // Receivers may be busy for a while with the transfer that failed before.
            let sender = command(&["send", "--wait", "--to", &to, "--fabric", fabric]);
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", "ulimit -n $0; exec \"$@\"", &limit]).arg(sender.get_program());
            let shell = shell.args(sender.get_args()).args(&files).stdout(Stdio::piped()).stderr(Stdio::piped());
            let sent = finish(shell.spawn().unwrap());
            let told = text(&sent.stderr);
            match code(&sent) {
                0 => continue,
                // The others have everything.
                3 => assert!(told.contains("going on"), "{limit} {fabric} {told}"),
                code => assert_eq!(code, 1, "{limit} {fabric} {told}"),
            }
            assert!(told.contains("ulimit -n") && told.contains(&format!("limit of {limit} ")), "{limit} {told}");
            assert!(code(&sent) == 3 || !told.contains("could not be reached"), "{limit} {fabric} {told}");
            limited += 1;
        }
    }
    assert!(limited > 5, "{limited}");
}
