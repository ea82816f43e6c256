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
/// There is one bit for each line; whoever has news on a line sets it, and wakes the engine if that sleeps. A peer that
/// writes nonsense makes the engine look at lines without news, and no more.
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
        let state = self.page.word(STATE_AT);
        if state.load(Ordering::SeqCst) == ASLEEP
            && state.compare_exchange(ASLEEP, AWAKE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            && let Err(error) = futex::wake(state, futex::Flags::empty(), 1)
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

    /// Sleeps until the bell rings, or for at most `limit`; not at all if `has_work` says so after the bell was armed, or
    /// there is news.
    pub(super) fn sleep(&self, limit: Option<Duration>, has_work: impl FnOnce() -> bool) {
        let state = self.page.word(STATE_AT);
        state.store(ASLEEP, Ordering::SeqCst);
        let news = (0..LINES / 64).any(|group| self.page.number(lines_at(group)).load(Ordering::SeqCst) != 0);
        if !news && !has_work() {
            let limit = limit.map(|limit| rustix::thread::Timespec {
                tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: limit.subsec_nanos().into(),
            });
            // However it ends, the engine looks.
            let _ = futex::wait(state, futex::Flags::empty(), ASLEEP, limit.as_ref());
        }
        state.store(AWAKE, Ordering::SeqCst);
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
/// Where the engine says whether it sleeps.
const STATE_AT: usize = 0;
/// Where the lines' bits begin, on a line of the cache of their own.
const LINES_AT: usize = 64;
/// The engine looks, or is about to.
const AWAKE: u32 = 0;
/// The engine sleeps, and must be woken.
const ASLEEP: u32 = 1;
const _: () = assert!(LINES_AT + LINES as usize / 8 <= PAGE_LEN, "the bits fit into the page");
