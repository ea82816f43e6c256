//! One node among those of its host: its socket, its bell, its shared memory, and the peers it has met.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::arena::Arena;
use super::bell::{Doorbell, DoorbellFiles, PeerBell};
use super::engine::Engine;
use super::map::Mapping;
use super::objects::{Objects, random};
use super::wire::{self, Request, Response};
use crate::software::Exposures;
use crate::sync::lock;

/// The state of a node that its queue pairs share.
pub(super) struct Node {
    /// Random; the name of its socket.
    pub(super) name: u128,
    pub(super) objects: Arc<Objects>,
    pub(super) arena: Arc<Arena>,
    pub(super) exposures: Arc<Exposures>,
    pub(super) engine: Arc<Engine>,
    bell: DoorbellFiles,
    /// Where the bytes of the bell arrive.
    bytes: std::os::unix::net::UnixStream,
    expected: Mutex<HashMap<u128, oneshot::Sender<MeetRequest>>>,
    /// Peers are kept for as long as they live, with their mapped memory.
    peers: Mutex<HashMap<PeerKey, Arc<PeerNode>>>,
    listening: Mutex<bool>,
    /// Ends, with the node, the tasks that serve peers.
    alive: watch::Sender<()>,
    refused: AtomicU64,
}

/// The name of a peer, and the page and the socket of its bell: another process could use the same name, or the same
/// page.
type PeerKey = (u128, u64, u64);

/// A request of a peer's queue pair that knew the nonce of one of this node's queue pairs.
pub(super) struct MeetRequest {
    pub(super) stream: UnixStream,
    pub(super) nonce: u128,
    pub(super) node_name: u128,
    pub(super) rings: OwnedFd,
    pub(super) bell: [OwnedFd; 2],
}

impl Node {
    pub(super) fn new(exposures: Arc<Exposures>) -> io::Result<Arc<Self>> {
        let objects: Arc<Objects> = Arc::default();
        let (bell, files, bytes) = Doorbell::create()?;
        Ok(Arc::new(Self {
            name: u128::from_le_bytes(random()),
            arena: Arena::new(objects.clone()),
            objects,
            exposures,
            engine: Engine::new(bell),
            bell: files,
            bytes,
            expected: Mutex::default(),
            peers: Mutex::default(),
            listening: Mutex::default(),
            alive: watch::Sender::new(()),
            refused: AtomicU64::new(0),
        }))
    }

    /// At the first call, starts to listen on a task of the current runtime, and starts the engine.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut listening = lock(&self.listening);
        if !*listening {
            let listener = UnixListener::bind(socket_of(self.name))?;
            self.engine.start(&self.bytes)?;
            tokio::spawn(serve(listener, Arc::downgrade(self), self.alive.subscribe()));
            *listening = true;
        }
        Ok(())
    }

    /// Expects the peer that knows `nonce`, until [`forget`](Self::forget).
    pub(super) fn expect(&self, nonce: u128) -> oneshot::Receiver<MeetRequest> {
        let (sender, receiver) = oneshot::channel();
        lock(&self.expected).insert(nonce, sender);
        receiver
    }

    pub(super) fn forget(&self, nonce: u128) {
        lock(&self.expected).remove(&nonce);
    }

    /// Returns what peers get of the bell.
    pub(super) fn bell(&self) -> [BorrowedFd<'_>; 2] {
        self.bell.descriptors()
    }

    /// Returns the number of refused connections.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns the peer with this name and bell. A new peer gets the bell that it has sent.
    pub(super) fn peer(self: &Arc<Self>, name: u128, bell: [OwnedFd; 2]) -> io::Result<Arc<PeerNode>> {
        let [page, socket] = [&bell[0], &bell[1]].map(|file| rustix::fs::fstat(file).map(|stat| stat.st_ino));
        let key = (name, page?, socket?);
        let mut peers = lock(&self.peers);
        if let Some(known) = peers.get(&key) {
            return Ok(known.clone());
        }
        let (wanted, asked) = mpsc::unbounded_channel();
        let engine = self.engine.clone();
        let peer = Arc::new(PeerNode { bell: PeerBell::attach(bell)?, attached: Mutex::default(), wanted, engine });
        peers.insert(key, peer.clone());
        tokio::spawn(fetch(key, Arc::downgrade(self), Arc::downgrade(&peer), asked));
        Ok(peer)
    }

    /// Decides on one request.
    fn decide(&self, request: Option<Request>, files: Vec<OwnedFd>, stream: UnixStream) -> io::Result<Decision> {
        match (request, <[OwnedFd; 3]>::try_from(files)) {
            (Some(Request::Meet { to, from, name }), Ok([rings, page, socket])) => {
                // Taken out, so that a nonce admits one connection only.
                let expected = lock(&self.expected).remove(&to);
                let bell = [page, socket];
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

/// The decision on a request.
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
                    tracing::debug!("a peer requests memory that is no longer shared");
                } else {
                    tracing::warn!(%error, "memory that a peer requests cannot be opened for it");
                }
                Self::GiveNothing(stream)
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.engine.stop();
        self.bell.close();
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
                // Out of descriptors, or a connection was reset in the queue: both are temporary.
                tracing::warn!(%error, "a connection of a process of this host could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Other connections wait in the listener's queue.
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
                        // The connection is held for as long as the peer knows this node.
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

/// Answers one request, in bounded time; returns the connection if more requests may follow on it. It does not keep the
/// node alive meanwhile.
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

/// Treats a closed connection as the end of the peer's requests.
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
    pub(super) bell: PeerBell,
    attached: Mutex<AttachedObjects>,
    /// The objects that are to be fetched.
    wanted: mpsc::UnboundedSender<u64>,
    engine: Arc<Engine>,
}

/// The objects of a peer that this node knows.
#[derive(Default)]
struct AttachedObjects {
    objects: BTreeMap<u64, Attachment>,
    /// The files among them, the latest last. Each holds a descriptor, which keeps a deleted file alive.
    files: VecDeque<u64>,
}

/// The state of an object of a peer.
enum Attachment {
    /// It is being fetched; these lines are notified when it is ready.
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

/// The result of looking up a peer's object.
pub(super) enum Lookup {
    Ready(Attached),
    /// It is being fetched; the line is notified when it is ready.
    Fetching,
    /// The peer does not share it.
    Refused,
}

impl PeerNode {
    /// Looks up an object of the peer. If it is not known, it is fetched, and `line` is notified then.
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
        // An object that is needed again is fetched again.
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
                // It may be fetched again at this moment.
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

    /// Notes that no more objects can be fetched.
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

/// Fetches objects of a peer. The connection also tells when the peer is gone; the peer is forgotten then.
async fn fetch(key: PeerKey, node: Weak<Node>, peer: Weak<PeerNode>, mut wanted: mpsc::UnboundedReceiver<u64>) {
    let fetching = async {
        let stream = UnixStream::connect(socket_of(key.0)).await?;
        same_user(&stream)?;
        wire::send(&stream, &Request::Stay.encode(), &[]).await?;
        loop {
            let object = tokio::select! {
                object = wanted.recv() => object,
                // Only requested objects arrive here.
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

/// Requests an object; returns `None` if the peer does not share it, or if this process cannot use it.
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
        // Any other file could make the engine wait.
        (Some(Response::Granted), Some(file)) if is_regular(&file)? => Ok(Attached::File(Arc::new(file.into()))),
        (Some(Response::Unknown), _) => Err(io::ErrorKind::NotFound.into()),
        (Some(_), None) => Err(io::Error::other("no descriptor arrived; this process may have too many open files")),
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

/// Returns the address of a node's socket. It is not a file: it vanishes with the last process that has it open.
pub(super) fn socket_of(name: u128) -> String {
    format!("\0rdmc-{name:032x}")
}

/// Most connections at once that have not yet made a request.
const HANDSHAKES_MAX: usize = 256;
/// How long a connection may take to make a request, and a peer to answer.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, so that the loop does not spin while descriptors are short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Most files of one peer that are kept open.
const FILES_MAX: usize = 8;
/// Most objects of one peer that are known.
const ATTACHED_MAX: usize = 256;
