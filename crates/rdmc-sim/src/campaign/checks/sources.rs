//! The checkers of messages that are read while they are sent, and while they arrive.

use super::super::case::{Break, Case, GroupCase};
use super::super::observation::{GroupObservation, Observation, Outcome, SeenRead};
use super::groups;

/// A message whose source breaks is not sent if that happens before the message has its place in the order. Later, the
/// group fails at the root.
pub(super) fn sources_break_as_promised(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        let Some(root) = of_group.members.first() else { continue };
        for (message, sent) in root.sends.iter().enumerate() {
            let Some(outcome) = sent.as_ref().map(|sent| &sent.outcome) else { continue };
            let (is_done, is_unreadable) = (*outcome == Outcome::Done, *outcome == Outcome::Unreadable);
            let is_wrong = match group.break_of(message) {
                None => is_unreadable,
                Some(Break::BeforeItsPlace) => is_done,
                // A group that continues this one may read it whole before it has its place.
                Some(Break::AfterItsPlace) => is_done || is_unreadable && root.recoveries.is_empty(),
            };
            if is_wrong {
                return Err(format!("group {}: the send of message {message} ended with {outcome:?}", group.id));
            }
        }
        let failures = of_group.members.iter().flat_map(|member| {
            let later = member.recoveries.iter().flat_map(|recovery| recovery.reported_failures());
            member.reported_failures().chain(later)
        });
        let is_blamed = |named: &super::NamedMember| {
            named.unreadable && (!group.has_broken_source() || group.rank_of(named.node) != Some(0))
        };
        if let Some(named) = failures.flat_map(|failure| &failure.named).find(|named| is_blamed(named)) {
            return Err(format!("group {}: {named:?}, although no source breaks there", group.id));
        }
    }
    Ok(())
}

/// What a member reads of a message while it arrives is the beginning of the message, all of it if the message is
/// delivered, and nothing with stable delivery if it is not.
pub(super) fn reads_are_true(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        for (rank, member) in of_group.members.iter().enumerate() {
            for read in &member.reads {
                let delivered = member.delivered.iter().find(|message| message.number == read.number);
                let is_whole = !read.ended || delivered.is_some_and(|message| message.digest == Some(read.digest));
                let is_atomic = read.ended || !group.stable || read.read == 0;
                if !is_whole || !is_atomic || !is_beginning(group, of_group, read) {
                    return Err(format!("group {}: rank {rank}: {read:?} and {delivered:?}", group.id));
                }
            }
        }
    }
    Ok(())
}

/// Returns whether a message of the root begins with what was read.
fn is_beginning(group: &GroupCase, seen: &GroupObservation, read: &SeenRead) -> bool {
    let sent = seen.members.first().map(|root| root.order.as_slice()).unwrap_or_default();
    sent.iter().filter(|message| group.messages[**message].size == read.size).any(|&message| {
        let content = Case::content(group.id, message, read.read);
        Outcome::digest_of(&content) == read.digest
    })
}
