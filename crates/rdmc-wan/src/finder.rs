//! Finds the rate that a path carries, where the fabric does not slow down by itself.
//!
//! Queue pairs of devices send at the rate of their port. Behind a slower link or a policer, most of that is lost, and
//! they send it again and again (go-back-N). So requests are paced at a rate that is found from how the path delivers,
//! as in BBR (Cardwell et al., 2016):
//!
//! - *Startup*: the rate doubles in each round trip, until the path is overloaded.
//! - *Cruise*: the rate is a little less than the best recent delivery. A path that is overloaded nevertheless slows it
//!   down.
//! - *Try*: a higher rate is tried, and then a still higher one, in growing steps. If it overloads the path, the rate
//!   before it is taken again.
//!
//! A path is overloaded if many bytes are overdue: a quarter of those of a round trip, or a slab. Overdue requests take
//! half a round trip, or 10 ms, longer than the fastest one has taken. Either they wait in a queue, or they were lost.
//! Packets that are lost by chance delay one queue pair of several, which overloads nothing.
//!
//! After an overload, nothing is admitted until all that is under way has arrived. Behind a policer that takes seconds.
//! So the time between two tries is a multiple of what the last overload has cost. The fastest time is taken anew then,
//! because the route may have become longer.
//!
//! Each overload halves the next step. The least step grows with the square root of the rate, and cuts with the rate
//! itself. So sessions that share a path come closer to each other (binomial congestion control, Bansal and
//! Balakrishnan, 2001).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rdmc_fabric::Timestamp;

/// What is known of a path.
#[derive(Debug)]
pub(crate) struct Finder {
    /// Bytes per second, and its bounds. The greatest one is the rate of the port, if that is known.
    rate: u64,
    rate_min: u64,
    rate_max: u64,
    slab_len: u64,
    /// A slab in a round trip, in bytes per second.
    unit: u64,
    phase: Phase,
    /// The next step of the rate.
    step: u64,
    /// Rounds in which the rate was used in full and passed.
    rounds: u32,
    /// Rounds of a cruise before a higher rate is tried.
    patience: u32,
    /// Requests under way, by their numbers.
    under_way: BTreeMap<u64, Request>,
    /// The number of the next request.
    next: u64,
    /// The least time that a request took since the last overload.
    fastest: Option<Duration>,
    /// Earlier requests tell nothing of the present rate.
    judged_from: u64,
    /// When the path was overloaded, until all requests before that have passed.
    overloaded_at: Option<Timestamp>,
    round: Round,
    /// What the last rounds have delivered, in bytes per second.
    delivered: VecDeque<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    admitted: Timestamp,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Startup,
    Cruise,
    /// The rate `before` has passed.
    Try {
        before: u64,
    },
}

/// A round trip. It ends when a request has passed that was admitted in it.
#[derive(Clone, Copy, Debug)]
struct Round {
    began: Timestamp,
    /// Its first request.
    from: u64,
    is_over: bool,
    /// Bytes that have passed.
    passed: u64,
    /// Whether a request had to wait for its time.
    was_limited: bool,
}

impl Round {
    fn new(began: Timestamp, from: u64) -> Self {
        Self { began, from, is_over: false, passed: 0, was_limited: false }
    }
}

/// The number of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission(u64);

/// What the path makes of the rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Unchanged,
    /// The rate is another one now.
    Changed,
    /// The rate is less, and what is under way should arrive before more is admitted.
    Overloaded,
}

impl Finder {
    /// Begins with a rate of [`SLABS_AT_FIRST`] slabs of `slab_len` bytes in a round trip, or [`RATE_AT_FIRST`] if that
    /// is less. It never exceeds the rate of the port in bytes per second.
    pub(crate) fn new(slab_len: usize, round_trip: Duration, port_rate: Option<u64>) -> Self {
        let (slab_len, rate_max) = (slab_len as u64, port_rate.unwrap_or(u64::MAX));
        let unit = per_second(slab_len, round_trip);
        Self {
            rate: unit.saturating_mul(SLABS_AT_FIRST).min(RATE_AT_FIRST).min(rate_max),
            rate_min: (unit / SLAB_PARTS_MIN).min(RATE_MIN).clamp(1, rate_max),
            rate_max,
            slab_len,
            unit,
            phase: Phase::Startup,
            step: 0,
            rounds: 0,
            patience: 0,
            under_way: BTreeMap::new(),
            next: 0,
            fastest: None,
            judged_from: 0,
            overloaded_at: None,
            round: Round::new(Timestamp::ZERO, 0),
            delivered: VecDeque::new(),
        }
    }

    /// Returns the present rate in bytes per second.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// Notes that a request of `bytes` is admitted, and whether it had to wait for its time.
    pub(crate) fn admit(&mut self, bytes: u64, has_waited: bool, now: Timestamp) -> Admission {
        let number = self.next;
        if self.under_way.is_empty() {
            // A pause says nothing of the path.
            self.round = Round::new(now, number);
        }
        self.next += 1;
        self.round.was_limited |= has_waited;
        self.under_way.insert(number, Request { admitted: now, bytes });
        Admission(number)
    }

    /// Notes that a request has passed.
    pub(crate) fn passed(&mut self, Admission(number): Admission, now: Timestamp, round_trip: Duration) {
        let Some(Request { admitted, bytes }) = self.under_way.remove(&number) else { return };
        self.round.passed += bytes;
        self.round.is_over |= number >= self.round.from;
        if number >= self.judged_from {
            let took = now.since(admitted);
            self.fastest = Some(self.fastest.map_or(took, |fastest| fastest.min(took)));
        }
        let earliest = self.under_way.first_key_value();
        if earliest.is_none_or(|(number, _)| *number >= self.judged_from)
            && let Some(since) = self.overloaded_at.take()
        {
            let cost = now.since(since).min(COST_MAX).as_nanos() / round_trip.as_nanos().max(1);
            self.patience = self.patience.saturating_mul(u32::try_from(cost).unwrap_or(u32::MAX).max(1));
        }
    }

    /// Adapts the rate to the requests that have passed.
    pub(crate) fn judge(&mut self, now: Timestamp, round_trip: Duration) -> Verdict {
        let is_overloaded = self.is_overloaded(now, round_trip);
        if !is_overloaded && !self.round.is_over {
            return Verdict::Unchanged;
        }
        let Round { began, passed, was_limited, .. } = std::mem::replace(&mut self.round, Round::new(now, self.next));
        let delivered = per_second(passed, now.since(began));
        // Part of a round may be a heap, and a round in which less was asked for says nothing, unless it brought more.
        if now.since(began) >= round_trip / 2 && (was_limited || delivered > self.best()) {
            self.delivered.push_back(delivered);
            if self.delivered.len() > ROUNDS {
                self.delivered.pop_front();
            }
        }
        let rate = self.rate;
        if is_overloaded {
            self.slow_down(now);
            return Verdict::Overloaded;
        }
        if was_limited {
            self.go_on(delivered);
        }
        if self.rate == rate { Verdict::Unchanged } else { Verdict::Changed }
    }

    fn best(&self) -> u64 {
        self.delivered.iter().copied().max().unwrap_or(0)
    }

    /// Tells whether too many bytes of the present rate are overdue.
    fn is_overloaded(&self, now: Timestamp, round_trip: Duration) -> bool {
        let limit = self.fastest.unwrap_or(Duration::MAX).saturating_add((round_trip / 2).max(LATE_MIN));
        let many = u128::from(self.rate) * round_trip.as_nanos() / 1_000_000_000 / OVERDUE_PART;
        let many = many.max(self.slab_len.into());
        let judged = self.under_way.range(self.judged_from..);
        let mut bytes = 0;
        judged.take_while(|(_, request)| now.since(request.admitted) > limit).any(|(_, request)| {
            bytes += u128::from(request.bytes);
            bytes > many
        })
    }

    /// Takes a rate that the path carries.
    fn slow_down(&mut self, now: Timestamp) {
        let carried = self.best() - self.best() / MARGIN;
        (self.rate, self.step, self.patience) = match self.phase {
            Phase::Startup => {
                let rate = carried.clamp(self.rate / 4, self.rate);
                (rate, rate / STEP_PART, PATIENCE_AT_FIRST)
            }
            Phase::Cruise => {
                let rate = carried.clamp(self.rate / 2, self.rate - self.rate / CUT);
                (rate, self.step / 2, PATIENCE)
            }
            Phase::Try { before } => (before, self.step / 2, PATIENCE),
        };
        self.rate = self.rate.max(self.rate_min);
        let least = self.rate.saturating_mul(self.unit).isqrt() / 4;
        self.step = self.step.max(least).min(self.rate / STEP_PART).max(1);
        (self.phase, self.rounds) = (Phase::Cruise, 0);
        (self.judged_from, self.fastest, self.overloaded_at) = (self.next, None, Some(now));
    }

    /// Goes on after a round of `delivered` bytes per second without an overload.
    fn go_on(&mut self, delivered: u64) {
        if self.phase == Phase::Startup {
            self.rate = delivered.saturating_mul(2).max(self.rate).min(self.rate_max);
            return;
        }
        if delivered < self.rate - self.rate / 4 {
            // Something else has limited it.
            return;
        }
        self.rounds += 1;
        match self.phase {
            Phase::Cruise if self.rounds > self.patience => {}
            // Requests of the first round have only begun to use it.
            Phase::Try { .. } if self.rounds > 1 => self.step = self.step.saturating_mul(2).min(self.rate),
            _ => return,
        }
        (self.phase, self.rounds) = (Phase::Try { before: self.rate }, 0);
        self.rate = self.rate.saturating_add(self.step).min(self.rate_max);
    }
}

/// Returns the rate of `bytes` in a time, in bytes per second, at least 1.
fn per_second(bytes: u64, time: Duration) -> u64 {
    let rate = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX).max(1)
}

/// Slabs of the first round trip, and the most bytes per second in it.
const SLABS_AT_FIRST: u64 = 8;
const RATE_AT_FIRST: u64 = 125_000_000;
/// The least rate: this part of a slab in a round trip, or so many bytes per second if that is less.
const SLAB_PARTS_MIN: u64 = 64;
const RATE_MIN: u64 = 1 << 20;
/// The part of a round trip's bytes that may be overdue.
const OVERDUE_PART: u128 = 4;
/// The least time after which a request is overdue, beyond that of the fastest one. Tasks wake late, too.
const LATE_MIN: Duration = Duration::from_millis(10);
/// Rounds whose best delivery counts.
const ROUNDS: usize = 4;
/// The part of what was delivered that the rate stays below it.
const MARGIN: u64 = 50;
/// The part of the rate by which it is cut at least, if it has passed before.
const CUT: u64 = 10;
/// The part of the rate that the first step after an overload has at most.
const STEP_PART: u64 = 4;
/// Rounds before a higher rate is tried, for each that an overload has cost. After the startup, the rate may be half of
/// what the path carries.
const PATIENCE: u32 = 32;
const PATIENCE_AT_FIRST: u32 = 4;
/// No overload counts as longer.
const COST_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(100);
    const SLAB_LEN: usize = 100_000;

    /// A link with a queue that loses nothing, and sessions that share it.
    struct Link {
        round_trip: Duration,
        /// How much longer the way has become.
        detour: Duration,
        /// When timers fire.
        timer: Duration,
        free_at: Timestamp,
        now: Timestamp,
        sessions: Vec<Session>,
    }

    struct Session {
        finder: Finder,
        piece_len: u64,
        starts: Timestamp,
        /// Whether there is anything to send.
        is_busy: bool,
        admits_at: Timestamp,
        has_waited: bool,
        drains: bool,
        /// Requests under way with their arrivals.
        arriving: VecDeque<(Timestamp, Admission)>,
        arrived: u64,
    }

    impl Link {
        fn new(starts_s: &[u64], port_rate: Option<u64>) -> Self {
            Self::of(ROUND_TRIP, SLAB_LEN, starts_s, port_rate)
        }

        fn of(round_trip: Duration, slab_len: usize, starts_s: &[u64], port_rate: Option<u64>) -> Self {
            let sessions = starts_s.iter().map(|&starts_s| Session {
                finder: Finder::new(slab_len, round_trip, port_rate),
                piece_len: slab_len as u64 / 4,
                starts: Timestamp::from_nanos(starts_s * 1_000_000_000),
                is_busy: true,
                admits_at: Timestamp::ZERO,
                has_waited: false,
                drains: false,
                arriving: VecDeque::new(),
                arrived: 0,
            });
            Self {
                round_trip,
                detour: Duration::ZERO,
                timer: Duration::from_micros(100),
                free_at: Timestamp::ZERO,
                now: Timestamp::ZERO,
                sessions: sessions.collect(),
            }
        }

        /// Plays some seconds with a link of `rate` bytes per second; returns what each session got of it.
        fn play(&mut self, seconds: u64, rate: u64) -> Vec<f64> {
            let before: Vec<u64> = self.sessions.iter().map(|session| session.arrived).collect();
            let end = self.now + Duration::from_secs(seconds);
            while self.now < end {
                let (round_trip, way) = (self.round_trip, self.round_trip + self.detour);
                for session in self.sessions.iter_mut().filter(|session| session.starts <= self.now) {
                    session.step(self.now, self.timer, rate, round_trip, way, &mut self.free_at);
                }
                self.now = self.now + self.timer;
            }
            let gained = self.sessions.iter().zip(before).map(|(session, before)| session.arrived - before);
            gained.map(|bytes| bytes as f64 / (seconds * rate) as f64).collect()
        }
    }

    impl Session {
        fn step(
            &mut self,
            now: Timestamp,
            timer: Duration,
            rate: u64,
            round_trip: Duration,
            way: Duration,
            free_at: &mut Timestamp,
        ) {
            while let Some(&(arrival, admission)) = self.arriving.front()
                && arrival <= now
            {
                self.arriving.pop_front();
                self.arrived += self.piece_len;
                self.finder.passed(admission, now, round_trip);
            }
            self.drains |= self.finder.judge(now, round_trip) == Verdict::Overloaded;
            self.drains &= !self.arriving.is_empty();
            while self.is_busy && self.admits_at <= now && !self.drains {
                let admission = self.finder.admit(self.piece_len, self.has_waited, now);
                *free_at = now.max(*free_at) + time_of(self.piece_len, rate);
                self.arriving.push_back((*free_at + way, admission));
                // After a pause there are no bytes to make up for.
                let earliest = Timestamp::ZERO + now.since(Timestamp::ZERO).saturating_sub(timer);
                self.admits_at = self.admits_at.max(earliest) + time_of(self.piece_len, self.finder.rate());
                self.has_waited = self.admits_at > now;
            }
        }
    }

    fn time_of(bytes: u64, rate: u64) -> Duration {
        Duration::from_nanos(bytes * 1_000_000_000 / rate)
    }

    #[test]
    fn the_rate_of_a_link_is_found_and_filled() {
        for rate in [1_000_000, 10_000_000, 100_000_000] {
            let mut link = Link::new(&[0], None);
            link.play(3, rate);
            let share = link.play(60, rate)[0];
            assert!(share > 0.95, "{share} of {rate} bytes per second");
        }
    }

    /// Slabs of 1 MiB are longer than what these links carry in a round trip, and tasks wake once in a millisecond.
    #[test]
    fn short_links_are_filled_too() {
        for (round_trip_ms, rate) in [(2, 125_000_000), (3, 25_000_000), (10, 2_000_000), (10, 1_000_000_000)] {
            let mut link = Link::of(Duration::from_millis(round_trip_ms), 1 << 20, &[0], None);
            link.timer = Duration::from_millis(1);
            link.play(3, rate);
            let share = link.play(30, rate)[0];
            assert!(share > 0.92, "{share} of {rate} bytes per second at {round_trip_ms} ms");
        }
    }

    #[test]
    fn a_link_that_changes_its_rate_is_followed() {
        let mut link = Link::new(&[0], None);
        link.play(30, 20_000_000);
        link.play(20, 5_000_000);
        let less = link.play(30, 5_000_000)[0];
        link.play(20, 20_000_000);
        let more = link.play(30, 20_000_000)[0];
        assert!(less > 0.9 && more > 0.9, "{less} of less, {more} of more");
    }

    #[test]
    fn a_longer_way_is_no_overload_for_long() {
        let mut link = Link::new(&[0], None);
        link.play(20, 20_000_000);
        link.detour = ROUND_TRIP;
        link.play(30, 20_000_000);
        let share = link.play(30, 20_000_000)[0];
        assert!(share > 0.95, "{share}");
    }

    #[test]
    fn pauses_do_not_lower_the_rate() {
        let mut link = Link::new(&[0], None);
        link.play(20, 20_000_000);
        let rate = link.sessions[0].finder.rate();
        for _ in 0..10 {
            link.sessions[0].is_busy = false;
            link.play(5, 20_000_000);
            link.sessions[0].is_busy = true;
            link.play(1, 20_000_000);
        }
        let later = link.sessions[0].finder.rate();
        assert!(later >= rate - rate / 10, "{later} of {rate}");
    }

    #[test]
    fn the_rate_of_the_port_is_no_overload() {
        let mut link = Link::new(&[0], Some(20_000_000));
        link.play(3, 20_000_000);
        let share = link.play(60, 20_000_000)[0];
        assert!(share > 0.999, "{share}");
    }

    #[test]
    fn sessions_that_share_a_link_get_similar_rates_whoever_came_first() {
        for starts in [[0, 0], [0, 10], [0, 30]] {
            let mut link = Link::new(&starts, None);
            link.play(60, 20_000_000);
            let shares = link.play(120, 20_000_000);
            let (sum, squares) =
                shares.iter().fold((0.0, 0.0), |(sum, squares), share| (sum + share, squares + share * share));
            let jain = sum * sum / (2.0 * squares);
            assert!(jain > 0.9 && sum > 0.9, "{shares:?} of a link, begun at {starts:?} s");
        }
    }

    /// A device with several queue pairs, one of which has lost a packet.
    #[test]
    fn a_few_requests_that_are_late_overload_nothing() {
        let mut finder = Finder::new(SLAB_LEN, ROUND_TRIP, None);
        finder.rate = 20_000_000;
        let at = |ms: u64| Timestamp::from_nanos(ms * 1_000_000);
        let passed = |finder: &mut Finder, admission, ms| {
            finder.passed(admission, at(ms), ROUND_TRIP);
            finder.judge(at(ms), ROUND_TRIP)
        };
        let admitted: Vec<_> = (0..160).map(|ms| finder.admit(20_000, true, at(ms))).collect();
        let (lost, others): (Vec<_>, Vec<_>) = (0..).zip(admitted).partition(|(number, _)| number % 8 == 0);
        for (number, admission) in others {
            assert_ne!(passed(&mut finder, admission, 100 + number), Verdict::Overloaded, "{number}");
        }
        // More than a quarter of a round trip's bytes are.
        let more: Vec<_> = (0..80).map(|_| finder.admit(20_000, true, at(260))).collect();
        assert_ne!(passed(&mut finder, lost[0].1, 400), Verdict::Overloaded);
        assert_eq!(passed(&mut finder, more[0], 420), Verdict::Overloaded);
    }
}
