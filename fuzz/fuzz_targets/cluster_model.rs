//! Gives [`rdmc_fuzz::simulation::cluster_model`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::simulation::cluster_model(bytes));
