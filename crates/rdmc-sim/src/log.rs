//! The events of a world: always a digest, and a record on request.

use crate::simulation::NodeIndex;

/// An event of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recorded {
    /// Bytes left one port and arrived at another.
    Carried {
        /// The sending node.
        from: NodeIndex,
        /// The receiving node.
        to: NodeIndex,
        /// The immediate: the number of a block, or the message's size with a first block.
        imm: Option<u32>,
        /// Whether the bytes belong to a write or a read, instead of a send.
        one_sided: bool,
        /// Bytes on the network.
        bytes: u64,
        /// When the first byte left, in ns.
        begin_ns: u64,
        /// When the last byte left, in ns.
        end_ns: u64,
        /// When the last byte arrived, in ns.
        arrival_ns: u64,
    },
    /// The scheduler held up a node's software.
    HeldUp {
        /// The node.
        node: NodeIndex,
        /// Start in ns.
        begin_ns: u64,
        /// Duration in ns.
        duration_ns: u64,
    },
    /// A fault.
    Fault {
        /// Time in ns.
        at_ns: u64,
        /// The node; `None` for a fault of several nodes.
        node: Option<NodeIndex>,
        /// The kind of fault.
        what: &'static str,
    },
}

impl Recorded {
    /// Counts times from `start_ns`; earlier times become 0.
    #[must_use]
    pub(crate) fn since(mut self, start_ns: u64) -> Self {
        let since = |ns: &mut u64| *ns = ns.saturating_sub(start_ns);
        match &mut self {
            Self::Carried { begin_ns, end_ns, arrival_ns, .. } => {
                [begin_ns, end_ns, arrival_ns].into_iter().for_each(since)
            }
            Self::HeldUp { begin_ns, .. } => since(begin_ns),
            Self::Fault { at_ns, .. } => since(at_ns),
        }
        self
    }
}

/// The digest and the record of one world.
#[derive(Debug, Default)]
pub(crate) struct Log {
    digest: u64,
    recorded: Option<Vec<Recorded>>,
}

impl Log {
    pub(crate) fn record(&mut self) {
        self.recorded.get_or_insert_default();
    }

    pub(crate) fn take(&mut self) -> Vec<Recorded> {
        self.recorded.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    /// Adds an event to the digest.
    pub(crate) fn note(&mut self, kind: &'static str, facts: [u64; 3]) {
        for byte in kind.bytes() {
            self.mix(u64::from(byte));
        }
        facts.into_iter().for_each(|fact| self.mix(fact));
    }

    pub(crate) fn carried(
        &mut self,
        (from, to): (NodeIndex, NodeIndex),
        imm: Option<u32>,
        one_sided: bool,
        bytes: u64,
        (begin_ns, end_ns, arrival_ns): (u64, u64, u64),
    ) {
        self.note("carried", [u64::from(from.0) << 32 | u64::from(to.0), bytes, begin_ns]);
        self.note("until", [end_ns, arrival_ns, imm.map_or(u64::MAX, u64::from)]);
        if let Some(recorded) = &mut self.recorded {
            recorded.push(Recorded::Carried { from, to, imm, one_sided, bytes, begin_ns, end_ns, arrival_ns });
        }
    }

    pub(crate) fn held_up(&mut self, begin_ns: u64, node: NodeIndex, duration_ns: u64) {
        self.note("held up", [begin_ns, u64::from(node.0), duration_ns]);
        if let Some(recorded) = &mut self.recorded {
            recorded.push(Recorded::HeldUp { node, begin_ns, duration_ns });
        }
    }

    pub(crate) fn fault(&mut self, at_ns: u64, node: Option<NodeIndex>, what: &'static str) {
        self.note(what, [at_ns, node.map_or(u64::MAX, |node| u64::from(node.0)), 0]);
        if let Some(recorded) = &mut self.recorded {
            recorded.push(Recorded::Fault { at_ns, node, what });
        }
    }

    /// FNV-1a, a word at a time.
    fn mix(&mut self, word: u64) {
        self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }
}
