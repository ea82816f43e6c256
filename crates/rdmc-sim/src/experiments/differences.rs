//! The findings that may differ from the papers, and the comparison of what experiments find with that list.

use std::fmt;

use serde::Deserialize;

use super::{EXPERIMENTS, Report};

/// The reviewed list of findings that may differ from the papers.
///
/// A finding that differs and is not in the list is an error. So is an entry whose finding agrees, or does not exist:
/// the list says exactly what differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownDifferences {
    /// The entries, in the order of the experiments.
    #[serde(rename = "difference", default)]
    pub entries: Vec<KnownDifference>,
}

/// A finding that may differ from the paper.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownDifference {
    /// The name of the experiment's report, such as `figure-8`.
    pub figure: String,
    /// The subject of the finding, as [`Finding::what`](super::Finding::what) has it.
    pub finding: String,
    /// Why the finding differs.
    pub reason: String,
}

impl KnownDifferences {
    /// Returns the committed list, `crates/rdmc-sim/differences.toml`.
    ///
    /// # Panics
    /// If the file is not valid, which a test excludes.
    pub fn committed() -> Self {
        toml::from_str(include_str!("../../differences.toml")).expect("the list of differences is tested")
    }

    /// Compares reports with the list. Entries of experiments without a report are not judged.
    ///
    /// # Errors
    /// The findings and the entries that do not match.
    pub fn check(&self, reports: &[Report]) -> Result<(), DifferencesError> {
        let mut mismatches = Vec::new();
        for report in reports {
            for finding in report.findings.iter().filter(|finding| !finding.agrees) {
                let is_listed = |entry: &KnownDifference| entry.is_about(report) && entry.finding == finding.what;
                if !self.entries.iter().any(is_listed) {
                    let (figure, finding) = (report.name.to_owned(), finding.to_string());
                    mismatches.push(Mismatch::NotListed { figure, finding });
                }
            }
        }
        mismatches.extend(self.entries.iter().filter_map(|entry| entry.staleness(reports)));
        if mismatches.is_empty() { Ok(()) } else { Err(DifferencesError { mismatches }) }
    }
}

impl KnownDifference {
    fn is_about(&self, report: &Report) -> bool {
        self.figure == report.name
    }

    /// Says why the entry has to go, if it has to.
    fn staleness(&self, reports: &[Report]) -> Option<Mismatch> {
        let (figure, finding) = (self.figure.clone(), self.finding.clone());
        if !EXPERIMENTS.iter().any(|experiment| experiment.report_name() == self.figure) {
            return Some(Mismatch::NoSuchFigure { figure, finding });
        }
        let report = reports.iter().find(|report| self.is_about(report))?;
        match report.findings.iter().find(|finding| finding.what == self.finding) {
            None => Some(Mismatch::NoSuchFinding { figure, finding }),
            Some(found) if found.agrees => Some(Mismatch::Agrees { figure, finding }),
            Some(_) => None,
        }
    }
}

/// A finding or an entry that does not match the other side.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// A finding differs from the paper and is not in the list.
    NotListed {
        /// The report.
        figure: String,
        /// The finding, with what the paper says and what was found.
        finding: String,
    },
    /// A finding in the list agrees with the paper.
    Agrees {
        /// The report.
        figure: String,
        /// The subject of the finding.
        finding: String,
    },
    /// The list names a finding that its experiment does not have.
    NoSuchFinding {
        /// The report.
        figure: String,
        /// The subject in the list.
        finding: String,
    },
    /// The list names an experiment that does not exist.
    NoSuchFigure {
        /// The name in the list.
        figure: String,
        /// The subject in the list.
        finding: String,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotListed { figure, finding } => write!(
                f,
                "{figure}: not in the list: {finding}\n    remedy: find the cause; correct the model, or add the \
                 finding with its cause"
            ),
            Self::Agrees { figure, finding } => {
                write!(f, "{figure}: stale entry, the finding agrees now: {finding}\n    remedy: remove the entry")
            }
            Self::NoSuchFinding { figure, finding } => write!(
                f,
                "{figure}: stale entry, the experiment has no such finding: {finding}\n    remedy: remove or rename \
                 the entry"
            ),
            Self::NoSuchFigure { figure, finding } => write!(
                f,
                "{figure}: stale entry, there is no such experiment: {finding}\n    remedy: remove or rename the entry"
            ),
        }
    }
}

/// The findings differ in other ways than the reviewed list says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DifferencesError {
    /// What does not match, at least one.
    pub mismatches: Vec<Mismatch>,
}

impl std::error::Error for DifferencesError {}

impl fmt::Display for DifferencesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the findings are not those of crates/rdmc-sim/differences.toml:")?;
        self.mismatches.iter().try_for_each(|mismatch| write!(f, "\n  {mismatch}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::Finding;
    use crate::plot::Figure;

    /// A report on Figure 8 whose findings agree, or do not.
    fn report(findings: &[(&str, bool)]) -> Report {
        let finding = |&(what, agrees): &(&str, bool)| Finding {
            what: what.to_owned(),
            paper: "1".to_owned(),
            here: "2".to_owned(),
            agrees,
        };
        Report {
            name: "figure-8",
            title: String::new(),
            tables: Vec::new(),
            figure: Figure::new("", Vec::new()),
            findings: findings.iter().map(finding).collect(),
        }
    }

    fn listed(figure: &str, finding: &str) -> KnownDifferences {
        let [figure, finding, reason] = [figure, finding, "a reason"].map(str::to_owned);
        KnownDifferences { entries: vec![KnownDifference { figure, finding, reason }] }
    }

    #[test]
    fn what_differs_and_is_listed_passes() {
        let reports = [report(&[("time", false), ("skew", true)])];
        assert_eq!(listed("figure-8", "time").check(&reports), Ok(()));
        assert_eq!(KnownDifferences::default().check(&[report(&[("skew", true)])]), Ok(()));
    }

    #[test]
    fn what_differs_and_is_not_listed_fails() {
        let error = KnownDifferences::default().check(&[report(&[("time", false)])]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("differences.toml") && text.contains("figure-8: not in the list"), "{text}");
        assert!(text.contains("DIFFERS: time: paper: 1; here: 2") && text.contains("remedy: find the cause"), "{text}");
        // Nor does an entry of another figure cover it.
        let other = listed("figure-9", "time").check(&[report(&[("time", false)])]);
        assert_eq!(other, Err(error));
    }

    #[test]
    fn a_stale_entry_fails() {
        let reports = [report(&[("time", true)])];
        let stale = |figure: &str, finding: &str| {
            let error = listed(figure, finding).check(&reports).unwrap_err();
            assert_eq!(error.mismatches.len(), 1);
            error.to_string()
        };
        let agrees = stale("figure-8", "time");
        assert!(agrees.contains("the finding agrees now: time") && agrees.contains("remedy: remove"), "{agrees}");
        let gone = stale("figure-8", "bandwidth");
        assert!(gone.contains("no such finding: bandwidth") && gone.contains("remedy: remove or rename"), "{gone}");
        let nowhere = stale("figure-99", "time");
        assert!(nowhere.contains("figure-99") && nowhere.contains("there is no such experiment"), "{nowhere}");
    }

    #[test]
    fn entries_of_experiments_that_were_not_run_are_not_judged() {
        assert_eq!(listed("figure-9", "time").check(&[report(&[("time", true)])]), Ok(()));
    }

    #[test]
    fn every_committed_entry_is_of_an_experiment_stands_once_and_has_a_reason() {
        let KnownDifferences { entries } = KnownDifferences::committed();
        let names: Vec<String> = EXPERIMENTS.iter().map(|experiment| experiment.report_name()).collect();
        let place = |entry: &KnownDifference| names.iter().position(|name| *name == entry.figure);
        let places: Vec<usize> = entries.iter().map(|entry| place(entry).expect(&entry.figure)).collect();
        assert!(places.is_sorted(), "in the order of the experiments");
        for (at, entry) in entries.iter().enumerate() {
            assert!(entry.reason.len() > 40, "{}: {}", entry.figure, entry.finding);
            let same = |other: &KnownDifference| (&other.figure, &other.finding) == (&entry.figure, &entry.finding);
            assert!(!entries[..at].iter().any(same), "{}: {} stands twice", entry.figure, entry.finding);
        }
    }
}
