//! The lab: a small virtual machine with RDMA devices in software, over the host's files.
//!
//! The machine is user-mode Linux, a kernel compiled as an ordinary program, which needs neither root nor KVM and boots
//! in half a second. `build` makes it and unpacks the RDMA tools beside it, both into `cache`; `boot` runs a command in it
//! by way of the script `lab/init.sh`; `suites` lists what `cargo xtask lab test` runs and `trial` runs it.

mod boot;
mod build;
mod cache;
mod script;
mod suites;
mod trial;

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};

use boot::Guest;
use cache::Cache;

/// A subcommand of `cargo xtask lab`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make what the lab needs, if it is not there: download packages, compile the kernel (minutes)
    Build,
    /// Run a command in the lab and exit with its status
    ///
    /// The command runs as root, in the same directory and environment and with the host's files. What it writes is
    /// thrown away, except in the directories named by --writable. Node 1 has the address 10.77.0.1 on the interface veth1
    /// and the RDMA device rxe1 (or siw1), and so on. RDMC_LAB_NODES and RDMC_LAB_DRIVER tell the command where it is.
    ///
    /// Exit status: the command's; 124 after the time limit; 125 if the lab itself failed.
    ///
    /// To run tests, CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER can be "$PWD/target/debug/xtask lab run --", but not
    /// "cargo xtask lab run --": that would run itself by itself.
    Run {
        #[command(flatten)]
        machine: Machine,
        /// The command and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "CMD")]
        command: Vec<OsString>,
    },
    /// Start an interactive shell in the lab
    Shell {
        #[command(flatten)]
        machine: Machine,
    },
    /// Build the test suites on the host and run them in the lab
    Test {
        /// Run only the suites with this in their names; some run only so
        filter: Option<String>,
        /// Show the guest kernel's messages while they come
        #[arg(long, short)]
        verbose: bool,
    },
    /// Build the measurements of the fabric verbs on the host and run them in the lab
    ///
    /// Without arguments: all of them, first with ports as fast as the processor goes, then with ports of 200 Mbit/s, where
    /// the network is what limits, as in most places.
    Bench {
        /// Rate of each node's port, in either direction, in Mbit/s
        #[arg(long = "port-rate", value_name = "MBIT", value_parser = clap::value_parser!(u32).range(1..))]
        port_rate_mbit: Option<u32>,
        /// Arguments for the program that measures [default: all of its parts in turn]
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
        arguments: Vec<OsString>,
    },
    /// Remove what was built
    Clean,
}

/// What the machine is like.
#[derive(Clone, Debug, Args)]
pub(crate) struct Machine {
    /// Number of nodes, each with one RDMA device
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=250))]
    pub(crate) nodes: u8,
    /// What the devices are: rxe is RoCE v2, siw is iWARP
    #[arg(long, default_value_t = Driver::Rxe)]
    pub(crate) driver: Driver,
    /// Memory of the machine, which also holds what the command writes
    #[arg(long = "memory", value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) memory_mib: u32,
    /// Rate of each node's port, in either direction, in Mbit/s [default: as fast as the processor goes]
    ///
    /// From 300 on the timers of the shaping itself take the processor.
    #[arg(long = "port-rate", value_name = "MBIT", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) port_rate_mbit: Option<u32>,
    /// Time limit in seconds [default: 300, for a shell none]
    #[arg(long = "timeout", value_name = "SECS")]
    pub(crate) timeout_s: Option<u32>,
    /// Directory of the host that the command may really write to; repeatable
    #[arg(long, value_name = "DIR")]
    pub(crate) writable: Vec<PathBuf>,
    /// Where to save the guest kernel's log at the end
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel_log: Option<PathBuf>,
    /// Show the guest kernel's messages while they come
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

/// The kernel's driver of the RDMA devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Driver {
    /// RDMA over UDP (RoCE v2).
    Rxe,
    /// RDMA over TCP (iWARP).
    Siw,
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rxe => "rxe",
            Self::Siw => "siw",
        })
    }
}

/// Executes a subcommand; what fails is told on stderr.
pub(crate) fn execute(command: &Command) -> ExitCode {
    let (result, status_failed) = match command {
        // A status of its own, which hardly any command in the lab ends with.
        Command::Run { .. } | Command::Shell { .. } => (execute_inside(command), STATUS_LAB_FAILED),
        _ => (execute_inside(command), 1),
    };
    ExitCode::from(result.unwrap_or_else(|error| {
        eprintln!("lab: {error:#}");
        status_failed
    }))
}

fn execute_inside(command: &Command) -> Result<u8> {
    let cache = Cache::locate()?;
    match command {
        Command::Build => {
            let parts = build::parts(&cache)?;
            eprintln!("lab: ready: {} and {}", parts.kernel.display(), parts.layer.display());
            Ok(0)
        }
        Command::Run { machine, command } => {
            Ok(boot::boot(&build::parts(&cache)?, machine, &Guest::Run(command))?.status())
        }
        Command::Shell { machine } => Ok(boot::boot(&build::parts(&cache)?, machine, &Guest::Shell)?.status()),
        Command::Test { filter, verbose } => {
            build::parts(&cache)?;
            trial::run_suites(filter.as_deref().unwrap_or_default(), *verbose)
        }
        Command::Bench { port_rate_mbit, arguments } => {
            trial::run_bench(&build::parts(&cache)?, *port_rate_mbit, arguments)
        }
        Command::Clean => cache.clean().map(|()| 0),
    }
}

/// Exit status when the lab itself fails, as of `env` and `timeout`.
const STATUS_LAB_FAILED: u8 = 125;
