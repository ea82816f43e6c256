//! Gives [`rdmc_fuzz::simulation::scenario`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::simulation::scenario(bytes));
