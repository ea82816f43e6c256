//! Blocks in flight to and from neighbours.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};

use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, future::BoxFuture};
use rdmc_fabric::{Operation, Received};
use rdmc_schedule::{BlockIndex, Rank, Step};

use super::arrival::{ArrivingBlock, ExpectedBlock};
use super::neighbour::{GrantGuard, SendGuard};
use super::{Transfer, TransferError};
use crate::checksum::yield_now;
use crate::woken::WokenWait;

/// The operations of each neighbour, in the order in which they were posted, which is the order in which they end.
///
/// So only the first operation of each queue is polled, and no operation allocates.
struct OperationQueues<O, A> {
    queues: Vec<OperationQueue<O, A>>,
    /// The queue that is polled first: that of the last operation that was posted or has ended.
    at: usize,
}

struct OperationQueue<O, A> {
    with: Rank,
    in_flight: VecDeque<(O, A)>,
}

/// An operation that has ended.
struct EndedOperation<T, A> {
    with: Rank,
    outcome: T,
    about: A,
}

impl<O: Future + Unpin, A> OperationQueues<O, A> {
    fn new() -> Self {
        Self { queues: Vec::new(), at: 0 }
    }

    /// Appends an operation, and the value that belongs to it.
    fn push(&mut self, with: Rank, operation: O, about: A) {
        let count = self.queues.len();
        // Neighbours come one after the other, and again in the same order.
        let found = (self.at..count).chain(0..self.at).find(|&at| self.queues[at].with == with);
        self.at = found.unwrap_or_else(|| {
            self.queues.push(OperationQueue { with, in_flight: VecDeque::new() });
            count
        });
        self.queues[self.at].in_flight.push_back((operation, about));
    }

    /// Lists the values that belong to the first operation of each neighbour.
    fn firsts(&self) -> impl Iterator<Item = (Rank, &A)> {
        self.queues.iter().filter_map(|queue| Some((queue.with, &queue.in_flight.front()?.1)))
    }

    /// Returns the next outcome, or `None` if no operation is in flight.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<EndedOperation<O::Output, A>>> {
        let mut is_empty = true;
        for _ in 0..self.queues.len() {
            let OperationQueue { with, in_flight } = &mut self.queues[self.at];
            if let Some((first, _)) = in_flight.front_mut() {
                if let Poll::Ready(outcome) = first.poll_unpin(cx) {
                    let (_, about) = in_flight.pop_front().expect("it was polled");
                    return Poll::Ready(Some(EndedOperation { with: *with, outcome, about }));
                }
                is_empty = false;
            }
            self.at = if self.at + 1 == self.queues.len() { 0 } else { self.at + 1 };
        }
        if is_empty { Poll::Ready(None) } else { Poll::Pending }
    }
}

/// Blocks in flight in one direction.
pub(super) trait BlockTraffic {
    /// Takes the next one that is through; `None` if no more are in flight.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), TransferError>>>;

    /// Returns the neighbour with which a block is in flight for longest, about.
    fn oldest(&self) -> Option<Rank>;
}

/// Waits for other events while blocks are in flight.
pub(super) struct InFlight<B> {
    pub(super) blocks: B,
    wait: WokenWait,
    /// Blocks taken since other work of the task had a turn.
    taken: u32,
}

impl<B: BlockTraffic> InFlight<B> {
    pub(super) fn new(blocks: B) -> Self {
        Self { blocks, wait: WokenWait::new(), taken: 0 }
    }

    /// Takes the blocks that are through by now.
    ///
    /// Blocks may come as fast as they are taken, so other work of the task gets a turn now and then.
    pub(super) async fn settle(&mut self) -> Result<(), TransferError> {
        if self.taken >= TURN_BLOCKS {
            self.taken = 0;
            yield_now().await;
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
    pub(super) async fn unless_failing<T>(&mut self, wanted: impl Future<Output = T>) -> Result<T, TransferError> {
        let Self { blocks, wait, .. } = self;
        wait.wait(wanted, |cx| blocks.poll_next(cx)).await
    }

    /// Returns the neighbour with which a block is in flight for longest, about.
    pub(super) fn oldest(&self) -> Option<Rank> {
        self.blocks.oldest()
    }

    /// Waits until one more block is through, if any are in flight.
    pub(super) async fn next(&mut self) -> Result<(), TransferError> {
        poll_fn(|cx| self.blocks.poll_next(cx)).await.unwrap_or(Ok(()))
    }

    /// Waits until all blocks are through.
    pub(super) async fn all(mut self) -> Result<(), TransferError> {
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
pub(super) struct OutgoingBlocks<'a> {
    transfer: &'a Transfer,
    queues: OperationQueues<Operation<()>, SentBlock<'a>>,
}

/// A block that was sent.
pub(super) struct SentBlock<'a> {
    pub(super) step: Step,
    pub(super) bytes: usize,
    pub(super) unacknowledged: SendGuard<'a>,
}

impl<'a> OutgoingBlocks<'a> {
    pub(super) fn new(transfer: &'a Transfer) -> Self {
        Self { transfer, queues: OperationQueues::new() }
    }

    pub(super) fn push(&mut self, to: Rank, operation: Operation<()>, sent: SentBlock<'a>) {
        self.queues.push(to, operation, sent);
    }
}

impl BlockTraffic for OutgoingBlocks<'_> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), TransferError>>> {
        let Some(EndedOperation { with: to, outcome, about: sent }) = ready!(self.queues.poll_next(cx)) else {
            return Poll::Ready(None);
        };
        let SentBlock { bytes, unacknowledged, .. } = sent;
        drop(unacknowledged);
        Poll::Ready(Some(self.transfer.block_sent(to, bytes, outcome)))
    }

    fn oldest(&self) -> Option<Rank> {
        self.queues.firsts().min_by_key(|(_, sent)| sent.step).map(|(to, _)| to)
    }
}

/// Blocks that arrive from neighbours.
pub(super) struct IncomingBlocks<'a> {
    transfer: &'a Transfer,
    queues: OperationQueues<Operation<Received>, (ExpectedBlock, BlockIndex, GrantGuard<'a>)>,
    /// Long blocks that are being summed, and corrupted blocks that are fetched anew.
    unsettled: FuturesUnordered<BoxFuture<'a, Result<(), TransferError>>>,
}

impl<'a> IncomingBlocks<'a> {
    pub(super) fn new(transfer: &'a Transfer) -> Self {
        Self { transfer, queues: OperationQueues::new(), unsettled: FuturesUnordered::new() }
    }

    pub(super) fn push(
        &mut self,
        block: BlockIndex,
        ArrivingBlock { operation, granted, expected }: ArrivingBlock<'a>,
    ) {
        self.queues.push(expected.from, operation, (expected, block, granted));
    }
}

impl BlockTraffic for IncomingBlocks<'_> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), TransferError>>> {
        let settled = if self.unsettled.is_empty() { Poll::Ready(None) } else { self.unsettled.poll_next_unpin(cx) };
        if let Poll::Ready(Some(settled)) = settled {
            return Poll::Ready(Some(settled));
        }
        let Some(EndedOperation { outcome, about, .. }) = ready!(self.queues.poll_next(cx)) else { return settled };
        let (expected, block, granted) = about;
        // Before the block is checked, since the neighbour may send another meanwhile.
        drop(granted);
        Poll::Ready(Some(
            self.transfer.take_arrived(expected, block, outcome).map(|unsettled| self.unsettled.extend(unsettled)),
        ))
    }

    fn oldest(&self) -> Option<Rank> {
        self.queues.firsts().min_by_key(|(_, (expected, ..))| expected.step).map(|(from, _)| from)
    }
}

/// Blocks after which other work of the task gets a turn.
const TURN_BLOCKS: u32 = 32;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::{Pending, pending};
    use tokio::sync::oneshot;

    use super::*;

    type Named = (u32, Result<i32, oneshot::error::RecvError>, char);

    fn next(queues: &mut OperationQueues<oneshot::Receiver<i32>, char>) -> Option<Option<Named>> {
        let ended = poll_fn(|cx| queues.poll_next(cx)).now_or_never()?;
        Some(ended.map(|ended| (ended.with.0, ended.outcome, ended.about)))
    }

    #[test]
    fn operations_of_a_neighbour_end_in_order_and_those_of_others_beside_them() {
        let mut queues = OperationQueues::new();
        assert!(matches!(next(&mut queues), Some(None)));
        let mut tell = ['a', 'b', 'c', 'd', 'e'].map(|about| {
            let (tell, told) = oneshot::channel();
            let with = if about < 'c' {
                1
            } else if about < 'e' {
                2
            } else {
                3
            };
            queues.push(Rank(with), told, about);
            Some(tell)
        });
        let mut end = |at: usize| tell[at].take().expect("it ends once").send(7).expect("it is waited for");
        assert!(next(&mut queues).is_none());
        // Behind the first of its queue it has to wait.
        end(1);
        assert!(next(&mut queues).is_none());
        end(4);
        assert_eq!(next(&mut queues), Some(Some((3, Ok(7), 'e'))));
        end(0);
        end(2);
        let mut ended =
            [next(&mut queues), next(&mut queues), next(&mut queues)].map(|ended| ended.flatten().expect("one").2);
        ended.sort_unstable();
        assert_eq!(ended, ['a', 'b', 'c']);
        assert!(next(&mut queues).is_none());
        end(3);
        assert_eq!(next(&mut queues), Some(Some((2, Ok(7), 'd'))));
        assert!(matches!(next(&mut queues), Some(None)));
    }

    /// Blocks that are always ready, so many in all.
    struct AlwaysThere(u32, Option<Pending<()>>);

    impl BlockTraffic for AlwaysThere {
        fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(), TransferError>>> {
            match (self.0.checked_sub(1), &mut self.1) {
                (Some(left), _) => {
                    self.0 = left;
                    Poll::Ready(Some(Ok(())))
                }
                (None, Some(never)) => never.poll_unpin(cx).map(|()| None),
                (None, None) => Poll::Ready(None),
            }
        }

        fn oldest(&self) -> Option<Rank> {
            None
        }
    }

    #[tokio::test]
    async fn blocks_that_are_always_there_leave_others_a_turn() {
        let mut in_flight = InFlight::new(AlwaysThere(0, Some(pending())));
        let mut turns = 0;
        for _ in 0..10 {
            in_flight.blocks.0 = TURN_BLOCKS;
            let mut settling = std::pin::pin!(in_flight.settle());
            while (&mut settling).now_or_never().is_none() {
                turns += 1;
            }
        }
        assert_eq!(turns, 9);
        InFlight::new(AlwaysThere(100, None)).all().await.expect("none fails");
    }
}
