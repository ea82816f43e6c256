//! What happened: a digest always, a record if asked for.

use crate::simulation::NodeIndex;

/// Something that happened in a world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recorded {
    /// Bytes left one port and came in at another.
    Carried {
        /// The node they left.
        from: NodeIndex,
        /// The node they reached.
        to: NodeIndex,
        /// The immediate that went with them: of a block its number, of a first block the message's size.
        imm: Option<u32>,
        /// Whether they answered a read or were written, instead of sent.
        one_sided: bool,
        /// Bytes on the network.
        bytes: u64,
        /// When the first left, in ns.
        begin_ns: u64,
        /// When the last left, in ns.
        end_ns: u64,
        /// When the last came in, in ns.
        arrival_ns: u64,
    },
    /// A node's software was held up.
    HeldUp {
        /// The node.
        node: NodeIndex,
        /// From when, in ns.
        begin_ns: u64,
        /// For how long, in ns.
        duration_ns: u64,
    },
    /// A fault.
    Fault {
        /// When, in ns.
        at_ns: u64,
        /// The node, if it concerns one.
        node: Option<NodeIndex>,
        /// What it was.
        what: &'static str,
    },
}

impl Recorded {
    /// Counts times from `start_ns`; what was earlier counts as then.
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

    /// Notes that something of a kind happened.
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
