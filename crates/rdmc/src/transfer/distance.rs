//! How far apart neighbours are, and whether their ports follow the steps of the schedule.
//!
//! Near neighbours keep in step: a port carries one block at a time, that of the schedule's step. No block comes late
//! because another one shared its port. But at the end of each step, members wait for each other's grant, which takes
//! a round trip.
//!
//! Distant neighbours run free: a port carries the blocks of all neighbours that are ready, each neighbour's in their
//! order, and receivers are ready for all blocks that find room. Then blocks share ports, and none waits for a grant.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rdmc_fabric::Timestamp;
use rdmc_schedule::{Algorithm, Hybrid, Spine, is_near};

use crate::sync::lock;

/// The distance of a member's neighbours, as far as it is known.
#[derive(Debug)]
pub(crate) struct Distance {
    block_size: u32,
    stepping: Stepping,
    runs_free: AtomicBool,
    /// Whether the fabric knows the rate.
    rate_is_known: bool,
    /// The round trip to the farthest neighbour in ns; 0 while it is not known.
    round_trip_ns: AtomicU64,
    /// The rate of the port in bytes per second; 0 while it is not known.
    rate: AtomicU64,
    /// Blocks that were counted.
    blocks: AtomicU32,
    meter: Mutex<RateMeter>,
}

/// What an algorithm needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stepping {
    /// In step at every distance: blocks come from one member only, one message follows the other, or blocks must not
    /// share ports.
    InStep,
    /// No block waits for one that comes a longer way, so blocks may share ports.
    Free,
    /// Members get their blocks from several others in turn.
    ByDistance,
}

impl Stepping {
    fn of(algorithm: &Algorithm) -> Self {
        match algorithm {
            Algorithm::Sequential | Algorithm::Fanout | Algorithm::Chain | Algorithm::BinomialTree => Self::InStep,
            Algorithm::TwoTree | Algorithm::Hybrid(Hybrid { spine: Spine::TwoTree, .. }) => Self::Free,
            // Each member has most others as neighbours. Running free, it takes up to twice as long.
            Algorithm::Circulant => Self::InStep,
            _ => Self::ByDistance,
        }
    }
}

/// Measures the rate of a port as the maximum of what it has carried.
#[derive(Debug, Default)]
struct RateMeter {
    since: Option<Timestamp>,
    bytes: u64,
    /// The maxima of this epoch and of the one before.
    maxima: [u64; 2],
    epoch_began: Option<Timestamp>,
}

impl Distance {
    /// Begins with what is known before: the rate of the port in bytes per second. Otherwise it is measured.
    pub(crate) fn new(algorithm: &Algorithm, block_size: u32, port_rate: Option<u64>) -> Self {
        let stepping = Stepping::of(algorithm);
        Self {
            block_size,
            stepping,
            runs_free: AtomicBool::new(stepping == Stepping::Free),
            rate_is_known: port_rate.is_some(),
            round_trip_ns: AtomicU64::new(0),
            rate: AtomicU64::new(port_rate.unwrap_or(0)),
            blocks: AtomicU32::new(0),
            meter: Mutex::default(),
        }
    }

    /// Tells whether ports carry the blocks of all neighbours at once.
    pub(crate) fn runs_free(&self) -> bool {
        self.runs_free.load(Ordering::Relaxed)
    }

    /// Returns the round trip to the farthest neighbour, the software at both ends included.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        let nanos = self.round_trip_ns.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// Returns the rate of the port in bytes per second.
    pub(crate) fn rate(&self) -> Option<u64> {
        let rate = self.rate.load(Ordering::Relaxed);
        (rate > 0).then_some(rate)
    }

    /// Returns how many blocks of one neighbour may be under way: those of two round trips and some more, so that the
    /// port never idles.
    pub(crate) fn window(&self) -> u64 {
        let ahead = if self.runs_free() { BLOCKS_AHEAD_FREE } else { BLOCKS_AHEAD };
        let (Some(round_trip), Some(rate)) = (self.round_trip(), self.rate()) else { return ahead };
        let bytes = round_trip.as_nanos() * u128::from(rate) / 1_000_000_000;
        u64::try_from(2 * bytes / u128::from(self.block_size)).unwrap_or(u64::MAX).saturating_add(ahead)
    }

    /// Notes the round trip to the farthest neighbour. `once` if it was measured only once: then a busy node may have
    /// delayed it, for a short time.
    pub(crate) fn note_round_trip(&self, round_trip: Duration, once: bool) {
        if once && round_trip < DELAY_MAX {
            return;
        }
        let nanos = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
        self.round_trip_ns.store(nanos.max(1), Ordering::Relaxed);
        self.decide();
    }

    /// Counts a block that the port has carried.
    pub(crate) fn count_block(&self, bytes: usize, now: impl FnOnce() -> Timestamp) {
        if self.rate_is_known {
            return;
        }
        let blocks = self.blocks.fetch_add(1, Ordering::Relaxed);
        let mut meter = lock(&self.meter);
        meter.bytes += bytes as u64;
        if blocks.is_multiple_of(BLOCKS_METERED)
            && let Some(maximum) = meter.read(now())
        {
            drop(meter);
            self.rate.store(maximum, Ordering::Relaxed);
            self.decide();
        }
    }

    /// Ports run free if the neighbours are not near.
    fn decide(&self) {
        if self.stepping != Stepping::ByDistance {
            return;
        }
        let (Some(round_trip), Some(rate)) = (self.round_trip(), self.rate()) else { return };
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let near = is_near(self.block_size.into(), round_trip, rate as f64);
        self.runs_free.store(!near, Ordering::Relaxed);
    }
}

impl RateMeter {
    /// Returns the maximum of the rate, in bytes per second; `None` if too little time has passed. Blocks that are
    /// handled at once may have come one after the other.
    fn read(&mut self, now: Timestamp) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let nanos = now.since(since).as_nanos();
        if nanos < METERED_MIN.as_nanos() {
            return None;
        }
        self.since = Some(now);
        let bytes = std::mem::take(&mut self.bytes);
        let rate = u64::try_from(u128::from(bytes) * 1_000_000_000 / nanos).unwrap_or(u64::MAX);
        let began = *self.epoch_began.get_or_insert(now);
        if now.since(began) >= EPOCH {
            self.maxima = [0, self.maxima[0]];
            self.epoch_began = Some(now);
        }
        self.maxima[0] = self.maxima[0].max(rate);
        Some(self.maxima[0].max(self.maxima[1]))
    }
}

/// Blocks of one neighbour under way besides those of two round trips. In a run of blocks in step, one write grants
/// half of them.
const BLOCKS_AHEAD: u64 = 32;
const BLOCKS_AHEAD_FREE: u64 = 16;
/// Longest delay by a node that is busy with forming groups, about.
const DELAY_MAX: Duration = Duration::from_millis(2);
/// Shortest time over which the rate is measured.
const METERED_MIN: Duration = Duration::from_millis(2);
/// Blocks after which the rate is read.
const BLOCKS_METERED: u32 = 4;
/// Time for which a maximum of the rate counts at least.
const EPOCH: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use rdmc_schedule::Racks;

    use super::*;

    fn distance(algorithm: Algorithm, port_rate: Option<u64>) -> Distance {
        Distance::new(&algorithm, 1 << 20, port_rate)
    }

    #[test]
    fn distant_neighbours_run_free_and_near_ones_keep_in_step() {
        // A block takes 1 ms.
        for (round_trip_us, free) in [(1, false), (160, false), (170, true), (10_000, true)] {
            let pipeline = distance(Algorithm::BinomialPipeline, Some(1 << 30));
            assert!(!pipeline.runs_free());
            pipeline.note_round_trip(Duration::from_micros(round_trip_us), false);
            assert_eq!(pipeline.runs_free(), free, "{round_trip_us} µs");
        }
    }

    #[test]
    fn a_short_round_trip_counts_if_it_was_measured_again() {
        let pipeline = distance(Algorithm::BinomialPipeline, Some(1 << 30));
        pipeline.note_round_trip(Duration::from_micros(500), true);
        assert_eq!((pipeline.round_trip(), pipeline.runs_free()), (None, false));
        pipeline.note_round_trip(Duration::from_millis(5), true);
        assert!(pipeline.runs_free());
        pipeline.note_round_trip(Duration::from_micros(50), false);
        assert_eq!((pipeline.round_trip(), pipeline.runs_free()), (Some(Duration::from_micros(50)), false));
    }

    #[test]
    fn what_needs_no_steps_runs_free_and_what_waits_for_no_grant_never_does() {
        let racks = Racks::from_sizes(&[2, 2]).unwrap();
        let by_racks = Hybrid::new(racks, Spine::TwoTree).into();
        for (algorithm, free) in
            [(Algorithm::TwoTree, true), (by_racks, true), (Algorithm::Chain, false), (Algorithm::Sequential, false)]
        {
            let distance = distance(algorithm, Some(1 << 30));
            distance.note_round_trip(Duration::from_secs(1), true);
            assert_eq!(distance.runs_free(), free);
        }
    }

    #[test]
    fn the_rate_is_measured_if_it_is_not_known() {
        let pipeline = distance(Algorithm::BinomialPipeline, None);
        pipeline.note_round_trip(Duration::from_millis(1), false);
        assert_eq!((pipeline.rate(), pipeline.runs_free()), (None, false));
        // Blocks that are handled at once say nothing.
        for _ in 0..=2 * BLOCKS_METERED {
            pipeline.count_block(1 << 20, || Timestamp::from_nanos(0));
        }
        assert_eq!(pipeline.rate(), None);
        let at_ms = |ms: u64| move || Timestamp::from_nanos(ms * 1_000_000);
        for ms in 1..=4 * u64::from(BLOCKS_METERED) {
            pipeline.count_block(1 << 20, at_ms(ms));
        }
        let burst = pipeline.rate().expect("it was measured");
        assert!(pipeline.runs_free());
        // It counts for a while only.
        for ms in (20..15_000).step_by(10) {
            pipeline.count_block(1 << 20, at_ms(ms));
        }
        assert!(pipeline.rate().is_some_and(|rate| rate < burst / 5 && rate > 90 << 20), "{:?}", pipeline.rate());
    }
}
