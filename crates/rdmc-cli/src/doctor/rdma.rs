//! What the host offers for RDMA: devices, libibverbs, memory that may be locked.

use std::sync::Arc;

use rdmc::Fabric;
use rdmc_verbs::{DeviceInfo, PortInfo, VerbsConfig, VerbsError, VerbsFabric};

use super::{Finding, State, good, weak};
use crate::fabric::lockable;

/// Looks at all devices, and opens the best one; called inside a Tokio runtime.
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
        findings.push(locked_memory(opened.as_deref().ok().map(|fabric| fabric as &dyn Fabric)));
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
            let advice =
                "tcp is used; for tests without hardware: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME";
            weak(TOPIC, State::Missing, "no RDMA device in /sys/class/infiniband", advice)
        }
        Err(VerbsError::Library { .. }) => weak(TOPIC, State::Missing, "needs libibverbs", "see below; tcp is used"),
        // The text says what to do.
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
    if gids.is_empty() {
        let found = format!("{}, {link}, no address", port.state);
        return weak(topic, State::Weak, found, "give its network interface an IP address: ip addr add … dev NAME");
    }
    let found = format!("{}, {link}: {}", port.state, gids.join(", "));
    if port.is_active() {
        good(topic, found)
    } else {
        weak(topic, State::Weak, found, "check its cable and its state: rdma link; ip link set NAME up")
    }
}

fn locked_memory(fabric: Option<&dyn Fabric>) -> Finding {
    const TOPIC: &str = "locked memory";
    match lockable(fabric) {
        Ok(found) => good(TOPIC, found),
        Err(found) => {
            let advice =
                "registered memory is locked: raise memlock in /etc/security/limits.d, or set LimitMEMLOCK=infinity";
            weak(TOPIC, State::Weak, found, advice)
        }
    }
}

/// Says what went wrong, with its causes.
fn chain(error: &VerbsError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
