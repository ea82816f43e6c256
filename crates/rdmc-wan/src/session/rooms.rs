//! Rooms: memory of this end that the other end writes slabs to.
//!
//! A room has the length of a slab, and its key lasts as long as the connection. The other end uses rooms in the order
//! in which it was told of them. Each piece that it writes brings the number of its room as the immediate. When all
//! pieces of a slab are here, its bytes are copied out, and the room is told anew under the next number. So whatever the
//! other end writes later does not change what was checked.

use std::collections::HashMap;
use std::future;
use std::sync::Mutex;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rdmc_fabric::{Buffer, BufferMut, Expose, ExposedRegion, RemoteAccess};
use tokio::sync::watch;
use twox_hash::xxhash3_128;

use super::Shared;
use super::error::SessionError;
use super::fetching::{CHECKED_AT_ONCE, yield_now};
use super::link::Failure;
use super::state::Violation;
use crate::channel::{Channel, Receives};
use crate::sync::lock;

/// The rooms of one connection.
#[derive(Default)]
pub(super) struct Rooms {
    state: Mutex<RoomsState>,
    /// Changes when a piece arrives.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct RoomsState {
    /// Rooms that the other end knows of, by their numbers.
    open: HashMap<u32, Room>,
    /// The number of the next room to be told.
    next_told: u32,
    /// The number of the next room that the other end uses for a slab.
    next_used: u32,
}

struct Room {
    exposed: ExposedRegion,
    /// Pieces that are here.
    pieces: u32,
}

impl Rooms {
    /// Returns the number of the room of the next slab.
    pub(super) fn next_used(&self) -> u32 {
        let mut state = lock(&self.state);
        let number = state.next_used;
        state.next_used = number.wrapping_add(1);
        number
    }

    /// Tells the other end of a room.
    fn tell(&self, session: &Shared, exposed: ExposedRegion) {
        let place = exposed.remote().encode();
        let mut state = lock(&self.state);
        let number = state.next_told;
        state.next_told = number.wrapping_add(1);
        state.open.insert(number, Room { exposed, pieces: 0 });
        session.change(|session| session.incoming.tell_room(place));
    }

    /// Notes that a piece of the room is here.
    fn note_piece(&self, number: Option<u32>) -> Result<(), Violation> {
        let mut state = lock(&self.state);
        let room = number.and_then(|number| state.open.get_mut(&number)).ok_or(Violation("a write to no room"))?;
        room.pieces = room.pieces.saturating_add(1);
        drop(state);
        self.changed.send_replace(());
        Ok(())
    }

    /// Waits until so many pieces are in a room, and moves their bytes to `into`; returns them with their check value.
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
                let room = state.open.get(&number).ok_or(Violation("a slab without a room"))?;
                if room.pieces >= pieces { state.open.remove(&number) } else { None }
            };
            match filled {
                Some(room) => break room.exposed,
                None => changed.changed().await.expect("the rooms live as long as this future"),
            }
        };
        let (mut hasher, mut offset) = (xxhash3_128::Hasher::new(), 0);
        for part in into.chunks_mut(CHECKED_AT_ONCE) {
            exposed.read_at(offset, part).expect("a slab is no longer than its room");
            hasher.write(part);
            offset += part.len();
            yield_now().await;
        }
        self.tell(session, exposed);
        Ok((into.freeze(), hasher.finish_128()))
    }
}

impl Shared {
    /// Gives the other end as many rooms as the ring of rooms may have, and notes what is written to them. Does nothing
    /// if this end reads its slabs.
    pub(super) async fn keep_rooms(&self, channel: &Channel, rooms: &Rooms) -> Result<Failure, Failure> {
        if !self.terms.ours.has_rooms {
            return future::pending().await;
        }
        let mut noting: FuturesUnordered<_> =
            channel.receive_writes().map(|receives| note_writes(receives, rooms)).collect();
        loop {
            let memory = tokio::select! {
                biased;
                Some(failure) = noting.next() => return failure,
                memory = self.rooms_ring.take() => memory.map_err(SessionError::from)?,
            };
            let exposed = self.fabric.expose(Expose::Mutable(memory, RemoteAccess::WRITE));
            rooms.tell(self, exposed.map_err(SessionError::from)?);
        }
    }
}

/// Notes the pieces that one stream brings.
async fn note_writes(mut receives: Receives<'_>, rooms: &Rooms) -> Result<Failure, Failure> {
    loop {
        rooms.note_piece(receives.next().await?)?;
    }
}
