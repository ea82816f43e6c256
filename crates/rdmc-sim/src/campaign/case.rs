//! Cases: everything that one seed draws, as plain data.

use std::time::Duration;

use rdmc::{Algorithm, Delivery, GroupSpec, Hybrid, NodeId, Racks, Spine};
use serde::{Deserialize, Serialize};

use crate::model::ClusterModel;
use crate::random::Random;

mod source;
mod text;

pub(super) use source::Break;
pub use source::{BrokenSource, SourceCase};

/// One case of a campaign: a cluster, its groups, the behaviour of their members, and faults.
///
/// Times count from the moment at which all nodes are connected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The seed of the world. A drawn case has the seed from which it was drawn.
    pub seed: u64,
    /// The cluster.
    pub model: ClusterModel,
    /// Limit of each node's pool, in bytes.
    pub pool_bytes_max: u64,
    /// The groups.
    pub groups: Vec<GroupCase>,
    /// The faults that happen before the world is healed.
    pub faults: Vec<FaultCase>,
    /// When the world is healed, in ns: cuts end, stopped processes continue, and faults no longer happen.
    pub heal_ns: u64,
    /// Whether groups form while the nodes connect.
    #[serde(default)]
    pub joins: bool,
}

/// A group of a case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupCase {
    /// Its number.
    pub id: u64,
    /// The members in rank order, the root first.
    pub members: Vec<MemberCase>,
    /// The algorithm.
    pub algorithm: AlgorithmCase,
    /// The block size in bytes.
    pub block_size: u32,
    /// Limit of the time to form the group, in ns.
    pub formation_limit_ns: u64,
    /// The messages of the root, in order.
    pub messages: Vec<MessageCase>,
    /// Limit of the root's sends in flight.
    pub sends_ahead: usize,
    /// Whether the root sends from pool memory.
    pub sends_from_pool: bool,
    /// Whether members keep messages for a recovery after a failure.
    #[serde(default = "yes")]
    pub recoverable: bool,
    /// Whether members recover after a failure, and go on. They keep messages, and none drops a delivery.
    #[serde(default)]
    pub recovers: bool,
    /// Whether receivers check blocks.
    #[serde(default)]
    pub checks: bool,
    /// Whether members may already have parts of the messages.
    #[serde(default)]
    pub delta: bool,
    /// Whether members deliver messages only when all have them.
    #[serde(default)]
    pub stable: bool,
    /// Whether the root awaits the receipts of its messages.
    #[serde(default)]
    pub receipts: bool,
    /// The ring for short messages. Delta groups have none.
    #[serde(default)]
    pub ring: Option<RingCase>,
    /// Whether messages have [headers](Case::header). Delta groups have none.
    #[serde(default)]
    pub headers: bool,
    /// The weight of the group at the ports of its members.
    #[serde(default)]
    pub share: Option<u32>,
    /// Most bytes of blocks a second that a member sends.
    #[serde(default)]
    pub rate_max: Option<u64>,
}

/// A ring for short messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingCase {
    /// Number of slots.
    pub slots: u32,
    /// Bytes of a slot.
    pub bytes: u32,
}

fn yes() -> bool {
    true
}

/// A member of a group and the behaviour of its application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberCase {
    /// Its node.
    pub node: u32,
    /// When it creates or joins the group, in ns.
    pub begins_ns: u64,
    /// Whether its application supplies the memory for each message, instead of the pool.
    pub offers: bool,
    /// The parts of each message that its memory already holds; `None` without parts.
    #[serde(default)]
    pub has: Option<PartsCase>,
    /// Bytes that it reads at once of a message that arrives in its memory; 0 if it awaits the whole message.
    #[serde(default)]
    pub reads_at_once: usize,
    /// Pause before each send, or after each received message, in ns.
    pub pause_ns: u64,
    /// Number of messages that it keeps before it drops the oldest.
    pub holds: usize,
    /// Its application lets every message of this many go without storing it; 0 if it stores all.
    #[serde(default)]
    pub lets_go_each: u64,
    /// What its application does besides the ordinary.
    pub behaviour: Behaviour,
}

/// The blocks of a message that are in a member's memory before the message arrives. Other blocks have other bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartsCase {
    /// Share of the blocks, in percent.
    pub percent: u8,
    /// Decides which blocks, and the bytes of the other blocks.
    pub seed: u64,
}

/// What a member's application does besides sending or receiving everything and closing the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Behaviour {
    /// Nothing else.
    Ordinary,
    /// It does not join.
    Absent,
    /// It joins with another block size.
    OtherBlockSize,
    /// It drops the future of creating or joining the group.
    DropJoin {
        /// Time before the drop, in ns.
        after_ns: u64,
    },
    /// It drops the future of the next message repeatedly, and makes a new one.
    DropNext {
        /// Time before the first drop, in ns; it doubles each time.
        after_ns: u64,
    },
    /// It drops its handle of the group.
    DropHandle {
        /// Number of messages before that.
        after: usize,
    },
    /// It refuses the group.
    Refuse {
        /// Number of messages before that.
        after: usize,
    },
    /// It refuses the offer of a message.
    RefuseOffer {
        /// The message.
        message: usize,
    },
    /// It drops the offer of a message.
    DropOffer {
        /// The message.
        message: usize,
    },
    /// It accepts a message and drops the future of its delivery.
    DropDelivery {
        /// The message.
        message: usize,
    },
    /// It closes the group before it has received everything.
    CloseEarly {
        /// Number of messages before that.
        after: usize,
    },
    /// It drops the future of closing the group.
    DropClose {
        /// Time before the drop, in ns.
        after_ns: u64,
    },
}

/// A message of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageCase {
    /// Its size in bytes.
    pub size: u64,
    /// How the application treats the future of the send.
    pub future: SendFuture,
    /// The source from which the root reads it while it sends it; `None` if the root has the message.
    #[serde(default)]
    pub source: Option<SourceCase>,
}

/// How the application treats the future of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SendFuture {
    /// The application awaits it until it ends.
    Completes,
    /// The application drops it before the first poll.
    NeverPolled,
    /// The application drops it after a while, unless it has ended.
    Dropped {
        /// Time before the drop, in ns.
        after_ns: u64,
    },
}

/// An algorithm, as plain data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AlgorithmCase {
    /// [`Algorithm::Sequential`].
    Sequential,
    /// [`Algorithm::Chain`].
    Chain,
    /// [`Algorithm::BinomialTree`].
    BinomialTree,
    /// [`Algorithm::BinomialPipeline`].
    BinomialPipeline,
    /// [`Algorithm::Circulant`].
    Circulant,
    /// [`Algorithm::TwoTree`].
    TwoTree,
    /// [`Algorithm::Hybrid`].
    Hybrid {
        /// The rack of each rank.
        racks: Vec<u32>,
        /// The schedule among the racks.
        spine: SpineCase,
    },
}

/// A schedule among racks, as plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SpineCase {
    /// [`Spine::Chain`].
    Chain,
    /// [`Spine::BinomialPipeline`].
    BinomialPipeline,
    /// [`Spine::Cascade`].
    Cascade,
    /// [`Spine::TwoTree`].
    TwoTree,
}

impl SpineCase {
    /// All schedules.
    pub const ALL: [SpineCase; 4] =
        [SpineCase::Chain, SpineCase::BinomialPipeline, SpineCase::Cascade, SpineCase::TwoTree];

    fn spine(self) -> Spine {
        match self {
            Self::Chain => Spine::Chain,
            Self::BinomialPipeline => Spine::BinomialPipeline,
            Self::Cascade => Spine::Cascade,
            Self::TwoTree => Spine::TwoTree,
        }
    }
}

/// A fault and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultCase {
    /// The time.
    pub when: When,
    /// The fault.
    pub fault: Fault,
}

/// The time of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// A moment.
    At {
        /// The moment, in ns.
        ns: u64,
    },
    /// When a member of a group has reached a milestone.
    Milestone {
        /// The group's number.
        group: u64,
        /// The member's node.
        node: u32,
        /// The milestone.
        milestone: Milestone,
        /// Delay after the milestone, in ns.
        delay_ns: u64,
    },
    /// When a node is about to begin an operation ([`World::operations_of`](crate::World::operations_of)).
    Operation {
        /// The node.
        node: u32,
        /// Number of operations before that one.
        count: u64,
    },
}

/// The progress of a member in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Milestone {
    /// It begins to join.
    Joining,
    /// It has joined.
    Joined,
    /// It has sent or received `count` messages.
    Messages {
        /// Number of messages.
        count: usize,
    },
    /// It begins to close the group.
    Closing,
    /// It has left or closed the group.
    Ended,
}

/// A fault of a node, or between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Fault {
    /// The process dies.
    Kill {
        /// The node.
        node: u32,
    },
    /// The host loses its power.
    Vanish {
        /// The node.
        node: u32,
    },
    /// The process stops for a while, as by SIGSTOP.
    Stop {
        /// The node.
        node: u32,
        /// Duration in ns.
        for_ns: u64,
    },
    /// The scheduler takes the core away for a while.
    HoldUp {
        /// The node.
        node: u32,
        /// Duration in ns.
        for_ns: u64,
    },
    /// Software and port become slow for a while.
    SlowDown {
        /// The node.
        node: u32,
        /// The factor.
        times: u64,
        /// Duration in ns.
        for_ns: u64,
    },
    /// The port changes its rate for a while.
    LimitPort {
        /// The node.
        node: u32,
        /// The rate in Mbit/s.
        mbps: u64,
        /// Duration in ns.
        for_ns: u64,
    },
    /// Two nodes are partitioned for a while.
    Cut {
        /// One node.
        a: u32,
        /// The other node.
        b: u32,
        /// Duration in ns.
        for_ns: u64,
    },
    /// Nothing from one node reaches the other for a while.
    CutOneWay {
        /// The sending node.
        from: u32,
        /// The receiving node.
        to: u32,
        /// Duration in ns.
        for_ns: u64,
    },
    /// The next write on each control connection to another node is truncated, and the connections break.
    TruncateControl {
        /// The writing node.
        from: u32,
        /// The reading node.
        to: u32,
        /// Limit of the bytes that arrive.
        bytes: usize,
    },
    /// One bit of the next write on each control connection to another node is flipped.
    GarbleControl {
        /// The writing node.
        from: u32,
        /// The reading node.
        to: u32,
        /// The bit.
        bit: usize,
    },
    /// The node shuts down.
    Leave {
        /// The node.
        node: u32,
        /// Limit of the wait for its groups to end, in ns. `None` leaves them at once.
        drain_ns: Option<u64>,
    },
    /// The control connections of two nodes are reset.
    ResetControl {
        /// One node.
        a: u32,
        /// The other node.
        b: u32,
    },
    /// The queue pairs of two nodes break.
    BreakQueuePairs {
        /// One node.
        a: u32,
        /// The other node.
        b: u32,
    },
    /// One bit of each of the next blocks to a node flips on the way.
    FlipBits {
        /// The node.
        node: u32,
        /// The bit, counted from the first, modulo the number of bits.
        bit: u64,
        /// Whether the bit is in the block's immediate instead of its bytes.
        immediate: bool,
        /// Number of blocks.
        blocks: u64,
    },
    /// One bit of each of the next slots of rings that are written at a node flips on the way.
    FlipSlots {
        /// The node.
        node: u32,
        /// The bit, counted from the first, modulo the number of bits.
        bit: u64,
        /// Number of slots.
        slots: u64,
    },
    /// One bit of each of the next rows that are written at a node flips on the way.
    FlipRows {
        /// The node.
        node: u32,
        /// The bit, counted from the first, modulo the number of bits.
        bit: u64,
        /// Number of rows.
        rows: u64,
    },
}

impl Case {
    /// Returns the case as JSON, for a file that can be played again.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a case is plain data")
    }

    /// Reads a case from the JSON of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// The text is not a case.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Checks a case, which may be written by hand.
    ///
    /// # Errors
    /// The reason why the case cannot be played.
    pub fn check(&self) -> Result<(), String> {
        self.model.check()?;
        for group in &self.groups {
            let nodes: Vec<u32> = group.members.iter().map(|member| member.node).collect();
            if group.block_size == 0 || group.block_size >= GroupSpec::BLOCK_SIZE_MAX {
                return Err(format!("group {} has blocks of {} bytes", group.id, group.block_size));
            }
            if group.messages.iter().any(|message| message.size > MESSAGE_MAX) {
                return Err(format!("group {} has a message of more than {MESSAGE_MAX} bytes", group.id));
            }
            if group.messages.iter().filter_map(|message| message.source).any(|source| source.piece == 0) {
                return Err(format!("group {} has a source that gives no bytes", group.id));
            }
            if let AlgorithmCase::Hybrid { racks, .. } = &group.algorithm {
                Racks::from_assignment(racks).map_err(|error| format!("group {}: {error}", group.id))?;
            }
            if group.recovers && !group.can_recover() {
                return Err(format!("group {} cannot recover", group.id));
            }
            if nodes.is_empty() || nodes.iter().any(|&node| node >= self.model.nodes) {
                return Err(format!("group {} has no members, or members that are not nodes of the cluster", group.id));
            }
            if let AlgorithmCase::Hybrid { racks, .. } = &group.algorithm
                && racks.len() != nodes.len()
            {
                return Err(format!(
                    "group {} names the racks of {} members, not of all its members",
                    group.id,
                    racks.len()
                ));
            }
        }
        let outside = |fault: &FaultCase| {
            let waits_for = match fault.when {
                When::Operation { node, .. } => Some(node),
                When::At { .. } | When::Milestone { .. } => None,
            };
            fault.fault.nodes().into_iter().chain(waits_for).any(|node| node >= self.model.nodes)
        };
        if self.faults.iter().any(outside) {
            return Err("a fault affects or waits for a node that is not in the cluster".to_owned());
        }
        for FaultCase { fault, .. } in &self.faults {
            let of_node = |node: u32| self.groups.iter().filter(move |group| group.rank_of(node).is_some());
            let unhealed = match fault {
                Fault::FlipBits { node, .. } => of_node(*node).find(|group| !group.checks),
                Fault::FlipSlots { node, .. } => {
                    of_node(*node).find(|group| group.has_ring() && !group.checks && !group.recoverable)
                }
                _ => None,
            };
            if let Some(group) = unhealed {
                return Err(format!("bits flip in group {}, which cannot heal that", group.id));
            }
        }
        Ok(())
    }

    /// Returns the content of a group's message.
    pub fn content(group: u64, message: usize, size: u64) -> Vec<u8> {
        let size = usize::try_from(size).expect("messages of a campaign are short");
        let mut state =
            group.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (message as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
        let mut bytes = vec![0; size];
        for room in bytes.chunks_mut(8) {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            room.copy_from_slice(&state.rotate_right(29).to_le_bytes()[..room.len()]);
        }
        bytes
    }

    /// Returns the header of a message in a group with headers: empty, short, or as long as it may be.
    pub fn header(group: u64, message: usize) -> Vec<u8> {
        let length = match group.wrapping_add(message as u64) % 4 {
            0 => 0,
            1 => 1,
            2 => 40,
            _ => GroupSpec::HEADER_LEN_MAX as u64,
        };
        Self::content(!group, message, length)
    }
}

impl GroupCase {
    /// Returns the rank of a node, if it is a member.
    pub fn rank_of(&self, node: u32) -> Option<usize> {
        self.members.iter().position(|member| member.node == node)
    }

    /// Returns whether its members can recover, so that each message is observed once.
    pub(super) fn can_recover(&self) -> bool {
        let drops = |member: &MemberCase| matches!(member.behaviour, Behaviour::DropDelivery { .. });
        self.recoverable && !self.members.iter().any(drops)
    }

    /// Returns whether short messages travel by a ring.
    pub(super) fn has_ring(&self) -> bool {
        self.ring.is_some() && !self.delta
    }

    /// Returns whether messages have headers.
    pub(super) fn has_headers(&self) -> bool {
        self.headers && !self.delta
    }

    /// Returns the header that the root sends with a message. A message that is read from a source has none.
    pub(super) fn header(&self, message: usize) -> Vec<u8> {
        match self.has_headers() && self.messages[message].source.is_none() {
            true => Case::header(self.id, message),
            false => Vec::new(),
        }
    }

    /// Returns whether a message is queued when its future is made, and not when that is polled.
    pub(super) fn is_queued_at_once(&self, message: usize) -> bool {
        !self.header(message).is_empty()
    }

    /// Returns the number of numbers that a message takes: a header is a message of its own.
    pub(super) fn numbers_each(&self) -> u64 {
        if self.has_headers() { 2 } else { 1 }
    }

    /// Returns the specification that a member uses.
    pub(super) fn spec(&self, member: &MemberCase) -> GroupSpec {
        let other = member.behaviour == Behaviour::OtherBlockSize;
        let spec = GroupSpec::new(self.id, self.members.iter().map(|member| NodeId(member.node)))
            .algorithm(self.algorithm.algorithm())
            .formation_limit(Duration::from_nanos(self.formation_limit_ns))
            .recoverable(self.recoverable)
            .check_blocks(self.checks)
            .delta(self.delta)
            .headers(self.has_headers())
            .share(self.share)
            .rate_max(self.rate_max)
            .delivery(if self.stable { Delivery::Stable } else { Delivery::Immediate })
            .block_size(self.block_size + u32::from(other));
        match self.ring.filter(|_| !self.delta) {
            Some(RingCase { slots, bytes }) => spec.ring(slots, bytes),
            None => spec,
        }
    }
}

impl PartsCase {
    /// Returns a member's memory for its message `number` with this content.
    pub(super) fn memory(self, number: u64, block_size: u32, content: Vec<u8>) -> Vec<u8> {
        let mut random = Random::new(self.seed ^ number);
        let mut memory = content;
        for block in memory.chunks_mut(block_size as usize) {
            if random.below(100) < u64::from(self.percent) {
                continue;
            }
            if random.chance(0.5) {
                random.fill(block);
            }
            // One bit is enough to make it another block.
            let at = usize::try_from(random.below(block.len() as u64)).expect("an index");
            block[at] ^= 1 << random.below(8);
        }
        memory
    }
}

impl AlgorithmCase {
    fn algorithm(&self) -> Algorithm {
        match self {
            Self::Sequential => Algorithm::Sequential,
            Self::Chain => Algorithm::Chain,
            Self::BinomialTree => Algorithm::BinomialTree,
            Self::BinomialPipeline => Algorithm::BinomialPipeline,
            Self::Circulant => Algorithm::Circulant,
            Self::TwoTree => Algorithm::TwoTree,
            Self::Hybrid { racks, spine } => {
                let racks = Racks::from_assignment(racks).expect("the case was checked");
                Hybrid::new(racks, spine.spine()).into()
            }
        }
    }
}

impl Fault {
    /// Returns the nodes that the fault affects.
    pub fn nodes(&self) -> Vec<u32> {
        match *self {
            Self::Kill { node }
            | Self::Vanish { node }
            | Self::Stop { node, .. }
            | Self::HoldUp { node, .. }
            | Self::SlowDown { node, .. }
            | Self::LimitPort { node, .. }
            | Self::FlipBits { node, .. }
            | Self::FlipSlots { node, .. }
            | Self::FlipRows { node, .. }
            | Self::Leave { node, .. } => vec![node],
            Self::Cut { a, b, .. } | Self::ResetControl { a, b } | Self::BreakQueuePairs { a, b } => vec![a, b],
            Self::CutOneWay { from, to, .. }
            | Self::TruncateControl { from, to, .. }
            | Self::GarbleControl { from, to, .. } => vec![from, to],
        }
    }

    /// Returns the duration in ns; `None` if the fault does not end.
    pub fn for_ns(&self) -> Option<u64> {
        match *self {
            Self::Stop { for_ns, .. }
            | Self::HoldUp { for_ns, .. }
            | Self::SlowDown { for_ns, .. }
            | Self::LimitPort { for_ns, .. }
            | Self::Cut { for_ns, .. }
            | Self::CutOneWay { for_ns, .. } => Some(for_ns),
            Self::Kill { .. }
            | Self::Vanish { .. }
            | Self::TruncateControl { .. }
            | Self::GarbleControl { .. }
            | Self::Leave { .. }
            | Self::ResetControl { .. }
            | Self::FlipBits { .. }
            | Self::FlipSlots { .. }
            | Self::FlipRows { .. }
            | Self::BreakQueuePairs { .. } => None,
        }
    }

    /// Returns the same fault with its nodes renumbered.
    pub(super) fn renamed(mut self, name: impl Fn(u32) -> u32) -> Self {
        match &mut self {
            Self::Kill { node }
            | Self::Vanish { node }
            | Self::Stop { node, .. }
            | Self::HoldUp { node, .. }
            | Self::SlowDown { node, .. }
            | Self::LimitPort { node, .. }
            | Self::FlipBits { node, .. }
            | Self::FlipSlots { node, .. }
            | Self::FlipRows { node, .. }
            | Self::Leave { node, .. } => *node = name(*node),
            Self::CutOneWay { from: a, to: b, .. }
            | Self::TruncateControl { from: a, to: b, .. }
            | Self::GarbleControl { from: a, to: b, .. }
            | Self::Cut { a, b, .. }
            | Self::ResetControl { a, b }
            | Self::BreakQueuePairs { a, b } => {
                (*a, *b) = (name(*a), name(*b));
            }
        }
        self
    }
}

/// Largest message of a case, in bytes: its content is in memory.
const MESSAGE_MAX: u64 = 256 << 20;
