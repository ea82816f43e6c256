//! Forms groups whose members all live in this process.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::{try_join, try_join_all};
use rdmc::{Cluster, Fabric, GroupSpec, Node, NodeId, Receiver, Sender};

/// A group of members of this process.
#[derive(Debug)]
pub struct Members {
    root: Sender,
    receivers: Vec<Receiver>,
    _nodes: Vec<Node>,
}

impl Members {
    /// Forms a group with a member for each fabric; the first fabric is the root's.
    ///
    /// # Errors
    /// Nodes could not start, or could not form a group.
    pub async fn join(fabrics: Vec<Arc<dyn Fabric>>, block_size: u32, checks: bool) -> Result<Self> {
        // Free addresses of the loopback; `mem` uses them as names.
        let free = fabrics.iter().map(|_| TcpListener::bind("127.0.0.1:0")).collect::<io::Result<Vec<_>>>()?;
        let address = |listener: TcpListener| Ok(listener.local_addr()?.to_string());
        let addresses = free.into_iter().map(address).collect::<io::Result<Vec<_>>>()?;
        let cluster = Cluster::new((0..).zip(addresses));
        let node = |(id, fabric)| Node::builder(NodeId(id), cluster.clone()).fabric(fabric).start();
        let nodes = try_join_all((0..).zip(fabrics).map(node)).await?;
        let spec = GroupSpec::new(1, cluster.nodes()).block_size(block_size).check_blocks(checks);
        let joining = nodes[1..].iter().map(|node| node.join_group(spec.clone()));
        let (root, receivers) = try_join(nodes[0].create_group(spec.clone()), try_join_all(joining)).await?;
        Ok(Self { root, receivers, _nodes: nodes })
    }

    /// Sends a message to all receivers.
    ///
    /// # Errors
    /// The group has failed.
    pub async fn multicast(&mut self, message: Bytes) -> Result<()> {
        let len = message.len();
        let received = self.receivers.iter_mut().map(|receiver| async move {
            let message = receiver.next().await.context("the group ended early")??;
            ensure!(message.len() == len, "a message of another length has come");
            Ok(())
        });
        let sent = async { self.root.send(message).await.context("the root could not send") };
        try_join(sent, try_join_all(received)).await?;
        Ok(())
    }

    /// Closes the group.
    ///
    /// # Errors
    /// The group has failed.
    pub async fn close(self) -> Result<()> {
        try_join(self.root.close(), try_join_all(self.receivers.into_iter().map(Receiver::close))).await?;
        Ok(())
    }
}
