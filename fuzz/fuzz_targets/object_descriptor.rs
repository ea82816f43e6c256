//! Gives [`rdmc_fuzz::fabric::object_descriptor`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::fabric::object_descriptor(bytes));
