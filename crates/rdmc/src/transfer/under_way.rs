//! Blocks under way to and from neighbours.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, future::BoxFuture};
use rdmc_fabric::{Operation, Received, WorkError};
use rdmc_schedule::Rank;

use super::{Arrival, Transfer, Trouble};
use crate::group::neighbour::{Granted, Sent};
use crate::woken::Attention;

/// Operations in lines: of each neighbour in the order in which they were posted, which is that in which they end.
///
/// So no more is looked at than the first one of each line, and nothing is allocated for an operation.
struct Lines<T, A> {
    lines: Vec<Line<T, A>>,
    /// The line that is looked at first: of what was posted last, or of what ended last.
    at: usize,
}

struct Line<T, A> {
    with: Rank,
    under_way: VecDeque<(Operation<T>, A)>,
}

/// What became of an operation.
struct Ended<T, A> {
    with: Rank,
    outcome: Result<T, WorkError>,
    about: A,
}

impl<T, A> Lines<T, A> {
    fn new() -> Self {
        Self { lines: Vec::new(), at: 0 }
    }

    /// Appends an operation, and what it is about.
    fn push(&mut self, with: Rank, operation: Operation<T>, about: A) {
        let count = self.lines.len();
        // Neighbours come one after the other, and again in the same order.
        let found = (self.at..count).chain(0..self.at).find(|&at| self.lines[at].with == with);
        self.at = found.unwrap_or_else(|| {
            self.lines.push(Line { with, under_way: VecDeque::new() });
            count
        });
        self.lines[self.at].under_way.push_back((operation, about));
    }

    /// Returns the next outcome; none if nothing is under way.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Ended<T, A>>> {
        let mut is_empty = true;
        for _ in 0..self.lines.len() {
            let Line { with, under_way } = &mut self.lines[self.at];
            if let Some((first, _)) = under_way.front_mut() {
                if let Poll::Ready(outcome) = first.poll_unpin(cx) {
                    let (_, about) = under_way.pop_front().expect("it was looked at");
                    return Poll::Ready(Some(Ended { with: *with, outcome, about }));
                }
                is_empty = false;
            }
            self.at = if self.at + 1 == self.lines.len() { 0 } else { self.at + 1 };
        }
        if is_empty { Poll::Ready(None) } else { Poll::Pending }
    }
}

/// Blocks under way in one direction.
pub(super) trait Traffic {
    /// Takes the next one that is through; none if no more are under way.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), Trouble>>>;
}

/// What waits for other things while blocks are under way.
pub(super) struct UnderWay<B> {
    pub(super) blocks: B,
    attention: Attention,
}

impl<B: Traffic> UnderWay<B> {
    pub(super) fn new(blocks: B) -> Self {
        Self { blocks, attention: Attention::new() }
    }

    /// Waits for `wanted`; ends early if a block fails.
    pub(super) async fn unless_failing<T>(&mut self, wanted: impl Future<Output = T>) -> Result<T, Trouble> {
        let Self { blocks, attention } = self;
        attention.wait(wanted, |cx| blocks.poll_next(cx)).await
    }

    /// Waits until all blocks are through.
    pub(super) async fn all(mut self) -> Result<(), Trouble> {
        while let Some(through) = poll_fn(|cx| self.blocks.poll_next(cx)).await {
            through?;
        }
        Ok(())
    }
}

/// Blocks that leave to neighbours.
pub(super) struct Leaving<'a> {
    transfer: &'a Transfer,
    lines: Lines<(), Sent<'a>>,
}

impl<'a> Leaving<'a> {
    pub(super) fn new(transfer: &'a Transfer) -> Self {
        Self { transfer, lines: Lines::new() }
    }

    pub(super) fn push(&mut self, to: Rank, (operation, sent): (Operation<()>, Sent<'a>)) {
        self.lines.push(to, operation, sent);
    }
}

impl Traffic for Leaving<'_> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), Trouble>>> {
        let Some(Ended { with: to, outcome, about: sent }) = ready!(self.lines.poll_next(cx)) else {
            return Poll::Ready(None);
        };
        drop(sent);
        Poll::Ready(Some(self.transfer.left(to, outcome)))
    }
}

/// Blocks that arrive from neighbours.
pub(super) struct Arriving<'a> {
    transfer: &'a Transfer,
    lines: Lines<Received, (Arrival, Granted<'a>)>,
    /// Long blocks that are summed, and corrupted ones that are fetched anew.
    unsettled: FuturesUnordered<BoxFuture<'a, Result<(), Trouble>>>,
}

impl<'a> Arriving<'a> {
    pub(super) fn new(transfer: &'a Transfer) -> Self {
        Self { transfer, lines: Lines::new(), unsettled: FuturesUnordered::new() }
    }

    pub(super) fn push(&mut self, arrival: Arrival, (operation, granted): (Operation<Received>, Granted<'a>)) {
        self.lines.push(arrival.receive.peer, operation, (arrival, granted));
    }
}

impl Traffic for Arriving<'_> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), Trouble>>> {
        let settled = if self.unsettled.is_empty() { Poll::Ready(None) } else { self.unsettled.poll_next_unpin(cx) };
        if let Poll::Ready(Some(settled)) = settled {
            return Poll::Ready(Some(settled));
        }
        let Some(Ended { outcome, about: (arrival, granted), .. }) = ready!(self.lines.poll_next(cx)) else {
            return settled;
        };
        // Before the block is looked at, since the neighbour may send another meanwhile.
        drop(granted);
        Poll::Ready(Some(self.transfer.arrived(arrival, outcome).map(|unsettled| self.unsettled.extend(unsettled))))
    }
}
