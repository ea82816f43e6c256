//! The experiments of the papers: each returns tables, a figure and a comparison with the paper.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::deployment::DeploymentError;
use crate::model::ClusterModel;
use crate::plot::Figure;
use crate::simulation::Stalled;
use crate::world::ModelError;

mod algorithms;
mod blocks;
mod breakdown;
mod circulant;
mod completion;
mod delay;
mod differences;
mod distance;
mod groups;
mod isolation;
mod measure;
mod offloading;
mod overlap;
mod racks;
mod replication;
mod scaling;
mod slack;
mod slow_link;
mod small_messages;
mod wan;
mod workload;

pub use differences::{DifferencesError, KnownDifference, KnownDifferences, Mismatch};
pub use distance::{BOUND, BOUND_PIPELINE, DistanceCase, DistanceOutcome, PREDICTED};
pub use isolation::{PlayedFlows, play_flows};
pub use wan::{LongPath, Pace};

/// One experiment, with its name in the program.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// The name, such as `8` or `slack`.
    pub name: &'static str,
    /// Describes it in a line.
    pub about: &'static str,
    run: fn(&Options) -> Result<Report, ExperimentError>,
}

/// The options of experiments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Decides everything random.
    pub seed: u64,
    /// A file with the replication workload to play: a line `microseconds,bytes,target,target,target` for each write.
    /// `None` draws one.
    pub workload: Option<PathBuf>,
    /// Largest group of Figure 8; `None` runs all its groups.
    pub members_max: Option<u32>,
}

impl Default for Options {
    /// The options of the reviewed findings: seed 1, the drawn workload and all groups.
    fn default() -> Self {
        Self { seed: 1, workload: None, members_max: None }
    }
}

impl Experiment {
    /// Runs the experiment.
    ///
    /// # Errors
    /// The simulation fails.
    pub fn run(&self, options: &Options) -> Result<Report, ExperimentError> {
        let report = (self.run)(options)?;
        debug_assert_eq!(report.name, self.report_name());
        Ok(report)
    }

    /// Returns the name of its report: `figure-8` of the experiment `8`, otherwise its own name.
    pub fn report_name(&self) -> String {
        let is_number = self.name.bytes().all(|byte| byte.is_ascii_digit());
        if is_number { format!("figure-{}", self.name) } else { self.name.to_owned() }
    }
}

/// All experiments in the order of the papers.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment { name: "4", about: "latency of the algorithms against the group's size", run: algorithms::run },
    Experiment { name: "5", about: "where the time of a transfer goes, with one stall", run: breakdown::run },
    Experiment { name: "6", about: "bandwidth against block size", run: blocks::run },
    Experiment { name: "7", about: "messages of 1 byte to 2 to 16 nodes", run: small_messages::run },
    Experiment { name: "8", about: "256 MiB to 2 to 512 nodes", run: scaling::run },
    Experiment { name: "9", about: "writes of a replication layer to three of 15 hosts", run: replication::run },
    Experiment { name: "10", about: "overlapping groups, at full bisection and over racks", run: overlap::run },
    Experiment { name: "11", about: "processor load of polling, hybrid and events", run: completion::run },
    Experiment { name: "12", about: "schedules executed by adapters and by software", run: offloading::run },
    Experiment { name: "slack", about: "how long members hold blocks before they relay them", run: slack::run },
    Experiment { name: "slow-link", about: "one slow link between two members", run: slow_link::run },
    Experiment { name: "delay", about: "one delay of one member in mid-transfer", run: delay::run },
    Experiment { name: "racks", about: "hybrid and flat schedules behind oversubscribed uplinks", run: racks::run },
    Experiment { name: "circulant", about: "circulant and binomial pipeline on jittery hosts", run: circulant::run },
    Experiment { name: "distance", about: "256 MiB to hosts from 1.3 µs to 25 ms apart", run: distance::run },
    Experiment { name: "isolation", about: "small messages beside bulk on the same ports", run: isolation::run },
    Experiment { name: "wan-channels", about: "a gateway's channel without distance", run: wan::channels::run },
    Experiment { name: "wan-loss", about: "gateways and TCP over long paths with loss", run: wan::loss::run },
    Experiment { name: "wan-ring", about: "a session's ring against the length of its path", run: wan::ring::run },
    Experiment { name: "wan-verbs", about: "slabs that are read or written", run: wan::verbs::run },
    Experiment { name: "wan-driver", about: "a session and TCP over a perfect long path", run: wan::driver::run },
    Experiment { name: "wan-policer", about: "a session and TCP behind a policer", run: wan::policer::run },
];

/// The results of an experiment.
#[derive(Clone, Debug)]
pub struct Report {
    /// The stem of its files, such as `figure-8`.
    pub name: &'static str,
    /// Describes the experiment in a line.
    pub title: String,
    /// The numbers.
    pub tables: Vec<Table>,
    /// The picture.
    pub figure: Figure,
    /// The comparisons with the paper.
    pub findings: Vec<Finding>,
}

/// Numbers, to be written as CSV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Distinguishes it from the other tables of the experiment; empty for the only one.
    pub name: &'static str,
    /// The names of the columns, with units.
    pub columns: Vec<String>,
    /// The values.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table without rows.
    pub fn new(name: &'static str, columns: &[&str]) -> Self {
        Self { name, columns: columns.iter().map(|&column| column.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If the number of values is not the number of columns.
    pub fn push(&mut self, row: Vec<String>) {
        assert_eq!(row.len(), self.columns.len(), "a row has a value for every column");
        self.rows.push(row);
    }

    /// Returns the table as CSV. Values must not contain commas.
    pub fn to_csv(&self) -> String {
        let mut text = String::new();
        for row in std::iter::once(&self.columns).chain(&self.rows) {
            text.push_str(&row.join(","));
            text.push('\n');
        }
        text
    }
}

/// One comparison with a paper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The subject of the comparison. It contains no measured value, so that lists can name it.
    pub what: String,
    /// The paper's statement; empty if the papers have none.
    pub paper: String,
    /// The result of the simulation.
    pub here: String,
    /// Whether the two agree.
    pub agrees: bool,
}

impl Finding {
    /// Makes a finding on a subject that the papers do not treat.
    pub fn beyond(what: impl Into<String>, here: impl Into<String>) -> Self {
        Self::target(what, here, true)
    }

    /// Makes such a finding about a target of our own. It differs if the target is not met.
    pub fn target(what: impl Into<String>, here: impl Into<String>, is_met: bool) -> Self {
        Self { what: what.into(), paper: String::new(), here: here.into(), agrees: is_met }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, paper, here, agrees } = self;
        match (paper.is_empty(), agrees) {
            (true, true) => write!(f, "beyond the papers: {what}: {here}"),
            (true, false) => write!(f, "DIFFERS: {what}: {here}"),
            (false, true) => write!(f, "agrees: {what}: paper: {paper}; here: {here}"),
            (false, false) => write!(f, "DIFFERS: {what}: paper: {paper}; here: {here}"),
        }
    }
}

impl Report {
    /// Writes the tables, the picture as SVG and PNG, and the comparison into a directory.
    ///
    /// # Errors
    /// A file cannot be written; the error names it.
    pub fn write(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let named = |path: &Path| {
            let path = path.display().to_string();
            move |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"))
        };
        std::fs::create_dir_all(directory).map_err(named(directory))?;
        let png = self.figure.to_png().map_err(io::Error::other)?;
        let mut files: Vec<(String, Vec<u8>)> = Vec::new();
        for table in &self.tables {
            let stem =
                if table.name.is_empty() { self.name.to_owned() } else { format!("{}-{}", self.name, table.name) };
            files.push((format!("{stem}.csv"), table.to_csv().into_bytes()));
        }
        files.push((format!("{}.svg", self.name), self.figure.to_svg().into_bytes()));
        files.push((format!("{}.png", self.name), png));
        let findings: String = self.findings.iter().map(|finding| format!("{finding}\n")).collect();
        files.push((format!("{}.txt", self.name), findings.into_bytes()));
        let mut written = Vec::new();
        for (name, content) in files {
            let path = directory.join(name);
            std::fs::write(&path, content).map_err(named(&path))?;
            written.push(path);
        }
        Ok(written)
    }
}

/// An experiment failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExperimentError {
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The simulation did not end.
    #[error(transparent)]
    Stalled(#[from] Stalled),
    /// The runtime reported an error.
    #[error(transparent)]
    Deployment(#[from] DeploymentError),
    /// A session could not be opened.
    #[error(transparent)]
    Open(#[from] rdmc_wan::OpenError),
    /// A session failed.
    #[error(transparent)]
    Session(#[from] rdmc_wan::SessionError),
    /// An input file is not usable.
    #[error("{path}: {what}")]
    Input {
        /// The file.
        path: String,
        /// What is wrong with it.
        what: String,
    },
}

/// The papers' clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaperCluster {
    /// 16 nodes at 100 Gbit/s.
    Fractus,
    /// 512 nodes at 40 Gbit/s.
    Sierra,
    /// 16 nodes at 40 Gbit/s.
    Stampede,
    /// Racks of 28 nodes at 56 Gbit/s behind oversubscribed uplinks.
    Apt,
    /// The machines of Zhang et al., KBNets 2017, at 48 Gbit/s.
    Kbnets,
}

impl PaperCluster {
    /// Returns the parameters from the cluster's file.
    ///
    /// # Panics
    /// If that file is invalid, which a test excludes.
    pub fn model(self) -> ClusterModel {
        let text = match self {
            Self::Fractus => include_str!("../clusters/fractus.toml"),
            Self::Sierra => include_str!("../clusters/sierra.toml"),
            Self::Stampede => include_str!("../clusters/stampede.toml"),
            Self::Apt => include_str!("../clusters/apt.toml"),
            Self::Kbnets => include_str!("../clusters/kbnets.toml"),
        };
        toml::from_str(text).expect("the clusters' files are tested")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_clusters_are_sound() {
        use PaperCluster::{Apt, Fractus, Kbnets, Sierra, Stampede};
        for cluster in [Fractus, Sierra, Stampede, Apt, Kbnets] {
            assert_eq!(cluster.model().check(), Ok(()), "{cluster:?}");
        }
    }

    #[test]
    fn experiments_have_names_of_their_own() {
        let names: std::collections::BTreeSet<_> = EXPERIMENTS.iter().map(|experiment| experiment.name).collect();
        assert_eq!(names.len(), EXPERIMENTS.len());
    }
}
