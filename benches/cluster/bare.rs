//! Exchanges the signs of life of nodes at rest over bare sockets: the floor of their cost on this machine.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rdmc_benches::processor_time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Connections of this process with every other process.
pub(crate) struct Mesh {
    /// Connections to processes that still exchange frames.
    peers: Vec<Peer>,
}

/// A connection with another process.
struct Peer {
    stream: TcpStream,
    /// Whether the other process comes before this one.
    before: bool,
}

impl Mesh {
    /// Connects to the processes before the one at `place`, and waits for the others.
    pub(crate) fn join(listener: &TcpListener, all: &[SocketAddr], place: usize) -> Result<Self> {
        let before = all.get(..place).context("a place among all")?;
        let mut peers = Vec::new();
        for address in before {
            peers.push(Peer { stream: TcpStream::connect(address)?, before: true });
        }
        for _ in place + 1..all.len() {
            peers.push(Peer { stream: listener.accept()?.0, before: false });
        }
        for peer in &peers {
            peer.stream.set_nodelay(true)?;
            peer.stream.set_nonblocking(true)?;
        }
        Ok(Self { peers })
    }

    /// Exchanges frames like nodes at rest for `settle` + `seconds` seconds, and returns the processor time of the last
    /// `seconds`.
    pub(crate) fn rest(&mut self, settle: u32, seconds: u32) -> Result<Duration> {
        let start = Instant::now();
        let counted = start + Duration::from_secs(settle.into());
        self.until(counted)?;
        let used = processor_time();
        self.until(counted + Duration::from_secs(seconds.into()))?;
        Ok(processor_time() - used)
    }

    /// Sends a frame to every process in each step, until `end`.
    ///
    /// In the second half of a step, a frame from another process begins the next step. If that process comes before
    /// this one, this one waits a quarter of a step longer, so that the other one begins the next step.
    fn until(&mut self, end: Instant) -> Result<()> {
        let (mut last, mut due, mut led) = (Instant::now(), Instant::now() + STEP, None);
        loop {
            let (asked, by_one_before) = self.wait(due.min(end))?;
            let now = Instant::now();
            if now >= end {
                return Ok(());
            }
            if by_one_before {
                led = Some(now);
            }
            if now >= due || (asked && now >= last + STEP / 2) {
                self.peers.retain_mut(|peer| peer.stream.write_all(&FRAME).is_ok());
                let follows = led.is_some_and(|at| now < at + STEP * 11 / 10);
                (last, due) = (now, now + if follows { STEP * 5 / 4 } else { STEP });
            }
        }
    }

    /// Waits for a frame, at most to `until`. Returns whether one came, and whether one came from a process before this
    /// one.
    fn wait(&mut self, until: Instant) -> Result<(bool, bool)> {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).context("less than a century")?;
        let mut ready: Vec<PollFd<'_>> =
            self.peers.iter().map(|peer| PollFd::new(&peer.stream, PollFlags::IN)).collect();
        poll(&mut ready, Some(&left))?;
        let mut ready = ready.iter().map(|peer| !peer.revents().is_empty()).collect::<Vec<_>>().into_iter();
        let (mut asked, mut by_one_before) = (false, false);
        self.peers.retain_mut(|peer| match ready.next().unwrap_or(false).then(|| peer.stream.read(&mut [0; 256])) {
            None => true,
            Some(Ok(len)) => {
                asked |= len > 0;
                by_one_before |= len > 0 && peer.before;
                len > 0
            }
            Some(Err(error)) => error.kind() == ErrorKind::WouldBlock,
        });
        Ok((asked, by_one_before))
    }
}

/// Time between two signs of life: a third of the detection time.
const STEP: Duration = Duration::from_nanos(2_000_000_000 / 3);
/// A frame of the length of a sign of life.
const FRAME: [u8; 9] = [7; 9];
