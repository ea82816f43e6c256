//! A group with small messages beside a group with bulk traffic, over the same ports.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rdmc::Algorithm;

use super::super::measure::{MIB, VIRTUAL_LIMIT, deploy, in_parallel};
use super::super::{ExperimentError, Finding, PaperCluster, Table};
use crate::deployment::{DeploymentError, FormedGroup, GroupPlan};
use crate::plot::{Axis, Content, Line, LineStyle, Panel, Reference};
use crate::random::Random;
use crate::simulation::NodeIndex;
use crate::world::{Simulation, World};

/// The traffic of the bulk group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bulk {
    /// Block size in bytes.
    block_size: u64,
    /// Message size in bytes.
    message: u64,
    /// Share of the time in which it sends, in percent. After each message it sleeps for the rest.
    share: u64,
}

/// The results of the two groups.
#[derive(Clone, Debug)]
struct GroupsMeasurement {
    /// Latencies of the small messages until the last member, in µs, in ascending order.
    latencies_us: Vec<f64>,
    /// The bulk group's rate at the root, in Gbit/s.
    bulk_gbps: f64,
}

impl GroupsMeasurement {
    fn median_us(&self) -> f64 {
        self.quantile_us(50)
    }

    fn mean_us(&self) -> f64 {
        self.latencies_us.iter().sum::<f64>() / self.latencies_us.len() as f64
    }

    /// Returns the latency that `percent` of the messages do not exceed.
    fn quantile_us(&self, percent: usize) -> f64 {
        let place = (self.latencies_us.len() * percent / 100).min(self.latencies_us.len().saturating_sub(1));
        self.latencies_us.get(place).copied().unwrap_or(f64::NAN)
    }
}

/// Multicasts small messages among all nodes by an algorithm, beside bulk or alone.
fn beside(algorithm: &Algorithm, bulk: Option<Bulk>, seed: u64) -> Result<GroupsMeasurement, ExperimentError> {
    let mut model = PaperCluster::Kbnets.model();
    model.payload_scale = SMALL;
    let simulation = Simulation::new(model, seed)?;
    let (world, algorithm) = (simulation.world().clone(), algorithm.clone());
    let played = simulation.run(VIRTUAL_LIMIT, async move {
        let deployment = deploy(&world).await?;
        let members: Vec<NodeIndex> = world.nodes().collect();
        let small = GroupPlan {
            id: 1,
            members: members.clone(),
            algorithm,
            block_size: SMALL,
            delivery: rdmc::Delivery::Immediate,
            ring: None,
        };
        let small = deployment.form(small).await?;
        let block_size = bulk.map_or(SMALL, |bulk| bulk.block_size);
        let large = GroupPlan {
            id: 2,
            members,
            algorithm: Algorithm::BinomialPipeline,
            block_size,
            delivery: rdmc::Delivery::Immediate,
            ring: None,
        };
        let large = deployment.form(large).await?;
        let (stop, moved) = (AtomicBool::new(false), AtomicU64::new(0));
        let began = world.now();
        let (latencies_us, _) = futures::try_join!(
            async {
                let latencies_us = send_small(&world, &small, seed).await;
                stop.store(true, Ordering::Relaxed);
                latencies_us
            },
            async {
                match bulk {
                    Some(bulk) => move_bulk(&world, &large, bulk, &stop, &moved).await,
                    None => Ok(()),
                }
            },
        )?;
        let elapsed = world.now().since(began).as_secs_f64();
        let bulk_gbps = moved.into_inner() as f64 * 8.0 / elapsed / 1e9;
        futures::try_join!(small.close(), large.close())?;
        Ok::<_, DeploymentError>(GroupsMeasurement { latencies_us, bulk_gbps })
    });
    Ok(played??)
}

/// Sends small messages one by one with pauses; returns their latencies.
async fn send_small(world: &World, group: &FormedGroup, seed: u64) -> Result<Vec<f64>, DeploymentError> {
    let mut random = Random::new(seed);
    let mut latencies_us = Vec::new();
    for _ in 0..MESSAGES {
        world.sleep(Duration::from_nanos(random.within(100_000..=500_000))).await;
        latencies_us.push(group.multicast(SMALL).await?.latency().as_secs_f64() * 1e6);
    }
    latencies_us.sort_by(f64::total_cmp);
    Ok(latencies_us)
}

/// Sends large messages until `stop` is set.
async fn move_bulk(
    world: &World,
    group: &FormedGroup,
    bulk: Bulk,
    stop: &AtomicBool,
    moved: &AtomicU64,
) -> Result<(), DeploymentError> {
    while !stop.load(Ordering::Relaxed) {
        let took = group.multicast(bulk.message).await?.latency();
        moved.fetch_add(bulk.message, Ordering::Relaxed);
        let pause = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX) * (100 - bulk.share) / bulk.share;
        world.sleep(Duration::from_nanos(pause)).await;
    }
    Ok(())
}

/// Bytes of a small message, which is one block.
const SMALL: u64 = 1024;
/// Number of small messages.
const MESSAGES: usize = 150;

/// The latencies of small messages beside bulk, by the settings of the bulk group.
pub(super) struct SmallBesideBulk {
    idle: GroupsMeasurement,
    settings: Vec<(Bulk, GroupsMeasurement)>,
    /// Small messages that the root sends to each member itself, alone and beside bulk in blocks of 1 MiB.
    sequential: [GroupsMeasurement; 2],
}

const KIB: u64 = 1 << 10;
/// Block sizes of the bulk group.
const BLOCK_SIZES: [u64; 6] = [16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB];
/// Message size in the comparison of block sizes.
const LONG: u64 = 32768 * KIB;
/// Message size and block size in the comparison of pauses.
const SHORT: (u64, u64) = (1024 * KIB, 128 * KIB);
/// Shares of the time in which the bulk group sends, in percent.
const SHARES: [u64; 5] = [100, 75, 50, 25, 10];
/// Largest accepted latency of a small message, in multiples of the idle latency.
const BOUND: f64 = 2.0;

impl SmallBesideBulk {
    pub(super) fn measure(seed: u64) -> Result<Self, ExperimentError> {
        let mut jobs = vec![None];
        for block_size in BLOCK_SIZES {
            jobs.extend([100, 50].map(|share| Some(Bulk { block_size, message: LONG, share })));
        }
        let (message, block_size) = SHORT;
        jobs.extend(SHARES.map(|share| Some(Bulk { block_size, message, share })));
        let pipeline = Algorithm::BinomialPipeline;
        let mut measured = in_parallel(&jobs, |&bulk| beside(&pipeline, bulk, seed))?.into_iter();
        let idle = measured.next().expect("the first job has no bulk");
        let sequential = [
            beside(&Algorithm::Sequential, None, seed)?,
            beside(&Algorithm::Sequential, Some(Bulk { block_size: MIB, message: LONG, share: 100 }), seed)?,
        ];
        Ok(Self { idle, settings: jobs.into_iter().flatten().zip(measured).collect(), sequential })
    }

    /// Returns the latency that `percent` of the messages do not exceed, as a multiple of the idle median.
    fn slower(&self, beside: &GroupsMeasurement, percent: usize) -> f64 {
        beside.quantile_us(percent) / self.idle.median_us()
    }

    fn of(&self, message: u64, share: u64) -> impl Iterator<Item = &(Bulk, GroupsMeasurement)> {
        self.settings.iter().filter(move |(bulk, _)| bulk.message == message && bulk.share == share)
    }

    pub(super) fn table(&self) -> Table {
        let columns = [
            "small_algorithm",
            "bulk_block_kib",
            "bulk_message_kib",
            "bulk_share_of_time_percent",
            "median_us",
            "mean_us",
            "p99_us",
            "median_over_idle",
            "p99_over_idle",
            "bulk_gbps",
        ];
        let mut table = Table::new("groups", &columns);
        let mut push = |algorithm: Algorithm, bulk: Option<&Bulk>, beside: &GroupsMeasurement, idle_us: f64| {
            let mut row = vec![algorithm.to_string()];
            row.extend(
                bulk.map_or([0; 3], |bulk| [bulk.block_size / KIB, bulk.message / KIB, bulk.share])
                    .map(|it| it.to_string()),
            );
            let times = [beside.median_us(), beside.mean_us(), beside.quantile_us(99)];
            row.extend(times.map(|us| format!("{us:.3}")));
            row.extend([50, 99].map(|percent| format!("{:.3}", beside.quantile_us(percent) / idle_us)));
            row.push(format!("{:.2}", beside.bulk_gbps));
            table.push(row);
        };
        let idle_us = self.idle.median_us();
        push(Algorithm::BinomialPipeline, None, &self.idle, idle_us);
        for (bulk, beside) in &self.settings {
            push(Algorithm::BinomialPipeline, Some(bulk), beside, idle_us);
        }
        let [idle, beside] = &self.sequential;
        let bulk = Bulk { block_size: MIB, message: LONG, share: 100 };
        push(Algorithm::Sequential, None, idle, idle.median_us());
        push(Algorithm::Sequential, Some(&bulk), beside, idle.median_us());
        table
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let sequential = &self.sequential;
        let name = |bulk: &Bulk| format!("{} KiB", bulk.block_size / KIB);
        let unpaced: Vec<_> = self.of(LONG, 100).map(|(bulk, beside)| (bulk, self.slower(beside, 50))).collect();
        let all: Vec<String> = unpaced.iter().map(|(bulk, slower)| format!("{}: {slower:.1}", name(bulk))).collect();
        let keeping: Vec<String> =
            unpaced.iter().filter(|(_, slower)| *slower <= BOUND).map(|(bulk, _)| name(bulk)).collect();
        let paced: Vec<String> = SHARES
            .into_iter()
            .flat_map(|share| self.of(SHORT.0, share))
            .map(|(bulk, beside)| {
                format!("{} %: {:.1} ({:.1})", bulk.share, self.slower(beside, 50), self.slower(beside, 99))
            })
            .collect();
        let kept = SHARES
            .into_iter()
            .find(|&share| self.of(SHORT.0, share).all(|(_, beside)| self.slower(beside, 50) <= BOUND));
        vec![
            Finding {
                what: "multicasts of 1 KiB to 8 members beside bulk of the same members: median latency".into(),
                paper: "two flows: about 2 times the idle latency, for all sizes of the elephant's messages".into(),
                here: format!(
                    "{} times the idle {:.1} µs, by the bulk group's block size; at most twice with {}",
                    all.join(", "),
                    self.idle.median_us(),
                    list(&keeping)
                ),
                agrees: unpaced.iter().all(|(_, slower)| (1.5..=3.0).contains(slower)),
            },
            Finding::beyond(
                "the same beside bulk messages of 1 MiB that are sent in a share of the time",
                format!(
                    "median (99th percentile) in multiples of the idle latency: {}; median at most twice {}",
                    paced.join(", "),
                    kept.map_or_else(|| "never".to_owned(), |share| format!("from {share} % down"))
                ),
            ),
            Finding::beyond(
                "small messages by the sequential algorithm, beside bulk in blocks of 1 MiB",
                format!(
                    "{:.1} µs idle; {:.1} µs beside bulk, {:.2} times that and {:.2} times the pipeline's idle \
                     latency: a send to another neighbour waits until the send before it leaves, so the waits in the \
                     adapter add up",
                    sequential[0].median_us(),
                    sequential[1].median_us(),
                    sequential[1].median_us() / sequential[0].median_us(),
                    sequential[1].median_us() / self.idle.median_us()
                ),
            ),
        ]
    }

    pub(super) fn sizes_panel(&self) -> Panel {
        let line = |name: &str, share, percent| {
            let points = self
                .of(LONG, share)
                .map(|(bulk, beside)| ((bulk.block_size / KIB) as f64, self.slower(beside, percent)));
            Line::new(name, points.collect(), LineStyle::Markers)
        };
        Panel {
            title: Some("Multicast of 1 KiB to 8 members beside bulk".into()),
            references: vec![Reference::new(BOUND, "twice the idle latency")],
            ..Panel::new(
                Axis::log2("block of the bulk group (KiB)"),
                Axis::linear("latency (multiples of the idle median)").with_range(0.0, 3.0),
                Content::Lines(vec![
                    line("99th percentile", 100, 99),
                    line("median", 100, 50),
                    line("median, bulk half the time", 50, 50),
                ]),
            )
        }
    }

    pub(super) fn pacing_panel(&self) -> Panel {
        let line = |name: &str, percent| {
            let points = SHARES.into_iter().flat_map(|share| self.of(SHORT.0, share));
            let points = points.map(|(_, beside)| (beside.bulk_gbps, self.slower(beside, percent)));
            Line::new(name, points.collect(), LineStyle::Markers)
        };
        Panel {
            title: Some("Bulk messages of 1 MiB with pauses".into()),
            references: vec![Reference::new(BOUND, "twice the idle latency")],
            ..Panel::new(
                Axis::linear("bandwidth of the bulk group (Gbit/s)"),
                Axis::linear("latency (multiples of the idle median)"),
                Content::Lines(vec![line("99th percentile", 99), line("median", 50)]),
            )
        }
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
