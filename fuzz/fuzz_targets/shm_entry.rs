//! Gives [`rdmc_fuzz::fabric::shm_entry`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::fabric::shm_entry(bytes));
