//! One flow: its socket, and how many of its bytes may be where.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::note::{FlowNumber, RefusedReason, Violation};
use super::socket::Socket;
use crate::sync::lock;

/// One end of a flow.
///
/// If it is dropped before both directions have ended, its socket is reset.
pub(super) struct Flow {
    pub(super) number: FlowNumber,
    socket: OnceLock<Socket>,
    state: Mutex<FlowState>,
    /// Changes with the state.
    changed: watch::Sender<()>,
    memory: Arc<WindowMemory>,
}

/// What becomes of a flow.
#[derive(Debug)]
pub(super) struct FlowState {
    /// Bytes that this end may still send.
    credit: u64,
    /// Whether the flow waits for its turn in a slab.
    queued: bool,
    /// The socket has no more bytes.
    read_ended: bool,
    /// Bytes of the other end that the socket has not taken.
    unwritten: VecDeque<u8>,
    /// Whether bytes may be written into the socket as they arrive.
    begun: bool,
    /// The other end has no more bytes.
    finished: bool,
    window: Window,
    /// What the exit says of a flow.
    answer: Option<Result<(), RefusedReason>>,
    over: Option<Over>,
}

/// How a flow ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Both directions have ended.
    Complete,
    /// Its socket is broken.
    Broken,
    /// The other end has reset or refused it, or the session has ended.
    Ended,
}

/// What was read from a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    Bytes(usize),
    /// The direction has ended.
    End,
    /// Nothing is there, or nothing may be sent.
    Nothing,
}

/// The bytes that the other end may have on the way, or in this end's memory.
#[derive(Debug)]
struct Window {
    len: u64,
    /// Bytes that the other end may still send.
    granted: u64,
    /// Bytes that the socket has taken, and that were not yet granted anew.
    to_grant: u64,
    grant_queued: bool,
    /// Bytes that the socket has taken in this round trip.
    passed: u64,
    /// Bytes that the socket has taken in the round trip before.
    passed_before: u64,
    began: Instant,
}

impl Flow {
    pub(super) fn new(number: FlowNumber, memory: Arc<WindowMemory>) -> Self {
        let window = Window {
            len: CREDIT_FIRST,
            granted: CREDIT_FIRST,
            to_grant: 0,
            grant_queued: false,
            passed: 0,
            passed_before: 0,
            began: Instant::now(),
        };
        let state = FlowState {
            credit: CREDIT_FIRST,
            queued: false,
            read_ended: false,
            unwritten: VecDeque::new(),
            begun: false,
            finished: false,
            window,
            answer: None,
            over: None,
        };
        Self { number, socket: OnceLock::new(), state: Mutex::new(state), changed: watch::Sender::new(()), memory }
    }

    /// Gives the flow its socket.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn connect(&self, socket: Socket) -> io::Result<()> {
        socket.prepare()?;
        assert!(self.socket.set(socket).is_ok(), "a flow has one socket");
        Ok(())
    }

    pub(super) fn socket(&self) -> &Socket {
        self.socket.get().expect("the flow is connected")
    }

    /// Lets bytes into the socket.
    pub(super) fn begin(&self) {
        self.change(|state| state.begun = true);
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut FlowState) -> T) -> T {
        let value = change(&mut lock(&self.state));
        self.changed.send_replace(());
        value
    }

    async fn until<T>(&self, mut look: impl FnMut(&FlowState) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(value) = look(&lock(&self.state)) {
                return value;
            }
            changed.changed().await.expect("the flow lives as long as this future");
        }
    }

    /// Waits until the flow is over before both directions have ended.
    pub(super) async fn over(&self) -> Over {
        self.until(|state| state.over).await
    }

    /// Waits for what the exit says.
    pub(super) async fn answered(&self) -> Result<(), RefusedReason> {
        self.until(|state| state.answer.or(state.over.map(|_| Err(RefusedReason::Closing)))).await
    }
}

/// From the socket to the session.
impl Flow {
    /// Waits until the socket has bytes, or its end, and some of them may be sent.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.until(|state| (state.credit > 0).then_some(())).await;
        self.socket().readable().await
    }

    /// Notes that the flow waits for its turn.
    pub(super) fn queue(&self) {
        lock(&self.state).queued = true;
    }

    /// Notes that the flow has had its turn, and that nothing more is there.
    pub(super) fn release(&self) {
        self.change(|state| state.queued = false);
    }

    /// Waits for the end of its turn; tells whether the direction has ended.
    pub(super) async fn turned(&self) -> bool {
        self.until(|state| (!state.queued).then_some(state.read_ended)).await
    }

    /// Reads what is there and may be sent.
    pub(super) fn read(&self, into: &mut [u8]) -> Read {
        let mut state = lock(&self.state);
        let len = usize::try_from(state.credit).unwrap_or(usize::MAX).min(into.len());
        if len == 0 || state.over.is_some() {
            return Read::Nothing;
        }
        match self.socket().try_read(&mut into[..len]) {
            Ok(0) => {
                state.read_ended = true;
                Read::End
            }
            Ok(len) => {
                state.credit -= len as u64;
                Read::Bytes(len)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Read::Nothing,
            Err(_) => {
                state.over.get_or_insert(Over::Broken);
                Read::Nothing
            }
        }
    }

    /// Adds to what may be sent.
    pub(super) fn add_credit(&self, bytes: u64) -> Result<(), Violation> {
        self.change(|state| {
            state.credit = state.credit.checked_add(bytes).ok_or(Violation("more credit than can be counted"))?;
            Ok(())
        })
    }
}

/// From the session to the socket.
impl Flow {
    /// Gives bytes to the socket, and keeps what it does not take. Returns whether a grant is due.
    pub(super) fn deliver(&self, bytes: &[u8]) -> Result<bool, Violation> {
        let mut state = lock(&self.state);
        if state.over.is_some() {
            return Ok(false);
        }
        if state.finished {
            return Err(Violation("bytes after the end of a flow"));
        }
        let granted = state.window.granted.checked_sub(bytes.len() as u64);
        state.window.granted = granted.ok_or(Violation("more bytes of a flow than were granted"))?;
        let mut rest = bytes;
        if state.begun && state.unwritten.is_empty() {
            rest = &bytes[self.write(&mut state, bytes)..];
        }
        if !rest.is_empty() {
            state.unwritten.extend(rest);
        }
        let due = state.window.note_passed((bytes.len() - rest.len()) as u64, &self.memory);
        drop(state);
        self.changed.send_replace(());
        Ok(due)
    }

    /// Writes what is kept, as far as the socket takes it. Returns whether a grant is due.
    pub(super) fn write_kept(&self) -> bool {
        let mut state = lock(&self.state);
        let mut kept = std::mem::take(&mut state.unwritten);
        let mut passed = 0;
        while !kept.is_empty() && passed < WRITTEN_AT_ONCE as u64 {
            let front = kept.as_slices().0;
            let len = self.write(&mut state, &front[..front.len().min(WRITTEN_AT_ONCE)]);
            if len == 0 {
                break;
            }
            kept.drain(..len);
            passed += len as u64;
        }
        if kept.is_empty() {
            // Idle flows keep no memory.
            kept = VecDeque::new();
        }
        state.unwritten = kept;
        let due = state.window.note_passed(passed, &self.memory);
        drop(state);
        self.changed.send_replace(());
        due
    }

    /// Writes some bytes without waiting; returns how many.
    fn write(&self, state: &mut FlowState, bytes: &[u8]) -> usize {
        let mut written = 0;
        while written < bytes.len() {
            match self.socket().try_write(&bytes[written..]) {
                Ok(0) => break,
                Ok(len) => written += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    state.over.get_or_insert(Over::Broken);
                    break;
                }
            }
        }
        written
    }

    /// Waits until bytes are kept and the socket takes some, or until the direction has ended: then it returns `false`.
    pub(super) async fn writable(&self) -> io::Result<bool> {
        let has_bytes = self.until(|state| match state.unwritten.is_empty() {
            // A socket that is broken counts as writable: the flow's task is about to end it.
            _ if state.over.is_some() => None,
            false => Some(true),
            true => state.finished.then_some(false),
        });
        if has_bytes.await {
            self.socket().writable().await?;
            return Ok(true);
        }
        Ok(false)
    }

    /// The other end has no more bytes.
    pub(super) fn finish(&self) -> Result<(), Violation> {
        self.change(|state| match std::mem::replace(&mut state.finished, true) {
            false => Ok(()),
            true => Err(Violation("a flow that ends twice")),
        })
    }

    /// Tells whether the other end has no more bytes.
    pub(super) fn is_finished(&self) -> bool {
        lock(&self.state).finished
    }

    /// Widens the window to its usual length, as far as there is memory. Returns whether a grant is due.
    pub(super) fn widen(&self) -> bool {
        let mut state = lock(&self.state);
        state.window.widen(self.memory.window, &self.memory);
        state.window.is_due()
    }

    /// Returns the bytes to be granted.
    pub(super) fn take_grant(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        let is_over = state.over.is_some() || state.finished;
        let window = &mut state.window;
        window.grant_queued = false;
        let bytes = std::mem::take(&mut window.to_grant);
        window.granted += bytes;
        (bytes > 0 && !is_over).then_some(bytes)
    }
}

impl FlowState {
    pub(super) fn answer(&mut self, answer: Result<(), RefusedReason>) {
        self.answer.get_or_insert(answer);
    }

    /// Ends the flow; only the first end counts.
    pub(super) fn end(&mut self, over: Over) {
        self.over.get_or_insert(over);
        self.unwritten = VecDeque::new();
    }

    /// Says that there is nothing to reset, although the flow has ended otherwise.
    pub(super) fn complete(&mut self) {
        self.over = Some(Over::Complete);
    }
}

impl Window {
    /// Counts bytes that the socket has taken. Returns whether a grant is due, once for each grant.
    fn note_passed(&mut self, bytes: u64, memory: &WindowMemory) -> bool {
        self.to_grant += bytes;
        self.passed += bytes;
        if bytes > 0 {
            let (elapsed, round_trip) = (self.began.elapsed(), memory.round_trip());
            let is_over = elapsed >= round_trip;
            let before = if elapsed < 2 * round_trip { self.passed_before } else { 0 };
            let passes = is_over && self.passed * PARTS_IN_A_ROUND_TRIP >= self.len && memory.has_left(2);
            // Flows that share a path have windows alike: the one with the longest window would else keep it.
            let much = self.passed.max(before) * PARTS_IN_A_ROUND_TRIP * 2 >= self.len;
            let lags = self.len < memory.note_longest(self.len) && much && memory.has_left(4);
            if passes || lags {
                self.widen((self.len * 2).min(memory.total / 2).max(self.len), memory);
            }
            if is_over {
                (self.passed_before, self.passed, self.began) = (self.passed, 0, Instant::now());
            }
        }
        self.is_due()
    }

    fn widen(&mut self, len: u64, memory: &WindowMemory) {
        let more = memory.take(len.saturating_sub(self.len));
        self.len += more;
        self.to_grant += more;
        memory.note_longest(self.len);
    }

    /// Tells whether a grant is due that is not yet queued. The caller queues it.
    fn is_due(&mut self) -> bool {
        let due = !self.grant_queued && self.to_grant * GRANTS_IN_A_WINDOW >= self.len;
        self.grant_queued |= due;
        due
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        let state = lock(&self.state);
        self.memory.give_back(state.window.len - CREDIT_FIRST);
        self.memory.forget_longest(state.window.len);
        let Some(socket) = self.socket.get() else { return };
        match state.over {
            Some(Over::Complete) => socket.settle(),
            _ => socket.reset(),
        }
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The memory that the windows of all flows of one end share.
///
/// Each flow has its [first credit](CREDIT_FIRST). All that is more comes from here.
#[derive(Debug)]
pub(super) struct WindowMemory {
    /// The usual length of a window.
    window: u64,
    total: u64,
    left: AtomicU64,
    /// The length of the longest window.
    longest: AtomicU64,
    round_trip_us: AtomicU64,
}

impl WindowMemory {
    pub(super) fn new(window: u64, total: u64) -> Self {
        let (left, longest) = (AtomicU64::new(total), AtomicU64::new(CREDIT_FIRST));
        Self { window, total, left, longest, round_trip_us: AtomicU64::new(ROUND_TRIP_MIN_US) }
    }

    pub(super) fn note_round_trip(&self, round_trip: Option<Duration>) {
        let us = round_trip.map_or(0, |round_trip| u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX));
        self.round_trip_us.store(us.max(ROUND_TRIP_MIN_US), Ordering::Relaxed);
    }

    fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_us.load(Ordering::Relaxed))
    }

    /// Notes the length of a window; returns that of the longest one.
    fn note_longest(&self, len: u64) -> u64 {
        self.longest.fetch_max(len, Ordering::Relaxed).max(len)
    }

    /// Forgets a window of this length. If it was the longest one, the others tell of theirs when bytes pass.
    fn forget_longest(&self, len: u64) {
        let _ = self.longest.compare_exchange(len, CREDIT_FIRST, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Tells whether one of so many parts of the memory is left, so that a window may grow beyond its usual length.
    fn has_left(&self, parts: u64) -> bool {
        self.left.load(Ordering::Relaxed) >= self.total / parts
    }

    /// Takes at most `bytes`.
    fn take(&self, bytes: u64) -> u64 {
        let rest = |left: u64| Some(left.saturating_sub(bytes));
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).expect("it always succeeds");
        left.min(bytes)
    }

    fn give_back(&self, bytes: u64) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Bytes that each end may send of a flow before the other end has granted any.
pub(super) const CREDIT_FIRST: u64 = 64 << 10;
/// A grant is due when this part of the window has passed.
const GRANTS_IN_A_WINDOW: u64 = 4;
/// A window is too short if this part of it passes in a round trip. Credit comes back after two to three round trips,
/// or later where bytes queue.
const PARTS_IN_A_ROUND_TRIP: u64 = 8;
const ROUND_TRIP_MIN_US: u64 = 1000;
/// Most kept bytes that are written between two turns of other tasks.
const WRITTEN_AT_ONCE: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_widen_as_far_as_there_is_memory_and_give_it_back() {
        let memory = Arc::new(WindowMemory::new(1 << 20, 2 << 20));
        let flows: Vec<Flow> = (1..=4).map(|number| Flow::new(number, memory.clone())).collect();
        let granted: Vec<Option<u64>> = flows
            .iter()
            .map(|flow| {
                flow.widen();
                flow.take_grant()
            })
            .collect();
        let usual = (1 << 20) - CREDIT_FIRST;
        assert_eq!(granted, [Some(usual), Some(usual), Some(2 * CREDIT_FIRST), None]);
        drop(flows);
        assert_eq!(memory.take(u64::MAX), 2 << 20);
    }

    #[test]
    fn bytes_beyond_the_window_are_a_violation() {
        let flow = Flow::new(1, Arc::new(WindowMemory::new(1 << 20, 0)));
        assert_eq!(flow.deliver(&vec![0; 64 << 10]), Ok(false));
        assert_eq!(flow.deliver(&[0]), Err(Violation("more bytes of a flow than were granted")));
    }

    #[test]
    fn a_window_that_lags_behind_grows_without_waiting_for_a_round_trip() {
        let memory = Arc::new(WindowMemory::new(1 << 20, 64 << 20));
        memory.note_round_trip(Some(Duration::from_secs(3600)));
        let flows: Vec<Flow> = (1..=3).map(|number| Flow::new(number, memory.clone())).collect();
        let len = |flow: &Flow| lock(&flow.state).window.len;
        flows.iter().for_each(|flow| _ = flow.widen());
        let pass = |flow: &Flow, bytes| lock(&flow.state).window.note_passed(bytes, &memory);
        pass(&flows[0], 1 << 19);
        assert_eq!(len(&flows[0]), 1 << 20, "nobody is ahead, and no round trip is over");
        lock(&flows[1].state).window.widen(4 << 20, &memory);
        for _ in 0..4 {
            pass(&flows[0], 1);
            pass(&flows[2], 1);
        }
        assert_eq!(
            flows.iter().map(len).collect::<Vec<_>>(),
            [4 << 20, 4 << 20, 1 << 20],
            "the last one passes little"
        );
    }

    #[test]
    fn a_window_that_passes_quickly_grows_while_memory_is_plenty() {
        let memory = WindowMemory::new(1 << 20, 8 << 20);
        let began = Instant::now() - Duration::from_secs(1);
        let mut window =
            Window { len: 1 << 20, granted: 0, to_grant: 0, grant_queued: false, passed: 0, passed_before: 0, began };
        assert!(window.note_passed(1 << 18, &memory), "what it has grown by is granted");
        assert_eq!(window.len, 2 << 20);
        window.began = began;
        let before = window.to_grant;
        window.note_passed(10, &memory);
        assert_eq!((window.len, window.to_grant), (2 << 20, before + 10), "little has passed");
        for _ in 0..8 {
            window.began = began;
            window.note_passed(window.len, &memory);
        }
        assert_eq!(window.len, 4 << 20, "it has doubled to half of the memory");
    }
}
