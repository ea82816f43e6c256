//! A queue pair of the device and its posted work.
//!
//! Requests stay here, with their memory, from posting to completion. A reliable connection completes sends and
//! receives in the order of posting, so each side is a queue. The completion of a signaled request also completes the
//! unsignaled ones before it. In a broken connection, the device's queue pair is in its error state, in which the
//! device flushes all posted work. The device's queue pair is destroyed only when no work is outstanding, or together
//! with all outstanding work.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rdmc_fabric::{
    Buffer, Completed, Opcode, QueuePairConfig, QueuePairId, RemoteMemory, UNSIGNALED_MAX, Work, WorkError, WorkRequest,
};

use tokio::sync::watch;

use crate::completion::Completions;
use crate::device::Device;
use crate::endpoint::{RETRIES_FOR_EVER, VerbsEndpoint};
use crate::fabric::VerbsConfig;
use crate::memory::Registration;
use crate::qp::{LocalAttributes, Qp, empty_send};
use crate::status::work_error;
use crate::sys::{self, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc};

/// A queue pair and its outstanding work.
///
/// The device's queue pair is declared first, and so dropped first: the device cannot reach the remaining work after
/// that.
pub(crate) struct Connection {
    qp: Qp,
    posted: Mutex<Posted>,
    pub(crate) id: QueuePairId,
    number: u32,
    completions: Weak<Completions>,
    /// Reserved entries of the completion queue.
    entries: u32,
    broken: watch::Sender<bool>,
}

struct Posted {
    phase: Phase,
    /// Sends that the device does not have yet: the connection is not made, or more sends follow.
    held: VecDeque<WorkRequest>,
    sends: VecDeque<SentRequest>,
    receives: VecDeque<WorkRequest>,
    /// The number of the next send, which is the low half of its work request id.
    sequence: u32,
    /// Unsignaled sends since the last signaled one.
    unsignaled: u32,
    /// Why the connection broke; the error of the first send that is flushed.
    cause: Option<WorkError>,
    /// Whether a mark is posted behind the last send and was not completed yet.
    marked: bool,
    /// Whether the queue pair was dropped.
    abandoned: bool,
    /// How long sends may make no progress, beside the time for their bytes; `None` if that has no limit, or if the
    /// device has one.
    patience: Option<Duration>,
    /// The oldest send at the last [look](Connection::look_for_progress), and at how many looks before it was that.
    oldest: Option<(u32, u32)>,
}

/// A request that the device has not taken, with the error.
type RefusedRequest = (WorkRequest, WorkError);

struct SentRequest {
    /// `None` for a probe.
    request: Option<WorkRequest>,
    sequence: u32,
}

/// What a look at a connection has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing is to be done.
    Going,
    /// The sends under way bring no completion: a probe would.
    Unknown,
    /// Sends have made no progress for too long.
    Stuck,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Connected,
    Broken,
}

impl Connection {
    pub(crate) fn create(
        device: &Arc<Device>,
        completions: &Arc<Completions>,
        id: QueuePairId,
        config: QueuePairConfig,
        inline: u32,
    ) -> io::Result<Arc<Self>> {
        // Numbers of connections that ended long ago may be used again.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let qp = Qp::create(device, &completions.cq, config, inline)?;
        qp.initialise()?;
        let posted = Posted {
            phase: Phase::Connecting,
            held: VecDeque::new(),
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            sequence: 0,
            unsignaled: 0,
            cause: None,
            marked: false,
            abandoned: false,
            patience: None,
            oldest: None,
        };
        let connection = Arc::new(Self {
            qp,
            posted: Mutex::new(posted),
            id,
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            completions: Arc::downgrade(completions),
            entries: Self::entries(config),
            broken: watch::Sender::new(false),
        });
        completions.attach(&connection);
        device.watch(&connection);
        Ok(connection)
    }

    /// Returns the most completions under way at once: one for each request, one for the mark, one for a probe.
    pub(crate) fn entries(config: QueuePairConfig) -> u32 {
        config.requests_max().saturating_add(EXTRA_SENDS)
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of the connection to which a work request id belongs.
    pub(crate) fn number_in(wr_id: u64) -> u32 {
        u32::try_from(wr_id >> 32).expect("the upper half")
    }

    pub(crate) fn qp_num(&self) -> u32 {
        self.qp.number()
    }

    /// Returns the address by which the device's events name the queue pair.
    pub(crate) fn address(&self) -> usize {
        self.qp.address()
    }

    /// Makes the queue pair ready for the peer. It blocks, so it must not run on the runtime's workers.
    pub(crate) fn prepare(
        &self,
        remote: &VerbsEndpoint,
        local: &LocalAttributes,
        config: &VerbsConfig,
    ) -> io::Result<()> {
        let unlimited = config.retries == RETRIES_FOR_EVER && remote.receiver_not_ready_retries != RETRIES_FOR_EVER;
        self.lock().patience = unlimited.then(|| STUCK_AFTER.max(config.acknowledgement_timeout * TIMEOUTS));
        self.qp.connect(remote, local, config)
    }

    /// Allows sends; returns false if the connection is broken.
    pub(crate) fn connected(&self) -> bool {
        let mut posted = self.lock();
        if posted.phase == Phase::Broken {
            return false;
        }
        posted.phase = Phase::Connected;
        let outcome = self.post_held(&mut posted);
        drop(posted);
        self.settle(outcome);
        true
    }

    pub(crate) fn post(&self, request: WorkRequest) {
        let mut posted = self.lock();
        let outcome = match (posted.phase, request.work().opcode()) {
            (Phase::Broken, _) => Err(vec![(request, WorkError::Flushed)]),
            (_, Opcode::Receive) => self.post_receive(&mut posted, request).map_err(|refused| vec![refused]),
            (phase, _) => {
                let more = request.has_more_behind() && posted.held.len() + 1 < CHAIN_MAX;
                posted.held.push_back(request);
                if more || phase == Phase::Connecting { Ok(()) } else { self.post_held(&mut posted) }
            }
        };
        drop(posted);
        self.settle(outcome);
    }

    /// Posts the sends that were held back because more followed.
    pub(crate) fn flush(&self) {
        let mut posted = self.lock();
        if posted.phase == Phase::Connected {
            let outcome = self.post_held(&mut posted);
            drop(posted);
            self.settle(outcome);
        }
    }

    /// Ends requests that the device has refused, and breaks the connection.
    fn settle(&self, outcome: Result<(), Vec<RefusedRequest>>) {
        if let Err(refused) = outcome {
            self.push(refused.into_iter().map(|(request, error)| request.complete(Err(error), None)).collect());
            self.break_with(WorkError::Flushed);
        }
    }

    fn post_receive(&self, posted: &mut Posted, mut request: WorkRequest) -> Result<(), RefusedRequest> {
        let Work::Receive { into } = request.work_mut() else { unreachable!("the caller asked") };
        let sge = match self.writable_range(into) {
            Ok(sge) => sge,
            Err(error) => return Err((request, error)),
        };
        let mut list = sge;
        let mut wr = ibv_recv_wr {
            wr_id: self.wr_id(RECEIVE),
            next: std::ptr::null_mut(),
            sg_list: list.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut),
            num_sge: c_int::from(sge.is_some()),
        };
        match self.qp.post_recv(&mut wr) {
            Ok(()) => {
                posted.receives.push_back(request);
                Ok(())
            }
            Err(error) => Err((request, posting_failed(&error))),
        }
    }

    /// Posts all held sends. On failure it returns the sends that the device does not take, which may be none.
    fn post_held(&self, posted: &mut Posted) -> Result<(), Vec<RefusedRequest>> {
        while !posted.held.is_empty() {
            if let Err(error) = self.post_chain(posted) {
                // The requests behind the refused one end with the connection.
                let reasons = std::iter::once(error).chain(std::iter::repeat(WorkError::Flushed));
                return Err(posted.held.drain(..).zip(reasons).collect());
            }
        }
        Ok(())
    }

    /// Posts the oldest held sends, as many as fit, by one call of the device. Refused sends stay held.
    fn post_chain(&self, posted: &mut Posted) -> Result<(), WorkError> {
        let mut wrs = [empty_send(); CHAIN_MAX];
        let mut lists = [EMPTY_LIST; CHAIN_MAX];
        let mut unsignaled = posted.unsignaled;
        let (mut len, mut outcome) = (0, Ok(()));
        for ((request, wr), list) in posted.held.iter_mut().zip(&mut wrs).zip(&mut lists) {
            let sge = match self.send_wr(request) {
                Ok((translated, sge)) => {
                    *wr = translated;
                    sge
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            };
            if let Some(sge) = sge {
                *list = sge;
                wr.sg_list = list;
                wr.num_sge = 1;
            }
            wr.wr_id = self.wr_id(sequence_after(posted.sequence, len));
            unsignaled = if request.is_unsignaled() && unsignaled + 1 < UNSIGNALED_MAX { unsignaled + 1 } else { 0 };
            if unsignaled == 0 {
                wr.send_flags |= sys::IBV_SEND_SIGNALED.cast_unsigned();
            }
            len += 1;
        }
        if len > 0
            && let Err((taken, error)) = self.qp.post_send(&mut wrs[..len])
        {
            (len, outcome) = (taken, Err(posting_failed(&error)));
        }
        for wr in &wrs[..len] {
            let request = posted.held.pop_front().expect("it was held above");
            let sequence = posted.sequence;
            posted.sequence = sequence_after(sequence, 1);
            let signaled = wr.send_flags & sys::IBV_SEND_SIGNALED.cast_unsigned() != 0;
            posted.unsignaled = if signaled { 0 } else { posted.unsignaled + 1 };
            posted.sends.push_back(SentRequest { request: Some(request), sequence });
        }
        outcome
    }

    /// Translates a send, write or read.
    fn send_wr(&self, request: &mut WorkRequest) -> Result<(ibv_send_wr, Option<ibv_sge>), WorkError> {
        let (opcode, sge, imm, remote) = match request.work_mut() {
            Work::Send { data, imm } => {
                let opcode = if imm.is_some() { sys::IBV_WR_SEND_WITH_IMM } else { sys::IBV_WR_SEND };
                (opcode, self.readable_range(data)?, *imm, None)
            }
            Work::Write { data, to, imm } => {
                let opcode = if imm.is_some() { sys::IBV_WR_RDMA_WRITE_WITH_IMM } else { sys::IBV_WR_RDMA_WRITE };
                (opcode, self.readable_range(data)?, *imm, Some(*to))
            }
            Work::Read { into, from } => (sys::IBV_WR_RDMA_READ, self.writable_range(into)?, None, Some(*from)),
            Work::Receive { .. } => unreachable!("the caller asked"),
            _ => return Err(WorkError::Device { status: "unknown kind of work", vendor: 0 }),
        };
        let mut wr = empty_send();
        wr.opcode = opcode;
        wr.imm_data = imm.unwrap_or(0).to_be();
        if let Some(remote) = remote {
            (wr.remote_addr, wr.rkey) = reachable(remote)?;
        }
        let short = sge.as_ref().is_some_and(|sge| sge.length as usize <= self.qp.inline_max);
        if short && opcode != sys::IBV_WR_RDMA_READ {
            wr.send_flags |= sys::IBV_SEND_INLINE.cast_unsigned();
        }
        Ok((wr, sge))
    }

    fn readable_range(&self, data: &Buffer) -> Result<Option<ibv_sge>, WorkError> {
        if data.is_empty() {
            return Ok(None);
        }
        let max = self.qp.device.port.max_msg_sz;
        if data.len() as u64 > max.into() {
            return Err(WorkError::Device { status: "longer than the device's longest message", vendor: 0 });
        }
        let addr = data.as_ptr() as u64;
        if data.len() <= self.qp.inline_max {
            // Copied at posting, so no registration is needed.
            return Ok(Some(ibv_sge { addr, length: length(data.len())?, lkey: 0 }));
        }
        let lkey = self.lkey(data.registration())?;
        Ok(Some(ibv_sge { addr, length: length(data.len())?, lkey }))
    }

    fn writable_range(&self, room: &mut rdmc_fabric::BufferMut) -> Result<Option<ibv_sge>, WorkError> {
        if room.is_empty() {
            return Ok(None);
        }
        let lkey = self.lkey(room.registration())?;
        Ok(Some(ibv_sge { addr: room.as_mut_ptr() as u64, length: length(room.len())?, lkey }))
    }

    fn lkey(&self, registration: Option<&Registration>) -> Result<u32, WorkError> {
        let registration =
            registration.filter(|found| found.is_of(&self.qp.device)).ok_or(WorkError::LocalProtection)?;
        let mr = registration.mr().map_err(|error| {
            tracing::warn!(%error, "memory of a request could not be registered");
            WorkError::LocalProtection
        })?;
        Ok(mr.lkey())
    }

    /// Takes a completion of the device; passes the completed requests to `completed`.
    pub(crate) fn complete(&self, wc: &ibv_wc, mut completed: impl FnMut(Completed)) {
        let mut posted = self.lock();
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is a 32-bit number")]
        let sequence = wc.wr_id as u32;
        if sequence == MARK {
            posted.marked = false;
            for request in posted.sends.drain(..).filter_map(|sent| sent.request) {
                let len = request.work().len();
                completed(request.complete(Ok(len), None));
            }
        } else if sequence == RECEIVE {
            if let Some(request) = posted.receives.pop_front() {
                completed(finish_receive(request, wc));
            }
        } else {
            while let Some(SentRequest { request, sequence: of }) = posted.sends.pop_front() {
                let done = of == sequence;
                if let Some(request) = request {
                    let len = request.work().len();
                    let mut result = Ok(len);
                    // An unsignaled one before a completed one is done.
                    if done && wc.status != 0 {
                        let error = work_error(wc.status, wc.vendor_err, request.work().opcode(), len);
                        let cause = posted.cause.take().filter(|_| error == WorkError::Flushed);
                        result = Err(cause.unwrap_or(error));
                    }
                    completed(request.complete(result, None));
                }
                if done {
                    break;
                }
            }
        }
        let broke = wc.status != 0 && posted.phase != Phase::Broken;
        let done = posted.abandoned && posted.is_drained();
        drop(posted);
        if broke {
            self.break_with(WorkError::Flushed);
        } else if done {
            self.detach();
        }
    }

    /// Breaks the connection: all posted work is flushed, the first send with `cause`. Returns whether it was whole.
    pub(crate) fn break_with(&self, cause: WorkError) -> bool {
        let mut posted = self.lock();
        let before = std::mem::replace(&mut posted.phase, Phase::Broken);
        if before == Phase::Broken {
            return false;
        }
        posted.cause = Some(cause);
        let mut ended = Vec::new();
        if let Err(error) = self.flush_device(&mut posted, before == Phase::Connected) {
            tracing::warn!(qp = %self.id, %error, "the device does not flush a queue pair, which is destroyed instead");
            posted.end_all(self.qp.destroy(), &mut ended);
        }
        ended.extend(posted.held.drain(..).map(|request| request.complete(Err(WorkError::Flushed), None)));
        drop(posted);
        self.push(ended);
        self.broken.send_replace(true);
        true
    }

    /// Makes the device flush all posted work, including sends that were held because more followed.
    fn flush_device(&self, posted: &mut Posted, connected: bool) -> io::Result<()> {
        self.qp.modify(sys::IBV_QPS_ERR, 0, |_| {})?;
        if connected {
            // They are posted behind the others, so that all end in order. Requests that a driver refuses in this state
            // end at once.
            if let Err(refused) = self.post_held(posted) {
                posted.held.extend(refused.into_iter().map(|(request, _)| request));
            }
        }
        if posted.unsignaled > 0 && !posted.sends.is_empty() {
            // Finished unsignaled work brings no completion; the completion of a mark behind it shows that it is
            // finished.
            let mut mark = empty_send();
            mark.wr_id = self.wr_id(MARK);
            mark.opcode = sys::IBV_WR_SEND;
            mark.send_flags = sys::IBV_SEND_SIGNALED.cast_unsigned();
            self.qp.post_send(std::slice::from_mut(&mut mark)).map_err(|(_, error)| error)?;
            posted.marked = true;
        }
        Ok(())
    }

    /// Tells whether sends, writes or reads are outstanding.
    pub(crate) fn has_sends(&self) -> bool {
        !self.lock().sends.is_empty()
    }

    /// Breaks the connection if its sends have made no progress for too long. Called every [`LOOK_INTERVAL`].
    ///
    /// Some devices retransmit for ever. So this notices what the device does not: a path that no packet passes.
    pub(crate) fn look_for_progress(&self) {
        let mut posted = self.lock();
        let progress = posted.look();
        let outcome = if progress == Progress::Unknown { self.post_probe(&mut posted) } else { Ok(()) };
        drop(posted);
        if let Err(error) = outcome {
            tracing::debug!(qp = %self.id, %error, "the device refuses a probe");
        }
        if progress == Progress::Stuck && self.break_with(WorkError::ConnectionLost) {
            tracing::debug!(qp = %self.id, "the device retransmits without progress; connection closed");
        }
    }

    /// Posts a write of no bytes, whose completion completes the unsignaled sends before it. It needs no key.
    fn post_probe(&self, posted: &mut Posted) -> io::Result<()> {
        let sequence = posted.sequence;
        let mut probe = empty_send();
        probe.wr_id = self.wr_id(sequence);
        probe.opcode = sys::IBV_WR_RDMA_WRITE;
        probe.send_flags = sys::IBV_SEND_SIGNALED.cast_unsigned();
        self.qp.post_send(std::slice::from_mut(&mut probe)).map_err(|(_, error)| error)?;
        posted.sequence = sequence_after(sequence, 1);
        posted.unsignaled = 0;
        posted.sends.push_back(SentRequest { request: None, sequence });
        Ok(())
    }

    /// Waits until the connection is broken.
    pub(crate) async fn broken(&self) {
        let _ = self.broken.subscribe().wait_for(|&broken| broken).await;
    }

    /// Breaks the connection after its queue pair was dropped, and forgets it when no work is outstanding.
    pub(crate) fn abandon(&self) {
        self.break_with(WorkError::Flushed);
        let mut posted = self.lock();
        posted.abandoned = true;
        let done = posted.is_drained();
        drop(posted);
        if done {
            self.detach();
        }
    }

    fn push(&self, completed: Vec<Completed>) {
        if let Some(completions) = self.completions.upgrade() {
            completions.push(completed);
        }
    }

    fn detach(&self) {
        if let Some(completions) = self.completions.upgrade() {
            completions.detach(self.number);
        }
    }

    fn wr_id(&self, low: u32) -> u64 {
        u64::from(self.number) << 32 | u64::from(low)
    }

    fn lock(&self) -> MutexGuard<'_, Posted> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        let released = self.qp.destroy();
        self.posted.get_mut().unwrap_or_else(PoisonError::into_inner).end_all(released, &mut ended);
        drop(ended);
        if let Some(completions) = self.completions.upgrade() {
            completions.shrink(self.entries);
        }
    }
}

impl Posted {
    /// Ends all work of a destroyed queue pair. Memory that the device may not have released is never used again.
    fn end_all(&mut self, released: bool, ended: &mut Vec<Completed>) {
        let requests = self.sends.drain(..).filter_map(|sent| sent.request).chain(self.receives.drain(..));
        for mut request in requests {
            if !released {
                let nothing = Work::Send { data: Buffer::empty(), imm: None };
                std::mem::forget(std::mem::replace(request.work_mut(), nothing));
            }
            let error = self.cause.take().unwrap_or(WorkError::Flushed);
            ended.push(request.complete(Err(error), None));
        }
        self.marked = false;
    }

    /// Looks whether sends make progress.
    ///
    /// Looks are counted, not time, so that a pause of the whole process does not look like a lost path.
    fn look(&mut self) -> Progress {
        let (Phase::Connected, Some(patience), Some(oldest)) = (self.phase, self.patience, self.sends.front()) else {
            self.oldest = None;
            return Progress::Going;
        };
        let looks = match self.oldest {
            Some((sequence, looks)) if sequence == oldest.sequence => looks.saturating_add(1),
            _ => 0,
        };
        self.oldest = Some((oldest.sequence, looks));
        let waited = LOOK_INTERVAL.saturating_mul(looks);
        // Unsignaled sends behind the last signaled one bring no completion.
        let completing = self.sends.len().saturating_sub(self.unsignaled as usize);
        if completing == 0 {
            return if waited >= PROBED_AFTER { Progress::Unknown } else { Progress::Going };
        }
        // The next completion is at most that of the last of these.
        let next = self.sends.iter().take(completing.min(UNSIGNALED_MAX as usize));
        let bytes: usize = next.map(|sent| sent.request.as_ref().map_or(0, |request| request.work().len())).sum();
        let limit = patience.saturating_add(TIME_OF_BYTE_MAX.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX)));
        if waited > limit { Progress::Stuck } else { Progress::Going }
    }

    fn is_drained(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty() && !self.marked
    }
}

fn finish_receive(request: WorkRequest, wc: &ibv_wc) -> Completed {
    if wc.status != 0 {
        let room = request.work().len();
        return request.complete(Err(work_error(wc.status, wc.vendor_err, Opcode::Receive, room)), None);
    }
    let imm = (wc.wc_flags & sys::IBV_WC_WITH_IMM.cast_unsigned() != 0).then(|| u32::from_be(wc.imm_data));
    // For a write, the length is that of the bytes written elsewhere.
    let len = if wc.opcode == sys::IBV_WC_RECV_RDMA_WITH_IMM { 0 } else { wc.byte_len as usize };
    request.complete(Ok(len), imm)
}

/// Translates the address of the peer's memory. It refuses impossible addresses, which some devices do not check.
fn reachable(remote: RemoteMemory) -> Result<(u64, u32), WorkError> {
    let key = u32::try_from(remote.key).map_err(|_| WorkError::RemoteAccess)?;
    remote.address.checked_add(remote.len).ok_or(WorkError::RemoteAccess)?;
    Ok((remote.address, key))
}

fn length(len: usize) -> Result<u32, WorkError> {
    u32::try_from(len).map_err(|_| WorkError::Device { status: "the message is longer than 4 GiB", vendor: 0 })
}

fn posting_failed(error: &io::Error) -> WorkError {
    let vendor = error.raw_os_error().unwrap_or(0).cast_unsigned();
    WorkError::Device { status: "posting failed", vendor }
}

/// Returns the number of the send that is `more` sends behind the send `sequence`.
fn sequence_after(sequence: u32, more: usize) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the numbers wrap around")]
    let sequence = sequence.wrapping_add(more as u32);
    sequence & !(RECEIVE | MARK)
}

/// Sends besides those of the user that a queue pair has room for: the mark and a probe.
pub(crate) const EXTRA_SENDS: u32 = 2;
/// How often connections are looked at.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long unsignaled sends may be the last ones before a probe is posted behind them.
const PROBED_AFTER: Duration = Duration::from_secs(5);
/// How long sends may make no progress, beside the time for their bytes. The sixteen sends up to a completion may each
/// wait a second for a receive.
const STUCK_AFTER: Duration = Duration::from_secs(30);
/// If the acknowledgement timeout is long, so many of them instead.
const TIMEOUTS: u32 = 64;
/// The time of a byte at the slowest rate that counts as progress, 250 kB per second.
const TIME_OF_BYTE_MAX: Duration = Duration::from_micros(4);

const EMPTY_LIST: ibv_sge = ibv_sge { addr: 0, length: 0, lkey: 0 };

/// In the low half of a work request id: a receive. Receives are identified by their order only.
const RECEIVE: u32 = 1 << 31;
/// In the low half of a work request id: the mark behind the last send.
const MARK: u32 = 1 << 30;
/// Most requests posted with one doorbell.
const CHAIN_MAX: usize = UNSIGNALED_MAX as usize;

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection of which so many sends are under way, the last of them unsignaled.
    fn posted(sends: u32, unsignaled: u32) -> Posted {
        let sends = (0..sends).map(|sequence| SentRequest { request: None, sequence }).collect();
        Posted {
            phase: Phase::Connected,
            held: VecDeque::new(),
            sends,
            receives: VecDeque::new(),
            sequence: 0,
            unsignaled,
            cause: None,
            marked: false,
            abandoned: false,
            patience: Some(STUCK_AFTER),
            oldest: None,
        }
    }

    fn looks(posted: &mut Posted, count: u64) -> Progress {
        (0..count).map(|_| posted.look()).last().expect("at least one")
    }

    #[test]
    fn sends_that_stay_the_oldest_for_long_are_stuck() {
        let seconds = STUCK_AFTER.as_secs();
        let mut stuck = posted(2, 0);
        assert_eq!(looks(&mut stuck, seconds + 1), Progress::Going);
        assert_eq!(stuck.look(), Progress::Stuck);
        let mut going = posted(100, 0);
        for _ in 0..90 {
            assert_eq!(looks(&mut going, seconds), Progress::Going);
            going.sends.pop_front();
        }
    }

    #[test]
    fn nothing_is_stuck_that_is_idle_broken_or_may_take_for_ever() {
        assert_eq!(looks(&mut posted(0, 0), 1000), Progress::Going);
        assert_eq!(looks(&mut Posted { phase: Phase::Broken, ..posted(1, 0) }, 1000), Progress::Going);
        assert_eq!(looks(&mut Posted { patience: None, ..posted(1, 0) }, 1000), Progress::Going);
    }

    #[test]
    fn sends_that_bring_no_completion_are_probed() {
        let mut last = posted(3, 3);
        assert_eq!(looks(&mut last, PROBED_AFTER.as_secs()), Progress::Going);
        assert_eq!(last.look(), Progress::Unknown);
        last.sends.push_back(SentRequest { request: None, sequence: 3 });
        last.unsignaled = 0;
        assert_eq!(last.look(), Progress::Going);
        assert_eq!(looks(&mut last, STUCK_AFTER.as_secs()), Progress::Stuck);
    }
}
