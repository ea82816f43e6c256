//! Measures multicasts to processes of one host, and compares with the limits of the host and with MPI.
//!
//! This is the subcommand `rdmc bench` of the program. A [`Bench`] starts that program again as a process for each
//! member, which gets a [`ProcessRole`]. A [`FlowsBench`] does the same for flows of single verbs beside each other.
//! The results go to an [`Output`]. Messages name the options of the subcommand. [`local`] helps to run several
//! processes of one program on one host.

#![deny(unsafe_code)]

mod bench;
mod cluster;
mod contestant;
mod copies;
mod error;
mod explain;
mod flows;
mod guard;
mod limits;
pub mod local;
mod measured;
mod mpi;
mod node;
mod options;
mod orders;
mod output;
mod pattern;
mod picture;
mod plan;
mod process;
mod report;
mod rounds;
mod statistics;

pub use bench::{Bench, Results};
pub use contestant::Contestant;
pub use error::BenchError;
pub use flows::flow::Flow;
pub use flows::process::{run_flow_source, run_flow_target};
pub use flows::server::FlowServer;
pub use flows::{FlowFabric, FlowsBench, FlowsOptions, FlowsResults};
pub use guard::run_guard;
pub use limits::run_sink;
pub use node::run_member;
pub use options::{BenchOptions, Checks, Completion, Delivery, Ring, RingChoice};
pub use output::{Output, OutputFormat};
pub use process::{MemberRole, ProcessRole};
