//! Schedules that the adapters carry out by themselves, as CORE-Direct's cross-channel operations do (DSN §5.3).
//!
//! Before the message every member gives its adapter the member's whole part of the schedule: a receive for every
//! block at its place, on the queue pair of the block's sender, and a list of sends, each behind what it waits for.
//! Then software does nothing until the end: nothing between a block's receipt and its relays.
//!
//! Modelled are the network, each adapter's time for an operation (a send, which includes the wait before it, a
//! receive, and either end of a word), the root's doorbell, and at each member the taking of the one completion that
//! tells that all blocks are there. The adapter works through its list in order; it prepares a send while the one
//! before leaves, and puts one block at a time on the port. Not modelled are the time to post the lists, which is
//! before the message, the room that they take in the adapter, and failures. That the size of the message is known
//! beforehand is taken for granted: RDMC tells it with the first block.

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

/// A multicast that is to be carried out by the adapters alone.
#[derive(Clone, Debug)]
pub struct Offload {
    /// The members, the root first.
    pub members: Vec<NodeIndex>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// What keeps the members in step.
    pub pace: Pace,
    /// The message's size in bytes, at least 1.
    pub bytes: u64,
    /// The block size in bytes, at least 1.
    pub block_size: u64,
}

/// What a send in an adapter's list waits for, besides its block and the sends before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Nothing, as all receives are posted. Where a member has two neighbours that send to it, one that is ahead of
    /// its step takes half of the port from the one whose turn it is.
    Free,
    /// Its turn at the receiver, whose adapter writes a word to the next sender when the block of the one before is
    /// there: *ready_for_block* without software. Blocks of one sender in a run have one turn.
    Turns,
}

impl Offload {
    /// Carries it out, in a world without other traffic or with it.
    ///
    /// # Errors
    /// The algorithm cannot serve so many members, or there are too many blocks.
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
        let lists = (0..count).map(|rank| Mutex::new(List::new(&schedule, Rank(rank), self.pace))).collect();
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
    lists: Vec<Mutex<List>>,
    /// Told when the root has sent everything, and when a member has everything.
    ended: mpsc::UnboundedSender<(Rank, Timestamp)>,
}

/// What one adapter was given, and how far it is.
struct List {
    sends: Peekable<Sends>,
    /// What the next receive of each queue pair is for, by the rank at the other end.
    receives: BTreeMap<Rank, VecDeque<BlockIndex>>,
    /// Runs of receives from one sender: who, and how many have not come in.
    runs: VecDeque<(Rank, usize)>,
    held: Vec<bool>,
    /// How many sends may still leave, by receiver; without, all may.
    turns: Option<BTreeMap<Rank, usize>>,
    preparing: bool,
    prepared: Option<Hop>,
    leaving: bool,
}

impl List {
    fn new(schedule: &Schedule, rank: Rank, pace: Pace) -> Self {
        let mut receives: BTreeMap<Rank, VecDeque<BlockIndex>> = BTreeMap::new();
        for receive in schedule.receives(rank) {
            receives.entry(receive.peer).or_default().push_back(receive.block);
        }
        Self {
            sends: schedule.sends(rank).peekable(),
            receives,
            runs: runs(schedule, rank),
            held: vec![rank.is_root(); schedule.blocks().get() as usize],
            turns: (pace == Pace::Turns).then(|| first_turns(schedule, rank)),
            preparing: false,
            prepared: None,
            leaving: false,
        }
    }

    /// Begins to prepare the next send, if the adapter may.
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

    /// Takes the send that is prepared, if the port is free.
    fn next_to_leave(&mut self) -> Option<Hop> {
        if self.leaving {
            return None;
        }
        let send = self.prepared.take();
        self.leaving = send.is_some();
        send
    }

    /// Fills the oldest receive of a queue pair; returns who has the next turn, if it is another, and for how many.
    fn fill(&mut self, from: Rank) -> Option<(Rank, usize)> {
        let block = self.receives.get_mut(&from).and_then(VecDeque::pop_front);
        self.held[block.expect("both ends compute the same schedule").index()] = true;
        // Without turns a run may be over before the one that was due first.
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

/// Returns whom a member receives from, and how many blocks each time.
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

/// Returns the sends that may leave without a word: those of each receiver's first run.
fn first_turns(schedule: &Schedule, rank: Rank) -> BTreeMap<Rank, usize> {
    let receivers = schedule.sends(rank).map(|send| send.peer).collect::<BTreeSet<_>>();
    let firsts = receivers.into_iter().filter_map(|receiver| Some((receiver, *runs(schedule, receiver).front()?)));
    firsts.filter(|(_, (sender, _))| *sender == rank).map(|(receiver, (_, count))| (receiver, count)).collect()
}

impl Adapters {
    /// The root's software rings the bell.
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

    /// An adapter does what it can.
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

    /// Puts a block on the network.
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

    /// A block has come in.
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

    /// Writes to a sender that it is its turn.
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

    /// The software of a member learns that it has everything.
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
        // Nobody may wait any more.
        let _ = self.ended.send((rank, at));
    }

    fn list(&self, rank: Rank) -> std::sync::MutexGuard<'_, List> {
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

    /// Ports of a byte per ns; returns the time until all had a message of so many blocks of 1000 bytes.
    fn latency_ns(algorithm: &Algorithm, n: u32, k: u64, pace: Pace, prepare: impl FnOnce(&mut ClusterModel)) -> u64 {
        let mut model = ClusterModel::new(n, 8_000, 0);
        prepare(&mut model);
        let simulation = Simulation::new(model, 1).unwrap();
        let world = simulation.world().clone();
        let members = (0..n).map(NodeIndex).collect();
        let offload = Offload { members, algorithm: algorithm.clone(), pace, bytes: 1000 * k, block_size: 1000 };
        let times = simulation.run(Duration::MAX, async move { offload.run(&world).await }).unwrap().unwrap();
        u64::try_from(times.latency().as_nanos()).unwrap()
    }

    #[test]
    fn without_costs_every_schedule_takes_a_block_time_for_each_step() {
        for algorithm in Algorithm::ALL_FLAT {
            for n in 2..=33 {
                for k in [1, 2, 3, 5, 8, 16] {
                    let steps = Schedule::new(&algorithm, n, BlockCount(u32::try_from(k).unwrap())).unwrap().steps();
                    let took = latency_ns(&algorithm, n, k, Pace::Turns, |_| {});
                    assert_eq!(took, 1000 * steps, "{algorithm}, n = {n}, k = {k}");
                }
            }
        }
    }

    #[test]
    fn a_step_costs_at_most_the_latency_and_the_adapters_more() {
        for n in 2..=17 {
            for k in [1, 4, 9] {
                let took = latency_ns(&Algorithm::BinomialPipeline, n, k, Pace::Turns, |model| {
                    model.latency_ns = 50;
                    model.nic.operation_ns = 7;
                });
                let steps = k - 1 + u64::from(n.next_power_of_two().trailing_zeros());
                assert!(took >= 1000 * steps + 50 + 7, "n = {n}, k = {k}: {took}");
                // A word and a block: two latencies, four operations.
                assert!(took <= (1000 + 2 * 50 + 4 * 7) * steps, "n = {n}, k = {k}: {took}");
            }
        }
    }

    #[test]
    fn software_is_asked_once_for_each_member() {
        let alone = latency_ns(&Algorithm::Chain, 3, 4, Pace::Free, |_| {});
        let asked = latency_ns(&Algorithm::Chain, 3, 4, Pace::Free, |model| {
            model.host.post_ns = 10;
            model.host.completion_ns = 20;
            model.host.wake_ns = 300;
            model.host.completion = crate::model::Completion::Event;
        });
        assert_eq!(asked, alone + 10 + 300 + 20);
    }

    #[test]
    fn without_turns_the_slightest_latency_puts_a_pipeline_out_of_step() {
        let took = |pace, n, late_ns| {
            latency_ns(&Algorithm::BinomialPipeline, n, 96, pace, |model| model.latency_ns = late_ns)
        };
        assert_eq!(took(Pace::Free, 8, 0), 98_000, "a power of two, and no latency: the steps hold by themselves");
        assert!(took(Pace::Free, 8, 16) > 140_000);
        assert!(took(Pace::Turns, 8, 16) < 98_000 + 98 * 3 * 16);
    }
}
