//! Tests in which processes are killed or stopped at random moments of a stream of short and long messages, whose
//! receipts the root awaits.
//!
//! Every member is a process, and records what it sees. `integration-tests/rounds` plays many rounds.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::cluster::free_addresses;
use crate::fleet::{Campaign, Draw};
use crate::program::{signal, wait_until};

mod judge;
mod member;
mod record;

use judge::{Seen, judge};
use member::{MEMBER, Part, Stream, TEST};
use record::Note;

#[test]
fn survivors_of_killed_processes_agree_on_a_stream_and_its_receipts_are_true() {
    let (messages, receipts) = (AtomicU64::new(0), AtomicU64::new(0));
    Campaign::of("RDMC_STREAM_ROUNDS", ROUNDS).play(LANES, |_, seed| {
        let round = Round::draw(seed);
        let seen = round.play();
        let count =
            |which: fn(&Note) -> bool| seen.iter().flat_map(|member| &member.notes).filter(|it| which(it)).count();
        messages.fetch_add(count(|note| matches!(note, Note::Got { .. })) as u64, Ordering::Relaxed);
        let answered =
            count(|note| matches!(note, Note::Delivered(_, Ok(())) | Note::Stored(_, record::StoredAt::All)));
        receipts.fetch_add(answered as u64, Ordering::Relaxed);
        judge(&seen, round.stream.stable).map_err(|what| format!("{round:?}: {what}\n{}", told(&seen)))
    });
    let (messages, receipts) = (messages.into_inner(), receipts.into_inner());
    let line = format!("{messages} messages were delivered, {receipts} receipts answered Ok\n");
    // Past the harness's capture, as the line of the campaign.
    let _ = std::io::stdout().write_all(line.as_bytes());
    assert!(messages > 0 && receipts > 0, "nothing was judged");
}

/// A round: a stream, and what happens to some of its processes.
#[derive(Debug)]
struct Round {
    stream: Stream,
    members: usize,
    /// What happens, in order, from the moment at which all have formed the group.
    events: Vec<(Duration, Event)>,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Kill(usize),
    Stop(usize),
    Continue(usize),
    /// The root is asked to close the group.
    Close,
}

impl Round {
    fn draw(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let members = 3 + usize::try_from(draw.below(4)).unwrap();
        let stream = Stream {
            seed,
            // Consecutive seeds play one kind after the other.
            shm: seed.is_multiple_of(2),
            stable: (seed / 2).is_multiple_of(2),
            recovers: draw.below(3) > 0,
            slots: [2, 4, 16, 64][usize::try_from(draw.below(4)).unwrap()],
            bytes: [10, 100, 1000][usize::try_from(draw.below(3)).unwrap()],
            long_each: [4, 16, 64][usize::try_from(draw.below(3)).unwrap()],
            sends_ahead: [1, 4, 32][usize::try_from(draw.below(3)).unwrap()],
            keeps: [0, 1, 8][usize::try_from(draw.below(3)).unwrap()],
        };
        let mut at = |span: Duration| span.mul_f64(draw.fraction());
        let times = [at(SPAN), at(SPAN)];
        let (pause, rest, closing) = (at(PAUSE_MAX), at(SPAN), at(CLOSING));
        let close = match draw.below(4) {
            // While the group is being closed, the first process comes to harm.
            0 => times[0].saturating_sub(closing),
            _ => SPAN / 2 + rest,
        };
        let mut events = vec![(close, Event::Close)];
        // Mostly one process comes to harm.
        let victims = if draw.below(3) == 0 { 2 } else { 1 };
        for time in &times[..victims] {
            let victim = usize::try_from(draw.below(members as u64)).unwrap();
            match draw.below(4) {
                0..2 => events.push((*time, Event::Kill(victim))),
                // It continues when the others have ended.
                2 => events.push((*time, Event::Stop(victim))),
                _ => events.extend([(*time, Event::Stop(victim)), (*time + pause, Event::Continue(victim))]),
            }
        }
        events.sort_by_key(|(time, _)| *time);
        Self { stream, members, events }
    }

    /// Returns the members that come to harm.
    fn victims(&self) -> BTreeSet<usize> {
        let victims = self.events.iter().filter_map(|(_, event)| match event {
            Event::Kill(victim) | Event::Stop(victim) | Event::Continue(victim) => Some(*victim),
            Event::Close => None,
        });
        victims.collect()
    }

    /// Plays the round, and returns what the members saw.
    fn play(&self) -> Vec<Seen> {
        let dir = TempDir::new().unwrap();
        let addresses = free_addresses(self.members);
        let start = |rank: usize| {
            let (addresses, rank) = (addresses.clone(), u32::try_from(rank).unwrap());
            Process::start(&Part {
                addresses,
                rank,
                record: dir.path().join(rank.to_string()),
                stream: self.stream.clone(),
            })
        };
        let mut processes: Vec<Process> = (0..self.members).map(start).collect();
        for process in &mut processes {
            wait_until("all have formed the group", || {
                assert!(!process.has_ended(), "a process ended before all had formed the group:\n{}", process.errors());
                !process.notes().is_empty()
            });
        }
        let begun = Instant::now();
        for (time, event) in &self.events {
            // Harm comes at the time that was drawn, whatever the processes do then.
            std::thread::sleep(time.saturating_sub(begun.elapsed()));
            match event {
                Event::Kill(victim) => processes[*victim].signal("KILL"),
                Event::Stop(victim) => processes[*victim].signal("STOP"),
                Event::Continue(victim) => processes[*victim].signal("CONT"),
                Event::Close => processes[0].ask_to_close(),
            }
        }
        let victims = self.victims();
        let (harmed, others): (Vec<_>, Vec<_>) =
            processes.iter_mut().enumerate().partition(|(rank, _)| victims.contains(rank));
        for (rank, process) in others {
            wait_until(&format!("process {rank} ends"), || process.has_ended());
        }
        for (rank, process) in harmed {
            process.signal("CONT");
            wait_until(&format!("process {rank} ends after the others"), || process.has_ended());
        }
        let seen = processes.iter_mut().enumerate().map(|(rank, process)| {
            let status = process.child.wait().unwrap();
            let killed = status.code().is_none();
            let errors = if status.success() || killed { String::new() } else { process.errors() };
            Seen { harmed: victims.contains(&rank), killed, errors, notes: process.notes() }
        });
        seen.collect()
    }
}

/// The process of a member.
struct Process {
    part: Part,
    child: Child,
}

impl Process {
    fn start(part: &Part) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("a test knows where it is"));
        command.args([TEST, "--exact", "--nocapture"]).env(MEMBER, serde_json::to_string(part).unwrap());
        let errors = File::create(errors_of(&part.record)).unwrap();
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(errors);
        Self { part: part.clone(), child: command.spawn().expect("it is this program") }
    }

    fn notes(&self) -> Vec<Note> {
        record::read(&self.part.record)
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(errors_of(&self.part.record)).unwrap_or_default()
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    fn signal(&mut self, name: &str) {
        if !self.has_ended() {
            signal(&self.child, name);
        }
    }

    fn ask_to_close(&mut self) {
        // A root that has ended does not read it.
        let _ = self.child.stdin.as_mut().expect("it is piped").write_all(b".");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn errors_of(record: &Path) -> std::path::PathBuf {
    record.with_extension("errors")
}

/// Lists the ends of the records.
fn told(seen: &[Seen]) -> String {
    let of_member = |(rank, member): (usize, &Seen)| {
        let last = member.notes.len().saturating_sub(SHOWN);
        format!("{rank}: {:?} {}\n", &member.notes[last..], member.errors)
    };
    seen.iter().enumerate().map(of_member).collect()
}

/// Rounds in a run of the test suite: one of each kind.
const ROUNDS: u64 = 4;
/// Rounds at a time in a long campaign.
const LANES: usize = 4;
/// Until when processes come to harm. A stream lasts half of that to one and a half times as long.
const SPAN: Duration = Duration::from_millis(400);
/// How long closing a group takes at most, about.
const CLOSING: Duration = Duration::from_millis(10);
/// Longest pause: long enough for the process to be declared failed.
const PAUSE_MAX: Duration = Duration::from_secs(4);
/// Notes of each member that are printed if a round fails.
const SHOWN: usize = 8;
