//! The ring of slabs: registered memory that is filled, announced and taken, again and again.
//!
//! Slabs leave the ring in the order of their numbers and come back in about that order, so the slabs that are being
//! filled, those that are announced and those that are in flight are three parts of a ring. Each slab is a region of
//! its own: a key opens one slab. That of a slab to be read lasts as long as the slab's turn.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rdmc_fabric::{BufferMut, Fabric, FabricError, Lender, MemoryRegion, Timestamp};
use tokio::sync::watch;

use crate::sync::lock;

/// Lends slabs, and takes them back when their last holder drops them.
#[derive(Clone)]
pub(crate) struct SlabRing(Arc<RingShared>);

struct RingShared {
    fabric: Arc<dyn Fabric>,
    slab_len: usize,
    state: Mutex<RingState>,
    /// Changes whenever a slab may be available.
    changed: watch::Sender<()>,
}

struct RingState {
    free: Vec<MemoryRegion>,
    /// Slabs that are lent.
    lent: usize,
    size: RingSize,
}

impl SlabRing {
    /// Creates a ring without memory, which grows from `slabs_min` to `slabs_max` slabs.
    pub(crate) fn new(fabric: Arc<dyn Fabric>, slab_len: usize, slabs_min: usize, slabs_max: usize) -> Self {
        let size = RingSize::new(slabs_min, slabs_max);
        let state = Mutex::new(RingState { free: Vec::new(), lent: 0, size });
        Self(Arc::new(RingShared { fabric, slab_len, state, changed: watch::Sender::new(()) }))
    }

    /// Returns the length of a slab in bytes.
    pub(crate) fn slab_len(&self) -> usize {
        self.0.slab_len
    }

    /// Waits for a slab; its bytes are unspecified.
    ///
    /// # Cancel safety
    /// A dropped future takes nothing.
    pub(crate) async fn take(&self) -> Result<BufferMut, FabricError> {
        let mut changed = self.0.changed.subscribe();
        loop {
            if let Some(slab) = self.try_take()? {
                return Ok(slab);
            }
            changed.changed().await.expect("the ring lives as long as this future");
        }
    }

    fn try_take(&self) -> Result<Option<BufferMut>, FabricError> {
        let free = {
            let mut state = lock(&self.0.state);
            if state.lent >= state.size.slabs {
                state.size.was_short = true;
                return Ok(None);
            }
            state.lent += 1;
            state.free.pop()
        };
        let region = match free {
            Some(region) => Ok(region),
            None => self.0.fabric.allocate(self.0.slab_len),
        };
        let region = region.inspect_err(|_| lock(&self.0.state).lent -= 1)?;
        let lender = Arc::new(RingLender(Arc::downgrade(&self.0)));
        Ok(Some(region.lend(lender).expect("a fabric allocates writable memory")))
    }

    /// Notes that slabs of so many bytes have passed through the ring; a short slab counts as a whole one.
    pub(crate) fn note_passed(&self, bytes: u64, now: Timestamp, round_trip: Duration) {
        let is_over = {
            let mut state = lock(&self.0.state);
            state.size.note_passed(bytes, now, round_trip, self.0.slab_len as u64)
        };
        if is_over {
            // Whoever still waits says so again.
            self.0.changed.send_replace(());
        }
    }

    /// Returns the bytes that the ring may lend now.
    pub(crate) fn len(&self) -> u64 {
        lock(&self.0.state).size.slabs as u64 * self.0.slab_len as u64
    }
}

impl fmt::Debug for SlabRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabRing").field("slab_len", &self.0.slab_len).field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Gives a slab back to its ring, if that is still there.
struct RingLender(Weak<RingShared>);

impl Lender for RingLender {
    fn take_back(&self, region: MemoryRegion) {
        let Some(ring) = self.0.upgrade() else { return };
        {
            let mut state = lock(&ring.state);
            state.lent -= 1;
            if state.free.len() + state.lent < state.size.slabs {
                state.free.push(region);
            }
        }
        ring.changed.send_replace(());
    }
}

/// How many slabs a ring may have: enough for the bytes of a few round trips.
///
/// A path that carries B bytes in a round trip needs B bytes in flight, B that are announced meanwhile, and B that are
/// being filled. The ring grows to three times the bytes that have passed in the last round trip, if it was ever short
/// of slabs in that time. Growing so, a ring that is too small for its path grows until it is not.
#[derive(Debug)]
struct RingSize {
    slabs: usize,
    slabs_max: usize,
    /// Whether a slab was wanted and there was none, in this round.
    was_short: bool,
    began: Option<Timestamp>,
    passed: u64,
}

impl RingSize {
    fn new(slabs_min: usize, slabs_max: usize) -> Self {
        let slabs_max = slabs_max.max(1);
        Self { slabs: slabs_min.clamp(1, slabs_max), slabs_max, was_short: false, began: None, passed: 0 }
    }

    /// Counts bytes. The ring may grow at the end of each round trip, and then this returns true.
    fn note_passed(&mut self, bytes: u64, now: Timestamp, round_trip: Duration, slab_len: u64) -> bool {
        let began = *self.began.get_or_insert(now);
        self.passed += bytes;
        if now.since(began) < round_trip {
            return false;
        }
        let wanted = usize::try_from(GROWTH * self.passed / slab_len).unwrap_or(usize::MAX).min(self.slabs_max);
        if self.was_short {
            self.slabs = self.slabs.max(wanted);
        }
        (self.was_short, self.began, self.passed) = (false, Some(now), 0);
        true
    }
}

/// The ring's length over the bytes that pass in a round trip: three parts.
const GROWTH: u64 = 3;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use rdmc_fabric::MemNetwork;

    use super::*;

    fn ring(slabs_min: usize, slabs_max: usize) -> SlabRing {
        SlabRing::new(MemNetwork::new().fabric(), 1024, slabs_min, slabs_max)
    }

    #[tokio::test]
    async fn a_slab_comes_back_when_its_last_holder_drops_it() {
        let ring = ring(1, 1);
        let slab = ring.take().await.unwrap().freeze();
        let part = slab.slice(..10);
        drop(slab);
        assert!(ring.take().now_or_never().is_none());
        drop(part);
        assert_eq!(ring.take().now_or_never().unwrap().unwrap().len(), 1024);
    }

    #[tokio::test]
    async fn a_ring_that_was_short_grows_to_three_round_trips() {
        let ring = ring(2, 100);
        let held = [ring.take().await.unwrap(), ring.take().await.unwrap()];
        assert!(ring.take().now_or_never().is_none());
        let at = |ms: u64| Timestamp::from_nanos(ms * 1_000_000);
        let round_trip = Duration::from_millis(10);
        ring.note_passed(2048, at(0), round_trip);
        assert_eq!(ring.len(), 2048, "no round trip has passed");
        ring.note_passed(2048, at(10), round_trip);
        assert_eq!(ring.len(), 3 * 4096);
        drop(held);
        ring.note_passed(8192, at(20), round_trip);
        assert_eq!(ring.len(), 3 * 4096, "it was not short");
    }

    #[test]
    fn a_ring_never_exceeds_its_bound() {
        let mut size = RingSize::new(5, 3);
        size.was_short = true;
        size.note_passed(1 << 40, Timestamp::ZERO, Duration::ZERO, 1);
        assert_eq!(size.slabs, 3);
    }
}
