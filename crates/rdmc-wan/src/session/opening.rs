//! How a session begins, and goes on, at the end that opens it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rdmc::Fabrics;
use rdmc_fabric::frames::FrameCheck;
use rdmc_fabric::{CompletionQueue, ControlStream, Elapsed, Environment, Fabric, Role};
use tokio::io::AsyncWriteExt;

use super::error::{OpenError, SessionError, silent};
use super::link::{Link, LinkEnd};
use super::{AgreedTerms, DISTANT, Session, SessionConfig, SessionId, Shared};
use crate::channel::Channel;
use crate::sync::lock;
use crate::wire::{self, Frame, Offer, Open, Opened, PROTOCOL_VERSION, Terms};

/// Opens a session with the [listener](super::SessionListener) at `address` (`host:port`), on one of `fabrics`.
///
/// `metadata` is for the other end's application, at most 64 KiB. The first of `fabrics` connects; all of them that
/// open connections share a [`Rendezvous`](rdmc_fabric::Rendezvous). The listener chooses the first one that it has
/// too.
///
/// # Cancel safety
/// If the future is dropped, there is no session. The other end may have accepted it, and sees it end.
///
/// # Errors
/// See [`OpenError`].
///
/// # Examples
/// ```
/// use rdmc_wan::{SessionConfig, SessionListener};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// let tcp = rdmc::TcpFabric::new;
/// let listener = SessionListener::bind(tcp(), "127.0.0.1:0", SessionConfig::default()).await?;
/// let address = listener.local_address().to_owned();
/// let producer = async {
///     let mut session = rdmc_wan::connect(tcp(), &address, SessionConfig::default(), b"a greeting".to_vec()).await?;
///     let mut slab = session.sender.slab().await?;
///     slab[..5].copy_from_slice(b"hello");
///     session.sender.send(slab, 5, Vec::new()).await?;
///     session.sender.finish().await?;
///     drop(session.receiver);
///     session.handle.ended().await?;
///     anyhow::Ok(())
/// };
/// let consumer = async {
///     let request = listener.accept().await;
///     assert_eq!(request.metadata(), b"a greeting");
///     let mut session = request.accept(Vec::new()).await?;
///     session.sender.finish().await?;
///     let slab = session.receiver.next().await?.expect("a slab");
///     assert_eq!(&slab.bytes[..], b"hello");
///     assert!(session.receiver.next().await?.is_none());
///     anyhow::Ok(())
/// };
/// tokio::try_join!(producer, consumer)?;
/// # Ok(())
/// # }
/// ```
pub async fn connect(
    fabrics: impl Into<Fabrics>,
    address: &str,
    config: SessionConfig,
    metadata: Vec<u8>,
) -> Result<Session, OpenError> {
    config.check()?;
    if metadata.len() > super::state::MESSAGE_LEN_MAX {
        return Err(OpenError::Invalid("metadata has at most 64 KiB: send the rest as messages or slabs"));
    }
    let fabrics: Vec<_> = fabrics.into().iter().cloned().collect();
    let environment = fabrics[0].environment();
    let mut id = [0; 16];
    environment.fill_random(&mut id);
    let opener = Opener {
        address: address.to_owned(),
        environment: environment.clone(),
        id: SessionId(u128::from_le_bytes(id)),
        config,
        metadata,
    };
    let greeting = environment.timeout(HANDSHAKE_LIMIT, opener.open(&fabrics, None));
    let reached = greeting.await.map_err(|elapsed| opener.handshake(silent(elapsed)))??;
    let Reached { ours, opened, link, fabric } = reached;
    let terms = AgreedTerms::new(&opener.config, ours, opened.terms)
        .ok_or_else(|| opener.handshake(io::Error::other("the other end's terms are out of bounds")))?;
    let shared = Shared::new(opener.id, fabric, &opener.config, terms, opened.metadata);
    tracing::debug!(session = %shared.id, address, fabric = shared.fabric.capabilities().name, "session opened");
    environment.spawn(Box::pin(opener.drive(shared.clone(), link)));
    Ok(Session::new(shared))
}

/// What the end that opens a session needs to connect again.
struct Opener {
    address: String,
    environment: Arc<dyn Environment>,
    id: SessionId,
    config: SessionConfig,
    metadata: Vec<u8>,
}

/// A connection that the other end has accepted.
struct Reached {
    ours: Terms,
    opened: Opened,
    link: Link,
    fabric: Arc<dyn Fabric>,
}

impl Opener {
    /// Connects, and agrees with the other end; goes on with the session if there is one.
    async fn open(&self, fabrics: &[Arc<dyn Fabric>], shared: Option<&Shared>) -> Result<Reached, OpenError> {
        let unreachable = |source| OpenError::Unreachable { address: self.address.clone(), source };
        fabrics.iter().for_each(|fabric| fabric.connect_ahead(&self.address, self.streams(fabric, false)));
        let began = self.environment.now();
        let mut stream = self.environment.connect(&self.address).await.map_err(unreachable)?;
        let is_distant = self.environment.now().since(began) >= DISTANT;
        let ours = shared.map_or_else(|| self.config.terms(is_distant), |shared| shared.terms.ours);
        if let Some(security) = &self.config.security {
            let name = self.address.rsplit_once(':').map_or(&*self.address, |(host, _)| host);
            let secured = security.opened(&*self.environment, stream, name.trim_matches(['[', ']'])).await;
            stream = secured.map_err(|error| self.handshake(error))?;
        }
        let mut channels = Vec::new();
        for fabric in fabrics {
            channels.push(Channel::new(&**fabric, self.streams(fabric, ours.is_distant), ours.has_landings)?);
        }
        let opened = self.greet(&mut stream, fabrics, &channels, shared, ours).await?;
        let chosen = usize::from(opened.chosen);
        if chosen >= channels.len() {
            return Err(self.handshake(io::Error::other("it chose a fabric that was not offered")));
        }
        let (channel, completions) = channels.swap_remove(chosen);
        channel.pace(opened.terms.rate);
        let endpoints = opened.endpoints.clone();
        let link = Link { stream, channel, completions, role: Role::Active, endpoints };
        Ok(Reached { ours, opened, link, fabric: fabrics[chosen].clone() })
    }

    fn streams(&self, fabric: &Arc<dyn Fabric>, is_distant: bool) -> u16 {
        self.config.streams.unwrap_or_else(|| SessionConfig::streams_over(&fabric.capabilities(), is_distant))
    }

    /// Exchanges the first frames.
    async fn greet(
        &self,
        stream: &mut Box<dyn ControlStream>,
        fabrics: &[Arc<dyn Fabric>],
        channels: &[(Channel, CompletionQueue)],
        shared: Option<&Shared>,
        ours: Terms,
    ) -> Result<Opened, OpenError> {
        let offer = |(fabric, (channel, _)): (&Arc<dyn Fabric>, &(Channel, CompletionQueue))| Offer {
            fabric: fabric.capabilities().place(),
            endpoints: channel.endpoints(),
        };
        let open = Open {
            version: PROTOCOL_VERSION,
            session: self.id.0,
            progress: shared.map(|shared| lock(&shared.state).progress()),
            offers: fabrics.iter().zip(channels).map(offer).collect(),
            terms: ours,
            metadata: if shared.is_none() { self.metadata.clone() } else { Vec::new() },
        };
        let answer = async {
            write_first(stream, &Frame::Open(open)).await?;
            wire::read(stream, &mut FrameCheck::default()).await
        };
        let answer = answer.await.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => closed(),
            _ => error,
        });
        match answer.map_err(|error| self.handshake(error))? {
            Some(Frame::Opened(opened)) => Ok(opened),
            Some(Frame::Refused(reason)) => {
                Err(OpenError::Refused { address: self.address.clone(), reason: wire::printable(&reason.to_string()) })
            }
            Some(_) => Err(self.handshake(io::Error::other("its first frame is no answer"))),
            None => Err(self.handshake(closed())),
        }
    }

    fn handshake(&self, source: io::Error) -> OpenError {
        OpenError::Handshake { address: self.address.clone(), source }
    }

    /// Uses the session's connections, one after the other, until it is over.
    async fn drive(self, shared: Arc<Shared>, first: Link) {
        let (mut link, mut patience) = (first, Patience::default());
        while let LinkEnd::Lost(cause) = shared.run(link).await {
            shared.note_lost(&cause);
            if !patience.has_more(&shared) {
                shared.change(|state| state.lose(shared.resume_within, cause));
                break;
            }
            match self.reconnect(&shared, cause).await {
                Some(next) => link = next,
                None => break,
            }
        }
        shared.close();
    }

    /// Connects again until that succeeds, or fails for good.
    async fn reconnect(&self, shared: &Shared, mut cause: String) -> Option<Link> {
        let deadline = self.environment.now() + shared.resume_within;
        let mut pause = PAUSE_MIN;
        let fabrics = [shared.fabric.clone()];
        let ended = shared.until(|state| state.ended.is_some().then_some(()));
        let trying = async {
            loop {
                let limit = deadline.since(self.environment.now()).min(HANDSHAKE_LIMIT);
                let opened = self.environment.timeout(limit, self.open(&fabrics, Some(shared))).await;
                match opened {
                    Ok(Ok(reached)) => match shared.take_over(reached.opened.progress) {
                        Ok(()) => return Some(reached.link),
                        Err(error) => {
                            shared.change(|state| state.end(Err(error)));
                            return None;
                        }
                    },
                    Ok(Err(OpenError::Refused { reason, .. })) => {
                        shared.change(|state| state.give_up(reason));
                        return None;
                    }
                    Ok(Err(error)) => cause = error_chain(&error),
                    Err(Elapsed { .. }) => {}
                }
                let left = deadline.since(self.environment.now());
                if left.is_zero() {
                    break;
                }
                self.environment.sleep(pause.min(left)).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
            shared.change(|state| state.lose(shared.resume_within, cause));
            None
        };
        tokio::select! {
            biased;
            () = ended => None,
            link = trying => link,
        }
    }
}

/// How often a session may be resumed without any progress.
#[derive(Debug, Default)]
pub(super) struct Patience {
    seen: u64,
    resumed: u32,
}

impl Patience {
    /// Tells whether to try again.
    pub(super) fn has_more(&mut self, shared: &Shared) -> bool {
        let moved = lock(&shared.state).moved();
        self.resumed = if moved > self.seen { 0 } else { self.resumed + 1 };
        self.seen = moved;
        self.resumed <= RESUMED_IN_VAIN_MAX
    }
}

impl Shared {
    /// Notes that the connection is lost.
    pub(super) fn note_lost(&self, cause: &str) {
        tracing::info!(session = %self.id, cause, "connection lost");
        // At the end of a session the other end may be gone first.
        self.change(|state| state.lost += u64::from(state.ended.is_none() && !state.is_complete()));
    }

    /// Goes on over another connection, whose other end has received so much.
    pub(super) fn take_over(&self, theirs: wire::Progress) -> Result<(), SessionError> {
        self.change(|state| {
            let resumed = state.resume(theirs);
            state.resumed += u64::from(resumed.is_ok());
            resumed
        })?;
        tracing::info!(session = %self.id, "session resumed over another connection");
        Ok(())
    }

    /// Ends the session in good order, unless it has failed.
    pub(super) fn close(&self) {
        self.change(|state| {
            state.end(Ok(()));
            state.released = true;
        });
        tracing::debug!(session = %self.id, ended = ?lock(&self.state).ended, "session ended");
    }
}

pub(super) async fn write_first(stream: &mut Box<dyn ControlStream>, frame: &Frame) -> io::Result<()> {
    let mut bytes = Vec::new();
    wire::encode(frame, &mut FrameCheck::default(), &mut bytes);
    stream.write_all(&bytes).await?;
    stream.flush().await
}

/// The other end closed the connection without an answer.
fn closed() -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        "it closed the connection: does `rdmc serve` or `rdmc gateway` listen at that port?",
    )
}

/// Joins an error with its causes.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// How often a session is resumed without progress before it fails.
const RESUMED_IN_VAIN_MAX: u32 = 8;
/// How long an attempt to connect may take.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(15);
/// Pauses between attempts.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
