//! A group: an ordered, static list of members, the first of which sends to all others (DSN §3).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{Capabilities, ConnectError, Operation, Received, Role, Timestamp};
use rdmc_schedule::{BlockCount, MEMBERS_MAX, Neighbours, Rank, Schedule, first_source, neighbours};
use tokio::sync::{mpsc, oneshot};

use crate::certificate::Digest;
use crate::checksum::BlockIdentity;
use crate::failure::{FailureCause, with_sources};
use crate::id::{GroupId, NodeId};
use crate::resources::{GroupEnding, NodeResources, OpenGroup};
use crate::round_trips::PAUSES;
use crate::stats::{Corruption, Counters, GroupStats};
use crate::sync::lock;
use crate::transfer::distance::Distance;
use crate::transfer::exchange::Exchange;
use crate::transfer::neighbour::{Depth, Endpoints, Neighbour};
use crate::transfer::waits::WaitMonitor;
use crate::transfer::{Blocks, Deliver, HealedBlock, HopPlan, Owner, Port, Transfer, TransferError};
use crate::wire::GroupFrame;
use crate::woken::WhenWoken;

pub(crate) mod agreement;
pub(crate) mod continuation;
mod delta;
mod ending;
pub(crate) mod error;
mod events;
pub(crate) mod healing;
mod intake;
pub(crate) mod offer;
pub(crate) mod pace;
mod queue;
pub(crate) mod receiver;
pub(crate) mod recovery;
pub(crate) mod retained;
pub(crate) mod sender;
pub(crate) mod sharing;
pub(crate) mod spec;

use continuation::{Continuation, Holdings, Irrecoverable, PriorProgress, Resumption};
use delta::Delta;
use ending::GroupEnd;
use error::GroupError;
use events::{EventRouting, OfferedEndpoints};
use healing::Healing;
use offer::Message;
use pace::PaceJudge;
use retained::RetainedMessages;
pub use spec::GroupSpec;

/// One member's side of a group.
pub(crate) struct Group {
    id: GroupId,
    rank: Rank,
    members: Arc<[NodeId]>,
    spec: GroupSpec,
    first_source: Option<Rank>,
    /// At the root: the members that cannot learn a message's size from its first block.
    announced_to: Vec<NodeId>,
    node: Arc<NodeResources>,
    exchange: Arc<Exchange>,
    pace: PaceJudge,
    end: GroupEnd,
    prior: PriorProgress,
    retained: Arc<RetainedMessages>,
    healing: Healing,
    delta: Delta,
    span: tracing::Span,
}

/// A group that is formed, for its engine.
pub(crate) struct FormedGroup {
    pub(crate) group: Arc<Group>,
    /// Sizes by message number, as the root announces them.
    pub(crate) announcements: mpsc::Receiver<(u64, u64)>,
    pub(crate) grants: Grants,
    pub(crate) resumption: Resumption,
}

/// The receives that grants consume, by neighbour.
pub(crate) type Grants = Vec<(Rank, VecDeque<Operation<Received>>)>;

/// A node's role in a group that it forms.
pub(crate) enum MemberRole {
    Root,
    Receiver,
    /// The role that it has in the group that it continues.
    Survivor(Box<Continuation>),
}

/// Forms a group: exchanges queue pairs with all neighbours and connects them.
pub(crate) async fn form(
    node: Arc<NodeResources>,
    mut spec: GroupSpec,
    role: MemberRole,
) -> Result<FormedGroup, GroupError> {
    let rank = spec.check(&node)?;
    let continuation = match role {
        MemberRole::Root | MemberRole::Receiver if rank.is_root() != matches!(role, MemberRole::Root) => {
            return Err(GroupError::WrongRole { rank });
        }
        MemberRole::Root | MemberRole::Receiver => None,
        MemberRole::Survivor(continuation) => Some(continuation),
    };
    let continuation = continuation.as_deref();
    let count = spec.count();
    let Neighbourhood { neighbours, first_source, peers, announced_to } =
        Neighbourhood::new(&node, &spec, rank, continuation.is_some())?;
    spec.check_blocks.get_or_insert(!node.fabric.capabilities().protects_blocks);
    let members: Arc<[NodeId]> = spec.members.clone().into();
    let inbox = node.mesh.open_group(spec.id, &members).ok_or(GroupError::GroupIdUsed { group: spec.id })?;
    let prior = continuation.map(|continuation| continuation.prior).unwrap_or_default();
    let retained = RetainedMessages::new(members.len(), prior.base, spec.recoverable)
        .and_for_healing(spec.check_blocks == Some(true))
        .and_for_sharing(spec.is_shared(), rank.is_root());
    let (healing, asked) = Healing::new();
    let exchange = Exchange {
        rank,
        members: count,
        algorithm: spec.algorithm.clone(),
        block_size: spec.block_size,
        checks_blocks: spec.check_blocks == Some(true),
        neighbours: peers,
        ingress: Port::default(),
        egress: Port::default(),
        distance: Distance::new(
            &spec.algorithm,
            count,
            rank.is_root(),
            spec.block_size,
            node.fabric.capabilities().port_rate,
            node.fabric.capabilities().tells_near,
        ),
        waits: WaitMonitor::default(),
        counters: Counters::default(),
        node_counters: node.counters.clone(),
        environment: node.environment.clone(),
    };
    let group = Arc::new(Group {
        id: spec.id,
        rank,
        retained: Arc::new(retained),
        members,
        first_source,
        announced_to,
        exchange: Arc::new(exchange),
        pace: PaceJudge::default(),
        end: GroupEnd::new(rank, count, node.mesh.detection(), continuation),
        prior,
        healing,
        delta: Delta::default(),
        span: tracing::info_span!("group", group = spec.id.0, rank = rank.0),
        spec,
        node,
    });
    let (announced, announcements) = mpsc::channel(ANNOUNCEMENTS_MAX);
    let unheard: BTreeSet<Rank> = group.exchange.neighbours.keys().copied().collect();
    // Each neighbour is let in once.
    let (offered, offers) = mpsc::channel(unheard.len().max(1));
    let holdings = Arc::<Mutex<Holdings>>::default();
    let routing = EventRouting { inbox, announced, offered, unheard, holdings: holdings.clone() };
    let abandon = AbandonOnDrop(Some(group.clone()));
    let open: Arc<dyn OpenGroup> = group.clone();
    if !group.node.groups.add(Arc::downgrade(&open), group.id) {
        return Err(GroupError::ShuttingDown);
    }
    if let Some(continuation) = continuation {
        continuation.hand_over(&group.retained);
    }
    let grants = neighbours.sends_to.iter().map(|&to| (to, group.exchange.neighbour(to).expect_grants())).collect();
    // A task of its own: others wait for this member's answers even if its application does not poll this future.
    let listening = group.clone();
    let listening = async move { listening.listen(routing, asked).await };
    group.node.environment.spawn(Box::pin(tracing::Instrument::instrument(listening, group.span.clone())));
    let connected = group.connect(offers, &holdings, group.spec.digest(continuation)).await;
    let resumption = connected.inspect_err(|_| group.retained.mark_idle())?;
    abandon.disarm();
    group.node.counters.groups_formed.fetch_add(1, Ordering::Relaxed);
    let (algorithm, fabric) = (&group.spec.algorithm, group.node.fabric.capabilities().name);
    let (neighbours, shared) = group.carriers();
    tracing::info!(
        parent: &group.span, members = count, %algorithm, fabric, neighbours, by_shared_memory = shared, "group formed"
    );
    Ok(FormedGroup { group, announcements, grants, resumption })
}

/// The members with which a member exchanges blocks.
struct Neighbourhood {
    neighbours: Neighbours,
    /// The member that sends this one the first block of every message, if it is always the same.
    first_source: Option<Rank>,
    peers: BTreeMap<Rank, Neighbour>,
    /// At the root: the members to which it has to announce a message's size.
    announced_to: Vec<NodeId>,
}

impl Neighbourhood {
    fn new(node: &NodeResources, spec: &GroupSpec, rank: Rank, continues: bool) -> Result<Self, GroupError> {
        let count = spec.count();
        // Missing blocks may come from any member.
        let neighbours = match continues || spec.delta {
            true => everybody_but(rank, count),
            false => neighbours(&spec.algorithm, count, rank)?,
        };
        // In a delta group all members know the size before the first block comes.
        let first_source_of = |member| match spec.delta {
            true => Ok(None),
            false => first_source(&spec.algorithm, count, member),
        };
        let depth = Depth::shared(node.completions_max, neighbours.sends_to.len() + neighbours.receives_from.len());
        let mut peers = BTreeMap::new();
        for &peer in neighbours.sends_to.iter().chain(&neighbours.receives_from) {
            let learns_size_here = first_source_of(peer)? == Some(rank);
            let id = spec.members[peer.index()];
            if let Entry::Vacant(vacant) = peers.entry(peer) {
                let (fabric, block_size) = (node.fabric.clone(), spec.block_size);
                vacant.insert(Neighbour::new(
                    fabric,
                    &node.completions,
                    peer,
                    id,
                    learns_size_here,
                    block_size,
                    depth,
                )?);
            }
        }
        let mut announced_to = Vec::new();
        for member in (1..count).filter(|_| rank.is_root()) {
            if first_source_of(Rank(member))?.is_none() {
                announced_to.push(spec.members[Rank(member).index()]);
            }
        }
        Ok(Self { first_source: first_source_of(rank)?, neighbours, peers, announced_to })
    }
}

impl GroupSpec {
    /// Checks the specification at a node; returns the node's rank.
    fn check(&self, node: &NodeResources) -> Result<Rank, GroupError> {
        if self.block_size == 0 || self.block_size > Self::BLOCK_SIZE_MAX {
            let max = u64::from(Self::BLOCK_SIZE_MAX);
            return Err(GroupError::BlockSize { bytes: u64::from(self.block_size), max });
        }
        let Capabilities { message_len_max: max, name: fabric, .. } = node.fabric.capabilities();
        if u64::from(self.block_size) > max {
            return Err(GroupError::BlockTooLong { bytes: u64::from(self.block_size), max, fabric });
        }
        self.check_sharing(node)?;
        let mut seen = BTreeSet::new();
        for &member in &self.members {
            if !node.mesh.knows(member) {
                return Err(GroupError::UnknownNode { node: member });
            }
            if !seen.insert(member) {
                return Err(GroupError::DuplicateMember { node: member });
            }
        }
        let me = node.mesh.me();
        let position = self.members.iter().position(|&member| member == me);
        let rank = position.ok_or(GroupError::NotMember { node: me })?;
        Ok(Rank(u32::try_from(rank).unwrap_or(MEMBERS_MAX)))
    }

    /// Checks that the group's other settings allow shared objects.
    pub(super) fn check_sharing(&self, node: &NodeResources) -> Result<(), GroupError> {
        let capabilities = node.fabric.capabilities();
        match self.is_shared() {
            true if !capabilities.shares_objects => {
                Err(GroupError::SharesNoObjects { node: node.mesh.me(), fabric: capabilities.name })
            }
            true if self.delta => Err(GroupError::SharedDelta),
            _ => Ok(()),
        }
    }

    /// Checks that the application does not supply memory for shared objects.
    pub(super) fn check_offers(&self) -> Result<(), GroupError> {
        if self.is_shared() { Err(GroupError::SharedOffers) } else { Ok(()) }
    }
}

/// Returns the next offer; waits for ever when the group has ended.
async fn next_of(offers: &mut mpsc::Receiver<(Rank, OfferedEndpoints)>) -> (Rank, OfferedEndpoints) {
    match offers.recv().await {
        Some(offer) => offer,
        None => std::future::pending().await,
    }
}

fn everybody_but(rank: Rank, count: u32) -> Neighbours {
    let others: Vec<Rank> = (0..count).map(Rank).filter(|other| *other != rank).collect();
    Neighbours { sends_to: others.clone(), receives_from: others }
}

/// Tells the others that this member has left, unless it is disarmed.
struct AbandonOnDrop(Option<Arc<Group>>);

impl AbandonOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        if let Some(group) = self.0.take() {
            group.declare(FailureCause::Abandoned);
        }
    }
}

impl Group {
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn first_source(&self) -> Option<Rank> {
        self.first_source
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.spec.block_size
    }

    pub(crate) fn retained(&self) -> &RetainedMessages {
        &self.retained
    }

    pub(crate) fn node(&self) -> &NodeResources {
        &self.node
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.node.environment.now()
    }

    /// Returns the schedule of a message of `blocks` blocks.
    pub(crate) fn schedule(&self, blocks: BlockCount) -> Schedule {
        self.exchange.schedule(blocks)
    }

    pub(crate) fn exchange(&self) -> &Arc<Exchange> {
        &self.exchange
    }

    /// Makes this member's part in the multicast of a message, which is kept until it is not needed any more. It is
    /// delivered to `to`, unless this member has it from the start.
    pub(crate) fn transfer(
        self: &Arc<Self>,
        number: u64,
        plan: HopPlan,
        blocks: Arc<Blocks>,
        to: Option<oneshot::Sender<Message>>,
    ) -> Transfer {
        self.retained.keep(number, &blocks);
        let deliver = to.map(|to| -> Deliver {
            let group = self.clone();
            Box::new(move |whole, digest| {
                async move {
                    let content = group.content(number, &whole).await?;
                    group.deliver(to, Message::new(number, content, digest), &whole, digest);
                    Ok(())
                }
                .boxed()
            })
        });
        Transfer::new(self.exchange.clone(), self.clone(), number, plan, blocks, deliver)
    }

    /// Tells whether members report which blocks of a message they have before it begins.
    pub(crate) fn is_delta(&self) -> bool {
        self.spec.delta
    }

    /// At the root: announces the size of a message to the members that cannot learn it from their first block.
    pub(crate) fn announce(&self, message: u64, size: u64) {
        for &to in &self.announced_to {
            self.node.mesh.post(to, self.id, GroupFrame::Announce { message, size });
        }
    }

    /// Measures the round trips to all neighbours, a few times. The shortest count.
    async fn measure_round_trips(&self) {
        let (environment, known) = (&*self.node.environment, &self.node.round_trips);
        for pause in PAUSES {
            environment.sleep(pause).await;
            let due = self.exchange.neighbours.values().filter(|neighbour| known.is_due(neighbour.node, self.now()));
            let measuring = due.map(|neighbour| async {
                // If a connection is broken, the group is about to end.
                let measured = neighbour.round_trip(environment).await;
                measured.into_iter().for_each(|measured| known.note(neighbour.node, measured));
            });
            futures::future::join_all(measuring).await;
            let all = self.exchange.neighbours.values().map(|neighbour| known.shortest(neighbour.node));
            if let Some(farthest) = all.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max()) {
                let (round_trip, once) = farthest;
                self.exchange.distance.note_round_trip(round_trip, once);
            }
        }
        let distance = &self.exchange.distance;
        let (round_trip, rate, near_bytes) = (distance.round_trip(), distance.rate(), distance.near_bytes());
        let runs_free = distance.runs_free(distance.latest());
        tracing::info!(parent: &self.span, ?round_trip, rate, near_bytes, runs_free, "distance measured");
    }

    /// At the root: tells the others which messages run free, whenever it has decided.
    async fn tell_decisions(&self) {
        loop {
            let from_blocks = self.exchange.distance.decided().await;
            for &member in &self.members[1..] {
                self.node.mesh.post(member, self.id, GroupFrame::RunFree { from_blocks });
            }
        }
    }

    pub(crate) fn stats(&self) -> GroupStats {
        let (slow, held_up) = self.held_up();
        let (neighbours, neighbours_by_shared_memory) = self.carriers();
        GroupStats {
            slow,
            held_up,
            neighbours,
            neighbours_by_shared_memory,
            round_trip: self.exchange.distance.round_trip(),
            port_rate: self.exchange.distance.rate(),
            ..self.exchange.counters.group_stats()
        }
    }

    /// Counts the neighbours, and the neighbours that the fabric reaches by shared memory.
    fn carriers(&self) -> (usize, usize) {
        (
            self.exchange.neighbours.len(),
            self.exchange.neighbours.values().filter(|neighbour| neighbour.shares_memory()).count(),
        )
    }

    /// Counts and logs a corrupted block.
    pub(crate) fn count_corrupted(&self, from: Rank, identity: BlockIdentity) {
        let BlockIdentity { message, block, .. } = identity;
        tracing::warn!(parent: &self.span, %from, to = %self.rank, message, block = block.0, "a block came corrupted");
        let corruption = Corruption { from, to: self.rank, message, block: block.0 };
        self.exchange.counters.corrupted(corruption);
        self.node.counters.corrupted(corruption);
    }

    pub(crate) fn message_completed(&self, number: u64, size: u64) {
        self.exchange.counters.completed();
        self.node.counters.completed();
        tracing::debug!(parent: &self.span, message = number, size, "transfer completed");
    }

    // Forming.

    async fn connect(
        &self,
        mut offers: mpsc::Receiver<(Rank, OfferedEndpoints)>,
        holdings: &Mutex<Holdings>,
        spec: [u8; 32],
    ) -> Result<Resumption, GroupError> {
        let told = self.holdings();
        let count = u32::try_from(told.len()).unwrap_or(u32::MAX);
        for neighbour in self.exchange.neighbours.values() {
            // Before the offer: a member that has all offers knows which blocks each member holds.
            for holding in &told {
                self.node.mesh.send(neighbour.node, self.id, holding.clone()).await;
            }
            let Endpoints { data, ready, cells } = neighbour.endpoints();
            let offer = GroupFrame::Offer { spec, told: count, data, ready, cells };
            self.node.mesh.post(neighbour.node, self.id, offer);
        }
        self.own_holdings(&told, &mut lock(holdings));
        let mut unheard: BTreeSet<Rank> = self.exchange.neighbours.keys().copied().collect();
        let mut unconnected = unheard.clone();
        let mut connecting = FuturesUnordered::new();
        let mut late = std::pin::pin!(self.wait_in_steps(self.spec.formation_limit).fuse());
        let mut ended = std::pin::pin!(self.ended().fuse());
        let mut stopped = std::pin::pin!(self.stopped().fuse());
        loop {
            if unconnected.is_empty() && !self.has_stopped() {
                let told = std::mem::take(&mut *lock(holdings));
                match self.resumption(told) {
                    Ok(resumption) => return Ok(resumption),
                    Err(Irrecoverable::TooLong { message }) if self.rank.is_root() => {
                        let what = format!("message {message} has too many blocks to complete it from parts");
                        self.declare(FailureCause::Resources { what });
                    }
                    // The root declares it.
                    Err(Irrecoverable::TooLong { message }) => futures::select_biased! {
                        () = stopped => {}
                        () = late => {
                            let what = format!("has dropped message {message}, which some members lack");
                            self.accuse(Rank::ROOT, FailureCause::Protocol { what });
                        }
                    },
                    Err(Irrecoverable::Contradiction { by, what }) if by == self.rank => {
                        self.declare(FailureCause::Resources { what });
                    }
                    Err(Irrecoverable::Contradiction { by, what }) => self.accuse(by, FailureCause::Protocol { what }),
                }
            }
            futures::select_biased! {
                outcome = ended => {
                    let failure = outcome.expect_err("a group that this member has not joined is not closed");
                    return Err(GroupError::Failed(failure));
                }
                // Only the end of the group is awaited then.
                () = stopped => {}
                (rank, theirs) = std::pin::pin!(next_of(&mut offers).fuse()) => {
                    unheard.remove(&rank);
                    if theirs.spec != spec {
                        self.accuse(rank, FailureCause::SpecMismatch);
                        continue;
                    }
                    let neighbour = self.exchange.neighbour(rank);
                    let role = if self.node.mesh.me() < neighbour.node { Role::Active } else { Role::Passive };
                    let address = self.node.mesh.address(neighbour.node);
                    let connect = neighbour.connect(role, address, theirs.endpoints);
                    connecting.push(connect.map(move |connected| (rank, connected)));
                }
                (member, outcome) = connecting.select_next_some() => {
                    if self.is_connected(member, outcome) {
                        unconnected.remove(&member);
                    }
                }
                () = late => self.accuse_late(&unconnected, &unheard),
            }
        }
    }

    /// Tells whether a member is connected as the group needs it; accuses it if not.
    fn is_connected(&self, member: Rank, outcome: Result<(), ConnectError>) -> bool {
        let outcome = outcome.map_err(|error| with_sources(&error));
        let can_share = !self.spec.is_shared() || self.exchange.neighbour(member).can_share();
        let shares = |()| if can_share { Ok(()) } else { Err("no memory is shared with it".to_owned()) };
        match outcome.and_then(shares) {
            Ok(()) => true,
            Err(what) => {
                let what = sharing::with_remedy(&self.spec, what);
                self.accuse(member, FailureCause::DataConnection { what });
                false
            }
        }
    }

    /// Accuses the members that are not connected in time; some of them were not heard of.
    fn accuse_late(&self, unconnected: &BTreeSet<Rank>, unheard: &BTreeSet<Rank>) {
        let late = unconnected.iter().map(|&rank| match unheard.contains(&rank) {
            true => (rank, FailureCause::NotJoined),
            false => (rank, FailureCause::DataConnection { what: "it was not connected in time".to_owned() }),
        });
        self.accuse_all(late.collect());
    }

    fn rank_of(&self, node: NodeId) -> Option<Rank> {
        let position = self.members.iter().position(|&member| member == node)?;
        u32::try_from(position).ok().map(Rank)
    }
}

impl OpenGroup for Group {
    fn id(&self) -> GroupId {
        self.id
    }

    fn declare(&self, cause: FailureCause) {
        Group::declare(self, cause);
    }

    fn depart(&self) {
        Group::depart(self);
    }

    fn state(&self) -> Option<GroupEnding> {
        Some(match self.outcome()? {
            Ok(_) => GroupEnding::Closed,
            Err(_) => GroupEnding::Failed,
        })
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        Group::ended(self).map(drop).boxed()
    }
}

impl Owner for Group {
    fn heal<'a>(
        &'a self,
        by: Rank,
        identity: BlockIdentity,
        first: bool,
        memory: &'a mut [u8],
    ) -> BoxFuture<'a, Result<HealedBlock, TransferError>> {
        self.fetch_anew(by, identity, first, memory).boxed()
    }

    fn note_digest(&self, message: u64, digest: Option<Digest>) {
        self.note_own_digest(message, digest);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.node.mesh.leave_group(self.id);
    }
}

/// Runs a member's engine until the group is to do no further work; then waits until all members agree on its end, and
/// closes its connections.
pub(crate) fn start(group: Arc<Group>, engine: impl Future<Output = Result<(), TransferError>> + Send + 'static) {
    let environment = group.node.environment.clone();
    let span = group.span.clone();
    let task = async move {
        {
            let working = async {
                if let Err(error) = engine.await {
                    group.report(error);
                }
            };
            let mut working = std::pin::pin!(working.fuse());
            let (stopped, pacing) = (std::pin::pin!(group.stopped()), std::pin::pin!(group.watch_pace()));
            let (mut stopped, mut pacing) = (WhenWoken::new(stopped).fuse(), WhenWoken::new(pacing).fuse());
            let measuring = std::pin::pin!(group.measure_round_trips());
            let mut measuring = WhenWoken::new(measuring).fuse();
            let telling = std::pin::pin!(group.tell_decisions());
            let mut telling = WhenWoken::new(telling).fuse();
            // The engine ends when this member has done its part. Others may be far behind.
            loop {
                futures::select_biased! {
                    () = stopped => break,
                    () = working => {}
                    () = pacing => {}
                    () = measuring => {}
                    () = telling => {}
                }
            }
        }
        // The connections stay until all have agreed: a neighbour that does not know of the failure yet must not take
        // this member for its cause.
        let _ = group.ended().await;
        for neighbour in group.exchange.neighbours.values() {
            neighbour.close();
        }
        group.retained.mark_idle();
    };
    environment.spawn(Box::pin(tracing::Instrument::instrument(task, span)));
}

/// Takes the grants of all neighbours, until a connection breaks.
pub(crate) fn take_grants(group: &Arc<Group>, grants: Grants) -> FuturesUnordered<BoxFuture<'static, TransferError>> {
    grants
        .into_iter()
        .map(|(rank, posted)| {
            let group = group.clone();
            async move { group.exchange.neighbour(rank).take_grants(posted).await }.boxed()
        })
        .collect()
}

/// A future that owns everything it needs.
pub(crate) type OwnedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Announced sizes that wait for their message.
const ANNOUNCEMENTS_MAX: usize = 4096;
