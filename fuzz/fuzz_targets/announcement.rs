//! Gives [`rdmc_fuzz::transfer::announcement`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::transfer::announcement(bytes));
