//! Words of messages.

/// Counts things in English.
pub(crate) fn count(number: impl TryInto<u64>, noun: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    if number == 1 { format!("{number} {noun}") } else { format!("{number} {noun}s") }
}
