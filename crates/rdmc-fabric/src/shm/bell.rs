//! The doorbell of a node: a page that its peers write to say which queue pair has news, and that wakes its engine.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::thread::futex;

use super::map::Mapping;

/// One node's doorbell, mapped by the node and by its peers.
///
/// There is one bit for each line; whoever has news on a line sets it, counts on, and wakes the engine if that sleeps. A ringer that
/// is stopped in the middle keeps nobody else from waking it. A peer that writes nonsense can make the engine look at lines
/// without news, or miss some until it looks at all of them, which it does now and then.
pub(super) struct Bell {
    page: Mapping,
}

impl Bell {
    /// Makes a node's bell, and the file by which its peers reach it.
    pub(super) fn create() -> io::Result<(Self, File)> {
        let (page, file) = Mapping::create(PAGE_LEN)?;
        Ok((Self { page }, file))
    }

    /// Maps a peer's bell.
    pub(super) fn attach(file: OwnedFd) -> io::Result<Self> {
        Ok(Self { page: Mapping::attach(file, PAGE_LEN)? })
    }

    /// Says that there is news on a line.
    pub(super) fn ring(&self, line: u32) {
        let line = line % LINES;
        self.page.number(lines_at(line / 64)).fetch_or(1 << (line % 64), Ordering::SeqCst);
        self.wake();
    }

    /// Wakes the engine, if it sleeps.
    pub(super) fn wake(&self) {
        let rung = self.page.word(RUNG_AT);
        rung.fetch_add(1, Ordering::SeqCst);
        if self.page.word(ASLEEP_AT).load(Ordering::SeqCst) != 0
            && let Err(error) = futex::wake(rung, futex::Flags::empty(), 1)
        {
            tracing::warn!(%error, "a sleeping engine could not be woken");
        }
    }

    /// Takes the lines with news.
    pub(super) fn take(&self, mut with_news: impl FnMut(u32)) {
        for group in 0..LINES / 64 {
            let number = self.page.number(lines_at(group));
            if number.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = number.swap(0, Ordering::SeqCst);
            while bits != 0 {
                with_news(group * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Sleeps until the bell rings, or for `limit` if that is given; not at all if there is news, or `has_work` says so after
    /// the bell was armed. Called by the engine alone.
    pub(super) fn sleep(&self, limit: Option<Duration>, has_work: impl FnOnce() -> bool) {
        let (rung, asleep) = (self.page.word(RUNG_AT), self.page.word(ASLEEP_AT));
        asleep.store(1, Ordering::SeqCst);
        let seen = rung.load(Ordering::SeqCst);
        let news = (0..LINES / 64).any(|group| self.page.number(lines_at(group)).load(Ordering::SeqCst) != 0);
        if !news && !has_work() {
            let limit = limit.map(|limit| rustix::thread::Timespec {
                tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: limit.subsec_nanos().into(),
            });
            // However it ends, the engine looks.
            let _ = futex::wait(rung, futex::Flags::empty(), seen, limit.as_ref());
        }
        asleep.store(0, Ordering::SeqCst);
    }
}

/// Returns where the bits of the `group`th 64 lines stand.
fn lines_at(group: u32) -> usize {
    LINES_AT + 8 * group as usize
}

/// Lines of one bell; more queue pairs share them.
pub(super) const LINES: u32 = 4096;
/// Bytes of the page.
const PAGE_LEN: usize = 4096;
/// Where ringers count, and where the engine sleeps.
const RUNG_AT: usize = 0;
/// Where the engine says that it sleeps, or is about to.
const ASLEEP_AT: usize = 4;
/// Where the lines' bits begin, on a line of the cache of their own.
const LINES_AT: usize = 64;
const _: () = assert!(LINES_AT + LINES as usize / 8 <= PAGE_LEN, "the bits fit into the page");
