//! One binary of tests that cross crates and processes: linked once.

mod cluster;
mod failure;
mod multicast;
mod program;
mod rooms;
