//! Figure 12: schedules executed by adapters against schedules executed by software, on Fractus.

use std::time::Duration;

use rdmc::Algorithm;
use rdmc_schedule::{BlockCount, Schedule};

use super::measure::{MIB, Single, VIRTUAL_LIMIT, in_parallel, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::deployment::DeploymentError;
use crate::model::{ClusterModel, DelayModel, Distribution, WaitMode};
use crate::offload::{Offload, SendOrder};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};
use crate::world::Simulation;

/// Bytes of the message.
const MESSAGE: u64 = 100_000_000;
/// Group sizes.
const MEMBERS: [u32; 9] = [2, 3, 4, 5, 6, 8, 10, 12, 16];
/// Number of runs for each mean of times with stalls.
const RUNS: u64 = 8;
/// One stall in about as many completions as a member takes for 256 blocks, as in the paper's Figure 5.
const STALLS: DelayModel =
    DelayModel { probability: 1.0 / 512.0, mean_ns: 100_000.0, distribution: Distribution::Exponential };

/// The party that relays blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RelayedBy {
    Software(WaitMode),
    /// Software that polls and gets no notice before the end of a block.
    WithoutNotices,
    /// Software that polls and posts without costs.
    FreePosts,
    /// Software whose posts and completions cost [`COSTLY_TIMES`] as much.
    Costly(WaitMode),
    Adapter(SendOrder),
}

const FREELY: RelayedBy = RelayedBy::Adapter(SendOrder::Free);
const IN_TURN: RelayedBy = RelayedBy::Adapter(SendOrder::InTurn);
const HYBRID: RelayedBy = RelayedBy::Software(WaitMode::Hybrid);
const EVENTS: RelayedBy = RelayedBy::Software(WaitMode::Event);
/// All of them, in the order of the table.
const RELAYS: [RelayedBy; 8] = [
    FREELY,
    IN_TURN,
    HYBRID,
    EVENTS,
    RelayedBy::WithoutNotices,
    RelayedBy::FreePosts,
    RelayedBy::Costly(WaitMode::Hybrid),
    RelayedBy::Costly(WaitMode::Event),
];
/// Factor of the costs of software at which adapters gain about as much as in the paper.
const COSTLY_TIMES: u64 = 6;

impl RelayedBy {
    fn name(self) -> &'static str {
        match self {
            Self::Software(WaitMode::Event) => "software, events",
            Self::Software(_) => "software, hybrid",
            Self::WithoutNotices => "software, hybrid, no notices",
            Self::FreePosts => "software, hybrid, free posts",
            Self::Costly(WaitMode::Event) => "software, events, costs times 6",
            Self::Costly(_) => "software, hybrid, costs times 6",
            Self::Adapter(SendOrder::Free) => "adapters",
            Self::Adapter(SendOrder::InTurn) => "adapters, in turn",
        }
    }
}

/// One point of the figure.
#[derive(Clone, Debug, PartialEq)]
struct Job {
    algorithm: Algorithm,
    members: u32,
    relay: RelayedBy,
    stalls: bool,
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let mut jobs = Vec::new();
    for &members in MEMBERS.iter().rev() {
        for algorithm in [Algorithm::Chain, Algorithm::BinomialPipeline] {
            for relay in RELAYS {
                for stalls in [false, true] {
                    jobs.push(Job { algorithm: algorithm.clone(), members, relay, stalls });
                }
            }
        }
    }
    let times = in_parallel(&jobs, |job| job.run(options.seed))?;
    let seconds = |algorithm: &Algorithm, members: u32, relay: RelayedBy, stalls: bool| {
        let wanted = Job { algorithm: algorithm.clone(), members, relay, stalls };
        let place = jobs.iter().position(|job| *job == wanted);
        place.map_or(f64::NAN, |place| times[place].as_secs_f64())
    };
    let mut table = Table::new(
        "",
        &["algorithm", "members", "relayed_by", "stalls", "time_ms", "bandwidth_gbps", "beyond_steps_percent"],
    );
    for (job, time) in jobs.iter().zip(&times) {
        table.push(vec![
            job.algorithm.to_string(),
            job.members.to_string(),
            job.relay.name().replace(", ", " "),
            job.stalls.to_string(),
            format!("{:.4}", time.as_secs_f64() * 1e3),
            format!("{:.3}", 0.8 / time.as_secs_f64()),
            format!("{:.3}", job.beyond_steps(time.as_secs_f64())),
        ]);
    }
    Ok(Report {
        name: "figure-12",
        title: "100 MB relayed by adapters and by software".into(),
        tables: vec![table],
        figure: figure(&seconds),
        findings: findings(&seconds),
    })
}

impl Job {
    /// Returns the time until the last member had the message; with stalls, the mean of several runs.
    fn run(&self, seed: u64) -> Result<Duration, ExperimentError> {
        let runs = if self.stalls { RUNS } else { 1 };
        let mut total = Duration::ZERO;
        for run in 0..runs {
            let mut model = PaperCluster::Fractus.model();
            model.nodes = self.members;
            model.host.delays = self.stalls.then_some(STALLS);
            total += self.run_once(model, seed + run)?;
        }
        Ok(total / u32::try_from(runs).unwrap_or(u32::MAX))
    }

    fn run_once(&self, mut model: ClusterModel, seed: u64) -> Result<Duration, ExperimentError> {
        match self.relay {
            RelayedBy::Software(completion) => model.host.completion = completion,
            RelayedBy::WithoutNotices => model.nic.notice_bytes = 0,
            RelayedBy::FreePosts => model.host.post_ns = 0,
            RelayedBy::Costly(completion) => {
                model.host.completion = completion;
                model.host.post_ns *= COSTLY_TIMES;
                model.host.completion_ns *= COSTLY_TIMES;
            }
            RelayedBy::Adapter(_) => {}
        }
        match self.relay {
            RelayedBy::Adapter(send_order) => {
                let simulation = Simulation::new(model, seed)?;
                let world = simulation.world().clone();
                let offload = Offload {
                    members: world.nodes().collect(),
                    algorithm: self.algorithm.clone(),
                    send_order,
                    bytes: MESSAGE,
                    block_size: MIB,
                };
                let times = simulation.run(VIRTUAL_LIMIT, async move { offload.run(&world).await })?;
                Ok(times.map_err(DeploymentError::from)?.latency())
            }
            _ => {
                let single = Single::new(model, self.members, self.algorithm.clone(), MESSAGE, MIB);
                Ok(Single { seed, ..single }.run()?.latency())
            }
        }
    }

    /// Returns the excess of a time over the schedule's steps at the port's rate, in percent.
    fn beyond_steps(&self, seconds: f64) -> f64 {
        let blocks = u32::try_from(MESSAGE.div_ceil(MIB)).unwrap_or(u32::MAX);
        let steps = Schedule::new(&self.algorithm, self.members, BlockCount(blocks)).map_or(0, |it| it.steps());
        let step = wire_time(&PaperCluster::Fractus.model(), MIB);
        let ideal = f64::from(u32::try_from(steps).unwrap_or(u32::MAX)) * step.as_secs_f64();
        (seconds / ideal - 1.0) * 1e2
    }
}

fn figure(seconds: &impl Fn(&Algorithm, u32, RelayedBy, bool) -> f64) -> Figure {
    let mut panels = Vec::new();
    for (algorithm, name) in [(Algorithm::Chain, "Chain"), (Algorithm::BinomialPipeline, "Binomial pipeline")] {
        for stalls in [false, true] {
            let relays: &[RelayedBy] = match algorithm {
                // A chain has one turn.
                Algorithm::Chain => &[FREELY, HYBRID, EVENTS],
                _ => &[FREELY, IN_TURN, HYBRID, EVENTS],
            };
            let lines = relays.iter().map(|&relay| {
                let point = |&n: &u32| (f64::from(n), 0.8 / seconds(&algorithm, n, relay, stalls));
                Line::new(relay.name(), MEMBERS.iter().map(point).collect(), LineStyle::Markers)
            });
            panels.push(Panel {
                title: Some(format!("{name}{}", if stalls { ", hosts stall sometimes" } else { "" })),
                ..Panel::new(Axis::linear("members"), Axis::linear("Gbit/s"), Content::Lines(lines.collect()))
            });
        }
    }
    let mut figure = Figure::new("100 MB relayed by adapters and by software", panels);
    figure.subtitle =
        Some("Fractus, blocks of 1 MiB; stalls of 100 µs on average, at one completion of 512, mean of 8 runs".into());
    figure
}

fn findings(seconds: &impl Fn(&Algorithm, u32, RelayedBy, bool) -> f64) -> Vec<Finding> {
    let most = MEMBERS[MEMBERS.len() - 1];
    let gains = |algorithm: &Algorithm, adapters: RelayedBy, software: RelayedBy, stalls: bool| -> Vec<f64> {
        let gain = |n: u32| seconds(algorithm, n, software, stalls) / seconds(algorithm, n, adapters, stalls);
        MEMBERS.iter().map(|&n| (gain(n) - 1.0) * 1e2).collect()
    };
    let count = MEMBERS.len();
    let last = |gains: &[f64]| gains.last().copied().unwrap_or(f64::NAN);
    let better = |gains: &[f64]| gains.iter().filter(|gain| **gain >= 0.0).count();
    let chain = |software, stalls| gains(&Algorithm::Chain, FREELY, software, stalls);
    let [hybrid, events, stalled, stalled_events] =
        [chain(HYBRID, false), chain(EVENTS, false), chain(HYBRID, true), chain(EVENTS, true)];
    let in_the_middle = MEMBERS.iter().zip(&hybrid).filter(|(members, _)| (5..=8).contains(*members));
    let middle = in_the_middle.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, greatest), (_, &gain)| {
        (gain.min(least), gain.max(greatest))
    });
    let pipeline = |software, stalls| gains(&Algorithm::BinomialPipeline, IN_TURN, software, stalls);
    let free =
        gains(&Algorithm::BinomialPipeline, IN_TURN, FREELY, false).into_iter().fold(f64::NEG_INFINITY, f64::max);
    vec![
        Finding {
            what: "chain: number of group sizes at which adapters are faster than the hybrid".into(),
            paper: "most".into(),
            here: format!("{} of {count}; with stalls {} of {count}", better(&hybrid), better(&stalled)),
            agrees: better(&hybrid).min(better(&stalled)) * 2 > count,
        },
        Finding {
            what: format!("chain, {most} members: gain over the hybrid"),
            paper: "about 5 %".into(),
            here: format!(
                "{:.2} %; {:.1} % if hosts stall; {:.2} % if posting is free; {:.1} % if software costs {COSTLY_TIMES} \
                 times as much",
                last(&hybrid),
                last(&stalled),
                last(&chain(RelayedBy::FreePosts, false)),
                last(&chain(RelayedBy::Costly(WaitMode::Hybrid), false)),
            ),
            agrees: (2.5..=10.0).contains(&last(&hybrid)),
        },
        Finding {
            what: "chain, 5 to 8 members: gain over the hybrid".into(),
            paper: "none: software is faster".into(),
            here: format!("{:.2} to {:.2} %", middle.0, middle.1),
            agrees: middle.1 <= 0.0,
        },
        Finding {
            what: format!("chain, {most} members: gain over events"),
            paper: "about 5 %".into(),
            here: format!(
                "{:.2} %; {:.1} % if hosts stall; {:.1} % if software costs {COSTLY_TIMES} times as much",
                last(&events),
                last(&stalled_events),
                last(&chain(RelayedBy::Costly(WaitMode::Event), false)),
            ),
            agrees: (2.5..=10.0).contains(&last(&events)),
        },
        Finding::beyond(
            format!("binomial pipeline, {most} members: adapters that take turns against software"),
            format!(
                "gain {:.1} % over the hybrid, {:.1} % without notices before the end of blocks, {:.1} % over events; \
                 if hosts stall {:.1} %, {:.1} %, {:.1} %",
                last(&pipeline(HYBRID, false)),
                last(&pipeline(RelayedBy::WithoutNotices, false)),
                last(&pipeline(EVENTS, false)),
                last(&pipeline(HYBRID, true)),
                last(&pipeline(RelayedBy::WithoutNotices, true)),
                last(&pipeline(EVENTS, true))
            ),
        ),
        Finding::beyond(
            "binomial pipeline: adapters without turns (without ready_for_block)",
            format!(
                "take up to {free:.0} % longer than with turns: members fall out of step; ready_for_block also keeps \
                 them in step"
            ),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_of_a_chain_cost_their_operations_and_the_latency_alone() {
        let job = Job { algorithm: Algorithm::Chain, members: 3, relay: FREELY, stalls: false };
        let beyond = job.beyond_steps(job.run(0).unwrap().as_secs_f64());
        // The last block is shorter. Two hops take 1.5 µs; preparing a send behind a block costs nothing.
        assert!((-0.7..0.1).contains(&beyond), "{beyond}");
    }

    #[test]
    fn stalls_of_hosts_hardly_touch_adapters() {
        let run = |relay, stalls| {
            let job = Job { algorithm: Algorithm::Chain, members: 6, relay, stalls };
            job.run(0).unwrap().as_secs_f64()
        };
        let lost = |relay| run(relay, true) / run(relay, false) - 1.0;
        assert!(lost(FREELY) < 0.001 && lost(HYBRID) > 0.001, "{} {}", lost(FREELY), lost(HYBRID));
    }
}
