//! What the two ends of a gateway have in common: its flows, and what waits for a place in a slab.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::GatewayConfig;
use super::flow::{Flow, Over, WindowMemory};
use super::note::{FlowNumber, Piece, RefusedReason, Violation};
use super::target::Target;
use crate::sync::lock;

/// The flows of one end of a session.
pub(super) struct Hub {
    state: Mutex<HubState>,
    /// Changes whenever something waits, and whenever a flow is over.
    changed: watch::Sender<()>,
    pub(super) memory: Arc<WindowMemory>,
    flows_max: usize,
}

#[derive(Debug, Default)]
struct HubState {
    flows: HashMap<FlowNumber, Arc<Flow>>,
    /// The number of the newest flow.
    last: FlowNumber,
    /// Pieces that are to leave, in order.
    pieces: VecDeque<Piece>,
    /// Flows with bytes to be granted.
    granting: VecDeque<Arc<Flow>>,
    /// Flows with bytes to be read, and how many of them belong to the present turn.
    ready: VecDeque<(Arc<Flow>, usize)>,
    /// Whether new flows are refused.
    closing: bool,
    /// Whether nothing leaves any more but `pieces`.
    stopped: bool,
}

/// What goes into a slab next.
#[derive(Debug)]
pub(super) enum Next {
    Piece(Piece),
    Grant(Arc<Flow>),
    /// At most so many bytes of a flow.
    Bytes(Arc<Flow>, usize),
}

impl Hub {
    pub(super) fn new(config: &GatewayConfig) -> Self {
        let memory = Arc::new(WindowMemory::new(config.window, config.memory_max));
        Self { state: Mutex::default(), changed: watch::Sender::new(()), memory, flows_max: config.flows_max }
    }

    fn change<T>(&self, change: impl FnOnce(&mut HubState) -> T) -> T {
        let value = change(&mut lock(&self.state));
        self.changed.send_replace(());
        value
    }

    async fn until<T>(&self, mut look: impl FnMut(&HubState) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(value) = look(&lock(&self.state)) {
                return value;
            }
            changed.changed().await.expect("the hub lives as long as this future");
        }
    }
}

/// The flows.
impl Hub {
    pub(super) fn flow_count(&self) -> usize {
        lock(&self.state).flows.len()
    }

    /// Adds a flow of this end, and announces it.
    pub(super) fn open(&self, target: Target, passed: u8) -> Result<Arc<Flow>, RefusedReason> {
        let flow = self.change(|state| {
            if state.closing {
                return Err(RefusedReason::Closing);
            }
            if state.flows.len() >= self.flows_max || state.pieces.len() >= self.pieces_max() / 2 {
                return Err(RefusedReason::TooMany);
            }
            let flow = state.add(state.last + 1, &self.memory);
            state.pieces.push_back(Piece::Open { flow: flow.number, target, passed });
            Ok(flow)
        })?;
        self.widen(&flow);
        Ok(flow)
    }

    /// Adds a flow of the other end, or refuses it: then the other end hears of it.
    pub(super) fn admit(&self, number: FlowNumber) -> Result<Result<Arc<Flow>, RefusedReason>, Violation> {
        let flow = self.change(|state| {
            if number != state.last + 1 {
                return Err(Violation("a flow out of order"));
            }
            // Answers wait while the other end fetches nothing.
            if state.pieces.len() > self.pieces_max() {
                return Err(Violation("more flows than are allowed"));
            }
            state.last = number;
            let reason = match state.closing {
                true => RefusedReason::Closing,
                false if state.flows.len() >= self.flows_max => RefusedReason::TooMany,
                false => return Ok(Ok(state.add(number, &self.memory))),
            };
            state.pieces.push_back(Piece::Refused { flow: number, reason });
            Ok(Err(reason))
        })?;
        if let Ok(flow) = &flow {
            self.widen(flow);
        }
        Ok(flow)
    }

    /// Returns a flow; `None` if it is over.
    pub(super) fn flow(&self, number: FlowNumber) -> Result<Option<Arc<Flow>>, Violation> {
        let state = lock(&self.state);
        if number > state.last {
            return Err(Violation("a piece of a flow that was not opened"));
        }
        Ok(state.flows.get(&number).cloned())
    }

    /// Forgets a flow, after a last word to the other end.
    pub(super) fn remove(&self, number: FlowNumber, last: Option<Piece>) {
        self.change(|state| {
            if state.flows.remove(&number).is_some() {
                state.pieces.extend(last);
                // Their shares would keep its socket open.
                state.ready.retain(|(flow, _)| flow.number != number);
                state.granting.retain(|flow| flow.number != number);
            }
        });
    }

    /// Takes no more flows.
    pub(super) fn close(&self) {
        self.change(|state| state.closing = true);
    }

    /// Waits until no flow is left.
    pub(super) async fn emptied(&self) {
        self.until(|state| state.flows.is_empty().then_some(())).await;
    }

    /// Resets all flows. After the last pieces have left, nothing more does.
    pub(super) fn stop(&self) {
        let flows = self.change(|state| {
            (state.closing, state.stopped) = (true, true);
            state.ready.clear();
            state.granting.clear();
            let flows = std::mem::take(&mut state.flows);
            state.pieces.extend(flows.keys().map(|&flow| Piece::Reset { flow }));
            flows
        });
        flows.values().for_each(|flow| flow.change(|state| state.end(Over::Ended)));
    }

    /// Resets the flows whose last bytes have not come. The others go on until these are written. After the last pieces
    /// have left, nothing more does.
    pub(super) fn leave(&self) {
        let broken = self.change(|state| {
            (state.closing, state.stopped) = (true, true);
            state.ready.clear();
            state.granting.clear();
            let (whole, broken) =
                std::mem::take(&mut state.flows).into_iter().partition(|(_, flow)| flow.is_finished());
            state.flows = whole;
            broken
        });
        let broken: HashMap<FlowNumber, Arc<Flow>> = broken;
        broken.values().for_each(|flow| flow.change(|state| state.end(Over::Ended)));
    }

    fn widen(&self, flow: &Arc<Flow>) {
        if flow.widen() {
            self.grant(flow.clone());
        }
    }

    /// Most pieces that wait: as many as flows can have without any misbehaviour, and more.
    fn pieces_max(&self) -> usize {
        4 * self.flows_max + 1024
    }
}

/// What waits for a place in a slab.
impl Hub {
    pub(super) fn push(&self, piece: Piece) {
        self.change(|state| state.pieces.push_back(piece));
    }

    /// Queues a flow that has bytes to be granted.
    pub(super) fn grant(&self, flow: Arc<Flow>) {
        self.change(|state| {
            if !state.stopped && state.flows.contains_key(&flow.number) {
                state.granting.push_back(flow);
            }
        });
    }

    /// Queues a flow that has bytes to be read.
    pub(super) fn ready(&self, flow: &Arc<Flow>) {
        flow.queue();
        self.change(|state| {
            if state.flows.contains_key(&flow.number) {
                state.queue(flow.clone());
            }
        });
    }

    /// Waits for something to send; `false` if nothing more will come.
    pub(super) async fn waiting(&self) -> bool {
        self.until(|state| match state.has_next() {
            true => Some(true),
            false => state.stopped.then_some(false),
        })
        .await
    }

    /// Takes what goes into a slab next. Pieces and grants come before bytes, whose flows take turns.
    pub(super) fn next(&self) -> Option<Next> {
        let mut state = lock(&self.state);
        if let Some(piece) = state.pieces.pop_front() {
            return Some(Next::Piece(piece));
        }
        if let Some(flow) = state.granting.pop_front() {
            return Some(Next::Grant(flow));
        }
        state.ready.pop_front().map(|(flow, left)| Next::Bytes(flow, left))
    }

    /// Gives back a flow of which `left` bytes of its turn are left: it goes on, or waits for its next turn.
    pub(super) fn turn(&self, flow: Arc<Flow>, left: usize) {
        let mut state = lock(&self.state);
        if !state.flows.contains_key(&flow.number) {
            return;
        }
        match left {
            0 => state.queue(flow),
            left => state.ready.push_front((flow, left)),
        }
    }
}

impl HubState {
    fn add(&mut self, number: FlowNumber, memory: &Arc<WindowMemory>) -> Arc<Flow> {
        let flow = Arc::new(Flow::new(number, memory.clone()));
        self.last = number;
        self.flows.insert(number, flow.clone());
        flow
    }

    /// Queues one of the flows for a turn of its own. The more flows there are, the shorter it is, so that all have one soon.
    fn queue(&mut self, flow: Arc<Flow>) {
        let turn = (ROUND_LEN / self.flows.len()).clamp(TURN_LEN_MIN, TURN_LEN_MAX);
        self.ready.push_back((flow, turn));
    }

    fn has_next(&self) -> bool {
        !(self.pieces.is_empty() && self.granting.is_empty() && self.ready.is_empty())
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("flows", &self.flow_count()).finish_non_exhaustive()
    }
}

/// Most bytes of one turn of a flow.
const TURN_LEN_MAX: usize = 64 << 10;
/// Fewest bytes of one turn: each costs a call of the system, and a piece of a slab.
const TURN_LEN_MIN: usize = 16 << 10;
/// Bytes of one round of turns, within these bounds.
const ROUND_LEN: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(flows_max: usize) -> Hub {
        Hub::new(&GatewayConfig { flows_max, ..GatewayConfig::default() })
    }

    fn target() -> Target {
        Target::new("127.0.0.1", 1).unwrap()
    }

    #[test]
    fn there_are_no_more_flows_than_are_allowed() {
        let (entrance, exit) = (hub(2), hub(2));
        let first = entrance.open(target(), 0).unwrap();
        entrance.open(target(), 0).unwrap();
        assert_eq!(entrance.open(target(), 0).unwrap_err(), RefusedReason::TooMany);
        entrance.remove(first.number, None);
        assert_eq!(entrance.open(target(), 0).unwrap().number, 3);
        entrance.close();
        assert_eq!(entrance.open(target(), 0).unwrap_err(), RefusedReason::Closing);
        let admitted = [1, 2, 3].map(|number| exit.admit(number).unwrap().map(drop));
        assert_eq!(admitted, [Ok(()), Ok(()), Err(RefusedReason::TooMany)]);
        let next = std::iter::from_fn(|| exit.next()).find_map(|next| match next {
            Next::Piece(piece) => Some(piece),
            _ => None,
        });
        assert_eq!(next, Some(Piece::Refused { flow: 3, reason: RefusedReason::TooMany }));
    }

    #[test]
    fn numbers_out_of_order_are_violations() {
        let exit = hub(8);
        assert!(exit.admit(2).is_err() && exit.admit(1).is_ok() && exit.admit(1).is_err());
        assert!(exit.flow(2).is_err() && exit.flow(1).unwrap().is_some());
        exit.remove(1, None);
        assert!(exit.flow(1).unwrap().is_none());
    }

    #[test]
    fn a_flood_of_flows_that_are_refused_is_a_violation() {
        let exit = hub(1);
        let violated = (1..10_000).find(|&number| exit.admit(number).is_err());
        assert_eq!(violated, Some(4 + 1024 + 3));
    }

    #[test]
    fn a_flood_of_flows_whose_targets_are_refused_is_a_violation() {
        let exit = hub(1);
        let violated = (1..10_000).find(|&number| {
            let violates = exit.admit(number).is_err();
            exit.remove(number, Some(Piece::Refused { flow: number, reason: RefusedReason::NotAllowed }));
            violates
        });
        assert!(violated.is_some());
    }

    #[test]
    fn flows_take_turns() {
        let hub = hub(8);
        let flows: Vec<_> = (0..3).map(|_| hub.open(target(), 0).unwrap()).collect();
        while hub.next().is_some() {}
        flows.iter().for_each(|flow| hub.ready(flow));
        let mut order = Vec::new();
        // Slabs end after every third of a turn.
        for _ in 0..9 {
            let Some(Next::Bytes(flow, left)) = hub.next() else { panic!("flows are ready") };
            order.push(flow.number);
            let next =
                if left == TURN_LEN_MAX { 2 * (TURN_LEN_MAX / 3) } else { left.saturating_sub(TURN_LEN_MAX / 3) };
            hub.turn(flow, if next < TURN_LEN_MAX / 3 { 0 } else { next });
        }
        assert_eq!(order, [1, 1, 1, 2, 2, 2, 3, 3, 3]);
    }

    #[test]
    fn turns_are_short_where_there_are_many_flows() {
        let turn_among = |flows| {
            let hub = hub(100);
            let flows: Vec<_> = (0..flows).map(|_| hub.open(target(), 0).unwrap()).collect();
            while hub.next().is_some() {}
            hub.ready(&flows[0]);
            let Some(Next::Bytes(_, turn)) = hub.next() else { panic!("a flow is ready") };
            turn >> 10
        };
        assert_eq!([1, 4, 8, 16, 64].map(turn_among), [64, 64, 32, 16, 16]);
    }
}
