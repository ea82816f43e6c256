//! Measures multicasts to processes of one host against what the host can do, and against MPI.
//!
//! It is the subcommand `rdmc bench` of the program. A [`Bench`] starts that program again for each member, as a process of its own,
//! and gives each a [`ProcessRole`]. What it finds goes to an [`Output`]. [`local`] serves whatever else runs several processes of one
//! program on one host.

#![deny(unsafe_code)]

mod bench;
mod cluster;
mod contestant;
mod copies;
mod error;
mod explain;
mod guard;
mod limits;
pub mod local;
mod measured;
mod mpi;
mod node;
mod options;
mod orders;
mod pattern;
mod picture;
mod plan;
mod process;
mod report;
mod statistics;

pub use bench::{Bench, Output, OutputFormat, Results};
pub use contestant::Contestant;
pub use error::BenchError;
pub use guard::run_guard;
pub use limits::run_sink;
pub use node::run_member;
pub use options::{BenchOptions, Checks, Completion, Delivery};
pub use process::{MemberRole, ProcessRole};
