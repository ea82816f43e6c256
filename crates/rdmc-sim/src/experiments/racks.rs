//! Racks behind oversubscribed uplinks, and racks that are far apart: flat schedules against hybrids of two levels (DSN
//! §4.3).

use rdmc::{Algorithm, Hybrid, Racks, Spine};

use super::measure::{MIB, Single, in_parallel, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::model::{ClusterModel, RackModel};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel, Reference};
use crate::random::Random;

/// Nodes in a rack.
const RACK: u32 = 8;
/// Numbers of racks in the groups.
const COUNTS: [u32; 4] = [2, 4, 8, 16];
/// Oversubscription: the rates of a rack's ports together, as multiples of its uplink.
const OVERSUBSCRIBED: [u64; 4] = [1, 2, 4, 8];
/// Blocks of the message.
const BLOCKS: u32 = 64;
/// Latency between racks, besides that of a port.
const UPLINK_NS: u64 = 500;
/// The same of racks that are far apart, of which there are two; their uplinks have the full rate.
const FAR_NS: [u64; 4] = [UPLINK_NS, 50_000, 1_000_000, 25_000_000];
/// Blocks of the message to them.
const FAR_BLOCKS: u32 = 1024;
/// The schedules for them.
const FAR_KINDS: [ScheduleKind; 6] = [
    ScheduleKind::Flat,
    ScheduleKind::TwoTree,
    ScheduleKind::Hybrid(Spine::Chain),
    ScheduleKind::Hybrid(Spine::BinomialPipeline),
    ScheduleKind::Hybrid(Spine::Cascade),
    ScheduleKind::Hybrid(Spine::TwoTree),
];

/// The placement of ranks in racks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    /// Rack by rack, in the order of ranks.
    Aligned,
    /// At random.
    Random,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScheduleKind {
    /// The binomial pipeline.
    Flat,
    TwoTree,
    Hybrid(Spine),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job {
    racks: u32,
    oversubscribed: u64,
    between_ns: u64,
    placement: Placement,
    kind: ScheduleKind,
    blocks: u32,
    seed: u64,
}

/// The times of all jobs, as multiples of the least time that ports allow.
struct Times(Vec<(Job, f64)>);

impl Times {
    fn of(&self, racks: u32, oversubscribed: u64, placement: Placement, kind: ScheduleKind) -> f64 {
        self.find(|job| {
            (job.racks, job.oversubscribed, job.placement, job.kind) == (racks, oversubscribed, placement, kind)
                && job.blocks == BLOCKS
        })
    }

    /// Returns the time to two racks that are far apart.
    fn far(&self, between_ns: u64, kind: ScheduleKind) -> f64 {
        self.find(|job| (job.between_ns, job.kind, job.blocks) == (between_ns, kind, FAR_BLOCKS))
    }

    fn find(&self, wanted: impl Fn(&Job) -> bool) -> f64 {
        self.0.iter().find(|(job, _)| wanted(job)).map_or(f64::NAN, |&(_, time)| time)
    }

    /// Returns the speed of the hybrid as a multiple of the flat pipeline's.
    fn speed_up(&self, racks: u32, oversubscribed: u64, placement: Placement, spine: Spine) -> f64 {
        let flat = self.of(racks, oversubscribed, placement, ScheduleKind::Flat);
        flat / self.of(racks, oversubscribed, placement, ScheduleKind::Hybrid(spine))
    }
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let mut jobs = Vec::new();
    // The largest groups first: they take the longest.
    for racks in COUNTS.into_iter().rev() {
        for oversubscribed in OVERSUBSCRIBED {
            for placement in [Placement::Random, Placement::Aligned] {
                let kinds = std::iter::once(ScheduleKind::Flat).chain(Spine::ALL.map(ScheduleKind::Hybrid));
                let (between_ns, blocks, seed) = (UPLINK_NS, BLOCKS, options.seed);
                let job = |kind| Job { racks, oversubscribed, between_ns, placement, kind, blocks, seed };
                jobs.extend(kinds.map(job));
            }
        }
    }
    for between_ns in FAR_NS {
        jobs.extend(FAR_KINDS.map(|kind| {
            let (placement, blocks, seed) = (Placement::Random, FAR_BLOCKS, options.seed);
            Job { racks: 2, oversubscribed: 1, between_ns, placement, kind, blocks, seed }
        }));
    }
    let times = in_parallel(&jobs, measure)?;
    let times = Times(jobs.into_iter().zip(times).collect());
    let columns = [
        "racks",
        "members",
        "oversubscription",
        "placement",
        "flat_ms",
        "hybrid_chain_ms",
        "hybrid_pipeline_ms",
        "hybrid_cascade_ms",
        "hybrid_two_tree_ms",
        "speed_up_chain",
        "speed_up_pipeline",
        "speed_up_cascade",
        "speed_up_two_tree",
    ];
    let mut table = Table::new("", &columns);
    for racks in COUNTS {
        for oversubscribed in OVERSUBSCRIBED {
            for placement in [Placement::Aligned, Placement::Random] {
                let ms = |kind| times.of(racks, oversubscribed, placement, kind) * bound_ms(racks, BLOCKS);
                let speed_up = |spine| times.speed_up(racks, oversubscribed, placement, spine);
                let mut row = vec![
                    racks.to_string(),
                    (racks * RACK).to_string(),
                    oversubscribed.to_string(),
                    format!("{placement:?}").to_lowercase(),
                    format!("{:.3}", ms(ScheduleKind::Flat)),
                ];
                row.extend(Spine::ALL.map(|spine| format!("{:.3}", ms(ScheduleKind::Hybrid(spine)))));
                row.extend(Spine::ALL.map(|spine| format!("{:.3}", speed_up(spine))));
                table.push(row);
            }
        }
    }
    let tables = vec![table, far_table(&times)];
    let (findings, figure) = (findings(&times), figure(&times));
    Ok(Report { name: "racks", title: "Racks behind slow uplinks".into(), tables, figure, findings })
}

fn far_table(times: &Times) -> Table {
    let columns =
        ["between_us", "flat", "two_tree", "hybrid_chain", "hybrid_pipeline", "hybrid_cascade", "hybrid_two_tree"];
    let mut table = Table::new("far", &columns);
    for between_ns in FAR_NS {
        let cells = FAR_KINDS.map(|kind| format!("{:.3}", times.far(between_ns, kind)));
        table.push(std::iter::once(format!("{:.1}", between_ns as f64 / 1e3)).chain(cells).collect());
    }
    table
}

fn findings(times: &Times) -> Vec<Finding> {
    let range = |values: &[f64]| {
        values.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), &value| (least.min(value), most.max(value)))
    };
    let speed_ups = |oversubscribed, placement| {
        range(&COUNTS.map(|racks| times.speed_up(racks, oversubscribed, placement, Spine::Cascade)))
    };
    let text = |(least, most): (f64, f64)| format!("{least:.2} to {most:.2}");
    let (random, aligned) = (speed_ups(8, Placement::Random), speed_ups(8, Placement::Aligned));
    let slow_uplinks = OVERSUBSCRIBED.into_iter().skip(1);
    let off = slow_uplinks.flat_map(|oversubscribed| {
        COUNTS.map(|racks| {
            times.of(racks, oversubscribed, Placement::Aligned, ScheduleKind::Flat) / stated(racks, oversubscribed)
        })
    });
    let off = range(&off.collect::<Vec<_>>());
    let price = |spine| range(&COUNTS.map(|racks| times.of(racks, 1, Placement::Aligned, ScheduleKind::Hybrid(spine))));
    let (leaders, cascade) = (price(Spine::BinomialPipeline), price(Spine::Cascade));
    let spines = range(&COUNTS.map(|racks| {
        let time = |spine| times.of(racks, 8, Placement::Random, ScheduleKind::Hybrid(spine));
        time(Spine::Chain) / time(Spine::BinomialPipeline)
    }));
    let trees = ScheduleKind::Hybrid(Spine::TwoTree);
    let by_trees = |oversubscribed| {
        range(&COUNTS.map(|racks| times.speed_up(racks, oversubscribed, Placement::Random, Spine::TwoTree)))
    };
    let trees_far = range(&FAR_NS.map(|between_ns| times.far(between_ns, trees)));
    let cascade_far = range(&FAR_NS.map(|between_ns| times.far(between_ns, ScheduleKind::Hybrid(Spine::Cascade))));
    let trees_near = range(&OVERSUBSCRIBED.map(|oversubscribed| {
        let time = |kind| times.of(8, oversubscribed, Placement::Random, kind);
        time(trees) / time(ScheduleKind::Hybrid(Spine::Cascade))
    }));
    vec![
        Finding {
            what: "hybrid (cascade) against flat pipeline on 2 to 16 racks".into(),
            paper: "better over slow uplinks: leaders first, then inside each rack (not measured)".into(),
            here: format!(
                "8:1: {} times as fast with members placed at random, {} with ranks rack by rack; 4:1: {} and {}; \
                 2:1: {} and {}",
                text(random),
                text(aligned),
                text(speed_ups(4, Placement::Random)),
                text(speed_ups(4, Placement::Aligned)),
                text(speed_ups(2, Placement::Random)),
                text(speed_ups(2, Placement::Aligned)),
            ),
            agrees: random.0 > 1.0 && aligned.0 > 1.0,
        },
        Finding {
            what: "price of the hybrid: its time against the least time that ports allow, uplinks of full rate".into(),
            paper: "by its step count, a leader sends a block on each level in one step (not measured)".into(),
            here: format!(
                "{} times the least time with a pipeline among leaders, whose ports carry the blocks of both levels; \
                 {} with the cascade, whose ports send one block a step",
                text(leaders),
                text(cascade)
            ),
            agrees: leaders.1 < 1.1,
        },
        Finding::beyond(
            "flat pipeline with ranks rack by rack and uplinks of c:1, against (3 + c·log₂ racks)/(3 + log₂ racks) \
             block times a step",
            format!("{} times that", text(off)),
        ),
        Finding::beyond(
            "hybrid (two trees) against flat pipeline on 2 to 16 racks, members placed at random",
            format!(
                "8:1: {} times as fast; 4:1: {}; 2:1: {}; 1:1: {}",
                text(by_trees(8)),
                text(by_trees(4)),
                text(by_trees(2)),
                text(by_trees(1)),
            ),
        ),
        Finding::beyond(
            "two racks up to 25 ms apart, two trees on both levels and the cascade; multiples of the least that ports \
             allow",
            format!("two trees take {} times that, the cascade {}", text(trees_far), text(cascade_far)),
        ),
        Finding::beyond(
            "two trees on both levels against the cascade, 8 racks behind uplinks of 1:1 to 8:1",
            format!("{} times the time", text(trees_near)),
        ),
        Finding {
            what: "chain as spine against binomial pipeline as spine, 8:1".into(),
            paper: "either; by count the chain fills in racks − 1 steps, the pipeline in log₂ racks".into(),
            here: format!("the chain takes {:.3} to {:.3} times as long", spines.0, spines.1),
            agrees: spines.0 > 0.99 && spines.1 < 1.2,
        },
    ]
}

/// Returns the flat pipeline's time with ranks rack by rack, as a multiple of the least time that ports allow: steps
/// across racks take longer by the oversubscription.
fn stated(racks: u32, oversubscribed: u64) -> f64 {
    let (inside, across) = (f64::from(RACK.ilog2()), f64::from(racks.ilog2()));
    (inside + across * oversubscribed as f64) / (inside + across)
}

fn figure(times: &Times) -> Figure {
    let axis = || Axis::log2("racks of 8 members");
    let speed_up = |oversubscribed: &u64| {
        let speed_up = |racks| times.speed_up(racks, *oversubscribed, Placement::Random, Spine::TwoTree);
        let points = COUNTS.map(|racks| (f64::from(racks), speed_up(racks)));
        Line::new(format!("{oversubscribed}:1"), points.to_vec(), LineStyle::Markers)
    };
    let speed_ups = Panel {
        title: Some("Members placed at random".into()),
        references: vec![Reference::new(1.0, "")],
        ..Panel::new(
            axis(),
            Axis::linear("speed-up by two trees (times)").with_range(0.0, 7.0),
            Content::Lines(OVERSUBSCRIBED.iter().rev().map(speed_up).collect()),
        )
    };
    let line = |name: &str, placement, kind| {
        let point = |oversubscribed| (oversubscribed as f64, times.of(8, oversubscribed, placement, kind));
        Line::new(name, OVERSUBSCRIBED.map(point).to_vec(), LineStyle::Markers)
    };
    let costs = Panel {
        title: Some("8 racks".into()),
        ..Panel::new(
            Axis::log2("oversubscription of the uplinks (:1)"),
            Axis::linear("time (multiples of the least that ports allow)").with_range(0.0, 8.0),
            Content::Lines(vec![
                line("flat, placed at random", Placement::Random, ScheduleKind::Flat),
                line("flat, rack by rack", Placement::Aligned, ScheduleKind::Flat),
                line(
                    "hybrid, pipeline among leaders",
                    Placement::Random,
                    ScheduleKind::Hybrid(Spine::BinomialPipeline),
                ),
                line("hybrid, cascade", Placement::Random, ScheduleKind::Hybrid(Spine::Cascade)),
                line("hybrid, two trees", Placement::Random, ScheduleKind::Hybrid(Spine::TwoTree)),
            ]),
        )
    };
    let spines = |name: &str, spine| {
        let point = |racks| (f64::from(racks), times.of(racks, 8, Placement::Random, ScheduleKind::Hybrid(spine)));
        Line::new(name, COUNTS.map(point).to_vec(), LineStyle::Markers)
    };
    let spines = Panel {
        title: Some("Hybrid, uplinks of 8:1".into()),
        references: vec![Reference::new(2.0, "")],
        ..Panel::new(
            axis(),
            Axis::linear("time (multiples of the least that ports allow)").with_range(0.5, 2.5),
            Content::Lines(vec![
                spines("chain among leaders", Spine::Chain),
                spines("pipeline among leaders", Spine::BinomialPipeline),
                spines("cascade", Spine::Cascade),
                spines("two trees", Spine::TwoTree),
            ]),
        )
    };
    let far = |name: &str, kind| {
        let point = |between_ns| (between_ns as f64 / 1e3, times.far(between_ns, kind));
        Line::new(name, FAR_NS.map(point).to_vec(), LineStyle::Markers)
    };
    let far = Panel {
        title: Some(format!("2 racks far apart, {FAR_BLOCKS} blocks")),
        references: vec![Reference::new(1.0, "")],
        ..Panel::new(
            Axis::log10("latency between racks (µs)"),
            Axis::log10("time (multiples of the least that ports allow)"),
            Content::Lines(vec![
                far("binomial pipeline", ScheduleKind::Flat),
                far("two trees", ScheduleKind::TwoTree),
                far("hybrid, cascade", ScheduleKind::Hybrid(Spine::Cascade)),
                far("hybrid, two trees", ScheduleKind::Hybrid(Spine::TwoTree)),
            ]),
        )
    };
    let panels = vec![costs, spines, far, speed_ups];
    let mut figure = Figure::new("Two trees by racks cross narrow uplinks once, and bear distance", panels);
    figure.subtitle =
        Some(format!("{BLOCKS} blocks of 1 MiB, ports of 40 Gbit/s, racks of {RACK}; speed-up over the flat pipeline"));
    figure
}

fn measure(job: &Job) -> Result<f64, ExperimentError> {
    let members = job.racks * RACK;
    let mut rack_of: Vec<u32> = (0..members).map(|rank| rank / RACK).collect();
    if job.placement == Placement::Random {
        Random::new(job.seed).shuffle(&mut rack_of);
    }
    let algorithm = match job.kind {
        ScheduleKind::Flat => Algorithm::BinomialPipeline,
        ScheduleKind::TwoTree => Algorithm::TwoTree,
        ScheduleKind::Hybrid(spine) => {
            let racks = Racks::from_assignment(&rack_of).expect("there are members, and not too many");
            Hybrid::new(racks, spine).into()
        }
    };
    let mut model = model();
    let uplink_mbps = u64::from(RACK) * model.port_mbps / job.oversubscribed;
    model.racks = Some(RackModel { size: RACK, uplink_mbps, latency_ns: job.between_ns, rack_of });
    // The other end of a group may be in another rack.
    model.control.latency_ns += job.between_ns - UPLINK_NS;
    let times = Single::new(model, members, algorithm, u64::from(job.blocks) * MIB, MIB).run()?;
    Ok(times.latency().as_secs_f64() * 1e3 / bound_ms(job.racks, job.blocks))
}

/// Returns the least time that ports allow: (k − 1 + ⌈log₂ n⌉) block times.
fn bound_ms(racks: u32, blocks: u32) -> f64 {
    let steps = blocks - 1 + (racks * RACK).next_power_of_two().ilog2();
    f64::from(steps) * wire_time(&model(), MIB).as_secs_f64() * 1e3
}

fn model() -> ClusterModel {
    PaperCluster::Sierra.model()
}
