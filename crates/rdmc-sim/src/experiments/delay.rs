//! One delay of one member in mid-transfer: DSN §4.5.

use std::time::Duration;

use rdmc::Algorithm;

use super::measure::{MIB, Single, in_parallel, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel, Reference};
use crate::random::Random;
use crate::simulation::NodeIndex;

/// Blocks of the message.
const BLOCKS: u64 = 128;
/// The delays, in µs.
const DELAYS_US: [u64; 6] = [10, 30, 100, 300, 1_000, 10_000];
/// Pairs of a moment and a member for each delay.
const SAMPLES: u64 = 8;
/// Tolerance above ε, in ns: the costs of a few operations.
const TOLERANCE_NS: f64 = 10_000.0;

/// A kind of group.
#[derive(Clone, Debug)]
struct GroupKind {
    name: &'static str,
    algorithm: Algorithm,
    members: u32,
}

/// One transfer with one delay.
#[derive(Clone, Debug)]
struct Job {
    kind: GroupKind,
    /// The member, the start of the delay and its duration.
    held_up: Option<(u32, Duration, Duration)>,
}

/// The time that one delay added to the transfers, in µs.
#[derive(Clone, Copy, Debug)]
struct AddedTime {
    delay_us: f64,
    least: f64,
    mean: f64,
    most: f64,
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let kinds = [
        GroupKind { name: "pipeline, 16 members", algorithm: Algorithm::BinomialPipeline, members: 16 },
        GroupKind { name: "pipeline, 64 members", algorithm: Algorithm::BinomialPipeline, members: 64 },
        GroupKind { name: "chain, 16 members", algorithm: Algorithm::Chain, members: 16 },
    ];
    let block = wire_time(&PaperCluster::Sierra.model(), MIB);
    let mut random = Random::new(options.seed);
    let mut jobs = Vec::new();
    for kind in &kinds {
        jobs.push(Job { kind: kind.clone(), held_up: None });
        for _ in 0..SAMPLES {
            // All delays use the same members and moments, so that they compare.
            let member = u32::try_from(random.below(u64::from(kind.members))).expect("members are few");
            let after = middle(block, &mut random);
            let held_up = DELAYS_US.map(|delay_us| Some((member, after, Duration::from_micros(delay_us))));
            jobs.extend(held_up.into_iter().map(|held_up| Job { kind: kind.clone(), held_up }));
        }
    }
    let latencies = in_parallel(&jobs, measure)?;
    let columns = ["group", "delay_us", "added_least_us", "added_mean_us", "added_most_us", "added_most_over_delay"];
    let mut table = Table::new("", &columns);
    let mut all = Vec::new();
    for kind in &kinds {
        let of_kind = || jobs.iter().zip(&latencies).filter(|(job, _)| job.kind.name == kind.name);
        let idle = of_kind().find(|(job, _)| job.held_up.is_none()).map_or(f64::NAN, |(_, &us)| us);
        let mut series = Vec::new();
        for delay_us in DELAYS_US {
            let delay = Duration::from_micros(delay_us);
            let with_it = of_kind().filter(|(job, _)| job.held_up.is_some_and(|held_up| held_up.2 == delay));
            let added: Vec<f64> = with_it.map(|(_, &us)| us - idle).collect();
            let added = AddedTime {
                delay_us: delay_us as f64,
                least: added.iter().copied().fold(f64::INFINITY, f64::min),
                mean: added.iter().sum::<f64>() / added.len() as f64,
                most: added.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            };
            let mut row = vec![kind.name.replace(',', ""), delay_us.to_string()];
            row.extend([added.least, added.mean, added.most].map(|us| format!("{us:.3}")));
            row.push(format!("{:.3}", added.most / added.delay_us));
            table.push(row);
            series.push(added);
        }
        all.push((kind.name, series));
    }
    let findings = findings(&all, block);
    let figure = figure(&all, block);
    Ok(Report { name: "delay", title: "One delay in mid-transfer".into(), tables: vec![table], figure, findings })
}

fn findings(all: &[(&str, Vec<AddedTime>)], block: Duration) -> Vec<Finding> {
    let of =
        |kind: &'static str| all.iter().filter(move |(name, _)| name.starts_with(kind)).flat_map(|(_, series)| series);
    let block_us = block.as_secs_f64() * 1e6;
    let beyond = |kind| of(kind).map(|added| added.most - added.delay_us).fold(f64::NEG_INFINITY, f64::max);
    let absorbed = |kind, from: f64, to: f64| {
        let within = of(kind).filter(move |added| from <= added.delay_us && added.delay_us <= to);
        let (mean, delay) = within.fold((0.0, 0.0), |sums, added| (sums.0 + added.mean, sums.1 + added.delay_us));
        (1.0 - mean / delay) * 1e2
    };
    let (pipeline, chain) = (beyond("pipeline"), beyond("chain"));
    let (short, long) = (absorbed("pipeline", 0.0, block_us), absorbed("pipeline", 10.0 * block_us, f64::INFINITY));
    let chain_short = absorbed("chain", 0.0, block_us);
    vec![
        Finding {
            what: "binomial pipeline among 16 and 64, one member held up once by ε = 10 µs to 10 ms".into(),
            paper: "the transfer takes at most about ε longer".into(),
            here: format!("at most ε {pipeline:+.1} µs longer, over all members and moments"),
            agrees: pipeline * 1e3 <= TOLERANCE_NS,
        },
        Finding {
            what: "share of a delay that the pipeline's slack absorbs".into(),
            paper: "a part (shape only)".into(),
            here: format!(
                "{short:.0} % of delays up to the time of a block ({block_us:.0} µs), {long:.0} % of delays above \
                 ten times that"
            ),
            agrees: short > 0.0,
        },
        Finding::beyond(
            "chain, one delay",
            format!(
                "the transfer takes at most ε {chain:+.1} µs longer; {chain_short:.0} % of delays up to the time of \
                 a block are absorbed"
            ),
        ),
    ]
}

fn figure(all: &[(&str, Vec<AddedTime>)], block: Duration) -> Figure {
    let panels = all.iter().map(|(name, series)| {
        let line = |name: &str, of: fn(&AddedTime) -> f64, style| {
            Line::new(name, series.iter().map(|added| (added.delay_us, of(added).max(FLOOR_US))).collect(), style)
        };
        let equal = series.iter().map(|added| (added.delay_us, added.delay_us)).collect();
        Panel {
            title: Some((*name).to_owned()),
            ..Panel::new(
                Axis::log10("delay ε of one member (µs)"),
                Axis::log10("transfer takes longer by (µs)").with_range(FLOOR_US, 20_000.0),
                Content::Lines(vec![
                    line("most", |added| added.most, LineStyle::Markers),
                    line("mean", |added| added.mean, LineStyle::Markers),
                    line("least", |added| added.least, LineStyle::Markers),
                    Line::new("ε", equal, LineStyle::Dashed),
                ]),
            )
        }
    });
    let share = |(name, series): &(&str, Vec<AddedTime>)| {
        let points = series.iter().map(|added| (added.delay_us, added.mean / added.delay_us * 1e2)).collect();
        Line::new(*name, points, LineStyle::Markers)
    };
    let shares = Panel {
        title: Some("Share of a delay that remains".into()),
        references: vec![Reference::new(1e2, "all of it")],
        ..Panel::new(
            Axis::log10("delay ε of one member (µs)"),
            Axis::linear("mean added time (% of ε)").with_range(0.0, 110.0),
            Content::Lines(all.iter().map(share).collect()),
        )
    };
    let panels = panels.chain(std::iter::once(shares));
    let mut figure = Figure::new("A delay adds at most its own length to a multicast", panels.collect());
    figure.subtitle = Some(format!(
        "{BLOCKS} blocks of {:.0} µs, Sierra (40 Gbit/s); {SAMPLES} members and moments each; values below 1 µs are \
         drawn at 1 µs",
        block.as_secs_f64() * 1e6
    ));
    figure
}

fn measure(job: &Job) -> Result<f64, ExperimentError> {
    let bytes = BLOCKS * MIB;
    let held_up = job.held_up;
    let single = Single::new(PaperCluster::Sierra.model(), job.kind.members, job.kind.algorithm.clone(), bytes, MIB);
    let times = single.run_with(move |world| {
        let Some((member, after, duration)) = held_up else { return };
        let later = world.clone();
        world.spawn(Box::pin(async move {
            later.sleep(after).await;
            later.hold_up(NodeIndex(member), duration);
        }));
    })?;
    Ok(times.latency().as_secs_f64() * 1e6)
}

/// Draws a moment in the middle half of a transfer.
fn middle(block: Duration, random: &mut Random) -> Duration {
    let whole_ns = u64::try_from(block.as_nanos()).expect("blocks take less than centuries") * BLOCKS;
    Duration::from_nanos(random.within(whole_ns / 4..=whole_ns / 4 * 3))
}

/// Smallest value in the figure, in µs; smaller ones are drawn here.
const FLOOR_US: f64 = 1.0;
