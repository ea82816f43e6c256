//! Paths that lose packets, spread their delays, or are policed.
//!
//! Queue pairs retransmit as adapters do (go-back-N): the receiver takes packets in order only, so all packets behind a
//! lost one are sent again. The sender learns of a loss a round trip after it, by the packets that follow. Nothing
//! follows the last packet of the last message, so its loss shows only by a timeout.
//!
//! Packets behind a lost one are not modelled: the sender pauses until it learns of the loss. Others may use the ports
//! meanwhile, and a policer's bucket fills. Acknowledgements and requests to repeat are not lost. No number of losses
//! breaks a connection.

use std::collections::btree_map::Entry;

use serde::{Deserialize, Serialize};

use crate::random::Random;
use crate::simulation::{NodeIndex, lock};
use crate::world::WorldShared;

/// The conditions of a path, for queue pairs. Control connections have [their own](crate::ControlModel).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PathModel {
    /// Probability that a packet is lost, at most 0.9.
    pub loss: f64,
    /// Bytes of a packet on the network.
    pub packet_bytes: u64,
    /// Time after which the last packet of the last message is sent again if it was lost, in ns; at least a round trip
    /// is waited.
    pub resend_ns: u64,
    /// Most time that a message takes beyond the latency, evenly distributed, in ns. Messages of a queue pair keep
    /// their order.
    pub jitter_ns: u64,
    /// Drops packets beyond a rate; `None` for no policer.
    pub policer: Option<PolicerModel>,
}

impl Default for PathModel {
    /// No loss, packets of 4096 bytes, a timeout of 67 ms, no jitter, no policer.
    ///
    /// The timeout is that of adapters whose local ACK timeout is 14.
    fn default() -> Self {
        Self { loss: 0.0, packet_bytes: 4096, resend_ns: 67_000_000, jitter_ns: 0, policer: None }
    }
}

/// A policer: a bucket that is filled at a rate. A packet that finds too little in it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicerModel {
    /// The rate, in Mbit/s.
    pub mbps: u64,
    /// Bytes of the bucket.
    pub burst_bytes: u64,
}

impl PathModel {
    /// Checks the parameters.
    ///
    /// # Errors
    /// The first invalid key, and its valid values.
    pub fn check(&self) -> Result<(), String> {
        let must = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
        must((0.0..=LOSS_MAX).contains(&self.loss), "path.loss must be from 0 to 0.9")?;
        must((1..=1 << 20).contains(&self.packet_bytes), "path.packet_bytes must be from 1 to 1048576, 1 MiB")?;
        must(self.resend_ns <= NS_MAX, "path.resend_ns must be at most 60000000000, a minute")?;
        must(self.jitter_ns <= NS_MAX, "path.jitter_ns must be at most 60000000000, a minute")?;
        if let Some(PolicerModel { mbps, burst_bytes }) = self.policer {
            let rates = 1..=crate::model::MBPS_MAX;
            must(rates.contains(&mbps), "path.policer.mbps must be from 1 to 10000000")?;
            let bursts = self.packet_bytes..=1 << 40;
            must(bursts.contains(&burst_bytes), "path.policer.burst_bytes must be from a packet to 1 TiB")?;
        }
        Ok(())
    }
}

/// One direction of a path.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) model: PathModel,
    /// What the policer lets pass at `since_ns`, in bits times nanoseconds per second. Below zero while a message that
    /// passes is on the way.
    tokens: i128,
    since_ns: u64,
}

/// The part of a message that leaves without a loss, or with one at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    /// Bytes that leave.
    pub(crate) bytes: u64,
    /// Bytes of them that the receiver takes; `None` if it takes the whole message.
    pub(crate) kept: Option<u64>,
    /// Whether the last packet of the message was lost.
    pub(crate) at_end: bool,
}

impl Stage {
    /// Returns the stage of a message that loses nothing.
    pub(crate) fn whole(bytes: u64) -> Self {
        Self { bytes, kept: None, at_end: false }
    }
}

impl Path {
    pub(crate) fn new(model: PathModel) -> Self {
        let burst = model.policer.map_or(0, |policer| i128::from(policer.burst_bytes) * BIT_NS_PER_BYTE);
        Self { model, tokens: burst, since_ns: 0 }
    }

    /// Decides how far a message of `bytes` comes that leaves now at `bits_per_second`.
    pub(crate) fn stage(&mut self, bytes: u64, bits_per_second: u64, now_ns: u64, random: &mut Random) -> Stage {
        let packet = self.model.packet_bytes;
        let packets = bytes.div_ceil(packet).max(1);
        let passing = self.passing(bytes, bits_per_second, now_ns);
        let lost = passing.min(self.before_loss(random));
        let kept = lost.saturating_mul(packet).min(bytes);
        if self.model.policer.is_some() {
            self.tokens -= i128::from(kept) * BIT_NS_PER_BYTE;
        }
        if lost >= packets {
            return Stage::whole(bytes);
        }
        Stage { bytes: (kept + packet).min(bytes), kept: Some(kept), at_end: lost + 1 == packets }
    }

    /// Counts the packets that the policer lets pass before it drops one.
    fn passing(&mut self, bytes: u64, bits_per_second: u64, now_ns: u64) -> u64 {
        let Some(policer) = self.model.policer else { return u64::MAX };
        let rate = i128::from(policer.mbps) * 1_000_000;
        let burst = i128::from(policer.burst_bytes) * BIT_NS_PER_BYTE;
        self.tokens = burst.min(self.tokens + rate * i128::from(now_ns - self.since_ns));
        self.since_ns = now_ns;
        // The bucket is filled while the message leaves.
        let excess = i128::from(bits_per_second) - rate;
        let passes = self.tokens.max(0) / BIT_NS_PER_BYTE * i128::from(bits_per_second) / excess.max(1);
        if excess <= 0 || passes >= i128::from(bytes) {
            return u64::MAX;
        }
        u64::try_from(passes).unwrap_or(u64::MAX) / self.model.packet_bytes
    }

    /// Draws the number of packets before the next loss.
    fn before_loss(&self, random: &mut Random) -> u64 {
        if self.model.loss == 0.0 {
            return u64::MAX;
        }
        let packets = libm::log(1.0 - random.unit()) / libm::log(1.0 - self.model.loss);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a float that does not fit saturates"
        )]
        let packets = packets as u64;
        packets
    }
}

impl WorldShared {
    /// Decides how far a message comes that leaves now from one node to another.
    pub(crate) fn stage(&self, (from, to): (NodeIndex, NodeIndex), bytes: u64) -> Stage {
        let rate = self.flows.rate_of(&self.path(from, to));
        let now_ns = self.executor.now_ns();
        self.with_path((from, to), |path, random| path.stage(bytes, rate, now_ns, random))
            .unwrap_or(Stage::whole(bytes))
    }

    /// Returns the pause of a sender after a loss. `followed` tells whether packets follow the lost one.
    pub(crate) fn pause_ns(&self, (from, to): (NodeIndex, NodeIndex), followed: bool) -> u64 {
        let round_trip_ns = self.latency_ns(from, to) + self.latency_ns(to, from);
        let resend_ns = self.with_path((from, to), |path, _| path.model.resend_ns).unwrap_or(0);
        if followed { round_trip_ns } else { round_trip_ns.max(resend_ns) }
    }

    /// Draws the time of a message from one node to another.
    pub(crate) fn flight_ns(&self, (from, to): (NodeIndex, NodeIndex)) -> u64 {
        let jitter_ns = self.with_path((from, to), |path, random| match path.model.jitter_ns {
            0 => 0,
            most => random.within(0..=most),
        });
        self.latency_ns(from, to) + jitter_ns.unwrap_or(0)
    }

    /// Looks at a direction of a path, unless it is one without conditions.
    fn with_path<T>(&self, ends: (NodeIndex, NodeIndex), look: impl FnOnce(&mut Path, &mut Random) -> T) -> Option<T> {
        if ends.0 == ends.1 {
            return None;
        }
        let mut paths = lock(&self.paths);
        let path = match paths.entry(ends) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(Path::new(self.model.path?)),
        };
        Some(look(path, &mut lock(&self.random)))
    }
}

/// Highest probability of a loss.
const LOSS_MAX: f64 = 0.9;
/// Limit of times, in ns.
const NS_MAX: u64 = 60_000_000_000;
/// A byte, in bits times nanoseconds per second.
const BIT_NS_PER_BYTE: i128 = 8_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn policed(mbps: u64, burst_bytes: u64) -> Path {
        Path::new(PathModel {
            packet_bytes: 1000,
            policer: Some(PolicerModel { mbps, burst_bytes }),
            ..PathModel::default()
        })
    }

    #[test]
    fn a_policer_passes_its_burst_and_what_fills_it_meanwhile() {
        let mut random = Random::new(1);
        let mut path = policed(4_000, 100_000);
        // At twice the rate, the bucket loses a byte for two that pass.
        let stage = path.stage(1_000_000, 8_000_000_000, 0, &mut random);
        assert_eq!(stage, Stage { bytes: 201_000, kept: Some(200_000), at_end: false });
        // 200 µs later the bytes have left and the bucket is empty; 100 µs later it has half of its burst.
        let stage = path.stage(1_000_000, 8_000_000_000, 300_000, &mut random);
        assert_eq!(stage, Stage { bytes: 101_000, kept: Some(100_000), at_end: false });
    }

    #[test]
    fn what_keeps_to_the_rate_of_a_policer_passes() {
        let mut random = Random::new(1);
        let mut path = policed(4_000, 100_000);
        assert_eq!(path.stage(1 << 30, 4_000_000_000, 0, &mut random), Stage::whole(1 << 30));
        let mut path = policed(4_000, 100_000);
        for message in 0..100 {
            // 100,000 bytes each 200 µs are 4 Gbit/s.
            let stage = path.stage(100_000, 8_000_000_000, message * 200_000, &mut random);
            assert_eq!(stage, Stage::whole(100_000), "message {message}");
        }
    }

    #[test]
    fn packets_are_lost_as_often_as_the_model_says() {
        let mut random = Random::new(1);
        let mut path = Path::new(PathModel { loss: 0.01, packet_bytes: 1000, ..PathModel::default() });
        let (mut rest, mut losses) = (100_000_000, 0);
        loop {
            let stage = path.stage(rest, 1, 0, &mut random);
            let Some(kept) = stage.kept else { break };
            (rest, losses) = (rest - kept, losses + 1);
        }
        // A lost packet is sent again, and may be lost again.
        assert!((930..=1090).contains(&losses), "{losses} of 100000 packets");
    }
}
