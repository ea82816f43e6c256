//! Figure 4: how the algorithms compare, on Fractus.

use rdmc::Algorithm;

use super::measure::{MIB, Single, in_parallel};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// The algorithms, slowest first.
const ALGORITHMS: [Algorithm; 4] =
    [Algorithm::Sequential, Algorithm::BinomialTree, Algorithm::Chain, Algorithm::BinomialPipeline];
/// The paper's two sizes, in MiB.
const SIZES: [u64; 2] = [256, 8];
/// Largest group.
const MEMBERS_MAX: u32 = 16;

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Fractus.model();
    let jobs: Vec<(u64, Algorithm, u32)> = SIZES
        .into_iter()
        .flat_map(|size| ALGORITHMS.into_iter().map(move |algorithm| (size, algorithm)))
        .flat_map(|(size, algorithm)| (2..=MEMBERS_MAX).map(move |n| (size, algorithm.clone(), n)))
        .collect();
    let latencies = in_parallel(&jobs, |(size, algorithm, n)| {
        let times = Single::new(model.clone(), *n, algorithm.clone(), size * MIB, MIB).run()?;
        Ok(times.latency().as_secs_f64() * 1e3)
    })?;
    let ms = |size: u64, algorithm: &Algorithm, n: u32| {
        let place = jobs.iter().position(|job| *job == (size, algorithm.clone(), n)).expect("every job was run");
        latencies[place]
    };

    let mut table = Table::new("", &["message_mib", "algorithm", "members", "latency_ms"]);
    for ((size, algorithm, n), latency) in jobs.iter().zip(&latencies) {
        table.push(vec![size.to_string(), algorithm.to_string(), n.to_string(), format!("{latency:.4}")]);
    }
    let panels = SIZES.map(|size| {
        let lines = ALGORITHMS.each_ref().map(|algorithm| {
            let points = (2..=MEMBERS_MAX).map(|n| (f64::from(n), ms(size, algorithm, n))).collect();
            Line::new(algorithm.to_string().replace('-', " "), points, LineStyle::Markers)
        });
        let content = Content::Lines(lines.into_iter().collect());
        Panel {
            title: Some(format!("{size} MiB")),
            ..Panel::new(Axis::linear("members"), Axis::log10("latency (ms)"), content)
        }
    });
    let mut figure = Figure::new("Latency of the algorithms", panels.into_iter().collect());
    figure.subtitle = Some("Fractus, 100 Gbit/s, blocks of 1 MiB; until the last member has the message".into());

    let ratio =
        |size, slow: &Algorithm| ms(size, slow, MEMBERS_MAX) / ms(size, &Algorithm::BinomialPipeline, MEMBERS_MAX);
    let (sequential, tree) = (ratio(256, &Algorithm::Sequential), ratio(256, &Algorithm::BinomialTree));
    let (chain, short_chain) = (ratio(256, &Algorithm::Chain), ratio(8, &Algorithm::Chain));
    let findings = vec![
        Finding {
            what: "sequential and binomial tree in large groups (16 members, 256 MiB)".into(),
            paper: "both fall far behind (shape only)".into(),
            here: format!("{sequential:.1} and {tree:.1} times the binomial pipeline's latency"),
            agrees: sequential > 10.0 && tree > 3.0,
        },
        Finding {
            what: "chain against the binomial pipeline, 16 members".into(),
            paper: "competitive, except for small transfers to many nodes".into(),
            here: format!("{chain:.2} times at 256 MiB, {short_chain:.2} times at 8 MiB"),
            agrees: chain < 1.1 && short_chain > 1.5,
        },
    ];
    let title = "latency of the algorithms against the group's size, 256 MiB and 8 MiB".into();
    Ok(Report { name: "figure-4", title, tables: vec![table], figure, findings })
}
