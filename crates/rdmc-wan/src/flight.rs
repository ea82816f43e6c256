//! How many bytes are asked for and have not arrived.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use rdmc_fabric::Timestamp;
use tokio::sync::watch;

use crate::sync::lock;

/// Bounds the bytes under way to what the path carries in a round trip, and some more.
///
/// More bytes than these would wait in queues of the path, and overflow them. At first the bound doubles with each
/// round trip, until that brings no more. Then it follows the best of the last spans of four round trips. Spans in
/// which the bound was not reached do not count. Over TCP, bytes behind a lost packet arrive in a heap, when the packet
/// has been sent again. So the bound is larger if bytes arrive in heaps.
#[derive(Debug)]
pub(crate) struct Flight {
    state: Mutex<FlightState>,
    /// Changes when there may be room.
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct FlightState {
    under_way: u64,
    /// Whether nothing begins until nothing is under way.
    drains: bool,
    /// Since when nothing was under way, and the round trip then.
    idle_since: Option<(Timestamp, Duration)>,
    /// The bound of a path of which nothing is known yet.
    least: u64,
    /// The last spans in which the bound was reached.
    spans: VecDeque<Span>,
    /// Rounds without growth; `None` if the rate of the path is known.
    flat: Option<u32>,
    /// Whether the bound was reached in this span.
    was_full: bool,
    /// When the present span and round began.
    span_began: Option<Timestamp>,
    round_began: Timestamp,
    /// Bytes that arrived in them.
    of_span: u64,
    of_round: u64,
    /// The most bytes of a round of the present span.
    heap: u64,
}

/// What arrived in a round trip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    /// Bytes on average.
    bytes: u64,
    /// Bytes in the best round.
    heap: u64,
}

impl Flight {
    /// Bounds the bytes to `least` at first.
    pub(crate) fn new(least: u64) -> Self {
        let state = FlightState {
            under_way: 0,
            drains: false,
            idle_since: None,
            least,
            spans: VecDeque::new(),
            flat: Some(0),
            was_full: false,
            span_began: None,
            round_began: Timestamp::ZERO,
            of_span: 0,
            of_round: 0,
            heap: 0,
        };
        Self { state: Mutex::new(state), changed: watch::Sender::new(()) }
    }

    /// Waits until `bytes` may be asked for, and counts them.
    ///
    /// # Cancel safety
    /// A dropped future counts nothing.
    pub(crate) async fn begin(&self, bytes: u64, now: Timestamp) {
        let mut changed = self.changed.subscribe();
        while !lock(&self.state).try_begin(bytes, now) {
            changed.changed().await.expect("it lives as long as this future");
        }
    }

    /// Lets nothing begin until nothing is under way.
    pub(crate) fn drain(&self) {
        lock(&self.state).drains = true;
    }

    /// Notes that bytes have arrived.
    pub(crate) fn arrived(&self, bytes: u64, now: Timestamp, round_trip: Duration) {
        lock(&self.state).arrived(bytes, now, round_trip);
        self.changed.send_replace(());
    }
}

impl FlightState {
    fn best(&self) -> Span {
        self.spans.iter().copied().max_by_key(|span| span.bytes).unwrap_or_default()
    }

    fn bound(&self) -> u64 {
        let Span { bytes, heap } = self.best();
        let bound = match self.flat {
            Some(_) => 2 * bytes,
            None => bytes + bytes / 2 + heap.saturating_sub(bytes).min(bytes) / 2,
        };
        bound.max(self.least)
    }

    fn try_begin(&mut self, bytes: u64, now: Timestamp) -> bool {
        if let Some((since, round_trip)) = self.idle_since.take()
            && now.since(since) > round_trip / 2
        {
            // A pause says nothing of the path.
            (self.span_began, self.was_full, self.of_span, self.of_round, self.heap) = (None, false, 0, 0, 0);
        }
        self.drains &= self.under_way > 0;
        if self.drains {
            // This bound was not reached.
            return false;
        }
        let has_room = self.under_way == 0 || self.under_way + bytes <= self.bound();
        if has_room {
            self.under_way += bytes;
        } else {
            self.was_full = true;
        }
        has_room
    }

    fn arrived(&mut self, bytes: u64, now: Timestamp, round_trip: Duration) {
        self.under_way = self.under_way.saturating_sub(bytes);
        self.idle_since = (self.under_way == 0).then_some((now, round_trip));
        self.of_span += bytes;
        self.of_round += bytes;
        let began = *self.span_began.get_or_insert_with(|| {
            self.round_began = now;
            now
        });
        if now.since(self.round_began) >= round_trip {
            self.heap = self.heap.max(in_a_round_trip(self.of_round, now.since(self.round_began), round_trip));
            (self.round_began, self.of_round) = (now, 0);
        }
        let length = if self.flat.is_some() { round_trip } else { SPAN * round_trip };
        if now.since(began) < length {
            return;
        }
        let (best, bytes) = (self.best().bytes, in_a_round_trip(self.of_span, now.since(began), round_trip));
        // A span in which less was asked for says nothing of the path, unless it brought more.
        if self.was_full || bytes > best {
            if let Some(flat) = &mut self.flat {
                *flat = if bytes > best + best / 4 { 0 } else { *flat + 1 };
            }
            self.flat = self.flat.filter(|flat| *flat < FLAT_ROUNDS);
            self.spans.push_back(Span { bytes, heap: self.heap });
            if self.spans.len() > SPANS {
                self.spans.pop_front();
            }
        }
        (self.was_full, self.of_span, self.heap) = (false, 0, 0);
        (self.span_began, self.round_began, self.of_round) = (Some(now), now, 0);
    }
}

/// Returns how many bytes arrive in a round trip, of those that arrived in some time.
fn in_a_round_trip(bytes: u64, time: Duration, round_trip: Duration) -> u64 {
    let scaled = u128::from(bytes) * round_trip.as_nanos() / time.as_nanos().max(1);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// Round trips of a span, once the rate of the path is known.
const SPAN: u32 = 4;
/// Spans over which the best counts.
const SPANS: usize = 4;
/// Rounds without growth after which the rate of the path is known.
const FLAT_ROUNDS: u32 = 3;

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const START: Timestamp = Timestamp::ZERO;
    const ROUND_TRIP: Duration = Duration::from_millis(100);

    /// Plays a path that carries `carried` bytes in a round trip, in pieces of a thousandth; returns the bound of the
    /// bytes under way after so many round trips.
    fn play(flight: &mut FlightState, from: Timestamp, carried: u64, heaps: bool, round_trips: u64) -> u64 {
        let (piece, mut kept) = (carried / 1000, 0);
        for step in 1..=round_trips * 1000 {
            let now = from + ROUND_TRIP * u32::try_from(step).unwrap() / 1000;
            while flight.try_begin(piece, now) {}
            kept += piece;
            // What was asked for, or what has gathered in half a round trip.
            if !heaps || step % 500 == 0 {
                let arriving = kept.min(flight.under_way);
                kept = 0;
                flight.arrived(arriving, now, ROUND_TRIP);
            }
        }
        flight.bound()
    }

    fn flight(least: u64) -> FlightState {
        Flight::new(least).state.into_inner().unwrap()
    }

    #[test]
    fn the_bound_finds_what_the_path_carries_and_stays_near_it() {
        let bound = play(&mut flight(50_000), START, 1_000_000, false, 60);
        assert!((1_400_000..=1_600_000).contains(&bound), "{bound}");
    }

    #[test]
    fn bytes_that_arrive_in_heaps_do_not_inflate_it_without_end() {
        let bound = play(&mut flight(50_000), START, 1_000_000, true, 60);
        assert!((1_300_000..=2_100_000).contains(&bound), "{bound}");
    }

    #[test]
    fn a_path_that_carries_more_later_is_filled() {
        let mut flight = flight(50_000);
        play(&mut flight, START, 200_000, false, 40);
        let bound = play(&mut flight, START + ROUND_TRIP * 40, 1_000_000, false, 120);
        assert!((1_300_000..=1_700_000).contains(&bound), "{bound}");
    }

    #[test]
    fn pauses_do_not_lower_the_bound() {
        let mut flight = flight(50_000);
        let bound = play(&mut flight, START, 1_000_000, false, 60);
        flight.arrived(flight.under_way, START + ROUND_TRIP * 61, ROUND_TRIP);
        for burst in 1..=10 {
            // Longer than the bound, and a pause after it.
            let now = START + ROUND_TRIP * (60 + 50 * burst);
            while flight.try_begin(1000, now) {}
            flight.arrived(flight.under_way, now + ROUND_TRIP, ROUND_TRIP);
        }
        assert!(flight.bound() >= bound / 2, "{} of {bound}", flight.bound());
    }

    #[tokio::test]
    async fn a_request_beyond_the_bound_waits_until_something_arrives() {
        let flight = Flight::new(10);
        // Of any length, if nothing else is under way.
        flight.begin(20, START).await;
        let mut waiting = std::pin::pin!(flight.begin(5, START));
        assert!(waiting.as_mut().now_or_never().is_none());
        flight.arrived(20, START, ROUND_TRIP);
        waiting.await;
        flight.begin(5, START).await;
        assert!(flight.begin(1, START).now_or_never().is_none());
    }

    #[tokio::test]
    async fn what_drains_waits_until_nothing_is_under_way() {
        let flight = Flight::new(100);
        flight.begin(50, START).await;
        flight.drain();
        flight.arrived(49, START, ROUND_TRIP);
        assert!(flight.begin(1, START).now_or_never().is_none());
        flight.arrived(1, START, ROUND_TRIP);
        assert!(flight.begin(60, START).now_or_never().is_some());
        assert!(flight.begin(40, START).now_or_never().is_some());
    }
}
