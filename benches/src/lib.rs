//! See benches/.
