//! The doorbell of a node: a page in which peers mark the queue pairs with news, and a socket by which they wake its
//! task.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::SendFlags;

use super::map::Mapping;

/// One node's doorbell, mapped by the node and by its peers.
///
/// Each line has a bit, and so has each group of lines. A peer with news on a line sets both bits, and sends a byte
/// over the socket if the bell is armed. If the peer is stopped in the middle, other peers can still wake the node. A
/// peer that writes nonsense can make the node look at lines without news. It can also make the node miss lines until
/// its next look at all lines, which it takes now and then.
pub(super) struct Doorbell {
    page: Mapping,
}

/// What peers get of a node's doorbell.
pub(super) struct DoorbellFiles {
    page: File,
    socket: UnixStream,
}

/// The doorbell of a peer.
pub(super) struct PeerBell {
    page: Mapping,
    socket: OwnedFd,
    /// The state in which the bell was armed when this node sent a byte last.
    sent_at: AtomicU32,
}

impl Doorbell {
    /// Creates a node's bell, what its peers get of it, and the socket at which their bytes arrive.
    pub(super) fn create() -> io::Result<(Self, DoorbellFiles, UnixStream)> {
        let (page, file) = Mapping::create(PAGE_LEN)?;
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        Ok((Self { page }, DoorbellFiles { page: file, socket: far }, near))
    }

    /// Marks a line as having news, without waking anyone.
    pub(super) fn mark(&self, line: u32) {
        mark(&self.page, line);
    }

    /// Tells whether a line has news.
    pub(super) fn has_news(&self) -> bool {
        self.page.number(GROUPS_AT).load(Ordering::Relaxed) != 0
    }

    /// Takes the lines with news.
    pub(super) fn take(&self, mut with_news: impl FnMut(u32)) {
        if !self.has_news() {
            return;
        }
        let groups = self.page.number(GROUPS_AT);
        for group in bits(groups.swap(0, Ordering::SeqCst)) {
            let lines = self.page.number(lines_at(group)).swap(0, Ordering::SeqCst);
            bits(lines).for_each(|bit| with_news(group * GROUP + bit));
        }
    }

    /// Lets peers send a byte with their next news. Returns false if there is news already.
    pub(super) fn arm(&self) -> bool {
        self.page.word(STATE_AT).fetch_or(ARMED, Ordering::SeqCst);
        self.page.number(GROUPS_AT).load(Ordering::SeqCst) == 0
    }

    /// Tells peers that they need not send bytes for now.
    pub(super) fn disarm(&self) {
        let state = self.page.word(STATE_AT);
        let seen = state.load(Ordering::SeqCst);
        if seen & ARMED != 0 {
            // If another thread has changed it, the bell is armed or disarmed as that thread wants.
            let _ = state.compare_exchange(seen, seen.wrapping_add(1), Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}

impl DoorbellFiles {
    /// Returns the descriptors that peers get.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.page.as_fd(), self.socket.as_fd()]
    }

    /// Ends the socket for the node and its peers.
    pub(super) fn close(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl PeerBell {
    /// Maps the bell that a peer has sent, as its page and its socket.
    pub(super) fn attach([page, socket]: [OwnedFd; 2]) -> io::Result<Self> {
        Ok(Self { page: Mapping::attach(page, PAGE_LEN)?, socket, sent_at: AtomicU32::new(0) })
    }

    /// Marks a line as having news, and wakes the peer if its bell is armed.
    pub(super) fn notify(&self, line: u32) {
        mark(&self.page, line);
        let state = self.page.word(STATE_AT).load(Ordering::SeqCst);
        // One byte is enough for each time that the bell is armed.
        if state & ARMED == 0 || self.sent_at.swap(state, Ordering::SeqCst) == state {
            return;
        }
        // Whatever the peer has sent as its socket, this call does not wait. A full socket has woken the peer already.
        if let Err(error) = rustix::net::send(&self.socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
            && error != rustix::io::Errno::AGAIN
        {
            tracing::debug!(%error, "a peer could not be woken");
        }
    }
}

/// Marks a line as having news.
fn mark(page: &Mapping, line: u32) {
    let line = line % LINES;
    let (group, bit) = (line / GROUP, line % GROUP);
    page.number(lines_at(group)).fetch_or(1 << bit, Ordering::SeqCst);
    // After the line's bit, so that the node finds it when it takes the group's.
    page.number(GROUPS_AT).fetch_or(1 << group, Ordering::SeqCst);
}

/// Iterates over the bits that are set.
fn bits(mut number: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let lowest = (number != 0).then(|| number.trailing_zeros())?;
        number &= number - 1;
        Some(lowest)
    })
}

/// Returns the offset of the bits of a group of lines.
fn lines_at(group: u32) -> usize {
    LINES_AT + 8 * group as usize
}

/// Lines of one bell; more queue pairs than that share lines.
pub(super) const LINES: u32 = 4096;
/// Lines of one group.
const GROUP: u32 = 64;
const _: () = assert!(LINES / GROUP <= u64::BITS, "each group has a bit");
/// Bytes of the page.
const PAGE_LEN: usize = 4096;
/// Offset of the state: odd while the bell is armed, and changed each time.
const STATE_AT: usize = 0;
/// The bit that is set while the bell is armed.
const ARMED: u32 = 1;
/// Offset of the groups' bits.
const GROUPS_AT: usize = 8;
/// Offset of the lines' bits, on a cache line of their own.
const LINES_AT: usize = 64;
const _: () = assert!(LINES_AT + LINES as usize / 8 <= PAGE_LEN, "the bits fit into the page");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::Read;
    use std::time::Duration;

    use super::*;

    fn create() -> (Doorbell, PeerBell, UnixStream) {
        let (bell, files, socket) = Doorbell::create().unwrap();
        let peer = PeerBell::attach(files.descriptors().map(|file| file.try_clone_to_owned().unwrap())).unwrap();
        (bell, peer, socket)
    }

    #[test]
    fn lines_that_were_rung_are_taken_once() {
        let (bell, ringer, _socket) = create();
        let taken = || {
            let mut lines = Vec::new();
            bell.take(|line| lines.push(line));
            lines
        };
        assert_eq!(taken(), []);
        for line in [LINES - 1, 0, 63, 64, 700, 64, LINES + 5] {
            ringer.notify(line);
        }
        bell.mark(700);
        assert_eq!(taken(), [0, 5, 63, 64, 700, LINES - 1]);
        assert_eq!(taken(), []);
    }

    #[test]
    fn an_armed_bell_gets_one_byte_and_a_disarmed_one_none() {
        let (bell, ringer, mut socket) = create();
        let mut bytes = || socket.read(&mut [0; 16]).ok();
        ringer.notify(1);
        assert_eq!(bytes(), None);
        assert!(!bell.arm(), "there is news");
        bell.take(|_| {});
        assert!(bell.arm());
        ringer.notify(1);
        ringer.notify(2);
        assert_eq!(bytes(), Some(1));
        bell.disarm();
        ringer.notify(1);
        assert_eq!(bytes(), None);
        bell.take(|_| {});
        assert!(bell.arm());
        ringer.notify(1);
        assert_eq!(bytes(), Some(1));
    }

    #[test]
    fn whoever_sleeps_is_woken_and_misses_no_line() {
        let (bell, ringer, mut socket) = create();
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ringing = std::thread::spawn(move || (0..LINES).step_by(7).for_each(|line| ringer.notify(line)));
        let mut lines = BTreeSet::new();
        loop {
            bell.take(|line| _ = lines.insert(line));
            if lines.len() == (0..LINES).step_by(7).len() {
                break;
            }
            if bell.arm() {
                let bytes = socket.read(&mut [0; 16]).expect("the news after the bell was armed sends a byte");
                assert_ne!(bytes, 0);
                bell.disarm();
            }
        }
        ringing.join().unwrap();
        assert!(lines.into_iter().eq((0..LINES).step_by(7)));
    }
}
