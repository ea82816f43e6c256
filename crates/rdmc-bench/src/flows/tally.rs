//! Counts the messages of a flow within a window of time.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// When messages count, by a clock in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Window {
    /// Where it begins.
    pub(crate) from_ns: u64,
    pub(crate) until: WindowEnd,
}

/// How a window ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WindowEnd {
    /// At a moment.
    At { ns: u64 },
    /// When the flow has completed so many messages after the first one that was complete within it.
    After { messages: u64 },
}

/// The messages of a flow within a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Messages per second. One whose turn is across an end of the window counts in proportion. The turn of a message
    /// begins when the one before it is complete, or when it is posted.
    pub(crate) message_rate: f64,
    /// Times from posting to completion; `None` if no message was complete within the window.
    pub(crate) seconds: Option<Times>,
    /// Processor time of both ends as a share of the time, which one core makes 1; `None` in the model.
    pub(crate) cpu: Option<[f64; 2]>,
}

/// Quantiles of the times of messages, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Times {
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// Counts the messages.
pub(crate) struct Tally {
    window: Window,
    messages: f64,
    /// When the latest message was complete.
    before_ns: u64,
    /// Messages that were complete within the window, and when the first and the last one were.
    whole: u64,
    first_ns: u64,
    last_ns: u64,
    times: Histogram<u64>,
    is_complete: bool,
}

impl Tally {
    pub(crate) fn new(window: Window) -> Self {
        let times = Histogram::new(3).expect("3 digits are allowed");
        Self { window, messages: 0.0, before_ns: 0, whole: 0, first_ns: 0, last_ns: 0, times, is_complete: false }
    }

    /// Takes note of a message. They come in order.
    #[expect(clippy::cast_precision_loss, reason = "times of much less than a month")]
    pub(crate) fn note(&mut self, posted: u64, done: u64) {
        if self.is_complete {
            return;
        }
        let Window { from_ns, until } = self.window;
        let end = match until {
            WindowEnd::At { ns } => ns,
            WindowEnd::After { .. } => u64::MAX,
        };
        // What is posted after the end follows all that counts.
        self.is_complete = posted >= end;
        let turn = posted.max(std::mem::replace(&mut self.before_ns, done));
        let inside = done.min(end).saturating_sub(turn.max(from_ns));
        self.messages += match done - turn {
            0 => f64::from(u8::from(done >= from_ns && done < end)),
            took => inside as f64 / took as f64,
        };
        if done < from_ns || done >= end {
            return;
        }
        if self.whole == 0 {
            self.first_ns = done;
        }
        self.whole += 1;
        self.last_ns = done;
        // It grows with the times.
        let _ = self.times.record(done - posted);
        if let WindowEnd::After { messages } = until {
            self.is_complete = self.whole > messages;
        }
    }

    /// Tells whether nothing counts any more.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns what was counted.
    #[expect(clippy::cast_precision_loss, reason = "times of much less than a month")]
    pub(crate) fn sample(&self, cpu: Option<[f64; 2]>) -> Sample {
        let Window { from_ns, until } = self.window;
        let (messages, took_ns) = match until {
            WindowEnd::At { ns } => (self.messages, ns.saturating_sub(from_ns)),
            WindowEnd::After { .. } => (self.whole.saturating_sub(1) as f64, self.last_ns - self.first_ns),
        };
        let at = |quantile| self.times.value_at_quantile(quantile) as f64 / 1e9;
        let seconds = (self.whole > 0).then(|| Times { median: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) });
        Sample { message_rate: messages * 1e9 / took_ns.max(1) as f64, seconds, cpu }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(window: Window, messages: &[(u64, u64)]) -> (Sample, bool) {
        let mut tally = Tally::new(window);
        messages.iter().for_each(|&(posted, done)| tally.note(posted, done));
        (tally.sample(None), tally.is_complete())
    }

    #[test]
    fn messages_across_an_end_of_the_window_count_in_proportion() {
        let window = Window { from_ns: 1_000, until: WindowEnd::At { ns: 2_000 } };
        let messages = [(0, 500), (500, 1_500), (1_500, 1_900), (1_900, 2_300)];
        let (sample, complete) = counted(window, &messages);
        // A half, a whole one and a quarter, in a microsecond.
        assert!((sample.message_rate - 1.75e6).abs() < 1.0, "{sample:?}");
        assert!((sample.seconds.unwrap().median - 400e-9).abs() < 1e-9, "{sample:?}");
        assert!(!complete, "one that was posted before the end may follow");
        assert!(counted(window, &[(2_000, 2_001)]).1);
        let one = counted(window, &[(0, 10_000), (10_000, 20_000)]).0;
        assert!((one.message_rate - 1e5).abs() < 1.0 && one.seconds.is_none(), "{one:?}");
    }

    #[test]
    fn a_window_of_so_many_messages_ends_with_the_last_one() {
        let window = Window { from_ns: 1_000, until: WindowEnd::After { messages: 2 } };
        for depth in [1, 8] {
            let messages: Vec<(u64, u64)> = (0..20).map(|n| (n * 500, (n + depth) * 500)).collect();
            let (sample, complete) = counted(window, &messages);
            assert!(complete);
            // One every 500 ns.
            assert!((sample.message_rate - 2e6).abs() < 1.0, "{depth}: {sample:?}");
            assert!(!counted(window, &messages[..2]).1, "{depth}");
        }
    }

    #[test]
    fn messages_under_way_at_once_count_when_it_is_their_turn() {
        // Sixteen are posted at once, and one is complete each microsecond.
        let window = Window { from_ns: 2_000, until: WindowEnd::At { ns: 10_000 } };
        let messages: Vec<(u64, u64)> = (1..=16).map(|n| (0, n * 1_000)).collect();
        let rate = counted(window, &messages).0.message_rate;
        assert!((rate - 1e6).abs() < 1.0, "{rate}");
    }

    #[test]
    fn messages_of_no_time_count() {
        let window = Window { from_ns: 10, until: WindowEnd::At { ns: 20 } };
        assert!((counted(window, &[(9, 9), (10, 10), (19, 19), (20, 20)]).0.message_rate - 2e8).abs() < 1.0);
    }
}
