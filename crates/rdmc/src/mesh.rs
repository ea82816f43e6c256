//! The mesh: a control connection between every two nodes of a cluster (DSN §4.2).
//!
//! It carries what the data path needs before it exists and when it fails: the exchange of queue pair endpoints and
//! keys, failure reports, and the barrier that closes a group. Of two nodes the one with the lower number opens the
//! connection, and opens it again when it is lost.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdmc_fabric::{ControlStream, Environment};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot, watch};

use crate::group::GroupId;
use crate::node::NodeId;

pub(crate) mod fabrics;
pub(crate) mod frame;
pub(crate) mod invite;
pub(crate) mod listener;

use frame::{Frame, GroupFrame, PROTOCOL_VERSION, Reject};
use listener::Arrived;

/// One node's control connections and the groups they serve.
#[derive(Clone)]
pub(crate) struct Mesh(Arc<MeshShared>);

struct MeshShared {
    me: NodeId,
    cluster: u128,
    members: BTreeMap<NodeId, String>,
    environment: Arc<dyn Environment>,
    state: Mutex<MeshState>,
    /// Changes with every connection made or lost.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct MeshState {
    links: BTreeMap<NodeId, Link>,
    next_serial: u64,
    groups: BTreeMap<GroupId, mpsc::Sender<GroupEvent>>,
    /// Frames of groups that this node has not joined yet, oldest first.
    early: VecDeque<(GroupId, NodeId, GroupFrame)>,
    /// Groups that ended here, oldest first: late frames of theirs are dropped.
    ended: VecDeque<GroupId>,
    /// The last problem with a node that is not connected.
    problems: BTreeMap<NodeId, String>,
}

/// One connection to another node.
struct Link {
    serial: u64,
    outgoing: mpsc::Sender<Outgoing>,
    address: Option<IpAddr>,
}

struct Outgoing {
    bytes: Vec<u8>,
    written: Option<oneshot::Sender<()>>,
}

/// What a group hears from the mesh.
#[derive(Debug)]
pub(crate) enum GroupEvent {
    /// A node says something.
    Frame(NodeId, GroupFrame),
    /// The connection to a node was lost.
    Lost(NodeId),
}

/// What a group hears, in order, with what was said before it was joined.
pub(crate) struct Inbox {
    early: VecDeque<GroupEvent>,
    events: mpsc::Receiver<GroupEvent>,
}

impl Inbox {
    /// Waits for the next event; none if the node is gone.
    ///
    /// # Cancel safety
    /// No event is lost.
    pub(crate) async fn next(&mut self) -> Option<GroupEvent> {
        match self.early.pop_front() {
            Some(event) => Some(event),
            None => self.events.recv().await,
        }
    }
}

impl Mesh {
    pub(crate) fn new(
        me: NodeId,
        cluster: u128,
        members: BTreeMap<NodeId, String>,
        environment: Arc<dyn Environment>,
    ) -> Self {
        Self(Arc::new(MeshShared {
            me,
            cluster,
            members,
            environment,
            state: Mutex::default(),
            changes: watch::Sender::new(0),
        }))
    }

    pub(crate) fn me(&self) -> NodeId {
        self.0.me
    }

    /// Returns all nodes of the cluster.
    pub(crate) fn nodes(&self) -> Vec<NodeId> {
        self.0.members.keys().copied().collect()
    }

    /// Tells whether the node belongs to the cluster.
    pub(crate) fn knows(&self, node: NodeId) -> bool {
        self.0.members.contains_key(&node)
    }

    /// Returns the nodes this one opens connections to.
    pub(crate) fn dialled(&self) -> Vec<NodeId> {
        self.0.members.keys().copied().filter(|&node| node > self.0.me).collect()
    }

    /// Returns the address under which the node is connected, where it has one.
    pub(crate) fn address(&self, node: NodeId) -> Option<IpAddr> {
        self.lock().links.get(&node).and_then(|link| link.address)
    }

    /// Waits until every other node is connected.
    pub(crate) async fn complete(&self) {
        let mut changes = self.0.changes.subscribe();
        // Counted, since a node of a large cluster looks very often. The links are those of members.
        while self.lock().links.len() + 1 < self.0.members.len() {
            changes.changed().await.expect("the sender lives in self");
        }
    }

    /// Returns the nodes that are not connected.
    pub(crate) fn missing(&self) -> Vec<NodeId> {
        let state = self.lock();
        let connected = |node: &NodeId| *node == self.0.me || state.links.contains_key(node);
        self.0.members.keys().copied().filter(|node| !connected(node)).collect()
    }

    /// Returns the last problem with any node that is not connected.
    pub(crate) fn problem(&self) -> String {
        let missing = self.missing();
        let state = self.lock();
        let problem = missing.iter().find_map(|node| Some(format!("node {node}: {}", state.problems.get(node)?)));
        problem.unwrap_or_else(|| "they did not connect".to_owned())
    }

    /// Keeps a connection to `peer` open, for ever.
    pub(crate) async fn dial(self, peer: NodeId) {
        let environment = &*self.0.environment;
        let address = &self.0.members[&peer];
        let mut pause = DIAL_PAUSE_MIN;
        loop {
            match environment.timeout(HANDSHAKE_LIMIT, self.say_hello(peer, address)).await {
                Ok(Ok(stream)) => {
                    pause = DIAL_PAUSE_MIN;
                    self.run_link(stream, peer).await;
                }
                Ok(Err(error)) => self.note_problem(peer, error.to_string()),
                Err(elapsed) => self.note_problem(peer, format!("{address}: {elapsed}")),
            }
            environment.sleep(pause).await;
            pause = (pause * 2).min(DIAL_PAUSE_MAX);
        }
    }

    async fn say_hello(&self, peer: NodeId, address: &str) -> io::Result<Box<dyn ControlStream>> {
        let name = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
        let mut stream = self.0.environment.connect(address).await.map_err(name)?;
        let hello = Frame::Hello { version: PROTOCOL_VERSION, cluster: self.0.cluster, from: self.0.me, to: peer };
        stream.write_all(&frame::encode(&hello)).await.map_err(name)?;
        stream.flush().await.map_err(name)?;
        match frame::read(&mut stream).await.map_err(name)? {
            Some(Frame::Welcome) => Ok(stream),
            Some(Frame::Reject { reason }) => Err(io::Error::other(format!("{address}: {reason}"))),
            _ => Err(io::Error::other(format!("{address}: did not answer as a node"))),
        }
    }

    /// Serves connections that other nodes open, for ever.
    pub(crate) async fn welcome(self, mut arrivals: mpsc::Receiver<Arrived>, spawner: crate::scope::Spawner) {
        while let Some(mut arrived) = arrivals.recv().await {
            let mesh = self.clone();
            spawner.spawn(Box::pin(async move {
                let from = arrived.from;
                let meant = mesh.knows(from) && from < mesh.0.me;
                let answer = if meant { Frame::Welcome } else { Frame::Reject { reason: Reject::Identity } };
                let written = arrived.stream.write_all(&frame::encode(&answer)).await;
                if written.is_ok() && arrived.stream.flush().await.is_ok() && meant {
                    mesh.run_link(arrived.stream, from).await;
                } else if !meant {
                    tracing::warn!(node = %from, "connection refused: not a node that connects to this one");
                }
            }));
        }
    }

    /// Serves one connection until it ends, then tells the groups that its node is lost.
    async fn run_link(&self, stream: Box<dyn ControlStream>, peer: NodeId) {
        let address = stream.peer_address();
        let (outgoing, queued) = mpsc::channel(OUTGOING_MAX);
        let (serial, replaced) = {
            let mut state = self.lock();
            let serial = state.next_serial;
            state.next_serial += 1;
            state.problems.remove(&peer);
            (serial, state.links.insert(peer, Link { serial, outgoing, address }).is_some())
        };
        if replaced {
            self.tell_lost(peer).await;
        }
        self.0.changes.send_modify(|count| *count += 1);
        tracing::debug!(node = %peer, "connected");
        let (mut from, to) = tokio::io::split(stream);
        let ended = {
            let reading = std::pin::pin!(self.read_link(&mut from, peer));
            let writing = std::pin::pin!(write_link(to, queued));
            match futures::future::select(reading, writing).await {
                futures::future::Either::Left((ended, _)) | futures::future::Either::Right((ended, _)) => ended,
            }
        };
        let current = {
            let mut state = self.lock();
            let current = state.links.get(&peer).is_some_and(|link| link.serial == serial);
            if current {
                state.links.remove(&peer);
                // What it said of groups not yet joined is void: they will hear that it is lost.
                state.early.retain(|(_, from, _)| *from != peer);
            }
            current
        };
        let problem = ended.err().map_or_else(|| "it closed the connection".to_owned(), |error| error.to_string());
        tracing::debug!(node = %peer, %problem, "disconnected");
        if current {
            self.note_problem(peer, problem);
            self.0.changes.send_modify(|count| *count += 1);
            self.tell_lost(peer).await;
        }
    }

    async fn read_link(&self, from: &mut (impl tokio::io::AsyncRead + Unpin), peer: NodeId) -> io::Result<()> {
        while let Some(frame) = frame::read_up_to(from, frame::LINK_FRAME_LEN_MAX).await? {
            match frame {
                Frame::Group { group, frame } => self.deliver(peer, group, frame).await?,
                Frame::Goodbye => break,
                _ => return Err(io::Error::other("a frame that does not belong here")),
            }
        }
        Ok(())
    }

    async fn deliver(&self, peer: NodeId, group: GroupId, frame: GroupFrame) -> io::Result<()> {
        let events = {
            let mut state = self.lock();
            if state.ended.contains(&group) {
                return Ok(());
            }
            match state.groups.get(&group) {
                Some(events) => events.clone(),
                None if state.early.iter().filter(|(_, from, _)| *from == peer).count() >= EARLY_MAX => {
                    return Err(io::Error::other("too many frames of groups that this node has not joined"));
                }
                None => {
                    state.early.push_back((group, peer, frame));
                    return Ok(());
                }
            }
        };
        // Fails only if the group has just ended.
        let _ = events.send(GroupEvent::Frame(peer, frame)).await;
        Ok(())
    }

    async fn tell_lost(&self, peer: NodeId) {
        let groups: Vec<_> = self.lock().groups.values().cloned().collect();
        for group in groups {
            let _ = group.send(GroupEvent::Lost(peer)).await;
        }
    }

    /// Starts to listen for a group; none if its number was used before.
    pub(crate) fn open_group(&self, group: GroupId, members: &[NodeId]) -> Option<Inbox> {
        let (sender, events) = mpsc::channel(INBOX_MAX);
        let mut state = self.lock();
        if state.ended.contains(&group) || state.groups.contains_key(&group) {
            return None;
        }
        state.groups.insert(group, sender);
        let mut early = VecDeque::new();
        state.early.retain(|(of, from, frame)| {
            if *of == group {
                early.push_back(GroupEvent::Frame(*from, frame.clone()));
            }
            *of != group
        });
        let lost = members.iter().filter(|node| **node != self.0.me && !state.links.contains_key(*node));
        early.extend(lost.map(|&node| GroupEvent::Lost(node)));
        Some(Inbox { early, events })
    }

    /// Stops listening for a group; its number is not used again.
    pub(crate) fn close_group(&self, group: GroupId) {
        let mut state = self.lock();
        state.groups.remove(&group);
        state.ended.push_back(group);
        if state.ended.len() > ENDED_MAX {
            state.ended.pop_front();
        }
    }

    /// Queues a frame of a group for a node. Does nothing if the node is not connected: the group hears of that.
    pub(crate) async fn send(&self, to: NodeId, group: GroupId, frame: GroupFrame) {
        self.queue(to, &Frame::Group { group, frame }, None).await;
    }

    /// Queues a frame of a group at once, before anything that is queued later; returns whether there was room.
    pub(crate) fn try_send(&self, to: NodeId, group: GroupId, frame: GroupFrame) -> bool {
        let outgoing = self.lock().links.get(&to).map(|link| link.outgoing.clone());
        let bytes = frame::encode(&Frame::Group { group, frame });
        // A node that is not connected has left: nothing is to be queued for it.
        outgoing.is_none_or(|outgoing| {
            let queued = outgoing.try_send(Outgoing { bytes, written: None });
            !matches!(queued, Err(mpsc::error::TrySendError::Full(_)))
        })
    }

    /// Sends a frame of a group and waits until the operating system has it.
    pub(crate) async fn send_written(&self, to: NodeId, group: GroupId, frame: GroupFrame) {
        let (written, wait) = oneshot::channel();
        self.queue(to, &Frame::Group { group, frame }, Some(written)).await;
        let _ = wait.await;
    }

    /// Says goodbye to everybody and waits until the operating system has it.
    pub(crate) async fn leave(&self) {
        let nodes: Vec<_> = self.lock().links.keys().copied().collect();
        for node in nodes {
            let (written, wait) = oneshot::channel();
            self.queue(node, &Frame::Goodbye, Some(written)).await;
            let _ = wait.await;
        }
    }

    async fn queue(&self, to: NodeId, frame: &Frame, written: Option<oneshot::Sender<()>>) {
        let outgoing = self.lock().links.get(&to).map(|link| link.outgoing.clone());
        if let Some(outgoing) = outgoing {
            let _ = outgoing.send(Outgoing { bytes: frame::encode(frame), written }).await;
        }
    }

    fn note_problem(&self, peer: NodeId, problem: String) {
        self.lock().problems.insert(peer, problem);
    }

    fn lock(&self) -> MutexGuard<'_, MeshState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes queued frames, many at once if they are there.
async fn write_link(mut to: impl AsyncWrite + Unpin, mut queued: mpsc::Receiver<Outgoing>) -> io::Result<()> {
    let mut batch = Vec::new();
    while queued.recv_many(&mut batch, OUTGOING_MAX).await > 0 {
        for outgoing in &batch {
            to.write_all(&outgoing.bytes).await?;
        }
        to.flush().await?;
        for written in batch.drain(..).filter_map(|outgoing| outgoing.written) {
            let _ = written.send(());
        }
    }
    Ok(())
}

/// How long connecting and greeting may take.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// First pause before a connection is tried again; doubles up to the longest.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest pause before a connection is tried again.
const DIAL_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Frames that wait to be written to one node.
const OUTGOING_MAX: usize = 256;
/// Events that wait to be taken by one group.
const INBOX_MAX: usize = 256;
/// Frames of one node kept for groups not yet joined.
const EARLY_MAX: usize = 2 << 10;
/// Ended groups that are remembered.
const ENDED_MAX: usize = 4 << 10;
