//! Distance: what the algorithms take as hosts are further apart, and what the cost model chooses.

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

impl DistanceCase {
    /// Returns the time of the message's bytes on a port.
    pub fn wire_time(&self) -> Duration {
        Duration::from_nanos(self.bytes * 8_000 / self.port_mbps)
    }

    /// Returns the bound for the choice: `ratio` times the bytes' time on a port, and for each doubling of the members
    /// two latencies and two times of 64 KiB, and a round trip.
    pub fn bound(&self, ratio: f64) -> Duration {
        let (latency, chunk) =
            (Duration::from_nanos(self.latency_ns), Duration::from_nanos((64 << 10) * 8_000 / self.port_mbps));
        let doublings = self.members.next_power_of_two().ilog2();
        self.wire_time().mul_f64(ratio) + 2 * doublings * (latency + chunk) + 2 * latency
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
pub const RATES_MBPS: [u64; 4] = [1_000, 10_000, 25_000, 100_000];
/// Latencies from port to port in ns.
pub const LATENCIES_NS: [u64; 9] = [1_300, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 25_000_000];
/// The members of the figure, and the size of its message.
const MEMBERS: u32 = 8;
const MESSAGE: u64 = 256 * MIB;

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
    let auto: Vec<_> = RATES_MBPS.into_iter().flat_map(|port_mbps| of(&None, port_mbps)).collect();
    let worst = auto.iter().map(|(case, outcome)| outcome.time.as_secs_f64() / case.bound(1.08).as_secs_f64());
    let mispredicted =
        auto.iter().map(|(_, outcome)| (outcome.plan.time.as_secs_f64() / outcome.time.as_secs_f64() - 1.0).abs());
    let (worst, mispredicted) = (worst.fold(0.0, f64::max), mispredicted.fold(0.0, f64::max));
    let findings = vec![
        Finding::beyond(
            "the chosen algorithm against 1.08 times the bytes' time and the latencies of its depth",
            format!("at most {worst:.2} times that"),
        ),
        Finding::beyond(
            "prediction of the cost model for what it chooses",
            format!("at most {:.0} % off", mispredicted * 1e2),
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
