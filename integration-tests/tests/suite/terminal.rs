//! Tests of the program's output on a terminal.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tempfile::TempDir;
use vt100::Parser;

use crate::cluster::pattern;
use crate::program::{Receiver, command, exit_of};

#[test]
fn a_bar_stays_on_one_line_of_any_terminal() {
    for columns in [20, 21, 33, 40, 64, 80, 200] {
        let demo = ["demo", "-n", "3", "--size", "1MiB", "--block-size", "64k", "--port-rate", "20M"];
        let mut bars = Vec::new();
        let mut demo = command(&demo);
        // The receivers' processes log to the same terminal, and know nothing of the bar.
        demo.env("RDMC_LOG", "off");
        let last = run(demo, columns, |screen| bars.extend(bar_of(screen)));
        assert!(bars.iter().any(|bar| !bar.contains(" 0%")), "{columns}: {bars:?}");
        assert_eq!(bar_of(last.screen()), None, "{columns}: a bar is left over");
    }
}

#[test]
fn a_bar_never_says_confirming_before_everything_was_sent() {
    let source = TempDir::new().unwrap();
    let path = source.path().join("file");
    std::fs::write(&path, pattern(32 << 20, 5)).unwrap();
    let receivers = [Receiver::start(&["--once"]), Receiver::start(&["--once"])];
    let to = receivers.each_ref().map(|receiver| receiver.address.as_str()).join(",");
    let send = ["send", "--to", &to, "--block-size", "4k"].map(OsStr::new);
    let mut bars = Vec::new();
    run(command(&[&send[..], &[path.as_os_str()]].concat()), 80, |screen| bars.extend(bar_of(screen)));
    assert!(bars.iter().any(|bar| bar.starts_with("sending")), "{bars:?}");
    let early = bars.iter().find(|bar| bar.starts_with("confirming") && !bar.contains("100%"));
    assert_eq!(early, None);
}

/// Returns the row with a percentage.
///
/// # Panics
/// If there are several, or if the row is longer than the screen.
fn bar_of(screen: &vt100::Screen) -> Option<String> {
    let columns = screen.size().1.get();
    let rows: Vec<String> = screen.rows(0, columns).collect();
    let bars: Vec<usize> = (0..rows.len()).filter(|row| rows[*row].contains('%')).collect();
    assert!(bars.len() <= 1, "bars pile up at {columns} columns:\n{}", screen.contents());
    let row = *bars.first()?;
    let wrapped = |row: usize| screen.row_wrapped(u16::try_from(row).unwrap());
    let is_split = wrapped(row) || row > 0 && wrapped(row - 1);
    assert!(!is_split, "a bar is longer than {columns} columns:\n{}", screen.contents());
    Some(rows[row].clone())
}

/// Runs the program on a terminal, and shows its screen whenever a line is complete. Returns the terminal at the end.
fn run(mut command: Command, columns: u16, mut look: impl FnMut(&vt100::Screen)) -> Parser {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    tcsetwinsize(&ours, Winsize { ws_row: ROWS.get(), ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    let end = |terminal: &OwnedFd| Stdio::from(terminal.try_clone().unwrap());
    let mut child = command.env("TERM", "xterm").stdout(end(&theirs)).stderr(end(&theirs)).spawn().unwrap();
    // The terminal ends when no process has it.
    drop((command, theirs));
    let mut terminal = Parser::new(ROWS, NonZero::new(columns).unwrap(), 0);
    let (mut bytes, mut ours) = ([0; 4096], File::from(ours));
    // The end is an error.
    while let Ok(read @ 1..) = ours.read(&mut bytes) {
        for byte in &bytes[..read] {
            if *byte == b'\r' {
                look(terminal.screen());
            }
            terminal.process(&[*byte]);
        }
    }
    assert_eq!(exit_of(&mut child), 0, "{}", terminal.screen().contents());
    terminal
}

/// Rows of the terminals.
const ROWS: NonZero<u16> = NonZero::new(24).unwrap();
