//! Tests of the program `rdmc` as a user runs it: real processes, real files, exit codes.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::pattern;
use crate::requirement::skip;

#[test]
fn files_of_every_size_arrive_by_every_algorithm_at_any_number_of_receivers() {
    const BLOCK: usize = 4096;
    let source = TempDir::new().unwrap();
    let sizes = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 1];
    for (size, seed) in sizes.into_iter().zip(1..) {
        let path = source.path().join(format!("{size}.bin"));
        std::fs::write(&path, pattern(size, seed)).unwrap();
        stamp(&path, 0o640 + u32::try_from(seed).unwrap(), 1_000_000_000 + seed);
    }
    let receivers: Vec<_> = (0..7).map(|_| Receiver::start(&[])).collect();
    for count in [1, 2, 4, 7] {
        let racks = format!("1,{count}");
        let flat = ["sequential", "chain", "binomial-tree", "binomial-pipeline", "circulant"];
        let choices = flat.map(|name| vec!["--algorithm", name]).into_iter();
        for choice in choices.chain([vec!["--algorithm", "hybrid", "--racks", &racks, "--spine", "chain"]]) {
            let sent = send(&files_in(source.path()), &receivers[..count], &choice, "4k");
            assert_eq!(code(&sent), 0, "{choice:?} {count}: {sent:?}");
            for receiver in &receivers[..count] {
                assert_eq!(tree(receiver.dir.path()), tree(source.path()), "{choice:?} {count}");
                empty(receiver.dir.path());
            }
        }
    }
    assert!(receivers.iter().all(|receiver| tree(receiver.dir.path()).is_empty()));
}

/// Checks that each receiver ends well, with the content of `source` and nothing else.
pub(crate) fn assert_all_have(receivers: impl IntoIterator<Item = Receiver>, source: &TempDir) {
    for receiver in receivers {
        let (exit, dir) = receiver.finish();
        assert_eq!(exit, 0);
        assert_eq!(tree(dir.path()), tree(source.path()));
    }
}

#[test]
fn a_message_may_have_more_than_65535_blocks() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("many");
    std::fs::write(&path, pattern(16 * 66_000 + 5, 1)).unwrap();
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once"])];
    let sent = send(&[path], &receivers, &[], "16");
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_all_have(receivers, &source);
}

#[test]
fn a_sender_sends_no_faster_than_its_bound() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("slow");
    std::fs::write(&path, pattern(2_000_000, 1)).unwrap();
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once"])];
    let begun = Instant::now();
    // 2 MB/s: a second for the file, but for the last block and a short burst.
    let sent = send(&[path], &receivers, &["--rate", "16M"], "64k");
    assert_eq!(code(&sent), 0, "{sent:?}");
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(900), "{took:?}");
    assert_all_have(receivers, &source);
}

#[test]
fn a_directory_tree_arrives_with_its_modes_times_and_empty_directories() {
    let source = TempDir::new().unwrap();
    let root = source.path().join("tree");
    std::fs::create_dir_all(root.join("empty")).unwrap();
    std::fs::create_dir_all(root.join("a/b/c")).unwrap();
    for (name, seed) in [("x", 1), ("a/y", 2), ("a/b/c/with space \u{e4}", 3), ("a/.hidden", 4)] {
        std::fs::write(root.join(name), pattern(70_000, seed)).unwrap();
        stamp(&root.join(name), 0o751, 1_234_567_890 + seed);
    }
    for (name, mode) in [("empty", 0o700), ("a/b/c", 0o711), ("a", 0o750)] {
        stamp(&root.join(name), mode, 1_100_000_000);
    }
    stamp(&root, 0o755, 1_000_000_000);
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once", "--fsync"])];
    let sent = send(std::slice::from_ref(&root), &receivers, &[], "64k");
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_all_have(receivers, &source);
}

#[test]
fn names_that_differ_only_in_case_arrive_where_they_are_different_files() {
    let source = TempDir::new().unwrap();
    std::fs::create_dir(source.path().join("tree")).unwrap();
    if source.path().join("TREE").exists() {
        skip("case", "the file system of temporary files ignores upper and lower case in names");
        return;
    }
    for name in ["Makefile", "makefile", "D/x", "d/X", "d/x"] {
        let path = source.path().join("tree").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, name).unwrap();
    }
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once"])];
    let sent = send(&[source.path().join("tree")], &receivers, &[], "64k");
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_all_have(receivers, &source);
}

#[test]
fn links_are_skipped_and_counted() {
    let source = TempDir::new().unwrap();
    let root = source.path().join("tree");
    std::fs::create_dir(&root).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("link")).unwrap();
    let receiver = Receiver::start(&["--once"]);
    let sent = send(&[root], std::slice::from_ref(&receiver), &["--json"], "1M");
    assert_eq!(code(&sent), 0);
    let events = events(&sent);
    let done = events.iter().find(|event| event["event"] == "done").expect("it says that it is done");
    assert_eq!(done["skipped"], 1);
    assert!(events.iter().any(|event| event["event"] == "skipped"));
    let (exit, dir) = receiver.finish();
    assert_eq!((exit, tree(dir.path()).len()), (0, 1));
}

#[test]
fn what_exists_is_replaced() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, b"new").unwrap();
    let receiver = Receiver::start(&["--once"]);
    std::fs::write(receiver.dir.path().join("file"), b"something old").unwrap();
    assert_eq!(code(&send(&[path], std::slice::from_ref(&receiver), &["--quiet"], "1M")), 0);
    let (exit, dir) = receiver.finish();
    assert_eq!((exit, std::fs::read(dir.path().join("file")).unwrap()), (0, b"new".to_vec()));
}

#[test]
fn a_signal_ends_a_receiver_in_good_order() {
    let source = TempDir::new().unwrap();
    let path = slow_file(&source);
    for (name, drain, expected) in [("TERM", "0", 143), ("INT", "60", 130)] {
        let receiver = Receiver::start(&["--once", "--drain", drain]);
        let sender = start_send(&path, std::slice::from_ref(&receiver));
        wait_until("the file begins to arrive", || begins(&receiver));
        signal(&receiver.child, name);
        let (exit, dir) = receiver.finish();
        assert_eq!(exit, expected);
        assert!(tree(dir.path()).is_empty(), "{:?}", tree(dir.path()));
        assert_eq!(code(&finish(sender)), 3);
    }
}

#[test]
fn a_receiver_that_is_terminated_finishes_what_is_under_way_and_takes_nothing_more() {
    let source = TempDir::new().unwrap();
    let path = slow_file(&source);
    let receiver = Receiver::start(&["--drain", "60"]);
    let sender = start_send(&path, std::slice::from_ref(&receiver));
    wait_until("the file begins to arrive", || begins(&receiver));
    signal(&receiver.child, "TERM");
    assert_eq!(code(&finish(sender)), 0);
    let (exit, dir) = receiver.finish();
    assert_eq!(exit, 143);
    assert_eq!(tree(dir.path()).keys().collect::<Vec<_>>(), ["slow"]);
}

#[test]
fn a_signal_ends_a_sender_and_the_receivers_clean_up() {
    let source = TempDir::new().unwrap();
    let path = slow_file(&source);
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once"])];
    let sender = start_send(&path, &receivers);
    wait_until("the file begins to arrive", || begins(&receivers[0]));
    signal(&sender, "INT");
    assert_eq!(code(&finish(sender)), 130);
    for receiver in receivers {
        let (exit, dir) = receiver.finish();
        assert_eq!(exit, 3);
        assert!(tree(dir.path()).is_empty());
    }
}

#[test]
fn a_file_changed_while_it_is_sent_is_an_integrity_error() {
    use std::os::unix::fs::FileExt;
    let source = TempDir::new().unwrap();
    let path = slow_file(&source);
    let receiver = Receiver::start(&["--once"]);
    let sender = start_send(&path, std::slice::from_ref(&receiver));
    wait_until("the file begins to arrive", || begins(&receiver));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"changed", file.metadata().unwrap().len() - 7).unwrap();
    assert_eq!(code(&finish(sender)), 5);
    let (exit, dir) = receiver.finish();
    assert!([3, 5].contains(&exit), "{exit}");
    assert!(tree(dir.path()).is_empty());
}

#[test]
fn several_senders_are_served_at_once() {
    let sources: Vec<_> = (0..3).map(|_| TempDir::new().unwrap()).collect();
    let receivers = [Receiver::start(&[]), Receiver::start(&[])];
    let senders: Vec<_> = (0..)
        .zip(&sources)
        .map(|(seed, source)| {
            let path = source.path().join(format!("from {seed}"));
            std::fs::write(&path, pattern(3_000_000, seed)).unwrap();
            start_send(&path, &receivers)
        })
        .collect();
    for sender in senders {
        let sent = finish(sender);
        assert_eq!(code(&sent), 0, "{sent:?}");
    }
    for receiver in &receivers {
        let found = tree(receiver.dir.path());
        assert!(sources.iter().all(|source| tree(source.path()).iter().all(|(name, node)| found[name] == *node)));
    }
}

#[test]
fn the_demo_measures_both_fabrics_and_checks_every_digest() {
    for (fabric, nodes) in [("mem", "4"), ("tcp", "4"), ("mem", "2"), ("tcp", "2")] {
        let output = rdmc(&["demo", "--fabric", fabric, "--nodes", nodes, "--size", "3MiB", "-b", "64k", "--json"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let rounds: Vec<_> = events(&output).into_iter().filter(|event| event["event"] == "round").collect();
        let names: Vec<_> = rounds.iter().map(|round| round["algorithm"].as_str().unwrap()).collect();
        assert_eq!(names, ["binomial-pipeline", "sequential"]);
        for round in &rounds {
            assert_eq!(round["digests_ok"], nodes.parse::<u64>().unwrap() - 1, "{round}");
            assert_eq!(round["fabric"], fabric);
        }
    }
}

#[test]
fn the_demo_sends_a_file_and_draws_a_table() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, pattern(1_000_001, 9)).unwrap();
    let output = rdmc(&[OsStr::new("demo"), "-n".as_ref(), "3".as_ref(), "--file".as_ref(), path.as_os_str()]);
    assert_eq!(code(&output), 0, "{output:?}");
    let table = text(&output.stdout);
    assert!(table.contains("3 members (1 sender, 2 receivers)") && table.contains("2 of 2 ok"), "{table}");
}

#[test]
fn no_receiver_of_the_demo_outlives_it() {
    for how in ["KILL", "INT"] {
        let mut demo = command(&["demo", "-n", "4", "--size", "64MiB", "-b", "512"]).spawn().unwrap();
        let mut members = Vec::new();
        wait_until("the receivers' processes run", || {
            members = children_of(demo.id(), "internal-demo-member");
            members.len() == 3
        });
        signal(&demo, how);
        demo.wait().unwrap();
        wait_until("the receivers' processes end", || members.iter().all(|&pid| !runs_as(pid, "internal-demo-member")));
    }
}

#[test]
fn the_schedule_is_printed_for_people_and_for_programs() {
    let output = rdmc(&["schedule", "--nodes", "8", "--blocks", "3"]);
    assert!(text(&output.stdout).contains("     3   .   0<1   .   1<2  2<1"), "{output:?}");
    let output = rdmc(&["schedule", "--nodes", "8", "--blocks", "3", "--json"]);
    let schedule = &events(&output)[0];
    assert_eq!((schedule["steps"].as_u64(), schedule["members"].as_u64()), (Some(5), Some(8)));
    assert_eq!(schedule["transfers"].as_array().unwrap().len(), 7 * 3);
    let racks = ["schedule", "--algorithm", "hybrid", "--racks", "0,2/1,3", "--nodes", "4"];
    assert_eq!(code(&rdmc(&racks)), 0);
}

#[test]
fn help_completions_manual_and_doctor_are_printed() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(text(&rdmc(&["completions", shell]).stdout).contains("rdmc"), "{shell}");
    }
    let help = text(&rdmc(&["send", "--help"]).stdout);
    assert!(help.contains("partial delivery") && help.contains("RDMC_TO"), "{help}");
    assert_eq!(text(&rdmc(&["help", "send"]).stdout), help);
    let help = rdmc(&["help"]);
    assert_eq!((code(&help), text(&help.stdout)), (0, text(&rdmc(&["--help"]).stdout)));
    let pages = TempDir::new().unwrap();
    let output = rdmc(&[OsStr::new("man"), "--dir".as_ref(), pages.path().as_os_str()]);
    assert_eq!(code(&output), 0);
    for page in ["rdmc.1", "rdmc-send.1", "rdmc-recv.1", "rdmc-demo.1", "rdmc-schedule.1", "rdmc-doctor.1"] {
        assert!(pages.path().join(page).exists(), "{page}");
    }
    assert!(text(&rdmc(&["man"]).stdout).contains(".TH rdmc"));
    assert!(text(&rdmc(&["doctor"]).stdout).contains("fabric tcp"));
    assert!(events(&rdmc(&["doctor", "--json"]))[0]["findings"].is_array());
}

#[cfg(target_os = "linux")]
#[test]
fn addresses_are_taken_as_they_are_typed() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, b"bytes").unwrap();
    // All of 127.0.0.0/8 belongs to this host, and each address has a default port.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let hosts = [format!("127.{high}.{low}.2"), format!("127.{high}.{low}.3")];
    let receivers = hosts.each_ref().map(|host| Receiver::start_at(&format!(" {host} "), &["--once"]));
    let addresses = receivers.each_ref().map(|receiver| receiver.address.clone());
    assert_eq!(addresses, hosts.each_ref().map(|host| format!("{host}:7471")));
    let to = format!("{}, {}:7471 ,", hosts[0], hosts[1]);
    let sent = rdmc(&[OsStr::new("send"), path.as_os_str(), "--to".as_ref(), to.as_ref()]);
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert_all_have(receivers, &source);

    for (wrong, part) in [
        (&["send", "file", "--to", "node:"][..], "'--to"),
        (&["send", "file", "--to", "node,,node2"], "'--to"),
        (&["send", "file", "10.0.0.3", "--to", "10.0.0.2,"], "10.0.0.3"),
        (&["recv", "--listen", "7471"], "'--listen"),
    ] {
        let output = rdmc(wrong);
        assert!(code(&output) == 2 && text(&output.stderr).contains(part), "{wrong:?}: {output:?}");
    }
}

#[test]
fn quiet_is_quiet_and_the_environment_is_heard() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, b"bytes").unwrap();
    let receiver = Receiver::start(&["--once"]);
    let environment = [("RDMC_TO", receiver.address.as_str()), ("RDMC_QUIET", "1"), ("RDMC_ALGORITHM", "chain")];
    let child = command(&[OsStr::new("send"), path.as_os_str()]).envs(environment).spawn().unwrap();
    let sent = finish(child);
    assert_eq!(code(&sent), 0, "{sent:?}");
    assert!(sent.stdout.is_empty() && sent.stderr.is_empty(), "{sent:?}");
    let unclear = command(&[OsStr::new("send"), path.as_os_str()]).envs(environment).env("RDMC_QUIET", "maybe").spawn();
    let sent = finish(unclear.unwrap());
    assert!(code(&sent) == 2 && text(&sent.stderr).contains("set RDMC_QUIET to 1 or 0"), "{sent:?}");
    assert_eq!(receiver.finish().0, 0);
}

/// A receiver's process with its own directory.
pub(crate) struct Receiver {
    pub(crate) child: Child,
    pub(crate) address: String,
    pub(crate) dir: TempDir,
    /// Its output after the line that it listens.
    said: Option<JoinHandle<Vec<u8>>>,
}

impl Receiver {
    pub(crate) fn start(options: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0", options)
    }

    pub(crate) fn start_at(address: &str, options: &[&str]) -> Self {
        Self::start_in(TempDir::new().unwrap(), address, options)
    }

    /// Starts a receiver in a directory that may have files of earlier transfers.
    pub(crate) fn start_in(dir: TempDir, address: &str, options: &[&str]) -> Self {
        let listen = ["recv", "--listen", address, "--json", "--dir"].map(OsStr::new);
        let arguments: Vec<_> =
            listen.into_iter().chain([dir.path().as_os_str()]).chain(options.iter().map(OsStr::new)).collect();
        Self::started(command(&arguments), dir)
    }

    /// Starts a server of a directory.
    pub(crate) fn serve(dir: TempDir, address: &str, options: &[&str]) -> Self {
        let serve = [OsStr::new("serve"), dir.path().as_os_str()].into_iter();
        let listen = ["--listen", address, "--json"].map(OsStr::new);
        let arguments: Vec<_> = serve.chain(listen).chain(options.iter().map(OsStr::new)).collect();
        Self::started(command(&arguments), dir)
    }

    /// Waits for the end of one that was killed, and returns the directory.
    pub(crate) fn finish_killed(mut self) -> TempDir {
        self.child.wait().unwrap();
        std::mem::replace(&mut self.dir, TempDir::new().unwrap())
    }

    /// Starts a receiver on a disk of so many bytes, which only it and its children see.
    pub(crate) fn start_on_disk(bytes: u64) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let script = format!("mount -t tmpfs -o size={bytes} none \"$1\" && shift && exec \"$@\"");
        let place = dir.path().as_os_str();
        let run = |program: &[&OsStr]| {
            let mut command = command_of(Path::new("unshare"));
            command.args(["--mount", "sh", "-c", &script, "sh"]).arg(place).args(program);
            command
        };
        let tried = run(&[OsStr::new("true")]).output();
        if !tried.as_ref().is_ok_and(|tried| tried.status.success()) {
            skip("disk", &format!("no disk can be made here (needs root and unshare): {tried:?}"));
            return None;
        }
        let listen = ["recv", "--listen", "127.0.0.1:0", "--json", "--dir"].map(OsStr::new);
        let arguments: Vec<_> = [program().as_os_str()].into_iter().chain(listen).chain([place]).collect();
        Some(Self::started(run(&arguments), dir))
    }

    fn started(mut command: Command, dir: TempDir) -> Self {
        let mut child = command.stderr(Stdio::inherit()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        // A server that strangers can reach warns of that first.
        let listening = loop {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            let event: Value = serde_json::from_str(&line).expect("the first lines are events");
            if event["event"] != "warning" {
                break event;
            }
        };
        assert_eq!(listening["event"], "listening");
        // Read on, so that the receiver does not wait for a reader.
        let said = Some(read_all(lines));
        Self { child, address: listening["address"].as_str().unwrap().to_owned(), dir, said }
    }

    /// Waits for the end, and returns the exit code and the output.
    pub(crate) fn finish_telling(mut self) -> (i32, String) {
        let said = self.said.take().unwrap();
        let (exit, _) = self.finish();
        (exit, text(&said.join().unwrap()))
    }

    /// Waits for the end, and returns the exit code and the directory.
    pub(crate) fn finish(mut self) -> (i32, TempDir) {
        let exit = exit_of(&mut self.child);
        (exit, std::mem::replace(&mut self.dir, TempDir::new().unwrap()))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a process ends by itself.
pub(crate) fn exit_of(child: &mut Child) -> i32 {
    let mut exit = None;
    wait_until("the program ends", || {
        exit = child.try_wait().unwrap();
        exit.is_some()
    });
    exit.and_then(|status| status.code()).expect("it ends by itself")
}

/// Returns where the program is; RDMC_TEST_PROGRAM names one that was built before.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| match std::env::var_os("RDMC_TEST_PROGRAM") {
        Some(program) => program.into(),
        None => built_beside_tests().unwrap_or_else(build),
    })
}

/// Finds the program that `cargo test --workspace` builds for rdmc-cli's own test, unless a source is newer.
fn built_beside_tests() -> Option<PathBuf> {
    let tests = std::env::current_exe().ok()?;
    let program = tests.parent()?.parent()?.join("rdmc");
    let built = std::fs::metadata(&program).ok()?.modified().ok()?;
    // Cargo lists the sources here: `PROGRAM: SOURCE SOURCE …`, with a backslash before a space in a name.
    let sources = std::fs::read_to_string(program.with_extension("d")).ok()?.replace("\\ ", "\0");
    let (_, sources) = sources.trim_end().split_once(": ")?;
    let mut sources = sources.split(' ').map(|source| PathBuf::from(source.replace('\0', " ")));
    let older =
        |source: PathBuf| std::fs::metadata(source).and_then(|found| found.modified()).is_ok_and(|at| at <= built);
    sources.all(older).then_some(program)
}

/// Builds the program with the profile of the tests, whose dependencies are built already.
fn build() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--profile", "test", "-p", "rdmc-cli", "--message-format", "json"])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap())
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "the program is built");
    let lines = text(&built.stdout);
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let executables = messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    executables.reduce(|_, later| later).expect("cargo says where the program is")
}

/// Prepares a run of the program without any of the caller's settings.
pub(crate) fn command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    command_in(None, arguments)
}

/// Prepares the same in a network namespace.
pub(crate) fn command_in<S: AsRef<OsStr>>(namespace: Option<&str>, arguments: &[S]) -> Command {
    let mut command = command_of(if namespace.is_some() { Path::new("ip") } else { program() });
    if let Some(namespace) = namespace {
        command.args(["netns", "exec", namespace]).arg(program());
    }
    command.args(arguments);
    command
}

/// Prepares a run of a program without any of the caller's settings.
fn command_of(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RDMC_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn rdmc<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    finish(command(arguments).spawn().unwrap())
}

/// Waits for a process that prints little.
pub(crate) fn finish(mut child: Child) -> Output {
    let (stdout, stderr) = (read_all(child.stdout.take().unwrap()), read_all(child.stderr.take().unwrap()));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > WATCHDOG {
            let _ = child.kill();
            panic!("the program hangs");
        }
        std::thread::sleep(POLL);
    };
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

fn read_all(mut from: impl std::io::Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

pub(crate) fn send(files: &[PathBuf], receivers: &[Receiver], options: &[&str], block: &str) -> Output {
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    let mut command = command(&["send", "--to", &to, "--block-size", block]);
    finish(command.args(options).args(files).spawn().unwrap())
}

/// Starts to send in small blocks, so that the transfer takes a while.
fn start_send(path: &Path, receivers: &[Receiver]) -> Child {
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    command(&["send", "--to", &to, "--block-size", "512"]).arg(path).spawn().unwrap()
}

fn slow_file(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("slow");
    std::fs::write(&path, pattern(64 << 20, 5)).unwrap();
    path
}

pub(crate) fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

pub(crate) fn wait_until(what: &str, done: impl FnMut() -> bool) {
    assert!(comes_true(done), "not within {WATCHDOG:?}: {what}");
}

/// Waits until `done` holds; returns whether it did so in time.
pub(crate) fn comes_true(mut done: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while !done() {
        if begun.elapsed() >= WATCHDOG {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// Lists the processes whose parent is `parent`, and that run as `role`.
pub(crate) fn children_of(parent: u32, role: &str) -> Vec<u32> {
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
    numbers.filter(|&pid| runs_as(pid, role) && parent_of(pid) == Some(parent)).collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// Tells whether a process has the arguments `role`, separated by NUL. A process that has ended has none.
pub(crate) fn runs_as(pid: u32, role: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains(role))
}

/// Returns the content of a directory: mode, modification time and digest by relative path.
pub(crate) fn tree(root: &Path) -> BTreeMap<PathBuf, (u32, i64, i64, Option<blake3::Hash>)> {
    let mut found = BTreeMap::new();
    let mut unread = vec![root.to_owned()];
    while let Some(dir) = unread.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            // The file may be removed meanwhile.
            let Ok(metadata) = std::fs::symlink_metadata(&path) else { continue };
            if path.ends_with(PARTS) {
                continue;
            }
            let digest = metadata.is_file().then(|| blake3::hash(&std::fs::read(&path).unwrap()));
            if metadata.is_dir() {
                unread.push(path.clone());
            }
            let name = path.strip_prefix(root).unwrap().to_owned();
            found.insert(name, (metadata.mode() & 0o7777, metadata.mtime(), metadata.mtime_nsec(), digest));
        }
    }
    found
}

/// Tells whether a part of a file has arrived.
pub(crate) fn begins(receiver: &Receiver) -> bool {
    !parts(receiver.dir.path()).is_empty()
}

/// Lists the parts of files in a receiver's directory. A receiver that keeps no parts has them beside the files.
pub(crate) fn parts(dir: &Path) -> Vec<PathBuf> {
    let entries = [dir.join(PARTS), dir.to_owned()].into_iter().filter_map(|dir| std::fs::read_dir(dir).ok());
    let paths = entries.flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "part")).collect()
}

fn files_in(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn empty(dir: &Path) {
    // The directory of parts may be removed at this moment.
    let files = files_in(dir).into_iter().filter(|path| !path.ends_with(PARTS));
    files.for_each(|path| std::fs::remove_file(path).unwrap());
}

fn stamp(path: &Path, mode: u32, seconds: u64) {
    let file = std::fs::File::open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::new(seconds, 987_654_321)).unwrap();
    file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
}

pub(crate) fn events(output: &Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).expect("every line is an object")).collect()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn code(output: &Output) -> i32 {
    output.status.code().expect("it ends by itself")
}

/// Directory in which receivers keep parts of files.
pub(crate) const PARTS: &str = ".rdmc-partial";
/// Time after which the tests take a process to hang.
const WATCHDOG: Duration = Duration::from_secs(120);
/// Interval between two looks.
const POLL: Duration = Duration::from_millis(2);
