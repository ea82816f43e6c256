//! The members that a group's failure may name.

use std::collections::BTreeSet;

use super::case::{Behaviour, Case, Fault, GroupCase};
use super::observation::{FlippedBlock, NamedMember, Observation};

/// The nodes that a failure of one group may name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suspects {
    /// Members with a fault or a behaviour that may end the group. Without any, the group must not fail.
    pub causes: BTreeSet<u32>,
    /// Members that were partitioned for a time that breaks nothing, but may delay the report of another failure. If
    /// there is a cause, a failure may name them too.
    pub delayed: BTreeSet<u32>,
    /// Members that sent corrupted blocks. A failure may name them for that, if there is a cause that prevented
    /// healing.
    pub corrupting: BTreeSet<u32>,
    /// Members that were partitioned for so long that they may have an outcome of their own.
    pub partitioned: BTreeSet<u32>,
    /// Whether a member was stopped for that long. If it leads after that, it names the members that gave it up.
    pub stopped: bool,
}

impl Suspects {
    /// Finds the suspects of a group of a case.
    pub fn of(case: &Case, seen: &Observation, group: &GroupCase) -> Self {
        let mut suspects = Self::default();
        suspects.add_behaviours(group);
        suspects.add_faults(case, seen, group);
        suspects
    }

    /// Returns whether a failure may name a member.
    pub fn may_be_named(&self, named: &NamedMember) -> bool {
        let NamedMember { node, corrupted, .. } = named;
        let known = match corrupted {
            true => self.corrupting.contains(node),
            false => self.stopped || self.causes.contains(node) || self.delayed.contains(node),
        };
        !self.causes.is_empty() && known
    }

    fn add_behaviours(&mut self, group: &GroupCase) {
        if group.has_broken_source() {
            self.causes.extend(group.members.first().map(|root| root.node));
        }
        for member in &group.members {
            match member.behaviour {
                Behaviour::Ordinary | Behaviour::DropNext { .. } | Behaviour::DropDelivery { .. } => {}
                // The runtime refuses messages that have not begun, and drops those in memory of the pool.
                Behaviour::CloseEarly { .. } if !member.offers => {}
                // The member and its neighbours name each other.
                Behaviour::OtherBlockSize => self.causes.extend(group.members.iter().map(|member| member.node)),
                _ => {
                    self.causes.insert(member.node);
                }
            }
        }
    }

    fn add_faults(&mut self, case: &Case, seen: &Observation, group: &GroupCase) {
        let within = |nodes: &[u32]| nodes.iter().all(|&node| group.rank_of(node).is_some());
        let flipped = seen.flipped.iter().filter(|flipped| within(&[flipped.from, flipped.to]));
        self.corrupting.extend(flipped.map(|FlippedBlock { from, .. }| from));
        let (mut waited_ns, mut waiting) = (0, BTreeSet::new());
        for happened in &seen.faults {
            let fault = case.faults[happened.fault].fault;
            let nodes = fault.nodes();
            if !within(&nodes) {
                continue;
            }
            let lasted_ns = happened.until_ns.map_or(0, |until_ns| until_ns - happened.at_ns);
            match fault {
                Fault::Kill { .. } | Fault::Vanish { .. } => {
                    self.partitioned.extend(&nodes);
                    self.causes.extend(nodes);
                }
                Fault::ResetControl { .. } => {
                    if reconnects_late(case, seen, &nodes) {
                        self.partitioned.extend(&nodes);
                    }
                    self.causes.extend(nodes);
                }
                // A node that waits for the rest of a garbled frame reads nothing more; nor does a node that has left.
                Fault::TruncateControl { .. } | Fault::GarbleControl { .. } | Fault::Leave { .. } => {
                    self.partitioned.extend(&nodes);
                    self.causes.extend(nodes);
                }
                Fault::BreakQueuePairs { .. } => self.causes.extend(nodes),
                Fault::Cut { a, b, .. } | Fault::CutOneWay { from: a, to: b, .. } => {
                    waited_ns += lasted_ns;
                    waiting.extend([a, b]);
                    self.delayed.extend([a, b]);
                    // Several cuts of the same two nodes may add up to one.
                    let cut_ns = cut_ns(case, seen, a, b);
                    let silent = cut_ns >= silence_ns(case);
                    if silent || cut_ns >= case.model.nic.retry_ns.min(case.model.control.patience_ns) {
                        self.causes.extend([a, b]);
                    }
                    if silent {
                        self.partitioned.extend([a, b]);
                    }
                }
                Fault::Stop { .. } | Fault::HoldUp { .. } => {
                    waited_ns += lasted_ns;
                    waiting.extend(&nodes);
                    if lasted_ns >= silence_ns(case) {
                        self.causes.extend(&nodes);
                        self.partitioned.extend(nodes);
                        self.stopped = true;
                    }
                }
                // Receivers heal these.
                Fault::FlipBits { .. } | Fault::FlipSlots { .. } | Fault::FlipRows { .. } => {}
                Fault::SlowDown { .. } | Fault::LimitPort { .. } => {}
            }
        }
        if waited_ns >= group.formation_limit_ns * 3 / 4 {
            self.causes.extend(waiting);
        }
    }
}

/// Returns the shortest silence after which a node may be given up, in ns. Retransmission of lost segments makes a
/// silence longer.
fn silence_ns(case: &Case) -> u64 {
    let given_up = DETECTION_DEFAULT_NS * 2 / 5;
    given_up.saturating_sub(case.model.control.resend_ns + 2 * case.model.control.latency_ns + MARGIN_NS)
}

/// Returns whether reconnecting two nodes after a reset may take longer than the members wait.
fn reconnects_late(case: &Case, seen: &Observation, nodes: &[u32]) -> bool {
    let delays = |fault: Fault| {
        matches!(fault, Fault::Cut { .. } | Fault::CutOneWay { .. } | Fault::Stop { .. } | Fault::HoldUp { .. })
            && fault.nodes().iter().any(|node| nodes.contains(node))
    };
    case.model.control.loss > 0.0 || seen.faults.iter().any(|happened| delays(case.faults[happened.fault].fault))
}

/// Returns the time for which two nodes were partitioned, in ns.
fn cut_ns(case: &Case, seen: &Observation, a: u32, b: u32) -> u64 {
    let of_both = seen.faults.iter().filter(|happened| match case.faults[happened.fault].fault {
        Fault::Cut { a: one, b: other, .. } | Fault::CutOneWay { from: one, to: other, .. } => {
            (one, other) == (a, b) || (one, other) == (b, a)
        }
        _ => false,
    });
    of_both.map(|happened| happened.until_ns.map_or(0, |until_ns| until_ns - happened.at_ns)).sum()
}

/// Default detection time of the runtime, agreement included, in ns.
const DETECTION_DEFAULT_NS: u64 = 2_000_000_000;
/// Margin for software, in ns.
const MARGIN_NS: u64 = 20_000_000;
