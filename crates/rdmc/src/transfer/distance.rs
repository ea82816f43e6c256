//! How far apart neighbours are, and whether their ports follow the steps of the schedule.
//!
//! Members can *keep in step*: a port carries one block at a time, that of the schedule's step. No block comes late
//! because another one shared its port. But at the end of each step, members wait for each other's grant and for each
//! other's last bytes.
//!
//! Or they *run free*: a port carries the blocks of all neighbours that are ready, each neighbour's in their order, and
//! receivers are ready for all blocks that find room. Then none waits for a grant, but blocks share ports.
//!
//! Unless the algorithm needs one of them, the root decides by [`runs_free_from`] and tells the others: members that
//! decide differently wait for each other. In a hypercube its neighbours are as far away as those of any member. In a
//! hybrid of pipelines they may all be in its own rack, and members with near neighbours keep in step while others run
//! free. There each member decides for itself.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rdmc_fabric::{Capabilities, Timestamp};
use rdmc_schedule::{Algorithm, BlockCount, Hybrid, Rank, Spine, runs_free_from, wait_in_step};
use tokio::sync::Notify;

use crate::sync::lock;

/// The distance of a member's neighbours, as far as it is known.
#[derive(Debug)]
pub(crate) struct Distance {
    block_size: u32,
    members: u32,
    decider: Decider,
    /// Whether the fabric tells when a block is nearly through.
    tells_near: bool,
    /// Other groups have shared the port of a member by weights, as far as this one knows.
    is_shared: AtomicBool,
    /// Messages of at least so many blocks run free.
    free_from: AtomicU32,
    /// At the root: wakes the task that tells the others when it has changed.
    changed: Notify,
    /// The number of blocks of the latest message.
    latest: AtomicU32,
    /// Whether the fabric knows the rate.
    rate_is_known: bool,
    /// The round trip to the farthest neighbour in ns; 0 while it is not known.
    round_trip_ns: AtomicU64,
    /// The rate of the port in bytes per second; 0 while it is not known.
    rate: AtomicU64,
    /// The bytes that the port carries in a round trip, and the blocks of two; 0 while they are not known. They are
    /// looked at with every block.
    bytes_on_the_way: AtomicU64,
    blocks_on_the_way: AtomicU64,
    /// Bytes of blocks that were counted since the meter was read.
    bytes: AtomicU64,
    /// The number of bytes at which it is read again.
    metered_bytes: u64,
    meter: Mutex<RateMeter>,
}

/// Who decides whether ports keep in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decider {
    /// The algorithm.
    Algorithm,
    /// This member, for itself.
    Member,
    /// This member, which is the root, for all.
    RootForAll,
    /// The root.
    Root,
}

impl Decider {
    /// Returns who decides at a member, and from how many blocks messages run free until then.
    fn of(algorithm: &Algorithm, members: u32, is_root: bool) -> (Self, u32) {
        const IN_STEP: u32 = u32::MAX;
        match algorithm {
            // There is nobody else to wait for.
            _ if members == 2 => (Self::Algorithm, IN_STEP),
            // Blocks come from one member only, or one message follows the other.
            Algorithm::Sequential | Algorithm::Fanout | Algorithm::Chain | Algorithm::BinomialTree => {
                (Self::Algorithm, IN_STEP)
            }
            // Each member has most others as neighbours. Running free, it takes up to twice as long.
            Algorithm::Circulant => (Self::Algorithm, IN_STEP),
            // No block waits for one that comes a longer way.
            Algorithm::TwoTree | Algorithm::Hybrid(Hybrid { spine: Spine::TwoTree, .. }) => (Self::Algorithm, 0),
            Algorithm::Hybrid(_) => (Self::Member, IN_STEP),
            _ if is_root => (Self::RootForAll, IN_STEP),
            _ => (Self::Root, IN_STEP),
        }
    }
}

/// Measures the rate of a port as the maximum of what it has carried.
#[derive(Debug, Default)]
struct RateMeter {
    since: Option<Timestamp>,
    /// Bytes since then.
    bytes: u64,
    /// The maxima of this epoch and of the one before.
    maxima: [u64; 2],
    epoch_began: Option<Timestamp>,
}

impl Distance {
    /// Begins with what the fabric knows before: the rate of the port. Otherwise it is measured.
    pub(crate) fn new(
        algorithm: &Algorithm,
        members: u32,
        rank: Rank,
        block_size: u32,
        &Capabilities { port_rate, tells_near, .. }: &Capabilities,
    ) -> Self {
        let (decider, free_from) = Decider::of(algorithm, members, rank.is_root());
        let metered_bytes = (BLOCKS_METERED * u64::from(block_size)).max(BYTES_METERED_MIN);
        Self {
            block_size,
            members,
            decider,
            tells_near,
            changed: Notify::new(),
            is_shared: AtomicBool::new(false),
            free_from: AtomicU32::new(free_from),
            latest: AtomicU32::new(0),
            rate_is_known: port_rate.is_some(),
            round_trip_ns: AtomicU64::new(0),
            rate: AtomicU64::new(port_rate.unwrap_or(0)),
            bytes_on_the_way: AtomicU64::new(0),
            blocks_on_the_way: AtomicU64::new(0),
            // The clock starts with the first block, and does not count what came before.
            bytes: AtomicU64::new(metered_bytes),
            metered_bytes,
            meter: Mutex::default(),
        }
    }

    /// Tells whether ports carry the blocks of all neighbours at once, for a message of so many blocks.
    pub(crate) fn runs_free(&self, blocks: BlockCount) -> bool {
        blocks.0 >= self.free_from.load(Ordering::Relaxed)
    }

    /// Notes that a message of so many blocks begins.
    pub(crate) fn note_message(&self, blocks: BlockCount) {
        self.latest.store(blocks.0, Ordering::Relaxed);
        self.decide();
    }

    /// Returns the number of blocks of the latest message. The next one is likely to have as many.
    pub(crate) fn latest(&self) -> BlockCount {
        BlockCount(self.latest.load(Ordering::Relaxed))
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
    pub(crate) fn window(&self, runs_free: bool) -> u64 {
        let ahead = if runs_free { BLOCKS_AHEAD_FREE } else { BLOCKS_AHEAD };
        self.blocks_on_the_way.load(Ordering::Relaxed).saturating_add(ahead)
    }

    /// Returns how long before its end a block is nearly through: the bytes of a round trip, at most half a block. So
    /// the next sender's block follows without a gap, and does not share the port. `None` while that is not known.
    pub(crate) fn near_bytes(&self) -> Option<u32> {
        let bytes = self.bytes_on_the_way.load(Ordering::Relaxed);
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        (bytes > 0).then(|| bytes.min(self.block_size / 2))
    }

    /// Computes what a port carries in a round trip, after one of both has changed.
    fn note_bytes_on_the_way(&self) {
        let (Some(round_trip), Some(rate)) = (self.round_trip(), self.rate()) else { return };
        let bytes = round_trip.as_nanos() * u128::from(rate) / 1_000_000_000;
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX).max(1);
        self.bytes_on_the_way.store(bytes, Ordering::Relaxed);
        self.blocks_on_the_way.store(bytes.saturating_mul(2) / u64::from(self.block_size), Ordering::Relaxed);
    }

    /// Notes the round trip to the farthest neighbour. `once` if it was measured only once: then a busy node may have
    /// delayed it, for a short time.
    pub(crate) fn note_round_trip(&self, round_trip: Duration, once: bool) {
        if once && round_trip < DELAY_MAX {
            return;
        }
        let nanos = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
        self.round_trip_ns.store(nanos.max(1), Ordering::Relaxed);
        self.note_bytes_on_the_way();
        self.decide();
    }

    /// Counts a block that the port has carried.
    pub(crate) fn count_block(&self, bytes: usize, now: impl FnOnce() -> Timestamp) {
        if self.rate_is_known {
            return;
        }
        let bytes = self.bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        if bytes < self.metered_bytes {
            return;
        }
        let maximum = {
            let mut meter = lock(&self.meter);
            meter.bytes += self.bytes.swap(0, Ordering::Relaxed);
            meter.read(now())
        };
        if let Some(maximum) = maximum {
            self.rate.store(maximum, Ordering::Relaxed);
            self.note_bytes_on_the_way();
            self.decide();
        }
    }

    /// Notes that other groups share the port of a member by weights. From then on messages run free.
    pub(crate) fn note_shared(&self) {
        if !self.is_shared.swap(true, Ordering::Relaxed) {
            self.decide();
        }
    }

    /// Decides which messages run free, if that matters for the latest one.
    fn decide(&self) {
        if !matches!(self.decider, Decider::Member | Decider::RootForAll) {
            return;
        }
        let from = match (self.is_shared.load(Ordering::Relaxed), self.round_trip(), self.rate()) {
            // A block of another group may have the port, however long it takes.
            (true, ..) => 0,
            (false, Some(round_trip), Some(rate)) => {
                let wait = wait_in_step(round_trip, self.tells_near);
                // In a hybrid, the pipelines have fewer members. So this is an estimate there.
                #[expect(clippy::cast_precision_loss, reason = "a rate")]
                let BlockCount(from) = runs_free_from(self.members, self.block_size.into(), rate as f64, wait);
                from
            }
            _ => return,
        };
        let blocks = self.latest();
        // What is measured scatters. Members should not change their minds for that.
        let turns = match self.runs_free(blocks) {
            true => blocks.0.saturating_add(blocks.0 / 4) < from,
            false => from.saturating_add(from / 4) <= blocks.0,
        };
        if turns {
            self.free_from.store(from, Ordering::Relaxed);
            if self.decider == Decider::RootForAll {
                self.changed.notify_one();
            }
        }
    }

    /// At the root: waits until it has decided anew; returns from how many blocks messages run free.
    pub(crate) async fn next_decision(&self) -> u32 {
        self.changed.notified().await;
        self.free_from.load(Ordering::Relaxed)
    }

    /// At another member: takes the root's decision.
    ///
    /// # Errors
    /// There is nothing to decide.
    pub(crate) fn take_decision(&self, free_from: u32) -> Result<(), &'static str> {
        if self.members == 2 {
            // Whatever it decides, they keep in step.
            return Ok(());
        }
        if self.decider != Decider::Root {
            return Err("decided how blocks share ports, where it may not");
        }
        self.free_from.store(free_from, Ordering::Relaxed);
        Ok(())
    }
}

impl RateMeter {
    /// Returns the maximum of the rate, in bytes per second; `None` if too little time has passed. Blocks that are
    /// handled at once may have come one after the other.
    fn read(&mut self, now: Timestamp) -> Option<u64> {
        let Some(since) = self.since else {
            // When these began to come is not known.
            (self.since, self.bytes) = (Some(now), 0);
            return None;
        };
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
/// Blocks after which the rate is read, and the bytes that these have at least.
const BLOCKS_METERED: u64 = 4;
const BYTES_METERED_MIN: u64 = 256 << 10;
/// Time for which a maximum of the rate counts at least.
const EPOCH: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use rdmc_schedule::Racks;

    use super::*;

    const SHORT: BlockCount = BlockCount(10);
    const LONG: BlockCount = BlockCount(1000);

    fn distance(algorithm: Algorithm, port_rate: Option<u64>) -> Distance {
        at_rank(Rank::ROOT, &algorithm, port_rate)
    }

    fn at_rank(rank: Rank, algorithm: &Algorithm, port_rate: Option<u64>) -> Distance {
        let mut capabilities = Capabilities::new("test");
        (capabilities.port_rate, capabilities.tells_near) = (port_rate, true);
        Distance::new(algorithm, 8, rank, 1 << 20, &capabilities)
    }

    fn cascade() -> Algorithm {
        Hybrid::new(Racks::from_sizes(&[4, 4]).unwrap(), Spine::Cascade).into()
    }

    #[test]
    fn distant_neighbours_run_free_and_near_ones_keep_in_step() {
        // A block takes 1 ms.
        for (round_trip_us, free) in [(1, false), (50, false), (70, true), (10_000, true)] {
            let pipeline = distance(Algorithm::BinomialPipeline, Some(1 << 30));
            pipeline.note_message(LONG);
            assert!(!pipeline.runs_free(LONG));
            pipeline.note_round_trip(Duration::from_micros(round_trip_us), false);
            assert_eq!(pipeline.runs_free(LONG), free, "{round_trip_us} µs");
            assert_eq!(pipeline.runs_free(SHORT), round_trip_us == 10_000);
        }
    }

    #[test]
    fn the_root_decides_for_all_and_only_if_it_matters() {
        let root = distance(Algorithm::BinomialPipeline, Some(1 << 30));
        root.note_round_trip(Duration::from_micros(100), false);
        root.note_message(SHORT);
        assert_eq!(root.next_decision().now_or_never(), None);
        root.note_message(LONG);
        let from = root.next_decision().now_or_never().expect("it has decided");
        assert!((200..500).contains(&from), "{from}");
        // A little more or less is no reason.
        root.note_message(BlockCount(from - 1));
        root.note_message(BlockCount(from));
        assert_eq!(root.next_decision().now_or_never(), None);
        let other = at_rank(Rank(1), &Algorithm::BinomialPipeline, Some(1 << 30));
        other.note_round_trip(Duration::from_micros(100), false);
        other.note_message(LONG);
        assert!(!other.runs_free(LONG));
        assert_eq!(other.take_decision(from), Ok(()));
        assert!(other.runs_free(LONG) && !other.runs_free(SHORT));
        for algorithm in [Algorithm::TwoTree, cascade()] {
            let other = at_rank(Rank(1), &algorithm, None);
            other.take_decision(5).expect_err("the root does not decide here");
        }
        let leader = at_rank(Rank(1), &cascade(), Some(1 << 30));
        leader.note_message(LONG);
        leader.note_round_trip(Duration::from_millis(50), false);
        assert!(leader.runs_free(LONG));
    }

    #[test]
    fn two_members_keep_in_step() {
        for algorithm in [Algorithm::BinomialPipeline, Algorithm::TwoTree] {
            let mut capabilities = Capabilities::new("test");
            capabilities.port_rate = Some(1 << 30);
            for (members, free) in [(2, false), (3, true)] {
                let root = Distance::new(&algorithm, members, Rank::ROOT, 1 << 20, &capabilities);
                root.note_message(LONG);
                root.note_round_trip(Duration::from_secs(1), false);
                assert_eq!(root.runs_free(LONG), free, "{algorithm:?}, {members} members");
            }
        }
    }

    #[test]
    fn a_short_round_trip_counts_if_it_was_measured_again() {
        let pipeline = distance(Algorithm::BinomialPipeline, Some(1 << 30));
        pipeline.note_message(SHORT);
        pipeline.note_round_trip(Duration::from_micros(500), true);
        assert_eq!((pipeline.round_trip(), pipeline.runs_free(SHORT)), (None, false));
        pipeline.note_round_trip(Duration::from_millis(5), true);
        assert!(pipeline.runs_free(SHORT));
        pipeline.note_round_trip(Duration::from_micros(50), false);
        assert_eq!((pipeline.round_trip(), pipeline.runs_free(SHORT)), (Some(Duration::from_micros(50)), false));
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
            assert_eq!((distance.runs_free(SHORT), distance.runs_free(LONG)), (free, free));
        }
    }

    #[test]
    fn the_rate_is_measured_if_it_is_not_known() {
        let pipeline = distance(Algorithm::BinomialPipeline, None);
        pipeline.note_message(LONG);
        pipeline.note_round_trip(Duration::from_millis(1), false);
        assert_eq!((pipeline.rate(), pipeline.runs_free(LONG)), (None, false));
        // Blocks that are handled at once say nothing.
        for _ in 0..=2 * BLOCKS_METERED {
            pipeline.count_block(1 << 20, || Timestamp::from_nanos(0));
        }
        assert_eq!(pipeline.rate(), None);
        let at_ms = |ms: u64| move || Timestamp::from_nanos(ms * 1_000_000);
        for ms in 1..=4 * BLOCKS_METERED {
            pipeline.count_block(1 << 20, at_ms(ms));
        }
        let burst = pipeline.rate().expect("it was measured");
        assert!(pipeline.runs_free(LONG));
        // It counts for a while only.
        for ms in (20..15_000).step_by(10) {
            pipeline.count_block(1 << 20, at_ms(ms));
        }
        assert!(pipeline.rate().is_some_and(|rate| rate < burst / 5 && rate > 90 << 20), "{:?}", pipeline.rate());
    }
}
