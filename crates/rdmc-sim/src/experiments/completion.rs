//! Figure 11: the processor load of waiting for completions, on Fractus.

use super::groups::{OverlappingGroups, RoundsMeasurement};
use super::measure::in_parallel;
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::model::WaitMode;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// The paper's message sizes.
const SIZES: [Size; 3] = [
    Size { bytes: 100_000_000, name: "100 MB", rounds: 2, load_percent: 10.0 },
    Size { bytes: 1_000_000, name: "1 MB", rounds: 10, load_percent: 50.0 },
    Size { bytes: 10_000, name: "10 KB", rounds: 50, load_percent: 100.0 },
];
/// The kinds of waiting by name; the last one has a wake-up of [`SHORT_WAKE_NS`].
const MODES: [(&str, WaitMode); 4] = [
    ("polling", WaitMode::Poll),
    ("hybrid", WaitMode::Hybrid),
    ("events", WaitMode::Event),
    (SHORT_WAKE, WaitMode::Event),
];
const SHORT_WAKE: &str = "events after 1 µs";
/// A wake-up that is shorter than the model's, in ns, to show the cause of the differences.
const SHORT_WAKE_NS: u64 = 1_000;
/// Largest difference of a load from the paper's that still agrees, in percent of a core.
const LOAD_TOLERANCE: f64 = 10.0;
/// Largest loss of bandwidth that the paper's words "quite minimal" still cover, in percent.
const LOSS_MAX: f64 = 10.0;
/// Largest group.
const MEMBERS_MAX: u32 = 16;

/// One message size.
struct Size {
    bytes: u64,
    name: &'static str,
    /// Measured rounds.
    rounds: u32,
    /// The paper's load with events, in percent of a core.
    load_percent: f64,
}

/// One point of the figure.
struct Job {
    mode: &'static str,
    bytes: u64,
    members: u32,
    groups: OverlappingGroups,
}

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let mut jobs = Vec::new();
    for members in (2..=MEMBERS_MAX).rev() {
        for Size { bytes, rounds, .. } in SIZES {
            for (mode, completion) in MODES {
                let mut groups = OverlappingGroups::new(PaperCluster::Fractus.model(), members, 1, bytes);
                groups.model.host.completion = completion;
                if mode == SHORT_WAKE {
                    groups.model.host.wake_ns = SHORT_WAKE_NS;
                }
                groups.rounds = rounds;
                jobs.push(Job { mode, bytes, members, groups });
            }
        }
    }
    let measurements = in_parallel(&jobs, |job| job.groups.run())?;
    let load = |mode: &str, bytes: u64, members: u32| {
        let is = |job: &Job| job.mode == mode && job.bytes == bytes && job.members == members;
        let place = jobs.iter().position(is).expect("every point was run");
        (measurements[place].cpu_percent(), measurements[place].gbps(bytes))
    };
    Ok(Report {
        name: "figure-11",
        title: "processor load and bandwidth by the kind of waiting".into(),
        tables: vec![table(&jobs, &measurements)],
        figure: figure(&load),
        findings: findings(&load),
    })
}

fn table(jobs: &[Job], measurements: &[RoundsMeasurement]) -> Table {
    let mut table = Table::new(
        "",
        &["completion", "message_bytes", "members", "cpu_percent", "root_cpu_percent", "bandwidth_gbps"],
    );
    for (Job { mode, bytes, members, .. }, load) in jobs.iter().zip(measurements) {
        table.push(vec![
            (*mode).to_owned(),
            bytes.to_string(),
            members.to_string(),
            format!("{:.2}", load.cpu_percent()),
            format!("{:.2}", load.cpu[0].as_secs_f64() / load.elapsed.as_secs_f64() * 1e2),
            format!("{:.3}", load.gbps(*bytes)),
        ]);
    }
    table
}

fn figure(load: &impl Fn(&str, u64, u32) -> (f64, f64)) -> Figure {
    let mut panels = Vec::new();
    for Size { bytes, name, .. } in SIZES {
        let lines = |value: fn((f64, f64)) -> f64, modes: &[&str]| {
            let line = |&mode: &&str| {
                let points = (2..=MEMBERS_MAX).map(|n| (f64::from(n), value(load(mode, bytes, n)))).collect();
                Line::new(mode, points, LineStyle::Markers)
            };
            Content::Lines(modes.iter().map(line).collect())
        };
        let panel = |title: String, y: Axis, content| Panel {
            title: Some(title),
            ..Panel::new(Axis::linear("members"), y, content)
        };
        let modes = ["hybrid", SHORT_WAKE, "events"];
        let cpu = Axis::linear("mean load (% of a core)").with_range(0.0, 110.0);
        panels.push(panel(format!("{name}: processor"), cpu, lines(|(cpu, _)| cpu, &modes)));
        panels.push(panel(format!("{name}: bandwidth"), Axis::linear("Gbit/s"), lines(|(_, gbps)| gbps, &modes)));
    }
    let mut figure = Figure::new("Hybrid waiting against events", panels);
    figure.subtitle =
        Some("Fractus, one sender, a barrier after each message; a wake-up takes 5 µs, or 1 µs where stated".into());
    figure
}

fn findings(load: &impl Fn(&str, u64, u32) -> (f64, f64)) -> Vec<Finding> {
    let all = || SIZES.iter().flat_map(|size| (2..=MEMBERS_MAX).map(move |n| (size.bytes, n)));
    let apart = all().map(|(bytes, n)| {
        let (poll, hybrid) = (load("polling", bytes, n), load("hybrid", bytes, n));
        ((poll.0 - hybrid.0).abs()).max((poll.1 / hybrid.1 - 1.0).abs() * 1e2)
    });
    let apart = apart.fold(0.0, f64::max);
    let hybrid = all().map(|(bytes, n)| load("hybrid", bytes, n).0).fold(f64::INFINITY, f64::min);
    let mut findings = vec![
        Finding {
            what: "polling all the time against the hybrid".into(),
            paper: "no measurable difference".into(),
            here: format!("at most {apart:.2} % apart, in load and in bandwidth"),
            agrees: apart < 1.0,
        },
        Finding {
            what: "load of the hybrid".into(),
            paper: "almost exactly 100 % of a core".into(),
            here: format!("at least {hybrid:.1} %"),
            agrees: hybrid > 99.0,
        },
    ];
    for size in &SIZES {
        let over_sizes = |value: &dyn Fn(u32) -> f64| {
            let values: Vec<f64> = (2..=MEMBERS_MAX).map(value).collect();
            let mean = values.iter().sum::<f64>() / f64::from(MEMBERS_MAX - 1);
            (mean, values.iter().copied().fold(0.0, f64::max))
        };
        let loads = |mode| over_sizes(&|n| load(mode, size.bytes, n).0);
        let losses =
            |mode| over_sizes(&|n| (1.0 - load(mode, size.bytes, n).1 / load("hybrid", size.bytes, n).1) * 1e2);
        let (events, short) = (loads("events"), loads(SHORT_WAKE));
        let paper = size.load_percent;
        findings.push(Finding {
            what: format!("load with events, {}", size.name),
            paper: if paper < 1e2 { format!("around {paper:.0} % of a core") } else { "hardly below 100 %".into() },
            here: format!("{:.0} % on average over group sizes; {:.0} % if a wake-up takes 1 µs", events.0, short.0),
            agrees: (events.0 - paper).abs() <= LOAD_TOLERANCE,
        });
        let (events, short) = (losses("events"), losses(SHORT_WAKE));
        findings.push(Finding {
            what: format!("bandwidth lost with events, {}", size.name),
            paper: "quite minimal, particularly for large transfers".into(),
            here: format!(
                "{:.0} % on average over group sizes, at most {:.0} %; {:.0} % and {:.0} % if a wake-up takes 1 µs",
                events.0, events.1, short.0, short.1
            ),
            agrees: events.1 <= LOSS_MAX,
        });
    }
    findings
}
