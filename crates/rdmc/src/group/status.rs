//! How far the members have come: which messages all have, and what their applications have done with them.
//!
//! Members keep the memory of a message until all have it. Where delivery is stable, they deliver it only then. And the
//! root's [receipts](super::receipt) tell its application. All of this is read from the [status table](crate::table).
//!
//! With stable delivery in a group of few members each reads the rows of all. Else rows travel between the root and each
//! member, and the root's row says what all have.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rdmc_schedule::Rank;

use super::GroupSpec;
use super::ending::GroupEnd;
use super::fates::Fates;
use super::membership::Membership;
use super::receipt::ReceiptBook;
use super::retained::RetainedMessages;
use crate::count::Level;
use crate::sync::lock;
use crate::table::{ExpectedRows, IncomingRing, LinkError, Row, RowReader, StatusTable};
use crate::transfer::TransferError;
use crate::wire::GroupFrame;

/// What a group knows of its members' progress.
pub(super) struct Status {
    membership: Arc<Membership>,
    end: Arc<GroupEnd>,
    retained: Arc<RetainedMessages>,
    pub(super) table: StatusTable,
    pub(super) fates: Arc<Fates>,
    pub(super) receipts: Arc<ReceiptBook>,
    /// At a receiver: how many slots of the ring the root was told to be read.
    told_read: AtomicU64,
    /// At the root: of how many messages it knows what all applications have done with them.
    pub(super) settled: Level,
    /// At the root, by rank: what it knows of each application.
    applications: Mutex<Vec<Application>>,
    reads_all: bool,
    /// This member has done its part, and is not the root.
    is_done: AtomicBool,
}

/// What the root knows of a receiver's application.
#[derive(Clone, Copy)]
struct Application {
    /// Of how many messages it is known whether they are stored, from the first.
    settled: u64,
    /// How many messages it has let go, as far as it is known which.
    let_go: u64,
    /// The message after the last of these.
    after: u64,
}

/// Returns the members with which a member exchanges rows.
pub(super) fn peers(spec: &GroupSpec, rank: Rank) -> Vec<Rank> {
    let others = (0..spec.count()).map(Rank).filter(|other| *other != rank);
    others.filter(|other| reads_all(spec) || rank.is_root() || other.is_root()).collect()
}

/// Tells whether every member reads the rows of all.
fn reads_all(spec: &GroupSpec) -> bool {
    spec.is_stable() && spec.count() <= ALL_READ_MAX
}

impl Status {
    pub(super) fn new(
        membership: Arc<Membership>,
        end: Arc<GroupEnd>,
        retained: Arc<RetainedMessages>,
        table: StatusTable,
    ) -> Self {
        let prior = membership.prior;
        let reads_all = membership.rank.is_root() || reads_all(&membership.spec);
        let settled = Level::default();
        if membership.members.len() == 1 {
            // There is no application to wait for.
            settled.raise_to(u64::MAX);
        }
        let application = Application { settled: prior.base, let_go: 0, after: 0 };
        Self {
            applications: Mutex::new(vec![application; membership.members.len()]),
            fates: Arc::new(Fates::new(prior.delivered.max(prior.base))),
            receipts: Arc::default(),
            membership,
            end,
            retained,
            table,
            settled,
            reads_all,
            is_done: AtomicBool::new(false),
            told_read: AtomicU64::new(0),
        }
    }

    /// Exchanges rows, and tells the root what the application does with messages; does not end.
    pub(super) async fn run(&self, expected: ExpectedRows) {
        let fates = async {
            let mut seen = 0;
            loop {
                seen = self.fates.changed(seen).await;
                self.report_fates();
            }
        };
        // In this order, so that what the application has done leaves with the row that is about to be written.
        futures::join!(fates, self.table.run(expected, self));
    }

    /// Notes that this member has done its part: others may end the group, and their connections, at any time.
    pub(super) fn note_done(&self) {
        self.is_done.store(!self.membership.rank.is_root(), Ordering::Release);
    }

    /// At the root of a group with a ring: returns the receiver that has read the fewest slots.
    pub(super) fn slowest_reader(&self) -> Rank {
        self.table.peers().min_by_key(|rank| self.table.row(*rank).read).unwrap_or(Rank::ROOT)
    }

    /// At a receiver: tells the root that slots of the ring were read, if they are many.
    pub(super) fn report_read(&self, ring: &IncomingRing) {
        let (read, told) = (ring.read(), self.told_read.load(Ordering::Relaxed));
        self.table.update(|row| row.read = read);
        if ring.should_tell(told) {
            self.told_read.store(read, Ordering::Relaxed);
            self.table.publish();
        }
    }

    // Messages that this member has.

    /// Notes that a message has begun, and that this member has it whole.
    pub(super) async fn begin_whole(&self, size: u64) {
        self.end.begin_whole(size).await;
        self.report_held(size);
    }

    /// Tells the others how many messages are here, the latest of so many bytes: at once if they wait for it, else with
    /// later ones.
    pub(super) fn report_held(&self, bytes: u64) {
        let held = self.end.held();
        self.table.update(|row| row.received = held.max(row.received));
        let me = self.membership.rank;
        if self.reads_all {
            self.note_held(me, held);
            if !me.is_root() && !self.membership.prior.root_gone && held > self.membership.prior.begun {
                // The root has begun it, and so has it.
                self.note_held(Rank::ROOT, held);
            }
        }
        if me.is_root() && !self.membership.prior.root_gone {
            if held <= self.membership.prior.begun {
                // Others may have messages of the group before this one that the root has not begun anew.
                self.table.publish();
            }
            return;
        }
        let at_once = self.membership.spec.is_stable() || held <= self.table.row(Rank::ROOT).asked;
        if (self.retained.keeps() || at_once) && self.retained.should_report(held, bytes, at_once) {
            self.table.publish();
        }
    }

    /// Where all rows are read: notes how many messages a member has.
    fn note_held(&self, member: Rank, messages: u64) {
        let Some((stable, long)) = self.retained.note_held(member, messages) else { return };
        self.note_stable(stable);
        if self.membership.rank.is_root() {
            self.table.update(|row| row.stable = stable);
            let at_once = long || self.membership.spec.is_stable() || self.membership.prior.root_gone;
            if self.retained.should_tell_stable(stable, at_once) {
                self.table.publish();
            }
        }
    }

    fn note_stable(&self, messages: u64) {
        if self.membership.spec.is_stable() {
            self.end.deliver_stable(messages);
        }
    }

    /// Returns how many messages all members have, as far as this one knows.
    pub(super) fn stable(&self) -> &Level {
        &self.retained.stable
    }

    // What applications do with messages.

    /// At the root: asks the members to tell at once what they have, and do with it, up to a message and further.
    pub(super) fn ask(&self, message: u64) {
        let mut more = false;
        self.table.update(|row| {
            more = row.asked < message.saturating_add(ASKED_AHEAD / 2);
            if more {
                row.asked = message.saturating_add(ASKED_AHEAD);
            }
        });
        if more {
            self.table.publish();
        }
    }

    /// At another member: tells the root, if it has asked, what the application has done with messages.
    fn report_fates(&self) {
        let (me, asked) = (self.membership.rank, self.table.row(Rank::ROOT).asked);
        if me.is_root() || asked == 0 {
            return;
        }
        self.fates.report_changes();
        if self.table.row(me).taken >= asked {
            // The row keeps what was published until the root asks about more.
            return;
        }
        let (taken, let_go) = self.fates.report(|first, count| {
            self.membership.post_to_root(GroupFrame::LetGo { first, count });
        });
        let (held, mut more) = (self.end.held(), false);
        self.table.update(|row| {
            let before = row.taken;
            // Those that a group before this one has delivered may not be here yet.
            row.taken = taken.min(held).max(before);
            row.let_go = let_go.min(row.taken).max(row.let_go);
            row.received = held.max(row.received);
            more = row.taken > before;
        });
        if more {
            self.table.publish();
        }
    }

    /// At another member: reports what the application has not stored when it agrees to the end of the group.
    pub(super) fn finish(&self) {
        if self.membership.rank.is_root() || self.membership.prior.root_gone {
            return;
        }
        self.fates.finish(self.end.held());
        self.fates.report(|first, count| self.membership.post_to_root(GroupFrame::LetGo { first, count }));
    }

    /// At the root: notes that a member has told everything about all messages of the group.
    pub(super) fn note_confirmed(&self, member: Rank, messages: u64) {
        self.change_application(member, |application| application.settled = messages);
    }

    /// At the root: takes a member's word that it let messages go without storing them.
    pub(super) fn take_let_go(&self, from: Rank, first: u64, count: u64) -> Result<(), &'static str> {
        let after = first.checked_add(count).filter(|after| *after <= self.end.begun());
        let Some(after) = after.filter(|_| count > 0) else { return Err("let go of messages that there are not") };
        if first < lock(&self.applications)[from.index()].after {
            return Err("let a message go twice");
        }
        self.receipts.note_let_go(from, first..after);
        self.change_application(from, |application| {
            application.let_go += count;
            application.after = after;
        });
        Ok(())
    }

    fn change_application(&self, member: Rank, change: impl FnOnce(&mut Application)) {
        let row = self.table.row(member);
        let settled = {
            let mut applications = lock(&self.applications);
            let application = &mut applications[member.index()];
            change(application);
            // Which messages are let go is told beside the table.
            if application.let_go >= row.let_go {
                application.settled = application.settled.max(row.taken);
            }
            applications[1..].iter().map(|application| application.settled).min()
        };
        self.settled.raise_to(settled.unwrap_or(u64::MAX));
    }

    /// At the root: returns the members about whose applications it knows nothing of a message.
    pub(super) fn unsettled(&self, message: u64) -> Vec<Rank> {
        let applications = lock(&self.applications);
        let unsettled = (0..).map(Rank).zip(&*applications).skip(1);
        unsettled.filter(|(_, application)| application.settled <= message).map(|(rank, _)| rank).collect()
    }
}

impl From<LinkError> for TransferError {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Work { with, error } => Self::Work { with, error },
            LinkError::Row { by, what } => Self::Protocol { by, what: what.to_owned() },
        }
    }
}

impl RowReader for Status {
    fn take(&self, from: Rank, before: Row, row: Row) -> Result<(), &'static str> {
        if row.taken > row.received || row.let_go > row.taken {
            return Err("wrote a row of counts that cannot be");
        }
        if self.membership.rank.is_root() {
            if row.received > self.end.begun().max(self.membership.prior.begun) {
                return Err("says that it has messages that were not begun");
            }
            if let Some(ring) = self.table.outgoing().filter(|_| row.read > before.read) {
                if row.read > ring.written() {
                    return Err("says that it has read slots that were not written");
                }
                let receivers = self.table.peers().map(|rank| self.table.row(rank).read);
                ring.note_read(receivers.min().unwrap_or(u64::MAX));
            }
            self.note_held(from, row.received);
            if row.taken > before.taken || row.let_go > before.let_go {
                self.change_application(from, |_| {});
            }
            return Ok(());
        }
        if self.reads_all {
            self.note_held(from, row.received);
        } else if row.stable > before.stable {
            if row.stable > self.end.held() {
                return Err("announces as held by all a message that this member does not have");
            }
            self.retained.release(row.stable);
            self.note_stable(row.stable);
        }
        if from.is_root() && row.asked > before.asked {
            let held = self.end.held();
            if self.retained.should_report(held, 0, true) {
                self.table.publish();
            }
            self.report_fates();
        }
        Ok(())
    }

    fn broken(&self, error: LinkError) {
        if !self.is_done.load(Ordering::Acquire) {
            self.end.report(error.into());
        }
    }

    fn ask_again(&self, from: Rank) {
        let to = self.membership.members[from.index()];
        tracing::debug!(parent: &self.membership.span, member = %from, "a row cannot be read and is asked for again");
        self.membership.post(to, GroupFrame::RepeatRow);
    }
}

/// Members of a group with stable delivery in which each reads the rows of all, at most.
const ALL_READ_MAX: u32 = 16;
/// Messages for which a receipt asks ahead.
const ASKED_AHEAD: u64 = 1024;
