//! Every fabric of this crate passes the conformance suite, and so does every decorator without anything to do.

use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::conformance::{Node, Rig, block_on};
use rdmc_fabric::{Fabric, Fault, FaultFabric, MemNetwork, TcpConfig, TcpFabric, TraceFabric};
#[cfg(target_os = "linux")]
use rdmc_fabric::{ShmFabric, TcpShmFabric};

struct Mem;

impl Rig for Mem {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let network = MemNetwork::new();
        Box::pin(async move {
            (Node::listening(network.fabric(), "a:0").await, Node::listening(network.fabric(), "b:0").await)
        })
    }
}

struct Tcp;

impl Rig for Tcp {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let listening = |fabric| Node::listening(fabric, "127.0.0.1:0");
        Box::pin(async move { (listening(TcpFabric::new()).await, listening(TcpFabric::new()).await) })
    }
}

struct EncryptedTcp;

impl Rig for EncryptedTcp {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let listening = || {
            let mut config = TcpConfig::default();
            config.encrypt = true;
            Node::listening(TcpFabric::with_config(config), "127.0.0.1:0")
        };
        Box::pin(async move { (listening().await, listening().await) })
    }
}

/// The nodes have two addresses, so that they take each other for other hosts, and padding precedes requests.
#[cfg(target_os = "linux")]
struct PaddedTcp {
    encrypt: bool,
}

#[cfg(target_os = "linux")]
impl Rig for PaddedTcp {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let listening = |address| {
            let mut config = TcpConfig::default();
            config.encrypt = self.encrypt;
            config.padded_from = Duration::ZERO;
            Node::listening(TcpFabric::with_config(config), address)
        };
        Box::pin(async move { (listening("127.0.0.1:0").await, listening("127.0.0.2:0").await) })
    }
}

#[cfg(target_os = "linux")]
struct Shm;

#[cfg(target_os = "linux")]
impl Rig for Shm {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let listening = || Node::listening(ShmFabric::new().expect("the system shares memory"), "127.0.0.1:0");
        Box::pin(async move { (listening().await, listening().await) })
    }
}

/// Both nodes are on this host, so they are joined by shared memory.
#[cfg(target_os = "linux")]
struct TcpShm;

#[cfg(target_os = "linux")]
impl Rig for TcpShm {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let fabric = || TcpShmFabric::new(TcpConfig::default()).expect("the system shares memory");
        let listening = move || Node::listening(fabric(), "127.0.0.1:0");
        Box::pin(async move { (listening().await, listening().await) })
    }
}

/// Runs the bodies of another rig on a runtime of several threads, where tasks run at the same time.
struct Threads<R>(R);

impl<R: Rig> Rig for Threads<R> {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        self.0.pair()
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        block_on(2, body);
    }
}

/// Wraps both fabrics of another rig.
struct Wrapped<R>(R, fn(Arc<dyn Fabric>) -> Arc<dyn Fabric>);

impl<R: Rig> Rig for Wrapped<R> {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        Box::pin(async {
            let (a, b) = self.0.pair().await;
            (a.map_fabric(self.1), b.map_fabric(self.1))
        })
    }
}

fn fault(inner: Arc<dyn Fabric>) -> Arc<dyn Fabric> {
    FaultFabric::new(inner, |_| Fault::None)
}

fn trace(inner: Arc<dyn Fabric>) -> Arc<dyn Fabric> {
    TraceFabric::new(inner, |_| {})
}

rdmc_fabric::conformance_suite!(mem, Mem);
rdmc_fabric::conformance_suite!(mem_threads, Threads(Mem));
rdmc_fabric::conformance_suite!(tcp, Tcp);
rdmc_fabric::conformance_suite!(tcp_threads, Threads(Tcp));
rdmc_fabric::conformance_suite!(tcp_encrypted, EncryptedTcp);
rdmc_fabric::conformance_suite!(tcp_encrypted_threads, Threads(EncryptedTcp));
#[cfg(target_os = "linux")]
rdmc_fabric::conformance_suite!(tcp_padded, PaddedTcp { encrypt: false });
#[cfg(target_os = "linux")]
rdmc_fabric::conformance_suite!(tcp_padded_encrypted, PaddedTcp { encrypt: true });
#[cfg(target_os = "linux")]
rdmc_fabric::conformance_suite!(shm, Shm);
#[cfg(target_os = "linux")]
rdmc_fabric::conformance_suite!(shm_threads, Threads(Shm));
#[cfg(target_os = "linux")]
rdmc_fabric::conformance_suite!(tcp_shm, TcpShm);
#[cfg(target_os = "linux")]
rdmc_fabric::conformance_suite!(tcp_shm_threads, Threads(TcpShm));
rdmc_fabric::conformance_suite!(fault_mem, Wrapped(Mem, fault));
rdmc_fabric::conformance_suite!(fault_tcp, Wrapped(Tcp, fault));
rdmc_fabric::conformance_suite!(trace_mem, Wrapped(Mem, trace));
rdmc_fabric::conformance_suite!(trace_tcp, Wrapped(Tcp, trace));
