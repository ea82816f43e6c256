//! A session and TCP behind a policer: Figure 9.

use std::time::Duration;

use rdmc_wan::{SessionConfig, SlabVerb};

use super::super::measure::in_parallel;
use super::super::{ExperimentError, Finding, Options, Report, Table};
use super::{LongPath, MINUTE, Pace, RDMA_MBPS, TCP_MBPS};
use crate::path::{PathModel, PolicerModel};
use crate::plot::{Axis, BarSeries, Bars, Content, Figure, Panel, Reference};
use crate::tcp_model::TcpModel;

/// The paper's path.
const ROUND_TRIP: Duration = Duration::from_millis(120);
const POLICER: PolicerModel = PolicerModel { mbps: 5_000, burst_bytes: 1_000_000 };
/// The rate of the policer in bytes per second.
const PACE: u64 = POLICER.mbps * 125_000;
/// Bytes of the ring where it is too short: half of what the path carries in a round trip.
const SHORT_RING: u64 = 36 << 20;
/// Time in which rings grow, and time of a measurement.
const SETTLING: Duration = Duration::from_secs(8);
const MEASURED: Duration = Duration::from_secs(4);

/// What sends behind the policer.
#[derive(Clone, Debug)]
enum Sender {
    Session(LongPath),
    Tcp(u32),
}

/// The cases, with their names and the paper's statement whether they fill the path.
fn cases(seed: u64) -> Vec<(&'static str, Sender)> {
    let path = LongPath {
        mbps: RDMA_MBPS,
        path: Some(PathModel { packet_bytes: 2048, policer: Some(POLICER), ..PathModel::default() }),
        seed,
        ..LongPath::new(ROUND_TRIP)
    };
    let pace = |burst| Pace::Given { bytes_per_second: PACE, burst };
    let paced = LongPath { pace: pace(256 << 10), ..path.clone() };
    let found = LongPath {
        pace: Pace::Found,
        streams: SessionConfig::STREAMS_OF_DISTANT,
        receive_by: SlabVerb::Write,
        ..path.clone()
    };
    vec![
        ("paced", Sender::Session(paced.clone())),
        (
            "paced, reads of 4 MiB",
            Sender::Session(LongPath { slab_bytes: 4 << 20, pace: pace(4 << 20), ..paced.clone() }),
        ),
        ("paced, short ring", Sender::Session(LongPath { ring_bytes: SHORT_RING, ..paced })),
        ("not paced", Sender::Session(path)),
        ("rate found", Sender::Session(found)),
        ("TCP x 1", Sender::Tcp(1)),
        ("TCP x 8", Sender::Tcp(8)),
    ]
}

fn measure(sender: &Sender, seed: u64) -> Result<(f64, f64), ExperimentError> {
    match sender {
        // It tries higher rates now and then.
        Sender::Session(path) if path.pace == Pace::Found => {
            Ok((path.rate(MINUTE)?, path.rate_after(MINUTE, 2 * MINUTE)?))
        }
        Sender::Session(path) => Ok((path.first_minute()?, path.rate_after(SETTLING, MEASURED)?)),
        &Sender::Tcp(streams) => {
            let tcp = TcpModel { mbps: TCP_MBPS, policer: Some(POLICER), ..TcpModel::new(streams, ROUND_TRIP) };
            let (first, later) = (tcp.rate(MINUTE, seed), tcp.rate(2 * MINUTE, seed));
            Ok((first, 2.0 * later - first))
        }
    }
}

pub(in super::super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let cases = cases(options.seed);
    let rates = in_parallel(&cases, |(_, sender)| measure(sender, options.seed))?;
    let mut table = Table::new("", &["sender", "first_minute_gbps", "later_gbps"]);
    for ((name, _), (first, later)) in cases.iter().zip(&rates) {
        table.push(vec![name.replace(',', ""), format!("{:.3}", first / 1e3), format!("{:.3}", later / 1e3)]);
    }
    let bars = Bars {
        categories: cases.iter().map(|(name, _)| (*name).to_owned()).collect(),
        series: vec![
            BarSeries::new("first minute", rates.iter().map(|(first, _)| first / 1e3).collect()),
            BarSeries::new("later", rates.iter().map(|(_, later)| later / 1e3).collect()),
        ],
        stacked: false,
    };
    let panel = Panel {
        references: vec![Reference::new(POLICER.mbps as f64 / 1e3, "policer")],
        ..Panel::new(Axis::linear("sender"), Axis::linear("rate (Gbit/s)").with_range(0.0, 6.0), Content::Bars(bars))
    };
    let mut figure = Figure::new("A paced session fills a policed path", vec![panel]);
    figure.subtitle = Some("120 ms, a policer of 5 Gbit/s with a burst of 1 MB; TCP is a model".into());
    Ok(Report {
        name: "wan-policer",
        title: "A session and TCP behind a policer".into(),
        findings: findings(&rates),
        tables: vec![table],
        figure,
    })
}

fn findings(rates: &[(f64, f64)]) -> Vec<Finding> {
    let share = |(first, later): (f64, f64)| (first / POLICER.mbps as f64, later / POLICER.mbps as f64);
    let text = |(first, later): (f64, f64)| format!("{:.0} % of its rate, later {:.0} %", first * 1e2, later * 1e2);
    let [paced, long_reads, short_ring, unpaced, found, one, eight] =
        std::array::from_fn(|place| share(*rates.get(place).unwrap_or(&(f64::NAN, f64::NAN))));
    vec![
        Finding {
            what: "session, paced at the policer's rate, with reads below its burst and a ring that is long enough"
                .into(),
            paper: "saturates the path".into(),
            here: text(paced),
            agrees: paced.0 >= 0.93 && paced.1 >= 0.99,
        },
        Finding {
            what: "session, paced, with reads beyond the burst".into(),
            paper: "stalls".into(),
            here: text(long_reads),
            agrees: long_reads.1 < 0.2,
        },
        Finding {
            what: "session, paced, with too short a ring".into(),
            paper: "does not saturate the path".into(),
            here: text(short_ring),
            agrees: short_ring.1 < 0.8,
        },
        Finding {
            what: "session, not paced".into(),
            paper: "stalls".into(),
            here: text(unpaced),
            agrees: unpaced.1 < 0.2,
        },
        Finding {
            what: "session that finds the rate, over 16 queue pairs".into(),
            paper: "future work".into(),
            here: text(found),
            agrees: found.0 > 0.5 && found.1 > 0.8,
        },
        Finding {
            what: "TCP, one stream (shape only)".into(),
            paper: "backs off severely".into(),
            here: text(one),
            agrees: one.0 < 0.7,
        },
        Finding {
            what: "TCP, 8 streams (shape only)".into(),
            paper: "does not saturate the path consistently, but more than one stream".into(),
            here: text(eight),
            agrees: eight.0 < 0.95 && eight.0 > one.0,
        },
    ]
}
