//! Gives [`rdmc_fuzz::fabric::remote_memory`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::fabric::remote_memory(bytes));
