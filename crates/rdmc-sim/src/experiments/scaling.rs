//! Figure 8: 256 MB to up to 512 nodes of Sierra.

use rdmc::Algorithm;

use super::measure::{MIB, Single, hop_time, in_parallel, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// Bytes of the message.
const MESSAGE: u64 = 256 * MIB;
/// Blocks of the message.
const BLOCKS: u32 = 256;

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Sierra.model();
    let sizes: Vec<u32> = vec![2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256, 512];
    // The largest first: they take the longest.
    let mut jobs: Vec<(Algorithm, u32)> = sizes.iter().rev().map(|&n| (Algorithm::BinomialPipeline, n)).collect();
    jobs.extend(sizes.iter().rev().map(|&n| (Algorithm::Sequential, n)));
    let outcomes =
        in_parallel(&jobs, |(algorithm, n)| Single::new(model.clone(), *n, algorithm.clone(), MESSAGE, MIB).run())?;
    let seconds_of = |wanted: &Algorithm, n: u32| {
        let place = jobs.iter().position(|(algorithm, members)| algorithm == wanted && *members == n)?;
        Some((outcomes[place].latency().as_secs_f64(), outcomes[place].skew().as_secs_f64()))
    };

    let block_time = wire_time(&model, MIB).as_secs_f64();
    let step_time = block_time + hop_time(&model).as_secs_f64();
    let mut table = Table::new(
        "",
        &["members", "pipeline_s", "pipeline_skew_s", "bound_s", "steps", "sequential_s", "sequential_skew_s"],
    );
    let mut worst: f64 = 0.0;
    let (mut pipeline, mut sequential, mut bound) = (Vec::new(), Vec::new(), Vec::new());
    let (mut skews, mut sequential_skews) = (Vec::new(), Vec::new());
    for &n in &sizes {
        let (seconds, skew) = seconds_of(&Algorithm::BinomialPipeline, n).expect("every size was run");
        let steps = BLOCKS - 1 + n.next_power_of_two().trailing_zeros();
        let stated = f64::from(steps) * step_time;
        worst = worst.max(seconds / stated);
        let (sequentially, sequential_skew) = seconds_of(&Algorithm::Sequential, n).expect("every size was run");
        table.push(vec![
            n.to_string(),
            format!("{seconds:.6}"),
            format!("{skew:.6}"),
            format!("{:.6}", f64::from(steps) * block_time),
            steps.to_string(),
            format!("{sequentially:.6}"),
            format!("{sequential_skew:.6}"),
        ]);
        let at = f64::from(n);
        pipeline.push((at, seconds * 1e3));
        bound.push((at, f64::from(steps) * block_time * 1e3));
        sequential.push((at, sequentially * 1e3));
        skews.push((at, skew * 1e3));
        sequential_skews.push((at, sequential_skew * 1e3));
    }
    let of = |n: u32| seconds_of(&Algorithm::BinomialPipeline, n).map_or(f64::NAN, |(seconds, _)| seconds);
    let last = sizes.last().copied().unwrap_or(2);
    let growth = of(last) / of(2);
    let sequential_growth = sequential.last().map_or(f64::NAN, |(_, ms)| ms / 1e3) / of(2);
    let worst_skew = skews.iter().map(|(_, ms)| ms / (of(last) * 1e3)).fold(0.0, f64::max);
    let findings = vec![
        Finding {
            what: "time of the binomial pipeline against (k − 1 + ⌈log₂ n⌉) steps of a block and the stated latencies"
                .into(),
            paper: "step-optimal".into(),
            here: format!("at most {worst:.3} times that, over all group sizes"),
            agrees: worst <= 1.01,
        },
        Finding {
            what: "512 nodes against 2".into(),
            paper: "replication is almost free".into(),
            here: format!("{growth:.3} times the time; sequentially {sequential_growth:.0} times"),
            agrees: growth < 1.05,
        },
        Finding {
            what: "skew between the first and the last member to have the message".into(),
            paper: "low; high for the sequential algorithm".into(),
            here: format!("at most {:.2} % of the transfer", worst_skew * 1e2),
            agrees: worst_skew < 0.02,
        },
    ];
    let time = Panel {
        title: Some("Until the last member has it".into()),
        ..Panel::new(
            Axis::log2("members"),
            Axis::log10("time (ms)"),
            Content::Lines(vec![
                Line::new("sequential", sequential, LineStyle::Markers),
                Line::new("binomial pipeline", pipeline, LineStyle::Markers),
                Line::new("bound", bound, LineStyle::Dashed),
            ]),
        )
    };
    let skew = Panel {
        title: Some("From the first member to the last".into()),
        ..Panel::new(
            Axis::log2("members"),
            Axis::log10("skew (ms)"),
            Content::Lines(vec![
                Line::new("sequential", sequential_skews, LineStyle::Markers),
                Line::new("binomial pipeline", skews, LineStyle::Markers),
            ]),
        )
    };
    let mut figure = Figure::new("256 MiB from one node to many", vec![time, skew]);
    figure.subtitle = Some("Sierra, 40 Gbit/s, blocks of 1 MiB".into());
    Ok(Report { name: "figure-8", title: "256 MiB to 2 to 512 nodes".into(), tables: vec![table], figure, findings })
}
