//! Requests of one connection for the slabs of one direction: how many bytes may be under way, and when they leave.

use std::sync::Mutex;

use tokio::sync::OnceCell;

use super::{SLABS_MIN, Shared};
use crate::channel::Channel;
use crate::finder::{Admission, Finder, Verdict};
use crate::flight::Flight;
use crate::pace::{Pacer, Rate};
use crate::ring::SlabRing;
use crate::sync::lock;

/// What the requests of one direction share.
pub(super) struct Requests<'a> {
    session: &'a Shared,
    pub(super) channel: &'a Channel,
    pacer: Mutex<Pacer>,
    /// If neither the user nor the fabric decides on the rate.
    finding: Option<Finding>,
    flight: Flight,
    piece_len: usize,
}

/// What finds the rate. It begins when the round trip is known.
struct Finding {
    slab_len: usize,
    finder: OnceCell<Mutex<Finder>>,
}

impl<'a> Requests<'a> {
    /// Paces them by `rate`, or else by a rate that is found if the fabric does not find it. The slabs are those of
    /// `ring`.
    pub(super) fn new(session: &'a Shared, channel: &'a Channel, rate: Option<Rate>, ring: &SlabRing) -> Self {
        let slab_len = ring.slab_len();
        let least = (SLABS_MIN as u64 * slab_len as u64).max(FLIGHT_MIN);
        let finds = rate.is_none() && session.finds_rate();
        let finding = finds.then(|| Finding { slab_len, finder: OnceCell::new() });
        let pacer = Pacer::new(rate);
        let burst = usize::try_from(pacer.bytes_max()).unwrap_or(usize::MAX);
        let piece_len = PIECE_LEN.min(burst).min(if finds { slab_len / PIECES_OF_FINDING } else { slab_len });
        // All pieces of a slab are posted before one is awaited.
        let piece_len = piece_len.max(slab_len.div_ceil(PIECES_MAX));
        Self { session, channel, pacer: Mutex::new(pacer), finding, flight: Flight::new(least), piece_len }
    }

    /// Returns the most bytes of a request.
    pub(super) fn piece_len(&self) -> usize {
        self.piece_len
    }

    /// Waits until `bytes` may be under way and their time has come, and counts them.
    pub(super) async fn admit(&self, bytes: u64) -> Admitted {
        self.flight.begin(bytes, self.session.environment.now()).await;
        self.pace(bytes).await
    }

    /// Counts `bytes` that may be under way in any case, and waits until their time has come.
    pub(super) async fn admit_at_once(&self, bytes: u64) -> Admitted {
        self.flight.add(bytes);
        self.pace(bytes).await
    }

    async fn pace(&self, bytes: u64) -> Admitted {
        let environment = &self.session.environment;
        let finder = match &self.finding {
            Some(finding) => Some(finding.finder.get_or_init(|| self.begin_to_find(finding.slab_len)).await),
            None => None,
        };
        let now = environment.now();
        let leaves = lock(&self.pacer).take(bytes, now);
        let waits = leaves > now;
        if waits {
            environment.sleep_until(leaves).await;
        }
        let admission = finder.map(|finder| lock(finder).admit(bytes, waits, environment.now()));
        Admitted { bytes, admission }
    }

    async fn begin_to_find(&self, slab_len: usize) -> Mutex<Finder> {
        let round_trip = self.session.until(|state| state.round_trip).await;
        let finder = Finder::new(slab_len, round_trip, self.session.fabric.capabilities().port_rate);
        let rate = Rate::bytes_per_second(finder.rate()).burst(self.piece_len as u64);
        *lock(&self.pacer) = Pacer::new(Some(rate));
        Mutex::new(finder)
    }

    /// Notes that a request has passed.
    pub(super) fn passed(&self, Admitted { bytes, admission }: Admitted) {
        let (now, round_trip) = (self.session.environment.now(), self.session.round_trip());
        if let (Some(finding), Some(admission)) = (&self.finding, admission)
            && let Some(finder) = finding.finder.get()
        {
            let mut finder = lock(finder);
            if finder.passed(admission, now, round_trip) == Verdict::Overloaded {
                // The requests of a slab are awaited when all of them are posted.
                self.flight.drain_to(finding.slab_len as u64);
            }
            lock(&self.pacer).set_bytes_per_second(finder.rate());
        }
        self.flight.arrived(bytes, now, round_trip);
    }
}

/// A request that may be posted.
#[derive(Debug)]
pub(super) struct Admitted {
    bytes: u64,
    admission: Option<Admission>,
}

/// Bytes that may be under way on any path.
const FLIGHT_MIN: u64 = 4 << 20;
/// Most bytes of a request, unless a slab would have too many.
const PIECE_LEN: usize = 256 << 10;
/// Requests for a slab if the rate is found: bursts should be short.
const PIECES_OF_FINDING: usize = 4;
/// Most requests for a slab: no more than a queue pair has at once.
pub(super) const PIECES_MAX: usize = 256;
