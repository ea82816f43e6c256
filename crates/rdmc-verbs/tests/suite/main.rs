//! The integration tests of the crate, linked as one program.

#![cfg(target_os = "linux")]

mod conformance;
mod lab;
