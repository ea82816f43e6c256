//! The record of what was proven, a file that is committed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

/// What was proven of a tier, and how it went.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Proof {
    /// The digest of what the tier covered.
    pub(crate) content: String,
    /// One line about how it went.
    pub(crate) result: String,
}

/// The proofs by the names of their tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Record(BTreeMap<String, Proof>);

impl Record {
    /// Reads the record; a repository without one has proven nothing.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let path = root.join(RECORD);
        match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text)
                .with_context(|| format!("{} is malformed; restore it, or remove it to prove anew", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Writes the record.
    pub(crate) fn write(&self, root: &Path) -> Result<()> {
        let mut text = HEAD.to_owned();
        for (name, Proof { content, result }) in &self.0 {
            let (content, result) = (serde_json::to_string(content)?, serde_json::to_string(result)?);
            write!(text, "\n[{name}]\ncontent = {content}\nresult = {result}\n")?;
        }
        let path = root.join(RECORD);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    pub(crate) fn proof(&self, tier: &str) -> Option<&Proof> {
        self.0.get(tier)
    }

    pub(crate) fn insert(&mut self, tier: &str, proof: Proof) {
        self.0.insert(tier.to_owned(), proof);
    }

    pub(crate) fn remove(&mut self, tier: &str) {
        self.0.remove(tier);
    }

    /// Forgets the proofs of other tiers than those wanted.
    pub(crate) fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| wanted(name));
    }
}

/// Where the record is.
pub(crate) const RECORD: &str = "xtask/proven.toml";
const HEAD: &str = "\
# Written by `cargo xtask prove`. A tier of tiers.toml is proven while `content` is the digest of what it covers.
";
