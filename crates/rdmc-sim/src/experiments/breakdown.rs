//! Table 1 and Figure 5: where the time of a transfer goes, on Stampede in a group of four.
//!
//! Everything is read from the record of the network. The member farthest from the root gets its first block over one
//! relayer; from then on its port is busy with blocks, or it waits.

use std::time::Duration;

use rdmc::Algorithm;
use rdmc_fabric::Timestamp;

use super::measure::{MIB, Measurement, Single, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::log::Recorded;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};
use crate::simulation::NodeIndex;

/// Members of the group.
const MEMBERS: u32 = 4;
/// The root.
const ROOT: NodeIndex = NodeIndex(0);
/// The member two hops away from the root.
const FARTHEST: NodeIndex = NodeIndex(3);
/// How long the relayer's software is held up: the paper saw a stall of about this length.
const STALL: Duration = Duration::from_micros(100);
/// In which step it is.
const STALL_AT_STEP: usize = 180;
/// How long before a block has come in the software is held up, in ns: it cannot pass it on, nor ask for the next one.
const STALL_AHEAD_NS: u64 = 10_000;

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Stampede.model();
    let single = Single::new(model.clone(), MEMBERS, Algorithm::BinomialPipeline, 256 * MIB, MIB);
    let calm = single.run_recorded(|_| {})?;
    // Until then both runs are the same, so this is when the relayer's software is about to be needed.
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

    let parts = TimeParts::of(&calm);
    let mut table = Table::new("table-1", &["part", "here_us", "paper_us"]);
    let paper = [11, 461, 4, 60_944, 449, 215, 62_084];
    for ((part, ns), paper) in parts.rows().into_iter().zip(paper) {
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
    let added = stalled.times.latency().saturating_sub(calm.times.latency());
    let findings = vec![
        Finding {
            what: "share of the time that is not block transfers, at the member farthest from the root".into(),
            paper: "about 1 % (1.1 % by its table)".into(),
            here: format!("{:.2} %", overhead * 1e2),
            agrees: overhead <= 0.0105,
        },
        Finding {
            what: "longest step above the usual, with one stall of 100 µs at the relayer".into(),
            paper: "about 100 µs at the relayer; the root has to wait in turn".into(),
            here: format!(
                "{:.0} µs at the relayer, {:.0} µs at the root; {:.0} µs added to the transfer",
                longest(&relayer),
                longest(&root),
                added.as_secs_f64() * 1e6
            ),
            agrees: (50.0..=150.0).contains(&longest(&relayer)),
        },
    ];
    let line = |name: &str, times: &[f64]| {
        let points = times.iter().zip(1..).map(|(&us, step)| (f64::from(step), us)).collect();
        Line::new(name, points, LineStyle::Plain)
    };
    let lines = vec![line("relayer, blocks come in", &relayer), line("root, blocks go out", &root)];
    let panel = Panel::new(Axis::linear("step"), Axis::linear("time of the step (µs)"), Content::Lines(lines));
    let mut figure = Figure::new("Where the time goes: one stall of 100 µs", vec![panel]);
    figure.subtitle = Some("Stampede, 40 Gbit/s, four members, 256 MiB in blocks of 1 MiB".into());
    let title = "where the time of a transfer of 256 MiB goes".into();
    Ok(Report { name: "figure-5", title, tables: vec![table, steps], figure, findings })
}

/// The parts of the time until the farthest member has the message, in ns, by the paper's names.
#[derive(Debug, Default)]
struct TimeParts {
    /// Until the root and the relayer had begun to send the member's first block.
    remote_setup: u64,
    /// While that block was on the network.
    remote_transfers: u64,
    /// From its arrival, until the member's software had it.
    local_setup: u64,
    /// While blocks came in.
    local_transfers: u64,
    /// While none did.
    waiting: u64,
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
        let on_the_way = relayed.map_or(0, CarriedBlock::duration_ns) + first.duration_ns();
        let mut parts = Self {
            remote_transfers: on_the_way,
            remote_setup: first.arrival_ns - began_ns - on_the_way,
            ..Self::default()
        };
        let mut busy_until = first.arrival_ns;
        for block in &incoming[1..] {
            let begin_ns = (block.arrival_ns - block.duration_ns()).max(busy_until);
            parts.waiting += begin_ns - busy_until;
            parts.local_transfers += block.arrival_ns - begin_ns;
            busy_until = block.arrival_ns;
        }
        let delivered = measurement.times.delivered[FARTHEST.index() - 1].as_nanos();
        parts.local_setup = delivered - busy_until;
        parts
    }

    fn total(&self) -> u64 {
        self.remote_setup + self.remote_transfers + self.local_setup + self.local_transfers + self.waiting
    }

    /// Returns the rows of the paper's table. The first block is copied while others arrive, so its copy takes no time.
    fn rows(&self) -> [(&'static str, u64); 7] {
        [
            ("remote setup", self.remote_setup),
            ("remote block transfers", self.remote_transfers),
            ("local setup", self.local_setup),
            ("local block transfers", self.local_transfers),
            ("waiting", self.waiting),
            ("copy time", 0),
            ("total", self.total()),
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

/// Lists the blocks that went between nodes that `wanted` accepts.
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
