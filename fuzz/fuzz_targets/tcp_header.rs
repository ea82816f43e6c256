//! Gives [`rdmc_fuzz::fabric::tcp_header`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::fabric::tcp_header(bytes));
