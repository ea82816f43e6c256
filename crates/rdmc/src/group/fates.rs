//! What the application of a receiver does with messages: it stores them, or lets them go.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::count::Count;
use crate::sync::lock;

/// The fates of all messages at one member.
pub(super) struct Fates {
    state: Mutex<FateState>,
    /// How often more fates were known.
    changes: Count,
    /// Whether anybody wants to know.
    reports: AtomicBool,
}

struct FateState {
    /// Messages whose fate is known, from the first.
    taken: u64,
    /// How many of these were let go.
    let_go: u64,
    /// Runs of later messages that are all stored or all let go: how many, and which of the two.
    later: BTreeMap<u64, (u64, bool)>,
    /// Messages let go that are not reported: the first, and how many follow each other.
    unreported: VecDeque<(u64, u64)>,
    /// No more is told.
    finished: bool,
}

/// The fate of one message. When it is dropped, the message is let go.
pub(super) struct Fate {
    fates: Arc<Fates>,
    number: u64,
    told: AtomicBool,
}

impl Fates {
    /// Begins with message `first`.
    pub(super) fn new(first: u64) -> Self {
        let (later, unreported) = (BTreeMap::new(), VecDeque::new());
        let state = FateState { taken: first, let_go: 0, later, unreported, finished: false };
        Self { state: Mutex::new(state), changes: Count::default(), reports: AtomicBool::new(false) }
    }

    pub(super) fn fate(self: &Arc<Self>, number: u64) -> Fate {
        Fate { fates: self.clone(), number, told: AtomicBool::new(false) }
    }

    fn settle(&self, number: u64, stored: bool) {
        {
            let mut state = lock(&self.state);
            if state.finished || number < state.taken {
                return;
            }
            if number == state.taken && stored && state.later.is_empty() {
                state.taken += 1;
            } else {
                state.note(number, stored);
                if !state.advance() {
                    return;
                }
            }
        }
        if self.reports.load(Ordering::Acquire) {
            self.changes.increment();
        }
    }

    /// Has [`changed`](Self::changed) tell of later changes.
    pub(super) fn report_changes(&self) {
        self.reports.store(true, Ordering::Release);
    }

    /// Waits for more changes than were seen; returns how many there are.
    pub(super) async fn changed(&self, seen: u64) -> u64 {
        self.changes.reaches(seen + 1).await;
        self.changes.get()
    }

    /// Reports the messages let go since the last report; returns of how many messages the fate is known, and how many
    /// of these were let go.
    pub(super) fn report(&self, mut let_go: impl FnMut(u64, u64)) -> (u64, u64) {
        let mut state = lock(&self.state);
        while let Some((first, count)) = state.unreported.pop_front() {
            let_go(first, count);
        }
        (state.taken, state.let_go)
    }

    /// Lets go all of the first `messages` messages that are not stored. After that, nothing changes any more.
    pub(super) fn finish(&self, messages: u64) {
        let mut state = lock(&self.state);
        state.finished = true;
        while state.taken < messages {
            let taken = state.taken;
            if !state.later.contains_key(&taken) {
                state.note(taken, false);
            }
            state.advance();
        }
    }
}

impl FateState {
    /// Returns whether the fates of more messages are known than before.
    fn advance(&mut self) -> bool {
        let before = self.taken;
        while let Some((count, stored)) = self.later.remove(&self.taken) {
            if !stored {
                self.let_go += count;
                self.note_let_go(self.taken, count);
            }
            self.taken += count;
        }
        self.taken > before
    }

    /// Notes the fate of a message that is not known yet.
    fn note(&mut self, number: u64, stored: bool) {
        let (mut first, mut count) = (number, 1);
        if let Some((&before, &(many, same))) = self.later.range(..number).next_back()
            && before + many == number
            && same == stored
        {
            (first, count) = (before, many + 1);
        }
        if let Some(&(many, same)) = self.later.get(&(number + 1))
            && same == stored
        {
            self.later.remove(&(number + 1));
            count += many;
        }
        self.later.insert(first, (count, stored));
    }

    fn note_let_go(&mut self, number: u64, more: u64) {
        match self.unreported.back_mut() {
            Some((first, count)) if *first + *count == number => *count += more,
            _ => self.unreported.push_back((number, more)),
        }
        if self.unreported.len() > UNREPORTED_MAX {
            // Nobody has asked for long. What was stored between the oldest two is not told any more.
            let (first, count) = self.unreported.pop_front().expect("there are many");
            let (next, more) = self.unreported.front_mut().expect("there are many");
            let between = *next - (first + count);
            *more += between + count;
            *next = first;
            self.let_go += between;
        }
    }
}

impl Fate {
    /// Tells that the message is stored.
    pub(super) fn store(&self) {
        if !self.told.swap(true, Ordering::AcqRel) {
            self.fates.settle(self.number, true);
        }
    }
}

impl Drop for Fate {
    fn drop(&mut self) {
        if !*self.told.get_mut() {
            self.fates.settle(self.number, false);
        }
    }
}

/// Runs of messages let go that are remembered for the root.
const UNREPORTED_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn report(fates: &Fates) -> (Vec<(u64, u64)>, (u64, u64)) {
        let mut ranges = Vec::new();
        let counts = fates.report(|first, count| ranges.push((first, count)));
        (ranges, counts)
    }

    #[test]
    fn fates_are_known_in_the_order_of_messages() {
        let fates = Arc::new(Fates::new(3));
        fates.report_changes();
        let [third, fourth, fifth, sixth] = [3, 4, 5, 6].map(|number| fates.fate(number));
        fourth.store();
        assert!(fates.changed(0).now_or_never().is_none(), "the third is not decided");
        drop(fourth);
        drop(third);
        assert_eq!(fates.changed(0).now_or_never(), Some(1));
        assert_eq!(report(&fates), (vec![(3, 1)], (5, 1)));
        drop(sixth);
        drop(fifth);
        assert_eq!(report(&fates), (vec![(5, 2)], (7, 3)));
        assert_eq!(report(&fates), (vec![], (7, 3)));
    }

    #[test]
    fn what_comes_early_takes_little_memory() {
        let fates = Arc::new(Fates::new(0));
        let kept = fates.fate(0);
        for number in (1..10_000).rev() {
            fates.fate(number).store();
        }
        (10_000..20_000).for_each(|number| drop(fates.fate(number)));
        assert_eq!(lock(&fates.state).later.len(), 2);
        kept.store();
        assert_eq!(report(&fates), (vec![(10_000, 10_000)], (20_000, 10_000)));
    }

    #[test]
    fn what_is_not_stored_at_the_end_is_let_go() {
        let fates = Arc::new(Fates::new(0));
        let kept: Vec<Fate> = (0..4).map(|number| fates.fate(number)).collect();
        kept[2].store();
        fates.finish(4);
        kept[0].store();
        assert_eq!(report(&fates), (vec![(0, 2), (3, 1)], (4, 3)));
    }

    #[test]
    fn what_nobody_asks_for_is_bounded_and_never_said_to_be_stored_wrongly() {
        let fates = Arc::new(Fates::new(0));
        let messages = 6 * UNREPORTED_MAX as u64;
        for number in 0..messages {
            let fate = fates.fate(number);
            if number % 2 == 1 {
                fate.store();
            }
        }
        let (ranges, (taken, let_go)) = report(&fates);
        assert!(ranges.len() <= UNREPORTED_MAX);
        assert_eq!(taken, messages);
        assert_eq!(let_go, ranges.iter().map(|(_, count)| count).sum::<u64>());
        for even in (0..messages).step_by(2) {
            assert!(ranges.iter().any(|(first, count)| (*first..first + count).contains(&even)));
        }
        assert!(ranges.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "in order");
    }
}
