//! Tests across crates and processes, in one binary that is linked once.

mod ahead;
mod api;
mod batches;
mod bench;
mod cancellation;
mod choice;
mod cluster;
mod contention;
mod delta;
mod failure;
#[cfg(target_os = "linux")]
mod fleet;
#[cfg(target_os = "linux")]
mod flows;
mod gateway;
mod headers;
mod integrity;
mod joining;
#[cfg(target_os = "linux")]
mod lab;
mod members;
mod mistakes;
mod multicast;
#[cfg(target_os = "linux")]
mod network;
mod operations;
mod outcomes;
mod pages;
mod program;
mod promises;
mod reading;
mod receipts;
mod recovery;
mod remote;
mod requirement;
mod resume;
mod rings;
mod rooms;
#[cfg(target_os = "linux")]
mod rounds;
mod security;
mod sessions;
#[cfg(target_os = "linux")]
mod sharing;
mod sim;
#[cfg(target_os = "linux")]
mod streams;
mod survivors;
#[cfg(target_os = "linux")]
mod terminal;
