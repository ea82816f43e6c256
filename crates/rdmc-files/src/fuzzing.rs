//! Private decoders, public for the fuzz targets. The module exists only with the feature `fuzzing`.

use rdmc::{Algorithm, GroupSpec, NodeId};

use crate::announcement::{self, Medium, Plans, WirePlan};
use crate::manifest::Manifest;

/// The announcement that an invitation carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement(announcement::Announcement);

impl Announcement {
    /// Announces a manifest of `manifest_len` bytes. The plans, an algorithm and a block size each, are for a network
    /// and for one host.
    pub fn new(plans: [(&Algorithm, u32); 2], manifest: &Manifest, manifest_len: u64) -> Self {
        let [network, host] = plans.map(|(algorithm, block_size)| WirePlan::new(algorithm, block_size));
        Self(announcement::Announcement::new(Plans { network, host }, manifest, manifest_len))
    }

    /// Adds a manifest that is short enough to travel with the announcement.
    #[must_use]
    pub fn with_manifest(self, encoded: &[u8]) -> Self {
        Self(self.0.with_short_manifest(encoded, 1))
    }

    /// Decodes the manifest that came with the announcement; `None` if there is none, or another one was announced.
    pub fn manifest(&self) -> Option<Manifest> {
        self.0.decode_manifest(self.0.manifest.as_ref()?).ok()
    }

    /// Decodes an announcement; `None` if it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        announcement::Announcement::decode(bytes).ok().map(Self)
    }

    /// Encodes the announcement.
    pub fn encode(&self) -> Vec<u8> {
        self.0.encode()
    }

    /// Returns the announced length of the encoded manifest in bytes.
    pub fn manifest_len(&self) -> u64 {
        self.0.manifest_len
    }

    /// Returns the block sizes for a network and for one host.
    pub fn block_sizes(&self) -> [u32; 2] {
        Medium::ALL.map(|medium| self.0.plans.on(medium).block_size)
    }

    /// Makes the groups of the manifest and of the files, on one host or on a network; `None` if they are not possible.
    pub fn groups(&self, nodes: Vec<NodeId>, on_one_host: bool) -> Option<[GroupSpec; 2]> {
        let medium = if on_one_host { Medium::Host } else { Medium::Network };
        let groups = self.0.groups(nodes, medium).ok()?;
        Some([groups.manifest, groups.files])
    }
}
