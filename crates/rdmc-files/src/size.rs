//! Numbers of bytes as people read and type them.

use std::fmt;

/// Parses `256MiB`, `1M`, `4k` or plain bytes; the units are powers of 1024.
///
/// # Errors
/// What a size looks like.
pub fn parse(text: &str) -> Result<u64, String> {
    let allowed =
        || format!("{text:?} is not a size: write bytes, or a number with k, M, G or T (powers of 1024): 256MiB");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| allowed())?;
    let unit = unit.trim_start();
    let letter = match unit.strip_suffix("iB").or(unit.strip_suffix('i')).unwrap_or(unit) {
        "" if unit.is_empty() => return Ok(number),
        "B" => return Ok(number),
        letter => letter,
    };
    let shift = match letter {
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        _ => return Err(allowed()),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is more than 2^64 bytes"))
}

/// A number of bytes, displayed with a unit: `256 MiB`, `1.5 GiB`, `17 B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match UNITS.iter().rposition(|&(_, unit)| self.0 >= unit) {
            None => format!("{} B", self.0),
            Some(at) => {
                let (name, unit) = UNITS[at];
                let (whole, rest) = (self.0 / unit, self.0 % unit);
                match rest * 10 / unit {
                    0 => format!("{whole} {name}"),
                    _ if whole >= 100 => format!("{whole} {name}"),
                    tenth => format!("{whole}.{tenth} {name}"),
                }
            }
        };
        f.pad(&text)
    }
}

/// Bytes per second, displayed with a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// How many bytes.
    pub bytes: u64,
    /// In how many seconds.
    pub seconds: f64,
}

impl Rate {
    /// Returns bytes per second; 0 if no time passed.
    #[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
    pub fn per_second(self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds } else { 0.0 }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; `as` saturates")]
        let rate = self.per_second() as u64;
        let text = match UNITS.iter().rfind(|&&(_, unit)| rate >= unit) {
            // Always with a digit behind the point, so that columns line up.
            Some(&(name, unit)) if rate < 100 * unit => {
                format!("{}.{} {name}/s", rate / unit, rate % unit * 10 / unit)
            }
            _ => format!("{}/s", ByteSize(rate)),
        };
        f.pad(&text)
    }
}

/// Unit of registered memory, in bytes.
pub const PAGE: u64 = 4 << 10;
/// Least bound of registered memory that a transfer can work with, in bytes.
pub const POOL_BYTES_MIN: u64 = 1 << 20;
/// Default bound of a transfer's registered memory, in bytes.
pub const POOL_BYTES_DEFAULT: u64 = 4 << 30;
const UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_with_a_unit_that_fits() {
        let shown = [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (256 << 20, "256 MiB")];
        for (bytes, text) in shown {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(Rate { bytes: 1 << 30, seconds: 2.0 }.to_string(), "512 MiB/s");
        assert_eq!(Rate { bytes: 2 << 30, seconds: 1.0 }.to_string(), "2.0 GiB/s");
        assert_eq!(Rate { bytes: 1, seconds: 0.0 }.to_string(), "0 B/s");
    }
}
