//! Gateways and TCP over long paths with loss at their edges: Figure 6.
//!
//! A transfer by gateways has three parts: TCP to the first gateway, a session between the gateways, and TCP from the
//! last one. Gateways have memory for what one part is ahead of the next. So the slowest part decides the rate, and no
//! part sees the length or the losses of another.

use std::time::Duration;

use super::super::{ExperimentError, Finding, Options, Report};
use super::{Curve, LongPath, MINUTE, RDMA_MBPS, TCP_MBPS, panel_of, table_of};
use crate::path::PathModel;
use crate::plot::Figure;
use crate::tcp_model::TcpModel;

/// Probabilities that a packet is lost at an edge, the name of their tables, and their titles.
const LOSSES: [(f64, &str, &str); 3] =
    [(0.0, "no-loss", "no loss"), (1e-5, "loss-0.001", "0.001 % loss"), (1e-4, "loss-0.01", "0.01 % loss")];
/// Round trips between the gateways in ms.
const ROUND_TRIPS_MS: [u64; 9] = [0, 10, 20, 40, 50, 60, 80, 100, 120];
const LONG_MS: u64 = 120;
/// The paper's crossing of one stream by gateways and eight without, in ms.
const CROSSING_MS: u64 = 50;
/// The round trip of an edge in ms; there are two.
const EDGE_MS: u64 = 2;
/// Most that packets between the gateways are late, in ns.
const JITTER_NS: u64 = 100_000;
/// Streams of parallel TCP.
const STREAMS: u32 = 8;

/// One panel of the figure.
struct Rates {
    direct: Curve,
    direct_parallel: Curve,
    gateway: Curve,
    gateway_parallel: Curve,
}

impl Rates {
    fn new(loss: f64, session: &Curve, seed: u64) -> Result<Self, ExperimentError> {
        let tcp = |streams, round_trip_ms, loss| {
            let tcp = TcpModel::new(streams, Duration::from_millis(round_trip_ms));
            TcpModel { mbps: TCP_MBPS, loss, ..tcp }.rate(MINUTE, seed)
        };
        // Both edges lose packets.
        let both = 1.0 - (1.0 - loss) * (1.0 - loss);
        let direct = |name: &str, streams| {
            Curve::new(name, &ROUND_TRIPS_MS, |round_trip_ms| Ok(tcp(streams, round_trip_ms + 2 * EDGE_MS, both)))
        };
        let gateway = |name: &str, streams| {
            let edge = tcp(streams, EDGE_MS, loss);
            Curve::new(name, &ROUND_TRIPS_MS, |round_trip_ms| Ok(edge.min(session.at(round_trip_ms))))
        };
        Ok(Self {
            direct: direct("direct x 1", 1)?,
            direct_parallel: direct("direct x 8", STREAMS)?,
            gateway: gateway("gateway x 1", 1)?,
            gateway_parallel: gateway("gateway x 8", STREAMS)?,
        })
    }

    fn curves(&self) -> [Curve; 4] {
        [&self.gateway, &self.gateway_parallel, &self.direct, &self.direct_parallel].map(Clone::clone)
    }
}

pub(in super::super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let session = Curve::new("session", &ROUND_TRIPS_MS, |round_trip_ms| {
        let path = LongPath::new(Duration::from_millis(round_trip_ms));
        let jitter = PathModel { packet_bytes: 2048, jitter_ns: JITTER_NS, ..PathModel::default() };
        LongPath { mbps: RDMA_MBPS, path: Some(jitter), seed: options.seed, ..path }.first_minute()
    })?;
    let panels = LOSSES.iter().map(|&(loss, _, _)| Rates::new(loss, &session, options.seed));
    let rates = panels.collect::<Result<Vec<_>, _>>()?;
    let named = LOSSES.iter().zip(&rates);
    let mut figure = Figure::new(
        "Gateways keep losses at the edges away from the long path",
        named.clone().map(|(&(_, _, title), rates)| panel_of(title, "round trip (ms)", &rates.curves())).collect(),
    );
    figure.subtitle =
        Some("mean rate of 60 s; edges of 2 ms each; TCP is a model, between gateways is a session".into());
    Ok(Report {
        name: "wan-loss",
        title: "Gateways and TCP over long paths with loss at their edges".into(),
        findings: findings(&rates),
        tables: named.map(|(&(_, name, _), rates)| table_of(name, &rates.curves())).collect(),
        figure,
    })
}

fn findings(rates: &[Rates]) -> Vec<Finding> {
    let [none, some, more] = rates else { unreachable!("there are three losses") };
    let gain = |better: &Curve, worse: &Curve| better.at(LONG_MS) / worse.at(LONG_MS) - 1.0;
    let percent = |gain: f64| format!("{:+.0} %", gain * 1e2);
    let crossing = more.gateway.points.iter().find(|point| point.1 > more.direct_parallel.at(point.0));
    let crossing = crossing.map_or(u64::MAX, |point| point.0);
    let against_lossless = |rates: &Rates| rates.gateway_parallel.at(LONG_MS) / none.gateway_parallel.at(LONG_MS);
    let (gain_one, gain_eight) = (gain(&none.gateway, &none.direct), gain(&none.gateway, &none.direct_parallel));
    let short = none.direct.at(0).min(none.gateway.at(0)) / none.direct_parallel.at(0);
    vec![
        Finding {
            what: "no loss, without distance: the slowest against 8 direct streams".into(),
            paper: "on par, 9.3 Gbit/s".into(),
            here: format!("{:.0} % of {:.2} Gbit/s", short * 1e2, none.direct_parallel.at(0) / 1e3),
            agrees: short >= 0.95,
        },
        Finding {
            what: "no loss, 120 ms: one stream by gateways against one direct stream".into(),
            paper: "+20 %".into(),
            here: percent(gain_one),
            agrees: (0.10..0.35).contains(&gain_one),
        },
        Finding {
            what: "no loss, 120 ms: one stream by gateways against 8 direct streams".into(),
            paper: "+5 %".into(),
            here: percent(gain_eight),
            agrees: (0.0..0.15).contains(&gain_eight),
        },
        Finding {
            what: "0.001 % loss, 120 ms: one stream by gateways against one direct stream".into(),
            paper: "more than 300 % better".into(),
            here: percent(gain(&some.gateway, &some.direct)),
            agrees: gain(&some.gateway, &some.direct) > 3.0,
        },
        Finding {
            what: "0.001 % loss, 120 ms: one stream by gateways against 8 direct streams".into(),
            paper: "approaches them from below".into(),
            here: percent(gain(&some.gateway, &some.direct_parallel)),
            agrees: (-0.2..0.1).contains(&gain(&some.gateway, &some.direct_parallel)),
        },
        Finding {
            what: "0.01 % loss: from where one stream by gateways passes 8 direct streams".into(),
            paper: format!("about {CROSSING_MS} ms"),
            here: format!("{crossing} ms"),
            agrees: (40..=60).contains(&crossing),
        },
        Finding {
            what: "8 streams by gateways with loss, 120 ms, against those without".into(),
            paper: "nearly the same".into(),
            here: format!(
                "{:.0} % with 0.001 %, {:.0} % with 0.01 %",
                against_lossless(some) * 1e2,
                against_lossless(more) * 1e2
            ),
            agrees: against_lossless(some) >= 0.95 && against_lossless(more) >= 0.9,
        },
        Finding {
            what: "0.01 % loss, 120 ms: 8 streams by gateways against 8 direct streams".into(),
            paper: "more than 6 times".into(),
            here: format!("{:.1} times", gain(&more.gateway_parallel, &more.direct_parallel) + 1.0),
            agrees: gain(&more.gateway_parallel, &more.direct_parallel) > 5.0,
        },
    ]
}
