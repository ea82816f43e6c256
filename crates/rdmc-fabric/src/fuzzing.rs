//! Private decoders, public for the fuzz targets. The module exists only with the feature `fuzzing`.

use crate::memory::ObjectDescriptor;
use crate::remote::RemoteMemory;
use crate::tcp::frame::{Frame, Refusal};

/// First bytes of a data connection.
pub const DATA_MAGIC: [u8; 8] = crate::environment::DATA_MAGIC;
/// Length in bytes of a header of the fabric `tcp`.
pub const TCP_HEADER_LEN: usize = Frame::LEN;

/// Decodes a header of the fabric `tcp` and encodes it again; returns `None` if it is invalid.
pub fn recode_tcp_header(header: &[u8; TCP_HEADER_LEN]) -> Option<[u8; TCP_HEADER_LEN]> {
    Frame::decode(header).map(Frame::encode)
}

/// Encodes one header of each kind, with its name; those that access memory access `at`.
pub fn tcp_headers(at: RemoteMemory) -> Vec<(&'static str, [u8; TCP_HEADER_LEN])> {
    let (imm, len, quiet) = (Some(7), at.len, true);
    let headers = [
        ("send", Frame::Send { imm: None, quiet, len }),
        ("send-imm", Frame::Send { imm, quiet: false, len }),
        ("write", Frame::Write { imm: None, quiet: false, to: at }),
        ("write-imm", Frame::Write { imm, quiet, to: at }),
        ("read", Frame::Read { from: at }),
        ("acknowledge", Frame::Acknowledge { requests: 1 }),
        ("read-response", Frame::ReadResponse { len }),
        ("refuse", Frame::Refuse { reason: Refusal::Access }),
        ("nearly-taken", Frame::NearlyTaken),
        ("padding", Frame::Padding { len }),
    ];
    headers.map(|(name, frame)| (name, frame.encode())).to_vec()
}

/// Decodes an object's descriptor and encodes it again; returns `None` if it is invalid.
pub fn recode_object_descriptor(bytes: &[u8]) -> Option<[u8; ObjectDescriptor::LEN]> {
    ObjectDescriptor::decode(bytes).map(ObjectDescriptor::encode)
}

#[cfg(target_os = "linux")]
pub use shm::{SHM_ENTRY_LEN, SHM_REQUEST_LEN, recode_shm_entry, recode_shm_request, shm_entries, shm_requests};

#[cfg(target_os = "linux")]
mod shm {
    use crate::shm::ring::{ENTRY_LEN, Entry, EntryKind, INLINE_LEN_MAX, Payload, Target};
    use crate::shm::wire::Request;

    /// Length in bytes of an entry of the fabric `shm`.
    pub const SHM_ENTRY_LEN: usize = ENTRY_LEN;
    /// Length in bytes of a request at a node's socket.
    pub const SHM_REQUEST_LEN: usize = Request::LEN;

    /// Decodes, encodes and decodes an entry of the fabric `shm`; returns whether it stays the same, `None` if it is
    /// invalid.
    pub fn recode_shm_entry(entry: &[u8; ENTRY_LEN]) -> Option<bool> {
        let entry = Entry::decode(entry)?;
        Some(entry.len <= entry.total && Entry::decode(&entry.encode()) == Some(entry))
    }

    /// Decodes a request at a node's socket and encodes it again; returns `None` if it is invalid.
    pub fn recode_shm_request(request: &[u8; SHM_REQUEST_LEN]) -> Option<[u8; SHM_REQUEST_LEN]> {
        Request::decode(request).map(Request::encode)
    }

    /// Encodes one entry of each kind, with its name.
    pub fn shm_entries() -> Vec<(&'static str, [u8; ENTRY_LEN])> {
        let (target, inline) = (Target { key: 7, address: 8 }, Payload::Inline([9; INLINE_LEN_MAX]));
        let shared = Payload::Shared { object: 5, offset: 1 << 30 };
        let entry = |kind, len, payload| {
            let quiet = len == 72;
            let imm = quiet.then_some(3);
            Entry { kind, imm, first: true, last: true, quiet, total: 1 << 20, len, payload }.encode()
        };
        let (send, write) = (entry(EntryKind::Send, 1 << 20, shared), entry(EntryKind::Write(target), 72, inline));
        let (read, data) = (entry(EntryKind::Read(target), 0, inline), entry(EntryKind::ReadData, 1 << 18, shared));
        vec![("send", send), ("write", write), ("read", read), ("read-data", data)]
    }

    /// Encodes one request of each kind, with its name.
    pub fn shm_requests() -> Vec<(&'static str, [u8; SHM_REQUEST_LEN])> {
        let meet = Request::Meet { to: 1, from: u128::MAX, name: 3 };
        let requests = [
            ("meet", meet),
            ("open", Request::Open { object: u64::MAX }),
            ("stay", Request::Stay),
            ("attach", Request::Attach { token: 7 }),
        ];
        requests.map(|(name, request)| (name, request.encode())).to_vec()
    }
}
