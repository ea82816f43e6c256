//! Why a fabric over verbs could not be opened.

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
        /// What the dynamic linker said.
        reason: &'static str,
    },
    /// The machine has no RDMA device.
    #[error(
        "this machine has no RDMA device; without hardware, `modprobe rdma_rxe` and `rdma link add rxe0 type rxe netdev IFACE` \
         make one in software"
    )]
    NoDevice,
    /// There is no device of that name.
    #[error("there is no RDMA device \"{name}\"; there are {}", have.join(", "))]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The names there are.
        have: Vec<String>,
    },
    /// The device has no port of that number.
    #[error("{device} has no port {port}; it has {}", have.iter().map(u8::to_string).collect::<Vec<_>>().join(", "))]
    UnknownPort {
        /// The device.
        device: String,
        /// The port asked for.
        port: u8,
        /// The ports there are.
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
        /// The kernel's word for its state.
        state: String,
    },
    /// The port has no address, or not the one asked for.
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
    #[error("{device} speaks iWARP, which sends no immediates; RoCE or InfiniBand is needed, or the fabric tcp")]
    Iwarp {
        /// The device.
        device: String,
    },
    /// The device could not be opened or asked.
    #[error("{device}: could not {action}")]
    Device {
        /// The device.
        device: String,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A setting makes no sense.
    #[error("{setting} must be {bounds}")]
    Setting {
        /// Which one.
        setting: &'static str,
        /// What it may be.
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

/// A device refused to register memory because too little may be locked.
#[derive(Debug, thiserror::Error)]
#[error(
    "{len} bytes must stay in memory for the device, of {max} bytes that this process may lock (RLIMIT_MEMLOCK); \
     raise the limit with `ulimit -l`, /etc/security/limits.conf or LimitMEMLOCK= of the service, or make the pool smaller"
)]
pub struct LockedMemoryLimit {
    /// Bytes that were to be registered.
    pub len: usize,
    /// The limit in bytes.
    pub max: u64,
}
