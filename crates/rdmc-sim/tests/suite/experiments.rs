//! The papers' statements about times hold in the simulation, except for the reviewed differences.
//!
//! `rdmc sim figure all` compares all experiments with the list of differences, and fails if they differ in other ways.

use rdmc_sim::experiments::{EXPERIMENTS, KnownDifferences, Options, Report};

use crate::proof;

fn run(name: &str, options: &Options) -> Report {
    let experiment = EXPERIMENTS.iter().find(|experiment| experiment.name == name).expect("the experiment exists");
    let report = experiment.run(options).expect("the experiment runs");
    assert!(report.figure.to_svg().starts_with("<svg") && !report.tables.is_empty());
    report
}

/// Runs an experiment and asserts that its findings differ exactly as the reviewed list says.
fn differs_as_listed(name: &str) {
    let report = run(name, &Options::default());
    KnownDifferences::committed().check(&[report]).unwrap_or_else(|error| panic!("{error}"));
}

/// All group sizes are within 1 % of (k − 1 + ⌈log₂ n⌉) block times and the stated latencies; 64 nodes take less than
/// 1.05 times as long as 2.
#[test]
fn many_nodes_take_hardly_longer_than_two() {
    // `rdmc sim figure 8` plays all 512, and judges them alike.
    let report = run("8", &Options { members_max: Some(65), ..Options::default() });
    let differing: Vec<String> =
        report.findings.iter().filter(|finding| !finding.agrees).map(ToString::to_string).collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn a_transfer_is_block_transfers_to_99_percent() {
    differs_as_listed("5");
}

#[test]
fn relays_have_the_slack_of_the_formula() {
    differs_as_listed("slack");
}

#[test]
fn bandwidth_has_its_peak_between_small_and_large_blocks() {
    differs_as_listed("6");
}

/// The other experiments: those with a test of their own are above.
#[test]
fn findings_differ_exactly_as_the_reviewed_list_says() {
    const ABOVE: [&str; 4] = ["5", "6", "8", "slack"];
    let all = EXPERIMENTS.iter().map(|experiment| experiment.name).filter(|name| !ABOVE.contains(name)).collect();
    let names = proof::amount(
        "findings_differ_exactly_as_the_reviewed_list_says",
        vec!["11", "isolation", "wan-channels", "wan-policer"],
        all,
    );
    names.into_iter().for_each(differs_as_listed);
}
