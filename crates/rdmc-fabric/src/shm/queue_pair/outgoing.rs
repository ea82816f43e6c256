//! The producing side of a queue pair: writes requests, and data for the peer's reads, into a ring.

use std::collections::VecDeque;

use super::{Connection, EndReason, PIECE_LEN, ShmQueuePair};
use crate::memory::Buffer;
use crate::shm::Shared;
use crate::shm::arena::Allocation;
use crate::shm::ring::{Entry, EntryKind, INLINE_LEN_MAX, Payload, SLOTS, Target};
use crate::software::{ExposureGrant, Reports};
use crate::sync::lock;
use crate::work::{Work, WorkError, WorkRequest};

/// The state of the producing side.
#[derive(Default)]
pub(super) struct Outgoing {
    ended: bool,
    /// Number of entries written.
    written: u64,
    /// Number of entries that the peer has carried out.
    done: u64,
    /// The entries that the peer has not carried out, oldest first.
    in_flight: VecDeque<InFlight>,
    /// Requests with at least one written entry, oldest first.
    requests: VecDeque<StartedRequest>,
    /// Bytes written of the last request, if it is not written completely.
    partial: Option<usize>,
    reports: Reports,
    /// The peer's reads without all their data, and how many bytes of the first one were sent.
    reads: VecDeque<ExposureGrant>,
    read_sent: usize,
    staging: Option<Staging>,
}

struct InFlight {
    staging_chunk: Option<usize>,
    /// Whether the entry is the last one of its request.
    ends_request: bool,
    /// Whether the entry carries data for a read of the peer.
    is_read_data: bool,
}

struct StartedRequest {
    request: WorkRequest,
    done: bool,
    /// Whether the peer need not report it at once.
    quiet: bool,
    /// Bytes received so far, for a read.
    read: usize,
}

/// Shared memory for bytes that the peer cannot reach otherwise.
struct Staging {
    allocation: Allocation,
    free: Vec<usize>,
}

/// The result of an attempt to write entries.
#[derive(Clone, Copy, Default)]
pub(super) struct Pushed {
    wrote_any: bool,
    /// More entries can be written, but only by a caller that may copy.
    pub(super) needs_copy: bool,
}

impl Outgoing {
    /// Takes all started requests; no more entries are written.
    pub(super) fn end(&mut self) -> Vec<WorkRequest> {
        self.ended = true;
        self.reads.clear();
        self.staging = None;
        self.requests.drain(..).map(|started| started.request).collect()
    }

    fn has_room(&self) -> bool {
        self.written - self.done < SLOTS
    }

    fn write(&mut self, connection: &Connection, entry: &Entry, in_flight: InFlight) {
        connection.outgoing.put(self.written, entry);
        self.written += 1;
        self.in_flight.push_back(in_flight);
    }

    /// Takes a free chunk of the staging memory, which is allocated at the first call.
    fn chunk(&mut self, queue_pair: &ShmQueuePair) -> Result<Option<usize>, EndReason> {
        if self.staging.is_none() {
            let allocation = queue_pair.node.arena.allocate(CHUNKS * CHUNK_LEN).map_err(|error| {
                tracing::warn!(%error, "no shared memory for bytes that peers cannot reach");
                EndReason::Unreadable
            })?;
            self.staging = Some(Staging { allocation, free: (0..CHUNKS).collect() });
        }
        Ok(self.staging.as_mut().and_then(|staging| staging.free.pop()))
    }
}

impl Staging {
    /// Returns a chunk's bytes, which belong to the caller until an entry names them.
    fn bytes(&mut self, chunk: usize, len: usize) -> &mut [u8] {
        assert!(chunk < CHUNKS && len <= CHUNK_LEN, "bytes outside the chunk");
        let start = self.allocation.as_mut_ptr().wrapping_add(chunk * CHUNK_LEN);
        // SAFETY: the chunk lies in the allocation, which belongs to this queue pair only; it was free, so no entry
        // names it, and peers map it for reading only.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    fn payload(&self, chunk: usize) -> Payload {
        let (object, offset) = self.allocation.location();
        Payload::Shared { object, offset: (offset + chunk * CHUNK_LEN) as u64 }
    }
}

impl ShmQueuePair {
    /// Writes entries while there is room. At most one piece is copied, of at most so many bytes as `may_copy` says.
    pub(super) fn push(&self, connection: &Connection, may_copy: Option<usize>) -> Result<Pushed, EndReason> {
        let mut outgoing = lock(&self.outgoing);
        let mut pushed = Pushed::default();
        let mut copied = false;
        while outgoing.has_room() && !outgoing.ended {
            let may_copy = may_copy.filter(|_| !copied);
            // The entries of a request are contiguous.
            let read = match outgoing.partial {
                None => self.push_read(connection, &mut outgoing, may_copy)?,
                Some(_) => None,
            };
            let step = match read {
                Some(step) => step,
                None => self.push_request(connection, &mut outgoing, may_copy)?,
            };
            match step {
                Wrote::Entry => pushed.wrote_any = true,
                Wrote::Copied => (pushed.wrote_any, copied) = (true, true),
                Wrote::WouldCopy => {
                    pushed.needs_copy = true;
                    break;
                }
                Wrote::Nothing => break,
            }
        }
        if pushed.wrote_any {
            connection.outgoing.publish(outgoing.written);
            drop(outgoing);
            connection.notify_peer();
        }
        Ok(pushed)
    }

    /// Writes a piece of data for the peer's oldest read; returns `None` if there is no read.
    fn push_read(
        &self,
        connection: &Connection,
        outgoing: &mut Outgoing,
        may_copy: Option<usize>,
    ) -> Result<Option<Wrote>, EndReason> {
        let (Some(grant), sent) = (outgoing.reads.front(), outgoing.read_sent) else { return Ok(None) };
        let total = grant.len();
        let Some(most) = may_copy else { return Ok(Some(Wrote::WouldCopy)) };
        let len = (total - sent).min(CHUNK_LEN).min(most);
        let (payload, chunk) = if len == 0 {
            (Payload::Inline([0; INLINE_LEN_MAX]), None)
        } else {
            let Some(chunk) = outgoing.chunk(self)? else { return Ok(Some(Wrote::Nothing)) };
            let staging = outgoing.staging.as_mut().expect("the chunk is of it");
            let room = staging.bytes(chunk, len);
            let grant = outgoing.reads.front().expect("it was there above");
            grant.with_bytes(sent, len, |bytes| room.copy_from_slice(bytes));
            (staging.payload(chunk), Some(chunk))
        };
        let (first, last) = (sent == 0, sent + len == total);
        let (total, len_sent) = (total as u64, len as u64);
        let (imm, quiet) = (None, false);
        let entry = Entry { kind: EntryKind::ReadData, imm, first, last, quiet, total, len: len_sent, payload };
        outgoing.write(connection, &entry, InFlight { staging_chunk: chunk, ends_request: false, is_read_data: true });
        outgoing.read_sent += len;
        if last {
            outgoing.reads.pop_front();
            outgoing.read_sent = 0;
        }
        Ok(Some(Wrote::Copied))
    }

    /// Writes a piece of the next request.
    fn push_request(
        &self,
        connection: &Connection,
        outgoing: &mut Outgoing,
        may_copy: Option<usize>,
    ) -> Result<Wrote, EndReason> {
        let sent = match outgoing.partial {
            Some(sent) => sent,
            None => {
                let Some(request) = self.posted.try_take_send() else { return Ok(Wrote::Nothing) };
                let quiet = !outgoing.reports.wants(&request);
                outgoing.requests.push_back(StartedRequest { request, done: false, quiet, read: 0 });
                outgoing.partial = Some(0);
                0
            }
        };
        let started = outgoing.requests.back().expect("the last one is written in part");
        let may_be_quiet = started.quiet;
        let (kind, data, imm) = match started.request.work() {
            Work::Send { data, imm } => (EntryKind::Send, data.clone(), *imm),
            Work::Write { data, to, imm } => (EntryKind::Write(Target::of(*to)), data.clone(), *imm),
            Work::Read { into, from } => {
                let (kind, total) = (EntryKind::Read(Target::of(*from)), into.len() as u64);
                let payload = Payload::Inline([0; INLINE_LEN_MAX]);
                let entry = Entry { kind, imm: None, first: true, last: true, quiet: false, total, len: 0, payload };
                outgoing.partial = None;
                outgoing.write(
                    connection,
                    &entry,
                    InFlight { staging_chunk: None, ends_request: false, is_read_data: false },
                );
                return Ok(Wrote::Entry);
            }
            Work::Receive { .. } => unreachable!("receives are queued apart"),
        };
        let (payload, len, chunk) = match self.locate_payload(outgoing, &data, sent, may_copy)? {
            Located::At { payload, len, chunk } => (payload, len, chunk),
            Located::Not(wrote) => return Ok(wrote),
        };
        let (first, last) = (sent == 0, sent + len == data.len());
        // The next request may need the staging memory.
        let quiet = may_be_quiet && chunk.is_none();
        let entry = Entry { kind, imm, first, last, quiet, total: data.len() as u64, len: len as u64, payload };
        outgoing.partial = (!last).then_some(sent + len);
        outgoing.write(connection, &entry, InFlight { staging_chunk: chunk, ends_request: last, is_read_data: false });
        Ok(if chunk.is_some() { Wrote::Copied } else { Wrote::Entry })
    }

    /// Chooses the location of a request's bytes from index `sent` on: in the entry if they are few, in their own
    /// memory if that is shared, else in the staging memory.
    fn locate_payload(
        &self,
        outgoing: &mut Outgoing,
        data: &Buffer,
        sent: usize,
        may_copy: Option<usize>,
    ) -> Result<Located, EndReason> {
        if data.len() <= INLINE_LEN_MAX {
            let mut bytes = [0; INLINE_LEN_MAX];
            data.copy_to(0, &mut bytes[..data.len()]).map_err(|_| EndReason::Unreadable)?;
            return Ok(Located::At { payload: Payload::Inline(bytes), len: data.len(), chunk: None });
        }
        let shared = data.registration().and_then(|shared: &Shared| shared.locate(data, &self.node.objects));
        if let Some((object, offset)) = shared {
            return Ok(Located::At { payload: Payload::Shared { object, offset }, len: data.len(), chunk: None });
        }
        // Pages of a file may have to be read first, which is the thread's work.
        let most = may_copy.filter(|most| *most >= PIECE_LEN || !data.may_change());
        let Some(most) = most else { return Ok(Located::Not(Wrote::WouldCopy)) };
        let Some(chunk) = outgoing.chunk(self)? else { return Ok(Located::Not(Wrote::Nothing)) };
        let len = (data.len() - sent).min(CHUNK_LEN).min(most);
        let staging = outgoing.staging.as_mut().expect("the chunk is of it");
        data.copy_to(sent, staging.bytes(chunk, len)).map_err(|_| EndReason::Unreadable)?;
        Ok(Located::At { payload: staging.payload(chunk), len, chunk: Some(chunk) })
    }

    /// Completes the requests that the peer has carried out.
    pub(super) fn count_done(&self, connection: &Connection) -> Result<(), EndReason> {
        let done = connection.outgoing.done();
        let mut outgoing = lock(&self.outgoing);
        if outgoing.ended {
            return Err(EndReason::Closed);
        }
        if done < outgoing.done || done > outgoing.written {
            return Err(EndReason::Protocol("it counts entries that it was not sent"));
        }
        let outgoing = &mut *outgoing;
        while outgoing.done < done {
            outgoing.done += 1;
            let InFlight { staging_chunk, ends_request, .. } =
                outgoing.in_flight.pop_front().expect("one for each entry");
            if let (Some(chunk), Some(staging)) = (staging_chunk, &mut outgoing.staging) {
                staging.free.push(chunk);
            }
            if ends_request {
                let is_open = |started: &&mut StartedRequest| !started.done && !started.is_read();
                let ended = outgoing.requests.iter_mut().find(is_open);
                ended.expect("each request ends with its last entry").done = true;
            }
        }
        self.finish_done(outgoing);
        Ok(())
    }

    /// Completes requests in the order in which they were posted.
    fn finish_done(&self, outgoing: &mut Outgoing) {
        while outgoing.requests.front().is_some_and(|oldest| oldest.done) {
            let Some(StartedRequest { request, .. }) = outgoing.requests.pop_front() else { return };
            let len = request.work().len();
            self.posted.finish(request, Ok(len));
        }
    }

    /// Completes the request that the peer has refused; returns `None` if data for an earlier read is still to come.
    pub(super) fn refused(&self, reason: WorkError, ended: bool) -> Option<EndReason> {
        let mut outgoing = lock(&self.outgoing);
        if outgoing.ended {
            return Some(EndReason::Closed);
        }
        if !ended && outgoing.requests.front().is_some_and(StartedRequest::is_read) {
            return None;
        }
        let Some(StartedRequest { request, .. }) = outgoing.requests.pop_front() else {
            return Some(EndReason::Protocol("it refuses what it was not sent"));
        };
        self.posted.finish(request, Err(reason));
        Some(EndReason::Refused)
    }

    /// Notes a read of the peer.
    pub(super) fn add_read(&self, grant: ExposureGrant) -> Result<(), EndReason> {
        let mut outgoing = lock(&self.outgoing);
        if outgoing.ended {
            return Err(EndReason::Closed);
        }
        if outgoing.reads.len() >= READS_MAX {
            return Err(EndReason::Protocol("too many reads at once"));
        }
        outgoing.reads.push_back(grant);
        Ok(())
    }

    /// Tells whether the peer still waits for data of a read.
    pub(super) fn is_being_read(&self) -> bool {
        let outgoing = lock(&self.outgoing);
        !outgoing.reads.is_empty() || outgoing.in_flight.iter().any(|entry| entry.is_read_data)
    }

    /// Fills part of the oldest read by `copy`, which gets the destination.
    pub(super) fn take_read_data(
        &self,
        entry: &Entry,
        at: usize,
        len: usize,
        copy: impl FnOnce(&mut [u8]) -> Result<(), EndReason>,
    ) -> Result<(), EndReason> {
        let mut outgoing = lock(&self.outgoing);
        let is_open = |started: &&mut StartedRequest| !started.done && started.is_read();
        let Some(started) = outgoing.requests.iter_mut().find(is_open) else {
            return Err(if outgoing.ended { EndReason::Closed } else { EndReason::Protocol("nothing was to be read") });
        };
        let begun = started.read;
        let Work::Read { into, .. } = started.request.work_mut() else { unreachable!("it is one to read") };
        let fits = into.len() as u64 == entry.total && (entry.first == (begun == 0 && at == 0) || at > 0);
        let Some(room) = into.get_mut(begun..).and_then(|room| room.get_mut(..len)).filter(|_| fits) else {
            return Err(EndReason::Protocol("what it sends does not fit the read"));
        };
        copy(room)?;
        started.read += len;
        if entry.last && (at + len) as u64 == entry.len {
            if started.read as u64 != entry.total {
                return Err(EndReason::Protocol("it sends less than was to be read"));
            }
            started.done = true;
            self.finish_done(&mut outgoing);
        }
        Ok(())
    }
}

impl StartedRequest {
    fn is_read(&self) -> bool {
        matches!(self.request.work(), Work::Read { .. })
    }
}

/// The result of an attempt to write one entry.
enum Wrote {
    Nothing,
    /// Bytes must be copied first.
    WouldCopy,
    Entry,
    /// An entry was written, and bytes were copied for it.
    Copied,
}

/// The location of a request's bytes, or why they have none yet.
enum Located {
    At { payload: Payload, len: usize, chunk: Option<usize> },
    Not(Wrote),
}

/// Chunks of the staging memory of one queue pair.
const CHUNKS: usize = 4;
/// Bytes of a chunk.
const CHUNK_LEN: usize = 256 << 10;
/// Most reads of the peer without their data; a peer that requests more breaks the protocol.
const READS_MAX: usize = 16 << 10;
