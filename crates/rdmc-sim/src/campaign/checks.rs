//! The checkers: what must hold after every case.

use std::collections::{BTreeMap, BTreeSet};

use super::case::{Case, Fate, GroupCase, Whim};
use super::observation::{Delivered, GroupObservation, MemberObservation, Observation, Outcome};
use super::suspects::Suspects;

/// One thing that must hold after every case.
#[derive(Clone, Copy, Debug)]
pub struct Checker {
    /// Its name.
    pub name: &'static str,
    /// Says what does not hold.
    pub check: fn(&Case, &Observation) -> Result<(), String>,
}

/// How much is asked of the runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strictness {
    /// What it promises.
    #[default]
    Promised,
    /// Besides, that all survivors of a group are told the same, whatever happened.
    OneVerdict,
}

impl Strictness {
    /// Returns the checkers, the most telling first.
    pub fn checkers(self) -> Vec<Checker> {
        let mut checkers = vec![
            Checker { name: "everybody comes to an end", check: everybody_ends },
            Checker { name: "messages are whole and in order", check: messages_are_whole },
            Checker { name: "a close is honest", check: closes_are_honest },
            Checker { name: "no failure without a cause", check: failures_have_causes },
            Checker { name: "failures name who failed", check: failures_name_suspects },
            Checker { name: "a verdict stands", check: verdicts_stand },
            Checker { name: "survivors agree whether it failed", check: outcomes_agree },
            Checker { name: "a stream ends once", check: streams_end_once },
            Checker { name: "nothing is left", check: nothing_is_left },
        ];
        if self == Self::OneVerdict {
            checkers.push(Checker { name: "survivors are told the same", check: verdicts_agree });
        }
        checkers
    }
}

/// The groups of a case with what was seen of them.
fn groups<'a>(case: &'a Case, seen: &'a Observation) -> impl Iterator<Item = (&'a GroupCase, &'a GroupObservation)> {
    case.groups.iter().zip(&seen.groups)
}

/// Everybody whose node lives has come to an end, within the limit.
fn everybody_ends(case: &Case, seen: &Observation) -> Result<(), String> {
    let mut waiting = Vec::new();
    for (group, of_group) in groups(case, seen) {
        for (rank, member) in of_group.members.iter().enumerate() {
            if member.ended_ns.is_none() && member.died_ns.is_none() {
                let node = group.members[rank].node;
                waiting.push(format!("rank {rank} (node {node}) of group {} {}", group.id, whereabouts(member)));
            }
        }
    }
    match &seen.stalled {
        Some(stalled) => Err(format!("{stalled}; waiting: {}", waiting.join(", "))),
        None if waiting.is_empty() => Ok(()),
        None => Err(format!("did not end: {}", waiting.join(", "))),
    }
}

fn whereabouts(member: &MemberObservation) -> String {
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

/// What was delivered is what the root sent, in its order, each once and none skipped, the same at all members.
fn messages_are_whole(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let mut longest: &[Delivered] = &[];
        let mut known: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (rank, member) in of_group.members.iter().enumerate() {
            for (due, message) in (0..).zip(&member.delivered) {
                if message.number != due {
                    let number = message.number;
                    return Err(format!("group {}: rank {rank} got message {number} where {due} was due", group.id));
                }
                let Some(digest) = message.digest else { continue };
                let first = *known.entry(due).or_insert((message.size, digest));
                if first != (message.size, digest) {
                    return Err(format!("group {}: rank {rank} got another message {due} than others", group.id));
                }
            }
            if member.delivered.len() > longest.len() {
                longest = &member.delivered;
            }
        }
        let delivered = longest.iter().map(|message| (message.size, known.get(&message.number).map(|it| it.1)));
        let delivered: Vec<_> = delivered.collect();
        if places_after(group, of_group, &delivered).is_empty() {
            return Err(format!("group {}: {delivered:?} is not what the root sent", group.id));
        }
    }
    Ok(())
}

/// Returns up to where the root may have come in its list when this was delivered; none if it cannot have been.
///
/// Sends whose future was dropped may have been carried out or not.
fn places_after(group: &GroupCase, seen: &GroupObservation, delivered: &[(u64, Option<u64>)]) -> BTreeSet<usize> {
    let mut places = BTreeSet::from([0]);
    for (size, digest) in delivered {
        let mut next = BTreeSet::new();
        for mut place in places {
            while let Some(message) = group.messages.get(place) {
                let content = || Outcome::digest_of(&Case::content(group.id, place, message.size));
                let same = message.size == *size && digest.is_none_or(|digest| digest == content());
                if same && message.fate != Fate::NeverPolled {
                    next.insert(place + 1);
                }
                if must_be_sent(group, seen, place) {
                    break;
                }
                place += 1;
            }
        }
        places = next;
    }
    places
}

fn must_be_sent(group: &GroupCase, seen: &GroupObservation, message: usize) -> bool {
    let sent = seen.members.first().and_then(|root| root.sends.get(message)?.as_ref());
    match group.messages[message].fate {
        Fate::NeverPolled => false,
        Fate::Awaited => true,
        Fate::Dropped { .. } => sent.is_some_and(|seen| seen.outcome == Outcome::Done),
    }
}

/// If anybody's close succeeded, every member has called close, and had everything that the root has sent.
fn closes_are_honest(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let Some(closed) = of_group.members.iter().position(MemberObservation::closed_well) else { continue };
        let who = |rank: usize| format!("group {}: rank {closed} closed well, but rank {rank}", group.id);
        for (rank, member) in of_group.members.iter().enumerate() {
            if member.closing_ns.is_none() {
                return Err(format!("{} never called close", who(rank)));
            }
            let closes_early = matches!(group.members[rank].whim, Whim::CloseEarly { .. });
            if rank == 0 || closes_early {
                continue;
            }
            let delivered: Vec<_> = member.delivered.iter().map(|message| (message.size, message.digest)).collect();
            let rest_is_optional =
                |&place: &usize| (place..group.messages.len()).all(|message| !must_be_sent(group, of_group, message));
            if !places_after(group, of_group, &delivered).iter().any(rest_is_optional) {
                return Err(format!("{} got only {} messages", who(rank), delivered.len()));
            }
        }
        let counts = of_group.members.iter().enumerate().skip(1);
        let counts = counts.filter(|(rank, _)| !matches!(group.members[*rank].whim, Whim::CloseEarly { .. }));
        let counts: BTreeSet<usize> = counts.map(|(_, member)| member.delivered.len()).collect();
        if counts.len() > 1 {
            return Err(format!("group {}: closed well after {counts:?} messages", group.id));
        }
    }
    Ok(())
}

/// A group fails only if something happened to one of its members, or one did something that ends it.
fn failures_have_causes(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        if !Suspects::of(case, seen, group).causes.is_empty() {
            continue;
        }
        for (rank, member) in of_group.members.iter().enumerate() {
            if let Some(blame) = member.blames().next() {
                return Err(format!("rank {rank} was told without a cause: {blame:?}"));
            }
            let errors = [&member.joined, &member.stream, &member.closed].into_iter().flatten();
            let mut errors = errors.chain(member.sends.iter().flatten()).map(|seen| &seen.outcome);
            if let Some(Outcome::Error(error)) = errors.find(|outcome| matches!(outcome, Outcome::Error(_))) {
                return Err(format!("group {}: rank {rank} was told without a cause: {error}", group.id));
            }
        }
    }
    Ok(())
}

/// A failure names a member of its group to whom something happened: the one, if it is one.
fn failures_name_suspects(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let suspects = Suspects::of(case, seen, group);
        for (rank, member) in of_group.members.iter().enumerate() {
            for blame in member.blames() {
                if blame.group != group.id || group.rank_of(blame.node) != Some(blame.rank as usize) {
                    return Err(format!("group {}: rank {rank} was told of another group: {blame:?}", group.id));
                }
                if !suspects.may_be(blame.node) {
                    return Err(format!("rank {rank} was told {blame:?}, which is not of {suspects:?}"));
                }
            }
        }
    }
    Ok(())
}

/// Whatever a member asks of a group that has failed, it is told the same.
fn verdicts_stand(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        for (rank, member) in of_group.members.iter().enumerate() {
            let told: BTreeSet<_> = member.blames().collect();
            if told.len() > 1 {
                return Err(format!("group {}: rank {rank} was told {told:?}", group.id));
            }
            if !told.is_empty() && member.closed_well() {
                return Err(format!("group {}: rank {rank} closed well after {told:?}", group.id));
            }
        }
    }
    Ok(())
}

/// If anybody's close succeeded, nobody was told of a failure, but for members that had confirmed the close and lost the
/// root, or a member that left, before they were told of the success.
fn outcomes_agree(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        if !of_group.members.iter().any(MemberObservation::closed_well) {
            continue;
        }
        for (rank, member) in of_group.members.iter().enumerate() {
            let Some(blame) = member.blames().next() else { continue };
            if rank == 0 {
                return Err(format!("group {}: a member closed well, but the root was told {blame:?}", group.id));
            }
            if member.closing_ns.is_none() {
                return Err(format!("group {}: rank {rank} was told {blame:?} of a group that closed well", group.id));
            }
        }
    }
    Ok(())
}

/// A stream that has ended says nothing more.
fn streams_end_once(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        if let Some(rank) = of_group.members.iter().position(|member| member.spoke_after_end) {
            return Err(format!("group {}: the stream of rank {rank} went on after its end", group.id));
        }
    }
    Ok(())
}

/// No memory is lent, no task runs and no queue pair exists when their owners are gone.
fn nothing_is_left(_: &Case, seen: &Observation) -> Result<(), String> {
    match seen.left.iter().enumerate().find(|(_, left)| **left != Default::default()) {
        Some((node, left)) => Err(format!("at node {node}: {left:?}")),
        None => Ok(()),
    }
}

/// All survivors of a group are told the same member.
fn verdicts_agree(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let survivors = of_group.members.iter().filter(|member| member.died_ns.is_none());
        let named: BTreeSet<u32> = survivors.filter_map(|member| Some(member.blames().next()?.node)).collect();
        if named.len() > 1 {
            return Err(format!("group {}: survivors were told of the nodes {named:?}", group.id));
        }
    }
    Ok(())
}
