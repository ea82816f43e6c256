//! The specification of a group.

use std::collections::BTreeSet;
use std::time::Duration;

#[cfg(doc)]
use rdmc_fabric::Capabilities;
use rdmc_schedule::{Algorithm, CostModel};
use serde::{Deserialize, Serialize};

#[cfg(doc)]
use crate::failure::FailureCause;
use crate::id::{GroupId, NodeId};
use crate::table::RingShape;
use crate::transfer::BLOCKS_MAX;

mod written;

/// Chooses what a group does about a member that holds the others up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SlowReceivers {
    /// It waits.
    #[default]
    Wait,
    /// It evicts the member after it has been held up for so long: the member fails with [`FailureCause::TooSlow`], and
    /// the others can [recover](crate::GroupFailure::recover).
    Evict {
        /// How long the group waits; at least a second.
        #[serde(rename = "after_ms", with = "written::milliseconds")]
        after: Duration,
    },
}

impl SlowReceivers {
    /// Evicts a member that has held the others up for so long; at least a second.
    pub fn evict_after(after: Duration) -> Self {
        Self::Evict { after }
    }
}

/// Chooses when members deliver messages to their applications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Delivery {
    /// When the member has the message. If the group fails, some members may have delivered messages that the survivors
    /// do not get.
    #[default]
    Immediate,
    /// When all members have the message: atomic multicast (DSN §4.6).
    ///
    /// If the group fails, all survivors deliver exactly the same messages, and no member, not even one that failed,
    /// has delivered a message that they do not. A group that [continues](crate::GroupFailure::recover) this one
    /// delivers the others if it can complete them. A member that is no [survivor](crate::GroupFailure::quorum) may
    /// deliver fewer. The last member to have a message delays it for all, by one write to the others.
    Stable,
}

/// Chooses how members get the messages of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DeliveryMode {
    /// Every member has a copy in its own memory. The root may write to its own when the message is sent.
    #[default]
    Private,
    /// All members have the same memory, read only: nothing is copied.
    ///
    /// Every message is a [`SharedObject`](rdmc_fabric::SharedObject). All members are processes of one user on one
    /// host, joined by shared memory.
    ///
    /// The descriptor of the object travels as a short message does. A member has the message when it has mapped the
    /// object; pages come in as they are read. The root keeps objects open until all members have them, at most 64 at a
    /// time. A member that has mapped an object keeps it, even if the root is gone. A survivor that has not mapped it
    /// when the root is gone cannot get it from the others: it fails. An object may be as long as [a message that the
    /// pool takes](crate::NodeBuilder::pool_bytes_max), although it takes no memory of the pool.
    ///
    /// Sizes and digests in the [certificate](crate::Certificate), and [checks](GroupSpec::check_blocks) of blocks, are
    /// those of descriptors: sealed objects cannot change, so they are not summed.
    Shared,
}

/// Specifies a group: all members must agree on it.
///
/// # Examples
/// ```
/// use rdmc::{Algorithm, GroupSpec, NodeId};
///
/// let spec = GroupSpec::new(7, [NodeId(0), NodeId(2), NodeId(1)]) // node 0 is the root
///     .algorithm(Algorithm::BinomialPipeline)
///     .block_size(256 << 10);
/// assert_eq!(spec.members().len(), 3);
/// ```
///
/// In a file, fields have the names of the methods, and durations are whole milliseconds. All but the first two fields
/// may be left out. A specification that no node would accept is refused; the error names the field.
/// ```
/// # use rdmc::GroupSpec;
/// let spec: GroupSpec = toml::from_str(r#"
///     id = 7
///     members = [0, 2, 1]                                 # node 0 is the root
///     algorithm = "binomial-pipeline"                     # the default; a hybrid names its racks, see Algorithm
///     block_size = 262144                                 # bytes
///     check_blocks = true                                 # default: unless the fabric protects blocks
///     formation_limit_ms = 30000                          # the default
///     recoverable = true                                  # the default
///     slow_receivers = { evict = { after_ms = 3000 } }    # default: "wait"
///     delta = false                                       # the default
///     delivery_mode = "private"                           # the default; or "shared"
///     delivery = "stable"                                 # default: "immediate"
///     ring = { slots = 64, bytes = 4096 }                 # default: no ring
///     headers = true                                      # default: false
///     share = 4                                           # default: none
///     rate_max = 50000000                                 # bytes a second; default: no bound
/// "#)?;
/// assert!(spec.is_stable());
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "written::WrittenSpec", into = "written::WrittenSpec")]
pub struct GroupSpec {
    pub(super) id: GroupId,
    pub(super) members: Vec<NodeId>,
    pub(super) algorithm: Algorithm,
    pub(super) block_size: u32,
    pub(super) check_blocks: Option<bool>,
    pub(super) formation_limit: Duration,
    pub(super) recoverable: bool,
    pub(super) slow_receivers: SlowReceivers,
    pub(super) delta: bool,
    pub(super) delivery_mode: DeliveryMode,
    pub(super) delivery: Delivery,
    pub(super) ring: Option<RingShape>,
    pub(super) headers: bool,
    pub(super) share: Option<u32>,
    pub(super) rate_max: Option<u64>,
}

impl GroupSpec {
    /// Largest block size in bytes: 1 GiB.
    pub const BLOCK_SIZE_MAX: u32 = 1 << 30;
    /// Most blocks of a message: 1,048,576. Each needs about 90 bytes of memory at every member.
    pub const BLOCKS_MAX: u32 = BLOCKS_MAX;
    /// Fewest slots of a [ring](Self::ring).
    pub const RING_SLOTS_MIN: u32 = 2;
    /// Most slots of a [ring](Self::ring).
    pub const RING_SLOTS_MAX: u32 = 4096;
    /// Largest [share](Self::share).
    pub const SHARE_MAX: u32 = 1000;
    /// Longest message in a slot of a [ring](Self::ring), in bytes.
    pub const RING_BYTES_MAX: u32 = 64 << 10;

    /// Specifies a group of these members, the first of which is the root; default: binomial pipeline, blocks of 1 MiB.
    pub fn new(id: u64, members: impl IntoIterator<Item = NodeId>) -> Self {
        Self {
            id: GroupId(id),
            members: members.into_iter().collect(),
            algorithm: Algorithm::BinomialPipeline,
            block_size: 1 << 20,
            check_blocks: None,
            formation_limit: Duration::from_secs(30),
            recoverable: true,
            slow_receivers: SlowReceivers::Wait,
            delta: false,
            delivery_mode: DeliveryMode::Private,
            delivery: Delivery::Immediate,
            ring: None,
            headers: false,
            share: None,
            rate_max: None,
        }
    }

    /// Sets the algorithm; all members need the same.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Sets the block size in bytes, 1 to [`BLOCK_SIZE_MAX`](Self::BLOCK_SIZE_MAX); all members need the same.
    ///
    /// Large blocks need fewer operations; small blocks start the relays sooner. A message takes about
    /// (blocks − 1 + log₂ members) block times. 64 KiB to 4 MiB suit most networks.
    #[must_use]
    pub fn block_size(mut self, bytes: u32) -> Self {
        self.block_size = bytes;
        self
    }

    /// Sets whether every block is checked where it arrives, before it is passed on; all members need the same.
    ///
    /// By default blocks are checked unless [the fabric protects them](Capabilities::protects_blocks).
    ///
    /// If a bit changes on the way, or in the memory of the member that passes the block on, the next member finds it.
    /// It [counts](crate::GroupStats::blocks_corrupted) it, and logs it with both members' ranks. The certificate then
    /// has the [digest](crate::Digest) of each message, on which all members have agreed.
    #[must_use]
    pub fn check_blocks(mut self, check: bool) -> Self {
        self.check_blocks = Some(check);
        self
    }

    /// Sets how long forming the group may take; default 30 s. Members that have not joined by then fail the group.
    #[must_use]
    pub fn formation_limit(mut self, limit: Duration) -> Self {
        self.formation_limit = limit;
        self
    }

    /// Sets whether the group can be [recovered](crate::GroupFailure::recover) after a failure; default true; all
    /// members need the same.
    ///
    /// Every member then keeps the memory of a message until all have it, even if the application has dropped it.
    /// Members report their progress to the root.
    #[must_use]
    pub fn recoverable(mut self, recoverable: bool) -> Self {
        self.recoverable = recoverable;
        self
    }

    /// Sets what the group does about a member that holds the others up; by default it waits. Only the root's setting
    /// applies.
    ///
    /// The root finds such a member by the waits for its *ready_for_block* and for room on the way to it, compared with
    /// those for others. [`GroupStats::slow`](crate::GroupStats::slow) and the log name it in any case.
    #[must_use]
    pub fn slow_receivers(mut self, policy: SlowReceivers) -> Self {
        self.slow_receivers = policy;
        self
    }

    /// Sets whether receivers may have parts of the messages already, so that only the rest travels; default false; all
    /// members need the same.
    ///
    /// It is for members that were interrupted, evicted or away, and for new versions of data that they have. They
    /// [accept](crate::Offer::accept_partial) a message into memory that may hold some of its blocks. Blocks that equal
    /// the root's stay, and are sent on to members that lack them. So any holder can be the root of such a group, and a
    /// member catches up from all other members at once. Members wait before each message while its blocks are compared
    /// by their checksums, and every member is connected to every other one.
    #[must_use]
    pub fn delta(mut self, delta: bool) -> Self {
        self.delta = delta;
        self
    }

    /// Sets whether members get private copies of the messages or share them; default private; all members need the
    /// same.
    ///
    /// # Examples
    /// ```
    /// use futures::StreamExt;
    /// use rdmc::{Cluster, DeliveryMode, GroupSpec, MemNetwork, Node, NodeId, SharedObjectMut};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let network = MemNetwork::new();
    /// # let cluster = Cluster::new([(0, "a"), (1, "b")]);
    /// # let node = |id| Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric()).start();
    /// # let (a, b) = futures::try_join!(node(0), node(1))?;
    /// // On the fabric shm, a and b are processes of one host.
    /// let spec = GroupSpec::new(1, cluster.nodes()).delivery_mode(DeliveryMode::Shared);
    /// let (root, mut at_b) = futures::try_join!(a.create_group(spec.clone()), b.join_group(spec))?;
    /// let mut object = SharedObjectMut::new(1 << 20)?;
    /// object.fill(7);
    /// root.send(object.seal()?).await?;
    /// let message = at_b.next().await.expect("a message")?;
    /// assert!(message.iter().all(|byte| *byte == 7));
    /// futures::try_join!(root.close(), at_b.close())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn delivery_mode(mut self, mode: DeliveryMode) -> Self {
        self.delivery_mode = mode;
        self
    }

    /// Sets when members deliver messages: as they have them, or when all have them; default
    /// [immediate](Delivery::Immediate); all members need the same.
    #[must_use]
    pub fn delivery(mut self, delivery: Delivery) -> Self {
        self.delivery = delivery;
        self
    }

    /// Gives short messages a shorter way: the root writes each of at most `bytes` bytes, and of at most a block, into
    /// a slot of a ring at each receiver (DSN §4.6). By default there is no ring; all members need the same.
    ///
    /// Such a message needs no schedule, no grant and no relay, but one write to each receiver. Messages that wait at
    /// the same time share a slot, as many as fit. Longer messages travel in blocks, in the same order; a slot tells
    /// the receivers their size. The root sends every short message to all receivers itself: a ring is for few members,
    /// or very short messages. It takes `slots` × (`bytes` + 16) bytes of memory at each receiver.
    ///
    /// `slots` is [`RING_SLOTS_MIN`](Self::RING_SLOTS_MIN) to [`RING_SLOTS_MAX`](Self::RING_SLOTS_MAX), `bytes` 1 to
    /// [`RING_BYTES_MAX`](Self::RING_BYTES_MAX).
    #[must_use]
    pub fn ring(mut self, slots: u32, bytes: u32) -> Self {
        self.ring = Some(RingShape { slots, bytes });
        self
    }

    /// Gives short messages a [ring](Self::ring) if a cost model finds that it pays for so many members:
    /// [`CostModel::RING_SLOTS`] slots of [`CostModel::ring_bytes`] bytes. All members need the same model, whatever
    /// they run on.
    ///
    /// # Examples
    /// ```
    /// # use std::time::Duration;
    /// use rdmc::{CostModel, GroupSpec, NodeId};
    ///
    /// // Ports of 10 Gbit/s, 12 µs for each block, 50 µs from host to host.
    /// let model = CostModel::network(1.25e9, Duration::from_micros(12), Duration::from_micros(50));
    /// let members = (0..4).map(NodeId);
    /// assert_eq!(GroupSpec::new(1, members.clone()).ring_by(&model), GroupSpec::new(1, members).ring(64, 65_536));
    /// ```
    #[must_use]
    pub fn ring_by(mut self, model: &CostModel) -> Self {
        // A group of an impossible number of members is refused when it forms.
        let bytes = model.ring_bytes(self.count()).ok().flatten();
        self.ring = bytes.map(|bytes| RingShape { slots: CostModel::RING_SLOTS, bytes });
        self
    }

    /// Sets whether every message has a header, of at most [`HEADER_LEN_MAX`](Self::HEADER_LEN_MAX) bytes, that
    /// receivers get with its offer; default false; all members need the same.
    ///
    /// A header travels as a message of its own before its message. So a message and its header take two numbers, two
    /// records of the certificate, and two messages in the counters. With a [ring](Self::ring) that is cheap.
    ///
    /// # Examples
    /// ```
    /// use futures::StreamExt;
    /// use rdmc::{Cluster, GroupSpec, MemNetwork, Node, NodeId};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let network = MemNetwork::new();
    /// # let cluster = Cluster::new([(0, "a"), (1, "b")]);
    /// # let node = |id| Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric()).start();
    /// # let (a, b) = futures::try_join!(node(0), node(1))?;
    /// let spec = GroupSpec::new(1, cluster.nodes()).headers(true);
    /// let (root, mut at_b) = futures::try_join!(a.create_group(spec.clone()), b.join_group(spec))?;
    /// root.send_with("images/cat", vec![7; 1 << 20]).await?;
    /// let message = at_b.next().await.expect("a message")?;
    /// assert_eq!((message.header(), message.len()), (&b"images/cat"[..], 1 << 20));
    /// futures::try_join!(root.close(), at_b.close())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn headers(mut self, headers: bool) -> Self {
        self.headers = headers;
        self
    }

    /// Sets the group's weight among the groups that use the port of a node, 1 to [`SHARE_MAX`](Self::SHARE_MAX); by
    /// default it has none; all members need the same.
    ///
    /// Where a group with a weight is among several that want a port, each gets of it by its weight. Groups without one
    /// count as 1. What one does not use goes to the others. That holds at each node that knows the [rate of its
    /// port](crate::NodeBuilder::port_rate). If no group of a node has a weight, the network shares the port: over TCP,
    /// one group may then get ten times as much as another. Messages in slots of a [ring](Self::ring) do not wait for
    /// their share.
    ///
    /// Shares are found in about a second, and later with blocks that take more than a few milliseconds.
    ///
    /// # Examples
    /// ```
    /// use rdmc::{GroupSpec, NodeId};
    ///
    /// let members = [NodeId(0), NodeId(1), NodeId(2)];
    /// let urgent = GroupSpec::new(1, members).share(8);
    /// let backup = GroupSpec::new(2, members).share(1).rate_max(20_000_000);
    /// # drop((urgent, backup));
    /// ```
    #[must_use]
    pub fn share(mut self, weight: impl Into<Option<u32>>) -> Self {
        self.share = weight.into();
        self
    }

    /// Sets how many bytes of blocks this member may send in a second, to all others together, at least 1; by default
    /// as many as the network takes. Give all members the same: each keeps its own.
    ///
    /// A burst has a block, and what passes in 5 ms. Messages in slots of a [ring](Self::ring), and corrupted blocks
    /// that are fetched anew, do not count.
    #[must_use]
    pub fn rate_max(mut self, bytes_per_second: impl Into<Option<u64>>) -> Self {
        self.rate_max = bytes_per_second.into();
        self
    }

    /// Returns the group's number.
    pub fn id(&self) -> GroupId {
        self.id
    }

    /// Tells whether receivers may have [parts](Self::delta) of messages already.
    pub fn is_delta(&self) -> bool {
        self.delta
    }

    /// Returns the members in rank order.
    pub fn members(&self) -> &[NodeId] {
        &self.members
    }

    /// Tells whether members [share](DeliveryMode::Shared) objects.
    pub fn is_shared(&self) -> bool {
        self.delivery_mode == DeliveryMode::Shared
    }

    /// Tells whether messages are delivered when [all members have them](Delivery::Stable).
    pub fn is_stable(&self) -> bool {
        self.delivery == Delivery::Stable
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.members.len()).unwrap_or(u32::MAX)
    }

    /// Checks the settings that no node would accept. Schedules check the number of members.
    pub(super) fn check(&self) -> Result<(), InvalidSpec> {
        if !(1..=Self::BLOCK_SIZE_MAX).contains(&self.block_size) {
            return Err(InvalidSpec::BlockSize { bytes: self.block_size.into() });
        }
        match self.ring {
            Some(RingShape { slots, bytes })
                if !(Self::RING_SLOTS_MIN..=Self::RING_SLOTS_MAX).contains(&slots)
                    || !(1..=Self::RING_BYTES_MAX).contains(&bytes) =>
            {
                return Err(InvalidSpec::Ring { slots, bytes });
            }
            Some(_) if self.delta => return Err(InvalidSpec::RingDelta),
            _ => {}
        }
        if let Some(weight) = self.share.filter(|weight| !(1..=Self::SHARE_MAX).contains(weight)) {
            return Err(InvalidSpec::Share { weight });
        }
        if self.rate_max == Some(0) {
            return Err(InvalidSpec::RateMax);
        }
        if self.is_shared() && self.delta {
            return Err(InvalidSpec::SharedDelta);
        }
        if self.headers && (self.is_shared() || self.delta) {
            return Err(InvalidSpec::Headers);
        }
        let mut seen = BTreeSet::new();
        match self.members.iter().find(|member| !seen.insert(**member)) {
            Some(&node) => Err(InvalidSpec::DuplicateMember { node }),
            None => Ok(()),
        }
    }
}

/// A setting that no node would accept. The text names the field of a file, and the values that it may have.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidSpec {
    #[error("block_size: {bytes} bytes are not between 1 and {}", GroupSpec::BLOCK_SIZE_MAX)]
    BlockSize { bytes: u64 },
    #[error("members: node {node} is a member twice; list each node once")]
    DuplicateMember { node: NodeId },
    #[error(
        "ring: {slots} slots of {bytes} bytes are not {} to {} slots of 1 to {} bytes",
        GroupSpec::RING_SLOTS_MIN,
        GroupSpec::RING_SLOTS_MAX,
        GroupSpec::RING_BYTES_MAX
    )]
    Ring { slots: u32, bytes: u32 },
    #[error("delta: members compare the blocks of every message; leave delta or the ring off")]
    RingDelta,
    #[error("share: a weight of {weight} is not between 1 and {}", GroupSpec::SHARE_MAX)]
    Share { weight: u32 },
    #[error("rate_max: at 0 bytes a second nothing is ever sent; leave it off, or choose a rate")]
    RateMax,
    #[error("headers: delta groups and shared objects have none; leave headers off, or these")]
    Headers,
    #[error("delta: shared objects have no parts to compare; leave delta off, or choose delivery_mode = \"private\"")]
    SharedDelta,
}

/// Shortest time after which a slow member is evicted.
pub(super) const EVICT_MIN: Duration = Duration::from_secs(1);
