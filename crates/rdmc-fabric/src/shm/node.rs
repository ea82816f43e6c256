//! One node among those of its host: its socket, its bell, what it shares, and the peers it has met.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::arena::Arena;
use super::bell::Bell;
use super::engine::Engine;
use super::lock;
use super::map::Mapping;
use super::objects::Objects;
use super::wire::{self, Answer, Request};
use crate::software::Exposures;

/// A node, as its queue pairs share it.
pub(super) struct Node {
    /// Random; its socket is called by it.
    pub(super) name: u128,
    pub(super) objects: Arc<Objects>,
    pub(super) arena: Arc<Arena>,
    pub(super) exposures: Arc<Exposures>,
    pub(super) engine: Arc<Engine>,
    bell: File,
    expected: Mutex<HashMap<u128, oneshot::Sender<Arrival>>>,
    peers: Mutex<HashMap<u128, Weak<Remote>>>,
    listening: OnceLock<AbortHandle>,
    refused: AtomicU64,
}

/// A peer's queue pair that knew the nonce of one of this node's.
pub(super) struct Arrival {
    pub(super) stream: UnixStream,
    pub(super) from: u128,
    pub(super) name: u128,
    pub(super) rings: OwnedFd,
    pub(super) bell: OwnedFd,
}

impl Node {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let mut name = [0; 16];
        getrandom::fill(&mut name).expect("the operating system provides randomness");
        let objects: Arc<Objects> = Arc::default();
        let (bell, file) = Bell::create()?;
        Ok(Arc::new(Self {
            name: u128::from_le_bytes(name),
            arena: Arena::new(objects.clone()),
            objects,
            exposures: Arc::default(),
            engine: Engine::new(bell),
            bell: file,
            expected: Mutex::default(),
            peers: Mutex::default(),
            listening: OnceLock::new(),
            refused: AtomicU64::new(0),
        }))
    }

    /// Listens from now on, on a task of the current runtime.
    pub(super) fn listen(self: &Arc<Self>) -> io::Result<()> {
        if self.listening.get().is_some() {
            return Ok(());
        }
        let listener = UnixListener::bind(socket_of(self.name))?;
        let serving = tokio::spawn(serve(listener, Arc::downgrade(self)));
        let _ = self.listening.set(serving.abort_handle());
        Ok(())
    }

    /// Waits for the peer that knows `nonce`, until [`forget`](Self::forget).
    pub(super) fn expect(&self, nonce: u128) -> oneshot::Receiver<Arrival> {
        let (arrived, arrival) = oneshot::channel();
        lock(&self.expected).insert(nonce, arrived);
        arrival
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
    pub(super) fn peer(&self, name: u128, bell: OwnedFd) -> io::Result<Arc<Remote>> {
        let mut peers = lock(&self.peers);
        if let Some(known) = peers.get(&name).and_then(Weak::upgrade) {
            return Ok(known);
        }
        peers.retain(|_, peer| peer.strong_count() > 0);
        let remote = Arc::new(Remote { name, bell: Bell::attach(bell)?, attached: Mutex::default() });
        peers.insert(name, Arc::downgrade(&remote));
        Ok(remote)
    }

    /// Answers one connection.
    async fn answer(&self, stream: UnixStream) -> io::Result<()> {
        same_user(&stream)?;
        let (bytes, files) = wire::receive::<{ Request::LEN }>(&stream).await?;
        match (Request::decode(&bytes), <[OwnedFd; 2]>::try_from(files)) {
            (Some(Request::Meet { to, from, name }), Ok([rings, bell])) => {
                // Taken out, so that a nonce lets in one connection only.
                let expected = lock(&self.expected).remove(&to);
                let arrival = Arrival { stream, from, name, rings, bell };
                let refused = match expected {
                    Some(arrived) => arrived.send(arrival).err(),
                    None => Some(arrival),
                };
                if let Some(Arrival { stream, .. }) = refused {
                    wire::send(&stream, &Answer::Unknown.encode(), &[]).await?;
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, "no queue pair waits for its nonce"));
                }
                Ok(())
            }
            (Some(Request::Open { object }), Err(none)) if none.is_empty() => match self.objects.open(object) {
                Ok((file, len)) => {
                    let answer = len.map_or(Answer::Granted, Answer::Memory);
                    wire::send(&stream, &answer.encode(), &[file.as_fd()]).await
                }
                Err(error) => {
                    wire::send(&stream, &Answer::Unknown.encode(), &[]).await?;
                    Err(error)
                }
            },
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a request")),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(listening) = self.listening.get() {
            listening.abort();
        }
        self.engine.stop();
    }
}

/// Accepts connections for as long as the node lives.
async fn serve(listener: UnixListener, node: Weak<Node>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let accepted = listener.accept().await;
        let Some(node) = node.upgrade() else { return };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or a connection reset in the queue: both pass.
                tracing::warn!(%error, "a connection of a process of this host could not be accepted");
                drop(node);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let permit = handshakes.clone().acquire_owned().await.expect("it is never closed");
        tokio::spawn(async move {
            let _permit = permit;
            let answered = tokio::time::timeout(HANDSHAKE_TIMEOUT, node.answer(stream)).await;
            let Err(error) = answered.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) else { return };
            node.refused.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%error, "a connection of a process of this host was refused");
        });
    }
}

/// A peer: a node of another process, or of this one.
pub(super) struct Remote {
    pub(super) name: u128,
    pub(super) bell: Bell,
    attached: Mutex<HashMap<u64, Attachment>>,
}

/// An object of a peer, on its way or here.
enum Attachment {
    /// Whoever is to be told when it is here.
    Coming(Vec<u32>),
    Here(Attached),
    Refused,
}

/// An object of a peer that can be read.
#[derive(Clone)]
pub(super) enum Attached {
    Memory(Arc<Mapping>),
    File(Arc<File>),
}

/// What is known of a peer's object.
pub(super) enum Found {
    Here(Attached),
    /// The line will be rung when it is here.
    Coming,
    /// The peer does not share it.
    Refused,
}

impl Remote {
    /// Finds an object of the peer, or asks the peer for it on a task of `runtime`, and rings `line` at `engine` later.
    pub(super) fn find(
        self: &Arc<Self>,
        object: u64,
        runtime: &tokio::runtime::Handle,
        engine: &Arc<Engine>,
        line: u32,
    ) -> Found {
        let mut attached = lock(&self.attached);
        match attached.get_mut(&object) {
            Some(Attachment::Here(here)) => return Found::Here(here.clone()),
            Some(Attachment::Refused) => return Found::Refused,
            Some(Attachment::Coming(lines)) => {
                if !lines.contains(&line) {
                    lines.push(line);
                }
                return Found::Coming;
            }
            None => {}
        }
        if attached.len() >= ATTACHED_MAX {
            // What is needed again is asked for again.
            attached.retain(|_, object| matches!(object, Attachment::Coming(_)));
        }
        attached.insert(object, Attachment::Coming(vec![line]));
        let (remote, engine) = (self.clone(), engine.clone());
        runtime.spawn(async move {
            let opened = tokio::time::timeout(HANDSHAKE_TIMEOUT, open(remote.name, object)).await;
            let outcome = opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            let outcome = outcome.inspect_err(|error| tracing::warn!(%error, "a peer's memory could not be mapped"));
            let found = outcome.map_or(Attachment::Refused, Attachment::Here);
            let waiting = lock(&remote.attached).insert(object, found);
            if let Some(Attachment::Coming(lines)) = waiting {
                lines.into_iter().for_each(|line| engine.ring(line));
            }
        });
        Found::Coming
    }
}

/// Asks the node called `name` for an object.
async fn open(name: u128, object: u64) -> io::Result<Attached> {
    let stream = UnixStream::connect(socket_of(name)).await?;
    same_user(&stream)?;
    wire::send(&stream, &Request::Open { object }.encode(), &[]).await?;
    let (answer, files) = wire::receive::<{ Answer::LEN }>(&stream).await?;
    match (Answer::decode(answer), files.into_iter().next()) {
        (Some(Answer::Memory(len)), Some(file)) => {
            let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidData)?;
            Ok(Attached::Memory(Arc::new(Mapping::attach_to_read(file, len)?)))
        }
        (Some(Answer::Granted), Some(file)) => Ok(Attached::File(Arc::new(file.into()))),
        (Some(Answer::Unknown), _) => Err(io::ErrorKind::NotFound.into()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
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
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, so that a lack of descriptors does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Objects of one peer that are kept open.
const ATTACHED_MAX: usize = 256;
