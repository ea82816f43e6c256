//! The frames of a queue pair's side channel. Numbers are little endian.

use std::time::Duration;

/// The first message of each end: how its queue pair is reached, and what the peer must know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Number and address of the queue pair, as `async-rdma` writes them.
    pub(crate) address: QueuePairAddress,
    /// Bytes of a packet; the same at both ends.
    pub(crate) packet_len: u16,
    /// How long a send waits for a receive at this end.
    pub(crate) receiver_not_ready: Duration,
}

/// A queue pair's number (4 bytes), LID (2) and GID (16), as `async-rdma` exchanges them.
pub(crate) type QueuePairAddress = [u8; ADDRESS_LEN];

impl Hello {
    pub(crate) const LEN: usize = 12 + ADDRESS_LEN;

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let micros = u64::try_from(self.receiver_not_ready.as_micros()).unwrap_or(u64::MAX);
        let mut out = [0; Self::LEN];
        out[..2].copy_from_slice(&VERSION.to_le_bytes());
        out[2..4].copy_from_slice(&self.packet_len.to_le_bytes());
        out[4..12].copy_from_slice(&micros.to_le_bytes());
        out[12..].copy_from_slice(&self.address);
        out
    }

    /// Decodes what [`encode`](Self::encode) made; none for another version.
    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (head, address) = bytes.split_first_chunk::<12>()?;
        let (numbers, micros) = head.split_first_chunk::<4>()?;
        if numbers[..2] != VERSION.to_le_bytes() {
            return None;
        }
        Some(Self {
            address: address.try_into().ok()?,
            packet_len: u16::from_le_bytes([numbers[2], numbers[3]]),
            receiver_not_ready: Duration::from_micros(u64::from_le_bytes(micros.try_into().ok()?)),
        })
    }
}

/// A frame, once both queue pairs are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A receive was posted: its memory may be written, once.
    Buffer(ReceiveBuffer),
    /// The oldest buffer gets `len` bytes, by a write with immediate that was posted before this frame.
    Taken { len: u64, imm: Option<u32> },
    /// A write with immediate to other memory consumed the oldest buffer.
    Notified { imm: u32 },
    /// A message of `len` bytes did not fit the oldest buffer; the sender breaks.
    TooLong { len: u64 },
    /// The queue pair is broken at this end. It posts nothing new, and closes the channel when its posted work is done.
    Break,
}

/// Where the memory of a receive is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReceiveBuffer {
    pub(crate) key: u32,
    pub(crate) address: u64,
    pub(crate) len: u64,
}

impl Frame {
    pub(crate) const LEN: usize = 24;

    /// Encodes: kind (4 bytes), immediate or key (4), address (8), length (8).
    pub(crate) fn encode(self) -> [u8; Self::LEN] {
        let (kind, word, address, len) = match self {
            Self::Buffer(buffer) => (1, buffer.key, buffer.address, buffer.len),
            Self::Taken { len, imm: None } => (2, 0, 0, len),
            Self::Taken { len, imm: Some(imm) } => (3, imm, 0, len),
            Self::Notified { imm } => (4, imm, 0, 0),
            Self::TooLong { len } => (5, 0, 0, len),
            Self::Break => (6, 0, 0, 0),
        };
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&u32::to_le_bytes(kind));
        out[4..8].copy_from_slice(&word.to_le_bytes());
        out[8..16].copy_from_slice(&address.to_le_bytes());
        out[16..].copy_from_slice(&len.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let short = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(short(at)) | u64::from(short(at + 4)) << 32;
        let (kind, word, address, len) = (short(0), short(4), long(8), long(16));
        let frame = match kind {
            1 => Self::Buffer(ReceiveBuffer { key: word, address, len }),
            2 => Self::Taken { len, imm: None },
            3 => Self::Taken { len, imm: Some(word) },
            4 => Self::Notified { imm: word },
            5 => Self::TooLong { len },
            6 => Self::Break,
            _ => return None,
        };
        // Fields that a kind does not use are zero, so that a frame has one form.
        (frame.encode() == *bytes).then_some(frame)
    }
}

/// Bytes of a [`QueuePairAddress`].
pub(crate) const ADDRESS_LEN: usize = 22;
/// The version of the side channel's protocol.
const VERSION: u16 = 1;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_survive_encoding() {
        let frames = [
            Frame::Buffer(ReceiveBuffer { key: u32::MAX - 1, address: u64::MAX - 2, len: 1 << 40 }),
            Frame::Taken { len: u64::MAX, imm: None },
            Frame::Taken { len: 0, imm: Some(0) },
            Frame::Notified { imm: u32::MAX },
            Frame::TooLong { len: 7 },
            Frame::Break,
        ];
        for frame in frames {
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
    }

    #[test]
    fn a_hello_survives_encoding_and_one_of_another_version_is_none() {
        let receiver_not_ready = Duration::from_micros(1_500_001);
        let hello = Hello { address: *b"0123456789abcdefghijkl", packet_len: 4096, receiver_not_ready };
        let mut encoded = hello.encode();
        assert_eq!(Hello::decode(&encoded), Some(hello));
        encoded[0] += 1;
        assert_eq!(Hello::decode(&encoded), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_none(bytes in any::<[u8; Frame::LEN]>(), kind in 0u8..8) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
            if let Some(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }
    }
}
