//! Sessions: what two ends exchange, whatever connections carry it.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdmc::Security;
use rdmc_fabric::{Capabilities, Environment, Fabric};
use tokio::sync::watch;

use crate::channel::Channel;
use crate::pace::Rate;
use crate::ring::SlabRing;
use crate::sync::lock;
use crate::wire;

mod error;
mod fetching;
mod landings;
mod link;
mod listener;
mod opening;
mod requests;
mod slabs;
pub(crate) mod state;
mod writing;

pub use error::{OpenError, SessionError};
pub use listener::{SessionListener, SessionRequest};
pub use opening::connect;
pub(crate) use opening::error_chain;
pub use slabs::{SlabMut, SlabReceiver, SlabSender};
pub use state::Slab;

use state::State;

/// The number of a session, which outlives its connections. Random, and a secret of both ends: it lets its holder go on
/// with the session.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SessionId(u128);

impl SessionId {
    /// A part that identifies the session in logs and does not let anyone take it over.
    fn public(self) -> u32 {
        (self.0 >> 96) as u32
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.public())
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Settings of a session. Each end has its own; where both ends must agree, the lesser value applies.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SessionConfig {
    /// Length of a slab in bytes, 4 KiB to 1 GiB; both ends take the lesser one. Default 1 MiB.
    ///
    /// A slab is announced, acknowledged and checked as a whole.
    pub slab_len: usize,
    /// Most bytes of each ring: one for each direction, and one for slabs that are written. Default 256 MiB.
    ///
    /// A ring begins with four slabs, or 16 between distant ends. It grows to three times what the path carries in a
    /// round trip.
    pub ring_len_max: u64,
    /// Queue pairs of the data channel, 1 to 64: the end that opens the session decides. Default 4 for TCP, and 8 where
    /// that end's system has no BBR; 16 for devices if it took at least 2 ms to find the other end's name and connect,
    /// else 1.
    pub streams: Option<u16>,
    /// The rate at which data comes to this end. Default `None`: as fast as the path carries it. TCP finds that rate;
    /// over a device the session does if a round trip takes at least 2 ms.
    pub rate: Option<Rate>,
    /// How slabs come to this end. Default `None`: [`SlabVerb::Write`] if it took at least 2 ms to find the other end's
    /// name and connect, else [`SlabVerb::Read`].
    pub receive_by: Option<SlabVerb>,
    /// After this time without a sign of life, a connection counts as lost; both ends take the lesser one. Default 10
    /// s.
    pub detection: Duration,
    /// How long a lost connection may take to be resumed. Default 60 s.
    pub resume_within: Duration,
    /// Protects the control connection, and with it the data channel's secrets. Default `None`.
    pub security: Option<Security>,
}

impl SessionConfig {
    /// Least length of a slab in bytes.
    pub const SLAB_LEN_MIN: usize = 4 << 10;
    /// Greatest length of a slab in bytes.
    pub const SLAB_LEN_MAX: usize = 1 << 30;
    /// Most queue pairs of a data channel.
    pub const STREAMS_MAX: u16 = 64;
    /// Queue pairs of a data channel over TCP, by default.
    pub const STREAMS_OF_TCP: u16 = 4;
    /// Queue pairs of a data channel over TCP that [yields to losses](rdmc_fabric::Capabilities::yields_to_loss), by
    /// default. They are as fast as four on a path without losses, and faster on others.
    pub const STREAMS_OF_YIELDING_TCP: u16 = 8;
    /// Queue pairs of a data channel over a device between distant ends, by default, or as many as its completion
    /// queues hold. A lost packet delays those behind it on its queue pair alone.
    pub const STREAMS_OF_DISTANT: u16 = 16;

    /// Returns how many queue pairs a data channel over such a fabric has by default. Ends are distant if it took at
    /// least 2 ms to connect.
    pub fn streams_over(capabilities: &Capabilities, is_distant: bool) -> u16 {
        if capabilities.yields_to_loss {
            Self::STREAMS_OF_YIELDING_TCP.min(Channel::streams_max(capabilities))
        } else if capabilities.name.starts_with("tcp") {
            Self::STREAMS_OF_TCP
        } else if capabilities.needs_pacing && is_distant {
            Self::STREAMS_OF_DISTANT.min(Channel::streams_max(capabilities))
        } else {
            1
        }
    }

    /// Returns the most bytes that a session registers: a ring for each direction, and one for slabs that are written.
    pub fn registered_max(&self) -> u64 {
        self.ring_len_max.saturating_mul(3)
    }

    fn check(&self) -> Result<(), OpenError> {
        if !(Self::SLAB_LEN_MIN..=Self::SLAB_LEN_MAX).contains(&self.slab_len) {
            return Err(OpenError::Invalid("a slab has 4 KiB to 1 GiB: choose another slab_len"));
        }
        if !self.streams.is_none_or(|streams| (1..=Self::STREAMS_MAX).contains(&streams)) {
            return Err(OpenError::Invalid("a session has 1 to 64 streams: choose another number"));
        }
        if !(DETECTION_MIN..=DETECTION_MAX).contains(&self.detection) {
            return Err(OpenError::Invalid("the detection time is 100 ms to one hour: choose another one"));
        }
        Ok(())
    }

    fn terms(&self, is_distant: bool) -> wire::Terms {
        // No request is longer than a burst, and a slab has few requests.
        let bursts = self.rate.map_or(u64::MAX, Rate::burst_bytes).saturating_mul(requests::PIECES_MAX as u64);
        let slab_len = self.slab_len.min(usize::try_from(bursts).unwrap_or(usize::MAX)).max(Self::SLAB_LEN_MIN);
        let by_distance = if is_distant { SlabVerb::Write } else { SlabVerb::Read };
        wire::Terms {
            slab_len: u32::try_from(slab_len).expect("checked to be at most 1 GiB"),
            detection_ms: u32::try_from(self.detection.as_millis()).expect("checked to be at most an hour"),
            rate: self.rate.map(Rate::as_bytes_per_second),
            is_distant,
            has_landings: self.receive_by.unwrap_or(by_distance) == SlabVerb::Write,
        }
    }
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            slab_len: 1 << 20,
            ring_len_max: 256 << 20,
            streams: None,
            rate: None,
            receive_by: None,
            detection: Duration::from_secs(10),
            resume_within: Duration::from_secs(60),
            security: None,
        }
    }
}

/// The one-sided operation that moves slabs to an end. Slabs of at most 16 KiB travel with their announcement in any
/// case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlabVerb {
    /// This end reads them from the memory of the other (*bulk asynchronous get*). Bytes come one and a half round
    /// trips after they were sent.
    Read,
    /// The other end writes them into memory of this end. Bytes come half a round trip after they were sent. This end
    /// copies each slab, and has a third ring of at most [`ring_len_max`](SessionConfig::ring_len_max).
    Write,
}

/// What both ends have agreed on.
#[derive(Clone, Copy, Debug)]
struct AgreedTerms {
    /// What this end has said.
    ours: wire::Terms,
    slab_len: usize,
    detection: Duration,
    /// The rate of slabs to this end.
    rate: Option<Rate>,
    /// The rate of slabs to the other end.
    their_rate: Option<Rate>,
    /// Whether this end writes slabs into landings of the other.
    writes: bool,
}

impl AgreedTerms {
    /// Joins the own settings and terms with the terms of the other end; `None` if these are out of bounds.
    fn new(config: &SessionConfig, ours: wire::Terms, theirs: wire::Terms) -> Option<Self> {
        let slab_len = ours.slab_len.min(theirs.slab_len) as usize;
        let detection = Duration::from_millis(ours.detection_ms.min(theirs.detection_ms).into());
        let fits = slab_len >= SessionConfig::SLAB_LEN_MIN && detection >= DETECTION_MIN && theirs.rate != Some(0);
        fits.then(|| Self {
            ours,
            slab_len,
            detection,
            rate: config.rate,
            their_rate: theirs.rate.map(Rate::bytes_per_second),
            writes: theirs.has_landings,
        })
    }
}

/// One end of a session: two directions of slabs, and messages beside them.
///
/// A session goes on when its connection is lost: the end that opened it connects again, and both go on where they
/// were. What was sent arrives once and in order, or both ends get an error.
///
/// A task of the session does its work until both directions have ended in good order, or it has failed. Wait for
/// [`ended`](SessionHandle::ended) before the runtime is shut down, so that the other end gets the last word.
#[derive(Debug)]
#[non_exhaustive]
pub struct Session {
    /// Slabs to the other end.
    pub sender: SlabSender,
    /// Slabs of the other end.
    pub receiver: SlabReceiver,
    /// Messages, counters, and the end of the session.
    pub handle: SessionHandle,
}

impl Session {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            sender: SlabSender::new(shared.clone()),
            receiver: SlabReceiver::new(shared.clone()),
            handle: SessionHandle(shared),
        }
    }
}

/// A session's messages, state and counters.
#[derive(Clone)]
pub struct SessionHandle(Arc<Shared>);

impl SessionHandle {
    /// Returns what the other end said when the session was opened.
    pub fn metadata(&self) -> &[u8] {
        &self.0.metadata
    }

    /// Returns the name of the fabric that carries the slabs.
    pub fn fabric(&self) -> &'static str {
        self.0.fabric.capabilities().name
    }

    /// Sends a message beside the slabs, of at most 64 KiB. Messages keep their order among themselves, but not with
    /// slabs. At most 64 messages wait for the other end's application; then this call waits.
    ///
    /// # Cancel safety
    /// If the future is dropped, the message is not sent.
    ///
    /// # Errors
    /// The session has failed.
    ///
    /// # Panics
    /// If the message is longer.
    pub async fn send_message(&self, message: Vec<u8>) -> Result<(), SessionError> {
        assert!(message.len() <= state::MESSAGE_LEN_MAX, "a message has at most 64 KiB");
        let mut message = Some(message);
        self.0.until_changed(|state| if state.ended.is_some() { None } else { state.messages.push(&mut message) }).await
    }

    /// Waits for the other end's next message. Several callers share the messages.
    ///
    /// # Cancel safety
    /// No message is lost.
    ///
    /// # Errors
    /// The session has ended, and all its messages were received.
    pub async fn next_message(&self) -> Result<Vec<u8>, SessionError> {
        self.0.until_changed(|state| state.messages.next()).await
    }

    /// Waits until the session has ended at both ends.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// How it failed.
    pub async fn ended(&self) -> Result<(), SessionError> {
        self.0.until(|state| state.ended.clone()).await
    }

    /// Waits until both directions have ended and the system has the last word to the other end. That is a round trip
    /// before [`ended`](Self::ended): this end needs nothing more of the other, and its process may end.
    ///
    /// If the process ends and the path loses the last word, the other end may learn nothing, and fail.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// How the session failed.
    pub async fn parted(&self) -> Result<(), SessionError> {
        self.0.until(|state| state.ended.clone().or(state.goodbye_left.then_some(Ok(())))).await
    }

    /// Waits until the session's task has ended, so that nothing more is told to the other end.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn released(&self) {
        self.0.until(|state| state.released.then_some(())).await;
    }

    /// Ends the session at once, and tells the other end.
    pub fn abort(&self, reason: &str) {
        self.0.change(|state| {
            state.abort(reason);
            state.end(Err(SessionError::Closed));
        });
    }

    /// Returns the events of the session's connections from now on.
    pub fn connection_events(&self) -> ConnectionEvents {
        let (lost, resumed) = {
            let state = lock(&self.0.state);
            (state.lost, state.resumed)
        };
        ConnectionEvents { session: self.clone(), lost, resumed }
    }

    /// Returns the session's counters.
    pub fn stats(&self) -> SessionStats {
        let state = lock(&self.0.state);
        SessionStats {
            sent_bytes: state.sent_bytes,
            received_bytes: state.received_bytes,
            lost: state.lost,
            resumed: state.resumed,
            round_trip: state.round_trip,
            outgoing_ring: self.0.outgoing_ring.len(),
            incoming_ring: self.0.incoming_ring.len(),
        }
    }
}

impl fmt::Debug for SessionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionHandle").field("id", &self.0.id).finish_non_exhaustive()
    }
}

/// The events of a session's connections; made by [`SessionHandle::connection_events`].
#[derive(Debug)]
pub struct ConnectionEvents {
    session: SessionHandle,
    /// Events up to these counts are not returned again.
    lost: u64,
    resumed: u64,
}

/// An event of a session's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionEvent {
    /// It is lost. The end that opened the session tries to open another one.
    Lost,
    /// The session goes on over another one.
    Resumed,
}

impl ConnectionEvents {
    /// Waits for the next event; returns `None` when the session has ended.
    ///
    /// # Cancel safety
    /// No event is missed.
    pub async fn next(&mut self) -> Option<ConnectionEvent> {
        let Self { session, lost, resumed } = self;
        let next = session.0.until(|state| {
            // A connection is lost before the next one takes over.
            if state.resumed > *resumed && *lost > *resumed {
                *resumed += 1;
                return Some(Some(ConnectionEvent::Resumed));
            }
            if state.lost > *lost {
                *lost += 1;
                return Some(Some(ConnectionEvent::Lost));
            }
            state.ended.is_some().then_some(None)
        });
        next.await
    }
}

/// What a session has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionStats {
    /// Bytes of slabs that were announced to the other end.
    pub sent_bytes: u64,
    /// Bytes of slabs that have arrived.
    pub received_bytes: u64,
    /// How often the session lost its connection.
    pub lost: u64,
    /// How often the session went on over another connection.
    pub resumed: u64,
    /// The least round trip of the present connection; `None` before the first one.
    pub round_trip: Option<Duration>,
    /// Bytes that the ring of outgoing slabs may have now.
    pub outgoing_ring: u64,
    /// Bytes that the ring of incoming slabs may have now.
    pub incoming_ring: u64,
}

/// What the handles, the connections and the task of one session share.
struct Shared {
    id: SessionId,
    environment: Arc<dyn Environment>,
    fabric: Arc<dyn Fabric>,
    terms: AgreedTerms,
    resume_within: Duration,
    metadata: Vec<u8>,
    state: Mutex<State>,
    /// Changes with the state.
    changed: watch::Sender<()>,
    outgoing_ring: SlabRing,
    incoming_ring: SlabRing,
    /// Memory for landings.
    landings_ring: SlabRing,
}

impl Shared {
    fn new(
        id: SessionId,
        fabric: Arc<dyn Fabric>,
        config: &SessionConfig,
        terms: AgreedTerms,
        metadata: Vec<u8>,
    ) -> Arc<Self> {
        let slabs_max = config.ring_len_max / terms.slab_len as u64;
        // A slab that is filled, one that is announced, and one in flight.
        let slabs_max = usize::try_from(slabs_max).unwrap_or(usize::MAX).clamp(3, state::ANNOUNCED_MAX);
        let slabs_min = if terms.ours.is_distant { SLABS_OF_DISTANT } else { SLABS_MIN };
        let ring = || SlabRing::new(fabric.clone(), terms.slab_len, slabs_min, slabs_max);
        Arc::new(Self {
            id,
            environment: fabric.environment(),
            terms,
            resume_within: config.resume_within,
            metadata,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
            outgoing_ring: ring(),
            incoming_ring: ring(),
            landings_ring: ring(),
            fabric,
        })
    }

    /// Changes the state, and wakes all that wait for a change.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let value = change(&mut lock(&self.state));
        self.changed.send_replace(());
        value
    }

    /// Waits until `look` finds something in the state. It may change what nobody waits for.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(value) = look(&mut lock(&self.state)) {
                return value;
            }
            changed.changed().await.expect("the session lives as long as this future");
        }
    }

    /// Waits until `change` succeeds, or the session has ended; wakes all that wait for a change.
    async fn until_changed<T>(&self, mut change: impl FnMut(&mut State) -> Option<T>) -> Result<T, SessionError> {
        let outcome = self
            .until(|state| match change(state) {
                Some(value) => Some(Ok(value)),
                None => state.ended.clone().map(|ended| Err(ended.err().unwrap_or(SessionError::Closed))),
            })
            .await;
        self.changed.send_replace(());
        outcome
    }

    /// Returns the round trip of the connection, or a guess before it is known.
    fn round_trip(&self) -> Duration {
        lock(&self.state).round_trip.unwrap_or(ROUND_TRIP_GUESS)
    }
}

/// Slabs of a ring that has not grown, and of one between distant ends.
const SLABS_MIN: usize = 4;
const SLABS_OF_DISTANT: usize = 16;
/// Ends are distant if it takes so long to connect. The rate of a path with at least this round trip is found.
const DISTANT: Duration = Duration::from_millis(2);
const DETECTION_MIN: Duration = Duration::from_millis(100);
const DETECTION_MAX: Duration = Duration::from_secs(3600);
const ROUND_TRIP_GUESS: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests;
