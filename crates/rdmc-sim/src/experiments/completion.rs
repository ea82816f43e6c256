//! Figure 11: the processor load of waiting for completions, on Fractus.

use super::groups::{OverlappingGroups, RoundsMeasurement};
use super::measure::in_parallel;
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::model::WaitMode;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// The paper's sizes in bytes, their names and how many rounds are measured.
const SIZES: [(u64, &str, u32); 3] = [(100_000_000, "100 MB", 2), (1_000_000, "1 MB", 10), (10_000, "10 KB", 50)];
const MODES: [(&str, WaitMode); 3] =
    [("polling", WaitMode::Poll), ("hybrid", WaitMode::Hybrid), ("events", WaitMode::Event)];
/// Largest group.
const MEMBERS_MAX: u32 = 16;

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
        for (bytes, _, rounds) in SIZES {
            for (mode, completion) in MODES {
                let mut groups = OverlappingGroups::new(PaperCluster::Fractus.model(), members, 1, bytes);
                groups.model.host.completion = completion;
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
        title: "processor load and bandwidth by how completions are waited for".into(),
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
    for (bytes, size, _) in SIZES {
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
        let modes = ["hybrid", "events"];
        let cpu = Axis::linear("mean load (% of a core)").with_range(0.0, 110.0);
        panels.push(panel(format!("{size}: processor"), cpu, lines(|(cpu, _)| cpu, &modes)));
        panels.push(panel(format!("{size}: bandwidth"), Axis::linear("Gbit/s"), lines(|(_, gbps)| gbps, &modes)));
    }
    let mut figure = Figure::new("Polling for a while, or waiting for events", panels);
    figure.subtitle =
        Some("Fractus, one sender, a barrier after each message; polling for ever is as the hybrid".into());
    figure
}

fn findings(load: &impl Fn(&str, u64, u32) -> (f64, f64)) -> Vec<Finding> {
    let all = || SIZES.iter().flat_map(|&(bytes, ..)| (2..=MEMBERS_MAX).map(move |n| (bytes, n)));
    let apart = all().map(|(bytes, n)| {
        let (poll, hybrid) = (load("polling", bytes, n), load("hybrid", bytes, n));
        ((poll.0 - hybrid.0).abs()).max((poll.1 / hybrid.1 - 1.0).abs() * 1e2)
    });
    let apart = apart.fold(0.0, f64::max);
    let hybrid = all().map(|(bytes, n)| load("hybrid", bytes, n).0).fold(f64::INFINITY, f64::min);
    let [large, medium, small] = SIZES.map(|(bytes, ..)| {
        let over = |value: &dyn Fn(u32) -> f64| (2..=MEMBERS_MAX).map(value).fold(0.0, f64::max);
        let cpu = over(&|n| load("events", bytes, n).0);
        (cpu, over(&|n| (1.0 - load("events", bytes, n).1 / load("hybrid", bytes, n).1) * 1e2))
    });
    vec![
        Finding {
            what: "polling for ever against the hybrid".into(),
            paper: "no visible difference".into(),
            here: format!("at most {apart:.2} % apart, in load and in bandwidth"),
            agrees: apart < 1.0,
        },
        Finding {
            what: "load of the hybrid".into(),
            paper: "near a whole core (shape only)".into(),
            here: format!("at least {hybrid:.1} %"),
            agrees: hybrid > 95.0,
        },
        Finding {
            what: "events, 100 MB".into(),
            paper: "load far below a core, bandwidth hardly less (shape only)".into(),
            here: format!("load at most {:.1} %, bandwidth at most {:.1} % less", large.0, large.1),
            agrees: large.0 < 50.0 && large.1 < 10.0,
        },
        Finding {
            what: "events, 10 KB against 1 MB".into(),
            paper: "small messages lose bandwidth (shape only)".into(),
            here: format!(
                "10 KB: up to {:.0} % less at a load of at most {:.0} %; 1 MB: up to {:.0} % less at {:.0} %",
                small.1, small.0, medium.1, medium.0
            ),
            agrees: small.1 > medium.1 && medium.1 > large.1,
        },
    ]
}
