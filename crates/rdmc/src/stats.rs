//! Counters as plain structs.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdmc_fabric::{Environment, RefusalLog, RefusalSum};
use rdmc_schedule::Rank;

/// Counts the work of a node since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeStats {
    /// Groups created or joined.
    pub groups_formed: u64,
    /// Groups that failed.
    pub groups_failed: u64,
    /// Messages completed here, sent as root or received.
    pub messages: u64,
    /// Bytes of blocks sent, relayed ones included.
    pub bytes_sent: u64,
    /// Bytes of blocks received.
    pub bytes_received: u64,
    /// Blocks that came corrupted, in groups that [check](crate::GroupSpec::check_blocks) them.
    pub blocks_corrupted: u64,
    /// Of these, the blocks that were fetched anew.
    pub blocks_healed: u64,
    /// Bytes of pool memory that are lent now.
    pub pool_bytes_lent: u64,
    /// Control connections that were refused. Those at the node's listener are included, even if other nodes use it.
    pub connections_refused: u64,
}

/// Counts the work of a listener since it was bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerStats {
    /// Control connections that were refused: for their credentials or frames, for their silence, or for lack of room.
    pub connections_refused: u64,
}

/// Counts refused connections, and bounds the warnings about them. Clones share both.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusals(Arc<RefusalsShared>);

#[derive(Debug, Default)]
struct RefusalsShared {
    count: AtomicU64,
    log: RefusalLog,
}

impl Refusals {
    /// Counts a refused connection; tells whether the caller is to log it.
    pub(crate) fn add(&self, kind: &'static str, from: Option<IpAddr>) -> bool {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        self.is_to_log(kind, from)
    }

    /// Tells whether the caller is to log something of this kind about a peer; if not, it becomes part of a sum.
    pub(crate) fn is_to_log(&self, kind: &'static str, from: Option<IpAddr>) -> bool {
        self.0.log.note(kind, from)
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Logs the sums of the refusals that were not logged one by one, for ever.
    pub(crate) async fn report(self, environment: Arc<dyn Environment>) {
        loop {
            for RefusalSum { kind, from, count } in self.0.log.next_sums(&*environment).await {
                tracing::warn!(
                    from = from.map(tracing::field::display),
                    kind,
                    count,
                    "control connections refused lately"
                );
            }
        }
    }
}

/// Counts the work of one member of a group since the group was formed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupStats {
    /// Messages completed here, sent as root or received.
    pub messages: u64,
    /// Blocks sent, relayed ones included.
    pub blocks_sent: u64,
    /// Bytes of blocks sent, relayed ones included.
    pub bytes_sent: u64,
    /// Blocks received.
    pub blocks_received: u64,
    /// Bytes of blocks received.
    pub bytes_received: u64,
    /// Time spent waiting for the next member's ready_for_block, with a block ready to send.
    pub waited_for_ready: Duration,
    /// The member that holds the others up now, if there is one; the same at all members.
    pub slow: Option<Rank>,
    /// Time for which this member has waited for slow members.
    pub held_up: Duration,
    /// Blocks that came corrupted, if they are [checked](crate::GroupSpec::check_blocks).
    pub blocks_corrupted: u64,
    /// Of these, the blocks that were fetched anew, from the root or another member.
    pub blocks_healed: u64,
    /// The last corrupted block.
    pub last_corruption: Option<Corruption>,
    /// Members that this one exchanges blocks with.
    pub neighbours: usize,
    /// Of these, the members reached by shared memory, where the fabric chooses for each pair of members.
    pub neighbours_by_shared_memory: usize,
    /// The round trip to the farthest of them, the software at both ends included; `None` until it is measured.
    pub round_trip: Option<Duration>,
    /// The rate of this member's port in bytes per second: what [the fabric
    /// knows](rdmc_fabric::Capabilities::port_rate), or the highest rate that was seen. `None` before the first blocks.
    pub port_rate: Option<u64>,
    /// How many bytes of blocks this member may send in a second: its [bound](crate::GroupSpec::rate_max), or at the
    /// root what the ports of all members leave to the group by its [share](crate::GroupSpec::share), if that is less.
    /// `None` without a bound.
    pub rate_limit: Option<u64>,
}

/// A block that a member received corrupted.
///
/// A bit changed on the way, or in the memory of the sender after it had checked the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Corruption {
    /// The member that sent it.
    pub from: Rank,
    /// The member that found it.
    pub to: Rank,
    /// The message's place in the group's order, from 0.
    pub message: u64,
    /// The block's place in the message, from 0.
    pub block: u32,
}

/// Live counters of a group or of a whole node.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) groups_formed: AtomicU64,
    pub(crate) groups_failed: AtomicU64,
    messages: AtomicU64,
    blocks_sent: AtomicU64,
    bytes_sent: AtomicU64,
    blocks_received: AtomicU64,
    bytes_received: AtomicU64,
    waited_for_ready_ns: AtomicU64,
    blocks_corrupted: AtomicU64,
    blocks_healed: AtomicU64,
    last_corruption: Mutex<Option<Corruption>>,
}

impl Counters {
    pub(crate) fn sent(&self, bytes: usize) {
        self.blocks_sent.fetch_add(1, Ordering::Relaxed);
        self.bytes_sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.blocks_received.fetch_add(1, Ordering::Relaxed);
        self.bytes_received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn completed(&self) {
        self.messages.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn waited(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.waited_for_ready_ns.fetch_add(nanos, Ordering::Relaxed);
    }

    pub(crate) fn corrupted(&self, corruption: Corruption) {
        self.blocks_corrupted.fetch_add(1, Ordering::Relaxed);
        *self.last_corruption.lock().unwrap_or_else(PoisonError::into_inner) = Some(corruption);
    }

    pub(crate) fn healed(&self) {
        self.blocks_healed.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the bytes of blocks received and sent.
    pub(crate) fn traffic(&self) -> [u64; 2] {
        [&self.bytes_received, &self.bytes_sent].map(|bytes| bytes.load(Ordering::Relaxed))
    }

    pub(crate) fn group_stats(&self) -> GroupStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        GroupStats {
            messages: read(&self.messages),
            blocks_sent: read(&self.blocks_sent),
            bytes_sent: read(&self.bytes_sent),
            blocks_received: read(&self.blocks_received),
            bytes_received: read(&self.bytes_received),
            waited_for_ready: Duration::from_nanos(read(&self.waited_for_ready_ns)),
            blocks_corrupted: read(&self.blocks_corrupted),
            blocks_healed: read(&self.blocks_healed),
            last_corruption: *self.last_corruption.lock().unwrap_or_else(PoisonError::into_inner),
            ..GroupStats::default()
        }
    }

    pub(crate) fn node_stats(&self, pool_bytes_lent: u64, connections_refused: u64) -> NodeStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        NodeStats {
            groups_formed: read(&self.groups_formed),
            groups_failed: read(&self.groups_failed),
            messages: read(&self.messages),
            bytes_sent: read(&self.bytes_sent),
            bytes_received: read(&self.bytes_received),
            blocks_corrupted: read(&self.blocks_corrupted),
            blocks_healed: read(&self.blocks_healed),
            pool_bytes_lent,
            connections_refused,
        }
    }
}
