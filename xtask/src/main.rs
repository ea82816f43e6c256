//! The project's own chores, run by `cargo xtask`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod lab;
mod prove;

/// What `cargo xtask` can do.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Xtask {
    /// Run commands and tests in a small virtual machine with RDMA devices in software
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[command(subcommand)]
    Lab(lab::Command),
    /// Run the heavy proofs whose files have changed since they ran last, and record their results
    ///
    /// Commit xtask/proven.toml afterwards. xtask/tiers.toml lists the tiers: what each proves, which files it covers,
    /// and its commands. `.ci/run` ends with this command.
    Prove(prove::Options),
}

fn main() -> ExitCode {
    match Xtask::parse() {
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        Xtask::Lab(command) => lab::execute(&command),
        Xtask::Prove(options) => prove::execute(&options),
    }
}
