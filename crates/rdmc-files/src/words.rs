//! Words of messages for people.

/// Counts things in English: `1 file`, `2 files`.
pub fn count(number: impl TryInto<u64>, noun: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    if number == 1 { format!("{number} {noun}") } else { format!("{number} {noun}s") }
}

/// Escapes control characters, which a terminal would obey.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}
