//! Slabs that this end writes to landings of the other.

use std::convert::Infallible;
use std::future;

use super::Shared;
use super::link::Failure;
use super::requests::Requests;
use super::state::Writing;
use crate::channel::Channel;

impl Shared {
    /// Writes slabs into landings, as both become available. Does nothing if the other end reads.
    pub(super) async fn write_slabs(&self, channel: &Channel) -> Result<Failure, Failure> {
        if !self.terms.writes {
            return future::pending().await;
        }
        let (requests, posted) = Requests::new(self, channel, self.terms.their_rate, &self.outgoing_ring);
        tokio::select! {
            biased;
            error = requests.drive(posted) => Err(error.into()),
            never = self.post_writes(&requests) => match never {},
        }
    }

    /// Waits for slabs and landings, and posts the writes of their pieces.
    async fn post_writes(&self, requests: &Requests<'_, ()>) -> Infallible {
        let piece_len = requests.piece_len();
        loop {
            let writing = self.until(|state| state.outgoing.next_to_write(piece_len)).await;
            // The slab is to be announced now.
            self.changed.send_replace(());
            let Writing { bytes, place, landing } = writing;
            for offset in (0..bytes.len()).step_by(piece_len) {
                let piece = bytes.slice(offset..bytes.len().min(offset + piece_len));
                let len = piece.len() as u64;
                let admitted = requests.admit(len).await;
                let under_way = requests.channel.write(piece, place.slice(offset as u64, len), landing).await;
                requests.track(under_way, admitted);
            }
        }
    }
}
