//! Träff's circulant schedule against the binomial pipeline, on hosts that are late and with a slow port.

use rdmc::Algorithm;

use super::measure::{MIB, Single, in_parallel, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::model::{DelayModel, Distribution};
use crate::plot::{Axis, BarSeries, Bars, Content, Figure, Panel};
use crate::random::Random;
use crate::simulation::NodeIndex;

/// Group sizes: powers of two, and one member more.
const SIZES: [u32; 9] = [5, 8, 9, 16, 17, 32, 33, 64, 65];
/// Blocks of the message.
const BLOCKS: u32 = 64;
/// Seeds for each random disturbance, by group size: the largest groups take the longest.
fn seeds(members: u32) -> u64 {
    match members {
        0..=9 => 20,
        10..=17 => 16,
        18..=33 => 8,
        _ => 4,
    }
}

/// A disturbance of the cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Disturbance {
    name: &'static str,
    title: &'static str,
    kind: DisturbanceKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DisturbanceKind {
    /// None.
    None,
    /// Each time software takes a completion, it is late with this probability, by this mean in µs.
    Late(f64, f64),
    /// One node's port runs at this share of its rate, in percent.
    SlowPort(u64),
}

const DISTURBANCES: [Disturbance; 5] = [
    Disturbance { name: "none", title: "No disturbance", kind: DisturbanceKind::None },
    Disturbance {
        name: "10 % of completions by 50 µs",
        title: "10 % of completions late by 50 µs",
        kind: DisturbanceKind::Late(0.1, 50.0),
    },
    Disturbance {
        name: "2 % of completions by 200 µs",
        title: "2 % of completions late by 200 µs",
        kind: DisturbanceKind::Late(0.02, 200.0),
    },
    Disturbance {
        name: "0.2 % of completions by 2 ms",
        title: "0.2 % of completions late by 2 ms",
        kind: DisturbanceKind::Late(0.002, 2_000.0),
    },
    Disturbance { name: "one port at 80 %", title: "One member's port at 80 %", kind: DisturbanceKind::SlowPort(80) },
];

const ALGORITHMS: [Algorithm; 2] = [Algorithm::BinomialPipeline, Algorithm::Circulant];

#[derive(Clone, Debug)]
struct Job {
    disturbance: Disturbance,
    algorithm: Algorithm,
    members: u32,
    seed: u64,
}

/// The times of one kind of job, as multiples of the ideal.
#[derive(Clone, Copy, Debug)]
struct Spread {
    least: f64,
    mean: f64,
    most: f64,
    /// The standard error of the mean.
    error: f64,
}

impl Spread {
    fn of(times: &[f64]) -> Self {
        let count = times.len() as f64;
        let mean = times.iter().sum::<f64>() / count;
        let variance = times.iter().map(|time| (time - mean) * (time - mean)).sum::<f64>() / (count - 1.0).max(1.0);
        Self {
            least: times.iter().copied().fold(f64::INFINITY, f64::min),
            mean,
            most: times.iter().copied().fold(0.0, f64::max),
            error: libm::sqrt(variance / count),
        }
    }
}

/// The times of all jobs.
struct Times(Vec<(Job, f64)>);

impl Times {
    fn of(&self, disturbance: &Disturbance, algorithm: &Algorithm, members: u32) -> Spread {
        let wanted =
            |job: &Job| job.disturbance == *disturbance && job.algorithm == *algorithm && job.members == members;
        let times: Vec<f64> = self.0.iter().filter(|(job, _)| wanted(job)).map(|&(_, time)| time).collect();
        Spread::of(&times)
    }

    /// Returns the circulant's mean time over the pipeline's, and its standard error.
    fn ratio(&self, disturbance: &Disturbance, members: u32) -> (f64, f64) {
        let [pipeline, circulant] = ALGORITHMS.map(|algorithm| self.of(disturbance, &algorithm, members));
        let parts = [pipeline, circulant].map(|spread| spread.error / spread.mean);
        let ratio = circulant.mean / pipeline.mean;
        (ratio, ratio * libm::sqrt(parts[0] * parts[0] + parts[1] * parts[1]))
    }

    /// Returns the mean of these ratios over several sizes, and its standard error.
    fn mean_ratio(&self, disturbance: &Disturbance, sizes: &[u32]) -> (f64, f64) {
        let ratios = sizes.iter().map(|&members| self.ratio(disturbance, members));
        let (sum, squares) = ratios.fold((0.0, 0.0), |sums, (ratio, error)| (sums.0 + ratio, sums.1 + error * error));
        (sum / sizes.len() as f64, libm::sqrt(squares) / sizes.len() as f64)
    }
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let mut jobs = Vec::new();
    // The largest groups first: they take the longest.
    for members in SIZES.into_iter().rev() {
        for disturbance in DISTURBANCES {
            let seeds = if disturbance.kind == DisturbanceKind::None { 1 } else { seeds(members) };
            for seed in 0..seeds {
                let seed = options.seed * seeds + seed;
                jobs.extend(ALGORITHMS.map(|algorithm| Job { disturbance, algorithm, members, seed }));
            }
        }
    }
    let times = in_parallel(&jobs, measure)?;
    let times = Times(jobs.into_iter().zip(times).collect());
    let columns = [
        "disturbance",
        "members",
        "algorithm",
        "least_over_ideal",
        "mean_over_ideal",
        "most_over_ideal",
        "error_of_mean",
    ];
    let mut table = Table::new("", &columns);
    for disturbance in &DISTURBANCES {
        for members in SIZES {
            for algorithm in &ALGORITHMS {
                let spread = times.of(disturbance, algorithm, members);
                let mut row = vec![disturbance.name.to_owned(), members.to_string(), algorithm.to_string()];
                row.extend([spread.least, spread.mean, spread.most, spread.error].map(|time| format!("{time:.4}")));
                table.push(row);
            }
        }
    }
    let title = "Circulant schedule and binomial pipeline".into();
    let (findings, figure) = (findings(&times), figure(&times));
    Ok(Report { name: "circulant", title, tables: vec![table], figure, findings })
}

fn findings(times: &Times) -> Vec<Finding> {
    let range = |values: &[f64]| {
        values.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), &value| (least.min(value), most.max(value)))
    };
    let (powers, others): (Vec<u32>, Vec<u32>) = SIZES.iter().partition(|size| size.is_power_of_two());
    let idle = range(&SIZES.map(|members| times.ratio(&DISTURBANCES[0], members).0));
    let mut findings = vec![Finding {
        what: "circulant against binomial pipeline without disturbance, 5 to 65 members".into(),
        paper: "the same number of steps for every n (Träff)".into(),
        here: format!("{:.3} to {:.3} times the time", idle.0, idle.1),
        agrees: (0.98..=1.02).contains(&idle.0) && idle.1 <= 1.02,
    }];
    for disturbance in DISTURBANCES.iter().filter(|disturbance| matches!(disturbance.kind, DisturbanceKind::Late(..))) {
        let (above, at) = (times.mean_ratio(disturbance, &others), times.mean_ratio(disturbance, &powers));
        findings.push(Finding::beyond(
            format!("software late, {} (the circulant has more slack, 2.5 steps against 1.3 to 1.8)", disturbance.name),
            format!(
                "circulant takes {:.3} ± {:.3} of the pipeline's time just above powers of two, {:.3} ± {:.3} at them",
                above.0, above.1, at.0, at.1
            ),
        ));
    }
    let slow = range(&SIZES.map(|members| times.ratio(&DISTURBANCES[4], members).0));
    let pipeline = range(&SIZES.map(|members| times.of(&DISTURBANCES[4], &ALGORITHMS[0], members).mean));
    findings.push(Finding::beyond(
        "one member's port at 80 % (slack cannot hide a lasting slowdown: 1.25 times the time)",
        format!(
            "pipeline {:.3} to {:.3} times the ideal; circulant {:.3} to {:.3} of that",
            pipeline.0, pipeline.1, slow.0, slow.1
        ),
    ));
    findings
}

fn figure(times: &Times) -> Figure {
    let panels = DISTURBANCES.iter().skip(1).map(|disturbance| {
        let bars = |name: &str, algorithm: &Algorithm| {
            BarSeries::new(
                name,
                SIZES.map(|members| (times.of(disturbance, algorithm, members).mean - 1.0) * 1e2).to_vec(),
            )
        };
        let [pipeline, circulant] = &ALGORITHMS;
        let bars = Bars {
            categories: SIZES.map(|members| members.to_string()).to_vec(),
            series: vec![bars("binomial pipeline", pipeline), bars("circulant", circulant)],
            stacked: false,
        };
        Panel {
            title: Some(disturbance.title.to_owned()),
            ..Panel::new(Axis::linear("members"), Axis::linear("time lost (% of the ideal)"), Content::Bars(bars))
        }
    });
    let title = "The circulant schedule's slack helps with short delays, hardly with long ones";
    let mut figure = Figure::new(title, panels.collect());
    figure.subtitle = Some(format!(
        "{BLOCKS} blocks of 210 µs, Sierra (40 Gbit/s); means of {} to {} seeds",
        seeds(SIZES[8]),
        seeds(SIZES[0])
    ));
    figure
}

fn measure(job: &Job) -> Result<f64, ExperimentError> {
    let mut model = PaperCluster::Sierra.model();
    let mut slow = None;
    match job.disturbance.kind {
        DisturbanceKind::None => {}
        DisturbanceKind::Late(probability, mean_us) => {
            let mean_ns = mean_us * 1e3;
            model.host.delays = Some(DelayModel { probability, mean_ns, distribution: Distribution::Exponential });
        }
        DisturbanceKind::SlowPort(percent) => {
            let node = Random::new(job.seed).below(u64::from(job.members));
            let node = u32::try_from(node).expect("members are few");
            slow = Some((NodeIndex(node), model.port_mbps * percent / 100));
        }
    }
    let ideal = wire_time(&model, MIB) * (BLOCKS - 1 + job.members.next_power_of_two().ilog2());
    let mut single = Single::new(model, job.members, job.algorithm.clone(), u64::from(BLOCKS) * MIB, MIB);
    single.seed = job.seed;
    let times = single.run_with(move |world| {
        if let Some((node, mbps)) = slow {
            world.limit_port(node, mbps);
        }
    })?;
    Ok(times.latency().as_secs_f64() / ideal.as_secs_f64())
}
