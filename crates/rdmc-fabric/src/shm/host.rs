//! The name of a host.

use std::fmt;
use std::os::unix::fs::MetadataExt;

/// Identifies the host of a node for the purpose of shared memory: one kernel, one network namespace, one user of one
/// user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Host([u8; 16]);

impl Host {
    pub(super) fn this() -> std::io::Result<Self> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id")?;
        let [network, users] = ["net", "user"].map(|kind| std::fs::metadata(format!("/proc/self/ns/{kind}")));
        let (network, users) = (network?, users?);
        let user = rustix::process::geteuid().as_raw();
        let text = format!("{}:{}:{}:{user}", boot.trim_ascii().escape_ascii(), network.ino(), users.ino());
        let name = blake3::derive_key(HOST_NAME, text.as_bytes());
        Ok(Self(std::array::from_fn(|at| name[at])))
    }

    pub(crate) fn as_bytes(self) -> [u8; 16] {
        self.0
    }

    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

/// Writes enough of the name to tell hosts apart.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The purpose of the name of a host.
const HOST_NAME: &str = "rdmc 2026-11 name of a host that shares memory";
