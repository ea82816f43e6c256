//! Runs three overlapping groups over the same nodes and awaits them together.
//!
//! ```text
//! cargo run -p rdmc-examples --example streams
//! ```
//! Each node is the root of one group and a member of the two others. A receiver is a `Stream`. So a node merges its
//! groups with the ordinary combinators and takes messages as they arrive. Messages of different groups interleave
//! differently on each node. Messages of one group arrive in its root's order, on every node.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use futures::StreamExt;
use futures::future::{try_join, try_join_all};
use rdmc::{Cluster, Fabric, GroupSpec, MemNetwork, Node, NodeId, Receiver, Sender};

#[tokio::main]
async fn main() -> Result<()> {
    let network = MemNetwork::new();
    let cluster = Cluster::new((0..NODES).map(|id| (id, format!("node{id}"))));
    // Each node is a task, so that nodes run in parallel and this program does not decide the interleaving.
    let nodes = cluster.nodes().into_iter().map(|me| tokio::spawn(run(me, cluster.clone(), network.fabric())));
    for (node, order) in try_join_all(nodes).await?.into_iter().enumerate() {
        println!("node {node} received: {}", order?);
    }
    Ok(())
}

/// Runs one node, and returns the order in which it received.
async fn run(me: NodeId, cluster: Cluster, fabric: Arc<dyn Fabric>) -> Result<String> {
    let members = cluster.nodes();
    let node = Node::builder(me, cluster).fabric(fabric).start().await?;

    // All groups form at the same time; the nodes agree on no order.
    let mine = node.create_group(group_of(me, &members));
    let others = members.iter().filter(|&&root| root != me);
    let joins = others.map(|&root| {
        let joined = node.join_group(group_of(root, &members));
        async move { joined.await.map(|receiver| (root, receiver)) }
    });
    let (sender, mut receivers) = try_join(mine, try_join_all(joins)).await?;

    // A node that sends everything before it receives would fill all queues, so it does both at once.
    let ((), order) = try_join(send_all(me, sender), receive_all(&mut receivers)).await?;
    Ok(order)
}

/// Returns the group of the root `root`; the other members follow in their order.
fn group_of(root: NodeId, members: &[NodeId]) -> GroupSpec {
    let others = members.iter().copied().filter(|&node| node != root);
    GroupSpec::new(u64::from(root.0), std::iter::once(root).chain(others)).block_size(64 << 10)
}

async fn send_all(me: NodeId, sender: Sender) -> Result<()> {
    for number in 0..MESSAGES {
        let mut message = vec![0; MESSAGE_LEN];
        message[..4].copy_from_slice(&me.0.to_le_bytes());
        message[4..12].copy_from_slice(&number.to_le_bytes());
        sender.send(message).await?;
    }
    sender.close().await?;
    Ok(())
}

async fn receive_all(receivers: &mut Vec<(NodeId, Receiver)>) -> Result<String> {
    let mut order = Vec::new();
    let mut due = BTreeMap::new();
    // The streams are borrowed: an ended stream must not be dropped before its group is closed.
    let streams = receivers.iter_mut().map(|(root, receiver)| receiver.map(|message| (*root, message)));
    let mut messages = futures::stream::select_all(streams);
    while let Some((root, message)) = messages.next().await {
        let message = message?;
        let due: &mut u64 = due.entry(root).or_default();
        ensure!(message.number() == *due && message[..4] == root.0.to_le_bytes(), "{root} sent #{due} now");
        ensure!(message[4..12] == due.to_le_bytes(), "the root meant another message to be #{due}");
        *due += 1;
        order.push(format!("{root}:{}", message.number()));
    }
    drop(messages);
    ensure!(due.len() == receivers.len() && due.values().all(|&count| count == MESSAGES), "a message is missing");
    try_join_all(receivers.drain(..).map(|(_, receiver)| receiver.close())).await?;
    Ok(order.join(" "))
}

const NODES: u32 = 3;
/// Messages that each root sends.
const MESSAGES: u64 = 6;
/// Bytes of a message: several blocks, so that transfers overlap.
const MESSAGE_LEN: usize = 400_000;
