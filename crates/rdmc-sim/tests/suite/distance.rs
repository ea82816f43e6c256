//! What the cost model chooses, from 1.3 µs to 25 ms.

use rdmc::Algorithm;
use rdmc_sim::experiments::{BOUND, BOUND_PIPELINE, DistanceCase, PREDICTED};

const MIB: u64 = 1 << 20;

/// A few cases. The experiment `distance` plays many more, and judges them alike.
#[test]
fn what_is_chosen_takes_little_longer_than_the_bytes_and_the_latencies_of_its_depth() {
    let rates = |members| [1_000, 100_000].map(|port_mbps| (members, port_mbps));
    let paths = |(members, port_mbps)| [1_300, 50_000, 1_000_000].map(|latency_ns| (members, port_mbps, latency_ns));
    for (members, port_mbps, latency_ns) in [8, 13].into_iter().flat_map(rates).flat_map(paths) {
        for bytes in [16 * MIB, 64 * MIB] {
            let case = DistanceCase { members, port_mbps, latency_ns, bytes };
            let outcome = case.play(None, None).unwrap();
            let bound = case.bound(BOUND);
            assert!(outcome.time <= bound, "{case:?}: {outcome:?}, not {bound:?}");
            let ratio = outcome.prediction();
            assert!(PREDICTED.contains(&ratio), "{case:?}: predicted {ratio:.3} times what it takes: {outcome:?}");
        }
    }
}

#[test]
fn the_binomial_pipeline_reaches_its_bound_at_a_distance_too() {
    let near = [(8, 1_000, 1_300, 64), (13, 1_000, 25_000, 64), (13, 100_000, 1_300, 256)];
    let far = [(8, 10_000, 250_000, 256), (8, 25_000, 50_000, 64), (16, 100_000, 50_000, 256)];
    for (members, port_mbps, latency_ns, mib) in near.into_iter().chain(far) {
        let case = DistanceCase { members, port_mbps, latency_ns, bytes: mib * MIB };
        let outcome = case.play(Some(&Algorithm::BinomialPipeline), None).unwrap();
        let bound = case.bound(BOUND_PIPELINE);
        assert!(outcome.time <= bound, "{case:?}: {outcome:?}, not {bound:?}");
    }
}

/// Blocks follow each other without a gap, and do not share ports, whatever their size.
#[test]
fn near_members_lose_nothing_at_the_ends_of_blocks() {
    for (members, block_kib) in [(8, 64), (8, 256), (13, 64), (13, 256)] {
        let case = DistanceCase { members, port_mbps: 1_000, latency_ns: 1_300, bytes: 256 * MIB };
        let outcome = case.play(Some(&Algorithm::BinomialPipeline), Some(block_kib << 10)).unwrap();
        assert!(outcome.time <= case.wire_time().mul_f64(1.01), "{members} {block_kib}: {outcome:?}");
    }
}
