//! The project's own chores, run by `cargo xtask`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod lab;

/// What `cargo xtask` can do.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Xtask {
    /// Run commands and tests in a small virtual machine with RDMA devices in software
    #[command(subcommand)]
    Lab(lab::Command),
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn main() -> ExitCode {
    match <Xtask as clap::Parser>::parse() {
        Xtask::Lab(command) => lab::execute(&command),
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn main() -> ExitCode {
    eprintln!("xtask: the lab is an x86-64 Linux kernel that runs as a program of its host; it needs x86-64 Linux");
    ExitCode::FAILURE
}
