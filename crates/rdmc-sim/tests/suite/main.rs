//! The simulator's tests, in one binary.
//!
//! Long tests have a short form, which is the default, and a full one: see [`proof`].

mod announced;
mod campaign;
mod conformance;
mod distance;
mod exhaustive;
mod experiments;
mod leaving;
mod long_paths;
mod proof;
mod receipts;
mod sessions;
mod shares;
mod slow;
mod snapshot;
mod stable;
mod starting;
mod world;
