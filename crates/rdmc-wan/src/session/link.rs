//! One connection of a session: its frames, and the slabs that are fetched over it.

use std::io;
use std::sync::Mutex;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesOrdered;
use rdmc_fabric::frames::FrameCheck;
use rdmc_fabric::{Buffer, CompletionQueue, ControlStream, RemoteMemory, Timestamp, WorkError};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};
use twox_hash::xxhash3_128;

use super::error::SessionError;
use super::state::Slab;
use super::{SLABS_MIN, Shared};
use crate::channel::{Channel, UnderWay};
use crate::flight::Flight;
use crate::pace::Pacer;
use crate::sync::lock;
use crate::wire::{self, Frame, Place, SlabFrame};

/// A connection after its handshake.
pub(crate) struct Link {
    pub(crate) stream: Box<dyn ControlStream>,
    pub(crate) channel: Channel,
    pub(crate) completions: CompletionQueue,
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
enum Failure {
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

impl Shared {
    /// Uses a connection until it is lost or the session is over.
    pub(crate) async fn run(&self, link: Link) -> LinkEnd {
        let Link { stream, channel, completions } = link;
        let (mut from, mut to) = tokio::io::split(stream);
        let heard = LastHeard::new(self.environment.now());
        let mut check = FrameCheck::default();
        let failure = tokio::select! {
            biased;
            failure = self.read_frames(&mut from, &heard) => failure,
            failure = self.write_frames(&mut to, &mut check, &heard) => failure,
            failure = self.fetch_slabs(&channel) => failure,
            failure = self.watch(&heard) => failure,
            () = self.lingers() => Ok(Failure::Over),
            () = completions.drain() => unreachable!("a queue is drained for ever"),
        };
        channel.close();
        if let Err(Failure::Session(error)) = &failure {
            let mut bytes = Vec::new();
            wire::encode(&Frame::Abort { reason: error.to_string() }, &mut check, &mut bytes);
            let telling = async {
                to.write_all(&bytes).await?;
                to.flush().await
            };
            let _ = self.environment.timeout(SHUT_LIMIT, telling).await;
        }
        // If that fails, the other end finds out by itself.
        let _ = self.environment.timeout(SHUT_LIMIT, to.shutdown()).await;
        let failure = failure.unwrap_or_else(|failure| failure);
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
                    return Err(Failure::Session(SessionError::Protocol { what: "a slab is too long".into() }));
                }
                Frame::Taken { slabs } => {
                    let bytes = self.change(|state| {
                        let before = state.outgoing.taken();
                        state.apply(Frame::Taken { slabs })?;
                        Ok((state.outgoing.taken() - before) * self.outgoing_ring.slab_len() as u64)
                    });
                    let bytes = bytes.map_err(Failure::Session)?;
                    self.outgoing_ring.note_passed(bytes, now, self.round_trip());
                }
                frame => self.change(|state| state.apply(frame)).map_err(|error| Failure::Session(error.into()))?,
            }
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
                Ok(written) => written?,
                Err(_) => return Ok(Failure::Lost("the other end reads nothing".into())),
            }
            bytes.clear();
        }
    }

    /// Fetches announced slabs in their order, several at once.
    async fn fetch_slabs(&self, channel: &Channel) -> Result<Failure, Failure> {
        let requests = &Requests {
            channel,
            pacer: Mutex::new(Pacer::new(self.terms.rate)),
            flight: Flight::new((SLABS_MIN as u64 * self.incoming_ring.slab_len() as u64).max(FLIGHT_MIN)),
        };
        let mut under_way = FuturesOrdered::new();
        let mut posting = Box::pin(self.post_next(requests));
        loop {
            tokio::select! {
                biased;
                Some(fetched) = under_way.next() => self.deliver(fetched?),
                posted = &mut posting => {
                    under_way.push_back(self.receive(requests, posted?));
                    drop(posting);
                    posting = Box::pin(self.post_next(requests));
                }
            }
        }
    }

    /// Waits for the next slab to be announced and for memory; posts the reads of its pieces.
    async fn post_next(&self, requests: &Requests<'_>) -> Result<Fetching, Failure> {
        let frame = self.until(|state| state.incoming.next_announced()).await;
        let mut fetching = Fetching { frame, whole: None, pieces: Vec::new() };
        self.post(requests, &mut fetching, Attempt::First).await?;
        Ok(fetching)
    }

    /// Posts the reads of a slab's pieces.
    async fn post(&self, requests: &Requests<'_>, fetching: &mut Fetching, attempt: Attempt) -> Result<(), Failure> {
        let mut memory = self.incoming_ring.take().await.map_err(|error| Failure::Session(error.into()))?;
        memory.truncate(fetching.frame.len as usize);
        let place = match &fetching.frame.place {
            Place::Exposed(place) => RemoteMemory::decode(*place),
            Place::Inline(bytes) if bytes.len() == memory.len() => {
                memory.copy_from_slice(bytes);
                fetching.whole = Some(memory.freeze());
                return Ok(());
            }
            Place::Inline(_) => {
                return Err(Failure::Session(SessionError::Protocol { what: "a slab of another length".into() }));
            }
        };
        if memory.is_empty() {
            // It keeps its place in the ring, too.
            fetching.whole = Some(memory.freeze());
            return Ok(());
        }
        let piece_len = usize::try_from(lock(&requests.pacer).bytes_max()).unwrap_or(usize::MAX).min(PIECE_LEN);
        let mut offset = 0;
        while !memory.is_empty() {
            let piece = memory.split_to(piece_len.min(memory.len()));
            let len = piece.len() as u64;
            match attempt {
                Attempt::First => requests.flight.begin(len, self.environment.now()).await,
                // Nobody takes its pieces before all are posted: several such slabs would wait for each other.
                Attempt::Again => requests.flight.add(len),
            }
            let now = self.environment.now();
            let leaves = lock(&requests.pacer).take(len, now);
            if leaves > now {
                self.environment.sleep_until(leaves).await;
            }
            fetching.pieces.push(requests.channel.read(piece, place.slice(offset, len)).await);
            offset += len;
        }
        Ok(())
    }

    /// Waits for the pieces of a slab, and compares its bytes with what was announced.
    async fn receive(&self, requests: &Requests<'_>, mut fetching: Fetching) -> Result<Slab, Failure> {
        for attempts in 1.. {
            let mut hasher = xxhash3_128::Hasher::new();
            let mut whole = fetching.whole.take();
            whole.iter().for_each(|whole| hasher.write(whole));
            for piece in std::mem::take(&mut fetching.pieces) {
                let piece = piece.done().await?.freeze();
                requests.flight.arrived(piece.len() as u64, self.environment.now(), self.round_trip());
                for part in piece.chunks(CHECKED_AT_ONCE) {
                    hasher.write(part);
                    yield_now().await;
                }
                match &mut whole {
                    Some(whole) => whole.try_append(piece).expect("pieces follow each other in their slab"),
                    None => whole = Some(piece),
                }
            }
            let SlabFrame { number, check, note, .. } = &mut fetching.frame;
            if hasher.finish_128() == *check {
                let (bytes, note) = (whole.unwrap_or_else(Buffer::empty), std::mem::take(note));
                return Ok(Slab { bytes, note });
            }
            tracing::warn!(session = %self.id, slab = *number, attempts, "a slab arrived with other bytes");
            if attempts >= ATTEMPTS_MAX {
                return Err(Failure::Session(SessionError::Corrupt { number: *number, attempts }));
            }
            drop(whole);
            self.post(requests, &mut fetching, Attempt::Again).await?;
        }
        unreachable!("the loop has no end")
    }

    fn deliver(&self, slab: Slab) {
        let (len, now) = (slab.bytes.len() as u64, self.environment.now());
        self.change(|state| {
            state.received_bytes += len;
            state.incoming.take(slab);
        });
        // A short slab takes the place of a long one.
        self.incoming_ring.note_passed(self.incoming_ring.slab_len() as u64, now, self.round_trip());
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

/// Whether a slab is fetched for the first time.
#[derive(Clone, Copy)]
enum Attempt {
    First,
    Again,
}

/// What the reads of one connection share.
struct Requests<'a> {
    channel: &'a Channel,
    pacer: Mutex<Pacer>,
    flight: Flight,
}

/// A slab that is being fetched.
struct Fetching {
    frame: SlabFrame,
    /// Its bytes, if they came with the announcement.
    whole: Option<Buffer>,
    /// Reads of its bytes.
    pieces: Vec<UnderWay>,
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

/// Lets the other tasks of the thread run.
async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

/// Bytes that may be under way on any path.
const FLIGHT_MIN: u64 = 4 << 20;
/// Most bytes of a read.
const PIECE_LEN: usize = 256 << 10;
/// Bytes that are checked between two turns of other tasks.
const CHECKED_AT_ONCE: usize = 64 << 10;
/// How often a slab is fetched before its path counts as broken.
const ATTEMPTS_MAX: u32 = 3;
/// How long the end of a connection may take to be written.
const SHUT_LIMIT: Duration = Duration::from_secs(2);
