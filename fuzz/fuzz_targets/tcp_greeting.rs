//! Gives [`rdmc_fuzz::peers::greeting`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::peers::greeting(bytes));
