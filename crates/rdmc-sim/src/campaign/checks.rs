//! The checkers: what must hold after every case.

use std::collections::{BTreeMap, BTreeSet};

use super::case::{Case, Fate, GroupCase, Whim};
use super::observation::{Blame, Delivered, GroupObservation, MemberObservation, Named, Observation, Outcome};
use super::suspects::Suspects;

/// One thing that must hold after every case.
#[derive(Clone, Copy, Debug)]
pub struct Checker {
    /// Its name.
    pub name: &'static str,
    /// Says what does not hold.
    pub check: fn(&Case, &Observation) -> Result<(), String>,
}

/// The checkers, the most telling first.
pub const CHECKERS: &[Checker] = &[
    Checker { name: "everybody comes to an end", check: everybody_ends },
    Checker { name: "messages are whole and in order", check: messages_are_whole },
    Checker { name: "a close is honest", check: closes_are_honest },
    Checker { name: "no failure without a cause", check: failures_have_causes },
    Checker { name: "failures name who failed", check: failures_name_suspects },
    Checker { name: "a verdict stands", check: verdicts_stand },
    Checker { name: "one outcome for all survivors", check: outcomes_agree },
    Checker { name: "one outcome of most", check: quorums_agree },
    Checker { name: "corrupted blocks are found and healed", check: corruptions_are_healed },
    Checker { name: "certificates are true", check: certificates_are_true },
    Checker { name: "a stream ends once", check: streams_end_once },
    Checker { name: "nothing is left", check: nothing_is_left },
];

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

/// A failure names members of its group to whom something happened: the one, if it is one. Who was apart from the others
/// may name those.
fn failures_name_suspects(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let suspects = Suspects::of(case, seen, group);
        for (rank, member) in of_group.members.iter().enumerate() {
            for blame in member.blames() {
                let of_group = |named: &Named| group.rank_of(named.node) == Some(named.rank as usize);
                if blame.group != group.id || blame.named.is_empty() || !blame.named.iter().all(of_group) {
                    return Err(format!("group {}: rank {rank} was told of another group: {blame:?}", group.id));
                }
                let apart = suspects.apart.contains(&group.members[rank].node);
                let may_be = |named: &Named| (apart && !named.corrupted) || suspects.may_be(named);
                if !blame.named.iter().all(may_be) {
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

/// Survivors that were never out of reach for long are told the same, or have all closed the group.
fn outcomes_agree(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let apart = Suspects::of(case, seen, group).apart;
        let survivors = group.members.iter().zip(&of_group.members).filter(|(member, _)| !apart.contains(&member.node));
        let mut told: Vec<(u32, Option<&Blame>)> = Vec::new();
        for (member, seen) in survivors {
            let blame = seen.blames().next();
            if blame.is_some() || seen.closed_well() {
                told.push((member.node, blame));
            }
        }
        if let Some(two) = told.windows(2).find(|two| two[0].1 != two[1].1) {
            return Err(format!("group {}: survivors came to different ends: {two:?}", group.id));
        }
    }
    Ok(())
}

/// What a quorum has agreed on is the only such outcome, whatever happened.
fn quorums_agree(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let closed = of_group.members.iter().any(MemberObservation::closed_well);
        let told = of_group.members.iter().flat_map(MemberObservation::blames).filter(|blame| blame.quorum);
        let told: BTreeSet<&Blame> = told.collect();
        if told.len() + usize::from(closed) > 1 {
            let well = if closed { "a close, and " } else { "" };
            return Err(format!("group {}: {well}{told:?}", group.id));
        }
    }
    Ok(())
}

/// Blocks of which a bit changed are counted where they came, with the edge, and no others; who was given everything had them
/// healed.
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
                    "group {}: rank {rank} was told of {told:?}, but bits came from {from:?}",
                    group.id
                ));
            }
        }
        let flipped = from.len() as u64;
        if found > flipped || whole && found != flipped {
            return Err(format!("bits of {flipped} blocks to node {node} changed, but it found {found}"));
        }
    }
    Ok(())
}

/// What a failure says of who has what is so: nobody was given more, and who took everything was given that much.
fn certificates_are_true(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let blames = of_group.members.iter().flat_map(MemberObservation::blames);
        for blame in blames {
            for ((rank, member), held) in of_group.members.iter().enumerate().zip(&blame.held).skip(1) {
                let Some(held) = *held else { continue };
                // What the application did not want is not seen to arrive.
                let given = member.delivered.iter().filter(|message| message.digest.is_some()).count() as u64;
                let ended = member.stream.is_some();
                let takes_all = ended && !matches!(group.members[rank].whim, Whim::CloseEarly { .. });
                if given > held || (takes_all && given < held && !group.members[rank].offers) {
                    let id = group.id;
                    return Err(format!("group {id}: rank {rank} was given {given} messages, but {blame:?}"));
                }
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
