//! A member's row.

use twox_hash::XxHash3_64;

use rdmc_schedule::Rank;

/// What a member says of itself: counts of messages, from the first of the group. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    /// Messages that it has whole.
    pub(crate) received: u64,
    /// Messages that its application has stored or let go.
    pub(crate) taken: u64,
    /// How many of these were let go without being stored.
    pub(crate) let_go: u64,
    /// Messages that all members have, as far as it knows.
    pub(crate) stable: u64,
    /// Messages about which it wants to hear at once.
    pub(crate) asked: u64,
    /// Slots of the ring that it has read.
    pub(crate) read: u64,
}

impl Row {
    /// Bytes of the encoded form.
    pub(crate) const LEN: usize = 56;

    /// Returns the row of a member that has these messages, as all others have.
    pub(crate) fn begin(messages: u64) -> Self {
        Self { received: messages, taken: messages, stable: messages, ..Self::default() }
    }

    /// Encodes the counts and their check value, little endian.
    pub(crate) fn encode(self, salt: u64, by: Rank) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let counts = [self.received, self.taken, self.let_go, self.stable, self.asked, self.read];
        for (count, place) in counts.iter().zip(out.chunks_exact_mut(8)) {
            place.copy_from_slice(&count.to_le_bytes());
        }
        let check = check(&out[..Self::LEN - 8], salt, by);
        out[Self::LEN - 8..].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// Decodes a row; `None` if its check value is wrong, because it came corrupted or is just being written.
    pub(crate) fn decode(bytes: &[u8; Self::LEN], salt: u64, by: Rank) -> Option<Self> {
        let count = |at: usize| {
            let mut count = [0; 8];
            count.copy_from_slice(&bytes[8 * at..8 * at + 8]);
            u64::from_le_bytes(count)
        };
        let row = Self {
            received: count(0),
            taken: count(1),
            let_go: count(2),
            stable: count(3),
            asked: count(4),
            read: count(5),
        };
        (count(6) == check(&bytes[..Self::LEN - 8], salt, by)).then_some(row)
    }

    /// Tells whether this row can come after another of the same member.
    pub(crate) fn follows(self, before: Self) -> bool {
        self.received >= before.received
            && self.taken >= before.taken
            && self.let_go >= before.let_go
            && self.stable >= before.stable
            && self.asked >= before.asked
            && self.read >= before.read
    }
}

fn check(counts: &[u8], salt: u64, by: Rank) -> u64 {
    XxHash3_64::oneshot_with_seed(salt.rotate_left(17) ^ u64::from(by.0), counts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(counts: [u64; 6]) -> Row {
        let [received, taken, let_go, stable, asked, read] = counts;
        Row { received, taken, let_go, stable, asked, read }
    }

    proptest! {
        #[test]
        fn a_row_is_read_as_it_was_written_by_its_member_alone(counts: [u64; 6], salt: u64, by in 0_u32..99) {
            let bytes = row(counts).encode(salt, Rank(by));
            prop_assert_eq!(Row::decode(&bytes, salt, Rank(by)), Some(row(counts)));
            prop_assert_eq!(Row::decode(&bytes, salt, Rank(by + 1)), None);
            prop_assert_eq!(Row::decode(&bytes, salt ^ 1, Rank(by)), None);
        }

        #[test]
        fn of_two_rows_half_written_neither_is_read(old: [u64; 6], new: [u64; 6], words in 1_usize..7) {
            let mut bytes = row(old).encode(1, Rank(2));
            let written = row(new).encode(1, Rank(2));
            bytes[..8 * words].copy_from_slice(&written[..8 * words]);
            let read = Row::decode(&bytes, 1, Rank(2));
            prop_assert!(read.is_none() || read == Some(row(old)) || read == Some(row(new)));
        }

        #[test]
        fn counts_only_grow(counts: [u32; 6], at in 0_usize..6) {
            let before = counts.map(|count| u64::from(count) + 1);
            let mut more = before;
            more[at] += 1;
            prop_assert!(row(more).follows(row(before)) && row(before).follows(row(before)));
            prop_assert!(!row(before).follows(row(more)));
        }
    }

    #[test]
    fn fresh_memory_is_no_row() {
        assert_eq!(Row::decode(&[0; Row::LEN], 0, Rank(0)), None);
    }
}
