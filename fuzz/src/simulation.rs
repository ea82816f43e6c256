//! Targets for the files of the simulator: scenarios, campaign cases, models of clusters.

use rdmc_sim::campaign::Case;
use rdmc_sim::{ClusterModel, Scenario};

use crate::allocation::{PER_CHARACTER, bounded};
use crate::{Seed, named};

/// Checks that an accepted scenario is valid.
pub fn scenario(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let Ok(scenario) = bounded(bytes.len(), PER_CHARACTER, || text.parse::<Scenario>()) else { return };
    scenario.cluster.check().expect("it was checked");
    let nodes = scenario.cluster.nodes;
    for group in &scenario.groups {
        assert!(group.members.iter().all(|&node| node < nodes));
        assert!(group.block_size > 0);
    }
}

/// Checks that a campaign case survives a round trip, and is accepted or refused.
pub fn campaign_case(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let Ok(case) = bounded(bytes.len(), PER_CHARACTER, || Case::from_json(text)) else { return };
    assert_eq!(Case::from_json(&case.to_json()).expect("it was written here"), case);
    if bounded(bytes.len(), PER_CHARACTER, || case.check()).is_ok() {
        assert!(case.groups.iter().flat_map(|group| &group.members).all(|member| member.node < case.model.nodes));
    }
    let _ = case.to_string();
}

/// Checks that an accepted model survives a round trip, and knows the rack of every node.
pub fn cluster_model(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let Ok(model) = bounded(bytes.len(), PER_CHARACTER, || toml::from_str::<ClusterModel>(text)) else { return };
    if model.check().is_err() {
        return;
    }
    let written = serde_json::to_string(&model).expect("a model is plain data");
    assert_eq!(serde_json::from_str::<ClusterModel>(&written).expect("it was written here"), model);
    for node in 0..model.nodes {
        assert!(model.rack_of(node) < 1024);
    }
}

/// Seeds of [`scenario`].
pub fn scenario_seeds() -> Vec<Seed> {
    named([
        ("racks", include_bytes!("../../examples/scenarios/racks.toml").to_vec()),
        ("faults", include_bytes!("../../examples/scenarios/faults.toml").to_vec()),
    ])
}

/// Seeds of [`campaign_case`].
pub fn campaign_case_seeds() -> Vec<Seed> {
    let short = |text: &String| text.len() < 4096;
    let cases = (0..).map(|seed| (seed.to_string(), Case::draw(seed).to_json())).filter(|(_, text)| short(text));
    named(cases.take(2).map(|(name, text)| (name, text.into_bytes())))
}

/// Seeds of [`cluster_model`].
pub fn cluster_model_seeds() -> Vec<Seed> {
    named([
        ("apt", include_bytes!("../../crates/rdmc-sim/clusters/apt.toml").to_vec()),
        ("fractus", include_bytes!("../../crates/rdmc-sim/clusters/fractus.toml").to_vec()),
        ("kbnets", include_bytes!("../../crates/rdmc-sim/clusters/kbnets.toml").to_vec()),
    ])
}
