//! Gives [`rdmc_fuzz::simulation::campaign_case`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::simulation::campaign_case(bytes));
