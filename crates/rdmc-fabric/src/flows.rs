//! The traffic of a flow: messages of one verb, one after the other, over a queue pair of its own. Measurements of how
//! flows share a network post it.

use std::collections::VecDeque;
use std::fmt;
use std::ops::ControlFlow;
use std::time::Duration;

use crate::completion::CompletionMode;
use crate::fabric::{ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig};
use crate::memory::{Buffer, BufferMut};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion, RemoteAccess, RemoteMemory};
use crate::work::{Operation, Received, WorkError};

/// What a flow posts for each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowVerb {
    /// A send, which takes a receive at the other end.
    Send,
    /// A one-sided write.
    Write,
    /// A one-sided write with an immediate value, which takes a receive without memory at the other end.
    WriteWithImm,
    /// A one-sided read: the bytes come from the other end.
    Read,
}

impl FlowVerb {
    /// Tells whether the other end posts receives.
    pub fn takes_receives(self) -> bool {
        matches!(self, Self::Send | Self::WriteWithImm)
    }
}

/// The messages of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowSpec {
    /// The verb.
    pub verb: FlowVerb,
    /// Bytes of a message.
    pub bytes: usize,
    /// Messages under way at once: 1 or more, and no more than a queue pair of the fabric holds.
    pub in_flight: u32,
    /// Receives that the other end keeps posted, if the verb takes them: 1 or more, and no more than a queue pair of
    /// the fabric holds.
    pub receives: u32,
}

impl FlowSpec {
    /// Returns the bytes of memory at the end that posts the messages. All that are under way come from the same
    /// memory, and each goes to its own.
    pub fn source_bytes(&self) -> u64 {
        let copies = if self.verb == FlowVerb::Read { self.in_flight } else { 1 };
        u64::from(copies) * self.bytes as u64
    }

    /// Returns the bytes of memory at the other end.
    pub fn target_bytes(&self) -> u64 {
        let copies = if self.verb == FlowVerb::Send { self.receives } else { 1 };
        u64::from(copies) * self.bytes as u64
    }
}

/// The end of a flow that posts its messages.
pub struct FlowSource {
    spec: FlowSpec,
    queue_pair: QueuePair,
    /// What is sent or written.
    data: Buffer,
    /// Where reads put what comes.
    rooms: Vec<BufferMut>,
    remote: Option<RemoteMemory>,
}

impl FlowSource {
    /// Creates the end of a flow, with memory that was written to, and a queue pair that is not yet connected.
    ///
    /// # Errors
    /// The system has too little memory, or the device refuses it or a queue pair of this depth.
    pub fn new(fabric: &dyn Fabric, spec: FlowSpec, mode: CompletionMode) -> Result<Self, FabricError> {
        let config = QueuePairConfig { send_depth: spec.in_flight, receive_depth: 1, ..QueuePairConfig::default() };
        let queue_pair = queue_pair(fabric, config, mode)?;
        let (mut data, mut rooms) = (BufferMut::empty(), Vec::new());
        match spec.verb {
            FlowVerb::Read => {
                for _ in 0..spec.in_flight {
                    rooms.push(memory(fabric, spec.bytes)?);
                }
            }
            FlowVerb::Send | FlowVerb::Write | FlowVerb::WriteWithImm => data = memory(fabric, spec.bytes)?,
        }
        Ok(Self { spec, queue_pair, data: data.freeze(), rooms, remote: None })
    }

    /// Returns what the other end needs to connect.
    pub fn endpoint(&self) -> Endpoint {
        self.queue_pair.endpoint()
    }

    /// Connects to the other end, whose [memory](FlowTarget::remote) is `remote`.
    ///
    /// # Cancel safety
    /// If the future is dropped, the queue pair cannot be used any more.
    ///
    /// # Errors
    /// The fabric's, or the verb is one-sided and there is no memory.
    pub async fn connect(&mut self, peer: Peer, remote: Option<RemoteMemory>) -> Result<(), ConnectError> {
        if remote.is_none() && self.spec.verb != FlowVerb::Send {
            return Err(ConnectError::BadEndpoint);
        }
        self.remote = remote;
        self.queue_pair.connect(peer).await
    }

    /// Posts messages one after the other, [so many](FlowSpec::in_flight) at once. For each it tells `done` when the
    /// message was posted and when it was complete, by `clock`, in the order of posting. It posts no more when `done`
    /// says break, and waits for the messages that are under way.
    ///
    /// # Cancel safety
    /// If the future is dropped, messages stay under way, and memory for reads is lost: drop the flow, too.
    ///
    /// # Errors
    /// The queue pair has failed.
    ///
    /// # Panics
    /// If a one-sided flow is not [connected](Self::connect), or an earlier call was dropped.
    pub async fn run(
        &mut self,
        clock: impl Fn() -> u64,
        mut done: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(), WorkError> {
        // They are complete in the order in which they were posted.
        let mut under_way = VecDeque::new();
        let mut goes_on = true;
        loop {
            while goes_on && under_way.len() < self.spec.in_flight as usize {
                under_way.push_back((clock(), self.post()));
            }
            let Some((posted, message)) = under_way.pop_front() else { return Ok(()) };
            match message {
                Message::Out(operation) => operation.await?,
                Message::In(operation) => self.rooms.push(operation.await?),
            }
            goes_on = done(posted, clock()).is_continue() && goes_on;
        }
    }

    fn post(&mut self) -> Message {
        let remote = || self.remote.expect("a flow is connected before it runs");
        match self.spec.verb {
            FlowVerb::Send => Message::Out(self.queue_pair.send(self.data.clone(), None)),
            FlowVerb::Write => Message::Out(self.queue_pair.write(self.data.clone(), remote(), None)),
            FlowVerb::WriteWithImm => Message::Out(self.queue_pair.write(self.data.clone(), remote(), Some(1))),
            FlowVerb::Read => {
                let room = self.rooms.pop().expect("each read that is under way has its own");
                Message::In(self.queue_pair.read(room, remote()))
            }
        }
    }
}

impl fmt::Debug for FlowSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowSource").field("spec", &self.spec).finish_non_exhaustive()
    }
}

enum Message {
    Out(Operation<()>),
    In(Operation<BufferMut>),
}

/// The other end of a flow.
pub struct FlowTarget {
    queue_pair: QueuePair,
    exposed: Option<ExposedRegion>,
    receives: VecDeque<Operation<Received>>,
}

impl FlowTarget {
    /// Creates the end of a flow, with memory that was written to, and a queue pair that is not yet connected. Its
    /// receives are posted.
    ///
    /// # Errors
    /// As [`FlowSource::new`].
    pub fn new(fabric: &dyn Fabric, spec: FlowSpec, mode: CompletionMode) -> Result<Self, FabricError> {
        let config = QueuePairConfig {
            send_depth: 1,
            receive_depth: spec.receives,
            receiver_not_ready: RECEIVE_LIMIT,
            ..QueuePairConfig::default()
        };
        let queue_pair = queue_pair(fabric, config, mode)?;
        let access = if spec.verb == FlowVerb::Read { RemoteAccess::READ } else { RemoteAccess::WRITE };
        let exposed = match spec.verb {
            FlowVerb::Send => None,
            _ => Some(fabric.expose(Expose::Mutable(memory(fabric, spec.bytes)?, access))?),
        };
        let mut receives = VecDeque::new();
        if spec.verb.takes_receives() {
            for _ in 0..spec.receives {
                let room = if spec.verb == FlowVerb::Send { memory(fabric, spec.bytes)? } else { BufferMut::empty() };
                receives.push_back(queue_pair.receive(room));
            }
        }
        Ok(Self { queue_pair, exposed, receives })
    }

    /// Returns what the other end needs to connect.
    pub fn endpoint(&self) -> Endpoint {
        self.queue_pair.endpoint()
    }

    /// Returns the memory that one-sided verbs reach; `None` for sends.
    pub fn remote(&self) -> Option<RemoteMemory> {
        self.exposed.as_ref().map(ExposedRegion::remote)
    }

    /// Connects to the other end.
    ///
    /// # Cancel safety
    /// If the future is dropped, the queue pair cannot be used any more.
    ///
    /// # Errors
    /// The fabric's.
    pub async fn connect(&self, peer: Peer) -> Result<(), ConnectError> {
        self.queue_pair.connect(peer).await
    }

    /// Takes messages and posts their receives again, until the queue pair fails. For verbs that take no receives it
    /// waits for ever; memory stays open meanwhile.
    ///
    /// # Cancel safety
    /// If the future is dropped, the flow ends.
    pub async fn run(mut self) -> WorkError {
        while let Some(receive) = self.receives.pop_front() {
            match receive.await {
                Ok(received) => self.receives.push_back(self.queue_pair.receive(received.buffer)),
                Err(error) => return error,
            }
        }
        std::future::pending().await
    }
}

impl fmt::Debug for FlowTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowTarget").field("receives", &self.receives.len()).finish_non_exhaustive()
    }
}

/// How long a message waits for a receive: an end may not get a processor for a while.
const RECEIVE_LIMIT: Duration = Duration::from_secs(4);

fn queue_pair(fabric: &dyn Fabric, config: QueuePairConfig, mode: CompletionMode) -> Result<QueuePair, FabricError> {
    let queue = fabric.create_completion_queue(config.requests_max(), mode)?;
    let source = queue.source();
    fabric.environment().spawn(Box::pin(queue.drain()));
    fabric.create_queue_pair(&source, config)
}

/// Allocates memory and writes to it: pages that nobody has written to may all be the same one.
fn memory(fabric: &dyn Fabric, len: usize) -> Result<BufferMut, FabricError> {
    let mut memory = fabric.allocate(len)?.into_mut().unwrap_or_else(|_| unreachable!("what is allocated is writable"));
    memory.fill(0xa5);
    Ok(memory)
}
