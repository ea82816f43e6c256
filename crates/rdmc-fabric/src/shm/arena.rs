//! Memory that a node shares: ranges of a few long segments, which peers map whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::map::{LARGE_PAGE, Mapping};
use super::objects::{Object, Objects};
use crate::memory::Memory;
use crate::sync::lock;

/// The segments of one node.
pub(super) struct Arena {
    objects: Arc<Objects>,
    segments: Mutex<Vec<Arc<Segment>>>,
}

/// One segment, shared under a number.
pub(super) struct Segment {
    pub(super) number: u64,
    memory: Mapping,
    free: Mutex<FreeRanges>,
}

/// A range of a segment that is in use. Dropping it gives its pages back to the system.
pub(super) struct Allocation {
    segment: Arc<Segment>,
    offset: usize,
    len: usize,
    arena: std::sync::Weak<Arena>,
}

impl Arena {
    pub(super) fn new(objects: Arc<Objects>) -> Arc<Self> {
        Arc::new(Self { objects, segments: Mutex::default() })
    }

    /// Allocates `len` zeroed bytes.
    pub(super) fn allocate(self: &Arc<Self>, len: usize) -> io::Result<Allocation> {
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let align = if len >= LARGE_PAGE { LARGE_PAGE } else { PAGE };
        let mut segments = lock(&self.segments);
        let found = segments.iter().find_map(|segment| Some((segment.clone(), lock(&segment.free).take(len, align)?)));
        let (segment, offset) = match found {
            Some(found) => found,
            None => {
                let whole = len.max(SEGMENT_LEN).checked_next_multiple_of(LARGE_PAGE);
                let segment = self.add_segment(whole.ok_or(io::ErrorKind::OutOfMemory)?)?;
                segments.push(segment.clone());
                let offset = lock(&segment.free).take(len, align).expect("a new segment is long enough");
                (segment, offset)
            }
        };
        Ok(Allocation { segment, offset, len, arena: Arc::downgrade(self) })
    }

    fn add_segment(&self, len: usize) -> io::Result<Arc<Segment>> {
        let (memory, file) = Mapping::create(len)?;
        // It is mapped already: no process of this user can open it for writing from now on.
        rustix::fs::fchmod(&file, rustix::fs::Mode::RUSR)?;
        let number = self.objects.share(Object::Memory { file, len: len as u64 });
        Ok(Arc::new(Segment { number, memory, free: Mutex::new(FreeRanges::new(len)) }))
    }

    /// Releases the unused segments, except one.
    fn release_unused(&self) {
        let mut segments = lock(&self.segments);
        let mut spare = 1;
        segments.retain(|segment| {
            let unused = lock(&segment.free).is_whole(segment.memory.len());
            let keep = !unused || (spare > 0 && segment.memory.len() == SEGMENT_LEN);
            spare -= usize::from(unused && keep);
            if !keep {
                self.objects.forget(segment.number);
            }
            keep
        });
    }
}

impl Allocation {
    /// Returns the number under which the segment is shared, and the range's offset in it.
    pub(super) fn location(&self) -> (u64, usize) {
        (self.segment.number, self.offset)
    }

    pub(super) fn as_mut_ptr(&self) -> *mut u8 {
        self.segment.memory.as_mut_ptr().wrapping_add(self.offset)
    }

    /// Turns the range, or its first `len` bytes, into memory.
    pub(super) fn into_memory(self, len: usize) -> Memory {
        assert!(len <= self.len, "more bytes than the range has");
        let ptr = NonNull::new(self.as_mut_ptr()).expect("a mapping is never at address 0");
        // SAFETY: the range of the segment belongs to this allocation only, and stays mapped while the allocation
        // lives; peers map it for reading only.
        unsafe { Memory::from_raw(ptr, len, true, Box::new(self)) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.segment.memory.remove(self.offset, self.len);
        lock(&self.segment.free).give_back(self.offset, self.len);
        if let Some(arena) = self.arena.upgrade() {
            arena.release_unused();
        }
    }
}

/// The free ranges of a segment, by their offset; adjacent ranges are joined.
struct FreeRanges(BTreeMap<usize, usize>);

impl FreeRanges {
    fn new(len: usize) -> Self {
        Self(BTreeMap::from([(0, len)]))
    }

    /// Takes `len` bytes from the first free range in which they fit at a multiple of `align`.
    fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let fits = |(&start, &room): (&usize, &usize)| {
            let at = start.checked_next_multiple_of(align)?;
            (at - start <= room && room - (at - start) >= len).then_some((start, room, at))
        };
        let (start, room, at) = self.0.iter().find_map(fits)?;
        self.0.remove(&start);
        if at > start {
            self.0.insert(start, at - start);
        }
        let end = start + room;
        if end > at + len {
            self.0.insert(at + len, end - at - len);
        }
        Some(at)
    }

    fn give_back(&mut self, offset: usize, len: usize) {
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &room)) = self.0.range(..offset).next_back().filter(|(at, room)| *at + *room == offset) {
            self.0.remove(&before);
            start = before;
            debug_assert_eq!(before + room, offset);
        }
        if let Some(room) = self.0.remove(&end) {
            end += room;
        }
        self.0.insert(start, end - start);
    }

    fn is_whole(&self, len: usize) -> bool {
        self.0.get(&0) == Some(&len)
    }
}

/// A mapped file that is shared for as long as the value lives.
pub(super) struct SharedFile {
    pub(super) number: u64,
    objects: Arc<Objects>,
}

impl SharedFile {
    pub(super) fn new(objects: &Arc<Objects>, file: File) -> Self {
        Self { number: objects.share(Object::File(file)), objects: objects.clone() }
    }

    /// Returns the objects among which it is shared.
    pub(super) fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        self.objects.forget(self.number);
    }
}

/// Bytes of a page.
const PAGE: usize = 4 << 10;
/// Bytes of a segment. The system provides only the pages in use. A longer allocation has a segment of its own.
const SEGMENT_LEN: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_in_use_never_overlap(
            steps in proptest::collection::vec((1usize..50, any::<bool>(), any::<u8>()), 1..200),
        ) {
            let mut free = FreeRanges::new(1000);
            let mut used: Vec<(usize, usize)> = Vec::new();
            for (len, aligned, which) in steps {
                if which < 128 {
                    let align = if aligned { 16 } else { 1 };
                    if let Some(at) = free.take(len, align) {
                        prop_assert!(at.is_multiple_of(align) && at + len <= 1000);
                        prop_assert!(used.iter().all(|&(start, room)| at + len <= start || start + room <= at));
                        used.push((at, len));
                    }
                } else if !used.is_empty() {
                    let (at, len) = used.swap_remove(usize::from(which) % used.len());
                    free.give_back(at, len);
                }
            }
            for (at, len) in used {
                free.give_back(at, len);
            }
            prop_assert!(free.is_whole(1000));
        }
    }

    #[test]
    fn pieces_are_zeroed_again_when_they_come_back() {
        let arena = Arena::new(Arc::default());
        let allocation = arena.allocate(5000).unwrap();
        // SAFETY: the allocation belongs to this test only.
        unsafe { allocation.as_mut_ptr().write_bytes(7, 5000) };
        let location = allocation.location();
        drop(allocation);
        let again = arena.allocate(6000).unwrap();
        assert_eq!((again.location(), again.len), (location, 8192));
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(again.as_mut_ptr(), 5000) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        let long = arena.allocate(SEGMENT_LEN + 1).unwrap();
        assert_ne!(long.location().0, location.0);
        drop(long);
        assert_eq!(lock(&arena.segments).len(), 1);
    }
}
