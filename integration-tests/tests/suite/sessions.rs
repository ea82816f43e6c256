//! Sessions pass the same bodies on every fabric of real processes.

use std::sync::Arc;

use futures::future::BoxFuture;
use rdmc::{Fabric, MemNetwork, ShmFabric, TcpConfig, TcpFabric};
use rdmc_wan::conformance::{Ends, Mem, Rig, run_on_tokio};

use crate::cluster::Kind;

/// A fabric whose control connections are TCP.
struct OverLoopback(fn() -> Arc<dyn Fabric>);

impl Rig for OverLoopback {
    fn ends(&self) -> Ends {
        Ends { accepting: self.0(), opening: self.0(), address: "127.0.0.1:0".to_owned() }
    }
}

rdmc_wan::session_suite!(mem, Mem);
rdmc_wan::session_suite!(tcp, OverLoopback(|| TcpFabric::with_config(rdmc_wan::tcp_config())));
rdmc_wan::session_suite!(tcp_encrypted, OverLoopback(encrypted));
#[cfg(target_os = "linux")]
rdmc_wan::session_suite!(shm, OverLoopback(|| ShmFabric::new().expect("processes share memory here")));
#[cfg(target_os = "linux")]
rdmc_wan::session_suite!(verbs, Verbs);

fn encrypted() -> Arc<dyn Fabric> {
    let mut config: TcpConfig = rdmc_wan::tcp_config();
    config.encrypt = true;
    TcpFabric::with_config(config)
}

/// The first two RDMA devices of the machine, or the only one.
#[cfg(target_os = "linux")]
struct Verbs;

#[cfg(target_os = "linux")]
impl Rig for Verbs {
    fn ends(&self) -> Ends {
        let [accepting, opening] = [0, 1].map(|number| Kind::Verbs.fabric(&MemNetwork::new(), number));
        Ends { accepting, opening, address: "127.0.0.1:0".to_owned() }
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        if crate::cluster::verbs_devices().is_empty() {
            crate::requirement::skip("rdma", "sessions on verbs: this machine has no RDMA device with an active port");
            return;
        }
        run_on_tokio(body);
    }
}
