//! What travels in one message: a long file, or several short ones together. A message costs round trips, and wake-ups
//! at every receiver. One for each short file would take far longer than its bytes.

use std::ops::{Index, Range};

use crate::manifest::Manifest;

/// What one message carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Positions among the files of the manifest.
    pub(crate) files: Range<usize>,
    /// The sum of their sizes.
    pub(crate) bytes: u64,
}

/// All that a transfer carries, in order. Both ends find the same from the list of files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Units(Vec<Unit>);

impl Units {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        let mut units: Vec<Unit> = Vec::new();
        for (at, (_, bytes)) in manifest.files().enumerate() {
            match units.last_mut().filter(|last| last.has_room_for(bytes)) {
                Some(last) => {
                    last.files.end = at + 1;
                    last.bytes += bytes;
                }
                None => units.push(Unit { files: at..at + 1, bytes }),
            }
        }
        Self(units)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unit> {
        self.0.iter()
    }

    /// Returns the bytes of the longest unit; 0 if there is none.
    pub(crate) fn longest(&self) -> u64 {
        self.iter().map(|unit| unit.bytes).max().unwrap_or(0)
    }

    /// Returns the number of files.
    pub(crate) fn files(&self) -> usize {
        self.files_in_first(self.len())
    }

    /// Returns for how many bytes to choose algorithm and block size: those of the longest unit. If most bytes are in
    /// packs, those of all units, because the messages of packs overlap.
    pub(crate) fn planned_bytes(&self) -> u64 {
        let all: u64 = self.iter().map(|unit| unit.bytes).sum();
        let packed: u64 = self.iter().filter(|unit| unit.is_pack()).map(|unit| unit.bytes).sum();
        if packed > all / 2 { all.min(PLANNED_BYTES_MAX).max(self.longest()) } else { self.longest() }
    }

    /// Returns the number of files in the first `units`.
    pub(crate) fn files_in_first(&self, units: usize) -> usize {
        units.min(self.len()).checked_sub(1).map_or(0, |last| self.0[last].files.end)
    }
}

impl Index<usize> for Units {
    type Output = Unit;

    fn index(&self, at: usize) -> &Unit {
        &self.0[at]
    }
}

impl Unit {
    /// Most bytes that travel together: enough for the cost of a message to be small, and little to hold in memory.
    pub(crate) const PACK_BYTES_MAX: u64 = 1 << 20;

    /// Tells whether it has several files.
    pub(crate) fn is_pack(&self) -> bool {
        self.files.len() > 1
    }

    /// Tells whether another file of `bytes` bytes may follow in the same message.
    fn has_room_for(&self, bytes: u64) -> bool {
        let (all_short, len) = (self.is_pack() || self.bytes <= SHORT_MAX, self.bytes.saturating_add(bytes));
        all_short && bytes <= SHORT_MAX && len <= Self::PACK_BYTES_MAX && self.files.len() < PACK_FILES_MAX
    }
}

/// Longest file that may travel together with others. Longer ones are mapped, and have parts if they are interrupted.
const SHORT_MAX: u64 = 256 << 10;
/// Most files that travel together. Other messages may wait until a receiver has stored them all.
const PACK_FILES_MAX: usize = 256;
/// Bytes of all units from which on the choice hardly changes.
const PLANNED_BYTES_MAX: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn units(sizes: &[usize]) -> Units {
        Units::of(&Manifest::of_sizes(sizes).0)
    }

    #[test]
    fn neighbours_that_are_short_travel_together() {
        const SHORT: usize = 256 << 10;
        let files = |sizes: &[usize]| units(sizes).iter().map(|unit| unit.files.len()).collect::<Vec<_>>();
        assert_eq!(files(&[]), [0; 0]);
        assert_eq!(files(&[7]), [1]);
        assert_eq!(files(&[0, 7, SHORT, SHORT + 1, 7, 8]), [3, 1, 2]);
        assert_eq!(files(&[SHORT, SHORT, SHORT, SHORT, 1]), [4, 1]);
        assert_eq!(files(&[0; 257]), [256, 1]);
    }

    #[test]
    fn a_choice_is_made_for_all_bytes_if_most_are_in_packs() {
        let planned = |sizes: &[usize]| units(sizes).planned_bytes();
        assert_eq!(planned(&[]), 0);
        assert_eq!(planned(&[100_000; 100]), 10_000_000);
        assert_eq!(planned(&[400_000; 10]), 400_000);
        assert_eq!(planned(&[1, 1, 5_000_000]), 5_000_000);
    }

    proptest! {
        #[test]
        fn every_file_is_in_one_unit_in_order_and_units_are_bounded(
            sizes in prop::collection::vec(prop_oneof![0usize..10, 0usize..400_000], 0..60),
        ) {
            let units = units(&sizes);
            let mut next = 0;
            for (at, unit) in units.iter().enumerate() {
                prop_assert_eq!(unit.files.start, next);
                next = unit.files.end;
                prop_assert_eq!(units.files_in_first(at + 1), next);
                let bytes: usize = sizes[unit.files.clone()].iter().sum();
                prop_assert_eq!(unit.bytes, bytes as u64);
                prop_assert!(!unit.is_pack() || unit.bytes <= Unit::PACK_BYTES_MAX);
            }
            prop_assert_eq!(next, sizes.len());
            prop_assert_eq!((units.files_in_first(0), units.files_in_first(usize::MAX)), (0, sizes.len()));
        }
    }
}
