//! Gives [`rdmc_fuzz::sessions::slabs`] to libFuzzer.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rdmc_fuzz::sessions::slabs(bytes));
