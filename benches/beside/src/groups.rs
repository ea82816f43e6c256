//! Messages through a group of rdmc.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::StreamExt;
use futures::stream::FuturesOrdered;
use rdmc::{Cluster, CompletionMode, Fabric, GroupSpec, Multicast, Node, NodeId, Receipt, Sender, Shutdown};

use crate::member::{Check, Figures, Part, RECEIVERS, Root, Waiting, lead};

/// Returns figures at the root.
pub(crate) fn run(fabric: Arc<dyn Fabric>, waiting: Waiting, part: &Part) -> Result<Option<Figures>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mode = match waiting {
            Waiting::Sleep => CompletionMode::Event,
            Waiting::Yield => {
                // Polls without end, and would keep the core until the system takes it away.
                tokio::spawn(async move {
                    loop {
                        waiting.pause();
                        tokio::task::yield_now().await;
                    }
                });
                CompletionMode::Poll
            }
        };
        let addresses = part.ports[..=RECEIVERS.into()].iter().map(|port| format!("{}:{port}", Ipv4Addr::LOCALHOST));
        let cluster = Cluster::new((0..).zip(addresses));
        let spec = GroupSpec::new(1, cluster.nodes()).ring(64, 4096);
        let node =
            Node::builder(NodeId(part.rank.into()), cluster).fabric(fabric).completion_mode(mode).start().await?;
        if part.rank == 0 {
            let root = Group {
                sender: node.create_group(spec).await?,
                sends: FuturesOrdered::new(),
                last: None,
                in_flight: part.in_flight,
            };
            return Ok(Some(lead(root, part).await?));
        }
        let mut check = Check::new(part);
        let mut messages = node.join_group(spec).await?;
        while !check.is_done() {
            let message = messages.next().await.context("the group ended early")??;
            check.take(&message)?;
            // It answers, as the applications of the other ways do.
            message.stored();
        }
        messages.close().await?;
        // Others may still need this node to agree on the end.
        node.shutdown(Shutdown::Drain { limit: Duration::from_secs(10) }).await;
        Ok(None)
    })
}

struct Group {
    sender: Sender,
    sends: FuturesOrdered<Multicast>,
    last: Option<Receipt>,
    in_flight: usize,
}

impl Root for Group {
    async fn send(&mut self, message: &[u8]) -> Result<()> {
        self.sends.push_back(self.sender.send(message.to_vec()));
        if self.sends.len() >= self.in_flight {
            self.last = self.sends.next().await.transpose()?;
        }
        Ok(())
    }

    async fn answered(&mut self) -> Result<()> {
        while let Some(receipt) = self.sends.next().await {
            self.last = Some(receipt?);
        }
        self.last.take().context("a message was sent")?.stored().await?;
        Ok(())
    }

    async fn close(self) -> Result<()> {
        self.sender.close().await?;
        Ok(())
    }
}
