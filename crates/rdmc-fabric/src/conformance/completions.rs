//! Completion queues: what they report, how they wait, what they hold.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{FutureExt, join, join_all};
use futures::stream::{Stream, StreamExt};

use super::{CountingLender, Harness, PATIENT, assert_gone, assert_pattern, bytes_at, is_pending, turn};
use crate::completion::{CompletionMode, CompletionQueue};
use crate::fabric::{FabricError, QueuePairConfig};
use crate::queue_pair::UNSIGNALED_MAX;
use crate::remote::{RemoteAccess, RemoteMemory};
use crate::work::{Opcode, WorkCompletion, WorkError};

pub(super) async fn the_queue_reports_what_was_posted(harness: &Harness) {
    let (source_a, mut queue_a) = harness.a.completion_queue(CompletionMode::Event);
    let (source_b, mut queue_b) = harness.b.completion_queue(CompletionMode::Event);
    let (a, b) = (harness.a.queue_pair_on(&source_a, PATIENT), harness.b.queue_pair_on(&source_b, PATIENT));
    harness.connect(&a, &b).await;
    let exposed = harness.b.expose(10, 0, RemoteAccess::READ_WRITE);
    let receives = [b.receive(harness.b.room(10)), b.receive(harness.b.room(10)), b.receive(harness.b.room(10))];
    let send = a.send(harness.a.filled(7, 0), Some(1));
    let write = a.write(harness.a.filled(10, 0), exposed.remote(), None);
    let noted = a.write(harness.a.filled(5, 0), exposed.remote().slice(5, 5), Some(2));
    let read = a.read(harness.a.room(4), exposed.remote().slice(0, 4));

    let at_a = next(&mut queue_a, 4).await;
    let told: Vec<_> = at_a.iter().map(|c| (c.queue_pair, c.opcode, c.result, c.imm)).collect();
    let want = [(Opcode::Send, 7), (Opcode::Write, 10), (Opcode::Write, 5), (Opcode::Read, 4)];
    assert_eq!(told, want.map(|(opcode, len)| (a.id(), opcode, Ok(len), None)));
    let at_b = next(&mut queue_b, 2).await;
    let told: Vec<_> = at_b.iter().map(|c| (c.queue_pair, c.opcode, c.result, c.imm)).collect();
    let want = [(Ok(7), Some(1)), (Ok(0), Some(2))];
    assert_eq!(told, want.map(|(result, imm)| (b.id(), Opcode::Receive, result, imm)));

    // Taking the completions is what resolved the operations.
    assert_eq!(
        (send.now_or_never(), write.now_or_never(), noted.now_or_never()),
        (Some(Ok(())), Some(Ok(())), Some(Ok(())))
    );
    assert!(read.now_or_never().is_some_and(|read| read.is_ok()));
    let [first, second, mut third] = receives;
    assert!(first.now_or_never().is_some_and(|received| received.is_ok()));
    assert!(second.now_or_never().is_some_and(|received| received.is_ok()));
    b.close();
    assert!(is_pending(&mut third), "an operation was resolved before its completion was taken");
    let flushed = next(&mut queue_b, 1).await[0];
    assert_eq!((flushed.queue_pair, flushed.opcode), (b.id(), Opcode::Receive));
    assert_eq!((flushed.result, flushed.imm), (Err(WorkError::Flushed), None));
    assert_eq!(third.await.expect_err("it was flushed"), WorkError::Flushed);
}

pub(super) async fn many_queue_pairs_share_one_queue(harness: &Harness) {
    let (source, mut queue) = harness.b.completion_queue(CompletionMode::Event);
    let mut pairs = Vec::new();
    for _ in 0..32 {
        let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair_on(&source, PATIENT));
        harness.connect(&a, &b).await;
        pairs.push((a, b));
    }
    let receives: Vec<_> =
        pairs.iter().flat_map(|(_, b)| [b.receive(harness.b.room(100)), b.receive(harness.b.room(100))]).collect();
    let sends: Vec<_> = (0..)
        .zip(&pairs)
        .flat_map(|(i, (a, _))| [2 * i, 2 * i + 1].map(|seed| a.send(harness.a.filled(100, seed), None)))
        .collect();
    let mut by_pair = HashMap::new();
    for completion in next(&mut queue, 64).await {
        assert_eq!((completion.opcode, completion.result), (Opcode::Receive, Ok(100)));
        *by_pair.entry(completion.queue_pair).or_insert(0) += 1;
    }
    assert!(pairs.iter().all(|(_, b)| by_pair.get(&b.id()) == Some(&2)), "{by_pair:?}");
    for outcome in join_all(sends).await {
        outcome.expect("the peer takes it");
    }
    for (seed, received) in (0..).zip(join_all(receives).await) {
        assert_pattern(&received.expect("the message arrives").buffer, seed);
    }
}

pub(super) async fn every_mode_reports_completions(harness: &Harness) {
    let short = CompletionMode::Hybrid { window: Duration::from_millis(1) };
    for mode in [CompletionMode::Event, CompletionMode::Poll, short, CompletionMode::HYBRID] {
        let (source_a, mut queue_a) = harness.a.completion_queue(mode);
        let (source_b, mut queue_b) = harness.b.completion_queue(mode);
        let (a, b) = (harness.a.queue_pair_on(&source_a, PATIENT), harness.b.queue_pair_on(&source_b, PATIENT));
        harness.connect(&a, &b).await;
        for seed in 0..10 {
            let receive = b.receive(harness.b.room(1000));
            if seed % 4 == 3 {
                // Beyond the short window, so that the hybrid queue is asleep when the completion comes.
                harness.a.environment().sleep(Duration::from_millis(3)).await;
            }
            let send = a.send(harness.a.filled(1000, seed), None);
            let (sent, taken) = join(next(&mut queue_a, 1), next(&mut queue_b, 1)).await;
            assert_eq!((sent[0].result, taken[0].result), (Ok(1000), Ok(1000)), "{mode:?}");
            send.await.expect("the peer takes it");
            assert_pattern(&receive.await.expect("the message arrives").buffer, seed);
        }
    }
}

pub(super) async fn an_event_queue_is_idle_without_completions(harness: &Harness) {
    let (source, mut queue) = harness.b.completion_queue(CompletionMode::Event);
    let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair_on(&source, PATIENT));
    harness.connect(&a, &b).await;
    let polls = Arc::new(AtomicU64::new(0));
    let counted = polls.clone();
    harness.b.environment().spawn(Box::pin(async move {
        loop {
            std::future::poll_fn(|cx| {
                counted.fetch_add(1, Ordering::Relaxed);
                Pin::new(&mut queue).poll_next(cx)
            })
            .await;
        }
    }));
    for seed in 0..10 {
        harness.settle().await;
        let receive = b.receive(harness.b.room(8));
        a.send(harness.a.filled(8, seed), None).await.expect("the peer takes it");
        receive.await.expect("the message arrives");
    }
    harness.settle().await;
    // At most one poll that finds nothing for each that finds a completion, and one at the start.
    let polls = polls.load(Ordering::Relaxed);
    assert!((10..=25).contains(&polls), "the queue was polled {polls} times for 10 completions");
}

pub(super) async fn unsignaled_writes_complete_with_later_requests(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 32, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let exposed = harness.b.expose(800, 0, RemoteAccess::WRITE);
    let lender = CountingLender::new();
    let write = |at: u64| {
        let data = harness.a.lent(&lender, 8, at).freeze();
        a.write_unsignaled(data, exposed.remote().slice(8 * at, 8), None)
    };
    // A signaled request behind them ends all of them.
    let few: Vec<_> = (0..3).map(write).collect();
    let receive = b.receive(harness.b.room(1));
    a.send(harness.a.filled(1, 0), None).await.expect("the peer takes it");
    receive.await.expect("the message arrives");
    for outcome in join_all(few).await {
        outcome.expect("the write lands");
    }
    // Without one, each ends after `UNSIGNALED_MAX` more requests.
    let behind = u64::from(UNSIGNALED_MAX);
    let mut posted = VecDeque::new();
    for at in 3..100 {
        posted.push_back(write(at));
        if posted.len() as u64 > behind {
            posted.pop_front().expect("it is not empty").await.expect("the write lands");
        }
    }
    a.write(harness.a.filled(0, 0), exposed.remote().slice(0, 0), None).await.expect("the write lands");
    for outcome in join_all(posted).await {
        outcome.expect("the write lands");
    }
    lender.holds_at_least(100).await;
    for at in 0..100 {
        assert_pattern(&bytes_at(&exposed, 8 * at, 8), at as u64);
    }
}

pub(super) async fn unsignaled_writes_end_with_the_queue_pair(harness: &Harness) {
    for closes_b in [false, true] {
        let (a, b) = harness.connected().await;
        let exposed = harness.b.expose(8, 0, RemoteAccess::WRITE);
        let lender = CountingLender::new();
        let data = || harness.a.lent(&lender, 8, 1).freeze();
        let writes: Vec<_> = (0..3).map(|_| a.write_unsignaled(data(), exposed.remote(), None)).collect();
        harness.settle().await;
        if closes_b {
            b.close()
        } else {
            a.close()
        }
        for outcome in join_all(writes).await {
            // Whether it was done by then is unknown.
            if outcome.is_err() {
                assert_gone(outcome);
            }
        }
        lender.holds_at_least(3).await;
    }
}

pub(super) async fn unsignaled_work_that_fills_the_queue_ends(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 4, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let exposed = harness.b.expose(8, 0, RemoteAccess::WRITE);
    for _ in 0..3 {
        let writes: Vec<_> =
            (0..4).map(|seed| a.write_unsignaled(harness.a.filled(8, seed), exposed.remote(), None)).collect();
        for outcome in join_all(writes).await {
            outcome.expect("the write lands");
        }
        let receives: Vec<_> = (0..4).map(|_| b.receive(harness.b.room(8))).collect();
        let sends: Vec<_> = (0..4).map(|seed| a.send_with_more(harness.a.filled(8, seed), None)).collect();
        for outcome in join_all(sends).await {
            outcome.expect("the peer takes it");
        }
        for receive in join_all(receives).await {
            receive.expect("the message arrives");
        }
    }
}

pub(super) async fn sends_with_more_leave_in_order(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 64, receive_depth: 64, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let mut seed = 0;
    // They leave by a flush, by a request behind them, or by themselves if many are held.
    for (count, flushes) in [(3, true), (3, false), (3 * UNSIGNALED_MAX, true), (0, true)] {
        let receives: Vec<_> = (0..=count).map(|_| b.receive(harness.b.room(64))).collect();
        let first = seed;
        let mut next = || {
            seed += 1;
            harness.a.filled(64, seed)
        };
        let held: Vec<_> = (0..count).map(|at| a.send_with_more(next(), Some(at))).collect();
        if flushes {
            a.flush();
            harness.settle().await;
        }
        let last = a.send(next(), Some(count));
        for (at, receive) in (0..).zip(receives) {
            let received = receive.await.expect("the message arrives");
            assert_eq!(received.imm, Some(at));
            assert_pattern(&received.buffer, first + u64::from(at) + 1);
        }
        last.await.expect("the peer takes it");
        for outcome in join_all(held).await {
            outcome.expect("the peer takes it");
        }
    }
    // A flush alone sends the last one.
    let receive = b.receive(harness.b.room(64));
    let last = a.send_with_more(harness.a.filled(64, 99), None);
    a.flush();
    assert_pattern(&receive.await.expect("the message arrives").buffer, 99);
    drop(last);
}

pub(super) async fn sends_with_more_end_with_the_queue_pair(harness: &Harness) {
    for closes_b in [false, true] {
        let (a, b) = harness.connected().await;
        let lender = CountingLender::new();
        let held: Vec<_> =
            (0..3).map(|seed| a.send_with_more(harness.a.lent(&lender, 64, seed).freeze(), None)).collect();
        if closes_b {
            b.close()
        } else {
            a.close()
        }
        for outcome in join_all(held).await {
            assert_gone(outcome);
        }
        lender.holds_at_least(3).await;
    }
}

pub(super) async fn a_full_queue_pair_refuses_and_goes_on(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 4, receive_depth: 2, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let mut sends: Vec<_> = (0..4).map(|seed| a.send(harness.a.filled(8, seed), None)).collect();
    assert_eq!(a.send(harness.a.filled(8, 99), None).await, Err(WorkError::QueueFull { depth: 4 }));
    let first = [b.receive(harness.b.room(8)), b.receive(harness.b.room(8))];
    let mut received = Vec::new();
    for receive in first {
        received.push(receive.await.expect("the message arrives"));
    }
    for outcome in join_all(sends.drain(..2)).await {
        outcome.expect("the peer takes it");
    }
    // There is room for as many again.
    sends.extend((4..6).map(|seed| a.send(harness.a.filled(8, seed), None)));
    for _ in 0..4 {
        received.push(b.receive(harness.b.room(8)).await.expect("the message arrives"));
    }
    for outcome in join_all(sends).await {
        outcome.expect("the peer takes it");
    }
    for (seed, received) in (0..).zip(received) {
        assert_pattern(&received.buffer, seed);
    }
    let full: Vec<_> = (0..2).map(|_| b.receive(harness.b.room(8))).collect();
    let refused = b.receive(harness.b.room(8)).await.expect_err("there is no room");
    assert_eq!(refused, WorkError::QueueFull { depth: 2 });
    drop(full);
}

pub(super) async fn a_completion_queue_admits_what_it_can_hold(harness: &Harness) {
    let fabric = &harness.a.node.fabric;
    let queue = fabric.create_completion_queue(20, CompletionMode::Event).expect("a completion queue can be made");
    let config = QueuePairConfig { send_depth: 4, receive_depth: 4, ..PATIENT };
    let first = fabric.create_queue_pair(&queue.source(), config).expect("there is room");
    let _second = fabric.create_queue_pair(&queue.source(), config).expect("there is room");
    let refused = fabric.create_queue_pair(&queue.source(), config).expect_err("there is no room");
    let FabricError::CompletionQueueFull { capacity, reserved, wanted } = refused else {
        panic!("a full completion queue was reported as {refused}");
    };
    assert_eq!((capacity, reserved, wanted), (20, 16, 8));
    let huge = QueuePairConfig { send_depth: u32::MAX, receive_depth: u32::MAX, ..PATIENT };
    fabric.create_queue_pair(&queue.source(), huge).expect_err("there is no room");
    drop(first);
    fabric.create_queue_pair(&queue.source(), config).expect("there is room again");
}

pub(super) async fn completions_around_an_error_come_in_order(harness: &Harness) {
    let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    let wrong = RemoteMemory { key: exposed.remote().key ^ 1, ..exposed.remote() };
    for too_long in [false, true] {
        let (source_a, mut queue_a) = harness.a.completion_queue(CompletionMode::Event);
        let (source_b, mut queue_b) = harness.b.completion_queue(CompletionMode::Event);
        let (a, b) = (harness.a.queue_pair_on(&source_a, PATIENT), harness.b.queue_pair_on(&source_b, PATIENT));
        harness.connect(&a, &b).await;
        // All requests are posted before the first receive.
        drop(a.send(harness.a.filled(8, 1), None));
        drop(a.write(harness.a.filled(10, 0), exposed.remote(), None));
        drop(a.read(harness.a.room(20), exposed.remote()));
        if too_long {
            drop(a.send(harness.a.filled(9, 1), None));
        } else {
            drop(a.write(harness.a.filled(9, 1), wrong, None));
        }
        drop(a.read(harness.a.room(20), exposed.remote()));
        drop(a.send(harness.a.filled(8, 1), None));
        drop(a.write(harness.a.filled(10, 1), exposed.remote(), Some(1)));
        (0..4).for_each(|_| drop(b.receive(harness.b.room(8))));

        let (at_a, at_b) = join(next(&mut queue_a, 7), next(&mut queue_b, 4)).await;
        let (failed, error) = match too_long {
            true => (Opcode::Send, WorkError::RemoteInvalidRequest),
            false => (Opcode::Write, WorkError::RemoteAccess),
        };
        let opcodes: Vec<_> = at_a.iter().map(|completion| completion.opcode).collect();
        let want = [Opcode::Send, Opcode::Write, Opcode::Read, failed, Opcode::Read, Opcode::Send, Opcode::Write];
        assert_eq!(opcodes, want);
        let results: Vec<_> = at_a.iter().map(|completion| completion.result).collect();
        assert_eq!(results[..4], [Ok(8), Ok(10), Ok(20), Err(error)]);
        results[4..].iter().for_each(|&result| assert_gone(result));
        let results: Vec<_> = at_b.iter().map(|completion| completion.result).collect();
        assert_eq!(results[0], Ok(8));
        if too_long {
            assert!(matches!(results[1], Err(WorkError::LocalLength { room: 8, .. })), "{:?}", results[1]);
        } else {
            assert_gone(results[1]);
        }
        results[2..].iter().for_each(|&result| assert_gone(result));
    }
}

pub(super) async fn every_request_completes_once_whenever_the_queue_pair_closes(harness: &Harness) {
    let exposed = harness.b.expose(300_000, 0, RemoteAccess::READ_WRITE);
    for turns in 0..40 {
        let (source_a, mut queue_a) = harness.a.completion_queue(CompletionMode::Event);
        let (source_b, mut queue_b) = harness.b.completion_queue(CompletionMode::Event);
        let (a, b) = (harness.a.queue_pair_on(&source_a, PATIENT), harness.b.queue_pair_on(&source_b, PATIENT));
        harness.connect(&a, &b).await;
        for _ in 0..4 {
            drop(b.receive(harness.b.room(300_000)));
            drop(a.receive(harness.a.room(300_000)));
        }
        for seed in 0..2 {
            drop(a.send(harness.a.filled(300_000, seed), None));
            drop(b.send(harness.b.filled(300_000, seed), None));
            drop(a.write(harness.a.filled(300_000, seed), exposed.remote(), Some(0)));
            drop(a.read(harness.a.room(300_000), exposed.remote()));
        }
        for _ in 0..turns {
            turn().await;
        }
        match turns % 3 {
            0 => a.close(),
            1 => b.close(),
            _ => drop((a, b)),
        }
        let (at_a, at_b) = join(next(&mut queue_a, 4 + 6), next(&mut queue_b, 4 + 2)).await;
        let receives = |at: &[WorkCompletion]| at.iter().filter(|c| c.opcode == Opcode::Receive).count();
        assert_eq!((receives(&at_a), receives(&at_b)), (4, 4));
        turn().await;
        assert!(queue_a.next().now_or_never().is_none() && queue_b.next().now_or_never().is_none());
    }
}

pub(super) async fn operations_end_with_their_queue(harness: &Harness) {
    let (source, queue) = harness.a.completion_queue(CompletionMode::Event);
    let a = harness.a.queue_pair_on(&source, PATIENT);
    let mut receive = a.receive(harness.a.room(8));
    drop(a);
    assert!(is_pending(&mut receive), "an operation was resolved before its completion was taken");
    drop((source, queue));
    receive.await.expect_err("it was flushed");
}

/// Takes `count` completions.
async fn next(queue: &mut CompletionQueue, count: usize) -> Vec<WorkCompletion> {
    let taken: Vec<_> = queue.take(count).collect().await;
    assert_eq!(taken.len(), count, "a completion queue never ends");
    taken
}
