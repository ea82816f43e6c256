//! `rdmc sim`: the runtime on a modelled network, in virtual time.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use rdmc_files::words::count;
use rdmc_sim::campaign::exhaustive::{self, Bounds, Survey};
use rdmc_sim::campaign::{self, Case, Report};
use rdmc_sim::experiments::{EXPERIMENTS, Experiment, KnownDifferences, Options};
use rdmc_sim::{Played, PlayedGroup, Scenario, ScenarioError, to_trace};
use serde::Serialize;

use crate::cli::{ALL_FIGURES, CampaignOptions, FigureOptions, SimCommand, SimOptions};
use crate::exit::Exit;
use crate::progress::{OutputOptions, Reporter, Screen};

/// Plays a scenario, or runs a subcommand.
pub(crate) fn run(options: &SimOptions, screen: Screen) -> anyhow::Result<()> {
    match (&options.command, &options.scenario) {
        (Some(SimCommand::Figure(options)), _) => figures(options),
        (Some(SimCommand::Campaign(options)), _) => hunt(options, screen),
        (None, Some(scenario)) => play(scenario, options),
        (None, None) => Err(Exit::Usage.error("name a scenario with --scenario FILE.toml")),
    }
}

fn play(path: &Path, options: &SimOptions) -> anyhow::Result<()> {
    let named = || path.display().to_string();
    let text = read_text(path)?;
    let scenario: Scenario = text.parse().with_context(named).context(Exit::Usage)?;
    // Opened before a scenario that may take long.
    let trace = options.trace.as_deref();
    let trace =
        trace.map(|path| File::create(path).with_context(|| path.display().to_string()).map(|file| (path, file)));
    let trace = trace.transpose()?;
    let began = Instant::now();
    let played = scenario.play(options.seed, options.trace.is_some());
    let took = began.elapsed();
    let recorded = match &played {
        Ok(played) => &played.recorded[..],
        Err(ScenarioError::Stalled { recorded, .. }) => recorded,
        Err(_) => &[],
    };
    let traced = trace.map_or(Ok(()), |(path, mut file)| {
        file.write_all(to_trace(recorded).as_bytes()).with_context(|| path.display().to_string())
    });
    let played = played.with_context(named)?;
    let text =
        if options.json { serde_json::to_string(&described(&played))? + "\n" } else { told(&played, took, options) };
    std::io::stdout().write_all(text.as_bytes())?;
    traced
}

/// Reads a file that a user has written.
fn read_text(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path);
    text.map_err(|error| match error.kind() {
        ErrorKind::InvalidData | ErrorKind::IsADirectory => Exit::Usage.error(format!("{}: {error}", path.display())),
        _ => anyhow::Error::new(error).context(path.display().to_string()),
    })
}

/// Describes in a table what has happened.
fn told(played: &Played, took: Duration, options: &SimOptions) -> String {
    let mut text = String::from("  group  message        bytes      sent at     complete after      Gbit/s  skew\n");
    for (number, group) in played.groups.iter().enumerate() {
        for (place, message) in group.messages.iter().enumerate() {
            let _ = write!(text, "{:>7}  {place:>7}  {:>11}  {:>11}", number + 1, message.bytes, ms(message.began));
            let _ = match &message.delivered {
                Ok(delivered) => {
                    let latency = message.latency().unwrap_or_default();
                    let first = delivered.iter().min().copied().unwrap_or_default();
                    let skew = (message.began + latency).saturating_sub(first);
                    writeln!(text, "  {:>17}  {:>10}  {}", ms(latency), gbits(message.bytes, latency), ms(skew))
                }
                Err(error) => writeln!(text, "  not complete: {error}"),
            };
        }
        if let Err(error) = &group.closed {
            let _ = writeln!(text, "{:>7}  {error}", number + 1);
        }
    }
    let all = played.groups.iter().all(|group| group.closed.is_ok());
    let verdict = if all { "every group closed: every member has everything" } else { "not every group closed" };
    let _ = writeln!(text, "{verdict}, after {} of virtual time", ms(played.duration));
    let _ = writeln!(text, "seed {}, digest {:016x}, simulated in {took:.2?}", options.seed, played.digest);
    text
}

fn described(played: &Played) -> Description {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let group = |group: &PlayedGroup| GroupDescription {
        members: group.members.iter().map(|node| node.0).collect(),
        messages: group
            .messages
            .iter()
            .map(|message| MessageDescription {
                bytes: message.bytes,
                sent_at_ns: nanos(message.began),
                delivered_at_ns: message
                    .delivered
                    .as_ref()
                    .ok()
                    .map(|times| times.iter().copied().map(nanos).collect()),
                error: message.delivered.as_ref().err().map(ToString::to_string),
            })
            .collect(),
        failure: group.closed.as_ref().err().map(ToString::to_string),
    };
    Description {
        groups: played.groups.iter().map(group).collect(),
        duration_ns: nanos(played.duration),
        digest: format!("{:016x}", played.digest),
    }
}

#[derive(Serialize)]
struct Description {
    groups: Vec<GroupDescription>,
    duration_ns: u64,
    digest: String,
}

#[derive(Serialize)]
struct GroupDescription {
    members: Vec<u32>,
    messages: Vec<MessageDescription>,
    failure: Option<String>,
}

#[derive(Serialize)]
struct MessageDescription {
    bytes: u64,
    sent_at_ns: u64,
    delivered_at_ns: Option<Vec<u64>>,
    error: Option<String>,
}

fn figures(options: &FigureOptions) -> anyhow::Result<()> {
    let wanted: BTreeSet<&str> = options.names.iter().map(String::as_str).collect();
    let chosen = |experiment: &&Experiment| wanted.contains(ALL_FIGURES) || wanted.contains(experiment.name);
    if options.workload.is_some() && !(wanted.contains("9") || wanted.contains(ALL_FIGURES)) {
        return Err(Exit::Usage.error("--workload is for experiment 9"));
    }
    let asked = Options { seed: options.seed, workload: options.workload.clone(), ..Options::default() };
    let mut out = std::io::stdout();
    let mut reports = Vec::new();
    for experiment in EXPERIMENTS.iter().filter(chosen) {
        let began = Instant::now();
        let report = experiment.run(&asked).with_context(|| format!("experiment {}", experiment.name))?;
        let files = report.write(&options.out)?;
        writeln!(out, "{}: {} ({:.1?})", report.name, report.title, began.elapsed())?;
        for finding in &report.findings {
            writeln!(out, "  {finding}")?;
        }
        let names = files.iter().filter_map(|file| file.file_name()?.to_str());
        writeln!(out, "  {}: {}", options.out.display(), names.collect::<Vec<_>>().join(" "))?;
        out.flush()?;
        reports.push(report);
    }
    if asked != Options::default() {
        writeln!(
            out,
            "not compared with the reviewed list of differences, which is for seed 1 and the drawn workload"
        )?;
        return Ok(());
    }
    Ok(KnownDifferences::committed().check(&reports)?)
}

fn hunt(options: &CampaignOptions, screen: Screen) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut out = std::io::stdout();
    let reporter = Reporter::new(OutputOptions { json: false, quiet: false }, screen);
    let report = match &options.case {
        None if options.exhaustive => {
            let Survey { histories, operations, report } = survey(&Bounds::all(), &reporter);
            let (groups, begun) = (count(histories, "group"), count(operations, "operation"));
            writeln!(out, "{groups}, whose members begin {begun} without a fault")?;
            report
        }
        Some(path) => {
            let named = || path.display().to_string();
            let text = read_text(path)?;
            let case = Case::from_json(&text).with_context(named).context(Exit::Usage)?;
            case.check().map_err(anyhow::Error::msg).with_context(named).context(Exit::Usage)?;
            Report { played: 1, failures: campaign::judge(&case).into_iter().collect() }
        }
        None => play_seeds(&options.seeds, &reporter),
    };
    for (number, failure) in report.failures.iter().enumerate() {
        writeln!(out, "seed {}: {failure}", failure.seed)?;
        if options.exhaustive && number >= WRITTEN_MAX {
            continue;
        }
        let path = match options.exhaustive {
            true => format!("exhaustive-{}.json", number + 1),
            false => format!("case-{}.json", failure.seed),
        };
        let write = |case: &Case| std::fs::write(&path, case.to_json()).with_context(|| path.clone());
        if options.shrink {
            let case = failure.shrunk(SHRINK_PLAYS);
            write(&case)?;
            writeln!(out, "smaller:\n{case}\nreplay: rdmc sim campaign --case {path}\n")?;
        } else if options.exhaustive {
            write(&failure.case)?;
            writeln!(out, "replay: rdmc sim campaign --case {path} --shrink\n")?;
        } else if options.case.is_none() {
            writeln!(out, "replay: rdmc sim campaign --seeds {} --shrink\n", failure.seed)?;
        }
    }
    let (played, failed, took) = (report.played, report.failures.len(), began.elapsed());
    if failed > 0 {
        anyhow::bail!("{failed} of {} failed, after {took:.1?}", count(played, "case"));
    }
    writeln!(out, "{}, none failed, after {took:.1?}", count(played, "case"))?;
    Ok(())
}

/// Plays the cases of all seeds, and shows the progress.
fn play_seeds(seeds: &Range<u64>, reporter: &Reporter) -> Report {
    let mut report = Report::default();
    let bar = reporter.work_bar("playing seeds", seeds.end.saturating_sub(seeds.start));
    let mut first = seeds.start;
    while first < seeds.end {
        let end = first.saturating_add(SEEDS_AT_ONCE).min(seeds.end);
        let Report { played, failures } = campaign::run(first..end);
        report.played += played;
        report.failures.extend(failures);
        bar.set(report.played);
        first = end;
    }
    report
}

/// Plays everything within bounds, by the sizes of groups and messages, and shows the progress.
fn survey(all: &Bounds, reporter: &Reporter) -> Survey {
    let sizes = all.members.clone().flat_map(|members| all.blocks.clone().map(move |blocks| (members, blocks)));
    // Approximate cost: each operation is a case, and a case has as many operations.
    let cost = |(members, blocks): (u32, u32)| u64::from(members * members * (blocks + 1) * (blocks + 1));
    let bar = reporter.work_bar("", sizes.clone().map(cost).sum());
    let (mut survey, mut done) = (Survey::default(), 0);
    for (members, blocks) in sizes {
        bar.label(&format!("{}, {}", count(members, "member"), count(blocks, "block")));
        let bounds = Bounds { members: members..=members, blocks: blocks..=blocks, harms: all.harms.clone() };
        let Survey { histories, operations, report: Report { played, failures } } = exhaustive::run(&bounds);
        survey.histories += histories;
        survey.operations += operations;
        survey.report.played += played;
        survey.report.failures.extend(failures);
        done += cost((members, blocks));
        bar.set(done);
    }
    survey
}

fn ms(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}

fn gbits(bytes: u64, time: Duration) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a rate to be read")]
    let bits = bytes as f64 * 8.0;
    if time.is_zero() { "-".to_owned() } else { format!("{:.2}", bits / time.as_secs_f64() / 1e9) }
}

/// Number of seeds between two updates of the progress.
const SEEDS_AT_ONCE: u64 = 128;
/// Greatest number of cases of an exhaustive campaign that are written.
const WRITTEN_MAX: usize = 20;
/// Number of cases that are played to find a smaller one.
const SHRINK_PLAYS: usize = 2000;

#[cfg(test)]
mod tests {
    use rdmc_sim::campaign::exhaustive::Harm;

    use super::*;

    fn reporter() -> Reporter {
        Reporter::new(OutputOptions { json: false, quiet: true }, Screen::new())
    }

    #[test]
    fn parts_of_a_campaign_add_up_to_the_whole() {
        let bounds = Bounds { members: 2..=3, blocks: 1..=2, harms: vec![Harm::Pauses] };
        assert_eq!(survey(&bounds, &reporter()), exhaustive::run(&bounds));
        let seeds = 7..8 + SEEDS_AT_ONCE;
        assert_eq!(play_seeds(&seeds, &reporter()), Report { played: SEEDS_AT_ONCE + 1, failures: Vec::new() });
    }
}
