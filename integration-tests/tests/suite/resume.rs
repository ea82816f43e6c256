//! Tests that an interrupted receiver, when it is started again, takes only the blocks that it lacks.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use tempfile::TempDir;

use crate::program::{PARTS, Receiver, begins, code, command, finish, parts, signal, text, tree, wait_until};
use crate::survivors::{end, start_send, write_files};

/// Block size of [`start_send`].
const BLOCK_SIZE: usize = 512;
const FILES: u64 = 3;
const FILE_LEN: usize = 3 << 20;
const ATTEMPTS_MAX: u32 = 10;

/// Returns the bytes of all blocks of the source that the directory lacks, in files and in parts of files.
fn lacking(source: &TempDir, dir: &Path) -> u64 {
    let parts: Vec<Vec<u8>> = parts(dir).iter().map(|path| std::fs::read(path).unwrap()).collect();
    let lacks = |number: u64| {
        let whole = std::fs::read(source.path().join(number.to_string())).unwrap();
        if std::fs::read(dir.join(number.to_string())).is_ok_and(|here| here == whole) {
            return 0;
        }
        let lacks = |part: &Vec<u8>| {
            let blocks = whole.chunks(BLOCK_SIZE).zip(part.chunks(BLOCK_SIZE));
            blocks.filter(|(want, have)| want != have).map(|(want, _)| want.len()).sum()
        };
        parts.iter().map(lacks).min().unwrap_or(whole.len())
    };
    (0..FILES).map(lacks).sum::<usize>() as u64
}

/// Interrupts the second of three receivers when it has one file and a part of the next. On a busy machine it may have
/// everything before it is interrupted; then others are sent to.
fn interrupt(source: &TempDir, files: &[PathBuf], how: impl Fn(&Child)) -> (Receiver, Vec<Receiver>) {
    let attempts = (0..ATTEMPTS_MAX).find_map(|_| interrupt_once(source, files, &how));
    attempts.expect("a receiver is interrupted before it has everything")
}

fn interrupt_once(source: &TempDir, files: &[PathBuf], how: impl Fn(&Child)) -> Option<(Receiver, Vec<Receiver>)> {
    let mut receivers: Vec<_> = (0..3).map(|_| Receiver::start(&["--once"])).collect();
    let sender = start_send(files, &receivers, &["--evict-after", "1"]);
    let victim = receivers.remove(1);
    wait_until("the second file begins to arrive", || victim.dir.path().join("0").exists() && begins(&victim));
    how(&victim.child);
    let sent = finish(sender);
    if lacking(source, victim.dir.path()) == 0 {
        return None;
    }
    assert_eq!(code(&sent), 3, "{sent:?}");
    assert!(text(&sent.stderr).contains(&victim.address), "{sent:?}");
    for receiver in &mut receivers {
        wait_until("the receiver ends", || receiver.child.try_wait().unwrap().is_some());
        assert_eq!(tree(receiver.dir.path()), tree(source.path()));
        assert!(!receiver.dir.path().join(PARTS).exists());
    }
    Some((victim, receivers))
}

/// Sends to receivers that have parts, with the same block size. Returns the bytes that each received.
fn send_again(files: &[PathBuf], source: &TempDir, dirs: Vec<TempDir>) -> Vec<u64> {
    send_again_by(files, source, dirs, &BLOCK_SIZE.to_string())
}

/// Sends to receivers that have parts, with another block size.
fn send_again_by(files: &[PathBuf], source: &TempDir, dirs: Vec<TempDir>, block_size: &str) -> Vec<u64> {
    let start = |dir| Receiver::start_in(dir, "127.0.0.1:0", &["--once"]);
    let receivers: Vec<_> = dirs.into_iter().map(start).collect();
    let to = receivers.iter().map(|receiver| receiver.address.as_str()).collect::<Vec<_>>().join(",");
    let mut sender = command(&["send", "--to", &to, "--block-size", block_size]);
    let sent = finish(sender.args(files).spawn().unwrap());
    assert_eq!(code(&sent), 0, "{sent:?}");
    let received = receivers.into_iter().map(|receiver| {
        let (exit, said, dir) = end(receiver);
        assert_eq!(exit, 0, "{said}");
        assert_eq!(tree(dir.path()), tree(source.path()));
        assert!(!dir.path().join(PARTS).exists());
        bytes_received(&said)
    });
    received.collect()
}

/// Returns what a receiver says how much has come.
fn bytes_received(said: &str) -> u64 {
    let mut events = said.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let done = events.find(|event| event["event"] == "done").expect("it is done");
    done["received"].as_u64().expect("a receiver says how much has come")
}

#[test]
fn who_was_killed_takes_only_what_it_lacks_when_it_is_started_again() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, FILE_LEN);
    let (victim, others) = interrupt(&source, &files, |child| signal(child, "KILL"));
    let (mut dirs, mut lacked) = (Vec::new(), Vec::new());
    for mut receiver in others.into_iter().chain([victim]) {
        wait_until("the receiver ends", || receiver.child.try_wait().unwrap().is_some());
        lacked.push(lacking(&source, receiver.dir.path()));
        dirs.push(std::mem::replace(&mut receiver.dir, TempDir::new().unwrap()));
    }
    assert_eq!(lacked[..2], [0, 0]);
    assert!(lacked[2] > 0 && lacked[2] <= 2 * FILE_LEN as u64, "{lacked:?}");
    let received = send_again(&files, &source, dirs);
    assert_eq!(received, lacked);
}

#[test]
fn who_was_ended_by_a_signal_takes_only_what_it_lacks_when_it_is_started_again() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, FILE_LEN);
    let (victim, _) = interrupt(&source, &files, |child| signal(child, "INT"));
    let (exit, said, dir) = end(victim);
    assert_eq!(exit, 130, "{said}");
    let lacked = lacking(&source, dir.path());
    assert!(lacked > 0 && lacked <= 2 * FILE_LEN as u64, "{lacked}");
    assert_eq!(send_again(&files, &source, vec![dir]), [lacked]);
}

/// The block size may differ from the one before, because it depends on the receivers and the files. Then whole files
/// still count, and of parts the blocks of the new size.
#[test]
fn parts_are_of_use_whatever_the_block_size_is_next_time() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, FILE_LEN);
    let (victim, _) = interrupt(&source, &files, |child| signal(child, "INT"));
    let (_, _, dir) = end(victim);
    let lacked = lacking(&source, dir.path());
    let received = send_again_by(&files, &source, vec![dir], "auto")[0];
    assert!((lacked..=2 * FILE_LEN as u64).contains(&received), "{received}, {lacked}");
}

/// A stopped receiver is evicted. When it runs again, it gets the rest from another receiver's files.
#[test]
fn who_was_evicted_takes_what_it_lacks_from_any_holder() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, FILE_LEN);
    let (victim, others) = interrupt(&source, &files, |child| signal(child, "STOP"));
    signal(&victim.child, "CONT");
    let (exit, said, dir) = end(victim);
    assert_eq!(exit, 3, "{said}");
    // Either it learns the verdict or it finds no other member.
    assert!(said.contains("without this receiver") || said.contains("have given up this receiver"), "{said}");
    assert!(said.contains("only what is missing here travels"), "{said}");
    let lacked = lacking(&source, dir.path());
    assert!(lacked > 0 && lacked <= 2 * FILE_LEN as u64, "{lacked}");
    let holder = others[1].dir.path();
    let held: Vec<PathBuf> = (0..FILES).map(|number| holder.join(number.to_string())).collect();
    assert_eq!(send_again(&held, &source, vec![dir]), [lacked]);
}

/// A receiver compares its parts with the sender's files, so a file that has changed arrives in its new version.
#[test]
fn parts_of_another_version_of_a_file_do_no_harm() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, FILE_LEN);
    let (victim, _) = interrupt(&source, &files, |child| signal(child, "INT"));
    let (_, _, dir) = end(victim);
    let mut second = std::fs::read(&files[1]).unwrap();
    second[..1000].fill(7);
    std::fs::write(&files[1], &second).unwrap();
    let received = send_again(&files, &source, vec![dir]);
    assert!(received[0] >= 1000, "{received:?}");
}

#[test]
fn one_that_keeps_no_parts_takes_everything_again() {
    let source = TempDir::new().unwrap();
    let files = write_files(&source, 1, FILE_LEN);
    let receiver = Receiver::start(&["--once", "--discard-parts"]);
    let sender = start_send(&files, std::slice::from_ref(&receiver), &[]);
    wait_until("the file begins to arrive", || begins(&receiver));
    signal(&receiver.child, "INT");
    assert_eq!(code(&finish(sender)), 3);
    let (exit, said, dir) = end(receiver);
    assert_eq!(exit, 130, "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    assert_eq!(send_again(&files, &source, vec![dir]), [FILE_LEN as u64]);
    let help = finish(command(&["recv", "--help"]).spawn().unwrap());
    assert!(text(&help.stdout).contains("--discard-parts"));
}

/// Short files travel together, and have no parts. Those in place are compared.
#[test]
fn of_short_files_only_those_that_are_not_in_place_travel_again() {
    const FILES: u64 = 40;
    const LEN: usize = 30 * BLOCK_SIZE + 7;
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, LEN);
    let dirs = [(); 2].map(|()| TempDir::new().unwrap());
    for (dir, lacks) in dirs.iter().zip([0..0, 17..22]) {
        for number in (0..FILES).filter(|number| !lacks.contains(number)) {
            let (from, to) = (&files[usize::try_from(number).unwrap()], dir.path().join(number.to_string()));
            std::fs::copy(from, &to).unwrap();
            let modified = std::fs::metadata(from).unwrap().modified().unwrap();
            std::fs::File::options().write(true).open(to).unwrap().set_modified(modified).unwrap();
        }
    }
    // Something is left of an interrupted transfer, so that files are compared.
    let left = dirs[1].path().join(PARTS);
    std::fs::DirBuilder::new().mode(0o700).create(&left).unwrap();
    std::fs::write(left.join("some.transfer"), "").unwrap();
    let receivers = dirs.map(|dir| Receiver::start_in(dir, "127.0.0.1:0", &["--once"]));
    let sender = start_send(&files, &receivers, &[]);
    let sent = finish(sender);
    assert_eq!(code(&sent), 0, "{sent:?}");
    let received = receivers.map(|receiver| {
        let (exit, said, dir) = end(receiver);
        assert_eq!(exit, 0, "{said}");
        (0..FILES).map(|number| number.to_string()).for_each(|name| {
            let read = |dir: &Path| std::fs::read(dir.join(&name)).unwrap();
            assert!(read(dir.path()) == read(source.path()), "{name}");
        });
        bytes_received(&said)
    });
    // Blocks that are partly there travel.
    let blocks = (22 * LEN).div_ceil(BLOCK_SIZE) - 17 * LEN / BLOCK_SIZE;
    assert_eq!(received, [0, (blocks * BLOCK_SIZE) as u64]);
}

#[test]
fn files_in_place_on_a_small_disk_need_room_for_one_of_them() {
    const FILES: u64 = 8;
    let source = TempDir::new().unwrap();
    let files = write_files(&source, FILES, 1 << 20);
    let Some(receiver) = Receiver::start_on_disk((FILES + 1) << 20) else { return };
    let send_all = || {
        let mut sender = command(&["send", "--to", &receiver.address, "--block-size", "64k"]);
        let sent = finish(sender.args(&files).spawn().unwrap());
        assert_eq!(code(&sent), 0, "{sent:?}");
    };
    send_all();
    // All files are replaced.
    send_all();
    // Something is left of an interrupted transfer, so that files are compared.
    let seen_there = Path::new("/proc").join(receiver.child.id().to_string()).join("root");
    let parts = seen_there.join(receiver.dir.path().strip_prefix("/").unwrap()).join(PARTS);
    std::fs::DirBuilder::new().mode(0o700).create(&parts).unwrap();
    std::fs::write(parts.join("other.part"), "x").unwrap();
    send_all();
    signal(&receiver.child, "INT");
    let (_, said) = receiver.finish_telling();
    let events = said.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let done = events.filter(|event| event["event"] == "done");
    let received: Vec<_> = done.map(|event| event["received"].as_u64().unwrap()).collect();
    let all = FILES << 20;
    assert_eq!(received, [all, all, 0], "{said}");
}
