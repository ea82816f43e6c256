//! The receiving side: from the arrival of a message to its acknowledgement.

use std::sync::Weak;

use rdmc_fabric::{Buffer, Work, WorkError, WorkRequest};

use super::{Answer, Content, Message, NextAction, SimQueuePair};
use crate::flows::Call;
use crate::simulation::lock;

impl SimQueuePair {
    /// Handles the arrival of a message.
    pub(super) fn arrive(&self, message: Message, from: Weak<Self>) {
        let broken = {
            let mut state = lock(&self.state);
            if !state.broken {
                state.incoming.push_back(message);
            }
            state.broken
        };
        if broken {
            // A host that is gone does not answer.
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
    pub(super) fn take_next(&self) {
        let next = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            match state.incoming.front() {
                None => NextAction::Nothing,
                Some(_) if state.taking || state.broken => NextAction::Nothing,
                Some(message) if message.content.takes_a_receive() && state.receives.is_empty() => {
                    let limit_ns = u64::try_from(self.config.receiver_not_ready.as_nanos()).unwrap_or(u64::MAX);
                    NextAction::WaitForReceive(self.world.0.executor.now_ns().saturating_add(limit_ns), state.taken)
                }
                Some(_) => {
                    state.taking = true;
                    NextAction::Take
                }
            }
        };
        match next {
            NextAction::Nothing => {}
            NextAction::WaitForReceive(until_ns, taken) => self.call_at(until_ns, move |queue_pair| {
                let refused = {
                    let state = lock(&queue_pair.state);
                    let still = state.taken == taken && !state.taking && !state.broken;
                    state.incoming.front().filter(|_| still && state.receives.is_empty()).map(|message| message.number)
                };
                if let Some(number) = refused {
                    queue_pair.answer(number, Err(WorkError::ReceiverNotReady));
                }
            }),
            NextAction::Take => {
                let free_ns = self.world.0.occupy_adapter(self.node, false);
                self.call_at(free_ns, Self::take);
            }
        }
    }

    /// Executes the oldest message and acknowledges it.
    pub(super) fn take(&self) {
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
                let receive = receive.expect("take_next waits for a receive");
                let (data, imm) = match self.peer_node() {
                    Some(peer) => self.world.0.received((peer, self.node), data, imm),
                    None => (data, imm),
                };
                match self.fill(receive, &data, imm) {
                    Ok(()) => self.answer(number, Ok(data.len())),
                    Err(error) => self.answer(number, Err(error)),
                }
            }
            Content::Write { data, to, imm } => match exposures.open(to, true) {
                Ok(grant) => {
                    let data = match (self.peer_node(), imm) {
                        (Some(peer), Some(imm)) => self.world.0.written((peer, self.node), data, imm),
                        _ => data,
                    };
                    grant.with_bytes_mut(0, data.len(), |room| room.copy_from_slice(&data));
                    if let Some(receive) = receive {
                        self.deliver(vec![receive.complete(Ok(0), imm)]);
                    }
                    self.answer(number, Ok(data.len()));
                }
                Err(error) => {
                    // The receive was not consumed; it is flushed with the others.
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

    /// Copies a peer's bytes into a receive.
    pub(super) fn fill(&self, mut receive: WorkRequest, data: &Buffer, imm: Option<u32>) -> Result<(), WorkError> {
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

    /// Sends the result of a request to its sender, one latency later. An error breaks this end too, and does not
    /// overtake the bytes of earlier reads.
    pub(super) fn answer(&self, number: u64, result: Result<usize, WorkError>) {
        if let Err(error) = result {
            let mut state = lock(&self.state);
            if !state.answers.is_empty() {
                (state.refusal, state.taking) = (Some((number, error)), true);
                return;
            }
        }
        let Some(peer) = self.other() else { return };
        let at_ns = self.world.0.executor.now_ns() + self.world.0.latency_ns(self.node, peer.node);
        peer.call_at(at_ns, move |peer| peer.acknowledged(number, result));
        if result.is_err() {
            self.break_with(WorkError::Flushed, true);
        }
    }

    /// Sends the bytes that a peer reads, behind those of earlier reads.
    pub(super) fn answer_read(&self, number: u64, bytes: Vec<u8>) {
        let is_first = {
            let mut state = lock(&self.state);
            let rest = bytes.len() as u64 * self.world.0.model.payload_scale;
            state.answers.push_back(Answer { number, bytes, rest });
            state.answers.len() == 1
        };
        if is_first {
            self.send_answer();
        }
    }

    /// Puts the bytes of the oldest answer on the network.
    fn send_answer(&self) {
        let Some(peer) = self.other() else { return };
        let Some(rest) = lock(&self.state).answers.front().map(|answer| answer.rest) else { return };
        let begin_ns = self.world.0.executor.now_ns();
        let stage = self.world.0.stage((self.node, peer.node), rest);
        let this = self.this.clone();
        let left: Call = Box::new(move || {
            let Some(queue_pair) = this.upgrade() else { return };
            match stage.kept {
                None => queue_pair.has_answered_read(begin_ns),
                Some(kept) => queue_pair.has_lost_of_answer(kept, stage.at_end),
            }
        });
        self.world.0.flows.carry(self.world.0.path(self.node, peer.node), stage.bytes, None, left);
    }

    /// Handles the loss of a packet: the peer asks for the bytes from there on when it learns of it.
    fn has_lost_of_answer(&self, kept: u64, at_end: bool) {
        let Some(peer) = self.peer_node() else { return };
        let followed = {
            let mut state = lock(&self.state);
            let followed = !at_end || state.answers.len() > 1;
            let Some(answer) = state.answers.front_mut() else { return };
            answer.rest -= kept;
            followed
        };
        let at_ns = self.world.0.executor.now_ns() + self.world.0.pause_ns((self.node, peer), followed);
        self.call_at(at_ns, Self::send_answer);
    }

    /// Handles the departure of the last byte of an answer. The next answer follows, or a refusal behind the last one.
    fn has_answered_read(&self, begin_ns: u64) {
        let (answer, more, refusal) = {
            let mut state = lock(&self.state);
            // A queue pair that broke meanwhile has none.
            let Some(answer) = state.answers.pop_front() else { return };
            let more = !state.answers.is_empty();
            (answer, more, if more { None } else { state.refusal.take() })
        };
        if let Some(peer) = self.other() {
            let end_ns = self.world.0.executor.now_ns();
            let arrival_ns = {
                let mut state = lock(&self.state);
                let arrival_ns = end_ns + self.world.0.flight_ns((self.node, peer.node));
                state.last_arrivals_ns.1 = arrival_ns.max(state.last_arrivals_ns.1);
                state.last_arrivals_ns.1
            };
            let Answer { number, bytes, .. } = answer;
            let count = bytes.len() as u64 * self.world.0.model.payload_scale;
            lock(&self.world.0.log).carried((self.node, peer.node), None, true, count, (begin_ns, end_ns, arrival_ns));
            peer.call_at(arrival_ns, move |peer| peer.has_read(number, &bytes));
        }
        if more {
            self.send_answer();
        }
        if let Some((number, error)) = refusal {
            self.answer(number, Err(error));
        }
    }

    /// Handles the arrival of the bytes of a read.
    pub(super) fn has_read(&self, number: u64, bytes: &[u8]) {
        {
            let mut state = lock(&self.state);
            let state = &mut *state;
            let Some(outstanding) = state.outstanding_mut(number) else { return };
            let Work::Read { into, .. } = outstanding.request.work_mut() else { return };
            into.copy_from_slice(bytes);
            state.reads_open -= 1;
        }
        self.acknowledged(number, Ok(bytes.len()));
        if self.world.0.model.nic.reads_max > 0 {
            self.begin_next(false);
        }
    }
}
