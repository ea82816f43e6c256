//! Queue pairs: reliable connections over the modelled network.
//!
//! A request goes from the software to the adapter, which takes a queue pair's requests one by one: each occupies the
//! adapter for a moment and then the ports for its bytes. What has left arrives one latency later, and its
//! acknowledgement another latency after it was taken.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{
    Buffer, Completed, CompletionSource, ConnectError, Endpoint, Environment, FabricError, Peer, QueuePairConfig,
    QueuePairId, RawQueuePair, RemoteMemory, Timestamp, UNSIGNALED_MAX, Work, WorkError, WorkRequest,
    next_queue_pair_id,
};

use crate::fabric::SimCompletions;
use crate::flows::{Call, FlowNumber};
use crate::simulation::{NodeIndex, lock};
use crate::world::{World, WorldShared};

/// One end of a connection.
pub(crate) struct SimQueuePair {
    id: QueuePairId,
    world: World,
    node: NodeIndex,
    nonce: u128,
    config: QueuePairConfig,
    reserved: u32,
    /// The thread of the node's software that posts, and takes the completions.
    thread: usize,
    completions: Arc<dyn CompletionSource>,
    /// The queue pair this end connected to.
    peer: OnceLock<Weak<SimQueuePair>>,
    /// The node of that one, which is known even when it is gone.
    peer_node: OnceLock<NodeIndex>,
    /// The queue pair that connected to this end: the same one, once both have.
    caller: OnceLock<Weak<SimQueuePair>>,
    this: Weak<SimQueuePair>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    broken: bool,
    /// Posted and not yet begun.
    waiting: VecDeque<WorkRequest>,
    /// How many of these the adapter has been told of, or will be.
    told: usize,
    /// How many of these the adapter knows.
    known: usize,
    /// The one that is leaving now.
    leaving: Option<Leaving>,
    /// Begun and not acknowledged, oldest first.
    outstanding: VecDeque<Outstanding>,
    /// The number of the oldest of these.
    first_outstanding: u64,
    receives: VecDeque<WorkRequest>,
    /// What has arrived and is not taken, oldest first.
    incoming: VecDeque<Message>,
    /// The oldest of these is being taken.
    taking: bool,
    /// Counts messages taken, for the wait for a receive.
    taken: u64,
    /// Unsignaled requests that are done.
    unreported: Vec<Completed>,
}

struct Leaving {
    flow: Option<FlowNumber>,
    /// The peer cannot be reached: it waits, and leaves anew.
    stalled: bool,
    /// Counts attempts: events of earlier ones are void.
    attempt: u64,
}

struct Outstanding {
    request: WorkRequest,
    result: Option<Result<usize, WorkError>>,
}

/// What travels from one end to the other.
struct Message {
    /// The sender's number of it.
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

/// What becomes of the oldest message that has arrived.
enum Next {
    Nothing,
    /// It waits for a receive: until when, and how many were taken before it.
    Awaits(u64, u64),
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
        let reserved = config.send_depth.saturating_add(config.receive_depth);
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
            peer: OnceLock::new(),
            peer_node: OnceLock::new(),
            caller: OnceLock::new(),
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

    /// Breaks this end, and the other one latency later if it is to be told: the oldest outstanding request gets
    /// `cause`, all else is flushed.
    pub(crate) fn break_with(&self, cause: WorkError, tells: bool) {
        let (leaving, outstanding, waiting, receives, unreported, incoming) = {
            let mut state = lock(&self.state);
            if state.broken {
                return;
            }
            state.broken = true;
            (state.told, state.known) = (0, 0);
            let state = &mut *state;
            (
                state.leaving.take(),
                std::mem::take(&mut state.outstanding),
                std::mem::take(&mut state.waiting),
                std::mem::take(&mut state.receives),
                std::mem::take(&mut state.unreported),
                std::mem::take(&mut state.incoming),
            )
        };
        drop(incoming);
        if let Some(flow) = leaving.and_then(|leaving| leaving.flow) {
            self.world.0.flows.cancel(flow);
        }
        let mut done = unreported;
        let mut cause = cause;
        let ends = outstanding.into_iter().map(|outstanding| (outstanding.request, outstanding.result));
        for (request, result) in ends.chain(waiting.into_iter().map(|request| (request, None))) {
            match result {
                // Acknowledged behind one that was not: it has been taken all the same.
                Some(Ok(len)) => done.push(request.complete(Ok(len), None)),
                _ => {
                    done.push(request.complete(Err(cause), None));
                    cause = WorkError::Flushed;
                }
            }
        }
        done.extend(receives.into_iter().map(|request| request.complete(Err(WorkError::Flushed), None)));
        self.deliver(done);
        if tells {
            let until_ns = self.world.0.executor.now_ns() + self.world.0.model.control.patience_ns;
            for other in self.others() {
                tell_of_break(&self.world, self.node, &other, until_ns);
            }
        }
    }

    /// Stops what is leaving: the path was cut. What has left waits for its acknowledgement no longer than what has not.
    pub(crate) fn stall(&self) {
        self.give_up_unacknowledged_later();
        let flow = {
            let mut state = lock(&self.state);
            let Some(leaving) = &mut state.leaving else { return };
            leaving.stalled = true;
            leaving.attempt += 1;
            leaving.flow.take()
        };
        if let Some(flow) = flow {
            self.world.0.flows.cancel(flow);
        }
        self.give_up_later();
    }

    /// Tries again: the path was joined.
    pub(crate) fn resume(&self) {
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else { return };
        if !self.world.0.reaches(self.node, peer.node) {
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

    // Sending.

    /// Tells the adapter of all requests that were posted.
    fn ring(&self, at_ns: u64) {
        let count = {
            let mut state = lock(&self.state);
            let count = state.waiting.len() - state.told;
            state.told += count;
            count
        };
        if count == 0 {
            return;
        }
        let this = self.this.clone();
        let learn = move || {
            if let Some(queue_pair) = this.upgrade() {
                {
                    let mut state = lock(&queue_pair.state);
                    if state.broken {
                        return;
                    }
                    state.known += count;
                }
                queue_pair.begin_next();
            }
        };
        if at_ns > self.world.0.executor.now_ns() { self.world.0.executor.call_at(at_ns, learn) } else { learn() }
    }

    /// Begins the next request, if the adapter knows one and none is leaving.
    fn begin_next(&self) {
        let attempt = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            if state.broken || state.leaving.is_some() || state.known == 0 || self.peer.get().is_none() {
                return;
            }
            let Some(request) = state.waiting.pop_front() else { return };
            state.known -= 1;
            state.told -= 1;
            state.outstanding.push_back(Outstanding { request, result: None });
            state.leaving = Some(Leaving { flow: None, stalled: false, attempt: 0 });
            0
        };
        let free_ns = self.world.0.occupy_adapter(self.node, true) + self.queueing_ns();
        self.call_at(free_ns, move |queue_pair| {
            let current = lock(&queue_pair.state).leaving.as_ref().is_some_and(|leaving| leaving.attempt == attempt);
            if current {
                queue_pair.leave();
            }
        });
    }

    /// Puts the bytes of the newest outstanding request on the network.
    fn leave(&self) {
        if self.is_cut_off() {
            {
                let mut state = lock(&self.state);
                let Some(leaving) = &mut state.leaving else { return };
                leaving.stalled = true;
                leaving.attempt += 1;
            }
            return self.give_up_later();
        }
        let Some(peer) = self.peer.get().and_then(Weak::upgrade) else {
            return self.break_with(WorkError::ConnectionLost, false);
        };
        let model = &self.world.0.model;
        let (content, number, attempt) = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            let (Some(newest), Some(leaving)) = (state.outstanding.back(), &mut state.leaving) else { return };
            leaving.attempt += 1;
            let number = state.first_outstanding + state.outstanding.len() as u64 - 1;
            (Content::of(newest.request.work()), number, leaving.attempt)
        };
        let bytes = model.nic.header_bytes
            + match &content {
                Content::Send { data, .. } => data.len() as u64 * model.payload_scale,
                Content::Write { data, .. } => data.len() as u64,
                Content::Read { .. } => 0,
            };
        let begin_ns = self.world.0.executor.now_ns();
        let this = self.this.clone();
        let left: Call = Box::new(move || {
            if let Some(queue_pair) = this.upgrade() {
                queue_pair.has_left(attempt, Message { number, content }, bytes, begin_ns);
            }
        });
        let path = self.world.0.path(self.node, peer.node);
        let rate = self.world.0.flows.rate_of(&path);
        if (bytes <= SMALL_BYTES && rate > 0) || path.is_empty() {
            // What is small goes between the packets of what is large.
            let wire_ns = bytes * 8_000_000_000 / rate;
            self.near(&peer);
            return self.world.0.executor.call_at(begin_ns + wire_ns, left);
        }
        let notice = (model.nic.notice_bytes > 0).then(|| {
            let this = self.this.clone();
            let near: Call = Box::new(move || {
                if let Some(queue_pair) = this.upgrade() {
                    queue_pair.near(&peer);
                }
            });
            (model.nic.notice_bytes, near)
        });
        let flow = self.world.0.flows.start(path, bytes, notice, left);
        if let Some(leaving) = &mut lock(&self.state).leaving
            && leaving.attempt == attempt
        {
            leaving.flow = Some(flow);
        }
    }

    /// Tells the receiving end that the block that is leaving is nearly through. The sending end learns it when the
    /// last byte has left: a block to somebody else that began earlier would share the port and delay this one.
    fn near(&self, peer: &Arc<Self>) {
        if self.world.0.model.nic.notice_bytes == 0 {
            return;
        }
        let at_ns = self.world.0.executor.now_ns() + self.world.0.latency_ns(self.node, peer.node);
        let peer = Arc::downgrade(peer);
        self.world.0.executor.call_at(at_ns, move || {
            let nearing = peer.upgrade().and_then(|peer| {
                let state = lock(&peer.state);
                let before = state.incoming.iter().filter(|message| message.content.takes_a_receive()).count();
                state.receives.get(before).map(WorkRequest::nearing)
            });
            if let Some(nearing) = nearing {
                nearing.mark();
            }
        });
    }

    /// The last byte of a request has left.
    fn has_left(&self, attempt: u64, message: Message, bytes: u64, begin_ns: u64) {
        {
            let mut state = lock(&self.state);
            if !state.leaving.as_ref().is_some_and(|leaving| leaving.attempt == attempt && !leaving.stalled) {
                return;
            }
            state.leaving = None;
        }
        let nearing = {
            let state = lock(&self.state);
            state.outstanding.back().map(|newest| newest.request.nearing())
        };
        if let Some(nearing) = nearing.filter(|_| self.world.0.model.nic.notice_bytes > 0) {
            nearing.mark();
        }
        if let Some(peer) = self.peer.get().and_then(Weak::upgrade) {
            let end_ns = self.world.0.executor.now_ns();
            let arrival_ns = end_ns + self.world.0.latency_ns(self.node, peer.node);
            let one_sided = !matches!(message.content, Content::Send { .. });
            let times = (begin_ns, end_ns, arrival_ns);
            lock(&self.world.0.log).carried((self.node, peer.node), message.content.imm(), one_sided, bytes, times);
            let from = self.this.clone();
            self.world.0.executor.call_at(arrival_ns, move || peer.arrive(message, from));
        }
        self.begin_next();
    }

    /// Breaks this end if the peer cannot be reached for too long.
    fn give_up_later(&self) {
        let attempt = lock(&self.state).leaving.as_ref().map(|leaving| leaving.attempt);
        let at_ns = self.world.0.executor.now_ns() + self.world.0.model.nic.retry_ns;
        self.call_at(at_ns, move |queue_pair| {
            let still = |leaving: &Leaving| leaving.stalled && Some(leaving.attempt) == attempt;
            if lock(&queue_pair.state).leaving.as_ref().is_some_and(still) {
                queue_pair.break_with(WorkError::ConnectionLost, true);
            }
        });
    }

    /// Breaks this end if what has left is not acknowledged for too long, by a peer that cannot be reached or is gone.
    fn give_up_unacknowledged_later(&self) {
        let oldest = {
            let state = lock(&self.state);
            if state.outstanding.is_empty() {
                return;
            }
            state.first_outstanding
        };
        let at_ns = self.world.0.executor.now_ns() + self.world.0.model.nic.retry_ns;
        self.call_at(at_ns, move |queue_pair| {
            let waits = {
                let state = lock(&queue_pair.state);
                !state.outstanding.is_empty() && state.first_outstanding == oldest
            };
            let gone = queue_pair.peer.get().is_some_and(|peer| peer.strong_count() == 0);
            if waits && (gone || queue_pair.is_cut_off()) {
                queue_pair.break_with(WorkError::ConnectionLost, true);
            }
        });
    }

    fn is_cut_off(&self) -> bool {
        self.peer_node().is_some_and(|peer| !self.world.0.reaches(self.node, peer))
    }

    /// The peer tells what became of a request.
    fn acknowledged(&self, number: u64, result: Result<usize, WorkError>) {
        let (mut done, error) = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            if state.broken {
                return;
            }
            let place = usize::try_from(number - state.first_outstanding).expect("a queue's depth is a u32");
            if let Some(outstanding) = state.outstanding.get_mut(place) {
                outstanding.result = Some(result);
            }
            let mut reported = Vec::new();
            let mut error = None;
            while let Some(Some(result)) = state.outstanding.front().map(|oldest| oldest.result) {
                if let Err(cause) = result {
                    error = Some(cause);
                    break;
                }
                let oldest = state.outstanding.pop_front().expect("it is the front");
                state.first_outstanding += 1;
                let unsignaled = oldest.request.is_unsignaled();
                state.unreported.push(oldest.request.complete(result, None));
                if !unsignaled || state.unreported.len() > UNSIGNALED_MAX as usize {
                    reported.append(&mut state.unreported);
                }
            }
            (reported, error)
        };
        self.deliver(std::mem::take(&mut done));
        if let Some(cause) = error {
            self.break_with(cause, true);
        }
    }

    // Receiving.

    /// A message has come in.
    fn arrive(&self, message: Message, from: Weak<Self>) {
        let broken = {
            let mut state = lock(&self.state);
            if !state.broken {
                state.incoming.push_back(message);
            }
            state.broken
        };
        if broken {
            // Nobody answers for a host that is gone.
            let sender = from.upgrade().filter(|sender| self.world.0.reaches(self.node, sender.node));
            if let Some(sender) = sender {
                let at_ns = self.world.0.executor.now_ns() + self.world.0.latency_ns(self.node, sender.node);
                sender.call_at(at_ns, Self::learn_of_break);
            }
            return;
        }
        self.take_next();
    }

    /// Takes the oldest message, if it can be taken.
    fn take_next(&self) {
        let next = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            match state.incoming.front() {
                None => Next::Nothing,
                Some(_) if state.taking || state.broken => Next::Nothing,
                Some(message) if message.content.takes_a_receive() && state.receives.is_empty() => {
                    let limit_ns = u64::try_from(self.config.receiver_not_ready.as_nanos()).unwrap_or(u64::MAX);
                    Next::Awaits(self.world.0.executor.now_ns().saturating_add(limit_ns), state.taken)
                }
                Some(_) => {
                    state.taking = true;
                    Next::Take
                }
            }
        };
        match next {
            Next::Nothing => {}
            Next::Awaits(until_ns, taken) => self.call_at(until_ns, move |queue_pair| {
                let refused = {
                    let state = lock(&queue_pair.state);
                    let still = state.taken == taken && !state.taking && !state.broken;
                    state.incoming.front().filter(|_| still && state.receives.is_empty()).map(|message| message.number)
                };
                if let Some(number) = refused {
                    queue_pair.answer(number, Err(WorkError::ReceiverNotReady));
                }
            }),
            Next::Take => {
                let free_ns = self.world.0.occupy_adapter(self.node, false);
                self.call_at(free_ns, Self::take);
            }
        }
    }

    /// Carries out the oldest message and answers it.
    fn take(&self) {
        let (message, receive) = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            if state.broken {
                return;
            }
            state.taking = false;
            state.taken += 1;
            let Some(message) = state.incoming.pop_front() else { return };
            let receive = if message.content.takes_a_receive() { state.receives.pop_front() } else { None };
            (message, receive)
        };
        let exposures = &self.world.0.nodes[self.node.index()].exposures;
        let number = message.number;
        match message.content {
            Content::Send { data, imm } => {
                let receive = receive.expect("a message that takes a receive is taken only with one");
                match self.fill(receive, &data, imm) {
                    Ok(()) => self.answer(number, Ok(data.len())),
                    Err(error) => self.answer(number, Err(error)),
                }
            }
            Content::Write { data, to, imm } => match exposures.open(to, true) {
                Ok(grant) => {
                    grant.with_bytes_mut(0, data.len(), |room| room.copy_from_slice(&data));
                    if let Some(receive) = receive {
                        self.deliver(vec![receive.complete(Ok(0), imm)]);
                    }
                    self.answer(number, Ok(data.len()));
                }
                Err(error) => {
                    // The receive was not used: it is flushed with the others.
                    if let Some(receive) = receive {
                        lock(&self.state).receives.push_front(receive);
                    }
                    self.answer(number, Err(error));
                }
            },
            Content::Read { from } => match exposures.open(from, false) {
                Ok(grant) => {
                    let bytes = grant.with_bytes(0, grant.len(), <[u8]>::to_vec);
                    self.answer_read(number, bytes);
                }
                Err(error) => self.answer(number, Err(error)),
            },
        }
        self.take_next();
    }

    /// Puts a peer's bytes into a receive.
    fn fill(&self, mut receive: WorkRequest, data: &Buffer, imm: Option<u32>) -> Result<(), WorkError> {
        let Work::Receive { into } = receive.work_mut() else { unreachable!("only receives are queued here") };
        if data.len() > into.len() {
            let error = WorkError::LocalLength { got: Some(data.len() as u64), room: into.len() as u64 };
            self.deliver(vec![receive.complete(Err(error), None)]);
            return Err(WorkError::RemoteInvalidRequest);
        }
        into[..data.len()].copy_from_slice(data);
        self.deliver(vec![receive.complete(Ok(data.len()), imm)]);
        Ok(())
    }

    /// Tells the sender what became of its request, one latency later; an error breaks this end too.
    fn answer(&self, number: u64, result: Result<usize, WorkError>) {
        let Some(peer) = self.other() else { return };
        let at_ns = self.world.0.executor.now_ns() + self.world.0.latency_ns(self.node, peer.node);
        peer.call_at(at_ns, move |peer| peer.acknowledged(number, result));
        if result.is_err() {
            self.break_with(WorkError::Flushed, true);
        }
    }

    /// Sends the bytes that a peer reads.
    fn answer_read(&self, number: u64, bytes: Vec<u8>) {
        let Some(peer) = self.other() else { return };
        let path = self.world.0.path(self.node, peer.node);
        let count = bytes.len() as u64;
        let (latency_ns, executor) = (self.world.0.latency_ns(self.node, peer.node), self.world.0.executor.clone());
        let (reader, log, nodes) = (Arc::downgrade(&peer), self.world.clone(), (self.node, peer.node));
        let begin_ns = executor.now_ns();
        let clock = executor.clone();
        let left: Call = Box::new(move || {
            let times = (begin_ns, clock.now_ns(), clock.now_ns() + latency_ns);
            lock(&log.0.log).carried(nodes, None, true, count, times);
            clock.call_at(times.2, move || {
                if let Some(reader) = reader.upgrade() {
                    reader.has_read(number, &bytes);
                }
            });
        });
        let rate = self.world.0.flows.rate_of(&path);
        if (count <= SMALL_BYTES && rate > 0) || path.is_empty() {
            let wire_ns = count * 8_000_000_000 / rate;
            return executor.call_at(begin_ns + wire_ns, left);
        }
        self.world.0.flows.start(path, count, None, left);
    }

    /// The bytes of a read have come in.
    fn has_read(&self, number: u64, bytes: &[u8]) {
        {
            let mut state = lock(&self.state);
            let state = &mut *state;
            let Some(place) = number.checked_sub(state.first_outstanding).and_then(|place| usize::try_from(place).ok())
            else {
                return;
            };
            let Some(outstanding) = state.outstanding.get_mut(place) else { return };
            let Work::Read { into, .. } = outstanding.request.work_mut() else { return };
            into.copy_from_slice(bytes);
        }
        self.acknowledged(number, Ok(bytes.len()));
    }

    // Both.

    /// The other end is broken.
    fn learn_of_break(&self) {
        self.break_with(WorkError::ConnectionLost, false);
    }

    fn other(&self) -> Option<Arc<Self>> {
        self.others().into_iter().next()
    }

    fn others(&self) -> Vec<Arc<Self>> {
        let others = [self.peer.get(), self.caller.get()];
        let mut others: Vec<_> = others.into_iter().flatten().filter_map(Weak::upgrade).collect();
        others.dedup_by(|a, b| Arc::ptr_eq(a, b));
        others
    }

    /// Returns how long the newest outstanding request, if it is short, waits behind what long ones have queued.
    fn queueing_ns(&self) -> u64 {
        let WorldShared { model, nodes, flows, .. } = &*self.world.0;
        let short = lock(&self.state).outstanding.back().is_some_and(|newest| {
            let work = newest.request.work();
            let len = work.len() as u64;
            let bytes = match work {
                Work::Send { .. } => len * model.payload_scale,
                // Only the request for it leaves.
                Work::Read { .. } => 0,
                _ => len,
            };
            bytes <= PACKET_BYTES
        });
        if model.nic.queue_bytes == 0 || !short || self.peer_node() == Some(self.node) {
            return 0;
        }
        let egress = nodes[self.node.index()].egress;
        let queued = flows.count_longer(egress, PACKET_BYTES) * model.nic.queue_bytes;
        queued * 8_000_000_000 / flows.rate_of(&[egress]).max(1)
    }

    /// Calls `call` at a moment, at once if it is now, unless the queue pair is gone by then.
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
        if lock(&self.state).broken || self.peer.get().is_some() {
            return Err(ConnectError::WrongState);
        }
        // A queue pair has one peer, and takes no other that knows its nonce.
        let caller = found.caller.get_or_init(|| self.this.clone());
        let expects_another = found.peer.get().is_some_and(|peer| !peer.ptr_eq(&self.this));
        if !caller.ptr_eq(&self.this) || expects_another {
            return Err(ConnectError::BadNonce);
        }
        if self.peer.set(Arc::downgrade(&found)).is_err() {
            return Err(ConnectError::WrongState);
        }
        let _ = self.peer_node.set(found.node);
        if lock(&found.state).broken {
            // It closed in between, and may not have seen its caller.
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
        let connected = self.connect_now(&peer);
        let (this, world, node) = (self.this.clone(), self.world.clone(), self.node);
        Box::pin(async move {
            connected?;
            let queue_pair = this.upgrade().ok_or(ConnectError::WrongState)?;
            let peer = queue_pair.peer_node().ok_or(ConnectError::BadNonce)?;
            let began = world.now();
            let patience = Duration::from_nanos(world.0.model.control.patience_ns);
            while !world.0.reaches(node, peer) {
                if world.now().since(began) >= patience {
                    return Err(ConnectError::Unreachable(std::io::ErrorKind::TimedOut.into()));
                }
                world.sleep(Duration::from_nanos(world.0.model.control.resend_ns.max(1))).await;
            }
            let round_trip_ns = 2 * world.0.latency_ns(node, peer);
            let at_ns = world.0.executor.now_ns() + round_trip_ns;
            world.sleep_until(Timestamp::from_nanos(at_ns)).await;
            if lock(&queue_pair.state).broken {
                return Err(ConnectError::WrongState);
            }
            queue_pair.begin_next();
            Ok(())
        })
    }

    fn post(&self, request: WorkRequest) {
        let receive = matches!(request.work(), Work::Receive { .. });
        let more = request.has_more_behind();
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
        self.break_with(WorkError::Flushed, true);
        lock(&self.world.0.queue_pairs).remove(&self.nonce);
    }
}

impl Drop for SimQueuePair {
    fn drop(&mut self) {
        self.completions.release(self.reserved);
    }
}

/// Tells one end that the other, of a node, is broken: one latency later, or when the path is joined again before `until_ns`.
fn tell_of_break(world: &World, by: NodeIndex, to: &Arc<SimQueuePair>, until_ns: u64) {
    let now_ns = world.0.executor.now_ns();
    if world.0.reaches(by, to.node) {
        let (to, at_ns) = (to.clone(), now_ns + world.0.latency_ns(by, to.node));
        return world.0.executor.call_at(at_ns, move || to.learn_of_break());
    }
    let again_ns = now_ns + world.0.model.control.resend_ns.max(1);
    if again_ns > until_ns || !world.0.is_alive(to.node) {
        return;
    }
    let (told, to) = (world.clone(), Arc::downgrade(to));
    world.0.executor.call_at(again_ns, move || {
        if let Some(to) = to.upgrade() {
            tell_of_break(&told, by, &to, until_ns);
        }
    });
}

/// Messages of at most so many bytes are one packet, and wait behind the packets of others.
const PACKET_BYTES: u64 = 4096;
/// Messages of at most so many bytes do not take part in the sharing of links, unless a port stands still.
const SMALL_BYTES: u64 = 256;
