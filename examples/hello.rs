//! Runs four members in one process; the root says hello, and every receiver prints it.
//!
//! ```text
//! cargo run -p rdmc-examples --example hello
//! ```

use std::sync::Arc;

use anyhow::Result;
use futures::StreamExt;
use rdmc::{Cluster, Fabric, GroupSpec, MemNetwork, Node, NodeId};

/// Runs one member, as each process of a real cluster does; only the fabric differs.
async fn member(me: NodeId, group: GroupSpec, cluster: Cluster, fabric: Arc<dyn Fabric>) -> Result<()> {
    let node = Node::builder(me, cluster).fabric(fabric).start().await?;
    if me == group.members()[0] {
        let root = node.create_group(group).await?; // the root is the only sender
        let receipt = root.send("hello, everybody").await?; // the memory is ours again
        receipt.stored().await?; // every receiver has stored it
        root.close().await?; // every member has every message
    } else {
        let mut messages = node.join_group(group).await?;
        while let Some(message) = messages.next().await {
            let message = message?;
            println!("node {me}: {}", String::from_utf8_lossy(&message));
            message.stored(); // or on disk, or whatever that means here
        }
        messages.close().await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let network = MemNetwork::new(); // `TcpFabric::new()` and real addresses for nodes on different machines
    let cluster = Cluster::new((0..4).map(|id| (id, format!("node{id}"))));
    let group = GroupSpec::new(1, cluster.nodes());
    let members = cluster.nodes().into_iter().map(|me| member(me, group.clone(), cluster.clone(), network.fabric()));
    futures::future::try_join_all(members).await?;
    Ok(())
}
