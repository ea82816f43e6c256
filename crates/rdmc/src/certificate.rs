//! Who has what, when a group has ended.

use std::fmt;
use std::sync::Arc;

use rdmc_schedule::Rank;
use serde::{Deserialize, Serialize};

use crate::group::GroupId;
use crate::node::NodeId;
use crate::transfer::Checksum;

/// What became of a group's messages: which there were, and who has which.
///
/// [`Sender::close`](crate::Sender::close) and [`Receiver::close`](crate::Receiver::close) return one that is
/// [complete](Self::is_complete); a [`GroupFailure`](crate::GroupFailure) carries one that says how far everybody came.
/// All members that took part in the decision have the same. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    pub(crate) group: GroupId,
    pub(crate) members: Arc<[NodeId]>,
    pub(crate) messages: u64,
    pub(crate) held: Arc<[Option<u64>]>,
    pub(crate) records: Arc<[MessageRecord]>,
}

impl Certificate {
    /// Returns the group's number.
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Returns the members in rank order.
    pub fn members(&self) -> &[NodeId] {
        &self.members
    }

    /// Returns how many messages were begun, as far as anybody knows.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Returns the sizes and digests of messages, in order: of the latest 65,536 at most, and of those that not everybody
    /// has as far as anybody who took part in the decision knows them. One that did not take part, but learnt of the outcome,
    /// may know fewer.
    pub fn records(&self) -> &[MessageRecord] {
        &self.records
    }

    /// Returns how many messages a member has whole, from the first; none if nobody knows. Of a root that is gone it is what
    /// others had heard that it began.
    ///
    /// # Panics
    /// If the group has no such member.
    pub fn held_by(&self, member: Rank) -> Option<u64> {
        self.held[member.index()]
    }

    /// Tells whether a member has a message; none if nobody knows.
    ///
    /// # Panics
    /// If the group has no such member.
    pub fn has(&self, member: Rank, message: u64) -> Option<bool> {
        self.held_by(member).map(|held| message < held)
    }

    /// Returns the members that are known to have a message.
    pub fn holders(&self, message: u64) -> impl Iterator<Item = Rank> {
        let known = (0..).map(Rank).zip(&*self.held);
        known.filter(move |(_, held)| held.is_some_and(|held| message < held)).map(|(rank, _)| rank)
    }

    /// Tells whether every member is known to have every message.
    pub fn is_complete(&self) -> bool {
        self.held.iter().all(|held| *held == Some(self.messages))
    }
}

impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let complete = self.held.iter().filter(|held| **held == Some(self.messages)).count();
        write!(f, "{complete} of {} members have all {} messages", self.members.len(), self.messages)
    }
}

/// A message of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageRecord {
    /// Its place in the group's order, from 0.
    pub number: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Its digest; none if blocks are not checked in the group, or if nobody who took part had the message whole.
    pub digest: Option<Digest>,
}

/// What a message's content comes down to: two messages with the same digest have the same bytes.
///
/// It is the BLAKE3 of the message's size, of the block size (each 8 bytes, little endian), and of the XXH3 of every block
/// in 128 bits, so that checking each block once gives it without a second look at the content. It proves that nothing
/// happened to the bytes by accident. Against somebody who makes up bytes on purpose it proves nothing, as XXH3 is no
/// cryptographic function; that is what encryption is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Computes the digest of a message that is sent in blocks of `block_size` bytes.
    ///
    /// # Panics
    /// If the block size is zero.
    ///
    /// # Examples
    /// ```
    /// use rdmc::Digest;
    ///
    /// let message = vec![7; 5_000_000];
    /// let mut other = message.clone();
    /// assert_eq!(Digest::of(&message, 1 << 20), Digest::of(&other, 1 << 20));
    /// other[4_999_999] ^= 1;
    /// assert_ne!(Digest::of(&message, 1 << 20), Digest::of(&other, 1 << 20));
    /// ```
    pub fn of(bytes: &[u8], block_size: u32) -> Self {
        let blocks = bytes.chunks(block_size as usize);
        // No bytes are one block.
        let none = bytes.is_empty().then_some(bytes);
        Self::of_checksums(bytes.len() as u64, block_size, blocks.chain(none).map(Checksum::of))
    }

    pub(crate) fn of_checksums(size: u64, block_size: u32, checksums: impl IntoIterator<Item = Checksum>) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(&size.to_le_bytes());
        hash.update(&u64::from(block_size).to_le_bytes());
        for checksum in checksums {
            hash.update(&checksum.0.to_le_bytes());
        }
        Self(hash.finalize().into())
    }
}

impl fmt::Display for Digest {
    /// Shows it in hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
