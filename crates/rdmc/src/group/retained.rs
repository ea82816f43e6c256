//! Retains the messages that some members lack, so that others can supply what a failed member had or a corrupted
//! block.
//!
//! How many messages all members have is known from their rows (`status.rs`). These are dropped.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use rdmc_fabric::{Buffer, Fabric, FabricError, Memory};
use rdmc_schedule::{BlockIndex, BlockSet, Rank};
use tokio::sync::watch;

use super::headers::Headers;
use crate::checksum::Checksum;
use crate::count::Level;
use crate::failure::FailureCause;
use crate::sync::lock;
use crate::transfer::{Blocks, Shape};

/// The messages that one member retains.
pub(crate) struct RetainedMessages {
    state: Mutex<RetainedState>,
    /// How many messages all members have, from the first.
    pub(super) stable: Level,
    /// Whether messages are retained.
    enabled: bool,
    /// Whether queued messages are kept when the group fails.
    recoverable: bool,
    /// Whether short messages are kept as copies, without the memory into which they were received.
    copies_short: bool,
    /// Whether the group does no more work here.
    idle: watch::Sender<bool>,
    /// Whether the messages were dropped, since the group is not recovered.
    unwanted: watch::Sender<bool>,
    pub(super) headers: Headers,
    /// At the root: the messages that are still being read from their sources.
    pub(super) sources: Arc<OpenSources>,
}

struct RetainedState {
    kept: BTreeMap<u64, RetainedMessage>,
    /// Short messages that have begun together, in order. All of a run are kept until the last is not needed.
    short: VecDeque<ShortRun>,
    /// All members have so many messages.
    released: u64,
    /// Messages that were queued at the root, but not begun.
    queued: Vec<(Buffer, Shape)>,
    /// Where all rows are read: how many messages each member has.
    held: Vec<u64>,
    /// How many messages this member has reported to the others.
    told: u64,
    /// Bytes of the messages that it got since.
    untold_bytes: u64,
    /// At the root: of how many messages it has told the others that all have them.
    told_stable: u64,
}

/// Short messages that follow each other.
struct ShortRun {
    first: u64,
    messages: Arc<[ShortMessage]>,
}

impl ShortRun {
    fn end(&self) -> u64 {
        self.first + self.messages.len() as u64
    }
}

impl RetainedState {
    fn short(&self, number: u64) -> Option<&ShortMessage> {
        let run = &self.short.get(self.short.partition_point(|run| run.end() <= number))?;
        let at = usize::try_from(number.checked_sub(run.first)?).ok()?;
        run.messages.get(at).filter(|_| number >= self.released)
    }
}

/// A retained message.
#[derive(Clone)]
pub(crate) enum RetainedMessage {
    Blocks(Arc<Blocks>),
    /// A short message that is whole.
    Short(ShortMessage),
}

/// A short message, as a copy.
#[derive(Clone)]
pub(crate) struct ShortMessage {
    shape: Shape,
    bytes: Bytes,
    /// Checksums of its blocks, where they were checked, so that others find bytes that change here.
    checksums: Checksums,
}

#[derive(Clone)]
enum Checksums {
    OfOne(Option<Checksum>),
    OfAll(Arc<[Option<Checksum>]>),
}

impl ShortMessage {
    /// Makes a message of one block of bytes that are its own, or shared with few other short messages.
    pub(super) fn of_one_block(shape: Shape, bytes: Bytes, checksum: Option<Checksum>) -> Self {
        debug_assert_eq!((shape.count.0, shape.size), (1, bytes.len() as u64));
        Self { shape, bytes, checksums: Checksums::OfOne(checksum) }
    }

    fn copy(bytes: &[u8], blocks: &Blocks) -> Self {
        let shape = blocks.shape();
        let checksum = |block| blocks.checksum(BlockIndex(block));
        let checksums = match shape.count.0 {
            1 => Checksums::OfOne(checksum(0)),
            count => Checksums::OfAll((0..count).map(checksum).collect()),
        };
        Self { shape, bytes: Bytes::copy_from_slice(bytes), checksums }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn checksums(&self) -> &[Option<Checksum>] {
        match &self.checksums {
            Checksums::OfOne(checksum) => std::slice::from_ref(checksum),
            Checksums::OfAll(checksums) => checksums,
        }
    }

    /// Returns a block and its checksum.
    pub(crate) fn block(&self, block: BlockIndex) -> (&[u8], Checksum) {
        let from = usize::try_from(self.shape.offset(block)).expect("it is in memory");
        let bytes = &self.bytes[from..from + self.shape.len(block)];
        (bytes, self.checksums()[block.index()].unwrap_or_else(|| Checksum::of(bytes)))
    }
}

impl RetainedMessage {
    pub(crate) fn shape(&self) -> Shape {
        match self {
            Self::Blocks(blocks) => blocks.shape(),
            Self::Short(short) => short.shape,
        }
    }

    /// Returns the blocks that are here.
    pub(crate) fn here(&self) -> BlockSet {
        match self {
            Self::Blocks(blocks) => blocks.here(),
            Self::Short(short) => BlockSet::full(short.shape.count),
        }
    }

    /// Returns its blocks, in memory that can be sent.
    pub(crate) fn into_blocks(self, fabric: &dyn Fabric) -> Result<Arc<Blocks>, FabricError> {
        match self {
            Self::Blocks(blocks) => Ok(blocks),
            Self::Short(short) => {
                let message = fabric.register(Memory::from(short.bytes.to_vec()))?.into_shared();
                let blocks = Blocks::whole_message(short.shape, message);
                for (checksum, block) in short.checksums().iter().zip(0..) {
                    checksum.iter().for_each(|checksum| blocks.note_checksum(BlockIndex(block), *checksum));
                }
                Ok(Arc::new(blocks))
            }
        }
    }
}

impl RetainedMessages {
    /// Begins empty, for a group of so many members, all of which have the first `stable` messages.
    pub(crate) fn new(members: usize, stable: u64, enabled: bool) -> Self {
        let state = RetainedState {
            kept: BTreeMap::new(),
            short: VecDeque::new(),
            released: stable,
            queued: Vec::new(),
            held: vec![stable; members],
            told: stable,
            untold_bytes: 0,
            told_stable: stable,
        };
        let all_have = Level::default();
        all_have.raise_to(stable);
        Self {
            state: Mutex::new(state),
            stable: all_have,
            enabled,
            recoverable: enabled,
            copies_short: true,
            idle: watch::Sender::new(false),
            unwanted: watch::Sender::new(false),
            headers: Headers::default(),
            sources: Arc::default(),
        }
    }

    /// Retains messages, if `checked`, also for members that receive a corrupted block.
    pub(crate) fn and_for_healing(mut self, checked: bool) -> Self {
        self.enabled |= checked;
        self
    }

    /// Retains messages, if members share objects, while some members lack them: the root's memory holds the objects.
    pub(crate) fn and_for_sharing(mut self, shared: bool, is_root: bool) -> Self {
        self.enabled |= shared;
        self.copies_short = !(shared && is_root);
        self
    }

    /// Tells whether messages are retained.
    pub(crate) fn keeps(&self) -> bool {
        self.enabled
    }

    /// Retains a message that begins.
    pub(crate) fn keep(&self, number: u64, blocks: &Arc<Blocks>) {
        if !self.enabled || number < self.stable.get() {
            return;
        }
        let kept = match blocks.short(SHORT_MAX).filter(|_| self.copies_short) {
            Some(message) => RetainedMessage::Short(ShortMessage::copy(message, blocks)),
            None => RetainedMessage::Blocks(blocks.clone()),
        };
        self.lock().kept.insert(number, kept);
    }

    /// Retains whole short messages that begin, from number `first` on.
    pub(super) fn keep_short(&self, first: u64, messages: &Arc<[ShortMessage]>) {
        let run = ShortRun { first, messages: messages.clone() };
        let mut state = self.lock();
        if self.enabled && run.end() > state.released {
            state.short.push_back(run);
        }
    }

    /// Tells whether a whole message is kept as a copy, if it is kept.
    pub(super) fn copies_short(&self, message: &Buffer) -> bool {
        self.copies_short && (message.len() <= SHORT_MAX || message.may_change())
    }

    /// Notes that a message is whole; a short one is kept without the memory into which it was received or read.
    pub(crate) fn shorten(&self, number: u64, message: &[u8]) {
        let replaced = {
            let mut state = self.lock();
            let kept = state.kept.get_mut(&number).filter(|_| message.len() <= SHORT_MAX);
            kept.and_then(|kept| {
                let short = match kept {
                    RetainedMessage::Blocks(blocks) => RetainedMessage::Short(ShortMessage::copy(message, blocks)),
                    RetainedMessage::Short(_) => return None,
                };
                Some(std::mem::replace(kept, short))
            })
        };
        drop(replaced);
    }

    /// Takes over a message from the group that this one continues.
    pub(crate) fn inherit(&self, number: u64, kept: RetainedMessage) {
        self.lock().kept.insert(number, kept);
    }

    /// Returns a retained message.
    pub(crate) fn message(&self, number: u64) -> Option<RetainedMessage> {
        let state = self.lock();
        let short = || Some(RetainedMessage::Short(state.short(number)?.clone()));
        state.kept.get(&number).cloned().or_else(short)
    }

    /// Resumes a retained message in the memory into which it was to be received; returns whether that is possible.
    pub(crate) fn resume(&self, number: u64) -> bool {
        let mut state = self.lock();
        match state.kept.remove(&number) {
            Some(RetainedMessage::Blocks(blocks)) => {
                let (blocks, resumed) = match Arc::try_unwrap(blocks).map(Blocks::resume) {
                    Ok(Ok(blocks)) => (Arc::new(blocks), true),
                    Ok(Err(blocks)) => (Arc::new(blocks), false),
                    Err(shared) => (shared, false),
                };
                state.kept.insert(number, RetainedMessage::Blocks(blocks));
                resumed
            }
            Some(short) => {
                state.kept.insert(number, short);
                true
            }
            None => state.short(number).is_some(),
        }
    }

    /// Takes all retained messages.
    pub(crate) fn take(&self) -> BTreeMap<u64, RetainedMessage> {
        let (mut kept, short, released) = {
            let mut state = self.lock();
            (std::mem::take(&mut state.kept), std::mem::take(&mut state.short), state.released)
        };
        for run in short {
            let numbered = (run.first..).zip(&*run.messages).filter(|(number, _)| *number >= released);
            kept.extend(numbered.map(|(number, message)| (number, RetainedMessage::Short(message.clone()))));
        }
        kept
    }

    /// Drops the first `count` messages, which all members have; returns whether a long one was among them.
    pub(crate) fn release(&self, count: u64) -> bool {
        let released = {
            let mut state = self.lock();
            state.released = count.max(state.released);
            let kept = state.kept.split_off(&count);
            let short = state.short.partition_point(|run| run.end() <= count);
            (std::mem::replace(&mut state.kept, kept), state.short.drain(..short).collect::<Vec<_>>())
        };
        let long = released.0.values().any(|message| matches!(message, RetainedMessage::Blocks(_)));
        drop(released);
        self.headers.release(count);
        self.stable.raise_to(count);
        long
    }

    /// Drops everything.
    pub(crate) fn clear(&self) {
        drop(self.take());
        drop(self.take_queued());
        self.unwanted.send_replace(true);
    }

    /// Where all rows are read: notes how many messages a member has; returns how many all members have, if that is
    /// more than before, and whether a long message is among the new ones.
    pub(crate) fn note_held(&self, member: Rank, count: u64) -> Option<(u64, bool)> {
        let least = {
            let mut state = self.lock();
            let known = state.held.get_mut(member.index())?;
            *known = count.max(*known);
            state.held.iter().copied().min()?
        };
        let known = self.stable.get();
        (least > known).then(|| (least, self.release(least)))
    }

    /// At a member that has `held` messages, the latest of so many bytes: tells whether it reports that now.
    ///
    /// A long message is reported at once, since others keep its memory. A few short messages may wait for more, unless
    /// somebody waits for them.
    pub(crate) fn should_report(&self, held: u64, bytes: u64, at_once: bool) -> bool {
        let mut state = self.lock();
        state.untold_bytes = state.untold_bytes.saturating_add(bytes);
        let many = state.untold_bytes >= SHORT_MAX as u64 || held.saturating_sub(state.told) >= UNTOLD_MAX;
        let due = held > state.told && (at_once || many);
        if due {
            state.told = held;
            state.untold_bytes = 0;
        }
        due
    }

    /// At the root, where all members have `stable` messages: tells whether it tells the others now. They only wait for
    /// it to give memory back, unless it is due `at_once`.
    pub(crate) fn should_tell_stable(&self, stable: u64, at_once: bool) -> bool {
        let mut state = self.lock();
        let due = at_once || stable.saturating_sub(state.told_stable) >= UNTOLD_MAX;
        if due {
            state.told_stable = stable;
        }
        due
    }

    /// Returns how many messages may be begun, after the first `begun`, before `count` of them are retained.
    pub(crate) fn room_left(&self, begun: u64, count: u64) -> usize {
        let left = if self.enabled { count.saturating_sub(begun.saturating_sub(self.stable.get())) } else { count };
        usize::try_from(left).unwrap_or(usize::MAX)
    }

    /// Waits until fewer than `count` of the first `begun` messages are retained.
    pub(crate) async fn room(&self, begun: u64, count: u64) {
        if !self.enabled {
            return;
        }
        self.stable.reaches((begun + 1).saturating_sub(count)).await;
    }

    // After a failure.

    pub(crate) fn queue(&self, messages: impl IntoIterator<Item = (Buffer, Shape)>) {
        if self.recoverable {
            self.lock().queued.extend(messages);
        }
    }

    pub(crate) fn take_queued(&self) -> Vec<(Buffer, Shape)> {
        std::mem::take(&mut self.lock().queued)
    }

    /// Notes that the group does no more work here: the retained messages do not change any more.
    pub(crate) fn mark_idle(&self) {
        self.idle.send_replace(true);
    }

    /// Waits until the group does no more work here, and the messages that have begun are read from their sources.
    ///
    /// # Errors
    /// Why one of them could not be read.
    pub(crate) async fn until_idle(&self) -> Result<(), FailureCause> {
        let mut idle = self.idle.subscribe();
        let _ = idle.wait_for(|idle| *idle).await.expect("the sender lives in self");
        self.sources.closed().await
    }

    /// Waits until the messages are of no use here: the group does no more work, and is not recovered.
    pub(super) fn until_unwanted(&self) -> impl Future<Output = ()> + use<> {
        let (recoverable, mut idle, mut unwanted) =
            (self.recoverable, self.idle.subscribe(), self.unwanted.subscribe());
        async move {
            // Both end also when `self` is dropped.
            let idle = idle.wait_for(|idle| *idle && !recoverable);
            let unwanted = unwanted.wait_for(|unwanted| *unwanted);
            futures::future::select(std::pin::pin!(idle), std::pin::pin!(unwanted)).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, RetainedState> {
        lock(&self.state)
    }
}

/// The messages that the root still reads from their sources.
#[derive(Default)]
pub(super) struct OpenSources(watch::Sender<SourcesState>);

#[derive(Clone, Default)]
struct SourcesState {
    open: usize,
    failed: Option<FailureCause>,
}

impl OpenSources {
    pub(super) fn open(&self) {
        self.0.send_modify(|state| state.open += 1);
    }

    /// Notes that one is read, or why it could not be.
    pub(super) fn close(&self, failed: Option<FailureCause>) {
        self.0.send_modify(|state| {
            state.open -= 1;
            state.failed = state.failed.take().or(failed);
        });
    }

    /// Waits until none is open.
    async fn closed(&self) -> Result<(), FailureCause> {
        let mut state = self.0.subscribe();
        let state = state.wait_for(|state| state.open == 0).await.expect("the sender lives in self");
        state.failed.clone().map_or(Ok(()), Err)
    }
}

/// Messages that the root begins before all members have the first of them.
pub(crate) const UNSTABLE_MAX: u64 = 1024;
/// Messages that the root begins before all members have the first of them: as many objects are open.
pub(crate) const UNSTABLE_OBJECTS_MAX: u64 = 64;
/// Longest message that is kept as a copy, in bytes.
const SHORT_MAX: usize = 16 << 10;
/// Most short messages that are not reported to the root, which waits if all members lack [`UNSTABLE_OBJECTS_MAX`].
const UNTOLD_MAX: u64 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn message(len: usize) -> Arc<Blocks> {
        let shape = Shape::new(len as u64, 1 << 20).unwrap();
        let fabric = rdmc_fabric::MemNetwork::new().fabric();
        let bytes = fabric.register(Memory::from(vec![7; len])).unwrap().into_shared();
        Arc::new(Blocks::whole_message(shape, bytes))
    }

    #[test]
    fn what_everybody_has_is_let_go() {
        let retained = RetainedMessages::new(3, 0, true);
        for number in 0..3 {
            retained.keep(number, &message(100_000));
        }
        assert_eq!(retained.note_held(Rank(0), 3), None);
        assert_eq!(retained.note_held(Rank(1), 3), None);
        assert_eq!(retained.note_held(Rank(2), 2), Some((2, true)));
        assert_eq!(retained.note_held(Rank(2), 1), None);
        assert!(retained.message(1).is_none() && retained.message(2).is_some());
        retained.keep(1, &message(100_000));
        assert!(retained.message(1).is_none(), "what comes late is not kept");
        assert_eq!(retained.note_held(Rank(7), 9), None, "nobody has that rank");
    }

    #[test]
    fn short_messages_are_told_of_together() {
        let retained = RetainedMessages::new(2, 0, true);
        let told: Vec<u64> = (1..=40).filter(|held| retained.should_report(*held, 10, false)).collect();
        assert_eq!(told, [32]);
        assert!(retained.should_report(41, 1 << 20, false));
        assert!(!retained.should_report(42, 1, false));
        assert!(retained.should_report(42, 0, true), "somebody waits for it");
        assert!(!retained.should_report(42, 0, true), "it was told");
    }

    #[test]
    fn short_messages_that_begin_together_are_let_go_one_by_one() {
        let retained = RetainedMessages::new(2, 3, true);
        let run = |bytes: std::ops::Range<u8>| -> Arc<[ShortMessage]> {
            let shape = Shape::new(1, 1 << 20).unwrap();
            bytes.map(|byte| ShortMessage::of_one_block(shape, Bytes::from(vec![byte]), None)).collect()
        };
        retained.keep_short(2, &run(2..4));
        retained.keep_short(4, &run(4..7));
        retained.keep(7, &message(100_000));
        retained.keep_short(8, &run(8..9));
        let here = |retained: &RetainedMessages| {
            let here = (0..12).filter(|number| match retained.message(*number) {
                Some(RetainedMessage::Short(short)) => short.bytes() == [u8::try_from(*number).unwrap()],
                kept => kept.is_some(),
            });
            here.collect::<Vec<_>>()
        };
        assert_eq!(here(&retained), [3, 4, 5, 6, 7, 8]);
        retained.release(6);
        assert_eq!(here(&retained), [6, 7, 8]);
        assert!(retained.resume(6) && !retained.resume(5));
        assert_eq!(retained.take().into_keys().collect::<Vec<_>>(), [6, 7, 8]);
        assert_eq!(here(&retained), [0; 0]);
    }

    #[test]
    fn a_short_message_is_kept_without_its_memory() {
        let retained = RetainedMessages::new(2, 0, true);
        let short = message(100);
        retained.keep(0, &short);
        assert_eq!(Arc::strong_count(&short), 1);
        let fabric = rdmc_fabric::MemNetwork::new().fabric();
        let kept = retained.message(0).unwrap().into_blocks(&*fabric).unwrap();
        assert_eq!(kept.whole()[..], [7; 100]);
    }

    #[test]
    fn the_root_of_a_group_that_shares_objects_keeps_their_memory() {
        let retained = RetainedMessages::new(2, 0, false).and_for_sharing(true, true);
        let short = message(44);
        retained.keep(0, &short);
        assert_eq!(Arc::strong_count(&short), 2);
        assert_eq!(retained.note_held(Rank(0), 1), None);
        assert_eq!(retained.note_held(Rank(1), 1), Some((1, true)));
        assert_eq!(Arc::strong_count(&short), 1);
        let elsewhere = RetainedMessages::new(2, 0, false).and_for_sharing(true, false);
        elsewhere.keep(0, &short);
        assert!(elsewhere.keeps() && Arc::strong_count(&short) == 1);
    }
}
