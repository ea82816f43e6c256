//! The network: links, and flows that share them max-min fairly.
//!
//! Rates are whole bits per second and amounts are bits times nanoseconds. So only fair shares and the end of a flow
//! are rounded, both to the slower side.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::simulation::{Executor, lock};

/// A direction of a port, or of an uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkIndex(pub(crate) u32);

/// The number of a flow in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FlowNumber(u64);

/// A function that is called when a flow reaches a point.
pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// All links of a network and the flows on them.
#[derive(Clone)]
pub(crate) struct Flows {
    executor: Executor,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    links: Vec<Link>,
    flows: BTreeMap<FlowNumber, Flow>,
    next: u64,
}

struct Link {
    bits_per_second: u64,
    flows: Vec<FlowNumber>,
    /// Amount carried so far, in bits times nanoseconds.
    carried: u128,
}

struct Flow {
    path: Vec<LinkIndex>,
    bytes: u64,
    /// Remaining bits, times nanoseconds per second.
    remaining: u128,
    bits_per_second: u64,
    since_ns: u64,
    /// Number of changes of the rate: events of earlier rates are void.
    generation: u64,
    /// Whether its rate is being computed.
    undecided: bool,
    /// The remaining amount at which `Call` is called.
    notice: Option<(u128, Call)>,
    done: Option<Call>,
}

impl Flow {
    /// Accounts for the time since the rate was set, at the flow and at the links of its path.
    fn advance(&mut self, links: &mut [Link], now_ns: u64) {
        let carried = u128::from(self.bits_per_second) * u128::from(now_ns - self.since_ns);
        let carried = carried.min(self.remaining);
        self.remaining -= carried;
        self.since_ns = now_ns;
        for link in &self.path {
            links[link.0 as usize].carried += carried;
        }
    }

    /// Returns when the flow reaches its next point at its current rate.
    fn next_point_ns(&self) -> Option<u64> {
        let target = self.notice.as_ref().map_or(0, |(at, _)| (*at).min(self.remaining));
        let rest = self.remaining - target;
        let rate = u128::from(self.bits_per_second);
        if rest == 0 {
            return Some(self.since_ns);
        }
        if rate == 0 {
            return None;
        }
        Some(self.since_ns.saturating_add(u64::try_from(rest.div_ceil(rate)).unwrap_or(u64::MAX)))
    }
}

impl Flows {
    pub(crate) fn new(executor: Executor) -> Self {
        Self { executor, state: Arc::default() }
    }

    /// Drops all flows, which hold references to their world.
    pub(crate) fn end(&self) {
        let flows = {
            let mut state = lock(&self.state);
            state.links.iter_mut().for_each(|link| link.flows.clear());
            std::mem::take(&mut state.flows)
        };
        drop(flows);
    }

    /// Adds a link.
    pub(crate) fn add_link(&self, bits_per_second: u64) -> LinkIndex {
        let mut state = lock(&self.state);
        let index = u32::try_from(state.links.len()).expect("a few links per node");
        state.links.push(Link { bits_per_second, flows: Vec::new(), carried: 0 });
        LinkIndex(index)
    }

    /// Changes the rate of a link; 0 stops its flows.
    pub(crate) fn set_rate(&self, link: LinkIndex, bits_per_second: u64) {
        {
            let mut state = lock(&self.state);
            state.links[link.0 as usize].bits_per_second = bits_per_second;
        }
        self.share_again(&[link]);
    }

    /// Returns the lowest rate along a path.
    pub(crate) fn rate_of(&self, path: &[LinkIndex]) -> u64 {
        let state = lock(&self.state);
        path.iter().map(|link| state.links[link.0 as usize].bits_per_second).min().unwrap_or(u64::MAX)
    }

    /// Counts the flows on a link that had more than `bytes` at the start.
    pub(crate) fn count_longer(&self, link: LinkIndex, bytes: u64) -> u64 {
        let state = lock(&self.state);
        state.links[link.0 as usize].flows.iter().filter(|flow| state.flows[flow].bytes > bytes).count() as u64
    }

    /// Returns the bytes that a link has carried for flows so far.
    pub(crate) fn carried_bytes(&self, link: LinkIndex) -> u64 {
        let now_ns = self.executor.now_ns();
        let mut state = lock(&self.state);
        let state = &mut *state;
        for number in state.links[link.0 as usize].flows.clone() {
            state.flows.get_mut(&number).expect("links list flows that exist").advance(&mut state.links, now_ns);
        }
        u64::try_from(state.links[link.0 as usize].carried / BIT_NS_PER_BYTE).unwrap_or(u64::MAX)
    }

    /// Carries bytes over a path: few bytes go between the packets of flows, others are a flow. Calls `notice` and
    /// `done` as [`start`](Self::start) does, `notice` at once for few bytes. Returns the flow, if any.
    pub(crate) fn carry(
        &self,
        path: Vec<LinkIndex>,
        bytes: u64,
        notice: Option<(u64, Call)>,
        done: Call,
    ) -> Option<FlowNumber> {
        let rate = self.rate_of(&path);
        if (bytes > SMALL_BYTES || rate == 0) && !path.is_empty() {
            return Some(self.start(path, bytes, notice, done));
        }
        if let Some((_, near)) = notice {
            near();
        }
        self.executor.call_at(self.executor.now_ns() + wire_ns(bytes, rate), done);
        None
    }

    /// Starts a flow of `bytes`, which calls `notice` when only its number of bytes is left, and `done` at the end.
    pub(crate) fn start(
        &self,
        path: Vec<LinkIndex>,
        bytes: u64,
        notice: Option<(u64, Call)>,
        done: Call,
    ) -> FlowNumber {
        let number = {
            let mut state = lock(&self.state);
            let number = FlowNumber(state.next);
            state.next += 1;
            for link in &path {
                state.links[link.0 as usize].flows.push(number);
            }
            let flow = Flow {
                path: path.clone(),
                bytes,
                remaining: u128::from(bytes) * BIT_NS_PER_BYTE,
                bits_per_second: 0,
                since_ns: self.executor.now_ns(),
                generation: 0,
                undecided: false,
                notice: notice.map(|(left, call)| (u128::from(left) * BIT_NS_PER_BYTE, call)),
                done: Some(done),
            };
            state.flows.insert(number, flow);
            number
        };
        self.share_again(&path);
        number
    }

    /// Ends a flow without a call.
    pub(crate) fn cancel(&self, number: FlowNumber) {
        let removed = {
            let mut state = lock(&self.state);
            let removed = state.flows.remove(&number);
            if let Some(flow) = &removed {
                state.leave(number, &flow.path);
            }
            removed
        };
        if let Some(flow) = removed {
            self.share_again(&flow.path);
        }
    }

    /// Shares the links of a path again, with all links that share a flow with them.
    fn share_again(&self, path: &[LinkIndex]) {
        let now_ns = self.executor.now_ns();
        let events = lock(&self.state).share(path, now_ns);
        for (number, generation, at_ns) in events {
            let flows = self.clone();
            self.executor.call_at(at_ns, move || flows.reach(number, generation));
        }
    }

    /// Handles the point that a flow has reached, unless its rate has changed since.
    fn reach(&self, number: FlowNumber, generation: u64) {
        let now_ns = self.executor.now_ns();
        let (call, ended, again) = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            let Some(flow) = state.flows.get_mut(&number).filter(|flow| flow.generation == generation) else { return };
            flow.advance(&mut state.links, now_ns);
            let call = flow.notice.take().map(|(_, call)| call);
            if flow.remaining > 0 {
                (call, None, flow.next_point_ns())
            } else {
                let mut flow = state.flows.remove(&number).expect("it was just there");
                state.leave(number, &flow.path);
                (call, flow.done.take().map(|done| (done, flow.path)), None)
            }
        };
        if let Some(at_ns) = again {
            let flows = self.clone();
            self.executor.call_at(at_ns, move || flows.reach(number, generation));
        }
        if let Some(call) = call {
            call();
        }
        if let Some((done, path)) = ended {
            self.share_again(&path);
            done();
        }
    }
}

impl State {
    fn leave(&mut self, number: FlowNumber, path: &[LinkIndex]) {
        for link in path {
            self.links[link.0 as usize].flows.retain(|&other| other != number);
        }
    }

    /// Gives every affected flow its max-min fair rate; returns the next points of the flows whose rates changed.
    fn share(&mut self, path: &[LinkIndex], now_ns: u64) -> Vec<(FlowNumber, u64, u64)> {
        let (links, mut undecided) = self.reachable_from(path);
        // The remaining rate of each link and the number of its undecided flows; zero for other links.
        let mut left = vec![(0, 0); self.links.len()];
        for &link in &links {
            let Link { bits_per_second, flows, .. } = &self.links[link.0 as usize];
            left[link.0 as usize] = (*bits_per_second, flows.len() as u64);
        }
        let mut events = Vec::new();
        while undecided > 0 {
            // The link with the smallest share for each of its flows decides about them.
            let shares = links.iter().map(|&link| (link, left[link.0 as usize])).filter(|(_, (_, count))| *count > 0);
            let Some((link, (rate, count))) = shares.min_by_key(|(_, (rate, count))| rate / count) else { break };
            let share = rate / count;
            for number in self.links[link.0 as usize].flows.clone() {
                let flow = self.flows.get_mut(&number).expect("links list flows that exist");
                if !std::mem::take(&mut flow.undecided) {
                    continue;
                }
                undecided -= 1;
                for link in &flow.path {
                    let (rate, count) = &mut left[link.0 as usize];
                    *rate -= share;
                    *count -= 1;
                }
                if flow.bits_per_second != share || flow.generation == 0 {
                    flow.advance(&mut self.links, now_ns);
                    flow.bits_per_second = share;
                    flow.generation += 1;
                    if let Some(at_ns) = flow.next_point_ns() {
                        events.push((number, flow.generation, at_ns));
                    }
                }
            }
        }
        // In the order of the flows, independent of the order of the links.
        events.sort_unstable();
        events
    }

    /// Returns, in order, the links that share a flow with those of a path, directly or through other links. Marks all
    /// their flows as undecided and counts them.
    fn reachable_from(&mut self, path: &[LinkIndex]) -> (Vec<LinkIndex>, usize) {
        let mut known = vec![false; self.links.len()];
        let mut links: Vec<LinkIndex> = Vec::new();
        let mut reach = |links: &mut Vec<LinkIndex>, link: LinkIndex| {
            if !std::mem::replace(&mut known[link.0 as usize], true) {
                links.push(link);
            }
        };
        path.iter().for_each(|&link| reach(&mut links, link));
        let (mut next, mut undecided) = (0, 0);
        while let Some(&link) = links.get(next) {
            next += 1;
            for number in &self.links[link.0 as usize].flows {
                let flow = self.flows.get_mut(number).expect("links list flows that exist");
                if !std::mem::replace(&mut flow.undecided, true) {
                    undecided += 1;
                    flow.path.iter().for_each(|&other| reach(&mut links, other));
                }
            }
        }
        links.sort_unstable();
        (links, undecided)
    }
}

/// Returns the time of `bytes` at a rate in bits per second above 0.
pub(crate) fn wire_ns(bytes: u64, bits_per_second: u64) -> u64 {
    u64::try_from(u128::from(bytes) * BIT_NS_PER_BYTE / u128::from(bits_per_second)).unwrap_or(u64::MAX)
}

/// Longest message in bytes that does not share links, unless a port is stopped.
const SMALL_BYTES: u64 = 256;
/// A byte, in bits times nanoseconds per second.
const BIT_NS_PER_BYTE: u128 = 8_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Runs flows, given by their start, bytes and path, on links of 8 Gbit/s (a byte per ns); returns their ends in
    /// ns.
    fn ends(links: usize, flows: &[(u64, u64, &[u32])]) -> Vec<u64> {
        let executor = Executor::new();
        let network = Flows::new(executor.clone());
        for _ in 0..links {
            network.add_link(8_000_000_000);
        }
        let ends = Arc::new(Mutex::new(vec![0; flows.len()]));
        for (place, &(start, bytes, path)) in flows.iter().enumerate() {
            let path: Vec<_> = path.iter().map(|&link| LinkIndex(link)).collect();
            let (ends, network, clock) = (ends.clone(), network.clone(), executor.clone());
            executor.call_at(start, move || {
                network.start(path, bytes, None, Box::new(move || lock(&ends)[place] = clock.now_ns()));
            });
        }
        let sleeper = executor.sleep_until(rdmc_fabric::Timestamp::from_nanos(1_000_000));
        executor.run(Duration::from_secs(1), sleeper).unwrap();
        lock(&ends).clone()
    }

    #[test]
    fn a_flow_alone_has_the_link() {
        assert_eq!(ends(2, &[(5, 1000, &[0, 1])]), [1005]);
    }

    #[test]
    fn two_flows_share_a_link_while_both_are_there() {
        // The second flow has half from 500 on: the first ends at 1500, the second, with 500 left, at 2000.
        assert_eq!(ends(3, &[(0, 1000, &[0, 1]), (500, 1000, &[0, 2])]), [1500, 2000]);
    }

    #[test]
    fn what_one_cannot_use_goes_to_the_others() {
        // Three on link 0, one of which shares link 1 with two more: that one gets a third of link 1, not more.
        let flows: [(u64, u64, &[u32]); 3] = [(0, 300, &[0, 1]), (0, 300, &[1]), (0, 700, &[0])];
        // The first two have 1/2 each until 600; the third the other half of link 0 until then, 300; then all.
        assert_eq!(ends(2, &flows), [600, 600, 1000]);
    }

    #[test]
    fn a_notice_comes_before_the_end() {
        let executor = Executor::new();
        let network = Flows::new(executor.clone());
        let link = network.add_link(8_000_000_000);
        let log = Arc::new(Mutex::new(Vec::new()));
        let note = |what: &'static str| -> Call {
            let (log, clock) = (log.clone(), executor.clone());
            Box::new(move || lock(&log).push((what, clock.now_ns())))
        };
        network.start(vec![link], 1000, Some((200, note("notice"))), note("end"));
        network.start(vec![link], 100, Some((200, note("at once"))), note("short"));
        let sleeper = executor.sleep_until(rdmc_fabric::Timestamp::from_nanos(10_000));
        executor.run(Duration::from_secs(1), sleeper).unwrap();
        assert_eq!(*lock(&log), [("at once", 0), ("short", 200), ("notice", 900), ("end", 1100)]);
    }

    #[test]
    fn a_stopped_link_holds_its_flows() {
        let executor = Executor::new();
        let network = Flows::new(executor.clone());
        let link = network.add_link(8_000_000_000);
        let end = Arc::new(Mutex::new(0));
        let (place, clock) = (end.clone(), executor.clone());
        network.start(vec![link], 1000, None, Box::new(move || *lock(&place) = clock.now_ns()));
        for (at, rate) in [(300, 0), (800, 8_000_000_000)] {
            let network = network.clone();
            executor.call_at(at, move || network.set_rate(link, rate));
        }
        let sleeper = executor.sleep_until(rdmc_fabric::Timestamp::from_nanos(10_000));
        executor.run(Duration::from_secs(1), sleeper).unwrap();
        assert_eq!(*lock(&end), 1500);
        assert_eq!(network.carried_bytes(link), 1000);
    }
}
