//! The tests of the crate from outside, as one program.

#![cfg(target_os = "linux")]

mod conformance;
mod lab;
