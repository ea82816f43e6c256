//! Slabs that the consumer reads beside slabs that the producer writes, on long paths.

use std::time::Duration;

use rdmc_wan::SlabVerb;

use super::super::measure::in_parallel;
use super::super::{ExperimentError, Finding, Options, Report, Table};
use super::{Curve, LongPath, RDMA_MBPS, panel_of, table_of};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// The length of the path for single transfers.
const ROUND_TRIP: Duration = Duration::from_millis(120);
/// Bytes of single transfers, in KiB.
const TRANSFERS_KIB: [u64; 5] = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
/// Round trips in ms.
const ROUND_TRIPS_MS: [u64; 10] = [1, 10, 20, 40, 60, 80, 100, 120, 160, 200];
/// Reads that an adapter has under way at once, where it limits them.
const READS_MAX: u32 = 16;
/// Time in which a ring grows, and time of a measurement.
const SETTLING: Duration = Duration::from_secs(6);
const MEASURED: Duration = Duration::from_secs(2);

pub(in super::super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let path = |receive_by, round_trip| LongPath {
        mbps: RDMA_MBPS,
        seed: options.seed,
        receive_by,
        ..LongPath::new(round_trip)
    };
    let single = |receive_by| {
        in_parallel(&TRANSFERS_KIB, |&kib| {
            let mbps = path(receive_by, ROUND_TRIP).transfer(kib << 10)?;
            Ok((kib as f64 / 1024.0, (kib << 13) as f64 / (mbps * 1e6) / ROUND_TRIP.as_secs_f64()))
        })
    };
    let (read, written) = (single(SlabVerb::Read)?, single(SlabVerb::Write)?);
    let curve = |name: &str, receive_by, reads_max| {
        Curve::new(name, &ROUND_TRIPS_MS, |round_trip_ms| {
            let path = LongPath { reads_max, ..path(receive_by, Duration::from_millis(round_trip_ms)) };
            path.rate_after(SETTLING, MEASURED)
        })
    };
    let rates = [
        curve("reads", SlabVerb::Read, 0)?,
        curve("16 reads at once", SlabVerb::Read, READS_MAX)?,
        curve("writes", SlabVerb::Write, READS_MAX)?,
    ];
    let mut table = Table::new("transfers", &["mib", "read_round_trips", "written_round_trips"]);
    for ((mib, read), (_, written)) in read.iter().zip(&written) {
        table.push(vec![mib.to_string(), format!("{read:.2}"), format!("{written:.2}")]);
    }
    let line = |name: &str, points: &[(f64, f64)]| Line::new(name, points.to_vec(), LineStyle::Markers);
    let transfers = Panel {
        title: Some("one transfer at 120 ms".into()),
        ..Panel::new(
            Axis::log2("bytes (MiB)"),
            Axis::linear("time until all are there (round trips)").with_range(0.0, 8.0),
            Content::Lines(vec![line("read", &read), line("written", &written)]),
        )
    };
    let mut figure = Figure::new(
        "Slabs that are written come a round trip earlier",
        vec![transfers, panel_of("rates of a session", "round trip (ms)", &rates)],
    );
    figure.subtitle = Some("one session on a perfect path of 10 Gbit/s".into());
    Ok(Report {
        name: "wan-verbs",
        title: "Slabs that are read or written".into(),
        findings: findings(&read, &written, &rates),
        tables: vec![table, table_of("", &rates)],
        figure,
    })
}

fn findings(read: &[(f64, f64)], written: &[(f64, f64)], [reads, few, writes]: &[Curve; 3]) -> Vec<Finding> {
    let longest = *ROUND_TRIPS_MS.last().expect("there are round trips");
    let gbps = |curve: &Curve, round_trip_ms| curve.at(round_trip_ms) / 1e3;
    let of_1_mib = |points: &[(f64, f64)]| points.iter().find(|point| point.0 == 1.0).map_or(f64::NAN, |point| point.1);
    vec![
        Finding::beyond(
            "1 MiB at 120 ms, read and written",
            format!("{:.2} and {:.2} round trips until all bytes are there", of_1_mib(read), of_1_mib(written)),
        ),
        Finding::beyond(
            format!("rate at {longest} ms, by reads and by writes"),
            format!("{:.2} and {:.2} Gbit/s", gbps(reads, longest), gbps(writes, longest)),
        ),
        Finding::beyond(
            format!("an adapter with {READS_MAX} reads at once, at 20 and {longest} ms"),
            format!("{:.2} and {:.2} Gbit/s by reads of 256 KiB", gbps(few, 20), gbps(few, longest)),
        ),
    ]
}
