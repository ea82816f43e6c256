//! Campaigns: each seed draws a case with faults, and checkers judge the outcome.
//!
//! A seed draws a [`Case`]. [`play`] runs it and returns an [`Observation`]. [`Checker`]s compare the two. A case has
//! two phases. In the first phase, faults happen. In the second phase the world is healed, and every member must end,
//! with success or with a failure. The same case always gives the same observation, so a seed is a test.
//!
//! # Examples
//! ```
//! use rdmc_sim::campaign;
//!
//! let report = campaign::run(0..20);
//! assert_eq!(report.played, 20);
//! for failure in &report.failures {
//!     println!("{failure}\n{}", failure.shrunk(200).to_json());
//! }
//! # assert!(report.failures.is_empty());
//! ```

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::simulation::lock;

mod case;
mod checks;
mod draw;
pub mod exhaustive;
mod member;
mod observation;
mod play;
mod shrink;
mod suspects;

pub use case::{
    AlgorithmCase, Behaviour, BrokenSource, Case, Fault, FaultCase, GroupCase, MemberCase, MessageCase, Milestone,
    PartsCase, RingCase, SendFuture, SourceCase, When,
};
pub use checks::{CHECKERS, Checker};
pub use observation::{
    Corruptions, Delivered, Ending, FaultObservation, FlippedBlock, GroupObservation, MemberObservation, NamedMember,
    Observation, Outcome, RecoveryObservation, ReportedFailure, ResourcesInUse, SeenRead, SeenReceipt, SeenStored,
};
pub use play::{CaseError, play};
pub use shrink::shrink;
pub use suspects::Suspects;

/// The results of a campaign.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Number of cases played.
    pub played: u64,
    /// The failures, in the order of the cases.
    pub failures: Vec<Failure>,
}

/// A case that violates a checker.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The name of the checker.
    pub checker: &'static str,
    /// The violation.
    pub what: String,
    /// The case.
    pub case: Case,
}

/// Plays and judges the cases of all seeds, on all processors of this machine.
///
/// The report depends only on the seeds.
pub fn run(seeds: Range<u64>) -> Report {
    let played = seeds.end.saturating_sub(seeds.start);
    Report { played, failures: judge_all(played, |number| Case::draw(seeds.start + number)) }
}

/// Plays `count` cases on all processors of this machine; returns the failures in the order of the cases.
fn judge_all(count: u64, case: impl Fn(u64) -> Case + Sync) -> Vec<Failure> {
    let next = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    if let Some(failure) = judge(&case(number)) {
                        lock(&failures).push((number, failure));
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap_or_default();
    failures.sort_by_key(|(number, _)| *number);
    failures.into_iter().map(|(_, failure)| failure).collect()
}

/// Plays and judges a case; returns the first violation. A panic is a violation too.
pub fn judge(case: &Case) -> Option<Failure> {
    let failure = |checker, what| Some(Failure { seed: case.seed, checker, what, case: case.clone() });
    let seen = match catch_unwind(AssertUnwindSafe(|| play(case))) {
        Ok(Ok(seen)) => seen,
        Ok(Err(error)) => return failure("the case can be played", error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            return failure("nothing panics", text.unwrap_or("a panic without a message").to_owned());
        }
    };
    for Checker { name, check } in CHECKERS {
        if let Err(what) = check(case, &seen) {
            return failure(name, what);
        }
    }
    None
}

impl Failure {
    /// Returns a smaller case that violates the same checker, found in at most `plays` plays.
    pub fn shrunk(&self, plays: usize) -> Case {
        shrink(&self.case, plays, |case| judge(case).is_some_and(|failure| failure.checker == self.checker))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { checker, what, case, .. } = self;
        write!(f, "violated: {checker}: {what}\n{case}")
    }
}
