//! Shrinks a failing case.

use super::case::{AlgorithmCase, Behaviour, Case, Fault, SendFuture, SourceCase, When};
use crate::model::{ControlModel, HostModel, NicModel};

/// Shrinks a case as long as `fails` returns true for it, with at most `plays` calls.
///
/// It removes faults first, then groups, members, nodes and messages, and then simplifies the rest. The result cannot
/// shrink by another step, unless the calls were used up.
pub fn shrink(case: &Case, plays: usize, mut fails: impl FnMut(&Case) -> bool) -> Case {
    let mut smallest = case.clone();
    let mut left = plays;
    'again: loop {
        for smaller in candidates(&smallest) {
            if smaller == smallest || smaller.check().is_err() {
                continue;
            }
            if left == 0 {
                break 'again;
            }
            left -= 1;
            if fails(&smaller) {
                smallest = smaller;
                continue 'again;
            }
        }
        break;
    }
    smallest
}

/// Returns the cases that are one step smaller, the largest steps first.
fn candidates(case: &Case) -> Vec<Case> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut Case)| {
        let mut smaller = case.clone();
        change(&mut smaller);
        found.push(smaller);
    };
    for at in 0..case.faults.len() {
        add(&|case| {
            case.faults.remove(at);
        });
    }
    for at in (0..case.groups.len()).filter(|_| case.groups.len() > 1) {
        add(&|case| {
            case.groups.remove(at);
        });
    }
    add(&drop_idle_nodes);
    for (at, group) in case.groups.iter().enumerate() {
        if group.messages.len() > 1 {
            let half = group.messages.len() / 2;
            add(&|case| case.groups[at].messages.truncate(half));
            add(&|case| drop(case.groups[at].messages.drain(..half)));
        }
        for rank in (0..group.members.len()).rev().filter(|_| group.members.len() > 1) {
            add(&|case| {
                let group = &mut case.groups[at];
                group.members.remove(rank);
                if let AlgorithmCase::Hybrid { racks, .. } = &mut group.algorithm {
                    racks.remove(rank);
                }
            });
        }
        for message in 0..group.messages.len() {
            add(&|case| {
                case.groups[at].messages.remove(message);
            });
        }
    }
    simplify_groups(case, &mut add);
    simplify_model(&mut add);
    simplify_times(case, &mut add);
    found
}

/// Removes nodes that are in no group and in no fault, and renumbers the others.
fn drop_idle_nodes(case: &mut Case) {
    let members = case.groups.iter().flat_map(|group| group.members.iter().map(|member| member.node));
    let hit = case.faults.iter().flat_map(|fault| fault.fault.nodes());
    let used: std::collections::BTreeSet<u32> = members.chain(hit).collect();
    // A cluster of one node has no traffic.
    let nodes = u32::try_from(used.len().max(2)).unwrap_or(u32::MAX).min(case.model.nodes);
    let name = |node: u32| used.iter().zip(0..).find(|(used, _)| **used == node).map_or(node, |(_, name)| name);
    case.model.nodes = nodes;
    if let Some(racks) = &mut case.model.racks {
        racks.rack_of.clear();
    }
    for member in case.groups.iter_mut().flat_map(|group| &mut group.members) {
        member.node = name(member.node);
    }
    for fault in &mut case.faults {
        fault.fault = fault.fault.renamed(name);
        if let When::Milestone { node, .. } | When::Operation { node, .. } = &mut fault.when {
            *node = name(*node);
        }
    }
}

fn simplify_groups(case: &Case, add: &mut impl FnMut(&dyn Fn(&mut Case))) {
    for (at, group) in case.groups.iter().enumerate() {
        for rank in 0..group.members.len() {
            add(&|case| case.groups[at].members[rank].behaviour = Behaviour::Ordinary);
            add(&|case| case.groups[at].members[rank].offers = false);
            add(&|case| case.groups[at].members[rank].has = None);
            add(&|case| case.groups[at].members[rank].reads_at_once = 0);
            add(&|case| case.groups[at].members[rank].holds = 0);
            add(&|case| case.groups[at].members[rank].lets_go_each = 0);
            add(&|case| case.groups[at].members[rank].pause_ns = 0);
            add(&|case| case.groups[at].members[rank].begins_ns = 0);
        }
        add(&|case| case.groups[at].sends_from_pool = false);
        add(&|case| case.groups[at].recovers = false);
        add(&|case| case.groups[at].recoverable = false);
        add(&|case| case.groups[at].checks = false);
        add(&|case| case.groups[at].delta = false);
        add(&|case| case.groups[at].stable = false);
        add(&|case| case.groups[at].receipts = false);
        add(&|case| case.groups[at].ring = None);
        add(&|case| case.groups[at].headers = false);
        add(&|case| case.groups[at].share = None);
        add(&|case| case.groups[at].rate_max = None);
        add(&|case| case.groups[at].sends_ahead = 1);
        for message in 0..group.messages.len() {
            let block = u64::from(group.block_size);
            add(&|case| case.groups[at].messages[message].future = SendFuture::Completes);
            add(&|case| case.groups[at].messages[message].source = None);
            if let Some(source) = group.messages[message].source {
                let simpler = [SourceCase { broken: None, ..source }, SourceCase { pause_ns: 0, ..source }];
                for simpler in simpler {
                    add(&|case| case.groups[at].messages[message].source = Some(simpler));
                }
            }
            for size in [0, 1, block, 2 * block, 3 * block] {
                if size < group.messages[message].size {
                    add(&|case| case.groups[at].messages[message].size = size);
                }
            }
        }
        if group.algorithm != AlgorithmCase::Chain && group.algorithm != AlgorithmCase::Sequential {
            add(&|case| case.groups[at].algorithm = AlgorithmCase::Sequential);
            add(&|case| case.groups[at].algorithm = AlgorithmCase::Chain);
            if group.algorithm != AlgorithmCase::BinomialPipeline {
                add(&|case| case.groups[at].algorithm = AlgorithmCase::BinomialPipeline);
            }
        }
    }
}

fn simplify_model(add: &mut impl FnMut(&dyn Fn(&mut Case))) {
    add(&|case| case.model.racks = None);
    add(&|case| case.model.host = HostModel::default());
    add(&|case| case.model.host.delays = None);
    add(&|case| case.model.nic = NicModel::default());
    add(&|case| case.model.control = ControlModel::default());
    add(&|case| case.model.control.loss = 0.0);
    add(&|case| case.model.latency_ns = 1_000);
    add(&|case| case.model.port_mbps = 1_000);
    add(&|case| case.pool_bytes_max = 1 << 30);
    add(&|case| case.joins = false);
}

/// Rounds times, so that they are easy to read.
fn simplify_times(case: &Case, add: &mut impl FnMut(&dyn Fn(&mut Case))) {
    add(&|case| case.heal_ns = rounded(case.heal_ns));
    for at in 0..case.faults.len() {
        add(&|case| match &mut case.faults[at].when {
            When::At { ns } => *ns = rounded(*ns),
            When::Milestone { delay_ns, .. } => *delay_ns = 0,
            When::Operation { count, .. } => *count /= 2,
        });
        add(&|case| match &mut case.faults[at].when {
            When::At { .. } => {}
            When::Milestone { delay_ns, .. } => *delay_ns = rounded(*delay_ns),
            When::Operation { count, .. } => *count = count.saturating_sub(1),
        });
        add(&|case| match &mut case.faults[at].fault {
            Fault::Stop { for_ns, .. }
            | Fault::HoldUp { for_ns, .. }
            | Fault::SlowDown { for_ns, .. }
            | Fault::LimitPort { for_ns, .. }
            | Fault::Cut { for_ns, .. }
            | Fault::CutOneWay { for_ns, .. } => *for_ns = rounded(*for_ns),
            Fault::FlipBits { blocks: count, .. }
            | Fault::FlipSlots { slots: count, .. }
            | Fault::FlipRows { rows: count, .. } => *count = 1,
            _ => {}
        });
    }
}

/// Rounds down to the first digit.
fn rounded(ns: u64) -> u64 {
    let unit = 10_u64.pow(ns.checked_ilog10().unwrap_or(0));
    ns / unit * unit
}
