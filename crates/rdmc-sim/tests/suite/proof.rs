//! The amount of long tests: a short form by default, everything with `RDMC_PROOF=full`.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::io::Write as _;

/// Returns the short or the full amount of a test. Prints a short one to stderr, past the capture of output.
pub(crate) fn amount<T: Debug>(test: &str, short: T, full: T) -> T {
    if is_full(std::env::var_os("RDMC_PROOF").as_deref()) {
        return full;
    }
    let line = format!("{test}: short form, {short:?}; RDMC_PROOF=full does {full:?}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("stderr takes a line");
    short
}

/// Returns whether the value of `RDMC_PROOF` asks for the full form.
fn is_full(value: Option<&OsStr>) -> bool {
    match value {
        None => false,
        Some(value) if value == "full" => true,
        Some(other) => panic!("RDMC_PROOF is {other:?}; leave it unset for the short form, or set it to full"),
    }
}

#[test]
fn only_the_word_full_asks_for_the_full_form() {
    assert!(!is_full(None));
    assert!(is_full(Some(OsStr::new("full"))));
    for other in ["", "1", "FULL", "short"] {
        assert!(std::panic::catch_unwind(|| is_full(Some(OsStr::new(other)))).is_err(), "{other:?}");
    }
}
