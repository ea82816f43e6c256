//! Tests of the program when something is wrong from the start: arguments, peers, addresses.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Child;

use tempfile::TempDir;

use crate::cluster::pattern;
use crate::program::{Receiver, code, command, exit_of, finish, rdmc, send, text, tree};
use crate::security::key_in;

#[test]
fn wrong_arguments_end_with_2() {
    let cases: [&[&str]; 24] = [
        &[],
        &["teleport"],
        &["send"],
        &["send", "Cargo.toml"],
        &["send", "Cargo.toml", "--to", "nowhere:"],
        &["send", "Cargo.toml", "--to", "h:1,h:1"],
        &["send", "Cargo.toml", "--to", "[::1]:1,[0::1]:1"],
        &["send", "Cargo.toml", "--to", "h:1", "--port-rate", "10GB/s"],
        &["send", "Cargo.toml", "--to", "h:1", "--block-size", "0"],
        &["send", "Cargo.toml", "--to", "h:1", "--block-size", "2GiB"],
        &["send", "Cargo.toml", "--to", "h:1", "--on-failure", "weep"],
        &["send", "Cargo.toml", "--to", "h:1", "--algorithm", "magic"],
        &["send", "Cargo.toml", "--to", "h:1", "--algorithm", "hybrid"],
        &["send", "Cargo.toml", "--to", "h:1", "--algorithm", "hybrid", "--racks", "4,4"],
        &["send", "/", "--to", "h:1"],
        &["recv", "--max-size", "much"],
        &["recv", "--listen", "no address"],
        &["schedule", "--nodes", "0"],
        &["demo", "--nodes", "3", "--algorithm", "chain", "--racks", "1,2"],
        &["schedule", "--nodes", "4", "--spine", "chain"],
        &["demo", "--nodes", "1"],
        &["demo", "--size", "0"],
        &["bench", "--device", "mlx5_0", "--fabric", "tcp"],
        &["send", "Cargo.toml", "--to", "127.0.0.1:1", "--device", "mlx5_0", "--fabric", "shm"],
    ];
    for arguments in cases {
        let output = rdmc(arguments);
        assert_eq!(code(&output), 2, "{arguments:?}: {output:?}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_file_that_is_not_there_ends_with_1() {
    let output = rdmc(&["send", "/nonexistent/file", "--to", "127.0.0.1:1"]);
    assert_eq!(code(&output), 1);
    assert!(text(&output.stderr).contains("/nonexistent/file"));
    assert_eq!(code(&rdmc(&["recv", "--dir", "/nonexistent"])), 1);
}

#[test]
fn more_blocks_than_a_receiver_can_remember_end_with_2() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    File::create(&path).unwrap().set_len((1 << 20) + 1).unwrap();
    let receiver = Receiver::start(&[]);
    let sent = send(std::slice::from_ref(&path), std::slice::from_ref(&receiver), &[], "1");
    let said = text(&sent.stderr);
    assert_eq!(code(&sent), 2, "{said}");
    assert!(said.contains("choose blocks of 2 bytes or more"), "{said}");
    assert!(tree(receiver.dir.path()).is_empty());
}

#[test]
fn a_receiver_that_is_not_there_ends_with_4_and_nothing_is_sent() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, b"bytes").unwrap();
    let receiver = Receiver::start(&["--once"]);
    let free = crate::cluster::free_addresses(1).remove(0);
    let to = format!("{},{free}", receiver.address);
    let sent = rdmc(&[OsStr::new("send"), path.as_os_str(), OsStr::new("--to"), OsStr::new(&to)]);
    assert_eq!(code(&sent), 4, "{sent:?}");
    let said = text(&sent.stderr);
    assert!(said.contains(&free) && said.contains("does rdmc recv run there?"), "{said}");
    assert!(tree(receiver.dir.path()).is_empty());
    // A withdrawn offer does not count as a transfer, so the receiver still waits for one.
    assert_eq!(code(&send(&[path], std::slice::from_ref(&receiver), &[], "1M")), 0);
    assert_eq!(receiver.finish().0, 0);
}

#[test]
fn a_receiver_that_refuses_ends_with_4_and_nothing_is_sent() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, pattern(5000, 1)).unwrap();
    for refusal in ["--max-size=4k", "--no-overwrite"] {
        let receivers = [Receiver::start(&[]), Receiver::start(&[refusal])];
        std::fs::write(receivers[1].dir.path().join("file"), b"old").unwrap();
        let sent = send(std::slice::from_ref(&path), &receivers, &[], "1M");
        assert_eq!(code(&sent), 4, "{sent:?}");
        let said = text(&sent.stderr);
        assert!(said.contains(&receivers[1].address) && said.contains("refused"), "{said}");
        assert!(tree(receivers[0].dir.path()).is_empty());
        assert_eq!(std::fs::read(receivers[1].dir.path().join("file")).unwrap(), b"old");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_directory_that_was_removed_is_an_offer_refused() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, pattern(5000, 1)).unwrap();
    let receivers = [Receiver::start(&[]), Receiver::start(&[])];
    std::fs::remove_dir_all(receivers[1].dir.path()).unwrap();
    let sent = send(std::slice::from_ref(&path), &receivers, &[], "1M");
    let said = text(&sent.stderr);
    assert_eq!(code(&sent), 4, "{said}");
    assert!(said.contains(&receivers[1].address) && said.contains("the directory of --dir was removed"), "{said}");
    assert!(tree(receivers[0].dir.path()).is_empty());
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_beyond_the_limit_of_file_sizes_is_the_failure_of_one_transfer() {
    let source = TempDir::new().unwrap();
    let (long, short) = (source.path().join("long"), source.path().join("short"));
    std::fs::write(&long, pattern(1 << 20, 1)).unwrap();
    std::fs::write(&short, pattern(5000, 2)).unwrap();
    // Shared memory is a file, too, so a group that needs it forms without this receiver.
    for (fabric, reason) in [("tcp", "ulimit -f"), ("shm", "File too large")] {
        let receivers = [Receiver::start(&[]), Receiver::start(&[])];
        let limited = rustix::process::Pid::from_child(&receivers[1].child);
        let limit = rustix::process::Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) };
        rustix::process::prlimit(Some(limited), rustix::process::Resource::Fsize, limit).unwrap();
        let sent = send(std::slice::from_ref(&long), &receivers, &["--fabric", fabric], "64k");
        let said = text(&sent.stderr);
        assert_eq!(code(&sent), 3, "{said}");
        assert!(said.contains(&receivers[1].address) && said.contains(reason), "{said}");
        // The receiver still accepts files within its limit.
        let sent = send(std::slice::from_ref(&short), &receivers, &["--fabric", "tcp"], "64k");
        assert_eq!(code(&sent), 0, "{sent:?}");
        assert_eq!(tree(receivers[1].dir.path()).len(), 1);
    }
}

#[test]
fn a_value_that_makes_no_sense_is_named_with_its_option() {
    let cases: [(&str, &[&str]); 5] = [
        ("--nodes", &["bench", "-n", "-3"]),
        ("--size", &["bench", "--size", "-1"]),
        ("--max-size", &["recv", "--max-size", "-1"]),
        ("--evict-after", &["send", "Cargo.toml", "--to", "h:1", "--evict-after", "-1"]),
        ("--nodes", &["demo", "-n", "-1"]),
    ];
    for (option, arguments) in cases {
        let output = rdmc(arguments);
        let said = text(&output.stderr);
        assert!(code(&output) == 2 && said.contains(option) && said.contains("invalid value"), "{arguments:?}: {said}");
    }
    let output = finish(command(&["doctor"]).env("RDMC_LOG", "[").spawn().unwrap());
    assert!(code(&output) == 2 && text(&output.stderr).contains("RDMC_LOG"), "{output:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn who_cannot_be_heard_works_all_the_same() {
    let (source, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = source.path().join("file");
    std::fs::write(&path, pattern(5000, 1)).unwrap();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut receiving = command(&["recv", "--once", "--json", "--listen", "127.0.0.1:0", "--dir"]);
    let mut receiver = Ending(receiving.arg(dir.path()).env("RDMC_LOG", "debug").stderr(full()).spawn().unwrap());
    let mut lines = BufReader::new(receiver.0.stdout.take().unwrap());
    let mut first = String::new();
    lines.read_line(&mut first).unwrap();
    // No process reads its output from here on.
    drop(lines);
    let listening: serde_json::Value = serde_json::from_str(&first).unwrap();
    let mut sending = command(&["send", "--to", listening["address"].as_str().unwrap()]);
    let sending = sending.arg(&path).env("RDMC_LOG", "debug").stdout(full()).stderr(full());
    let mut sender = Ending(sending.spawn().unwrap());
    assert_eq!((exit_of(&mut sender.0), exit_of(&mut receiver.0)), (0, 0));
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), pattern(5000, 1));
}

/// A process that ends with the test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_is_no_receiver_is_said_to_be_none() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let banner = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap();
        // Until the other end closes the connection.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let sent = rdmc(&["send", "Cargo.toml", "--to", &address]);
    let said = text(&sent.stderr);
    assert!(code(&sent) == 4 && said.contains("does not speak rdmc: its first bytes are \"SSH-\""), "{said}");
    banner.join().unwrap();
}

#[test]
fn encryption_at_one_end_alone_is_refused_with_the_remedy() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, b"bytes").unwrap();
    let key = key_in(&source, "key");
    let with_key = |more: &[&'static str]| {
        let options = key.iter().map(String::as_str);
        options.chain(more.iter().copied()).collect::<Vec<_>>()
    };
    for (ours, theirs) in [(&[][..], &["--encrypt"][..]), (&["--encrypt"], &[])] {
        let receiver = Receiver::start(&with_key(theirs));
        let sent = send(std::slice::from_ref(&path), std::slice::from_ref(&receiver), &with_key(ours), "1M");
        let said = text(&sent.stderr);
        assert!(code(&sent) == 4 && said.contains("--encrypt must be set at both ends or at neither"), "{said}");
        assert!(tree(receiver.dir.path()).is_empty());
    }
}
