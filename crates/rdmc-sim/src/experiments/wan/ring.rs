//! The ring of a session against the length of its path: Figure 7, and the adapter's limit of reads.

use std::time::Duration;

use super::super::{ExperimentError, Finding, Options, Report};
use super::{Curve, LongPath, RDMA_MBPS, panel_of, table_of};
use crate::plot::Figure;

/// Rings in MiB.
const RINGS_MIB: [u64; 4] = [64, 128, 256, 512];
/// The paper's largest ring.
const LARGEST_MIB: u64 = 512;
/// Lengths of reads in KiB: what the library posts, what a slab has by default, and long slabs.
const READS_KIB: [u64; 4] = [256, 1 << 10, 4 << 10, 16 << 10];
/// Reads that an adapter has under way at once.
const READS_MAX: u32 = 16;
/// Round trips in ms.
const ROUND_TRIPS_MS: [u64; 10] = [1, 10, 20, 40, 60, 80, 100, 120, 160, 200];
/// The paper's bound for the largest ring in ms.
const LONG_MS: u64 = 120;
/// Time in which a ring grows, and time of a measurement.
const SETTLING: Duration = Duration::from_secs(6);
const MEASURED: Duration = Duration::from_secs(2);
/// A path counts as full from this share of its rate.
const FULL: f64 = 0.97;

fn path(round_trip_ms: u64, seed: u64) -> LongPath {
    LongPath { mbps: RDMA_MBPS, seed, ..LongPath::new(Duration::from_millis(round_trip_ms)) }
}

pub(in super::super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let ring = |mib: u64| {
        Curve::new(format!("{mib} MiB"), &ROUND_TRIPS_MS, |round_trip_ms| {
            let path = LongPath { ring_bytes: mib << 20, ..path(round_trip_ms, options.seed) };
            path.rate_after(SETTLING, MEASURED)
        })
    };
    let rings = RINGS_MIB.map(ring).into_iter().collect::<Result<Vec<_>, _>>()?;
    let reads = |kib: u64| {
        let name = if kib < 1 << 10 { format!("{kib} KiB") } else { format!("{} MiB", kib >> 10) };
        Curve::new(name, &ROUND_TRIPS_MS, |round_trip_ms| {
            let path = LongPath { slab_bytes: kib << 10, reads_max: READS_MAX, ..path(round_trip_ms, options.seed) };
            path.rate_after(SETTLING, MEASURED)
        })
    };
    let reads = READS_KIB.map(reads).into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut figure = Figure::new(
        "A ring must hold what the path carries in two round trips",
        vec![
            panel_of("rings, any number of reads at once", "round trip (ms)", &rings),
            panel_of("reads of these lengths, 16 at once, rings of 512 MiB", "round trip (ms)", &reads),
        ],
    );
    figure.subtitle = Some("one session on a perfect path of 10 Gbit/s, after its rings have grown".into());
    Ok(Report {
        name: "wan-ring",
        title: "The ring of a session against the length of its path".into(),
        findings: findings(&rings, &reads),
        tables: vec![table_of("", &rings), table_of("reads", &reads)],
        figure,
    })
}

fn findings(rings: &[Curve], reads: &[Curve]) -> Vec<Finding> {
    let full = RDMA_MBPS as f64 * FULL;
    let largest = &rings[RINGS_MIB.iter().position(|&mib| mib == LARGEST_MIB).unwrap_or(0)];
    let last_full = |curve: &Curve| {
        let held = curve.points.iter().take_while(|point| point.1 >= full);
        held.last().map_or(0, |point| point.0)
    };
    // Beyond the knee, the ring decides: what is in flight is a constant part of it.
    let parts = rings.iter().zip(RINGS_MIB).flat_map(|(curve, mib)| {
        let beyond = curve.points.iter().filter(|point| point.1 < full);
        beyond.map(move |&(round_trip_ms, mbps)| mbps * round_trip_ms as f64 * 125.0 / (mib << 20) as f64)
    });
    let (least, most) =
        parts.fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), part| (least.min(part), most.max(part)));
    let falls = rings.iter().zip(RINGS_MIB).all(|(curve, mib)| {
        // Where a third of the ring is the bandwidth-delay product, in ms.
        let third_ms = (mib << 20) as f64 / 3.0 / (RDMA_MBPS as f64 * 125.0);
        curve.points.iter().all(|&(round_trip_ms, mbps)| round_trip_ms as f64 > third_ms || mbps >= full)
    });
    let in_flight = |curve: &Curve, kib: u64| {
        let (round_trip_ms, mbps) = *curve.points.last().expect("there are round trips");
        mbps * round_trip_ms as f64 * 125.0 / (f64::from(READS_MAX) * (kib << 10) as f64)
    };
    vec![
        Finding {
            what: format!("a ring of {LARGEST_MIB} MB, at a round trip of {LONG_MS} ms"),
            paper: "full rate well beyond 100 ms".into(),
            here: format!(
                "{:.2} Gbit/s of {:.2}; full up to {} ms",
                largest.at(LONG_MS) / 1e3,
                RDMA_MBPS as f64 / 1e3,
                last_full(largest)
            ),
            agrees: largest.at(LONG_MS) >= full,
        },
        Finding {
            what: "each ring, while a third of it is at least the bandwidth-delay product".into(),
            paper: "full rate".into(),
            here: if falls { "full rate".into() } else { "less than the full rate".to_owned() },
            agrees: falls,
        },
        Finding {
            what: "part of the ring that is in flight beyond the knee".into(),
            paper: "a third".into(),
            here: format!("{:.0} to {:.0} %", least * 1e2, most * 1e2),
            agrees: (0.30..0.37).contains(&least) && (0.30..0.37).contains(&most),
        },
        Finding::beyond(
            format!("with {READS_MAX} reads at once, reads of 256 KiB and 1 MiB, at {LONG_MS} ms"),
            format!(
                "{:.2} and {:.2} Gbit/s, {:.2} and {:.2} times those reads in a round trip",
                reads[0].at(LONG_MS) / 1e3,
                reads[1].at(LONG_MS) / 1e3,
                in_flight(&reads[0], READS_KIB[0]),
                in_flight(&reads[1], READS_KIB[1])
            ),
        ),
    ]
}
