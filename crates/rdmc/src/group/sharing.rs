//! Groups whose members share every message: the descriptor of a sealed object travels instead of its bytes.
//!
//! The descriptor is a message like any other, so order, flow control, recovery and close are the same. The
//! descriptor's memory owns the object, so the root keeps the object open as long as it retains the descriptor. A
//! member has a message when it has mapped the object.

use bytes::Bytes;
use rdmc_fabric::{AttachError, Buffer, Memory, ObjectDescriptor, ObjectShare, SharedObject};
use rdmc_schedule::Rank;

use super::Group;
use super::error::SendError;
use super::sender::Payload;
use crate::failure::{FailureCause, with_sources};
use crate::pool::PoolError;
use crate::transfer::TransferError;

/// The descriptor of an object, as it is sent. The object stays shared as long as this memory lives.
struct SharedDescriptor {
    bytes: [u8; ObjectDescriptor::LEN],
    _share: ObjectShare,
}

impl AsRef<[u8]> for SharedDescriptor {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Group {
    /// At the root: turns a payload into the memory that is sent.
    pub(super) fn register_payload(&self, payload: Payload) -> Result<Buffer, SendError> {
        let memory = match payload {
            Payload::Object(object) if self.membership.spec.is_shared() => self.announced(&object)?,
            _ if self.membership.spec.is_shared() => return Err(SendError::NotAnObject),
            Payload::Buffer(buffer) => return Ok(buffer),
            Payload::Memory(memory) => memory,
            Payload::Object(object) => object.into(),
        };
        Ok(self.membership.node.fabric.register(memory)?.into_shared())
    }

    fn announced(&self, object: &SharedObject) -> Result<Memory, SendError> {
        let share = self.membership.node.fabric.share(object)?;
        Ok(Bytes::from_owner(SharedDescriptor { bytes: share.descriptor().encode(), _share: share }).into())
    }

    /// At another member: returns the content of a whole message: its bytes, or the object that they describe.
    pub(crate) async fn content(&self, message: u64, whole: &Buffer) -> Result<Buffer, TransferError> {
        if !self.membership.spec.is_shared() {
            return Ok(whole.clone());
        }
        let descriptor = ObjectDescriptor::decode(whole)
            .ok_or_else(|| TransferError::sent(Rank::ROOT, "no descriptor of an object"))?;
        let (len, max) = (descriptor.len, self.membership.node.pool.bytes_max());
        if len > max {
            let what = PoolError::TooLong { len, max }.to_string();
            return Err(TransferError::Local(FailureCause::Resources { what }));
        }
        let attached = self.membership.node.fabric.attach(descriptor).await;
        attached.map_err(|error| {
            let what = format!("the object of message {message}: {}", with_sources(&error));
            match error {
                AttachError::Unsound { .. } => TransferError::Protocol { by: Rank::ROOT, what },
                AttachError::Unreachable(_) | AttachError::NotShared if !self.membership.prior.root_gone => {
                    TransferError::Unattached { by: Rank::ROOT, what }
                }
                // The owner is not a member any more, or this member is at fault.
                _ => TransferError::Local(FailureCause::Resources { what }),
            }
        })
    }
}
