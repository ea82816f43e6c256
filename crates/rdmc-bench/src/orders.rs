//! Orders to members and their acknowledgements, as lines of JSON on standard input and output.

use rdmc::{Algorithm, GroupSpec, NodeId};
use serde::{Deserialize, Serialize};

use crate::options::{Checks, Completion, Delivery, Ring};
use crate::plan::Case;

/// What all members must know before they form their groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) nodes: u32,
    pub(crate) groups: u32,
    pub(crate) senders: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) block_size: u32,
    pub(crate) bytes: u64,
    pub(crate) completion: Completion,
    pub(crate) delivery: Delivery,
    pub(crate) checks: Checks,
    pub(crate) ring: Option<Ring>,
}

impl From<&Case> for Setup {
    fn from(case: &Case) -> Self {
        Self {
            nodes: case.nodes,
            groups: case.groups,
            senders: case.senders,
            algorithm: case.algorithm.clone(),
            block_size: case.block_size,
            bytes: case.bytes,
            completion: case.completion,
            delivery: case.delivery,
            checks: case.checks,
            ring: case.ring,
        }
    }
}

impl Setup {
    /// Makes the specification of a group. Its members follow each other from the root on.
    pub(crate) fn spec(&self, group: u32) -> GroupSpec {
        let root = group % self.senders;
        let members = (0..self.nodes).map(|place| NodeId((root + place) % self.nodes));
        let spec = GroupSpec::new(1 + u64::from(group), members)
            .algorithm(self.algorithm.clone())
            .block_size(self.block_size)
            .delivery_mode(self.delivery.into());
        let spec = match self.ring {
            Some(Ring { slots, bytes }) => spec.ring(slots, bytes),
            None => spec,
        };
        match self.checks {
            Checks::Auto => spec,
            Checks::Off => spec.check_blocks(false),
        }
    }

    /// Returns the bound of a pool: messages of all groups, earlier ones that are not released yet, and blocks.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.bytes.saturating_mul(4 * u64::from(self.groups)).saturating_add(4 << 30)
    }
}

/// Messages of each group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Seed of the first message's content. Later messages count up.
    pub(crate) seed: u64,
    /// Number of messages of each group.
    pub(crate) messages: u64,
    pub(crate) pace: Pace,
}

/// How messages follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pace {
    /// Each is a round of its own.
    OneAtATime,
    /// So many are in flight.
    Window(u32),
    /// They are packed into batches.
    Packed,
}

impl Work {
    /// Returns the seed of a message. Only as many messages differ as are in memory at the same time.
    pub(crate) fn seed_of(&self, group: u32, message: u64) -> u64 {
        (self.seed + message % DISTINCT).wrapping_add(u64::from(group) << 48)
    }

    /// Returns the number of different messages.
    pub(crate) fn distinct(&self) -> u64 {
        self.messages.min(DISTINCT)
    }
}

/// An order of the benchmark to a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Invite the addresses, or wait for an invitation; then form the groups.
    Begin { setup: Setup, addresses: Vec<String> },
    /// Prepare the messages.
    Prepare(Work),
    /// Receive, and be ready to send.
    Arm,
    /// Send.
    Go,
    /// Verify the content, since all members have everything.
    Verify,
    /// Close the groups.
    Close,
}

/// The acknowledgement of an order by a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub(crate) enum Acknowledgement {
    Listening {
        address: String,
    },
    /// The groups are formed.
    Formed {
        /// Name of the fabric.
        fabric: String,
    },
    Ready,
    Armed,
    /// The member has sent all messages of its own groups, and received all others.
    Done {
        /// When the member began to send in each group of which it is the root, for each round.
        started_ns: Vec<Vec<u64>>,
        /// When it had the last message of each group that it receives from, for each round.
        ended_ns: Vec<Vec<u64>>,
    },
    /// Processor time of the work without the content, and the number of wrong messages.
    Verified {
        cpu_ns: u64,
        wrong: u64,
    },
    Closed,
}

/// Number of different messages, which are repeated afterwards.
const DISTINCT: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_has_all_members_and_the_roots_take_turns() {
        let algorithm = Algorithm::Chain;
        let completion = Completion::Event;
        let (delivery, checks, ring) = (Delivery::Private, Checks::Auto, None);
        let (nodes, groups, senders, block_size, bytes) = (3, 4, 2, 1, 1);
        let setup = Setup { nodes, groups, senders, algorithm, block_size, bytes, completion, delivery, checks, ring };
        let members = |group| setup.spec(group).members().iter().map(|node| node.0).collect::<Vec<_>>();
        assert_eq!([members(0), members(1), members(2)], [vec![0, 1, 2], vec![1, 2, 0], vec![0, 1, 2]]);
        assert_ne!(setup.spec(0).id(), setup.spec(2).id());
    }

    #[test]
    fn messages_that_may_be_in_flight_together_differ() {
        let work = Work { seed: 9, messages: 1000, pace: Pace::Window(64) };
        assert_ne!(work.seed_of(0, 0), work.seed_of(0, 255));
        assert_ne!(work.seed_of(0, 0), work.seed_of(1, 0));
        assert_eq!((work.seed_of(0, 256), work.distinct()), (work.seed_of(0, 0), 256));
    }

    #[test]
    fn orders_are_lines() {
        let order = Order::Prepare(Work { seed: 1, messages: 2, pace: Pace::Packed });
        let line = serde_json::to_string(&order).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Order>(&line).unwrap(), order);
    }
}
