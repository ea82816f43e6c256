//! Losses of a distant connection that no full queue explains.

use std::time::{Duration, Instant};

use tokio::net::TcpStream;

use super::{set_congestion_control, stays_on_host};
use crate::environment::{TcpProgress, tcp_progress};

/// Changes the congestion control of a distant connection when packets are lost while no queue grows.
///
/// A full queue lengthens round trips before it loses a packet. A loss while they are as short as ever is an error of
/// the path; to slow down does not help against it.
pub(super) struct LossWatch {
    socket: socket2::Socket,
    control: &'static str,
    queues: QueueSense,
    look_at: Instant,
}

/// Tells losses of a full queue from losses of the path.
#[derive(Clone, Copy, Debug)]
struct QueueSense {
    shortest: Duration,
    /// At the last look.
    last: TcpProgress,
}

impl LossWatch {
    /// Watches a connection, if it is distant, to change it to `control`.
    pub(super) fn of(stream: &TcpStream, control: &'static str) -> Option<Self> {
        let first = tcp_progress(stream)?;
        if stays_on_host(stream).unwrap_or(true) || first.round_trip < DISTANT {
            return None;
        }
        let socket = socket2::SockRef::from(stream).try_clone().ok()?;
        Some(Self { socket, control, queues: QueueSense::new(first), look_at: Instant::now() })
    }

    /// Looks for losses, at most once in a while. Returns whether to look again.
    pub(super) fn look(&mut self) -> bool {
        let now = Instant::now();
        if now < self.look_at {
            return true;
        }
        self.look_at = now + LOOK_EVERY;
        let Some(progress) = tcp_progress(&self.socket) else { return false };
        if !self.queues.has_lost_without_queue(progress) {
            // A first round trip may have been late by chance.
            return self.queues.shortest >= DISTANT;
        }
        match set_congestion_control(&self.socket, self.control) {
            Ok(()) => tracing::debug!(control = self.control, ?progress, "the path loses packets"),
            Err(error) => tracing::debug!(control = self.control, %error, "the congestion control stays"),
        }
        false
    }
}

impl QueueSense {
    fn new(first: TcpProgress) -> Self {
        Self { shortest: first.round_trip, last: first }
    }

    /// Takes what TCP says now; tells whether packets were lost since the last time, and none queued.
    fn has_lost_without_queue(&mut self, now: TcpProgress) -> bool {
        let before = std::mem::replace(&mut self.last, now);
        self.shortest = self.shortest.min(now.round_trip);
        let queued = before.round_trip.max(now.round_trip) >= self.shortest.mul_f64(QUEUED);
        now.retransmitted > before.retransmitted && !queued
    }
}

/// Least round trip of a connection that is watched. On shorter paths, any congestion control recovers soon.
const DISTANT: Duration = Duration::from_millis(10);
/// Least time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// A round trip of at least so many times the shortest one means a queue.
const QUEUED: f64 = 1.25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_counts_if_round_trips_were_short_before_and_after() {
        let at = |ms, retransmitted| TcpProgress { round_trip: Duration::from_millis(ms), retransmitted };
        let mut queues = QueueSense::new(at(100, 0));
        let looks = [
            (at(100, 0), false),
            (at(90, 0), false),
            (at(120, 3), false), // A queue has grown.
            (at(91, 5), false),  // It was there when the packets were lost.
            (at(95, 5), false),
            (at(92, 6), true),
        ];
        for (now, expected) in looks {
            assert_eq!(queues.has_lost_without_queue(now), expected, "{now:?}");
        }
    }
}
