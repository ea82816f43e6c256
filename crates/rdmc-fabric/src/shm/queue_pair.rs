//! A queue pair between two processes of a host: two rings, of which the engine carries out one and fills the other.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use futures::future::BoxFuture;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

use super::map::Mapping;
use super::node::{Arrival, Node, Remote, same_user, socket_of};
use super::ring::{RINGS_LEN, Ring};
use super::wire::{self, Answer, Request};
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
use outgoing::Outgoing;

pub(super) struct ShmQueuePair {
    posted: PostedWork,
    node: Arc<Node>,
    config: QueuePairConfig,
    nonce: u128,
    /// The node's line by which the engine hears of news for this queue pair.
    pub(super) line: u32,
    /// The peer's connection, if this end is the passive one; taken when connecting.
    arrival: Mutex<Option<oneshot::Receiver<Arrival>>>,
    link: OnceLock<Link>,
    outgoing: Mutex<Outgoing>,
    incoming: Mutex<Incoming>,
    /// The peer waits for a receive to be posted.
    starved: AtomicBool,
    /// The engine is about to look at it.
    enqueued: AtomicBool,
    closed: watch::Sender<bool>,
    this: Weak<ShmQueuePair>,
}

/// What joins a queue pair with its peer.
struct Link {
    outgoing: Ring,
    incoming: Ring,
    peer: Arc<Remote>,
    /// The peer's line.
    line: u32,
    /// The connection over which both met has ended.
    lost: AtomicBool,
}

impl Link {
    /// Tells the peer's engine that there is news.
    fn ring(&self) {
        self.peer.bell.ring(self.line);
    }

    /// Tells whether the peer has closed its end, or is gone.
    fn has_ended(&self) -> bool {
        self.lost.load(Ordering::Acquire) || self.incoming.is_closed()
    }
}

/// What the engine is to do with a queue pair next.
pub(super) enum Step {
    /// Look again when others had their turn.
    More,
    /// Wait for news.
    Idle,
    /// Wait for news, but not longer.
    Until(Instant),
    /// Nothing, any more.
    Ended,
}

/// Why a queue pair ends.
#[derive(Debug)]
enum Ending {
    /// It was closed or broken.
    Closed,
    /// The peer closed it or is gone.
    Lost,
    /// The peer refused a request, which has been completed with the reason.
    Refused,
    /// This end refused a request of the peer and has told it.
    Refusing,
    /// Memory of a request could not be read, or there was none to copy it to.
    Unreadable,
    /// The peer wrote what no peer writes.
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
        let arrival = node.expect(nonce);
        Ok(Arc::new_cyclic(|this| Self {
            posted,
            line: node.engine.next_line(),
            node,
            config,
            nonce,
            arrival: Mutex::new(Some(arrival)),
            link: OnceLock::new(),
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            starved: AtomicBool::new(false),
            enqueued: AtomicBool::new(false),
            closed: watch::Sender::new(false),
            this: this.clone(),
        }))
    }

    /// Notes that the engine is about to look at it; false if it was noted before.
    pub(super) fn enqueue(&self) -> bool {
        !self.enqueued.swap(true, Ordering::Relaxed)
    }

    /// Notes that the engine looks at it.
    pub(super) fn dequeued(&self) {
        self.enqueued.store(false, Ordering::Relaxed);
    }

    /// Ends it, because there is no engine any more.
    pub(super) fn abandon(&self) {
        self.end(WorkError::ConnectionLost);
        self.give_up_incoming(WorkError::ConnectionLost);
    }

    /// Does a piece of work for it; called by the engine alone.
    pub(super) fn step(&self) -> Step {
        let Some(link) = self.link.get() else { return Step::Idle };
        if self.posted.is_broken() {
            self.give_up_incoming(WorkError::Flushed);
            return Step::Ended;
        }
        match self.advance(link) {
            Ok(step) => step,
            Err(ending) => {
                let cause = match &ending {
                    Ending::Closed | Ending::Refused => WorkError::Flushed,
                    Ending::Lost | Ending::Refusing => WorkError::ConnectionLost,
                    Ending::Unreadable => WorkError::LocalProtection,
                    Ending::Protocol(_) => WorkError::Protocol,
                };
                if let Ending::Protocol(what) = ending {
                    tracing::warn!(qp = %self.posted.id, what, "the peer broke the protocol; connection closed");
                } else {
                    tracing::debug!(qp = %self.posted.id, ?ending, "connection ended");
                }
                self.end(cause);
                self.give_up_incoming(cause);
                Step::Ended
            }
        }
    }

    fn advance(&self, link: &Link) -> Result<Step, Ending> {
        // Before the counts: what the peer carried out before it ended has been carried out.
        let ended = link.has_ended();
        let refused = link.outgoing.refusal();
        self.count_done(link)?;
        let step = if ended { Step::Idle } else { self.take_entries(link)? };
        if let Some(ending) = refused.and_then(|reason| self.refused(reason, ended)) {
            return Err(ending);
        }
        if ended {
            return Err(Ending::Lost);
        }
        let pushed = self.push(link, true)?;
        Ok(if pushed.again { Step::More } else { step })
    }

    /// Breaks the queue pair. From here on its memory may be used otherwise, which the peer is told first.
    fn end(&self, cause: WorkError) {
        {
            // Nothing is written between the word to the peer and the release of what it may still read.
            let mut outgoing = lock(&self.outgoing);
            if let Some(link) = self.link.get() {
                link.outgoing.close();
            }
            for request in outgoing.end() {
                self.posted.await_acknowledgement(request);
            }
            self.posted.break_with(cause);
        }
        self.closed.send_replace(true);
        self.node.forget(self.nonce);
        // A peer whose connection has arrived waits for an answer, which does not come any more.
        drop(lock(&self.arrival).take());
        if let Some(link) = self.link.get() {
            link.ring();
            // The engine gives back what it was filling.
            self.node.engine.ring(self.line);
        }
    }

    async fn join(&self, peer: Peer) -> Result<(), ConnectError> {
        let remote = Place::of_endpoint(&peer.endpoint)?;
        let arrival = lock(&self.arrival).take().ok_or(ConnectError::WrongState)?;
        let mut closed = self.closed.subscribe();
        let met = async {
            match peer.role {
                Role::Active => self.call(remote).await,
                Role::Passive => self.await_call(arrival, remote).await,
            }
        };
        let (stream, rings, peer) = tokio::select! {
            biased;
            _ = closed.wait_for(|&closed| closed) => return Err(ConnectError::WrongState),
            met = met => met?,
        };
        let [ours, theirs] = rings;
        let link = Link { outgoing: ours, incoming: theirs, peer, line: remote.line, lost: AtomicBool::new(false) };
        self.link.set(link).map_err(|_| ConnectError::WrongState)?;
        let this = self.this.upgrade().expect("somebody holds the queue pair they connect");
        if this.posted.is_broken() {
            // It was closed in between, and may not have seen its link.
            this.end(WorkError::Flushed);
        }
        self.node.engine.add(this.clone());
        tokio::spawn(watch(Arc::downgrade(&this), stream, closed));
        Ok(())
    }

    /// Connects to the peer's node, with the memory of both rings.
    async fn call(&self, remote: Place) -> Result<(UnixStream, [Ring; 2], Arc<Remote>), ConnectError> {
        self.node.forget(self.nonce);
        let unreachable = ConnectError::Unreachable;
        let (memory, file) = Mapping::create(RINGS_LEN).map_err(unreachable)?;
        let stream = UnixStream::connect(socket_of(remote.name)).await.map_err(unreachable)?;
        same_user(&stream).map_err(unreachable)?;
        let request = Request::Meet { to: remote.nonce, from: self.nonce, name: self.node.name };
        let bell = self.node.bell();
        wire::send(&stream, &request.encode(), &[file.as_fd(), bell.as_fd()]).await.map_err(unreachable)?;
        let (answer, mut files) = wire::receive::<{ Answer::LEN }>(&stream).await.map_err(unreachable)?;
        match (Answer::decode(answer), files.pop()) {
            (Some(Answer::Granted), Some(bell)) => {
                let peer = self.node.peer(remote.name, bell).map_err(unreachable)?;
                Ok((stream, Ring::both(&Arc::new(memory)), peer))
            }
            (Some(Answer::Unknown), _) => Err(ConnectError::BadNonce),
            _ => Err(unreachable(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Waits until the peer has connected.
    async fn await_call(
        &self,
        arrival: oneshot::Receiver<Arrival>,
        remote: Place,
    ) -> Result<(UnixStream, [Ring; 2], Arc<Remote>), ConnectError> {
        let Arrival { stream, from, name, rings, bell } = arrival.await.map_err(|_| ConnectError::WrongState)?;
        if (from, name) != (remote.nonce, remote.name) {
            return Err(ConnectError::BadNonce);
        }
        let met = async {
            let memory = Mapping::attach(rings, RINGS_LEN)?;
            let peer = self.node.peer(name, bell)?;
            wire::send(&stream, &Answer::Granted.encode(), &[self.node.bell().as_fd()]).await?;
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
        Place { nonce: self.nonce, name: self.node.name, line: self.line }.to_endpoint()
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let this = self.this.upgrade().expect("somebody holds the queue pair they connect");
        Box::pin(async move { this.join(peer).await })
    }

    fn post(&self, request: WorkRequest) {
        // No port is shared on a host: nothing has to wait for its turn at one.
        request.nearly_done();
        let receive = matches!(request.work(), Work::Receive { .. });
        self.posted.post(request);
        if receive {
            if self.starved.swap(false, Ordering::SeqCst) {
                self.node.engine.ring(self.line);
            }
            return;
        }
        let Some(link) = self.link.get() else { return };
        match self.push(link, false) {
            Ok(pushed) if !pushed.again => {}
            // What needs a copy, or goes wrong, is the engine's business.
            _ => self.node.engine.ring(self.line),
        }
    }

    fn close(&self) {
        self.end(WorkError::Flushed);
    }
}

/// Notes when the connection over which two queue pairs have met ends.
async fn watch(queue_pair: Weak<ShmQueuePair>, stream: UnixStream, mut closed: watch::Receiver<bool>) {
    let ended = async {
        // Nothing is ever sent on it: whatever happens is its end.
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
    if let Some(link) = queue_pair.link.get() {
        link.lost.store(true, Ordering::Release);
        queue_pair.node.engine.ring(queue_pair.line);
    }
}

/// Where a queue pair can be met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    nonce: u128,
    /// Its node.
    name: u128,
    line: u32,
}

impl Place {
    fn to_endpoint(self) -> Endpoint {
        let mut out = ENDPOINT_TAG.to_vec();
        out.extend(self.nonce.to_le_bytes());
        out.extend(self.name.to_le_bytes());
        out.extend(self.line.to_le_bytes());
        Endpoint::new(out).expect("40 bytes are within the limit")
    }

    fn of_endpoint(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        let place = || {
            let rest = endpoint.as_bytes().strip_prefix(ENDPOINT_TAG)?;
            let rest: &[u8; 36] = rest.try_into().ok()?;
            let (nonce, rest) = rest.split_first_chunk()?;
            let (name, line) = rest.split_first_chunk()?;
            let line = u32::from_le_bytes(line.try_into().ok()?);
            Some(Self { nonce: u128::from_le_bytes(*nonce), name: u128::from_le_bytes(*name), line })
        };
        place().ok_or(ConnectError::BadEndpoint)
    }
}

/// The first bytes of an encoded endpoint: fabric and version.
const ENDPOINT_TAG: &[u8] = b"shm2";
