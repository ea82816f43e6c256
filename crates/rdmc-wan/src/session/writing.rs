//! Slabs that this end writes to landings of the other.

use std::future;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rdmc_fabric::WorkError;

use super::Shared;
use super::link::Failure;
use super::requests::Requests;
use super::state::Writing;
use crate::channel::{Channel, UnderWay};

impl Shared {
    /// Writes slabs into landings, as both become available. Does nothing if the other end reads.
    pub(super) async fn write_slabs(&self, channel: &Channel) -> Result<Failure, Failure> {
        if !self.terms.writes {
            return future::pending().await;
        }
        let requests = &Requests::new(self, channel, self.terms.their_rate, &self.outgoing_ring);
        let mut under_way = FuturesUnordered::new();
        let mut posting = Box::pin(self.write_next(requests));
        loop {
            tokio::select! {
                biased;
                Some(written) = under_way.next() => written?,
                posted = &mut posting => {
                    under_way.push(finish(requests, posted));
                    drop(posting);
                    posting = Box::pin(self.write_next(requests));
                }
            }
        }
    }

    /// Waits for a slab and a landing, and posts the writes of its pieces; returns them with their lengths.
    async fn write_next(&self, requests: &Requests<'_>) -> Vec<(UnderWay<()>, u64)> {
        let piece_len = requests.piece_len();
        let writing = self.until(|state| state.outgoing.next_to_write(piece_len)).await;
        // The slab is to be announced now.
        self.changed.send_replace(());
        let Writing { bytes, place, landing } = writing;
        let mut pieces = Vec::new();
        for offset in (0..bytes.len()).step_by(piece_len) {
            let piece = bytes.slice(offset..bytes.len().min(offset + piece_len));
            let len = piece.len() as u64;
            requests.admit(len).await;
            pieces.push((requests.channel.write(piece, place.slice(offset as u64, len), landing).await, len));
        }
        pieces
    }
}

/// Waits until the pieces of a slab are in their landing.
async fn finish(requests: &Requests<'_>, pieces: Vec<(UnderWay<()>, u64)>) -> Result<(), WorkError> {
    for (piece, len) in pieces {
        piece.done().await?;
        requests.passed(len);
    }
    Ok(())
}
