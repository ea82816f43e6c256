//! The content of messages. It differs between messages, and every byte is verified.

/// Writes the content of a seed.
pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    let start = start(seed);
    let mut words = bytes.chunks_exact_mut(8);
    let mut value = start;
    for word in words.by_ref() {
        word.copy_from_slice(&value.to_le_bytes());
        value = value.wrapping_add(STEP);
    }
    let rest = words.into_remainder();
    rest.copy_from_slice(&value.to_le_bytes()[..rest.len()]);
}

/// Tells whether `bytes` are the content of a seed.
pub(crate) fn is_right(bytes: &[u8], seed: u64) -> bool {
    let mut value = start(seed);
    let mut words = bytes.chunks_exact(8);
    let mut difference = 0;
    for word in words.by_ref() {
        difference |= u64::from_le_bytes(word.try_into().expect("eight bytes")) ^ value;
        value = value.wrapping_add(STEP);
    }
    let rest = words.remainder();
    difference == 0 && *rest == value.to_le_bytes()[..rest.len()]
}

/// Returns the first word. Its low byte differs between consecutive seeds, for messages of one byte.
fn start(seed: u64) -> u64 {
    seed.wrapping_mul(START)
}

/// Odd, so that no two seeds have the same first word.
const START: u64 = 0x9e37_79b9_7f4a_7c15;
/// Odd, so that no two words of a message are the same.
const STEP: u64 = 0xd1b5_4a32_d192_ed03;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_filled_is_right_and_every_changed_byte_is_noticed() {
        for len in [1, 7, 8, 9, 64, 4099] {
            let mut bytes = vec![0; len];
            fill(&mut bytes, 42);
            assert!(is_right(&bytes, 42), "{len}");
            for at in 0..len {
                bytes[at] ^= 1;
                assert!(!is_right(&bytes, 42), "{at} of {len}");
                bytes[at] ^= 1;
            }
            assert!(!is_right(&bytes, 43) && !is_right(&bytes, 41), "{len}");
        }
    }

    #[test]
    fn a_part_in_a_wrong_place_is_noticed() {
        let mut bytes = vec![0; 8192];
        fill(&mut bytes, 1);
        bytes.rotate_left(4096);
        assert!(!is_right(&bytes, 1));
    }
}
