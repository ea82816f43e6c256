//! A session and TCP over a perfect long path: Figure 8.

use std::time::Duration;

use super::super::{ExperimentError, Finding, Options, Report};
use super::{Curve, LongPath, MINUTE, RDMA_MBPS, TCP_MBPS, panel_of, table_of};
use crate::plot::Figure;
use crate::tcp_model::TcpModel;

/// Round trips in ms.
const ROUND_TRIPS_MS: [u64; 8] = [0, 10, 20, 40, 60, 80, 100, 120];
/// From here on, the paper's TCP loses rate, in ms.
const SAGS_FROM_MS: u64 = 60;
const LONG_MS: u64 = 120;
/// Buffers of TCP in MiB.
const TUNED_MIB: u64 = 256;
const UNTUNED_MIB: u64 = 16;
/// Streams of parallel TCP.
const STREAMS: u32 = 8;

pub(in super::super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let session = Curve::new("session", &ROUND_TRIPS_MS, |round_trip_ms| {
        let path = LongPath::new(Duration::from_millis(round_trip_ms));
        LongPath { mbps: RDMA_MBPS, seed: options.seed, ..path }.first_minute()
    })?;
    let tcp = |streams: u32, mib: u64| {
        Curve::new(format!("TCP x {streams}, {mib} MB"), &ROUND_TRIPS_MS, |round_trip_ms| {
            let tcp = TcpModel::new(streams, Duration::from_millis(round_trip_ms));
            Ok(TcpModel { mbps: TCP_MBPS, window_bytes: mib << 20, ..tcp }.rate(MINUTE, options.seed))
        })
    };
    let (one, eight) = (tcp(1, TUNED_MIB)?, tcp(STREAMS, TUNED_MIB)?);
    let (untuned, untuned_eight) = (tcp(1, UNTUNED_MIB)?, tcp(STREAMS, UNTUNED_MIB)?);
    let curves = [session, one, eight, untuned, untuned_eight];
    let mut figure =
        Figure::new("A session keeps the rate of a long path", vec![panel_of("", "round trip (ms)", &curves)]);
    figure.panels[0].title = None;
    figure.subtitle = Some("mean rate of 60 s on a perfect path of 10 Gbit/s; TCP is a model".into());
    Ok(Report {
        name: "wan-driver",
        title: "A session and TCP over a perfect long path".into(),
        findings: findings(&curves),
        tables: vec![table_of("", &curves)],
        figure,
    })
}

fn findings([session, one, eight, untuned, untuned_eight]: &[Curve; 5]) -> Vec<Finding> {
    let share = |curve: &Curve, round_trip_ms| curve.at(round_trip_ms) / curve.at(0);
    let percent = |share: f64| format!("{:.0} %", share * 1e2);
    // What a window allows.
    let window = (UNTUNED_MIB << 20) as f64 * 8e-3 / LONG_MS as f64;
    vec![
        Finding {
            what: "session, up to 120 ms (shape only)".into(),
            paper: "flat".into(),
            here: format!("at least {} of its greatest rate", percent(session.flatness())),
            agrees: session.flatness() >= 0.95,
        },
        Finding {
            what: "tuned TCP, at 60 ms (shape only)".into(),
            paper: "fills the path up to there, with one stream and in parallel".into(),
            here: format!(
                "{} of its rate without distance; with {STREAMS} streams {}",
                percent(share(one, SAGS_FROM_MS)),
                percent(share(eight, SAGS_FROM_MS))
            ),
            agrees: [one, eight].iter().all(|curve| share(curve, SAGS_FROM_MS) >= 0.95),
        },
        Finding {
            what: "tuned TCP, at 120 ms (shape only)".into(),
            paper: "drops, with one stream and in parallel".into(),
            here: format!(
                "{} of its rate without distance; with {STREAMS} streams {}",
                percent(share(one, LONG_MS)),
                percent(share(eight, LONG_MS))
            ),
            agrees: [one, eight].iter().all(|curve| share(curve, LONG_MS) < 0.97 * share(curve, SAGS_FROM_MS)),
        },
        Finding {
            what: "session against tuned TCP, at 120 ms (shape only)".into(),
            paper: "faster than both".into(),
            here: format!(
                "{:.2} Gbit/s; {:.2} with one stream, {:.2} with {STREAMS}",
                session.at(LONG_MS) / 1e3,
                one.at(LONG_MS) / 1e3,
                eight.at(LONG_MS) / 1e3
            ),
            agrees: session.at(LONG_MS) > one.at(LONG_MS).max(eight.at(LONG_MS)),
        },
        Finding {
            what: "untuned TCP, at 120 ms (shape only)".into(),
            paper: "collapses with buffers of 16 MB".into(),
            here: format!(
                "{:.2} Gbit/s with one stream, whose window allows {:.2}; {:.2} with {STREAMS}",
                untuned.at(LONG_MS) / 1e3,
                window / 1e3,
                untuned_eight.at(LONG_MS) / 1e3
            ),
            agrees: untuned.at(LONG_MS) < 0.2 * one.at(0),
        },
    ]
}
