//! Gives [`rdmc_fuzz::sessions::note`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::sessions::note(bytes));
