//! Blocks under way to and from neighbours.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, future::BoxFuture};
use rdmc_fabric::{Operation, Received};
use rdmc_schedule::Rank;

use super::{Arrival, Transfer, Trouble, give_way};
use crate::group::neighbour::{Granted, Sent};
use crate::woken::Attention;

/// Operations in lines: of each neighbour in the order in which they were posted, which is that in which they end.
///
/// So no more is looked at than the first one of each line, and nothing is allocated for an operation.
struct Lines<O, A> {
    lines: Vec<Line<O, A>>,
    /// The line that is looked at first: of what was posted last, or of what ended last.
    at: usize,
}

struct Line<O, A> {
    with: Rank,
    under_way: VecDeque<(O, A)>,
}

/// What became of an operation.
struct Ended<T, A> {
    with: Rank,
    outcome: T,
    about: A,
}

impl<O: Future + Unpin, A> Lines<O, A> {
    fn new() -> Self {
        Self { lines: Vec::new(), at: 0 }
    }

    /// Appends an operation, and what it is about.
    fn push(&mut self, with: Rank, operation: O, about: A) {
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
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Ended<O::Output, A>>> {
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
    /// Blocks that were taken since other work of the task had a turn.
    taken: u32,
}

impl<B: Traffic> UnderWay<B> {
    pub(super) fn new(blocks: B) -> Self {
        Self { blocks, attention: Attention::new(), taken: 0 }
    }

    /// Takes the blocks that are through by now.
    ///
    /// Blocks may come as fast as they are taken: other work of the task has a turn now and then.
    pub(super) async fn settle(&mut self) -> Result<(), Trouble> {
        if self.taken >= TURN_BLOCKS {
            self.taken = 0;
            give_way().await;
        }
        poll_fn(|cx| {
            while let Poll::Ready(Some(through)) = self.blocks.poll_next(cx) {
                self.taken += 1;
                if through.is_err() {
                    return Poll::Ready(through);
                }
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Waits for `wanted`; ends early if a block fails.
    pub(super) async fn unless_failing<T>(&mut self, wanted: impl Future<Output = T>) -> Result<T, Trouble> {
        let Self { blocks, attention, .. } = self;
        attention.wait(wanted, |cx| blocks.poll_next(cx)).await
    }

    /// Waits until all blocks are through.
    pub(super) async fn all(mut self) -> Result<(), Trouble> {
        loop {
            self.settle().await?;
            match poll_fn(|cx| self.blocks.poll_next(cx)).await {
                Some(through) => through?,
                None => return Ok(()),
            }
        }
    }
}

/// Blocks that leave to neighbours.
pub(super) struct Leaving<'a> {
    transfer: &'a Transfer,
    lines: Lines<Operation<()>, Sent<'a>>,
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
    lines: Lines<Operation<Received>, (Arrival, Granted<'a>)>,
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

/// Blocks after which other work of the task has a turn; each may be summed in it.
const TURN_BLOCKS: u32 = 32;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::{Pending, pending};
    use tokio::sync::oneshot;

    use super::*;

    type Named = (u32, Result<i32, oneshot::error::RecvError>, char);

    fn next(lines: &mut Lines<oneshot::Receiver<i32>, char>) -> Option<Option<Named>> {
        let ended = poll_fn(|cx| lines.poll_next(cx)).now_or_never()?;
        Some(ended.map(|ended| (ended.with.0, ended.outcome, ended.about)))
    }

    #[test]
    fn operations_of_a_neighbour_end_in_order_and_those_of_others_beside_them() {
        let mut lines = Lines::new();
        assert!(matches!(next(&mut lines), Some(None)));
        let mut tell = ['a', 'b', 'c', 'd', 'e'].map(|about| {
            let (tell, told) = oneshot::channel();
            let with = if about < 'c' {
                1
            } else if about < 'e' {
                2
            } else {
                3
            };
            lines.push(Rank(with), told, about);
            Some(tell)
        });
        let mut end = |at: usize| tell[at].take().expect("it ends once").send(7).expect("it is waited for");
        assert!(next(&mut lines).is_none());
        // Behind the first of its line it has to wait.
        end(1);
        assert!(next(&mut lines).is_none());
        end(4);
        assert_eq!(next(&mut lines), Some(Some((3, Ok(7), 'e'))));
        end(0);
        end(2);
        let mut ended =
            [next(&mut lines), next(&mut lines), next(&mut lines)].map(|ended| ended.flatten().expect("one").2);
        ended.sort_unstable();
        assert_eq!(ended, ['a', 'b', 'c']);
        assert!(next(&mut lines).is_none());
        end(3);
        assert_eq!(next(&mut lines), Some(Some((2, Ok(7), 'd'))));
        assert!(matches!(next(&mut lines), Some(None)));
    }

    /// Blocks that are there whenever they are asked for, so many in all.
    struct AlwaysThere(u32, Option<Pending<()>>);

    impl Traffic for AlwaysThere {
        fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), Trouble>>> {
            match (self.0.checked_sub(1), &mut self.1) {
                (Some(left), _) => {
                    self.0 = left;
                    Poll::Ready(Some(Ok(())))
                }
                (None, Some(never)) => never.poll_unpin(cx).map(|()| None),
                (None, None) => Poll::Ready(None),
            }
        }
    }

    #[tokio::test]
    async fn blocks_that_are_always_there_leave_others_a_turn() {
        let mut under_way = UnderWay::new(AlwaysThere(0, Some(pending())));
        let mut turns = 0;
        for _ in 0..10 {
            under_way.blocks.0 = TURN_BLOCKS;
            let mut settling = std::pin::pin!(under_way.settle());
            while (&mut settling).now_or_never().is_none() {
                turns += 1;
            }
        }
        assert_eq!(turns, 9);
        UnderWay::new(AlwaysThere(100, None)).all().await.expect("none fails");
    }
}
