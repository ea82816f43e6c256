//! Whom a group's failure may name, from what happened.

use std::collections::BTreeSet;

use super::case::{Case, Fault, GroupCase, Whim};
use super::observation::{Flipped, Named, Observation};

/// The nodes that a failure of one group may name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suspects {
    /// Members to whom something happened, or who did something, that may end the group. If there are none, the group
    /// must not fail.
    pub causes: BTreeSet<u32>,
    /// Members that were cut off each other for a while that does not break anything, but may delay the word of why
    /// something else broke: they may be named too, if there is a cause.
    pub delayed: BTreeSet<u32>,
    /// Members from which blocks came corrupted to others: they may be named for that, if there is a cause for which nobody
    /// supplied these whole.
    pub corrupting: BTreeSet<u32>,
    /// Members that were out of reach of others for so long that they may have come to an end of their own.
    pub apart: BTreeSet<u32>,
    /// Whether a member was stopped for so long: if it leads when it goes on, it names those who have given it up.
    pub stopped: bool,
}

impl Suspects {
    /// Finds the suspects of a group of a case.
    pub fn of(case: &Case, seen: &Observation, group: &GroupCase) -> Self {
        let mut suspects = Self::default();
        suspects.add_whims(group);
        suspects.add_faults(case, seen, group);
        suspects
    }

    /// Tells whether a failure may name a node.
    pub fn may_be(&self, named: &Named) -> bool {
        let Named { node, corrupted, .. } = named;
        let known = match corrupted {
            true => self.corrupting.contains(node),
            false => self.stopped || self.causes.contains(node) || self.delayed.contains(node),
        };
        !self.causes.is_empty() && known
    }

    fn add_whims(&mut self, group: &GroupCase) {
        for member in &group.members {
            match member.whim {
                Whim::None | Whim::DropNext { .. } | Whim::DropDelivery { .. } => {}
                // What was not begun is refused; messages in the pool's memory are taken and dropped.
                Whim::CloseEarly { .. } if !member.offers => {}
                // Neighbours accuse it, and it accuses them.
                Whim::OtherBlockSize => self.causes.extend(group.members.iter().map(|member| member.node)),
                _ => {
                    self.causes.insert(member.node);
                }
            }
        }
    }

    fn add_faults(&mut self, case: &Case, seen: &Observation, group: &GroupCase) {
        let within = |nodes: &[u32]| nodes.iter().all(|&node| group.rank_of(node).is_some());
        let flipped = seen.flipped.iter().filter(|flipped| within(&[flipped.from, flipped.to]));
        self.corrupting.extend(flipped.map(|Flipped { from, .. }| from));
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
                    self.apart.extend(&nodes);
                    self.causes.extend(nodes);
                }
                Fault::ResetControl { .. } => {
                    if mends_late(case, seen, &nodes) {
                        self.apart.extend(&nodes);
                    }
                    self.causes.extend(nodes);
                }
                // Who waits for the rest of a frame of a garbled length hears no more, nor does who has left.
                Fault::TruncateControl { .. } | Fault::GarbleControl { .. } | Fault::Leave { .. } => {
                    self.apart.extend(&nodes);
                    self.causes.extend(nodes);
                }
                Fault::BreakQueuePairs { .. } => self.causes.extend(nodes),
                Fault::Cut { a, b, .. } | Fault::CutOneWay { from: a, to: b, .. } => {
                    waited_ns += lasted_ns;
                    waiting.extend([a, b]);
                    self.delayed.extend([a, b]);
                    // Cuts of the same two nodes may follow each other without a break.
                    let cut_ns = cut_ns(case, seen, a, b);
                    let silent = cut_ns >= silence_ns(case);
                    if silent || cut_ns >= case.model.nic.retry_ns.min(case.model.control.patience_ns) {
                        self.causes.extend([a, b]);
                    }
                    if silent {
                        self.apart.extend([a, b]);
                    }
                }
                Fault::Stop { .. } | Fault::HoldUp { .. } => {
                    waited_ns += lasted_ns;
                    waiting.extend(&nodes);
                    if lasted_ns >= silence_ns(case) {
                        self.causes.extend(&nodes);
                        self.apart.extend(nodes);
                        self.stopped = true;
                    }
                }
                // They are healed.
                Fault::FlipBits { .. } => {}
                Fault::SlowDown { .. } | Fault::LimitPort { .. } => {}
            }
        }
        if waited_ns >= group.formation_limit_ns * 3 / 4 {
            self.causes.extend(waiting);
        }
    }
}

/// Returns the shortest silence after which a node may be given up, in ns: what is silent for a while may be so for longer,
/// as what was lost is sent again later.
fn silence_ns(case: &Case) -> u64 {
    let given_up = DETECTION_DEFAULT_NS * 2 / 5;
    given_up.saturating_sub(case.model.control.resend_ns + 2 * case.model.control.latency_ns + MARGIN_NS)
}

/// Tells whether the control connection of two nodes, once reset, may take longer to be made anew than one waits who is left
/// alone by that.
fn mends_late(case: &Case, seen: &Observation, nodes: &[u32]) -> bool {
    let delays = |fault: Fault| {
        matches!(fault, Fault::Cut { .. } | Fault::CutOneWay { .. } | Fault::Stop { .. } | Fault::HoldUp { .. })
            && fault.nodes().iter().any(|node| nodes.contains(node))
    };
    case.model.control.loss > 0.0 || seen.faults.iter().any(|happened| delays(case.faults[happened.fault].fault))
}

/// Returns for how long two nodes were cut off each other, in ns.
fn cut_ns(case: &Case, seen: &Observation, a: u32, b: u32) -> u64 {
    let of_both = seen.faults.iter().filter(|happened| match case.faults[happened.fault].fault {
        Fault::Cut { a: one, b: other, .. } | Fault::CutOneWay { from: one, to: other, .. } => {
            (one, other) == (a, b) || (one, other) == (b, a)
        }
        _ => false,
    });
    of_both.map(|happened| happened.until_ns.map_or(0, |until_ns| until_ns - happened.at_ns)).sum()
}

/// After which silence a node that was not told otherwise gives others up, agreement included, in ns.
const DETECTION_DEFAULT_NS: u64 = 2_000_000_000;
/// What software may take, in ns.
const MARGIN_NS: u64 = 20_000_000;
