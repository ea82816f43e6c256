//! A queue pair between two processes of a host: two rings. The engine carries out the entries of one and fills the
//! other.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use futures::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

use super::map::Mapping;
use super::node::{MeetRequest, Node, PeerNode, same_user, socket_of};
use super::ring::{RINGS_LEN, Ring};
use super::wire::{self, Request, Response};
use crate::completion::CompletionSource;
use crate::environment::Environment;
use crate::fabric::{ConnectError, Endpoint, FabricError, Peer, QueuePairConfig, RawQueuePair, Role};
use crate::queue_pair::next_queue_pair_id;
use crate::software::PostedWork;
use crate::sync::lock;
use crate::work::{QueuePairId, Work, WorkError, WorkRequest};

mod incoming;
mod outgoing;

use incoming::Incoming;
pub(super) use incoming::PIECE_LEN;
use outgoing::Outgoing;

pub(super) struct ShmQueuePair {
    posted: PostedWork,
    node: Arc<Node>,
    config: QueuePairConfig,
    nonce: u128,
    /// The node's line on which the engine gets news for this queue pair.
    pub(super) line: u32,
    /// The peer's request, if this end is the passive one; taken when connecting.
    meet_request: Mutex<Option<oneshot::Receiver<MeetRequest>>>,
    connection: OnceLock<Connection>,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
    /// Whether the peer waits for a receive to be posted.
    starved: AtomicBool,
    /// Whether the engine is about to look at it.
    enqueued: AtomicBool,
    closed: watch::Sender<bool>,
    this: Weak<ShmQueuePair>,
}

/// The connection of a queue pair with its peer.
struct Connection {
    outgoing: Ring,
    incoming: Ring,
    peer: Arc<PeerNode>,
    /// The peer's line.
    line: u32,
    /// Whether the socket connection over which both met has ended.
    lost: AtomicBool,
}

impl Connection {
    /// Tells the peer's engine that there is news.
    fn notify_peer(&self) {
        self.peer.bell.notify(self.line);
    }

    /// Tells whether the peer has closed its end or is gone.
    fn has_ended(&self) -> bool {
        self.lost.load(Ordering::Acquire) || self.incoming.is_closed()
    }
}

/// What the engine does next with a queue pair.
pub(super) enum TurnOutcome {
    /// Give it another turn after the others.
    More,
    /// Wait for news.
    Idle,
    /// Wait for news, but not longer than this.
    Until(Instant),
    /// Remove it.
    Ended,
}

/// The reason why a queue pair ends.
#[derive(Debug)]
enum EndReason {
    /// It was closed or broken.
    Closed,
    /// The peer closed it or is gone.
    Lost,
    /// The peer refused a request, which has been completed with the peer's reason.
    Refused,
    /// This end refused a request of the peer and has told the peer.
    Refusing,
    /// Memory of a request could not be read, or there was no memory to copy it to.
    Unreadable,
    /// The peer broke the protocol.
    Protocol(&'static str),
}

impl ShmQueuePair {
    pub(super) fn create(
        node: Arc<Node>,
        environment: &dyn Environment,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
        reserved: u32,
    ) -> Result<Arc<Self>, FabricError> {
        let posted = PostedWork::new(next_queue_pair_id(), completions, reserved)?;
        let nonce = environment.random_u128();
        let meet_request = node.expect(nonce);
        Ok(Arc::new_cyclic(|this| Self {
            posted,
            line: node.engine.next_line(),
            node,
            config,
            nonce,
            meet_request: Mutex::new(Some(meet_request)),
            connection: OnceLock::new(),
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            starved: AtomicBool::new(false),
            enqueued: AtomicBool::new(false),
            closed: watch::Sender::new(false),
            this: this.clone(),
        }))
    }

    /// Notes that the engine is about to look at it; returns false if that was noted before.
    pub(super) fn enqueue(&self) -> bool {
        !self.enqueued.swap(true, Ordering::Relaxed)
    }

    /// Notes that the engine looks at it now.
    pub(super) fn dequeued(&self) {
        self.enqueued.store(false, Ordering::Relaxed);
    }

    /// Ends it because the engine has ended.
    pub(super) fn abandon(&self) {
        self.end(WorkError::ConnectionLost);
        self.give_up_incoming(WorkError::ConnectionLost);
    }

    /// Does a piece of its work, and copies about `most` bytes for that; only the engine calls it.
    pub(super) fn take_turn(&self, most: usize) -> TurnOutcome {
        let Some(connection) = self.connection.get() else { return TurnOutcome::Idle };
        if self.posted.is_broken() {
            self.give_up_incoming(WorkError::Flushed);
            return TurnOutcome::Ended;
        }
        match self.advance(connection, most) {
            Ok(outcome) => outcome,
            Err(ending) => {
                let cause = match &ending {
                    EndReason::Closed | EndReason::Refused => WorkError::Flushed,
                    EndReason::Lost | EndReason::Refusing => WorkError::ConnectionLost,
                    EndReason::Unreadable => WorkError::LocalProtection,
                    EndReason::Protocol(_) => WorkError::Protocol,
                };
                if let EndReason::Protocol(what) = ending {
                    tracing::warn!(qp = %self.posted.id, what, "the peer broke the protocol; connection closed");
                } else {
                    tracing::debug!(qp = %self.posted.id, ?ending, "connection ended");
                }
                self.end(cause);
                self.give_up_incoming(cause);
                TurnOutcome::Ended
            }
        }
    }

    fn advance(&self, connection: &Connection, most: usize) -> Result<TurnOutcome, EndReason> {
        // This is read before the counts: entries that the peer carried out before it ended count as carried out.
        let ended = connection.has_ended();
        let refused = connection.outgoing.refusal();
        self.count_done(connection)?;
        let outcome = if ended { TurnOutcome::Idle } else { self.take_entries(connection, most)? };
        if let Some(ending) = refused.and_then(|reason| self.refused(reason, ended)) {
            return Err(ending);
        }
        if ended {
            return Err(EndReason::Lost);
        }
        let pushed = self.push(connection, Some(most))?;
        Ok(if pushed.needs_copy { TurnOutcome::More } else { outcome })
    }

    /// Breaks the queue pair. The peer is told first, because the owner may use the memory otherwise from here on.
    fn end(&self, cause: WorkError) {
        {
            // No entry is written between the word to the peer and the release of memory that the peer may still read.
            let mut outgoing = lock(&self.outgoing);
            if let Some(connection) = self.connection.get() {
                connection.outgoing.close();
            }
            for request in outgoing.end() {
                self.posted.await_acknowledgement(request);
            }
            self.posted.break_with(cause);
        }
        self.closed.send_replace(true);
        self.node.forget(self.nonce);
        // A peer whose connection has arrived waits for a response, which will not come.
        drop(lock(&self.meet_request).take());
        if let Some(connection) = self.connection.get() {
            connection.notify_peer();
            // The engine gives back the memory that it was filling.
            self.node.engine.notify(self.line);
        }
    }

    async fn join(&self, peer: Peer) -> Result<(), ConnectError> {
        let remote = ShmEndpoint::decode(&peer.endpoint)?;
        let meet_request = lock(&self.meet_request).take().ok_or(ConnectError::WrongState)?;
        let mut closed = self.closed.subscribe();
        let met = async {
            match peer.role {
                Role::Active => self.open_connection(remote).await,
                Role::Passive => self.await_connection(meet_request, remote).await,
            }
        };
        let (stream, rings, peer) = tokio::select! {
            biased;
            _ = closed.wait_for(|&closed| closed) => return Err(ConnectError::WrongState),
            met = met => met?,
        };
        let [ours, theirs] = rings;
        let connection =
            Connection { outgoing: ours, incoming: theirs, peer, line: remote.line, lost: AtomicBool::new(false) };
        self.connection.set(connection).map_err(|_| ConnectError::WrongState)?;
        let this = self.this.upgrade().expect("the caller holds the queue pair");
        if this.posted.is_broken() {
            // It was closed in between, and `end` may not have seen its connection.
            this.end(WorkError::Flushed);
        }
        self.node.engine.add(this.clone());
        tokio::spawn(watch(Arc::downgrade(&this), stream, closed));
        Ok(())
    }

    /// Connects to the peer's node, with the memory of both rings.
    async fn open_connection(
        &self,
        remote: ShmEndpoint,
    ) -> Result<(UnixStream, [Ring; 2], Arc<PeerNode>), ConnectError> {
        self.node.forget(self.nonce);
        let unreachable = ConnectError::Unreachable;
        let (memory, file) = Mapping::create(RINGS_LEN).map_err(unreachable)?;
        let stream = UnixStream::connect(socket_of(remote.node_name)).await.map_err(unreachable)?;
        same_user(&stream).map_err(unreachable)?;
        let request = Request::Meet { to: remote.nonce, from: self.nonce, name: self.node.name };
        let [page, socket] = self.node.bell();
        wire::send(&stream, &request.encode(), &[file.as_fd(), page, socket]).await.map_err(unreachable)?;
        let (response, files) = wire::receive::<{ Response::LEN }>(&stream).await.map_err(unreachable)?;
        match (Response::decode(response), <[OwnedFd; 2]>::try_from(files)) {
            (Some(Response::Granted), Ok(bell)) => {
                let peer = self.node.peer(remote.node_name, bell).map_err(unreachable)?;
                Ok((stream, Ring::both(&Arc::new(memory)), peer))
            }
            (Some(Response::Unknown), _) => Err(ConnectError::BadNonce),
            _ => Err(unreachable(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Waits until the peer has connected.
    async fn await_connection(
        &self,
        meet_request: oneshot::Receiver<MeetRequest>,
        remote: ShmEndpoint,
    ) -> Result<(UnixStream, [Ring; 2], Arc<PeerNode>), ConnectError> {
        let MeetRequest { stream, nonce, node_name, rings, bell } =
            meet_request.await.map_err(|_| ConnectError::WrongState)?;
        if (nonce, node_name) != (remote.nonce, remote.node_name) {
            return Err(ConnectError::BadNonce);
        }
        let met = async {
            let memory = Mapping::attach(rings, RINGS_LEN)?;
            let peer = self.node.peer(node_name, bell)?;
            wire::send(&stream, &Response::Granted.encode(), &self.node.bell()).await?;
            let [theirs, ours] = Ring::both(&Arc::new(memory));
            Ok(([ours, theirs], peer))
        };
        let (rings, peer) = met.await.map_err(ConnectError::Unreachable)?;
        Ok((stream, rings, peer))
    }
}

impl RawQueuePair for ShmQueuePair {
    fn id(&self) -> QueuePairId {
        self.posted.id
    }

    fn endpoint(&self) -> Endpoint {
        ShmEndpoint { nonce: self.nonce, node_name: self.node.name, line: self.line }.encode()
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let this = self.this.upgrade().expect("the caller holds the queue pair");
        Box::pin(async move { this.join(peer).await })
    }

    fn post(&self, request: WorkRequest) {
        // Queue pairs of one host share no port, so no block has to wait for its turn at one.
        request.nearly_done_from_the_start();
        let receive = matches!(request.work(), Work::Receive { .. });
        self.posted.post(request);
        if receive {
            if self.starved.swap(false, Ordering::SeqCst) {
                self.node.engine.notify(self.line);
            }
            return;
        }
        let Some(connection) = self.connection.get() else { return };
        match self.push(connection, None) {
            Ok(pushed) if !pushed.needs_copy => {}
            // The engine copies, and handles errors.
            _ => self.node.engine.notify(self.line),
        }
    }

    fn close(&self) {
        self.end(WorkError::Flushed);
    }
}

/// Watches for the end of the socket connection over which two queue pairs have met.
async fn watch(queue_pair: Weak<ShmQueuePair>, stream: UnixStream, mut closed: watch::Receiver<bool>) {
    let ended = async {
        // No bytes are ever sent on it: any event is its end.
        while stream.readable().await.is_ok() {
            match stream.try_read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    };
    tokio::select! {
        _ = closed.wait_for(|&closed| closed) => return,
        () = ended => {}
    }
    let Some(queue_pair) = queue_pair.upgrade() else { return };
    if let Some(connection) = queue_pair.connection.get() {
        connection.lost.store(true, Ordering::Release);
        queue_pair.node.engine.notify(queue_pair.line);
    }
}

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShmEndpoint {
    nonce: u128,
    node_name: u128,
    line: u32,
}

impl ShmEndpoint {
    fn encode(self) -> Endpoint {
        let mut out = ENDPOINT_TAG.to_vec();
        out.extend(self.nonce.to_le_bytes());
        out.extend(self.node_name.to_le_bytes());
        out.extend(self.line.to_le_bytes());
        Endpoint::new(out).expect("40 bytes are within the limit")
    }

    fn decode(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        let parse = || {
            let rest = endpoint.as_bytes().strip_prefix(ENDPOINT_TAG)?;
            let rest: &[u8; 36] = rest.try_into().ok()?;
            let (nonce, rest) = rest.split_first_chunk()?;
            let (node_name, line) = rest.split_first_chunk()?;
            let line = u32::from_le_bytes(line.try_into().ok()?);
            Some(Self { nonce: u128::from_le_bytes(*nonce), node_name: u128::from_le_bytes(*node_name), line })
        };
        parse().ok_or(ConnectError::BadEndpoint)
    }
}

/// The first bytes of an encoded endpoint: fabric and version.
const ENDPOINT_TAG: &[u8] = b"shm4";
