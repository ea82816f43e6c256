//! The parameters of a modelled cluster, in the form of scenario files.

use serde::{Deserialize, Serialize};

use crate::path::PathModel;

/// A cluster: nodes, their network, and the costs of their hosts and adapters.
///
/// Rates are in bits per second, times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterModel {
    /// Number of nodes.
    pub nodes: u32,
    /// Rate of each node's port, in either direction, in Mbit/s of payload.
    pub port_mbps: u64,
    /// Time from one port to another within a rack, in ns.
    pub latency_ns: u64,
    /// Racks with uplinks. With `None`, every port reaches every other at full rate.
    #[serde(default)]
    pub racks: Option<RackModel>,
    /// Adapters.
    #[serde(default)]
    pub nic: NicModel,
    /// Hosts.
    #[serde(default)]
    pub host: HostModel,
    /// Control connections.
    #[serde(default)]
    pub control: ControlModel,
    /// Conditions of all paths: loss, jitter, a policer. With `None`, paths are perfect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathModel>,
    /// Bytes on the network for each byte of a send or a read: small messages model large ones.
    #[serde(default = "one")]
    pub payload_scale: u64,
    /// Whether one-sided writes are scaled, too. Those of groups carry the protocol, and keep their lengths.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scales_writes: bool,
}

impl ClusterModel {
    /// Returns the bytes on the network of a one-sided write.
    pub(crate) fn written(&self, len: usize) -> u64 {
        len as u64 * if self.scales_writes { self.payload_scale } else { 1 }
    }

    /// Describes a cluster of equal nodes on a non-blocking switch. Only the network takes time.
    pub fn new(nodes: u32, port_mbps: u64, latency_ns: u64) -> Self {
        Self {
            nodes,
            port_mbps,
            latency_ns,
            racks: None,
            nic: NicModel::default(),
            host: HostModel::default(),
            control: ControlModel::default(),
            path: None,
            payload_scale: 1,
            scales_writes: false,
        }
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// The first invalid key, and its valid values.
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
        if let Some(path) = &self.path {
            path.check()?;
        }
        let (nic, host, control) = (&self.nic, &self.host, &self.control);
        let costs = [nic.operation_ns, nic.fetch_ns, host.post_ns, host.completion_ns, host.wake_ns, host.wake_cpu_ns];
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

/// Racks. Ports of one rack reach each other at full rate, others through the racks' uplinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RackModel {
    /// Nodes in a rack; the last one may have fewer.
    pub size: u32,
    /// Rate of a rack's uplink, in either direction, in Mbit/s.
    pub uplink_mbps: u64,
    /// Additional latency of a path between racks, in ns.
    #[serde(default)]
    pub latency_ns: u64,
    /// The rack of each node; empty if nodes fill the racks in order.
    #[serde(default)]
    pub rack_of: Vec<u32>,
}

/// Network adapters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NicModel {
    /// Time for which an operation occupies the adapter, at either end, in ns.
    pub operation_ns: u64,
    /// Bytes on the network before the end of a block at which its receiver gets a notice, as with software fabrics,
    /// unless the receive says how many. Its sender gets one when the last byte has left. With 0, as with devices,
    /// neither gets one before the completion.
    pub notice_bytes: u64,
    /// Time of retries before the connection to an unreachable peer breaks, in ns.
    pub retry_ns: u64,
    /// Bytes of each message on the network besides its payload.
    pub header_bytes: u64,
    /// Bytes of each longer message in flight that leave the adapter before a message of one packet, which has at most
    /// 4096 bytes.
    pub queue_bytes: u64,
    /// Time to fetch the payload of a message of one packet that is longer than `inline_bytes`, in ns, if none of its
    /// queue pair left just before. With 0, nothing is fetched.
    #[serde(skip_serializing_if = "is_zero")]
    pub fetch_ns: u64,
    /// Longest message that needs no fetch, since its bytes come with the request.
    #[serde(skip_serializing_if = "is_zero")]
    pub inline_bytes: u64,
    /// Most reads of a queue pair whose bytes have not arrived; those behind wait. With 0 there is no limit. Adapters
    /// have 16 at most.
    #[serde(skip_serializing_if = "is_zero")]
    pub reads_max: u32,
}

impl Default for NicModel {
    /// No costs, no queue, no fetches, no limit of reads, a notice 64 KiB before the end, retries for half a second.
    fn default() -> Self {
        Self {
            operation_ns: 0,
            notice_bytes: 64 << 10,
            retry_ns: 500_000_000,
            header_bytes: 0,
            queue_bytes: 0,
            fetch_ns: 0,
            inline_bytes: 0,
            reads_max: 0,
        }
    }
}

/// Hosts: the costs of software for each operation, on one core.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostModel {
    /// Time to post an operation, in ns.
    pub post_ns: u64,
    /// Time to take a completion and act on it, in ns.
    pub completion_ns: u64,
    /// Time from an event until a sleeping thread runs, in ns.
    pub wake_ns: u64,
    /// Processor time of a wake-up, in ns.
    pub wake_cpu_ns: u64,
    /// Kind of waiting for completions, unless the application chooses one.
    pub completion: WaitMode,
    /// Delays by the scheduler; `None` for no delays.
    pub delays: Option<DelayModel>,
}

/// The kind of waiting for completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitMode {
    /// A core polls all the time.
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
    /// Probability of a delay before software takes a completion.
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
    /// Lognormal with a median of half the mean: most delays are short, few are long.
    Lognormal,
}

/// Control connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlModel {
    /// Time from one end to the other, in ns.
    pub latency_ns: u64,
    /// Probability that a segment is lost. Its retransmission arrives.
    pub loss: f64,
    /// Time until the retransmission of a lost segment, in ns.
    pub resend_ns: u64,
    /// Time until the connection to an unreachable peer breaks, in ns.
    pub patience_ns: u64,
}

impl Default for ControlModel {
    /// 20 µs, no loss, retransmission after 200 ms, a break after 30 s.
    fn default() -> Self {
        Self { latency_ns: 20_000, loss: 0.0, resend_ns: 200_000_000, patience_ns: 30_000_000_000 }
    }
}

fn one() -> u64 {
    1
}

fn is_zero<T: Default + PartialEq>(count: &T) -> bool {
    *count == T::default()
}

/// Limit of nodes: every two have a control connection, which together take about 5 GB at this limit.
const NODES_MAX: u32 = 1024;
/// Highest rate in Mbit/s.
pub(crate) const MBPS_MAX: u64 = 10_000_000;
/// Limit of `queue_bytes`.
const QUEUE_MAX: u64 = 16 << 20;
/// Limit of the time until a connection to an unreachable peer breaks, in ns.
const PATIENCE_NS_MAX: u64 = 3_600_000_000_000;
/// Shortest time until a retransmission, in ns: the interval at which connects check for a cut.
const RESEND_NS_MIN: u64 = 1_000;
/// Limit of the mean of delays, in ns.
const DELAY_NS_MAX: f64 = 60e9;
/// Limit of other times, in ns.
const NS_MAX: u64 = 60_000_000_000;
