//! The doorbell of a node: a page in which peers mark the queue pairs with news, and by which they wake the engine.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::thread::futex;

use super::map::Mapping;

/// One node's doorbell, mapped by the node and by its peers.
///
/// Each line has a bit, and so has each group of lines. A peer with news on a line sets both bits, increments a
/// counter, and wakes the engine if it sleeps. If the peer is stopped in the middle, other peers can still wake the
/// engine. A peer that writes nonsense can make the engine look at lines without news. It can also make the engine miss
/// lines until its next look at all lines, which it takes now and then.
pub(super) struct Doorbell {
    page: Mapping,
}

impl Doorbell {
    /// Creates a node's bell, and the file through which its peers map it.
    pub(super) fn create() -> io::Result<(Self, File)> {
        let (page, file) = Mapping::create(PAGE_LEN)?;
        Ok((Self { page }, file))
    }

    /// Maps a peer's bell.
    pub(super) fn attach(file: OwnedFd) -> io::Result<Self> {
        Ok(Self { page: Mapping::attach(file, PAGE_LEN)? })
    }

    /// Marks a line as having news, and wakes the engine.
    pub(super) fn notify(&self, line: u32) {
        let line = line % LINES;
        let (group, bit) = (line / GROUP, line % GROUP);
        self.page.number(lines_at(group)).fetch_or(1 << bit, Ordering::SeqCst);
        // After the line's bit, so that the engine finds it when it takes the group's.
        self.page.number(GROUPS_AT).fetch_or(1 << group, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes the engine, if it sleeps.
    pub(super) fn wake(&self) {
        let notified = self.page.word(NOTIFIED_AT);
        notified.fetch_add(1, Ordering::SeqCst);
        if self.page.word(ASLEEP_AT).load(Ordering::SeqCst) != 0
            && let Err(error) = futex::wake(notified, futex::Flags::empty(), 1)
        {
            tracing::warn!(%error, "a sleeping engine could not be woken");
        }
    }

    /// Takes the lines with news.
    pub(super) fn take(&self, mut with_news: impl FnMut(u32)) {
        let groups = self.page.number(GROUPS_AT);
        if groups.load(Ordering::Relaxed) == 0 {
            return;
        }
        for group in bits(groups.swap(0, Ordering::SeqCst)) {
            let lines = self.page.number(lines_at(group)).swap(0, Ordering::SeqCst);
            bits(lines).for_each(|bit| with_news(group * GROUP + bit));
        }
    }

    /// Sleeps until a peer notifies the engine, or for at most `limit`. It does not sleep if there is news, or if
    /// `has_work` returns true after the bell is armed. Only the engine calls it.
    pub(super) fn sleep(&self, limit: Option<Duration>, has_work: impl FnOnce() -> bool) {
        let (notified, asleep) = (self.page.word(NOTIFIED_AT), self.page.word(ASLEEP_AT));
        asleep.store(1, Ordering::SeqCst);
        let seen = notified.load(Ordering::SeqCst);
        let news = self.page.number(GROUPS_AT).load(Ordering::SeqCst) != 0;
        if !news && !has_work() {
            let limit = limit.map(|limit| rustix::thread::Timespec {
                tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: limit.subsec_nanos().into(),
            });
            // Whatever ends the sleep, the engine looks for news.
            let _ = futex::wait(notified, futex::Flags::empty(), seen, limit.as_ref());
        }
        asleep.store(0, Ordering::SeqCst);
    }
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
/// Offset of the counter of notifications, on which the engine sleeps.
const NOTIFIED_AT: usize = 0;
/// Offset of the flag that the engine sleeps, or is about to.
const ASLEEP_AT: usize = 4;
/// Offset of the groups' bits.
const GROUPS_AT: usize = 8;
/// Offset of the lines' bits, on a cache line of their own.
const LINES_AT: usize = 64;
const _: () = assert!(LINES_AT + LINES as usize / 8 <= PAGE_LEN, "the bits fit into the page");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn lines_that_were_rung_are_taken_once() {
        let (bell, file) = Doorbell::create().unwrap();
        let ringer = Doorbell::attach(file.into()).unwrap();
        let taken = || {
            let mut lines = Vec::new();
            bell.take(|line| lines.push(line));
            lines
        };
        assert_eq!(taken(), []);
        for line in [LINES - 1, 0, 63, 64, 700, 64, LINES + 5] {
            ringer.notify(line);
        }
        assert_eq!(taken(), [0, 5, 63, 64, 700, LINES - 1]);
        assert_eq!(taken(), []);
    }

    #[test]
    fn whoever_sleeps_is_woken_and_misses_no_line() {
        let (bell, file) = Doorbell::create().unwrap();
        let ringer = Doorbell::attach(file.into()).unwrap();
        let ringing = std::thread::spawn(move || (0..LINES).step_by(7).for_each(|line| ringer.notify(line)));
        let mut lines = BTreeSet::new();
        while lines.len() < (0..LINES).step_by(7).len() {
            bell.take(|line| _ = lines.insert(line));
            bell.sleep(Some(Duration::from_millis(100)), || false);
        }
        ringing.join().unwrap();
        assert!(lines.into_iter().eq((0..LINES).step_by(7)));
    }
}
