//! The blocks that some member still misses, by their holders.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::bits::{Bits, WORD, ones};
use super::block_set::BlockSet;

/// The blocks that some member misses, in classes with the same holders.
///
/// The cost of a choice grows with the number of classes, which are few, and not with the number of blocks.
#[derive(Debug)]
pub(super) struct HolderClasses {
    members: u32,
    everybody: Bits,
    /// The rarest come first, and of a class the block that came first.
    queues: BTreeMap<HolderClass, VecDeque<u32>>,
    /// Where blocks were put in this step.
    touched: Vec<HolderClass>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HolderClass {
    /// How many members hold the block when this step ends.
    holders: u32,
    /// The members that held it when this step began, and so may send it.
    held: Bits,
    /// The members that get it in this step.
    given: Bits,
}

impl HolderClasses {
    /// Sorts the blocks of at least one member's holdings.
    ///
    /// # Errors
    /// The blocks that no member holds, if there are any.
    pub(super) fn new(holdings: &[BlockSet], members: u32) -> Result<HolderClasses, BlockSet> {
        let mut lost = BlockSet::empty(holdings[0].blocks());
        let mut queues = BTreeMap::<HolderClass, VecDeque<u32>>::new();
        for run in runs(holdings) {
            let (mut held, mut holders) = (Bits::clear(members), 0);
            for (rank, set) in (0..).zip(holdings) {
                if set.holds(run.start) {
                    held.set(rank);
                    holders += 1;
                }
            }
            if holders == 0 {
                lost.fill(run);
            } else if holders < members {
                queues.entry(HolderClass { holders, held, given: Bits::clear(members) }).or_default().extend(run);
            }
        }
        if !lost.is_empty() {
            return Err(lost);
        }
        let mut everybody = Bits::clear(members);
        (0..members).for_each(|rank| everybody.set(rank));
        Ok(HolderClasses { members, everybody, queues, touched: Vec::new() })
    }

    pub(super) fn nobody(&self) -> Bits {
        Bits::clear(self.members)
    }

    /// Returns the members that hold a block which some member misses.
    pub(super) fn useful(&self) -> Bits {
        let (mut useful, mut classes) = (self.nobody(), self.queues.keys());
        // Usually these are all members, and a few classes show it.
        while useful != self.everybody
            && let Some(class) = classes.next()
        {
            useful.add(&class.held);
        }
        useful
    }

    /// Returns the members that hold a block which `receiver` misses, all as this step began.
    pub(super) fn sources(&self, receiver: u32) -> Bits {
        let mut sources = self.nobody();
        let missing = self.queues.keys().filter(|class| !class.held.contains(receiver));
        missing.for_each(|class| sources.add(&class.held));
        sources
    }

    /// Returns the holders of the rarest block that `receiver` misses and a member in `free` holds.
    pub(super) fn rarest_held_by(&self, free: &Bits, receiver: u32) -> Option<&Bits> {
        let mut held = self.queues.keys().map(|class| &class.held);
        held.find(|held| !held.contains(receiver) && held.meets(free))
    }

    /// Gives `receiver` the rarest block that it misses and `sender` holds, in this step.
    pub(super) fn give(&mut self, sender: u32, receiver: u32) -> Option<u32> {
        let misses = |class: &&HolderClass| !class.held.contains(receiver) && !class.given.contains(receiver);
        let mut class = self.queues.keys().filter(misses).find(|class| class.held.contains(sender))?.clone();
        let block = self.take(&class)?;
        class.holders += 1;
        class.given.set(receiver);
        self.queues.entry(class.clone()).or_default().push_back(block);
        self.touched.push(class);
        Some(block)
    }

    /// Ends the step: members hold the blocks that they got in it.
    pub(super) fn settle(&mut self) {
        for class in std::mem::take(&mut self.touched) {
            // A class may have been touched twice, or left by its blocks for another one of this step.
            let Some(given) = self.queues.remove(&class) else { continue };
            let HolderClass { holders, mut held, given: takers } = class;
            if holders < self.members {
                held.add(&takers);
                let class = HolderClass { holders, held, given: self.nobody() };
                self.queues.entry(class).or_default().extend(given);
            }
        }
    }

    fn take(&mut self, class: &HolderClass) -> Option<u32> {
        let queue = self.queues.get_mut(class)?;
        let block = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(class);
        }
        block
    }
}

/// Cuts the blocks into runs of blocks with the same holders; no run crosses a word's end.
fn runs(holdings: &[BlockSet]) -> impl Iterator<Item = Range<u32>> + '_ {
    let blocks = holdings[0].blocks().get();
    let words = 0..holdings[0].words().len();
    words.zip((0..).step_by(64)).flat_map(move |(word, start)| {
        let end = blocks.min(start + WORD);
        let changes = |set: &BlockSet| set.words()[word] ^ (set.words()[word] << 1);
        let starts = holdings.iter().map(changes).fold(1, |starts, changes| starts | changes);
        let starts = starts & (u64::MAX >> (WORD - (end - start)));
        ones(starts).map(move |bit| {
            let later = starts.checked_shr(bit + 1).unwrap_or(0);
            let next = if later == 0 { end } else { start + bit + 1 + later.trailing_zeros() };
            start + bit..next
        })
    })
}
