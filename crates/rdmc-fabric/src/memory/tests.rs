use std::sync::Mutex;
use std::time::Duration;

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

/// Returns how many bytes of mappings of the file with this name are in memory.
#[cfg(target_os = "linux")]
fn resident(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let behind_name = maps.split_once(name).expect("the file is mapped").1;
    let line = behind_name.lines().find_map(|line| line.strip_prefix("Rss:")).expect("every mapping has it");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[cfg(target_os = "linux")]
#[tokio::test]
#[cfg_attr(miri, ignore = "maps a file")]
async fn pages_of_a_file_are_allocated_ahead_of_the_bytes_and_not_all_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pages-ahead");
    let file = File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
    let len = 8 * AHEAD;
    file.set_len(len as u64).unwrap();
    // SAFETY: nothing else touches the file while it is mapped.
    let mut memory = unsafe { Memory::map_file_mut(&file, len) }.unwrap();
    if let Err(error) = allocate(memory.writable_map().unwrap(), 0, 1) {
        println!("skipped: this kernel cannot allocate pages ahead ({error}); Linux 5.14 can");
        return;
    }
    let becomes_resident = async |len: usize| {
        while resident("pages-ahead") < len {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let allocating = memory.allocate_ahead().expect("it is a file, in a runtime");
    let (pages, next) = (allocating.0.clone(), |pages: &PagesAhead| pages.next.load(Ordering::Relaxed));
    let mut rest = MemoryRegion::new(memory, Box::new(())).into_mut().unwrap();
    becomes_resident(AHEAD).await;
    assert_eq!(next(&pages), AHEAD);
    let mut block = rest.split_to(AHEAD / 4);
    block.note_receive();
    assert_eq!(next(&pages), AHEAD, "enough of them are ahead");
    block.fill(7);
    let near = rest.split_to(AHEAD / 2);
    near.note_receive();
    assert_eq!(next(&pages), 2 * AHEAD - AHEAD / 4);
    becomes_resident(next(&pages)).await;
    assert!(block.iter().all(|&byte| byte == 7) && near.iter().all(|&byte| byte == 0));
    // Blocks that come in another order do not have all pages between them allocated.
    let _passed_over = rest.split_to(4 * AHEAD);
    let before = resident("pages-ahead");
    let far = rest.split_to(AHEAD / 4);
    far.note_receive();
    becomes_resident(before + AHEAD + AHEAD / 4).await;
    assert!(resident("pages-ahead") < before + 2 * AHEAD);
    drop(allocating);
    assert!(!pages.allocate(0..1), "it has ended");
}

#[tokio::test]
#[cfg_attr(miri, ignore = "maps a file")]
async fn only_long_files_have_pages_allocated_ahead() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(ALLOCATED_AT_ONCE as u64).unwrap();
    // SAFETY: the file has no name; no other code knows it.
    let mut short = unsafe { Memory::map_file_mut(&file, ALLOCATED_AT_ONCE) }.unwrap();
    assert!(short.allocate_ahead().is_none());
    assert!(Memory::from(vec![0; 2 * ALLOCATED_AT_ONCE]).allocate_ahead().is_none());
}
