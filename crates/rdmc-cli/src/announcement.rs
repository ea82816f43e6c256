//! What an invitation says about the transfer to come, by which a receiver judges it.

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use rdmc::{Algorithm, GroupSpec, NodeId};
use serde::{Deserialize, Serialize};

use crate::choice::AlgorithmTold;
use crate::manifest::{self, Manifest};

/// The transfer in numbers, and how it will travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) algorithm: AlgorithmTold,
    pub(crate) block_size: u32,
    pub(crate) manifest_len: u64,
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    pub(crate) file_bytes_max: u64,
    pub(crate) on_failure: OnFailure,
}

/// What becomes of a transfer when a member fails in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum OnFailure {
    /// The others complete what was interrupted from what they hold between them, and go on
    Repair,
    /// It ends for all
    Fail,
}

impl Announcement {
    /// Describes the transfer of a manifest, which goes on after failures.
    pub(crate) fn new(algorithm: &Algorithm, block_size: u32, manifest: &Manifest, manifest_len: u64) -> Self {
        let (files, bytes) = manifest.totals();
        let file_bytes_max = manifest.files().map(|(_, size)| size).max().unwrap_or(0);
        let on_failure = OnFailure::Repair;
        Self { algorithm: algorithm.into(), block_size, manifest_len, files, bytes, file_bytes_max, on_failure }
    }

    /// Encodes the announcement: its version, then the rest.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(postcard::to_stdvec(self).expect("plain data in memory is always encoded"));
        bytes
    }

    /// Decodes an announcement of this version.
    pub(crate) fn decode(bytes: &[u8]) -> anyhow::Result<Self> {
        let (version, rest) = bytes.split_first_chunk().context("the invitation is not one of rdmc send")?;
        let version = u16::from_le_bytes(*version);
        if version != VERSION {
            bail!("version {VERSION} of the file transfer is spoken here, not {version}");
        }
        let told: Self = postcard::from_bytes(rest).context("the invitation is not one of rdmc send")?;
        ensure!(
            (1..=GroupSpec::BLOCK_SIZE_MAX).contains(&told.block_size),
            "a block of {} bytes is not possible",
            told.block_size
        );
        ensure!(told.manifest_len <= manifest::LEN_MAX, "the list of files is too long");
        Ok(told)
    }

    /// Makes the groups that the transfer uses, which sender and receivers must agree on.
    pub(crate) fn groups(&self, nodes: Vec<NodeId>) -> anyhow::Result<Groups> {
        let algorithm = self.algorithm.resolve(nodes.len())?;
        let spec = |id| GroupSpec::new(id, nodes.clone()).algorithm(algorithm.clone()).block_size(self.block_size);
        // A failure before anything was sent is the transfer's.
        let manifest = spec(1).recoverable(false);
        let files = spec(2).recoverable(self.on_failure == OnFailure::Repair);
        Ok(Groups { manifest, files })
    }

    /// Checks that a manifest is the one that was announced.
    pub(crate) fn check(&self, manifest: &Manifest) -> anyhow::Result<()> {
        let algorithm = self.algorithm.clone();
        let (files, bytes) = manifest.totals();
        let file_bytes_max = manifest.files().map(|(_, size)| size).max().unwrap_or(0);
        let found = Self { algorithm, files, bytes, file_bytes_max, ..*self };
        ensure!(found == *self, "the list of files is not what the invitation announced");
        Ok(())
    }
}

/// What a receiver says when it accepts: a byte if it has parts of files, from transfers that were interrupted; none if not.
pub(crate) struct Reply {
    pub(crate) has_parts: bool,
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        vec![1; usize::from(self.has_parts)]
    }

    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Self { has_parts: !bytes.is_empty() }
    }
}

/// The groups of one transfer.
///
/// The manifest travels in a group of its own: its close tells the sender that every receiver agrees before the
/// first byte of a file is sent. In both groups the last message is for a receiver that has found something wrong to say so,
/// by refusing it. That of the files is empty; that of the manifest is a byte if only what receivers lack is to travel, as
/// some have parts of files.
pub(crate) struct Groups {
    pub(crate) manifest: GroupSpec,
    pub(crate) files: GroupSpec,
}

/// Changes whenever the transfer changes its meaning.
const VERSION: u16 = 3;

/// Bytes of a file's digest, which follows the file as a message of its own.
pub(crate) const DIGEST_LEN: usize = blake3::OUT_LEN;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_announcement_is_understood_by_the_same_version_only() {
        let told = Announcement::new(&Algorithm::Chain, 1 << 20, &Manifest::default(), 1);
        let told = Announcement { on_failure: OnFailure::Fail, ..told };
        let mut bytes = told.encode();
        assert_eq!(Announcement::decode(&bytes).unwrap(), told);
        bytes[0] ^= 1;
        let error = Announcement::decode(&bytes).unwrap_err().to_string();
        assert!(error.contains("version 3"), "{error}");
    }

    #[test]
    fn only_the_files_are_sent_in_a_group_that_goes_on_and_only_if_that_is_wanted() {
        let nodes = || vec![NodeId(0), NodeId(1)];
        let told = Announcement::new(&Algorithm::Chain, 1 << 20, &Manifest::default(), 1);
        let groups = |on_failure| Announcement { on_failure, ..told.clone() }.groups(nodes()).unwrap();
        let (repair, fail) = (groups(OnFailure::Repair), groups(OnFailure::Fail));
        assert_eq!(repair.manifest, fail.manifest);
        assert_eq!(repair.files.clone().recoverable(false), fail.files);
        assert_ne!(repair.files, fail.files);
    }

    proptest! {
        #[test]
        fn invitations_from_anywhere_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..128)) {
            if let [version, rest, ..] = bytes.as_mut_slice() {
                [*version, *rest] = VERSION.to_le_bytes();
            }
            if let Ok(told) = Announcement::decode(&bytes) {
                let _ = told.groups(vec![NodeId(0), NodeId(1)]);
            }
        }
    }
}
