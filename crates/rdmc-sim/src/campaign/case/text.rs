//! The text form of a case.

use std::fmt;
use std::time::Duration;

use super::{Behaviour, Case, FaultCase, GroupCase, MessageCase, PartsCase, RingCase, SendFuture, SourceCase, When};

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, .. } = self;
        writeln!(
            f,
            "seed {}: {} nodes, {} Mbit/s, {} apart",
            self.seed,
            model.nodes,
            model.port_mbps,
            ns(model.latency_ns)
        )?;
        writeln!(f, "  {:?}, {:?}, {:?}, racks {:?}", model.nic, model.host, model.control, model.racks)?;
        let joins = if self.joins { ", groups form while the nodes connect" } else { "" };
        writeln!(f, "  pools of {} bytes, healed at {}{joins}", self.pool_bytes_max, ns(self.heal_ns))?;
        self.groups.iter().try_for_each(|group| group.fmt(f))?;
        self.faults.iter().try_for_each(|fault| writeln!(f, "  {fault}"))
    }
}

impl fmt::Display for GroupCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, algorithm, block_size, sends_ahead, .. } = self;
        let limit = ns(self.formation_limit_ns);
        write!(f, "  group {id}: {algorithm:?}, blocks of {block_size}, to be formed in {limit}")?;
        let kinds = [
            ("recoverable", self.recoverable),
            ("recovers", self.recovers),
            ("checked", self.checks),
            ("delta", self.delta),
            ("stable", self.stable),
            ("receipts", self.receipts),
            ("headers", self.has_headers()),
        ];
        for (kind, is_so) in kinds {
            if is_so {
                write!(f, ", {kind}")?;
            }
        }
        if let Some(weight) = self.share {
            write!(f, ", a share of {weight}")?;
        }
        if let Some(rate) = self.rate_max {
            write!(f, ", at most {rate} bytes a second")?;
        }
        if let Some(RingCase { slots, bytes }) = self.ring.filter(|_| !self.delta) {
            write!(f, ", a ring of {slots} slots of {bytes} bytes")?;
        }
        writeln!(f)?;
        let memory = if self.sends_from_pool { " from the pool" } else { "" };
        write!(f, "    sends up to {sends_ahead} at once{memory}:")?;
        self.messages.iter().try_for_each(|message| write!(f, " {message}"))?;
        writeln!(f)?;
        for (rank, member) in self.members.iter().enumerate() {
            write!(f, "    rank {rank} on node {} from {}", member.node, ns(member.begins_ns))?;
            if member.offers {
                write!(f, ", offers memory")?;
            }
            if let Some(PartsCase { percent, seed }) = member.has {
                write!(f, " with {percent}% of each message (seed {seed})")?;
            }
            if member.reads_at_once > 0 {
                write!(f, ", reads {} bytes at once", member.reads_at_once)?;
            }
            if member.pause_ns > 0 {
                write!(f, ", pauses {}", ns(member.pause_ns))?;
            }
            if member.holds > 0 {
                write!(f, ", holds {}", member.holds)?;
            }
            if member.lets_go_each > 0 {
                write!(f, ", lets every message of {} go", member.lets_go_each)?;
            }
            if member.behaviour != Behaviour::Ordinary {
                write!(f, ", {:?}", member.behaviour)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for MessageCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.size)?;
        if let Some(SourceCase { piece, pause_ns, broken }) = self.source {
            write!(f, " (read in pieces of {piece}, {} before each", ns(pause_ns))?;
            broken.map_or(Ok(()), |broken| write!(f, ", {broken:?}"))?;
            write!(f, ")")?;
        }
        match self.future {
            SendFuture::Completes => Ok(()),
            SendFuture::NeverPolled => write!(f, " (never polled)"),
            SendFuture::Dropped { after_ns } => write!(f, " (dropped after {})", ns(after_ns)),
        }
    }
}

impl fmt::Display for FaultCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.when {
            When::At { ns: at } => write!(f, "at {}: {:?}", ns(at), self.fault),
            When::Milestone { group, node, milestone, delay_ns } => {
                let delay = ns(delay_ns);
                write!(f, "{delay} after {milestone:?} of node {node} in group {group}: {:?}", self.fault)
            }
            When::Operation { node, count } => write!(f, "after {count} operations of node {node}: {:?}", self.fault),
        }
    }
}

/// Returns a time in readable units.
fn ns(ns: u64) -> String {
    format!("{:?}", Duration::from_nanos(ns))
}
