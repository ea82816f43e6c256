//! Figure 9: the writes of Cosmos's replication layer on Fractus.
//!
//! Node 0 writes to three of fifteen hosts at a time. The 455 groups are formed beforehand. As in the authors' driver:
//! - writes start in their order;
//! - at most sixteen writes are open, one in each group;
//! - a write that waits for its group holds up the writes behind it.
//!
//! Latency counts from the start of a write until its last host has it. The driver's confirmation to the writer, one
//! latency of 1.3 µs, is left out.

use std::sync::Arc;

use rdmc::Algorithm;
use rdmc_fabric::Timestamp;
use tokio::sync::{Mutex, Semaphore, mpsc};

use super::groups::form_all;
use super::measure::{MIB, VIRTUAL_LIMIT, in_parallel};
use super::workload::{self, HOSTS, Write};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::deployment::scale_for;
use crate::deployment::{DeploymentError, FormedGroup, GroupPlan, MulticastTimes};
use crate::model::ClusterModel;
use crate::plot::{Axis, BarSeries, Bars, Content, Figure, Line, Panel, Reference};
use crate::simulation::NodeIndex;
use crate::world::{Simulation, World};

/// Number of drawn writes.
const WRITES: usize = 1_000;
/// Limit of open writes.
const OPEN_MAX: usize = 16;
/// Rate of drawn writes, as a multiple of the rate at which the writer's port can send each once.
const OVERLOAD: f64 = 1.2;
/// Last latency on the axis of the paper's figure, in ms.
const AXIS_MS: f64 = 300.0;
const ALGORITHMS: [(&str, Algorithm); 3] = [
    ("sequential", Algorithm::Sequential),
    ("binomial tree", Algorithm::BinomialTree),
    ("binomial pipeline", Algorithm::BinomialPipeline),
];

/// The latencies of the writes with one algorithm.
struct Replayed {
    /// The latency of each write, in ms, in ascending order.
    latencies_ms: Vec<f64>,
    /// Bytes of all writes, counted once, over the time until the last write ended, in Gbit/s.
    gbps: f64,
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Fractus.model();
    let apart_ns = workload::MEAN * 8e3 / f64::from(u32::try_from(model.port_mbps).unwrap_or(u32::MAX)) / OVERLOAD;
    let (writes, source) = match &options.workload {
        Some(path) => (workload::read(path)?, "from a trace"),
        None => (workload::sample(WRITES, apart_ns, options.seed), "drawn"),
    };
    let replayed = in_parallel(&ALGORITHMS, |(_, algorithm)| replay(&model, algorithm, &writes))?;
    let mut table = Table::new("", &["algorithm", "writes", "mean_ms", "median_ms", "p99_ms", "aggregate_gbps"]);
    for ((name, _), replayed) in ALGORITHMS.iter().zip(&replayed) {
        table.push(vec![
            (*name).to_owned(),
            replayed.latencies_ms.len().to_string(),
            format!("{:.3}", replayed.mean_ms()),
            format!("{:.3}", replayed.quantile_ms(0.5)),
            format!("{:.3}", replayed.quantile_ms(0.99)),
            format!("{:.2}", replayed.gbps),
        ]);
    }
    let mut distribution = Table::new("distribution", &["share", "sequential_ms", "tree_ms", "pipeline_ms"]);
    for percent in 1..=100 {
        let share = f64::from(percent) / 1e2;
        let values = replayed.iter().map(|replayed| format!("{:.3}", replayed.quantile_ms(share)));
        distribution.push(std::iter::once(format!("{share:.2}")).chain(values).collect());
    }
    let title = format!("{} writes to three of {HOSTS} hosts, {source}", writes.len());
    Ok(Report {
        name: "figure-9",
        figure: figure(&replayed, &title),
        title,
        tables: vec![table, distribution],
        findings: findings(&replayed, &model),
    })
}

impl Replayed {
    fn mean_ms(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let count = self.latencies_ms.len().max(1) as f64;
        self.latencies_ms.iter().sum::<f64>() / count
    }

    /// Returns the smallest latency that this share of the writes does not exceed.
    fn quantile_ms(&self, share: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let rank = libm::ceil(share * self.latencies_ms.len() as f64);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank is a small count")]
        let place = (rank as usize).saturating_sub(1);
        self.latencies_ms.get(place).copied().unwrap_or(f64::NAN)
    }
}

/// Replays the writes with one algorithm.
fn replay(model: &ClusterModel, algorithm: &Algorithm, writes: &[Write]) -> Result<Replayed, ExperimentError> {
    let mut model = model.clone();
    model.nodes = HOSTS + 1;
    model.payload_scale = scale_for(&[MIB], u64::MAX);
    let simulation = Simulation::new(model, 1)?;
    let bytes: u64 = writes.iter().map(|write| write.bytes).sum();
    let (world, algorithm, writes) = (simulation.world().clone(), algorithm.clone(), writes.to_vec());
    let played = simulation.run(VIRTUAL_LIMIT, async move {
        let triples = workload::triples();
        let plans = (1..).zip(&triples).map(|(id, triple)| GroupPlan {
            id,
            members: [0].iter().chain(triple).map(|&node| NodeIndex(node)).collect(),
            algorithm: algorithm.clone(),
            block_size: MIB,
            delivery: rdmc::Delivery::Immediate,
            ring: None,
        });
        let (_deployment, groups) = form_all(&world, plans.collect()).await?;
        let groups: Vec<_> = groups.into_iter().map(|group| Arc::new(Mutex::new(group))).collect();
        let began = world.now();
        let times = write_all(&world, &triples, &groups, &writes).await?;
        Ok::<_, DeploymentError>((began, times))
    });
    let (began, times) = played??;
    let mut latencies_ms: Vec<f64> = times.iter().map(|times| times.latency().as_secs_f64() * 1e3).collect();
    latencies_ms.sort_unstable_by(f64::total_cmp);
    let end = times.iter().flat_map(|times| times.delivered.iter().copied()).max().unwrap_or(began);
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let bits = bytes as f64 * 8.0;
    Ok(Replayed { latencies_ms, gbps: bits / 1e9 / end.since(began).as_secs_f64() })
}

/// Starts the writes like the authors' driver; returns when all have ended.
async fn write_all(
    world: &World,
    triples: &[[u32; 3]],
    groups: &[Arc<Mutex<FormedGroup>>],
    writes: &[Write],
) -> Result<Vec<MulticastTimes>, DeploymentError> {
    let open = Arc::new(Semaphore::new(OPEN_MAX));
    let (ended, mut ends) = mpsc::unbounded_channel();
    let began = world.now();
    for write in writes {
        world.sleep_until(Timestamp::from_nanos(began.as_nanos().saturating_add(write.at_ns))).await;
        let room = open.clone().acquire_owned().await.expect("it is never closed");
        let place = triples.binary_search(&write.targets).expect("any three hosts have a group");
        let group = groups[place].clone().lock_owned().await;
        let (bytes, ended) = (write.bytes, ended.clone());
        world.spawn(Box::pin(async move {
            let times = group.multicast(bytes).await;
            drop((group, room));
            // After a failure the receiver may be gone.
            let _ = ended.send(times);
        }));
    }
    drop(ended);
    let mut times = Vec::new();
    while let Some(outcome) = ends.recv().await {
        times.push(outcome?);
    }
    Ok(times)
}

fn figure(replayed: &[Replayed], title: &str) -> Figure {
    let lines = ALGORITHMS.iter().zip(replayed).map(|((name, _), replayed)| {
        let distribution = Line::distribution(*name, &replayed.latencies_ms);
        let points = distribution.points.into_iter().map(|(ms, share)| (ms, share * 1e2)).collect();
        Line { points, ..distribution }
    });
    let shares = Panel {
        title: Some("Share of the writes by latency".into()),
        ..Panel::new(
            Axis::log10("latency (ms)"),
            Axis::linear("writes (%)").with_range(0.0, 100.0),
            Content::Lines(lines.collect()),
        )
    };
    let series = BarSeries::new("", replayed.iter().map(|replayed| replayed.gbps).collect());
    let categories = ALGORITHMS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let aggregate = Panel {
        title: Some("Data replicated".into()),
        references: vec![Reference::new(93.0, "paper, pipeline: 93")],
        ..Panel::new(
            Axis::linear(""),
            Axis::linear("Gbit/s, each object counted once").with_range(0.0, 100.0),
            Content::Bars(Bars { categories, series: vec![series], stacked: false }),
        )
    };
    let mut figure = Figure::new("Replication of objects to three hosts", vec![shares, aggregate]);
    figure.subtitle = Some(format!("Fractus, {title}; at most {OPEN_MAX} open at the one writer"));
    figure
}

fn findings(replayed: &[Replayed], model: &ClusterModel) -> Vec<Finding> {
    let [sequential, tree, pipeline] = replayed else { return Vec::new() };
    let port_gbps = f64::from(u32::try_from(model.port_mbps).unwrap_or(u32::MAX)) / 1e3;
    let (to_tree, to_sequential) = (tree.mean_ms() / pipeline.mean_ms(), sequential.mean_ms() / pipeline.mean_ms());
    let of = |replayed: &Replayed| {
        let (mean, median, p99) = (replayed.mean_ms(), replayed.quantile_ms(0.5), replayed.quantile_ms(0.99));
        format!("mean {mean:.1} ms, median {median:.1} ms, 99 % {p99:.1} ms")
    };
    let petabytes = pipeline.gbps * 86_400.0 / 8.0 / 1e6;
    vec![
        Finding {
            what: "mean latency of the binomial tree against the binomial pipeline".into(),
            paper: "almost 2 times".into(),
            here: format!("{to_tree:.2} times: {}; {}", of(tree), of(pipeline)),
            agrees: (1.6..=2.3).contains(&to_tree),
        },
        Finding {
            what: "mean latency of the sequential algorithm against the binomial pipeline".into(),
            paper: "around 3 times".into(),
            here: format!("{to_sequential:.2} times: {}", of(sequential)),
            agrees: (2.5..=3.5).contains(&to_sequential),
        },
        Finding {
            what: "latency that 99 % of the writes by the sequential algorithm do not exceed".into(),
            paper: format!("the axis of Figure 9 ends at {AXIS_MS:.0} ms (draft)"),
            here: format!(
                "{:.0} ms; binomial pipeline {:.0} ms",
                sequential.quantile_ms(0.99),
                pipeline.quantile_ms(0.99)
            ),
            agrees: sequential.quantile_ms(0.99) <= AXIS_MS,
        },
        Finding {
            what: "data replicated with the binomial pipeline, each object counted once".into(),
            paper: "about 93 Gbit/s, a petabyte a day".into(),
            here: format!(
                "{:.1} Gbit/s of {port_gbps:.0}, {petabytes:.2} PB a day; tree {:.1}, sequential {:.1}",
                pipeline.gbps, tree.gbps, sequential.gbps
            ),
            agrees: (0.85 * 93.0..=1.1 * 93.0).contains(&pipeline.gbps),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_value_that_was_seen() {
        let replayed = Replayed { latencies_ms: vec![1.0, 2.0, 4.0, 9.0], gbps: 0.0 };
        assert_eq!([0.25, 0.26, 0.5, 0.99, 1.0].map(|share| replayed.quantile_ms(share)), [1.0, 2.0, 2.0, 9.0, 9.0]);
        assert_eq!(replayed.mean_ms(), 4.0);
    }

    #[test]
    fn writes_wait_for_their_group_and_are_all_carried_out() {
        let write = |at_ns, targets| Write { at_ns, bytes: 4 * MIB, targets };
        // When all groups are formed, and have measured the round trips.
        let at_ns = 1_000_000_000;
        let writes = [write(at_ns, [1, 2, 3]), write(at_ns, [1, 2, 3]), write(at_ns, [4, 5, 6])];
        let replayed = replay(&PaperCluster::Fractus.model(), &Algorithm::BinomialPipeline, &writes).unwrap();
        assert_eq!(replayed.latencies_ms.len(), 3);
        // The second write waits for the first. The third one shares the port with the second.
        let [first, second, third] = [0, 1, 2].map(|place| replayed.latencies_ms[place]);
        assert!((1.6..2.4).contains(&(second / first)) && third < 1.1 * second, "{:?}", replayed.latencies_ms);
    }
}
