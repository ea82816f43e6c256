//! A fabric for tests that is as particular about memory as a device: it registers no memory that cannot be written, as
//! files to be sent, and must not receive into files.

use std::sync::Arc;

use rdmc::{Capabilities, Cluster, CompletionMode, Fabric, MemNetwork, Memory, MemoryRegion, Node, NodeId};
use rdmc_fabric::{
    CompletionQueue, CompletionSource, Environment, Expose, ExposedRegion, FabricError, QueuePair, QueuePairConfig,
};

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

impl Fabric for Strict {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.receives_into_files = false;
        capabilities.shares_objects = false;
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.0.environment()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        if !memory.is_writable() && !memory.is_empty() {
            let source = std::io::ErrorKind::Unsupported.into();
            return Err(FabricError::Memory { len: memory.len(), source });
        }
        self.0.register(memory)
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        self.0.expose(memory)
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        self.0.create_completion_queue(capacity, mode)
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        self.0.create_queue_pair(completions, config)
    }
}

/// What the nodes may lend: one large file of the tests at a time.
pub(crate) const POOL_BYTES: u64 = 1 << 20;
