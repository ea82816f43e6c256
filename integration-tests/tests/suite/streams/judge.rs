//! What the records of a stream must say.

use std::collections::{BTreeMap, BTreeSet};

use super::record::{Failure, Note, StoredAt};

/// What became of one process of a round, in rank order.
pub(super) struct Seen {
    /// Whether the process was killed or stopped.
    pub(super) harmed: bool,
    /// Whether it was killed.
    pub(super) killed: bool,
    /// What a process that has failed wrote to stderr.
    pub(super) errors: String,
    /// Its record.
    pub(super) notes: Vec<Note>,
}

/// How a group ended at a member.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Closed(u64),
    Failed(Failure),
}

/// What a member saw of one group.
#[derive(Default)]
struct Part {
    /// Messages that its application got until the end of this group, from the first of the stream.
    given: u64,
    /// `None` if the process was killed before.
    end: Option<End>,
    lost: Option<u64>,
    delivered: Vec<(u64, Result<(), Vec<u32>>)>,
    stored: Vec<(u64, StoredAt)>,
}

/// One group after the other, known by its members; what each of these saw.
type Groups = BTreeMap<Vec<u32>, BTreeMap<u32, Part>>;

/// Judges a round, and returns its outcome in a few words.
///
/// # Errors
/// The property that does not hold.
pub(super) fn judge(seen: &[Seen], stable: bool) -> Result<String, String> {
    let mut groups = Groups::new();
    for (node, member) in (0..).zip(seen) {
        if !member.killed && member.notes.last() != Some(&Note::Ended) {
            return Err(format!("process {node} failed"));
        }
        read(node, member, &mut groups)?;
    }
    let fates = seen.iter().map(Fates::of).collect::<Vec<_>>();
    let harmed: BTreeSet<u32> = (0..).zip(seen).filter(|(_, member)| member.harmed).map(|(node, _)| node).collect();
    for (members, parts) in &groups {
        let of_group = |what: String| format!("the group of {members:?}: {what}");
        ends_agree(members, parts, &harmed).map_err(of_group)?;
        survivors_have_what_they_say(parts, members.len() == seen.len(), stable).map_err(of_group)?;
        if stable {
            delivery_is_atomic(parts).map_err(of_group)?;
        }
        receipts_are_true(members, parts, &fates, stable).map_err(of_group)?;
    }
    Ok(outcome(&groups))
}

/// Reads a record, and checks that messages come in order, each once, with their content.
fn read(node: u32, member: &Seen, groups: &mut Groups) -> Result<(), String> {
    let (mut group, mut given) = (Vec::new(), 0);
    for note in &member.notes {
        // A group that fails while it is formed is known by its failure alone.
        match note {
            Note::Formed(members) => group.clone_from(members),
            Note::Failed(Failure { members, .. }) | Note::Closed { members, .. } => group.clone_from(members),
            _ => {}
        }
        let part = groups.entry(group.clone()).or_default().entry(node).or_default();
        match note {
            Note::Got { number, is_right } => {
                if *number != given || !is_right {
                    let how = if *is_right { "" } else { " with other bytes" };
                    return Err(format!("process {node} got message {number}{how} when {given} was due"));
                }
                given += 1;
            }
            Note::Failed(failure) => part.end = Some(End::Failed(failure.clone())),
            Note::Closed { messages, .. } => part.end = Some(End::Closed(*messages)),
            Note::Lost(first) => part.lost = Some(*first),
            Note::Delivered(number, answer) => part.delivered.push((*number, answer.clone())),
            Note::Stored(number, answer) => part.stored.push((*number, answer.clone())),
            Note::Formed(_) | Note::Stores(_) | Note::LetsGo(_) | Note::Excluded(_) | Note::Ended => {}
        }
        part.given = given;
    }
    Ok(())
}

impl Part {
    /// Returns the failure, if this member is a survivor of it.
    fn survived(&self, node: u32) -> Option<&Failure> {
        match &self.end {
            Some(End::Failed(failure)) if failure.quorum && !failure.named.contains(&node) => Some(failure),
            _ => None,
        }
    }

    fn has_closed(&self) -> bool {
        matches!(self.end, Some(End::Closed(_)))
    }
}

/// What an application has done with messages, before it said so.
struct Fates {
    stores: BTreeSet<u64>,
    lets_go: BTreeSet<u64>,
}

impl Fates {
    fn of(member: &Seen) -> Self {
        let (mut stores, mut lets_go) = (BTreeSet::new(), BTreeSet::new());
        for note in &member.notes {
            match note {
                Note::Stores(number) => drop(stores.insert(*number)),
                Note::LetsGo(number) => drop(lets_go.insert(*number)),
                _ => {}
            }
        }
        Self { stores, lets_go }
    }
}

/// A group was closed at all members that came to no harm, or has failed with the same failure at all survivors, which
/// names a member that came to harm. If those that came to no harm are not a quorum, the others may give them up.
fn ends_agree(members: &[u32], parts: &BTreeMap<u32, Part>, harmed: &BTreeSet<u32>) -> Result<(), String> {
    let told = || parts.iter().map(|(node, part)| format!("\n{node}: {:?}", part.end)).collect::<String>();
    let mut failures = parts.iter().filter_map(|(node, part)| part.survived(*node));
    let first = failures.next();
    if failures.any(|failure| Some(failure) != first) {
        return Err(format!("survivors have different failures:{}", told()));
    }
    let unharmed = || parts.iter().filter(|(node, _)| !harmed.contains(node)).map(|(_, part)| part);
    let closed = parts.values().any(Part::has_closed);
    let (all, well) = (members.len(), members.iter().filter(|node| !harmed.contains(node)).count());
    let are_quorum = 2 * well > all || 2 * well == all && !harmed.contains(&members[0]);
    if closed && (first.is_some() || are_quorum && !unharmed().all(Part::has_closed)) {
        return Err(format!("it was closed only at some members:{}", told()));
    }
    let counts: BTreeSet<u64> = parts
        .iter()
        .filter_map(|(node, part)| match part.end {
            Some(End::Closed(messages)) => Some([messages, if *node == 0 { messages } else { part.given }]),
            _ => None,
        })
        .flatten()
        .collect();
    if counts.len() > 1 {
        return Err(format!("members closed it after {counts:?} messages:{}", told()));
    }
    let blamed = unharmed().filter_map(|part| match &part.end {
        Some(End::Failed(failure)) if failure.quorum && are_quorum => Some(&failure.named),
        _ => None,
    });
    if let Some(named) = blamed.into_iter().find(|named| !named.iter().any(|node| harmed.contains(node))) {
        return Err(format!("{named:?} is named, but {harmed:?} came to harm:{}", told()));
    }
    Ok(())
}

/// Survivors have what the failure says, deliver it, and learn the same about messages that are lost.
fn survivors_have_what_they_say(parts: &BTreeMap<u32, Part>, is_first: bool, stable: bool) -> Result<(), String> {
    let survivors = || parts.iter().filter_map(|(node, part)| Some((*node, part, part.survived(*node)?)));
    for (node, part, failure) in survivors().filter(|(node, ..)| *node != 0) {
        let rank = failure.members.iter().position(|member| *member == node).ok_or("a failure of another group")?;
        // A group that fails while it is formed may not have heard of all.
        let Some(held) = failure.held[rank] else { continue };
        let is_right = match (stable, is_first) {
            (false, true) => part.given == held,
            (true, true) => part.given <= held,
            // It may have got more from the group before.
            (false, false) => part.given >= held,
            (true, false) => true,
        };
        if !is_right || held > failure.begun {
            return Err(format!("{node} got {} messages, but {failure:?}", part.given));
        }
    }
    let lost: BTreeSet<Option<u64>> =
        survivors().filter(|(_, part, _)| part.lost.is_some()).map(|(_, part, _)| part.lost).collect();
    if lost.len() > 1 {
        return Err(format!("survivors were told that messages from {lost:?} on are lost"));
    }
    Ok(())
}

/// All survivors have delivered the same messages, and no other member has delivered more.
fn delivery_is_atomic(parts: &BTreeMap<u32, Part>) -> Result<(), String> {
    let receivers = || parts.iter().filter(|(node, _)| **node != 0);
    let survivors = receivers().filter(|(node, part)| part.survived(**node).is_some());
    let cuts: BTreeSet<u64> = survivors.map(|(_, part)| part.given).collect();
    if cuts.len() > 1 {
        return Err(format!("survivors delivered {cuts:?} messages"));
    }
    let cut = cuts.first();
    match receivers().find(|(_, part)| cut.is_some_and(|cut| part.given > *cut)) {
        Some((node, part)) => Err(format!("{node} delivered {} messages, but survivors only {cut:?}", part.given)),
        None => Ok(()),
    }
}

/// What receipts say of members is true of them, whatever became of the root.
fn receipts_are_true(
    members: &[u32],
    parts: &BTreeMap<u32, Part>,
    fates: &[Fates],
    stable: bool,
) -> Result<(), String> {
    let Some(root) = parts.get(&0) else { return Ok(()) };
    let of = |node: u32| &fates[node as usize];
    // Members deliver before they learn that the group has failed, or is to be closed.
    let lacks = |node: u32, number: u64| {
        parts.get(&node).is_some_and(|part| {
            (part.survived(node).is_some() || part.has_closed()) && node != 0 && part.given <= number
        })
    };
    for (number, answer) in &root.delivered {
        let (said, is_given) = match answer {
            Ok(()) => (members, true),
            // With stable delivery, only what all have.
            Err(nodes) => (&nodes[..], !stable),
        };
        if let Some(node) = said.iter().find(|node| is_given && lacks(**node, *number)) {
            return Err(format!("the receipt of message {number} says {answer:?}, but {node} did not get it"));
        }
    }
    for (number, answer) in &root.stored {
        let receivers = members.iter().filter(|node| **node != 0);
        let wrong = match answer {
            StoredAt::All => receivers.copied().find(|node| !of(*node).stores.contains(number)),
            StoredAt::Failed(nodes) => nodes.iter().copied().find(|node| !of(*node).stores.contains(number)),
            StoredAt::NotAt(nodes) => nodes.iter().copied().find(|node| !of(*node).lets_go.contains(number)),
        };
        if let Some(node) = wrong {
            return Err(format!("the receipt of message {number} says {answer:?}, which is wrong of {node}"));
        }
    }
    Ok(())
}

fn outcome(groups: &Groups) -> String {
    let failed =
        groups.values().filter(|parts| parts.iter().any(|(node, part)| part.survived(*node).is_some())).count();
    let closed = groups.values().any(|parts| parts.values().any(Part::has_closed));
    match (failed, closed) {
        (0, true) => "closed".to_owned(),
        (0, false) => "no survivors".to_owned(),
        (_, true) => format!("closed after {failed} failures"),
        (_, false) => "failed".to_owned(),
    }
}
