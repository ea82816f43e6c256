//! A queue pair over one TCP connection: one task reads frames, another writes them.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::net::TcpStream;

use super::frame::{Frame, Refusal};
use super::losses::LossWatch;
use super::stream::{Connection, Incoming, Outgoing, Reader, Writer};
use super::{TcpConfig, TcpShared, set_pace, stays_on_host, tune};
use crate::completion::CompletionSource;
use crate::environment::{Environment, TokioEnvironment, tcp_round_trip, tcp_unacknowledged};
use crate::fabric::{ConnectError, Endpoint, FabricError, Peer, QueuePairConfig, RawQueuePair, Role};
use crate::memory::Buffer;
use crate::queue_pair::{UNSIGNALED_MAX, next_queue_pair_id};
use crate::rendezvous::{Meeting, MeetingPlace};
use crate::software::{ExposureGrant, PostedWork, Reports, TakenRequest, YieldBudget};
use crate::sync::lock;
use crate::work::{Nearing, QueuePairId, Work, WorkError, WorkRequest};

pub(super) struct TcpQueuePair {
    posted: PostedWork,
    meeting: Meeting,
    config: QueuePairConfig,
    shared: Arc<TcpShared>,
    environment: Arc<TokioEnvironment>,
    /// Responses that the reader hands to the writer; they go before any request.
    responses: Mutex<Responses>,
    reports: Mutex<Reports>,
    /// Most bytes per second, which apply when it is connected.
    pace: Mutex<Option<u64>>,
    /// Whether the peer is on this host: then blocks share no port and need not wait for each other.
    on_host: AtomicBool,
    this: Weak<TcpQueuePair>,
}

/// How padding precedes the first request of a connection.
struct Padding {
    /// The time between two pieces: a round trip.
    interval: Duration,
    /// The length of the next piece.
    next: usize,
    /// The connection, to see what the peer has acknowledged.
    socket: socket2::Socket,
}

/// Responses to requests of the peer.
#[derive(Default)]
struct Responses {
    queue: VecDeque<Response>,
    /// Requests behind these that are acknowledged with whatever is written next.
    held: u32,
}

impl Responses {
    /// Adds a response behind the others.
    fn push(&mut self, response: Response) {
        if let Response::Acknowledge { requests } = response {
            self.held += requests;
            return self.release();
        }
        self.release();
        self.queue.push_back(response);
    }

    fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.held == 0
    }

    /// Lets go of the acknowledgements that are held.
    fn release(&mut self) {
        let requests = std::mem::take(&mut self.held);
        match self.queue.back_mut() {
            _ if requests == 0 => {}
            Some(Response::Acknowledge { requests: before }) => *before += requests,
            _ => self.queue.push_back(Response::Acknowledge { requests }),
        }
    }
}

/// A response to a request of the peer.
enum Response {
    Acknowledge { requests: u32 },
    Read(ExposureGrant),
    Refuse(Refusal),
    NearlyTaken,
}

/// The reason why a connection's tasks end.
#[derive(Debug)]
pub(super) enum EndReason {
    /// The queue pair was closed or broken by the other task.
    Closed,
    /// The socket failed or ended.
    Lost(io::Error),
    /// The peer refused a request, which has been completed with the peer's reason.
    Refused,
    /// This end refused a request of the peer and has sent the refusal.
    Refusing,
    /// The peer broke the protocol.
    Protocol(&'static str),
}

impl From<io::Error> for EndReason {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

impl TcpQueuePair {
    pub(super) fn create(
        shared: Arc<TcpShared>,
        environment: Arc<TokioEnvironment>,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
        reserved: u32,
    ) -> Result<Arc<Self>, FabricError> {
        let posted = PostedWork::new(next_queue_pair_id(), completions, reserved)?;
        let meeting = match shared.config.encrypt {
            true => shared.rendezvous.encrypted_meeting(&*environment),
            false => {
                let meeting = shared.rendezvous.meeting(&*environment);
                let tcp = shared.config;
                // Padding begins before the peer answers.
                meeting.followed_by(move |stream| match padding_interval(stream, &config, tcp) {
                    Some(_) => padding(PADDING_FIRST),
                    None => Vec::new(),
                })
            }
        };
        Ok(Arc::new_cyclic(|this| Self {
            posted,
            meeting,
            config,
            shared,
            environment,
            responses: Mutex::default(),
            reports: Mutex::default(),
            pace: Mutex::default(),
            on_host: AtomicBool::new(false),
            this: this.clone(),
        }))
    }
}

impl RawQueuePair for TcpQueuePair {
    fn id(&self) -> QueuePairId {
        self.posted.id
    }

    fn endpoint(&self) -> Endpoint {
        self.meeting.place().to_endpoint(endpoint_tag(self.shared.config.encrypt))
    }

    fn pace(&self, bytes_per_second: Option<u64>) {
        *lock(&self.pace) = bytes_per_second;
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        let this = self.this.upgrade().expect("the caller holds the queue pair");
        Box::pin(async move {
            let remote = this.place_of(&peer.endpoint)?;
            let stream = match this.shared.config.encrypt {
                true => {
                    let stream = this.meeting.meet_encrypted(remote, peer.role, peer.address).await?;
                    Connection::Encrypted(Box::new(stream))
                }
                false => Connection::Plain(this.meeting.meet(remote, peer.role, peer.address).await?),
            };
            tune(stream.tcp(), this.shared.config).map_err(ConnectError::Unreachable)?;
            let pace = *lock(&this.pace);
            if let Some(bytes_per_second) = pace {
                set_pace(stream.tcp(), bytes_per_second).map_err(ConnectError::Unreachable)?;
            }
            this.on_host.store(stays_on_host(stream.tcp()).map_err(ConnectError::Unreachable)?, Ordering::Relaxed);
            let greets_with_padding = peer.role == Role::Active && !this.shared.config.encrypt;
            let environment = this.environment.clone();
            environment.spawn(Box::pin(this.run(stream, greets_with_padding)));
            Ok(())
        })
    }

    fn post(&self, request: WorkRequest) {
        if self.on_host.load(Ordering::Relaxed) && matches!(request.work(), Work::Receive { .. }) {
            request.nearly_done();
        }
        self.posted.post(request);
    }

    fn close(&self) {
        self.end(WorkError::Flushed);
    }
}

impl TcpQueuePair {
    /// Decodes the peer's place; both ends must encrypt, or neither.
    fn place_of(&self, endpoint: &Endpoint) -> Result<MeetingPlace, ConnectError> {
        let encrypt = self.shared.config.encrypt;
        MeetingPlace::of_endpoint(endpoint, endpoint_tag(encrypt)).map_err(|error| {
            match MeetingPlace::of_endpoint(endpoint, endpoint_tag(!encrypt)) {
                Ok(_) if encrypt => ConnectError::PeerNotEncrypting,
                Ok(_) => ConnectError::PeerEncrypting,
                Err(_) => error,
            }
        })
    }

    /// Reads and writes until the queue pair is closed or breaks.
    async fn run(self: Arc<Self>, stream: Connection, greets_with_padding: bool) {
        let peer = stream.tcp().peer_addr().ok();
        let padding = self.padding(stream.tcp(), greets_with_padding);
        let losses = self.shared.congestion().lossy.and_then(|control| LossWatch::of(stream.tcp(), control));
        let (mut from, mut to) = match stream.into_split() {
            Ok(halves) => halves,
            Err(error) => {
                tracing::warn!(qp = %self.posted.id, ?peer, %error, "the connection cannot be used");
                return self.end(WorkError::ConnectionLost);
            }
        };
        let ending = {
            let reading = std::pin::pin!(self.read_frames(&mut from));
            let writing = std::pin::pin!(self.write_frames(&mut to, padding, losses));
            match futures::future::select(reading, writing).await {
                futures::future::Either::Left((Err(ending), _)) | futures::future::Either::Right((Err(ending), _)) => {
                    ending
                }
            }
        };
        let cause = match &ending {
            EndReason::Closed | EndReason::Refused => WorkError::Flushed,
            EndReason::Lost(error) if error.raw_os_error() == Some(BAD_ADDRESS) => WorkError::LocalProtection,
            EndReason::Lost(_) | EndReason::Refusing => WorkError::ConnectionLost,
            EndReason::Protocol(_) => WorkError::Protocol,
        };
        if let EndReason::Protocol(what) = ending {
            tracing::warn!(qp = %self.posted.id, ?peer, what, "the peer broke the protocol; connection closed");
        } else {
            tracing::debug!(qp = %self.posted.id, ?peer, ?ending, "connection ended");
        }
        self.end(cause);
        if matches!(ending, EndReason::Refusing) {
            // A reset must not overtake the refusal: let the peer read it and close first.
            let shut = async {
                to.shutdown().await;
                from.drain().await;
            };
            let _ = tokio::time::timeout(REFUSAL_LINGER, shut).await;
        }
    }

    fn end(&self, cause: WorkError) {
        self.posted.break_with(cause);
        *lock(&self.responses) = Responses::default();
        self.meeting.close();
    }

    // The reader.

    async fn read_frames(&self, from: &mut Incoming) -> Result<std::convert::Infallible, EndReason> {
        let mut closed = self.meeting.closed();
        let mut from = Reader::new(from, &mut closed);
        let mut budget = YieldBudget::default();
        let mut padding = 0;
        loop {
            let mut header = [0; Frame::LEN];
            from.fill(&mut header).await?;
            let frame = Frame::decode(&header).ok_or(EndReason::Protocol("unknown frame"))?;
            let bytes = frame.payload_len();
            let answered = match frame {
                Frame::Send { imm, len, .. } => self.take_send(&mut from, imm, len).await?,
                Frame::Write { imm, to, .. } => match self.shared.exposures.open(to, true) {
                    Ok(grant) => self.take_write(&mut from, grant, imm).await?,
                    Err(error) => Err(error),
                },
                Frame::Read { from } => match self.shared.exposures.open(from, false) {
                    Ok(grant) => {
                        self.respond(Response::Read(grant))?;
                        continue;
                    }
                    Err(error) => Err(error),
                },
                Frame::NearlyTaken => {
                    if !self.posted.nearly_acknowledged() {
                        return Err(self.nothing_outstanding("nothing to be nearly taken"));
                    }
                    continue;
                }
                Frame::Padding { len } => {
                    let allowed = usize::try_from(len).ok().filter(|len| (1..=PADDING_MAX - padding).contains(len));
                    let len = allowed.ok_or(EndReason::Protocol("no padding, or too much"))?;
                    padding += len;
                    from.skip(len).await?;
                    continue;
                }
                Frame::Acknowledge { requests } => {
                    self.take_acknowledgement(requests)?;
                    continue;
                }
                Frame::ReadResponse { len } => {
                    self.take_read_response(&mut from, len).await?;
                    continue;
                }
                Frame::Refuse { reason } => {
                    let refused =
                        self.posted.acknowledged().ok_or_else(|| self.nothing_outstanding("nothing to refuse"))?;
                    refused.finish(Err(reason.error()), None);
                    return Err(EndReason::Refused);
                }
            };
            match answered {
                Ok(()) => {
                    self.acknowledge(frame.is_quiet())?;
                    // A peer that sends without a pause must not keep the writer waiting.
                    budget.spend(bytes).await;
                }
                Err(error) => {
                    self.respond(Response::Refuse(Refusal::of(error)))?;
                    // The writer ends the connection when it has sent the refusal.
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Reads a send's payload into the oldest receive.
    async fn take_send(
        &self,
        from: &mut Reader<'_>,
        imm: Option<u32>,
        len: u64,
    ) -> Result<Result<(), WorkError>, EndReason> {
        let mut receive = match self.take_receive(from).await? {
            Ok(receive) => receive,
            Err(error) => return Ok(Err(error)),
        };
        let inspector = receive.inspector();
        let inspector = inspector.as_deref();
        let near_bytes = receive.near_bytes();
        let Work::Receive { into } = receive.work_mut() else { unreachable!("only receives are queued here") };
        let room = into.len();
        let Some(taken) = usize::try_from(len).ok().filter(|&len| len <= room) else {
            let error = WorkError::LocalLength { got: Some(len), room: room as u64 };
            receive.finish(Err(error), None);
            return Ok(Err(WorkError::RemoteInvalidRequest));
        };
        // The next sender may be told now, and this sender may go on to another neighbour, while the last bytes arrive.
        let on_host = self.on_host.load(Ordering::Relaxed);
        let usual = self.shared.config.near_bytes;
        // Within a host there is no port to share.
        let early = if on_host { 0 } else { taken.saturating_sub(near_bytes.unwrap_or(usual) as usize) };
        let mut filled = if early > 0 { from.fill_inspected(&mut into[..early], inspector).await } else { Ok(()) };
        if filled.is_ok() {
            receive.nearly_done();
            // The sender marks short sends itself.
            if !on_host && taken > usual as usize {
                self.respond(Response::NearlyTaken)?;
            }
            let Work::Receive { into } = receive.work_mut() else { unreachable!("it was one above") };
            filled = from.fill_inspected(&mut into[early..taken], inspector).await;
        }
        if let Err(ending) = filled {
            let error =
                if matches!(ending, EndReason::Closed) { WorkError::Flushed } else { WorkError::ConnectionLost };
            receive.finish(Err(error), None);
            return Err(ending);
        }
        receive.finish(Ok(taken), imm);
        Ok(Ok(()))
    }

    /// Reads a write's payload into exposed memory.
    async fn take_write(
        &self,
        from: &mut Reader<'_>,
        grant: ExposureGrant,
        imm: Option<u32>,
    ) -> Result<Result<(), WorkError>, EndReason> {
        from.fill_grant(&grant).await?;
        if imm.is_none() {
            return Ok(Ok(()));
        }
        match self.take_receive(from).await? {
            Ok(receive) => {
                receive.finish(Ok(0), imm);
                Ok(Ok(()))
            }
            Err(error) => Ok(Err(error)),
        }
    }

    async fn take_receive(&self, from: &Reader<'_>) -> Result<Result<TakenRequest<'_>, WorkError>, EndReason> {
        let receive = match self.posted.try_take_receive() {
            Ok(None) => {
                let limit = self.config.receiver_not_ready;
                from.unless_reset(self.posted.take_receive(&*self.environment, limit)).await?
            }
            Ok(Some(receive)) => Ok(self.posted.guard(receive)),
            Err(error) => Err(error),
        };
        match receive {
            Err(WorkError::Flushed) => Err(EndReason::Closed),
            outcome => Ok(outcome),
        }
    }

    fn take_acknowledgement(&self, requests: u32) -> Result<(), EndReason> {
        for _ in 0..requests {
            let mut request =
                self.posted.acknowledged().ok_or_else(|| self.nothing_outstanding("nothing to acknowledge"))?;
            if matches!(request.work_mut(), Work::Read { .. }) {
                request.finish(Err(WorkError::Protocol), None);
                return Err(EndReason::Protocol("a read was acknowledged without its bytes"));
            }
            let len = request.work_mut().len();
            request.finish(Ok(len), None);
        }
        Ok(())
    }

    async fn take_read_response(&self, from: &mut Reader<'_>, len: u64) -> Result<(), EndReason> {
        let mut request =
            self.posted.acknowledged().ok_or_else(|| self.nothing_outstanding("nothing was to be read"))?;
        let outcome = match request.work_mut() {
            Work::Read { into, .. } if into.len() as u64 == len => from.fill(into).await,
            _ => Err(EndReason::Protocol("a response does not fit its read")),
        };
        match outcome {
            Ok(()) => {
                request.finish(Ok(usize::try_from(len).expect("the length of a buffer")), None);
                Ok(())
            }
            Err(ending) => {
                let error = match ending {
                    EndReason::Closed => WorkError::Flushed,
                    EndReason::Protocol(_) => WorkError::Protocol,
                    _ => WorkError::ConnectionLost,
                };
                request.finish(Err(error), None);
                Err(ending)
            }
        }
    }

    /// Tells a response to no request from one that arrived while the queue pair was closed.
    fn nothing_outstanding(&self, what: &'static str) -> EndReason {
        if self.posted.is_broken() { EndReason::Closed } else { EndReason::Protocol(what) }
    }

    /// Acknowledges a request; if it is `quiet`, with the next response or request that is written.
    fn acknowledge(&self, quiet: bool) -> Result<(), EndReason> {
        if quiet {
            let mut responses = self.open_responses()?;
            // A peer expects an acknowledgement of 16 requests at least.
            if responses.held < UNSIGNALED_MAX {
                responses.held += 1;
                return Ok(());
            }
        }
        self.respond(Response::Acknowledge { requests: 1 })
    }

    fn respond(&self, response: Response) -> Result<(), EndReason> {
        let mut responses = self.open_responses()?;
        responses.push(response);
        if responses.queue.len() > RESPONSES_MAX {
            return Err(EndReason::Protocol("too many requests at once"));
        }
        drop(responses);
        self.posted.wake_sender();
        Ok(())
    }

    fn open_responses(&self) -> Result<MutexGuard<'_, Responses>, EndReason> {
        let responses = lock(&self.responses);
        // Earlier responses may be lost, and the peer would take this one for the response to another request.
        if self.posted.is_broken() { Err(EndReason::Closed) } else { Ok(responses) }
    }

    // The writer.

    async fn write_frames(
        &self,
        to: &mut Outgoing,
        padding: Option<Padding>,
        losses: Option<LossWatch>,
    ) -> Result<std::convert::Infallible, EndReason> {
        let mut closed = self.meeting.closed();
        let mut to = Writer { to, closed: &mut closed, losses };
        if let Some(padding) = padding {
            self.pad(&mut to, padding).await?;
        }
        let mut batch = WriteBatch { headers: Vec::with_capacity(HEADERS_LEN), ..WriteBatch::default() };
        loop {
            if self.has_only_acknowledgements() {
                // What the application does about the requests may leave with them, as a member's status does.
                tokio::task::yield_now().await;
            }
            self.gather(&mut batch, to.is_encrypted())?;
            if batch.headers.is_empty() {
                if self.posted.is_broken() {
                    return Err(EndReason::Closed);
                }
                self.posted.sends_changed().await;
                continue;
            }
            let payload = batch.large.take();
            to.write_both(&batch.headers, payload.as_deref().unwrap_or(&batch.copied)).await?;
            batch.headers.clear();
            batch.copied.clear();
            batch.departing.drain(..).for_each(Nearing::mark);
            if let Some(grant) = batch.reading.take() {
                to.write_grant(&grant).await?;
            }
            if batch.refuses {
                return Err(EndReason::Refusing);
            }
        }
    }

    /// Returns how padding precedes the first request, if it does on this connection.
    fn padding(&self, stream: &TcpStream, greets_with_padding: bool) -> Option<Padding> {
        let interval = padding_interval(stream, &self.config, self.shared.config)?;
        let socket = socket2::SockRef::from(stream).try_clone().ok()?;
        Some(Padding { interval, next: if greets_with_padding { 2 * PADDING_FIRST } else { PADDING_FIRST }, socket })
    }

    /// Writes padding until there is something else to write: each time as much as TCP lets out in one round trip.
    async fn pad(&self, to: &mut Writer<'_>, Padding { interval, next, socket }: Padding) -> Result<(), EndReason> {
        let mut len = next;
        while len <= PADDING_LAST
            && !self.posted.has_sends()
            && !self.posted.is_broken()
            && lock(&self.responses).is_empty()
        {
            to.write_both(&padding(len), &[]).await?;
            let changed = self.posted.sends_changed();
            let _ = tokio::time::timeout(interval, changed).await;
            // On a slow path, more would only wait in queues, and blocks behind it.
            let piece = (len + Frame::LEN + SEGMENT) as u64;
            if tcp_unacknowledged(&socket).is_none_or(|bytes| bytes > piece) {
                break;
            }
            len *= 2;
        }
        Ok(())
    }

    /// Tells whether nothing but acknowledgements is to be written.
    fn has_only_acknowledgements(&self) -> bool {
        let responses = lock(&self.responses);
        matches!(responses.queue.front(), Some(Response::Acknowledge { .. }))
            && responses.queue.len() == 1
            && !self.posted.has_sends()
    }

    /// Collects the next write: responses first, then requests.
    fn gather(&self, batch: &mut WriteBatch, encrypts: bool) -> Result<(), EndReason> {
        {
            let mut responses = lock(&self.responses);
            if !responses.queue.is_empty() || self.posted.has_sends() {
                responses.release();
            }
        }
        while !batch.is_full() {
            let response = lock(&self.responses).queue.pop_front();
            if let Some(response) = response {
                batch.answer(response);
            } else if let Some(request) = self.posted.try_take_send() {
                self.add(batch, request, encrypts)?;
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Adds a request to the next write.
    fn add(&self, batch: &mut WriteBatch, request: WorkRequest, encrypts: bool) -> Result<(), EndReason> {
        let quiet = !lock(&self.reports).wants(&request);
        let (frame, data) = match request.work() {
            Work::Send { data, imm } => (Frame::Send { imm: *imm, quiet, len: data.len() as u64 }, Some(data.clone())),
            Work::Write { data, to, imm } => (Frame::Write { imm: *imm, quiet, to: *to }, Some(data.clone())),
            Work::Read { from, .. } => (Frame::Read { from: *from }, None),
            Work::Receive { .. } => unreachable!("receives are queued apart"),
        };
        batch.headers.extend(frame.encode());
        // A short request, or one within this host, is nearly done when it is written. The peer reports long ones.
        let len = data.as_ref().map_or(0, Buffer::len);
        if len <= self.shared.config.near_bytes as usize || self.on_host.load(Ordering::Relaxed) {
            batch.departing.push(request.nearing());
        }
        // This comes before the bytes leave, since the response may come before this task runs again.
        self.posted.await_acknowledgement(request);
        let Some(data) = data else { return Ok(()) };
        if len <= SMALL_LEN {
            copy_behind(&mut batch.headers, &data)?;
        } else if encrypts && data.may_change() {
            // TLS reads these bytes in this process.
            copy_behind(&mut batch.copied, &data)?;
        } else {
            batch.large = Some(data);
        }
        Ok(())
    }
}

/// The content of one write: headers with short payloads, and the payload behind the last header.
#[derive(Default)]
struct WriteBatch {
    headers: Vec<u8>,
    /// A long payload, or a copy of one.
    large: Option<Buffer>,
    copied: Vec<u8>,
    /// Exposed memory that the peer reads.
    reading: Option<ExposureGrant>,
    /// Whether the last header is a refusal, after which nothing follows.
    refuses: bool,
    /// Requests that are nearly done when this is written.
    departing: Vec<Nearing>,
}

impl WriteBatch {
    /// Tells whether the batch is complete.
    fn is_full(&self) -> bool {
        let has_more = self.large.is_some() || !self.copied.is_empty() || self.reading.is_some() || self.refuses;
        has_more || self.headers.len() >= HEADERS_LEN
    }

    /// Adds a response to a request of the peer.
    fn answer(&mut self, response: Response) {
        let frame = match response {
            Response::Acknowledge { requests } => Frame::Acknowledge { requests },
            Response::NearlyTaken => Frame::NearlyTaken,
            Response::Read(grant) => {
                let len = grant.len() as u64;
                self.reading = Some(grant);
                Frame::ReadResponse { len }
            }
            Response::Refuse(reason) => {
                self.refuses = true;
                Frame::Refuse { reason }
            }
        };
        self.headers.extend(frame.encode());
    }
}

/// Appends a copy of a payload to `bytes`.
///
/// # Errors
/// The payload lies in a mapped file that was shortened. The error is the same as the kernel's.
fn copy_behind(bytes: &mut Vec<u8>, data: &Buffer) -> io::Result<()> {
    if !data.may_change() {
        bytes.extend_from_slice(data);
        return Ok(());
    }
    let from = bytes.len();
    bytes.resize(from + data.len(), 0);
    data.copy_to(0, &mut bytes[from..]).map_err(|_| io::Error::from_raw_os_error(BAD_ADDRESS))
}

/// Returns the time between two pieces of padding on a connection, if it is to have padding.
fn padding_interval(stream: &TcpStream, pair: &QueuePairConfig, config: TcpConfig) -> Option<Duration> {
    let is_padded = pair.warm_up && !stays_on_host(stream).unwrap_or(true);
    tcp_round_trip(stream).filter(|round_trip| is_padded && *round_trip >= config.padded_from)
}

/// Returns padding of `len` bytes, with its header.
fn padding(len: usize) -> Vec<u8> {
    let mut frame = Frame::Padding { len: len as u64 }.encode().to_vec();
    frame.resize(Frame::LEN + len, 0);
    frame
}

/// Returns the first bytes of an encoded endpoint: they name fabric, encryption and version.
fn endpoint_tag(encrypt: bool) -> &'static [u8] {
    if encrypt { b"tls3" } else { b"tcp3" }
}

/// `EFAULT`: the kernel could not access the memory, for example because a mapped file was shortened.
const BAD_ADDRESS: i32 = 14;
/// Payloads up to this many bytes are copied behind their header; longer ones are written from their own memory.
const SMALL_LEN: usize = 4 << 10;
/// Most bytes of headers and small payloads in one write.
const HEADERS_LEN: usize = 16 << 10;
/// Responses that may wait to be written; a peer that causes more breaks the protocol.
const RESPONSES_MAX: usize = 16 << 10;
/// What TCP lets out in the first round trip (RFC 6928).
const PADDING_FIRST: usize = 14 << 10;
/// The same in the third one.
const PADDING_LAST: usize = 4 * PADDING_FIRST;
/// Most bytes of padding on a connection: those of three round trips.
const PADDING_MAX: usize = 7 * PADDING_FIRST;
/// Longest segment of TCP on usual networks.
const SEGMENT: usize = 1460;
/// How long a connection that carries a refusal waits for the peer to close it.
const REFUSAL_LINGER: Duration = Duration::from_secs(2);
