//! One binary of tests that cross crates and processes: linked once.

mod cluster;
mod multicast;
