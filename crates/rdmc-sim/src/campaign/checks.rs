//! The checkers: conditions that must hold after every case.

use std::collections::{BTreeMap, BTreeSet};

use super::case::{Behaviour, Break, Case, GroupCase, SendFuture};
use super::observation::{
    Delivered, Ending, GroupObservation, MemberObservation, NamedMember, Observation, Outcome, ReportedFailure,
    SeenReceipt, SeenStored,
};
use super::suspects::Suspects;

mod headers;
mod recoveries;
mod sources;

use headers::headers_belong;
use recoveries::recoveries_go_on;
use sources::{reads_are_true, sources_break_as_promised};

/// A condition that must hold after every case.
#[derive(Clone, Copy, Debug)]
pub struct Checker {
    /// Its name.
    pub name: &'static str,
    /// Returns the violation as an error.
    pub check: fn(&Case, &Observation) -> Result<(), String>,
}

/// The checkers, the most informative first.
pub const CHECKERS: &[Checker] = &[
    Checker { name: "every member ends", check: every_member_ends },
    Checker { name: "messages are whole and in order", check: messages_are_whole },
    Checker { name: "headers belong to their messages", check: headers_belong },
    Checker { name: "readers get the bytes of their messages", check: reads_are_true },
    Checker { name: "a close succeeds only after full delivery", check: closes_follow_full_delivery },
    Checker { name: "no failure without a cause", check: failures_have_causes },
    Checker { name: "failures name the failed members", check: failures_name_suspects },
    Checker { name: "an outcome does not change", check: outcomes_do_not_change },
    Checker { name: "one outcome for all survivors", check: outcomes_agree },
    Checker { name: "one outcome by quorum", check: quorums_agree },
    Checker { name: "sources break as promised", check: sources_break_as_promised },
    Checker { name: "corrupted blocks are found and healed", check: corruptions_are_healed },
    Checker { name: "certificates are true", check: certificates_are_true },
    Checker { name: "receipts are true", check: receipts_are_true },
    Checker { name: "stable delivery is atomic", check: stable_delivery_is_atomic },
    Checker { name: "survivors go on", check: recoveries_go_on },
    Checker { name: "a stream ends once", check: streams_end_once },
    Checker { name: "no resources remain in use", check: no_resources_remain },
];

/// Returns the groups of a case with their observations.
fn groups<'a>(case: &'a Case, seen: &'a Observation) -> impl Iterator<Item = (&'a GroupCase, &'a GroupObservation)> {
    case.groups.iter().zip(&seen.groups)
}

/// Every member on a living node ends within the limit.
fn every_member_ends(case: &Case, seen: &Observation) -> Result<(), String> {
    let mut waiting = Vec::new();
    for (group, of_group) in groups(case, seen) {
        for (rank, member) in of_group.members.iter().enumerate() {
            if member.ended_ns.is_none() && member.died_ns.is_none() {
                let node = group.members[rank].node;
                waiting.push(format!("rank {rank} (node {node}) of group {} {}", group.id, progress_of(member)));
            }
        }
    }
    match &seen.stalled {
        Some(stalled) => Err(format!("{stalled}; waiting: {}", waiting.join(", "))),
        None if waiting.is_empty() => Ok(()),
        None => Err(format!("did not end: {}", waiting.join(", "))),
    }
}

fn progress_of(member: &MemberObservation) -> String {
    match member {
        MemberObservation { joining_ns: None, .. } => "has not begun".to_owned(),
        MemberObservation { joined: None, .. } => "is joining".to_owned(),
        MemberObservation { closing_ns: Some(at_ns), .. } => format!("closes since {at_ns} ns"),
        MemberObservation { stream: Some(_), .. } => "has seen the end of the stream".to_owned(),
        _ => {
            let sent = member.sends.iter().flatten().count();
            format!("has sent {sent} and received {}", member.delivered.len())
        }
    }
}

/// All members deliver the same messages as the root sent, in order, each once and none skipped.
fn messages_are_whole(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let mut longest: &[Delivered] = &[];
        let mut known: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (rank, member) in of_group.members.iter().enumerate() {
            for (place, message) in (0..).zip(&member.delivered) {
                // A header has the number before that of its message.
                let due = (place + 1) * group.numbers_each() - 1;
                if message.number != due {
                    let number = message.number;
                    return Err(format!("group {}: rank {rank} got message {number}, not message {due}", group.id));
                }
                let Some(digest) = message.digest else { continue };
                let first = *known.entry(due).or_insert((message.size, digest));
                if first != (message.size, digest) {
                    return Err(format!("group {}: rank {rank} got another message {due} than the others", group.id));
                }
            }
            if member.delivered.len() > longest.len() {
                longest = &member.delivered;
            }
        }
        let delivered = longest.iter().map(|message| {
            let digest = known.get(&message.number).map(|it| it.1);
            Content { size: message.size, digest, header: None }
        });
        let delivered: Vec<_> = delivered.collect();
        if positions_after(group, of_group, &delivered).is_empty() {
            return Err(format!("group {}: {delivered:?} is not what the root sent", group.id));
        }
    }
    Ok(())
}

/// The content of a delivered message, to be compared with what the root sent. `None` compares equal.
#[derive(Clone, Copy, Debug)]
struct Content {
    size: u64,
    digest: Option<u64>,
    /// The digest of the header.
    header: Option<u64>,
}

impl Content {
    fn of(message: &Delivered) -> Self {
        Self { size: message.size, digest: message.digest, header: None }
    }

    /// Returns whether the root may have sent it as this message.
    fn may_be(self, group: &GroupCase, message: usize) -> bool {
        let planned = group.messages[message];
        let is_sent = planned.future != SendFuture::NeverPolled || group.is_queued_at_once(message);
        let content = || Outcome::digest_of(&Case::content(group.id, message, planned.size));
        let header = || Outcome::digest_of(&group.header(message));
        is_sent
            && group.break_of(message).is_none()
            && planned.size == self.size
            && self.header.is_none_or(|digest| digest == header())
            && self.digest.is_none_or(|digest| digest == content())
    }
}

/// Returns the messages in the order in which the root sent them, and behind them those that it did not send.
fn order_of(group: &GroupCase, seen: &GroupObservation) -> Vec<usize> {
    let mut order = seen.members.first().map(|root| root.order.clone()).unwrap_or_default();
    let left: Vec<usize> = (0..group.messages.len()).filter(|message| !order.contains(message)).collect();
    order.extend(left);
    order
}

/// Returns the positions in the root's order at which these deliveries may end; none if they are impossible.
///
/// A send whose future was dropped may or may not have been executed.
fn positions_after(group: &GroupCase, seen: &GroupObservation, delivered: &[Content]) -> BTreeSet<usize> {
    let order = order_of(group, seen);
    let mut positions = BTreeSet::from([0]);
    for content in delivered {
        let mut next = BTreeSet::new();
        for mut place in positions {
            while let Some(&message) = order.get(place) {
                if content.may_be(group, message) {
                    next.insert(place + 1);
                }
                if must_be_sent(group, seen, message) {
                    break;
                }
                place += 1;
            }
        }
        positions = next;
    }
    positions
}

/// Returns whether these deliveries may be all that the root sent.
fn may_be_all(group: &GroupCase, seen: &GroupObservation, delivered: &[Content]) -> bool {
    let order = order_of(group, seen);
    let rest_is_optional = |place: usize| !order[place..].iter().any(|&message| must_be_sent(group, seen, message));
    positions_after(group, seen, delivered).into_iter().any(rest_is_optional)
}

fn must_be_sent(group: &GroupCase, seen: &GroupObservation, message: usize) -> bool {
    let Some(root) = seen.members.first() else { return false };
    let outcome = root.sends.get(message).and_then(|sent| Some(&sent.as_ref()?.outcome));
    match group.messages[message].future {
        SendFuture::Completes => {
            group.break_of(message) != Some(Break::BeforeItsPlace) && outcome != Some(&Outcome::Unreadable)
        }
        // The application may not learn that a group that has failed did not queue it.
        _ if group.is_queued_at_once(message) && root.recoveries.is_empty() => true,
        SendFuture::NeverPolled => false,
        SendFuture::Dropped { .. } => outcome == Some(&Outcome::Done),
    }
}

/// If one close succeeds, every member has called close and has every message that the root sent.
fn closes_follow_full_delivery(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let Some(closed) = of_group.members.iter().position(MemberObservation::closed_well) else { continue };
        let closed_but = |rank: usize| format!("group {}: rank {closed} closed well, but rank {rank}", group.id);
        for (rank, member) in of_group.members.iter().enumerate() {
            if member.closing_ns.is_none() {
                return Err(format!("{} never called close", closed_but(rank)));
            }
            let closes_early = matches!(group.members[rank].behaviour, Behaviour::CloseEarly { .. });
            if rank == 0 || closes_early {
                continue;
            }
            let delivered: Vec<_> = member.delivered.iter().map(Content::of).collect();
            if !may_be_all(group, of_group, &delivered) {
                return Err(format!("{} got only {} messages", closed_but(rank), delivered.len()));
            }
        }
        let counts = of_group.members.iter().enumerate().skip(1);
        let counts = counts.filter(|(rank, _)| !matches!(group.members[*rank].behaviour, Behaviour::CloseEarly { .. }));
        let counts: BTreeSet<usize> = counts.map(|(_, member)| member.delivered.len()).collect();
        if counts.len() > 1 {
            return Err(format!("group {}: closed well after {counts:?} messages", group.id));
        }
    }
    Ok(())
}

/// A group fails only if a fault affected a member, or if a member's application ended the group.
fn failures_have_causes(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        if !Suspects::of(case, seen, group).causes.is_empty() {
            continue;
        }
        for (rank, member) in of_group.members.iter().enumerate() {
            if let Some(failure) = member.reported_failures().next() {
                return Err(format!("rank {rank} got a failure without a cause: {failure:?}"));
            }
            let errors = [&member.joined, &member.stream, &member.closed].into_iter().flatten();
            let mut errors = errors.chain(member.sends.iter().flatten()).map(|seen| &seen.outcome);
            if let Some(Outcome::Error(error)) = errors.find(|outcome| matches!(outcome, Outcome::Error(_))) {
                return Err(format!("group {}: rank {rank} got an error without a cause: {error}", group.id));
            }
        }
    }
    Ok(())
}

/// A failure names only suspects of its group. A member that was partitioned may also name the others.
fn failures_name_suspects(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let suspects = Suspects::of(case, seen, group);
        for (rank, member) in of_group.members.iter().enumerate() {
            for failure in member.reported_failures() {
                let of_group = |named: &NamedMember| group.rank_of(named.node) == Some(named.rank as usize);
                if failure.group != group.id || failure.named.is_empty() || !failure.named.iter().all(of_group) {
                    return Err(format!(
                        "group {}: rank {rank} got the failure of another group: {failure:?}",
                        group.id
                    ));
                }
                let partitioned = suspects.partitioned.contains(&group.members[rank].node);
                let may_be = |named: &NamedMember| (partitioned && !named.corrupted) || suspects.may_be_named(named);
                if !failure.named.iter().all(may_be) {
                    return Err(format!("rank {rank} got {failure:?}, which names others than {suspects:?}"));
                }
            }
        }
    }
    Ok(())
}

/// A failed group reports the same failure to a member on every call.
fn outcomes_do_not_change(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        for (rank, member) in of_group.members.iter().enumerate() {
            let told: BTreeSet<_> = member.reported_failures().collect();
            if told.len() > 1 {
                return Err(format!("group {}: rank {rank} got several failures: {told:?}", group.id));
            }
            if !told.is_empty() && member.closed_well() {
                return Err(format!("group {}: rank {rank} closed well after {told:?}", group.id));
            }
        }
    }
    Ok(())
}

/// Survivors that were never partitioned for long get the same failure, or have all closed the group.
fn outcomes_agree(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let partitioned = Suspects::of(case, seen, group).partitioned;
        let survivors =
            group.members.iter().zip(&of_group.members).filter(|(member, _)| !partitioned.contains(&member.node));
        let mut told: Vec<(u32, Option<&ReportedFailure>)> = Vec::new();
        for (member, seen) in survivors {
            let failure = seen.reported_failures().next();
            if failure.is_some() || seen.closed_well() {
                told.push((member.node, failure));
            }
        }
        if let Some(two) = told.windows(2).find(|two| two[0].1 != two[1].1) {
            return Err(format!("group {}: survivors have different outcomes: {two:?}", group.id));
        }
    }
    Ok(())
}

/// At most one outcome has a quorum.
fn quorums_agree(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let closed = of_group.members.iter().any(MemberObservation::closed_well);
        let told =
            of_group.members.iter().flat_map(MemberObservation::reported_failures).filter(|failure| failure.quorum);
        let told: BTreeSet<&ReportedFailure> = told.collect();
        if told.len() + usize::from(closed) > 1 {
            let well = if closed { "a close, and " } else { "" };
            return Err(format!("group {}: {well}{told:?}", group.id));
        }
    }
    Ok(())
}

/// Receivers count exactly the blocks with a flipped bit, with the right sender. A member with every message has healed
/// all of them.
fn corruptions_are_healed(case: &Case, seen: &Observation) -> Result<(), String> {
    for node in 0..case.model.nodes {
        let flipped = seen.flipped.iter().filter(|flipped| flipped.to == node);
        let from: Vec<u32> = flipped.map(|flipped| flipped.from).collect();
        let (mut found, mut whole) = (0, true);
        for (group, of_group) in groups(case, seen) {
            let Some(rank) = group.rank_of(node).filter(|rank| *rank > 0) else { continue };
            let member = &of_group.members[rank];
            let takes_all = member.stream.as_ref().is_some_and(|seen| seen.outcome == Outcome::Done);
            whole &= takes_all;
            let Some(told) = member.corruptions else { continue };
            found += told.found;
            let known = told.last_from.map_or(told.found == 0, |last| from.contains(&last));
            if !known || told.healed > told.found || takes_all && told.healed != told.found {
                return Err(format!(
                    "group {}: rank {rank} reports {told:?}, but flipped bits came from {from:?}",
                    group.id
                ));
            }
        }
        let flipped = from.len() as u64;
        if found > flipped || whole && found != flipped {
            return Err(format!("bits flipped in {flipped} blocks to node {node}, but it found {found}"));
        }
    }
    Ok(())
}

/// A certificate's counts are true: no member has more messages, and a member that received everything has as many.
fn certificates_are_true(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let failures = of_group.members.iter().flat_map(MemberObservation::reported_failures);
        for failure in failures {
            for ((rank, member), held) in of_group.members.iter().enumerate().zip(&failure.held).skip(1) {
                // A member that has a header may lack its message.
                let Some(held) = held.map(|held| held / group.numbers_each()) else { continue };
                // The observation does not see messages that the application dropped.
                let given = member.delivered_until(0).iter().filter(|message| message.digest.is_some()).count() as u64;
                let ended = member.stream.is_some();
                // With stable delivery a member may have more than it gets.
                let takes_all =
                    ended && !group.stable && !matches!(group.members[rank].behaviour, Behaviour::CloseEarly { .. });
                if given > held || (takes_all && given < held && !group.members[rank].offers) {
                    let id = group.id;
                    return Err(format!("group {id}: rank {rank} received {given} messages, but {failure:?}"));
                }
            }
        }
    }
    Ok(())
}

/// A receipt says that all members have a message only if no member is known to lack it, and that they have stored it
/// only if they have said so.
fn receipts_are_true(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let Some(root) = of_group.members.first() else { continue };
        let members: Vec<u32> = group.members.iter().map(|member| member.node).collect();
        let failures: Vec<_> = of_group.members.iter().flat_map(MemberObservation::reported_failures).collect();
        receipts_of_group(group, of_group, &members, &root.receipts, &failures)
            .map_err(|what| format!("group {}: {what}", group.id))?;
    }
    Ok(())
}

/// Checks the receipts of a group, or of one of `members` that continues it, with these failures.
fn receipts_of_group<'a>(
    group: &GroupCase,
    seen: &GroupObservation,
    members: &[u32],
    receipts: impl IntoIterator<Item = &'a SeenReceipt>,
    failures: &[&ReportedFailure],
) -> Result<(), String> {
    for receipt in receipts {
        let number = receipt.number;
        for failure in failures.iter().filter(|failure| failure.quorum) {
            for (held, node) in failure.held.iter().zip(members) {
                let said = match &receipt.delivered {
                    Ok(()) => true,
                    Err(nodes) => nodes.contains(node),
                };
                if said && held.is_some_and(|held| held <= number) {
                    return Err(format!("{receipt:?}, but node {node} has only {held:?} messages"));
                }
            }
        }
        let receivers = || members.iter().copied().filter(|node| group.rank_of(*node) != Some(0)).collect();
        let (nodes, stored): (Vec<u32>, bool) = match &receipt.stored {
            SeenStored::Everywhere => (receivers(), true),
            SeenStored::NotAt(nodes) => (nodes.clone(), false),
            SeenStored::Failed(nodes) => (nodes.clone(), true),
        };
        let has_stored = |node: u32| {
            group.rank_of(node).is_some_and(|rank| rank == 0 || seen.members[rank].stored.contains(&number))
        };
        if let Some(node) = nodes.into_iter().find(|node| has_stored(*node) != stored) {
            return Err(format!("{receipt:?}, but node {node} has {}stored it", if stored { "not " } else { "" }));
        }
    }
    Ok(())
}

/// With stable delivery, survivors of a failure deliver the same messages, and nobody has delivered another one.
fn stable_delivery_is_atomic(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen).filter(|(group, _)| group.stable) {
        let given = |member: &MemberObservation| {
            let given = member.delivered_until(0).iter().filter(|message| message.digest.is_some());
            given.map(|message| message.number + 1).max().unwrap_or(0)
        };
        let mut survivors: Option<(usize, u64)> = None;
        for (rank, member) in of_group.members.iter().enumerate().skip(1) {
            let Some(Ending { outcome: Outcome::Failed(failure), .. }) = &member.stream else { continue };
            let named = failure.named.iter().any(|named| named.rank as usize == rank);
            let drops = matches!(group.members[rank].behaviour, Behaviour::DropDelivery { .. });
            if !failure.quorum || named || drops {
                continue;
            }
            let (first, cut) = *survivors.get_or_insert((rank, given(member)));
            if given(member) != cut {
                return Err(format!(
                    "group {}: rank {first} delivered {cut} messages, but rank {rank} {}",
                    group.id,
                    given(member)
                ));
            }
        }
        let Some((survivor, cut)) = survivors else { continue };
        for (rank, member) in of_group.members.iter().enumerate().skip(1) {
            if given(member) > cut {
                return Err(format!(
                    "group {}: rank {rank} delivered {} messages, but the survivor {survivor} only {cut}",
                    group.id,
                    given(member)
                ));
            }
        }
    }
    Ok(())
}

/// A stream that has ended returns no more items.
fn streams_end_once(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        if let Some(rank) = of_group.members.iter().position(|member| member.spoke_after_end) {
            return Err(format!("group {}: the stream of rank {rank} went on after its end", group.id));
        }
    }
    Ok(())
}

/// When the owners are dropped, no memory is lent, no task runs and no queue pair exists.
fn no_resources_remain(_: &Case, seen: &Observation) -> Result<(), String> {
    match seen.still_in_use.iter().enumerate().find(|(_, in_use)| **in_use != Default::default()) {
        Some((node, in_use)) => Err(format!("at node {node}: {in_use:?}")),
        None => Ok(()),
    }
}
