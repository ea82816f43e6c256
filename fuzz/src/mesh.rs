//! Targets for control connections: frames, the reader of their stream, the members in an invitation.

use std::collections::BTreeSet;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use rdmc::NodeId;
use rdmc::fuzzing::{Frame, Invited};
use tokio::io::{AsyncRead, ReadBuf};

use crate::allocation::{PER_BYTE, bounded};
use crate::{Seed, named};

/// Checks that a decoded frame survives another round trip, and does not grow.
pub fn frame(bytes: &[u8]) {
    let Ok(frame) = bounded(bytes.len(), PER_BYTE, || Frame::decode(bytes)) else { return };
    let encoded = frame.encode();
    let (len, value) = encoded.split_first_chunk().expect("an encoded frame has a length");
    assert_eq!(u32::from_le_bytes(*len) as usize, value.len());
    assert!(value.len() <= bytes.len(), "{frame:?} grew from {} to {} bytes", bytes.len(), value.len());
    assert_eq!(Frame::decode(value).expect("it was encoded here"), frame);
}

/// Checks that a stream yields the same frames, however it is cut.
///
/// The first byte decides the cut, and whether the fuzzer gets the right check values for free. The first frame may be
/// that of a handshake.
pub fn stream(bytes: &[u8]) {
    let Some((&first, stream)) = bytes.split_first() else { return };
    let sealed = if first & 8 == 0 { Frame::seal(stream) } else { stream.to_vec() };
    let piece = usize::from(first % 8) + 1;
    let whole = bounded(bytes.len(), PER_BYTE, || all_frames(&sealed, usize::MAX));
    let pieces = bounded(bytes.len(), PER_BYTE, || all_frames(&sealed, piece));
    assert_eq!(whole, pieces);
    let greeting = |piece| greeting(&sealed, piece);
    assert_eq!(bounded(bytes.len(), PER_BYTE, || greeting(usize::MAX)), greeting(piece));
    if whole.1.is_none() {
        let again: Vec<u8> = whole.0.iter().flat_map(Frame::encode).collect();
        assert_eq!(all_frames(&Frame::seal(&again), usize::MAX), (whole.0, None));
    }
}

/// Checks that an invitation is accepted only if its members are valid.
pub fn invitation(bytes: &[u8]) {
    let Ok(frame) = Frame::decode(bytes) else { return };
    let Some(Invited { you, members, sound }) = bounded(bytes.len(), PER_BYTE, || frame.invited()) else { return };
    let nodes: BTreeSet<NodeId> = members.iter().map(|(node, _)| *node).collect();
    let printable = |address: &str| address.len() <= 300 && !address.contains(char::is_control);
    let all = members.iter().all(|(_, address)| printable(address));
    let sensible = all && nodes.len() == members.len() && nodes.contains(&you) && you != NodeId(0);
    assert_eq!(sound, sensible);
}

/// Checks that a member of a group reaches an outcome and keeps it, whatever the others send about the group's end.
pub fn agreement(bytes: &[u8]) {
    rdmc::fuzzing::agreement::play(bytes);
}

/// Seeds of [`agreement`].
pub fn agreement_seeds() -> Vec<Seed> {
    named(rdmc::fuzzing::agreement::examples())
}

/// Seeds of [`frame`].
pub fn frame_seeds() -> Vec<Seed> {
    named(Frame::examples().into_iter().map(|(name, frame)| (name, frame.encode().split_off(4))))
}

/// Seeds of [`stream`].
pub fn stream_seeds() -> Vec<Seed> {
    let all: Vec<u8> = Frame::examples().iter().flat_map(|(_, frame)| frame.encode()).collect();
    let cut = |cut: u8, bytes: &[u8]| [&[cut], bytes].concat();
    let long = u32::MAX.to_le_bytes();
    named([
        ("all", cut(2, &all)),
        ("none", cut(0, &[])),
        ("too-long", cut(0, &long)),
        ("cut-in-value", cut(6, &all[..30])),
        ("cut-in-length", cut(0, &all[..2])),
        ("without-checks", cut(8, &all)),
    ])
}

/// Seeds of [`invitation`].
pub fn invitation_seeds() -> Vec<Seed> {
    frame_seeds().into_iter().filter(|(name, _)| name == "invite").collect()
}

/// Reads frames to the end, or to the first error.
fn all_frames(bytes: &[u8], piece: usize) -> (Vec<Frame>, Option<io::ErrorKind>) {
    let (frames, ended) = Frame::read_all(&mut Pieces { bytes, piece }).now_or_never().expect("the stream never waits");
    (frames, ended.err().map(|error| error.kind()))
}

/// Reads one frame of a handshake.
fn greeting(bytes: &[u8], piece: usize) -> Result<Option<Frame>, io::ErrorKind> {
    let read = Frame::read(&mut Pieces { bytes, piece }).now_or_never().expect("the stream never waits");
    read.map_err(|error| error.kind())
}

/// Bytes that arrive in pieces.
struct Pieces<'a> {
    bytes: &'a [u8],
    piece: usize,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let len = self.piece.min(room.remaining()).min(self.bytes.len());
        let (piece, rest) = self.bytes.split_at(len);
        room.put_slice(piece);
        self.bytes = rest;
        Poll::Ready(Ok(()))
    }
}
