//! The signs of life of nodes at rest, without anything else: what processes must take for them on this machine.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rdmc_benches::processor_time;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A connection of this process with each other one.
pub(crate) struct Mesh {
    /// Those that have not counted enough.
    peers: Vec<TcpStream>,
}

impl Mesh {
    /// Connects with the processes that come before the one at `place`, and waits for the others.
    pub(crate) fn join(listener: &TcpListener, all: &[SocketAddr], place: usize) -> Result<Self> {
        let before = all.get(..place).context("a place among all")?;
        let mut peers = before.iter().map(TcpStream::connect).collect::<std::io::Result<Vec<_>>>()?;
        for _ in place + 1..all.len() {
            peers.push(listener.accept()?.0);
        }
        for peer in &peers {
            peer.set_nodelay(true)?;
            peer.set_nonblocking(true)?;
        }
        Ok(Self { peers })
    }

    /// Exchanges frames as nodes do that have nothing else to do, and returns the processor time of that for `seconds`, after
    /// `settle` others.
    pub(crate) fn rest(&mut self, settle: u32, seconds: u32) -> Result<Duration> {
        let start = Instant::now();
        let counted = start + Duration::from_secs(settle.into());
        self.until(counted)?;
        let used = processor_time();
        self.until(counted + Duration::from_secs(seconds.into()))?;
        Ok(processor_time() - used)
    }

    /// Has everybody told in each step, as soon as another one says so in its second half; who is told leaves it to the others
    /// to begin the next step, a quarter of one longer.
    fn until(&mut self, end: Instant) -> Result<()> {
        let (mut last, mut due) = (Instant::now(), Instant::now() + STEP);
        loop {
            let asked = self.wait(due.min(end))?;
            let now = Instant::now();
            if now >= end {
                return Ok(());
            }
            if now >= due || (asked && now >= last + STEP / 2) {
                self.peers.retain_mut(|peer| peer.write_all(&FRAME).is_ok());
                (last, due) = (now, now + if asked { STEP * 5 / 4 } else { STEP });
            }
        }
    }

    /// Waits until a frame has come, which is told, or it is `until`.
    fn wait(&mut self, until: Instant) -> Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).context("less than a century")?;
        let mut ready: Vec<PollFd<'_>> = self.peers.iter().map(|peer| PollFd::new(peer, PollFlags::IN)).collect();
        poll(&mut ready, Some(&left))?;
        let mut ready = ready.iter().map(|peer| !peer.revents().is_empty()).collect::<Vec<_>>().into_iter();
        let mut asked = false;
        self.peers.retain_mut(|peer| match ready.next().unwrap_or(false).then(|| peer.read(&mut [0; 256])) {
            None => true,
            Some(Ok(len)) => {
                asked |= len > 0;
                len > 0
            }
            Some(Err(error)) => error.kind() == ErrorKind::WouldBlock,
        });
        Ok(asked)
    }
}

/// Between two signs of life: a quarter of the detection time.
const STEP: Duration = Duration::from_millis(500);
/// As long as a sign of life.
const FRAME: [u8; 9] = [7; 9];
