//! The certificate of a group that has ended: its messages, and the members that have them.

use std::fmt;
use std::sync::Arc;

use rdmc_schedule::Rank;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use twox_hash::xxhash3_128;

use crate::checksum::Checksum;
use crate::id::GroupId;
use crate::id::NodeId;

/// Certifies which messages a group had, and which member has which of them.
///
/// [`Sender::close`](crate::Sender::close) and [`Receiver::close`](crate::Receiver::close) return a
/// [complete](Self::is_complete) one. A [`GroupFailure`](crate::GroupFailure) carries one that says how far each member
/// came. All members that took part in the decision have the same. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Serialize)]
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

    /// Returns how many messages were begun, as far as any member knows.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Returns the sizes and digests of messages, in order: of the latest 65,536 at most.
    ///
    /// Messages that some members lack are included as far as a member that took part in the decision knows them. A
    /// member that only learnt of the outcome may know fewer.
    pub fn records(&self) -> &[MessageRecord] {
        &self.records
    }

    /// Returns how many messages a member has whole, from the first; `None` if no member knows.
    ///
    /// For a root that is gone it is the number of messages of which others had heard.
    ///
    /// # Panics
    /// If the group has no such member.
    pub fn held_by(&self, member: Rank) -> Option<u64> {
        self.held[member.index()]
    }

    /// Tells whether a member has a message; `None` if no member knows.
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

impl fmt::Debug for Certificate {
    /// Writes what a log line needs: of many members and records only how many there are, and the first and the last.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("group", &self.group)
            .field("members", &Abbreviated(&self.members))
            .field("messages", &self.messages)
            .field("held", &Abbreviated(&self.held))
            .field("records", &Abbreviated(&self.records))
            .finish()
    }
}

/// Writes a list, or the length and the ends of a long one.
pub(crate) struct Abbreviated<'a, T>(pub(crate) &'a [T]);

impl<T: fmt::Debug> fmt::Debug for Abbreviated<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [first, .., last] if self.0.len() > LISTED_MAX => write!(f, "{} [{first:?}, …, {last:?}]", self.0.len()),
            all => f.debug_list().entries(all).finish(),
        }
    }
}

impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let complete = self.held.iter().filter(|held| **held == Some(self.messages)).count();
        write!(f, "{complete} of {} members have all {} messages", self.members.len(), self.messages)
    }
}

/// Describes a message of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageRecord {
    /// Its place in the group's order, from 0.
    pub number: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Its digest; `None` if the group does not check blocks, or if no member that took part had the message whole.
    pub digest: Option<Digest>,
}

/// Digest of a message's content: two messages with the same digest have the same bytes.
///
/// It is the BLAKE3 of the message's size, of the block size (each 8 bytes, little endian), and of the XXH3 of every
/// block in 128 bits. So it follows from the checksums of the blocks, without a second look at the content. It proves
/// that no byte changed by accident. It proves nothing against bytes made up on purpose, since XXH3 is not a
/// cryptographic function; encryption protects against those. In JSON and its like it is a text of 64 hexadecimal
/// digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
        let mut hasher = DigestHasher::new(block_size);
        hasher.update(bytes);
        hasher.finish()
    }

    fn from_hexadecimal(text: &str) -> Option<Self> {
        let is_sound = text.len() == 64 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let mut bytes = [0; 32];
        for (place, byte) in bytes.iter_mut().enumerate().filter(|_| is_sound) {
            *byte = u8::from_str_radix(&text[2 * place..2 * place + 2], 16).ok()?;
        }
        is_sound.then_some(Self(bytes))
    }

    /// Returns the digest of a message of one block.
    pub(crate) fn of_block(size: u64, block_size: u32, checksum: Checksum) -> Self {
        let mut hashed = [0; 32];
        hashed[..8].copy_from_slice(&size.to_le_bytes());
        hashed[8..16].copy_from_slice(&u64::from(block_size).to_le_bytes());
        hashed[16..].copy_from_slice(&checksum.0.to_le_bytes());
        Self(blake3::hash(&hashed).into())
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

/// Computes the digest of a message piece by piece, for content that is not in memory.
///
/// # Examples
/// ```
/// use rdmc::{Digest, DigestHasher};
///
/// let message = vec![7; 3_000_000];
/// let mut hasher = DigestHasher::new(1 << 20);
/// message.chunks(100_000).for_each(|piece| hasher.update(piece));
/// assert_eq!(hasher.finish(), Digest::of(&message, 1 << 20));
/// ```
pub struct DigestHasher {
    block_size: u32,
    size: u64,
    /// Bytes that the current block still takes.
    room: usize,
    block: xxhash3_128::Hasher,
    checksums: Vec<Checksum>,
}

impl DigestHasher {
    /// Begins with a message that is sent in blocks of `block_size` bytes.
    ///
    /// # Panics
    /// If the block size is zero.
    pub fn new(block_size: u32) -> Self {
        assert!(block_size > 0, "a block has bytes");
        let (room, block) = (block_size as usize, xxhash3_128::Hasher::new());
        Self { block_size, size: 0, room, block, checksums: Vec::new() }
    }

    /// Appends bytes to the message.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.size += bytes.len() as u64;
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(self.room));
            self.block.write(piece);
            self.room -= piece.len();
            if self.room == 0 {
                self.end_block();
            }
            bytes = rest;
        }
    }

    /// Returns the digest of the message.
    pub fn finish(mut self) -> Digest {
        // No bytes are one block.
        if self.room < self.block_size as usize || self.checksums.is_empty() {
            self.end_block();
        }
        Digest::of_checksums(self.size, self.block_size, self.checksums)
    }

    fn end_block(&mut self) {
        let block = std::mem::replace(&mut self.block, xxhash3_128::Hasher::new());
        self.checksums.push(Checksum(block.finish_128()));
        self.room = self.block_size as usize;
    }
}

impl fmt::Debug for DigestHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DigestHasher").field("size", &self.size).finish_non_exhaustive()
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match serializer.is_human_readable() {
            true => serializer.collect_str(self),
            false => self.0.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return <[u8; 32]>::deserialize(deserializer).map(Self);
        }
        let text = String::deserialize(deserializer)?;
        Self::from_hexadecimal(&text)
            .ok_or_else(|| serde::de::Error::custom("digest: the text is not one of 64 hexadecimal digits"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl fmt::Display for Digest {
    /// Writes the digest in hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Longest list that a log line has in full.
const LISTED_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_text_for_people_and_bytes_on_the_wire() {
        let digest = Digest::of(b"abc", 1);
        let json = serde_json::to_string(&digest).unwrap();
        assert_eq!(json, format!("\"{digest}\""));
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
        assert_eq!(postcard::to_stdvec(&digest).unwrap(), digest.0);
        assert_eq!(postcard::from_bytes::<Digest>(&digest.0).unwrap(), digest);
        for wrong in ["", "abc", &"x".repeat(64), &"é".repeat(32), &"+1".repeat(32)] {
            let refused = serde_json::from_value::<Digest>(wrong.into()).unwrap_err();
            assert_eq!(refused.to_string(), "digest: the text is not one of 64 hexadecimal digits", "{wrong}");
        }
    }

    #[test]
    fn the_digest_of_a_message_of_one_block_is_that_of_its_checksum() {
        for bytes in [&b""[..], b"abc"] {
            let (size, checksum) = (bytes.len() as u64, Checksum::of(bytes));
            assert_eq!(Digest::of_block(size, 4096, checksum), Digest::of(bytes, 4096));
        }
    }

    fn certificate(members: u32, messages: u64) -> Certificate {
        let record = |number| MessageRecord { number, size: 100 + number, digest: Some(Digest([7; 32])) };
        Certificate {
            group: GroupId(9),
            members: (0..members).map(NodeId).collect(),
            messages,
            held: (0..members).map(|member| (member > 0).then_some(messages)).collect(),
            records: (0..messages).map(record).collect(),
        }
    }

    #[test]
    fn a_log_line_has_the_ends_of_long_lists() {
        let text = format!("{:?}", certificate(1000, 65_536));
        assert!(text.len() < 700, "{text}");
        for part in
            ["1000 [", "…, NodeId(999)]", "1000 [None, …, Some(65536)]", "65536 [MessageRecord { number: 0, size: 100"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        // Also where every field has a line of its own.
        assert!(format!("{:#?}", certificate(1000, 65_536)).lines().count() < 20);
    }

    #[test]
    fn a_log_line_has_short_lists_in_full() {
        let text = format!("{:?}", certificate(3, 2));
        assert!(text.contains("held: [None, Some(2), Some(2)]") && text.contains("size: 101"), "{text}");
    }
}
