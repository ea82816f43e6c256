//! Distance: what the algorithms take as hosts are further apart, and what the cost model chooses.

use std::ops::RangeInclusive;
use std::time::Duration;

use rdmc::Algorithm;
use rdmc_schedule::{CostModel, Plan};

use super::measure::{MIB, Single, in_parallel};
use super::{ExperimentError, Finding, Options, Report, Table};
use crate::model::ClusterModel;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// One point of the grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DistanceCase {
    /// The members, the root included.
    pub members: u32,
    /// Rate of a port in Mbit/s.
    pub port_mbps: u64,
    /// From port to port in ns.
    pub latency_ns: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
}

/// What a point of the grid takes, with the predictions.
#[derive(Clone, Debug)]
pub struct DistanceOutcome {
    /// The algorithm and the block size, and the predicted time.
    pub plan: Plan,
    /// The time in the simulation, from the send until the last member has the message.
    pub time: Duration,
}

impl DistanceOutcome {
    /// Returns the predicted time over the time that was taken.
    pub fn prediction(&self) -> f64 {
        self.plan.time.as_secs_f64() / self.time.as_secs_f64()
    }
}

impl DistanceCase {
    /// Returns the time of the message's bytes on a port.
    pub fn wire_time(&self) -> Duration {
        Duration::from_nanos(self.bytes * 8_000 / self.port_mbps)
    }

    fn round_trip(&self) -> Duration {
        Duration::from_nanos(2 * self.latency_ns)
    }

    /// Returns the bound for the choice: `ratio` times the bytes' time on a port, and for each doubling of the members
    /// two latencies and two times of 64 KiB, and a round trip.
    pub fn bound(&self, ratio: f64) -> Duration {
        let (latency, chunk) =
            (Duration::from_nanos(self.latency_ns), Duration::from_nanos((64 << 10) * 8_000 / self.port_mbps));
        let doublings = self.members.next_power_of_two().ilog2();
        self.wire_time().mul_f64(ratio) + 2 * doublings * (latency + chunk) + self.round_trip()
    }

    /// Returns the cost model of the modelled hosts.
    pub fn costs(&self) -> CostModel {
        let model = self.model();
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = self.port_mbps as f64 * 125e3;
        let per_block = Duration::from_nanos(model.nic.operation_ns);
        let software = Duration::from_nanos(model.host.post_ns + 2 * model.host.completion_ns);
        CostModel::network(rate, per_block, Duration::from_nanos(self.latency_ns) + software)
    }

    /// Plays the message with what the cost model chooses, or what is given.
    ///
    /// # Errors
    /// The algorithm cannot serve so many members, or the simulation fails.
    pub fn play(
        &self,
        algorithm: Option<&Algorithm>,
        block_size: Option<u32>,
    ) -> Result<DistanceOutcome, ExperimentError> {
        let planned = self.costs().complete(algorithm, block_size, self.members, self.bytes);
        let plan = planned.map_err(crate::deployment::DeploymentError::from)?;
        let single =
            Single::new(self.model(), self.members, plan.algorithm.clone(), self.bytes, plan.block_size.into());
        Ok(DistanceOutcome { time: single.run()?.latency(), plan })
    }

    fn model(&self) -> ClusterModel {
        let mut model = ClusterModel::new(self.members, self.port_mbps, self.latency_ns);
        model.host.post_ns = 150;
        model.host.completion_ns = 250;
        model.nic.operation_ns = 100;
        model.nic.notice_bytes = 32 << 10;
        model.control.latency_ns = self.latency_ns;
        model
    }
}

/// The algorithms that are compared.
const ALGORITHMS: [Algorithm; 3] = [Algorithm::BinomialPipeline, Algorithm::Chain, Algorithm::TwoTree];
/// Rates of ports in Mbit/s, and the distances that are played for all of them in ns.
const RATES_MBPS: [u64; 4] = [1_000, 10_000, 25_000, 100_000];
/// Latencies from port to port in ns.
const LATENCIES_NS: [u64; 9] = [1_300, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 25_000_000];
/// What the choice may take, in the bytes' time, beside the latencies of its depth.
pub const BOUND: f64 = 1.08;
/// The same for the binomial pipeline, and how many round trips the bytes take at least then.
pub const BOUND_PIPELINE: f64 = 1.10;
const ROUND_TRIPS: u32 = 50;
/// What the cost model may predict, in the time that it takes.
pub const PREDICTED: RangeInclusive<f64> = 0.9..=1.1;
/// The members of the figure, and the size of its message.
const MEMBERS: u32 = 8;
const MESSAGE: u64 = 256 * MIB;

/// What the cost model is judged by, besides the figure: part of it has other numbers of members and sizes.
fn judged() -> impl Iterator<Item = DistanceCase> {
    let grid = |members, rates: &'static [u64], latencies: &'static [u64], bytes: [u64; 2]| {
        let paths = rates.iter().flat_map(move |&rate| latencies.iter().map(move |&latency| (rate, latency)));
        paths.flat_map(move |(port_mbps, latency_ns)| {
            bytes.map(|bytes| DistanceCase { members, port_mbps, latency_ns, bytes })
        })
    };
    let sizes = [16 * MIB, 256 * MIB];
    let all = [8, 13, 16].into_iter().flat_map(move |members| grid(members, &RATES_MBPS, &LATENCIES_NS, sizes));
    // These take long to play.
    let many = grid(64, &[10_000, 100_000], &[1_300, 50_000, 25_000_000], sizes);
    let long = DistanceCase { members: 8, port_mbps: 100_000, latency_ns: 25_000_000, bytes: 4096 * MIB };
    all.chain(many).chain([long])
}

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let choices: Vec<Option<Algorithm>> = ALGORITHMS.into_iter().map(Some).chain([None]).collect();
    let jobs: Vec<(Option<Algorithm>, DistanceCase)> = choices
        .iter()
        .flat_map(|choice| RATES_MBPS.into_iter().map(move |port_mbps| (choice, port_mbps)))
        .flat_map(|(choice, port_mbps)| {
            LATENCIES_NS.into_iter().map(move |latency_ns| {
                (choice.clone(), DistanceCase { members: MEMBERS, port_mbps, latency_ns, bytes: MESSAGE })
            })
        })
        .collect();
    let outcomes = in_parallel(&jobs, |(choice, case)| case.play(choice.as_ref(), None))?;
    let mut table =
        Table::new("", &["port_mbps", "latency_us", "choice", "algorithm", "block_kib", "time_over_wire", "predicted"]);
    for ((choice, case), outcome) in jobs.iter().zip(&outcomes) {
        table.push(vec![
            case.port_mbps.to_string(),
            format!("{:.1}", us(case.latency_ns)),
            choice.as_ref().map_or("auto".into(), ToString::to_string),
            outcome.plan.algorithm.to_string(),
            (outcome.plan.block_size >> 10).to_string(),
            format!("{:.3}", over_wire(case, outcome.time)),
            format!("{:.3}", over_wire(case, outcome.plan.time)),
        ]);
    }
    let of = |wanted: &Option<Algorithm>, port_mbps: u64| -> Vec<(&DistanceCase, &DistanceOutcome)> {
        let its = |(choice, case): &(Option<Algorithm>, DistanceCase)| choice == wanted && case.port_mbps == port_mbps;
        let found = jobs.iter().zip(&outcomes).filter(|(job, _)| its(job));
        found.map(|((_, case), outcome)| (case, outcome)).collect()
    };
    let panels = RATES_MBPS.map(|port_mbps| {
        let lines = choices.iter().map(|choice| {
            let points = of(choice, port_mbps)
                .into_iter()
                .map(|(case, outcome)| (us(case.latency_ns), over_wire(case, outcome.time)));
            let name = choice.as_ref().map_or("chosen".into(), |algorithm| algorithm.to_string().replace('-', " "));
            Line::new(name, points.collect(), if choice.is_none() { LineStyle::Dashed } else { LineStyle::Markers })
        });
        Panel {
            title: Some(format!("{} Gbit/s", port_mbps / 1000)),
            ..Panel::new(
                Axis::log10("latency (µs)"),
                Axis::log10("time over bytes' time"),
                Content::Lines(lines.collect()),
            )
        }
    });
    let mut figure = Figure::new("256 MiB to seven hosts at a distance", panels.into());
    figure.subtitle = Some("each algorithm in the blocks that the cost model chooses for it".into());
    let in_figure = |case: &DistanceCase| case.members == MEMBERS && case.bytes == MESSAGE;
    let besides: Vec<DistanceCase> = judged().filter(|case| !in_figure(case)).collect();
    let outcomes_besides = in_parallel(&besides, |case| case.play(None, None))?;
    let auto = RATES_MBPS.into_iter().flat_map(|port_mbps| of(&None, port_mbps));
    let auto: Vec<_> = auto.chain(besides.iter().zip(&outcomes_besides)).collect();
    let ratios = auto.iter().map(|(case, outcome)| outcome.time.as_secs_f64() / case.bound(BOUND).as_secs_f64());
    let predicted = auto.iter().map(|(_, outcome)| outcome.prediction());
    let worst = ratios.fold(0.0, f64::max);
    let (least, most) =
        predicted.fold((f64::MAX, 0.0), |(least, most): (f64, f64), ratio| (least.min(ratio), most.max(ratio)));
    let pipeline = RATES_MBPS.into_iter().flat_map(|port_mbps| of(&Some(Algorithm::BinomialPipeline), port_mbps));
    let pipeline: Vec<f64> = pipeline
        .filter(|(case, _)| case.wire_time() >= case.round_trip() * ROUND_TRIPS)
        .map(|(case, outcome)| outcome.time.as_secs_f64() / case.bound(BOUND_PIPELINE).as_secs_f64())
        .collect();
    let worst_of_pipeline = pipeline.iter().copied().fold(0.0, f64::max);
    let findings = vec![
        Finding::target(
            "the binomial pipeline against 1.10 times the bytes' time and the latencies of its depth, 8 members, where \
             the bytes take 50 round trips or more",
            format!("at most {worst_of_pipeline:.2} times that, in {} cases", pipeline.len()),
            worst_of_pipeline <= 1.0,
        ),
        Finding::target(
            "the chosen algorithm against 1.08 times the bytes' time and the latencies of its depth",
            format!("at most {worst:.2} times that, in {} cases of 8, 13, 16 and 64 members", auto.len()),
            worst <= 1.0,
        ),
        Finding::target(
            "prediction of the cost model for what it chooses",
            format!("{least:.2} to {most:.2} times what it takes"),
            least >= *PREDICTED.start() && most <= *PREDICTED.end(),
        ),
    ];
    Ok(Report {
        name: "distance",
        title: "256 MiB to seven hosts, from 1.3 µs to 25 ms apart".into(),
        tables: vec![table],
        figure,
        findings,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a time to be displayed")]
fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn over_wire(case: &DistanceCase, time: Duration) -> f64 {
    time.as_secs_f64() / case.wire_time().as_secs_f64()
}
