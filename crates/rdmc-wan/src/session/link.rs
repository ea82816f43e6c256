//! One connection of a session, and its frames.

use std::future;
use std::io;
use std::sync::Mutex;
use std::time::Duration;

use rdmc_fabric::frames::FrameCheck;
use rdmc_fabric::{CompletionQueue, ConnectError, ControlStream, FabricError, Role, Timestamp, WorkError};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};

use super::Shared;
use super::error::SessionError;
use super::landings::Landings;
use super::opening::{HANDSHAKE_LIMIT, error_chain};
use super::state::{State, Violation};
use crate::channel::Channel;
use crate::sync::lock;
use crate::wire::{self, Frame, Place};

/// A connection after its handshake. The data channel is not yet connected.
pub(crate) struct Link {
    pub(crate) stream: Box<dyn ControlStream>,
    pub(crate) channel: Channel,
    pub(crate) completions: CompletionQueue,
    pub(crate) role: Role,
    /// The endpoints of the other end's queue pairs.
    pub(crate) endpoints: Vec<Vec<u8>>,
}

/// How a connection ends.
#[derive(Debug)]
pub(crate) enum LinkEnd {
    /// Both directions of the session have ended in good order, or the session has failed for another reason.
    Over,
    /// The connection was lost: the session may go on over another one.
    Lost(String),
}

/// Why a connection cannot go on.
#[derive(Debug)]
pub(super) enum Failure {
    Lost(String),
    Session(SessionError),
    Over,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Session(SessionError::Protocol { what: error.to_string() }),
            _ => Self::Lost(error.to_string()),
        }
    }
}

impl From<WorkError> for Failure {
    fn from(error: WorkError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl From<FabricError> for Failure {
    fn from(error: FabricError) -> Self {
        Self::Session(error.into())
    }
}

impl From<Violation> for Failure {
    fn from(violation: Violation) -> Self {
        Self::Session(violation.into())
    }
}

impl Shared {
    /// Uses a connection until it is lost or the session is over.
    pub(crate) async fn run(&self, link: Link) -> LinkEnd {
        let Link { stream, channel, completions, role, endpoints } = link;
        let connecting = channel.connect(role, stream.peer_address(), endpoints);
        let (mut from, mut to) = tokio::io::split(stream);
        let heard = LastHeard::new(self.environment.now());
        let mut check = FrameCheck::default();
        let failure = tokio::select! {
            biased;
            failure = self.read_frames(&mut from, &heard) => failure,
            failure = self.write_frames(&mut to, &mut check, &heard) => failure,
            failure = self.move_slabs(&channel, connecting) => failure,
            failure = self.watch(&heard) => failure,
            () = self.lingers() => Ok(Failure::Over),
            () = completions.drain() => unreachable!("a queue is drained for ever"),
        };
        if let Err(Failure::Session(error)) = &failure {
            let mut bytes = Vec::new();
            wire::encode(&Frame::Abort { reason: error.to_string() }, &mut check, &mut bytes);
            let telling = async {
                to.write_all(&bytes).await?;
                to.flush().await
            };
            let _ = self.environment.timeout(SHUT_LIMIT, telling).await;
        }
        // Not before: the other end would see that first.
        channel.close();
        // If that fails, the other end finds out by itself.
        let _ = self.environment.timeout(SHUT_LIMIT, to.shutdown()).await;
        let failure = failure.unwrap_or_else(|failure| failure);
        if self.is_told_why(&failure) {
            // A connection that is closed with bytes unread is reset, and what was told last may be lost with it.
            let _ = self.environment.timeout(LAST_WORD, tokio::io::copy(&mut from, &mut tokio::io::sink())).await;
        }
        let state = lock(&self.state);
        match failure {
            _ if state.is_over() || state.ended.is_some() => LinkEnd::Over,
            Failure::Over => LinkEnd::Over,
            Failure::Lost(cause) => LinkEnd::Lost(cause),
            Failure::Session(error) => {
                drop(state);
                self.change(|state| state.end(Err(error)));
                LinkEnd::Over
            }
        }
    }

    /// Tells whether a connection ends because the session has failed, and one end has told the other why.
    fn is_told_why(&self, failure: &Failure) -> bool {
        match failure {
            Failure::Session(_) => true,
            Failure::Over => matches!(lock(&self.state).ended, Some(Err(_))),
            Failure::Lost(_) => false,
        }
    }

    /// Connects the data channel, and moves slabs in both directions.
    async fn move_slabs(
        &self,
        channel: &Channel,
        connecting: impl Future<Output = Result<(), ConnectError>>,
    ) -> Result<Failure, Failure> {
        let landings = Landings::default();
        let failure = tokio::select! {
            biased;
            failure = self.connect(connecting) => failure,
            failure = self.fetch_slabs(channel, &landings) => failure,
            failure = self.keep_landings(channel, &landings) => failure,
            failure = self.write_slabs(channel) => failure,
        };
        // If the other end has ended the session, the control connection says so and why.
        self.environment.sleep(LAST_WORD).await;
        if lock(&self.state).is_complete() {
            return future::pending().await;
        }
        failure
    }

    /// Connects the data channel. If the first one fails, so does the session.
    async fn connect(&self, connecting: impl Future<Output = Result<(), ConnectError>>) -> Result<Failure, Failure> {
        let reason = match self.environment.timeout(HANDSHAKE_LIMIT, connecting).await {
            Ok(Ok(())) => return future::pending().await,
            Ok(Err(error)) => error_chain(&error),
            Err(elapsed) => elapsed.to_string(),
        };
        let error = SessionError::Channel { reason };
        match lock(&self.state).resumed {
            0 => Err(Failure::Session(error)),
            _ => Ok(Failure::Lost(error.to_string())),
        }
    }

    async fn read_frames(
        &self,
        from: &mut ReadHalf<Box<dyn ControlStream>>,
        heard: &LastHeard,
    ) -> Result<Failure, Failure> {
        let mut check = FrameCheck::default();
        loop {
            let Some(frame) = wire::read(from, &mut check).await? else {
                return Ok(Failure::Lost("the other end closed the connection".into()));
            };
            let now = self.environment.now();
            heard.note(now);
            match frame {
                Frame::Ping { at } => self.change(|_| heard.answer(at)),
                Frame::Pong { at } => {
                    self.change(|state| state.note_round_trip(now.since(Timestamp::from_nanos(at))));
                }
                Frame::Slab(slab) if slab.len as usize > self.incoming_ring.slab_len() => {
                    return Err(Violation("a slab is too long").into());
                }
                Frame::Slab(slab) if !self.may_be_at(&slab.place) => {
                    return Err(Violation("a slab in another place than was agreed").into());
                }
                Frame::Landing { .. } if !self.terms.writes => {
                    return Err(Violation("a landing, although this end writes no slabs").into());
                }
                Frame::Taken { slabs } => {
                    let bytes = self.change(|state| {
                        let before = state.outgoing.taken();
                        state.apply(Frame::Taken { slabs })?;
                        Ok::<_, Violation>((state.outgoing.taken() - before) * self.outgoing_ring.slab_len() as u64)
                    });
                    self.outgoing_ring.note_passed(bytes?, now, self.round_trip());
                }
                frame => self.change(|state| state.apply(frame))?,
            }
        }
    }

    /// Tells whether slabs may come from there.
    fn may_be_at(&self, place: &Place) -> bool {
        match place {
            Place::Inline(_) => true,
            Place::Exposed(_) => !self.terms.ours.has_landings,
            Place::Written { .. } => self.terms.ours.has_landings,
        }
    }

    async fn write_frames(
        &self,
        to: &mut WriteHalf<Box<dyn ControlStream>>,
        check: &mut FrameCheck,
        heard: &LastHeard,
    ) -> Result<Failure, Failure> {
        let mut bytes = Vec::new();
        let mut ping_at = self.environment.now();
        loop {
            let due = self.until(|state| {
                let frames = state.take_frames();
                let answer = heard.take_ping();
                if frames.is_empty() && answer.is_none() {
                    return (state.is_over() || state.ended.is_some()).then_some(None);
                }
                Some(Some((frames, answer)))
            });
            let asleep = self.environment.sleep_until(ping_at);
            tokio::select! {
                biased;
                due = due => match due {
                    None => return Ok(Failure::Over),
                    Some((frames, answer)) => {
                        frames.iter().for_each(|frame| wire::encode(frame, check, &mut bytes));
                        if let Some(at) = answer {
                            wire::encode(&Frame::Pong { at }, check, &mut bytes);
                        }
                    }
                },
                () = asleep => {
                    let now = self.environment.now();
                    wire::encode(&Frame::Ping { at: now.as_nanos() }, check, &mut bytes);
                    ping_at = now + self.terms.detection / 3;
                }
            }
            let writing = async {
                to.write_all(&bytes).await?;
                to.flush().await
            };
            match self.environment.timeout(self.terms.detection, writing).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    // If the other end has ended the session, what it told before is still to be read.
                    self.environment.sleep(LAST_WORD).await;
                    return Err(error.into());
                }
                Err(_) => return Ok(Failure::Lost("the other end reads nothing".into())),
            }
            bytes.clear();
            self.change(State::note_written);
        }
    }

    /// Ends when all was received, or the session has failed, and the other end has not ended it for the detection
    /// time.
    async fn lingers(&self) {
        self.until(|state| (state.is_complete() || state.ended.is_some()).then_some(())).await;
        self.environment.sleep(self.terms.detection).await;
    }

    /// Ends when nothing was heard for the detection time.
    async fn watch(&self, heard: &LastHeard) -> Result<Failure, Failure> {
        loop {
            let due = heard.last() + self.terms.detection;
            if self.environment.now() >= due {
                return Ok(Failure::Lost(format!("no sign of life for {:?}", self.terms.detection)));
            }
            self.environment.sleep_until(due).await;
        }
    }
}

/// When the other end was heard of, and what it has asked.
struct LastHeard(Mutex<(Timestamp, Option<u64>)>);

impl LastHeard {
    fn new(now: Timestamp) -> Self {
        Self(Mutex::new((now, None)))
    }

    fn note(&self, now: Timestamp) {
        lock(&self.0).0 = now;
    }

    fn last(&self) -> Timestamp {
        lock(&self.0).0
    }

    /// Notes a ping that is to be answered.
    fn answer(&self, at: u64) {
        lock(&self.0).1 = Some(at);
    }

    fn take_ping(&self) -> Option<u64> {
        lock(&self.0).1.take()
    }
}

/// How long an end waits for what the other one has told last, and for the other one to read it.
const LAST_WORD: Duration = Duration::from_secs(1);
/// How long the end of a connection may take to be written.
const SHUT_LIMIT: Duration = Duration::from_secs(2);
