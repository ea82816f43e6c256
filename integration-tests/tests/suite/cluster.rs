//! Makes clusters of nodes inside the test process, on any fabric.

use std::fmt;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use rdmc::{
    Algorithm, Cluster, Fabric, GroupError, GroupSpec, MemNetwork, Message, Node, NodeId, Receiver, Sender, ShmFabric,
    TcpFabric,
};
#[cfg(target_os = "linux")]
use rdmc_verbs::{VerbsConfig, VerbsFabric};

/// The fabrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Mem,
    Tcp,
    Shm,
    /// Needs RDMA devices, which the nodes share in turn.
    Verbs,
}

impl Kind {
    /// Returns the fabrics that this machine has; with `RDMC_TEST_FABRICS=verbs`, only those of RDMA devices.
    pub(crate) fn all() -> Vec<Kind> {
        if std::env::var("RDMC_TEST_FABRICS").is_ok_and(|only| only == "verbs") {
            assert!(!verbs_devices().is_empty(), "this machine has no RDMA device with an active port");
            return vec![Kind::Verbs];
        }
        let mut kinds = vec![Kind::Mem, Kind::Tcp, Kind::Shm];
        if verbs_devices().is_empty() {
            println!("skipped on verbs: this machine has no RDMA device with an active port");
        } else {
            kinds.push(Kind::Verbs);
        }
        kinds
    }

    /// Makes the fabric of one node, in the runtime of that node.
    pub(crate) fn fabric(self, network: &MemNetwork, number: usize) -> Arc<dyn Fabric> {
        match self {
            Kind::Mem => network.fabric(),
            Kind::Tcp => TcpFabric::new(),
            Kind::Shm => ShmFabric::new().expect("processes share memory here"),
            Kind::Verbs => {
                let devices = verbs_devices();
                let mut config = VerbsConfig::default();
                config.device = Some(devices[number % devices.len()].clone());
                VerbsFabric::open(config).expect("a device with an active port can be opened")
            }
        }
    }
}

/// Lists the RDMA devices that can be used.
pub(crate) fn verbs_devices() -> Vec<String> {
    rdmc_verbs::usable_devices().expect("the kernel lists its devices")
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Mem => "mem",
            Kind::Tcp => "tcp",
            Kind::Shm => "shm",
            Kind::Verbs => "verbs",
        })
    }
}

/// Makes the fabrics of `count` nodes that reach each other.
pub(crate) fn fabrics(kind: Kind, count: usize) -> Vec<Arc<dyn Fabric>> {
    let network = MemNetwork::new();
    (0..count).map(|number| kind.fabric(&network, number)).collect()
}

/// Starts a cluster of `count` nodes.
pub(crate) async fn start(kind: Kind, count: u32) -> Vec<Node> {
    start_on(fabrics(kind, count as usize), kind).await
}

/// Starts a cluster of one node for each fabric.
pub(crate) async fn start_on(fabrics: Vec<Arc<dyn Fabric>>, kind: Kind) -> Vec<Node> {
    let addresses: Vec<String> = match kind {
        Kind::Mem => (0..fabrics.len()).map(|i| format!("node{i}")).collect(),
        Kind::Tcp | Kind::Shm | Kind::Verbs => free_addresses(fabrics.len()),
    };
    let cluster = Cluster::new((0u32..).zip(addresses)).key(0x5eed);
    let starts = (0u32..).zip(fabrics).map(|(id, fabric)| {
        let builder = Node::builder(NodeId(id), cluster.clone()).fabric(fabric);
        builder.connect_limit(Duration::from_secs(20)).start()
    });
    futures::future::try_join_all(starts).await.expect("all nodes start")
}

/// Finds free loopback addresses, which stay free: each call has a host address of its own, and neither connections nor
/// listeners at all addresses get ports below the ephemeral ones.
pub(crate) fn free_addresses(count: usize) -> Vec<String> {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let [_, _, round, call] = CALLS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let host = Ipv4Addr::new(127, high | 0x80, low, call);
    (PORT_FIRST + PORTS_MAX * u16::from(round)..).take(count).map(|port| format!("{host}:{port}")).collect()
}

/// The first port of a test's nodes.
const PORT_FIRST: u16 = 10_000;
/// Most nodes of a test.
const PORTS_MAX: u16 = 64;

/// Specifies a group of all the nodes in order.
pub(crate) fn spec_of_all(id: u64, nodes: &[Node], algorithm: Algorithm, block_size: u32) -> GroupSpec {
    GroupSpec::new(id, nodes.iter().map(Node::id)).algorithm(algorithm).block_size(block_size)
}

/// Forms a group, and returns the handles of the root and of the others.
pub(crate) async fn form(nodes: &[Node], spec: &GroupSpec) -> (Sender, Vec<Receiver>) {
    try_form(nodes, spec).await.expect("the group forms")
}

/// Forms a group, if it can be formed.
pub(crate) async fn try_form(nodes: &[Node], spec: &GroupSpec) -> Result<(Sender, Vec<Receiver>), GroupError> {
    let member = |id: &NodeId| nodes.iter().find(|node| node.id() == *id).expect("the spec names these nodes");
    let root = member(&spec.members()[0]);
    let joins = spec.members()[1..].iter().map(|id| member(id).join_group(spec.clone()));
    futures::future::try_join(root.create_group(spec.clone()), futures::future::try_join_all(joins)).await
}

/// Receives all messages until the root closes the group, then agrees to the close.
pub(crate) async fn take_all(mut receiver: Receiver) -> Vec<Message> {
    let mut messages = Vec::new();
    while let Some(message) = receiver.next().await {
        messages.push(message.expect("the group does not fail"));
    }
    receiver.close().await.expect("the group closes");
    messages
}

/// Returns bytes that depend on every position and on the seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Fails the test if `test` does not finish, so that it does not hang.
pub(crate) async fn watched<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(120), test).await.expect("the test hangs")
}

/// Polls `future` a number of times, then drops it.
pub(crate) async fn poll_and_drop<T>(future: impl Future<Output = T>, polls: usize) -> Option<T> {
    let mut future = std::pin::pin!(future);
    for _ in 0..polls {
        if let Some(done) = future.as_mut().now_or_never() {
            return Some(done);
        }
        tokio::task::yield_now().await;
    }
    None
}
