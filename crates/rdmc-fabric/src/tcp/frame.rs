//! The 32-byte header of every message on a data connection.
//!
//! ```text
//! byte  0      kind: 1 send, 2 write, 3 read, 4 acknowledgement, 5 read response, 6 refusal, 7 nearly taken,
//!              8 padding
//!       1      flags (send and write only): bit 0 set if an immediate is given, bit 1 if the acknowledgement may wait
//!              for that of a later request
//!       2..4   0
//!       4..8   immediate (send, write) | number of requests (acknowledgement) | reason (refusal)
//!       8..16  length in bytes: of the payload (send, write, read response, padding), to be read (read)
//!      16..24  key (write, read)
//!      24..32  address (write, read)
//! ```
//! Numbers are little endian; fields that a kind does not use are 0. The payload of a send, a write or a read response
//! follows its header, as do the bytes of padding, which carry no data. Requests are answered in order; "nearly taken"
//! precedes the acknowledgement of a long send.

use crate::remote::RemoteMemory;
use crate::work::WorkError;

/// One header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Send { imm: Option<u32>, quiet: bool, len: u64 },
    Write { imm: Option<u32>, quiet: bool, to: RemoteMemory },
    Read { from: RemoteMemory },
    Acknowledge { requests: u32 },
    ReadResponse { len: u64 },
    Refuse { reason: Refusal },
    NearlyTaken,
    Padding { len: u64 },
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    InvalidRequest,
    Access,
    ReceiverNotReady,
}

impl Refusal {
    pub(super) fn of(error: WorkError) -> Self {
        match error {
            WorkError::RemoteAccess => Self::Access,
            WorkError::ReceiverNotReady => Self::ReceiverNotReady,
            _ => Self::InvalidRequest,
        }
    }

    pub(super) fn error(self) -> WorkError {
        match self {
            Self::InvalidRequest => WorkError::RemoteInvalidRequest,
            Self::Access => WorkError::RemoteAccess,
            Self::ReceiverNotReady => WorkError::ReceiverNotReady,
        }
    }
}

impl Frame {
    pub(crate) const LEN: usize = 32;

    /// Returns the length of the payload that follows.
    pub(super) fn payload_len(self) -> usize {
        let len = match self {
            Self::Send { len, .. } => len,
            Self::Write { to, .. } => to.len,
            _ => 0,
        };
        usize::try_from(len).unwrap_or(usize::MAX)
    }

    /// Tells whether the acknowledgement may wait for that of a later request.
    pub(super) fn is_quiet(self) -> bool {
        matches!(self, Self::Send { quiet: true, .. } | Self::Write { quiet: true, .. })
    }

    pub(crate) fn encode(self) -> [u8; Self::LEN] {
        let zero = RemoteMemory { key: 0, address: 0, len: 0 };
        let (kind, imm, number, at) = match self {
            Self::Send { imm, len, .. } => (1, imm, 0, RemoteMemory { len, ..zero }),
            Self::Write { imm, to, .. } => (2, imm, 0, to),
            Self::Read { from } => (3, None, 0, from),
            Self::Acknowledge { requests } => (4, None, requests, zero),
            Self::ReadResponse { len } => (5, None, 0, RemoteMemory { len, ..zero }),
            Self::Refuse { reason } => (6, None, reason as u32 + 1, zero),
            Self::NearlyTaken => (7, None, 0, zero),
            Self::Padding { len } => (8, None, 0, RemoteMemory { len, ..zero }),
        };
        let mut out = [0; Self::LEN];
        out[0] = kind;
        out[1] = u8::from(imm.is_some()) | u8::from(self.is_quiet()) << 1;
        out[4..8].copy_from_slice(&imm.unwrap_or(number).to_le_bytes());
        out[8..16].copy_from_slice(&at.len.to_le_bytes());
        out[16..24].copy_from_slice(&at.key.to_le_bytes());
        out[24..].copy_from_slice(&at.address.to_le_bytes());
        out
    }

    /// Decodes a header; returns `None` unless [`encode`](Self::encode) makes such a header.
    pub(crate) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let number = u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i]));
        let imm = (bytes[1] & 1 != 0).then_some(number);
        let quiet = bytes[1] & 2 != 0;
        let at = RemoteMemory { len: long(8), key: long(16), address: long(24) };
        let frame = match bytes[0] {
            1 => Self::Send { imm, quiet, len: at.len },
            2 => Self::Write { imm, quiet, to: at },
            3 => Self::Read { from: at },
            4 => Self::Acknowledge { requests: number },
            5 => Self::ReadResponse { len: at.len },
            6 => Self::Refuse {
                reason: match number {
                    1 => Refusal::InvalidRequest,
                    2 => Refusal::Access,
                    3 => Refusal::ReceiverNotReady,
                    _ => return None,
                },
            },
            7 => Self::NearlyTaken,
            8 => Self::Padding { len: at.len },
            _ => return None,
        };
        // Unused fields are 0, so that each header has one form.
        (frame.encode() == *bytes).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let remote = (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(key, address, len)| RemoteMemory {
            key,
            address,
            len,
        });
        prop_oneof![
            (any::<Option<u32>>(), any::<bool>(), any::<u64>()).prop_map(|(imm, quiet, len)| Frame::Send {
                imm,
                quiet,
                len
            }),
            (any::<Option<u32>>(), any::<bool>(), remote.clone()).prop_map(|(imm, quiet, to)| Frame::Write {
                imm,
                quiet,
                to
            }),
            remote.prop_map(|from| Frame::Read { from }),
            any::<u32>().prop_map(|requests| Frame::Acknowledge { requests }),
            any::<u64>().prop_map(|len| Frame::ReadResponse { len }),
            prop_oneof![Just(Refusal::InvalidRequest), Just(Refusal::Access), Just(Refusal::ReceiverNotReady)]
                .prop_map(|reason| Frame::Refuse { reason }),
            Just(Frame::NearlyTaken),
            any::<u64>().prop_map(|len| Frame::Padding { len }),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_encoding(frame in frames()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }

        #[test]
        fn any_bytes_are_one_frame_or_none(mut bytes: [u8; Frame::LEN], kind in 0u8..9, flags in 0u8..5) {
            bytes[0] = kind;
            bytes[1] = flags;
            bytes[2..4].fill(0);
            if let Some(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }
    }
}
