//! Requests of one connection for the slabs of one direction: when they leave, how many bytes may be under way, and
//! what the path made of each.

use std::sync::Mutex;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use rdmc_fabric::{Timestamp, WorkError};
use tokio::sync::{OnceCell, mpsc, oneshot};

use super::{DISTANT, SLABS_MIN, Shared};
use crate::channel::{Channel, UnderWay};
use crate::finder::{Admission, Finder, Verdict};
use crate::flight::Flight;
use crate::pace::{Pacer, Rate};
use crate::ring::SlabRing;
use crate::sync::lock;

/// What the requests of one direction share. Each results in a `T`.
pub(super) struct Requests<'a, T> {
    session: &'a Shared,
    pub(super) channel: &'a Channel,
    pacer: Mutex<Pacer>,
    /// If neither the user nor the fabric decides on the rate.
    finding: Option<Finding>,
    flight: Flight,
    piece_len: usize,
    posted: mpsc::UnboundedSender<Posted<T>>,
}

/// Requests that were posted, for [`Requests::drive`]. The flight bounds them.
pub(super) type PostedRequests<T> = mpsc::UnboundedReceiver<Posted<T>>;

/// What finds the rate. It begins when the round trip is known, unless that is short.
struct Finding {
    slab_len: usize,
    finder: OnceCell<Option<Mutex<Finder>>>,
}

impl<'a, T> Requests<'a, T> {
    /// Paces them by `rate`, or else by a rate that is found if the fabric does not find it. The slabs are those of
    /// `ring`.
    pub(super) fn new(
        session: &'a Shared,
        channel: &'a Channel,
        rate: Option<Rate>,
        ring: &SlabRing,
    ) -> (Self, PostedRequests<T>) {
        let slab_len = ring.slab_len();
        let least = (SLABS_MIN as u64 * slab_len as u64).max(FLIGHT_MIN);
        let finds = rate.is_none() && session.fabric.capabilities().needs_pacing;
        let finding = finds.then(|| Finding { slab_len, finder: OnceCell::new() });
        let pacer = Pacer::new(rate);
        let burst = usize::try_from(pacer.bytes_max()).unwrap_or(usize::MAX);
        let piece_len = PIECE_LEN.min(burst).min(if finds { slab_len / PIECES_OF_FINDING } else { slab_len });
        // A slab has few requests.
        let piece_len = piece_len.max(slab_len.div_ceil(PIECES_MAX));
        let (posted, requests) = mpsc::unbounded_channel();
        let pacer = Mutex::new(pacer);
        (Self { session, channel, pacer, finding, flight: Flight::new(least), piece_len, posted }, requests)
    }

    /// Returns the most bytes of a request.
    pub(super) fn piece_len(&self) -> usize {
        self.piece_len
    }

    /// Waits until the time of `bytes` has come, and until they may be under way; counts them.
    pub(super) async fn admit(&self, bytes: u64) -> Admitted {
        let finder = match &self.finding {
            Some(finding) => finding.finder.get_or_init(|| self.begin_to_find(finding.slab_len)).await.as_ref(),
            None => None,
        };
        let now = self.now();
        let leaves = lock(&self.pacer).take(bytes, now);
        let has_to_wait = leaves > now;
        if has_to_wait {
            self.session.environment.sleep_until(leaves).await;
        }
        self.flight.begin(bytes, self.now()).await;
        let admission = finder.map(|finder| lock(finder).admit(bytes, has_to_wait, self.now()));
        Admitted { bytes, admission }
    }

    async fn begin_to_find(&self, slab_len: usize) -> Option<Mutex<Finder>> {
        let round_trip = self.session.until(|state| state.round_trip).await;
        if round_trip < DISTANT {
            return None;
        }
        let finder = Finder::new(slab_len, round_trip, self.session.fabric.capabilities().port_rate);
        lock(&self.pacer).set_found(finder.rate(), self.piece_len);
        Some(Mutex::new(finder))
    }

    /// Has [`drive`](Self::drive) wait for a request; returns how to get what it results in.
    pub(super) fn track(&self, under_way: UnderWay<T>, admitted: Admitted) -> oneshot::Receiver<T> {
        let (passes, passed) = oneshot::channel();
        // If nobody drives requests any more, the connection is over.
        let _ = self.posted.send(Posted { under_way, admitted, passes });
        passed
    }

    /// Waits for all requests that were posted, and notes each as soon as it has passed. Ends when one has failed.
    pub(super) async fn drive(&self, mut posted: PostedRequests<T>) -> WorkError {
        let mut under_way = FuturesUnordered::new();
        loop {
            tokio::select! {
                biased;
                Some(passed) = under_way.next() => {
                    let (now, round_trip) = (self.now(), self.session.round_trip());
                    let mut next = Some(passed);
                    while let Some(passed) = next {
                        match passed {
                            Ok(admitted) => self.passed(admitted, now, round_trip),
                            Err(error) => return error,
                        }
                        next = under_way.next().now_or_never().flatten();
                    }
                    self.judge(now, round_trip);
                }
                Some(request) = posted.recv() => under_way.push(request.pass()),
            }
        }
    }

    /// Notes that a request has passed.
    fn passed(&self, Admitted { bytes, admission }: Admitted, now: Timestamp, round_trip: Duration) {
        if let (Some(finder), Some(admission)) = (self.finder(), admission) {
            lock(finder).passed(admission, now, round_trip);
        }
        self.flight.arrived(bytes, now, round_trip);
    }

    /// Adapts the rate to what has passed.
    fn judge(&self, now: Timestamp, round_trip: Duration) {
        let Some(finder) = self.finder() else { return };
        let mut finder = lock(finder);
        let verdict = finder.judge(now, round_trip);
        if verdict == Verdict::Overloaded {
            self.flight.drain();
        }
        if verdict != Verdict::Unchanged {
            lock(&self.pacer).set_found(finder.rate(), self.piece_len);
        }
    }

    fn finder(&self) -> Option<&Mutex<Finder>> {
        self.finding.as_ref()?.finder.get()?.as_ref()
    }

    fn now(&self) -> Timestamp {
        self.session.environment.now()
    }
}

/// A request that may be posted.
#[derive(Debug)]
pub(super) struct Admitted {
    bytes: u64,
    admission: Option<Admission>,
}

/// A request that was posted.
pub(super) struct Posted<T> {
    under_way: UnderWay<T>,
    admitted: Admitted,
    passes: oneshot::Sender<T>,
}

impl<T> Posted<T> {
    async fn pass(self) -> Result<Admitted, WorkError> {
        let result = self.under_way.done().await?;
        // Whoever posted it may not want to know.
        let _ = self.passes.send(result);
        Ok(self.admitted)
    }
}

/// Bytes that may be under way on any path.
const FLIGHT_MIN: u64 = 4 << 20;
/// Most bytes of a request, unless a slab would have too many.
const PIECE_LEN: usize = 256 << 10;
/// Requests for a slab if the rate is found: bursts should be short.
const PIECES_OF_FINDING: usize = 4;
/// Most requests for a slab: no more than a queue pair has at once.
pub(super) const PIECES_MAX: usize = 256;
