//! Sends, writes and reads: which the device may have now, and what became of them.

use std::collections::VecDeque;
use std::sync::Arc;

use async_rdma::{AccessFlag, Rdma};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesOrdered;
use rdmc_fabric::{RemoteMemory, Work, WorkError, WorkRequest};

use crate::device::{Device, RECEIVES_MAX, SENDS_MAX, post_now, remote};
use crate::error::{device_error, work_error};
use crate::fabric::MESSAGE_LEN_MAX;
use crate::frame::{Frame, ReceiveBuffer};
use crate::memory::{Region, Source};

/// Everything on its way to the peer, in the order in which it was posted.
#[derive(Default)]
pub(crate) struct Outgoing {
    /// What the device does not have yet.
    pub(crate) queued: VecDeque<WorkRequest>,
    /// The buffers that the peer announced, oldest first.
    buffers: VecDeque<ReceiveBuffer>,
    /// What the device has.
    under_way: VecDeque<WorkRequest>,
    outcomes: FuturesOrdered<BoxFuture<'static, Outcome>>,
    /// A request was refused here: nothing may follow it.
    refused: bool,
}

/// The outcome of a request: for a read, the bytes.
type Outcome = Result<Option<Region>, WorkError>;

/// The outcome of an attempt to give the device another request.
pub(crate) enum PostOutcome {
    /// There is none, or the device has enough.
    Idle,
    /// It has one more; the peer gets this frame.
    Posted(Option<Frame>),
    /// The next one waits for a buffer of the peer.
    NeedsBuffer,
    /// The next one does not fit its buffer.
    TooLong { len: u64 },
}

impl Outgoing {
    /// Notes a buffer that the peer announced.
    ///
    /// # Errors
    /// There are too many already.
    pub(crate) fn add_buffer(&mut self, buffer: ReceiveBuffer) -> Result<(), &'static str> {
        if self.buffers.len() >= RECEIVES_MAX as usize {
            return Err("too many buffers at once");
        }
        self.buffers.push_back(buffer);
        Ok(())
    }

    /// Gives the device the next request, if it may have one.
    pub(crate) fn post_next(&mut self, device: &Device, rdma: &Arc<Rdma>) -> PostOutcome {
        if self.refused || self.under_way.len() >= SENDS_MAX as usize {
            return PostOutcome::Idle;
        }
        let Some(request) = self.queued.front() else { return PostOutcome::Idle };
        let needs_buffer = matches!(request.work(), Work::Send { .. } | Work::Write { imm: Some(_), .. });
        let mut buffer = ReceiveBuffer::default();
        if needs_buffer {
            let Some(oldest) = self.buffers.front() else { return PostOutcome::NeedsBuffer };
            buffer = *oldest;
            let len = request.work().len() as u64;
            if matches!(request.work(), Work::Send { .. }) && len > buffer.len {
                return PostOutcome::TooLong { len };
            }
            self.buffers.pop_front();
        }
        let request = self.queued.pop_front().expect("it was looked at above");
        let (outcome, frame) = match start(device, rdma, request.work(), buffer) {
            Ok(started) => started,
            Err(error) => {
                self.refused = true;
                (done(Err(error)), None)
            }
        };
        self.outcomes.push_back(outcome);
        self.under_way.push_back(request);
        PostOutcome::Posted(frame)
    }

    /// Tells whether the device has requests.
    pub(crate) fn is_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Waits until the device is done with its oldest request; for ever if it has none.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn done(&mut self) -> (WorkRequest, Result<usize, WorkError>) {
        let Some(outcome) = self.outcomes.next().await else { return std::future::pending().await };
        let mut request = self.under_way.pop_front().expect("each outcome has its request");
        let result = outcome.map(|read| {
            if let (Work::Read { into, .. }, Some(region)) = (request.work_mut(), read) {
                region.copy_to(into);
            }
            request.work().len()
        });
        (request, result)
    }

    /// Drops the operations, which hold the device's queue pair. Their outcome is lost.
    pub(crate) fn let_go(&mut self) {
        self.outcomes.clear();
    }

    /// Returns the requests that have not ended. The device's queue pair must be gone.
    pub(crate) fn into_requests(self) -> impl Iterator<Item = WorkRequest> {
        self.under_way.into_iter().chain(self.queued)
    }
}

/// Gives the device a request.
///
/// # Errors
/// It is refused here for a reason for which the device would refuse it.
fn start(
    device: &Device,
    rdma: &Arc<Rdma>,
    work: &Work,
    buffer: ReceiveBuffer,
) -> Result<(BoxFuture<'static, Outcome>, Option<Frame>), WorkError> {
    if work.len() > MESSAGE_LEN_MAX {
        return Err(device_error("longer than the longest message"));
    }
    let source = |data| {
        Source::of(device, data).map_err(|error| {
            tracing::warn!(%error, "no memory to send from");
            WorkError::LocalProtection
        })
    };
    let rdma = rdma.clone();
    Ok(match work {
        Work::Send { data, imm } => {
            let len = data.len() as u64;
            let to = RemoteRange::of(RemoteMemory { key: buffer.key.into(), address: buffer.address, len })?;
            (write_with_notice(rdma, source(data)?, to, true), Some(Frame::Taken { len, imm: *imm }))
        }
        Work::Write { data, to, imm: Some(imm) } => {
            let to = RemoteRange::of(*to)?;
            (write_with_notice(rdma, source(data)?, to, false), Some(Frame::Notified { imm: *imm }))
        }
        Work::Write { data, .. } if data.is_empty() => (done(Ok(None)), None),
        Work::Write { data, to, imm: None } => {
            let (source, to) = (source(data)?, RemoteRange::of(*to)?);
            let write = async move {
                let written = rdma.write(&source.slice(), &mut remote(to.key, to.address, to.len)).await;
                written.map(|()| None).map_err(|error| work_error(&error))
            };
            (post_now(Box::pin(write)), None)
        }
        Work::Read { into, .. } if into.is_empty() => (done(Ok(None)), None),
        Work::Read { from, .. } => {
            let from = RemoteRange::of(*from)?;
            // A read locks the whole allocation that it fills, so it gets one of its own.
            let region = device.allocate(from.len, AccessFlag::LocalWrite.into());
            let mut region = region.map_err(|_| WorkError::LocalProtection)?;
            let read = async move {
                let read = rdma.read(region.mr_mut(), &remote(from.key, from.address, from.len)).await;
                read.map(|()| Some(region)).map_err(|error| work_error(&error))
            };
            (post_now(Box::pin(read)), None)
        }
        _ => return Err(device_error("a kind of request that this fabric does not know")),
    })
}

/// Writes and consumes the peer's oldest receive. The immediate is not used: the frame has it.
fn write_with_notice(
    rdma: Arc<Rdma>,
    source: Source,
    to: RemoteRange,
    into_receive_buffer: bool,
) -> BoxFuture<'static, Outcome> {
    post_now(Box::pin(async move {
        let written = rdma.write_with_imm(&source.slice(), &mut remote(to.key, to.address, to.len), 0).await;
        written.map(|()| None).map_err(|error| match work_error(&error) {
            // The peer made this buffer itself; it goes only with the queue pair.
            WorkError::RemoteAccess if into_receive_buffer => WorkError::ConnectionLost,
            error => error,
        })
    }))
}

fn done(outcome: Outcome) -> BoxFuture<'static, Outcome> {
    Box::pin(std::future::ready(outcome))
}

/// Memory of the peer, in the device's terms.
#[derive(Clone, Copy)]
struct RemoteRange {
    key: u32,
    address: usize,
    len: usize,
}

impl RemoteRange {
    /// # Errors
    /// No peer can have such memory.
    fn of(memory: RemoteMemory) -> Result<Self, WorkError> {
        if memory.len == 0 {
            return Ok(Self { key: 0, address: 0, len: 0 });
        }
        let end = memory.address.checked_add(memory.len).and_then(|end| usize::try_from(end).ok());
        let key = u32::try_from(memory.key).map_err(|_| WorkError::RemoteAccess)?;
        let len = usize::try_from(memory.len).map_err(|_| WorkError::RemoteAccess)?;
        let address = end.ok_or(WorkError::RemoteAccess)? - len;
        Ok(Self { key, address, len })
    }
}
