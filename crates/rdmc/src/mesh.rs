//! The mesh: a control connection between every two nodes of a cluster (DSN §4.2).
//!
//! It carries everything that does not travel on queue pairs: their endpoints and keys, signs of life, and the
//! agreement on the end of a group. Of two nodes the one with the lower number opens the connection, and opens it again
//! when it is lost.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use futures::future::FutureExt;
use rdmc_fabric::{ControlStream, Environment, Timestamp};
use tokio::io::{AsyncRead, AsyncWriteExt, BufReader};
use tokio::sync::{Notify, mpsc, watch};

use crate::failure::FailureCause;
use crate::id::{GroupId, NodeId};
use crate::security::PeerSecurity;
use crate::sync::lock;
use crate::wire::end::{Ballot, EndFrame, Evidence, Outcome};
use crate::wire::{self, Frame, FrameCheck, GroupFrame, PROTOCOL_VERSION, RejectReason};

pub(crate) mod ahead;
mod groups;
pub(crate) mod listener;
mod liveness;
pub(crate) mod members;
mod outbox;
mod reach;
pub(crate) mod roster;

use ahead::ConnectionAhead;
use groups::{FrameRoute, Groups};
use listener::NodeConnection;
use liveness::{LastHeard, Liveness, Stall};
use members::{LinkHistory, Subscriptions};
use outbox::{Outbox, PostError};
use reach::Reached;

/// One node's control connections and the groups they serve.
#[derive(Clone)]
pub(crate) struct Mesh(Arc<MeshShared>);

struct MeshShared {
    me: NodeId,
    /// Random: another process that is this node has another one.
    incarnation: u64,
    cluster: u128,
    members: BTreeMap<NodeId, String>,
    environment: Arc<dyn Environment>,
    detection: Duration,
    peers: PeerSecurity,
    state: Mutex<MeshState>,
    /// Counts connections opened, made or lost, and failed for want of descriptors; and groups and subscriptions that
    /// begin.
    changes: watch::Sender<u64>,
    /// Other nodes have begun a check of liveness.
    check_now: Notify,
}

#[derive(Default)]
struct MeshState {
    links: BTreeMap<NodeId, Link>,
    next_serial: u64,
    groups: Groups,
    /// The nodes to which this one has opened connections.
    reached: BTreeMap<NodeId, Reached>,
    /// The nodes that were ever connected.
    histories: BTreeMap<NodeId, LinkHistory>,
    /// The nodes that were not, and that groups need not wait for any more.
    unreachable: BTreeMap<NodeId, FailureCause>,
    /// Counts connections made or lost.
    link_changes: u64,
    /// Those that follow the other nodes.
    subscriptions: Subscriptions,
    /// The last problem with a node that is not connected.
    problems: BTreeMap<NodeId, String>,
    /// This process could not open a connection because it has too many descriptors open.
    out_of_descriptors: bool,
    /// This node is leaving: others answer by closing their connections.
    leaving: bool,
    /// When liveness was last checked.
    checked_at: Timestamp,
    /// When the task that checks liveness runs next, at the latest.
    run_due: Option<Timestamp>,
    /// The last time for which it did not run although it was due.
    stall: Option<Stall>,
    /// When a partner with a lower number last asked for a sign of life.
    pinged_by_leader_at: Option<Timestamp>,
}

/// One connection to another node.
struct Link {
    serial: u64,
    outgoing: Arc<Outbox>,
    address: Option<IpAddr>,
    liveness: Liveness,
    /// Ends the connection.
    cut: mpsc::Sender<FailureCause>,
}

/// An event of the mesh, for a group.
#[derive(Clone, Debug)]
pub(crate) enum GroupEvent {
    /// A node has sent a frame.
    Frame(NodeId, GroupFrame),
    /// The connection to a node was lost, and how.
    Lost(NodeId, FailureCause),
    /// The connection to a node was made.
    Connected(NodeId),
}

/// An event, with the serial number of the connection if it is about one.
struct InboxEvent {
    event: GroupEvent,
    serial: Option<u64>,
}

impl GroupEvent {
    /// Returns the node that it is about.
    pub(crate) fn node(&self) -> NodeId {
        match self {
            Self::Frame(node, _) | Self::Lost(node, _) | Self::Connected(node) => *node,
        }
    }
}

/// The events of a group, in order, and those from before it was joined.
pub(crate) struct Inbox {
    early: VecDeque<GroupEvent>,
    events: mpsc::Receiver<InboxEvent>,
    /// The latest connection that was made to each node.
    connected: BTreeMap<NodeId, u64>,
    /// Whether some frames from before the group was joined are forgotten.
    lost_early_frames: bool,
}

impl Inbox {
    pub(crate) fn lost_early_frames(&self) -> bool {
        self.lost_early_frames
    }

    /// Waits for the next event; returns `None` if the group has ended.
    ///
    /// # Cancel safety
    /// No event is lost.
    pub(crate) async fn next(&mut self) -> Option<GroupEvent> {
        if let Some(event) = self.early.pop_front() {
            return Some(event);
        }
        let InboxEvent { event, serial } = self.events.recv().await?;
        match (&event, serial) {
            (GroupEvent::Connected(node), Some(serial)) => _ = self.connected.insert(*node, serial),
            // The event of a connection's end may come after the next one has begun.
            (GroupEvent::Lost(node, _), Some(serial)) if self.connected.get(node) > Some(&serial) => {
                self.early.push_back(GroupEvent::Connected(*node));
            }
            _ => {}
        }
        Some(event)
    }
}

impl Mesh {
    pub(crate) fn new(
        me: NodeId,
        cluster: u128,
        members: BTreeMap<NodeId, String>,
        environment: Arc<dyn Environment>,
        detection: Duration,
        peers: PeerSecurity,
    ) -> Self {
        let incarnation = environment.random_u64();
        Self(Arc::new(MeshShared {
            me,
            incarnation,
            cluster,
            members,
            environment,
            detection,
            peers,
            state: Mutex::default(),
            changes: watch::Sender::new(0),
            check_now: Notify::new(),
        }))
    }

    pub(crate) fn me(&self) -> NodeId {
        self.0.me
    }

    /// Returns the time within which the members agree that a silent one has failed.
    pub(crate) fn detection(&self) -> Duration {
        self.0.detection
    }

    /// Returns the number of refused control connections, those at this node's listener included.
    pub(crate) fn refused(&self) -> u64 {
        self.0.peers.refusals.count()
    }

    /// Returns all nodes of the cluster.
    pub(crate) fn nodes(&self) -> Vec<NodeId> {
        self.0.members.keys().copied().collect()
    }

    /// Tells whether the node belongs to the cluster.
    pub(crate) fn knows(&self, node: NodeId) -> bool {
        self.0.members.contains_key(&node)
    }

    /// Returns the nodes to which this one opens connections.
    pub(crate) fn dialled(&self) -> Vec<NodeId> {
        self.0.members.keys().copied().filter(|&node| node > self.0.me).collect()
    }

    /// Returns the address of a connected node, where it has one.
    pub(crate) fn address(&self, node: NodeId) -> Option<IpAddr> {
        self.lock().links.get(&node).and_then(|link| link.address)
    }

    /// Keeps a connection to `peer` open, for ever. The first one may be open already.
    pub(crate) async fn dial(self, peer: NodeId, mut ahead: Option<ConnectionAhead>) {
        let environment = &*self.0.environment;
        let address = &self.0.members[&peer];
        let mut pause = DIAL_PAUSE_MIN;
        loop {
            match environment.timeout(HANDSHAKE_LIMIT, self.say_hello(peer, address, ahead.take())).await {
                Ok(Ok((stream, incarnation))) => {
                    pause = DIAL_PAUSE_MIN;
                    self.run_link(stream, peer, incarnation).await;
                }
                Ok(Err(error)) => self.note_problem(peer, error.to_string()),
                Err(_) => {
                    let limit = HANDSHAKE_LIMIT.as_secs();
                    self.note_problem(peer, format!("{address}: it did not answer within {limit} s"));
                }
            }
            environment.sleep(pause).await;
            pause = (pause * 2).min(DIAL_PAUSE_MAX);
        }
    }

    /// Opens a connection to `peer`, unless it is open already, and greets the peer; returns it with the peer's
    /// incarnation.
    pub(crate) async fn say_hello(
        &self,
        peer: NodeId,
        address: &str,
        ahead: Option<ConnectionAhead>,
    ) -> io::Result<(Box<dyn ControlStream>, u64)> {
        let name = |error: io::Error| {
            self.note_if_out_of_descriptors(&error);
            io::Error::new(error.kind(), format!("{address}: {error}"))
        };
        let environment = &*self.0.environment;
        let open = futures::future::OptionFuture::from(ahead).await;
        let stream = match open {
            Some(Ok(open)) => open.stream,
            _ => environment.connect(address).await.map_err(name)?,
        };
        self.lock().reached.insert(peer, Reached::by(&*stream));
        self.0.changes.send_modify(|count| *count += 1);
        let mut stream = self.0.peers.secure(environment, stream, peer, address).await.map_err(name)?;
        let MeshShared { cluster, me: from, incarnation, .. } = *self.0;
        let hello = Frame::Hello { version: PROTOCOL_VERSION, cluster, from, to: peer, incarnation };
        stream.write_all(&wire::encode(&hello)).await.map_err(name)?;
        stream.flush().await.map_err(name)?;
        match wire::read(&mut stream).await.map_err(name)? {
            Some(Frame::Welcome { incarnation }) => Ok((stream, incarnation)),
            Some(Frame::Reject { reason }) => Err(io::Error::other(format!("{address}: {reason}"))),
            Some(_) => Err(io::Error::other(format!("{address}: it does not answer as a node"))),
            None => Err(io::Error::other(format!("{address}: it closed the connection before it answered"))),
        }
    }

    /// Serves connections that other nodes open, for ever.
    pub(crate) async fn welcome(self, mut arrivals: mpsc::Receiver<NodeConnection>, spawner: rdmc_fabric::Spawner) {
        while let Some(mut arrived) = arrivals.recv().await {
            let mesh = self.clone();
            spawner.spawn(Box::pin(async move {
                let from = arrived.from;
                let address = arrived.stream.peer_address();
                let meant = mesh.knows(from) && from < mesh.0.me;
                let answer = match meant {
                    true => Frame::Welcome { incarnation: mesh.0.incarnation },
                    false => Frame::Reject { reason: RejectReason::Identity },
                };
                let written = arrived.stream.write_all(&wire::encode(&answer)).await;
                if written.is_ok() && arrived.stream.flush().await.is_ok() && meant {
                    mesh.run_link(arrived.stream, from, arrived.incarnation).await;
                } else if !meant && arrived.refusals.add("unexpected", address) {
                    tracing::warn!(node = %from, "connection refused: this node does not connect to this one");
                }
            }));
        }
    }

    /// Serves one connection until it ends, then tells the groups that its node is lost.
    async fn run_link(&self, stream: Box<dyn ControlStream>, peer: NodeId, incarnation: u64) {
        let address = stream.peer_address();
        let (from, to) = tokio::io::split(stream);
        let (outgoing, writer) = outbox::open(to);
        let (cut, mut cuts) = mpsc::channel(1);
        let liveness = Liveness::default();
        let heard = liveness.heard();
        let link = Link { serial: 0, outgoing, address, liveness, cut };
        let (serial, begun) = {
            let mut state = self.lock();
            let state = &mut *state;
            if state.leaving {
                return;
            }
            let serial = state.next_serial;
            state.next_serial += 1;
            state.problems.remove(&peer);
            (serial, state.begin_link(peer, Link { serial, ..link }, incarnation))
        };
        self.note_link_change();
        tracing::debug!(node = %peer, restarted = begun.restarted, "connected");
        begun.notify(serial).await;
        // A short frame, such as a sign of life, is read by one system call.
        let mut from = BufReader::with_capacity(READ_BYTES, from);
        let (ended, cause) = {
            let mut serving = std::pin::pin!(self.serve_link(&mut from, writer.run(), (peer, serial), &heard).fuse());
            let mut cutting = std::pin::pin!(cuts.recv().fuse());
            futures::select_biased! {
                ended = serving => (ended, None),
                cause = cutting => (Ok(()), cause),
            }
        };
        let problem = match (&cause, &ended) {
            (Some(cause), _) => cause.to_string(),
            (None, Ok(())) => "it closed the connection".to_owned(),
            (None, Err(error)) => error.to_string(),
        };
        let cause = cause.unwrap_or(FailureCause::ConnectionLost);
        let (current, groups) = {
            let mut state = self.lock();
            let current = state.is_current(peer, serial);
            if current {
                state.links.remove(&peer);
                state.histories.entry(peer).and_modify(|history| history.loss = Some(cause.clone()));
                // Its frames for groups that are not joined yet are void: these groups learn that it is lost.
                state.groups.forget_early(peer);
            }
            let groups = if current && !state.leaving { state.groups.listening() } else { Vec::new() };
            (current, groups)
        };
        if let Err(error) = &ended
            && error.kind() == io::ErrorKind::InvalidData
            && self.0.peers.refusals.is_to_log("corrupt", address)
        {
            tracing::warn!(node = %peer, %error, "disconnected");
        }
        tracing::debug!(node = %peer, %problem, "disconnected");
        if current {
            self.note_problem(peer, problem);
            self.note_link_change();
        }
        notify(&groups, serial, &GroupEvent::Lost(peer, cause)).await;
    }

    /// Tells all that wait for it that a connection was made or lost.
    fn note_link_change(&self) {
        let waiting = {
            let mut state = self.lock();
            state.link_changes += 1;
            state.subscriptions.take_waiting()
        };
        waiting.into_iter().for_each(Waker::wake);
        self.0.changes.send_modify(|count| *count += 1);
    }

    /// Reads and writes until either ends.
    async fn serve_link(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        writing: impl Future<Output = io::Result<()>>,
        link: (NodeId, u64),
        heard: &LastHeard,
    ) -> io::Result<()> {
        let mut reading = std::pin::pin!(self.read_link(from, link, heard).fuse());
        let mut writing = std::pin::pin!(writing.fuse());
        let refused = futures::select_biased! {
            ended = reading => return ended,
            ended = writing => ended,
        };
        if refused.is_err() {
            // Frames that the peer sent before it ended, perhaps an outcome, have arrived and are still to be read.
            let _ = self.0.environment.timeout(self.0.detection / UNREAD_SHARE, reading).await;
        }
        refused
    }

    async fn read_link(
        &self,
        from: &mut (impl AsyncRead + Unpin),
        (peer, serial): (NodeId, u64),
        heard: &LastHeard,
    ) -> io::Result<()> {
        let mut check = FrameCheck::default();
        while let Some(frame) = wire::read_next(from, &mut check).await? {
            heard.set(self.0.environment.now());
            match frame {
                Frame::Group { group, frame } => self.deliver((peer, serial), group, frame).await,
                Frame::Ping => self.answer_ping(peer),
                Frame::Pong => {}
                Frame::Goodbye => break,
                _ => return Err(io::Error::other("a frame that does not belong here")),
            }
        }
        Ok(())
    }

    async fn deliver(&self, (peer, serial): (NodeId, u64), group: GroupId, frame: GroupFrame) {
        let destined = {
            let mut state = self.lock();
            // A frame of a connection that another one has replaced must not come after those of the new one, which may
            // be of another process.
            let current = state.is_current(peer, serial);
            if current { state.groups.route(group, peer, frame) } else { FrameRoute::Nowhere }
        };
        match destined {
            FrameRoute::ToGroup(events, frame) => {
                // Fails only if the group has just ended.
                let _ = events.send(InboxEvent { event: GroupEvent::Frame(peer, frame), serial: None }).await;
            }
            FrameRoute::ToPeer(answer) => {
                self.post_frame(peer, &Frame::Group { group, frame: GroupFrame::End(answer) })
            }
            FrameRoute::Nowhere => {}
        }
    }

    fn outbox(&self, peer: NodeId) -> Option<Arc<Outbox>> {
        self.lock().links.get(&peer).map(|link| link.outgoing.clone())
    }

    /// Opens a group's inbox; returns `None` if the group's number was used before.
    pub(crate) fn open_group(&self, group: GroupId, members: &Arc<[NodeId]>) -> Option<Inbox> {
        let mut state = self.lock();
        let (mut early, events, lost_early_frames) = state.groups.open(group, members)?;
        let lost = |node: &NodeId| match state.histories.get(node) {
            Some(_) => (!state.links.contains_key(node)).then_some(FailureCause::ConnectionLost),
            // A group waits for nodes that were never connected.
            None => state.unreachable.get(node).cloned(),
        };
        early.extend(members.iter().filter_map(|node| Some(GroupEvent::Lost(*node, lost(node)?))));
        drop(state);
        self.0.changes.send_modify(|count| *count += 1);
        Some(Inbox { early, events, connected: BTreeMap::new(), lost_early_frames })
    }

    /// Closes a group's inbox and remembers its outcome, for nodes that ask. Its number is not used again.
    pub(crate) fn conclude_group(&self, group: GroupId, ballot: Ballot, outcome: Outcome) {
        self.end_group(group, Some((ballot, outcome)));
    }

    /// Closes a group's inbox without an outcome, unless it has one. Its number is not used again.
    pub(crate) fn leave_group(&self, group: GroupId) {
        self.end_group(group, None);
    }

    fn end_group(&self, group: GroupId, outcome: Option<(Ballot, Outcome)>) {
        let told = self.lock().groups.end(group, outcome);
        for (node, frame) in told {
            self.post_frame(node, &Frame::Group { group, frame: GroupFrame::End(frame) });
        }
    }

    /// Queues a frame of a group for a node when there is room. Does nothing if the node is not connected, or was
    /// started again since the group was opened: the group gets an event of that.
    pub(crate) async fn send(&self, to: NodeId, group: GroupId, frame: GroupFrame) {
        let outgoing = self.lock().link_for(group, to).map(|link| link.outgoing.clone());
        if let Some(outgoing) = outgoing {
            outgoing.send(wire::encode_unchecked(&Frame::Group { group, frame })).await;
        }
    }

    /// Queues a frame of a group at once. Does nothing where [`send`](Self::send) does nothing.
    pub(crate) fn post(&self, to: NodeId, group: GroupId, frame: GroupFrame) {
        if let Some(link) = self.lock().link_for(group, to) {
            self.post_on(link, &Frame::Group { group, frame });
        }
    }

    fn post_frame(&self, to: NodeId, frame: &Frame) {
        if let Some(link) = self.lock().links.get(&to) {
            self.post_on(link, frame);
        }
    }

    fn post_on(&self, link: &Link, frame: &Frame) {
        if let Err(PostError) = link.outgoing.post(wire::encode_unchecked(frame)) {
            // The node must notice that it misses a frame. Fails only if the connection was cut before.
            let _ = link.cut.try_send(FailureCause::Unresponsive { silence: self.0.detection });
        }
    }

    /// Waits until the operating system has everything that was queued for these nodes.
    pub(crate) async fn flush(&self, nodes: &[NodeId]) {
        let flush = nodes.iter().filter_map(|&node| self.outbox(node));
        let flush = flush.map(|outgoing| async move { outgoing.flush().await });
        futures::future::join_all(flush).await;
    }

    /// Leaves before this node has started: tells the nodes that form groups with it why it does not join them.
    pub(crate) async fn leave_unjoined(&self, cause: FailureCause) {
        let awaited = self.lock().groups.awaited();
        for (group, node) in awaited {
            let evidence = Evidence { own: Some(cause.clone()), ..Evidence::default() };
            self.post_frame(node, &Frame::Group { group, frame: GroupFrame::End(EndFrame::Wedged(evidence)) });
        }
        // A node that takes no frames does not get them.
        let _ = self.0.environment.timeout(LEAVE_LIMIT, self.leave()).await;
    }

    /// Says goodbye to all nodes and waits until the operating system has the frames.
    ///
    /// Before that, it sends the outcomes of the latest groups: the leader may have died after it told only this node.
    /// From here on groups get no events of connections, and the streams of members end.
    pub(crate) async fn leave(&self) {
        let leaving: Vec<Arc<Outbox>> = {
            let mut state = self.lock();
            state.leaving = true;
            let state = &*state;
            let told = |node| {
                let told = state.groups.latest_of(node);
                told.map(|(group, frame)| Frame::Group { group, frame: GroupFrame::End(frame) })
            };
            for (&node, link) in &state.links {
                for frame in told(node).chain([Frame::Goodbye]) {
                    // A node that takes no more frames does not get it.
                    let _ = link.outgoing.post(wire::encode_unchecked(&frame));
                }
            }
            state.links.values().map(|link| link.outgoing.clone()).collect()
        };
        self.note_link_change();
        futures::future::join_all(leaving.iter().map(|outgoing| outgoing.flush())).await;
    }

    fn note_problem(&self, peer: NodeId, problem: String) {
        self.lock().problems.insert(peer, problem);
    }

    fn lock(&self) -> MutexGuard<'_, MeshState> {
        lock(&self.0.state)
    }
}

/// A connection that has begun: the groups that were open then, and what they are to learn.
struct BegunLink {
    restarted: bool,
    groups: Vec<mpsc::Sender<InboxEvent>>,
    events: Vec<GroupEvent>,
}

impl MeshState {
    /// Notes a new connection. Groups from before a node was started again do not get the new process as the member.
    fn begin_link(&mut self, peer: NodeId, link: Link, incarnation: u64) -> BegunLink {
        let serial = link.serial;
        self.unreachable.remove(&peer);
        let replaced = self.links.insert(peer, link).is_some();
        let history = self.histories.entry(peer).or_insert(LinkHistory { serial, incarnation, loss: None });
        let restarted = history.incarnation != incarnation;
        (history.serial, history.incarnation) = (serial, incarnation);
        let mut events = Vec::new();
        if replaced {
            let cause = if restarted { FailureCause::Restarted } else { FailureCause::ConnectionLost };
            history.loss = Some(cause.clone());
            events.push(GroupEvent::Lost(peer, cause));
            // As when the one before is noticed to have ended.
            self.groups.forget_early(peer);
        }
        if restarted {
            self.groups.note_restart(peer);
        } else {
            events.push(GroupEvent::Connected(peer));
        }
        BegunLink { restarted, groups: self.groups.listening(), events }
    }

    fn is_current(&self, peer: NodeId, serial: u64) -> bool {
        self.links.get(&peer).is_some_and(|link| link.serial == serial)
    }

    /// Returns the connection to a node as a member of a group.
    fn link_for(&self, group: GroupId, node: NodeId) -> Option<&Link> {
        self.links.get(&node).filter(|_| !self.groups.is_without(group, node))
    }
}

impl BegunLink {
    /// Sends the events to the groups. Keeps no inbox open that its group has closed.
    async fn notify(self, serial: u64) {
        for event in &self.events {
            notify(&self.groups, serial, event).await;
        }
    }
}

/// Sends an event of a connection to groups.
async fn notify(groups: &[mpsc::Sender<InboxEvent>], serial: u64, event: &GroupEvent) {
    for group in groups {
        // Fails only if the group has just ended.
        let _ = group.send(InboxEvent { event: event.clone(), serial: Some(serial) }).await;
    }
}

/// How long connecting and greeting may take.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// First pause before a connection is tried again; doubles up to the longest.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest pause before a connection is tried again.
const DIAL_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a node that has not started waits until its last frames are written.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);
/// The share of the detection time for which arrived frames are read from a connection that takes no more.
const UNREAD_SHARE: u32 = 4;
/// Bytes to read at once; longer frames are read directly into their memory.
const READ_BYTES: usize = 1 << 10;

#[cfg(test)]
mod tests;
