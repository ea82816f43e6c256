//! What tests need of the machine, and how they say that it is missing.

use std::io::Write;

/// Reports that a test is skipped because the machine lacks `need`, also where the harness captures output.
///
/// # Panics
/// If `RDMC_TEST_REQUIRE`, a list separated by commas, names `need`: there a skipped test is a failure.
pub(crate) fn skip(need: &str, reason: &str) {
    let required = std::env::var("RDMC_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|required| required == need), "RDMC_TEST_REQUIRE names {need}: {reason}");
    // `println!` would be captured.
    let _ = writeln!(std::io::stdout(), "skipped: {reason}");
}
