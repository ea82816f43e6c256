use std::sync::Mutex;

use super::*;

fn region(len: usize) -> MemoryRegion {
    MemoryRegion::new(Memory::from(vec![0; len]), Box::new(()))
}

#[derive(Default)]
struct CollectingLender(Mutex<Vec<MemoryRegion>>);

impl Lender for CollectingLender {
    fn take_back(&self, region: MemoryRegion) {
        self.0.lock().expect("no test panics while it holds the lender").push(region);
    }
}

#[test]
fn split_ranges_are_disjoint_and_join_again() {
    let mut rest = region(10).into_mut().unwrap();
    let mut front = rest.split_to(4);
    front.fill(1);
    rest.fill(2);
    let mut whole = front.freeze();
    whole.try_append(rest.freeze()).unwrap();
    assert_eq!(whole[..], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    assert_eq!(whole.slice(3..5)[..], [1, 2]);
}

#[test]
fn ranges_of_different_leases_do_not_join() {
    let mut a = region(2).into_shared();
    let b = region(2).into_shared();
    assert!(a.try_append(b).is_err());
    assert_eq!(a.len(), 2);
}

#[test]
fn a_range_that_is_held_alone_widens_to_be_written() {
    let mut rest = region(10).into_mut().unwrap();
    let mut front = rest.split_to(4);
    front.fill(1);
    let (front, other) = (front.freeze(), rest.split_to(2));
    drop(rest);
    assert_eq!(front.holders(), 2);
    let front = front.try_widen(0, 6).unwrap_err();
    drop(other);
    let front = front.try_widen(0, 7).unwrap_err().try_widen(1, 0).unwrap_err();
    let mut whole = front.slice(2..4).try_widen(2, 6).unwrap_err();
    assert_eq!(whole.len(), 2);
    drop(front);
    whole = whole.try_widen(2, 5).unwrap().freeze();
    assert_eq!(whole[..], [1, 1, 1, 1, 0, 0, 0, 0, 0]);
}

#[test]
fn read_only_memory_does_not_widen() {
    let shared = MemoryRegion::new(Memory::from(Bytes::from_static(b"abc")), Box::new(())).into_shared();
    assert!(shared.try_widen(0, 0).is_err());
}

#[test]
fn the_lender_gets_the_region_back_with_the_last_range() {
    let lender = Arc::new(CollectingLender::default());
    let mut rest = region(8).lend(lender.clone()).unwrap();
    let front = rest.split_to(3).freeze();
    let bytes = Bytes::from(front.clone());
    drop((rest, front));
    assert!(lender.0.lock().unwrap().is_empty());
    drop(bytes);
    assert_eq!(lender.0.lock().unwrap().len(), 1);
}

#[test]
fn read_only_memory_is_not_lent_for_writing() {
    let region = MemoryRegion::new(Memory::from(Bytes::from_static(b"abc")), Box::new(()));
    let region = region.into_mut().unwrap_err();
    assert_eq!(region.into_shared()[..], *b"abc");
}

#[test]
fn ranges_are_written_from_two_threads_at_once() {
    let mut rest = region(64).into_mut().unwrap();
    let mut front = rest.split_to(32);
    std::thread::scope(|scope| {
        scope.spawn(|| front.fill(7));
        scope.spawn(|| rest.fill(9));
    });
    assert!(front.iter().all(|&b| b == 7) && rest.iter().all(|&b| b == 9));
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_mapped_file_that_changes_is_copied_as_it_is_and_not_at_all_when_it_is_gone() {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(b"_hello", 0).unwrap();
    // SAFETY: no code uses the bytes as a slice.
    let memory = unsafe { Memory::map_file(&file, 6) }.unwrap();
    let buffer = MemoryRegion::new(memory, Box::new(())).into_shared().slice(1..);
    let mut copy = [0; 4];
    buffer.copy_to(1, &mut copy).unwrap();
    assert!(buffer.may_change() && copy == *b"ello");
    file.write_all_at(b"J", 1).unwrap();
    buffer.copy_to(0, &mut copy).unwrap();
    assert_eq!(copy, *b"Jell");
    file.set_len(3).unwrap();
    assert!(buffer.copy_to(0, &mut copy).is_err());
}

#[test]
#[cfg_attr(miri, ignore = "maps a file")]
fn a_mapped_file_holds_what_was_written() {
    let mut file = tempfile::tempfile().unwrap();
    // SAFETY: the file has no name; no other code knows it.
    assert!(unsafe { Memory::map_file_mut(&file, 5) }.is_err());
    file.set_len(5).unwrap();
    // SAFETY: as above, and the mapping is dropped before the file is read.
    let memory = unsafe { Memory::map_file_mut(&file, 5) }.unwrap();
    let mut buffer = MemoryRegion::new(memory, Box::new(())).into_mut().unwrap();
    buffer.copy_from_slice(b"hello");
    drop(buffer);
    let mut text = String::new();
    io::Read::read_to_string(&mut file, &mut text).unwrap();
    assert_eq!(text, "hello");
}
