//! The status table: how far each member has come, in the memory of the others.
//!
//! Each member has a row and writes it one-sidedly to the members that read it (the shared state table of Derecho;
//! DSN §4.6). A row is a few counts that only grow. So what has once been true of the least of a column stays true, and
//! needs no lock and no agreement.
//!
//! A row is written again when the write before it is acknowledged. What changes meanwhile is written with the next one.
//! An acknowledgement wakes nobody unless it is waited for: it comes with the next write of the other member.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::DerefMut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{Either, select, try_join};
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{Fabric, Operation, Received, WorkError};
use rdmc_schedule::Rank;

use crate::count::Count;
use crate::sync::lock;

mod link;
mod memory;
pub(crate) mod ring;
mod row;

use link::Report;
pub(crate) use link::{Link, RingEnd};
pub(crate) use ring::{IncomingRing, OutgoingRing, RingShape, Slot};
pub(crate) use row::Row;

/// One member's view of the status of all, and the connections by which rows travel.
pub(crate) struct StatusTable {
    links: BTreeMap<Rank, Link>,
    /// Makes the check values of rows differ from group to group.
    salt: u64,
    me: Rank,
    state: Mutex<TableState>,
    /// How often this member's row was published, for the writers of the links.
    due: BTreeMap<Rank, Count>,
    /// At the root of a group with a ring.
    outgoing: Option<OutgoingRing>,
    fabric: Arc<dyn Fabric>,
}

struct TableState {
    /// By rank. This member's own row is what it says of itself, published or not.
    rows: Vec<Row>,
    published: u64,
}

/// A connection of the table does not work.
#[derive(Debug)]
pub(crate) enum LinkError {
    Work {
        with: Rank,
        error: WorkError,
    },
    /// A member has written what cannot be.
    Row {
        by: Rank,
        what: &'static str,
    },
}

/// The receives that the writes of rows consume, by the member that writes.
pub(crate) type ExpectedRows = Vec<(Rank, VecDeque<Operation<Received>>)>;

/// What the owner of a table does about rows.
pub(crate) trait RowReader: Sync {
    /// Takes a member's new row; `before` is the one that it replaces.
    ///
    /// # Errors
    /// How the row violates the protocol.
    fn take(&self, from: Rank, before: Row, row: Row) -> Result<(), &'static str>;

    /// Learns that a connection is broken.
    fn broken(&self, error: LinkError);

    /// Asks a member to write its row again.
    fn ask_again(&self, from: Rank);
}

impl StatusTable {
    /// Makes the table of member `me` of `members`, which exchanges rows with `peers`. All columns begin at what `first`
    /// says, at every member.
    pub(crate) fn new(
        me: Rank,
        members: usize,
        salt: u64,
        first: Row,
        links: impl IntoIterator<Item = Link>,
        ring: Option<RingShape>,
        fabric: Arc<dyn Fabric>,
    ) -> Self {
        let links: BTreeMap<Rank, Link> = links.into_iter().map(|link| (link.rank, link)).collect();
        let due = links.keys().map(|rank| (*rank, Count::default())).collect();
        let state = Mutex::new(TableState { rows: vec![first; members], published: 0 });
        let outgoing = ring.filter(|_| me.is_root()).map(|shape| OutgoingRing::new(shape, links.len()));
        if let Some(outgoing) = outgoing.as_ref().filter(|_| links.is_empty()) {
            outgoing.note_read(u64::MAX);
        }
        Self { links, salt, me, state, due, outgoing, fabric }
    }

    /// Returns the connection to a member, if rows travel between the two.
    pub(crate) fn link(&self, rank: Rank) -> Option<&Link> {
        self.links.get(&rank)
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> {
        self.links.keys().copied()
    }

    /// Returns the latest row that is known of a member.
    pub(crate) fn row(&self, of: Rank) -> Row {
        lock(&self.state).rows[of.index()]
    }

    /// Changes this member's row; the others see it with the next [publication](Self::publish).
    pub(crate) fn update(&self, change: impl FnOnce(&mut Row)) {
        change(&mut lock(&self.state).rows[self.me.index()]);
    }

    /// Has this member's row written to the members that read it.
    pub(crate) fn publish(&self) {
        let published = {
            let mut state = lock(&self.state);
            state.published += 1;
            state.published
        };
        self.due.values().for_each(|due| due.raise_to(published));
    }

    /// Posts the receives that the writes of rows consume, before the connections are made.
    pub(crate) fn expect_rows(&self) -> ExpectedRows {
        self.links.iter().map(|(rank, link)| (*rank, link.expect_rows())).collect()
    }

    /// Takes the rows of others and writes this member's own; does not end, even if connections break.
    pub(crate) async fn run(&self, expected: ExpectedRows, reader: &dyn RowReader) {
        let mut links: FuturesUnordered<_> = expected
            .into_iter()
            .map(|(rank, posted)| {
                let (link, due) = (&self.links[&rank], &self.due[&rank]);
                async move {
                    let ended = try_join(self.take_rows(link, posted, reader), self.write_rows(link, due)).await;
                    ended.expect_err("neither ends")
                }
            })
            .collect();
        while let Some(error) = links.next().await {
            reader.broken(error);
        }
        std::future::pending::<()>().await;
    }

    async fn take_rows(
        &self,
        link: &Link,
        mut posted: VecDeque<Operation<Received>>,
        reader: &dyn RowReader,
    ) -> Result<(), LinkError> {
        let environment = self.fabric.environment();
        let mut unreadable: Option<Unreadable> = None;
        while let Some(mut next) = posted.pop_front() {
            // A row that cannot be read is being written, and read when that is done. If nothing comes, it has come
            // corrupted.
            let received = loop {
                let Some(unreadable) = &mut unreadable else { break (&mut next).await };
                match select(&mut next, environment.sleep(unreadable.patience())).await {
                    Either::Left((received, _)) => break received,
                    Either::Right(_) => {
                        unreadable.asked += 1;
                        reader.ask_again(link.rank);
                    }
                }
            };
            let received = received.map_err(|error| LinkError::Work { with: link.rank, error })?;
            posted.push_back(link.expect_row());
            if let (Some(ring), Some(link::RING_IMM)) = (&link.ring, received.imm) {
                ring.written.increment();
                continue;
            }
            match link.read(self.salt) {
                None if unreadable.get_or_insert_default().comes_in_vain() => {
                    return Err(LinkError::Row { by: link.rank, what: UNREADABLE });
                }
                None => {}
                Some(row) => {
                    unreadable = None;
                    self.take(link.rank, row, reader).map_err(|what| LinkError::Row { by: link.rank, what })?;
                }
            }
        }
        unreachable!("each receive that is taken is posted again");
    }

    fn take(&self, from: Rank, row: Row, reader: &dyn RowReader) -> Result<(), &'static str> {
        let before = {
            let mut state = lock(&self.state);
            let known = &mut state.rows[from.index()];
            if !row.follows(*known) {
                return Err("wrote a row of counts that went back");
            }
            std::mem::replace(known, row)
        };
        reader.take(from, before, row)
    }

    async fn write_rows(&self, link: &Link, due: &Count) -> Result<(), LinkError> {
        let failed = |error| LinkError::Work { with: link.rank, error };
        let mut written = 0;
        let mut last: Option<Operation<()>> = None;
        loop {
            due.reaches(written + 1).await;
            // So that the row also has what the application does next.
            self.fabric.environment().give_way().await;
            let row = {
                let state = lock(&self.state);
                written = state.published;
                state.rows[self.me.index()]
            };
            if let Some(write) = &mut last
                && write.now_or_never().transpose().map_err(failed)?.is_some()
            {
                last = None;
            }
            let report = if last.is_none() { Report::Later } else { Report::AtOnce };
            let write = link.write(row, self.salt, self.me, report).map_err(failed)?;
            match last.take() {
                None => last = Some(write),
                // In this order, so that the first error is the one that is reported.
                Some(before) => {
                    before.await.map_err(failed)?;
                    write.await.map_err(failed)?;
                }
            }
        }
    }

    // The ring.

    /// At a receiver: returns its end of the ring.
    pub(crate) fn incoming(&self) -> Option<&IncomingRing> {
        self.links.get(&Rank::ROOT)?.ring.as_ref()
    }

    /// At the root: returns its end of the ring.
    pub(crate) fn outgoing(&self) -> Option<&OutgoingRing> {
        self.outgoing.as_ref()
    }

    /// At a receiver: waits for the next slot, with the memory that `memory` returns for a message; `None` if it has
    /// come corrupted.
    pub(crate) async fn next_slot<M: DerefMut<Target = [u8]>, E>(
        &self,
        ring: &IncomingRing,
        memory: impl FnOnce(usize) -> Result<M, E>,
    ) -> Result<Option<Slot<M>>, E> {
        ring.next(self.salt, memory).await
    }

    /// At a receiver: reads the slot that [`next_slot`](Self::next_slot) has read last, as the root has sent it again
    /// by another way; `None` if it is corrupted too.
    pub(crate) fn slot_again<M: DerefMut<Target = [u8]>, E>(
        &self,
        ring: &IncomingRing,
        bytes: &[u8],
        memory: impl FnOnce(usize) -> Result<M, E>,
    ) -> Result<Option<Slot<M>>, E> {
        ring.read_again((self.salt, ring.read() - 1), bytes, memory)
    }

    /// At the root: waits until the connections to all receivers take one more slot.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn takes_slot(&self, ring: &OutgoingRing) -> Result<(), LinkError> {
        for (at, link) in self.links.values().enumerate() {
            ring.acknowledged(at).await.map_err(|error| LinkError::Work { with: link.rank, error })?;
        }
        Ok(())
    }

    /// At the root: writes the slot of the next message, whose bytes `fill` writes, to all receivers, which have
    /// [room](OutgoingRing::has_room) and [take it](Self::takes_slot). One task writes at a time.
    pub(crate) fn write_slot(
        &self,
        ring: &OutgoingRing,
        slot: Slot<usize>,
        fill: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let number = ring.written.load(Ordering::Relaxed);
        let encoded = ring.encode(&*self.fabric, &slot, (self.salt, number), fill)?;
        ring.written.store(number + 1, Ordering::Release);
        let report = if ring.shape.is_reported(number) { Report::AtOnce } else { Report::Later };
        for (at, link) in self.links.values().enumerate() {
            ring.note(at, link.write_slot(encoded.clone(), ring.shape.place(number), report));
        }
        Ok(())
    }

    /// Breaks all connections.
    pub(crate) fn close(&self) {
        self.links.values().for_each(Link::close);
    }
}

/// A row that cannot be read.
#[derive(Default)]
struct Unreadable {
    /// How often the member was asked to write it again, since it came.
    asked: u32,
    /// How often it came unreadable after that.
    in_vain: u32,
}

impl Unreadable {
    /// Returns how long to wait for the row before the member is asked: the way to here may be slow.
    fn patience(&self) -> Duration {
        ASK_AGAIN_AFTER * (1 << self.asked.min(ASK_SLOWER_MAX))
    }

    /// Notes that the row has come unreadable; tells whether that happens too often.
    fn comes_in_vain(&mut self) -> bool {
        self.in_vain += u32::from(self.asked > 0);
        self.asked = 0;
        self.in_vain > ASK_AGAIN_MAX
    }
}

/// How long a row may stay unreadable before its member is asked to write it again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(50);
/// How often that time doubles, while nothing comes.
const ASK_SLOWER_MAX: u32 = 5;
/// How often a row may come unreadable after its member was asked for it.
const ASK_AGAIN_MAX: u32 = 20;
const UNREADABLE: &str = "wrote a row whose check value is wrong, again and again";
