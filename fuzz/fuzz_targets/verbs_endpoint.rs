//! Gives [`rdmc_fuzz::fabric::verbs_endpoint`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::fabric::verbs_endpoint(bytes));
