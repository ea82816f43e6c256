//! Tests of `rdmc serve`, `get` and `put`: files between two hosts by one session.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{Receiver, code, command, exit_of, finish, rdmc, signal, text};

/// Writes a file without blocks that are alike.
fn file_of(dir: &Path, len: usize) -> PathBuf {
    let path = dir.join("file");
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Runs a get; returns its exit code and what it tells at its end.
fn get(from: &str, into: &Path, options: &[&str]) -> (i32, Value) {
    let arguments = ["get", from].map(OsStr::new).into_iter().chain([into.as_os_str(), OsStr::new("--json")]);
    let arguments: Vec<_> = arguments.chain(options.iter().map(OsStr::new)).collect();
    let output = rdmc(&arguments);
    let stdout = text(&output.stdout);
    let last = stdout.lines().last().map(|line| serde_json::from_str(line).unwrap());
    (code(&output), last.unwrap_or_default())
}

/// Prepares a get at a low rate.
fn slow_get(from: &str, into: &Path) -> Command {
    let rate = ["--json", "--rate", "80M", "--resume", "2"].map(OsStr::new);
    let arguments: Vec<_> = ["get", from].map(OsStr::new).into_iter().chain([into.as_os_str()]).chain(rate).collect();
    command(&arguments)
}

/// Waits until a part of a file has come.
fn await_part(getting: &mut Child) {
    let mut lines = BufReader::new(getting.stdout.take().unwrap());
    loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it ends before a part has come");
        let event: Value = serde_json::from_str(&line).unwrap();
        if event["event"] == "progress" && event["bytes"].as_u64() > Some(2 << 20) {
            // The pipe stays open, so that it can tell more.
            std::thread::spawn(move || lines.lines().count());
            return;
        }
    }
}

#[test]
fn files_are_got_and_put_with_a_key_and_encryption() {
    let dir = TempDir::new().unwrap();
    let key = dir.path().join("key");
    assert_eq!(code(&rdmc(&[OsStr::new("keygen"), key.as_os_str()])), 0);
    let key = key.to_str().unwrap();
    let secure = ["--key", key, "--encrypt"];
    let server = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &[&secure[..], &["--writable"]].concat());
    let file = file_of(dir.path(), 3_000_001);
    let put = ["put", file.to_str().unwrap(), &server.address];
    let output = rdmc(&[&put[..], &secure[..]].concat());
    assert_eq!(code(&output), 0, "{output:?}");
    assert_eq!(std::fs::read(server.dir.path().join("file")).unwrap(), std::fs::read(&file).unwrap());
    let into = TempDir::new().unwrap();
    let (exit, told) = get(&format!("{}/file", server.address), into.path(), &secure);
    assert_eq!((exit, told["moved"].as_u64()), (0, Some(3_000_001)), "{told}");
    assert_eq!(std::fs::read(into.path().join("file")).unwrap(), std::fs::read(&file).unwrap());
    // Others are refused, and say why.
    let (exit, told) = get(&format!("{}/file", server.address), into.path(), &[]);
    assert_eq!((exit, told["code"].as_u64()), (4, Some(4)), "{told}");
}

#[test]
fn a_get_that_was_killed_is_completed_with_the_rest() {
    let server = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &[]);
    let file = file_of(server.dir.path(), 24 << 20);
    let into = TempDir::new().unwrap();
    let mut getting = slow_get(&server.address, into.path()).spawn().unwrap();
    await_part(&mut getting);
    getting.kill().unwrap();
    getting.wait().unwrap();
    assert!(!into.path().join("file").exists());
    let (exit, told) = get(&server.address, into.path(), &[]);
    let moved = told["moved"].as_u64().unwrap();
    assert!(exit == 0 && moved <= 23 << 20 && told["bytes"] == 24 << 20, "{told}");
    assert_eq!(std::fs::read(into.path().join("file")).unwrap(), std::fs::read(file).unwrap());
}

#[test]
fn a_client_whose_server_is_stopped_is_told() {
    let mut server = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &[]);
    file_of(server.dir.path(), 24 << 20);
    let into = TempDir::new().unwrap();
    let mut getting = slow_get(&server.address, into.path());
    let mut getting = getting.stderr(Stdio::piped()).spawn().unwrap();
    await_part(&mut getting);
    signal(&server.child, "TERM");
    let mut told = String::new();
    getting.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!((exit_of(&mut getting), exit_of(&mut server.child)), (3, 143), "{told}");
    assert!(told.contains("the server was stopped; run the same command again when it runs"), "{told}");
}

#[test]
fn a_get_whose_server_is_killed_says_so_and_can_be_repeated() {
    let mut server = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &[]);
    let file = file_of(server.dir.path(), 24 << 20);
    let into = TempDir::new().unwrap();
    let mut getting = slow_get(&server.address, into.path()).spawn().unwrap();
    await_part(&mut getting);
    server.child.kill().unwrap();
    assert_eq!(exit_of(&mut getting), 3);
    let dir = server.finish_killed();
    let server = Receiver::serve(dir, "127.0.0.1:0", &[]);
    let (exit, told) = get(&server.address, into.path(), &[]);
    assert!(exit == 0 && told["moved"].as_u64().unwrap() <= 23 << 20, "{told}");
    assert_eq!(std::fs::read(into.path().join("file")).unwrap(), std::fs::read(file).unwrap());
}

#[test]
fn files_go_from_one_server_to_another() {
    let from = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &[]);
    let file = file_of(from.dir.path(), 3_000_001);
    let to = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &["--writable", "--fetch-from", &from.address]);
    let source = format!("{}/file", from.address);
    let copy = || rdmc(&["get", "--from", &source, "--to", &to.address, "--json"].map(OsStr::new));
    let told = |output: &std::process::Output| {
        let last = text(&output.stdout).lines().last().map(|line| serde_json::from_str::<Value>(line).unwrap());
        last.unwrap_or_default()
    };
    let copied = copy();
    assert_eq!((code(&copied), told(&copied)["moved"].as_u64()), (0, Some(3_000_001)), "{copied:?}");
    assert_eq!(std::fs::read(to.dir.path().join("file")).unwrap(), std::fs::read(&file).unwrap());
    // Why the other server does not serve it is told to the client of this one.
    std::fs::remove_file(&file).unwrap();
    let refused = copy();
    let message = told(&refused)["message"].to_string();
    assert!(code(&refused) == 4 && message.contains("file does not exist at the server"), "{refused:?}");
}

#[test]
fn links_are_named_by_a_get_and_counted_by_the_server() {
    let mut server = Receiver::serve(TempDir::new().unwrap(), "127.0.0.1:0", &[]);
    file_of(server.dir.path(), 1000);
    std::os::unix::fs::symlink("file", server.dir.path().join("link")).unwrap();
    let into = TempDir::new().unwrap();
    let output = rdmc(&["get", &server.address, into.path().to_str().unwrap()].map(OsStr::new));
    assert!(code(&output) == 3 && text(&output.stderr).contains("skipped link: it is a symbolic link"), "{output:?}");
    assert!(text(&output.stdout).ends_with("; 1 skipped\n"), "{output:?}");
    signal(&server.child, "TERM");
    assert_eq!(exit_of(&mut server.child), 143);
}

#[test]
fn mistakes_are_refused_before_anything_is_sent() {
    let dir = TempDir::new().unwrap();
    let into = dir.path().to_str().unwrap();
    let receiver = Receiver::start(&[]);
    for (arguments, told) in [
        (vec!["get", "host/a", "other/b", into], "two servers"),
        (vec!["get", "host/../a", into], "points elsewhere"),
        (vec!["get", ":7471/a", into], "names no host"),
        (vec!["put", "/no/such/file", "127.0.0.1:1"], "No such file"),
        (vec!["get", "127.0.0.1:1/a", "/no/such/dir"], "create it first"),
        (vec!["get", "127.0.0.1:1/a", into], "cannot reach 127.0.0.1:1"),
        (vec!["get", &receiver.address, into], "`rdmc serve` or `rdmc gateway` listen at that port?"),
        (vec!["serve", "/no/such/dir"], "cannot be used"),
        (vec!["serve", into, "--fetch-from", "host"], "--writable"),
        (vec!["serve", into, "--writable", "--fetch-from", "host/path"], "without a path"),
        (vec!["get"], "at last the directory"),
        (vec!["gateway", "--serve", &receiver.address, "--allow", "127.0.0.1"], "choose another port"),
        (vec!["gateway", "--listen", &receiver.address, "--peer", "host", "--socks"], "choose another port"),
        (vec!["gateway", "--listen", "1.2.3.4:0", "--peer", "host", "--socks"], "is not an address of this host"),
        (vec!["get", "host/a", into, "--rate", "0"], "leave the option out if there is no limit"),
        (vec!["get", "host/a"], "at last the directory"),
        (vec!["get", "host/a", ""], "at last the directory"),
        (vec!["get", "--to", "host"], "--from"),
        (vec!["get", "--from", "host"], "--to"),
        (vec!["get", "--from", "host/a", "other/b", "--to", "third"], "two servers"),
        (vec!["get", "host/a", into, "--from", "host", "--to", "other"], "cannot be used with"),
        (vec!["get", "--from", "host", "--to", "other", "--rate", "1G"], "cannot be used with"),
    ] {
        let output = finish(command(&arguments).spawn().unwrap());
        assert!(code(&output) > 0 && text(&output.stderr).contains(told), "{arguments:?}: {output:?}");
    }
}
