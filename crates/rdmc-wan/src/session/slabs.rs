//! The application's ends of the slabs.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use rdmc_fabric::{BufferMut, Expose};
use twox_hash::xxhash3_128;

use super::Shared;
use super::error::SessionError;
use super::state::{MESSAGE_LEN_MAX, OutgoingSlab, Slab, SlabMemory};
use crate::sync::lock;
use crate::wire::{INLINE_LEN_MAX, INLINE_SHARE};

/// Sends slabs. If it is dropped before [`finish`](Self::finish), the session fails at both ends.
pub struct SlabSender(Arc<Shared>);

/// A slab that is being filled: registered memory, of the length that both ends have agreed on.
///
/// Dereferences to its bytes, whose content is unspecified at first.
#[derive(Debug)]
pub struct SlabMut(BufferMut);

impl SlabSender {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Returns the length of a slab in bytes.
    pub fn slab_len(&self) -> usize {
        self.0.terms.slab_len
    }

    /// Waits for an empty slab. This is how the receiver's application, and the path, hold back the sender.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// The session has failed, or the other end takes no more slabs.
    pub async fn slab(&self) -> Result<SlabMut, SessionError> {
        let failed = self.0.until(|state| state.sending_error());
        let slab = async {
            // Short slabs hold no place in the ring.
            self.0.until(|state| state.outgoing.has_room().then_some(())).await;
            self.0.outgoing_ring.take().await
        };
        tokio::select! {
            biased;
            error = failed => Err(error),
            slab = slab => Ok(SlabMut(slab?)),
        }
    }

    /// Sends the first `len` bytes of a slab, with a note of at most 64 KiB. The other end gets them after all that was
    /// sent before.
    ///
    /// It does not wait for the other end; [`taken`](Self::taken) does.
    ///
    /// # Cancel safety
    /// If the future is dropped, the slab is not sent.
    ///
    /// # Errors
    /// The session has failed, the other end takes no more slabs, or the device refuses to expose the memory.
    ///
    /// # Panics
    /// If the slab or the note is shorter, or longer, than that.
    pub async fn send(&mut self, slab: SlabMut, len: usize, note: Vec<u8>) -> Result<(), SessionError> {
        assert!(note.len() <= MESSAGE_LEN_MAX, "a note has at most 64 KiB");
        assert!(len <= slab.len(), "the slab has {} bytes, not {len}", slab.len());
        if let Some(error) = lock(&self.0.state).sending_error() {
            return Err(error);
        }
        let SlabMut(mut memory) = slab;
        memory.truncate(len);
        let check = xxhash3_128::Hasher::oneshot(&memory);
        // Short beside a whole slab, too: otherwise all slabs would pass through the control connection.
        let memory = match len <= INLINE_LEN_MAX.min(self.0.terms.slab_len / INLINE_SHARE) {
            true => SlabMemory::Short(memory.to_vec()),
            false if self.0.terms.writes => SlabMemory::Written { bytes: memory.freeze(), pieces: None },
            false => SlabMemory::Exposed(self.0.fabric.expose(Expose::Frozen(memory.freeze()))?),
        };
        let len = u32::try_from(len).expect("a slab has at most 1 GiB");
        self.0.change(|state| {
            state.sent_bytes += u64::from(len);
            state.outgoing.push(OutgoingSlab { memory, len, check, note });
        });
        Ok(())
    }

    /// Waits until the other end has taken all slabs that were sent so far: they are in its memory.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// The session has failed, or the other end takes no more slabs.
    pub async fn taken(&self) -> Result<(), SessionError> {
        let all = lock(&self.0.state).outgoing.count();
        self.0
            .until(|state| match &state.ended {
                _ if state.outgoing.taken() >= all => Some(Ok(())),
                _ if state.outgoing.is_stopped() => Some(Err(SessionError::Stopped)),
                Some(ended) => Some(Err(ended.clone().err().unwrap_or(SessionError::Closed))),
                None => None,
            })
            .await
    }

    /// Ends this direction, and waits until the other end has all its slabs.
    ///
    /// # Cancel safety
    /// If the future was polled, the direction has ended.
    ///
    /// # Errors
    /// The session has failed, or the other end takes no more slabs.
    pub async fn finish(self) -> Result<(), SessionError> {
        self.end();
        self.taken().await
    }

    /// Ends this direction without waiting.
    pub(crate) fn end(&self) {
        self.0.change(|state| state.outgoing.finish());
    }
}

impl Drop for SlabSender {
    fn drop(&mut self) {
        self.0.change(|state| {
            if !state.outgoing.is_finished() && !state.outgoing.is_stopped() && state.ended.is_none() {
                state.abort("its sender was dropped before the end of the data");
                state.end(Err(SessionError::Closed));
            }
        });
    }
}

impl fmt::Debug for SlabSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabSender").field("id", &self.0.id).finish_non_exhaustive()
    }
}

impl Deref for SlabMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for SlabMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Receives slabs, in their order. If it is dropped before the last one, the other end learns that no more are wanted.
pub struct SlabReceiver(Arc<Shared>);

impl SlabReceiver {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Waits for the next slab; `None` after the last one.
    ///
    /// A slab that is held keeps its part of the ring: an application that holds many slows down the sender.
    ///
    /// # Cancel safety
    /// No slab is lost.
    ///
    /// # Errors
    /// The session has failed, and all slabs that had arrived were received.
    pub async fn next(&mut self) -> Result<Option<Slab>, SessionError> {
        self.0.until_changed(|state| state.incoming.next_ready()).await
    }
}

impl Drop for SlabReceiver {
    fn drop(&mut self) {
        self.0.change(|state| state.incoming.stop());
    }
}

impl fmt::Debug for SlabReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlabReceiver").field("id", &self.0.id).finish_non_exhaustive()
    }
}
