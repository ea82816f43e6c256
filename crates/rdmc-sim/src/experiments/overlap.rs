//! Figure 10: overlapping groups on Fractus and Apt.
//!
//! On Apt the batch scheduler decides about the placement: members are drawn from all nodes of seven racks. The other
//! nodes of a rack run other jobs, so each member has its share of the rack's uplink, 16 Gbit/s. Without other jobs
//! the uplinks are hardly ever full.

use super::groups::{OverlappingGroups, RoundsMeasurement, sender_counts};
use super::measure::in_parallel;
use super::{ExperimentError, Finding, Options, PaperCluster, Report, Table};
use crate::model::ClusterModel;
use crate::plot::{Axis, Content, Figure, Line, LineStyle, Panel, Reference};
use crate::random::Random;

/// The paper's sizes in bytes, their names and how many rounds are measured.
const SIZES: [(u64, &str, u32); 3] = [(100_000_000, "100 MB", 1), (1_000_000, "1 MB", 5), (10_000, "10 KB", 20)];
/// Group sizes.
const MEMBERS: [u32; 7] = [2, 3, 4, 6, 8, 12, 16];
/// Racks of Apt.
const APT_RACKS: u32 = 7;

/// The cluster of a group, and the load of its other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Testbed {
    Fractus,
    /// Apt; the other nodes fill the uplinks.
    AptBusy,
    /// Apt; the other nodes are idle.
    AptIdle,
}

impl Testbed {
    fn name(self) -> &'static str {
        match self {
            Self::Fractus => "fractus",
            Self::AptBusy => "apt",
            Self::AptIdle => "apt_quiet",
        }
    }
}

/// One point of the figure.
struct Job {
    testbed: Testbed,
    bytes: u64,
    members: u32,
    name: &'static str,
    groups: OverlappingGroups,
}

pub(super) fn run(options: &Options) -> Result<Report, ExperimentError> {
    let mut jobs = Vec::new();
    for (bytes, _, rounds) in SIZES {
        for &members in MEMBERS.iter().rev() {
            for (name, senders) in sender_counts(members) {
                for testbed in [Testbed::Fractus, Testbed::AptBusy, Testbed::AptIdle] {
                    // One point shows the effect of the other jobs.
                    let shown = bytes == SIZES[0].0 && members == MEMBERS[MEMBERS.len() - 1] && name == "all send";
                    if testbed != Testbed::AptIdle || shown {
                        let mut groups = groups_at(testbed, members, senders, bytes, options.seed);
                        groups.rounds = rounds;
                        jobs.push(Job { testbed, bytes, members, name, groups });
                    }
                }
            }
        }
    }
    let measurements = in_parallel(&jobs, |job| job.groups.run())?;
    let gbps = |testbed: Testbed, bytes: u64, name: &str, members: u32| {
        let is = |job: &Job| job.testbed == testbed && job.bytes == bytes && job.name == name && job.members == members;
        jobs.iter().position(is).map_or(f64::NAN, |at| measurements[at].gbps(bytes))
    };
    Ok(Report {
        name: "figure-10",
        title: "overlapping groups of 2 to 16 members, 10 KB to 100 MB".into(),
        tables: vec![table(&jobs, &measurements)],
        figure: figure(&gbps),
        findings: findings(&gbps),
    })
}

fn groups_at(testbed: Testbed, members: u32, senders: u32, bytes: u64, seed: u64) -> OverlappingGroups {
    if testbed == Testbed::Fractus {
        return OverlappingGroups::new(PaperCluster::Fractus.model(), members, senders, bytes);
    }
    let (model, share_mbps) = scattered(members, seed);
    let mut groups = OverlappingGroups::new(model, members, senders, bytes);
    if testbed == Testbed::AptBusy {
        let racks: Vec<u32> = groups.model.racks.iter().flat_map(|racks| racks.rack_of.iter().copied()).collect();
        let count = racks.iter().max().map_or(0, |last| last + 1);
        let members_of = |rack: u32| racks.iter().filter(|&&of| of == rack).count() as u64;
        groups.uplinks_mbps = (0..count).map(|rack| members_of(rack) * share_mbps).collect();
    }
    groups
}

/// Draws the members' racks on Apt; returns the cluster of these nodes, and a node's share of its uplink.
fn scattered(members: u32, seed: u64) -> (ClusterModel, u64) {
    let mut model = PaperCluster::Apt.model();
    let racks = model.racks.as_mut().expect("Apt has racks");
    let mut nodes: Vec<u32> = (0..APT_RACKS * racks.size).collect();
    Random::new(seed).shuffle(&mut nodes);
    racks.rack_of = nodes.iter().take(members as usize).map(|node| node / racks.size).collect();
    let share_mbps = racks.uplink_mbps / u64::from(racks.size);
    model.nodes = members;
    (model, share_mbps)
}

fn table(jobs: &[Job], measurements: &[RoundsMeasurement]) -> Table {
    let columns = ["cluster", "message_bytes", "block_bytes", "members", "senders", "aggregate_gbps"];
    let mut table = Table::new("", &columns);
    for (Job { testbed, bytes, members, groups, .. }, load) in jobs.iter().zip(measurements) {
        table.push(vec![
            testbed.name().to_owned(),
            bytes.to_string(),
            groups.block_size.to_string(),
            members.to_string(),
            groups.senders.to_string(),
            format!("{:.3}", load.gbps(*bytes)),
        ]);
    }
    table
}

fn figure(gbps: &impl Fn(Testbed, u64, &str, u32) -> f64) -> Figure {
    let mut panels = Vec::new();
    for (bytes, size, _) in SIZES {
        for (testbed, cluster, limit, label) in [
            (Testbed::Fractus, "Fractus", 100.0, "Dotted: the rate of a port."),
            (Testbed::AptBusy, "Apt", 16.0, "Dotted: a node's share of its rack's uplink."),
        ] {
            let lines = sender_counts(2).map(|(name, _)| {
                let points = MEMBERS.iter().map(|&n| (f64::from(n), gbps(testbed, bytes, name, n))).collect();
                Line::new(name, points, LineStyle::Markers)
            });
            // Short messages stay far below the limit.
            let near = bytes > 100_000;
            panels.push(Panel {
                title: Some(format!("{cluster}, {size}")),
                references: near.then(|| Reference::new(limit, "")).into_iter().collect(),
                notes: near.then(|| label.to_owned()).into_iter().collect(),
                ..Panel::new(Axis::linear("members"), Axis::linear("aggregate (Gbit/s)"), Content::Lines(lines.into()))
            });
        }
    }
    let mut figure = Figure::new("Overlapping groups of the same members", panels);
    figure.subtitle = Some(
        "Binomial pipeline, messages counted once, a barrier after each; on Apt other jobs fill the uplinks".into(),
    );
    figure
}

fn findings(gbps: &impl Fn(Testbed, u64, &str, u32) -> f64) -> Vec<Finding> {
    let [large, medium, small] = SIZES.map(|(bytes, ..)| bytes);
    let most = MEMBERS[MEMBERS.len() - 1];
    let fractus = |bytes: u64, name: &str| gbps(Testbed::Fractus, bytes, name, most);
    let all = [large, medium, small].map(|bytes| fractus(bytes, "all send"));
    let one = [large, medium, small].map(|bytes| fractus(bytes, "one sends"));
    let least = MEMBERS.iter().map(|&n| gbps(Testbed::Fractus, large, "all send", n)).fold(f64::INFINITY, f64::min);
    let apt: Vec<f64> = MEMBERS.iter().map(|&n| gbps(Testbed::AptBusy, large, "all send", n)).collect();
    let (apt_first, apt_last) = (apt[0], apt[apt.len() - 1]);
    let quiet = gbps(Testbed::AptIdle, large, "all send", most);
    vec![
        Finding {
            what: format!("Fractus, {most} members, all send 100 MB"),
            paper: "close to the port's 100 Gbit/s".into(),
            here: format!(
                "{:.1} Gbit/s; at least {least:.1} over all group sizes; the limit is n / (n − 1) of a port, as \
                 no member receives its own messages",
                all[0]
            ),
            agrees: all[0] >= 90.0,
        },
        Finding {
            what: format!("Fractus, {most} members: all senders against one, at 100 MB, 1 MB, 10 KB"),
            paper: "concurrent senders come closer to the limit (shape only)".into(),
            here: (0..3).map(|i| format!("{:.1} / {:.1}", all[i], one[i])).collect::<Vec<_>>().join(", ") + " Gbit/s",
            agrees: all.iter().zip(&one).all(|(all, one)| *all >= one * 0.98),
        },
        Finding {
            what: format!("Apt, all send 100 MB, {} to {most} members in seven racks", MEMBERS[0]),
            paper: "approaches 16 Gbit/s for larger groups".into(),
            here: format!(
                "{apt_first:.1} to {apt_last:.1} Gbit/s; {quiet:.1} with {most} members if the other nodes are idle"
            ),
            agrees: (apt_last / 16.0 - 1.0).abs() <= 0.25 && apt_last < apt_first,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_scattered_over_racks_with_their_share_of_the_uplinks() {
        let groups = groups_at(Testbed::AptBusy, 16, 1, 10_000, 0);
        let racks = groups.model.racks.as_ref().unwrap();
        assert_eq!((groups.model.check(), racks.rack_of.len()), (Ok(()), 16));
        assert!(groups.uplinks_mbps.iter().filter(|&&mbps| mbps > 0).count() >= 4);
        assert_eq!(groups.uplinks_mbps.iter().sum::<u64>(), 16 * 16_000);
        assert!(groups_at(Testbed::AptIdle, 16, 1, 10_000, 0).uplinks_mbps.is_empty());
    }
}
