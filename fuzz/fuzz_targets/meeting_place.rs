//! Gives [`rdmc_fuzz::fabric::meeting_place`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::fabric::meeting_place(bytes));
