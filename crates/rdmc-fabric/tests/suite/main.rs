//! The integration tests of the crate, linked as one program.

mod conformance;
mod decorators;
mod forwarding;
#[cfg(target_os = "linux")]
mod shm;
mod tcp;
