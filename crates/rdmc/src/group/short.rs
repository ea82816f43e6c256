//! Short messages: those that share a slot of the ring begin, and are delivered, together.
//!
//! They are whole when they begin, so they need no transfer.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use rdmc_fabric::Buffer;
use rdmc_schedule::BlockCount;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::Group;
use super::offer::{Arrival, Message, Offer};
use super::retained::ShortMessage;
use crate::certificate::Digest;
use crate::checksum::Checksum;
use crate::failure::FailureCause;
use crate::table::{Slot, ring};
use crate::transfer::{Shape, TransferError};

/// The messages of one slot, as the group keeps them.
pub(super) struct ShortMessages {
    messages: Arc<[ShortMessage]>,
    digests: Vec<Option<Digest>>,
}

/// What the engine of a receiver hands to the application.
pub(super) enum Incoming {
    Offer(Offer),
    /// Where the memory is the pool's: messages that are whole.
    Whole(WholeMessages),
}

/// Whole messages, in the order of the group.
#[derive(Default)]
pub(super) struct WholeMessages {
    messages: VecDeque<Message>,
    /// Lets the engine receive as many messages ahead.
    ahead: Option<OwnedSemaphorePermit>,
}

impl WholeMessages {
    /// Takes the next message.
    pub(super) fn next(&mut self) -> Option<Message> {
        let message = self.messages.pop_front();
        // One by one, the engine would be woken for each.
        self.ahead.take_if(|_| self.messages.is_empty());
        message
    }
}

impl ShortMessages {
    /// Copies messages of one block. What is kept and checked is what is sent, also if it is in files that change.
    pub(super) fn copy(group: &Group, messages: &[(Buffer, Shape)]) -> Result<Self, TransferError> {
        let is_copied = |message: &Buffer| group.retained.copies_short(message);
        let copied = || messages.iter().map(|(message, _)| message).filter(|message| is_copied(message));
        let mut copies = vec![0; copied().map(Buffer::len).sum()];
        let mut room = &mut copies[..];
        for message in copied() {
            let (copy, rest) = room.split_at_mut(message.len());
            message.copy_to(0, copy).map_err(|error| unusable(&error))?;
            room = rest;
        }
        let mut copies = Bytes::from(copies);
        let checks = group.exchange.checks_blocks;
        let (messages, digests): (Vec<_>, Vec<_>) = messages
            .iter()
            .map(|(message, shape)| {
                let bytes = match is_copied(message) {
                    true => copies.split_to(message.len()),
                    false => message.clone().into(),
                };
                let checksum = checks.then(|| Checksum::of(&bytes));
                let digest = checksum.map(|checksum| Digest::of_block(shape.size, shape.block_size, checksum));
                (ShortMessage::of_one_block(*shape, bytes, checksum), digest)
            })
            .unzip();
        Ok(Self { messages: messages.into(), digests })
    }

    fn bytes(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.messages.iter().map(ShortMessage::bytes)
    }

    /// Returns the bytes of all.
    fn len(&self) -> u64 {
        self.bytes().map(|bytes| bytes.len() as u64).sum()
    }
}

impl Group {
    // At the root.

    /// Begins short messages, of which `first` is the first. Waits for ever if the group does no further work.
    pub(super) async fn begin_short(&self, first: u64, short: &ShortMessages) {
        let sizes = short.bytes().map(|bytes| bytes.len() as u64);
        self.end.begin_all_whole(first, sizes.zip(short.digests.iter().copied())).await;
        self.retained.keep_short(first, &short.messages);
        self.status.report_held(short.len());
        self.short_completed(first, short);
    }

    /// Writes short messages into a slot, for which there is [room](Self::room_for_slot). They fit together.
    pub(super) fn write_short(&self, short: &ShortMessages) -> Result<(), TransferError> {
        if let [only] = &short.messages[..] {
            return self.write_slot(Slot::Message(only.bytes().len()), |place| place.copy_from_slice(only.bytes()));
        }
        let len = ring::packed_len(short.bytes().map(<[u8]>::len));
        self.write_slot(Slot::Messages(len), |place| ring::pack(short.bytes(), place))
    }

    // At a receiver.

    /// Delivers short messages that have come in a slot, of which `first` is the first, after the messages before them.
    pub(super) async fn take_short(
        self: &Arc<Self>,
        first: u64,
        short: Vec<(Buffer, Shape)>,
        mut ahead: OwnedSemaphorePermit,
        incoming: &mpsc::Sender<Incoming>,
    ) -> Result<(), TransferError> {
        let mut header = match self.header_of(first) {
            Some(header) => Some(self.retained.headers.get(header).await),
            None => None,
        };
        let kept = ShortMessages::copy(self, &short)?;
        let count = short.len() as u64;
        let messages = (first..).zip(short).zip(&kept.digests).map(|((number, (content, _)), digest)| {
            let mut message = Message::new(number, content, *digest, self.status.fates.fate(number));
            if self.is_header(number) {
                header = Some(self.take_header(&message));
            } else if let Some(header) = header.take() {
                message.set_header(header);
            }
            message
        });
        let messages = messages.collect();
        let send = |to_application| {
            // There is room for as many as are received ahead.
            let sent = incoming.try_send(to_application);
            sent.map_err(|_| TransferError::Local(FailureCause::Abandoned))
        };
        self.end
            .take_whole(first, messages, |mut messages, at_once| {
                if at_once {
                    messages.retain(|message| !self.is_header(message.number()));
                    if messages.is_empty() {
                        return Ok(Vec::new());
                    }
                    send(Incoming::Whole(WholeMessages { messages: messages.into(), ahead: Some(ahead) }))?;
                    return Ok(Vec::new());
                }
                let waiting = messages.into_iter().map(|message| {
                    let (to, coming) = oneshot::channel();
                    if !self.is_header(message.number()) {
                        let share = ahead.split(1).expect("it has one for each message");
                        let arrival = Arrival::new(self.clone(), coming, None, share);
                        let offer = Offer::new(message.number(), message.len() as u64, None, false, arrival);
                        send(Incoming::Offer(offer))?;
                    }
                    Ok((to, message))
                });
                waiting.collect()
            })
            .await?;
        self.retained.keep_short(first, &kept.messages);
        if !self.retained.keeps() {
            self.retained.headers.release(first + count - 1);
        }
        self.status.report_held(kept.len());
        self.short_completed(first, &kept);
        Ok(())
    }

    fn short_completed(&self, first: u64, short: &ShortMessages) {
        self.exchange.distance.note_message(BlockCount(1));
        for (number, bytes) in (first..).zip(short.bytes()) {
            self.message_completed(number, bytes.len() as u64);
        }
    }
}

fn unusable(error: &std::io::Error) -> TransferError {
    TransferError::Local(FailureCause::Resources { what: format!("a short message could not be read: {error}") })
}
