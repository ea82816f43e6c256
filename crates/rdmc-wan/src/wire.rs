//! The frames of a session's control connection.
//!
//! [Frames](rdmc_fabric::frames) have values of [`Frame`] in the postcard encoding, of at most [`FRAME_LEN_MAX`] bytes.
//! The first frame of a connection is an `Open`, the answer an `Opened` or a `Refused`.

use std::fmt;
use std::io;

use rdmc_fabric::frames::{FrameCheck, PREFIX_LEN, len_of, read_prefix, read_value, set_len, verify};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;

/// Changes whenever frames change their meaning; ends of different versions do not talk.
pub(crate) const PROTOCOL_VERSION: u16 = 2;
/// Longest slab whose bytes travel with its announcement, in bytes.
pub(crate) const INLINE_LEN_MAX: usize = 16 << 10;
/// How many times as long as such a slab a whole one is, at least.
pub(crate) const INLINE_SHARE: usize = 64;
/// Longest value of a frame in bytes.
pub(crate) const FRAME_LEN_MAX: usize = 256 << 10;

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// A slab is filled.
    Slab(SlabFrame),
    /// All slabs before this number are taken.
    Taken { slabs: u64 },
    /// No slab follows these.
    Finished { slabs: u64 },
    /// This end wants no more slabs.
    Stopped,
    /// A message beside the slabs.
    Message { number: u64, bytes: Vec<u8> },
    /// All messages before this number were received.
    Heard { messages: u64 },
    /// Asks for a sign of life. The other end returns the moment, which only this end understands.
    Ping { at: u64 },
    /// Gives a sign of life.
    Pong { at: u64 },
    /// This end has failed, and the session with it.
    Abort { reason: String },
    /// Both directions have ended in good order.
    Goodbye,
    /// Opens a session, or goes on with it over another connection. Neither this number nor those of the answers are
    /// numbers of a node's first frames, so that nodes and sessions do not take each other for another version.
    Open(Open),
    /// Accepts an `Open`.
    Opened(Opened),
    /// Refuses an `Open`.
    Refused(RefusedReason),
    /// Memory for a slab, which the other end may write.
    Landing { place: [u8; 24] },
}

/// What the end that opens a connection says first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Open {
    pub(crate) version: u16,
    pub(crate) session: u128,
    /// How far this end has come; `None` for a new session.
    pub(crate) progress: Option<Progress>,
    /// The fabrics that it can use, in order of preference.
    pub(crate) offers: Vec<Offer>,
    pub(crate) terms: Terms,
    pub(crate) metadata: Vec<u8>,
}

/// What the end that accepts a connection answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// How far this end has come.
    pub(crate) progress: Progress,
    /// Which of the offers it takes.
    pub(crate) chosen: u8,
    /// The endpoints of its queue pairs, as many as in the offer.
    pub(crate) endpoints: Vec<Vec<u8>>,
    pub(crate) terms: Terms,
    pub(crate) metadata: Vec<u8>,
}

/// A fabric, and the endpoints of queue pairs that were made for the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) fabric: String,
    pub(crate) endpoints: Vec<Vec<u8>>,
}

/// What an end has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// Slabs, from the first.
    pub(crate) slabs: u64,
    /// Messages, from the first.
    pub(crate) messages: u64,
}

/// What each end states of itself. Of lengths and times, the lesser value applies to both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    /// Longest slab in bytes.
    pub(crate) slab_len: u32,
    /// After this time without a sign of life, a connection counts as lost.
    pub(crate) detection_ms: u32,
    /// The rate at which slabs may come to this end, in bytes per second.
    pub(crate) rate: Option<u64>,
    /// Whether the ends are distant, as the one that opens the session has seen.
    pub(crate) is_distant: bool,
    /// Whether the other end writes slabs into landings of this one.
    pub(crate) has_landings: bool,
}

/// A filled slab.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlabFrame {
    pub(crate) number: u64,
    pub(crate) len: u32,
    /// The XXH3 of its bytes, in 128 bits.
    pub(crate) check: u128,
    pub(crate) place: Place,
    /// What the application says of it.
    pub(crate) note: Vec<u8>,
}

/// Where the bytes of a slab are.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// In memory that can be read.
    Exposed([u8; 24]),
    /// Here: a short slab saves a round trip.
    Inline(Vec<u8>),
    /// They are written into the next landing, in so many pieces.
    Written { pieces: u32 },
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out of logs.
        match self {
            Self::Exposed(_) => f.write_str("Exposed"),
            Self::Inline(bytes) => write!(f, "Inline({} bytes)", bytes.len()),
            Self::Written { pieces } => write!(f, "Written({pieces} pieces)"),
        }
    }
}

impl fmt::Debug for SlabFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabFrame").field("number", &self.number).field("len", &self.len).finish_non_exhaustive()
    }
}

/// Why a session is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum RefusedReason {
    #[error("it speaks version {ours} of the protocol, this end speaks version {PROTOCOL_VERSION}")]
    Version { ours: u16 },
    #[error("it does not know the session: it was started again, or had given it up")]
    Unknown,
    #[error("it offers {ours}, not {theirs}")]
    Fabrics { ours: String, theirs: String },
    #[error("{reason}")]
    Declined { reason: String },
    #[error("it is busy")]
    Busy,
}

/// Encodes a frame; `check` is that of its direction.
pub(crate) fn encode(frame: &Frame, check: &mut FrameCheck, out: &mut Vec<u8>) {
    let mut bytes = postcard::to_extend(frame, vec![0; PREFIX_LEN]).expect("frames have no unsized parts");
    set_len(&mut bytes);
    check.seal(&mut bytes);
    out.append(&mut bytes);
}

/// Reads the next frame; `None` if the stream ended between frames.
///
/// # Errors
/// The stream's. Of the kind `InvalidData`, if the frame is too long, was changed on the way, or is none.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin), check: &mut FrameCheck) -> io::Result<Option<Frame>> {
    let Some(prefix) = read_prefix(stream).await? else { return Ok(None) };
    let len = len_of(prefix);
    if len > FRAME_LEN_MAX {
        return Err(malformed(&format!("a frame of {len} bytes exceeds {FRAME_LEN_MAX}")));
    }
    let value = read_value(stream, prefix).await?;
    verify(stream, &prefix, &value, check).await?;
    decode(&value).map(Some)
}

/// Decodes the value of a frame.
pub(crate) fn decode(bytes: &[u8]) -> io::Result<Frame> {
    match postcard::take_from_bytes(bytes) {
        Ok((frame, [])) => Ok(frame),
        Ok(_) => Err(malformed("a frame has bytes left over")),
        Err(error) => Err(malformed(&format!("not a frame: {error}"))),
    }
}

/// Returns a text of the other end without control characters, which could steer a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { char::REPLACEMENT_CHARACTER } else { letter }).collect()
}

fn malformed(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..80)
    }

    fn terms() -> impl Strategy<Value = Terms> {
        any::<(u32, u32, Option<u64>, bool, bool)>().prop_map(
            |(slab_len, detection_ms, rate, is_distant, has_landings)| Terms {
                slab_len,
                detection_ms,
                rate,
                is_distant,
                has_landings,
            },
        )
    }

    fn places() -> impl Strategy<Value = Place> {
        prop_oneof![
            any::<[u8; 24]>().prop_map(Place::Exposed),
            bytes().prop_map(Place::Inline),
            any::<u32>().prop_map(|pieces| Place::Written { pieces }),
        ]
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let progress = || (any::<u64>(), any::<u64>()).prop_map(|(slabs, messages)| Progress { slabs, messages });
        let endpoints = || proptest::collection::vec(bytes(), 0..3);
        let offer = (".{0,8}", endpoints()).prop_map(|(fabric, endpoints)| Offer { fabric, endpoints });
        let offers = proptest::collection::vec(offer, 0..3);
        prop_oneof![
            (any::<u16>(), any::<u128>(), proptest::option::of(progress()), offers, terms(), bytes()).prop_map(
                |(version, session, progress, offers, terms, metadata)| {
                    Frame::Open(Open { version, session, progress, offers, terms, metadata })
                }
            ),
            (progress(), any::<u8>(), endpoints(), terms(), bytes()).prop_map(
                |(progress, chosen, endpoints, terms, metadata)| {
                    Frame::Opened(Opened { progress, chosen, endpoints, terms, metadata })
                }
            ),
            any::<u16>().prop_map(|ours| Frame::Refused(RefusedReason::Version { ours })),
            ".{0,20}".prop_map(|reason| Frame::Refused(RefusedReason::Declined { reason })),
            (any::<u64>(), any::<u32>(), any::<u128>(), places(), bytes()).prop_map(
                |(number, len, check, place, note)| Frame::Slab(SlabFrame { number, len, check, place, note })
            ),
            any::<u64>().prop_map(|slabs| Frame::Taken { slabs }),
            any::<u64>().prop_map(|slabs| Frame::Finished { slabs }),
            Just(Frame::Stopped),
            (any::<u64>(), bytes()).prop_map(|(number, bytes)| Frame::Message { number, bytes }),
            any::<u64>().prop_map(|messages| Frame::Heard { messages }),
            any::<u64>().prop_map(|at| Frame::Ping { at }),
            any::<u64>().prop_map(|at| Frame::Pong { at }),
            ".{0,20}".prop_map(|reason| Frame::Abort { reason }),
            Just(Frame::Goodbye),
            any::<[u8; 24]>().prop_map(|place| Frame::Landing { place }),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_the_wire(sent in proptest::collection::vec(frames(), 0..8)) {
            let (mut bytes, mut check) = (Vec::new(), FrameCheck::default());
            sent.iter().for_each(|frame| encode(frame, &mut check, &mut bytes));
            let (mut stream, mut check) = (&bytes[..], FrameCheck::default());
            for frame in sent {
                let got = read(&mut stream, &mut check).now_or_never().expect("the bytes are there");
                prop_assert_eq!(got.unwrap(), Some(frame));
            }
            prop_assert!(read(&mut stream, &mut check).now_or_never().unwrap().unwrap().is_none());
        }

        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }

        #[test]
        fn a_changed_bit_is_found(frame in frames(), at: prop::sample::Index, bit in 0u8..8) {
            let mut bytes = Vec::new();
            encode(&frame, &mut FrameCheck::default(), &mut bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let got = read(&mut &bytes[..], &mut FrameCheck::default()).now_or_never().expect("the bytes are there");
            prop_assert!(got.is_err(), "{:?}", got);
        }
    }
}
