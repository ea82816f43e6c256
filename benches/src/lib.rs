//! Holds what the measurements share.

pub mod callgrind;
mod members;
mod process;

use std::time::Duration;

use bytes::Bytes;

pub use members::Members;
pub use process::{Figure, Process, report};

/// Returns the machine's monotonic clock: one clock for all processes and network namespaces of a host.
pub fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).expect("the monotonic clock starts at zero");
    Duration::new(seconds, u32::try_from(now.tv_nsec).expect("less than a second"))
}

/// Returns the processor time this process has used.
pub fn processor_time() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(used.tv_sec).expect("processor time starts at zero");
    Duration::new(seconds, u32::try_from(used.tv_nsec).expect("less than a second"))
}

/// Makes an object of `mib` MiB; its word at `i` is [`word`]`(i)`.
pub fn object(mib: usize) -> Bytes {
    let words = (0..).take((mib << 20) / 8).flat_map(word);
    Bytes::from(words.collect::<Vec<_>>())
}

/// Returns the word number `i` of every object.
pub fn word(i: u64) -> [u8; 8] {
    i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

/// Returns the median; of an even number of values, the upper one.
///
/// # Panics
/// If there are no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
