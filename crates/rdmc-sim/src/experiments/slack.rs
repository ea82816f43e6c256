//! How long members hold a block before they relay it: DSN §4.5.

use std::collections::BTreeMap;

use rdmc::{Algorithm, Rank};
use rdmc_schedule::{BlockCount, Schedule};

use super::measure::{MIB, Single, in_parallel};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::log::Recorded;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// Group sizes; the paper's formula is for powers of two.
const SIZES: [u32; 13] = [8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128];
/// Blocks of the message.
const BLOCKS: u32 = 128;
/// The group size of the distribution in the figure.
const SHOWN: u32 = 64;

/// One block that a member relays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RelayedBlock {
    /// The step in which the member relays it.
    step: u64,
    from: u32,
    to: u32,
    /// The step in which the member received it.
    came_in: u64,
    /// The member that sent it, and its place among the blocks from that member.
    source: (u32, usize),
}

impl RelayedBlock {
    fn slack(&self) -> u64 {
        self.step - self.came_in
    }
}

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let measured = in_parallel(&SIZES, |&n| measure(n))?;
    let columns = [
        "members",
        "formula_steps",
        "schedule_steps",
        "trace_steps",
        "step_us",
        "held_us",
        "relays",
        "circulant_steps",
    ];
    let mut table = Table::new("", &columns);
    let mut series = Series::default();
    let (mut worst, mut exact) = (0.0_f64, true);
    for (&n, seen) in SIZES.iter().zip(&measured) {
        let slack = mean(seen.slacks.iter().map(|&slack| slack as f64));
        let trace = mean(seen.steps.iter().copied());
        let stated = n.is_power_of_two().then(|| formula(n));
        if let Some(stated) = stated {
            exact &= seen.planned.iter().all(|&(sum, count)| is_formula(n, sum, count));
            worst = worst.max((trace / stated - 1.0).abs());
            series.stated.push((f64::from(n), stated));
        }
        let circulant = schedule_of(Algorithm::Circulant, n);
        let circulant = mean(steady(&circulant).iter().map(|relay| relay.slack() as f64));
        table.push(vec![
            n.to_string(),
            stated.map_or_else(String::new, |stated| format!("{stated:.4}")),
            format!("{slack:.4}"),
            format!("{trace:.4}"),
            format!("{:.3}", seen.step_ns / 1e3),
            format!("{:.3}", seen.held_ns / 1e3),
            seen.steps.len().to_string(),
            format!("{circulant:.4}"),
        ]);
        series.planned.push((f64::from(n), slack));
        series.traced.push((f64::from(n), trace));
        series.circulant.push((f64::from(n), circulant));
    }
    let last = series.traced.last().map_or(f64::NAN, |&(_, slack)| slack);
    let findings = vec![
        Finding {
            what: "average slack of relays in every steady step of the schedule, 8 to 128 members, powers of two"
                .into(),
            paper: "2(1 − (l−1)/(n−2)), with n = 2^l members".into(),
            here: if exact { "exactly the formula, in every step" } else { "not the formula in every step" }.into(),
            agrees: exact,
        },
        Finding {
            what: "the same in the recorded trace of the runtime, times divided by the time of a step".into(),
            paper: "the formula".into(),
            here: format!("at most {:.2} % off", worst * 1e2),
            agrees: worst < 0.02,
        },
        Finding {
            what: "average slack of large groups".into(),
            paper: "about 2 steps".into(),
            here: format!("{last:.3} steps with {} members", SIZES[SIZES.len() - 1]),
            agrees: (1.8..2.05).contains(&last),
        },
    ];
    let shown = SIZES.iter().position(|&n| n == SHOWN).map(|place| &measured[place]);
    let figure = figure(series, shown);
    Ok(Report { name: "slack", title: "How long relays hold blocks".into(), tables: vec![table], figure, findings })
}

/// Average slacks by the number of members.
#[derive(Default)]
struct Series {
    stated: Vec<(f64, f64)>,
    planned: Vec<(f64, f64)>,
    traced: Vec<(f64, f64)>,
    circulant: Vec<(f64, f64)>,
}

fn figure(series: Series, shown: Option<&Measured>) -> Figure {
    let mean = Panel {
        title: Some("Mean over all relays".into()),
        notes: vec![
            "Slack of a relayed block: the step in which a member relays it minus the step in which the member \
             received it; the minimum is 1. In the trace: the time between the starts of the two transfers, in steps."
                .into(),
        ],
        ..Panel::new(
            Axis::log2("members"),
            Axis::linear("slack (steps)").with_range(1.0, 2.8),
            Content::Lines(vec![
                Line::new("2(1 − (l−1)/(n−2))", series.stated, LineStyle::Dashed),
                Line::new("trace", series.traced, LineStyle::Markers),
                Line::new("schedule", series.planned, LineStyle::Plain),
                Line::new("circulant, schedule", series.circulant, LineStyle::Plain),
            ]),
        )
    };
    let distributions = shown.map_or_else(Vec::new, |seen| {
        vec![
            Line::distribution("trace", &seen.steps),
            Line::distribution("schedule", &seen.slacks.iter().map(|&slack| slack as f64).collect::<Vec<_>>()),
        ]
    });
    let spread = Panel {
        title: Some(format!("All blocks relayed among {SHOWN} members")),
        ..Panel::new(
            Axis::linear("slack (steps)").with_range(0.0, 7.0),
            Axis::linear("share of relayed blocks not above"),
            Content::Lines(distributions),
        )
    };
    let title = "Relays hold a block for almost two steps on average";
    let mut figure = Figure::new(title, vec![mean, spread]);
    figure.subtitle = Some(format!("Binomial pipeline, Sierra (40 Gbit/s), {BLOCKS} blocks of 1 MiB, steady steps"));
    figure
}

/// The results of one group size, in steady steps.
struct Measured {
    /// For each step, the sum and the number of the schedule's slacks.
    planned: Vec<(u64, u64)>,
    /// The slacks of the schedule.
    slacks: Vec<u64>,
    /// The slacks of the trace: from the start of a block's arrival to the start of its relay, in steps.
    steps: Vec<f64>,
    /// The mean time from the last byte of a block to the start of its relay, in ns.
    held_ns: f64,
    step_ns: f64,
}

fn measure(members: u32) -> Result<Measured, ExperimentError> {
    let algorithm = Algorithm::BinomialPipeline;
    let schedule = schedule_of(algorithm.clone(), members);
    let single = Single::new(PaperCluster::Sierra.model(), members, algorithm, u64::from(BLOCKS) * MIB, MIB);
    let recorded = single.run_recorded(|_| {})?.recorded;
    // Blocks between two members arrive in the order of the schedule.
    let mut carried: BTreeMap<(u32, u32), Vec<(u64, u64)>> = BTreeMap::new();
    for record in &recorded {
        if let Recorded::Carried { from, to, one_sided: false, begin_ns, arrival_ns, .. } = *record {
            carried.entry((from.0, to.0)).or_default().push((begin_ns, arrival_ns));
        }
    }
    let times = || carried.values().flatten();
    let began = times().map(|&(begin_ns, _)| begin_ns).min().unwrap_or(0);
    let ended = times().map(|&(_, arrival_ns)| arrival_ns).max().unwrap_or(0);
    let step_ns = (ended - began) as f64 / schedule.steps() as f64;
    let relays = steady(&schedule);
    let mut sent: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    let (mut steps, mut held_ns) = (Vec::new(), Vec::new());
    for relay in relays_of(&schedule) {
        let nth = sent.entry((relay.from, relay.to)).or_default();
        let (passed_on_ns, _) = carried[&(relay.from, relay.to)][*nth];
        *nth += 1;
        let (source, place) = relay.source;
        let (came_ns, arrived_ns) = carried[&(source, relay.from)][place];
        if is_steady(&schedule, relay.step) {
            steps.push((passed_on_ns - came_ns) as f64 / step_ns);
            held_ns.push(passed_on_ns as f64 - arrived_ns as f64);
        }
    }
    let mut planned: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for relay in &relays {
        let (sum, count) = planned.entry(relay.step).or_default();
        *sum += relay.slack();
        *count += 1;
    }
    Ok(Measured {
        planned: planned.into_values().collect(),
        slacks: relays.iter().map(RelayedBlock::slack).collect(),
        steps,
        held_ns: mean(held_ns.into_iter()),
        step_ns,
    })
}

/// Lists the blocks that members relay in the steady steps of a schedule.
fn steady(schedule: &Schedule) -> Vec<RelayedBlock> {
    relays_of(schedule).into_iter().filter(|relay| is_steady(schedule, relay.step)).collect()
}

/// Returns whether all members have a block to relay and the root still has new ones. With a power of two of members,
/// the last steps are steady too.
fn is_steady(schedule: &Schedule, step: u64) -> bool {
    let members = schedule.members();
    let until = if members.is_power_of_two() { schedule.steps() } else { u64::from(schedule.blocks().0) };
    (u64::from(members.next_power_of_two().ilog2())..until).contains(&step)
}

fn schedule_of(algorithm: Algorithm, members: u32) -> Schedule {
    Schedule::new(&algorithm, members, BlockCount(BLOCKS)).expect("the sizes are within the limits")
}

/// Lists the blocks that members relay, in step order for each pair of members.
fn relays_of(schedule: &Schedule) -> Vec<RelayedBlock> {
    let mut relays = Vec::new();
    for rank in 1..schedule.members() {
        let mut came_in = vec![(0, (0, 0)); schedule.blocks().0 as usize];
        let mut from: BTreeMap<u32, usize> = BTreeMap::new();
        for receive in schedule.receives(Rank(rank)) {
            let place = from.entry(receive.peer.0).or_default();
            came_in[receive.block.index()] = (receive.step.0, (receive.peer.0, *place));
            *place += 1;
        }
        for send in schedule.sends(Rank(rank)) {
            let (came_in, source) = came_in[send.block.index()];
            relays.push(RelayedBlock { step: send.step.0, from: rank, to: send.peer.0, came_in, source });
        }
    }
    relays
}

/// Returns the paper's average slack for a power of two of members.
fn formula(members: u32) -> f64 {
    let dimensions = f64::from(members.ilog2());
    2.0 * (1.0 - (dimensions - 1.0) / (f64::from(members) - 2.0))
}

/// Returns whether a mean is exactly the formula's: sum/count = 2(n − 1 − l)/(n − 2).
fn is_formula(members: u32, sum: u64, count: u64) -> bool {
    let (n, dimensions) = (u64::from(members), u64::from(members.ilog2()));
    sum * (n - 2) == count * 2 * (n - 1 - dimensions)
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedules_slack_is_the_formula_in_every_steady_step() {
        for (members, blocks) in [(4, 1), (8, 3), (16, 1), (32, 40), (128, 10)] {
            let schedule = Schedule::new(&Algorithm::BinomialPipeline, members, BlockCount(blocks)).unwrap();
            let mut steps: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
            for relay in steady(&schedule) {
                let (sum, count) = steps.entry(relay.step).or_default();
                *sum += relay.slack();
                *count += 1;
            }
            assert_eq!(steps.len() as u64, schedule.steps() - u64::from(members.ilog2()));
            for (step, (sum, count)) in steps {
                assert!(is_formula(members, sum, count), "{members} members, {blocks} blocks, step {step}");
                assert!((sum as f64 / count as f64 - formula(members)).abs() < 1e-12);
            }
        }
    }
}
