//! Figure 8: 256 MiB to up to 512 nodes of Sierra.

use rdmc::Algorithm;

use super::measure::{MIB, Single, hop_time, in_parallel, wire_time};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// Bytes of the message.
const MESSAGE: u64 = 256 * MIB;
/// Blocks of the message.
const BLOCKS: u32 = 256;

/// The results of one group size, in s.
struct Row {
    members: u32,
    /// Steps of the binomial pipeline.
    steps: u32,
    pipeline: f64,
    pipeline_skew: f64,
    sequential: f64,
    sequential_skew: f64,
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let model = PaperCluster::Sierra.model();
    let members_max = options.members_max.unwrap_or(u32::MAX);
    let sizes: Vec<u32> = SIZES.into_iter().filter(|&members| members <= members_max).collect();
    // The largest groups first: they take the longest.
    let jobs: Vec<(Algorithm, u32)> = [Algorithm::BinomialPipeline, Algorithm::Sequential]
        .into_iter()
        .flat_map(|algorithm| sizes.iter().rev().map(move |&n| (algorithm.clone(), n)))
        .collect();
    let outcomes =
        in_parallel(&jobs, |(algorithm, n)| Single::new(model.clone(), *n, algorithm.clone(), MESSAGE, MIB).run())?;
    let (pipeline, sequential) = outcomes.split_at(sizes.len());
    let rows: Vec<Row> = sizes
        .iter()
        .zip(pipeline.iter().rev().zip(sequential.iter().rev()))
        .map(|(&members, (pipeline, sequential))| Row {
            members,
            steps: BLOCKS - 1 + members.next_power_of_two().trailing_zeros(),
            pipeline: pipeline.latency().as_secs_f64(),
            pipeline_skew: pipeline.skew().as_secs_f64(),
            sequential: sequential.latency().as_secs_f64(),
            sequential_skew: sequential.skew().as_secs_f64(),
        })
        .collect();
    let block_time = wire_time(&model, MIB).as_secs_f64();
    let step_time = block_time + hop_time(&model).as_secs_f64();
    Ok(Report {
        name: "figure-8",
        title: "256 MiB to 2 to 512 nodes".into(),
        tables: vec![table(&rows, block_time)],
        figure: figure(&rows, block_time),
        findings: findings(&rows, step_time),
    })
}

fn table(rows: &[Row], block_time: f64) -> Table {
    let columns = ["members", "pipeline_s", "pipeline_skew_s", "bound_s", "steps", "sequential_s", "sequential_skew_s"];
    let mut table = Table::new("", &columns);
    for row in rows {
        table.push(vec![
            row.members.to_string(),
            format!("{:.6}", row.pipeline),
            format!("{:.6}", row.pipeline_skew),
            format!("{:.6}", f64::from(row.steps) * block_time),
            row.steps.to_string(),
            format!("{:.6}", row.sequential),
            format!("{:.6}", row.sequential_skew),
        ]);
    }
    table
}

fn findings(rows: &[Row], step_time: f64) -> Vec<Finding> {
    let (first, last) = (&rows[0], &rows[rows.len() - 1]);
    let worst = rows.iter().map(|row| row.pipeline / (f64::from(row.steps) * step_time)).fold(0.0, f64::max);
    let (growth, sequential_growth) = (last.pipeline / first.pipeline, last.sequential / first.sequential);
    let most = last.members;
    let quarter = rows.iter().find(|row| row.members == most / 4).map_or(f64::NAN, |row| row.pipeline);
    let from_quarter = last.pipeline / quarter;
    let worst_skew = rows.iter().map(|row| row.pipeline_skew / row.pipeline).fold(0.0, f64::max);
    vec![
        Finding {
            what: "time of the binomial pipeline against (k − 1 + ⌈log₂ n⌉) steps of a block and the stated latencies"
                .into(),
            paper: "step-optimal".into(),
            here: format!("at most {worst:.3} times that, over all group sizes"),
            agrees: worst <= 1.01,
        },
        Finding {
            what: format!("{most} nodes against 2"),
            paper: "replication is almost free".into(),
            here: format!("{growth:.3} times the time; sequentially {sequential_growth:.0} times"),
            agrees: growth < 1.05,
        },
        Finding {
            what: format!("{most} nodes against {}", most / 4),
            paper: "almost the same time".into(),
            here: format!("{from_quarter:.3} times the time"),
            agrees: from_quarter < 1.02,
        },
        Finding {
            what: "skew between the first and the last member to have the message".into(),
            paper: "low; high for the sequential algorithm".into(),
            here: format!("at most {:.2} % of the transfer", worst_skew * 1e2),
            agrees: worst_skew < 0.02,
        },
    ]
}

fn figure(rows: &[Row], block_time: f64) -> Figure {
    let line = |name: &str, style, seconds: &dyn Fn(&Row) -> f64| {
        let points = rows.iter().map(|row| (f64::from(row.members), seconds(row) * 1e3)).collect();
        Line::new(name, points, style)
    };
    let time = vec![
        line("sequential", LineStyle::Markers, &|row| row.sequential),
        line("binomial pipeline", LineStyle::Markers, &|row| row.pipeline),
        line("bound", LineStyle::Dashed, &|row| f64::from(row.steps) * block_time),
    ];
    let skew = vec![
        line("sequential", LineStyle::Markers, &|row| row.sequential_skew),
        line("binomial pipeline", LineStyle::Markers, &|row| row.pipeline_skew),
    ];
    let panel = |title: &str, quantity: &str, lines| Panel {
        title: Some(title.into()),
        ..Panel::new(Axis::log2("members"), Axis::log10(quantity), Content::Lines(lines))
    };
    let panels = vec![
        panel("Until the last member has it", "time (ms)", time),
        panel("From the first member to the last", "skew (ms)", skew),
    ];
    let mut figure = Figure::new("256 MiB from one node to many", panels);
    figure.subtitle = Some("Sierra, 40 Gbit/s, blocks of 1 MiB".into());
    figure
}

/// The group sizes: powers of two, and some just above.
const SIZES: [u32; 15] = [2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256, 512];
