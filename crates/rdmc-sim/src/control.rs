//! Control connections: byte streams with latency and loss that can stall and break.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{ControlListener, ControlStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;

use crate::simulation::{NodeIndex, lock};
use crate::world::WorldShared;

/// The listeners and streams of a world.
#[derive(Default)]
pub(crate) struct Control {
    listeners: Mutex<BTreeMap<String, Listening>>,
    pipes: Mutex<Vec<Weak<Pipe>>>,
    next_port: Mutex<u32>,
}

struct Listening {
    node: NodeIndex,
    arrived: mpsc::UnboundedSender<SimStream>,
}

impl Control {
    /// Listens at an address of a node.
    pub(crate) fn listen(
        world: &Arc<WorldShared>,
        node: NodeIndex,
        address: &str,
    ) -> io::Result<Box<dyn ControlListener>> {
        let this = &world.control;
        let address = match address.strip_suffix(":0") {
            Some(host) => {
                let mut next = lock(&this.next_port);
                *next += 1;
                format!("{host}:{next}")
            }
            None => address.to_owned(),
        };
        let mut listeners = lock(&this.listeners);
        if listeners.get(&address).is_some_and(|listening| !listening.arrived.is_closed()) {
            let text = format!("a node of this world listens at {address}");
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let (arrived, incoming) = mpsc::unbounded_channel();
        listeners.insert(address.clone(), Listening { node, arrived });
        Ok(Box::new(SimListener { incoming, address, node, world: Arc::downgrade(world) }))
    }

    /// Opens a connection from a node to the listener at an address.
    pub(crate) async fn connect(
        world: Arc<WorldShared>,
        from: NodeIndex,
        address: String,
    ) -> io::Result<Box<dyn ControlStream>> {
        let refused = || io::Error::new(io::ErrorKind::ConnectionRefused, format!("no node listens at {address}"));
        let latency_ns = world.model.control.latency_ns;
        world.begin_operation(from);
        loop {
            let listening = lock(&world.control.listeners).get(&address).map(|it| (it.node, it.arrived.clone()));
            let reaches = listening.as_ref().is_none_or(|(node, _)| world.reach_each_other(from, *node));
            if !reaches {
                sleep(&world, world.model.control.resend_ns).await;
                continue;
            }
            sleep(&world, latency_ns).await;
            let Some((to, arrived)) = listening.filter(|(node, _)| world.is_alive(*node)) else {
                return Err(refused());
            };
            let (there, back) = (Pipe::new(&world, from, to), Pipe::new(&world, to, from));
            let round_trip = Duration::from_nanos(2 * latency_ns);
            let far = SimStream { incoming: there.clone(), outgoing: back.clone(), round_trip };
            let near = SimStream { incoming: back, outgoing: there, round_trip };
            if arrived.send(far).is_err() {
                return Err(refused());
            }
            sleep(&world, latency_ns).await;
            return Ok(Box::new(near));
        }
    }

    /// Injects a fault into the next write on each connection from one node to another.
    pub(crate) fn inject(&self, from: NodeIndex, to: NodeIndex, fault: ControlFault) {
        for pipe in self.pipes_that(|pipe| (pipe.from, pipe.to) == (from, to)) {
            lock(&pipe.state).fault = Some(fault);
        }
    }

    pub(crate) fn pipes_of(&self, node: NodeIndex) -> Vec<Arc<Pipe>> {
        self.pipes_that(|pipe| pipe.from == node || pipe.to == node)
    }

    pub(crate) fn pipes_between(&self, a: NodeIndex, b: NodeIndex) -> Vec<Arc<Pipe>> {
        self.pipes_that(|pipe| (pipe.from, pipe.to) == (a, b) || (pipe.from, pipe.to) == (b, a))
    }

    fn pipes_that(&self, wanted: impl Fn(&Pipe) -> bool) -> Vec<Arc<Pipe>> {
        let mut pipes = lock(&self.pipes);
        pipes.retain(|pipe| pipe.strong_count() > 0);
        pipes.iter().filter_map(Weak::upgrade).filter(|pipe| wanted(pipe)).collect()
    }
}

async fn sleep(world: &WorldShared, duration_ns: u64) {
    let at_ns = world.executor.now_ns().saturating_add(duration_ns);
    world.executor.sleep_until(rdmc_fabric::Timestamp::from_nanos(at_ns)).await;
}

struct SimListener {
    incoming: mpsc::UnboundedReceiver<SimStream>,
    address: String,
    node: NodeIndex,
    world: Weak<WorldShared>,
}

impl ControlListener for SimListener {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        Box::pin(async move {
            match self.incoming.recv().await {
                Some(stream) => {
                    if let Some(world) = self.world.upgrade() {
                        world.begin_operation(self.node);
                    }
                    Ok(Box::new(stream) as Box<dyn ControlStream>)
                }
                None => Err(io::Error::other("the world has ended")),
            }
        })
    }

    fn local_address(&self) -> String {
        self.address.clone()
    }
}

/// A fault of bytes on a control connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ControlFault {
    /// Only the first `bytes` arrive, and the connection breaks.
    Truncate { bytes: usize },
    /// This bit flips.
    Garble { bit: usize },
}

impl ControlFault {
    /// Applies the fault to a segment that is not empty.
    fn apply(self, segment: &mut Vec<u8>) {
        let len = segment.len();
        match self {
            Self::Truncate { bytes } => segment.truncate(bytes.min(len - 1)),
            Self::Garble { bit } => segment[bit / 8 % len] ^= 1 << (bit % 8),
        }
    }
}

/// One direction of a control connection.
pub(crate) struct Pipe {
    from: NodeIndex,
    to: NodeIndex,
    world: Weak<WorldShared>,
    state: Mutex<PipeState>,
}

#[derive(Default)]
struct PipeState {
    /// Bytes that have arrived.
    readable: VecDeque<u8>,
    /// Segments in flight with their arrival times, in order; an empty segment marks the end.
    in_flight: VecDeque<(u64, Vec<u8>)>,
    /// Bytes readable or in flight.
    held: usize,
    ended: bool,
    reset: bool,
    /// Reset during a cut: the ends learn it when the cut is healed.
    resets_later: bool,
    reader_gone: bool,
    /// The fault of the next write.
    fault: Option<ControlFault>,
    /// Number of cuts and healings of the path.
    changes: u64,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn new(world: &Arc<WorldShared>, from: NodeIndex, to: NodeIndex) -> Arc<Self> {
        let pipe = Arc::new(Self { from, to, world: Arc::downgrade(world), state: Mutex::default() });
        let mut pipes = lock(&world.control.pipes);
        if pipes.len() == pipes.capacity() {
            pipes.retain(|pipe| pipe.strong_count() > 0);
        }
        pipes.push(Arc::downgrade(&pipe));
        pipe
    }

    /// Sends a segment.
    fn launch(self: &Arc<Self>, state: &mut PipeState, segment: Vec<u8>) {
        let Some(world) = self.world.upgrade() else { return };
        let model = &world.model.control;
        let lost = model.loss > 0.0 && lock(&world.random).chance(model.loss);
        let delay_ns = model.latency_ns + if lost { model.resend_ns } else { 0 };
        let at_ns = world.executor.now_ns() + delay_ns;
        // Segments behind a lost one wait for its retransmission.
        let at_ns = state.in_flight.back().map_or(at_ns, |(last, _)| at_ns.max(*last));
        let nodes = u64::from(self.from.0) << 32 | u64::from(self.to.0);
        lock(&world.log).note("control", [nodes, segment.len() as u64, at_ns]);
        state.held += segment.len();
        state.in_flight.push_back((at_ns, segment));
        let pipe = self.clone();
        world.executor.call_at(at_ns, move || pipe.arrive());
    }

    /// Delivers the segments that have arrived by now, unless the path is cut.
    fn arrive(&self) {
        let Some(world) = self.world.upgrade() else { return };
        if !world.reaches(self.from, self.to) {
            return;
        }
        let now_ns = world.executor.now_ns();
        let waker = {
            let mut state = lock(&self.state);
            let state = &mut *state;
            while state.in_flight.front().is_some_and(|(at_ns, _)| *at_ns <= now_ns) {
                let (_, segment) = state.in_flight.pop_front().expect("there is a front");
                state.ended |= segment.is_empty();
                state.readable.extend(segment);
            }
            state.reader.take()
        };
        wake(waker);
    }

    /// Breaks the connection at `at_ns` if the path is still cut then.
    pub(crate) fn stall(self: &Arc<Self>, at_ns: u64) {
        let Some(world) = self.world.upgrade() else { return };
        let changes = {
            let mut state = lock(&self.state);
            state.changes += 1;
            state.changes
        };
        let pipe = self.clone();
        world.executor.call_at(at_ns, move || {
            if lock(&pipe.state).changes == changes {
                pipe.reset_now();
            }
        });
    }

    /// Retransmits the segments that were in flight when the path was cut.
    pub(crate) fn resume(self: &Arc<Self>) {
        let Some(world) = self.world.upgrade() else { return };
        let at_ns = world.executor.now_ns() + world.model.control.resend_ns;
        {
            let mut state = lock(&self.state);
            state.changes += 1;
            for (due_ns, _) in &mut state.in_flight {
                *due_ns = at_ns.max(*due_ns);
            }
        }
        let pipe = self.clone();
        world.executor.call_at(at_ns, move || {
            pipe.arrive();
            if lock(&pipe.state).resets_later {
                pipe.reset();
            }
        });
    }

    /// Breaks the connection; both ends learn it one latency later.
    pub(crate) fn reset(self: &Arc<Self>) {
        let Some(world) = self.world.upgrade() else { return };
        let cut = !world.reach_each_other(self.from, self.to);
        lock(&self.state).resets_later = cut;
        if cut {
            return;
        }
        let pipe = self.clone();
        world.executor.call_at(world.executor.now_ns() + world.model.control.latency_ns, move || pipe.reset_now());
    }

    /// Breaks the connections between its two nodes.
    fn reset_all(&self) {
        let Some(world) = self.world.upgrade() else { return };
        world.control.pipes_between(self.from, self.to).iter().for_each(Self::reset);
    }

    /// Counts an operation at one of its ends; returns whether that node is alive.
    fn begin_operation(&self, node: NodeIndex) -> bool {
        self.world.upgrade().is_some_and(|world| world.begin_operation(node))
    }

    fn is_cut(&self) -> bool {
        self.world.upgrade().is_some_and(|world| !world.reach_each_other(self.from, self.to))
    }

    fn reset_now(&self) {
        let (reader, writer) = {
            let mut state = lock(&self.state);
            state.reset = true;
            (state.reader.take(), state.writer.take())
        };
        wake(reader);
        wake(writer);
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// One end of a control connection.
struct SimStream {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
    round_trip: Duration,
}

impl ControlStream for SimStream {
    fn peer_address(&self) -> Option<IpAddr> {
        None
    }

    fn round_trip(&self) -> Option<Duration> {
        Some(self.round_trip)
    }
}

impl AsyncRead for SimStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let arrived = !lock(&self.incoming.state).readable.is_empty();
        if arrived && !self.incoming.begin_operation(self.incoming.to) {
            return Poll::Pending;
        }
        let writer = {
            let mut state = lock(&self.incoming.state);
            if state.readable.is_empty() {
                if state.reset {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
                }
                if state.ended {
                    return Poll::Ready(Ok(()));
                }
                state.reader = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let len = buf.remaining().min(state.readable.len());
            for byte in state.readable.drain(..len) {
                buf.put_slice(&[byte]);
            }
            if state.readable.is_empty() {
                // Frees the buffer: a cluster of hundreds has hundreds of thousands of streams, most of them idle.
                state.readable = VecDeque::new();
            }
            state.held -= len;
            state.writer.take()
        };
        wake(writer);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let outgoing = &self.outgoing;
        let fits = |state: &PipeState| buf.len().min(WINDOW.saturating_sub(state.held));
        let goes = {
            let state = lock(&outgoing.state);
            !state.reset && !state.reader_gone && fits(&state) > 0
        };
        if goes && !outgoing.begin_operation(outgoing.from) {
            return Poll::Pending;
        }
        let mut state = lock(&outgoing.state);
        if state.reset {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        // An unreachable host cannot report that its reader is gone.
        if state.reader_gone && !outgoing.is_cut() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let len = fits(&state);
        if len == 0 && !buf.is_empty() {
            state.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if len == 0 {
            return Poll::Ready(Ok(0));
        }
        let (mut segment, fault) = (buf[..len].to_vec(), state.fault.take());
        if let Some(fault) = fault {
            fault.apply(&mut segment);
        }
        // An empty segment would mark the end.
        if !segment.is_empty() {
            outgoing.launch(&mut state, segment);
        }
        drop(state);
        if let Some(ControlFault::Truncate { .. }) = fault {
            outgoing.reset_all();
        }
        Poll::Ready(Ok(len))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.outgoing.begin_operation(self.outgoing.from) {
            return Poll::Pending;
        }
        let mut state = lock(&self.outgoing.state);
        self.outgoing.launch(&mut state, Vec::new());
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        {
            let mut state = lock(&self.outgoing.state);
            self.outgoing.launch(&mut state, Vec::new());
        }
        let writer = {
            let mut state = lock(&self.incoming.state);
            state.reader_gone = true;
            state.writer.take()
        };
        wake(writer);
    }
}

/// Limit of bytes in flight or readable in one direction.
const WINDOW: usize = 64 << 10;
