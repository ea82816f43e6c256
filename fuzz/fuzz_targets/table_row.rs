//! Gives [`rdmc_fuzz::table::row`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::table::row(bytes));
