//! Tests in which a process is killed or stopped at a random moment of a multicast.
//!
//! `integration-tests/rounds` plays many rounds.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::fleet::{Campaign, Draw, Fleet, Host, file, judge};

#[test]
fn whoever_is_killed_or_stopped_at_any_moment_is_named_by_all_others() {
    let source = TempDir::new().unwrap();
    let path = file(&source, FILE_BYTES);
    let quiet = || {
        let begun = Instant::now();
        let ends = Fleet::start(&vec![Host::default(); 4], &path, &OPTIONS).end();
        assert_eq!(judge(&ends, &BTreeSet::new(), &path), Ok(true));
        begun.elapsed()
    };
    // After a slow one alone, harm would come when most transfers have ended.
    let span = quiet().min(quiet()).min(quiet());
    Campaign::of("RDMC_ROUNDS", ROUNDS).play(LANES, |_, seed| Round::draw(seed, span).play(&path));
}

/// A round: what happens to one process of a transfer.
#[derive(Debug)]
struct Round {
    receivers: usize,
    algorithm: &'static str,
    /// Number of the process; process 0 is the sender.
    victim: usize,
    after: Duration,
    harm: Harm,
}

#[derive(Debug)]
enum Harm {
    Killed,
    /// The process continues when the others have ended.
    Stopped,
    Paused(Duration),
}

impl Round {
    fn draw(seed: u64, span: Duration) -> Self {
        let mut draw = Draw(seed);
        let receivers = usize::try_from(2 + draw.below(4)).unwrap();
        let algorithms = ["sequential", "chain", "binomial-tree", "binomial-pipeline", "circulant"];
        Self {
            receivers,
            algorithm: draw.one_of(&algorithms),
            victim: usize::try_from(draw.below(receivers as u64 + 1)).unwrap(),
            after: span.mul_f64(draw.fraction()),
            harm: match draw.below(4) {
                0..2 => Harm::Killed,
                2 => Harm::Stopped,
                _ => Harm::Paused(PAUSE_MAX.mul_f64(draw.fraction())),
            },
        }
    }

    /// Plays the round, and returns its outcome.
    fn play(&self, path: &Path) -> Result<String, String> {
        let options = [&OPTIONS[..], &["--algorithm", self.algorithm]].concat();
        let mut fleet = Fleet::start(&vec![Host::default(); self.receivers + 1], path, &options);
        std::thread::sleep(self.after);
        let victims = BTreeSet::from([self.victim]);
        let victim = |fleet: &Fleet, signal| fleet.members[self.victim].signal(signal);
        match self.harm {
            Harm::Killed => victim(&fleet, "KILL"),
            Harm::Stopped => {
                victim(&fleet, "STOP");
                fleet.wait_but(&victims);
                victim(&fleet, "CONT");
            }
            Harm::Paused(pause) => {
                victim(&fleet, "STOP");
                std::thread::sleep(pause);
                victim(&fleet, "CONT");
            }
        }
        let closed = judge(&fleet.end(), &victims, path).map_err(|what| format!("{self:?}: {what}"))?;
        let harm = match self.harm {
            Harm::Killed => "killed",
            Harm::Stopped => "stopped",
            Harm::Paused(_) => "paused",
        };
        Ok(format!("{harm}, {}", if closed { "all others have the file" } else { "named by all others" }))
    }
}

/// Rounds in a run of the test suite.
const ROUNDS: u64 = 6;
/// Rounds at a time in a long campaign.
const LANES: usize = 4;
/// Length of the file in bytes; with blocks this small, the transfer takes a while.
const FILE_BYTES: usize = 48 << 20;
/// Options of the sender.
const OPTIONS: [&str; 2] = ["--block-size", "4k"];
/// Longest pause: long enough for the process to be declared failed.
const PAUSE_MAX: Duration = Duration::from_secs(4);
