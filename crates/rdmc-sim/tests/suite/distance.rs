//! What the cost model chooses, from 1.3 µs to 25 ms.

use rdmc::Algorithm;
use rdmc_sim::experiments::{DistanceCase, LATENCIES_NS, RATES_MBPS};

use crate::proof::amount;

const MIB: u64 = 1 << 20;

/// Part of the grid.
#[derive(Debug)]
struct Grid {
    members: Vec<u32>,
    rates_mbps: Vec<u64>,
    latencies_ns: Vec<u64>,
    mib: Vec<u64>,
}

impl Grid {
    fn cases(&self) -> Vec<DistanceCase> {
        let mut cases = Vec::new();
        for &members in &self.members {
            for &port_mbps in &self.rates_mbps {
                for &latency_ns in &self.latencies_ns {
                    cases.extend(self.mib.iter().map(|&mib| DistanceCase {
                        members,
                        port_mbps,
                        latency_ns,
                        bytes: mib * MIB,
                    }));
                }
            }
        }
        cases
    }
}

fn coarse() -> Vec<Grid> {
    let latencies_ns = vec![1_300, 50_000, 1_000_000];
    vec![Grid { members: vec![8, 13], rates_mbps: vec![1_000, 100_000], latencies_ns, mib: vec![16, 64] }]
}

fn full() -> Vec<Grid> {
    let (rates_mbps, latencies_ns) = (RATES_MBPS.to_vec(), LATENCIES_NS.to_vec());
    let all = Grid { members: vec![8, 13, 16], rates_mbps, latencies_ns, mib: vec![16, 256] };
    // These take long to play.
    let latencies_ns = vec![1_300, 50_000, 25_000_000];
    let large = Grid { members: vec![64], rates_mbps: vec![10_000, 100_000], latencies_ns, mib: vec![16, 256] };
    vec![all, large]
}

#[test]
fn what_is_chosen_takes_little_longer_than_the_bytes_and_the_latencies_of_its_depth() {
    let name = "what_is_chosen_takes_little_longer_than_the_bytes_and_the_latencies_of_its_depth";
    let mut cases: Vec<DistanceCase> = amount(name, coarse(), full()).iter().flat_map(Grid::cases).collect();
    // A long message too.
    cases.push(DistanceCase { members: 8, port_mbps: 100_000, latency_ns: 25_000_000, bytes: 4096 * MIB });
    for case in cases {
        let outcome = case.play(None, None).unwrap();
        let bound = case.bound(1.08);
        assert!(outcome.time <= bound, "{case:?}: {outcome:?}, not {bound:?}");
        let ratio = outcome.plan.time.as_secs_f64() / outcome.time.as_secs_f64();
        assert!((0.85..1.1).contains(&ratio), "{case:?}: predicted {ratio:.3} times what it takes: {outcome:?}");
    }
}

#[test]
fn the_binomial_pipeline_reaches_its_bound_at_a_distance_too() {
    let ratios = [(8, 10_000, 250_000, 256), (8, 25_000, 50_000, 64), (16, 100_000, 50_000, 256)];
    for (members, port_mbps, latency_ns, mib) in ratios {
        let case = DistanceCase { members, port_mbps, latency_ns, bytes: mib * MIB };
        let outcome = case.play(Some(&Algorithm::BinomialPipeline), None).unwrap();
        let bound = case.bound(1.10);
        assert!(outcome.time <= bound, "{case:?}: {outcome:?}, not {bound:?}");
    }
}
