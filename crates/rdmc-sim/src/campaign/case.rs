//! A case: everything that one seed draws, as plain data.

use std::time::Duration;

use rdmc::{Algorithm, GroupSpec, Hybrid, NodeId, Racks, Spine};
use serde::{Deserialize, Serialize};

use crate::model::ClusterModel;
use crate::random::Random;

mod text;

/// One experiment of a campaign: a cluster, the groups on it, what their members do and what happens to them.
///
/// Times count from the moment at which all nodes are connected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The seed of the world; of a case that was drawn, the seed it was drawn from.
    pub seed: u64,
    /// The cluster.
    pub model: ClusterModel,
    /// Most bytes of each node's pool.
    pub pool_bytes_max: u64,
    /// The groups.
    pub groups: Vec<GroupCase>,
    /// What happens until the world is healed.
    pub faults: Vec<FaultCase>,
    /// When the world is healed, in ns: cuts are joined, stopped processes go on, nothing happens any more.
    pub heal_ns: u64,
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
    /// How long its forming may take, in ns.
    pub formation_limit_ns: u64,
    /// What the root sends, in order.
    pub messages: Vec<MessageCase>,
    /// Most sends the root has under way.
    pub sends_ahead: usize,
    /// Whether the root sends from pool memory.
    pub sends_from_pool: bool,
    /// Whether members keep messages so that the group could go on after a failure.
    #[serde(default = "yes")]
    pub recoverable: bool,
    /// Whether blocks are checked where they arrive.
    #[serde(default)]
    pub checks: bool,
    /// Whether members may have parts of the messages already.
    #[serde(default)]
    pub delta: bool,
}

fn yes() -> bool {
    true
}

/// A member of a group, and how its application behaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberCase {
    /// Its node.
    pub node: u32,
    /// When it creates or joins the group, in ns.
    pub begins_ns: u64,
    /// Whether it supplies the memory for each message, instead of the pool.
    pub offers: bool,
    /// What the memory that it supplies holds of each message already, if anything.
    #[serde(default)]
    pub has: Option<PartsCase>,
    /// How long it waits before each send, or after each message it takes, in ns.
    pub pause_ns: u64,
    /// Messages it keeps before it drops the oldest.
    pub holds: usize,
    /// What it does that not every application does.
    pub whim: Whim,
}

/// Which blocks of a message are in a member's memory before it arrives; in the places of the others is something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartsCase {
    /// How many of a hundred.
    pub percent: u8,
    /// Decides which, and what is in the places of the others.
    pub seed: u64,
}

/// What a member's application does besides sending or taking everything and closing the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Whim {
    /// Nothing.
    None,
    /// It does not join.
    Absent,
    /// It joins with another block size.
    OtherBlockSize,
    /// It drops the future of creating or joining the group.
    DropJoin {
        /// After so many ns.
        after_ns: u64,
    },
    /// It drops the future of the next message again and again, and takes up a new one.
    DropNext {
        /// First after so many ns, then after twice as many each time.
        after_ns: u64,
    },
    /// It drops its handle of the group.
    DropHandle {
        /// After so many messages.
        after: usize,
    },
    /// It ends the group because it cannot go on.
    Refuse {
        /// After so many messages.
        after: usize,
    },
    /// It refuses a message that it is offered.
    RefuseOffer {
        /// The message.
        message: usize,
    },
    /// It drops the offer of a message.
    DropOffer {
        /// The message.
        message: usize,
    },
    /// It accepts a message and drops the future of its arrival.
    DropDelivery {
        /// The message.
        message: usize,
    },
    /// It closes the group before it has taken everything.
    CloseEarly {
        /// After so many messages.
        after: usize,
    },
    /// It drops the future of closing the group.
    DropClose {
        /// After so many ns.
        after_ns: u64,
    },
}

/// A message of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MessageCase {
    /// Its size in bytes.
    pub size: u64,
    /// What becomes of the future of its send.
    pub fate: Fate,
}

/// What becomes of the future of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It is awaited.
    Awaited,
    /// It is dropped before it is polled.
    NeverPolled,
    /// It is dropped if it has not ended.
    Dropped {
        /// After so many ns.
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
    /// [`Algorithm::Hybrid`].
    Hybrid {
        /// The rack of each rank.
        racks: Vec<u32>,
        /// The schedule among them.
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
}

impl SpineCase {
    /// All of them.
    pub const ALL: [SpineCase; 3] = [SpineCase::Chain, SpineCase::BinomialPipeline, SpineCase::Cascade];

    fn spine(self) -> Spine {
        match self {
            Self::Chain => Spine::Chain,
            Self::BinomialPipeline => Spine::BinomialPipeline,
            Self::Cascade => Spine::Cascade,
        }
    }
}

/// Something that happens, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultCase {
    /// When.
    pub when: When,
    /// What.
    pub fault: Fault,
}

/// When something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// At a moment.
    At {
        /// In ns.
        ns: u64,
    },
    /// When a member of a group has come so far.
    Milestone {
        /// The group's number.
        group: u64,
        /// The member's node.
        node: u32,
        /// How far.
        milestone: Milestone,
        /// How long after, in ns.
        delay_ns: u64,
    },
    /// When a node is about to begin an operation ([`World::operations_of`](crate::World::operations_of)).
    Operation {
        /// The node.
        node: u32,
        /// How many it has begun before.
        count: u64,
    },
}

/// How far a member has come in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Milestone {
    /// It begins to join.
    Joining,
    /// It has joined.
    Joined,
    /// It has sent, or received, so many messages.
    Messages {
        /// How many.
        count: usize,
    },
    /// It begins to close the group.
    Closing,
    /// The group is over for it.
    Ended,
}

/// What can happen to nodes and between them.
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
    /// The process is stopped for a while.
    Stop {
        /// The node.
        node: u32,
        /// In ns.
        for_ns: u64,
    },
    /// The core is given to somebody else for a while.
    HoldUp {
        /// The node.
        node: u32,
        /// In ns.
        for_ns: u64,
    },
    /// Software and port are slow for a while.
    SlowDown {
        /// The node.
        node: u32,
        /// How many times as slow.
        times: u64,
        /// In ns.
        for_ns: u64,
    },
    /// The port has another rate for a while.
    LimitPort {
        /// The node.
        node: u32,
        /// The rate in Mbit/s.
        mbps: u64,
        /// In ns.
        for_ns: u64,
    },
    /// Two nodes do not reach each other for a while.
    Cut {
        /// One.
        a: u32,
        /// The other.
        b: u32,
        /// In ns.
        for_ns: u64,
    },
    /// What one node says does not reach the other for a while.
    CutOneWay {
        /// The one that is not heard.
        from: u32,
        /// The other.
        to: u32,
        /// In ns.
        for_ns: u64,
    },
    /// What one node writes next on its control connections to another breaks off, and so do these.
    TruncateControl {
        /// The one that writes.
        from: u32,
        /// The other.
        to: u32,
        /// How many bytes arrive, at most.
        bytes: usize,
    },
    /// What one node writes next on its control connections to another arrives with a bit turned over.
    GarbleControl {
        /// The one that writes.
        from: u32,
        /// The other.
        to: u32,
        /// Which bit.
        bit: usize,
    },
    /// The node is shut down.
    Leave {
        /// The node.
        node: u32,
        /// How long it waits for its groups to end, in ns; if it does not, it leaves them at once.
        drain_ns: Option<u64>,
    },
    /// The control connections of two nodes are reset.
    ResetControl {
        /// One.
        a: u32,
        /// The other.
        b: u32,
    },
    /// The queue pairs of two nodes break.
    BreakQueuePairs {
        /// One.
        a: u32,
        /// The other.
        b: u32,
    },
    /// A bit of each of the next blocks that come to a node changes on the way.
    FlipBits {
        /// The node.
        node: u32,
        /// Which bit, counted from the first, modulo their number.
        bit: u64,
        /// Whether it is one of the immediate that comes with the block, instead of its bytes.
        immediate: bool,
        /// How many blocks.
        blocks: u64,
    },
}

impl Case {
    /// Writes the case as JSON, to be kept in a file and played again.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a case is plain data")
    }

    /// Reads a case that [`to_json`](Self::to_json) wrote.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Says what makes a case that cannot be played, if anything does: cases may be written by hand.
    ///
    /// # Errors
    /// What is wrong.
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
            if let AlgorithmCase::Hybrid { racks, .. } = &group.algorithm {
                Racks::from_assignment(racks).map_err(|error| format!("group {}: {error}", group.id))?;
            }
            if nodes.is_empty() || nodes.iter().any(|&node| node >= self.model.nodes) {
                return Err(format!("group {} has no members, or some that are no nodes of the cluster", group.id));
            }
            if let AlgorithmCase::Hybrid { racks, .. } = &group.algorithm
                && racks.len() != nodes.len()
            {
                return Err(format!("group {} names the racks of {} of its members", group.id, racks.len()));
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
            return Err("a fault hits a node that the cluster has not, or waits for one".to_owned());
        }
        let unchecked = |node: u32| self.groups.iter().find(|group| !group.checks && group.rank_of(node).is_some());
        let flips = self.faults.iter().filter(|it| matches!(it.fault, Fault::FlipBits { .. }));
        match flips.flat_map(|it| it.fault.nodes()).find_map(unchecked) {
            Some(group) => Err(format!("bits change in group {}, which does not check blocks", group.id)),
            None => Ok(()),
        }
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
}

impl GroupCase {
    /// Returns the rank of a node, if it is a member.
    pub fn rank_of(&self, node: u32) -> Option<usize> {
        self.members.iter().position(|member| member.node == node)
    }

    /// Returns the specification that a member uses.
    pub(super) fn spec(&self, member: &MemberCase) -> GroupSpec {
        let other = member.whim == Whim::OtherBlockSize;
        GroupSpec::new(self.id, self.members.iter().map(|member| NodeId(member.node)))
            .algorithm(self.algorithm.algorithm())
            .formation_limit(Duration::from_nanos(self.formation_limit_ns))
            .recoverable(self.recoverable)
            .check_blocks(self.checks)
            .delta(self.delta)
            .block_size(self.block_size + u32::from(other))
    }
}

impl PartsCase {
    /// Returns the memory for a message of this content, the `number`th that a member takes.
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
            // One bit makes it another block, too.
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
            Self::Hybrid { racks, spine } => {
                let racks = Racks::from_assignment(racks).expect("the case was checked");
                Hybrid::new(racks, spine.spine()).into()
            }
        }
    }
}

impl Fault {
    /// Returns the nodes it hits.
    pub fn nodes(&self) -> Vec<u32> {
        match *self {
            Self::Kill { node }
            | Self::Vanish { node }
            | Self::Stop { node, .. }
            | Self::HoldUp { node, .. }
            | Self::SlowDown { node, .. }
            | Self::LimitPort { node, .. }
            | Self::FlipBits { node, .. }
            | Self::Leave { node, .. } => vec![node],
            Self::Cut { a, b, .. } | Self::ResetControl { a, b } | Self::BreakQueuePairs { a, b } => vec![a, b],
            Self::CutOneWay { from, to, .. }
            | Self::TruncateControl { from, to, .. }
            | Self::GarbleControl { from, to, .. } => vec![from, to],
        }
    }

    /// Returns for how long it lasts, in ns, if it ends.
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
            | Self::BreakQueuePairs { .. } => None,
        }
    }

    /// Returns the same fault with its nodes renamed.
    pub(super) fn renamed(mut self, name: impl Fn(u32) -> u32) -> Self {
        match &mut self {
            Self::Kill { node }
            | Self::Vanish { node }
            | Self::Stop { node, .. }
            | Self::HoldUp { node, .. }
            | Self::SlowDown { node, .. }
            | Self::LimitPort { node, .. }
            | Self::FlipBits { node, .. }
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

/// Longest message of a case, in bytes: its content is real.
const MESSAGE_MAX: u64 = 256 << 20;
