//! What a slab of a gateway holds: its note lists the pieces of flows, in order.
//!
//! A note is the pieces in the postcard encoding, one after the other. The slab has their bytes.

use serde::{Deserialize, Serialize};

use super::target::{NAME_LEN_MAX, Target};

/// The number of a flow: its entrance counts from 1.
pub(super) type FlowNumber = u64;

/// One entry of a note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Piece {
    /// The entrance has a new flow, with the next number, which has passed so many gateways since a program opened it.
    Open { flow: FlowNumber, target: Target, passed: u8 },
    /// The exit has connected the flow.
    Opened { flow: FlowNumber },
    /// The exit does not connect the flow, which is over.
    Refused { flow: FlowNumber, reason: RefusedReason },
    /// Bytes of a flow.
    Bytes { flow: FlowNumber, len: u32 },
    /// The flow has no more bytes in this direction.
    Finished { flow: FlowNumber },
    /// The flow is over, in both directions.
    Reset { flow: FlowNumber },
    /// The other end may send so many more bytes of a flow.
    Grant { flow: FlowNumber, bytes: u64 },
}

/// Why a flow is not connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedReason {
    /// The list of the exit, or of a gateway on the way to it, does not allow the target.
    #[error("the exit does not allow the target")]
    NotAllowed,
    /// The exit cannot resolve the name.
    #[error("the exit does not know the host")]
    NoSuchHost,
    /// Nothing listens at the target.
    #[error("the target refuses the connection")]
    ConnectionRefused,
    /// The target's host cannot be reached.
    #[error("the host cannot be reached")]
    HostUnreachable,
    /// The target's network cannot be reached.
    #[error("the network cannot be reached")]
    NetworkUnreachable,
    /// The target does not answer in time.
    #[error("the target does not answer in time")]
    TimedOut,
    /// The gateway has as many flows as it may have.
    #[error("the gateway has too many flows")]
    TooMany,
    /// The gateway is ending, or the path between its ends is lost.
    #[error("the gateway takes no more flows")]
    Closing,
    /// The connection failed for another reason.
    #[error("the connection failed")]
    Failed,
    /// The flow has passed as many gateways as it may: they lead to each other in a loop.
    #[error("the flow has passed too many gateways, which may lead to each other in a loop")]
    Loop,
}

/// The other end has broken the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

/// Writes a note.
#[derive(Debug, Default)]
pub(super) struct NoteWriter {
    list: Vec<u8>,
    /// Bytes of a flow that are not yet in the list, since more of the same flow may follow.
    last: Option<(FlowNumber, u32)>,
}

impl NoteWriter {
    /// Tells whether any entry fits.
    pub(super) fn has_room(&self) -> bool {
        self.list.len() + 2 * ENTRY_LEN_MAX <= LIST_LEN_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.last.is_none()
    }

    pub(super) fn push(&mut self, piece: &Piece) {
        self.flush();
        self.append(piece);
    }

    /// Adds bytes of a flow, which follow those before in the slab.
    pub(super) fn push_bytes(&mut self, flow: FlowNumber, len: u32) {
        match &mut self.last {
            Some((last, sum)) if *last == flow => *sum += len,
            _ => {
                self.flush();
                self.last = Some((flow, len));
            }
        }
    }

    /// Returns the note.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.flush();
        self.list
    }

    fn flush(&mut self) {
        if let Some((flow, len)) = self.last.take() {
            self.append(&Piece::Bytes { flow, len });
        }
    }

    fn append(&mut self, piece: &Piece) {
        let list = std::mem::take(&mut self.list);
        self.list = postcard::to_extend(piece, list).expect("pieces have no unsized parts");
    }
}

/// Reads the pieces of a note.
///
/// # Errors
/// It is malformed.
pub(super) fn decode(note: &[u8]) -> Result<Vec<Piece>, Violation> {
    const MALFORMED: Violation = Violation("a malformed note");
    let mut list = note;
    let mut pieces = Vec::new();
    while !list.is_empty() {
        let (piece, rest) = postcard::take_from_bytes(list).map_err(|_| MALFORMED)?;
        if let Piece::Open { target: Target::Name { host, .. }, .. } = &piece
            && host.len() > NAME_LEN_MAX
        {
            return Err(MALFORMED);
        }
        pieces.push(piece);
        list = rest;
    }
    Ok(pieces)
}

/// Longest list of a note in bytes.
const LIST_LEN_MAX: usize = 40 << 10;
/// Longest entry in bytes: a name, and numbers.
const ENTRY_LEN_MAX: usize = NAME_LEN_MAX + 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces() -> impl Strategy<Value = Piece> {
        let flow = any::<u64>;
        let target = prop_oneof![
            any::<std::net::SocketAddrV4>().prop_map(|address| Target::Address(address.into())),
            ("[a-z]{1,255}", any::<u16>()).prop_map(|(host, port)| Target::Name { host, port }),
        ];
        prop_oneof![
            (flow(), target, any::<u8>()).prop_map(|(flow, target, passed)| Piece::Open { flow, target, passed }),
            flow().prop_map(|flow| Piece::Opened { flow }),
            flow().prop_map(|flow| Piece::Refused { flow, reason: RefusedReason::TimedOut }),
            flow().prop_map(|flow| Piece::Finished { flow }),
            flow().prop_map(|flow| Piece::Reset { flow }),
            (flow(), any::<u64>()).prop_map(|(flow, bytes)| Piece::Grant { flow, bytes }),
        ]
    }

    proptest! {
        #[test]
        fn notes_survive_the_wire(sent in proptest::collection::vec(pieces(), 0..40)) {
            let mut writer = NoteWriter::default();
            sent.iter().for_each(|piece| writer.push(piece));
            prop_assert_eq!(decode(&writer.finish()).unwrap(), sent);
        }

        #[test]
        fn any_bytes_are_a_note_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(pieces) = decode(&bytes) {
                prop_assert!(pieces.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn a_note_that_is_full_is_not_too_long() {
        let mut writer = NoteWriter::default();
        let target = Target::Name { host: "a".repeat(NAME_LEN_MAX), port: u16::MAX };
        while writer.has_room() {
            writer.push(&Piece::Open { flow: u64::MAX, target: target.clone(), passed: u8::MAX });
            writer.push_bytes(u64::MAX, u32::MAX);
        }
        let note = writer.finish();
        assert!(note.len() <= 64 << 10, "{}", note.len());
    }

    #[test]
    fn bytes_of_one_flow_are_one_piece() {
        let mut writer = NoteWriter::default();
        writer.push_bytes(1, 10);
        writer.push_bytes(1, 5);
        writer.push_bytes(2, 1);
        writer.push(&Piece::Finished { flow: 2 });
        writer.push_bytes(2, 1);
        let bytes = |flow, len| Piece::Bytes { flow, len };
        let expected = [bytes(1, 15), bytes(2, 1), Piece::Finished { flow: 2 }, bytes(2, 1)];
        assert_eq!(decode(&writer.finish()).unwrap(), expected);
    }
}
