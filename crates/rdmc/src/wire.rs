//! The frames of control connections.
//!
//! [Frames](rdmc_fabric::frames) have values of [`Frame`] in the postcard encoding, of at most [`FRAME_LEN_MAX`] bytes.
//! The first frame of a connection is a `Hello` or an `Invite`.

use std::collections::BTreeSet;
use std::fmt;
use std::io;

pub(crate) use rdmc_fabric::frames::{CHECK_LEN, FrameCheck};
use rdmc_fabric::frames::{PREFIX_LEN, len_of, read_prefix, read_value, set_len, verify};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;

use crate::fabrics::{ChosenFabric, FabricNames};
use crate::id::{GroupId, NodeId};

pub(crate) mod end;

use end::EndFrame;

/// Changes whenever frames change their meaning; nodes of different versions do not talk.
pub(crate) const PROTOCOL_VERSION: u16 = 14;
/// Longest frame in bytes: an invitation.
pub(crate) const FRAME_LEN_MAX: usize = 4 << 20;
/// Longest piece of a block in one frame, in bytes.
pub(crate) const PIECE_LEN_MAX: usize = 256 << 10;
/// Longest frame in bytes after the handshake.
pub(crate) const LINK_FRAME_LEN_MAX: usize = 1 << 20;

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// Opens a node's connection to another of the same cluster. The incarnation is random, and another one in each
    /// life of the node.
    Hello { version: u16, cluster: u128, from: NodeId, to: NodeId, incarnation: u64 },
    /// Accepts a `Hello`.
    Welcome { incarnation: u64 },
    /// Refuses a `Hello` or an `Invite`.
    Reject { reason: RejectReason },
    /// Asks a listener to become a member of a new cluster, on one of these fabrics.
    Invite {
        version: u16,
        cluster: u128,
        you: NodeId,
        members: Vec<(NodeId, String)>,
        fabrics: FabricNames,
        payload: Vec<u8>,
        /// The detection time of all nodes of the cluster.
        detection_ms: u32,
    },
    /// Accepts an `Invite`, on any of these of its fabrics, and answers its payload.
    Accept { fabrics: FabricNames, reply: Vec<u8> },
    /// Enough have accepted: start, on this fabric, without these nodes. The inviting application concludes this from
    /// the replies of those that take part.
    Go { chosen: ChosenFabric, conclusion: Vec<u8>, missing: BTreeSet<NodeId> },
    /// Concerns one group.
    Group { group: GroupId, frame: GroupFrame },
    /// Ends the connection in good order.
    Goodbye,
    /// Asks for a sign of life.
    Ping,
    /// Gives a sign of life.
    Pong,
    /// Withdraws an invitation that was accepted: this node cannot take part, for this reason.
    Withdrawn { because_of: NodeId, reason: String },
}

/// The first frame of the other end is of another version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it speaks version {theirs} of the protocol, this node speaks version {PROTOCOL_VERSION}")]
pub(crate) struct OtherVersion {
    pub(crate) theirs: u16,
}

impl OtherVersion {
    /// Returns the version that a handshake's first frame names, if it is another one.
    ///
    /// In every version `Hello`, `Invite` and the rejection of a version begin with their number and a version.
    fn of(value: &[u8]) -> Option<Self> {
        let (frame, rest) = postcard::take_from_bytes::<u32>(value).ok()?;
        let rest = match frame {
            HELLO | INVITE => rest,
            REJECT => match postcard::take_from_bytes::<u32>(rest).ok()? {
                (REJECT_VERSION, rest) => rest,
                _ => return None,
            },
            _ => return None,
        };
        let (theirs, _) = postcard::take_from_bytes::<u16>(rest).ok()?;
        (theirs != PROTOCOL_VERSION).then_some(Self { theirs })
    }
}

/// The other end sends something that is no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotFrames {
    first: [u8; 4],
}

impl std::error::Error for NotFrames {}

impl fmt::Display for NotFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.first {
            b"rdmc" => f.write_str("it sends what only the end that opens a connection sends"),
            first => write!(f, "its first bytes are \"{}\"", first.escape_ascii()),
        }
    }
}

/// Why a connection is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum RejectReason {
    #[error("it speaks version {ours} of the protocol, this node speaks version {PROTOCOL_VERSION}")]
    Version { ours: u16 },
    #[error("it is not (or not yet) a node of this cluster")]
    Cluster,
    #[error("it is not the intended node, or does not know this one")]
    Identity,
    #[error("it takes no invitations")]
    NoInvitations,
    #[error("it offers {offers}, not {asked}")]
    Fabrics { offers: FabricNames, asked: FabricNames },
    #[error("{reason}")]
    Declined { reason: String },
    #[error("it is busy")]
    Busy,
}

/// A frame between two members of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GroupFrame {
    /// To a member to which this one connects: by what they exchange blocks, and by what they exchange rows of the
    /// status table. `told` is the number of `Holding` frames before it.
    Offer { spec: [u8; 32], told: u32, blocks: Option<BlockEndpoints>, table: Option<TableEndpoint> },
    /// From the root, where members cannot learn it from the first block: the size of a message.
    Announce { message: u64, size: u64 },
    /// To the root: this member's application has let go of these messages without storing them.
    LetGo { first: u64, count: u64 },
    /// Asks a member to write its row of the status table again.
    RepeatRow,
    /// To all, before a group is formed that continues another: the blocks of an interrupted message that are here.
    Holding { message: u64, size: u64, blocks: Vec<u8> },
    /// To the root of a delta group, about an announced message: the checksums of the blocks that are here, from the
    /// first. The rest follows unless `is_whole`.
    Have { message: u64, checksums: Vec<u8>, is_whole: bool },
    /// From the root: a member has these blocks of a message, equal to the root's.
    Parts { message: u64, member: u32, blocks: Vec<u8> },
    /// From the root, after the parts of all members: the message begins.
    Begin { message: u64 },
    /// To the root: how long this member has waited for others lately.
    WaitTimes { on: Vec<WaitTimes> },
    /// From the root: this member holds the others up; or none does any more.
    Slow { member: Option<u32> },
    /// Concerns the end of the group.
    End(EndFrame),
    /// Asks for a piece of a block that came corrupted.
    Fetch(PieceRequest),
    /// The piece, if the member has it.
    Piece { wanted: PieceRequest, piece: Option<BlockPiece> },
    /// From the root: the blocks of messages that have at least so many share ports.
    RunFree { from_blocks: u32 },
    /// To the root: asks for a slot of the ring that came corrupted.
    FetchSlot { slot: u64 },
    /// From the root: the slot, unless all have read it.
    Slot { slot: u64, bytes: Option<Vec<u8>> },
    /// To the root: the bytes of messages a second that this member's port leaves to the group, if other groups share
    /// it by weights and this one is held back.
    Allot { rate: Option<u64> },
}

/// What a neighbour needs to exchange blocks with a member: the endpoints of two queue pairs, and the cells that it may
/// write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockEndpoints {
    pub(crate) data: Vec<u8>,
    pub(crate) ready: Vec<u8>,
    pub(crate) cells: [u8; 24],
}

/// What a member needs to write its row of the status table to another: the endpoint of a queue pair, and the place of
/// the row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TableEndpoint {
    pub(crate) queue_pair: Vec<u8>,
    pub(crate) row: [u8; 24],
    /// At a receiver of a group with a ring: its place.
    pub(crate) ring: Option<[u8; 24]>,
}

/// How long one member has waited for another within a window, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitTimes {
    /// The rank of the other.
    pub(crate) on: u32,
    /// For its grants.
    pub(crate) ready_ms: u32,
    /// For blocks to leave to it.
    pub(crate) leaving_ms: u32,
    /// For its blocks.
    pub(crate) arriving_ms: u32,
    /// How long it was receiving blocks, or was due to receive one.
    pub(crate) busy_ms: u32,
    /// Blocks that it has received.
    pub(crate) blocks: u32,
}

/// A piece of a block that a member wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PieceRequest {
    pub(crate) message: u64,
    /// `None` for the first block that the member gets of the message: which one that is depends on the size.
    pub(crate) block: Option<u32>,
    /// Where in the block the piece begins, in bytes.
    pub(crate) offset: u32,
}

/// A piece of a block, of [`PIECE_LEN_MAX`] bytes unless the block ends before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockPiece {
    /// The message's size in bytes.
    pub(crate) size: u64,
    pub(crate) block: u32,
    /// Of the whole block.
    pub(crate) checksum: u128,
    pub(crate) bytes: Vec<u8>,
}

/// Encodes a frame of a handshake.
pub(crate) fn encode(frame: &Frame) -> Vec<u8> {
    let mut out = encode_unchecked(frame);
    FrameCheck::default().seal(&mut out);
    out
}

/// Encodes a frame with its length, and without a check value.
pub(crate) fn encode_unchecked(frame: &Frame) -> Vec<u8> {
    let mut out = postcard::to_extend(frame, vec![0; PREFIX_LEN]).expect("frames have no unsized parts");
    set_len(&mut out);
    out
}

/// Decodes the value of a frame.
pub(crate) fn decode(bytes: &[u8]) -> io::Result<Frame> {
    match postcard::take_from_bytes(bytes) {
        Ok((frame, [])) => Ok(frame),
        Ok(_) => Err(malformed("a frame has bytes left over")),
        Err(error) => Err(malformed(&format!("not a frame: {error}"))),
    }
}

/// Reads one frame of a handshake; memory is taken only as bytes arrive. `None` if the stream ended between frames.
///
/// # Errors
/// The stream's; [`OtherVersion`], [`NotFrames`] or [`CorruptFrame`](rdmc_fabric::frames::CorruptFrame), of the kind
/// `InvalidData`; or the frame cannot be decoded.
pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Frame>> {
    let Some(prefix) = read_prefix(stream).await? else { return Ok(None) };
    if len_of(prefix) > FRAME_LEN_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, NotFrames { first: prefix }));
    }
    let value = read_value(stream, prefix).await?;
    if let Some(other) = OtherVersion::of(&value) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, other));
    }
    verify(stream, &prefix, &value, &mut FrameCheck::default()).await?;
    decode(&value).map(Some)
}

/// Reads the next frame, of at most [`LINK_FRAME_LEN_MAX`] bytes, as [`read`] does.
///
/// # Errors
/// The stream's; [`CorruptFrame`], of the kind `InvalidData`; or the frame cannot be decoded.
pub(crate) async fn read_next(
    stream: &mut (impl AsyncRead + Unpin),
    check: &mut FrameCheck,
) -> io::Result<Option<Frame>> {
    let Some(prefix) = read_prefix(stream).await? else { return Ok(None) };
    let len = len_of(prefix);
    if len > LINK_FRAME_LEN_MAX {
        return Err(malformed(&format!("a frame of {len} bytes exceeds {LINK_FRAME_LEN_MAX}")));
    }
    let value = read_value(stream, prefix).await?;
    verify(stream, &prefix, &value, check).await?;
    decode(&value).map(Some)
}

fn malformed(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The numbers of frames that name a version. They are the same in every version.
const HELLO: u32 = 0;
const REJECT: u32 = 2;
const INVITE: u32 = 3;
/// The number of [`RejectReason::Version`].
const REJECT_VERSION: u32 = 0;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    fn fabrics() -> impl Strategy<Value = FabricNames> {
        let names = proptest::collection::btree_set("[a-z0-9]{1,32}", 1..9);
        names.prop_map(|names| names.into_iter().collect::<Vec<_>>().try_into().expect("few, all different"))
    }

    fn group_frames() -> impl Strategy<Value = GroupFrame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..80);
        let wanted = || {
            (any::<u64>(), proptest::option::of(any::<u32>()), any::<u32>())
                .prop_map(|(message, block, offset)| PieceRequest { message, block, offset })
        };
        prop_oneof![
            (
                any::<[u8; 32]>(),
                any::<u32>(),
                proptest::option::of((bytes(), bytes(), any::<[u8; 24]>())),
                proptest::option::of((bytes(), any::<[u8; 24]>(), any::<Option<[u8; 24]>>()))
            )
                .prop_map(|(spec, told, blocks, table)| {
                    let blocks = blocks.map(|(data, ready, cells)| BlockEndpoints { data, ready, cells });
                    let table = table.map(|(queue_pair, row, ring)| TableEndpoint { queue_pair, row, ring });
                    GroupFrame::Offer { spec, told, blocks, table }
                }),
            (any::<u64>(), any::<u64>()).prop_map(|(message, size)| GroupFrame::Announce { message, size }),
            any::<u32>().prop_map(|from_blocks| GroupFrame::RunFree { from_blocks }),
            any::<Option<u64>>().prop_map(|rate| GroupFrame::Allot { rate }),
            any::<u64>().prop_map(|slot| GroupFrame::FetchSlot { slot }),
            (any::<u64>(), proptest::option::of(bytes())).prop_map(|(slot, bytes)| GroupFrame::Slot { slot, bytes }),
            (any::<u64>(), any::<u64>()).prop_map(|(first, count)| GroupFrame::LetGo { first, count }),
            Just(GroupFrame::RepeatRow),
            any::<Option<u32>>().prop_map(|member| GroupFrame::Slow { member }),
            proptest::collection::vec((any::<u32>(), any::<u32>()), 0..5).prop_map(|on| {
                let waited = |(on, ready_ms)| WaitTimes { on, ready_ms, ..WaitTimes::default() };
                GroupFrame::WaitTimes { on: on.into_iter().map(waited).collect() }
            }),
            (any::<u64>(), any::<u64>(), bytes()).prop_map(|(message, size, blocks)| GroupFrame::Holding {
                message,
                size,
                blocks
            }),
            (any::<u64>(), bytes(), any::<bool>()).prop_map(|(message, checksums, is_whole)| GroupFrame::Have {
                message,
                checksums,
                is_whole
            }),
            (any::<u64>(), any::<u32>(), bytes()).prop_map(|(message, member, blocks)| GroupFrame::Parts {
                message,
                member,
                blocks
            }),
            any::<u64>().prop_map(|message| GroupFrame::Begin { message }),
            crate::group::agreement::tests::frames().prop_map(GroupFrame::End),
            wanted().prop_map(GroupFrame::Fetch),
            (wanted(), proptest::option::of((any::<u64>(), any::<u32>(), any::<u128>(), bytes()))).prop_map(
                |(wanted, piece)| {
                    let piece = piece.map(|(size, block, checksum, bytes)| BlockPiece { size, block, checksum, bytes });
                    GroupFrame::Piece { wanted, piece }
                }
            ),
        ]
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let text = "[a-z0-9.:]{0,20}";
        let bytes = || proptest::collection::vec(any::<u8>(), 0..80);
        let member = (any::<u32>().prop_map(NodeId), text);
        prop_oneof![
            (any::<u128>(), any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(cluster, from, to, incarnation)| {
                let (version, from, to) = (PROTOCOL_VERSION, NodeId(from), NodeId(to));
                Frame::Hello { version, cluster, from, to, incarnation }
            }),
            any::<u64>().prop_map(|incarnation| Frame::Welcome { incarnation }),
            text.prop_map(|reason| Frame::Reject { reason: RejectReason::Declined { reason } }),
            (any::<u128>(), proptest::collection::vec(member, 0..5), fabrics(), bytes(), any::<u32>()).prop_map(
                |(cluster, members, fabrics, payload, detection_ms)| {
                    let (version, you) = (PROTOCOL_VERSION, NodeId(3));
                    Frame::Invite { version, cluster, you, members, fabrics, payload, detection_ms }
                }
            ),
            Just(Frame::Reject { reason: RejectReason::Busy }),
            Just(Frame::Reject { reason: RejectReason::Version { ours: PROTOCOL_VERSION } }),
            (fabrics(), fabrics())
                .prop_map(|(offers, asked)| { Frame::Reject { reason: RejectReason::Fabrics { offers, asked } } }),
            (fabrics(), bytes()).prop_map(|(fabrics, reply)| Frame::Accept { fabrics, reply }),
            (fabrics(), proptest::collection::vec(any::<u32>().prop_map(NodeId), 0..5), bytes()).prop_map(
                |(fabrics, lacking, conclusion)| {
                    let passed_over =
                        fabrics.iter().map(|name| (name.clone(), lacking.iter().copied().collect())).collect();
                    let fabric = fabrics.iter().next().expect("there is one").clone();
                    let missing = lacking.into_iter().collect();
                    Frame::Go { chosen: ChosenFabric { fabric, passed_over }, conclusion, missing }
                }
            ),
            (any::<u64>(), group_frames()).prop_map(|(group, frame)| Frame::Group { group: GroupId(group), frame }),
            (any::<u32>(), ".{0,40}").prop_map(|(node, reason)| Frame::Withdrawn { because_of: NodeId(node), reason }),
            Just(Frame::Goodbye),
            Just(Frame::Ping),
            Just(Frame::Pong),
        ]
    }

    fn read_now(mut bytes: &[u8]) -> io::Result<Option<Frame>> {
        read(&mut bytes).now_or_never().expect("a slice never waits")
    }

    proptest! {
        #[test]
        fn frames_survive_the_wire(frame in frames()) {
            prop_assert_eq!(read_now(&encode(&frame)).unwrap(), Some(frame));
        }

        #[test]
        fn a_bit_that_is_changed_or_a_frame_that_is_lost_is_noticed(
            frames in proptest::collection::vec(frames(), 2..5), at: prop::sample::Index, bit in 0u8..8, lost: bool,
        ) {
            let mut check = FrameCheck::default();
            let mut sent: Vec<Vec<u8>> = frames.iter().map(encode_unchecked).collect();
            sent.iter_mut().for_each(|frame| check.seal(frame));
            if lost {
                // The loss of the last frame shows only at the end of the stream.
                sent.remove(at.index(frames.len() - 1));
            }
            let mut bytes = sent.concat();
            if !lost {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
            }
            let (mut rest, mut check, mut heard) = (bytes.as_slice(), FrameCheck::default(), Vec::new());
            let ended = loop {
                match read_next(&mut rest, &mut check).now_or_never().expect("a slice never waits") {
                    Ok(Some(frame)) => heard.push(frame),
                    ended => break ended,
                }
            };
            prop_assert!(ended.is_err(), "{ended:?}");
            prop_assert!(frames.starts_with(&heard));
        }

        #[test]
        fn a_first_frame_of_another_version_names_both_versions(
            version in (0u16..).prop_filter("another one", |version| *version != PROTOCOL_VERSION),
            rest in proptest::collection::vec(any::<u8>(), 0..50),
            frame in prop_oneof![Just(vec![HELLO]), Just(vec![INVITE]), Just(vec![REJECT, REJECT_VERSION])],
        ) {
            // What follows the version may be anything, and there may be no check value.
            let mut value: Vec<u8> = frame.iter().flat_map(|number| postcard::to_stdvec(number).unwrap()).collect();
            value.extend(postcard::to_stdvec(&version).unwrap());
            value.extend(&rest);
            let bytes = [&u32::try_from(value.len()).unwrap().to_le_bytes()[..], &value].concat();
            let error = read_now(&bytes).unwrap_err().to_string();
            let both = format!("version {version} of the protocol, this node speaks version {PROTOCOL_VERSION}");
            prop_assert!(error.contains(&both), "{error}");
        }

        #[test]
        fn a_cut_frame_is_an_error(frame in frames(), cut in 0.0f64..1.0) {
            let whole = encode(&frame);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a short length")]
            let at = 1 + ((whole.len() - 1) as f64 * cut) as usize;
            prop_assert!(at >= whole.len() || read_now(&whole[..at]).is_err());
        }

        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
            let _ = read_now(&bytes);
        }

        #[test]
        fn only_frames_that_name_a_version_are_of_another_one(frame in frames()) {
            let value = encode_unchecked(&frame).split_off(4);
            prop_assert_eq!(OtherVersion::of(&value), None);
        }

        #[test]
        fn a_length_beyond_the_limit_is_refused_before_memory_is_taken(len in (4u32 << 20) + 1..) {
            let error = read_now(&len.to_le_bytes()).unwrap_err();
            prop_assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn versions_stand_where_every_version_looks_for_them() {
        const OTHER: u16 = PROTOCOL_VERSION + 1;
        let hello = Frame::Hello { version: OTHER, cluster: 1, from: NodeId(1), to: NodeId(2), incarnation: 3 };
        let reject = Frame::Reject { reason: RejectReason::Version { ours: OTHER } };
        let invite = Frame::Invite {
            version: OTHER,
            cluster: 1,
            you: NodeId(1),
            members: Vec::new(),
            fabrics: vec!["tcp".to_owned()].try_into().unwrap(),
            payload: Vec::new(),
            detection_ms: 2000,
        };
        for frame in [hello, reject, invite] {
            let value = encode_unchecked(&frame).split_off(4);
            assert_eq!(OtherVersion::of(&value), Some(OtherVersion { theirs: OTHER }), "{frame:?}");
        }
    }

    #[test]
    fn an_end_that_does_not_speak_in_frames_is_quoted() {
        for (bytes, said) in [
            (&b"HTTP/1.1 400 Bad Request"[..], "its first bytes are \"HTTP\""),
            (b"\x16\x03\x01\xff", "its first bytes are \"\\x16\\x03\\x01\\xff\""),
            (b"rdmcCTL1", "it sends what only the end that opens a connection sends"),
        ] {
            assert_eq!(read_now(bytes).unwrap_err().to_string(), said);
        }
    }
}
