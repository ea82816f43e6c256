//! Specifications in files and messages of applications.

use std::time::Duration;

use rdmc_schedule::{Algorithm, BlockCount, Schedule, ScheduleError};
use serde::{Deserialize, Deserializer, Serialize};

use super::{Delivery, DeliveryMode, EVICT_MIN, GroupSpec, InvalidSpec, SlowReceivers};
use crate::id::{GroupId, NodeId};
use crate::table::RingShape;

/// The fields of a [`GroupSpec`] as they are written. All but the first two have defaults.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename = "GroupSpec", deny_unknown_fields)]
pub(super) struct WrittenSpec {
    id: GroupId,
    members: Vec<NodeId>,
    #[serde(default, deserialize_with = "algorithm")]
    algorithm: Algorithm,
    #[serde(default = "block_size")]
    block_size: u64,
    #[serde(default)]
    check_blocks: Option<bool>,
    #[serde(default = "formation_limit_ms")]
    formation_limit_ms: u64,
    #[serde(default = "recoverable")]
    recoverable: bool,
    #[serde(default, deserialize_with = "slow_receivers")]
    slow_receivers: SlowReceivers,
    #[serde(default)]
    delta: bool,
    #[serde(default, deserialize_with = "delivery_mode")]
    delivery_mode: DeliveryMode,
    #[serde(default, deserialize_with = "delivery")]
    delivery: Delivery,
    #[serde(default)]
    ring: Option<RingShape>,
    #[serde(default)]
    headers: bool,
    #[serde(default)]
    share: Option<u32>,
    #[serde(default)]
    rate_max: Option<u64>,
}

impl From<GroupSpec> for WrittenSpec {
    fn from(spec: GroupSpec) -> Self {
        Self {
            id: spec.id,
            members: spec.members,
            algorithm: spec.algorithm,
            block_size: spec.block_size.into(),
            check_blocks: spec.check_blocks,
            formation_limit_ms: milliseconds::of(spec.formation_limit),
            recoverable: spec.recoverable,
            slow_receivers: spec.slow_receivers,
            delta: spec.delta,
            delivery_mode: spec.delivery_mode,
            delivery: spec.delivery,
            ring: spec.ring,
            headers: spec.headers,
            share: spec.share,
            rate_max: spec.rate_max,
        }
    }
}

impl TryFrom<WrittenSpec> for GroupSpec {
    type Error = Refusal;

    fn try_from(written: WrittenSpec) -> Result<Self, Refusal> {
        let bytes = written.block_size;
        let block_size = u32::try_from(bytes).map_err(|_| InvalidSpec::BlockSize { bytes })?;
        let spec = Self {
            id: written.id,
            members: written.members,
            algorithm: written.algorithm,
            block_size,
            check_blocks: written.check_blocks,
            formation_limit: Duration::from_millis(written.formation_limit_ms),
            recoverable: written.recoverable,
            slow_receivers: written.slow_receivers,
            delta: written.delta,
            delivery_mode: written.delivery_mode,
            delivery: written.delivery,
            ring: written.ring,
            headers: written.headers,
            share: written.share,
            rate_max: written.rate_max,
        };
        if let SlowReceivers::Evict { after } = spec.slow_receivers
            && after < EVICT_MIN
        {
            return Err(Refusal::EvictsTooSoon { after });
        }
        spec.check()?;
        Schedule::new(&spec.algorithm, spec.count(), BlockCount(1)).map_err(|error| match error {
            ScheduleError::RacksMismatch { .. } => Refusal::Racks(error),
            _ => Refusal::Members(error),
        })?;
        Ok(spec)
    }
}

/// Why a specification is refused. The text names the field, and the values that it may have.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Spec(#[from] InvalidSpec),
    #[error("members: {0}")]
    Members(ScheduleError),
    #[error("algorithm: {0}; list the rack of each member")]
    Racks(ScheduleError),
    #[error(
        "slow_receivers: the group cannot evict a member after {} ms; choose after_ms = {} or more, or \"wait\"",
        after.as_millis(),
        EVICT_MIN.as_millis()
    )]
    EvictsTooSoon { after: Duration },
}

/// Durations as whole milliseconds. The next whole one is written, so that no limit becomes zero.
pub(super) mod milliseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(of(*duration))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }

    pub(super) fn of(duration: Duration) -> u64 {
        u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
    }
}

fn algorithm<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Algorithm, D::Error> {
    named("algorithm", deserializer)
}

fn slow_receivers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SlowReceivers, D::Error> {
    named("slow_receivers", deserializer)
}

fn delivery_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DeliveryMode, D::Error> {
    named("delivery_mode", deserializer)
}

fn delivery<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Delivery, D::Error> {
    named("delivery", deserializer)
}

/// Deserializes a field whose errors tell the valid names, but not the field.
fn named<'de, T: Deserialize<'de>, D: Deserializer<'de>>(field: &str, deserializer: D) -> Result<T, D::Error> {
    T::deserialize(deserializer).map_err(|error| serde::de::Error::custom(format_args!("{field}: {error}")))
}

fn block_size() -> u64 {
    GroupSpec::new(0, []).block_size.into()
}

fn formation_limit_ms() -> u64 {
    milliseconds::of(GroupSpec::new(0, []).formation_limit)
}

fn recoverable() -> bool {
    GroupSpec::new(0, []).recoverable
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rdmc_schedule::{Hybrid, Racks, Spine};

    use super::*;

    fn three() -> GroupSpec {
        GroupSpec::new(7, [NodeId(0), NodeId(2), NodeId(1)])
    }

    #[test]
    fn a_file_names_what_differs_from_the_defaults() {
        let from_toml = |text: &str| toml::from_str::<GroupSpec>(text).unwrap();
        assert_eq!(from_toml("id = 7\nmembers = [0, 2, 1]"), three());
        let racks = Racks::from_assignment(&[0, 1, 1]).unwrap();
        let all = r#"
            id = 7
            members = [0, 2, 1]
            algorithm = { hybrid = { spine = "cascade", racks = [0, 1, 1] } }
            block_size = 262144
            check_blocks = true
            formation_limit_ms = 5000
            recoverable = false
            slow_receivers = { evict = { after_ms = 3000 } }
            delivery_mode = "shared"
            delivery = "stable"
            ring = { slots = 64, bytes = 4096 }
        "#;
        let spec = three()
            .algorithm(Hybrid::new(racks, Spine::Cascade).into())
            .block_size(256 << 10)
            .check_blocks(true)
            .formation_limit(Duration::from_secs(5))
            .recoverable(false)
            .slow_receivers(SlowReceivers::evict_after(Duration::from_secs(3)))
            .delivery_mode(DeliveryMode::Shared)
            .delivery(Delivery::Stable)
            .ring(64, 4096);
        assert_eq!(from_toml(all), spec);
    }

    #[test]
    fn a_refusal_names_the_field_and_the_remedy() {
        let refusals = [
            (r#""block_size": 0"#, "block_size: 0 bytes are not between 1 and 1073741824"),
            (r#""block_size": 4294967296"#, "block_size: 4294967296 bytes are not between 1 and 1073741824"),
            (r#""algorithm": "teleport""#, "algorithm: unknown variant `teleport`, expected one of `sequential`, "),
            (r#""algorithm": {"hybrid": {"spine": "chain", "racks": []}}"#, "algorithm: racks without any member"),
            (
                r#""algorithm": {"hybrid": {"spine": "chain", "racks": [0, 1]}}"#,
                "algorithm: the racks hold 2 members, the group has 3; \
                 list the rack of each member",
            ),
            (r#""delivery": "soon""#, "delivery: unknown variant `soon`, expected `immediate` or `stable`"),
            (r#""delivery_mode": "both""#, "delivery_mode: unknown variant `both`, expected `private` or `shared`"),
            (r#""slow_receivers": "hurry""#, "slow_receivers: unknown variant `hurry`, expected `wait` or `evict`"),
            (
                r#""slow_receivers": {"evict": {"after_ms": 999}}"#,
                "slow_receivers: the group cannot evict a member after 999 ms; choose after_ms = 1000 or more, or \"wait\"",
            ),
            (
                r#""ring": {"slots": 1, "bytes": 8}"#,
                "ring: 1 slots of 8 bytes are not 2 to 4096 slots of 1 to 65536 bytes",
            ),
            (
                r#""ring": {"slots": 2, "bytes": 8}, "delta": true"#,
                "delta: members compare the blocks of every message; leave",
            ),
            (r#""delivery_mode": "shared", "delta": true"#, "delta: shared objects have no parts to compare; leave"),
            (r#""blocksize": 1"#, "unknown field `blocksize`, expected one of `id`, `members`, `algorithm`, "),
        ];
        let refusal = |text: String| serde_json::from_str::<GroupSpec>(&text).expect_err(&text).to_string();
        for (field, expected) in refusals {
            let got = refusal(format!(r#"{{"id": 1, "members": [0, 2, 1], {field}}}"#));
            assert!(got.starts_with(expected), "{field}: {got}");
        }
        for (members, expected) in [
            ("[]", "members: a group has 1 to "),
            ("[0, 2, 0]", "members: node 0 is a member twice; list each node once"),
        ] {
            let got = refusal(format!(r#"{{"id": 1, "members": {members}}}"#));
            assert!(got.starts_with(expected), "{members}: {got}");
        }
    }

    #[test]
    fn a_flat_algorithm_is_written_as_it_is_displayed() {
        for algorithm in Algorithm::ALL_FLAT {
            assert_eq!(serde_json::to_value(&algorithm).unwrap(), algorithm.to_string());
        }
    }

    #[test]
    fn a_duration_is_rounded_up_to_whole_milliseconds() {
        let spec = three().formation_limit(Duration::from_nanos(1));
        assert_eq!(serde_json::to_value(&spec).unwrap()["formation_limit_ms"], 1);
    }

    fn algorithms(members: u32) -> impl Strategy<Value = Algorithm> {
        let racks = prop::collection::vec(any::<u32>(), members as usize);
        let hybrid = (racks, prop::sample::select(&Spine::ALL)).prop_map(|(racks, spine)| {
            Hybrid::new(Racks::from_assignment(&racks).expect("there are members"), spine).into()
        });
        prop_oneof![prop::sample::select(&Algorithm::ALL_FLAT), hybrid]
    }

    fn specs() -> impl Strategy<Value = GroupSpec> {
        let first = (any::<u64>(), 1..20_u32, 0..4_000_000_000_u32).prop_flat_map(|(id, count, first)| {
            algorithms(count).prop_map(move |algorithm| {
                GroupSpec::new(id, (0..count).map(|place| NodeId(first + place))).algorithm(algorithm)
            })
        });
        let numbers = (1..=GroupSpec::BLOCK_SIZE_MAX, 0..1_000_000_000_u64, prop::option::of(1000..100_000_u64));
        let kinds =
            (any::<(bool, bool, bool, bool)>(), any::<Option<bool>>(), prop::option::of((2..=4096_u32, 1..=65536_u32)));
        (first, numbers, kinds).prop_map(|(spec, (block_size, limit_ms, evict_ms), kinds)| {
            let ((recoverable, delta, shared, stable), checks, ring) = kinds;
            GroupSpec {
                check_blocks: checks,
                recoverable,
                delta,
                slow_receivers: evict_ms
                    .map_or(SlowReceivers::Wait, |ms| SlowReceivers::evict_after(Duration::from_millis(ms))),
                delivery_mode: if shared && !delta { DeliveryMode::Shared } else { DeliveryMode::Private },
                delivery: if stable { Delivery::Stable } else { Delivery::Immediate },
                ring: ring.filter(|_| !delta).map(|(slots, bytes)| RingShape { slots, bytes }),
                ..spec.block_size(block_size).formation_limit(Duration::from_millis(limit_ms))
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_specification_survives_json_and_postcard(spec in specs()) {
            let json = serde_json::to_string(&spec).unwrap();
            prop_assert_eq!(&serde_json::from_str::<GroupSpec>(&json).unwrap(), &spec);
            let bytes = postcard::to_stdvec(&spec).unwrap();
            prop_assert_eq!(&postcard::from_bytes::<GroupSpec>(&bytes).unwrap(), &spec);
        }
    }
}
