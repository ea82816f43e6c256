//! The copy itself: from a peer's memory into this process's.

/// Copies `len` bytes. With `streaming` they bypass the processor's caches, if it can do that. That suits bytes that no
/// code reads soon: it saves fetching the old content and displaces nothing from the caches.
///
/// # Safety
/// `from` must be valid for reads of `len` bytes, `to` for writes, and they must not overlap. Other code may write the
/// bytes at `from` meanwhile; their copies are unspecified then.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, streaming: bool) {
    #[cfg(target_arch = "x86_64")]
    if streaming && len >= 2 * LINE && is_x86_feature_detected!("avx2") {
        // SAFETY: by the contract of this function; the processor has the instructions.
        unsafe { stream(from, to, len) };
        return;
    }
    let _ = streaming;
    // SAFETY: by the contract of this function.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Copies with stores that bypass the caches.
///
/// # Safety
/// As [`copy`], and the processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    // These stores write whole cache lines.
    let head = to.align_offset(LINE);
    // SAFETY: `head < LINE <= len`, so the bytes are part of both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    let lines = (len - head) / LINE;
    for line in 0..lines {
        let at = head + line * LINE;
        let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
        // SAFETY: the line lies in the range at `from`; the load needs no alignment.
        let low = unsafe { _mm256_loadu_si256(from.cast()) };
        // SAFETY: as above, its second half.
        let high = unsafe { _mm256_loadu_si256(from.wrapping_add(LINE / 2).cast()) };
        // SAFETY: the line lies in the range at `to` and begins at a multiple of its length.
        unsafe { _mm256_stream_si256(to.cast(), low) };
        // SAFETY: as above, its second half.
        unsafe { _mm256_stream_si256(to.wrapping_add(LINE / 2).cast(), high) };
    }
    let done = head + lines * LINE;
    // SAFETY: this is the rest of both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from.wrapping_add(done), to.wrapping_add(done), len - done) };
    // These stores are not ordered with others; the copied bytes must be visible before any later store.
    _mm_sfence();
}

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_copied_is_the_same_and_nothing_else_changes(
            from_at in 0usize..100, to_at in 0usize..100, len in 0usize..1000, streaming: bool,
        ) {
            let source: Vec<u8> = (0..1100u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
            let mut target = vec![255; 1100];
            let (from, to) = (source[from_at..].as_ptr(), target[to_at..].as_mut_ptr());
            // SAFETY: both vectors are longer than the offset and the length together.
            unsafe { copy(from, to, len, streaming) };
            prop_assert_eq!(&target[to_at..to_at + len], &source[from_at..from_at + len]);
            prop_assert!(target[..to_at].iter().chain(&target[to_at + len..]).all(|&byte| byte == 255));
        }
    }
}
