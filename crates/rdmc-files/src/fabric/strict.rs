//! A fabric for tests that is as strict about memory as a device. It registers no read-only memory, such as files to be
//! sent, and does not receive into files.

use std::sync::Arc;

use rdmc::{Capabilities, Cluster, Fabric, MemNetwork, Memory, MemoryRegion, Node, NodeId};
use rdmc_fabric::{FabricDecorator, FabricError};

#[derive(Debug)]
pub(crate) struct Strict(Arc<dyn Fabric>);

impl Strict {
    /// Starts a cluster of `count` nodes on such fabrics.
    pub(crate) async fn nodes(count: u32) -> Vec<Node> {
        let network = MemNetwork::new();
        let cluster = Cluster::new((0..count).map(|node| (node, format!("node{node}"))));
        let starts = (0..count).map(|node| {
            let builder = Node::builder(NodeId(node), cluster.clone());
            builder.fabric(Arc::new(Self(network.fabric()))).pool_bytes_max(POOL_BYTES).start()
        });
        futures::future::try_join_all(starts).await.unwrap()
    }
}

impl FabricDecorator for Strict {
    fn inner(&self) -> &dyn Fabric {
        &*self.0
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.receives_into_files = false;
        capabilities.shares_objects = false;
        capabilities
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        if !memory.is_writable() && !memory.is_empty() {
            let source = std::io::ErrorKind::Unsupported.into();
            return Err(FabricError::Memory { len: memory.len(), source });
        }
        self.0.register(memory)
    }
}

/// Bound of each node's pool in bytes: one large file of the tests at a time.
pub(crate) const POOL_BYTES: u64 = 1 << 20;
