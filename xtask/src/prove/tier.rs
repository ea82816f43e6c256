//! The tiers, as `tiers.toml` lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

/// A heavy proof, and the paths whose content can change its outcome.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tier {
    /// What the command line and the record call it.
    pub(crate) name: String,
    /// Ends the sentence "it proves …".
    pub(crate) proves: String,
    /// Packages that its steps compile; all crates of ours that these use must be covered.
    pub(crate) packages: Vec<String>,
    /// The workspace that the packages belong to.
    #[serde(default = "main_manifest")]
    pub(crate) manifest: String,
    /// Files and directories, from the root of the repository; [`COMMON`] is covered besides.
    pub(crate) covers: Vec<String>,
    /// Commands that end with status 0 if the proof holds, run in the root of the repository.
    pub(crate) steps: Vec<Step>,
}

/// A command of a tier.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    /// The program and its arguments.
    pub(crate) run: Vec<String>,
    /// Variables of its environment.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// Tests that must be among those that pass, by the ends of their paths.
    #[serde(default)]
    pub(crate) tests: Vec<String>,
    /// Words with which the result begins in a line of the output, if it is not a number of tests.
    #[serde(default)]
    pub(crate) result: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tiers {
    tier: Vec<Tier>,
}

impl Tier {
    /// Reads the tiers of a repository.
    pub(crate) fn read_all(root: &Path) -> Result<Vec<Self>> {
        let path = root.join(TIERS);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let Tiers { tier: tiers } =
            toml::from_str(&text).with_context(|| format!("{} is malformed", path.display()))?;
        let mut names = BTreeSet::new();
        for tier in &tiers {
            let name = &tier.name;
            ensure!(names.insert(name), "{TIERS}: two tiers are called {name}");
            ensure!(!tier.steps.is_empty(), "{TIERS}: the tier {name} has no steps");
            ensure!(tier.steps.iter().all(|step| !step.run.is_empty()), "{TIERS}: a step of {name} runs nothing");
            ensure!(!tier.covers.is_empty(), "{TIERS}: the tier {name} covers nothing");
        }
        Ok(tiers)
    }
}

fn main_manifest() -> String {
    "Cargo.toml".to_owned()
}

/// Where the tiers are listed.
pub(crate) const TIERS: &str = "xtask/tiers.toml";
/// What every tier covers: dependencies and their versions, profiles, the compiler and its settings.
pub(crate) const COMMON: [&str; 4] = ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml", ".cargo"];
