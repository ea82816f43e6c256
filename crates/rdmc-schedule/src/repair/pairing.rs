//! The pairs of senders and receivers of one step.

use std::collections::VecDeque;

use super::bits::Bits;
use super::classes::HolderClasses;

/// A growing matching of members that hold a block with members that miss it.
///
/// Members choose one after the other, each a holder of the rarest block that it can get, and among these the one that
/// has sent the least. A member that finds all its sources taken makes the takers move to others, along an augmenting
/// path. So every member is served that can be served together with those that chose before; in a large group as far as
/// [`MOVES_MAX`] allows.
pub(super) struct Pairing<'a> {
    classes: &'a HolderClasses,
    sent: &'a [u32],
    /// Senders that no receiver has taken.
    free: Bits,
    /// Senders that cannot be had by moving others, in the rest of the step.
    stuck: Bits,
    receiver_of: Vec<Option<u32>>,
    sender_of: Vec<Option<u32>>,
    /// The word of the row of members from which candidates are looked for.
    from: usize,
    moves_left: u32,
}

impl<'a> Pairing<'a> {
    /// Begins without pairs; `sent` is the number of blocks that each member has sent before.
    pub(super) fn new(classes: &'a HolderClasses, sent: &'a [u32], step: usize) -> Pairing<'a> {
        let nobody = vec![None; sent.len()];
        Pairing {
            classes,
            sent,
            free: classes.useful(),
            stuck: classes.nobody(),
            receiver_of: nobody.clone(),
            sender_of: nobody,
            from: step % sent.len().div_ceil(64),
            moves_left: MOVES_MAX,
        }
    }

    /// Tells whether all possible senders have been taken.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_clear()
    }

    /// Returns the sender of each member, if it has got one.
    pub(super) fn senders(self) -> Vec<Option<u32>> {
        self.sender_of
    }

    /// Finds a sender for `receiver` if there is one; for the first receiver there always is.
    pub(super) fn choose(&mut self, receiver: u32) {
        let Some(held) = self.classes.rarest_held_by(&self.free, receiver) else {
            return self.rearrange(receiver);
        };
        let candidates = held.common(&self.free, self.from).take(CANDIDATES_MAX);
        if let Some(sender) = candidates.min_by_key(|&sender| self.sent[sender as usize]) {
            self.free.unset(sender);
            self.join(sender, receiver);
        }
    }

    /// Looks for an augmenting path from `receiver` to a free sender, nearest first, and flips it.
    fn rearrange(&mut self, receiver: u32) {
        let mut seen = self.stuck.clone();
        let mut seen_by = vec![None; self.receiver_of.len()];
        let mut queue = VecDeque::from([receiver]);
        while let Some(asking) = queue.pop_front() {
            let Some(left) = self.moves_left.checked_sub(1) else { return };
            self.moves_left = left;
            let mut sources = self.classes.sources(asking);
            let free = sources.common(&self.free, 0).next();
            if let Some(sender) = free {
                self.free.unset(sender);
                return self.flip(sender, asking, &seen_by);
            }
            sources.remove(&seen);
            seen.add(&sources);
            for sender in sources.ones() {
                seen_by[sender as usize] = Some(asking);
                queue.extend(self.receiver_of[sender as usize]);
            }
        }
        self.stuck = seen;
    }

    /// Gives `sender` to `receiver`, the sender that it leaves to the member that had seen that one, and so on.
    fn flip(&mut self, sender: u32, receiver: u32, seen_by: &[Option<u32>]) {
        let mut end = Some((sender, receiver));
        while let Some((sender, receiver)) = end {
            let left = self.sender_of[receiver as usize];
            self.join(sender, receiver);
            end = left.and_then(|left| Some((left, seen_by[left as usize]?)));
        }
    }

    fn join(&mut self, sender: u32, receiver: u32) {
        self.receiver_of[sender as usize] = Some(receiver);
        self.sender_of[receiver as usize] = Some(sender);
    }
}

/// The holders of a block among which a member looks for the one that has sent least.
const CANDIDATES_MAX: usize = 64;

/// Most members that are asked in one step whether they can take another sender; up to 64 members never ask so often.
const MOVES_MAX: u32 = 4096;
