//! The consuming side of a queue pair: carries out the entries of the peer's ring by copying.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Connection, EndReason, ShmQueuePair, TurnOutcome};
use crate::shm::copy::copy;
use crate::shm::node::{Attached, Lookup};
use crate::shm::ring::{Entry, EntryKind, Payload, SLOTS};
use crate::software::ExposureGrant;
use crate::sync::lock;
use crate::work::{Inspector, Work, WorkError, WorkRequest};

/// The state of the consuming side; only the engine uses it.
#[derive(Default)]
pub(super) struct Incoming {
    /// Number of entries carried out.
    done: u64,
    /// The current entry, between turns.
    entry: Option<Entry>,
    /// How many bytes of the current entry are copied.
    at: usize,
    /// The request of that entry.
    request: Option<PartialRequest>,
    /// Whether something was carried out that this side does not know of yet.
    unannounced: bool,
    /// Whether something of that is to be reported to the peer.
    unreported: bool,
    /// How many bytes were copied since the last announcement.
    unannounced_len: usize,
    /// The intermediate buffer of writes.
    bounce: Vec<u8>,
    /// When the peer's wait for a receive ends.
    deadline: Option<Instant>,
    /// Why the current entry is refused. The queue pair ends when the peer has got its earlier reads, or at the time
    /// `linger`.
    refusal: Option<WorkError>,
    linger: Option<Instant>,
}

/// A request of the peer that is partly carried out.
enum PartialRequest {
    Send { receive: WorkRequest, filled: usize },
    Write { grant: ExposureGrant, filled: usize },
    ReadData,
}

/// How far the engine got with an entry.
enum EntryProgress {
    /// A piece of this many bytes was copied.
    Copied(usize),
    /// It is carried out.
    Done,
    /// It waits for another event.
    Stalled,
    /// Its bytes are in a file, which the thread reads.
    InFile,
    /// It waits for a receive, until then.
    Starved(Instant),
    /// The request is refused.
    Refused(WorkError),
}

impl ShmQueuePair {
    /// Carries out entries of the peer: several short ones, or a piece of a long one.
    ///
    /// `most` is the number of bytes to copy at once.
    pub(super) fn take_entries(&self, connection: &Connection, most: usize) -> Result<TurnOutcome, EndReason> {
        let mut incoming = lock(&self.incoming);
        let done_before = incoming.done;
        let published = connection.incoming.published();
        if published < incoming.done || published - incoming.done > SLOTS {
            return Err(EndReason::Protocol("it counts entries that there is no room for"));
        }
        let mut copied = 0;
        let mut current = incoming.entry.take();
        let outcome = loop {
            if incoming.done == published {
                break TurnOutcome::Idle;
            }
            if copied >= most {
                break TurnOutcome::More;
            }
            let progress = match incoming.refusal {
                Some(error) => EntryProgress::Refused(error),
                None => self.take_entry(connection, &mut incoming, &mut current, most)?,
            };
            match progress {
                EntryProgress::Copied(len) => copied += len.max(1),
                EntryProgress::Done => {
                    incoming.done += 1;
                    incoming.at = 0;
                    incoming.unreported |= current.take().is_none_or(|entry| !entry.quiet);
                    connection.incoming.set_done(incoming.done);
                }
                EntryProgress::Stalled => break TurnOutcome::Idle,
                EntryProgress::InFile => break TurnOutcome::More,
                EntryProgress::Starved(limit) => break TurnOutcome::Until(limit),
                EntryProgress::Refused(error) => {
                    connection.incoming.refuse(error);
                    let now = Instant::now();
                    let limit = *incoming.linger.get_or_insert(now + REFUSAL_LINGER);
                    // If both ends refuse, neither gets any further.
                    if !self.is_being_read() || connection.outgoing.refusal().is_some() || now >= limit {
                        return Err(EndReason::Refusing);
                    }
                    if incoming.refusal.replace(error).is_none() {
                        connection.notify_peer();
                    }
                    break TurnOutcome::Until(limit);
                }
            }
        };
        incoming.entry = current;
        incoming.unannounced |= incoming.done > done_before;
        incoming.unannounced_len += copied;
        // If more work is at hand, several completions are announced together.
        if incoming.unannounced && (!matches!(outcome, TurnOutcome::More) || incoming.unannounced_len >= ANNOUNCED_LEN)
        {
            (incoming.unannounced, incoming.unannounced_len) = (false, 0);
            self.posted.announce();
            if std::mem::take(&mut incoming.unreported) {
                connection.notify_peer();
            }
        }
        Ok(outcome)
    }

    /// Advances the current entry.
    fn take_entry(
        &self,
        connection: &Connection,
        incoming: &mut Incoming,
        current: &mut Option<Entry>,
        most: usize,
    ) -> Result<EntryProgress, EndReason> {
        let entry = match current {
            Some(entry) => entry,
            None => {
                let entry =
                    connection.incoming.get(incoming.done).ok_or(EndReason::Protocol("it writes no entries"))?;
                if entry.first != incoming.request.is_none() {
                    return Err(EndReason::Protocol("its requests do not follow each other whole"));
                }
                current.insert(entry)
            }
        };
        if incoming.request.is_none()
            && let Some(otherwise) = self.begin(incoming, entry)?
        {
            return Ok(otherwise);
        }
        let at = incoming.at;
        let left = usize::try_from(entry.len).map_err(|_| EndReason::Protocol("it sends too much"))? - at;
        if left > 0 || (at == 0 && entry.kind == EntryKind::ReadData) {
            return self.copy_piece(connection, incoming, entry, (at, left), most);
        }
        if !entry.last {
            return Ok(EntryProgress::Done);
        }
        self.complete(incoming, entry)
    }

    /// Begins a request of the peer, unless it must wait or is refused.
    fn begin(&self, incoming: &mut Incoming, entry: &Entry) -> Result<Option<EntryProgress>, EndReason> {
        let request = match entry.kind {
            EntryKind::Send => {
                let receive = match self.next_receive(incoming)? {
                    Ok(receive) => receive,
                    Err(otherwise) => return Ok(Some(otherwise)),
                };
                let room = receive.work().len() as u64;
                if entry.total > room {
                    let error = WorkError::LocalLength { got: Some(entry.total), room };
                    self.posted.finish(receive, Err(error));
                    return Ok(Some(EntryProgress::Refused(WorkError::RemoteInvalidRequest)));
                }
                PartialRequest::Send { receive, filled: 0 }
            }
            EntryKind::Write(target) => match self.node.exposures.open(target.of_len(entry.total), true) {
                Ok(grant) => PartialRequest::Write { grant, filled: 0 },
                Err(error) => return Ok(Some(EntryProgress::Refused(error))),
            },
            EntryKind::Read(target) => match self.node.exposures.open(target.of_len(entry.total), false) {
                Ok(grant) => {
                    self.add_read(grant)?;
                    return Ok(Some(EntryProgress::Done));
                }
                Err(error) => return Ok(Some(EntryProgress::Refused(error))),
            },
            EntryKind::ReadData => PartialRequest::ReadData,
        };
        incoming.request = Some(request);
        Ok(None)
    }

    /// Takes the oldest posted receive; returns other progress if there is none.
    fn next_receive(&self, incoming: &mut Incoming) -> Result<Result<WorkRequest, EntryProgress>, EndReason> {
        let take = || self.posted.try_take_receive().map_err(|_| EndReason::Closed);
        let mut receive = take()?;
        if receive.is_none() {
            self.starved.store(true, Ordering::SeqCst);
            // A receive may have been posted before `starved` was set.
            receive = take()?;
        }
        match receive {
            Some(receive) => {
                self.starved.store(false, Ordering::SeqCst);
                incoming.deadline = None;
                Ok(Ok(receive))
            }
            None => {
                let now = Instant::now();
                let patience = self.config.receiver_not_ready.min(PATIENCE_MAX);
                let limit = *incoming.deadline.get_or_insert(now + patience);
                let late = limit <= now;
                let refused = EntryProgress::Refused(WorkError::ReceiverNotReady);
                Ok(Err(if late { refused } else { EntryProgress::Starved(limit) }))
            }
        }
    }

    /// Copies a piece of an entry to its destination.
    fn copy_piece(
        &self,
        connection: &Connection,
        incoming: &mut Incoming,
        entry: &Entry,
        (at, left): (usize, usize),
        most: usize,
    ) -> Result<EntryProgress, EndReason> {
        let Some(source) = self.source_of(connection, entry)? else { return Ok(EntryProgress::Stalled) };
        if matches!(source, Source::File { .. }) && most < PIECE_LEN {
            return Ok(EntryProgress::InFile);
        }
        let (len, copied) = self.fill_piece(connection, incoming, entry, &source, (at, left.min(most)))?;
        if let Err(error) = copied {
            return Ok(self.unreadable(incoming, error));
        }
        if connection.incoming.is_closed() {
            // The peer may have overwritten what was just copied.
            return Err(EndReason::Lost);
        }
        if len == left && matches!(incoming.request, Some(PartialRequest::ReadData)) {
            if entry.last {
                incoming.request = None;
            }
            return Ok(EntryProgress::Done);
        }
        incoming.at = at + len;
        Ok(EntryProgress::Copied(len))
    }

    /// Copies a piece of the next `left` bytes of an entry from index `at` on, and returns its length.
    fn fill_piece(
        &self,
        connection: &Connection,
        incoming: &mut Incoming,
        entry: &Entry,
        source: &Source,
        (at, left): (usize, usize),
    ) -> Result<(usize, io::Result<()>), EndReason> {
        match incoming.request.as_mut().expect("a piece is part of a request") {
            PartialRequest::Send { receive, filled } => {
                let inspector = receive.inspector().cloned();
                let len = if inspector.is_some() { left.min(INSPECTED_LEN) } else { left };
                let Work::Receive { into } = receive.work_mut() else { unreachable!("it is a receive") };
                // The decoder ensures that an entry is not longer than its request. Several entries together may be.
                let room = into.get_mut(*filled..).and_then(|room| room.get_mut(..len));
                let room = room.ok_or(EndReason::Protocol("it sends more than it said"))?;
                *filled += len;
                let streaming = entry.total >= STREAMED_LEN_MIN && inspector.is_none();
                let copied = source.copy_to(at, room, streaming);
                if let (Some(inspector), Ok(()), false) = (inspector, &copied, connection.incoming.is_closed()) {
                    let inspector: &dyn Inspector = &*inspector;
                    inspector.inspect(room);
                }
                Ok((len, copied))
            }
            PartialRequest::Write { grant, filled } => {
                let len = left.min(BOUNCED_LEN);
                if len > grant.len() - *filled {
                    return Err(EndReason::Protocol("it writes more than it said"));
                }
                // The bytes are not copied directly into the exposed memory, which stays in use: they are wrong if the
                // peer closes its end meanwhile.
                incoming.bounce.resize(len, 0);
                let copied = source.copy_to(at, &mut incoming.bounce, false);
                if copied.is_ok() && !connection.incoming.is_closed() {
                    let place = |room: &mut [u8]| room.copy_from_slice(&incoming.bounce);
                    grant.with_bytes_mut(*filled, len, place).expect("write access was checked");
                    *filled += len;
                }
                Ok((len, copied))
            }
            PartialRequest::ReadData => {
                let copy = |room: &mut [u8]| {
                    let copied = source.copy_to(at, room, false);
                    if connection.incoming.is_closed() {
                        Err(EndReason::Lost)
                    } else {
                        copied.map_err(|_| EndReason::Lost)
                    }
                };
                self.take_read_data(entry, at, left, copy)?;
                Ok((left, Ok(())))
            }
        }
    }

    /// Refuses a request whose bytes lie in a file of the peer that was shortened.
    fn unreadable(&self, incoming: &mut Incoming, error: io::Error) -> EntryProgress {
        tracing::warn!(qp = %self.posted.id, %error, "a file that a peer sends cannot be read");
        if let Some(PartialRequest::Send { receive, .. }) = incoming.request.take() {
            self.posted.finish(receive, Err(WorkError::ConnectionLost));
        }
        EntryProgress::Refused(WorkError::LocalProtection)
    }

    /// Returns the source of an entry's bytes; `None` while the peer's object is being fetched.
    fn source_of(&self, connection: &Connection, entry: &Entry) -> Result<Option<Source>, EndReason> {
        let (object, offset) = match entry.payload {
            Payload::Inline(bytes) => return Ok(Some(Source::Inline(bytes))),
            Payload::Shared { object, offset } => (object, offset),
        };
        match connection.peer.find(object, self.line) {
            Lookup::Ready(Attached::Memory(memory)) => {
                let end = offset.checked_add(entry.len).filter(|&end| end <= memory.len() as u64);
                end.ok_or(EndReason::Protocol("it points outside its memory"))?;
                let offset = usize::try_from(offset).expect("it lies in mapped memory");
                Ok(Some(Source::Memory { memory, offset }))
            }
            Lookup::Ready(Attached::File(file)) => Ok(Some(Source::File { file, offset })),
            Lookup::Fetching => Ok(None),
            // The reason was logged when the object could not be fetched.
            Lookup::Refused => Err(EndReason::Lost),
        }
    }

    /// Ends a request that has all its bytes.
    fn complete(&self, incoming: &mut Incoming, entry: &Entry) -> Result<EntryProgress, EndReason> {
        match &incoming.request {
            Some(PartialRequest::Send { filled, .. } | PartialRequest::Write { filled, .. })
                if *filled as u64 != entry.total =>
            {
                return Err(EndReason::Protocol("it sends less than it said"));
            }
            Some(PartialRequest::Write { .. }) if entry.imm.is_some() => match self.next_receive(incoming)? {
                Ok(receive) => self.posted.finish_with_imm(receive, Ok(0), entry.imm),
                Err(otherwise) => return Ok(otherwise),
            },
            _ => {}
        }
        if let Some(PartialRequest::Send { receive, filled }) = incoming.request.take() {
            self.posted.finish_unannounced(receive, Ok(filled), entry.imm);
        }
        Ok(EntryProgress::Done)
    }

    /// Gives back the receive that was being filled.
    pub(super) fn give_up_incoming(&self, cause: WorkError) {
        self.posted.announce();
        if let Some(PartialRequest::Send { receive, .. }) = lock(&self.incoming).request.take() {
            let cause = if cause == WorkError::Flushed { cause } else { WorkError::ConnectionLost };
            self.posted.finish(receive, Err(cause));
        }
    }
}

/// The source of an entry's bytes.
enum Source {
    Inline([u8; crate::shm::ring::INLINE_LEN_MAX]),
    Memory { memory: Arc<crate::shm::map::Mapping>, offset: usize },
    File { file: Arc<std::fs::File>, offset: u64 },
}

impl Source {
    /// Copies the entry's bytes from index `at` on; the caller has checked that there are enough.
    fn copy_to(&self, at: usize, room: &mut [u8], streaming: bool) -> io::Result<()> {
        match self {
            Self::Inline(bytes) => room.copy_from_slice(&bytes[at..at + room.len()]),
            Self::Memory { memory, offset } => {
                let start = offset + at;
                assert!(start + room.len() <= memory.len(), "the entry was checked");
                let from = memory.as_mut_ptr().wrapping_add(start);
                // SAFETY: the range lies in the mapping, which stays readable, as its file cannot be shortened; `room`
                // is memory of this process, exclusively borrowed. The peer may write it, and the bytes are then not
                // used.
                unsafe { copy(from, room.as_mut_ptr(), room.len(), streaming) };
            }
            Self::File { file, offset } => file.read_exact_at(room, offset + at as u64)?,
        }
        Ok(())
    }
}

/// Most bytes copied before other queue pairs have their turn.
pub(in crate::shm) const PIECE_LEN: usize = 256 << 10;
/// Most bytes copied at once for an inspector, so that they are in the second-level cache when it sees them.
const INSPECTED_LEN: usize = 128 << 10;
/// Bytes after which completions are announced even if there is more work.
const ANNOUNCED_LEN: usize = 4 << 20;
/// How long the peer's earlier reads may take before a refused request ends the queue pair.
const REFUSAL_LINGER: Duration = Duration::from_secs(2);
/// Longest wait for a receive: a year.
const PATIENCE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Most bytes of a write that are copied at once.
const BOUNCED_LEN: usize = 64 << 10;
/// Shortest request whose copies bypass the caches.
const STREAMED_LEN_MIN: u64 = 256 << 10;
