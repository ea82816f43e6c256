//! Gives [`rdmc_fuzz::transfer::manifest`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::transfer::manifest(bytes));
