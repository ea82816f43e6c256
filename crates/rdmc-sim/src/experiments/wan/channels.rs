//! A gateway's channel without distance: Figure 5.
//!
//! A gateway takes data by TCP, keeps it in its ring, and sends it on. Each byte crosses the memory of the host several
//! times, and that limits the gateway where the network does not. The bandwidth of the paper's memory is not known: it
//! is fitted to the paper's TCP, so that figure is no finding.

use std::time::Duration;

use super::super::{ExperimentError, Finding, Options, Report, Table};
use super::{LongPath, RDMA_MBPS, TCP_MBPS};
use crate::plot::{Axis, BarSeries, Bars, Content, Figure, Panel, Reference};

/// The paper's rates in Mbit/s, in the order of the channels.
const PAPER_MBPS: [f64; 3] = [8_100.0, 8_500.0, 9_700.0];
/// Times that a byte crosses memory in the gateway's receiving half: written by the adapter, read and written by the
/// copy out of the socket.
const CROSSINGS_IN: f64 = 3.0;
/// The same for the sending half. Sockets copy, and the adapter reads the copy; with RDMA it reads the ring itself.
const CROSSINGS_OF_SOCKETS: f64 = 3.0;
const CROSSINGS_OF_RDMA: f64 = 1.0;
/// The bandwidth of the memory in Mbit/s, fitted.
const MEMORY_MBPS: f64 = PAPER_MBPS[0] * (CROSSINGS_IN + CROSSINGS_OF_SOCKETS);
/// Payload of UDP in Mbit/s of a port of 10 Gbit/s: 8972 bytes of each frame of 9038.
const UDP_MBPS: f64 = 9_927.0;

pub(in super::super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let path = LongPath { mbps: RDMA_MBPS, seed: options.seed, ..LongPath::new(Duration::from_micros(100)) };
    let session = path.rate_after(Duration::from_secs(1), Duration::from_secs(4))?;
    let memory = |crossings: f64| MEMORY_MBPS / (CROSSINGS_IN + crossings);
    let channels = [
        ("TCP", TCP_MBPS as f64, memory(CROSSINGS_OF_SOCKETS)),
        ("UDP", UDP_MBPS, memory(CROSSINGS_OF_SOCKETS)),
        ("RDMA", session, memory(CROSSINGS_OF_RDMA)),
    ];
    let rates = channels.map(|(_, network, memory)| network.min(memory));
    let mut table = Table::new("", &["channel", "network_gbps", "memory_gbps", "rate_gbps", "paper_gbps"]);
    for (((name, network, memory), rate), paper) in channels.iter().zip(rates).zip(PAPER_MBPS) {
        let values = [*network, *memory, rate, paper].map(|mbps| format!("{:.2}", mbps / 1e3));
        table.push(std::iter::once((*name).to_owned()).chain(values).collect());
    }
    let bars = Bars {
        categories: channels.iter().map(|(name, _, _)| (*name).to_owned()).collect(),
        series: vec![
            BarSeries::new("here", rates.iter().map(|rate| rate / 1e3).collect()),
            BarSeries::new("paper", PAPER_MBPS.iter().map(|rate| rate / 1e3).collect()),
        ],
        stacked: false,
    };
    let panel = Panel {
        references: vec![Reference::new(TCP_MBPS as f64 / 1e3, "TCP alone")],
        notes: vec!["The bandwidth of the gateway's memory is fitted to the paper's TCP.".into()],
        ..Panel::new(
            Axis::linear("channel between gateways"),
            Axis::linear("rate (Gbit/s)").with_range(0.0, 11.0),
            Content::Bars(bars),
        )
    };
    let mut figure = Figure::new("With RDMA, the port limits a gateway", vec![panel]);
    figure.subtitle = Some("ports of 10 Gbit/s, no distance; the session is simulated, memory is a model".into());
    Ok(Report {
        name: "wan-channels",
        title: "A gateway's channel without distance".into(),
        findings: findings(rates, session),
        tables: vec![table],
        figure,
    })
}

fn findings([_, udp, rdma]: [f64; 3], session: f64) -> Vec<Finding> {
    let close = |here: f64, paper: f64| (here / paper - 1.0).abs() < 0.02;
    let gbps = |mbps: f64| format!("{:.2} Gbit/s", mbps / 1e3);
    vec![
        Finding {
            what: "RDMA channel".into(),
            paper: "9.7 Gbit/s, the limit of the port with packets of 2048 bytes".into(),
            here: format!("{} of {}", gbps(rdma), gbps(RDMA_MBPS as f64)),
            agrees: close(rdma, PAPER_MBPS[2]) && session >= 0.99 * RDMA_MBPS as f64,
        },
        Finding {
            what: "UDP channel".into(),
            paper: "8.5 Gbit/s".into(),
            here: gbps(udp),
            agrees: close(udp, PAPER_MBPS[1]),
        },
        Finding {
            what: "TCP alone".into(),
            paper: "9.9 Gbit/s with packets of 9000 bytes".into(),
            here: gbps(TCP_MBPS as f64),
            agrees: close(TCP_MBPS as f64, 9_900.0),
        },
    ]
}
