//! Private decoders, public for the fuzz targets. The module exists only with the feature `fuzzing`.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use rdmc_schedule::Rank;
use tokio::io::AsyncRead;

use crate::fabrics::{ChosenFabric, FabricNames};
use crate::id::{GroupId, NodeId};
use crate::mesh::roster::Roster;
use crate::table::Row;
use crate::table::ring::{self, RingShape, Slot};
use crate::wire::{self, BlockEndpoints, GroupFrame, PROTOCOL_VERSION, RejectReason, TableEndpoint};

pub mod agreement;

/// A frame of a control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame(wire::Frame);

/// The counts of a member's row of the status table.
///
/// Returns `None` if the check value of member 1 of group 7 is wrong.
pub fn read_row(bytes: &[u8]) -> Option<[u64; 6]> {
    let Row { received, taken, let_go, stable, asked, read } = Row::decode(bytes.first_chunk()?, 7, Rank(1))?;
    Some([received, taken, let_go, stable, asked, read])
}

/// Encodes the row of member 1 of group 7.
pub fn write_row([received, taken, let_go, stable, asked, read]: [u64; 6]) -> Vec<u8> {
    Row { received, taken, let_go, stable, asked, read }.encode(7, Rank(1)).to_vec()
}

/// A slot of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RingSlot {
    /// A message.
    Message(Vec<u8>),
    /// Several messages.
    Messages(Vec<Vec<u8>>),
    /// The size of a message that comes in blocks.
    InBlocks(u64),
}

/// Reads a slot of the third message of group 7, in a ring with slots of 100 bytes; `None` if it is none.
pub fn read_slot(bytes: &[u8]) -> Option<RingSlot> {
    let shape = RingShape { slots: 4, bytes: 100 };
    let mut memory = bytes.to_vec();
    memory.resize(shape.len(), 0);
    let read_at = |at: usize, out: &mut [u8]| out.copy_from_slice(&memory[at..at + out.len()]);
    let slot = ring::read(shape, (7, 3), read_at, |len| Ok::<_, std::convert::Infallible>(vec![0; len]));
    match slot.unwrap_or_else(|never| match never {})? {
        Slot::Message(bytes) => Some(RingSlot::Message(bytes)),
        Slot::Messages(packed) => {
            let places = ring::unpack(&packed)?;
            Some(RingSlot::Messages(places.into_iter().map(|place| packed[place].to_vec()).collect()))
        }
        Slot::InBlocks(size) => Some(RingSlot::InBlocks(size)),
    }
}

/// Encodes a slot of the third message of group 7.
pub fn write_slot(slot: &RingSlot) -> Vec<u8> {
    let (slot, bytes) = match slot {
        RingSlot::Message(bytes) => (Slot::Message(bytes.len()), bytes.clone()),
        RingSlot::Messages(messages) => {
            let mut packed = vec![0; ring::packed_len(messages.iter().map(Vec::len))];
            ring::pack(messages.iter().map(Vec::as_slice), &mut packed);
            (Slot::Messages(packed.len()), packed)
        }
        RingSlot::InBlocks(size) => (Slot::InBlocks(*size), Vec::new()),
    };
    let mut memory = vec![0; ring::SLOT_HEADER_LEN + bytes.len()];
    ring::encode(&slot, (7, 3), &mut memory, |place| place.copy_from_slice(&bytes));
    memory
}

/// The members that an invitation lists, and whether the list is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invited {
    /// The number of the node that is invited.
    pub you: NodeId,
    /// The members' numbers and addresses.
    pub members: Vec<(NodeId, String)>,
    /// Whether the check finds nothing wrong.
    pub sound: bool,
}

impl Frame {
    /// Decodes the value of a frame.
    ///
    /// # Errors
    /// The bytes are not a frame.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        wire::decode(bytes).map(Self)
    }

    /// Reads one frame of a handshake; returns `None` if the stream ended between frames.
    ///
    /// # Cancel safety
    /// Bytes are lost.
    ///
    /// # Errors
    /// The stream's, or its bytes are not a frame.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        Ok(wire::read(stream).await?.map(Self))
    }

    /// Reads the next frames until there are no more.
    ///
    /// # Cancel safety
    /// Frames are lost.
    ///
    /// # Errors
    /// Returned with the frames before: the stream's, or its bytes are not a frame.
    pub async fn read_all(stream: &mut (impl AsyncRead + Unpin)) -> (Vec<Self>, io::Result<()>) {
        let (mut frames, mut check) = (Vec::new(), wire::FrameCheck::default());
        loop {
            match wire::read_next(stream, &mut check).await {
                Ok(Some(frame)) => frames.push(Self(frame)),
                Ok(None) => return (frames, Ok(())),
                Err(error) => return (frames, Err(error)),
            }
        }
    }

    /// Encodes the frame with its length, four bytes, before it, and without a check value.
    pub fn encode(&self) -> Vec<u8> {
        wire::encode_unchecked(&self.0)
    }

    /// Appends check values to the frames of a stream that has none.
    pub fn seal(mut stream: &[u8]) -> Vec<u8> {
        let (mut sealed, mut check) = (Vec::new(), wire::FrameCheck::default());
        while let Some(len) = stream.first_chunk().map(|len| u32::from_le_bytes(*len) as usize)
            && let Some((whole, rest)) = len.checked_add(4).and_then(|len| stream.split_at_checked(len))
        {
            let mut whole = whole.to_vec();
            check.seal(&mut whole);
            sealed.extend(whole);
            stream = rest;
        }
        sealed.extend(stream);
        sealed
    }

    /// Returns the members that an invitation lists, or `None` if the frame is another.
    pub fn invited(&self) -> Option<Invited> {
        let wire::Frame::Invite { cluster, you, members, .. } = &self.0 else { return None };
        let sound = Roster::new(*cluster, *you, members.clone(), Duration::from_secs(1)).is_some();
        Some(Invited { you: *you, members: members.clone(), sound })
    }

    /// Makes frames of all kinds, by their names.
    pub fn examples() -> Vec<(&'static str, Self)> {
        let fabrics: FabricNames =
            vec!["verbs".to_owned(), "tcp".to_owned()].try_into().expect("two short names that differ");
        let verbs = fabrics.iter().next().expect("there are two").clone();
        let lacking = BTreeSet::from([NodeId(1), NodeId(300)]);
        let missing = BTreeSet::from([NodeId(2), NodeId(301)]);
        let chosen = ChosenFabric { fabric: verbs.clone(), passed_over: vec![(verbs, lacking)] };
        let members = (0..3).map(|node| (NodeId(node), format!("10.0.0.{node}:7471"))).collect();
        let (version, from, to) = (PROTOCOL_VERSION, NodeId(1), NodeId(2));
        let hello = wire::Frame::Hello { version, cluster: 7, from, to, incarnation: u64::MAX };
        let invite = wire::Frame::Invite {
            version: PROTOCOL_VERSION,
            cluster: u128::MAX,
            you: NodeId(1),
            members,
            fabrics: fabrics.clone(),
            payload: b"payload".to_vec(),
            detection_ms: 2000,
        };
        let declined = RejectReason::Declined { reason: "no room".to_owned() };
        let asked = RejectReason::Fabrics { offers: fabrics.clone(), asked: fabrics.clone() };
        let group = |frame| wire::Frame::Group { group: GroupId(1), frame };
        let offer = GroupFrame::Offer {
            spec: [1; 32],
            told: 0,
            blocks: Some(BlockEndpoints { data: vec![2; 40], ready: vec![3; 40], cells: [4; 24] }),
            table: Some(TableEndpoint { queue_pair: vec![5; 40], row: [6; 24], ring: Some([7; 24]) }),
        };
        let frames = [
            ("hello", hello),
            ("welcome", wire::Frame::Welcome { incarnation: 7 }),
            ("reject-version", wire::Frame::Reject { reason: RejectReason::Version { ours: PROTOCOL_VERSION } }),
            ("reject-fabrics", wire::Frame::Reject { reason: asked }),
            ("reject-declined", wire::Frame::Reject { reason: declined }),
            ("reject-busy", wire::Frame::Reject { reason: RejectReason::Busy }),
            ("invite", invite),
            ("accept", wire::Frame::Accept { fabrics, reply: b"reply".to_vec() }),
            ("go", wire::Frame::Go { chosen, conclusion: b"conclusion".to_vec(), missing }),
            ("withdrawn", wire::Frame::Withdrawn { because_of: NodeId(2), reason: "refused: no".to_owned() }),
            ("group-offer", group(offer)),
            ("group-announce", group(GroupFrame::Announce { message: 3, size: 1 << 40 })),
            ("group-holding", group(GroupFrame::Holding { message: 3, size: 1 << 20, blocks: vec![1, 0b10] })),
            ("group-have", group(GroupFrame::Have { message: 3, checksums: vec![7; 32], is_whole: true })),
            ("group-parts", group(GroupFrame::Parts { message: 3, member: 2, blocks: vec![1, 0b10] })),
            ("group-let-go", group(GroupFrame::LetGo { first: 3, count: 2 })),
            ("group-repeat-row", group(GroupFrame::RepeatRow)),
            ("group-begin", group(GroupFrame::Begin { message: 3 })),
            ("group-run-free", group(GroupFrame::RunFree { from_blocks: 300 })),
            ("group-allot", group(GroupFrame::Allot { rate: Some(1 << 30) })),
            ("group-fetch-slot", group(GroupFrame::FetchSlot { slot: 300 })),
            ("group-slot", group(GroupFrame::Slot { slot: 300, bytes: Some(vec![7; 20]) })),
            ("goodbye", wire::Frame::Goodbye),
        ];
        frames.into_iter().map(|(name, frame)| (name, Self(frame))).collect()
    }
}
