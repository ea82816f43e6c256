//! Gives [`rdmc_fuzz::sessions::state`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::sessions::state(bytes));
