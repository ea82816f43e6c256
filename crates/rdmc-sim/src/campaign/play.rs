//! Plays a case on a world and notes the observations.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures::future::{Either, join_all, select};
use rdmc::{Node, NodeBuilder, Shutdown};
use rdmc_fabric::Timestamp;
use tokio::sync::{Notify, oneshot, watch};

use super::case::{Case, Fault, Milestone, When};
use super::member::Participant;
use super::observation::{
    FaultObservation, FlippedBlock, GroupObservation, MemberObservation, Observation, ResourcesInUse,
};
use crate::deployment::Deployment;
use crate::simulation::{NodeIndex, lock};
use crate::world::{FlippedBit, Simulation, World};

/// A case cannot be played.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the case cannot be played: {what}")]
pub struct CaseError {
    /// What is wrong with it.
    pub what: String,
}

/// Plays a case: faults come first, then the world is healed and every member must end.
///
/// The same case always gives the same observation.
///
/// # Errors
/// The case is invalid.
pub fn play(case: &Case) -> Result<Observation, CaseError> {
    case.check().map_err(|what| CaseError { what })?;
    let simulation = Simulation::new(case.model.clone(), case.seed).map_err(|error| CaseError { what: error.what })?;
    let world = simulation.world().clone();
    let running = Arc::new(RunningCase::new(world.clone(), case));
    let starting = {
        let (world, pool_bytes_max, joins) = (world.clone(), case.pool_bytes_max, case.joins);
        async move {
            let prepare = |builder: NodeBuilder| builder.pool_bytes_max(pool_bytes_max);
            match joins {
                true => Deployment::start_joining_with(&world, prepare).await,
                false => Deployment::start_with(&world, prepare).await,
            }
        }
    };
    let limit = Duration::from_nanos(case.heal_ns) + END_LIMIT;
    let outcome = match simulation.run(START_LIMIT, starting) {
        Ok(Ok(deployment)) => simulation.run(limit, running.clone().perform(deployment)).map_err(|it| it.to_string()),
        Ok(Err(error)) => Err(format!("the nodes did not start: {error}")),
        Err(stalled) => Err(format!("the nodes did not start: {stalled}")),
    };
    let mut seen = std::mem::take(&mut *lock(&running.seen));
    seen.stalled = outcome.err();
    seen.digest = world.digest();
    let flipped = world.flipped().into_iter().chain(world.flipped_writes(IMM_OF_SLOTS));
    seen.flipped = flipped.map(|(from, to)| FlippedBlock { from: from.0, to: to.0 }).collect();
    Ok(seen)
}

/// A case that is being played.
pub(super) struct RunningCase {
    pub(super) world: World,
    pub(super) case: Case,
    began: OnceLock<Timestamp>,
    seen: Mutex<Observation>,
    /// Notified of every observation.
    changed: Notify,
    healed: watch::Sender<bool>,
    /// The handles of the nodes, for faults that shut nodes down.
    nodes: Mutex<Vec<Node>>,
}

impl RunningCase {
    fn new(world: World, case: &Case) -> Self {
        let members = |count: usize| vec![MemberObservation::default(); count];
        let groups = case.groups.iter().map(|group| {
            let mut members = members(group.members.len());
            if let Some(root) = members.first_mut() {
                root.sends = vec![None; group.messages.len()];
            }
            GroupObservation { members }
        });
        let seen = Observation { groups: groups.collect(), ..Observation::default() };
        Self {
            world,
            case: case.clone(),
            began: OnceLock::new(),
            seen: Mutex::new(seen),
            changed: Notify::new(),
            healed: watch::Sender::new(false),
            nodes: Mutex::default(),
        }
    }

    /// Returns the time since the start of the case, in ns: all nodes have started then.
    pub(super) fn now_ns(&self) -> u64 {
        self.world.now().as_nanos() - self.began.get().map_or(0, |began| began.as_nanos())
    }

    pub(super) async fn sleep(&self, ns: u64) {
        self.world.sleep(Duration::from_nanos(ns)).await;
    }

    /// Notes an observation of a member.
    pub(super) fn note(&self, group: usize, rank: usize, write: impl FnOnce(&mut MemberObservation)) {
        write(&mut lock(&self.seen).groups[group].members[rank]);
        self.changed.notify_waiters();
    }

    async fn perform(self: Arc<Self>, deployment: Deployment) {
        let _ = self.began.set(self.world.now());
        *lock(&self.nodes) = self.world.nodes().map(|node| deployment.node(node).clone()).collect();
        let mut ends = Vec::new();
        for (group, planned) in self.case.groups.iter().enumerate() {
            for (rank, member) in planned.members.iter().enumerate() {
                let node = NodeIndex(member.node);
                let participant = Participant::new(self.clone(), deployment.node(node).clone(), group, rank);
                let (ends_with_it, ended) = oneshot::channel::<()>();
                ends.push(ended);
                let task = async move {
                    participant.act().await;
                    drop(ends_with_it);
                };
                self.world.spawn_on(node, Box::pin(task));
            }
        }
        let before: Vec<u64> = self.world.nodes().map(|node| self.world.operations_of(node)).collect();
        for (number, planned) in self.case.faults.iter().enumerate() {
            let running = self.clone();
            match planned.when {
                When::Operation { node, count } => {
                    let inject = move || running.inject_at_once(number);
                    self.world.before_operation(NodeIndex(node), before[node as usize] + count, inject);
                }
                When::At { .. } | When::Milestone { .. } => self.world.spawn(Box::pin(running.inject_when_due(number))),
            }
        }
        let (everybody, healing) = (join_all(ends), std::pin::pin!(self.sleep(self.case.heal_ns)));
        match select(everybody, healing).await {
            Either::Left(_) => self.heal(),
            Either::Right(((), everybody)) => {
                self.heal();
                everybody.await;
            }
        }
        let ended_ns = self.now_ns();
        let counts = self.world.nodes().zip(before).map(|(node, before)| self.world.operations_of(node) - before);
        {
            let mut seen = lock(&self.seen);
            (seen.ended_ns, seen.operations) = (Some(ended_ns), counts.collect());
        }
        lock(&self.nodes).clear();
        self.clean_up(deployment).await;
    }

    /// Notes the resources in use after the groups are dropped, and after the nodes are dropped too.
    async fn clean_up(&self, deployment: Deployment) {
        // If the application dropped the future of its close, the engine runs until the mesh gives the others up.
        let settled = Duration::from_nanos(self.case.model.control.patience_ns) + SETTLE_TIME;
        self.world.sleep(settled).await;
        let left = |node: NodeIndex| {
            let left = |it: &FaultObservation| match self.case.faults[it.fault].fault {
                Fault::Leave { node: left, .. } => left == node.0,
                _ => false,
            };
            lock(&self.seen).faults.iter().any(left)
        };
        // After a shutdown, posted work keeps its memory until the handles of the node are dropped.
        let lent = |node| match self.world.is_alive(node) && !left(node) {
            true => deployment.node(node).stats().pool_bytes_lent,
            false => 0,
        };
        let in_use = |node| ResourcesInUse { pool_bytes_lent: lent(node), ..ResourcesInUse::default() };
        let mut in_use: Vec<ResourcesInUse> = self.world.nodes().map(in_use).collect();
        drop(deployment);
        self.world.sleep(settled).await;
        for (node, in_use) in self.world.nodes().zip(&mut in_use) {
            in_use.tasks = self.world.tasks_of(node);
            in_use.queue_pairs = self.world.queue_pairs_of(node);
        }
        lock(&self.seen).still_in_use = in_use;
    }

    // Faults.

    /// Injects a fault when it is due, and ends it later.
    async fn inject_when_due(self: Arc<Self>, number: usize) {
        let planned = self.case.faults[number];
        if self.unless_healed(self.moment(planned.when)).await.is_none() {
            return;
        }
        let place = self.inject(number);
        self.end(number, place).await;
    }

    /// Injects a fault now, in the middle of an operation, and ends it later.
    fn inject_at_once(self: Arc<Self>, number: usize) {
        if *self.healed.borrow() {
            return;
        }
        let place = self.inject(number);
        let world = self.world.clone();
        world.spawn(Box::pin(async move { self.end(number, place).await }));
    }

    /// Injects a fault; returns its index among those that happened.
    fn inject(&self, number: usize) -> usize {
        let place = {
            let (fault, at_ns) = (number, self.now_ns());
            let mut seen = lock(&self.seen);
            seen.faults.push(FaultObservation { fault, at_ns, until_ns: None });
            seen.faults.len() - 1
        };
        self.apply(self.case.faults[number].fault);
        place
    }

    /// Ends an injected fault after its duration.
    async fn end(&self, number: usize, place: usize) {
        let fault = self.case.faults[number].fault;
        let Some(for_ns) = fault.for_ns() else { return };
        if self.unless_healed(self.sleep(for_ns)).await.is_some() {
            self.undo(fault);
            lock(&self.seen).faults[place].until_ns = Some(self.now_ns());
        }
    }

    /// Waits for the time of a fault, which may never come.
    async fn moment(&self, when: When) {
        match when {
            When::At { ns } => self.sleep(ns).await,
            When::Milestone { group, node, milestone, delay_ns } => {
                let place = self.case.groups.iter().position(|planned| planned.id == group);
                let place = place.and_then(|at| Some((at, self.case.groups[at].rank_of(node)?)));
                let Some((group, rank)) = place else { return std::future::pending().await };
                loop {
                    let changed = self.changed.notified();
                    if reached(&lock(&self.seen).groups[group].members[rank], milestone) {
                        break;
                    }
                    changed.await;
                }
                self.sleep(delay_ns).await;
            }
            When::Operation { .. } => unreachable!("the world injects it"),
        }
    }

    async fn unless_healed<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut healed = self.healed.subscribe();
        let healed = std::pin::pin!(healed.wait_for(|healed| *healed));
        match select(healed, std::pin::pin!(future)).await {
            Either::Left(_) => None,
            Either::Right((output, _)) => Some(output),
        }
    }

    fn apply(&self, fault: Fault) {
        let world = &self.world;
        match fault {
            Fault::Kill { node } => {
                self.note_death(node);
                world.kill(NodeIndex(node));
            }
            Fault::Vanish { node } => {
                self.note_death(node);
                world.vanish(NodeIndex(node));
            }
            Fault::Stop { node, .. } => world.stop(NodeIndex(node)),
            Fault::HoldUp { node, for_ns } => world.hold_up(NodeIndex(node), Duration::from_nanos(for_ns)),
            Fault::SlowDown { node, times, .. } => world.slow_down(NodeIndex(node), times),
            Fault::LimitPort { node, mbps, .. } => world.limit_port(NodeIndex(node), mbps),
            Fault::Cut { a, b, .. } => world.cut(NodeIndex(a), NodeIndex(b)),
            Fault::CutOneWay { from, to, .. } => world.cut_one_way(NodeIndex(from), NodeIndex(to)),
            Fault::TruncateControl { from, to, bytes } => {
                world.truncate_control(NodeIndex(from), NodeIndex(to), bytes);
            }
            Fault::GarbleControl { from, to, bit } => world.garble_control(NodeIndex(from), NodeIndex(to), bit),
            Fault::Leave { node, drain_ns } => {
                let how = drain_ns.map_or(Shutdown::Abort, |ns| Shutdown::Drain { limit: Duration::from_nanos(ns) });
                let leaving = lock(&self.nodes).get(node as usize).cloned();
                if let Some(leaving) = leaving {
                    world.spawn_on(NodeIndex(node), Box::pin(async move { drop(leaving.shutdown(how).await) }));
                }
            }
            Fault::ResetControl { a, b } => world.reset_control(NodeIndex(a), NodeIndex(b)),
            Fault::FlipBits { node, bit, immediate, blocks } => {
                let place = if immediate { FlippedBit::OfImmediate(bit) } else { FlippedBit::OfPayload(bit) };
                world.flip_bits(NodeIndex(node), place, blocks);
            }
            Fault::FlipSlots { node, bit, slots } => world.flip_writes(NodeIndex(node), IMM_OF_SLOTS, bit, slots),
            Fault::FlipRows { node, bit, rows } => world.flip_writes(NodeIndex(node), IMM_OF_ROWS, bit, rows),
            Fault::BreakQueuePairs { a, b } => world.break_queue_pairs(NodeIndex(a), NodeIndex(b)),
        }
    }

    fn undo(&self, fault: Fault) {
        match fault {
            Fault::Stop { node, .. } => self.world.resume(NodeIndex(node)),
            Fault::SlowDown { node, .. } | Fault::LimitPort { node, .. } => self.world.slow_down(NodeIndex(node), 1),
            Fault::Cut { a, b, .. } | Fault::CutOneWay { from: a, to: b, .. } => {
                self.world.heal(NodeIndex(a), NodeIndex(b));
            }
            _ => {}
        }
    }

    /// Ends all lasting faults and prevents new ones.
    fn heal(&self) {
        self.healed.send_replace(true);
        let now_ns = self.now_ns();
        let lasting = {
            let mut seen = lock(&self.seen);
            seen.healed_ns = Some(now_ns);
            let lasts = |seen: &FaultObservation| self.case.faults[seen.fault].fault.for_ns().is_some();
            let lasting = seen.faults.iter_mut().filter(|seen| seen.until_ns.is_none() && lasts(seen));
            let ended = lasting.map(|seen| {
                seen.until_ns = Some(now_ns);
                self.case.faults[seen.fault].fault
            });
            ended.collect::<Vec<_>>()
        };
        lasting.into_iter().for_each(|fault| self.undo(fault));
        for node in self.world.nodes() {
            self.world.flip_bits(node, FlippedBit::OfPayload(0), 0);
            self.world.flip_writes(node, IMM_OF_SLOTS, 0, 0);
            self.world.flip_writes(node, IMM_OF_ROWS, 0, 0);
        }
        self.world.heal_all();
    }

    fn note_death(&self, node: u32) {
        let now_ns = self.now_ns();
        for (group, planned) in self.case.groups.iter().enumerate() {
            if let Some(rank) = planned.rank_of(node) {
                self.note(group, rank, |member| {
                    member.died_ns.get_or_insert(now_ns);
                });
            }
        }
    }
}

fn reached(member: &MemberObservation, milestone: Milestone) -> bool {
    match milestone {
        Milestone::Joining => member.joining_ns.is_some(),
        Milestone::Joined => member.joined.is_some(),
        Milestone::Messages { count } => {
            let sent = member.sends.iter().flatten().count();
            member.joined.is_some() && sent.max(member.delivered.len()) >= count
        }
        Milestone::Closing => member.closing_ns.is_some(),
        Milestone::Ended => member.ended_ns.is_some(),
    }
}

/// Limit of the time to connect all nodes: control connections may lose segments.
const START_LIMIT: Duration = Duration::from_secs(700);
/// Limit of the time from the healing until the last member ends.
const END_LIMIT: Duration = Duration::from_secs(300);
/// Limit of the time for resources to be released.
const SETTLE_TIME: Duration = Duration::from_secs(20);
/// The immediate of the runtime's writes of rows.
const IMM_OF_ROWS: u32 = 0;
/// The immediate of the runtime's writes into rings.
const IMM_OF_SLOTS: u32 = 1;
