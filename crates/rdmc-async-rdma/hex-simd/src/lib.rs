//! Stands in for `hex-simd` 0.5, of which `async-rdma` 0.5.0 calls one function.
//!
//! Every release of 0.5 depends on a crate whose releases were yanked, so that no new lock file can name them. This is
//! as much of its interface as `async-rdma` uses, to print the identifiers of devices.

#![forbid(unsafe_code)]

use std::mem::MaybeUninit;

/// Which letters stand for ten to fifteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsciiCase {
    /// `a` to `f`.
    Lower,
    /// `A` to `F`.
    Upper,
}

/// Room for digits.
#[derive(Debug)]
pub struct OutBuf<'a>(&'a mut [MaybeUninit<u8>]);

impl<'a> OutBuf<'a> {
    /// Takes room that need not be initialised.
    pub fn from_uninit_mut(room: &'a mut [MaybeUninit<u8>]) -> Self {
        Self(room)
    }
}

/// The room is too small.
#[derive(Debug)]
pub struct Error;

/// Writes two digits for each byte of `src` and returns them.
///
/// # Errors
/// The room is too small for them.
pub fn encode_as_str<'d>(src: &[u8], dst: OutBuf<'d>, case: AsciiCase) -> Result<&'d str, Error> {
    let digits: &[u8; 16] = match case {
        AsciiCase::Lower => b"0123456789abcdef",
        AsciiCase::Upper => b"0123456789ABCDEF",
    };
    let digit = |four_bits: u8| digits[usize::from(four_bits)];
    let text: Vec<u8> = src.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
    let room = dst.0.get_mut(..text.len()).ok_or(Error)?;
    std::str::from_utf8(room.write_copy_of_slice(&text)).map_err(|_| Error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_two_digits_each() {
        let mut room = [MaybeUninit::uninit(); 5];
        let lower = encode_as_str(&[0x0f, 0xa0], OutBuf::from_uninit_mut(&mut room), AsciiCase::Lower);
        assert_eq!(lower.unwrap(), "0fa0");
        let upper = encode_as_str(&[0x0f, 0xa0], OutBuf::from_uninit_mut(&mut room), AsciiCase::Upper);
        assert_eq!(upper.unwrap(), "0FA0");
        assert!(encode_as_str(&[1, 2, 3], OutBuf::from_uninit_mut(&mut room), AsciiCase::Lower).is_err());
    }
}
