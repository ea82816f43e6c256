//! What the root is asked to send, in the order in which it is asked.
//!
//! A request gets its place when it is made, not when the task that makes it has its next turn: a bounded channel of
//! Tokio has those who wait for room take turns with all other work of their tasks, and loses their order. So there is no limit
//! to what waits: each request is held by a future of the caller's, or by a [`BatchSender`](crate::BatchSender), which makes two.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use rdmc_fabric::Buffer;
use tokio::sync::{mpsc, oneshot};

use super::retained::Retained;
use crate::sync::lock;
use crate::transfer::{Blocks, Shape};

pub(super) enum Request {
    Send { message: Buffer, shape: Shape, done: Option<oneshot::Sender<()>> },
    Close,
}

/// Where requests are made. When all are gone, there are no more requests.
#[derive(Clone)]
pub(super) struct Requests {
    waiting: Arc<Mutex<Waiting>>,
    news: mpsc::Sender<()>,
}

#[derive(Default)]
struct Waiting {
    /// By their places.
    requests: BTreeMap<u64, Request>,
    next: u64,
    /// The group has ended.
    closed: bool,
}

/// The place of a request. Dropped before its turn comes, it takes the request back.
pub(super) struct Place {
    waiting: Arc<Mutex<Waiting>>,
    /// None if the request stands.
    number: Option<u64>,
}

impl Place {
    /// Lets the request stand, whatever becomes of this.
    pub(super) fn stand(mut self) {
        self.number = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let request = lock(&self.waiting).requests.remove(&number);
        // Its memory goes when nothing is locked.
        drop(request);
    }
}

impl Requests {
    /// Asks for a message to be sent, unless the group has ended. It is not, if what is returned is dropped before its turn.
    pub(super) fn send(&self, message: Buffer, shape: Shape, done: oneshot::Sender<()>) -> Option<Place> {
        let number = self.put(Request::Send { message, shape, done: Some(done) })?;
        Some(Place { waiting: self.waiting.clone(), number: Some(number) })
    }

    /// Asks for the group to be closed, after what was asked for before.
    pub(super) fn close(&self) {
        self.put(Request::Close);
    }

    fn put(&self, request: Request) -> Option<u64> {
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
        // There may be news already that nobody has looked at.
        let _ = self.news.try_send(());
        Some(number)
    }
}

/// Where the root's engine takes them. What is not begun when the group fails is kept.
pub(super) struct Queue {
    /// From the group that this one continues.
    queued: VecDeque<(Buffer, Shape)>,
    waiting: Arc<Mutex<Waiting>>,
    news: mpsc::Receiver<()>,
    /// Taken, but not begun.
    pub(super) in_hand: Option<Arc<Blocks>>,
    retained: Arc<Retained>,
}

impl Queue {
    pub(super) fn new(retained: Arc<Retained>) -> (Requests, Self) {
        let (told, news) = mpsc::channel(1);
        let waiting = Arc::<Mutex<Waiting>>::default();
        let queued = retained.take_queued().into();
        (Requests { waiting: waiting.clone(), news: told }, Self { queued, waiting, news, in_hand: None, retained })
    }

    /// Waits for the next request; none when nobody can make any more.
    ///
    /// # Cancel safety
    /// No request is lost.
    pub(super) async fn next(&mut self) -> Option<Request> {
        if let Some((message, shape)) = self.queued.pop_front() {
            return Some(Request::Send { message, shape, done: None });
        }
        loop {
            if let Some(request) = self.first() {
                return Some(request);
            }
            if self.news.recv().await.is_none() {
                return self.first();
            }
        }
    }

    fn first(&self) -> Option<Request> {
        lock(&self.waiting).requests.pop_first().map(|(_, request)| request)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let waiting = {
            let mut waiting = lock(&self.waiting);
            waiting.closed = true;
            std::mem::take(&mut waiting.requests)
        };
        let mut left = std::mem::take(&mut self.queued);
        if let Some(blocks) = self.in_hand.take() {
            left.push_front((blocks.whole(), blocks.shape()));
        }
        left.extend(waiting.into_values().filter_map(|request| match request {
            Request::Send { message, shape, .. } => Some((message, shape)),
            Request::Close => None,
        }));
        self.retained.queue(left);
    }
}
