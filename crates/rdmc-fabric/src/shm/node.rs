//! One node among those of its host: its socket, its bell, what it shares, and the peers it has met.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::arena::Arena;
use super::bell::Doorbell;
use super::engine::Engine;
use super::map::Mapping;
use super::objects::{Objects, random};
use super::wire::{self, Request, Response};
use crate::software::Exposures;
use crate::sync::lock;

/// A node, as its queue pairs share it.
pub(super) struct Node {
    /// Random; its socket is called by it.
    pub(super) name: u128,
    pub(super) objects: Arc<Objects>,
    pub(super) arena: Arc<Arena>,
    pub(super) exposures: Arc<Exposures>,
    pub(super) engine: Arc<Engine>,
    bell: File,
    expected: Mutex<HashMap<u128, oneshot::Sender<MeetRequest>>>,
    /// Kept for as long as they live, with what is mapped of them.
    /// By name, and by the file of their bell: a name alone could be anybody's.
    peers: Mutex<HashMap<(u128, u64), Arc<PeerNode>>>,
    listening: Mutex<bool>,
    /// Ends, with the node, the tasks that serve others.
    alive: watch::Sender<()>,
    refused: AtomicU64,
}

/// A peer's queue pair that knew the nonce of one of this node's.
pub(super) struct MeetRequest {
    pub(super) stream: UnixStream,
    pub(super) nonce: u128,
    pub(super) node_name: u128,
    pub(super) rings: OwnedFd,
    pub(super) bell: OwnedFd,
}

impl Node {
    pub(super) fn new(exposures: Arc<Exposures>) -> io::Result<Arc<Self>> {
        let objects: Arc<Objects> = Arc::default();
        let (bell, file) = Doorbell::create()?;
        Ok(Arc::new(Self {
            name: u128::from_le_bytes(random()),
            arena: Arena::new(objects.clone()),
            objects,
            exposures,
            engine: Engine::new(bell),
            bell: file,
            expected: Mutex::default(),
            peers: Mutex::default(),
            listening: Mutex::default(),
            alive: watch::Sender::new(()),
            refused: AtomicU64::new(0),
        }))
    }

    /// Begins, at the first call, to listen on a task of the current runtime, and starts the engine.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut listening = lock(&self.listening);
        if !*listening {
            let listener = UnixListener::bind(socket_of(self.name))?;
            self.engine.start()?;
            tokio::spawn(serve(listener, Arc::downgrade(self), self.alive.subscribe()));
            *listening = true;
        }
        Ok(())
    }

    /// Waits for the peer that knows `nonce`, until [`forget`](Self::forget).
    pub(super) fn expect(&self, nonce: u128) -> oneshot::Receiver<MeetRequest> {
        let (sender, receiver) = oneshot::channel();
        lock(&self.expected).insert(nonce, sender);
        receiver
    }

    pub(super) fn forget(&self, nonce: u128) {
        lock(&self.expected).remove(&nonce);
    }

    pub(super) fn bell(&self) -> impl AsFd + '_ {
        &self.bell
    }

    /// Counts connections that were refused.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the peer of that name, with the bell that it has sent if it was not known.
    pub(super) fn peer(self: &Arc<Self>, name: u128, bell: OwnedFd) -> io::Result<Arc<PeerNode>> {
        let key = (name, rustix::fs::fstat(&bell)?.st_ino);
        let mut peers = lock(&self.peers);
        if let Some(known) = peers.get(&key) {
            return Ok(known.clone());
        }
        let (wanted, asked) = mpsc::unbounded_channel();
        let engine = self.engine.clone();
        let peer = Arc::new(PeerNode { bell: Doorbell::attach(bell)?, attached: Mutex::default(), wanted, engine });
        peers.insert(key, peer.clone());
        tokio::spawn(fetch(key, Arc::downgrade(self), Arc::downgrade(&peer), asked));
        Ok(peer)
    }

    /// Decides on one request.
    fn decide(&self, request: Option<Request>, files: Vec<OwnedFd>, stream: UnixStream) -> io::Result<Decision> {
        match (request, <[OwnedFd; 2]>::try_from(files)) {
            (Some(Request::Meet { to, from, name }), Ok([rings, bell])) => {
                // Taken out, so that a nonce lets in one connection only.
                let expected = lock(&self.expected).remove(&to);
                let meet_request = MeetRequest { stream, nonce: from, node_name: name, rings, bell };
                let refused = match expected {
                    Some(sender) => sender.send(meet_request).err(),
                    None => Some(meet_request),
                };
                Ok(refused.map_or(Decision::HandedOver, |meet_request| Decision::Refuse(meet_request.stream)))
            }
            (Some(Request::Stay), Err(none)) if none.is_empty() => Ok(Decision::Stay(stream)),
            (Some(Request::Open { object }), Err(none)) if none.is_empty() => {
                Ok(Decision::give(stream, self.objects.open(object)))
            }
            (Some(Request::Attach { token }), Err(none)) if none.is_empty() => {
                let opened = self.objects.open_sealed(token);
                Ok(Decision::give(stream, opened.map(|(file, len)| (file, Some(len)))))
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a request")),
        }
    }
}

/// What becomes of a request.
enum Decision {
    /// A queue pair has the connection.
    HandedOver,
    /// No queue pair waits for it.
    Refuse(UnixStream),
    Stay(UnixStream),
    Give(UnixStream, OwnedFd, Option<u64>),
    GiveNothing(UnixStream),
}

impl Decision {
    fn give(stream: UnixStream, opened: io::Result<(OwnedFd, Option<u64>)>) -> Self {
        match opened {
            Ok((file, len)) => Self::Give(stream, file, len),
            Err(error) => {
                if error.kind() == io::ErrorKind::NotFound {
                    tracing::debug!("a peer asks for memory that is not shared any more");
                } else {
                    tracing::warn!(%error, "memory that a peer asks for cannot be opened for it");
                }
                Self::GiveNothing(stream)
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.engine.stop();
    }
}

/// Accepts connections for as long as the node lives.
async fn serve(listener: UnixListener, node: Weak<Node>, mut alive: watch::Receiver<()>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let accepted = tokio::select! {
            _ = alive.changed() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or a connection reset in the queue: both pass.
                tracing::warn!(%error, "a connection of a process of this host could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Others wait in the listener's queue.
        let permit = tokio::select! {
            _ = alive.changed() => return,
            permit = handshakes.clone().acquire_owned() => permit.expect("it is never closed"),
        };
        let (node, mut alive) = (node.clone(), alive.clone());
        tokio::spawn(async move {
            let Err(error) = same_user(&stream) else {
                let served = async {
                    let mut more = answer(&node, stream).await.or_else(ignore_disconnect)?;
                    drop(permit);
                    while let Some(stream) = more {
                        // It is held for as long as the peer knows this node.
                        wire::wait_readable(&stream).await?;
                        more = answer(&node, stream).await.or_else(ignore_disconnect)?;
                    }
                    Ok(())
                };
                let served: io::Result<()> = tokio::select! {
                    _ = alive.changed() => Ok(()),
                    served = served => served,
                };
                return served.unwrap_or_else(|error| refuse(&node, error));
            };
            refuse(&node, error);
        });
    }
}

/// Answers one request, in bounded time; gives the connection back if more may follow on it. The node is not kept meanwhile.
async fn answer(node: &Weak<Node>, stream: UnixStream) -> io::Result<Option<UnixStream>> {
    let answered = async {
        let (bytes, files) = wire::receive::<{ Request::LEN }>(&stream).await?;
        let Some(decision) = node.upgrade().map(|node| node.decide(Request::decode(&bytes), files, stream)) else {
            return Ok(None);
        };
        match decision? {
            Decision::HandedOver => Ok(None),
            Decision::Stay(stream) => Ok(Some(stream)),
            Decision::Give(stream, file, len) => {
                let response = len.map_or(Response::Granted, Response::Memory);
                wire::send(&stream, &response.encode(), &[file.as_fd()]).await?;
                Ok(Some(stream))
            }
            Decision::GiveNothing(stream) => {
                wire::send(&stream, &Response::Unknown.encode(), &[]).await?;
                Ok(Some(stream))
            }
            Decision::Refuse(stream) => {
                wire::send(&stream, &Response::Unknown.encode(), &[]).await?;
                Err(io::Error::new(io::ErrorKind::PermissionDenied, "no queue pair waits for its nonce"))
            }
        }
    };
    tokio::time::timeout(HANDSHAKE_TIMEOUT, answered).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// A peer that closes its connection wants nothing more.
fn ignore_disconnect<T>(error: io::Error) -> io::Result<Option<T>> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Ok(None),
        _ => Err(error),
    }
}

fn refuse(node: &Weak<Node>, error: io::Error) {
    if let Some(node) = node.upgrade() {
        node.refused.fetch_add(1, Ordering::Relaxed);
    }
    tracing::warn!(%error, "a connection of a process of this host was refused");
}

/// A peer: a node of another process, or of this one.
pub(super) struct PeerNode {
    pub(super) bell: Doorbell,
    attached: Mutex<AttachedObjects>,
    /// Objects that are to be fetched.
    wanted: mpsc::UnboundedSender<u64>,
    engine: Arc<Engine>,
}

/// What a peer shares, as far as it is known.
#[derive(Default)]
struct AttachedObjects {
    objects: HashMap<u64, Attachment>,
    /// The files among them, the latest last: each holds a descriptor, and keeps a file that was deleted.
    files: VecDeque<u64>,
}

/// An object of a peer, on its way or here.
enum Attachment {
    /// The lines that are to be rung when it is here.
    Fetching(Vec<u32>),
    Ready(Attached),
    Refused,
}

/// An object of a peer that can be read.
#[derive(Clone)]
pub(super) enum Attached {
    Memory(Arc<Mapping>),
    File(Arc<File>),
}

/// What is known of a peer's object.
pub(super) enum Lookup {
    Ready(Attached),
    /// The line will be rung when it is here.
    Fetching,
    /// The peer does not share it.
    Refused,
}

impl PeerNode {
    /// Finds an object of the peer, or has it fetched, upon which `line` is rung.
    pub(super) fn find(&self, object: u64, line: u32) -> Lookup {
        let mut attached = lock(&self.attached);
        match attached.objects.get_mut(&object) {
            Some(Attachment::Ready(here)) => return Lookup::Ready(here.clone()),
            Some(Attachment::Refused) => return Lookup::Refused,
            Some(Attachment::Fetching(lines)) => {
                if !lines.contains(&line) {
                    lines.push(line);
                }
                return Lookup::Fetching;
            }
            None => {}
        }
        // What is needed again is fetched again.
        if attached.objects.len() >= ATTACHED_MAX {
            attached.objects.retain(|_, object| matches!(object, Attachment::Fetching(_)));
        }
        if self.wanted.send(object).is_err() {
            return Lookup::Refused;
        }
        attached.objects.insert(object, Attachment::Fetching(vec![line]));
        Lookup::Fetching
    }

    fn note(&self, object: u64, found: Attachment) {
        let waiting = {
            let mut attached = lock(&self.attached);
            if matches!(found, Attachment::Ready(Attached::File(_))) {
                attached.files.push_back(object);
            }
            if attached.files.len() > FILES_MAX {
                let oldest = attached.files.pop_front().expect("there are some");
                // It may be on its way once more.
                if matches!(attached.objects.get(&oldest), Some(Attachment::Ready(_))) {
                    attached.objects.remove(&oldest);
                }
            }
            attached.objects.insert(object, found)
        };
        if let Some(Attachment::Fetching(lines)) = waiting {
            lines.into_iter().for_each(|line| self.engine.notify(line));
        }
    }

    /// Notes that nothing can be fetched any more.
    fn note_gone(&self) {
        let mut waiting = Vec::new();
        for object in lock(&self.attached).objects.values_mut() {
            if let Attachment::Fetching(lines) = object {
                waiting.append(lines);
                *object = Attachment::Refused;
            }
        }
        waiting.into_iter().for_each(|line| self.engine.notify(line));
    }
}

/// Fetches objects of a peer, over a connection that tells when the peer is gone, and forgets the peer then.
async fn fetch(key: (u128, u64), node: Weak<Node>, peer: Weak<PeerNode>, mut wanted: mpsc::UnboundedReceiver<u64>) {
    let fetching = async {
        let stream = UnixStream::connect(socket_of(key.0)).await?;
        same_user(&stream)?;
        wire::send(&stream, &Request::Stay.encode(), &[]).await?;
        loop {
            let object = tokio::select! {
                object = wanted.recv() => object,
                // Nothing comes that was not asked for.
                _ = stream.readable() => match stream.try_read(&mut [0]) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    _ => return Ok(()),
                },
            };
            let Some(object) = object else { return Ok(()) };
            let found = open(&stream, object).await?;
            let Some(peer) = peer.upgrade() else { return Ok(()) };
            peer.note(object, found.map_or(Attachment::Refused, Attachment::Ready));
        }
    };
    let fetched: io::Result<()> = fetching.await;
    if let Err(error) = fetched {
        tracing::debug!(%error, "a peer's memory cannot be mapped any more");
    }
    wanted.close();
    if let Some(node) = node.upgrade() {
        lock(&node.peers).remove(&key);
    }
    if let Some(peer) = peer.upgrade() {
        peer.note_gone();
    }
}

/// Asks for an object; none if the peer does not share it, or it cannot be reached here.
async fn open(stream: &UnixStream, object: u64) -> io::Result<Option<Attached>> {
    let asked = async {
        wire::send(stream, &Request::Open { object }.encode(), &[]).await?;
        wire::receive::<{ Response::LEN }>(stream).await
    };
    let asked = tokio::time::timeout(HANDSHAKE_TIMEOUT, asked).await;
    let (response, files) = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    let attached = attach(Response::decode(response), files.into_iter().next());
    Ok(attached.inspect_err(|error| tracing::warn!(%error, "a peer's memory cannot be read")).ok())
}

fn attach(response: Option<Response>, file: Option<OwnedFd>) -> io::Result<Attached> {
    match (response, file) {
        (Some(Response::Memory(len)), Some(file)) => {
            let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?;
            Ok(Attached::Memory(Arc::new(Mapping::attach_to_read(file, len)?)))
        }
        // Whatever else might keep the engine waiting.
        (Some(Response::Granted), Some(file)) if is_regular(&file)? => Ok(Attached::File(Arc::new(file.into()))),
        (Some(Response::Unknown), _) => Err(io::ErrorKind::NotFound.into()),
        (Some(_), None) => Err(io::Error::other("no descriptor came: are too many files open?")),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn is_regular(file: &OwnedFd) -> io::Result<bool> {
    Ok(rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode).is_file())
}

/// Refuses a process of another user.
pub(super) fn same_user(stream: &UnixStream) -> io::Result<()> {
    let (theirs, ours) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if theirs == ours {
        return Ok(());
    }
    let text = format!("the process at the other end is of user {theirs}, not of {ours}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// Returns the address of a node's socket, which is no file: it vanishes with the last process that has it open.
pub(super) fn socket_of(name: u128) -> String {
    format!("\0rdmc-{name:032x}")
}

/// Connections that have not yet said what they want, at once.
const HANDSHAKES_MAX: usize = 256;
/// How long a connection may take to say what it wants, and a peer to answer.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, so that a lack of descriptors does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Files of one peer that are kept open.
const FILES_MAX: usize = 8;
/// Objects of one peer that are known.
const ATTACHED_MAX: usize = 256;
