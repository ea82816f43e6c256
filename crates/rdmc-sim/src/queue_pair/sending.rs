//! The sending side: from the software's post to the acknowledgement.

use std::sync::Arc;

use rdmc_fabric::{UNSIGNALED_MAX, Work, WorkError, WorkRequest};

use super::{Content, Departure, Message, Outstanding, PACKET_BYTES, SimQueuePair};
use crate::flows::{Call, wire_ns};
use crate::simulation::lock;
use crate::world::WorldShared;

impl SimQueuePair {
    /// Rings the doorbell: the adapter sees all posted requests at `at_ns`.
    pub(super) fn ring(&self, at_ns: u64) {
        let count = {
            let mut state = lock(&self.state);
            let count = state.waiting.len() - state.rung;
            state.rung += count;
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
                    state.seen += count;
                }
                queue_pair.begin_next(false);
            }
        };
        if at_ns > self.world.0.executor.now_ns() { self.world.0.executor.call_at(at_ns, learn) } else { learn() }
    }

    /// Begins the next request, if the adapter has seen one and none is leaving. If it follows one that has left, its
    /// payload `is_fetched`.
    pub(super) fn begin_next(&self, is_fetched: bool) {
        let attempt = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            if state.broken || state.leaving.is_some() || state.seen == 0 || !self.pairing.is_joined() {
                return;
            }
            let reads = matches!(state.waiting.front().map(WorkRequest::work), Some(Work::Read { .. }));
            let reads_max = self.world.0.model.nic.reads_max;
            if reads && reads_max > 0 && state.reads_open >= reads_max {
                return;
            }
            let Some(request) = state.waiting.pop_front() else { return };
            state.reads_open += u32::from(reads);
            state.seen -= 1;
            state.rung -= 1;
            state.outstanding.push_back(Outstanding { request, result: None });
            let attempt = state.next_attempt();
            state.leaving = Some(Departure { flow: None, stalled: false, attempt, rest: None });
            attempt
        };
        let free_ns = self.world.0.occupy_adapter(self.node, true) + self.queueing_ns(is_fetched);
        self.call_at(free_ns, move |queue_pair| {
            let current = lock(&queue_pair.state).leaving.as_ref().is_some_and(|leaving| leaving.attempt == attempt);
            if current {
                queue_pair.leave();
            }
        });
    }

    /// Puts the bytes of the newest outstanding request on the network.
    pub(super) fn leave(&self) {
        if self.is_cut_off() {
            {
                let mut state = lock(&self.state);
                let attempt = state.next_attempt();
                let Some(leaving) = &mut state.leaving else { return };
                (leaving.stalled, leaving.attempt) = (true, attempt);
            }
            return self.give_up_later();
        }
        let Some(peer) = self.pairing.peer() else {
            return self.break_with(WorkError::ConnectionLost, false);
        };
        let model = &self.world.0.model;
        let (content, number, attempt, rest) = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            let attempt = state.next_attempt();
            let (Some(newest), Some(leaving)) = (state.outstanding.back(), &mut state.leaving) else { return };
            leaving.attempt = attempt;
            let number = state.first_outstanding + state.outstanding.len() as u64 - 1;
            (Content::of(newest.request.work()), number, leaving.attempt, leaving.rest)
        };
        let bytes = model.nic.header_bytes
            + match &content {
                Content::Send { data, .. } => data.len() as u64 * model.payload_scale,
                Content::Write { data, .. } => model.written(data.len()),
                Content::Read { .. } => 0,
            };
        let begin_ns = self.world.0.executor.now_ns();
        let rest = rest.unwrap_or(bytes);
        let stage = self.world.0.stage((self.node, peer.node), rest);
        let this = self.this.clone();
        let left: Call = Box::new(move || {
            let Some(queue_pair) = this.upgrade() else { return };
            match stage.kept {
                None => queue_pair.has_left(attempt, Message { number, content }, bytes, begin_ns),
                Some(kept) => queue_pair.has_lost(attempt, rest - kept, stage.at_end),
            }
        });
        let path = self.world.0.path(self.node, peer.node);
        let notice = (model.nic.notice_bytes > 0 && stage.kept.is_none()).then(|| {
            // The receive says when, if it is there already. Those before it say the same.
            let said = lock(&peer.state).receives.front().and_then(WorkRequest::near_bytes);
            let near_bytes = said.map_or(model.nic.notice_bytes, |bytes| u64::from(bytes) * model.payload_scale);
            let this = self.this.clone();
            let near: Call = Box::new(move || {
                if let Some(queue_pair) = this.upgrade() {
                    queue_pair.near(&peer);
                }
            });
            (near_bytes, near)
        });
        let flow = self.world.0.flows.carry(path, stage.bytes, notice, left);
        if let Some(leaving) = &mut lock(&self.state).leaving
            && leaving.attempt == attempt
        {
            leaving.flow = flow;
        }
    }

    /// Handles the loss of a packet: the request goes on from there when this end learns of it.
    fn has_lost(&self, attempt: u64, rest: u64, at_end: bool) {
        let Some(peer) = self.peer_node() else { return };
        let (again, followed) = {
            let mut state = lock(&self.state);
            let again = state.next_attempt();
            let followed = !at_end || state.seen > 0;
            let current = |leaving: &&mut Departure| leaving.attempt == attempt && !leaving.stalled;
            let Some(leaving) = state.leaving.as_mut().filter(current) else { return };
            (leaving.flow, leaving.rest, leaving.attempt) = (None, Some(rest), again);
            (again, followed)
        };
        let at_ns = self.world.0.executor.now_ns() + self.world.0.pause_ns((self.node, peer), followed);
        self.call_at(at_ns, move |queue_pair| {
            let current = |leaving: &Departure| leaving.attempt == again && !leaving.stalled;
            if lock(&queue_pair.state).leaving.as_ref().is_some_and(current) {
                queue_pair.leave();
            }
        });
    }

    /// Marks the receive at the other end as nearly done. The sending end is marked when the last byte has left:
    /// otherwise a block to another neighbour would begin earlier, share the port and delay this one.
    pub(super) fn near(&self, peer: &Arc<Self>) {
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

    /// Handles the departure of the last byte of a request.
    pub(super) fn has_left(&self, attempt: u64, message: Message, bytes: u64, begin_ns: u64) {
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
        if let Some(peer) = self.pairing.peer() {
            let end_ns = self.world.0.executor.now_ns();
            let arrival_ns = {
                let mut state = lock(&self.state);
                let arrival_ns = end_ns + self.world.0.flight_ns((self.node, peer.node));
                state.last_arrivals_ns.0 = arrival_ns.max(state.last_arrivals_ns.0);
                state.last_arrivals_ns.0
            };
            let one_sided = !matches!(message.content, Content::Send { .. });
            let times = (begin_ns, end_ns, arrival_ns);
            lock(&self.world.0.log).carried((self.node, peer.node), message.content.imm(), one_sided, bytes, times);
            let from = self.this.clone();
            self.world.0.executor.call_at(arrival_ns, move || peer.arrive(message, from));
        }
        self.begin_next(true);
    }

    /// Breaks this end later, if the peer is still unreachable then.
    pub(super) fn give_up_later(&self) {
        let attempt = lock(&self.state).leaving.as_ref().map(|leaving| leaving.attempt);
        let at_ns = self.world.0.executor.now_ns() + self.world.0.model.nic.retry_ns;
        self.call_at(at_ns, move |queue_pair| {
            let still = |leaving: &Departure| leaving.stalled && Some(leaving.attempt) == attempt;
            if lock(&queue_pair.state).leaving.as_ref().is_some_and(still) {
                queue_pair.break_with(WorkError::ConnectionLost, true);
            }
        });
    }

    /// Breaks this end later, if an unreachable or vanished peer has still not acknowledged a request that has left.
    pub(super) fn give_up_unacknowledged_later(&self) {
        let (oldest, stalls) = {
            let mut state = lock(&self.state);
            state.stalls += 1;
            if state.outstanding.is_empty() {
                return;
            }
            (state.first_outstanding, state.stalls)
        };
        let at_ns = self.world.0.executor.now_ns() + self.world.0.model.nic.retry_ns;
        self.call_at(at_ns, move |queue_pair| {
            let waits = {
                let state = lock(&queue_pair.state);
                !state.outstanding.is_empty() && (state.first_outstanding, state.stalls) == (oldest, stalls)
            };
            let gone = queue_pair.pairing.is_joined() && queue_pair.pairing.peer().is_none();
            if waits && (gone || queue_pair.is_cut_off()) {
                queue_pair.break_with(WorkError::ConnectionLost, true);
            }
        });
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.peer_node().is_some_and(|peer| !self.world.0.reach_each_other(self.node, peer))
    }

    /// Handles the acknowledgement of a request.
    pub(super) fn acknowledged(&self, number: u64, result: Result<usize, WorkError>) {
        let (done, error) = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            if state.broken {
                return;
            }
            let Some(outstanding) = state.outstanding_mut(number) else { return };
            outstanding.result = Some(result);
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
        self.deliver(done);
        if let Some(cause) = error {
            self.break_with(cause, true);
        }
    }

    /// Returns the time for which the newest outstanding request waits for its payload, and behind queued bytes of
    /// longer ones, if it is short. The payload waits behind as many bytes of longer ones, which are fetched too.
    fn queueing_ns(&self, is_fetched: bool) -> u64 {
        let WorldShared { model, nodes, flows, .. } = &*self.world.0;
        let Some(bytes) = lock(&self.state).outstanding.back().map(|newest| {
            let work = newest.request.work();
            match work {
                Work::Send { .. } => work.len() as u64 * model.payload_scale,
                // Only the request of a read leaves.
                Work::Read { .. } => 0,
                _ => model.written(work.len()),
            }
        }) else {
            return 0;
        };
        if bytes > PACKET_BYTES || self.peer_node() == Some(self.node) {
            return 0;
        }
        let fetches = !is_fetched && model.nic.fetch_ns > 0 && bytes > model.nic.inline_bytes;
        let fetch_ns = if fetches { model.nic.fetch_ns } else { 0 };
        let egress = nodes[self.node.index()].egress;
        let queue_ns = match flows.rate_of(&[egress]) {
            _ if model.nic.queue_bytes == 0 => 0,
            // It waits for the stopped port instead.
            0 => 0,
            rate => wire_ns(flows.count_longer(egress, PACKET_BYTES).saturating_mul(model.nic.queue_bytes), rate),
        };
        fetch_ns + queue_ns * (1 + u64::from(fetches))
    }
}
