//! Schedules that adapters execute without software, like CORE-Direct's cross-channel operations (DSN §5.2.3).
//!
//! Before the message, every member posts its whole part of the schedule to its adapter: a receive for every block at
//! its place, on the queue pair of the block's sender, and a list of sends, each with the block it waits for. Software
//! then does nothing until the end, and nothing between the receipt of a block and its relays.
//!
//! The model has:
//! - the network;
//! - each adapter's time for a send with its wait, for a receive, and for both ends of a turn's write;
//! - the doorbell of the root, and the one completion at each member for all blocks.
//!
//! An adapter works through its list in order. It prepares a send while the one before leaves, and sends one block at a
//! time. The model has no time for posting the lists, which happens before the message, no limit of their length, and
//! no failures. Members know the size of the message beforehand; RDMC announces it with the first block.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter::Peekable;
use std::sync::{Arc, Mutex};

use rdmc::Algorithm;
use rdmc_fabric::Timestamp;
use rdmc_schedule::{BlockCount, BlockIndex, Hop, Rank, Schedule, ScheduleError, Sends};
use tokio::sync::mpsc;

use crate::deployment::MulticastTimes;
use crate::simulation::{NodeIndex, lock};
use crate::world::World;

/// A multicast by the adapters alone.
#[derive(Clone, Debug)]
pub struct Offload {
    /// The members, the root first.
    pub members: Vec<NodeIndex>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The order of sends to one receiver.
    pub send_order: SendOrder,
    /// The message's size in bytes, at least 1.
    pub bytes: u64,
    /// The block size in bytes, at least 1.
    pub block_size: u64,
}

/// The condition of a send in an adapter's list, besides its block and the sends before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOrder {
    /// None, as all receives are posted. If a member has two senders, a sender that is ahead of its step takes half of
    /// the port from the other one.
    Free,
    /// The turn of its sender: the receiver's adapter writes to the next sender when the block of the sender before it
    /// has arrived. This is *ready_for_block* without software. A run of blocks from one sender is one turn.
    InTurn,
}

impl Offload {
    /// Runs it in a world, with or without other traffic.
    ///
    /// # Errors
    /// The algorithm does not support this number of members, or there are too many blocks.
    ///
    /// # Panics
    /// If a node is a member twice, or the block size is 0.
    pub async fn run(&self, world: &World) -> Result<MulticastTimes, ScheduleError> {
        let distinct: BTreeSet<NodeIndex> = self.members.iter().copied().collect();
        assert_eq!(distinct.len(), self.members.len(), "a node is a member once");
        let blocks = u32::try_from(self.bytes.div_ceil(self.block_size)).unwrap_or(0);
        let count = u32::try_from(self.members.len()).unwrap_or(u32::MAX);
        let schedule = Schedule::new(&self.algorithm, count, BlockCount(blocks))?;
        let (ended, mut ends) = mpsc::unbounded_channel();
        let lists = (0..count).map(|rank| Mutex::new(WorkList::new(&schedule, Rank(rank), self.send_order))).collect();
        let began = world.now();
        Arc::new(Adapters { world: world.clone(), plan: self.clone(), lists, ended }).begin();
        let mut times = MulticastTimes { began, sent: began, delivered: vec![began; self.members.len() - 1] };
        for _ in 0..count {
            let (rank, at) = ends.recv().await.expect("every member ends, as the schedule is complete");
            match rank.index().checked_sub(1) {
                None => times.sent = at,
                Some(place) => times.delivered[place] = at,
            }
        }
        Ok(times)
    }
}

/// The adapters of all members.
struct Adapters {
    world: World,
    plan: Offload,
    lists: Vec<Mutex<WorkList>>,
    /// Gets each member when it has everything, and the root when it has sent everything.
    ended: mpsc::UnboundedSender<(Rank, Timestamp)>,
}

/// The list of one adapter, and its progress.
struct WorkList {
    sends: Peekable<Sends>,
    /// The blocks of the posted receives on each queue pair, by the rank at the other end.
    receives: BTreeMap<Rank, VecDeque<BlockIndex>>,
    /// Runs of receives from one sender: its rank, and the number of missing blocks.
    runs: VecDeque<(Rank, usize)>,
    held: Vec<bool>,
    /// Number of sends that may leave, by receiver; `None` if all may.
    turns: Option<BTreeMap<Rank, usize>>,
    preparing: bool,
    prepared: Option<Hop>,
    leaving: bool,
}

impl WorkList {
    fn new(schedule: &Schedule, rank: Rank, send_order: SendOrder) -> Self {
        let mut receives: BTreeMap<Rank, VecDeque<BlockIndex>> = BTreeMap::new();
        for receive in schedule.receives(rank) {
            receives.entry(receive.peer).or_default().push_back(receive.block);
        }
        Self {
            sends: schedule.sends(rank).peekable(),
            receives,
            runs: runs(schedule, rank),
            held: vec![rank.is_root(); schedule.blocks().get() as usize],
            turns: (send_order == SendOrder::InTurn).then(|| first_turns(schedule, rank)),
            preparing: false,
            prepared: None,
            leaving: false,
        }
    }

    /// Begins to prepare the next send, if its conditions hold.
    fn next_to_prepare(&mut self) -> bool {
        let Some(send) = self.sends.peek() else { return false };
        if self.preparing || self.prepared.is_some() || !self.held[send.block.index()] {
            return false;
        }
        if let Some(turns) = &mut self.turns {
            match turns.get_mut(&send.peer) {
                Some(left) if *left > 0 => *left -= 1,
                _ => return false,
            }
        }
        self.preparing = true;
        true
    }

    /// Returns the prepared send, if the port is free.
    fn next_to_leave(&mut self) -> Option<Hop> {
        if self.leaving {
            return None;
        }
        let send = self.prepared.take();
        self.leaving = send.is_some();
        send
    }

    /// Fills the oldest receive of a queue pair; returns the sender of the next turn and its number of blocks, if the
    /// sender changes.
    fn fill(&mut self, from: Rank) -> Option<(Rank, usize)> {
        let block = self.receives.get_mut(&from).and_then(VecDeque::pop_front);
        self.held[block.expect("both ends compute the same schedule").index()] = true;
        // Without turns a run may end before an earlier one.
        let run = self.runs.iter().position(|(peer, _)| *peer == from).expect("as many runs as receives");
        self.runs[run].1 -= 1;
        if self.runs[run].1 > 0 {
            return None;
        }
        self.runs.remove(run);
        self.runs.front().copied().filter(|_| self.turns.is_some())
    }

    fn is_complete(&self) -> bool {
        self.runs.is_empty()
    }

    fn has_sent_everything(&mut self) -> bool {
        !self.leaving && !self.preparing && self.prepared.is_none() && self.sends.peek().is_none()
    }
}

/// Returns the runs of a member: each sender and its number of blocks.
fn runs(schedule: &Schedule, rank: Rank) -> VecDeque<(Rank, usize)> {
    let mut runs: VecDeque<(Rank, usize)> = VecDeque::new();
    for receive in schedule.receives(rank) {
        match runs.back_mut() {
            Some((peer, count)) if *peer == receive.peer => *count += 1,
            _ => runs.push_back((receive.peer, 1)),
        }
    }
    runs
}

/// Returns the sends that may leave without a write: those of each receiver's first run.
fn first_turns(schedule: &Schedule, rank: Rank) -> BTreeMap<Rank, usize> {
    let receivers = schedule.sends(rank).map(|send| send.peer).collect::<BTreeSet<_>>();
    let firsts = receivers.into_iter().filter_map(|receiver| Some((receiver, *runs(schedule, receiver).front()?)));
    firsts.filter(|(_, (sender, _))| *sender == rank).map(|(receiver, (_, count))| (receiver, count)).collect()
}

impl Adapters {
    /// Rings the doorbell of the root's adapter.
    fn begin(self: Arc<Self>) {
        let root = self.plan.members[0];
        let now_ns = self.world.0.executor.now_ns();
        let at_ns = lock(&self.world.0.nodes[root.index()].host).first_thread().post(now_ns, &self.world.0.model.host);
        self.clone().call_at(at_ns, move |adapters| {
            adapters.go_on(Rank::ROOT);
            if adapters.list(Rank::ROOT).has_sent_everything() {
                adapters.end(Rank::ROOT, adapters.world.now());
            }
        });
    }

    /// Lets an adapter prepare and send what it can.
    fn go_on(self: &Arc<Self>, rank: Rank) {
        let leaves = self.list(rank).next_to_leave();
        if let Some(send) = leaves {
            self.leave(rank, send);
        }
        let prepares = self.list(rank).next_to_prepare();
        if prepares {
            let at_ns = self.world.0.occupy_adapter(self.node(rank), true);
            self.clone().call_at(at_ns, move |adapters| {
                {
                    let mut list = adapters.list(rank);
                    list.preparing = false;
                    list.prepared = list.sends.next();
                }
                adapters.go_on(rank);
            });
        }
    }

    /// Sends a block.
    fn leave(self: &Arc<Self>, rank: Rank, send: Hop) {
        let (from, to) = (self.node(rank), self.node(send.peer));
        let bytes = self.len(send.block) + self.world.0.model.nic.header_bytes;
        let begin_ns = self.world.0.executor.now_ns();
        let adapters = self.clone();
        let left = Box::new(move || {
            let world = &adapters.world.0;
            let end_ns = world.executor.now_ns();
            let arrival_ns = end_ns + world.latency_ns(from, to);
            let times = (begin_ns, end_ns, arrival_ns);
            lock(&world.log).carried((from, to), Some(send.block.0), false, bytes, times);
            adapters.clone().call_at(arrival_ns, move |adapters| adapters.arrive(send.peer, rank));
            let all_sent = {
                let mut list = adapters.list(rank);
                list.leaving = false;
                rank.is_root() && list.has_sent_everything()
            };
            if all_sent {
                adapters.end(rank, adapters.world.now());
            }
            adapters.go_on(rank);
        });
        self.world.0.flows.start(self.world.0.path(from, to), bytes, None, left);
    }

    /// Handles the arrival of a block.
    fn arrive(self: &Arc<Self>, rank: Rank, from: Rank) {
        let at_ns = self.world.0.occupy_adapter(self.node(rank), false);
        self.clone().call_at(at_ns, move |adapters| {
            let (turn, complete) = {
                let mut list = adapters.list(rank);
                (list.fill(from), list.is_complete())
            };
            if let Some((sender, count)) = turn {
                adapters.tell(rank, sender, count);
            }
            adapters.go_on(rank);
            if complete {
                adapters.complete(rank);
            }
        });
    }

    /// Writes its turn to a sender.
    fn tell(self: &Arc<Self>, rank: Rank, sender: Rank, count: usize) {
        let left_ns = self.world.0.occupy_adapter(self.node(rank), true);
        let arrival_ns = left_ns + self.world.0.latency_ns(self.node(rank), self.node(sender));
        self.clone().call_at(arrival_ns, move |adapters| {
            let at_ns = adapters.world.0.occupy_adapter(adapters.node(sender), false);
            adapters.clone().call_at(at_ns, move |adapters| {
                if let Some(turns) = &mut adapters.list(sender).turns {
                    *turns.entry(rank).or_default() += count;
                }
                adapters.go_on(sender);
            });
        });
    }

    /// Delivers the completion of the message to the software of a member.
    fn complete(self: &Arc<Self>, rank: Rank) {
        let (world, node) = (&self.world.0, self.node(rank));
        let acts_at_ns = {
            let mut random = lock(&world.random);
            let mut host = lock(&world.nodes[node.index()].host);
            let model = &world.model.host;
            host.first_thread().take_completion(world.executor.now_ns(), model.completion, model, &mut random)
        };
        self.end(rank, Timestamp::from_nanos(acts_at_ns));
    }

    fn end(&self, rank: Rank, at: Timestamp) {
        // The receiver may be gone.
        let _ = self.ended.send((rank, at));
    }

    fn list(&self, rank: Rank) -> std::sync::MutexGuard<'_, WorkList> {
        lock(&self.lists[rank.index()])
    }

    fn node(&self, rank: Rank) -> NodeIndex {
        self.plan.members[rank.index()]
    }

    /// Returns the length of a block in bytes; the last one may be shorter.
    fn len(&self, block: BlockIndex) -> u64 {
        let offset = u64::from(block.0) * self.plan.block_size;
        (self.plan.bytes - offset).min(self.plan.block_size)
    }

    fn call_at(self: Arc<Self>, at_ns: u64, call: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let executor = self.world.0.executor.clone();
        executor.call_at(at_ns, move || call(&self));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::ClusterModel;
    use crate::world::Simulation;

    /// Returns the time until all members have a message of `k` blocks of 1000 bytes, on ports of a byte per ns.
    fn latency_ns(
        algorithm: &Algorithm,
        n: u32,
        k: u64,
        send_order: SendOrder,
        prepare: impl FnOnce(&mut ClusterModel),
    ) -> u64 {
        let mut model = ClusterModel::new(n, 8_000, 0);
        prepare(&mut model);
        let simulation = Simulation::new(model, 1).unwrap();
        let world = simulation.world().clone();
        let members = (0..n).map(NodeIndex).collect();
        let offload = Offload { members, algorithm: algorithm.clone(), send_order, bytes: 1000 * k, block_size: 1000 };
        let times = simulation.run(Duration::MAX, async move { offload.run(&world).await }).unwrap().unwrap();
        u64::try_from(times.latency().as_nanos()).unwrap()
    }

    #[test]
    fn without_costs_every_schedule_takes_a_block_time_for_each_step() {
        for algorithm in Algorithm::ALL_FLAT {
            for n in 2..=33 {
                for k in [1, 2, 3, 5, 8, 16] {
                    let steps = Schedule::new(&algorithm, n, BlockCount(u32::try_from(k).unwrap())).unwrap().steps();
                    let took = latency_ns(&algorithm, n, k, SendOrder::InTurn, |_| {});
                    // With two trees some ports idle in some steps, for which adapters do not wait.
                    let in_time = took == 1000 * steps || (algorithm == Algorithm::TwoTree && took < 1000 * steps);
                    assert!(in_time, "{algorithm}, n = {n}, k = {k}: {took}");
                }
            }
        }
    }

    #[test]
    fn a_step_costs_at_most_the_latency_and_the_adapters_more() {
        for n in 2..=17 {
            for k in [1, 4, 9] {
                let took = latency_ns(&Algorithm::BinomialPipeline, n, k, SendOrder::InTurn, |model| {
                    model.latency_ns = 50;
                    model.nic.operation_ns = 7;
                });
                let steps = k - 1 + u64::from(n.next_power_of_two().trailing_zeros());
                assert!(took >= 1000 * steps + 50 + 7, "n = {n}, k = {k}: {took}");
                // A turn's write and a block: two latencies, four operations.
                assert!(took <= (1000 + 2 * 50 + 4 * 7) * steps, "n = {n}, k = {k}: {took}");
            }
        }
    }

    #[test]
    fn software_is_asked_once_for_each_member() {
        let alone = latency_ns(&Algorithm::Chain, 3, 4, SendOrder::Free, |_| {});
        let asked = latency_ns(&Algorithm::Chain, 3, 4, SendOrder::Free, |model| {
            model.host.post_ns = 10;
            model.host.completion_ns = 20;
            model.host.wake_ns = 300;
            model.host.completion = crate::model::WaitMode::Event;
        });
        assert_eq!(asked, alone + 10 + 300 + 20);
    }

    #[test]
    fn without_turns_the_slightest_latency_puts_a_pipeline_out_of_step() {
        let took = |send_order, n, late_ns| {
            latency_ns(&Algorithm::BinomialPipeline, n, 96, send_order, |model| model.latency_ns = late_ns)
        };
        assert_eq!(took(SendOrder::Free, 8, 0), 98_000, "a power of two, and no latency: the steps hold by themselves");
        assert!(took(SendOrder::Free, 8, 16) > 140_000);
        assert!(took(SendOrder::InTurn, 8, 16) < 98_000 + 98 * 3 * 16);
    }
}
