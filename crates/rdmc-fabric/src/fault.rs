//! A decorator that breaks queue pairs, delays requests or changes bits, as a test's plan says.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::completion::CompletionSource;
use crate::decorator::{FabricDecorator, QueuePairDecorator};
use crate::environment::{Environment, Timestamp};
use crate::fabric::{Fabric, FabricError, QueuePairConfig, RawQueuePair};
use crate::memory::Memory;
use crate::queue_pair::QueuePair;
use crate::sync::lock;
use crate::work::{Opcode, QueuePairId, Work, WorkRequest};

/// The fault that a plan chooses for a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// No fault: the request is posted.
    None,
    /// The request is posted later, by the environment's clock. Later requests to the same queue wait behind it.
    Delay(Duration),
    /// The queue pair is closed first, so that the request is flushed with all others.
    Close,
    /// One bit of a send's or write's bytes is flipped. The memory of the bytes stays as it is. Requests without bytes
    /// are posted unchanged.
    Flip {
        /// The bit's index from the first bit, modulo the number of bits.
        bit: u64,
    },
    /// One bit of the immediate is flipped. Requests without an immediate are posted unchanged.
    FlipImmediate {
        /// The bit's index, modulo 32.
        bit: u32,
    },
}

/// A work request as the plan of a [`FaultFabric`] sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Posting {
    /// The queue pair it is posted to.
    pub queue_pair: QueuePairId,
    /// How many queue pairs the fabric had created before this one.
    pub queue_pair_index: u64,
    /// The kind of work.
    pub opcode: Opcode,
    /// How many requests of this opcode were posted to this queue pair before.
    pub index: u64,
    /// Length in bytes of the request's memory.
    pub len: usize,
}

/// A fabric with faults: wraps another one and applies a plan to every posted request.
///
/// # Examples
/// The third send on every queue pair finds it closed:
/// ```
/// use rdmc_fabric::{Fault, FaultFabric, MemNetwork, Opcode};
///
/// let fabric = FaultFabric::new(MemNetwork::new().fabric(), |posting| {
///     if (posting.opcode, posting.index) == (Opcode::Send, 2) { Fault::Close } else { Fault::None }
/// });
/// # drop(fabric);
/// ```
pub struct FaultFabric {
    inner: Arc<dyn Fabric>,
    plan: Arc<Plan>,
    queue_pairs: Mutex<QueuePairs>,
}

type Plan = dyn Fn(&Posting) -> Fault + Send + Sync;

/// The queue pairs of one fabric.
#[derive(Default)]
struct QueuePairs {
    count: u64,
    alive: Vec<Weak<FaultQueuePair>>,
}

impl FaultFabric {
    /// Wraps `inner`; `plan` chooses the fault of each request. The task that posts a request calls it.
    pub fn new(inner: Arc<dyn Fabric>, plan: impl Fn(&Posting) -> Fault + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { inner, plan: Arc::new(plan), queue_pairs: Mutex::default() })
    }

    /// Closes every queue pair created so far, as the death of the node would.
    pub fn close_all(&self) {
        let alive = std::mem::take(&mut lock(&self.queue_pairs).alive);
        for queue_pair in alive.iter().filter_map(Weak::upgrade) {
            QueuePairDecorator::close(&*queue_pair);
        }
    }
}

impl fmt::Debug for FaultFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultFabric").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl FabricDecorator for FaultFabric {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let queue_pair = self.inner.create_queue_pair(completions, config)?;
        let mut queue_pairs = lock(&self.queue_pairs);
        let index = queue_pairs.count;
        queue_pairs.count += 1;
        Ok(queue_pair.map_raw(|inner| {
            let faulty = Arc::new_cyclic(|this| FaultQueuePair {
                inner,
                fabric: self.inner.clone(),
                index,
                plan: self.plan.clone(),
                environment: self.inner.environment(),
                state: Mutex::default(),
                this: this.clone(),
            });
            queue_pairs.alive.retain(|queue_pair| queue_pair.strong_count() > 0);
            queue_pairs.alive.push(Arc::downgrade(&faulty));
            faulty
        }))
    }
}

struct FaultQueuePair {
    inner: Arc<dyn RawQueuePair>,
    fabric: Arc<dyn Fabric>,
    index: u64,
    plan: Arc<Plan>,
    environment: Arc<dyn Environment>,
    state: Mutex<FaultState>,
    this: Weak<FaultQueuePair>,
}

#[derive(Default)]
struct FaultState {
    posted: BTreeMap<Opcode, u64>,
    sends: DelayedQueue,
    receives: DelayedQueue,
}

/// Requests that wait until they are due, in order.
#[derive(Default)]
struct DelayedQueue {
    waiting: VecDeque<(Timestamp, WorkRequest)>,
    /// A task posts them; until it ends, no later request may overtake them.
    running: bool,
}

impl FaultState {
    fn queue(&mut self, receives: bool) -> &mut DelayedQueue {
        if receives { &mut self.receives } else { &mut self.sends }
    }
}

impl QueuePairDecorator for FaultQueuePair {
    fn inner(&self) -> &dyn RawQueuePair {
        &*self.inner
    }

    fn post(&self, mut request: WorkRequest) {
        let delay = match (self.plan)(&self.posting(request.work())) {
            Fault::None => Duration::ZERO,
            Fault::Delay(delay) => delay,
            Fault::Close => {
                QueuePairDecorator::close(self);
                Duration::ZERO
            }
            Fault::Flip { bit } => {
                self.flip(request.work_mut(), bit);
                Duration::ZERO
            }
            Fault::FlipImmediate { bit } => {
                if let Work::Send { imm: Some(imm), .. } | Work::Write { imm: Some(imm), .. } = request.work_mut() {
                    *imm ^= 1 << (bit % u32::BITS);
                }
                Duration::ZERO
            }
        };
        let receives = matches!(request.work(), Work::Receive { .. });
        {
            let mut state = lock(&self.state);
            let queue = state.queue(receives);
            if queue.running || !delay.is_zero() {
                queue.waiting.push_back((self.environment.now() + delay, request));
                if !std::mem::replace(&mut queue.running, true) {
                    let this = self.this.upgrade().expect("the caller holds the queue pair");
                    self.environment.spawn(Box::pin(async move { this.post_waiting(receives).await }));
                }
                return;
            }
        }
        self.inner.post(request);
    }

    fn close(&self) {
        self.inner.close();
        let waiting = {
            let mut state = lock(&self.state);
            let sends = std::mem::take(&mut state.sends.waiting);
            sends.into_iter().chain(std::mem::take(&mut state.receives.waiting))
        };
        // Flushed with the rest.
        waiting.for_each(|(_, request)| self.inner.post(request));
    }
}

impl FaultQueuePair {
    /// Counts a request and describes it to the plan.
    fn posting(&self, work: &Work) -> Posting {
        let mut state = lock(&self.state);
        let count = state.posted.entry(work.opcode()).or_default();
        let index = *count;
        *count += 1;
        Posting {
            queue_pair: self.inner.id(),
            queue_pair_index: self.index,
            opcode: work.opcode(),
            index,
            len: work.len(),
        }
    }

    /// Replaces the bytes of a request by a copy with one flipped bit.
    fn flip(&self, work: &mut Work, bit: u64) {
        let (Work::Send { data, .. } | Work::Write { data, .. }) = work else { return };
        let mut bytes = data.to_vec();
        let bits = bytes.len() as u64 * u64::from(u8::BITS);
        let Some(bit) = bit.checked_rem(bits) else { return };
        let at = usize::try_from(bit / u64::from(u8::BITS)).expect("the bytes are in memory");
        bytes[at] ^= 1 << (bit % u64::from(u8::BITS));
        match self.fabric.register(Memory::from(bytes)) {
            Ok(region) => *data = region.into_shared(),
            Err(error) => tracing::warn!(%error, "no memory to flip a bit in"),
        }
    }

    /// Posts the requests of one queue, each when it is due, until none is left.
    async fn post_waiting(&self, receives: bool) {
        loop {
            let due = {
                let mut state = lock(&self.state);
                let queue = state.queue(receives);
                let Some((due, _)) = queue.waiting.front() else {
                    queue.running = false;
                    return;
                };
                *due
            };
            self.environment.sleep_until(due).await;
            // `None` if the queue pair was closed meanwhile.
            let next = lock(&self.state).queue(receives).waiting.pop_front();
            if let Some((_, request)) = next {
                self.inner.post(request);
                // The flush that would have sent it may be over.
                self.inner.flush();
            }
        }
    }
}
