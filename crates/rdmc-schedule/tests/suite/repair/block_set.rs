//! Sets of blocks, and their bytes.

use proptest::prelude::*;
use rdmc_schedule::{BlockCount, BlockIndex, BlockSet, BlockSetError};

fn set(blocks: u32, held: impl IntoIterator<Item = u32>) -> BlockSet {
    let mut set = BlockSet::empty(BlockCount(blocks));
    for block in held {
        assert!(set.insert(BlockIndex(block)));
    }
    set
}

fn decode(blocks: u32, bytes: &[u8]) -> Result<BlockSet, BlockSetError> {
    BlockSet::decode(BlockCount(blocks), bytes)
}

#[test]
fn full_and_empty_sets_are_what_they_say() {
    for blocks in [0, 1, 63, 64, 65, 128, 1000] {
        let (empty, full) = (BlockSet::empty(BlockCount(blocks)), BlockSet::full(BlockCount(blocks)));
        let all = || (0..blocks).map(BlockIndex);
        assert!(empty.is_empty() && full.is_full());
        assert_eq!((empty.len(), full.len()), (BlockCount(0), BlockCount(blocks)));
        assert!(empty.missing().eq(all()) && full.held().eq(all()));
        assert_eq!((empty.held().count(), full.missing().count()), (0, 0));
        assert_eq!(full, set(blocks, 0..blocks));
        assert_eq!((empty.blocks(), full.blocks()), (BlockCount(blocks), BlockCount(blocks)));
    }
}

#[test]
fn a_block_is_inserted_once() {
    let mut set = BlockSet::empty(BlockCount(70));
    assert!(set.insert(BlockIndex(69)));
    assert!(!set.insert(BlockIndex(69)));
    assert_eq!(set.len(), BlockCount(1));
    assert!(set.contains(BlockIndex(69)) && !set.contains(BlockIndex(5)));
}

#[test]
#[should_panic(expected = "block 70 is none of a message of 70")]
fn inserting_a_block_of_another_message_is_a_bug() {
    BlockSet::empty(BlockCount(70)).insert(BlockIndex(70));
}

#[test]
fn debug_output_is_bounded() {
    assert_eq!(format!("{:?}", set(10, [0, 1, 2, 7])), "4 of 10 blocks: 0..3 7..8");
    let odd = format!("{:?}", set(10_000, (0..10_000).step_by(2)));
    assert!(odd.ends_with("30..31 and more"), "{odd}");
}

#[test]
fn few_runs_are_written_as_lengths_and_many_as_a_bitmap() {
    assert_eq!(set(1000, 0..300).encode(), [0, 0xac, 2, 0xbc, 5]);
    assert_eq!(set(1000, []).encode(), [0, 0, 0xe8, 7]);
    assert_eq!(BlockSet::full(BlockCount(1000)).encode(), [0, 0xe8, 7]);
    assert_eq!(set(20, (1..20).step_by(2)).encode(), [1, 0xaa, 0xaa, 0x0a]);
    assert_eq!(set(0, []).encode(), [0]);
}

#[test]
fn every_small_set_survives_encoding() {
    for blocks in 0..=10 {
        for bits in 0..1_u32 << blocks {
            let set = set(blocks, (0..blocks).filter(|block| bits >> block & 1 == 1));
            let bytes = set.encode();
            assert!(bytes.len() <= BlockSet::encoded_len_max(BlockCount(blocks)));
            assert_eq!(decode(blocks, &bytes), Ok(set));
        }
    }
}

#[test]
fn bytes_that_describe_something_else_are_refused() {
    let (short, long) = (
        |want| Err(BlockSetError::TooShort { want: BlockCount(want) }),
        |want| Err(BlockSetError::TooLong { want: BlockCount(want) }),
    );
    let run = |at| Err(BlockSetError::Run { at: BlockIndex(at) });
    assert_eq!(decode(10, &[]), short(10));
    assert_eq!(decode(10, &[7, 0]), Err(BlockSetError::Form { got: 7 }));
    assert_eq!(decode(10, &[0, 4]), short(10));
    assert_eq!(decode(10, &[0, 4, 7]), long(10));
    assert_eq!(decode(10, &[0, 4, 6, 0]), long(10));
    assert_eq!(decode(10, &[0, 0xff, 0xff, 0xff, 0xff, 0x0f]), long(10));
    assert_eq!(decode(10, &[0, 4, 0, 6]), run(4), "an empty run");
    assert_eq!(decode(10, &[0, 0, 0, 10]), run(0), "two empty runs");
    assert_eq!(decode(10, &[0, 4, 0x86, 0]), run(4), "a longer varint than is needed");
    assert_eq!(decode(10, &[0, 4, 0x86]), run(4), "a varint without an end");
    assert_eq!(decode(10, &[0, 0xff, 0xff, 0xff, 0xff, 0x1f]), run(0), "2³² and more");
    assert_eq!(decode(10, &[1, 0xff]), short(10));
    assert_eq!(decode(10, &[1, 0xff, 3, 0]), long(10));
    assert_eq!(decode(10, &[1, 0xff, 7]), long(10), "a block beyond the last");
    assert_eq!(decode(0, &[1]), Ok(set(0, [])));
}

proptest! {
    #[test]
    fn sets_survive_encoding(held in prop::collection::vec(any::<bool>(), 0..700), runs in 1_usize..40) {
        let held: Vec<bool> = held.iter().flat_map(|&held| std::iter::repeat_n(held, runs)).collect();
        let blocks = u32::try_from(held.len()).unwrap();
        let set = set(blocks, (0..blocks).filter(|&block| held[block as usize]));
        let bytes = set.encode();
        prop_assert!(bytes.len() <= BlockSet::encoded_len_max(BlockCount(blocks)));
        prop_assert_eq!(decode(blocks, &bytes), Ok(set));
    }

    #[test]
    fn any_bytes_are_a_set_of_exactly_that_many_blocks_or_none(
        form in 0_u8..2,
        rest in prop::collection::vec(prop_oneof![0_u8..8, any::<u8>()], 0..12),
        blocks in 0_u32..80,
    ) {
        let bytes: Vec<u8> = std::iter::once(form).chain(rest).collect();
        if let Ok(set) = decode(blocks, &bytes) {
            prop_assert_eq!(set.blocks(), BlockCount(blocks));
            prop_assert_eq!(set.held().count() + set.missing().count(), blocks as usize);
            prop_assert_eq!(set.len().get() as usize, set.held().count());
            prop_assert_eq!(decode(blocks, &set.encode()), Ok(set));
        }
    }
}
