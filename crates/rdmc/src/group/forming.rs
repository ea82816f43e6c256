//! How a group forms: members exchange queue pairs with their neighbours and connect them.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::FutureExt;
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{Capabilities, ConnectError, FabricError, Operation, Received, Role};
use rdmc_schedule::{MEMBERS_MAX, Neighbours, Rank, first_source, neighbours};
use tokio::sync::mpsc;

use super::continuation::{Continuation, Holdings, Irrecoverable, Resumption};
use super::delta::Delta;
use super::ending::GroupEnd;
use super::error::GroupError;
use super::events::{EventRouting, OfferedEndpoints};
use super::healing::Healing;
use super::membership::Membership;
use super::pace::PaceJudge;
use super::retained::RetainedMessages;
use super::share::Allotments;
use super::status::{self, Status};
use super::{Group, GroupSpec};
use crate::failure::{FailureCause, with_sources};
use crate::id::NodeId;
use crate::resources::{NodeResources, OpenGroup};
use crate::stats::Counters;
use crate::sync::lock;
use crate::table::{ExpectedRows, Link, RingEnd, Row, StatusTable};
use crate::transfer::Port;
use crate::transfer::distance::Distance;
use crate::transfer::exchange::Exchange;
use crate::transfer::limit::SendLimit;
use crate::transfer::neighbour::{Depth, Neighbour, Sends};
use crate::transfer::waits::WaitMonitor;
use crate::wire::GroupFrame;

/// A group that is formed, for its engine.
pub(crate) struct FormedGroup {
    pub(crate) group: Arc<Group>,
    /// Sizes by message number, as the root announces them.
    pub(crate) announcements: mpsc::Receiver<(u64, u64)>,
    pub(crate) grants: Grants,
    pub(crate) rows: ExpectedRows,
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
    let rank = spec.check_at(&node)?;
    let continuation = match role {
        MemberRole::Root | MemberRole::Receiver if rank.is_root() != matches!(role, MemberRole::Root) => {
            return Err(GroupError::WrongRole { rank });
        }
        MemberRole::Root | MemberRole::Receiver => None,
        MemberRole::Survivor(continuation) => Some(continuation),
    };
    let continuation = continuation.as_deref();
    let count = spec.count();
    let Neighbourhood { neighbours, first_source, peers, announced_to, announced_early_to } =
        Neighbourhood::new(&node, &spec, rank, continuation.is_some())?;
    let links = status::peers(&spec, rank).into_iter();
    let ring_with = |peer: Rank| {
        let end = if rank.is_root() { RingEnd::Writes } else { RingEnd::Reads };
        spec.ring.filter(|_| rank.is_root() || peer.is_root()).map(|ring| (ring, end))
    };
    let links = links.map(|peer| Link::new(node.fabric.clone(), &node.completions, peer, ring_with(peer)));
    let links = links.collect::<Result<Vec<_>, FabricError>>()?;
    let capabilities = node.fabric.capabilities();
    spec.check_blocks.get_or_insert(!capabilities.protects_blocks);
    let members: Arc<[NodeId]> = spec.members.clone().into();
    let inbox = node.mesh.open_group(spec.id, &members).ok_or(GroupError::GroupIdUsed { group: spec.id })?;
    let prior = continuation.map(|continuation| continuation.prior).unwrap_or_default();
    let retained = RetainedMessages::new(members.len(), prior.base, spec.recoverable)
        .and_for_healing(spec.check_blocks == Some(true))
        .and_for_sharing(spec.is_shared(), rank.is_root());
    let exchange = Exchange {
        rank,
        members: count,
        algorithm: spec.algorithm.clone(),
        block_size: spec.block_size,
        checks_blocks: spec.check_blocks == Some(true),
        neighbours: peers,
        ingress: Port::default(),
        egress: Port::default(),
        distance: Distance::new(&spec.algorithm, count, rank, spec.block_size, &capabilities),
        limit: SendLimit::default(),
        waits: WaitMonitor::default(),
        counters: Counters::default(),
        node_counters: node.counters.clone(),
        environment: node.environment.clone(),
    };
    let span = tracing::info_span!("group", group = spec.id.0, rank = rank.0);
    let membership = Arc::new(Membership { id: spec.id, rank, members, spec, prior, node, span });
    let retained = Arc::new(retained);
    let end = Arc::new(GroupEnd::new(membership.clone(), retained.clone(), continuation));
    let first = Row::begin(prior.base);
    let salt = membership.id.0;
    let (count, ring) = (membership.members.len(), membership.spec.ring);
    let table = StatusTable::new(rank, count, salt, first, links, ring, membership.node.fabric.clone());
    let status = Status::new(membership.clone(), end.clone(), retained.clone(), table);
    let exchange = Arc::new(exchange);
    let (healing, asked) = Healing::new(membership.clone(), exchange.clone(), retained.clone());
    let group = Arc::new(Group {
        pace: PaceJudge::new(membership.clone(), exchange.clone(), end.clone()),
        delta: Delta::new(membership.clone(), exchange.clone()),
        allotments: Allotments::new(membership.clone(), exchange.clone()),
        membership,
        first_source,
        announced_to,
        announced_early_to,
        exchange,
        end,
        status,
        retained,
        healing,
    });
    let (announced, announcements) = mpsc::channel(ANNOUNCEMENTS_MAX);
    let unheard = group.connected_to();
    // Each of them is let in once.
    let (offered, offers) = mpsc::channel(unheard.len().max(1));
    let holdings = Arc::<Mutex<Holdings>>::default();
    let routing = EventRouting { inbox, announced, offered, unheard, holdings: holdings.clone() };
    let abandon = AbandonOnDrop(Some(group.clone()));
    let open: Arc<dyn OpenGroup> = group.clone();
    if !group.membership.node.groups.add(Arc::downgrade(&open), group.membership.id) {
        return Err(GroupError::ShuttingDown);
    }
    if let Some(continuation) = continuation {
        continuation.hand_over(&group.retained);
    }
    let rows = group.status.table.expect_rows();
    let grants = neighbours.sends_to.iter().map(|&to| (to, group.exchange.neighbour(to).expect_grants())).collect();
    // A task of its own: others wait for this member's answers even if its application does not poll this future.
    let listening = group.clone();
    let listening = async move { listening.listen(routing, asked).await };
    group
        .membership
        .node
        .environment
        .spawn(Box::pin(tracing::Instrument::instrument(listening, group.membership.span.clone())));
    let connected = group.connect(offers, &holdings, group.membership.spec.digest(continuation)).await;
    let resumption = connected.inspect_err(|_| group.retained.mark_idle())?;
    abandon.disarm();
    group.membership.node.counters.groups_formed.fetch_add(1, Ordering::Relaxed);
    let (algorithm, fabric) = (&group.membership.spec.algorithm, capabilities.name);
    let (neighbours, shared) = group.carriers();
    tracing::info!(
        parent: &group.membership.span,
        members = count,
        %algorithm,
        fabric,
        neighbours,
        by_shared_memory = shared,
        "group formed"
    );
    Ok(FormedGroup { group, announcements, grants, rows, resumption })
}

/// The members with which a member exchanges blocks.
struct Neighbourhood {
    neighbours: Neighbours,
    /// The member that sends this one the first block of every message, if it is always the same.
    first_source: Option<Rank>,
    peers: BTreeMap<Rank, Neighbour>,
    /// At the root: the members to which it has to announce a message's size.
    announced_to: Vec<NodeId>,
    /// At the root: its neighbours, which also learn the size from their first block, if it announces sizes anyway.
    announced_early_to: Vec<NodeId>,
}

impl Neighbourhood {
    fn new(node: &NodeResources, spec: &GroupSpec, rank: Rank, continues: bool) -> Result<Self, GroupError> {
        let count = spec.count();
        // Missing blocks may come from any member.
        let neighbours = match continues || spec.delta {
            true => everybody_but(rank, count),
            false => neighbours(&spec.algorithm, count, rank)?,
        };
        // In a delta group any member may send the first block.
        let first_source_of = |member| match spec.delta {
            true => Ok(None),
            false => first_source(&spec.algorithm, count, member),
        };
        // A slot of the ring has the size.
        let learns_size_of_block = spec.ring.is_none();
        let depth = Depth::shared(node.completions_max, neighbours.sends_to.len() + neighbours.receives_from.len());
        let mut peers = BTreeMap::new();
        for &peer in neighbours.sends_to.iter().chain(&neighbours.receives_from) {
            let sends = match learns_size_of_block && first_source_of(peer)? == Some(rank) {
                true => Sends::BlocksAndSizes,
                false if neighbours.sends_to.contains(&peer) => Sends::Blocks,
                false => Sends::Nothing,
            };
            let id = spec.members[peer.index()];
            if let Entry::Vacant(vacant) = peers.entry(peer) {
                let (fabric, block_size) = (node.fabric.clone(), spec.block_size);
                vacant.insert(Neighbour::new(fabric, &node.completions, peer, id, sends, block_size, depth)?);
            }
        }
        let (mut announced_to, mut announced_early_to) = (Vec::new(), Vec::new());
        for member in (1..count).map(Rank).filter(|_| rank.is_root() && spec.ring.is_none()) {
            match first_source_of(member)? {
                None => announced_to.push(spec.members[member.index()]),
                Some(Rank::ROOT) => announced_early_to.push(spec.members[member.index()]),
                Some(_) => {}
            }
        }
        if announced_to.is_empty() {
            announced_early_to.clear();
        }
        Ok(Self { first_source: first_source_of(rank)?, neighbours, peers, announced_to, announced_early_to })
    }
}

impl GroupSpec {
    /// Checks the specification at a node; returns the node's rank.
    fn check_at(&self, node: &NodeResources) -> Result<Rank, GroupError> {
        self.check()?;
        let Capabilities { message_len_max: max, name: fabric, shares_objects, .. } = node.fabric.capabilities();
        if u64::from(self.block_size) > max {
            return Err(GroupError::BlockTooLong { bytes: u64::from(self.block_size), max, fabric });
        }
        let me = node.mesh.me();
        if self.is_shared() && !shares_objects {
            return Err(GroupError::SharesNoObjects { node: me, fabric });
        }
        if let Some(&node) = self.members.iter().find(|member| !node.mesh.knows(**member)) {
            return Err(GroupError::UnknownNode { node });
        }
        let position = self.members.iter().position(|&member| member == me);
        let rank = position.ok_or(GroupError::NotMember { node: me })?;
        Ok(Rank(u32::try_from(rank).unwrap_or(MEMBERS_MAX)))
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
            group.end.declare(FailureCause::Abandoned);
        }
    }
}

impl Group {
    async fn connect(
        &self,
        mut offers: mpsc::Receiver<(Rank, OfferedEndpoints)>,
        holdings: &Mutex<Holdings>,
        spec: [u8; 32],
    ) -> Result<Resumption, GroupError> {
        let told = self.holdings();
        self.own_holdings(&told, &mut lock(holdings));
        let peers = self.connected_to();
        let offer = peers.iter().map(|&rank| self.offer_to(rank, spec, &told));
        let mut offering: FuturesUnordered<_> = offer.collect();
        let mut unheard = peers.clone();
        let mut unconnected = peers;
        let mut connecting = FuturesUnordered::new();
        let mut late = std::pin::pin!(self.end.wait_in_steps(self.membership.spec.formation_limit).fuse());
        let mut ended = std::pin::pin!(self.end.ended().fuse());
        let mut stopped = std::pin::pin!(self.end.stopped().fuse());
        let (mesh, members) = (&self.membership.node.mesh, &self.membership.members);
        let mut meeting = std::pin::pin!(mesh.connections_to(members).fuse());
        let mut has_met_all = false;
        loop {
            if unconnected.is_empty() && has_met_all && !self.end.has_stopped() {
                let told = std::mem::take(&mut *lock(holdings));
                match self.resumption(told) {
                    Ok(resumption) => return Ok(resumption),
                    Err(Irrecoverable::TooLong { message }) if self.membership.rank.is_root() => {
                        let what = format!("message {message} has too many blocks to complete it from parts");
                        self.end.declare(FailureCause::Resources { what });
                    }
                    // The root declares it.
                    Err(Irrecoverable::TooLong { message }) => futures::select_biased! {
                        () = stopped => {}
                        () = late => {
                            let what = format!("has dropped message {message}, which some members lack");
                            self.end.accuse(Rank::ROOT, FailureCause::Protocol { what });
                        }
                    },
                    Err(Irrecoverable::Contradiction { by, what }) if by == self.membership.rank => {
                        self.end.declare(FailureCause::Resources { what });
                    }
                    Err(Irrecoverable::Contradiction { by, what }) => {
                        self.end.accuse(by, FailureCause::Protocol { what })
                    }
                }
            }
            futures::select_biased! {
                outcome = ended => {
                    let failure = outcome.expect_err("a group that this member has not joined is not closed");
                    return Err(GroupError::Failed(failure));
                }
                // Only the end of the group is awaited then.
                () = stopped => {}
                // Frames to a member that was never connected would be lost.
                () = meeting => has_met_all = true,
                () = offering.select_next_some() => {}
                (rank, theirs) = std::pin::pin!(next_of(&mut offers).fuse()) => {
                    unheard.remove(&rank);
                    if theirs.spec != spec {
                        self.end.accuse(rank, FailureCause::SpecMismatch);
                        continue;
                    }
                    connecting.push(self.connect_to(rank, theirs).map(move |connected| (rank, connected)));
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

    /// Offers queue pairs to a member as soon as its node is connected.
    async fn offer_to(&self, rank: Rank, spec: [u8; 32], told: &[GroupFrame]) {
        let (mesh, node) = (&self.membership.node.mesh, self.membership.members[rank.index()]);
        mesh.contact_with(node).await;
        self.connect_ahead(rank, node);
        mesh.connection_to(node).await;
        // Before the offer: a member that has all offers knows which blocks each member holds.
        for holding in told {
            self.membership.send(node, holding.clone()).await;
        }
        let blocks = self.exchange.neighbours.get(&rank).map(Neighbour::endpoints);
        let table = self.status.table.link(rank).map(Link::endpoint);
        let told = u32::try_from(told.len()).unwrap_or(u32::MAX);
        self.membership.post(node, GroupFrame::Offer { spec, told, blocks, table });
    }

    /// Returns the members to which this one connects.
    fn connected_to(&self) -> BTreeSet<Rank> {
        self.exchange.neighbours.keys().copied().chain(self.status.table.peers()).collect()
    }

    /// Has the fabric open the connections to a distant member before it offers its queue pairs, if this node is to
    /// open them.
    fn connect_ahead(&self, rank: Rank, peer: NodeId) {
        let node = &self.membership.node;
        let Some(address) = node.mesh.distant_peer(peer, DISTANT_FROM) else { return };
        let for_blocks = if self.exchange.neighbours.contains_key(&rank) { Neighbour::QUEUE_PAIRS } else { 0 };
        let for_table = if self.status.table.link(rank).is_some() { Link::QUEUE_PAIRS } else { 0 };
        node.fabric.connect_ahead(&address.to_string(), for_blocks + for_table);
    }

    /// Connects to what a member has offered.
    async fn connect_to(&self, rank: Rank, theirs: OfferedEndpoints) -> Result<(), ConnectError> {
        let (mesh, node) = (&self.membership.node.mesh, self.membership.members[rank.index()]);
        let role = if mesh.me() < node { Role::Active } else { Role::Passive };
        let address = mesh.address(node);
        let blocks = async {
            match (self.exchange.neighbours.get(&rank), theirs.blocks) {
                (Some(neighbour), Some(theirs)) => neighbour.connect(role, address, theirs).await,
                (None, None) => Ok(()),
                _ => Err(ConnectError::WrongState),
            }
        };
        let table = async {
            match (self.status.table.link(rank), theirs.table) {
                (Some(link), Some(theirs)) => link.connect(role, address, theirs).await,
                (None, None) => Ok(()),
                _ => Err(ConnectError::WrongState),
            }
        };
        futures::try_join!(blocks, table).map(drop)
    }

    /// Tells whether a member is connected as the group needs it; accuses it if not.
    fn is_connected(&self, member: Rank, outcome: Result<(), ConnectError>) -> bool {
        let outcome = outcome.map_err(|error| with_sources(&error));
        let neighbour = self.exchange.neighbours.get(&member).filter(|_| self.membership.spec.is_shared());
        let can_share = neighbour.is_none_or(Neighbour::can_share);
        let shares = |()| if can_share { Ok(()) } else { Err("no memory is shared with it".to_owned()) };
        match outcome.and_then(shares) {
            Ok(()) => true,
            Err(what) => {
                let what = with_remedy(&self.membership.spec, what);
                self.end.accuse(member, FailureCause::DataConnection { what });
                false
            }
        }
    }

    /// Accuses the members that are not connected in time; some of them were not heard of.
    fn accuse_late(&self, unconnected: &BTreeSet<Rank>, unheard: &BTreeSet<Rank>) {
        let mesh = &self.membership.node.mesh;
        let members = (0..).map(Rank).zip(&*self.membership.members);
        let unmet = members.filter(|(_, node)| !mesh.is_connected(**node)).map(|(rank, _)| rank);
        let late = unconnected.iter().copied().chain(unmet).collect::<BTreeSet<_>>().into_iter();
        let late = late.map(|rank| match unheard.contains(&rank) {
            true => (rank, FailureCause::NotJoined),
            false => (rank, FailureCause::DataConnection { what: "it was not connected in time".to_owned() }),
        });
        self.end.accuse_all(late.collect());
    }
}

/// Adds a remedy to an error, if members that share objects cannot be joined.
fn with_remedy(spec: &GroupSpec, what: String) -> String {
    if spec.is_shared() { format!("{what}; {REMEDY}") } else { what }
}

/// The remedy for members that are not on one host.
const REMEDY: &str = "members that share objects must be processes of one host, joined by shared memory: \
                      choose them so, or private delivery";
/// Least round trip at which a group does ahead what may be in vain: it opens connections before the other end has
/// offered its queue pairs, and announces sizes that come with blocks too.
pub(super) const DISTANT_FROM: Duration = Duration::from_micros(500);
/// Announced sizes that wait for their message.
const ANNOUNCEMENTS_MAX: usize = 4096;
