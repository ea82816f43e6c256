//! Proofs that are run when what they cover has changed.
//!
//! A *tier* is a list of commands that prove something heavy, and a list of the paths whose content can change the outcome
//! (`tiers.toml`). `cargo xtask prove` runs the tiers that are due and records, for each, a digest of its content and its
//! result (`proven.toml`). A tier is due unless the record holds the digest of the tree as it is. So a record that is out
//! of date costs a run, never a proof.

mod digest;
mod record;
mod run;
mod tier;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use digest::digest;
use record::{Proof, Record};
use tier::Tier;

/// The options of `cargo xtask prove`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Tiers to run, due or not [default: all that are due]
    tiers: Vec<String>,
    /// Run all tiers, due or not
    #[arg(long, conflicts_with = "tiers")]
    all: bool,
    /// Print which tiers are due and run nothing; fails if any is
    #[arg(long, conflicts_with = "all")]
    check: bool,
    /// Directories to use instead of those of this workspace, for tests of this command
    #[arg(long, hide = true)]
    root: Option<PathBuf>,
}

/// Executes the command; failures are printed on stderr.
pub(crate) fn execute(options: &Options) -> ExitCode {
    match prove(options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("prove: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what is asked for; returns whether everything is proven.
fn prove(options: &Options) -> Result<bool> {
    let root = options.root.as_deref().unwrap_or(workspace());
    let tiers = Tier::read_all(root)?;
    for name in &options.tiers {
        let known = || tiers.iter().map(|tier| tier.name.as_str()).collect::<Vec<_>>().join(", ");
        ensure!(tiers.iter().any(|tier| tier.name == *name), "there is no tier {name}; there are: {}", known());
    }
    let mut record = Record::read(root)?;
    record.retain(|name| tiers.iter().any(|tier| tier.name == name));
    let mut all_proven = true;
    for tier in &tiers {
        let content = digest(root, tier)?;
        let proven = record.proof(&tier.name).filter(|proof| proof.content == content);
        let asked = options.all || options.tiers.contains(&tier.name);
        match proven {
            Some(proof) if !asked => println!("{}: proven for this tree: {}", tier.name, proof.result),
            _ if !asked && !options.tiers.is_empty() => {}
            _ if options.check => {
                println!("{}: due: it proves {}", tier.name, tier.proves);
                all_proven = false;
            }
            _ => all_proven &= run_tier(root, tier, &content, &mut record)?,
        }
    }
    Ok(all_proven)
}

/// Runs a tier and records its result; a tier that fails loses its record.
fn run_tier(root: &Path, tier: &Tier, content: &str, record: &mut Record) -> Result<bool> {
    println!("{}: running: it proves {}", tier.name, tier.proves);
    let begun = Instant::now();
    let outcome = run::run(root, tier);
    let seconds = begun.elapsed().as_secs();
    let result = match outcome {
        // Only the tree that was read before and is there still was proven.
        Ok(result) if digest(root, tier)? == content => result,
        Ok(_) => {
            println!(
                "{}: FAILED after {seconds} s: files that it covers changed while it ran; run it again",
                tier.name
            );
            return Ok(false);
        }
        Err(error) => {
            println!("{}: FAILED after {seconds} s: {error:#}", tier.name);
            record.remove(&tier.name);
            record.write(root)?;
            return Ok(false);
        }
    };
    let result = format!("{result}; {seconds} s");
    println!("{}: proven: {result}", tier.name);
    record.insert(&tier.name, Proof { content: content.to_owned(), result });
    record.write(root).context("the proof is not recorded")?;
    Ok(true)
}

/// Returns the root of the workspace.
fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a directory of the workspace")
}

#[cfg(test)]
mod tests;
