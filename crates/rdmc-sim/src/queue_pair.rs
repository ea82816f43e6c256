//! Queue pairs: reliable connections over the modelled network.
//!
//! Software posts a request to the adapter, which takes the requests of a queue pair one by one. Each request occupies
//! the adapter for an operation and then the ports for its bytes. The message arrives one latency after it left. Its
//! acknowledgement arrives one latency after the receiver took it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{
    Buffer, Completed, CompletionSource, ConnectError, Endpoint, Environment, FabricError, Pairing, Peer,
    QueuePairConfig, QueuePairId, RawQueuePair, RemoteMemory, Work, WorkError, WorkRequest, next_queue_pair_id,
};

use crate::fabric::SimCompletions;
use crate::flows::FlowNumber;
use crate::simulation::{NodeIndex, lock};
use crate::world::World;

mod receiving;
mod sending;

/// One end of a connection.
pub(crate) struct SimQueuePair {
    id: QueuePairId,
    world: World,
    node: NodeIndex,
    nonce: u128,
    config: QueuePairConfig,
    reserved: u32,
    /// The thread of the node's software that posts requests and takes completions.
    thread: usize,
    completions: Arc<dyn CompletionSource>,
    pairing: Pairing<SimQueuePair>,
    /// The node of the peer, known even after the peer is gone.
    peer_node: OnceLock<NodeIndex>,
    this: Weak<SimQueuePair>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    broken: bool,
    /// Requests posted and not begun.
    waiting: VecDeque<WorkRequest>,
    /// Number of these for which the doorbell was rung.
    rung: usize,
    /// Number of these that the adapter has seen.
    seen: usize,
    /// The request that is leaving now.
    leaving: Option<Departure>,
    /// Requests begun and not acknowledged, oldest first.
    outstanding: VecDeque<Outstanding>,
    /// The number of the oldest outstanding request.
    first_outstanding: u64,
    receives: VecDeque<WorkRequest>,
    /// Messages that have arrived and are not taken, oldest first.
    incoming: VecDeque<Message>,
    /// Whether the oldest of these is being taken.
    taking: bool,
    /// Reads that have begun and whose bytes have not arrived.
    reads_open: u32,
    /// Answers to reads whose bytes have not left, oldest first. They leave one by one.
    answers: VecDeque<Answer>,
    /// The number and the error of a refused request behind these answers. Nothing behind it is taken.
    refusal: Option<(u64, WorkError)>,
    /// Number of messages taken, for the wait for a receive.
    taken: u64,
    /// Unsignaled requests that are complete.
    unreported: Vec<Completed>,
    /// Number of attempts of all requests to leave: events of earlier attempts are void.
    attempts: u64,
    /// Number of cuts of the path.
    stalls: u64,
    /// When the last message, and the last answer, arrives at the peer.
    last_arrivals_ns: (u64, u64),
}

impl State {
    fn next_attempt(&mut self) -> u64 {
        self.attempts += 1;
        self.attempts
    }

    /// Finds an outstanding request by its number.
    fn outstanding_mut(&mut self, number: u64) -> Option<&mut Outstanding> {
        let place = number.checked_sub(self.first_outstanding)?;
        self.outstanding.get_mut(usize::try_from(place).ok()?)
    }
}

struct Departure {
    flow: Option<FlowNumber>,
    /// Whether it waits for a peer that cannot be reached, to leave again.
    stalled: bool,
    /// The number of this attempt.
    attempt: u64,
    /// Bytes that the receiver has not taken, if packets were lost.
    rest: Option<u64>,
}

struct Outstanding {
    request: WorkRequest,
    result: Option<Result<usize, WorkError>>,
}

/// The bytes that a peer reads.
struct Answer {
    /// The number of the read at the peer.
    number: u64,
    bytes: Vec<u8>,
    /// Bytes on the network that the peer has not taken.
    rest: u64,
}

/// A message from one end to the other.
struct Message {
    /// Its number at the sender.
    number: u64,
    content: Content,
}

#[derive(Clone)]
enum Content {
    Send { data: Buffer, imm: Option<u32> },
    Write { data: Buffer, to: RemoteMemory, imm: Option<u32> },
    Read { from: RemoteMemory },
}

impl Content {
    fn of(work: &Work) -> Self {
        match work {
            Work::Send { data, imm } => Self::Send { data: data.clone(), imm: *imm },
            Work::Write { data, to, imm } => Self::Write { data: data.clone(), to: *to, imm: *imm },
            Work::Read { from, .. } => Self::Read { from: *from },
            _ => unreachable!("receives are queued apart"),
        }
    }

    fn takes_a_receive(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { imm: Some(_), .. })
    }

    fn imm(&self) -> Option<u32> {
        match self {
            Self::Send { imm, .. } | Self::Write { imm, .. } => *imm,
            Self::Read { .. } => None,
        }
    }
}

/// What the adapter does with the oldest message that has arrived.
enum NextAction {
    Nothing,
    /// Waits for a receive: until when, and the number of messages taken before it.
    WaitForReceive(u64, u64),
    Take,
}

impl SimQueuePair {
    pub(crate) fn create(
        world: &World,
        node: NodeIndex,
        environment: &dyn Environment,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<Arc<Self>, FabricError> {
        let &SimCompletions { thread, .. } =
            SimCompletions::of(completions).ok_or(FabricError::ForeignCompletionQueue)?;
        let reserved = config.requests_max();
        completions.reserve(reserved)?;
        let nonce = environment.random_u128();
        let queue_pair = Arc::new_cyclic(|this| Self {
            id: next_queue_pair_id(),
            world: world.clone(),
            node,
            nonce,
            config,
            reserved,
            thread,
            completions: completions.clone(),
            pairing: Pairing::default(),
            peer_node: OnceLock::new(),
            this: this.clone(),
            state: Mutex::default(),
        });
        lock(&world.0.queue_pairs).insert(nonce, Arc::downgrade(&queue_pair));
        Ok(queue_pair)
    }

    pub(crate) fn node(&self) -> NodeIndex {
        self.node
    }

    pub(crate) fn peer_node(&self) -> Option<NodeIndex> {
        self.peer_node.get().copied()
    }

    /// Breaks this end, and with `tells` the other end one latency later. The oldest outstanding request fails with
    /// `cause`; all others are flushed.
    pub(crate) fn break_with(&self, cause: WorkError, tells: bool) {
        let (leaving, outstanding, waiting, receives, unreported, incoming, answers) = {
            let mut state = lock(&self.state);
            if state.broken {
                return;
            }
            state.broken = true;
            (state.rung, state.seen) = (0, 0);
            let state = &mut *state;
            (
                state.leaving.take(),
                std::mem::take(&mut state.outstanding),
                std::mem::take(&mut state.waiting),
                std::mem::take(&mut state.receives),
                std::mem::take(&mut state.unreported),
                std::mem::take(&mut state.incoming),
                std::mem::take(&mut state.answers),
            )
        };
        drop((incoming, answers));
        if let Some(flow) = leaving.and_then(|leaving| leaving.flow) {
            self.world.0.flows.cancel(flow);
        }
        let mut done = unreported;
        let mut cause = cause;
        // Requests that were acknowledged behind an unacknowledged one are flushed with it: none succeeds after an
        // error.
        for request in outstanding.into_iter().map(|outstanding| outstanding.request).chain(waiting) {
            done.push(request.complete(Err(cause), None));
            cause = WorkError::Flushed;
        }
        done.extend(receives.into_iter().map(|request| request.complete(Err(WorkError::Flushed), None)));
        self.deliver(done);
        if tells {
            let until_ns = self.world.0.executor.now_ns() + self.world.0.model.control.patience_ns;
            for other in self.pairing.others() {
                tell_of_break(&self.world, self.node, &other, until_ns);
            }
        }
    }

    /// Stops the request that is leaving, since the path was cut. A request that has left waits for its acknowledgement
    /// for the same time.
    pub(crate) fn stall(&self) {
        self.give_up_unacknowledged_later();
        let flow = {
            let mut state = lock(&self.state);
            let attempt = state.next_attempt();
            let Some(leaving) = &mut state.leaving else { return };
            (leaving.stalled, leaving.attempt) = (true, attempt);
            leaving.flow.take()
        };
        if let Some(flow) = flow {
            self.world.0.flows.cancel(flow);
        }
        self.give_up_later();
    }

    /// Sends the request again, since the path was healed.
    pub(crate) fn resume(&self) {
        let Some(peer) = self.pairing.peer() else { return };
        if !self.world.0.reach_each_other(self.node, peer.node) {
            return;
        }
        let stalled = {
            let mut state = lock(&self.state);
            state.leaving.as_mut().filter(|leaving| leaving.stalled).map(|leaving| leaving.stalled = false)
        };
        if stalled.is_some() {
            self.leave();
        }
    }

    /// Breaks this end because the other end is broken.
    fn learn_of_break(&self) {
        self.break_with(WorkError::ConnectionLost, false);
    }

    fn other(&self) -> Option<Arc<Self>> {
        self.pairing.others().into_iter().next()
    }

    /// Calls `call` at a moment, at once if it is now or past, unless the queue pair is gone by then.
    fn call_at(&self, at_ns: u64, call: impl FnOnce(&Self) + Send + 'static) {
        if at_ns <= self.world.0.executor.now_ns() {
            return call(self);
        }
        let this = self.this.clone();
        self.world.0.executor.call_at(at_ns, move || {
            if let Some(queue_pair) = this.upgrade() {
                call(&queue_pair);
            }
        });
    }

    fn deliver(&self, done: Vec<Completed>) {
        if !done.is_empty() {
            self.world.deliver(self.node, &self.completions, done);
        }
    }

    fn connect_now(&self, peer: &Peer) -> Result<(), ConnectError> {
        let nonce = peer.endpoint.as_bytes().try_into().map_err(|_| ConnectError::BadEndpoint)?;
        let nonce = u128::from_le_bytes(nonce);
        let found = lock(&self.world.0.queue_pairs).get(&nonce).and_then(Weak::upgrade);
        let found = found.ok_or(ConnectError::BadNonce)?;
        if lock(&self.state).broken {
            return Err(ConnectError::WrongState);
        }
        self.pairing.join(&self.this, &found, &found.pairing)?;
        let _ = self.peer_node.set(found.node);
        if lock(&found.state).broken {
            // The peer closed in between, and may not have seen this end.
            self.break_with(WorkError::ConnectionLost, false);
        }
        Ok(())
    }
}

impl RawQueuePair for SimQueuePair {
    fn id(&self) -> QueuePairId {
        self.id
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::new(self.nonce.to_le_bytes().to_vec()).expect("16 bytes are within the limit")
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        self.world.0.begin_operation(self.node);
        let connected = self.connect_now(&peer);
        let (this, world, node) = (self.this.clone(), self.world.clone(), self.node);
        Box::pin(async move {
            connected?;
            let queue_pair = this.upgrade().ok_or(ConnectError::WrongState)?;
            let peer = queue_pair.peer_node().ok_or(ConnectError::BadNonce)?;
            let began = world.now();
            let patience = Duration::from_nanos(world.0.model.control.patience_ns);
            while !world.0.reach_each_other(node, peer) {
                if world.now().since(began) >= patience {
                    return Err(ConnectError::Unreachable(std::io::ErrorKind::TimedOut.into()));
                }
                world.sleep(Duration::from_nanos(world.0.model.control.resend_ns)).await;
            }
            world.sleep(Duration::from_nanos(2 * world.0.latency_ns(node, peer))).await;
            if lock(&queue_pair.state).broken {
                return Err(ConnectError::WrongState);
            }
            queue_pair.begin_next(false);
            Ok(())
        })
    }

    fn post(&self, request: WorkRequest) {
        let receive = matches!(request.work(), Work::Receive { .. });
        let more = request.has_more_behind();
        self.world.0.begin_operation(self.node);
        let refused = {
            let mut state = lock(&self.state);
            if state.broken {
                Some(request)
            } else {
                if receive {
                    state.receives.push_back(request)
                } else {
                    state.waiting.push_back(request)
                }
                None
            }
        };
        if let Some(request) = refused {
            return self.deliver(vec![request.complete(Err(WorkError::Flushed), None)]);
        }
        let at_ns = {
            let mut host = lock(&self.world.0.nodes[self.node.index()].host);
            host.thread(self.thread).post(self.world.0.executor.now_ns(), &self.world.0.model.host)
        };
        if receive {
            self.take_next();
        } else if !more {
            self.ring(at_ns);
        }
    }

    fn flush(&self) {
        self.ring(self.world.0.executor.now_ns());
    }

    fn close(&self) {
        self.world.0.begin_operation(self.node);
        self.break_with(WorkError::Flushed, true);
        lock(&self.world.0.queue_pairs).remove(&self.nonce);
    }
}

impl Drop for SimQueuePair {
    fn drop(&mut self) {
        self.completions.release(self.reserved);
    }
}

/// Reports to one end that the other end, on node `by`, is broken: one latency later, or when the path is healed before
/// `until_ns`.
fn tell_of_break(world: &World, by: NodeIndex, to: &Arc<SimQueuePair>, until_ns: u64) {
    let now_ns = world.0.executor.now_ns();
    if world.0.reaches(by, to.node) {
        let (to, at_ns) = (to.clone(), now_ns + world.0.latency_ns(by, to.node));
        return world.0.executor.call_at(at_ns, move || to.learn_of_break());
    }
    let again_ns = now_ns + world.0.model.control.resend_ns;
    if again_ns > until_ns || !world.0.is_alive(to.node) {
        return;
    }
    let (later, to) = (world.clone(), Arc::downgrade(to));
    world.0.executor.call_at(again_ns, move || {
        if let Some(to) = to.upgrade() {
            tell_of_break(&later, by, &to, until_ns);
        }
    });
}

/// Longest message in bytes that is one packet, and waits behind the packets of others.
const PACKET_BYTES: u64 = 4096;
