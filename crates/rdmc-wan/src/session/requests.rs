//! Requests of one connection for the slabs of one direction: how many bytes may be under way, and when they leave.

use std::sync::Mutex;

use super::{SLABS_MIN, Shared};
use crate::channel::Channel;
use crate::flight::Flight;
use crate::pace::{Pacer, Rate};
use crate::ring::SlabRing;
use crate::sync::lock;

/// What the requests of one direction share.
pub(super) struct Requests<'a> {
    session: &'a Shared,
    pub(super) channel: &'a Channel,
    pacer: Mutex<Pacer>,
    flight: Flight,
    piece_len: usize,
}

impl<'a> Requests<'a> {
    /// Paces them by `rate`. The slabs are those of `ring`.
    pub(super) fn new(session: &'a Shared, channel: &'a Channel, rate: Option<Rate>, ring: &SlabRing) -> Self {
        let least = (SLABS_MIN as u64 * ring.slab_len() as u64).max(FLIGHT_MIN);
        let pacer = Pacer::new(rate);
        let piece_len = usize::try_from(pacer.bytes_max()).unwrap_or(usize::MAX).min(PIECE_LEN);
        // All pieces of a slab are posted before one is awaited.
        let piece_len = piece_len.max(ring.slab_len().div_ceil(PIECES_MAX));
        Self { session, channel, pacer: Mutex::new(pacer), flight: Flight::new(least), piece_len }
    }

    /// Returns the most bytes of a request.
    pub(super) fn piece_len(&self) -> usize {
        self.piece_len
    }

    /// Waits until `bytes` may be under way and their time has come, and counts them.
    pub(super) async fn admit(&self, bytes: u64) {
        self.flight.begin(bytes, self.session.environment.now()).await;
        self.pace(bytes).await;
    }

    /// Counts `bytes` that may be under way in any case, and waits until their time has come.
    pub(super) async fn admit_at_once(&self, bytes: u64) {
        self.flight.add(bytes);
        self.pace(bytes).await;
    }

    async fn pace(&self, bytes: u64) {
        let now = self.session.environment.now();
        let leaves = lock(&self.pacer).take(bytes, now);
        if leaves > now {
            self.session.environment.sleep_until(leaves).await;
        }
    }

    /// Notes that bytes have passed.
    pub(super) fn passed(&self, bytes: u64) {
        self.flight.arrived(bytes, self.session.environment.now(), self.session.round_trip());
    }
}

/// Bytes that may be under way on any path.
const FLIGHT_MIN: u64 = 4 << 20;
/// Most bytes of a request, unless a slab would have too many.
const PIECE_LEN: usize = 256 << 10;
/// Most requests for a slab: no more than a queue pair has at once.
pub(super) const PIECES_MAX: usize = 256;
