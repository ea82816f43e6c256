//! Which messages all members have.
//!
//! Members keep the memory of a message until then. The root counts what they report and tells them.

use std::sync::Arc;

use rdmc_schedule::Rank;

use super::ending::GroupEnd;
use super::membership::Membership;
use super::retained::RetainedMessages;
use crate::wire::GroupFrame;

/// Counts the messages that members have.
pub(super) struct Stability {
    membership: Arc<Membership>,
    end: Arc<GroupEnd>,
    retained: Arc<RetainedMessages>,
}

impl Stability {
    pub(super) fn new(membership: Arc<Membership>, end: Arc<GroupEnd>, retained: Arc<RetainedMessages>) -> Self {
        Self { membership, end, retained }
    }

    /// Notes that a message has begun, and that this member has it whole.
    pub(super) async fn begin_whole(&self, size: u64) {
        self.end.begin_whole(size).await;
        self.report_held(size);
    }

    /// Reports to the root how many messages are here, the latest of so many bytes; at the root, notes it for itself.
    pub(super) fn report_held(&self, bytes: u64) {
        if !self.retained.keeps() {
            return;
        }
        let held = self.end.held();
        if self.membership.rank.is_root() {
            self.note_held(Rank::ROOT, held);
        } else if self.retained.should_report(held, bytes) {
            self.membership.post_to_root(GroupFrame::Held { messages: held });
        }
    }

    /// At the root: notes how many messages a member has; announces how many all members have, if that is more.
    fn note_held(&self, member: Rank, messages: u64) {
        if let Some(messages) = self.retained.note_held(member, messages) {
            self.membership.post_to_others(&GroupFrame::Stable { messages });
        }
    }

    /// At the root: takes a member's report of how many messages it has.
    pub(super) fn receive_held(&self, from: Rank, messages: u64) -> Result<(), &'static str> {
        if messages > self.end.begun().max(self.membership.prior.begun) {
            return Err("says that it has messages that were not begun");
        }
        self.note_held(from, messages);
        Ok(())
    }

    /// At another member: takes the root's announcement of how many messages all members have.
    pub(super) fn receive_stable(&self, messages: u64) -> Result<(), &'static str> {
        if messages > self.end.held() {
            return Err("announces as held by all a message that this member does not have");
        }
        self.retained.release(messages);
        Ok(())
    }
}
