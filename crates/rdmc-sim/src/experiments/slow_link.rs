//! One slow link between two members: DSN §4.5.

use std::collections::BTreeSet;

use rdmc::{Algorithm, Rank};
use rdmc_schedule::neighbours;

use super::measure::{MIB, Single, in_parallel};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel, Reference};
use crate::random::Random;
use crate::simulation::NodeIndex;

/// Members of the group.
const MEMBERS: u32 = 64;
/// Bytes of the message.
const MESSAGE: u64 = 256 * MIB;
/// Rates of the slow link, in tenths of the full rate.
const TENTHS: [u64; 10] = [10, 9, 8, 7, 6, 5, 4, 3, 2, 1];
/// The rate of the paper's example, in tenths.
const HALF: u64 = 5;
/// Links at half rate, one at a time, besides all links of the root.
const LINKS: usize = 6;
/// Links at the other rates, one at a time; one of them is the root's.
const LINKS_SWEPT: usize = 3;
/// The paper's share of the full rate at half rate, l = 6.
const PAPER_SHARE: f64 = 0.856;

/// Two members that send to each other, the lower rank first.
type Link = (u32, u32);

/// A transfer with one slow link, or with none.
#[derive(Clone, Debug, PartialEq)]
struct Job {
    algorithm: Algorithm,
    slow: Option<(Link, u64)>,
}

/// The bandwidths with one rate of the slow link, as shares of the bandwidth without a slow link.
#[derive(Clone, Copy, Debug)]
struct Shares {
    links: usize,
    worst: f64,
    mean: f64,
    best: f64,
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let algorithms = [Algorithm::BinomialPipeline, Algorithm::Chain];
    let mut random = Random::new(options.seed);
    let mut jobs = Vec::new();
    for algorithm in &algorithms {
        let (at_root, others) = links_of(algorithm, &mut random);
        jobs.push(Job { algorithm: algorithm.clone(), slow: None });
        for tenths in TENTHS {
            let (near, far) = if tenths == HALF { (at_root.len(), LINKS) } else { (1, LINKS_SWEPT - 1) };
            let links = at_root.iter().take(near).chain(others.iter().take(far));
            let slow = links.map(|&link| Some((link, tenths)));
            jobs.extend(slow.map(|slow| Job { algorithm: algorithm.clone(), slow }));
        }
    }
    let seconds = in_parallel(&jobs, measure)?;
    let full = |algorithm: &Algorithm| {
        let whole = |job: &&(&Job, &f64)| job.0.slow.is_none() && job.0.algorithm == *algorithm;
        jobs.iter().zip(&seconds).find(|job| whole(&job)).map_or(f64::NAN, |(_, &seconds)| seconds)
    };
    let mut table = Table::new("", &["algorithm", "rate_share", "links", "worst_share", "mean_share", "formula_share"]);
    let mut links = Table::new("links", &["algorithm", "rate_share", "from", "to", "seconds", "share"]);
    let mut lines = Vec::new();
    for algorithm in &algorithms {
        let mut points = Vec::new();
        for tenths in TENTHS {
            let mut shares = Vec::new();
            for (job, &seconds) in jobs.iter().zip(&seconds) {
                let Some((link, _)) = job.slow.filter(|slow| slow.1 == tenths && job.algorithm == *algorithm) else {
                    continue;
                };
                let share = full(algorithm) / seconds;
                shares.push(share);
                links.push(vec![
                    algorithm.to_string(),
                    rate(tenths).to_string(),
                    link.0.to_string(),
                    link.1.to_string(),
                    format!("{seconds:.6}"),
                    format!("{share:.4}"),
                ]);
            }
            let of_rate = Shares {
                links: shares.len(),
                worst: shares.iter().copied().fold(f64::INFINITY, f64::min),
                mean: shares.iter().sum::<f64>() / shares.len() as f64,
                best: shares.iter().copied().fold(0.0, f64::max),
            };
            table.push(vec![
                algorithm.to_string(),
                rate(tenths).to_string(),
                shares.len().to_string(),
                format!("{:.4}", of_rate.worst),
                format!("{:.4}", of_rate.mean),
                format!(
                    "{:.4}",
                    if *algorithm == Algorithm::Chain { of_chain(rate(tenths)) } else { formula(rate(tenths)) }
                ),
            ]);
            points.push((tenths, of_rate));
        }
        lines.push(points);
    }
    let findings = findings(&lines[0], &lines[1]);
    let figure = figure(&lines[0], &lines[1]);
    Ok(Report { name: "slow-link", title: "One slow link".into(), tables: vec![table, links], figure, findings })
}

fn findings(pipeline: &[(u64, Shares)], chain: &[(u64, Shares)]) -> Vec<Finding> {
    let at_half = |points: &[(u64, Shares)]| points.iter().find(|point| point.0 == HALF).map(|point| point.1);
    let none = Shares { links: 0, worst: f64::NAN, mean: f64::NAN, best: f64::NAN };
    let (half, chain_half) = (at_half(pipeline).unwrap_or(none), at_half(chain).unwrap_or(none));
    let margins = pipeline.iter().map(|(tenths, shares)| shares.worst / formula(rate(*tenths)) - 1.0);
    let (least, most) =
        margins.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), margin| (least.min(margin), most.max(margin)));
    let fill = of_chain(rate(HALF));
    vec![
        Finding {
            what: format!("binomial pipeline, {MEMBERS} members, one link at half rate: share of the full bandwidth"),
            paper: "at least 85.6 %".into(),
            here: format!(
                "{:.1} % with the worst of {} links, among them all of the root; {:.1} % on average",
                half.worst * 1e2,
                half.links,
                half.mean * 1e2
            ),
            agrees: half.worst >= PAPER_SHARE,
        },
        Finding {
            what: "binomial pipeline, the worst link at rates T' from 0.1 T to T".into(),
            paper: "at least l·T'/(T + (l−1)·T') of the full bandwidth, since every l-th step uses the link".into(),
            here: format!("{:+.1} % to {:+.1} % off", least * 1e2, most * 1e2),
            agrees: least >= -0.001,
        },
        Finding {
            what: "chain, one link at half rate".into(),
            paper: "T'/T = 50 % of the full bandwidth in the long run".into(),
            here: format!(
                "{:.1} to {:.1} %; by count {:.1} % with {} blocks, since the first n − 1 steps are not slower",
                chain_half.worst * 1e2,
                chain_half.best * 1e2,
                fill * 1e2,
                MESSAGE / MIB
            ),
            agrees: (chain_half.worst - fill).abs() < 0.01 && (chain_half.best - fill).abs() < 0.01,
        },
    ]
}

fn figure(pipeline: &[(u64, Shares)], chain: &[(u64, Shares)]) -> Figure {
    let percent = |points: &[(u64, Shares)], of: fn(&Shares) -> f64| {
        points.iter().map(|(tenths, shares)| (rate(*tenths), of(shares) * 1e2)).collect::<Vec<_>>()
    };
    let stated = TENTHS.map(|tenths| (rate(tenths), formula(rate(tenths)) * 1e2)).to_vec();
    let in_proportion = TENTHS.map(|tenths| (rate(tenths), rate(tenths) * 1e2)).to_vec();
    let panel = Panel {
        references: vec![Reference::new(PAPER_SHARE * 1e2, "the paper: 85.6 % at T'/T = 0.5")],
        notes: vec![format!(
            "Links between neighbours, one at a time: {} at half rate, among them all of the root, and {LINKS_SWEPT} \
             at each other rate. The chain is above T'/T because its first n − 1 steps are not slower.",
            pipeline.iter().map(|(_, shares)| shares.links).max().unwrap_or(0)
        )],
        ..Panel::new(
            Axis::linear("rate of the slow link, T'/T").with_range(0.0, 1.0),
            Axis::linear("bandwidth of the multicast (% of the full bandwidth)").with_range(0.0, 100.0),
            Content::Lines(vec![
                Line::new("l·T'/(T + (l−1)·T')", stated, LineStyle::Dashed),
                Line::new("pipeline, worst link", percent(pipeline, |shares| shares.worst), LineStyle::Markers),
                Line::new("chain, worst link", percent(chain, |shares| shares.worst), LineStyle::Markers),
                Line::new("T'/T", in_proportion, LineStyle::Dashed),
            ]),
        )
    };
    let mut figure = Figure::new("A slow link slows the pipeline a little and the chain fully", vec![panel]);
    figure.subtitle = Some(format!("256 MiB to {MEMBERS} members, l = 6, Sierra (40 Gbit/s), blocks of 1 MiB"));
    figure
}

fn measure(job: &Job) -> Result<f64, ExperimentError> {
    let model = PaperCluster::Sierra.model();
    let full_mbps = model.port_mbps;
    let slow = job.slow;
    let times = Single::new(model, MEMBERS, job.algorithm.clone(), MESSAGE, MIB).run_with(move |world| {
        if let Some(((a, b), tenths)) = slow {
            world.limit_path(NodeIndex(a), NodeIndex(b), full_mbps * tenths / 10);
        }
    })?;
    Ok(times.latency().as_secs_f64())
}

/// Lists the links of a schedule in random order: the links of the root, and the others.
fn links_of(algorithm: &Algorithm, random: &mut Random) -> (Vec<Link>, Vec<Link>) {
    let mut links = BTreeSet::new();
    for rank in 0..MEMBERS {
        let near = neighbours(algorithm, MEMBERS, Rank(rank)).expect("the group is within the limits");
        links.extend(near.sends_to.into_iter().map(|peer| (rank.min(peer.0), rank.max(peer.0))));
    }
    let mut links: Vec<_> = links.into_iter().collect();
    random.shuffle(&mut links);
    links.into_iter().partition(|link| link.0 == 0)
}

fn rate(tenths: u64) -> f64 {
    tenths as f64 / 10.0
}

/// Returns the paper's share of the full rate for the pipeline, if one link has `rate` times the rate of the others.
fn formula(rate: f64) -> f64 {
    let dimensions = f64::from(MEMBERS.ilog2());
    dimensions * rate / (1.0 + (dimensions - 1.0) * rate)
}

/// Returns the share of the full rate for the chain: each of its k blocks crosses the slow link, but the n − 1 steps of
/// the start take no longer.
fn of_chain(rate: f64) -> f64 {
    let (members, blocks) = (f64::from(MEMBERS), (MESSAGE / MIB) as f64);
    (blocks + members - 2.0) / ((blocks - 1.0) / rate + members - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_gives_the_papers_number() {
        assert!((formula(0.5) - 6.0 / 7.0).abs() < 1e-12);
        assert!((formula(1.0) - 1.0).abs() < 1e-12);
    }
}
