//! The checker of headers.

use super::super::case::Case;
use super::super::observation::Observation;
use super::{Content, groups, positions_after};

/// Every delivered message has the header with which the root sent it, and its offer had the same. It is empty in a
/// group without headers.
pub(super) fn headers_belong(case: &Case, seen: &Observation) -> Result<(), String> {
    for (group, of_group) in groups(case, seen) {
        for (rank, member) in of_group.members.iter().enumerate() {
            let mut delivered = Vec::new();
            for message in &member.delivered {
                let header = message.headers.first().copied();
                if message.headers.iter().any(|other| Some(*other) != header) {
                    let number = message.number;
                    return Err(format!("group {}: rank {rank} got two headers with message {number}", group.id));
                }
                delivered.push(Content { header, ..Content::of(message) });
            }
            if positions_after(group, of_group, &delivered).is_empty() {
                return Err(format!("group {}: rank {rank} got {delivered:?}, not the root's headers", group.id));
            }
        }
    }
    Ok(())
}
