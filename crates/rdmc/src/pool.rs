//! The pool of registered memory: bounded and reused.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rdmc_fabric::{BufferMut, Fabric, FabricError, Lender, MemoryRegion};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Lends registered memory, which comes back when the last holder of a range drops it.
///
/// Memory that came back is kept for the next lease of a similar length: it is registered, and its pages are warm.
/// Lent and kept memory together never exceed the limit.
#[derive(Clone)]
pub(crate) struct Pool(Arc<PoolShared>);

struct PoolShared {
    fabric: Arc<dyn Fabric>,
    /// One permit per page that may be lent; fair, so that a large lease is not starved by small ones.
    pages_free: Arc<Semaphore>,
    pages_max: u64,
    kept: Mutex<IdleRegions>,
    lent_bytes: AtomicU64,
}

#[derive(Default)]
struct IdleRegions {
    regions: Vec<MemoryRegion>,
    pages: u64,
}

/// The pool could not lend memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The lease is longer than the limit of the whole pool.
    #[error("{len} bytes exceed the pool's limit of {max} bytes")]
    TooLong {
        /// Bytes asked for.
        len: u64,
        /// The pool's limit in bytes.
        max: u64,
    },
    /// The fabric could not allocate.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

impl Pool {
    pub(crate) fn new(fabric: Arc<dyn Fabric>, bytes_max: u64) -> Self {
        let pages_max = (bytes_max / PAGE).clamp(1, Semaphore::MAX_PERMITS as u64);
        let permits = usize::try_from(pages_max).unwrap_or(Semaphore::MAX_PERMITS);
        Self(Arc::new(PoolShared {
            fabric,
            pages_free: Arc::new(Semaphore::new(permits)),
            pages_max,
            kept: Mutex::default(),
            lent_bytes: AtomicU64::new(0),
        }))
    }

    /// Lends `len` bytes of unspecified content; waits while too much is lent.
    ///
    /// # Cancel safety
    /// Nothing is lent if the future is dropped.
    pub(crate) async fn lend(&self, len: usize) -> Result<BufferMut, PoolError> {
        if len == 0 {
            return Ok(BufferMut::empty());
        }
        let shared = &self.0;
        let pages = (len as u64).div_ceil(PAGE);
        let pages = if pages > shared.pages_max { pages } else { size_class(pages).min(shared.pages_max) };
        let too_long = PoolError::TooLong { len: len as u64, max: shared.pages_max * PAGE };
        let Some(permits) = u32::try_from(pages).ok().filter(|_| pages <= shared.pages_max) else {
            return Err(too_long);
        };
        let permit = shared.pages_free.clone().acquire_many_owned(permits).await.expect("the pool never closes it");
        Ok(shared.lease(len, pages, Some(permit))?)
    }

    /// Lends memory that does not count towards the limit, without waiting.
    ///
    /// It is for the one block per group that arrives before the size of its message is known. If it counted, a message
    /// could wait for memory that its own first block holds.
    pub(crate) fn lend_staging(&self, len: usize) -> Result<BufferMut, PoolError> {
        Ok(self.0.lease(len, size_class((len as u64).div_ceil(PAGE)), None)?)
    }

    /// Allocates `count` regions of `len` bytes in advance, as far as the limit allows.
    pub(crate) fn preallocate(&self, len: usize, count: usize) -> Result<(), PoolError> {
        for _ in 0..count {
            let pages = size_class((len as u64).div_ceil(PAGE));
            if self.0.kept().pages + pages > self.0.pages_max {
                break;
            }
            let bytes = usize::try_from(pages * PAGE).expect("a length rounded to pages");
            let region = self.0.fabric.allocate(bytes)?;
            self.0.keep(region);
        }
        Ok(())
    }

    /// Returns the most bytes that may be lent in all.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.0.pages_max * PAGE
    }

    /// Returns the bytes that are lent now.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.0.lent_bytes.load(Ordering::Relaxed)
    }
}

impl PoolShared {
    fn lease(
        self: &Arc<Self>,
        len: usize,
        pages: u64,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<BufferMut, FabricError> {
        let bytes = pages * PAGE;
        let region = match self.kept_region(pages) {
            Some(region) => region,
            None => {
                self.fabric.allocate(usize::try_from(bytes).expect("a length rounded to pages")).inspect_err(|_| {
                    self.lent_bytes.fetch_sub(bytes, Ordering::Relaxed);
                })?
            }
        };
        let loan = Loan { pool: Arc::downgrade(self), permit: Mutex::new(permit), bytes };
        let mut buffer = region.lend(Arc::new(loan)).expect("a fabric allocates writable memory");
        buffer.truncate(len);
        Ok(buffer)
    }

    /// Counts a lease and takes the latest kept region of that many pages, or makes room to allocate one.
    fn kept_region(&self, pages: u64) -> Option<MemoryRegion> {
        let mut kept = self.kept();
        let lent = self.lent_bytes.fetch_add(pages * PAGE, Ordering::Relaxed) / PAGE;
        let fits = |region: &MemoryRegion| region.len() as u64 == pages * PAGE;
        if let Some(at) = kept.regions.iter().rposition(fits) {
            return Some(kept.take(at));
        }
        while kept.pages > 0 && lent + kept.pages + pages > self.pages_max {
            drop(kept.take(0));
        }
        None
    }

    fn keep(&self, region: MemoryRegion) {
        let mut kept = self.kept();
        kept.pages += region.len() as u64 / PAGE;
        kept.regions.push(region);
        while kept.pages > self.pages_max || kept.regions.len() > KEPT_MAX {
            drop(kept.take(0));
        }
    }

    fn kept(&self) -> MutexGuard<'_, IdleRegions> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleRegions {
    fn take(&mut self, at: usize) -> MemoryRegion {
        let region = self.regions.remove(at);
        self.pages -= region.len() as u64 / PAGE;
        region
    }
}

/// Rounds a number of pages up, by an eighth at most, so that messages of similar length reuse each other's memory.
fn size_class(pages: u64) -> u64 {
    let granule = (pages.next_power_of_two() / 16).max(1);
    pages.next_multiple_of(granule)
}

/// One lease: gives region and permit back.
struct Loan {
    pool: Weak<PoolShared>,
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    bytes: u64,
}

impl Lender for Loan {
    fn take_back(&self, region: MemoryRegion) {
        if let Some(pool) = self.pool.upgrade() {
            pool.lent_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
            pool.keep(region);
        }
        // After the region is back, so that a waiting task finds it.
        drop(self.permit.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// The pool's unit, in bytes.
const PAGE: u64 = 4 << 10;
/// Most regions kept for reuse.
const KEPT_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use rdmc_fabric::MemNetwork;

    use super::*;

    fn pool(bytes_max: u64) -> Pool {
        Pool::new(MemNetwork::new().fabric(), bytes_max)
    }

    #[test]
    fn a_returned_region_is_lent_again() {
        let pool = pool(1 << 20);
        let mut first = pool.lend(5000).now_or_never().unwrap().unwrap();
        let address = first.as_mut_ptr();
        assert_eq!(pool.lent_bytes(), 8192);
        drop(first);
        assert_eq!(pool.lent_bytes(), 0);
        let mut second = pool.lend(6000).now_or_never().unwrap().unwrap();
        assert_eq!((second.as_mut_ptr(), second.len()), (address, 6000));
    }

    #[test]
    fn a_lease_beyond_the_limit_waits_until_memory_comes_back() {
        let pool = pool(16 << 10);
        let held = pool.lend(12 << 10).now_or_never().unwrap().unwrap();
        let mut waiting = Box::pin(pool.lend(8 << 10));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(held);
        assert!(waiting.now_or_never().unwrap().is_ok());
    }

    #[test]
    fn a_lease_longer_than_the_pool_is_refused_at_once() {
        let refused = pool(16 << 10).lend(20 << 10).now_or_never().unwrap();
        assert!(matches!(refused, Err(PoolError::TooLong { len: 20480, max: 16384 })));
    }

    #[test]
    fn kept_memory_makes_room_for_other_lengths() {
        let pool = pool(64 << 10);
        drop(pool.lend(60 << 10).now_or_never().unwrap().unwrap());
        assert_eq!(pool.0.kept().pages, 15);
        let other = pool.lend(8 << 10).now_or_never().unwrap().unwrap();
        assert_eq!((other.len(), pool.0.kept().pages), (8 << 10, 0));
    }
}
