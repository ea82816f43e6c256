//! How sessions arrive.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdmc::{Fabrics, Security};
use rdmc_fabric::frames::FrameCheck;
use rdmc_fabric::{ControlListener, ControlStream, Environment, Fabric, Role, Scope, Spawner, Strangers};
use tokio::sync::mpsc;

use super::error::{OpenError, silent};
use super::link::{Link, LinkEnd};
use super::opening::{HANDSHAKE_LIMIT, Patience, write_first};
use super::{AgreedTerms, Session, SessionConfig, SessionId, Shared};
use crate::channel::Channel;
use crate::sync::lock;
use crate::wire::{self, Frame, Open, Opened, PROTOCOL_VERSION, Progress, RefusedReason};

/// Accepts sessions at an address.
///
/// If it is dropped, no more sessions arrive, and lost connections of those that are there cannot be resumed.
pub struct SessionListener {
    address: String,
    requests: tokio::sync::Mutex<mpsc::Receiver<SessionRequest>>,
    _scope: Scope,
}

impl SessionListener {
    /// Listens at `address` (`host:port`, port 0 for any free one) for sessions on any of `fabrics`. The first of them
    /// listens for all.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing listens.
    ///
    /// # Errors
    /// The operating system's error, or settings that cannot be used.
    pub async fn bind(fabrics: impl Into<Fabrics>, address: &str, config: SessionConfig) -> io::Result<Self> {
        config.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let fabrics: Vec<_> = fabrics.into().iter().cloned().collect();
        let environment = fabrics[0].environment();
        let listener = environment.listen(address).await?;
        let address = listener.local_address();
        let (arrived, requests) = mpsc::channel(REQUESTS_MAX);
        let entrance =
            Entrance { fabrics, environment: environment.clone(), config, arrived, sessions: Mutex::default() };
        let scope = Scope::new(environment);
        scope.spawn(accept(listener, Arc::new(entrance), scope.spawner()));
        Ok(Self { address, requests: tokio::sync::Mutex::new(requests), _scope: scope })
    }

    /// Returns the address to which others connect, with the port that was chosen for port 0.
    pub fn local_address(&self) -> &str {
        &self.address
    }

    /// Waits for the next session that another end wants to open.
    ///
    /// # Cancel safety
    /// No request is lost.
    pub async fn accept(&self) -> SessionRequest {
        let mut requests = self.requests.lock().await;
        match requests.recv().await {
            Some(request) => request,
            // It no longer listens.
            None => std::future::pending().await,
        }
    }
}

impl fmt::Debug for SessionListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionListener").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Another end wants to open a session. Dropping it refuses the session.
pub struct SessionRequest {
    stream: Option<Box<dyn ControlStream>>,
    open: Open,
    from: Option<IpAddr>,
    entrance: Arc<Entrance>,
}

impl SessionRequest {
    /// Returns what the other end says.
    pub fn metadata(&self) -> &[u8] {
        &self.open.metadata
    }

    /// Returns the address of the other end.
    pub fn from(&self) -> Option<IpAddr> {
        self.from
    }

    /// Accepts the session. `metadata` is for the other end's application, at most 64 KiB.
    ///
    /// # Cancel safety
    /// If the future is dropped, there is no session.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub async fn accept(mut self, metadata: Vec<u8>) -> Result<Session, OpenError> {
        if metadata.len() > super::state::MESSAGE_LEN_MAX {
            return Err(OpenError::Invalid("metadata has at most 64 KiB: send the rest as messages or slabs"));
        }
        let entrance = self.entrance.clone();
        let stream = self.stream.take().expect("only this call takes it");
        let ours = entrance.config.terms(self.open.terms.is_distant);
        let accepting = entrance.answer(stream, &self.open, Progress::default(), ours, metadata, &entrance.fabrics);
        let accepted = entrance.environment.timeout(HANDSHAKE_LIMIT, accepting).await;
        let (link, fabric) = accepted.map_err(|elapsed| handshake(self.from, silent(elapsed)))??;
        let terms = AgreedTerms::new(&entrance.config, ours, self.open.terms).expect("checked before it was answered");
        let id = SessionId(self.open.session);
        let shared = Shared::new(id, fabric, &entrance.config, terms, std::mem::take(&mut self.open.metadata));
        let (resumed, resumptions) = mpsc::channel(1);
        lock(&entrance.sessions).insert(id, resumed);
        tracing::debug!(session = %id, from = ?self.from, "session accepted");
        entrance.environment.spawn(Box::pin(drive(shared.clone(), link, resumptions, Arc::downgrade(&entrance))));
        Ok(Session::new(shared))
    }

    /// Refuses the session, and says why.
    ///
    /// # Cancel safety
    /// If the future is dropped, the other end may not learn why.
    pub async fn refuse(mut self, reason: &str) {
        if let Some(stream) = self.stream.take() {
            self.entrance.refuse(stream, RefusedReason::Declined { reason: reason.to_owned() }).await;
        }
    }
}

impl Drop for SessionRequest {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            let entrance = self.entrance.clone();
            let reason = RefusedReason::Declined { reason: "it takes no sessions now".into() };
            self.entrance.environment.spawn(Box::pin(async move { entrance.refuse(stream, reason).await }));
        }
    }
}

impl fmt::Debug for SessionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRequest").field("from", &self.from).finish_non_exhaustive()
    }
}

/// What a listener's connections share.
struct Entrance {
    fabrics: Vec<Arc<dyn Fabric>>,
    environment: Arc<dyn Environment>,
    config: SessionConfig,
    arrived: mpsc::Sender<SessionRequest>,
    /// The sessions that were accepted here, until they are over.
    sessions: Mutex<HashMap<SessionId, mpsc::Sender<Resumption>>>,
}

/// A connection over which a session is to go on.
struct Resumption {
    stream: Box<dyn ControlStream>,
    open: Open,
    entrance: Arc<Entrance>,
}

async fn accept(mut listener: Box<dyn ControlListener>, entrance: Arc<Entrance>, spawner: Spawner) {
    let strangers = Strangers::new(STRANGERS_PER_PEER_MAX, STRANGERS_MAX);
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(%error, "no longer listening for sessions");
                return;
            }
        };
        let from = stream.peer_address();
        let (place, displacement) = strangers.admit(from);
        let entrance = entrance.clone();
        spawner.spawn(Box::pin(async move {
            let environment = entrance.environment.clone();
            let greeted = environment.timeout(GREETING_LIMIT, entrance.greet(stream));
            let greeted = displacement.unless_displaced(greeted).await;
            drop(place);
            match greeted {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => tracing::warn!(?from, %error, "connection refused"),
                Some(Err(elapsed)) => tracing::warn!(?from, error = %elapsed, "connection refused: it is silent"),
                None => tracing::warn!(?from, "connection closed: too many had not said what they want"),
            }
        }));
    }
}

impl Entrance {
    /// Reads a connection's first frame, and hands the connection on.
    async fn greet(self: &Arc<Self>, stream: Box<dyn ControlStream>) -> io::Result<()> {
        let security = self.config.security.as_ref();
        let mut stream = match Security::accepted(security, &*self.environment, stream).await {
            Ok(stream) => stream,
            Err((error, in_clear)) => {
                if let Some(stream) = in_clear {
                    let reason = match security {
                        Some(_) => "it takes only clients with a key or a certificate",
                        None => "it does not speak TLS",
                    };
                    self.refuse(stream, RefusedReason::Declined { reason: reason.to_owned() }).await;
                }
                return Err(error);
            }
        };
        let open = match wire::read(&mut stream, &mut FrameCheck::default()).await? {
            Some(Frame::Open(open)) => open,
            Some(_) => return Err(io::Error::other("it speaks another protocol: its first frame opens no session")),
            None => return Ok(()),
        };
        if open.version != PROTOCOL_VERSION {
            self.refuse(stream, RefusedReason::Version { ours: PROTOCOL_VERSION }).await;
            return Ok(());
        }
        if AgreedTerms::new(&self.config, self.config.terms(open.terms.is_distant), open.terms).is_none() {
            let reason = "its terms are out of bounds".to_owned();
            self.refuse(stream, RefusedReason::Declined { reason }).await;
            return Ok(());
        }
        let from = stream.peer_address();
        if open.progress.is_some() {
            let session = lock(&self.sessions).get(&SessionId(open.session)).cloned();
            return match session {
                Some(session) => {
                    let resumption = Resumption { stream, open, entrance: self.clone() };
                    // If it is full, an older one waits, which the other end has given up: it will try again.
                    let _ = session.try_send(resumption);
                    Ok(())
                }
                None => {
                    self.refuse(stream, RefusedReason::Unknown).await;
                    Ok(())
                }
            };
        }
        if lock(&self.sessions).contains_key(&SessionId(open.session)) {
            let reason = "there is a session of this number".to_owned();
            self.refuse(stream, RefusedReason::Declined { reason }).await;
            return Ok(());
        }
        let request = SessionRequest { stream: Some(stream), open, from, entrance: self.clone() };
        if let Err(mpsc::error::TrySendError::Full(mut request) | mpsc::error::TrySendError::Closed(mut request)) =
            self.arrived.try_send(request)
            && let Some(stream) = request.stream.take()
        {
            self.refuse(stream, RefusedReason::Busy).await;
        }
        Ok(())
    }

    /// Accepts an `Open`, and chooses a fabric.
    async fn answer(
        &self,
        mut stream: Box<dyn ControlStream>,
        open: &Open,
        progress: Progress,
        ours: wire::Terms,
        metadata: Vec<u8>,
        fabrics: &[Arc<dyn Fabric>],
    ) -> Result<(Link, Arc<dyn Fabric>), OpenError> {
        let from = stream.peer_address();
        let named = |offer: &wire::Offer| fabrics.iter().find(|fabric| fabric.capabilities().place() == offer.fabric);
        let found = open.offers.iter().enumerate().find_map(|(at, offer)| Some((at, offer, named(offer)?)));
        let Some((chosen, offer, fabric)) = found else {
            let ours: Vec<_> = fabrics.iter().map(|fabric| fabric.capabilities().place()).collect();
            let theirs: Vec<_> = open.offers.iter().map(|offer| offer.fabric.clone()).collect();
            let reason = RefusedReason::Fabrics { ours: ours.join(", "), theirs: theirs.join(", ") };
            let text = reason.to_string();
            self.refuse(stream, reason).await;
            return Err(handshake(from, io::Error::other(text)));
        };
        let streams = u16::try_from(offer.endpoints.len()).ok();
        let Some(streams) = streams.filter(|streams| (1..=SessionConfig::STREAMS_MAX).contains(streams)) else {
            return Err(handshake(from, io::Error::other("it offers no, or too many, streams")));
        };
        let (channel, completions) = Channel::new(&**fabric, streams, ours.has_landings)?;
        channel.pace(open.terms.rate);
        let opened = Opened {
            progress,
            chosen: u8::try_from(chosen).map_err(|_| handshake(from, io::Error::other("too many offers")))?,
            endpoints: channel.endpoints(),
            terms: ours,
            metadata,
        };
        write_first(&mut stream, &Frame::Opened(opened)).await.map_err(|error| handshake(from, error))?;
        let link = Link { stream, channel, completions, role: Role::Passive, endpoints: offer.endpoints.clone() };
        Ok((link, fabric.clone()))
    }

    async fn refuse(&self, mut stream: Box<dyn ControlStream>, reason: RefusedReason) {
        let frame = Frame::Refused(reason);
        let telling = write_first(&mut stream, &frame);
        // The other end may be gone.
        let _ = self.environment.timeout(GREETING_LIMIT, telling).await;
    }
}

/// Uses the connections that the other end makes, until the session is over.
async fn drive(
    shared: Arc<Shared>,
    first: Link,
    mut resumptions: mpsc::Receiver<Resumption>,
    entrance: std::sync::Weak<Entrance>,
) {
    let (mut link, mut patience) = (Some(first), Patience::default());
    loop {
        let resumption = match link.take() {
            Some(link) => tokio::select! {
                biased;
                // The other end has lost the connection, whatever this end knows.
                Some(resumption) = resumptions.recv() => {
                    shared.note_lost("the other end connects again");
                    Some(resumption)
                }
                end = shared.run(link) => match end {
                    LinkEnd::Over => break,
                    LinkEnd::Lost(cause) => {
                        shared.note_lost(&cause);
                        if !patience.has_more(&shared) {
                            shared.change(|state| state.lose(shared.resume_within, cause));
                            break;
                        }
                        match shared.next_resumption(&mut resumptions, cause).await {
                            Some(resumption) => Some(resumption),
                            None => break,
                        }
                    }
                },
            },
            None => match shared.next_resumption(&mut resumptions, "the new connection failed".into()).await {
                Some(resumption) => Some(resumption),
                None => break,
            },
        };
        let Some(Resumption { stream, open, entrance }) = resumption else { break };
        let (progress, theirs) = (lock(&shared.state).progress(), open.progress.unwrap_or_default());
        let fabrics = [shared.fabric.clone()];
        let answering = entrance.answer(stream, &open, progress, shared.terms.ours, Vec::new(), &fabrics);
        match shared.environment.timeout(HANDSHAKE_LIMIT, answering).await {
            Ok(Ok((next, _))) => match shared.take_over(theirs) {
                Ok(()) => link = Some(next),
                Err(error) => {
                    shared.change(|state| state.end(Err(error)));
                    break;
                }
            },
            Ok(Err(error)) => tracing::info!(session = %shared.id, %error, "not resumed"),
            Err(elapsed) => tracing::info!(session = %shared.id, error = %elapsed, "not resumed"),
        }
    }
    if let Some(entrance) = entrance.upgrade() {
        lock(&entrance.sessions).remove(&shared.id);
    }
    shared.close();
}

impl Shared {
    /// Waits until the other end connects again; `None` if it does not in time, or the session has ended.
    async fn next_resumption(&self, resumptions: &mut mpsc::Receiver<Resumption>, cause: String) -> Option<Resumption> {
        let ended = self.until(|state| state.ended.is_some().then_some(()));
        let waiting = self.environment.timeout(self.resume_within, resumptions.recv());
        let resumption = tokio::select! {
            biased;
            () = ended => return None,
            resumption = waiting => resumption.ok().flatten(),
        };
        if resumption.is_none() {
            self.change(|state| state.lose(self.resume_within, cause));
        }
        resumption
    }
}

fn handshake(from: Option<IpAddr>, source: io::Error) -> OpenError {
    OpenError::Handshake { address: display(from), source }
}

fn display(from: Option<IpAddr>) -> String {
    from.map_or_else(|| "the other end".to_owned(), |from| from.to_string())
}

/// Sessions that wait for the application.
const REQUESTS_MAX: usize = 64;
/// How long a connection may take to say what it wants.
const GREETING_LIMIT: Duration = Duration::from_secs(10);
/// Connections that have not yet said what they want: of each peer, and in all.
const STRANGERS_PER_PEER_MAX: usize = 64;
const STRANGERS_MAX: usize = 512;
