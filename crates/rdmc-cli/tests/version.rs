//! The program starts. As a test of this package it also has `cargo test --workspace` build the program, which the
//! integration tests run.

use std::process::Command;

#[test]
fn the_program_tells_its_version() {
    let output = Command::new(env!("CARGO_BIN_EXE_rdmc")).arg("--version").output().expect("the program runs");
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), concat!("rdmc ", env!("CARGO_PKG_VERSION")));
}
