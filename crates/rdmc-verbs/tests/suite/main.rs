//! The integration tests of the crate, linked as one program.

#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Mutex;

mod conformance;
mod lab;

/// Prints once that tests are skipped, and why, also where the harness captures output.
fn skip(reason: &'static str) {
    static PRINTED: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    if PRINTED.lock().expect("no test panics while it prints").insert(reason) {
        let _ = writeln!(std::io::stdout(), "skipped: {reason}");
    }
}
