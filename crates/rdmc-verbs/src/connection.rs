//! A queue pair of the device and the work posted to it.
//!
//! Requests stay here, with their memory, from posting to completion. A reliable connection completes sends and receives
//! in the order of posting, so each side is a queue, and a completion of a signaled request also completes the unsignaled
//! ones before it. Broken means: the device's queue pair is in its error state, in which the device flushes everything
//! posted. It is destroyed only when nothing is outstanding, or with everything that is.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rdmc_fabric::{
    Buffer, Completed, Opcode, QueuePairConfig, QueuePairId, RemoteMemory, UNSIGNALED_MAX, Work, WorkError, WorkRequest,
};

use tokio::sync::watch;

use crate::completion::{Completions, Cq};
use crate::device::{Device, check};
use crate::endpoint::Remote;
use crate::fabric::VerbsConfig;
use crate::memory::Registration;
use crate::status::work_error;
use crate::sys::{self, ibv_qp, ibv_qp_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc};

/// A queue pair of the device; dropping it destroys it.
struct Qp {
    device: Arc<Device>,
    /// Keeps the completion queue alive.
    _cq: Arc<Cq>,
    qp: NonNull<ibv_qp>,
    inline_max: usize,
}

// SAFETY: queue pairs of libibverbs may be used from any thread, at the same time.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    fn create(device: &Arc<Device>, cq: &Arc<Cq>, config: QueuePairConfig, inline: u32) -> io::Result<Self> {
        let mut wanted = sys::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                // One more, for the mark behind the last.
                max_send_wr: config.send_depth.saturating_add(1),
                max_recv_wr: config.receive_depth.max(1),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let mut create = || {
            // SAFETY: protection domain and completion queue live; the struct has the library's layout.
            NonNull::new(unsafe { (device.library.ibv_create_qp)(device.pd.as_ptr(), &mut wanted) })
                .ok_or_else(io::Error::last_os_error)
        };
        let (qp, inline_max) = match create() {
            Ok(qp) => (qp, wanted.cap.max_inline_data.min(inline)),
            Err(error) if inline == 0 => return Err(error),
            // Some devices send nothing inline.
            Err(_) => return Self::create(device, cq, config, 0),
        };
        let inline_max = inline_max as usize;
        Ok(Self { device: device.clone(), _cq: cq.clone(), qp, inline_max })
    }

    fn number(&self) -> u32 {
        // SAFETY: the object is initialised and lives until `self` is dropped.
        unsafe { self.qp.as_ref() }.qp_num
    }

    fn modify(&self, state: c_int, mask: c_int, set: impl FnOnce(&mut ibv_qp_attr)) -> io::Result<()> {
        // SAFETY: all fields are numbers, for which zero is a value.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = state;
        set(&mut attributes);
        let mask = mask | sys::IBV_QP_STATE;
        // SAFETY: the queue pair lives, the struct has the library's layout.
        check(unsafe { (self.device.library.ibv_modify_qp)(self.qp.as_ptr(), &mut attributes, mask) })
    }

    /// Lets receives be posted.
    fn initialise(&self) -> io::Result<()> {
        let mask = sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        self.modify(sys::IBV_QPS_INIT, mask, |attributes| {
            attributes.port_num = self.device.choice.port;
            let access = sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_WRITE;
            attributes.qp_access_flags = access.cast_unsigned();
        })
    }

    /// Makes it ready to receive from `remote` and to send to it. Blocks while the network finds the way.
    fn connect(&self, remote: &Remote, own: &Own, config: &VerbsConfig) -> io::Result<()> {
        let choice = &self.device.choice;
        let mask = sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.modify(sys::IBV_QPS_RTR, mask, |attributes| {
            // The smaller of both: a longer packet would be lost without a word.
            attributes.path_mtu = c_int::from(remote.mtu.min(own.mtu));
            attributes.dest_qp_num = remote.qp_num;
            attributes.rq_psn = remote.psn;
            attributes.max_dest_rd_atomic = own.reads_max;
            attributes.min_rnr_timer = own.receiver_not_ready_timer;
            let way = &mut attributes.ah_attr;
            way.port_num = choice.port;
            way.sl = config.service_level;
            // InfiniBand without a local identifier, and Ethernet always, is reached by the global one.
            way.is_global = u8::from(choice.ethernet || remote.lid == 0);
            way.dlid = remote.lid;
            way.grh.dgid = [&remote.gid[..8], &remote.gid[8..]]
                .map(|half| u64::from_ne_bytes(half.try_into().expect("half of sixteen bytes")));
            way.grh.sgid_index = choice.gid.index;
            way.grh.hop_limit = HOPS_MAX;
            way.grh.traffic_class = config.traffic_class;
        })?;
        let mask = sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(sys::IBV_QPS_RTS, mask, |attributes| {
            attributes.sq_psn = own.psn;
            attributes.timeout = crate::endpoint::timeout_code(config.acknowledgement_timeout);
            attributes.retry_cnt = config.retries;
            attributes.rnr_retry = remote.receiver_not_ready_retries;
            attributes.max_rd_atomic = remote.reads_max.min(own.reads_max);
        })
    }

    fn post_send(&self, wr: &mut ibv_send_wr) -> io::Result<()> {
        let post = self.device.ops.post_send.expect("every driver sends");
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives; request and list live during the call, which copies them; the memory they name
        // is registered and owned by the request that the caller keeps until its completion, or copied if inline.
        check(unsafe { post(self.qp.as_ptr(), wr, &mut bad) })
    }

    fn post_recv(&self, wr: &mut ibv_recv_wr) -> io::Result<()> {
        let post = self.device.ops.post_recv.expect("every driver receives");
        let mut bad = std::ptr::null_mut();
        // SAFETY: as for sends.
        check(unsafe { post(self.qp.as_ptr(), wr, &mut bad) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.device.unwatch(self.qp.as_ptr() as usize);
        // SAFETY: made by this library, destroyed once; afterwards the device touches no memory of its requests.
        let code = unsafe { (self.device.library.ibv_destroy_qp)(self.qp.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "a queue pair could not be destroyed");
        }
    }
}

/// What this end tells the other, and asks of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    pub(crate) psn: u32,
    pub(crate) mtu: u8,
    pub(crate) reads_max: u8,
    pub(crate) receiver_not_ready_timer: u8,
    pub(crate) receiver_not_ready_retries: u8,
}

/// A queue pair and its outstanding work.
///
/// The device's queue pair is declared, and so dropped, first: what is then left of the work is out of its reach.
pub(crate) struct Connection {
    qp: Qp,
    posted: Mutex<Posted>,
    pub(crate) id: QueuePairId,
    number: u32,
    completions: Weak<Completions>,
    /// Entries of the completion queue set aside.
    entries: u32,
    broken: watch::Sender<bool>,
}

struct Posted {
    phase: Phase,
    /// Sends posted before the connection was made.
    held: VecDeque<WorkRequest>,
    sends: VecDeque<Sent>,
    receives: VecDeque<WorkRequest>,
    /// Numbers the sends; the low half of their work request ids.
    sequence: u32,
    /// Unsignaled sends since the last signaled one.
    unsignaled: u32,
    /// Why the connection broke, for the first send that is flushed.
    cause: Option<WorkError>,
    /// A mark is posted behind the last send and was not completed yet.
    marked: bool,
    /// Nobody holds the queue pair any more.
    abandoned: bool,
}

struct Sent {
    request: WorkRequest,
    sequence: u32,
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
        // Numbers of connections that are gone for long may come again.
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

    /// Returns how many completions may be under way at once: one for each request, one for the mark.
    pub(crate) fn entries(config: QueuePairConfig) -> u32 {
        config.send_depth.saturating_add(config.receive_depth).saturating_add(1)
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of the connection that a work request id belongs to.
    pub(crate) fn number_in(wr_id: u64) -> u32 {
        u32::try_from(wr_id >> 32).expect("the upper half")
    }

    pub(crate) fn qp_num(&self) -> u32 {
        self.qp.number()
    }

    /// Returns the address by which the device's events name the queue pair.
    pub(crate) fn address(&self) -> usize {
        self.qp.qp.as_ptr() as usize
    }

    /// Makes the queue pair ready for the peer. Blocks; to be called off the runtime's workers.
    pub(crate) fn prepare(&self, remote: &Remote, own: &Own, config: &VerbsConfig) -> io::Result<()> {
        self.qp.connect(remote, own, config)
    }

    /// Lets sends out; false if the connection is broken.
    pub(crate) fn connected(&self) -> bool {
        let mut posted = self.lock();
        if posted.phase == Phase::Broken {
            return false;
        }
        posted.phase = Phase::Connected;
        let held = std::mem::take(&mut posted.held);
        let refused: Vec<_> =
            held.into_iter().filter_map(|request| self.post_send(&mut posted, request).err()).collect();
        drop(posted);
        self.refuse(refused);
        true
    }

    pub(crate) fn post(&self, request: WorkRequest) {
        let mut posted = self.lock();
        let refused = match (posted.phase, request.work().opcode()) {
            (Phase::Broken, _) => Err((request, WorkError::Flushed)),
            (_, Opcode::Receive) => self.post_receive(&mut posted, request),
            (Phase::Connecting, _) => {
                posted.held.push_back(request);
                Ok(())
            }
            (Phase::Connected, _) => self.post_send(&mut posted, request),
        };
        drop(posted);
        if let Err(refused) = refused {
            self.refuse([refused]);
        }
    }

    /// Ends requests that the device never saw, and the connection with them unless it was broken before.
    fn refuse(&self, refused: impl IntoIterator<Item = (WorkRequest, WorkError)>) {
        let mut any = false;
        let ended: Vec<_> = refused
            .into_iter()
            .map(|(request, error)| {
                any |= error != WorkError::Flushed;
                request.complete(Err(error), None)
            })
            .collect();
        self.push(ended);
        if any {
            self.break_with(WorkError::Flushed);
        }
    }

    fn post_receive(&self, posted: &mut Posted, mut request: WorkRequest) -> Result<(), (WorkRequest, WorkError)> {
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

    fn post_send(&self, posted: &mut Posted, mut request: WorkRequest) -> Result<(), (WorkRequest, WorkError)> {
        let unsignaled = request.is_unsignaled() && posted.unsignaled + 1 < UNSIGNALED_MAX;
        let (mut wr, mut list) = match self.send_wr(&mut request) {
            Ok(both) => both,
            Err(error) => return Err((request, error)),
        };
        if let Some(sge) = &mut list {
            wr.sg_list = sge;
            wr.num_sge = 1;
        }
        let sequence = posted.sequence & !(RECEIVE | MARK);
        wr.wr_id = self.wr_id(sequence);
        if !unsignaled {
            wr.send_flags |= sys::IBV_SEND_SIGNALED.cast_unsigned();
        }
        match self.qp.post_send(&mut wr) {
            Ok(()) => {
                posted.sequence = posted.sequence.wrapping_add(1);
                posted.unsignaled = if unsignaled { posted.unsignaled + 1 } else { 0 };
                posted.sends.push_back(Sent { request, sequence });
                Ok(())
            }
            Err(error) => Err((request, posting_failed(&error))),
        }
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
        let addr = data.as_ptr() as u64;
        if data.len() <= self.qp.inline_max {
            // Copied at posting: no registration is needed.
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

    /// Takes a completion of the device; hands on what it completes.
    pub(crate) fn complete(&self, wc: &ibv_wc, mut completed: impl FnMut(Completed)) {
        let mut posted = self.lock();
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is what was put there")]
        let sequence = wc.wr_id as u32;
        if sequence == MARK {
            posted.marked = false;
            for sent in posted.sends.drain(..) {
                let len = sent.request.work().len();
                completed(sent.request.complete(Ok(len), None));
            }
        } else if sequence == RECEIVE {
            if let Some(request) = posted.receives.pop_front() {
                completed(finish_receive(request, wc));
            }
        } else {
            while let Some(sent) = posted.sends.pop_front() {
                let len = sent.request.work().len();
                if sent.sequence != sequence {
                    // Unsignaled and before a completed one: it was done.
                    completed(sent.request.complete(Ok(len), None));
                    continue;
                }
                let mut result = Ok(len);
                if wc.status != 0 {
                    let error = work_error(wc.status, wc.vendor_err, sent.request.work().opcode(), len);
                    let cause = posted.cause.take().filter(|_| error == WorkError::Flushed);
                    result = Err(cause.unwrap_or(error));
                }
                completed(sent.request.complete(result, None));
                break;
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

    /// Breaks the connection: everything posted is flushed, the first send with `cause`. Tells whether it was whole.
    pub(crate) fn break_with(&self, cause: WorkError) -> bool {
        let mut posted = self.lock();
        if posted.phase == Phase::Broken {
            return false;
        }
        posted.phase = Phase::Broken;
        posted.cause = Some(cause);
        if let Err(error) = self.qp.modify(sys::IBV_QPS_ERR, 0, |_| {}) {
            tracing::error!(qp = %self.id, %error, "the device does not break a queue pair");
        }
        if posted.unsignaled > 0 && !posted.sends.is_empty() {
            // Unsignaled work that was done brings no completion; that of a mark behind it tells of it.
            let mut mark = empty_send();
            mark.wr_id = self.wr_id(MARK);
            mark.opcode = sys::IBV_WR_SEND;
            mark.send_flags = sys::IBV_SEND_SIGNALED.cast_unsigned();
            match self.qp.post_send(&mut mark) {
                Ok(()) => posted.marked = true,
                Err(error) => tracing::error!(qp = %self.id, %error, "a broken queue pair does not flush"),
            }
        }
        let flushed: Vec<_> =
            posted.held.drain(..).map(|request| request.complete(Err(WorkError::Flushed), None)).collect();
        drop(posted);
        self.push(flushed);
        self.broken.send_replace(true);
        true
    }

    /// Tells whether sends, writes or reads are outstanding.
    pub(crate) fn has_sends(&self) -> bool {
        !self.lock().sends.is_empty()
    }

    /// Waits until the connection is broken.
    pub(crate) async fn broken(&self) {
        let _ = self.broken.subscribe().wait_for(|&broken| broken).await;
    }

    /// Breaks the connection, which nobody holds any more, and lets it go when nothing is outstanding.
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
        if let Some(completions) = self.completions.upgrade() {
            completions.shrink(self.entries);
        }
    }
}

impl Posted {
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
    // Of a write the length tells how much was written elsewhere.
    let len = if wc.opcode == sys::IBV_WC_RECV_RDMA_WITH_IMM { 0 } else { wc.byte_len as usize };
    request.complete(Ok(len), imm)
}

/// Translates where the peer's memory is; refuses what no memory can be, which devices do not all check.
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

fn empty_send() -> ibv_send_wr {
    // SAFETY: all fields are numbers or raw pointers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// In the low half of a work request id: a receive. They are told apart by their order alone.
const RECEIVE: u32 = 1 << 31;
/// In the low half of a work request id: the mark behind the last send.
const MARK: u32 = 1 << 30;
/// Routers on the way.
const HOPS_MAX: u8 = 64;
