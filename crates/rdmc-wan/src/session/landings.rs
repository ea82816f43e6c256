//! Landings: memory of this end that the other end writes slabs to.
//!
//! A landing has the length of a slab, and its key lasts as long as the connection. The other end uses landings in the
//! order in which they were announced. Each piece that it writes brings the number of its landing as the immediate. When
//! all pieces of a slab are here, its bytes are copied out, and the landing is announced again under the next number. So
//! whatever the other end writes later does not change what was checked.

use std::collections::HashMap;
use std::future;
use std::sync::Mutex;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rdmc_fabric::{Buffer, BufferMut, Expose, ExposedRegion, RemoteAccess};
use tokio::sync::watch;
use twox_hash::xxhash3_128;

use super::Shared;
use super::fetching::{CHECKED_AT_ONCE, yield_now};
use super::link::Failure;
use super::state::Violation;
use crate::channel::{Channel, Receives};
use crate::sync::lock;

/// The landings of one connection.
#[derive(Default)]
pub(super) struct Landings {
    state: Mutex<LandingsState>,
    /// Changes when a piece arrives.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct LandingsState {
    /// Landings that the other end knows of, by their numbers.
    open: HashMap<u32, Landing>,
    /// The number of the next landing to be announced.
    next_announced: u32,
    /// The number of the next landing that the other end uses for a slab.
    next_used: u32,
}

struct Landing {
    exposed: ExposedRegion,
    /// Pieces that are here.
    pieces: u32,
}

impl Landings {
    /// Returns the number of the landing of the next slab.
    pub(super) fn next_used(&self) -> u32 {
        let mut state = lock(&self.state);
        let number = state.next_used;
        state.next_used = number.wrapping_add(1);
        number
    }

    /// Announces a landing to the other end.
    fn announce(&self, session: &Shared, exposed: ExposedRegion) {
        let place = exposed.remote().encode();
        let mut state = lock(&self.state);
        let number = state.next_announced;
        state.next_announced = number.wrapping_add(1);
        state.open.insert(number, Landing { exposed, pieces: 0 });
        // Under the lock: they are announced in the order of their numbers.
        session.change(|session| session.incoming.announce_landing(place));
    }

    /// Notes that a piece of the landing is here.
    fn note_piece(&self, number: Option<u32>) -> Result<(), Violation> {
        let mut state = lock(&self.state);
        let landing =
            number.and_then(|number| state.open.get_mut(&number)).ok_or(Violation("a write to no landing"))?;
        landing.pieces = landing.pieces.saturating_add(1);
        drop(state);
        self.changed.send_replace(());
        Ok(())
    }

    /// Waits until so many pieces are in a landing, and copies their bytes to `into`; returns them with their check
    /// value.
    pub(super) async fn take(
        &self,
        session: &Shared,
        number: u32,
        pieces: u32,
        mut into: BufferMut,
    ) -> Result<(Buffer, u128), Failure> {
        let mut changed = self.changed.subscribe();
        let exposed = loop {
            let filled = {
                let mut state = lock(&self.state);
                let landing = state.open.get(&number).ok_or(Violation("a slab without a landing"))?;
                if landing.pieces >= pieces { state.open.remove(&number) } else { None }
            };
            match filled {
                Some(landing) => break landing.exposed,
                None => changed.changed().await.expect("the landings live as long as this future"),
            }
        };
        let (mut hasher, mut offset) = (xxhash3_128::Hasher::new(), 0);
        for part in into.chunks_mut(CHECKED_AT_ONCE) {
            exposed.read_at(offset, part).expect("a slab is no longer than its landing");
            hasher.write(part);
            offset += part.len();
            yield_now().await;
        }
        self.announce(session, exposed);
        Ok((into.freeze(), hasher.finish_128()))
    }
}

impl Shared {
    /// Announces as many landings as their ring may have, and notes what is written to them. Does nothing if this end
    /// reads its slabs.
    pub(super) async fn keep_landings(&self, channel: &Channel, landings: &Landings) -> Result<Failure, Failure> {
        if !self.terms.ours.has_landings {
            return future::pending().await;
        }
        let mut receives: FuturesUnordered<_> =
            channel.receive_writes().map(|receives| note_writes(receives, landings)).collect();
        loop {
            let memory = tokio::select! {
                biased;
                Some(failure) = receives.next() => return failure,
                memory = self.landings_ring.take() => memory?,
            };
            landings.announce(self, self.fabric.expose(Expose::Mutable(memory, RemoteAccess::WRITE))?);
        }
    }
}

/// Notes the pieces that one stream brings.
async fn note_writes(mut receives: Receives<'_>, landings: &Landings) -> Result<Failure, Failure> {
    loop {
        landings.note_piece(receives.next().await?)?;
    }
}
