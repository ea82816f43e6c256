//! Sessions of `rdmc-wan` over long paths: rates, loss, jitter, policers, adapters with few reads.

use std::time::Duration;

use rdmc_sim::experiments::{LongPath, Pace};
use rdmc_sim::{PathModel, PolicerModel};
use rdmc_wan::{SessionConfig, SlabVerb};

fn path(round_trip_ms: u64) -> LongPath {
    LongPath::new(Duration::from_millis(round_trip_ms))
}

/// Returns the rate after the rings have grown, in Mbit/s.
fn rate(path: &LongPath) -> f64 {
    path.rate_after(Duration::from_secs(4), Duration::from_secs(4)).expect("the session lasts")
}

fn with_loss(loss: f64, round_trip_ms: u64) -> LongPath {
    LongPath { path: Some(PathModel { loss, ..PathModel::default() }), ..path(round_trip_ms) }
}

/// A transfer also pays for the first announcement, the first read, and the growth of its rings.
#[test]
fn a_gigabyte_takes_its_time_on_the_path_and_a_few_round_trips() {
    for round_trip_ms in [0, 10, 60, 120] {
        let mbps = path(round_trip_ms).transfer(1_000_000_000).expect("it arrives");
        println!("1 GB, {round_trip_ms} ms: {mbps:.0} Mbit/s");
        let (wire_ms, took_ms) = (800.0, 8e6 / mbps);
        let most_ms = wire_ms + (ROUND_TRIPS * round_trip_ms + 1) as f64;
        assert!((wire_ms..most_ms).contains(&took_ms), "{round_trip_ms} ms: {took_ms:.1} ms");
    }
}

#[test]
fn a_session_fills_a_path_of_any_length() {
    for round_trip_ms in [0, 10, 60, 120] {
        let mbps = rate(&path(round_trip_ms));
        println!("{round_trip_ms} ms: {mbps:.0} Mbit/s");
        assert!((9_900.0..10_010.0).contains(&mbps), "{round_trip_ms} ms: {mbps}");
    }
}

/// The bytes of reads are what their adapter has under way at once: so much in a round trip.
#[test]
fn an_adapter_with_few_reads_limits_a_long_path() {
    for (slab_bytes, reads_max) in [(1 << 20, 16), (4 << 20, 8)] {
        let mbps = rate(&LongPath { reads_max, slab_bytes, ..path(120) });
        let limit = (slab_bytes * u64::from(reads_max)) as f64 * 8e-6 / 0.12;
        assert!((0.85 * limit..=1.01 * limit).contains(&mbps), "{slab_bytes} x {reads_max}: {mbps} of {limit}");
    }
}

/// A loss costs a round trip. So with p the loss of a packet of s bits, each packet takes s/rate + p·round trip.
#[test]
fn a_loss_costs_a_round_trip() {
    for (loss, round_trip_ms) in [(1e-5, 60), (1e-4, 10), (1e-4, 60)] {
        let mbps = rate(&with_loss(loss, round_trip_ms));
        let packet_bits = 8.0 * 4096.0;
        let formula = packet_bits / (packet_bits / 10_000.0 + loss * round_trip_ms as f64 * 1e3);
        println!("{round_trip_ms} ms, loss {loss}: {mbps:.0} Mbit/s, formula {formula:.0}");
        // A few dozen losses.
        assert!((0.75..1.25).contains(&(mbps / formula)), "{round_trip_ms} ms, {loss}: {mbps}, not {formula}");
    }
}

/// Both directions, and a slab that is alone: its last packet is followed by nothing, and shows its loss by a timeout.
#[test]
fn the_last_packet_is_sent_again_after_a_timeout() {
    let resend = |resend_ms: u64| {
        let model = PathModel { loss: 0.5, resend_ns: resend_ms * 1_000_000, ..PathModel::default() };
        LongPath { path: Some(model), ..path(1) }.transfer(1 << 18).expect("it arrives")
    };
    assert!(resend(10) > 1.5 * resend(1_000), "{} {}", resend(10), resend(1_000));
}

#[test]
fn jitter_slows_nothing_and_mixes_nothing_up() {
    let jitter = PathModel { jitter_ns: 100_000, ..PathModel::default() };
    // Slabs are checked, and a session whose slabs come out of order fails.
    let mbps = rate(&LongPath { path: Some(jitter), ..path(60) });
    assert!(mbps > 9_900.0, "{mbps}");
}

#[test]
fn a_paced_session_passes_a_policer_that_stalls_others() {
    let policer = Some(PolicerModel { mbps: 5_000, burst_bytes: 1_000_000 });
    let policed = LongPath { path: Some(PathModel { policer, ..PathModel::default() }), ..path(60) };
    let paced =
        rate(&LongPath { pace: Pace::Given { bytes_per_second: 625_000_000, burst: 256 << 10 }, ..policed.clone() });
    assert!((4_900.0..5_010.0).contains(&paced), "{paced}");
    // A burst passes, with what fills the bucket meanwhile, in each round trip.
    let unpaced = rate(&policed);
    let bursts = 2.0 * 1_000_000.0 * 8e-6 / 0.06;
    assert!((0.8 * bursts..1.2 * bursts).contains(&unpaced), "{unpaced}, not {bursts}");
}

/// Without it, the policer admits a burst in each round trip, and each lost packet costs a round trip of everything.
#[test]
fn a_session_that_finds_the_rate_keeps_it_behind_policers_and_when_packets_are_lost() {
    let finding = LongPath {
        pace: Pace::Found,
        streams: SessionConfig::STREAMS_OF_DISTANT,
        receive_by: SlabVerb::Write,
        ..path(120)
    };
    let behind = |mbps| {
        let policer = Some(PolicerModel { mbps, burst_bytes: 1_000_000 });
        LongPath { path: Some(PathModel { policer, ..PathModel::default() }), ..finding.clone() }
    };
    let losing = LongPath { path: with_loss(1e-5, 120).path, ..finding.clone() };
    for (path, least, most) in [
        (&finding, 9_990.0, 10_010.0),
        (&losing, 9_000.0, 10_000.0),
        (&behind(5_000), 3_000.0, 5_010.0),
        (&behind(2_000), 1_200.0, 2_010.0),
    ] {
        let mbps = path.rate_after(Duration::from_secs(5), Duration::from_secs(35)).expect("the session lasts");
        println!("{:?}: {mbps:.0} Mbit/s", path.path);
        assert!((least..most).contains(&mbps), "{mbps} Mbit/s of {path:?}");
    }
}

#[test]
fn a_seed_decides_which_packets_are_lost() {
    let transfer = |seed| LongPath { seed, ..with_loss(1e-4, 10) }.transfer(100_000_000).expect("it arrives");
    assert_eq!(transfer(1).to_bits(), transfer(1).to_bits());
    assert_ne!(transfer(1).to_bits(), transfer(2).to_bits());
}

/// Most round trips that a gigabyte takes beyond its time on the path.
const ROUND_TRIPS: u64 = 20;
