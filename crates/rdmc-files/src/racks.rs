//! Racks among the members: given, or found by round trips.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use rdmc::{Algorithm, Hybrid, NodeId, Racks, Rank, Spine};

use crate::announcement::{Reply, WirePlan};
use crate::costs::{Assumed, Path, plan};

/// Says how a sender finds the members that share a rack or a site. It counts if a cost model chooses the algorithm.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RackSelection {
    /// By the round trips between all members, where it costs little to measure them.
    #[default]
    Find,
    /// All members count as equally far from each other.
    Ignore,
    /// As given. Rank 0 is the sender, rank i the receiver at the i-th address.
    Given(Racks),
}

/// Returns the racks of the members, if there are any, by the round trips that sender and receivers have measured.
pub(crate) fn find(
    members: u32,
    of_sender: &BTreeMap<NodeId, Duration>,
    replies: &BTreeMap<NodeId, Reply>,
) -> Option<Racks> {
    Racks::by_round_trips(members, |a, b| match a {
        Rank::ROOT => of_sender.get(&NodeId(b.0)).copied(),
        a => replies.get(&NodeId(a.0))?.round_trip(b.0.checked_sub(a.0 + 1)?),
    })
}

/// Tells whether the receivers should measure the round trips between them. It takes the longest one, so the transfer
/// must be long, or some receivers much farther than others.
pub(crate) fn is_worth_a_round_trip(
    of_sender: &BTreeMap<NodeId, Duration>,
    mut addresses: impl Iterator<Item = IpAddr>,
    predicted: Duration,
) -> bool {
    let (Some(least), Some(most)) = (of_sender.values().min(), of_sender.values().max()) else { return false };
    let few = (RECEIVERS_MIN..=RECEIVERS_MAX).contains(&of_sender.len());
    let differ = most.as_secs_f64() >= DIFFERENT_RATIO * least.as_secs_f64() && *most >= DIFFERENT_MIN;
    few && (differ || *most * TRANSFER_ROUND_TRIPS_MIN <= predicted) && !addresses.all(|address| address.is_loopback())
}

/// Returns two trees by racks, unless the cost model predicts that `bytes` take longer by them than as announced.
pub(crate) fn two_trees(racks: Racks, announced: &WirePlan, bytes: u64, path: Path) -> Option<Algorithm> {
    let members = racks.members();
    let by_racks = Hybrid::new(racks, Spine::TwoTree).into();
    let time = |algorithm: &Algorithm| {
        let planned = plan(Assumed::Network(path), Some(algorithm), Some(announced.block_size), members, bytes);
        planned.ok().map(|planned| planned.time.as_secs_f64())
    };
    let flat = announced.algorithm.resolve(Rank(members).index()).ok()?;
    (time(&by_racks)? <= LONGER_MAX * time(&flat)?).then_some(by_racks)
}

/// Fewest receivers for which racks are looked for.
const RECEIVERS_MIN: usize = 3;
/// Most receivers for which racks are looked for: their racks fit a conclusion, and finding them takes milliseconds.
pub(crate) const RECEIVERS_MAX: usize = 127;
/// Receivers that are this many times farther from the sender than others may be in another rack.
const DIFFERENT_RATIO: f64 = 2.0;
/// Shorter round trips do not show a rack.
const DIFFERENT_MIN: Duration = Duration::from_micros(100);
/// Least time of a transfer, in round trips, for which the receivers measure.
const TRANSFER_ROUND_TRIPS_MIN: u32 = 200;
/// Greatest predicted time of two trees by racks, over that of the announced algorithm.
const LONGER_MAX: f64 = 1.03;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::PortRate;

    const NEAR: Duration = Duration::from_micros(200);
    const FAR: Duration = Duration::from_millis(5);

    #[test]
    fn racks_are_found_from_what_sender_and_receivers_have_measured() {
        let rack_of = [0, 1, 0, 1, 1, 0];
        let between = |a: usize, b: usize| if rack_of[a] == rack_of[b] { NEAR } else { FAR };
        let mut replies = BTreeMap::new();
        for receiver in 1..6_u32 {
            let next = (receiver + 1..6).map(|other| Some(between(receiver as usize, other as usize)));
            replies.insert(NodeId(receiver), Reply::decode(&Reply::new(false, next).encode()));
        }
        let of_sender = (1..6).map(|receiver| (NodeId(receiver), between(0, receiver as usize))).collect();
        assert_eq!(find(6, &of_sender, &replies), Some(Racks::from_assignment(&rack_of).unwrap()));

        // Replies that say nothing, or nonsense.
        let replies = [(NodeId(1), Reply::decode(&[])), (NodeId(7), Reply::decode(&[255; 1000]))].into();
        assert_eq!(find(6, &BTreeMap::new(), &replies), None);
    }

    #[test]
    fn receivers_measure_if_that_is_short_beside_the_transfer_or_some_are_much_farther_than_others() {
        let asks = |of_sender: &[Duration], transfer, address: [u8; 4]| {
            let of_sender = (1..).map(NodeId).zip(of_sender.iter().copied()).collect();
            is_worth_a_round_trip(&of_sender, [IpAddr::from(address)].into_iter(), transfer)
        };
        let (short, long, elsewhere) = (Duration::from_millis(100), Duration::from_secs(5), [10, 0, 0, 7]);
        assert!(asks(&[FAR; 7], long, elsewhere) && !asks(&[FAR; 7], short, elsewhere));
        assert!(asks(&[NEAR, FAR, FAR], short, elsewhere));
        for few in [&[][..], &[NEAR], &[NEAR, FAR]] {
            assert!(!asks(few, long, elsewhere));
        }
        assert!(!asks(&[NEAR; 128], long, elsewhere));
        assert!(!asks(&[NEAR; 7], long, [127, 0, 0, 1]));
    }

    #[test]
    fn blocks_travel_by_racks_unless_that_takes_much_longer() {
        let chosen = |racks: &[u32], bytes: u64, round_trip| {
            let path = Path { port_rate: PortRate::default(), round_trip };
            let network = WirePlan::new(&Algorithm::TwoTree, 256 << 10);
            two_trees(Racks::from_assignment(racks).unwrap(), &network, bytes, path)
        };
        let alternating: Vec<u32> = (0..8).map(|rank| rank % 2).collect();
        for bytes in [1 << 10, 1 << 20, 1 << 30] {
            let by_racks = chosen(&alternating, bytes, FAR);
            assert!(matches!(by_racks, Some(Algorithm::Hybrid(Hybrid { spine: Spine::TwoTree, .. }))), "{bytes}");
        }
        // Sixteen racks of one that are near have more levels than the trees of sixteen members.
        let pairs: Vec<u32> = (0..64).map(|rank| rank / 2).collect();
        assert_eq!(chosen(&pairs, 4 << 20, Duration::ZERO), None);
    }
}
