//! Receives: the rooms that the peer was told of, and what becomes of them.

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
use crate::frame::Room;
use crate::memory::Target;

/// The receives that the device has, oldest first.
///
/// Each has its room at the peer and waits for two things, which come in order but independently: the device's notice
/// that a write with immediate has used it, and the peer's word for what was written.
#[derive(Default)]
pub(crate) struct Incoming {
    rooms: VecDeque<(WorkRequest, Target)>,
    /// The device's notices to come.
    notices: FuturesOrdered<BoxFuture<'static, io::Result<()>>>,
    /// Notices that have come, of the oldest rooms.
    noticed: usize,
    /// What the peer said about the oldest rooms.
    fates: VecDeque<Fate>,
}

/// What the peer says about a room.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    /// It gets this many bytes.
    Filled { len: u64, imm: Option<u32> },
    /// It is used up by a write to other memory.
    Notified { imm: u32 },
    /// It is too small for a message of this many bytes.
    TooSmall { len: u64 },
}

/// A receive that was successful.
pub(crate) struct Arrived {
    pub(crate) request: WorkRequest,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
}

impl Incoming {
    /// Tells whether the device takes another receive.
    pub(crate) fn is_open(&self) -> bool {
        self.rooms.len() < RECEIVES_MAX as usize
    }

    /// Gives a receive to the device and returns the room to announce.
    ///
    /// # Errors
    /// Gives the request back.
    pub(crate) fn post(
        &mut self,
        device: &Device,
        rdma: &Arc<Rdma>,
        mut request: WorkRequest,
    ) -> Result<Room, (WorkRequest, WorkError)> {
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
        let room = target.room();
        let rdma = rdma.clone();
        // A write with immediate leaves the receive's memory alone, but async-rdma insists on some.
        self.notices.push_back(post_now(Box::pin(async move {
            rdma.receive_raw_with_imm(Layout::new::<u8>()).await.map(drop)
        })));
        self.rooms.push_back((request, target));
        Ok(room)
    }

    /// Takes the peer's word for the next room.
    ///
    /// # Errors
    /// What the peer may not say.
    pub(crate) fn hear(&mut self, fate: Fate) -> Result<(), &'static str> {
        let (_, target) = self.rooms.get(self.fates.len()).ok_or("a room was used that was not announced")?;
        match fate {
            Fate::Filled { len, .. } if len > target.room().len => Err("a room got more than it holds"),
            Fate::TooSmall { len } if len <= target.room().len => Err("a room was too small that is not"),
            _ => {
                self.fates.push_back(fate);
                Ok(())
            }
        }
    }

    /// Tells whether the device has receives.
    pub(crate) fn is_posted(&self) -> bool {
        !self.notices.is_empty()
    }

    /// Waits for the device's next notice; for ever if it has no receive.
    ///
    /// # Cancel safety
    /// No notice is lost.
    ///
    /// # Errors
    /// The queue pair is broken.
    pub(crate) async fn notice(&mut self) -> Result<(), WorkError> {
        match self.notices.next().await {
            Some(Ok(())) => {
                self.noticed += 1;
                Ok(())
            }
            Some(Err(error)) => Err(work_error(&error)),
            None => std::future::pending().await,
        }
    }

    /// Takes the oldest receive, if both the device and the peer have told of it.
    pub(crate) fn arrived(&mut self) -> Option<Arrived> {
        let (len, imm) = match self.fates.front().filter(|_| self.noticed > 0)? {
            Fate::Filled { len, imm } => (usize::try_from(*len).expect("no more than the room, which is memory"), *imm),
            Fate::Notified { imm } => (0, Some(*imm)),
            Fate::TooSmall { .. } => return None,
        };
        let (mut request, target) = self.rooms.pop_front().expect("fates and notices are of rooms");
        self.fates.pop_front();
        self.noticed -= 1;
        if let Work::Receive { into } = request.work_mut() {
            target.deliver(&mut into[..len]);
        }
        Some(Arrived { request, len, imm })
    }

    /// Lets go of the operations, which hold the device's queue pair. What became of them is not learnt any more.
    pub(crate) fn let_go(&mut self) {
        self.notices.clear();
    }

    /// Returns what has not ended, and why; the device's queue pair must be gone.
    pub(crate) fn into_requests(self) -> impl Iterator<Item = (WorkRequest, WorkError)> {
        let mut fates = self.fates.into_iter();
        self.rooms.into_iter().map(move |(request, target)| match fates.next() {
            Some(Fate::TooSmall { len }) => {
                (request, WorkError::LocalLength { got: Some(len), room: target.room().len })
            }
            _ => (request, WorkError::Flushed),
        })
    }
}
