//! Completion scripts and manual pages, made from the definition of the command line.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::Cli;

/// Prints the completion script for `shell`.
pub(crate) fn completions(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rdmc", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

/// Prints the main page, or writes all pages to `dir`.
pub(crate) fn man(dir: Option<&Path>) -> anyhow::Result<()> {
    let Some(dir) = dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        io::stdout().write_all(&page)?;
        return Ok(());
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .with_context(|| format!("the manual pages cannot be written to {}", dir.display()))
}

#[cfg(test)]
mod reference;
