//! Table 1 and Figure 5: where the time of a transfer goes, on Stampede in a group of four.
//!
//! All times come from the record of the network. The member farthest from the root gets its first block through one
//! relayer. After that its port receives blocks, or the member waits.
//!
//! The runtime copies the first block in pieces and handles completions between them. Copies take no virtual time in
//! the model, so this experiment occupies the receivers' software with a copy of the paper's duration instead.

use std::time::Duration;

use rdmc::Algorithm;
use rdmc_fabric::Timestamp;

use super::measure::{MIB, Measurement, Single, hop_time, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::log::Recorded;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};
use crate::simulation::NodeIndex;
use crate::world::World;

/// Members of the group.
const MEMBERS: u32 = 4;
/// The root.
const ROOT: NodeIndex = NodeIndex(0);
/// The member two hops away from the root.
const FARTHEST: NodeIndex = NodeIndex(3);
/// Duration of the relayer's stall: the paper observed one of about this length.
const STALL: Duration = Duration::from_micros(100);
/// The step of the stall.
const STALL_AT_STEP: usize = 180;
/// Time from the beginning of the stall to the arrival of a block, in ns: the relayer can neither relay the block nor
/// grant the next one.
const STALL_AHEAD_NS: u64 = 10_000;
/// The rows of the paper's Table 1, in µs.
const TABLE_1: [(&str, u64); 7] = [
    ("remote setup", 11),
    ("remote block transfers", 461),
    ("local setup", 4),
    ("local block transfers", 60_944),
    ("waiting", 449),
    ("copy time", COPY_US),
    ("total", 62_084),
];
/// Relative difference from a row of Table 1 that still agrees.
const TOLERANCE: f64 = 0.2;
/// Duration of the copy of a block in Table 1, in µs.
const COPY_US: u64 = 215;
/// Number of pieces of a copy: the runtime copies 128 KiB before it handles completions.
const COPY_PIECES: u32 = 8;
/// Interval at which a copy looks for the first block.
const LOOK_INTERVAL: Duration = Duration::from_micros(1);

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Stampede.model();
    let single = Single::new(model.clone(), MEMBERS, Algorithm::BinomialPipeline, 256 * MIB, MIB);
    let calm = single.run_recorded(|_| {})?;
    // Both runs are the same until then, so this is just before the relayer has to act.
    let mut arrivals: Vec<u64> = blocks(&calm, |_, to| to == FARTHEST).iter().map(|block| block.arrival_ns).collect();
    arrivals.sort_unstable();
    let at = Timestamp::from_nanos(arrivals[STALL_AT_STEP].saturating_sub(STALL_AHEAD_NS));
    let stalled = single.run_recorded(move |world| {
        let clock = world.clone();
        world.spawn(Box::pin(async move {
            clock.sleep_until(at).await;
            clock.hold_up(FARTHEST, STALL);
        }));
    })?;

    let copying = single.run_recorded(|world| copy_first_blocks(world, COPY_PIECES))?;
    let in_one_piece = single.run_recorded(|world| copy_first_blocks(world, 1))?;
    let parts = TimeParts { copy: added(&copying, &calm), ..TimeParts::of(&calm) };
    let mut table = Table::new("table-1", &["part", "here_us", "paper_us"]);
    for ((part, paper), ns) in TABLE_1.into_iter().zip(parts.rows()) {
        table.push(vec![part.to_owned(), format!("{:.1}", us(ns)), paper.to_string()]);
    }
    let mut steps = Table::new("steps", &["step", "relayer_us", "root_us"]);
    let (relayer, root) = (step_times(&stalled, |_, to| to == FARTHEST), step_times(&stalled, |from, _| from == ROOT));
    for (step, (relayer, root)) in relayer.iter().zip(&root).enumerate() {
        steps.push(vec![(step + 1).to_string(), format!("{relayer:.2}"), format!("{root:.2}")]);
    }

    let overhead = 1.0 - us(parts.remote_transfers + parts.local_transfers) / us(parts.total());
    let block_us = wire_time(&model, MIB).as_secs_f64() * 1e6;
    let longest = |times: &[f64]| times.iter().copied().fold(0.0, f64::max) - block_us;
    let stall_added = stalled.times.latency().saturating_sub(calm.times.latency());
    let mut findings = vec![
        Finding {
            what: "share of the time that is not block transfers, at the member farthest from the root".into(),
            paper: "around 1 % (1.1 % by Table 1)".into(),
            here: format!("{:.2} %", overhead * 1e2),
            agrees: overhead <= 0.0105,
        },
        Finding {
            what: "longest step minus a usual one, with one stall of 100 µs at the relayer".into(),
            paper: "about 100 µs at the relayer; the root waits in the next step".into(),
            here: format!(
                "{:.0} µs at the relayer, {:.0} µs at the root; {:.0} µs added to the transfer",
                longest(&relayer),
                longest(&root),
                stall_added.as_secs_f64() * 1e6
            ),
            agrees: (50.0..=150.0).contains(&longest(&relayer)),
        },
    ];
    findings.extend(TABLE_1.into_iter().zip(parts.rows()).map(|((part, paper), ns)| {
        let finding = row_finding(part, paper, us(ns));
        match part {
            "copy time" => Finding { here: copies(&finding.here, us(added(&in_one_piece, &calm))), ..finding },
            _ => finding,
        }
    }));
    let line = |name: &str, times: &[f64]| {
        let points = times.iter().zip(1..).map(|(&us, step)| (f64::from(step), us)).collect();
        Line::new(name, points, LineStyle::Plain)
    };
    let lines = vec![line("relayer, blocks received", &relayer), line("root, blocks sent", &root)];
    let panel = Panel::new(Axis::linear("step"), Axis::linear("time of the step (µs)"), Content::Lines(lines));
    let mut figure = Figure::new("Where the time goes: one stall of 100 µs", vec![panel]);
    figure.subtitle = Some("Stampede, 40 Gbit/s, four members, 256 MiB in blocks of 1 MiB".into());
    let title = "where the time of a transfer of 256 MiB goes".into();
    Ok(Report { name: "figure-5", title, tables: vec![table, steps], figure, findings })
}

/// Compares a row of Table 1.
fn row_finding(part: &str, paper: u64, here: f64) -> Finding {
    #[expect(clippy::cast_precision_loss, reason = "a time to be read")]
    let off = here / paper as f64 - 1.0;
    Finding {
        what: format!("Table 1: {part}"),
        paper: format!("{paper} µs"),
        here: format!("{here:.1} µs"),
        agrees: off.abs() <= TOLERANCE,
    }
}

/// Describes by how much copies lengthen the transfer.
fn copies(here: &str, one_piece_us: f64) -> String {
    format!(
        "{here} longer with copies of {COPY_US} µs in {COPY_PIECES} pieces beside the transfers; {one_piece_us:.1} µs \
         with copies in one piece"
    )
}

/// Returns by how much longer one transfer takes than another, in ns.
fn added(longer: &Measurement, shorter: &Measurement) -> u64 {
    TimeParts::of(longer).total() - TimeParts::of(shorter).total()
}

/// Keeps the software of every receiver busy with the copy of its first block, from the moment it has the block.
fn copy_first_blocks(world: &World, pieces: u32) {
    for member in world.nodes().filter(|&node| node != ROOT) {
        let clock = world.clone();
        world.spawn(Box::pin(async move {
            let (_, before) = clock.carried_bytes(member);
            while clock.carried_bytes(member).1 < before + MIB {
                clock.sleep(LOOK_INTERVAL).await;
            }
            clock.sleep(hop_time(clock.model())).await;
            let piece = Duration::from_micros(COPY_US) / pieces;
            for _ in 0..pieces {
                clock.hold_up(member, piece);
                clock.sleep(piece).await;
            }
        }));
    }
}

/// The parts of the time until the farthest member has the message, in ns, by the paper's names.
#[derive(Debug, Default)]
struct TimeParts {
    /// Before the root and the relayer sent the member's first block.
    remote_setup: u64,
    /// While that block was on the network, twice.
    remote_transfers: u64,
    /// From its arrival until the member granted the next blocks.
    local_setup: u64,
    /// While blocks arrived.
    local_transfers: u64,
    /// While no block arrived, until the member's software had the last one.
    waiting: u64,
    /// By which copies of the first block lengthen the time.
    copy: u64,
}

impl TimeParts {
    fn of(measurement: &Measurement) -> Self {
        let began_ns = measurement.times.began.as_nanos();
        let mut incoming = blocks(measurement, |_, to| to == FARTHEST);
        incoming.sort_unstable_by_key(|block| block.arrival_ns);
        let first = incoming[0];
        // The same block on its way from the root to the relayer.
        let from_root = blocks(measurement, |from, to| from == ROOT && to == first.from);
        let relayed =
            from_root.iter().filter(|block| block.arrival_ns <= first.begin_ns).max_by_key(|block| block.end_ns);
        let ready_ns = grants(measurement, FARTHEST).find(|&begin_ns| begin_ns >= first.arrival_ns);
        let ready_ns = ready_ns.expect("a member grants blocks when it knows the message's size");
        let on_the_way = relayed.map_or(0, CarriedBlock::duration_ns) + first.duration_ns();
        let mut parts = Self {
            remote_transfers: on_the_way,
            remote_setup: first.arrival_ns - began_ns - on_the_way,
            local_setup: ready_ns - first.arrival_ns,
            ..Self::default()
        };
        let mut busy_until = ready_ns;
        for block in &incoming[1..] {
            let begin_ns = (block.arrival_ns - block.duration_ns()).max(busy_until);
            parts.waiting += begin_ns - busy_until;
            parts.local_transfers += block.arrival_ns - begin_ns;
            busy_until = block.arrival_ns;
        }
        let delivered = measurement.times.delivered[FARTHEST.index() - 1].as_nanos();
        parts.waiting += delivered - busy_until;
        parts
    }

    fn total(&self) -> u64 {
        self.remote_setup + self.remote_transfers + self.local_setup + self.local_transfers + self.waiting + self.copy
    }

    /// Returns the values in the order of [`TABLE_1`].
    fn rows(&self) -> [u64; 7] {
        [
            self.remote_setup,
            self.remote_transfers,
            self.local_setup,
            self.local_transfers,
            self.waiting,
            self.copy,
            self.total(),
        ]
    }
}

/// A block on the network.
#[derive(Clone, Copy, Debug)]
struct CarriedBlock {
    from: NodeIndex,
    begin_ns: u64,
    end_ns: u64,
    arrival_ns: u64,
}

impl CarriedBlock {
    fn duration_ns(&self) -> u64 {
        self.end_ns - self.begin_ns
    }
}

/// Lists the times at which a node's one-sided writes began, in ns: these are its grants.
fn grants(measurement: &Measurement, node: NodeIndex) -> impl Iterator<Item = u64> {
    measurement.recorded.iter().filter_map(move |event| match *event {
        Recorded::Carried { from, one_sided: true, begin_ns, .. } if from == node => Some(begin_ns),
        _ => None,
    })
}

/// Lists the blocks between nodes that `wanted` accepts.
fn blocks(measurement: &Measurement, wanted: impl Fn(NodeIndex, NodeIndex) -> bool) -> Vec<CarriedBlock> {
    let block = |what: &Recorded| match *what {
        Recorded::Carried { from, to, one_sided: false, begin_ns, end_ns, arrival_ns, .. } if wanted(from, to) => {
            Some(CarriedBlock { from, begin_ns, end_ns, arrival_ns })
        }
        _ => None,
    };
    measurement.recorded.iter().filter_map(block).collect()
}

/// Returns the times between the ends of successive blocks, in µs.
fn step_times(measurement: &Measurement, wanted: impl Fn(NodeIndex, NodeIndex) -> bool) -> Vec<f64> {
    let mut ends: Vec<u64> = blocks(measurement, wanted).iter().map(|block| block.end_ns).collect();
    ends.sort_unstable();
    ends.windows(2).map(|pair| us(pair[1] - pair[0])).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a time to be read")]
fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}
