//! Scenarios: a cluster, groups, messages and faults from a file.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rdmc::{Algorithm, Delivery, Hybrid, Racks, Spine};
use rdmc_fabric::Timestamp;
use serde::Deserialize;

use crate::deployment::{Deployment, DeploymentError, FormedGroup, GroupPlan, scale_for};
use crate::log::Recorded;
use crate::model::{ClusterModel, MBPS_MAX};
use crate::simulation::{NodeIndex, Stalled};
use crate::world::{ModelError, Simulation, World};

/// A cluster, its groups and messages, and its faults.
///
/// # Examples
/// ```
/// let scenario: rdmc_sim::Scenario = r#"
///     [cluster]
///     nodes = 4
///     port_mbps = 40000
///     latency_ns = 1500
///
///     [[groups]]
///     messages = [{ bytes = 16_777_216 }]
///
///     [[events]]
///     what = "hold_up"
///     at_us = 500
///     node = 2
///     us = 100
/// "#.parse().expect("a scenario");
/// let played = scenario.play(1, false).expect("it can be played");
/// assert_eq!(played.groups[0].messages.len(), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The cluster.
    pub cluster: ClusterModel,
    /// The groups, all formed before anything is sent.
    #[serde(default)]
    pub groups: Vec<ScenarioGroup>,
    /// Faults and other events. Their times count from the moment at which all groups are formed.
    #[serde(default)]
    pub events: Vec<ScenarioEvent>,
    /// Limit in virtual seconds; an hour by default.
    #[serde(default = "default_limit_s")]
    pub limit_s: u64,
    /// Whether payload has its modelled length. Otherwise about a thousand bytes model a block, unless the cluster sets
    /// a scale.
    #[serde(default)]
    pub full_payload: bool,
}

/// A group of a scenario.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioGroup {
    /// The members, the root first. An empty list means all nodes in order.
    #[serde(default)]
    pub members: Vec<u32>,
    /// The algorithm, by its name in the program. `hybrid(chain)`, `hybrid(binomial-pipeline)`, `hybrid(cascade)` and
    /// `hybrid(two-tree)` use the cluster's racks.
    #[serde(default = "default_algorithm")]
    pub algorithm: String,
    /// Block size in bytes; 1 MiB by default.
    #[serde(default = "default_block_size")]
    pub block_size: u64,
    /// When members deliver messages: `immediate`, the default, or `stable`: when all have them.
    #[serde(default)]
    pub delivery: Delivery,
    /// The slots of a ring for short messages, and the bytes of a slot; without a ring by default.
    #[serde(default)]
    pub ring: Option<(u32, u64)>,
    /// The messages of the root.
    #[serde(default)]
    pub messages: Vec<ScenarioMessage>,
}

/// A message of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioMessage {
    /// Its size in bytes.
    pub bytes: u64,
    /// The time of its send, in µs.
    #[serde(default)]
    pub at_us: u64,
}

/// A fault or another event of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the time, the nodes and the amount")]
pub enum ScenarioEvent {
    /// A process dies.
    Kill { at_us: u64, node: u32 },
    /// A host loses its power.
    Vanish { at_us: u64, node: u32 },
    /// A process stops.
    Stop { at_us: u64, node: u32 },
    /// A stopped process continues.
    Resume { at_us: u64, node: u32 },
    /// Two nodes are partitioned.
    Cut { at_us: u64, node: u32, other: u32 },
    /// Two nodes reach each other again.
    Heal { at_us: u64, node: u32, other: u32 },
    /// The scheduler takes the core of a node's software away for `us`.
    HoldUp { at_us: u64, node: u32, us: u64 },
    /// A node becomes slower by the factor `times`.
    SlowDown { at_us: u64, node: u32, times: u64 },
    /// A port changes its rate.
    LimitPort { at_us: u64, node: u32, mbps: u64 },
    /// The control connections of two nodes are reset.
    ResetControl { at_us: u64, node: u32, other: u32 },
    /// The queue pairs of two nodes break.
    BreakQueuePairs { at_us: u64, node: u32, other: u32 },
}

/// The results of a scenario.
#[derive(Clone, Debug)]
pub struct Played {
    /// The groups, in the order of the scenario.
    pub groups: Vec<PlayedGroup>,
    /// Virtual time from the moment at which all groups were formed until the end.
    pub duration: Duration,
    /// Digest of all events and their times: equal runs have equal digests.
    pub digest: u64,
    /// The recorded events; empty without recording. Times count from the moment at which all groups were formed.
    pub recorded: Vec<Recorded>,
}

/// The results of a group.
#[derive(Clone, Debug)]
pub struct PlayedGroup {
    /// The members, the root first.
    pub members: Vec<NodeIndex>,
    /// The messages, in the order of their sends.
    pub messages: Vec<PlayedMessage>,
    /// The result of closing the group.
    pub closed: Result<(), DeploymentError>,
}

/// The results of a message.
#[derive(Clone, Debug)]
pub struct PlayedMessage {
    /// Its size in bytes.
    pub bytes: u64,
    /// When the application sent it, counted like all times.
    pub began: Duration,
    /// When each member but the root delivered it, in rank order; or why a member did not.
    pub delivered: Result<Vec<Duration>, DeploymentError>,
}

impl PlayedMessage {
    /// Returns the time until the last delivery; `None` if a member did not deliver it.
    pub fn latency(&self) -> Option<Duration> {
        let delivered = self.delivered.as_ref().ok()?;
        Some(delivered.iter().copied().max().unwrap_or(self.began).saturating_sub(self.began))
    }
}

/// A scenario cannot be read or played.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScenarioError {
    /// The text is not a scenario.
    #[error("not a scenario")]
    Syntax(#[from] toml::de::Error),
    /// A value is invalid.
    #[error("{what}")]
    Invalid {
        /// The value, and the valid ones.
        what: String,
    },
    /// The model is invalid.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The groups could not be formed.
    #[error("the groups could not be formed")]
    Deployment(#[from] DeploymentError),
    /// The simulation did not end.
    #[error(
        "the scenario did not end (stopped processes and ports delay a group without limit; limit_s limits the \
         scenario)"
    )]
    Stalled {
        /// The cause.
        source: Stalled,
        /// The recorded events until then; empty without recording.
        recorded: Vec<Recorded>,
    },
}

impl std::str::FromStr for Scenario {
    type Err = ScenarioError;

    fn from_str(text: &str) -> Result<Self, ScenarioError> {
        let scenario: Self = toml::from_str(text)?;
        scenario.check()?;
        Ok(scenario)
    }
}

impl Scenario {
    /// Plays the scenario; `records` records its events.
    ///
    /// # Errors
    /// The scenario is invalid, or its groups cannot be formed. [`Played`] has later failures.
    pub fn play(&self, seed: u64, records: bool) -> Result<Played, ScenarioError> {
        self.check()?;
        let mut model = self.cluster.clone();
        model.payload_scale = self.payload_scale();
        let simulation = Simulation::new(model, seed)?;
        let world = simulation.world().clone();
        let (plans, scenario) = (self.plans()?, self.clone());
        let start_ns = Arc::new(AtomicU64::new(0));
        let began = start_ns.clone();
        let played = simulation.run(Duration::from_secs(self.limit_s), async move {
            let deployment = Deployment::start(&world).await?;
            let forming = plans.into_iter().map(|plan| deployment.form(plan));
            let groups = futures::future::try_join_all(forming).await?;
            if records {
                world.record();
            }
            let start = world.now();
            began.store(start.as_nanos(), Ordering::Relaxed);
            scenario.events.iter().for_each(|event| event.schedule(&world));
            let sending = scenario.groups.iter().zip(groups).map(|(group, formed)| group.play(&world, start, formed));
            let groups = futures::future::join_all(sending).await;
            let duration = world.now().since(start);
            Ok::<_, DeploymentError>(Played { groups, duration, digest: world.digest(), recorded: Vec::new() })
        });
        let start_ns = start_ns.load(Ordering::Relaxed);
        let recorded = simulation.world().recorded().into_iter().map(|what| what.since(start_ns)).collect();
        match played {
            Ok(played) => Ok(Played { recorded, ..played? }),
            Err(source) => Err(ScenarioError::Stalled { source, recorded }),
        }
    }

    /// Returns the payload scale.
    fn payload_scale(&self) -> u64 {
        if self.cluster.payload_scale > 1 || self.full_payload {
            return self.cluster.payload_scale;
        }
        let blocks: Vec<u64> = self.groups.iter().map(|group| group.block_size).collect();
        let messages = self.groups.iter().flat_map(|group| &group.messages);
        let shortest = messages.map(|message| message.bytes).filter(|&bytes| bytes > 0).min();
        scale_for(&blocks, shortest.unwrap_or(u64::MAX))
    }

    fn check(&self) -> Result<(), ScenarioError> {
        let invalid = |what: String| Err(ScenarioError::Invalid { what });
        if let Err(what) = self.cluster.check() {
            return invalid(format!("cluster: {what}"));
        }
        let nodes = self.cluster.nodes;
        for (number, group) in self.groups.iter().enumerate() {
            if let Some(node) = group.members.iter().find(|&&node| node >= nodes) {
                return invalid(format!(
                    "groups[{number}].members: there is no node {node}; the cluster has {nodes} nodes"
                ));
            }
            if group.block_size == 0 || group.block_size > BLOCK_SIZE_MAX {
                return invalid(format!("groups[{number}].block_size must be from 1 to {BLOCK_SIZE_MAX}"));
            }
            let distinct: BTreeSet<u32> = group.members.iter().copied().collect();
            if distinct.len() < group.members.len() {
                return invalid(format!("groups[{number}].members: a node is listed twice"));
            }
            let scale = self.payload_scale();
            if !group.block_size.is_multiple_of(scale) {
                let what = format!("cluster.payload_scale {scale} does not divide it");
                return invalid(format!("groups[{number}].block_size {}: {what}", group.block_size));
            }
            if let Some(message) = group.messages.iter().find(|message| message.bytes > MESSAGE_MAX) {
                let bytes = message.bytes;
                return invalid(format!("groups[{number}].messages: {bytes} bytes are more than {MESSAGE_MAX}"));
            }
            let members = if group.members.is_empty() { u64::from(nodes) } else { group.members.len() as u64 };
            let longest = group.messages.iter().map(|message| message.bytes).max().unwrap_or(0).max(group.block_size);
            let bytes = longest.div_ceil(scale) * members;
            if bytes > PAYLOAD_MAX {
                let what = "a larger cluster.payload_scale, larger blocks or shorter messages need less";
                return invalid(format!(
                    "groups[{number}] needs {bytes} bytes of memory, more than {PAYLOAD_MAX}: {what}"
                ));
            }
            let blocks = group.messages.iter().map(|message| message.bytes / group.block_size).max().unwrap_or(0);
            if blocks * members > BLOCKS_MAX {
                return invalid(format!(
                    "groups[{number}]: {blocks} blocks for each of {members} members are more than {BLOCKS_MAX}; use \
                     larger blocks"
                ));
            }
        }
        for (number, event) in self.events.iter().enumerate() {
            if let Some(node) = event.nodes().into_iter().find(|&node| node >= nodes) {
                return invalid(format!("events[{number}]: there is no node {node}; the cluster has {nodes} nodes"));
            }
            match *event {
                ScenarioEvent::SlowDown { times, .. } if !(1..=SLOWNESS_MAX).contains(&times) => {
                    return invalid(format!("events[{number}].times must be from 1 to {SLOWNESS_MAX}"));
                }
                ScenarioEvent::LimitPort { mbps, .. } if mbps > MBPS_MAX => {
                    return invalid(format!("events[{number}].mbps must be at most {MBPS_MAX}"));
                }
                ScenarioEvent::HoldUp { us, .. } if us > HOLD_UP_US_MAX => {
                    return invalid(format!("events[{number}].us must be at most {HOLD_UP_US_MAX}, an hour"));
                }
                _ => {}
            }
        }
        self.plans().map(|_| ())
    }

    fn plans(&self) -> Result<Vec<GroupPlan>, ScenarioError> {
        let plan = |(group, id): (&ScenarioGroup, u64)| {
            let members: Vec<u32> =
                if group.members.is_empty() { (0..self.cluster.nodes).collect() } else { group.members.clone() };
            let algorithm = algorithm(&group.algorithm, &self.cluster, &members)
                .map_err(|what| ScenarioError::Invalid { what: format!("groups[{}].algorithm: {what}", id - 1) })?;
            let members = members.into_iter().map(NodeIndex).collect();
            Ok(GroupPlan {
                id,
                members,
                algorithm,
                block_size: group.block_size,
                delivery: group.delivery,
                ring: group.ring,
            })
        };
        self.groups.iter().zip(1..).map(plan).collect()
    }
}

impl ScenarioGroup {
    /// Sends the messages at their times, waits for their deliveries, and closes the group.
    async fn play(&self, world: &World, start: Timestamp, formed: FormedGroup) -> PlayedGroup {
        let mut order: Vec<ScenarioMessage> = self.messages.clone();
        order.sort_by_key(|message| message.at_us);
        let mut begun = Vec::new();
        for message in &order {
            world.sleep_until(start + Duration::from_micros(message.at_us)).await;
            begun.push((world.now(), formed.begin(message.bytes)));
        }
        let mut messages = Vec::new();
        for (number, (message, (began, sent))) in order.iter().zip(begun).enumerate() {
            let sent = match sent.await {
                Ok(sent) => sent.map(|_| ()).map_err(DeploymentError::from),
                Err(_) => Err(DeploymentError::new("the root died")),
            };
            let delivered = match sent {
                Ok(()) => formed.delivered(number).await,
                Err(error) => Err(error),
            };
            let since_start = |times: Vec<Timestamp>| times.into_iter().map(|time| time.since(start)).collect();
            let delivered = delivered.map(since_start);
            messages.push(PlayedMessage { bytes: message.bytes, began: began.since(start), delivered });
        }
        let members = formed.plan().members.clone();
        PlayedGroup { members, messages, closed: formed.close().await }
    }
}

impl ScenarioEvent {
    fn nodes(&self) -> Vec<u32> {
        match *self {
            Self::Kill { node, .. }
            | Self::Vanish { node, .. }
            | Self::Stop { node, .. }
            | Self::Resume { node, .. }
            | Self::HoldUp { node, .. }
            | Self::SlowDown { node, .. }
            | Self::LimitPort { node, .. } => vec![node],
            Self::Cut { node, other, .. }
            | Self::Heal { node, other, .. }
            | Self::ResetControl { node, other, .. }
            | Self::BreakQueuePairs { node, other, .. } => vec![node, other],
        }
    }

    fn at_us(&self) -> u64 {
        match *self {
            Self::Kill { at_us, .. }
            | Self::Vanish { at_us, .. }
            | Self::Stop { at_us, .. }
            | Self::Resume { at_us, .. }
            | Self::HoldUp { at_us, .. }
            | Self::SlowDown { at_us, .. }
            | Self::LimitPort { at_us, .. }
            | Self::Cut { at_us, .. }
            | Self::Heal { at_us, .. }
            | Self::ResetControl { at_us, .. }
            | Self::BreakQueuePairs { at_us, .. } => at_us,
        }
    }

    /// Schedules the event at its time, counted from now.
    fn schedule(&self, world: &World) {
        let (event, clock) = (*self, world.clone());
        let at = world.now() + Duration::from_micros(self.at_us());
        world.spawn(Box::pin(async move {
            clock.sleep_until(at).await;
            event.happen(&clock);
        }));
    }

    fn happen(self, world: &World) {
        match self {
            Self::Kill { node, .. } => world.kill(NodeIndex(node)),
            Self::Vanish { node, .. } => world.vanish(NodeIndex(node)),
            Self::Stop { node, .. } => world.stop(NodeIndex(node)),
            Self::Resume { node, .. } => world.resume(NodeIndex(node)),
            Self::Cut { node, other, .. } => world.cut(NodeIndex(node), NodeIndex(other)),
            Self::Heal { node, other, .. } => world.heal(NodeIndex(node), NodeIndex(other)),
            Self::HoldUp { node, us, .. } => world.hold_up(NodeIndex(node), Duration::from_micros(us)),
            Self::SlowDown { node, times, .. } => world.slow_down(NodeIndex(node), times),
            Self::LimitPort { node, mbps, .. } => world.limit_port(NodeIndex(node), mbps),
            Self::ResetControl { node, other, .. } => world.reset_control(NodeIndex(node), NodeIndex(other)),
            Self::BreakQueuePairs { node, other, .. } => world.break_queue_pairs(NodeIndex(node), NodeIndex(other)),
        }
    }
}

/// Returns the algorithm with this name; hybrids use the racks of the cluster.
fn algorithm(name: &str, cluster: &ClusterModel, members: &[u32]) -> Result<Algorithm, String> {
    let Some(spine) = Spine::in_name(name) else {
        let hybrids = Spine::ALL.map(|spine| format!("hybrid({spine})")).join(", ");
        return name.parse().map_err(|error| format!("{error}, {hybrids}"));
    };
    let racks: Vec<u32> = members.iter().map(|&node| cluster.rack_of(node)).collect();
    let racks = Racks::from_assignment(&racks).map_err(|error| error.to_string())?;
    Ok(Algorithm::Hybrid(Hybrid { racks: racks.into(), spine }))
}

fn default_limit_s() -> u64 {
    3600
}

fn default_algorithm() -> String {
    Algorithm::BinomialPipeline.to_string()
}

fn default_block_size() -> u64 {
    1 << 20
}

/// Limit of the factor by which a node becomes slower.
const SLOWNESS_MAX: u64 = 1_000_000;
/// Limit of a delay of software, in µs.
const HOLD_UP_US_MAX: u64 = 3_600_000_000;
/// Limit of the memory of one message at all members, in bytes.
const PAYLOAD_MAX: u64 = 1 << 30;
/// Limit of the blocks of one message, counted at all members.
const BLOCKS_MAX: u64 = 10_000_000;
/// Largest block, in bytes.
const BLOCK_SIZE_MAX: u64 = 1 << 30;
/// Largest message, in bytes: 1 TiB.
const MESSAGE_MAX: u64 = 1 << 40;
