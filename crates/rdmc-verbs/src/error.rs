//! The errors of opening a fabric over verbs.

use std::io;
use std::net::IpAddr;

use crate::sys::LIBRARY_NAME;

/// A device could not be found, chosen or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// libibverbs is not installed.
    #[error(
        "{} could not be loaded ({reason}); install rdma-core's libibverbs (Debian: libibverbs1, ibverbs-providers)",
        LIBRARY_NAME
    )]
    Library {
        /// The dynamic linker's message.
        reason: &'static str,
    },
    /// The machine has no RDMA device.
    #[error(
        "this machine has no RDMA device; without hardware, `modprobe rdma_rxe` and \
         `rdma link add rxe0 type rxe netdev IFACE` make one in software"
    )]
    NoDevice,
    /// There is no device with this name.
    #[error("there is no RDMA device \"{name}\"; there are {}", have.join(", "))]
    UnknownDevice {
        /// The name requested.
        name: String,
        /// The names of the existing devices.
        have: Vec<String>,
    },
    /// The device has no port with this number.
    #[error("{device} has no port {port}; it has {}", have.iter().map(u8::to_string).collect::<Vec<_>>().join(", "))]
    UnknownPort {
        /// The device.
        device: String,
        /// The port requested.
        port: u8,
        /// The existing ports.
        have: Vec<u8>,
    },
    /// The port cannot be used now.
    #[error(
        "port {port} of {device} is {state}, not ACTIVE; check its cable and `rdma link`, or choose another device"
    )]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The port's state, as the kernel names it.
        state: String,
    },
    /// The port has no address, or not the requested one.
    #[error("port {port} of {device} has no address of the kind asked for; it has {}", list(have))]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The addresses it has.
        have: Vec<IpAddr>,
    },
    /// The device speaks iWARP.
    #[error("{device} speaks iWARP, which sends no immediates; use RoCE, InfiniBand or the fabric tcp")]
    Iwarp {
        /// The device.
        device: String,
    },
    /// The device could not be opened or queried.
    #[error("{device}: could not {action}")]
    Device {
        /// The device.
        device: String,
        /// The action that failed.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A setting is out of bounds; the caller must change it.
    #[error("{setting} must be {bounds}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its bounds.
        bounds: &'static str,
    },
    /// The kernel's list of devices could not be read.
    #[error("the system's RDMA devices could not be listed")]
    System(#[source] io::Error),
}

fn list(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return "none; give its network interface an IP address".into();
    }
    addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}

/// A device refused to register memory because this process may lock too little.
#[derive(Debug, thiserror::Error)]
#[error(
    "the device needs {len} bytes of locked memory, but this process may lock {max} bytes (RLIMIT_MEMLOCK); \
     raise the limit with `ulimit -l`, /etc/security/limits.conf or LimitMEMLOCK= of the service, or make the pool \
     smaller"
)]
pub struct LockedMemoryLimit {
    /// Bytes to be registered.
    pub len: usize,
    /// The limit in bytes.
    pub max: u64,
}
