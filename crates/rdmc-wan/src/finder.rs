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
//!   before it is taken again, and the next step is half as long.
//!
//! A path is overloaded if a quarter of a round trip's bytes are overdue: they take half a round trip longer than the
//! fastest request has taken. Either they wait in a queue, or they were lost. Packets that are lost by chance delay one
//! queue pair of several, which overloads nothing.
//!
//! After an overload, nothing is admitted until all that is under way has arrived. Behind a policer that takes seconds.
//! So the time between two tries is a multiple of what the last overload has cost.
//!
//! The least step grows with the square root of the rate, and cuts with the rate itself. So sessions that share a path
//! come closer to each other (binomial congestion control, Bansal and Balakrishnan, 2001).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rdmc_fabric::Timestamp;

/// What is known of a path.
#[derive(Debug)]
pub(crate) struct Finder {
    /// Bytes per second.
    rate: u64,
    /// The rate of the port, if it is known.
    rate_max: u64,
    /// A slab in a round trip.
    unit: u64,
    phase: Phase,
    /// The next step of the rate.
    step: u64,
    /// Rounds in which the rate was used in full and passed.
    rounds: u32,
    /// Rounds of a cruise before a higher rate is tried.
    patience: u32,
    /// Requests under way.
    under_way: BTreeMap<Admission, u64>,
    next: u64,
    /// The least time that a request took.
    fastest: Option<Duration>,
    /// Requests that were admitted earlier tell nothing of the present rate.
    judged_from: Timestamp,
    /// Since when the effects of an overload last.
    overloaded_at: Option<Timestamp>,
    round_began: Timestamp,
    /// Bytes that have passed in this round, and whether a request had to wait for its time.
    passed: u64,
    was_limited: bool,
    /// What the last rounds have delivered, in bytes per second.
    delivered: VecDeque<u64>,
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

/// When a request was admitted, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Admission(Timestamp, u64);

/// What a path made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Carries,
    /// What is under way should arrive before more is admitted.
    Overloaded,
}

impl Finder {
    /// Begins with a rate of [`SLABS_AT_FIRST`] slabs of `slab_len` bytes in a round trip. It never exceeds the rate of
    /// the port in bytes per second.
    pub(crate) fn new(slab_len: usize, round_trip: Duration, port_rate: Option<u64>) -> Self {
        let (unit, rate_max) = (per_second(slab_len as u64, round_trip), port_rate.unwrap_or(u64::MAX));
        Self {
            rate: unit.saturating_mul(SLABS_AT_FIRST).min(rate_max),
            rate_max,
            unit,
            phase: Phase::Startup,
            step: 0,
            rounds: 0,
            patience: 0,
            under_way: BTreeMap::new(),
            next: 0,
            fastest: None,
            judged_from: Timestamp::ZERO,
            overloaded_at: None,
            round_began: Timestamp::ZERO,
            passed: 0,
            was_limited: false,
            delivered: VecDeque::new(),
        }
    }

    /// Returns the present rate in bytes per second.
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// Notes that a request of `bytes` is admitted, and whether it had to wait for its time.
    pub(crate) fn admit(&mut self, bytes: u64, has_waited: bool, now: Timestamp) -> Admission {
        let admission = Admission(now, self.next);
        self.next += 1;
        self.was_limited |= has_waited;
        self.under_way.insert(admission, bytes);
        admission
    }

    /// Notes that a request has passed.
    pub(crate) fn passed(&mut self, admission: Admission, now: Timestamp, round_trip: Duration) -> Verdict {
        let Admission(admitted, _) = admission;
        let took = now.since(admitted);
        self.fastest = Some(self.fastest.map_or(took, |fastest| fastest.min(took)));
        self.passed += self.under_way.remove(&admission).unwrap_or(0);
        if admitted >= self.judged_from
            && let Some(since) = self.overloaded_at.take()
        {
            let rounds = now.since(since).as_nanos() / round_trip.as_nanos().max(1);
            let rounds = u32::try_from(rounds).unwrap_or(u32::MAX).max(1);
            self.patience = rounds.saturating_mul(self.patience);
        }
        let is_overloaded = self.is_overloaded(now, round_trip);
        if is_overloaded || admitted >= self.round_began {
            let delivered = per_second(self.passed, now.since(self.round_began));
            self.delivered.push_back(delivered);
            if self.delivered.len() > ROUNDS {
                self.delivered.pop_front();
            }
            if is_overloaded {
                self.slow_down(now);
            } else if self.was_limited {
                self.go_on(delivered);
            }
            (self.round_began, self.passed, self.was_limited) = (now, 0, false);
        }
        if is_overloaded { Verdict::Overloaded } else { Verdict::Carries }
    }

    /// Tells whether too many bytes of the present rate are overdue.
    fn is_overloaded(&self, now: Timestamp, round_trip: Duration) -> bool {
        let limit = self.fastest.unwrap_or(Duration::MAX).saturating_add(round_trip / 2);
        let many = u128::from(self.rate) * round_trip.as_nanos() / 1_000_000_000 / OVERDUE_PART;
        let judged = self.under_way.range(Admission(self.judged_from, 0)..);
        let overdue = judged.take_while(|(Admission(admitted, _), _)| now.since(*admitted) > limit);
        let mut bytes = 0;
        overdue.map(|(_, len)| u128::from(*len)).any(|len| {
            bytes += len;
            bytes > many
        })
    }

    /// Takes a rate that the path carries.
    fn slow_down(&mut self, now: Timestamp) {
        let best = self.delivered.iter().copied().max().unwrap_or(0);
        let carried = best - best / MARGIN;
        (self.rate, self.step, self.patience) = match self.phase {
            Phase::Startup => {
                let rate = carried.clamp(self.rate / 4, self.rate);
                (rate, rate / 4, PATIENCE_AT_FIRST)
            }
            Phase::Cruise => {
                let rate = carried.clamp(self.rate / 2, self.rate - self.rate / CUT);
                (rate, self.step, PATIENCE)
            }
            Phase::Try { before } => (before, self.step / 2, PATIENCE),
        };
        self.rate = self.rate.max(1);
        let least = self.rate.saturating_mul(self.unit).isqrt() / 4;
        (self.phase, self.rounds, self.step) = (Phase::Cruise, 0, self.step.max(least).max(1));
        (self.judged_from, self.overloaded_at) = (now, Some(now));
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

/// Slabs of the first round trip.
const SLABS_AT_FIRST: u64 = 8;
/// The part of a round trip's bytes that may be overdue.
const OVERDUE_PART: u128 = 4;
/// Rounds whose best delivery counts.
const ROUNDS: usize = 4;
/// The part of what was delivered that the rate stays below it.
const MARGIN: u64 = 50;
/// The part of the rate by which it is cut at most, if it has passed before.
const CUT: u64 = 10;
/// Rounds before a higher rate is tried, for each that an overload has cost. After the startup, the rate may be half of
/// what the path carries.
const PATIENCE: u32 = 32;
const PATIENCE_AT_FIRST: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(100);
    const SLAB_LEN: usize = 100_000;
    const LEN: u64 = 25_000;

    /// A link with a queue that loses nothing, and sessions that share it.
    struct Link {
        free_at: Timestamp,
        sessions: Vec<Session>,
    }

    struct Session {
        finder: Finder,
        starts: Timestamp,
        admits_at: Timestamp,
        has_waited: bool,
        drains: bool,
        /// Requests under way with their arrivals.
        arriving: VecDeque<(Timestamp, Admission)>,
        arrived: u64,
    }

    impl Link {
        fn new(starts_s: &[u64], port_rate: Option<u64>) -> Self {
            let sessions = starts_s.iter().map(|&starts_s| Session {
                finder: Finder::new(SLAB_LEN, ROUND_TRIP, port_rate),
                starts: Timestamp::from_nanos(starts_s * 1_000_000_000),
                admits_at: Timestamp::ZERO,
                has_waited: false,
                drains: false,
                arriving: VecDeque::new(),
                arrived: 0,
            });
            Self { free_at: Timestamp::ZERO, sessions: sessions.collect() }
        }

        /// Plays some seconds with a link of `rate` bytes per second; returns what each session got of it.
        fn play(&mut self, from_s: u64, seconds: u64, rate: u64) -> Vec<f64> {
            let before: Vec<u64> = self.sessions.iter().map(|session| session.arrived).collect();
            for step in 0..seconds * 10_000 {
                let now = Timestamp::from_nanos(from_s * 1_000_000_000 + step * 100_000);
                for session in self.sessions.iter_mut().filter(|session| session.starts <= now) {
                    session.step(now, rate, &mut self.free_at);
                }
            }
            let gained = self.sessions.iter().zip(before).map(|(session, before)| session.arrived - before);
            gained.map(|bytes| bytes as f64 / (seconds * rate) as f64).collect()
        }
    }

    impl Session {
        fn step(&mut self, now: Timestamp, rate: u64, free_at: &mut Timestamp) {
            while let Some(&(arrival, admission)) = self.arriving.front()
                && arrival <= now
            {
                self.arriving.pop_front();
                self.arrived += LEN;
                self.drains |= self.finder.passed(admission, now, ROUND_TRIP) == Verdict::Overloaded;
            }
            self.drains &= !self.arriving.is_empty();
            while self.admits_at <= now && !self.drains {
                let admission = self.finder.admit(LEN, self.has_waited, now);
                *free_at = now.max(*free_at) + Duration::from_nanos(LEN * 1_000_000_000 / rate);
                self.arriving.push_back((*free_at + ROUND_TRIP, admission));
                let pause = Duration::from_nanos(LEN * 1_000_000_000 / self.finder.rate());
                // After a pause there are no bytes to make up for.
                self.admits_at =
                    self.admits_at.max(Timestamp::from_nanos(now.as_nanos().saturating_sub(100_000))) + pause;
                self.has_waited = self.admits_at > now;
            }
        }
    }

    #[test]
    fn the_rate_of_a_link_is_found_and_filled() {
        for rate in [1_000_000, 10_000_000, 100_000_000] {
            let mut link = Link::new(&[0], None);
            link.play(0, 3, rate);
            let share = link.play(3, 60, rate)[0];
            assert!(share > 0.95, "{share} of {rate} bytes per second");
        }
    }

    #[test]
    fn a_link_that_changes_its_rate_is_followed() {
        let mut link = Link::new(&[0], None);
        link.play(0, 30, 20_000_000);
        link.play(30, 20, 5_000_000);
        let less = link.play(50, 30, 5_000_000)[0];
        link.play(80, 20, 20_000_000);
        let more = link.play(100, 30, 20_000_000)[0];
        assert!(less > 0.9 && more > 0.9, "{less} of less, {more} of more");
    }

    #[test]
    fn the_rate_of_the_port_is_no_overload() {
        let mut link = Link::new(&[0], Some(20_000_000));
        link.play(0, 3, 20_000_000);
        let share = link.play(3, 60, 20_000_000)[0];
        assert!(share > 0.999, "{share}");
    }

    #[test]
    fn sessions_that_share_a_link_get_similar_rates_whoever_came_first() {
        for starts in [[0, 0], [0, 10], [0, 30]] {
            let mut link = Link::new(&starts, None);
            link.play(0, 60, 20_000_000);
            let shares = link.play(60, 120, 20_000_000);
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
        let admitted: Vec<_> = (0..160).map(|ms| finder.admit(20_000, true, at(ms))).collect();
        let (lost, others): (Vec<_>, Vec<_>) = (0..).zip(admitted).partition(|(number, _)| number % 8 == 0);
        for (number, admission) in others {
            assert_eq!(finder.passed(admission, at(100 + number), ROUND_TRIP), Verdict::Carries, "{number}");
        }
        // More than a quarter of a round trip's bytes are.
        let more: Vec<_> = (0..40).map(|_| finder.admit(20_000, true, at(260))).collect();
        assert_eq!(finder.passed(lost[0].1, at(400), ROUND_TRIP), Verdict::Carries);
        assert_eq!(finder.passed(more[0], at(420), ROUND_TRIP), Verdict::Overloaded);
    }
}
