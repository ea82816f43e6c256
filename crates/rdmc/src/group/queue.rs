//! What the root is asked to send, in the order in which it is asked.
//!
//! A request gets its place when it is made, not when the task that makes it has its next turn: a bounded channel of
//! Tokio has those who wait for room take turns with all other work of their tasks, and loses their order. So there is no limit
//! to what waits: each request is held by a future of the caller's, or by a [`BatchSender`](crate::BatchSender), which makes two.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use rdmc_fabric::Buffer;
use tokio::sync::{mpsc, oneshot};

use super::retained::RetainedMessages;
use crate::sync::lock;
use crate::transfer::{Blocks, Shape};

pub(super) enum RootRequest {
    Send { message: Buffer, shape: Shape, done: Option<oneshot::Sender<()>> },
    Close,
}

/// Where requests are made. When all are gone, there are no more requests.
#[derive(Clone)]
pub(super) struct RequestSender {
    waiting: Arc<Mutex<QueuedRequests>>,
    available: mpsc::Sender<()>,
}

#[derive(Default)]
struct QueuedRequests {
    /// By their places.
    requests: BTreeMap<u64, RootRequest>,
    next: u64,
    /// The group has ended.
    closed: bool,
}

/// The place of a request. Dropped before its turn comes, it takes the request back.
pub(super) struct QueueSlot {
    waiting: Arc<Mutex<QueuedRequests>>,
    /// None if the request stands.
    number: Option<u64>,
}

impl QueueSlot {
    /// Lets the request stand, whatever becomes of this.
    pub(super) fn detach(mut self) {
        self.number = None;
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let request = lock(&self.waiting).requests.remove(&number);
        // Its memory goes when nothing is locked.
        drop(request);
    }
}

impl RequestSender {
    /// Asks for a message to be sent, unless the group has ended. It is not, if what is returned is dropped before its turn.
    pub(super) fn send(&self, message: Buffer, shape: Shape, done: oneshot::Sender<()>) -> Option<QueueSlot> {
        let number = self.put(RootRequest::Send { message, shape, done: Some(done) })?;
        Some(QueueSlot { waiting: self.waiting.clone(), number: Some(number) })
    }

    /// Asks for the group to be closed, after what was asked for before.
    pub(super) fn close(&self) {
        self.put(RootRequest::Close);
    }

    fn put(&self, request: RootRequest) -> Option<u64> {
        let number = {
            let mut waiting = lock(&self.waiting);
            if waiting.closed {
                return None;
            }
            let number = waiting.next;
            waiting.next += 1;
            waiting.requests.insert(number, request);
            number
        };
        // There may be available already that nobody has looked at.
        let _ = self.available.try_send(());
        Some(number)
    }
}

/// Where the root's engine takes them. What is not begun when the group fails is kept.
pub(super) struct RequestQueue {
    /// From the group that this one continues.
    queued: VecDeque<(Buffer, Shape)>,
    waiting: Arc<Mutex<QueuedRequests>>,
    available: mpsc::Receiver<()>,
    /// Taken, but not begun.
    pub(super) starting: Option<Arc<Blocks>>,
    retained: Arc<RetainedMessages>,
}

impl RequestQueue {
    pub(super) fn new(retained: Arc<RetainedMessages>) -> (RequestSender, Self) {
        let (told, available) = mpsc::channel(1);
        let waiting = Arc::<Mutex<QueuedRequests>>::default();
        let queued = retained.take_queued().into();
        (
            RequestSender { waiting: waiting.clone(), available: told },
            Self { queued, waiting, available, starting: None, retained },
        )
    }

    /// Waits for the next request; none when nobody can make any more.
    ///
    /// # Cancel safety
    /// No request is lost.
    pub(super) async fn next(&mut self) -> Option<RootRequest> {
        if let Some((message, shape)) = self.queued.pop_front() {
            return Some(RootRequest::Send { message, shape, done: None });
        }
        loop {
            if let Some(request) = self.first() {
                return Some(request);
            }
            if self.available.recv().await.is_none() {
                return self.first();
            }
        }
    }

    fn first(&self) -> Option<RootRequest> {
        lock(&self.waiting).requests.pop_first().map(|(_, request)| request)
    }
}

impl Drop for RequestQueue {
    fn drop(&mut self) {
        let waiting = {
            let mut waiting = lock(&self.waiting);
            waiting.closed = true;
            std::mem::take(&mut waiting.requests)
        };
        let mut left = std::mem::take(&mut self.queued);
        if let Some(blocks) = self.starting.take() {
            left.push_front((blocks.whole(), blocks.shape()));
        }
        left.extend(waiting.into_values().filter_map(|request| match request {
            RootRequest::Send { message, shape, .. } => Some((message, shape)),
            RootRequest::Close => None,
        }));
        self.retained.queue(left);
    }
}
