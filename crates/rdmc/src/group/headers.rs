//! Headers of messages: in a group with headers, each travels as a message of its own before its message.
//!
//! So order, flow control, recovery and the certificate are those of any message. Headers have the even numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::{Group, GroupSpec};
use crate::sync::lock;

/// The headers that a member has, until their messages are offered. Kept for a group that continues this one.
#[derive(Debug, Default)]
pub(super) struct Headers {
    known: Mutex<BTreeMap<u64, Arc<[u8]>>>,
    added: Notify,
}

impl Headers {
    pub(super) fn add(&self, number: u64, header: Arc<[u8]>) {
        lock(&self.known).insert(number, header);
        self.added.notify_one();
    }

    /// Waits for a header. One task waits at a time.
    pub(super) async fn get(&self, number: u64) -> Arc<[u8]> {
        loop {
            if let Some(header) = lock(&self.known).get(&number) {
                return header.clone();
            }
            self.added.notified().await;
        }
    }

    /// Drops the headers of messages before `message`.
    pub(super) fn release(&self, message: u64) {
        let mut known = lock(&self.known);
        *known = known.split_off(&message.saturating_sub(1));
    }

    pub(super) fn take(&self) -> BTreeMap<u64, Arc<[u8]>> {
        std::mem::take(&mut *lock(&self.known))
    }
}

impl Group {
    /// Tells whether a message is the header of the next one.
    pub(super) fn is_header(&self, number: u64) -> bool {
        self.membership.spec.headers && number.is_multiple_of(2)
    }

    /// Returns the number of a message's header, if it has one.
    pub(super) fn header_of(&self, number: u64) -> Option<u64> {
        number.checked_sub(1).filter(|before| self.is_header(*before))
    }
}

impl GroupSpec {
    /// Longest [header](Self::headers), in bytes.
    pub const HEADER_LEN_MAX: usize = 4096;
}
