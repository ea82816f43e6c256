//! Numbers of bytes as typed.

pub(crate) use rdmc_files::size::parse;
use rdmc_files::size::{ByteSize, PAGE, POOL_BYTES_MIN};

use crate::choice::{AUTO, OrAuto};

/// Parses a block size: 1 byte to 1 GiB.
pub(crate) fn parse_block(text: &str) -> Result<u32, String> {
    let bytes = parse(text)?;
    let allowed = u32::try_from(bytes).ok().filter(|bytes| (1..=rdmc::GroupSpec::BLOCK_SIZE_MAX).contains(bytes));
    allowed.ok_or_else(|| format!("a block of {} is not possible: 1 byte to 1 GiB", ByteSize(bytes)))
}

/// Parses a block size that may be left to a cost model.
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
    pages.ok_or_else(|| format!("a pool of {} is not possible: at least {}", ByteSize(bytes), ByteSize(POOL_BYTES_MIN)))
}

/// Parses the length of a ring of slabs: 4 MiB or more.
pub(crate) fn parse_ring(text: &str) -> Result<u64, String> {
    let bytes = parse(text)?;
    match (RING_MIN..=RING_MAX).contains(&bytes) {
        true => Ok(bytes),
        false => {
            let (min, max) = (ByteSize(RING_MIN), ByteSize(RING_MAX));
            Err(format!("a ring of {} is not possible: {min} to {max}", ByteSize(bytes)))
        }
    }
}

const RING_MIN: u64 = 4 << 20;
const RING_MAX: u64 = 1 << 40;

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
        assert!(parse_ring("4095k").is_err() && parse_ring("2T").is_err() && parse_ring("4M") == Ok(4 << 20));
        assert!(parse_block("0").is_err() && parse_block("2G").is_err() && parse_block("1GiB").is_ok());
        assert_eq!(parse_block_or_auto("1k"), Ok(OrAuto::Given(1024)));
        assert_eq!(parse_block_or_auto("auto"), Ok(OrAuto::Auto));
        assert!(parse_block_or_auto("0").unwrap_err().ends_with("or auto") && parse_block("auto").is_err());
    }
}
