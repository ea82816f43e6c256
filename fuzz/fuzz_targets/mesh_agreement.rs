//! Gives [`rdmc_fuzz::mesh::agreement`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::mesh::agreement(bytes));
