//! One digest of all messages of a group.

use std::collections::BTreeMap;

use crate::certificate::Digest;

/// Chains digests in the order of the messages, although they become known in any order.
#[derive(Debug)]
pub(super) struct DigestChain {
    messages: u64,
    digest: Digest,
    /// Digests after a message whose digest is not known yet; no more than messages are in flight at once.
    early: BTreeMap<u64, Digest>,
}

impl DigestChain {
    /// Begins after the first `messages`, on which members need not agree any more.
    pub(super) fn after(messages: u64) -> Self {
        Self { messages, digest: Digest([0; 32]), early: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, message: u64, digest: Digest) {
        if message != self.messages {
            self.early.insert(message, digest);
            return;
        }
        let mut next = Some(digest);
        while let Some(digest) = next {
            self.messages += 1;
            self.digest = Digest(blake3::hash([self.digest.0, digest.0].as_flattened()).into());
            next = self.early.remove(&self.messages);
        }
    }

    /// Returns the digest of all messages if there are so many and all digests are known.
    pub(super) fn of(&self, messages: u64) -> Option<Digest> {
        (self.messages == messages).then_some(self.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_depends_on_every_digest_and_on_their_order_alone() {
        let chain = |digests: &[(u64, u8)]| {
            let mut chain = DigestChain::after(0);
            digests.iter().for_each(|(message, byte)| chain.add(*message, Digest([*byte; 32])));
            chain.of(3)
        };
        let whole = chain(&[(0, 7), (1, 8), (2, 9)]);
        assert!(whole.is_some());
        assert_eq!(chain(&[(2, 9), (0, 7), (1, 8)]), whole);
        assert_ne!(chain(&[(0, 8), (1, 7), (2, 9)]), whole);
        assert_ne!(chain(&[(0, 7), (1, 8), (2, 0)]), whole);
        assert_eq!(chain(&[(0, 7), (2, 9)]), None);
    }
}
