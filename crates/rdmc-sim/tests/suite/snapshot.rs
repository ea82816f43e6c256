//! The virtual times of a fixed set of multicasts: if a change of a schedule or of the runtime moves one of them, the
//! difference of the file is reviewed.
//!
//! `INSTA_UPDATE=always cargo test -p rdmc-sim --test suite snapshot` writes the file again.

use std::fmt::Write as _;

use rdmc_sim::{ClusterModel, HostModel, RackModel, Scenario, ScenarioEvent, ScenarioGroup, ScenarioMessage, WaitMode};

const BLOCK: u64 = 64 << 10;
const SIZES: [u64; 3] = [1, 3 * BLOCK + 1, 32 * BLOCK];

/// Ports of 8 Gbit/s, so that a byte takes a nanosecond.
fn cluster(nodes: u32) -> ClusterModel {
    let mut cluster = ClusterModel::new(nodes, 8_000, 1_000);
    cluster.nic.operation_ns = 100;
    cluster.nic.notice_bytes = 4 << 10;
    cluster.host = HostModel {
        post_ns: 150,
        completion_ns: 250,
        wake_ns: 3_000,
        completion: WaitMode::Event,
        ..HostModel::default()
    };
    cluster
}

/// Sends three messages, each after the delivery of the one before; returns their latencies in ns.
fn latencies(cluster: ClusterModel, algorithm: &str, slow: Option<u32>) -> Vec<u128> {
    // Far enough apart that each has the network to itself.
    let messages = SIZES.iter().zip(0..).map(|(&bytes, number)| ScenarioMessage { bytes, at_us: number * 1_000_000 });
    let group = ScenarioGroup {
        members: Vec::new(),
        algorithm: algorithm.to_owned(),
        block_size: BLOCK,
        messages: messages.collect(),
        delivery: rdmc::Delivery::Immediate,
        ring: None,
    };
    let events = slow.map(|node| ScenarioEvent::SlowDown { at_us: 0, node, times: 3 });
    let scenario = Scenario {
        cluster,
        groups: vec![group],
        events: events.into_iter().collect(),
        limit_s: 3600,
        full_payload: true,
    };
    let played = scenario.play(1, false).expect("the scenario can be played");
    let group = &played.groups[0];
    assert_eq!(group.closed.as_ref().err(), None);
    group.messages.iter().map(|message| message.latency().expect("it was delivered").as_nanos()).collect()
}

#[test]
fn virtual_times_are_those_that_were_reviewed() {
    let mut table = String::from("                                        1 byte  3 blocks + 1   32 blocks (ns)\n");
    let mut row = |what: &str, times: Vec<u128>| {
        writeln!(table, "{what:<34}{:>12}{:>14}{:>12}", times[0], times[1], times[2]).expect("a string takes it");
    };
    for algorithm in ["sequential", "binomial-tree", "chain", "binomial-pipeline", "circulant"] {
        for nodes in 2..=17 {
            row(&format!("{algorithm}, {nodes}"), latencies(cluster(nodes), algorithm, None));
        }
    }
    for algorithm in ["binomial-pipeline", "hybrid(chain)", "hybrid(binomial-pipeline)", "hybrid(cascade)"] {
        let mut racks = cluster(16);
        racks.racks = Some(RackModel { size: 4, uplink_mbps: 8_000, latency_ns: 500, rack_of: Vec::new() });
        row(&format!("{algorithm}, 4 racks of 4"), latencies(racks, algorithm, None));
    }
    for algorithm in ["chain", "binomial-pipeline", "circulant"] {
        row(&format!("{algorithm}, 9, node 4 slow"), latencies(cluster(9), algorithm, Some(4)));
    }
    insta::assert_snapshot!(table);
}

/// A seed gives the same events at the same nanoseconds, independent of threads and hash maps.
#[test]
fn a_seed_gives_the_same_history_every_time() {
    let history = |seed| {
        let mut lossy = cluster(9);
        lossy.control.loss = 0.2;
        lossy.host.delays = Some(rdmc_sim::DelayModel {
            probability: 0.1,
            mean_ns: 20_000.0,
            distribution: rdmc_sim::Distribution::Exponential,
        });
        let group = |algorithm: &str| ScenarioGroup {
            members: Vec::new(),
            algorithm: algorithm.to_owned(),
            block_size: BLOCK,
            messages: vec![ScenarioMessage { bytes: 20 * BLOCK, at_us: 0 }; 3],
            delivery: rdmc::Delivery::Immediate,
            ring: None,
        };
        let groups = vec![group("binomial-pipeline"), group("circulant"), group("chain")];
        let events = vec![ScenarioEvent::Kill { at_us: 9_000, node: 5 }];
        let scenario = Scenario { cluster: lossy, groups, events, limit_s: 3600, full_payload: true };
        let played = scenario.play(seed, true).expect("the scenario can be played");
        assert!(played.groups.iter().all(|group| group.closed.is_err()), "the death of a member ends its groups");
        (played.digest, rdmc_sim::to_trace(&played.recorded))
    };
    let first = history(7);
    for _ in 0..4 {
        // On a thread of its own, with another random state of hash maps.
        let again = std::thread::spawn(move || history(7)).join().expect("it does not panic");
        assert!(again == first, "the same seed gave another history");
    }
    assert_ne!(history(8).0, first.0);
}
