//! A simple model of the time of a multicast, and the algorithm and block size that take least by it.
//!
//! The paper compares its algorithms by their steps (DSN §4.3): a step takes as long as a block takes to cross a port,
//! and the cost of a block besides. Distance adds to that:
//!
//! - A block that goes from member to member is late by one latency at each of them.
//! - Members that keep in step with several neighbours [wait](wait_in_step) at the end of each step.
//! - Members that [run free](runs_free_from) do not. But their blocks share ports, which costs some steps more.
//! - The fabric is assumed to tell when a block is nearly through, as software fabrics do.
//! - Connections that begin slowly carry the first block in several round trips.
//!
//! Members that are processes of one host have no ports. They share processors, which copy every block to every member.

use std::time::Duration;

use crate::algorithm::{Algorithm, Hybrid, Spine};
use crate::hop::BlockCount;
use crate::schedule::{Schedule, ScheduleError};
use crate::simple::stages;
use crate::stepping::{FREE_FILL_BLOCKS, crowded_ratio, runs_free_from, wait_in_step};

/// Models the cost of moving blocks between members.
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use rdmc_schedule::{Algorithm, CostModel};
///
/// // Ports of 10 Gbit/s, 50 µs for each block, half a millisecond from host to host.
/// let network = CostModel::network(1.25e9, Duration::from_micros(50), Duration::from_micros(500));
/// let plan = network.best(8, 64 << 20)?;
/// assert_eq!(plan.algorithm, Algorithm::TwoTree);
/// assert!((512 << 10..=4 << 20).contains(&plan.block_size));
/// # Ok::<(), rdmc_schedule::ScheduleError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// The cost of a block of any length: posting it, granting it, waking the task that waits for it.
    per_block: Duration,
    /// From one member's software to another's.
    latency: Duration,
    /// The same, inside a rack.
    latency_in_rack: Duration,
    medium: Medium,
    /// The shortest and the longest block that is chosen, in bytes.
    block_size_min: u32,
    block_size_max: u32,
    slow_start: Option<SlowStart>,
}

/// The resource that members share.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Medium {
    /// Each has a port of so many bytes per second in each direction.
    Ports { rate: f64 },
    /// All are processes of one host, in which each of so many processors copies so many bytes per second.
    Host { rate: f64, processors: u32 },
}

/// How connections begin: so many bytes in the first round trip.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SlowStart {
    initial_window: f64,
    round_trip: Duration,
}

/// An algorithm and a block size, and their predicted time.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The block size in bytes.
    pub block_size: u32,
    /// The predicted time of the message, from the first block's departure to the last one's arrival.
    pub time: Duration,
}

impl CostModel {
    /// Slots of a ring whose [length](Self::ring_bytes) a model chooses.
    pub const RING_SLOTS: u32 = 64;

    /// Describes members that have ports of `rate` bytes per second in each direction.
    ///
    /// `per_block` is the time that a block takes besides its way through the port. Handling that goes on meanwhile
    /// costs nothing. `latency` is the time from one member's software to another's, half of a round trip.
    ///
    /// # Panics
    /// If the rate is not a positive number.
    #[must_use]
    pub fn network(rate: f64, per_block: Duration, latency: Duration) -> CostModel {
        assert!(rate.is_finite() && rate > 0.0, "a rate of {rate} bytes per second");
        CostModel::new(per_block, latency, Medium::Ports { rate })
    }

    /// Describes members that are processes of one host; each of its `processors` copies `rate` bytes per second.
    ///
    /// # Panics
    /// If the rate is not a positive number, or there are no processors.
    #[must_use]
    pub fn host(rate: f64, processors: u32, per_block: Duration, latency: Duration) -> CostModel {
        assert!(rate.is_finite() && rate > 0.0, "a rate of {rate} bytes per second");
        assert!(processors > 0, "a host without processors");
        CostModel::new(per_block, latency, Medium::Host { rate, processors })
    }

    fn new(per_block: Duration, latency: Duration, medium: Medium) -> CostModel {
        let (block_size_min, block_size_max) = (BLOCK_SIZE_MIN, BLOCK_SIZE_MAX);
        let latency_in_rack = latency;
        CostModel { per_block, latency, latency_in_rack, medium, block_size_min, block_size_max, slow_start: None }
    }

    /// Sets the latency inside racks, as far as it is shorter than that between them. It counts for
    /// [`Spine::TwoTree`]. By default both are the same.
    #[must_use]
    pub fn latency_in_rack(self, latency: Duration) -> CostModel {
        CostModel { latency_in_rack: latency.min(self.latency), ..self }
    }

    /// Sets how many bytes a connection sends in its first round trip, which takes `round_trip`, and twice as many in
    /// each further one, as TCP does. By default connections begin at the rate of the port.
    ///
    /// A relay sends a block on when the block is whole. So the first block is late by its round trips at every member
    /// that it passes, and short blocks are late by fewer.
    #[must_use]
    pub fn slow_start(self, initial_window: u32, round_trip: Duration) -> CostModel {
        CostModel { slow_start: Some(SlowStart { initial_window: initial_window.max(1).into(), round_trip }), ..self }
    }

    /// Sets the shortest block to choose, in bytes, rounded up to a power of two; default 64 KiB.
    #[must_use]
    pub fn block_size_min(self, bytes: u32) -> CostModel {
        CostModel { block_size_min: bytes.clamp(1, BLOCK_SIZE_MAX).next_power_of_two(), ..self }
    }

    /// Sets the longest block to choose, in bytes; default 16 MiB. The shortest one is chosen in any case.
    ///
    /// The model does not know the other costs of long blocks: memory, caches, and the part of a block that is lost
    /// when a transfer is interrupted.
    #[must_use]
    pub fn block_size_max(self, bytes: u32) -> CostModel {
        CostModel { block_size_max: bytes, ..self }
    }

    /// Predicts the time of a message of `bytes` to `members`, the root included, in blocks of `block_size` bytes.
    ///
    /// # Errors
    /// The algorithm cannot serve so many members, or there are too many blocks.
    pub fn time(
        &self,
        algorithm: &Algorithm,
        members: u32,
        bytes: u64,
        block_size: u32,
    ) -> Result<Duration, ScheduleError> {
        let blocks = u32::try_from(bytes.div_ceil(block_size.max(1).into()).max(1)).unwrap_or(u32::MAX);
        let schedule = Schedule::new(algorithm, members, BlockCount(blocks))?;
        // The last block may be shorter: all are as long as they are on average.
        let len = as_f64(bytes) / f64::from(blocks);
        let (count, overhead) = (hops(algorithm, members), self.per_block.as_secs_f64());
        let hops = f64::from(count.between);
        let seconds = match self.medium {
            Medium::Ports { rate } => {
                self.time_on_ports(&schedule, count, len, rate) + hops * self.late_by_slow_start(len, rate)
            }
            Medium::Host { rate, processors } => {
                let receivers = f64::from(members.saturating_sub(1));
                let copy = len / rate + overhead;
                let at_once = receivers.min(processors.into()).max(1.0);
                // All copies, and before the last member has its first block those of the members between.
                receivers * f64::from(blocks) * copy / at_once
                    + (hops - 1.0).max(0.0) * copy
                    + hops * self.latency.as_secs_f64()
            }
        };
        Ok(Duration::from_secs_f64(seconds.min(SECONDS_MAX)))
    }

    /// Returns how much longer the first block of `len` bytes takes from one member to another.
    fn late_by_slow_start(&self, len: f64, rate: f64) -> f64 {
        let Some(SlowStart { initial_window, round_trip }) = self.slow_start else { return 0.0 };
        // From then on the port is the limit.
        let until_full = len.min(rate * round_trip.as_secs_f64());
        let rounds = (1.0 + until_full / initial_window).log2() - 1.0;
        rounds.max(0.0) * round_trip.as_secs_f64()
    }

    /// Predicts the time of a message on ports of `rate` bytes per second; its blocks have `len` bytes on average.
    fn time_on_ports(&self, schedule: &Schedule, hops: HopCount, len: f64, rate: f64) -> f64 {
        let (latency, latency_in_rack) = (self.latency.as_secs_f64(), self.latency_in_rack.as_secs_f64());
        let (algorithm, members) = (schedule.algorithm(), schedule.members());
        // Of each sender, so many blocks may be under way.
        let senders = match algorithm {
            Algorithm::TwoTree
            | Algorithm::BinomialPipeline
            | Algorithm::Hybrid(Hybrid { spine: Spine::TwoTree, .. }) => 2.0,
            _ => 1.0,
        };
        let block_time = (len / rate + self.per_block.as_secs_f64()).max(2.0 * latency / (BLOCKS_UNDER_WAY * senders));
        let (steps, in_rack) = (as_f64(schedule.steps()), f64::from(hops.inside) * latency_in_rack);
        let hops = f64::from(hops.between);
        match algorithm {
            _ if members < 3 => steps * block_time + 2.0 * latency,
            // Before the first block, members learn the message's size, and grant.
            Algorithm::TwoTree | Algorithm::Hybrid(Hybrid { spine: Spine::TwoTree, .. }) => {
                steps * block_time + (hops + 2.0) * latency + in_rack
            }
            Algorithm::BinomialPipeline | Algorithm::Circulant | Algorithm::Hybrid(_) => {
                let wait = wait_in_step(2 * self.latency, true);
                let blocks = schedule.blocks();
                if *algorithm == Algorithm::Circulant || blocks < runs_free_from(members, len, rate, wait) {
                    // The next block is granted in the middle of this one, at the earliest.
                    let late = (2.0 * latency - len / rate / 2.0).max(0.0);
                    return steps * (block_time + wait.as_secs_f64() + late) * IN_STEP_RATIO + latency;
                }
                let fill = hops * (FREE_FILL_BLOCKS * block_time + FREE_FILL_LATENCIES * latency);
                let blocks_time = f64::from(blocks.get()) * block_time;
                (blocks_time * crowded_ratio(members) + fill).min(steps * (block_time + 2.0 * latency)) + latency
            }
            // The members of the last stage are behind fewer others, unless they are as many as all before.
            Algorithm::BinomialTree if schedule.blocks().get() == 1 => {
                steps * block_time + f64::from(members.ilog2()) * latency
            }
            _ if schedule.blocks().get() == 1 => steps * block_time + hops * latency,
            // The first block brings the size. For the others, each stage begins with a grant.
            Algorithm::BinomialTree => steps * block_time + 3.0 * hops * latency,
            _ => steps * block_time + (hops + 2.0) * latency,
        }
    }

    /// Chooses the flat algorithm and the block size that should take least; block sizes are powers of two.
    ///
    /// Of equal times the longest blocks win, but no block of which half would stay empty. The circulant schedule is
    /// not considered: near members take as long with it as with the binomial pipeline, distant members longer.
    ///
    /// # Errors
    /// There can be no group of so many members.
    pub fn best(&self, members: u32, bytes: u64) -> Result<Plan, ScheduleError> {
        self.complete(None, None, members, bytes)
    }

    /// Chooses as [`best`](Self::best) does what is not given: the algorithm, the block size in bytes, both or neither.
    ///
    /// # Errors
    /// There can be no group of so many members, or the given algorithm cannot serve them.
    ///
    /// # Examples
    /// ```
    /// # use std::time::Duration;
    /// use rdmc_schedule::{Algorithm, CostModel};
    ///
    /// # let model = CostModel::network(1.25e9, Duration::from_micros(50), Duration::from_micros(20));
    /// let plan = model.complete(Some(&Algorithm::Chain), None, 8, 64 << 20)?;
    /// assert_eq!(plan.algorithm, Algorithm::Chain);
    /// # Ok::<(), rdmc_schedule::ScheduleError>(())
    /// ```
    pub fn complete(
        &self,
        algorithm: Option<&Algorithm>,
        block_size: Option<u32>,
        members: u32,
        bytes: u64,
    ) -> Result<Plan, ScheduleError> {
        let algorithms = algorithm.map_or(&CANDIDATES[..], std::slice::from_ref);
        let block_sizes = match block_size {
            Some(given) => vec![given],
            None => self.block_sizes(bytes),
        };
        let mut best: Option<Plan> = None;
        for algorithm in algorithms {
            for &block_size in &block_sizes {
                let time = self.time(algorithm, members, bytes, block_size)?;
                if best.as_ref().is_none_or(|best| time < best.time) {
                    best = Some(Plan { algorithm: algorithm.clone(), block_size, time });
                }
            }
        }
        Ok(best.expect("there are candidates"))
    }

    /// Chooses the longest message, in bytes, that the root should write to each of the other members itself, into a
    /// slot of a ring (DSN §4.6), instead of sending it by a schedule: 64 bytes to 64 KiB. `None` if a schedule is
    /// faster for any message, as with many members.
    ///
    /// It is about a single message. The root's port carries one once for each member, so that a stream of long
    /// messages can be slower with a ring although each of them is faster.
    ///
    /// # Errors
    /// There can be no group of so many members.
    ///
    /// # Examples
    /// ```
    /// # use std::time::Duration;
    /// use rdmc_schedule::CostModel;
    ///
    /// let network = CostModel::network(1.25e9, Duration::from_micros(12), Duration::from_micros(50));
    /// assert_eq!(network.ring_bytes(4)?, Some(64 << 10));
    /// assert_eq!(network.ring_bytes(512)?, None);
    /// # Ok::<(), rdmc_schedule::ScheduleError>(())
    /// ```
    pub fn ring_bytes(&self, members: u32) -> Result<Option<u32>, ScheduleError> {
        let mut longest = None;
        for bytes in (RING_BYTES_MIN.ilog2()..=RING_BYTES_MAX.ilog2()).map(|log2| 1 << log2) {
            if self.ring_time(members, bytes) > self.best(members, bytes.into())?.time {
                break;
            }
            longest = Some(bytes);
        }
        Ok(longest)
    }

    /// Predicts the time of a message that the root writes to each member itself.
    fn ring_time(&self, members: u32, bytes: u32) -> Duration {
        let (receivers, bytes) = (f64::from(members.saturating_sub(1)), f64::from(bytes));
        let per_block = self.per_block.as_secs_f64();
        let all = match self.medium {
            // Posting goes on while the port sends.
            Medium::Ports { rate } => receivers * (bytes / rate).max(per_block * RING_WRITE_RATIO),
            // Receivers copy from their slots, and wake up for that.
            Medium::Host { rate, processors } => {
                receivers * (bytes / rate + per_block) / receivers.min(processors.into()).max(1.0)
            }
        };
        Duration::from_secs_f64((all + self.latency.as_secs_f64()).min(SECONDS_MAX))
    }

    /// Returns the block sizes that are candidates, the longest first.
    fn block_sizes(&self, bytes: u64) -> Vec<u32> {
        let useful = |block_size: &u32| u64::from(block_size / 2) < bytes && *block_size <= self.block_size_max;
        let (least, most) = (self.block_size_min.ilog2(), BLOCK_SIZE_MAX.ilog2());
        let longer = (least + 1..=most).rev().map(|log2| 1 << log2).filter(useful);
        longer.chain([1 << least]).collect()
    }
}

/// The hops that a block takes, one after the other, to reach the last member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HopCount {
    /// All hops, or with two trees by racks those from rack to rack.
    between: u32,
    /// Hops inside racks with two trees by racks.
    inside: u32,
}

fn hops(algorithm: &Algorithm, members: u32) -> HopCount {
    if let Algorithm::Hybrid(Hybrid { racks, spine: Spine::TwoTree }) = algorithm {
        let (between, inside) = racks.hops_in_trees();
        return HopCount { between, inside };
    }
    let between = match algorithm {
        _ if members < 2 => 0,
        Algorithm::Sequential | Algorithm::Fanout => 1,
        Algorithm::Chain => members - 1,
        Algorithm::BinomialTree | Algorithm::BinomialPipeline | Algorithm::Circulant | Algorithm::Hybrid(_) => {
            stages(members)
        }
        Algorithm::TwoTree => (members - 1).ilog2() + 1,
    };
    HopCount { between, inside: 0 }
}

#[expect(clippy::cast_precision_loss, reason = "a prediction needs no more than 53 bits")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// The candidates; of several with the same time the first is taken.
static CANDIDATES: [Algorithm; 6] = [
    Algorithm::BinomialPipeline,
    Algorithm::TwoTree,
    Algorithm::Fanout,
    Algorithm::Chain,
    Algorithm::BinomialTree,
    Algorithm::Sequential,
];
/// Members that keep in step take this many times as long: one that is late makes others late.
const IN_STEP_RATIO: f64 = 1.02;
/// Blocks of one sender that are under way, about, where distance needs many.
const BLOCKS_UNDER_WAY: f64 = 512.0;
/// If blocks share ports, the time until the last member gets its blocks at full rate, besides blocks: so many
/// latencies for each doubling of the members.
const FREE_FILL_LATENCIES: f64 = 1.8;
/// The block sizes that are candidates by default, in bytes: the powers of two from the first to the second.
const BLOCK_SIZE_MIN: u32 = 64 << 10;
const BLOCK_SIZE_MAX: u32 = 16 << 20;
/// The bounds of what a slot of a ring may have, in bytes.
const RING_BYTES_MIN: u32 = 64;
const RING_BYTES_MAX: u32 = 64 << 10;
/// Of the cost of a block, the part that a write into a ring has: no grant, and no relay that wakes up.
const RING_WRITE_RATIO: f64 = 0.4;
/// Longer times are all the same: a century.
const SECONDS_MAX: f64 = 3.2e9;

#[cfg(test)]
mod tests {
    use super::*;

    /// One message in the simulator with 100 Gbit/s, with and without a ring: latency, software costs of a block,
    /// members, bytes, and whether the ring is faster.
    #[test]
    fn a_ring_is_for_the_messages_that_are_faster_with_it() {
        let simulated = [
            (1300, 800, 4, 1000, true),
            (1300, 800, 8, 1000, true),
            (1300, 800, 16, 1000, true),
            (1300, 800, 16, 10_000, false),
            (50_000, 800, 4, 10_000, true),
            (50_000, 800, 16, 10_000, true),
        ];
        for (latency, per_block, members, bytes, is_faster) in simulated {
            let (per_block, latency) = (Duration::from_nanos(per_block), Duration::from_nanos(latency));
            let model = CostModel::network(12.5e9, per_block, latency);
            let chosen = model.ring_bytes(members).unwrap();
            assert_eq!(chosen.is_some_and(|most| bytes <= most), is_faster, "{members} {bytes}: {chosen:?}");
        }
    }

    const MIB: u64 = 1 << 20;

    fn network(rate: f64, per_block_us: u64) -> CostModel {
        CostModel::network(rate, Duration::from_micros(per_block_us), Duration::from_micros(20))
    }

    fn host() -> CostModel {
        CostModel::host(10e9, 2, Duration::from_micros(30), Duration::from_micros(20))
    }

    #[test]
    fn connections_that_begin_slowly_want_short_blocks_where_round_trips_are_long() {
        let block_size = |round_trip_ms| {
            let round_trip = Duration::from_millis(round_trip_ms);
            let model = CostModel::network(312e6, Duration::from_micros(12), round_trip / 2);
            let model = model.slow_start(14_480, round_trip).block_size_min(32 << 10);
            model.best(8, 64 * MIB).unwrap().block_size
        };
        assert!(block_size(0) > block_size(12), "{} {}", block_size(0), block_size(12));
        assert_eq!(block_size(24), 32 << 10);
        let (near, late) = (network(100e6, 12), network(100e6, 12).slow_start(10_000, Duration::from_millis(10)));
        let time = |model: &CostModel| model.time(&Algorithm::Chain, 3, 70_000, 70_000).unwrap();
        // A block of seven windows takes three round trips instead of one, at both members that it passes.
        assert_eq!((time(&late) - time(&near)).as_millis(), 40);
    }

    #[test]
    fn on_ports_it_is_steps_times_what_a_step_takes() {
        let model = network(100e6, 500);
        let predicted = |algorithm, block_size| model.time(&algorithm, 8, 64 * MIB, block_size).unwrap();
        let is = |time: Duration, expected: f64| (time.as_secs_f64() / expected - 1.0).abs() < 1e-6;
        // 66 steps of 1 MiB. At the end of each, members wait for a part of a round trip.
        let (block_time, wait) = (1_048_576.0 / 100e6 + 500e-6, 0.3 * 40e-6);
        let pipeline = predicted(Algorithm::BinomialPipeline, 1 << 20);
        assert!(is(pipeline, 66.0 * (block_time + wait) * 1.02 + 20e-6), "{pipeline:?}");
        // Three levels, an announcement and a grant.
        let two_tree = predicted(Algorithm::TwoTree, 1 << 20);
        assert!(is(two_tree, 68.0 * block_time + 5.0 * 20e-6), "{two_tree:?}");
        let chain = predicted(Algorithm::Chain, 1 << 20);
        assert!(is(chain, 70.0 * block_time + 9.0 * 20e-6), "{chain:?}");
        let predicted = pipeline;
        let one_by_one = model.time(&Algorithm::Sequential, 8, 64 * MIB, 1 << 20).unwrap();
        assert!(one_by_one > 6 * predicted);
    }

    #[test]
    fn on_one_host_every_copy_is_made_by_some_processor() {
        let predicted = host().time(&Algorithm::Fanout, 8, 64 * MIB, 1 << 20).unwrap();
        let expected = 7.0 * 64.0 * (1_048_576.0 / 10e9 + 30e-6) / 2.0 + 20e-6;
        assert!((predicted.as_secs_f64() / expected - 1.0).abs() < 1e-6, "{predicted:?}");
    }

    #[test]
    fn the_best_is_no_worse_than_anything_else() {
        for model in [network(25e6, 100), network(1.25e9, 50), network(12.5e9, 5), host()] {
            for members in [2, 3, 5, 8, 17, 100] {
                for bytes in [0, 1, 100_000, MIB, 64 * MIB, 1 << 40] {
                    let best = model.best(members, bytes).unwrap();
                    // The circulant is not considered.
                    for algorithm in Algorithm::ALL_FLAT.into_iter().filter(|other| *other != Algorithm::Circulant) {
                        for block_size in [64 << 10, 1 << 20, 16 << 20] {
                            let other = model.time(&algorithm, members, bytes, block_size).unwrap();
                            assert!(best.time <= other, "{best:?} {algorithm} {block_size}: {other:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn networks_get_a_pipeline_or_two_trees_and_hosts_the_fan_out() {
        for (members, bytes) in [(4, 64 * MIB), (8, 256 * MIB), (16, MIB)] {
            let near = network(1.25e9, 50).best(members, bytes).unwrap().algorithm;
            assert!([Algorithm::BinomialPipeline, Algorithm::TwoTree].contains(&near), "{members} {bytes}: {near}");
            assert_eq!(host().best(members, bytes).unwrap().algorithm, Algorithm::Fanout);
        }
        for (members, rate) in [(8, 1.25e9), (13, 125e6), (64, 12.5e9)] {
            let (per_block, latency) = (Duration::from_micros(5), Duration::from_millis(5));
            let far = CostModel::network(rate, per_block, latency).best(members, 4096 * MIB).unwrap();
            assert_eq!(far.algorithm, Algorithm::TwoTree, "{members} {rate}");
        }
        // With two members all are the same.
        assert_eq!(host().best(2, MIB).unwrap().algorithm, Algorithm::BinomialPipeline);
    }

    #[test]
    fn slower_ports_and_shorter_messages_want_shorter_blocks() {
        let block_size = |rate, bytes| network(rate, 100).best(8, bytes).unwrap().block_size;
        assert!(block_size(25e6, 64 * MIB) < block_size(1.25e9, 64 * MIB));
        assert!(block_size(1.25e9, MIB) < block_size(1.25e9, 1024 * MIB));
    }

    #[test]
    fn what_is_given_is_kept_and_the_rest_chosen_for_it() {
        let model = network(1.25e9, 50);
        let free = model.best(8, 64 * MIB).unwrap();
        assert_eq!(model.complete(Some(&free.algorithm), None, 8, 64 * MIB).unwrap(), free);
        assert_eq!(model.complete(None, Some(free.block_size), 8, 64 * MIB).unwrap(), free);
        // Where a relay has to wait for few blocks, they may be longer.
        let chain = model.complete(Some(&Algorithm::Chain), None, 3, 64 * MIB).unwrap();
        let long = model.complete(Some(&Algorithm::Chain), None, 100, 64 * MIB).unwrap();
        assert!(chain.block_size > long.block_size, "{chain:?} {long:?}");
        // One block goes fastest from those who have it to as many others.
        let whole = model.complete(None, Some(64 << 20), 8, 64 * MIB).unwrap();
        assert_eq!((whole.algorithm, whole.block_size), (Algorithm::BinomialTree, 64 << 20));
        let both = model.complete(Some(&Algorithm::Sequential), Some(1000), 8, MIB).unwrap();
        assert_eq!((both.algorithm, both.block_size), (Algorithm::Sequential, 1000));
    }

    #[test]
    fn no_block_is_chosen_of_which_half_stays_empty_nor_a_longer_one_than_allowed() {
        let block_size = |bytes| network(1.25e9, 50).best(2, bytes).unwrap().block_size;
        let chosen = [0, 1, 64 << 10, (64 << 10) + 1, MIB, MIB + 1, 1 << 40].map(block_size);
        assert_eq!(chosen, [64 << 10, 64 << 10, 64 << 10, 128 << 10, 1 << 20, 2 << 20, 16 << 20]);
        let limited = |bytes| network(1.25e9, 50).block_size_max(bytes).best(2, 1 << 40).unwrap().block_size;
        assert_eq!([0, 3 << 20, u32::MAX].map(limited), [64 << 10, 2 << 20, 16 << 20]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(network(1e9, 1).best(0, 1).is_err());
        assert!(network(1e9, 1).time(&Algorithm::Chain, crate::MEMBERS_MAX + 1, 1, 1).is_err());
        // More blocks than there can be are as many as there can be.
        assert!(network(1.0, 1).time(&Algorithm::Chain, 2, u64::MAX, 1).is_ok());
    }
}
