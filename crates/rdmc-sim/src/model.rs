//! The parameters of a modelled cluster, as they stand in scenario files.

use serde::{Deserialize, Serialize};

/// A cluster: nodes, the network between them, what their hosts and adapters cost.
///
/// Rates are in bits per second, times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterModel {
    /// How many nodes there are.
    pub nodes: u32,
    /// Rate of each node's port, in either direction, in Mbit/s of payload.
    pub port_mbps: u64,
    /// Time from one port to another within a rack, in ns.
    pub latency_ns: u64,
    /// Racks with uplinks; without, every port reaches every other at full rate.
    #[serde(default)]
    pub racks: Option<RackModel>,
    /// What adapters cost and can.
    #[serde(default)]
    pub nic: NicModel,
    /// What software costs.
    #[serde(default)]
    pub host: HostModel,
    /// The control plane.
    #[serde(default)]
    pub control: ControlModel,
    /// Bytes on the network for each byte of a send: large messages are modelled by small ones. One-sided writes, which
    /// carry the protocol, count as they are.
    #[serde(default = "one")]
    pub payload_scale: u64,
}

impl ClusterModel {
    /// Describes a cluster of equal nodes on a switch that never blocks; nothing costs anything but the network.
    pub fn new(nodes: u32, port_mbps: u64, latency_ns: u64) -> Self {
        Self {
            nodes,
            port_mbps,
            latency_ns,
            racks: None,
            nic: NicModel::default(),
            host: HostModel::default(),
            control: ControlModel::default(),
            payload_scale: 1,
        }
    }

    /// Says what is wrong with the parameters, if anything is.
    ///
    /// # Errors
    /// The key, and what it must be.
    pub fn check(&self) -> Result<(), String> {
        let must = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
        must(self.nodes >= 1 && self.nodes <= NODES_MAX, "nodes must be from 1 to 1024")?;
        must(self.port_mbps >= 1 && self.port_mbps <= MBPS_MAX, "port_mbps must be from 1 to 10000000")?;
        must(self.latency_ns <= NS_MAX, "latency_ns must be at most 60000000000, a minute")?;
        must(self.payload_scale >= 1 && self.payload_scale <= 1 << 20, "payload_scale must be from 1 to 1048576")?;
        if let Some(racks) = &self.racks {
            must(racks.size >= 1, "racks.size must be at least 1")?;
            must((1..=MBPS_MAX).contains(&racks.uplink_mbps), "racks.uplink_mbps must be from 1 to 10000000")?;
            must(racks.latency_ns <= NS_MAX, "racks.latency_ns must be at most 60000000000")?;
            let all = racks.rack_of.is_empty() || racks.rack_of.len() == self.nodes as usize;
            must(all, "racks.rack_of must name the rack of every node, or be left out")?;
            let few = racks.rack_of.iter().all(|&rack| rack < NODES_MAX);
            must(few, "racks.rack_of must have numbers below 1024")?;
        }
        let (nic, host, control) = (&self.nic, &self.host, &self.control);
        let costs = [nic.operation_ns, host.post_ns, host.completion_ns, host.wake_ns, host.wake_cpu_ns];
        must(costs.iter().all(|&ns| ns <= NS_MAX), "costs must be at most 60000000000 ns, a minute")?;
        must(nic.retry_ns <= PATIENCE_NS_MAX, "nic.retry_ns must be at most 3600000000000, an hour")?;
        must(nic.header_bytes <= 1 << 16, "nic.header_bytes must be at most 65536")?;
        must(nic.queue_bytes <= QUEUE_MAX, "nic.queue_bytes must be at most 16777216, 16 MiB")?;
        must(control.latency_ns <= NS_MAX, "control.latency_ns must be at most 60000000000, a minute")?;
        let resend = RESEND_NS_MIN..=NS_MAX;
        must(resend.contains(&control.resend_ns), "control.resend_ns must be from 1000 to 60000000000, a minute")?;
        must(control.patience_ns <= PATIENCE_NS_MAX, "control.patience_ns must be at most 3600000000000, an hour")?;
        must((0.0..=1.0).contains(&control.loss), "control.loss must be a probability, from 0 to 1")?;
        if let Some(delays) = &host.delays {
            must((0.0..=1.0).contains(&delays.probability), "host.delays.probability must be from 0 to 1")?;
            let mean = delays.mean_ns > 0.0 && delays.mean_ns <= DELAY_NS_MAX;
            must(mean, "host.delays.mean_ns must be above 0 and at most 60000000000, a minute")?;
        }
        Ok(())
    }

    /// Returns a node's rack.
    pub fn rack_of(&self, node: u32) -> u32 {
        match &self.racks {
            None => 0,
            Some(racks) => racks.rack_of.get(node as usize).copied().unwrap_or(node / racks.size.max(1)),
        }
    }
}

/// Racks: ports of one rack reach each other at full rate, others through the racks' uplinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RackModel {
    /// Nodes in a rack; the last one may have fewer.
    pub size: u32,
    /// Rate of a rack's uplink, in either direction, in Mbit/s.
    pub uplink_mbps: u64,
    /// What a path between racks takes longer, in ns.
    #[serde(default)]
    pub latency_ns: u64,
    /// The rack of each node, where they do not follow each other.
    #[serde(default)]
    pub rack_of: Vec<u32>,
}

/// Network adapters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NicModel {
    /// Time that an operation occupies the adapter, at either end, in ns; operations follow each other.
    pub operation_ns: u64,
    /// How long before the end of a block, in bytes on the network, its receiver learns that it is nearly through, as
    /// software fabrics tell; its sender learns it when the last byte has left. 0 if neither learns it before the
    /// completion, as with devices. Best is what a port carries in the time of a round trip.
    pub notice_bytes: u64,
    /// How long a peer that cannot be reached is tried before the connection breaks, in ns.
    pub retry_ns: u64,
    /// Bytes that each message takes on the network besides its payload.
    pub header_bytes: u64,
    /// Bytes of each longer message under way that stand in the adapter before a message of one packet, at most 4096
    /// bytes: it leaves when they have left.
    pub queue_bytes: u64,
}

impl Default for NicModel {
    /// Costs nothing, queues nothing, tells 64 KiB before the end, tries for half a second.
    fn default() -> Self {
        Self { operation_ns: 0, notice_bytes: 64 << 10, retry_ns: 500_000_000, header_bytes: 0, queue_bytes: 0 }
    }
}

/// Hosts: what the software's share of each operation costs, on one core.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostModel {
    /// Time to post an operation, in ns.
    pub post_ns: u64,
    /// Time to take a completion and act on it, in ns.
    pub completion_ns: u64,
    /// Time from an event until a sleeping thread runs, in ns.
    pub wake_ns: u64,
    /// Processor time of such a wake-up, in ns.
    pub wake_cpu_ns: u64,
    /// How completions are waited for, where the application does not say.
    pub completion: Completion,
    /// Times at which the scheduler gives the core to somebody else.
    pub delays: Option<DelayModel>,
}

/// How completions are waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completion {
    /// A core polls for ever.
    #[default]
    Poll,
    /// A core polls for a while after the last completion, then sleeps.
    Hybrid,
    /// The thread sleeps until an event.
    Event,
}

/// Delays by the scheduler of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelayModel {
    /// Probability that software is delayed before it takes a completion.
    pub probability: f64,
    /// Mean of the delay in ns.
    pub mean_ns: f64,
    /// The distribution of the delay.
    #[serde(default)]
    pub distribution: Distribution,
}

/// A distribution of delays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Distribution {
    /// Always the mean.
    Fixed,
    /// Exponential.
    #[default]
    Exponential,
    /// Lognormal with a median of half the mean: most are short, few are long.
    Lognormal,
}

/// Control connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlModel {
    /// Time from one end to the other, in ns.
    pub latency_ns: u64,
    /// Probability that a segment is lost, once, and arrives when it is sent again.
    pub loss: f64,
    /// Time until a lost segment is sent again, in ns.
    pub resend_ns: u64,
    /// How long a peer that cannot be reached is tried before the connection is given up, in ns.
    pub patience_ns: u64,
}

impl Default for ControlModel {
    /// 20 µs, no loss, a repetition after 200 ms, given up after 30 s.
    fn default() -> Self {
        Self { latency_ns: 20_000, loss: 0.0, resend_ns: 200_000_000, patience_ns: 30_000_000_000 }
    }
}

fn one() -> u64 {
    1
}

/// Most nodes of a cluster: every two have a control connection, which take some 5 GB for as many.
const NODES_MAX: u32 = 1024;
/// Highest rate in Mbit/s.
pub(crate) const MBPS_MAX: u64 = 10_000_000;
/// Most bytes of a flow in an adapter.
const QUEUE_MAX: u64 = 16 << 20;
/// Longest wait for a peer that cannot be reached, in ns.
const PATIENCE_NS_MAX: u64 = 3_600_000_000_000;
/// Shortest time until a lost segment is sent again, in ns: a cut is looked at so often.
const RESEND_NS_MIN: u64 = 1_000;
/// Longest mean of a scheduler's delay, in ns.
const DELAY_NS_MAX: f64 = 60e9;
/// Longest time in ns.
const NS_MAX: u64 = 60_000_000_000;
