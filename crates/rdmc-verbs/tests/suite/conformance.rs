//! The conformance suite on real verbs: on the first two RDMA devices of the machine, or twice on a single one.
//!
//! Without a device the suite prints that it is skipped; `cargo xtask lab test conformance` runs them on Soft-RoCE.

use futures::future::BoxFuture;
use rdmc_fabric::conformance::{Node, Rig, block_on};
use rdmc_verbs::{VerbsConfig, VerbsFabric};

struct VerbsRig {
    workers: usize,
}

impl Rig for VerbsRig {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        Box::pin(async move {
            let devices: Vec<_> = usable_devices();
            let open = |name: &String| {
                let mut config = VerbsConfig::default();
                config.device = Some(name.clone());
                VerbsFabric::open(config).expect("a device with an active port can be opened")
            };
            let (first, last) = (open(&devices[0]), open(devices.get(1).unwrap_or(&devices[0])));
            (Node::listening(first, "127.0.0.1:0").await, Node::listening(last, "127.0.0.1:0").await)
        })
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        if usable_devices().is_empty() {
            crate::skip("conformance of verbs: this machine has no RDMA device with an active port");
            return;
        }
        block_on(self.workers, body);
    }
}

fn usable_devices() -> Vec<String> {
    let names = rdmc_verbs::usable_devices().expect("the kernel lists its devices");
    assert!(!names.is_empty() || std::env::var_os("RDMC_LAB_NODES").is_none(), "the lab's devices are not found");
    names
}

rdmc_fabric::conformance_suite!(verbs, VerbsRig { workers: 0 });
rdmc_fabric::conformance_suite!(verbs_on_two_threads, VerbsRig { workers: 2 });
