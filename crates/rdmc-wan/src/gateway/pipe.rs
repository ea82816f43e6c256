//! A connection inside this process, which joins a flow of one session to a flow of another.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::sync::lock;

/// One end of a pipe. It behaves as a socket does: each direction ends by itself, and a reset ends both.
///
/// If it is dropped before its direction has ended, the pipe is reset.
pub(super) struct PipeEnd {
    pipe: Arc<Pipe>,
    side: usize,
}

struct Pipe {
    state: Mutex<PipeState>,
    /// Changes with the state.
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct PipeState {
    /// By the side that writes.
    directions: [Direction; 2],
    is_reset: bool,
}

#[derive(Debug, Default)]
struct Direction {
    bytes: VecDeque<u8>,
    has_ended: bool,
}

/// Returns both ends of a new pipe.
pub(super) fn pipe() -> (PipeEnd, PipeEnd) {
    let pipe = Arc::new(Pipe { state: Mutex::default(), changed: watch::Sender::new(()) });
    (PipeEnd { pipe: pipe.clone(), side: 0 }, PipeEnd { pipe, side: 1 })
}

impl PipeEnd {
    /// Waits for bytes, the end of the other direction, or a reset.
    pub(super) async fn readable(&self) {
        self.until(|state| state.is_reset || !state.directions[1 - self.side].is_blocked()).await;
    }

    /// Waits for room, or a reset.
    pub(super) async fn writable(&self) {
        self.until(|state| state.is_reset || state.directions[self.side].bytes.len() < CAPACITY).await;
    }

    /// Waits for a reset.
    pub(super) async fn reset_seen(&self) {
        self.until(|state| state.is_reset).await;
    }

    /// Takes bytes; 0 if the direction has ended.
    ///
    /// # Errors
    /// Nothing is there, or the pipe is reset.
    pub(super) fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        self.change(|state| {
            let direction = &mut state.directions[1 - self.side];
            if direction.is_blocked() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let len = io::Read::read(&mut direction.bytes, into)?;
            if direction.bytes.is_empty() {
                // Idle flows keep no memory.
                direction.bytes = VecDeque::new();
            }
            Ok(len)
        })
    }

    /// Gives bytes, as far as there is room.
    ///
    /// # Errors
    /// There is no room, or the pipe is reset.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.change(|state| {
            let direction = &mut state.directions[self.side];
            let len = bytes.len().min(CAPACITY - direction.bytes.len());
            if len == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            direction.bytes.extend(&bytes[..len]);
            Ok(len)
        })
    }

    /// Ends the direction from this end.
    ///
    /// # Errors
    /// The pipe is reset.
    pub(super) fn shut(&self) -> io::Result<()> {
        self.change(|state| {
            state.directions[self.side].has_ended = true;
            Ok(())
        })
    }

    /// Ends both directions, and drops their bytes.
    pub(super) fn reset(&self) {
        *lock(&self.pipe.state) = PipeState { is_reset: true, ..PipeState::default() };
        self.pipe.changed.send_replace(());
    }

    fn change<T>(&self, change: impl FnOnce(&mut PipeState) -> io::Result<T>) -> io::Result<T> {
        let mut state = lock(&self.pipe.state);
        if state.is_reset {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let value = change(&mut state)?;
        drop(state);
        self.pipe.changed.send_replace(());
        Ok(value)
    }

    async fn until(&self, holds: impl Fn(&PipeState) -> bool) {
        let mut changed = self.pipe.changed.subscribe();
        while !holds(&lock(&self.pipe.state)) {
            changed.changed().await.expect("the pipe lives as long as this future");
        }
    }
}

impl Direction {
    /// Tells whether a reader has to wait.
    fn is_blocked(&self) -> bool {
        self.bytes.is_empty() && !self.has_ended
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        let has_ended = lock(&self.pipe.state).directions[self.side].has_ended;
        if !has_ended {
            self.reset();
        }
    }
}

/// Most bytes that wait in each direction.
const CAPACITY: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn is_ready(future: impl Future) -> bool {
        future.now_or_never().is_some()
    }

    fn kind<T: std::fmt::Debug>(result: io::Result<T>) -> io::ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn bytes_pass_up_to_the_capacity_and_then_the_end() {
        let (near, far) = pipe();
        assert!(!is_ready(far.readable()) && is_ready(near.writable()));
        assert_eq!(kind(far.try_read(&mut [0; 4])), io::ErrorKind::WouldBlock);
        assert_eq!(near.try_write(&vec![7; CAPACITY + 1]).unwrap(), CAPACITY);
        assert_eq!(kind(near.try_write(&[7])), io::ErrorKind::WouldBlock);
        assert!(is_ready(far.readable()) && !is_ready(near.writable()));
        near.shut().unwrap();
        let mut bytes = vec![0; 2 * CAPACITY];
        assert_eq!(far.try_read(&mut bytes).unwrap(), CAPACITY);
        assert_eq!(far.try_read(&mut bytes).unwrap(), 0);
        // The other direction goes on, also when the end that has ended is gone.
        assert_eq!(far.try_write(&[1, 2]).unwrap(), 2);
        assert_eq!(near.try_read(&mut bytes).unwrap(), 2);
        drop(near);
        assert!(!is_ready(far.reset_seen()));
    }

    #[test]
    fn a_reset_or_an_early_drop_ends_both_directions() {
        for is_dropped in [true, false] {
            let (near, far) = pipe();
            far.try_write(&[7]).unwrap();
            near.try_write(&[7]).unwrap();
            let near = (!is_dropped).then_some(near);
            if let Some(near) = &near {
                near.shut().unwrap();
                near.reset();
            }
            assert!(is_ready(far.reset_seen()) && is_ready(far.readable()) && is_ready(far.writable()));
            for failed in [far.try_read(&mut [0; 1]), far.try_write(&[7]), far.shut().map(|()| 0)] {
                assert_eq!(kind(failed), io::ErrorKind::ConnectionReset);
            }
        }
    }
}
