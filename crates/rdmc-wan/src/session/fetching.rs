//! Slabs that come to this end: it reads them from the memory of the other end, or the other end writes them to
//! [rooms](super::rooms).

use futures::StreamExt;
use futures::stream::FuturesOrdered;
use rdmc_fabric::{Buffer, BufferMut, RemoteMemory};
use twox_hash::xxhash3_128;

use super::Shared;
use super::error::SessionError;
use super::link::Failure;
use super::requests::Requests;
use super::rooms::Rooms;
use super::state::Slab;
use crate::channel::{Channel, UnderWay};
use crate::wire::{Place, SlabFrame};

impl Shared {
    /// Fetches announced slabs in their order, several at once.
    pub(super) async fn fetch_slabs(&self, channel: &Channel, rooms: &Rooms) -> Result<Failure, Failure> {
        let requests = &Requests::new(self, channel, self.terms.rate, &self.incoming_ring);
        let mut under_way = FuturesOrdered::new();
        let mut posting = Box::pin(self.post_next(requests, rooms));
        loop {
            tokio::select! {
                biased;
                Some(fetched) = under_way.next() => self.deliver(fetched?),
                posted = &mut posting => {
                    let (frame, coming) = posted?;
                    under_way.push_back(self.receive(requests, rooms, frame, coming));
                    drop(posting);
                    posting = Box::pin(self.post_next(requests, rooms));
                }
            }
        }
    }

    /// Waits for the next slab to be announced and for memory; posts the reads of its pieces.
    async fn post_next(&self, requests: &Requests<'_>, rooms: &Rooms) -> Result<(SlabFrame, Coming), Failure> {
        let frame = self.until(|state| state.incoming.next_announced()).await;
        let mut memory = self.memory_of(&frame).await?;
        let coming = match &frame.place {
            Place::Exposed(place) => {
                Coming::Read(self.read(requests, memory, RemoteMemory::decode(*place), Attempt::First).await)
            }
            Place::Inline(bytes) => {
                // It keeps its place in the ring, too.
                memory.copy_from_slice(bytes);
                Coming::Here(memory.freeze())
            }
            Place::Written { pieces } => {
                let room = rooms.next_used();
                Coming::Written { room, pieces: *pieces, into: memory }
            }
        };
        Ok((frame, coming))
    }

    /// Waits for memory for a slab.
    async fn memory_of(&self, frame: &SlabFrame) -> Result<BufferMut, Failure> {
        let mut memory = self.incoming_ring.take().await.map_err(|error| Failure::Session(error.into()))?;
        memory.truncate(frame.len as usize);
        Ok(memory)
    }

    /// Posts the reads of a slab's pieces.
    async fn read(
        &self,
        requests: &Requests<'_>,
        mut memory: BufferMut,
        place: RemoteMemory,
        attempt: Attempt,
    ) -> Vec<UnderWay<BufferMut>> {
        let (mut pieces, mut offset) = (Vec::new(), 0);
        while !memory.is_empty() {
            let piece = memory.split_to(requests.piece_len().min(memory.len()));
            let len = piece.len() as u64;
            match attempt {
                Attempt::First => requests.admit(len).await,
                // Nobody takes its pieces before all are posted: several such slabs would wait for each other.
                Attempt::Again => requests.admit_at_once(len).await,
            }
            pieces.push(requests.channel.read(piece, place.slice(offset, len)).await);
            offset += len;
        }
        pieces
    }

    /// Waits for the bytes of a slab, and compares them with what was announced.
    async fn receive(
        &self,
        requests: &Requests<'_>,
        rooms: &Rooms,
        mut frame: SlabFrame,
        mut coming: Coming,
    ) -> Result<Slab, Failure> {
        for attempts in 1.. {
            let (bytes, check) = match coming {
                Coming::Here(bytes) => {
                    let check = xxhash3_128::Hasher::oneshot(&bytes);
                    (bytes, check)
                }
                Coming::Read(pieces) => receive_pieces(requests, pieces).await?,
                Coming::Written { room, pieces, into } => rooms.take(self, room, pieces, into).await?,
            };
            if check == frame.check {
                return Ok(Slab { bytes, note: std::mem::take(&mut frame.note) });
            }
            tracing::warn!(session = %self.id, slab = frame.number, attempts, "a slab arrived with other bytes");
            if attempts >= ATTEMPTS_MAX {
                return Err(Failure::Session(SessionError::Corrupt { number: frame.number, attempts }));
            }
            let Place::Exposed(place) = frame.place else {
                // Over the next connection it comes again.
                return Err(Failure::Lost(format!("slab {} arrived with other bytes", frame.number)));
            };
            drop(bytes);
            let memory = self.memory_of(&frame).await?;
            coming = Coming::Read(self.read(requests, memory, RemoteMemory::decode(place), Attempt::Again).await);
        }
        unreachable!("the loop has no end")
    }

    fn deliver(&self, slab: Slab) {
        let (len, now) = (slab.bytes.len() as u64, self.environment.now());
        self.change(|state| {
            state.received_bytes += len;
            state.incoming.take(slab);
        });
        // A short slab takes the place of a long one.
        for ring in [&self.incoming_ring, &self.rooms_ring] {
            ring.note_passed(ring.slab_len() as u64, now, self.round_trip());
        }
    }
}

/// Waits for the pieces of a slab; returns their bytes and the check value.
async fn receive_pieces(requests: &Requests<'_>, pieces: Vec<UnderWay<BufferMut>>) -> Result<(Buffer, u128), Failure> {
    let (mut hasher, mut whole) = (xxhash3_128::Hasher::new(), None::<Buffer>);
    for piece in pieces {
        let piece = piece.done().await?.freeze();
        requests.passed(piece.len() as u64);
        for part in piece.chunks(CHECKED_AT_ONCE) {
            hasher.write(part);
            yield_now().await;
        }
        match &mut whole {
            Some(whole) => whole.try_append(piece).expect("pieces follow each other in their slab"),
            None => whole = Some(piece),
        }
    }
    Ok((whole.unwrap_or_else(Buffer::empty), hasher.finish_128()))
}

/// Whether a slab is fetched for the first time.
#[derive(Clone, Copy)]
enum Attempt {
    First,
    Again,
}

/// Where the bytes of an announced slab come from.
enum Coming {
    /// They came with the announcement.
    Here(Buffer),
    /// Reads of its pieces.
    Read(Vec<UnderWay<BufferMut>>),
    /// The other end writes so many pieces into a room.
    Written { room: u32, pieces: u32, into: BufferMut },
}

/// Lets the other tasks of the thread run.
pub(super) async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

/// Bytes that are checked between two turns of other tasks.
pub(super) const CHECKED_AT_ONCE: usize = 64 << 10;
/// How often a slab is fetched before its path counts as broken.
const ATTEMPTS_MAX: u32 = 3;
