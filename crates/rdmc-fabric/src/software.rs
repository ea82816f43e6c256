//! Parts of the software fabrics: posted work in queues, exposed memory behind keys.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use futures::future::Either;
use tokio::sync::Notify;

use crate::completion::{CompletionSource, SoftwareCompletions};
use crate::environment::{Environment, Timestamp};
use crate::fabric::{ConnectError, FabricError};
use crate::memory::{Buffer, BufferMut};
use crate::queue_pair::UNSIGNALED_MAX;
use crate::remote::{Expose, ExposedMemory, ExposedRegion, RemoteAccess, RemoteMemory};
use crate::work::{Inspector, Nearing, QueuePairId, Work, WorkError, WorkRequest};

/// Lets the thread's other tasks run after a certain amount of work.
///
/// Several short requests fit into one turn, so that the task that waits for their completions is woken once for all of
/// them.
#[derive(Debug, Default)]
pub(crate) struct YieldBudget {
    /// Bytes moved since the last turn ended.
    moved: usize,
}

impl YieldBudget {
    /// Counts a request, or a part of one.
    pub(crate) async fn spend(&mut self, bytes: usize) {
        self.moved = self.moved.saturating_add(bytes.max(TURN_BYTES / TURN_REQUESTS));
        if self.moved >= TURN_BYTES {
            self.moved = 0;
            tokio::task::yield_now().await;
        }
    }
}

/// Most bytes moved in one turn, and most requests.
const TURN_BYTES: usize = 64 << 10;
const TURN_REQUESTS: usize = 16;

/// Chooses the requests that the peer reports as soon as it has carried them out. It reports the others with the next
/// of these.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    /// Requests in a row that are not chosen.
    unreported: u32,
}

impl Reports {
    /// Tells whether the peer is to report the next request at once.
    pub(crate) fn wants(&mut self, request: &WorkRequest) -> bool {
        // A run of sends may have a bound, and its sender wait at it.
        let waits = request.is_unsignaled() && !request.has_more_behind();
        let may_wait = waits && self.unreported + 1 < UNSIGNALED_MAX;
        self.unreported = if may_wait { self.unreported + 1 } else { 0 };
        !may_wait
    }
}

/// The work posted to one queue pair, until the fabric's tasks take it.
///
/// Once broken, it stays broken: it flushes all its requests and every later one.
pub(crate) struct PostedWork {
    pub(crate) id: QueuePairId,
    completions: Arc<SoftwareCompletions>,
    reserved: u32,
    state: Mutex<PostedState>,
    sends_posted: Notify,
    receive_posted: Notify,
}

#[derive(Default)]
struct PostedState {
    broken: bool,
    sends: VecDeque<WorkRequest>,
    /// Requests that were sent and not yet acknowledged, in order.
    unacknowledged: VecDeque<WorkRequest>,
    receives: VecDeque<WorkRequest>,
}

impl PostedWork {
    pub(crate) fn new(
        id: QueuePairId,
        completions: &Arc<dyn CompletionSource>,
        reserved: u32,
    ) -> Result<Self, FabricError> {
        let any: Arc<dyn Any + Send + Sync> = completions.clone();
        let completions: Arc<SoftwareCompletions> = any.downcast().map_err(|_| FabricError::ForeignCompletionQueue)?;
        completions.reserve(reserved)?;
        Ok(Self {
            id,
            completions,
            reserved,
            state: Mutex::default(),
            sends_posted: Notify::new(),
            receive_posted: Notify::new(),
        })
    }

    pub(crate) fn post(&self, request: WorkRequest) {
        let receive = matches!(request.work(), Work::Receive { .. });
        {
            let mut state = self.lock();
            if state.broken {
                drop(state);
                return self.finish(request, Err(WorkError::Flushed));
            }
            let queue = if receive { &mut state.receives } else { &mut state.sends };
            queue.push_back(request);
        }
        if receive { self.receive_posted.notify_one() } else { self.sends_posted.notify_one() }
    }

    /// Takes the next send, write or read, if one is posted.
    pub(crate) fn try_take_send(&self) -> Option<WorkRequest> {
        self.lock().sends.pop_front()
    }

    /// Tells whether a send, write or read waits to be taken.
    pub(crate) fn has_sends(&self) -> bool {
        !self.lock().sends.is_empty()
    }

    /// Waits until a send, write or read may have been posted, or the queue pair broke. Only one task may wait at a
    /// time.
    pub(crate) async fn sends_changed(&self) {
        self.sends_posted.notified().await;
    }

    /// Wakes the task that waits in [`sends_changed`](Self::sends_changed), because it has other work.
    pub(crate) fn wake_sender(&self) {
        self.sends_posted.notify_one();
    }

    /// Takes the oldest posted receive; waits for one for at most `limit`.
    pub(crate) async fn take_receive(
        &self,
        environment: &dyn Environment,
        limit: Duration,
    ) -> Result<TakenRequest<'_>, WorkError> {
        let mut deadline: Option<Timestamp> = None;
        let mut late = false;
        loop {
            {
                let mut state = self.lock();
                if state.broken {
                    return Err(WorkError::Flushed);
                }
                if let Some(receive) = state.receives.pop_front() {
                    return Ok(self.guard(receive));
                }
            }
            if late {
                return Err(WorkError::ReceiverNotReady);
            }
            let at = *deadline.get_or_insert_with(|| environment.now() + limit);
            let posted = std::pin::pin!(self.receive_posted.notified());
            let expired = environment.sleep_until(at);
            // The receive may arrive with the deadline, so there is always a last look.
            late = matches!(futures::future::select(posted, expired).await, Either::Right(_));
        }
    }

    /// Takes the oldest posted receive, if there is one; the caller must finish it.
    ///
    /// # Errors
    /// [`WorkError::Flushed`] if the queue pair is broken.
    pub(crate) fn try_take_receive(&self) -> Result<Option<WorkRequest>, WorkError> {
        let mut state = self.lock();
        if state.broken { Err(WorkError::Flushed) } else { Ok(state.receives.pop_front()) }
    }

    /// Keeps a request until the peer acknowledges it; flushes it if the queue pair has broken meanwhile.
    pub(crate) fn await_acknowledgement(&self, request: WorkRequest) {
        let mut state = self.lock();
        if state.broken {
            drop(state);
            return self.finish(request, Err(WorkError::Flushed));
        }
        state.unacknowledged.push_back(request);
    }

    /// Takes the oldest request that waits for an acknowledgement.
    pub(crate) fn acknowledged(&self) -> Option<TakenRequest<'_>> {
        let request = self.lock().unacknowledged.pop_front()?;
        Some(self.guard(request))
    }

    /// Marks the oldest request that waits for an acknowledgement as nearly done; returns false if there is none.
    pub(crate) fn nearly_acknowledged(&self) -> bool {
        let state = self.lock();
        let nearing = state.unacknowledged.front().map(WorkRequest::nearing);
        drop(state);
        nearing.map(Nearing::mark).is_some()
    }

    /// Ends a request that has no immediate.
    pub(crate) fn finish(&self, request: WorkRequest, result: Result<usize, WorkError>) {
        self.finish_with_imm(request, result, None);
    }

    /// Ends a receive; no task needs to see it before [`announce`](Self::announce) is called.
    #[cfg(target_os = "linux")]
    pub(crate) fn finish_unannounced(&self, request: WorkRequest, result: Result<usize, WorkError>, imm: Option<u32>) {
        self.completions.push_unannounced(request.complete(result, imm));
    }

    /// Wakes the task that takes completions.
    #[cfg(target_os = "linux")]
    pub(crate) fn announce(&self) {
        self.completions.announce();
    }

    /// Ends a request.
    pub(crate) fn finish_with_imm(&self, request: WorkRequest, result: Result<usize, WorkError>, imm: Option<u32>) {
        self.completions.push(request.complete(result, imm));
    }

    /// Breaks the queue pair: the oldest outstanding send gets `cause`, all else is flushed. Returns whether it was
    /// whole before.
    pub(crate) fn break_with(&self, cause: WorkError) -> bool {
        let (unacknowledged, sends, receives) = {
            let mut state = self.lock();
            if state.broken {
                return false;
            }
            state.broken = true;
            let state = &mut *state;
            (
                std::mem::take(&mut state.unacknowledged),
                std::mem::take(&mut state.sends),
                std::mem::take(&mut state.receives),
            )
        };
        let mut error = cause;
        for request in unacknowledged.into_iter().chain(sends) {
            self.finish(request, Err(error));
            error = WorkError::Flushed;
        }
        for request in receives {
            self.finish(request, Err(WorkError::Flushed));
        }
        self.sends_posted.notify_one();
        self.receive_posted.notify_one();
        true
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.lock().broken
    }

    /// Wraps a request so that it is flushed unless it is finished.
    pub(crate) fn guard(&self, request: WorkRequest) -> TakenRequest<'_> {
        TakenRequest { posted: self, request: Some(request) }
    }

    fn lock(&self) -> MutexGuard<'_, PostedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PostedWork {
    fn drop(&mut self) {
        self.completions.release(self.reserved);
    }
}

/// A request that a task has taken out to carry out.
///
/// If the task ends early, the request is flushed, so that its completion is not missing from the queue.
pub(crate) struct TakenRequest<'a> {
    posted: &'a PostedWork,
    request: Option<WorkRequest>,
}

impl TakenRequest<'_> {
    pub(crate) fn work_mut(&mut self) -> &mut Work {
        self.request.as_mut().expect("only finishing takes the request out").work_mut()
    }

    /// Returns the inspector of a receive, if it has one.
    pub(crate) fn inspector(&self) -> Option<Arc<dyn Inspector>> {
        self.request.as_ref().expect("only finishing takes the request out").inspector().cloned()
    }

    /// Returns how many bytes may be still to come when a receive is nearly done; `None` if it does not say.
    pub(crate) fn near_bytes(&self) -> Option<u32> {
        self.request.as_ref().expect("only finishing takes the request out").near_bytes()
    }

    pub(crate) fn nearly_done(&self) {
        self.request.as_ref().expect("only finishing takes the request out").nearly_done();
    }

    pub(crate) fn finish(mut self, result: Result<usize, WorkError>, imm: Option<u32>) {
        let request = self.request.take().expect("only finishing takes the request out");
        self.posted.finish_with_imm(request, result, imm);
    }
}

impl Drop for TakenRequest<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.posted.finish(request, Err(WorkError::Flushed));
        }
    }
}

/// The peer of a queue pair, if both ends live in one process.
pub struct Pairing<Q> {
    /// The queue pair this end connected to.
    peer: OnceLock<Weak<Q>>,
    /// The queue pair that connected to this end: the same one, once both have connected.
    caller: OnceLock<Weak<Q>>,
}

impl<Q> Default for Pairing<Q> {
    fn default() -> Self {
        Self { peer: OnceLock::new(), caller: OnceLock::new() }
    }
}

impl<Q> fmt::Debug for Pairing<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pairing").field("joined", &self.is_joined()).finish_non_exhaustive()
    }
}

impl<Q> Pairing<Q> {
    /// Connects `this` end, whose pairing it is, to `found`. A queue pair has one peer, and refuses any other queue
    /// pair.
    ///
    /// # Errors
    /// [`ConnectError::WrongState`] if this end is connected, [`ConnectError::BadNonce`] if `found` has or expects
    /// another peer.
    pub fn join(&self, this: &Weak<Q>, found: &Arc<Q>, of_found: &Self) -> Result<(), ConnectError> {
        if self.is_joined() {
            return Err(ConnectError::WrongState);
        }
        let caller = of_found.caller.get_or_init(|| this.clone());
        let expects_another = of_found.peer.get().is_some_and(|peer| !peer.ptr_eq(this));
        if !caller.ptr_eq(this) || expects_another {
            return Err(ConnectError::BadNonce);
        }
        self.peer.set(Arc::downgrade(found)).map_err(|_| ConnectError::WrongState)
    }

    /// Tells whether this end has connected. The peer may be gone by now.
    pub fn is_joined(&self) -> bool {
        self.peer.get().is_some()
    }

    /// Returns the queue pair this end connected to, if it is there.
    pub fn peer(&self) -> Option<Arc<Q>> {
        self.peer.get()?.upgrade()
    }

    /// Returns the queue pairs that must learn of this end's state: its peer, and the one that connected to it.
    pub fn others(&self) -> Vec<Arc<Q>> {
        let others = [self.peer.get(), self.caller.get()];
        let mut others: Vec<_> = others.into_iter().flatten().filter_map(Weak::upgrade).collect();
        others.dedup_by(|a, b| Arc::ptr_eq(a, b));
        others
    }
}

/// The exposed memory of one node, by key: a software fabric's counterpart of a device's tables.
#[derive(Default)]
pub struct Exposures {
    by_key: Mutex<HashMap<u64, Arc<Exposed>>>,
}

/// One exposed region. The lock stands for the device's arbitration between local and remote access.
enum Exposed {
    Mutable { memory: RwLock<BufferMut>, access: RemoteAccess },
    Frozen(Buffer),
}

impl Exposed {
    fn len(&self) -> usize {
        match self {
            Self::Mutable { memory, .. } => memory.read().unwrap_or_else(PoisonError::into_inner).len(),
            Self::Frozen(buffer) => buffer.len(),
        }
    }

    /// Runs `read` on a checked range of bytes.
    fn with_bytes<T>(&self, offset: usize, len: usize, read: impl FnOnce(&[u8]) -> T) -> T {
        match self {
            Self::Mutable { memory, .. } => {
                read(&memory.read().unwrap_or_else(PoisonError::into_inner)[offset..offset + len])
            }
            Self::Frozen(buffer) => read(&buffer[offset..offset + len]),
        }
    }

    /// Runs `write` on a checked range of bytes; returns `None` if the region is frozen.
    fn with_bytes_mut<T>(&self, offset: usize, len: usize, write: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        match self {
            Self::Mutable { memory, .. } => {
                Some(write(&mut memory.write().unwrap_or_else(PoisonError::into_inner)[offset..offset + len]))
            }
            Self::Frozen(_) => None,
        }
    }
}

/// A range of exposed memory to which a peer has shown the key.
pub struct ExposureGrant {
    exposed: Arc<Exposed>,
    offset: usize,
    len: usize,
}

impl ExposureGrant {
    /// Returns the length of the range in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Runs `read` on `len` bytes from `at` of the range, without any other access at the same time.
    ///
    /// # Panics
    /// If they lie outside the range.
    pub fn with_bytes<T>(&self, at: usize, len: usize, read: impl FnOnce(&[u8]) -> T) -> T {
        self.check(at, len);
        self.exposed.with_bytes(self.offset + at, len, read)
    }

    /// Runs `write` on `len` bytes from `at` of the range, without any other access at the same time. Returns `None` if
    /// the range is frozen.
    ///
    /// # Panics
    /// If they lie outside the range.
    pub fn with_bytes_mut<T>(&self, at: usize, len: usize, write: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        self.check(at, len);
        self.exposed.with_bytes_mut(self.offset + at, len, write)
    }

    fn check(&self, at: usize, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "bytes outside the range that was granted");
    }
}

impl fmt::Debug for ExposureGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExposureGrant").field("len", &self.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for Exposures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exposures").field("count", &self.lock().len()).finish()
    }
}

impl Exposures {
    /// Exposes memory under a random key, until the region is dropped.
    pub fn expose(self: &Arc<Self>, environment: &dyn Environment, memory: Expose) -> ExposedRegion {
        let exposed = Arc::new(match memory {
            Expose::Mutable(memory, access) => Exposed::Mutable { memory: RwLock::new(memory), access },
            Expose::Frozen(buffer) => Exposed::Frozen(buffer),
        });
        let len = exposed.len() as u64;
        let key = environment.random_u64();
        self.lock().insert(key, exposed.clone());
        let remote = RemoteMemory { key, address: 0, len };
        ExposedRegion::new(Box::new(SoftwareExposed { exposures: Arc::downgrade(self), exposed, remote }))
    }

    /// Checks key, bounds and access of a peer's request.
    ///
    /// # Errors
    /// [`WorkError::RemoteAccess`] if any is wrong.
    pub fn open(&self, at: RemoteMemory, writes: bool) -> Result<ExposureGrant, WorkError> {
        let exposed = self.lock().get(&at.key).cloned().ok_or(WorkError::RemoteAccess)?;
        let allowed = match &*exposed {
            Exposed::Mutable { access, .. } => {
                if writes {
                    access.write
                } else {
                    access.read
                }
            }
            Exposed::Frozen(_) => !writes,
        };
        let end = at.address.checked_add(at.len).ok_or(WorkError::RemoteAccess)?;
        if !allowed || end > exposed.len() as u64 {
            return Err(WorkError::RemoteAccess);
        }
        let bounded = |n: u64| usize::try_from(n).map_err(|_| WorkError::RemoteAccess);
        Ok(ExposureGrant { offset: bounded(at.address)?, len: bounded(at.len)?, exposed })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Exposed>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct SoftwareExposed {
    exposures: Weak<Exposures>,
    exposed: Arc<Exposed>,
    remote: RemoteMemory,
}

impl ExposedMemory for SoftwareExposed {
    fn remote(&self) -> RemoteMemory {
        self.remote
    }

    fn read_at(&self, offset: usize, out: &mut [u8]) {
        self.exposed.with_bytes(offset, out.len(), |bytes| out.copy_from_slice(bytes));
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) -> bool {
        self.exposed.with_bytes_mut(offset, bytes.len(), |room| room.copy_from_slice(bytes)).is_some()
    }
}

impl Drop for SoftwareExposed {
    fn drop(&mut self) {
        if let Some(exposures) = self.exposures.upgrade() {
            exposures.lock().remove(&self.remote.key);
        }
    }
}
