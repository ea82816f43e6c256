//! The port of a member: what it sends takes as long as on a network, although all members run on one host.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdmc::Fabric;
use rdmc_fabric::{Fault, FaultFabric, Opcode, Timestamp};
use rdmc_files::PortRate;

/// The rate of the port that each member of the demo gets, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DemoPort {
    /// A port of its own.
    Limited(PortRate),
    /// None: members send as fast as the host copies.
    Unlimited,
}

impl DemoPort {
    /// Wraps the fabric of one member, so that its sends wait for the port.
    pub(crate) fn limit(self, fabric: Arc<dyn Fabric>) -> Arc<dyn Fabric> {
        let Self::Limited(rate) = self else { return fabric };
        let environment = fabric.environment();
        let free_at = Mutex::new(Timestamp::ZERO);
        FaultFabric::new(fabric, move |posting| {
            if posting.opcode != Opcode::Send {
                // Grants are a few bytes.
                return Fault::None;
            }
            let now = environment.now();
            let mut free_at = free_at.lock().unwrap_or_else(PoisonError::into_inner);
            let begins = (*free_at).max(Timestamp::from_nanos(now.as_nanos().saturating_sub(SLACK_NS)));
            *free_at = begins + Duration::from_secs_f64(posting.len as f64 / rate.bytes_per_second());
            // A block has left its port when its last byte has.
            Fault::Delay(free_at.since(now))
        })
    }
}

/// One that seven receivers' processes on two cores can fill.
impl Default for DemoPort {
    fn default() -> Self {
        Self::Limited(PortRate::from_bits_per_second(1_000_000_000).expect("it is in range"))
    }
}

impl FromStr for DemoPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == UNLIMITED {
            return Ok(Self::Unlimited);
        }
        text.parse()
            .map(Self::Limited)
            .map_err(|error: rdmc_files::costs::ParsePortRateError| format!("{error}; or {UNLIMITED}"))
    }
}

impl fmt::Display for DemoPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(rate) => rate.fmt(f),
            Self::Unlimited => f.write_str(UNLIMITED),
        }
    }
}

const UNLIMITED: &str = "none";
/// How late the timers of a runtime are: a port that was free for less is not idle. A port's rate is exact over time.
const SLACK_NS: u64 = 3_000_000;

#[cfg(test)]
mod tests {
    use rdmc::{Cluster, GroupSpec, MemNetwork, Node};
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_port_is_read_and_shown_alike() {
        for text in ["1 Gbit/s", "200 Mbit/s", "none"] {
            assert_eq!(text.parse::<DemoPort>().unwrap().to_string(), text);
        }
        assert!("fast".parse::<DemoPort>().unwrap_err().ends_with("or none"));
    }

    #[tokio::test]
    async fn what_leaves_a_port_takes_its_time() {
        let port: DemoPort = "80M".parse().unwrap();
        let network = MemNetwork::new();
        let cluster = Cluster::new((0..2).map(|id| (id, format!("node{id}"))));
        let nodes = cluster.nodes().into_iter();
        let nodes = nodes.map(|id| Node::builder(id, cluster.clone()).fabric(port.limit(network.fabric())).start());
        let nodes = futures::future::try_join_all(nodes).await.unwrap();
        let spec = GroupSpec::new(1, cluster.nodes()).block_size(64 << 10);
        let (sender, receiver) =
            futures::try_join!(nodes[0].create_group(spec.clone()), nodes[1].join_group(spec)).unwrap();
        let begun = Instant::now();
        let received = futures::StreamExt::into_future(receiver);
        let (sent, (message, _)) = futures::join!(sender.send(vec![7; 1 << 20]), received);
        sent.unwrap();
        assert_eq!(message.unwrap().unwrap()[..], vec![7; 1 << 20]);
        // A MiB at 10 MB/s.
        assert!(begun.elapsed() >= Duration::from_millis(100), "{:?}", begun.elapsed());
    }
}
