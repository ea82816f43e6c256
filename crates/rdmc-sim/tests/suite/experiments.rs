//! What the papers state about times holds in the simulation, whatever else changes.

use rdmc_sim::experiments::{EXPERIMENTS, Options};

/// Carries an experiment out and asks that every finding agrees with the paper.
fn agrees(name: &str) {
    let experiment = EXPERIMENTS.iter().find(|experiment| experiment.name == name).expect("it is one of them");
    let report = experiment.run(&Options::default()).expect("it can be carried out");
    let differing: Vec<String> =
        report.findings.iter().filter(|finding| !finding.agrees).map(ToString::to_string).collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    assert!(report.figure.to_svg().starts_with("<svg") && !report.tables.is_empty());
}

/// Every n from 2 to 512 within 1 % of (k − 1 + ⌈log₂ n⌉) block times and the stated latencies; 512 nodes take less than
/// 1.05 times as long as 2.
#[test]
fn five_hundred_nodes_take_hardly_longer_than_two() {
    agrees("8");
}

#[test]
fn a_transfer_is_block_transfers_to_99_percent() {
    agrees("5");
}

#[test]
fn relays_have_the_slack_of_the_formula() {
    agrees("slack");
}

#[test]
fn bandwidth_has_its_peak_between_small_and_large_blocks() {
    agrees("6");
}
