//! Random numbers that are the same on every machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A generator in which one seed decides everything.
///
/// Mathematical functions come from a Rust library, since those of operating systems differ in the last bit.
#[derive(Clone, Debug)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// Makes the generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Makes an independent generator, seeded by the next number.
    #[must_use]
    pub fn branch(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// Draws 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill_bytes(bytes);
    }

    /// Draws a number from `0..bound`.
    ///
    /// # Panics
    /// If `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "there is no number below 0");
        let wide = u128::from(self.next_u64()) * u128::from(bound);
        u64::try_from(wide >> 64).expect("a product's high half is below the bound")
    }

    /// Draws a number from a range, both ends included.
    ///
    /// # Panics
    /// If the range is empty.
    pub fn within(&mut self, range: std::ops::RangeInclusive<u64>) -> u64 {
        let (low, high) = range.into_inner();
        assert!(low <= high, "the range has a number");
        low + self.below((high - low).saturating_add(1))
    }

    /// Draws a number from 0 to 1, without 1.
    pub fn unit(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let bits = (self.next_u64() >> 11) as f64;
        bits / 9_007_199_254_740_992.0
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Draws from the exponential distribution.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * libm::log(1.0 - self.unit())
    }

    /// Draws from the standard normal distribution.
    pub fn normal(&mut self) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(1.0 - self.unit()));
        radius * libm::cos(2.0 * std::f64::consts::PI * self.unit())
    }

    /// Draws from the lognormal distribution with this median and this mean.
    ///
    /// # Panics
    /// If the mean is below the median, or the median not above 0.
    pub fn lognormal(&mut self, median: f64, mean: f64) -> f64 {
        assert!(0.0 < median && median <= mean, "a lognormal's mean is above its median");
        let sigma = libm::sqrt(2.0 * libm::log(mean / median));
        median * libm::exp(sigma * self.normal())
    }

    /// Brings `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let at = usize::try_from(self.below(last as u64 + 1)).expect("an index");
            items.swap(last, at);
        }
    }

    /// Draws one of `items`.
    ///
    /// # Panics
    /// If there are no items.
    pub fn one_of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[usize::try_from(self.below(items.len() as u64)).expect("an index")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_every_number() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (random.next_u64(), random.lognormal(12e6, 29e6).to_bits(), random.exponential(3.0).to_bits())
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        // The same on every machine: this fails if logarithms differ.
        assert_eq!(draw(1), (7424550030962593201, 4710000207665073356, 4604865653972719237));
    }

    #[test]
    fn distributions_have_their_means() {
        let mut random = Random::new(1);
        let mut mean = |draw: fn(&mut Random) -> f64| (0..100_000).map(|_| draw(&mut random)).sum::<f64>() / 1e5;
        assert!((mean(|random| random.exponential(2.0)) - 2.0).abs() < 0.05);
        assert!(mean(Random::normal).abs() < 0.02);
        assert!((mean(|random| random.lognormal(12.0, 29.0)) - 29.0).abs() < 1.5);
        assert!((mean(|random| random.within(1..=3) as f64) - 2.0).abs() < 0.02);
    }
}
