//! The root's side of a group.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{Buffer, BufferMut, Memory};
use tokio::sync::{mpsc, oneshot};

use super::{Formed, Grants, Group, GroupSpec, form, start, take_grants};
use crate::certificate::Certificate;
use crate::failure::{FailureCause, GroupError, GroupFailure, SendError};
use crate::node::{NodeId, NodeShared};
use crate::stats::GroupStats;
use crate::transfer::{Blocks, Shape, Transfer, Trouble, Turnstile};

/// The root's handle of a group: sends messages to all members.
///
/// Dropping it without [`close`](Self::close) abandons the group: messages that were begun are completed here, then
/// the members learn that the root has left.
pub struct Sender {
    group: Arc<Group>,
    requests: mpsc::Sender<Request>,
}

/// What can be sent: pool memory, `Bytes` or a mapped file, all without a copy on fabrics that register cheaply.
#[derive(Debug)]
#[non_exhaustive]
pub enum Payload {
    /// Registered memory.
    Buffer(Buffer),
    /// Memory still to be registered, such as a mapped file.
    Memory(Memory),
}

impl From<Buffer> for Payload {
    fn from(buffer: Buffer) -> Self {
        Self::Buffer(buffer)
    }
}

impl From<BufferMut> for Payload {
    fn from(buffer: BufferMut) -> Self {
        Self::Buffer(buffer.freeze())
    }
}

impl From<Memory> for Payload {
    fn from(memory: Memory) -> Self {
        Self::Memory(memory)
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self::Memory(bytes.into())
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Memory(bytes.into())
    }
}

impl From<&'static [u8]> for Payload {
    fn from(bytes: &'static [u8]) -> Self {
        Bytes::from_static(bytes).into()
    }
}

impl From<&'static str> for Payload {
    fn from(text: &'static str) -> Self {
        text.as_bytes().into()
    }
}

enum Request {
    Send { message: Buffer, shape: Shape, done: oneshot::Sender<()> },
    Close,
}

pub(crate) async fn create(node: Arc<NodeShared>, spec: GroupSpec) -> Result<Sender, GroupError> {
    let Formed { group, events, grants } = form(node, spec, true).await?;
    let (requests, queue) = mpsc::channel(REQUESTS_MAX);
    start(group.clone(), events, run(group.clone(), queue, grants));
    Ok(Sender { group, requests })
}

impl Sender {
    /// Sends a message to every member; the future is that of its transfer.
    ///
    /// It completes when the memory is no longer needed here, although some members may still receive from others
    /// (DSN §4.6); [`close`](Self::close) tells when everybody has everything. Several may be under way; they are
    /// carried out and completed in the order in which the futures were first polled. Few wait in a queue, so
    /// that sending faster than the network waits here.
    ///
    /// # Cancel safety
    /// Dropped before it is polled or before its turn comes, nothing is sent. Dropped later, the message is
    /// sent all the same.
    ///
    /// # Errors
    /// [`SendError::Failed`] if the group fails, before or meanwhile.
    pub fn send(&self, payload: impl Into<Payload>) -> Multicast {
        let payload = payload.into();
        let (group, requests) = (self.group.clone(), self.requests.clone());
        Multicast(
            async move {
                let message = match payload {
                    Payload::Buffer(buffer) => buffer,
                    Payload::Memory(memory) => group.node().fabric.register(memory)?.into_shared(),
                };
                let size = message.len() as u64;
                let block_size = group.block_size();
                let shape =
                    Shape::new(size, block_size).ok_or(SendError::TooManyBlocks { size, block_size, max: u32::MAX })?;
                let (done, completed) = oneshot::channel();
                let request = Request::Send { message, shape, done };
                if requests.send(request).await.is_err() || completed.await.is_err() {
                    return Err(group.ended().await.err().map_or(SendError::Closed, SendError::Failed));
                }
                Ok(())
            }
            .boxed(),
        )
    }

    /// Closes the group: `Ok` if and only if every message reached every member and every member agrees to the end, which
    /// the certificate says.
    ///
    /// # Cancel safety
    /// Dropped before it is polled, the group is abandoned; later, it is closed all the same.
    ///
    /// # Errors
    /// The group's failure, with what did and did not arrive, if it failed before everybody had everything.
    pub async fn close(self) -> Result<Certificate, GroupFailure> {
        // Behind what was sent before. By a task if it has to wait, so that the group is closed if this future is dropped.
        if let Err(mpsc::error::TrySendError::Full(close)) = self.requests.try_send(Request::Close) {
            let requests = self.requests.clone();
            let environment = self.group.node().environment.clone();
            environment.spawn(Box::pin(async move {
                let _ = requests.send(close).await;
            }));
        }
        self.group.ended().await
    }

    /// Waits until the group fails, which may be never.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn failed(&self) -> GroupFailure {
        self.group.failed().await
    }

    /// Returns the members in rank order; the first is this node.
    pub fn members(&self) -> &[NodeId] {
        &self.group.members
    }

    /// Returns what happened so far.
    pub fn stats(&self) -> GroupStats {
        self.group.stats()
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("group", &self.group.id).finish_non_exhaustive()
    }
}

/// The future of one multicast, made by [`Sender::send`].
#[must_use = "nothing is sent unless it is polled"]
pub struct Multicast(BoxFuture<'static, Result<(), SendError>>);

impl Future for Multicast {
    type Output = Result<(), SendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_unpin(cx)
    }
}

impl fmt::Debug for Multicast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Multicast").finish_non_exhaustive()
    }
}

/// The root's engine: carries out requests in order until the group is closed.
async fn run(group: Arc<Group>, mut queue: mpsc::Receiver<Request>, grants: Grants) -> Result<(), Trouble> {
    let mut grants = take_grants(&group, grants);
    let mut running = FuturesUnordered::new();
    let mut completed = InOrder::default();
    let mut relay_turns = Turnstile::default();
    let mut receive_turns = Turnstile::default();
    let mut messages = 0;
    let close = loop {
        let room = running.len() < TRANSFERS_MAX;
        futures::select_biased! {
            trouble = grants.select_next_some() => return Err(trouble),
            outcome = running.select_next_some() => completed.add(outcome)?,
            request = next_request(&mut queue, room).fuse() => match request {
                Some(Request::Send { done, .. }) if done.is_closed() => {}
                Some(Request::Send { message, shape, done }) => {
                    group.begin_whole(shape.size).await;
                    let blocks = Blocks::whole_message(shape, message);
                    let transfer = Transfer::new(group.clone(), messages, shape, blocks, None);
                    let (receive_turn, relay_turn) = (receive_turns.next(), relay_turns.next());
                    let number = messages;
                    running.push(async move {
                        transfer.run(None, receive_turn, relay_turn).await?;
                        Ok((number, done))
                    });
                    messages += 1;
                }
                Some(Request::Close) => break true,
                None => break false,
            },
        }
    };
    while !running.is_empty() {
        futures::select_biased! {
            trouble = grants.select_next_some() => return Err(trouble),
            outcome = running.select_next_some() => completed.add(outcome)?,
        }
    }
    if !close {
        return Err(Trouble::Own(FailureCause::Abandoned));
    }
    group.close(messages);
    Ok(())
}

/// Tells whoever waits that a message is sent, in the order of the messages.
#[derive(Default)]
struct InOrder {
    next: u64,
    early: BTreeMap<u64, oneshot::Sender<()>>,
}

impl InOrder {
    fn add(&mut self, outcome: Result<(u64, oneshot::Sender<()>), Trouble>) -> Result<(), Trouble> {
        let (number, done) = outcome?;
        self.early.insert(number, done);
        while let Some(done) = self.early.remove(&self.next) {
            self.next += 1;
            // Nobody may wait any more.
            let _ = done.send(());
        }
        Ok(())
    }
}

async fn next_request(queue: &mut mpsc::Receiver<Request>, room: bool) -> Option<Request> {
    if room { queue.recv().await } else { std::future::pending().await }
}

/// Requests that wait for their turn.
const REQUESTS_MAX: usize = 16;
/// Messages under way at once.
const TRANSFERS_MAX: usize = 4;
