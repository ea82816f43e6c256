//! The task of a connected queue pair, which owns the device's queue pair and the leash.
//!
//! It ends in three steps. *Serving* ends with the first error, close or word of the peer's end. *Winding down* posts
//! nothing new, tells the peer to do the same, and waits for what the device has: since the peer's queue pair stays
//! until this end has let the leash go, that ends at once rather than after the retries of a device that nobody
//! answers. Then the queue pair is spoiled, which gives back its receives, and destroyed; only after that is memory
//! given back of which no completion has told.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_rdma::Rdma;
use rdmc_fabric::{RawQueuePair, WorkError, WorkRequest};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::device::Device;
use crate::frame::Frame;
use crate::incoming::{Fate, Incoming};
use crate::leash::{Listener, Speaker, leash};
use crate::outgoing::{Next, Outgoing};
use crate::queue_pair::AsyncRdmaQueuePair;

pub(crate) struct Connection {
    /// The device's queue pair; destroyed before any memory below is given back.
    rdma: Arc<Rdma>,
    queue_pair: Arc<AsyncRdmaQueuePair>,
    device: Arc<Device>,
    listener: Listener,
    speaker: Speaker,
    outgoing: Outgoing,
    incoming: Incoming,
    /// Receives that the device does not have yet.
    receives: VecDeque<WorkRequest>,
    /// How long a send waits for a room.
    patience: Duration,
    /// Until when something is waited for.
    deadline: Option<Instant>,
}

/// Why serving ends.
#[derive(Debug)]
enum Ending {
    /// The queue pair was closed here.
    Closed,
    /// The peer closed its end, or it broke there.
    PeerBroke,
    /// A request failed and was completed with its reason.
    Failed,
    /// The device broke the queue pair.
    Device(WorkError),
    /// The peer posted no receive in time.
    ReceiverNotReady,
    /// A message did not fit the peer's receive.
    TooLong,
    /// The leash failed or ended.
    Lost(io::Error),
    /// The peer said what no peer says.
    Protocol(&'static str),
}

impl Ending {
    /// Returns what the oldest request that did not end is told; all others are flushed.
    fn cause(&self) -> WorkError {
        match self {
            Self::Closed | Self::Failed => WorkError::Flushed,
            Self::PeerBroke | Self::Lost(_) | Self::Device(WorkError::Flushed) => WorkError::ConnectionLost,
            Self::Device(error) => *error,
            Self::ReceiverNotReady => WorkError::ReceiverNotReady,
            Self::TooLong => WorkError::RemoteInvalidRequest,
            Self::Protocol(_) => WorkError::Protocol,
        }
    }
}

/// What the task wakes up for.
enum Event {
    Changed,
    Heard(io::Result<Option<Frame>>),
    Said(io::Result<()>),
    Done(WorkRequest, Result<usize, WorkError>),
    Noticed(Result<(), WorkError>),
    TimeIsUp,
}

impl Connection {
    pub(crate) fn new(
        queue_pair: Arc<AsyncRdmaQueuePair>,
        device: Arc<Device>,
        rdma: Rdma,
        stream: TcpStream,
        patience: Duration,
    ) -> Self {
        let (listener, speaker) = leash(stream);
        Self {
            rdma: Arc::new(rdma),
            queue_pair,
            device,
            listener,
            speaker,
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            receives: VecDeque::new(),
            patience,
            deadline: None,
        }
    }

    /// Serves the queue pair until it is closed or breaks, and ends it.
    pub(crate) async fn run(mut self) {
        let Err(ending) = self.serve().await;
        match &ending {
            Ending::Protocol(what) => {
                tracing::warn!(qp = %self.queue_pair.id(), what, "the peer broke the protocol; connection closed");
            }
            Ending::Lost(error) => tracing::debug!(qp = %self.queue_pair.id(), %error, "the leash ended"),
            ending => tracing::debug!(qp = %self.queue_pair.id(), ?ending, "connection ends"),
        }
        self.queue_pair.take_last(&mut self.outgoing.queued, &mut self.receives);
        let cause = self.wind_down(&ending).await;
        self.end(cause).await;
    }

    async fn serve(&mut self) -> Result<std::convert::Infallible, Ending> {
        loop {
            self.post()?;
            match self.event(true).await {
                Event::Changed => {}
                Event::Heard(Ok(Some(frame))) => self.hear(frame)?,
                Event::Heard(Ok(None)) => return Err(Ending::Lost(io::ErrorKind::UnexpectedEof.into())),
                Event::Heard(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(Ending::Protocol("it said what is no frame"));
                }
                Event::Heard(Err(error)) => return Err(Ending::Lost(error)),
                Event::Said(outcome) => outcome.map_err(Ending::Lost)?,
                Event::Done(request, Ok(len)) => self.queue_pair.complete(request, Ok(len), None),
                Event::Done(request, Err(error)) => {
                    // Without a reason of its own, it was the peer's end that broke.
                    let error = if error == WorkError::Flushed { WorkError::ConnectionLost } else { error };
                    self.queue_pair.complete(request, Err(error), None);
                    return Err(Ending::Failed);
                }
                Event::Noticed(outcome) => {
                    outcome.map_err(Ending::Device)?;
                    self.complete_arrived();
                }
                Event::TimeIsUp => return Err(Ending::ReceiverNotReady),
            }
        }
    }

    /// Gives the device what it may have, receives first.
    fn post(&mut self) -> Result<(), Ending> {
        if !self.queue_pair.take(&mut self.outgoing.queued, &mut self.receives) {
            return Err(Ending::Closed);
        }
        while self.incoming.is_open() && !self.speaker.is_full() {
            let Some(request) = self.receives.pop_front() else { break };
            match self.incoming.post(&self.device, &self.rdma, request) {
                Ok(room) => self.speaker.say(Frame::Room(room)),
                Err((request, error)) => {
                    self.queue_pair.complete(request, Err(error), None);
                    return Err(Ending::Failed);
                }
            }
        }
        let mut needs_room = false;
        while !self.speaker.is_full() && !needs_room {
            match self.outgoing.post_next(&self.device, &self.rdma) {
                Next::Idle => break,
                Next::Posted(frame) => {
                    self.deadline = None;
                    frame.into_iter().for_each(|frame| self.speaker.say(frame));
                }
                Next::NeedsRoom => needs_room = true,
                Next::TooLong { len } => {
                    self.speaker.say(Frame::TooLong { len });
                    return Err(Ending::TooLong);
                }
            }
        }
        self.deadline = if needs_room { self.deadline.or(Instant::now().checked_add(self.patience)) } else { None };
        Ok(())
    }

    /// Waits for the next event; with `listens`, also for what the peer says.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn event(&mut self, listens: bool) -> Event {
        let deadline = self.deadline;
        let time_is_up = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let unsaid = !self.speaker.is_flushed();
        tokio::select! {
            () = self.queue_pair.changed() => Event::Changed,
            heard = self.listener.next(), if listens => Event::Heard(heard),
            said = self.speaker.flush(), if unsaid => Event::Said(said),
            (request, result) = self.outgoing.done() => Event::Done(request, result),
            noticed = self.incoming.notice() => Event::Noticed(noticed),
            () = time_is_up => Event::TimeIsUp,
        }
    }

    fn hear(&mut self, frame: Frame) -> Result<(), Ending> {
        let heard = match frame {
            Frame::Room(room) => self.outgoing.add_room(room),
            Frame::Taken { len, imm } => self.incoming.hear(Fate::Filled { len, imm }),
            Frame::Notified { imm } => self.incoming.hear(Fate::Notified { imm }),
            Frame::TooLong { len } => self.incoming.hear(Fate::TooSmall { len }),
            Frame::Break => return Err(Ending::PeerBroke),
        };
        heard.map_err(Ending::Protocol)?;
        self.complete_arrived();
        Ok(())
    }

    fn complete_arrived(&mut self) {
        while let Some(arrived) = self.incoming.arrived() {
            self.queue_pair.complete(arrived.request, Ok(arrived.len), arrived.imm);
        }
    }

    /// Waits until neither end has anything for the other; returns what the oldest request is told that did not end.
    async fn wind_down(&mut self, ending: &Ending) -> WorkError {
        let mut cause = ending.cause();
        let mut peer_ended = matches!(ending, Ending::Lost(_));
        let mut ended = false;
        self.deadline = None;
        self.speaker.say(Frame::Break);
        loop {
            if !self.outgoing.is_under_way() {
                self.deadline = self.deadline.or(Instant::now().checked_add(LINGER));
                if !ended && (self.speaker.is_flushed() || peer_ended) {
                    self.speaker.give_up();
                    self.speaker.end().await;
                    ended = true;
                }
                if ended && peer_ended {
                    return cause;
                }
            }
            match self.event(!peer_ended).await {
                Event::Changed => {}
                // The end of the leash: the peer has nothing under way any more, or is gone.
                Event::Heard(Ok(None) | Err(_)) => peer_ended = true,
                Event::Heard(Ok(Some(Frame::Room(_) | Frame::Break))) => {}
                Event::Heard(Ok(Some(frame))) => {
                    if self.hear(frame).is_err() {
                        peer_ended = true;
                    }
                }
                Event::Said(Ok(())) => {}
                Event::Said(Err(_)) => {
                    self.speaker.give_up();
                    peer_ended = true;
                }
                Event::Done(request, result) => {
                    let result = match result {
                        Err(WorkError::Flushed) => Err(std::mem::replace(&mut cause, WorkError::Flushed)),
                        Err(error) => {
                            cause = WorkError::Flushed;
                            Err(error)
                        }
                        done => done,
                    };
                    self.queue_pair.complete(request, result, None);
                }
                // Broken receives are taken back at the end.
                Event::Noticed(_) => self.complete_arrived(),
                Event::TimeIsUp => {
                    tracing::debug!(qp = %self.queue_pair.id(), "the peer did not end the connection in time");
                    return cause;
                }
            }
        }
    }

    /// Takes everything back from the device, destroys the queue pair and ends what is left.
    async fn end(mut self, mut cause: WorkError) {
        let taking_back = async {
            if self.incoming.is_posted() {
                self.device.spoil(&self.rdma).await;
            }
            while self.incoming.is_posted() {
                let _ = self.incoming.notice().await;
            }
        };
        if tokio::time::timeout(TAKE_BACK_LIMIT, taking_back).await.is_err() {
            tracing::warn!(qp = %self.queue_pair.id(), "the device keeps receives; they end with the queue pair");
        }
        self.complete_arrived();
        let queue_pair = self.queue_pair.clone();
        let mut outgoing = std::mem::take(&mut self.outgoing);
        let mut incoming = std::mem::take(&mut self.incoming);
        let receives = std::mem::take(&mut self.receives);
        outgoing.let_go();
        incoming.let_go();
        drop(self);
        for request in outgoing.into_requests() {
            queue_pair.complete(request, Err(std::mem::replace(&mut cause, WorkError::Flushed)), None);
        }
        for (request, error) in incoming.into_requests() {
            queue_pair.complete(request, Err(error), None);
        }
        for request in receives {
            queue_pair.complete(request, Err(WorkError::Flushed), None);
        }
    }
}

impl Drop for Connection {
    /// Matters if the task does not come to its end, as when its runtime is shut down.
    fn drop(&mut self) {
        self.outgoing.let_go();
        self.incoming.let_go();
    }
}

/// How long an end that has nothing under way waits for the other.
const LINGER: Duration = Duration::from_secs(2);
/// How long the device may take to give receives back; it takes microseconds.
const TAKE_BACK_LIMIT: Duration = Duration::from_secs(10);
