//! Members that do not answer about the end, although their nodes give signs of life.

use std::collections::{BTreeMap, BTreeSet};

use rdmc_fabric::Timestamp;

use super::Agreement;
use crate::failure::FailureCause;

/// Tracks which members were heard of in the agreement, and when.
#[derive(Debug)]
pub(super) struct SilenceTracker {
    /// Since when every member is expected to speak.
    since: Timestamp,
    heard_at: BTreeMap<u32, Timestamp>,
    /// The members that are not expected to answer, until they are heard.
    counted_out: BTreeSet<u32>,
}

impl SilenceTracker {
    pub(super) fn since(now: Timestamp) -> Self {
        Self { since: now, heard_at: BTreeMap::new(), counted_out: BTreeSet::new() }
    }

    pub(super) fn note_heard(&mut self, rank: u32, now: Timestamp) {
        self.heard_at.insert(rank, now);
        self.counted_out.remove(&rank);
    }

    /// Expects no answers of a member any more, without an accusation.
    pub(super) fn expect_nothing(&mut self, rank: u32) {
        self.counted_out.insert(rank);
    }

    pub(super) fn is_counted_out(&self, rank: u32) -> bool {
        self.counted_out.contains(&rank)
    }
}

impl Default for SilenceTracker {
    fn default() -> Self {
        Self::since(Timestamp::ZERO)
    }
}

impl Agreement {
    /// Counts out the members that have not spoken for long: members that have stopped repeat their frames.
    pub(super) fn count_out_silent(&mut self, now: Timestamp) {
        if now > self.ask_at + self.patience.outbid {
            // This process was stopped itself: the frames that came meanwhile are still to be read.
            self.silence = SilenceTracker::since(now);
        }
        let limit = self.patience.outbid * ASKED_MAX;
        let heard_at = |rank: &u32| self.silence.heard_at.get(rank).map_or(self.silence.since, |at| *at);
        let silent = self.others().filter(|rank| self.is_reachable(*rank) && now >= heard_at(rank) + limit);
        for rank in silent.collect::<Vec<_>>() {
            self.count_out(rank, FailureCause::Unresponsive { silence: limit });
        }
    }

    /// Expects no more answers of a member, because of `cause`.
    pub(super) fn count_out(&mut self, rank: u32, cause: FailureCause) {
        if self.wedged && rank != self.me {
            self.silence.counted_out.insert(rank);
            self.evidence.entry(self.me).or_default().accuse(rank, cause);
        }
    }
}

/// Attempts to ask a member before it counts as silent.
const ASKED_MAX: u32 = 2;
