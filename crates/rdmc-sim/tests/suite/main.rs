//! The simulator's tests, in one binary.

mod campaign;
mod conformance;
mod exhaustive;
mod experiments;
mod leaving;
mod slow;
mod snapshot;
mod starting;
mod world;
