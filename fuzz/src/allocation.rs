//! Counts the memory that a decoder allocates, so that its input can bound it. The unsafe code forwards to the
//! system's allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Runs a decoder of `len` bytes.
///
/// # Panics
/// If the decoder ever holds more memory than the bound: `per_byte` for each byte, and the memory that serde reserves
/// before it has seen the elements of lists.
#[track_caller]
pub(crate) fn bounded<T>(len: usize, per_byte: usize, decode: impl FnOnce() -> T) -> T {
    HELD.set(Held::default());
    let decoded = decode();
    let Held { most, .. } = HELD.get();
    let bound = RESERVED_MAX + per_byte * len;
    assert!(most <= bound, "{most} bytes of memory for {len} bytes of input, more than {bound}");
    decoded
}

/// Memory for each byte of input in the binary encodings. A component of a path takes the most.
pub(crate) const PER_BYTE: usize = 64;
/// Memory for each byte of input in TOML and JSON, whose readers keep their input.
pub(crate) const PER_CHARACTER: usize = 512;
/// Memory that serde reserves: up to a MiB for a list, and lists contain lists.
const RESERVED_MAX: usize = 4 << 20;

/// Bytes that the thread has allocated and not freed, since this was last set.
#[derive(Clone, Copy, Default)]
struct Held {
    now: isize,
    most: usize,
}

thread_local! {
    static HELD: Cell<Held> = const { Cell::new(Held { now: 0, most: 0 }) };
}

fn count(bytes: isize) {
    // Fails in a thread that is ending, where no count is needed.
    let _ = HELD.try_with(|held| {
        let Held { now, most } = held.get();
        let now = now.saturating_add(bytes);
        held.set(Held { now, most: most.max(usize::try_from(now).unwrap_or(0)) });
    });
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: all calls are the system allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller's promises are the same.
        unsafe { System.realloc(ptr, layout, size) }
    }
}
