//! TCP as a model, round by round: what sessions over long paths are compared with.
//!
//! In a round, every stream sends its window. A round lasts a round trip and the time of the bytes that wait in the
//! queue of the bottleneck. What does not fit there is dropped. A stream that lost a segment in a round shrinks its
//! window at the end of it, otherwise its window grows. Lost segments are sent again selectively.
//!
//! Windows leave as one burst, at the rate of the path, during slow start, and evenly afterwards. A policer sees that.

use std::time::Duration;

use crate::path::PolicerModel;
use crate::random::Random;

/// Parallel streams of TCP over one path.
#[derive(Clone, Debug, PartialEq)]
pub struct TcpModel {
    /// Number of streams.
    pub streams: u32,
    /// The time of a round trip without a queue. At least 100 µs are taken, for the software of both ends.
    pub round_trip: Duration,
    /// The rate of the bottleneck in Mbit/s of payload.
    pub mbps: u64,
    /// Bytes that wait before the bottleneck at most.
    pub queue_bytes: u64,
    /// Probability that a segment is lost, besides those that are dropped.
    pub loss: f64,
    /// Drops segments beyond a rate.
    pub policer: Option<PolicerModel>,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Largest window of a stream in bytes: its buffers.
    pub window_bytes: u64,
    /// How windows change.
    pub congestion: Congestion,
    /// Whether slow start ends as soon as the segments of a round take half of the round trip, as with CUBIC on Linux.
    /// It loses little then, but leaves the other half to congestion avoidance (Ha and Rhee, "Taming the elephants").
    pub hystart: bool,
}

/// How a stream changes its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Congestion {
    /// A segment more in each round trip, half after a loss.
    Reno,
    /// A cubic function of the time since the last loss, 7/10 after a loss (RFC 9438).
    Cubic,
}

impl TcpModel {
    /// Describes streams with CUBIC and segments of jumbo frames on a path of 10 Gbit/s, which loses nothing.
    pub fn new(streams: u32, round_trip: Duration) -> Self {
        Self {
            streams,
            round_trip,
            mbps: 10_000,
            queue_bytes: 16 << 20,
            loss: 0.0,
            policer: None,
            segment_bytes: 8948,
            window_bytes: 256 << 20,
            congestion: Congestion::Cubic,
            hystart: true,
        }
    }

    /// Returns the rate in Mbit/s of `duration` from the first segment.
    pub fn rate(&self, duration: Duration, seed: u64) -> f64 {
        self.run(duration, Losses(Some(Random::new(seed))))
    }

    fn run(&self, duration: Duration, mut losses: Losses) -> f64 {
        let duration = duration.as_secs_f64();
        let round_trip = self.round_trip.as_secs_f64().max(ROUND_TRIP_MIN);
        #[expect(clippy::cast_precision_loss, reason = "sizes and rates")]
        let (per_second, queue, window_max) = (
            self.mbps as f64 * 125e3 / self.segment_bytes as f64,
            self.queue_bytes as f64 / self.segment_bytes as f64,
            self.window_bytes as f64 / self.segment_bytes as f64,
        );
        let mut policer = self.policer.map(|policer| Bucket::new(policer, self.segment_bytes, per_second));
        let mut streams = vec![Stream::default(); self.streams as usize];
        let (mut now, mut delivered) = (0.0, 0.0);
        while now < duration {
            let windows: Vec<f64> = streams.iter().map(|stream| stream.sends(now).min(window_max)).collect();
            let sent: f64 = windows.iter().sum();
            let waiting = (sent - per_second * round_trip).max(0.0);
            let mut dropped = (waiting - queue).max(0.0);
            let lasts = round_trip + waiting.min(queue) / per_second;
            if let Some(bucket) = &mut policer {
                let in_burst = streams.iter().zip(&windows).filter(|(stream, _)| stream.in_slow_start());
                let in_burst: f64 = in_burst.map(|(_, window)| window).sum();
                dropped += bucket.drops(sent - dropped, in_burst, lasts);
            }
            now += lasts;
            let within = (1.0 - (now - duration).max(0.0) / lasts).clamp(0.0, 1.0);
            delivered += (sent - dropped).max(0.0) * (1.0 - self.loss) * within;
            let share = if sent > 0.0 { (dropped / sent).min(1.0) } else { 0.0 };
            let probability = 1.0 - (1.0 - self.loss) * (1.0 - share);
            // The part of the windows at which the train of segments was long enough.
            let train = per_second * round_trip * HYSTART_SHARE / sent;
            let train = (self.hystart && train <= 1.0).then_some(train);
            for (stream, window) in streams.iter_mut().zip(windows) {
                if window == 0.0 {
                    continue;
                }
                if losses.among(window, probability, &mut stream.since_loss) {
                    stream.shrink(self.congestion, window, now);
                } else {
                    stream.grow(self.congestion, window, now, lasts, train);
                }
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a size")]
        let bits = delivered * self.segment_bytes as f64 * 8.0;
        bits / duration / 1e6
    }
}

/// Which segments are lost.
///
/// `None` lets each stream lose a segment after as many as are lost on average, as the formulas have it.
struct Losses(Option<Random>);

impl Losses {
    /// Tells whether a stream loses a segment of a window. `since` is what it has sent since the last loss.
    fn among(&mut self, window: f64, probability: f64, since: &mut f64) -> bool {
        *since += window;
        let lost = match &mut self.0 {
            Some(random) => probability > 0.0 && random.unit() > libm::pow(1.0 - probability, window),
            None => *since * probability >= 1.0,
        };
        if lost {
            *since = 0.0;
        }
        lost
    }
}

/// The bucket of a policer, in segments.
struct Bucket {
    per_second: f64,
    burst: f64,
    held: f64,
    /// The rate of a burst in segments per second.
    line: f64,
}

impl Bucket {
    fn new(policer: PolicerModel, segment_bytes: u64, line: f64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "sizes and rates")]
        let (per_second, burst) =
            (policer.mbps as f64 * 125e3 / segment_bytes as f64, policer.burst_bytes as f64 / segment_bytes as f64);
        Self { per_second, burst, held: burst, line }
    }

    /// Returns how many of the segments of a round are dropped, `in_burst` of which leave at the rate of the path.
    fn drops(&mut self, sent: f64, in_burst: f64, lasts: f64) -> f64 {
        let takes = in_burst / self.line;
        let of_burst = (in_burst - self.held - self.per_second * takes).max(0.0);
        let room = self.held + self.per_second * lasts;
        let drops = of_burst.max(sent - room).max(0.0);
        self.held = (room - (sent - drops)).clamp(0.0, self.burst);
        drops
    }
}

/// One stream.
#[derive(Clone, Debug)]
struct Stream {
    window: f64,
    /// The window at which slow start ends.
    threshold: f64,
    /// Segments since the last loss.
    since_loss: f64,
    /// A timeout lasts until then, in s.
    idle_until: f64,
    /// The window before the last loss, and before that.
    window_before: f64,
    /// The beginning of the present growth; `None` during slow start.
    epoch: Option<Epoch>,
}

/// The growth of a window since a loss.
#[derive(Clone, Copy, Debug)]
struct Epoch {
    began: f64,
    /// The window at its beginning.
    from: f64,
    /// The window at the inflexion.
    origin: f64,
    /// When the window is that again, in s after the beginning.
    returns_after: f64,
}

impl Epoch {
    fn new(began: f64, from: f64, origin: f64) -> Self {
        Self { began, from, origin, returns_after: libm::cbrt((origin - from).max(0.0) / CUBIC_SCALE) }
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self {
            window: WINDOW_FIRST,
            threshold: f64::INFINITY,
            since_loss: 0.0,
            idle_until: 0.0,
            window_before: 0.0,
            epoch: None,
        }
    }
}

impl Stream {
    fn in_slow_start(&self) -> bool {
        self.window < self.threshold
    }

    /// Returns the segments of the next round.
    fn sends(&self, now: f64) -> f64 {
        if now < self.idle_until { 0.0 } else { self.window }
    }

    fn shrink(&mut self, congestion: Congestion, window: f64, now: f64) {
        let share = match congestion {
            Congestion::Reno => 0.5,
            Congestion::Cubic => CUBIC_SHARE,
        };
        self.threshold = (window * share).max(2.0);
        if window < WINDOW_OF_FAST_RETRANSMIT {
            // Too few acknowledgements follow the loss: only the timeout shows it.
            (self.window, self.idle_until, self.epoch) = (1.0, now + TIMEOUT, None);
            return;
        }
        self.window = self.threshold;
        // Fast convergence: a stream whose windows shrink leaves room for others.
        let origin = if window < self.window_before { window * (1.0 + share) / 2.0 } else { window };
        self.window_before = window;
        self.epoch = Some(Epoch::new(now, self.window, origin));
    }

    fn grow(&mut self, congestion: Congestion, window: f64, now: f64, round_trip: f64, train: Option<f64>) {
        if self.in_slow_start() {
            let Some(train) = train else {
                self.window = (2.0 * window).min(self.threshold);
                return;
            };
            self.threshold = (window * train).max(2.0);
            (self.window, self.epoch) = (self.threshold, Some(Epoch::new(now, self.threshold, self.threshold)));
            return;
        }
        let epoch = *self.epoch.get_or_insert_with(|| Epoch::new(now - round_trip, window, window));
        let elapsed = now - epoch.began;
        let next = match congestion {
            Congestion::Reno => window + 1.0,
            Congestion::Cubic => {
                let since = elapsed - epoch.returns_after;
                let cubic = epoch.origin + CUBIC_SCALE * since * since * since;
                let reno = epoch.from + 3.0 * (1.0 - CUBIC_SHARE) / (1.0 + CUBIC_SHARE) * elapsed / round_trip;
                cubic.max(reno)
            }
        };
        // A window that is not used does not grow.
        self.window = next.clamp(self.threshold, (1.5 * window).max(self.threshold));
    }
}

/// Shortest round trip in s.
const ROUND_TRIP_MIN: f64 = 100e-6;
/// The first window in segments: that of Linux 2.6.32, which the paper's hosts ran.
const WINDOW_FIRST: f64 = 3.0;
/// Least window in which a loss is followed by enough acknowledgements to show it.
const WINDOW_OF_FAST_RETRANSMIT: f64 = 4.0;
/// Time after which a loss shows without them, in s.
const TIMEOUT: f64 = 0.2;
/// The part of the round trip that the segments of a round take when slow start ends.
const HYSTART_SHARE: f64 = 0.5;
/// The scale of CUBIC's function, in segments per s³.
const CUBIC_SCALE: f64 = 0.4;
/// The part of its window that CUBIC keeps after a loss.
const CUBIC_SHARE: f64 = 0.7;

#[cfg(test)]
mod tests {
    use super::*;

    fn lossy(congestion: Congestion, round_trip_ms: u64, loss: f64) -> TcpModel {
        TcpModel {
            loss,
            congestion,
            // Nothing else limits it.
            mbps: 1_000_000,
            window_bytes: 1 << 40,
            ..TcpModel::new(1, Duration::from_millis(round_trip_ms))
        }
    }

    fn mbps_of(window: f64, model: &TcpModel) -> f64 {
        window * model.segment_bytes as f64 * 8e-6 / model.round_trip.as_secs_f64()
    }

    /// Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm": 1.22 √(1/p).
    #[test]
    fn reno_has_the_rate_of_its_formula() {
        for (round_trip_ms, loss) in [(2, 1e-4), (20, 1e-4), (60, 1e-5), (120, 1e-5)] {
            let model = lossy(Congestion::Reno, round_trip_ms, loss);
            let formula = mbps_of(1.2247 / loss.sqrt(), &model);
            let ratio = model.run(Duration::from_secs(20_000), Losses(None)) / formula;
            assert!((0.95..1.05).contains(&ratio), "{round_trip_ms} ms, {loss}: {ratio}");
            // Random losses come in clusters and gaps: the mean window is √(2/p)·0.93 rather than √(3/2p).
            let ratio = model.rate(Duration::from_secs(20_000), 1) / formula;
            assert!((0.95..1.15).contains(&ratio), "{round_trip_ms} ms, {loss}, at random: {ratio}");
        }
    }

    /// RFC 9438, §5.1: the fourth root of C·(3 + β)/(4·(1 − β)), times (RTT/p)^¾.
    #[test]
    fn cubic_has_the_rate_of_its_formula() {
        for (round_trip_ms, loss) in [(60, 1e-5), (120, 1e-5), (120, 1e-6), (200, 1e-4)] {
            let model = lossy(Congestion::Cubic, round_trip_ms, loss);
            let factor: f64 = (CUBIC_SCALE * (3.0 + CUBIC_SHARE) / (4.0 * (1.0 - CUBIC_SHARE))).powf(0.25);
            let formula = mbps_of(factor * (model.round_trip.as_secs_f64() / loss).powf(0.75), &model);
            let ratio = model.run(Duration::from_secs(20_000), Losses(None)) / formula;
            assert!((0.93..1.07).contains(&ratio), "{round_trip_ms} ms, {loss}: {ratio}");
        }
    }

    #[test]
    fn cubic_is_no_slower_than_reno_where_round_trips_are_short() {
        let [cubic, reno] = [Congestion::Cubic, Congestion::Reno]
            .map(|congestion| lossy(congestion, 2, 1e-4).run(Duration::from_secs(2_000), Losses(None)));
        assert!((0.95..1.1).contains(&(cubic / reno)), "{cubic} {reno}");
    }

    #[test]
    fn a_window_limits_the_rate_to_a_window_in_a_round_trip() {
        let model = TcpModel { window_bytes: 16 << 20, ..TcpModel::new(1, Duration::from_millis(120)) };
        let limit = f64::from(16 << 20) * 8e-6 / 0.12;
        let mbps = model.rate(Duration::from_secs(600), 1);
        assert!((0.97 * limit..=limit).contains(&mbps), "{mbps} of {limit}");
    }

    #[test]
    fn short_paths_are_filled() {
        for streams in [1, 8] {
            let mbps = TcpModel::new(streams, Duration::from_millis(2)).rate(Duration::from_secs(60), 1);
            assert!((9_800.0..=10_001.0).contains(&mbps), "{streams} streams: {mbps}");
        }
    }

    /// The path is dedicated and loses nothing: only the growth of the window keeps the rate low.
    #[test]
    fn after_hystart_a_long_path_fills_slowly() {
        let model = TcpModel::new(1, Duration::from_millis(120));
        let first = model.rate(Duration::from_secs(60), 1);
        let late = (model.rate(Duration::from_secs(120), 1) * 2.0) - first;
        assert!(first < 9_000.0 && late > 1.05 * first, "{first} then {late}");
    }

    #[test]
    fn a_policer_keeps_streams_below_its_rate() {
        let policer = Some(PolicerModel { mbps: 5_000, burst_bytes: 1_000_000 });
        let policed = TcpModel { policer, ..TcpModel::new(1, Duration::from_millis(120)) };
        let mbps = policed.rate(Duration::from_secs(60), 1);
        assert!((100.0..5_000.0).contains(&mbps), "{mbps}");
        // With a bucket for a whole round trip, slow start loses nothing before it is as fast.
        let wide = TcpModel { policer: policer.map(|it| PolicerModel { burst_bytes: 150_000_000, ..it }), ..policed };
        assert!(wide.rate(Duration::from_secs(60), 1) > mbps);
    }
}
