//! The round trips to other nodes, which all groups of a node measure together.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use rdmc_fabric::Timestamp;

use crate::id::NodeId;
use crate::sync::lock;

/// The shortest round trips to other nodes that were seen. The software at both ends is included.
#[derive(Default)]
pub(crate) struct RoundTrips(Mutex<BTreeMap<NodeId, MeasuredPeer>>);

#[derive(Default)]
struct MeasuredPeer {
    shortest: Option<Duration>,
    /// Measurements that have begun, and that have ended.
    begun: usize,
    ended: usize,
    last: Option<Timestamp>,
}

impl RoundTrips {
    /// Tells whether the caller is to measure the round trip to a node now. Many groups may ask at once.
    pub(crate) fn is_due(&self, to: NodeId, now: Timestamp) -> bool {
        let mut peers = lock(&self.0);
        let peer = peers.entry(to).or_default();
        let pause = PAUSES.get(peer.begun).copied().unwrap_or(PAUSE_MAX);
        let is_due = peer.last.is_none_or(|last| now.since(last) >= pause);
        if is_due {
            peer.begun += 1;
            peer.last = Some(now);
        }
        is_due
    }

    /// Notes a round trip.
    pub(crate) fn note(&self, to: NodeId, measured: Duration) {
        let mut peers = lock(&self.0);
        let peer = peers.entry(to).or_default();
        peer.ended += 1;
        peer.shortest = Some(peer.shortest.map_or(measured, |shortest| shortest.min(measured)));
    }

    /// Returns the shortest round trip to a node, and whether it was measured only once.
    pub(crate) fn shortest(&self, to: NodeId) -> Option<(Duration, bool)> {
        let peers = lock(&self.0);
        let peer = peers.get(&to)?;
        Some((peer.shortest?, peer.ended < 2))
    }
}

/// Pauses before the measurements of a new group. A node is busy while it forms groups, so the first one may be long.
pub(crate) const PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(20), Duration::from_millis(500)];
/// Pause between later measurements, as new groups are formed.
const PAUSE_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_groups_measure_a_round_trip_once_and_the_shortest_counts() {
        let (round_trips, peer) = (RoundTrips::default(), NodeId(7));
        let at = |ms: u64| Timestamp::from_nanos(ms * 1_000_000);
        let due = [0, 0, 1, 1, 5, 22, 100, 600, 601].map(|ms| round_trips.is_due(peer, at(ms)));
        assert_eq!(due, [true, false, true, false, false, true, false, true, false]);
        assert!(round_trips.is_due(peer, at(11_000)));
        assert_eq!(round_trips.shortest(peer), None);
        [3, 1, 2].into_iter().for_each(|ms| round_trips.note(peer, Duration::from_millis(ms)));
        assert_eq!(round_trips.shortest(peer), Some((Duration::from_millis(1), false)));
    }
}
