//! The tests of the crate from outside, as one program.

mod conformance;
mod decorators;
mod forwarding;
#[cfg(target_os = "linux")]
mod shm;
mod tcp;
