//! Decoders that are private otherwise, for fuzzers: exists under `--cfg fuzzing` only.

use crate::remote::RemoteMemory;
use crate::tcp::frame::{Frame, Refusal};

/// First bytes of a data connection.
pub const DATA_MAGIC: [u8; 8] = crate::environment::DATA_MAGIC;
/// Bytes of a header of the fabric `tcp`.
pub const TCP_HEADER_LEN: usize = Frame::LEN;

/// Decodes a header of the fabric `tcp` and encodes it again; none if it is none.
pub fn recode_tcp_header(header: &[u8; TCP_HEADER_LEN]) -> Option<[u8; TCP_HEADER_LEN]> {
    Frame::decode(header).map(Frame::encode)
}

/// Encodes one header of each kind, by its name; those that ask for memory ask for `at`.
pub fn tcp_headers(at: RemoteMemory) -> Vec<(&'static str, [u8; TCP_HEADER_LEN])> {
    let (imm, len) = (Some(7), at.len);
    let headers = [
        ("send", Frame::Send { imm: None, len }),
        ("send-imm", Frame::Send { imm, len }),
        ("write", Frame::Write { imm: None, to: at }),
        ("write-imm", Frame::Write { imm, to: at }),
        ("read", Frame::Read { from: at }),
        ("acknowledge", Frame::Acknowledge { requests: 1 }),
        ("read-response", Frame::ReadResponse { len }),
        ("refuse", Frame::Refuse { reason: Refusal::Access }),
        ("nearly-taken", Frame::NearlyTaken),
    ];
    headers.map(|(name, frame)| (name, frame.encode())).to_vec()
}
