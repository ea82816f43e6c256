//! A row of bits, with operations on whole words.

/// The bits of one word.
pub(super) const WORD: u32 = u64::BITS;

/// A fixed number of bits, rounded up to whole words; those beyond the number asked for stay clear.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Bits(Box<[u64]>);

impl Bits {
    pub(super) fn clear(len: u32) -> Bits {
        Bits(vec![0; len.div_ceil(WORD) as usize].into())
    }

    pub(super) fn words(&self) -> &[u64] {
        &self.0
    }

    pub(super) fn words_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }

    pub(super) fn contains(&self, at: u32) -> bool {
        self.0[(at / WORD) as usize] & mask(at) != 0
    }

    pub(super) fn set(&mut self, at: u32) {
        self.0[(at / WORD) as usize] |= mask(at);
    }

    pub(super) fn unset(&mut self, at: u32) {
        self.0[(at / WORD) as usize] &= !mask(at);
    }

    pub(super) fn is_clear(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    pub(super) fn add(&mut self, other: &Bits) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }

    pub(super) fn remove(&mut self, other: &Bits) {
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word &= !other;
        }
    }

    pub(super) fn meets(&self, other: &Bits) -> bool {
        self.0.iter().zip(&other.0).any(|(word, other)| word & other != 0)
    }

    /// Lists the places of the bits that are set, ascending.
    pub(super) fn ones(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().zip((0..).step_by(64)).flat_map(|(&word, start)| ones(word).map(move |bit| start + bit))
    }

    /// Lists the places set in both, word by word in a ring that begins with word `from` of them.
    pub(super) fn common<'a>(&'a self, other: &'a Bits, from: usize) -> impl Iterator<Item = u32> + 'a {
        let words = self.0.iter().zip(&other.0).zip((0..).step_by(64));
        let ring = words.clone().skip(from).chain(words.take(from));
        ring.flat_map(|((word, other), start)| ones(word & other).map(move |bit| start + bit))
    }
}

/// Lists the bits set in `word`, ascending.
pub(super) fn ones(word: u64) -> impl Iterator<Item = u32> {
    let mut left = word;
    std::iter::from_fn(move || {
        let bit = (left != 0).then(|| left.trailing_zeros())?;
        left &= left - 1;
        Some(bit)
    })
}

fn mask(at: u32) -> u64 {
    1 << (at % WORD)
}
