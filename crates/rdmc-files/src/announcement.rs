//! The announcement that an invitation carries. A receiver decides by it whether to take part.

use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;
use rdmc::{Algorithm, GroupSpec, NodeId, Rank};
use serde::{Deserialize, Serialize};

use crate::algorithm::WireAlgorithm;
use crate::error::{Context, Problem};
use crate::manifest::{self, Manifest};
use crate::units::Units;

/// A transfer in numbers, and how its blocks will travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) plans: Plans,
    pub(crate) manifest_len: u64,
    /// The encoded manifest, if it is so short that every receiver gets it with the invitation.
    pub(crate) manifest: Option<Vec<u8>>,
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    /// Length of the longest message of the files.
    pub(crate) unit_bytes_max: u64,
    pub(crate) on_failure: OnFailure,
    /// Whether receivers are to measure the round trips between them, so that the sender finds racks.
    pub(crate) asks_round_trips: bool,
    /// Bytes of files that a member sends in a second at most.
    pub(crate) rate_max: Option<NonZeroU64>,
}

/// How blocks travel on each medium. Which medium it is becomes known only when all receivers have accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plans {
    pub(crate) network: WirePlan,
    pub(crate) host: WirePlan,
}

/// How blocks travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WirePlan {
    pub(crate) algorithm: WireAlgorithm,
    /// Size of a block in bytes.
    pub(crate) block_size: u32,
}

/// What the members share, as far as the plan depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// A network on which each member has a port.
    Network,
    /// The memory and the processors of one host.
    Host,
}

impl Medium {
    pub(crate) const ALL: [Self; 2] = [Self::Network, Self::Host];
}

impl Plans {
    /// Makes blocks at most so long.
    pub(crate) fn shorten_blocks(&mut self, bytes: u32) {
        for plan in [&mut self.network, &mut self.host] {
            plan.block_size = plan.block_size.min(bytes);
        }
    }

    /// Returns the plan for a medium.
    pub(crate) fn on(&self, medium: Medium) -> &WirePlan {
        match medium {
            Medium::Network => &self.network,
            Medium::Host => &self.host,
        }
    }
}

impl WirePlan {
    pub(crate) fn new(algorithm: &Algorithm, block_size: u32) -> Self {
        Self { algorithm: algorithm.into(), block_size }
    }
}

/// What happens to a transfer when a member fails after all have agreed to the list of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnFailure {
    /// The survivors complete what was interrupted from the blocks that they hold between them, and go on.
    Repair,
    /// The transfer ends for all.
    Fail,
}

impl OnFailure {
    /// Every variant.
    pub const ALL: [Self; 2] = [Self::Repair, Self::Fail];
}

impl Announcement {
    /// Describes the transfer of a manifest, which travels apart. The survivors of a failure go on by default.
    pub(crate) fn new(plans: Plans, manifest: &Manifest, manifest_len: u64) -> Self {
        let (files, bytes) = manifest.totals();
        let unit_bytes_max = Units::of(manifest).longest();
        let on_failure = OnFailure::Repair;
        let (asks_round_trips, rate_max) = (false, None);
        Self {
            plans,
            manifest_len,
            manifest: None,
            files,
            bytes,
            unit_bytes_max,
            on_failure,
            asks_round_trips,
            rate_max,
        }
    }

    /// Adds the encoded manifest if it is short enough to be sent to so many receivers with their invitations.
    pub(crate) fn with_short_manifest(self, encoded: &[u8], receivers: usize) -> Self {
        let is_short = encoded.len().saturating_mul(receivers) <= INVITED_BYTES_MAX;
        Self { manifest: is_short.then(|| encoded.to_vec()), ..self }
    }

    /// Encodes the announcement: its version first, then its fields.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(postcard::to_stdvec(self).expect("plain data in memory is always encoded"));
        bytes
    }

    /// Decodes an announcement of this version, and checks its bounds.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Problem> {
        let (version, rest) = bytes.split_first_chunk().ok_or_else(|| Problem::local(NO_ANNOUNCEMENT))?;
        let version = u16::from_le_bytes(*version);
        if version != VERSION {
            return Err(Problem::local(format!(
                "this receiver speaks version {VERSION} of the file transfer, not {version}"
            )));
        }
        let announcement: Self = postcard::from_bytes(rest).context(NO_ANNOUNCEMENT)?;
        for medium in Medium::ALL {
            let block_size = announcement.plans.on(medium).block_size;
            if !(1..=GroupSpec::BLOCK_SIZE_MAX).contains(&block_size) {
                return Err(Problem::local(format!("a block of {block_size} bytes is not possible")));
            }
        }
        if announcement.manifest_len > manifest::LEN_MAX {
            return Err(Problem::local("the list of files is too long"));
        }
        Ok(announcement)
    }

    /// Changes the plan for a network to the algorithm that the sender has concluded.
    pub(crate) fn concluded(mut self, conclusion: &Conclusion) -> Self {
        if let Some(algorithm) = &conclusion.algorithm {
            self.plans.network.algorithm = algorithm.clone();
        }
        self
    }

    /// Makes the groups of the transfer on a medium. Sender and receivers must make the same ones.
    pub(crate) fn groups(&self, nodes: Vec<NodeId>, medium: Medium) -> Result<FileGroups, Problem> {
        let plan = self.plans.on(medium);
        let algorithm = plan.algorithm.resolve(nodes.len())?;
        let spec = |id| GroupSpec::new(id, nodes.clone()).algorithm(algorithm.clone()).block_size(plan.block_size);
        // A failure before the first file ends the transfer, so that no survivor goes on.
        let manifest = spec(1).recoverable(false);
        let rate_max = self.rate_max.map(NonZeroU64::get);
        let files = spec(2).recoverable(self.on_failure == OnFailure::Repair).rate_max(rate_max);
        Ok(FileGroups { manifest, files })
    }

    /// Decodes a manifest, and checks that it is the announced one.
    pub(crate) fn decode_manifest(&self, encoded: &[u8]) -> Result<Manifest, Problem> {
        let manifest = Manifest::decode(encoded).context("the list of files is malformed")?;
        let (files, bytes) = manifest.totals();
        let found = (encoded.len() as u64, files, bytes, Units::of(&manifest).longest());
        if found != (self.manifest_len, self.files, self.bytes, self.unit_bytes_max) {
            return Err(Problem::local("the list of files is not what the invitation announced"));
        }
        Ok(manifest)
    }
}

/// The reply of a receiver that accepts. It is encoded as one byte for the parts, and one for each round trip.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Whether it has parts of files from interrupted transfers.
    pub(crate) has_parts: bool,
    /// The round trips to the next receivers, in their order: 0 if unknown, else v for 2^((v − 1)/8) µs.
    round_trips: Vec<u8>,
}

impl Reply {
    /// Replies with the round trips to the receivers that come next.
    pub(crate) fn new(has_parts: bool, round_trips: impl IntoIterator<Item = Option<Duration>>) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is clamped")]
        let encoded = |round_trip: Duration| {
            let octaves = (round_trip.as_secs_f64() / ROUND_TRIP_UNIT.as_secs_f64()).max(1.0).log2();
            (1.0 + ROUND_TRIPS_IN_OCTAVE * octaves).round().min(255.0) as u8
        };
        Self { has_parts, round_trips: round_trips.into_iter().map(|known| known.map_or(0, encoded)).collect() }
    }

    /// Returns the round trip to the receiver that comes `nth` after this one, as far as it is known.
    pub(crate) fn round_trip(&self, nth: u32) -> Option<Duration> {
        let encoded = *self.round_trips.get(Rank(nth).index()).filter(|encoded| **encoded > 0)?;
        Some(ROUND_TRIP_UNIT.mul_f64(((f64::from(encoded) - 1.0) / ROUND_TRIPS_IN_OCTAVE).exp2()))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.has_parts)];
        bytes.extend(&self.round_trips);
        bytes
    }

    /// Decodes a reply. An empty one says that there are no parts; bytes beyond the last receiver are ignored.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let (has_parts, round_trips) = bytes.split_first().unwrap_or((&0, &[]));
        Self { has_parts: *has_parts != 0, round_trips: round_trips.to_vec() }
    }
}

/// What the sender concludes from all replies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conclusion {
    /// Whether only missing blocks are to travel, because some receiver has parts of files.
    pub(crate) delta: bool,
    /// The algorithm for a network, if it is not the announced one.
    pub(crate) algorithm: Option<WireAlgorithm>,
}

impl Conclusion {
    pub(crate) fn encode(&self) -> Bytes {
        postcard::to_stdvec(self).expect("plain data in memory is always encoded").into()
    }

    /// Decodes a conclusion for a group of `members`, and checks that there is such an algorithm.
    pub(crate) fn decode(bytes: &[u8], members: usize) -> Result<Self, Problem> {
        let conclusion: Self = postcard::from_bytes(bytes).context("the sender's conclusion is malformed")?;
        if let Some(algorithm) = &conclusion.algorithm {
            algorithm.resolve(members).context("the sender's conclusion cannot be followed")?;
        }
        Ok(conclusion)
    }
}

/// The groups of one transfer.
///
/// Receivers get a short manifest with their invitations, and accept only if they agree to it. A longer one travels in
/// a group of its own. The close of that group tells the sender that every receiver agrees, before the first byte of a
/// file is sent. A receiver that has found a problem refuses a message, or the end of the group.
pub(crate) struct FileGroups {
    pub(crate) manifest: GroupSpec,
    pub(crate) files: GroupSpec,
}

/// Most bytes of a list of files that travel in invitations, to all receivers together.
const INVITED_BYTES_MAX: usize = 256 << 10;
/// Greatest number of messages under way at once in the group of the files; fewer than a group queues.
pub(crate) const UNDER_WAY_MAX: usize = 8;
/// Reason for refusing a group that ends too soon.
pub(crate) const CLOSED_EARLY: &str = "the sender closed the group before everything was sent";
/// Reason for declining an invitation that announces something else.
const NO_ANNOUNCEMENT: &str = "the invitation announces no file transfer";
/// Version of the file transfer; changes when the meaning of its messages does.
const VERSION: u16 = 9;
/// The unit of round trips in replies, and how many steps double one.
const ROUND_TRIP_UNIT: Duration = Duration::from_micros(1);
const ROUND_TRIPS_IN_OCTAVE: f64 = 8.0;

/// Length of a file's digest in bytes. The digest follows the file as a message of its own.
pub(crate) const DIGEST_LEN: usize = blake3::OUT_LEN;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rdmc::{Hybrid, Invitation, Racks, Spine};

    use super::*;

    fn told() -> Announcement {
        let (network, host) = (WirePlan::new(&Algorithm::Chain, 1 << 20), WirePlan::new(&Algorithm::Fanout, 1 << 18));
        Announcement::new(Plans { network, host }, &Manifest::default(), 1)
    }

    #[test]
    fn an_announcement_is_understood_by_the_same_version_only() {
        let told = Announcement { on_failure: OnFailure::Fail, ..told() };
        let mut bytes = told.encode();
        assert_eq!(Announcement::decode(&bytes).unwrap(), told);
        bytes[0] ^= 1;
        let error = Announcement::decode(&bytes).unwrap_err().reason();
        assert!(error.contains(&format!("not {}", VERSION ^ 1)), "{error}");
    }

    #[test]
    fn only_the_files_are_sent_in_a_group_that_goes_on_and_only_if_that_is_wanted() {
        let nodes = || vec![NodeId(0), NodeId(1)];
        let groups = |on_failure| Announcement { on_failure, ..told() }.groups(nodes(), Medium::Host).unwrap();
        let (repair, fail) = (groups(OnFailure::Repair), groups(OnFailure::Fail));
        assert_eq!(repair.manifest, fail.manifest);
        assert_eq!(repair.files.clone().recoverable(false), fail.files);
        assert_ne!(repair.files, fail.files);
        // Every member keeps the bound.
        let bounded = Announcement { rate_max: NonZeroU64::new(7), ..told() }.groups(nodes(), Medium::Host).unwrap();
        assert_eq!((bounded.files, bounded.manifest), (repair.files.rate_max(7), repair.manifest));
    }

    #[test]
    fn round_trips_are_told_to_a_tenth() {
        let told = [Some(1), Some(37), None, Some(24_000), Some(60_000_000)].map(|us| us.map(Duration::from_micros));
        let reply = Reply::decode(&Reply::new(true, told).encode());
        assert!(reply.has_parts);
        for (nth, told) in (0..).zip(told) {
            let ratio = reply.round_trip(nth).zip(told).map(|(got, told)| got.as_secs_f64() / told.as_secs_f64());
            assert_eq!(ratio.is_some(), told.is_some());
            assert!(ratio.is_none_or(|ratio| (0.95..1.05).contains(&ratio)), "{ratio:?}");
        }
        assert_eq!(reply.round_trip(5), None);
        assert_eq!(Reply::decode(&[]), Reply::new(false, []));
        // A century is as long as an hour.
        assert!(Reply::new(false, [Some(Duration::MAX)]).round_trip(0).is_some_and(|it| it.as_secs() > 3000));
    }

    #[test]
    fn a_conclusion_changes_the_plan_for_a_network_and_must_suit_the_group() {
        let racks = Racks::from_assignment(&[0, 1, 0, 1]).unwrap();
        let by_racks: Algorithm = Hybrid::new(racks, Spine::TwoTree).into();
        let conclusion = Conclusion { delta: true, algorithm: Some((&by_racks).into()) };
        assert_eq!(Conclusion::decode(&conclusion.encode(), 4).unwrap(), conclusion);
        assert!(Conclusion::decode(&conclusion.encode(), 5).is_err());
        assert!(Conclusion::decode(&[7], 4).is_err());
        let changed = told().concluded(&conclusion);
        assert_eq!(changed.plans.network, WirePlan::new(&by_racks, 1 << 20));
        assert_eq!(changed.plans.host, told().plans.host);
        assert_eq!(told().concluded(&Conclusion::default()), told());
    }

    #[test]
    fn the_conclusion_for_the_most_receivers_is_short_enough() {
        let racks = Racks::from_assignment(&(0..128).collect::<Vec<_>>()).unwrap();
        let by_racks: Algorithm = Hybrid::new(racks, Spine::TwoTree).into();
        let conclusion = Conclusion { delta: true, algorithm: Some((&by_racks).into()) };
        assert!(conclusion.encode().len() <= Invitation::REPLY_LEN_MAX);
        assert!(Reply::new(true, vec![None; 127]).encode().len() <= Invitation::REPLY_LEN_MAX);
    }

    #[test]
    fn both_groups_are_made_by_the_plan_for_the_medium() {
        let nodes = || vec![NodeId(0), NodeId(1)];
        let by = |algorithm, block_size| GroupSpec::new(1, nodes()).algorithm(algorithm).block_size(block_size);
        for (medium, spec) in
            [(Medium::Network, by(Algorithm::Chain, 1 << 20)), (Medium::Host, by(Algorithm::Fanout, 1 << 18))]
        {
            assert_eq!(told().groups(nodes(), medium).unwrap().manifest, spec.recoverable(false));
        }
    }

    #[test]
    fn a_short_manifest_travels_with_the_invitation_and_must_be_the_announced_one() {
        let (manifest, _) = Manifest::of_sizes(&[3, 5]);
        let encoded = manifest.encode();
        let told = Announcement::new(told().plans, &manifest, encoded.len() as u64);
        let with = |receivers| told.clone().with_short_manifest(&encoded, receivers).manifest;
        assert_eq!(with(INVITED_BYTES_MAX / encoded.len()).as_ref(), Some(&encoded));
        assert_eq!(with(INVITED_BYTES_MAX / encoded.len() + 1), None);
        assert_eq!(told.decode_manifest(&encoded).unwrap().totals(), (2, 8));
        let (other, _) = Manifest::of_sizes(&[3, 6]);
        let error = told.decode_manifest(&other.encode()).unwrap_err().reason();
        assert!(error.contains("not what the invitation announced"), "{error}");
    }

    #[test]
    fn a_block_that_is_not_possible_is_refused_on_either_medium() {
        for (network, host) in [(0, 1), (1, 0), (GroupSpec::BLOCK_SIZE_MAX + 1, 1), (1, u32::MAX)] {
            let mut wrong = told();
            (wrong.plans.network.block_size, wrong.plans.host.block_size) = (network, host);
            assert!(Announcement::decode(&wrong.encode()).is_err());
        }
    }

    proptest! {
        #[test]
        fn invitations_from_anywhere_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            if let [version, rest, ..] = bytes.as_mut_slice() {
                [*version, *rest] = VERSION.to_le_bytes();
            }
            if let Ok(told) = Announcement::decode(&bytes) {
                for medium in Medium::ALL {
                    let _ = told.groups(vec![NodeId(0), NodeId(1)], medium);
                }
            }
        }
    }
}
