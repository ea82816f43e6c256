//! Receives: the buffers that were announced to the peer, and how it uses them.

use std::alloc::Layout;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use async_rdma::Rdma;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesOrdered;
use rdmc_fabric::{Work, WorkError, WorkRequest};

use crate::device::{Device, RECEIVES_MAX, post_now};
use crate::error::{device_error, work_error};
use crate::fabric::MESSAGE_LEN_MAX;
use crate::frame::ReceiveBuffer;
use crate::memory::Target;

/// The receives that the device has, oldest first.
///
/// Each was announced to the peer and completes with two events: the device's completion of a write with immediate, and
/// the peer's frame that describes the write. Each kind of event comes in order, independently of the other kind.
#[derive(Default)]
pub(crate) struct Incoming {
    buffers: VecDeque<(WorkRequest, Target)>,
    /// The completions that the device has yet to report.
    completions: FuturesOrdered<BoxFuture<'static, io::Result<()>>>,
    /// Completions that the device has reported, of the oldest buffers.
    completed: usize,
    /// How the peer has used the oldest buffers.
    uses: VecDeque<BufferUse>,
}

/// How the peer has used a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BufferUse {
    /// It gets this many bytes.
    Filled { len: u64, imm: Option<u32> },
    /// It is used up by a write to other memory.
    Notified { imm: u32 },
    /// It is too small for a message of this many bytes.
    TooSmall { len: u64 },
}

/// A receive that was successful.
pub(crate) struct CompletedReceive {
    pub(crate) request: WorkRequest,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
}

impl Incoming {
    /// Tells whether the device takes another receive.
    pub(crate) fn is_open(&self) -> bool {
        self.buffers.len() < RECEIVES_MAX as usize
    }

    /// Gives a receive to the device and returns the buffer to announce.
    ///
    /// # Errors
    /// Gives the request back.
    pub(crate) fn post(
        &mut self,
        device: &Device,
        rdma: &Arc<Rdma>,
        mut request: WorkRequest,
    ) -> Result<ReceiveBuffer, (WorkRequest, WorkError)> {
        let Work::Receive { into } = request.work_mut() else { unreachable!("only receives are queued as such") };
        if into.len() > MESSAGE_LEN_MAX {
            return Err((request, device_error("longer than the longest message")));
        }
        let target = match Target::of(device, into) {
            Ok(target) => target,
            Err(error) => {
                tracing::warn!(%error, "no memory to receive into");
                return Err((request, WorkError::LocalProtection));
            }
        };
        let buffer = target.buffer();
        let rdma = rdma.clone();
        // A write with immediate leaves the receive's memory alone, but async-rdma insists on some.
        self.completions.push_back(post_now(Box::pin(async move {
            rdma.receive_raw_with_imm(Layout::new::<u8>()).await.map(drop)
        })));
        self.buffers.push_back((request, target));
        Ok(buffer)
    }

    /// Notes how the peer has used the next buffer.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub(crate) fn note_use(&mut self, buffer_use: BufferUse) -> Result<(), &'static str> {
        let (_, target) = self.buffers.get(self.uses.len()).ok_or("the peer used a buffer that was not announced")?;
        match buffer_use {
            BufferUse::Filled { len, .. } if len > target.buffer().len => {
                Err("the peer wrote more than a buffer holds")
            }
            BufferUse::TooSmall { len } if len <= target.buffer().len => {
                Err("the peer called a buffer too small that is not")
            }
            _ => {
                self.uses.push_back(buffer_use);
                Ok(())
            }
        }
    }

    /// Tells whether the device has receives.
    pub(crate) fn is_posted(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Waits for the device's next completion; for ever if it has no receive.
    ///
    /// # Cancel safety
    /// No completion is lost.
    ///
    /// # Errors
    /// The queue pair is broken.
    pub(crate) async fn next_completion(&mut self) -> Result<(), WorkError> {
        match self.completions.next().await {
            Some(Ok(())) => {
                self.completed += 1;
                Ok(())
            }
            Some(Err(error)) => Err(work_error(&error)),
            None => std::future::pending().await,
        }
    }

    /// Takes the oldest receive, if both the device and the peer have reported it.
    pub(crate) fn take_completed(&mut self) -> Option<CompletedReceive> {
        let (len, imm) = match self.uses.front().filter(|_| self.completed > 0)? {
            BufferUse::Filled { len, imm } => {
                (usize::try_from(*len).expect("no more than the buffer, which is memory"), *imm)
            }
            BufferUse::Notified { imm } => (0, Some(*imm)),
            BufferUse::TooSmall { .. } => return None,
        };
        let (mut request, target) = self.buffers.pop_front().expect("uses and completions are of buffers");
        self.uses.pop_front();
        self.completed -= 1;
        if let Work::Receive { into } = request.work_mut() {
            target.deliver(&mut into[..len]);
        }
        Some(CompletedReceive { request, len, imm })
    }

    /// Drops the operations, which hold the device's queue pair. Their outcome is lost.
    pub(crate) fn let_go(&mut self) {
        self.completions.clear();
    }

    /// Returns the receives that have not ended, each with its error. The device's queue pair must be gone.
    pub(crate) fn into_requests(self) -> impl Iterator<Item = (WorkRequest, WorkError)> {
        let mut uses = self.uses.into_iter();
        self.buffers.into_iter().map(move |(request, target)| match uses.next() {
            Some(BufferUse::TooSmall { len }) => {
                (request, WorkError::LocalLength { got: Some(len), room: target.buffer().len })
            }
            _ => (request, WorkError::Flushed),
        })
    }
}
