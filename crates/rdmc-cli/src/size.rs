//! Numbers of bytes as people write and read them.

use std::fmt;

use crate::choice::{AUTO, OrAuto};

/// Parses `256MiB`, `1M`, `4k` or plain bytes; the units are powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let allowed =
        || format!("{text:?} is no size: write bytes, or a number with k, M, G or T (powers of 1024): 256MiB");
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

/// Parses a block size: 1 byte to 1 GiB.
pub(crate) fn parse_block(text: &str) -> Result<u32, String> {
    let bytes = parse(text)?;
    let allowed = u32::try_from(bytes).ok().filter(|bytes| (1..=rdmc::GroupSpec::BLOCK_SIZE_MAX).contains(bytes));
    allowed.ok_or_else(|| format!("a block of {} is not possible: 1 byte to 1 GiB", Bytes(bytes)))
}

/// Parses a block size that may be left to be chosen.
pub(crate) fn parse_block_or_auto(text: &str) -> Result<OrAuto<u32>, String> {
    if text == AUTO {
        return Ok(OrAuto::Auto);
    }
    parse_block(text).map(OrAuto::Given).map_err(|error| format!("{error}; or {AUTO}"))
}

/// Parses the size of a pool: 1 MiB or more, rounded up to whole pages.
pub(crate) fn parse_pool(text: &str) -> Result<u64, String> {
    let bytes = parse(text)?;
    let pages = bytes.checked_next_multiple_of(PAGE).filter(|bytes| *bytes >= POOL_BYTES_MIN);
    pages.ok_or_else(|| format!("a pool of {} is not possible: at least {}", Bytes(bytes), Bytes(POOL_BYTES_MIN)))
}

/// A number of bytes, displayed with a unit: `256 MiB`, `1.5 GiB`, `17 B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
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
pub(crate) struct Rate {
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
}

impl Rate {
    /// Returns bytes per second, 0 if no time passed.
    #[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
    pub(crate) fn per_second(self) -> f64 {
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
            _ => format!("{}/s", Bytes(rate)),
        };
        f.pad(&text)
    }
}

/// The unit of registered memory in bytes.
pub(crate) const PAGE: u64 = 4 << 10;
/// Registered memory without which no transfer goes well.
pub(crate) const POOL_BYTES_MIN: u64 = 1 << 20;
/// Registered memory of a transfer, at most, unless told otherwise.
pub(crate) const POOL_BYTES_DEFAULT: u64 = 4 << 30;
const UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_all_their_units() {
        let sizes = [("0", 0), ("4096", 4096), ("17B", 17), ("4k", 4096), ("1M", 1 << 20), ("256MiB", 256 << 20)];
        for (text, bytes) in sizes.into_iter().chain([("3 GiB", 3 << 30), ("2Ti", 2 << 40), ("1K", 1024)]) {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_what_is_allowed() {
        for text in ["", "M", "-1", "1.5G", "1MB", "12 apples", "iB", "1iB", "0x10", "99999999999T"] {
            let error = parse(text).expect_err(text);
            assert!(error.contains("k, M, G or T") || error.contains("2^64"), "{error}");
        }
        assert!(parse_pool("1000k").is_err() && parse_pool("1048577") == Ok((1 << 20) + 4096));
        assert!(parse_block("0").is_err() && parse_block("2G").is_err() && parse_block("1GiB").is_ok());
        assert_eq!(parse_block_or_auto("1k"), Ok(OrAuto::Given(1024)));
        assert_eq!(parse_block_or_auto("auto"), Ok(OrAuto::Auto));
        assert!(parse_block_or_auto("0").unwrap_err().ends_with("or auto") && parse_block("auto").is_err());
    }

    #[test]
    fn bytes_are_shown_with_a_unit_that_fits() {
        let shown = [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (256 << 20, "256 MiB")];
        for (bytes, text) in shown {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(Rate { bytes: 1 << 30, seconds: 2.0 }.to_string(), "512 MiB/s");
        assert_eq!(Rate { bytes: 2 << 30, seconds: 1.0 }.to_string(), "2.0 GiB/s");
        assert_eq!(Rate { bytes: 1, seconds: 0.0 }.to_string(), "0 B/s");
    }
}
