//! Figure 7: messages of one byte on Fractus.

use super::groups::{OverlappingGroups, RoundsMeasurement, barrier_time, sender_counts};
use super::measure::{hop_time, in_parallel};
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::model::WaitMode;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel};

/// Measured rounds.
const ROUNDS: u32 = 20;
/// Messages of a stream in a round.
const STREAM: usize = 200;
/// Largest group.
const MEMBERS_MAX: u32 = 16;

/// One point of the figure.
struct Job {
    name: &'static str,
    members: u32,
    groups: OverlappingGroups,
}

pub(super) fn run(_: &Options) -> Result<Report, ExperimentError> {
    let mut jobs = Vec::new();
    for members in 2..=MEMBERS_MAX {
        for (name, senders) in sender_counts(members) {
            jobs.push(job(name, members, senders, 1, WaitMode::Hybrid));
        }
        jobs.push(job("one sends a stream", members, 1, STREAM, WaitMode::Hybrid));
        jobs.push(job("one sends, events", members, 1, 1, WaitMode::Event));
    }
    let measurements = in_parallel(&jobs, |job| job.groups.run())?;
    let rate = |name: &str, members: u32| {
        let place = jobs.iter().position(|job| job.name == name && job.members == members);
        place.map_or(f64::NAN, |place| measurements[place].per_second())
    };
    Ok(Report {
        name: "figure-7",
        title: "messages of 1 byte to 2 to 16 members".into(),
        tables: vec![table(&jobs, &measurements)],
        figure: figure(&rate),
        findings: findings(&rate),
    })
}

fn job(name: &'static str, members: u32, senders: u32, stream: usize, completion: WaitMode) -> Job {
    let mut groups = OverlappingGroups::new(PaperCluster::Fractus.model(), members, senders, 1);
    groups.model.host.completion = completion;
    groups.stream = stream;
    groups.rounds = if stream == 1 { ROUNDS } else { 1 };
    Job { name, members, groups }
}

fn table(jobs: &[Job], measurements: &[RoundsMeasurement]) -> Table {
    let mut table =
        Table::new("", &["members", "senders", "completion", "in_a_round", "messages_per_s", "cpu_percent"]);
    for (Job { members, groups, .. }, load) in jobs.iter().zip(measurements) {
        table.push(vec![
            members.to_string(),
            groups.senders.to_string(),
            format!("{:?}", groups.model.host.completion).to_lowercase(),
            groups.stream.to_string(),
            format!("{:.0}", load.per_second()),
            format!("{:.1}", load.cpu_percent()),
        ]);
    }
    table
}

fn figure(rate: &impl Fn(&str, u32) -> f64) -> Figure {
    let line = |name: &str| {
        let points = (2..=MEMBERS_MAX).map(|n| (f64::from(n), rate(name, n) / 1e3)).collect();
        Line::new(name, points, LineStyle::Markers)
    };
    let panel = |title: &str, names: &[&str]| Panel {
        title: Some(title.into()),
        ..Panel::new(
            Axis::linear("members"),
            Axis::linear("thousand messages per second"),
            Content::Lines(names.iter().map(|name| line(name)).collect()),
        )
    };
    let rounds = panel("One message a sender, then a barrier", &["all send", "half send", "one sends"]);
    let stream = panel("One sender", &["one sends a stream", "one sends", "one sends, events"]);
    let mut figure = Figure::new("Messages of one byte", vec![rounds, stream]);
    figure.subtitle = Some("Fractus, hybrid waiting unless stated otherwise, messages counted once".into());
    figure
}

fn findings(rate: &impl Fn(&str, u32) -> f64) -> Vec<Finding> {
    let model = PaperCluster::Fractus.model();
    let all: Vec<f64> = (2..=MEMBERS_MAX).map(|n| rate("one sends", n)).collect();
    let falls = all.windows(2).all(|pair| pair[1] <= pair[0] * 1.02);
    let hops = f64::from(MEMBERS_MAX.next_power_of_two().trailing_zeros());
    let stated = hops * hop_time(&model).as_secs_f64() + barrier_time(&model).as_secs_f64();
    let beyond = 1.0 / rate("one sends", MEMBERS_MAX) / stated;
    let ratio = rate("all send", MEMBERS_MAX) / rate("one sends", MEMBERS_MAX);
    let stream = rate("one sends a stream", MEMBERS_MAX) / rate("one sends", MEMBERS_MAX);
    let events = rate("one sends", MEMBERS_MAX) / rate("one sends, events", MEMBERS_MAX);
    vec![
        Finding {
            what: "one sender, 2 and 16 members".into(),
            paper: "the rate falls as groups grow (shape only)".into(),
            here: format!("{:.0} and {:.0} messages per second", all[0], rate("one sends", MEMBERS_MAX)),
            agrees: falls,
        },
        Finding {
            what: "one sender, 16 members: time of a round against ⌈log₂ n⌉ hops and a barrier at the stated costs"
                .into(),
            paper: "overhead decides, not bandwidth (shape only)".into(),
            here: format!("{beyond:.2} times as long"),
            agrees: beyond < 3.0,
        },
        Finding {
            what: "16 members: all send against one".into(),
            paper: "more senders send more messages in all (shape only)".into(),
            here: format!("{ratio:.1} times as many"),
            agrees: ratio > 1.0,
        },
        Finding::beyond(
            "16 members: a stream against one message a round; polling against events",
            format!("{stream:.1} times as many; {events:.1} times as many"),
        ),
    ]
}
