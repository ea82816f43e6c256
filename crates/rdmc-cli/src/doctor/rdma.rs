//! What the host offers for RDMA: devices, libibverbs, memory that may be locked.

use std::sync::Arc;

use rdmc::Fabric;
use rdmc_files::fabric::Lockable;
use rdmc_files::size::{ByteSize, POOL_BYTES_DEFAULT};
use rdmc_verbs::{DeviceInfo, PortInfo, VerbsConfig, VerbsError, VerbsFabric};

use super::{Finding, State, good, weak};

/// Examines all devices, and opens the best one. Must be called inside a Tokio runtime.
pub(super) fn examine() -> Vec<Finding> {
    let devices = match rdmc_verbs::devices() {
        Ok(devices) => devices,
        Err(error) => {
            let advice = "see whether /sys/class/infiniband can be read";
            return vec![weak("RDMA devices", State::Missing, error.to_string(), advice)];
        }
    };
    let opened = VerbsFabric::open(VerbsConfig::default());
    let mut findings = vec![fabric(&opened, devices.is_empty()), library(&opened, devices.is_empty())];
    findings.extend(devices.iter().flat_map(device));
    if !devices.is_empty() {
        let fabric = opened.as_deref().ok().map(|fabric| fabric as &dyn Fabric);
        findings.push(locked_memory(Lockable::find(fabric)));
    }
    findings
}

type Opened = Result<Arc<VerbsFabric>, VerbsError>;

fn fabric(opened: &Opened, no_devices: bool) -> Finding {
    const TOPIC: &str = "fabric verbs";
    match opened {
        Ok(fabric) => {
            let (device, gid) = (fabric.device(), fabric.gid());
            let found = format!("between hosts with RDMA; {device} can be opened, {} ({})", gid.address(), gid.kind);
            good(TOPIC, found)
        }
        Err(_) if no_devices => {
            let advice = "tcp+shm is used; for tests without hardware: modprobe rdma_rxe && \
                          rdma link add rxe0 type rxe netdev NAME";
            weak(TOPIC, State::Missing, "no RDMA device in /sys/class/infiniband", advice)
        }
        Err(VerbsError::Library { .. }) => {
            weak(TOPIC, State::Missing, "needs libibverbs", "see below; tcp+shm is used")
        }
        // The error says what to do.
        Err(error) => weak(TOPIC, State::Missing, "no device can be used", chain(error)),
    }
}

fn library(opened: &Opened, no_devices: bool) -> Finding {
    const TOPIC: &str = "libibverbs";
    match opened {
        Err(VerbsError::Library { reason }) if no_devices => {
            weak(TOPIC, State::Missing, *reason, "not needed without an RDMA device")
        }
        Err(VerbsError::Library { reason }) => {
            weak(TOPIC, State::Missing, *reason, "install rdma-core (Debian: libibverbs1, ibverbs-providers)")
        }
        _ => good(TOPIC, "installed"),
    }
}

/// Describes each port of a device.
fn device(device: &DeviceInfo) -> Vec<Finding> {
    let name = &device.name;
    if device.iwarp {
        let found = "speaks iWARP, which sends no immediates";
        return vec![weak(name, State::Missing, found, "use another device, with RoCE or InfiniBand, or tcp")];
    }
    device.ports.iter().map(|found| port(name, found)).collect()
}

fn port(device: &str, port: &PortInfo) -> Finding {
    let topic = format!("{device} port {}", port.number);
    let link = if port.ethernet { "Ethernet" } else { "InfiniBand" };
    let gids: Vec<_> = port.gids.iter().map(|gid| format!("{} ({})", gid.address(), gid.kind)).collect();
    let addresses = if gids.is_empty() { ", no address".to_owned() } else { format!(": {}", gids.join(", ")) };
    let found = format!("{}, {link}{addresses}", port.state);
    match remedy(&port.state, port.ethernet, !gids.is_empty()) {
        None => good(topic, found),
        Some(advice) => weak(topic, State::Weak, found, advice),
    }
}

/// Returns advice on a port in this state; `None` if the port can be used.
fn remedy(state: &str, ethernet: bool, has_address: bool) -> Option<&'static str> {
    match (state, ethernet) {
        (_, true) if !has_address => Some("give its network interface an IP address: ip addr add … dev NAME"),
        ("ACTIVE", _) if has_address => None,
        (_, true) => Some("check its cable and its state: rdma link; ip link set NAME up"),
        // The link works. Addresses and the last state come from the subnet manager.
        ("INIT" | "ARMED" | "ACTIVE", false) => {
            Some("its network has no subnet manager: start one, such as opensm, on a host or in a switch")
        }
        (_, false) => {
            Some("check its cable and its state: rdma link; its network needs a subnet manager, such as opensm")
        }
    }
}

fn locked_memory(lockable: Lockable) -> Finding {
    const TOPIC: &str = "locked memory";
    if lockable.check(POOL_BYTES_DEFAULT).is_err() {
        let advice = format!(
            "registered memory is locked, in rdmc recv up to {} and a little more: raise memlock in \
             /etc/security/limits.d, or set LimitMEMLOCK=infinity",
            ByteSize(POOL_BYTES_DEFAULT)
        );
        return weak(TOPIC, State::Weak, lockable.to_string(), advice);
    }
    good(TOPIC, lockable.to_string())
}

/// Returns the text of an error and its causes.
fn chain(error: &VerbsError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_infiniband_that_is_not_set_up_lacks_a_subnet_manager() {
        for state in ["INIT", "ARMED"] {
            let advice = remedy(state, false, true).unwrap();
            assert!(advice.contains("opensm") && !advice.contains("ip link"), "{advice}");
            assert!(remedy(state, true, true).unwrap().contains("ip link set"));
        }
        let down = remedy("DOWN", false, true).unwrap();
        assert!(down.contains("cable") && !down.contains("ip link"), "{down}");
    }

    #[test]
    fn an_active_port_with_an_address_needs_nothing() {
        assert_eq!((remedy("ACTIVE", true, true), remedy("ACTIVE", false, true)), (None, None));
        assert!(remedy("ACTIVE", true, false).unwrap().contains("ip addr add"));
        assert!(!remedy("ACTIVE", false, false).unwrap().contains("ip addr"));
    }

    #[test]
    fn less_locked_memory_than_the_pool_could_be_better() {
        let state = |lockable| locked_memory(lockable).state;
        assert_eq!(state(Lockable::up_to(POOL_BYTES_DEFAULT - 1)), State::Weak);
        assert_eq!(state(Lockable::up_to(POOL_BYTES_DEFAULT + (1 << 30))), State::Good);
        assert_eq!(state(Lockable::WITHOUT_LIMIT), State::Good);
    }
}
