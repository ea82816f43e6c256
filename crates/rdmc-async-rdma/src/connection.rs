//! The task of a connected queue pair, which owns the device's queue pair and the side channel.
//!
//! It ends in three steps. *Serving* ends with the first error, with a close, or when the peer ends. *Winding down*
//! posts nothing new, asks the peer for the same, and waits for the requests that the device has. They end at once,
//! without the device's retries: the peer's queue pair stays until this end has closed the side channel. Then the queue
//! pair is broken on purpose, which gives back its receives, and destroyed. Memory without a completion is given back
//! after that.

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
use crate::incoming::{BufferUse, Incoming};
use crate::outgoing::{Outgoing, PostOutcome};
use crate::queue_pair::AsyncRdmaQueuePair;
use crate::side_channel::{self, FrameReader, FrameWriter};

pub(crate) struct Connection {
    /// The device's queue pair; destroyed before any memory below is given back.
    rdma: Arc<Rdma>,
    queue_pair: Arc<AsyncRdmaQueuePair>,
    device: Arc<Device>,
    reader: FrameReader,
    writer: FrameWriter,
    outgoing: Outgoing,
    incoming: Incoming,
    /// Receives that the device does not have yet.
    receives: VecDeque<WorkRequest>,
    /// How long a send waits for a buffer of the peer.
    patience: Duration,
    /// When the current wait ends.
    deadline: Option<Instant>,
}

/// Why serving ends.
#[derive(Debug)]
enum EndReason {
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
    /// The side channel failed or ended.
    Lost(io::Error),
    /// The peer broke the protocol.
    Protocol(&'static str),
}

impl EndReason {
    /// Returns the error of the oldest request that did not end; all others are flushed.
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

/// What wakes the task.
enum Event {
    Changed,
    FrameRead(io::Result<Option<Frame>>),
    FramesWritten(io::Result<()>),
    Done(WorkRequest, Result<usize, WorkError>),
    ReceiveCompleted(Result<(), WorkError>),
    DeadlinePassed,
}

impl Connection {
    pub(crate) fn new(
        queue_pair: Arc<AsyncRdmaQueuePair>,
        device: Arc<Device>,
        rdma: Rdma,
        stream: TcpStream,
        patience: Duration,
    ) -> Self {
        let (reader, writer) = side_channel::split(stream);
        Self {
            rdma: Arc::new(rdma),
            queue_pair,
            device,
            reader,
            writer,
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
            EndReason::Protocol(what) => {
                tracing::warn!(qp = %self.queue_pair.id(), what, "the peer broke the protocol; connection closed");
            }
            EndReason::Lost(error) => tracing::debug!(qp = %self.queue_pair.id(), %error, "the side channel ended"),
            ending => tracing::debug!(qp = %self.queue_pair.id(), ?ending, "connection ends"),
        }
        self.queue_pair.take_last(&mut self.outgoing.queued, &mut self.receives);
        let cause = self.wind_down(&ending).await;
        self.end(cause).await;
    }

    async fn serve(&mut self) -> Result<std::convert::Infallible, EndReason> {
        loop {
            self.post()?;
            match self.event(true).await {
                Event::Changed => {}
                Event::FrameRead(Ok(Some(frame))) => self.take_frame(frame)?,
                Event::FrameRead(Ok(None)) => return Err(EndReason::Lost(io::ErrorKind::UnexpectedEof.into())),
                Event::FrameRead(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(EndReason::Protocol("it sent what is no frame"));
                }
                Event::FrameRead(Err(error)) => return Err(EndReason::Lost(error)),
                Event::FramesWritten(outcome) => outcome.map_err(EndReason::Lost)?,
                Event::Done(request, Ok(len)) => self.queue_pair.complete(request, Ok(len), None),
                Event::Done(request, Err(error)) => {
                    // A request that failed without a reason of its own failed because the peer's end broke.
                    let error = if error == WorkError::Flushed { WorkError::ConnectionLost } else { error };
                    self.queue_pair.complete(request, Err(error), None);
                    return Err(EndReason::Failed);
                }
                Event::ReceiveCompleted(outcome) => {
                    outcome.map_err(EndReason::Device)?;
                    self.complete_receives();
                }
                Event::DeadlinePassed => return Err(EndReason::ReceiverNotReady),
            }
        }
    }

    /// Gives the device what it may have, receives first.
    fn post(&mut self) -> Result<(), EndReason> {
        if !self.queue_pair.take(&mut self.outgoing.queued, &mut self.receives) {
            return Err(EndReason::Closed);
        }
        while self.incoming.is_open() && !self.writer.is_full() {
            let Some(request) = self.receives.pop_front() else { break };
            match self.incoming.post(&self.device, &self.rdma, request) {
                Ok(buffer) => self.writer.queue(Frame::Buffer(buffer)),
                Err((request, error)) => {
                    self.queue_pair.complete(request, Err(error), None);
                    return Err(EndReason::Failed);
                }
            }
        }
        let mut needs_buffer = false;
        while !self.writer.is_full() && !needs_buffer {
            match self.outgoing.post_next(&self.device, &self.rdma) {
                PostOutcome::Idle => break,
                PostOutcome::Posted(frame) => {
                    self.deadline = None;
                    frame.into_iter().for_each(|frame| self.writer.queue(frame));
                }
                PostOutcome::NeedsBuffer => needs_buffer = true,
                PostOutcome::TooLong { len } => {
                    self.writer.queue(Frame::TooLong { len });
                    return Err(EndReason::TooLong);
                }
            }
        }
        self.deadline = if needs_buffer { self.deadline.or(Instant::now().checked_add(self.patience)) } else { None };
        Ok(())
    }

    /// Waits for the next event; with `reads`, also for frames of the peer.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn event(&mut self, reads: bool) -> Event {
        let deadline = self.deadline;
        let deadline_passed = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let unwritten = !self.writer.is_flushed();
        tokio::select! {
            () = self.queue_pair.changed() => Event::Changed,
            read = self.reader.next(), if reads => Event::FrameRead(read),
            written = self.writer.flush(), if unwritten => Event::FramesWritten(written),
            (request, result) = self.outgoing.done() => Event::Done(request, result),
            completed = self.incoming.next_completion() => Event::ReceiveCompleted(completed),
            () = deadline_passed => Event::DeadlinePassed,
        }
    }

    fn take_frame(&mut self, frame: Frame) -> Result<(), EndReason> {
        let noted = match frame {
            Frame::Buffer(buffer) => self.outgoing.add_buffer(buffer),
            Frame::Taken { len, imm } => self.incoming.note_use(BufferUse::Filled { len, imm }),
            Frame::Notified { imm } => self.incoming.note_use(BufferUse::Notified { imm }),
            Frame::TooLong { len } => self.incoming.note_use(BufferUse::TooSmall { len }),
            Frame::Break => return Err(EndReason::PeerBroke),
        };
        noted.map_err(EndReason::Protocol)?;
        self.complete_receives();
        Ok(())
    }

    fn complete_receives(&mut self) {
        while let Some(receive) = self.incoming.take_completed() {
            self.queue_pair.complete(receive.request, Ok(receive.len), receive.imm);
        }
    }

    /// Waits until neither end has requests for the other; returns the error for the oldest request that did not end.
    async fn wind_down(&mut self, ending: &EndReason) -> WorkError {
        let mut cause = ending.cause();
        let mut peer_ended = matches!(ending, EndReason::Lost(_));
        let mut ended = false;
        self.deadline = None;
        self.writer.queue(Frame::Break);
        loop {
            if !self.outgoing.is_under_way() {
                self.deadline = self.deadline.or(Instant::now().checked_add(LINGER));
                // A peer that has ended still reads which of its buffers this end has used.
                if !ended && self.writer.is_flushed() {
                    self.writer.shutdown().await;
                    ended = true;
                }
                if ended && peer_ended {
                    return cause;
                }
            }
            match self.event(!peer_ended).await {
                Event::Changed => {}
                // The end of the channel: the peer has nothing under way any more, or is gone.
                Event::FrameRead(Ok(None) | Err(_)) => peer_ended = true,
                Event::FrameRead(Ok(Some(Frame::Buffer(_) | Frame::Break))) => {}
                Event::FrameRead(Ok(Some(frame))) => {
                    if self.take_frame(frame).is_err() {
                        peer_ended = true;
                    }
                }
                Event::FramesWritten(Ok(())) => {}
                Event::FramesWritten(Err(_)) => {
                    self.writer.discard();
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
                Event::ReceiveCompleted(_) => self.complete_receives(),
                Event::DeadlinePassed => {
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
                self.device.break_queue_pair(&self.rdma).await;
            }
            while self.incoming.is_posted() {
                let _ = self.incoming.next_completion().await;
            }
        };
        if tokio::time::timeout(TAKE_BACK_LIMIT, taking_back).await.is_err() {
            tracing::warn!(qp = %self.queue_pair.id(), "the device keeps receives; they end with the queue pair");
        }
        self.complete_receives();
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
    /// Matters if the task is dropped before its end, as when its runtime is shut down.
    fn drop(&mut self) {
        self.outgoing.let_go();
        self.incoming.let_go();
    }
}

/// How long an end that has nothing under way waits for the other.
const LINGER: Duration = Duration::from_secs(2);
/// How long the device may take to give receives back; it takes microseconds.
const TAKE_BACK_LIMIT: Duration = Duration::from_secs(10);
