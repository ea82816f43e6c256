//! Slabs that come to this end: it reads them from the memory of the other end, or the other end writes them to
//! [landings](super::landings).

use std::pin::pin;

use futures::StreamExt;
use futures::stream::FuturesOrdered;
use rdmc_fabric::{Buffer, BufferMut, RemoteMemory};
use tokio::sync::oneshot;
use twox_hash::xxhash3_128;

use super::Shared;
use super::error::SessionError;
use super::landings::Landings;
use super::link::Failure;
use super::requests::Requests;
use super::state::Slab;
use crate::channel::Channel;
use crate::sync::lock;
use crate::wire::{Place, SlabFrame};

impl Shared {
    /// Fetches announced slabs in their order, several at once.
    pub(super) async fn fetch_slabs(&self, channel: &Channel, landings: &Landings) -> Result<Failure, Failure> {
        let (requests, posted) = Requests::new(self, channel, self.terms.rate, &self.incoming_ring);
        let requests = &requests;
        let mut driving = pin!(requests.drive(posted));
        let mut under_way = FuturesOrdered::new();
        let mut posting = Box::pin(self.post_next(requests, landings));
        loop {
            tokio::select! {
                biased;
                error = &mut driving => return Err(error.into()),
                Some(fetched) = under_way.next() => self.deliver(fetched?),
                posted = &mut posting => {
                    let (frame, source) = posted?;
                    under_way.push_back(self.receive(requests, landings, frame, source));
                    drop(posting);
                    posting = Box::pin(self.post_next(requests, landings));
                }
            }
        }
    }

    /// Waits for the next slab to be announced and for memory; posts the reads of its pieces.
    async fn post_next(
        &self,
        requests: &Requests<'_, BufferMut>,
        landings: &Landings,
    ) -> Result<(SlabFrame, SlabSource), Failure> {
        let frame = self.until(|state| state.incoming.next_announced()).await;
        let mut memory = self.memory_of(&frame).await?;
        let source = match &frame.place {
            Place::Exposed(place) => SlabSource::Read(self.read(requests, memory, RemoteMemory::decode(*place)).await),
            Place::Inline(bytes) => {
                // It keeps its place in the ring, too.
                memory.copy_from_slice(bytes);
                SlabSource::Here(memory.freeze())
            }
            Place::Written { pieces } => {
                let landing = landings.next_used();
                SlabSource::Written { landing, pieces: *pieces, into: memory }
            }
        };
        Ok((frame, source))
    }

    /// Waits for memory for a slab.
    async fn memory_of(&self, frame: &SlabFrame) -> Result<BufferMut, Failure> {
        let mut memory = self.incoming_ring.take().await?;
        memory.truncate(frame.len as usize);
        Ok(memory)
    }

    /// Posts the reads of a slab's pieces.
    async fn read(
        &self,
        requests: &Requests<'_, BufferMut>,
        mut memory: BufferMut,
        place: RemoteMemory,
    ) -> Vec<oneshot::Receiver<BufferMut>> {
        let (mut pieces, mut offset) = (Vec::new(), 0);
        while !memory.is_empty() {
            let piece = memory.split_to(requests.piece_len().min(memory.len()));
            let len = piece.len() as u64;
            let admitted = requests.admit(len).await;
            let under_way = requests.channel.read(piece, place.slice(offset, len)).await;
            pieces.push(requests.track(under_way, admitted));
            offset += len;
        }
        pieces
    }

    /// Waits for the bytes of a slab, and compares them with what was announced.
    async fn receive(
        &self,
        requests: &Requests<'_, BufferMut>,
        landings: &Landings,
        mut frame: SlabFrame,
        mut source: SlabSource,
    ) -> Result<Slab, Failure> {
        loop {
            let (bytes, check) = match source {
                SlabSource::Here(bytes) => {
                    let check = xxhash3_128::Hasher::oneshot(&bytes);
                    (bytes, check)
                }
                SlabSource::Read(pieces) => receive_pieces(pieces).await?,
                SlabSource::Written { landing, pieces, into } => landings.take(self, landing, pieces, into).await?,
            };
            if check == frame.check {
                return Ok(Slab { bytes, note: std::mem::take(&mut frame.note) });
            }
            let number = frame.number;
            let attempts = lock(&self.state).incoming.note_corrupt(number);
            tracing::warn!(session = %self.id, slab = number, attempts, "a slab arrived with other bytes");
            if attempts >= ATTEMPTS_MAX {
                return Err(Failure::Session(SessionError::Corrupt { number, attempts }));
            }
            let Place::Exposed(place) = frame.place else {
                // Over the next connection it comes again.
                return Err(Failure::Lost(format!("slab {number} arrived with other bytes")));
            };
            drop(bytes);
            let memory = self.memory_of(&frame).await?;
            source = SlabSource::Read(self.read(requests, memory, RemoteMemory::decode(place)).await);
        }
    }

    fn deliver(&self, slab: Slab) {
        let (len, now) = (slab.bytes.len() as u64, self.environment.now());
        self.change(|state| {
            state.received_bytes += len;
            state.incoming.take(slab);
        });
        // A short slab takes the place of a long one.
        for ring in [&self.incoming_ring, &self.landings_ring] {
            ring.note_passed(ring.slab_len() as u64, now, self.round_trip());
        }
    }
}

/// Waits for the pieces of a slab; returns their bytes and the check value.
async fn receive_pieces(pieces: Vec<oneshot::Receiver<BufferMut>>) -> Result<(Buffer, u128), Failure> {
    let (mut hasher, mut whole) = (xxhash3_128::Hasher::new(), None::<Buffer>);
    for piece in pieces {
        let piece = piece.await.map_err(|_| Failure::Lost("a read has failed".into()))?.freeze();
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

/// Where the bytes of an announced slab come from.
enum SlabSource {
    /// They came with the announcement.
    Here(Buffer),
    /// Reads of its pieces.
    Read(Vec<oneshot::Receiver<BufferMut>>),
    /// The other end writes so many pieces into a landing.
    Written { landing: u32, pieces: u32, into: BufferMut },
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
