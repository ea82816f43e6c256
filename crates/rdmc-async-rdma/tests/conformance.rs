//! The conformance suite over `async-rdma`: on the first two RDMA devices of the machine, or twice on the only one.
//!
//! Without a device each body is skipped and says so.

#![cfg(target_os = "linux")]

use async_rdma::device::DeviceList;
use futures::future::BoxFuture;
use rdmc_async_rdma::{AsyncRdmaConfig, AsyncRdmaFabric};
use rdmc_fabric::conformance::{Node, Rig, block_on};

struct AsyncRdmaRig {
    workers: usize,
}

impl Rig for AsyncRdmaRig {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        Box::pin(async move {
            let devices = devices();
            let (first, last) = (&devices[0], devices.get(1).unwrap_or(&devices[0]));
            (node(first).await, node(last).await)
        })
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        if devices().is_empty() {
            println!("skipped: this machine has no RDMA device");
            return;
        }
        block_on(self.workers, body);
    }
}

async fn node(device: &str) -> Node {
    let mut config = AsyncRdmaConfig::default();
    config.device = Some(device.to_owned());
    let fabric = AsyncRdmaFabric::open(config).await.expect("a device can be opened");
    Node::listening(fabric, "127.0.0.1:0").await
}

/// Returns the names of the machine's devices; none if the kernel knows nothing of RDMA.
fn devices() -> Vec<String> {
    let list = DeviceList::available();
    assert!(list.is_ok() || std::env::var_os("RDMC_LAB_NODES").is_none(), "the lab's devices are not found");
    list.map(|list| list.iter().map(|device| device.name().to_owned()).collect()).unwrap_or_default()
}

rdmc_fabric::conformance_suite!(async_rdma_bodies, AsyncRdmaRig { workers: 0 });
rdmc_fabric::conformance_suite!(async_rdma_on_two_threads, AsyncRdmaRig { workers: 2 });
