//! The requests to the root, in the order in which they are made.
//!
//! A request gets its place when it is made, not when the task that makes it has its next turn. A bounded channel of
//! Tokio would lose that order, since tasks that wait for room take turns with all their other work. So there is no
//! limit to the queue. Each request is held by a future of the caller, or by a [`BatchSender`](crate::BatchSender),
//! which makes two.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use rdmc_fabric::Buffer;
use tokio::sync::{mpsc, oneshot};

use super::receipt::SentMessage;
use super::retained::RetainedMessages;
use super::source::QueuedContent;
use crate::sync::lock;
use crate::transfer::{ProgressCounter, Shape};

pub(super) enum RootRequest {
    Send {
        /// It goes before the message, as a message of its own.
        header: Option<(Buffer, Shape)>,
        message: QueuedContent,
        shape: Shape,
        done: Option<oneshot::Sender<SentMessage>>,
        progress: Option<ProgressCounter>,
    },
    Close,
}

impl RootRequest {
    /// Requests a message that nobody waits for.
    fn whole(message: Buffer, shape: Shape) -> Self {
        Self::Send { header: None, message: QueuedContent::Whole(message), shape, done: None, progress: None }
    }

    fn is_message(&self) -> bool {
        matches!(self, Self::Send { .. })
    }
}

/// Makes requests. When all clones are dropped, there are no more requests.
#[derive(Clone)]
pub(super) struct RequestSender {
    waiting: Arc<Mutex<QueuedRequests>>,
    available: mpsc::Sender<()>,
}

#[derive(Default)]
struct QueuedRequests {
    /// `None` where one was taken back.
    requests: VecDeque<Option<RootRequest>>,
    /// The slot of the first.
    first: u64,
    /// The group is to be closed, or has ended.
    closed: bool,
}

impl QueuedRequests {
    /// Puts a request at the end; returns its slot.
    fn put(&mut self, request: RootRequest) -> u64 {
        let number = self.first + self.requests.len() as u64;
        self.requests.push_back(Some(request));
        number
    }

    /// Returns the first request that was not taken back. It is then the first of all.
    fn first(&mut self) -> Option<&RootRequest> {
        while let Some(None) = self.requests.front() {
            self.requests.pop_front();
            self.first += 1;
        }
        self.requests.front()?.as_ref()
    }

    fn take_first(&mut self) -> Option<RootRequest> {
        self.first()?;
        self.first += 1;
        self.requests.pop_front()?
    }

    /// Takes a request out, unless its turn has come.
    fn take_back(&mut self, number: u64) -> Option<RootRequest> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.requests.get_mut(at)?.take()
    }
}

/// The slot of a request. Dropping it before its turn takes the request back.
pub(super) struct QueueSlot {
    waiting: Arc<Mutex<QueuedRequests>>,
    /// `None` if the request stays.
    number: Option<u64>,
}

impl QueueSlot {
    /// Keeps the request in the queue when the slot is dropped.
    pub(super) fn detach(mut self) {
        self.number = None;
    }
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let request = lock(&self.waiting).take_back(number);
        // Its memory is freed when nothing is locked.
        drop(request);
    }
}

impl RequestSender {
    /// Requests that a message is sent; returns `None` if the group has ended. Dropping the slot before its turn takes
    /// the request back.
    pub(super) fn send(
        &self,
        header: Option<(Buffer, Shape)>,
        (message, shape): (QueuedContent, Shape),
        done: oneshot::Sender<SentMessage>,
        progress: Option<ProgressCounter>,
    ) -> Option<QueueSlot> {
        let number = self.put(RootRequest::Send { header, message, shape, done: Some(done), progress })?;
        Some(QueueSlot { waiting: self.waiting.clone(), number: Some(number) })
    }

    /// Requests that the group is closed, after all requests before. It takes no more requests.
    pub(super) fn close(&self) {
        self.put(RootRequest::Close);
    }

    fn put(&self, request: RootRequest) -> Option<u64> {
        let number = {
            let mut waiting = lock(&self.waiting);
            if waiting.closed {
                return None;
            }
            waiting.closed = matches!(request, RootRequest::Close);
            waiting.put(request)
        };
        // Fails only if the queue is to look anyway.
        let _ = self.available.try_send(());
        Some(number)
    }
}

/// Hands requests to the root's engine. Messages that are not begun when the group fails are kept.
pub(super) struct RequestQueue {
    /// Messages of the group that this one continues.
    queued: VecDeque<(Buffer, Shape)>,
    /// The message whose header was taken.
    after_header: Option<RootRequest>,
    waiting: Arc<Mutex<QueuedRequests>>,
    available: mpsc::Receiver<()>,
    /// No more requests can be made.
    ended: bool,
    /// The messages that were taken whole, but have not begun.
    pub(super) starting: VecDeque<(Buffer, Shape)>,
    retained: Arc<RetainedMessages>,
}

impl RequestQueue {
    pub(super) fn new(retained: Arc<RetainedMessages>) -> (RequestSender, Self) {
        let (told, available) = mpsc::channel(1);
        let waiting = Arc::<Mutex<QueuedRequests>>::default();
        let queued = retained.take_queued().into();
        (
            RequestSender { waiting: waiting.clone(), available: told },
            Self { queued, after_header: None, waiting, available, ended: false, starting: VecDeque::new(), retained },
        )
    }

    /// Waits for the next request, or until no more can be made; tells whether it is a message. A message may still be
    /// taken back.
    ///
    /// # Cancel safety
    /// No request is lost.
    pub(super) async fn next_is_message(&mut self) -> bool {
        loop {
            if !self.queued.is_empty() || self.after_header.is_some() {
                return true;
            }
            let first = lock(&self.waiting).first().map(RootRequest::is_message);
            match first {
                Some(is_message) => return is_message,
                None if self.ended => return false,
                None => self.ended = self.available.recv().await.is_none(),
            }
        }
    }

    /// Takes the next request, if there is one.
    pub(super) fn take(&mut self) -> Option<RootRequest> {
        if let Some((message, shape)) = self.queued.pop_front() {
            return Some(RootRequest::whole(message, shape));
        }
        if let Some(request) = self.after_header.take() {
            return Some(request);
        }
        let request = lock(&self.waiting).take_first()?;
        Some(self.header_first(request))
    }

    /// Returns the request for the header of a message, if it has one. The message follows, and is not taken back.
    fn header_first(&mut self, mut request: RootRequest) -> RootRequest {
        if let RootRequest::Send { header, .. } = &mut request
            && let Some((message, shape)) = header.take()
        {
            self.after_header = Some(request);
            return RootRequest::whole(message, shape);
        }
        request
    }

    /// Takes the next request if it is a message, and `suitable`.
    pub(super) fn take_if(&mut self, suitable: impl FnOnce(&Shape) -> bool) -> Option<RootRequest> {
        if let Some((_, shape)) = self.queued.front() {
            return if suitable(shape) { self.take() } else { None };
        }
        if let Some(RootRequest::Send { shape, .. }) = &self.after_header {
            return if suitable(shape) { self.take() } else { None };
        }
        let request = {
            let mut waiting = lock(&self.waiting);
            let RootRequest::Send { header, shape, .. } = waiting.first()? else { return None };
            let shape = header.as_ref().map_or(shape, |(_, shape)| shape);
            if !suitable(shape) {
                return None;
            }
            waiting.take_first()?
        };
        Some(self.header_first(request))
    }

    /// Tells whether no more requests can be made.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
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
        for message in self.starting.drain(..).rev() {
            left.push_front(message);
        }
        for request in self.after_header.take().into_iter().chain(waiting.into_iter().flatten()) {
            if let RootRequest::Send { header, message, shape, .. } = request
                && let Some(message) = message.into_whole()
            {
                left.extend(header.into_iter().chain([(message, shape)]));
            }
        }
        self.retained.queue(left);
    }
}
