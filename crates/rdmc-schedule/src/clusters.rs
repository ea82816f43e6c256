//! Clusters of members that are close to each other.

use std::time::Duration;

use crate::hop::Rank;

/// Returns the number of each member's cluster; `None` if there are no clusters, or each member would be one.
pub(crate) fn by_distance(members: u32, round_trip: impl Fn(Rank, Rank) -> Option<Duration>) -> Option<Vec<u32>> {
    let mut clusters = Clusters::new(members, round_trip);
    let mut joins = Vec::new();
    while let Some(join) = clusters.join_closest() {
        joins.push(join);
    }
    let grows = |pair: &[Join]| {
        let (inside, between) = (pair[0].distance, pair[1].distance);
        between - inside >= APART_MIN.as_secs_f64() && between >= APART_RATIO * inside
    };
    let last = joins.windows(2).rposition(grows)?;
    let mut cluster_of: Vec<u32> = (0..members).collect();
    for Join { from, into, .. } in &joins[..=last] {
        cluster_of.iter_mut().filter(|cluster| *cluster == from).for_each(|cluster| *cluster = *into);
    }
    Some(cluster_of)
}

/// Two clusters that became one.
#[derive(Clone, Copy, Debug)]
struct Join {
    from: u32,
    into: u32,
    /// The mean round trip between their members, in seconds.
    distance: f64,
}

/// Clusters that are joined until one is left. Each has the number of its lowest member.
struct Clusters {
    /// By a cluster and one of higher number, the round trip between their members.
    between: Vec<Vec<MeanRoundTrip>>,
    /// The clusters that are left.
    left: Vec<u32>,
}

/// The geometric mean of round trips, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
struct MeanRoundTrip {
    logarithms: f64,
    count: f64,
}

impl Clusters {
    fn new(members: u32, round_trip: impl Fn(Rank, Rank) -> Option<Duration>) -> Self {
        let measured = |a, b| match round_trip(Rank(a), Rank(b)) {
            Some(round_trip) => {
                MeanRoundTrip { logarithms: round_trip.max(ROUND_TRIP_MIN).as_secs_f64().ln(), count: 1.0 }
            }
            None => MeanRoundTrip::default(),
        };
        let row = |a| (0..members).map(|b| if a < b { measured(a, b) } else { MeanRoundTrip::default() }).collect();
        Self { between: (0..members).map(row).collect(), left: (0..members).collect() }
    }

    fn between(&mut self, a: u32, b: u32) -> &mut MeanRoundTrip {
        &mut self.between[a.min(b) as usize][a.max(b) as usize]
    }

    /// Joins the two clusters that are closest; `None` if no two are known to be close.
    fn join_closest(&mut self) -> Option<Join> {
        let pairs = self.left.iter().enumerate().flat_map(|(nth, a)| self.left[nth + 1..].iter().map(|b| (*a, *b)));
        let known = pairs.filter_map(|(a, b)| {
            let MeanRoundTrip { logarithms, count } = self.between[a as usize][b as usize];
            (count > 0.0).then(|| Join { from: b, into: a, distance: (logarithms / count).exp() })
        });
        let closest = known.min_by(|a, b| a.distance.total_cmp(&b.distance))?;
        self.left.retain(|cluster| *cluster != closest.from);
        for other in self.left.clone().into_iter().filter(|other| *other != closest.into) {
            let MeanRoundTrip { logarithms, count } = *self.between(closest.from, other);
            let joined = self.between(closest.into, other);
            joined.logarithms += logarithms;
            joined.count += count;
        }
        Some(closest)
    }
}

/// Least ratio of the distance between clusters to that inside.
const APART_RATIO: f64 = 2.0;
/// Least difference of the two distances.
const APART_MIN: Duration = Duration::from_micros(50);
/// Shorter round trips are all the same.
const ROUND_TRIP_MIN: Duration = Duration::from_micros(1);
