//! Errors: which end gets which one, and that no operation on a broken queue pair waits for ever.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, join, join_all};
use tokio::sync::oneshot;

use super::{Harness, PATIENT, assert_gone, assert_pattern, assert_untouched, bytes_at, turn};
use crate::fabric::QueuePairConfig;
use crate::memory::{Lender, MemoryRegion};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, RemoteAccess, RemoteMemory};
use crate::work::WorkError;

pub(super) async fn too_small_a_receive_breaks_both_ends(harness: &Harness) {
    for (room, len) in [(0, 1), (10, 11), (10, 1 << 20)] {
        let (a, b) = harness.connected().await;
        let receives = [b.receive(harness.b.room(room)), b.receive(harness.b.room(1 << 20))];
        let at_a = a.receive(harness.a.room(8));
        let sends = [a.send(harness.a.filled(len, 0), None), a.send(harness.a.filled(8, 0), None)];
        let [first, second] = sends;
        assert_eq!(first.await, Err(WorkError::RemoteInvalidRequest));
        assert_gone(second.await);
        let [first, second] = receives;
        let error = first.await.expect_err("the message does not fit");
        assert!(matches!(error, WorkError::LocalLength { room: told, .. } if told == room as u64), "{error:?}");
        assert_gone(second.await);
        assert_gone(at_a.await);
        assert_broken(harness, &a, &b).await;
    }
}

pub(super) async fn a_message_too_long_stays_within_its_receive(harness: &Harness) {
    for (room, len) in [(1, 2), (1000, 1001), (5000, 1 << 20)] {
        let (a, b) = harness.connected().await;
        let mut behind = harness.b.room(GUARD_LEN + room + GUARD_LEN);
        let before = behind.split_to(GUARD_LEN);
        let receive = b.receive(behind.split_to(room));
        assert_eq!(a.send(harness.a.filled(len, 0), None).await, Err(WorkError::RemoteInvalidRequest));
        receive.await.expect_err("the message does not fit");
        harness.settle().await;
        assert_untouched(&before);
        assert_untouched(&behind);
    }
}

pub(super) async fn a_wrong_key_is_refused(harness: &Harness) {
    let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    let wrong = RemoteMemory { key: exposed.remote().key ^ 1, ..exposed.remote() };
    refuses_write(harness, wrong).await;
    refuses_read(harness, wrong).await;
    assert_pattern(&bytes_at(&exposed, 0, 100), 0);
}

pub(super) async fn access_out_of_bounds_is_refused(harness: &Harness) {
    let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    for (offset, len) in [(0, 101), (100, 1), (99, 2), (1 << 40, 8), (u64::MAX, 8), (u64::MAX - 7, 8)] {
        let outside = exposed.remote().slice(offset, len);
        refuses_write(harness, outside).await;
        refuses_read(harness, outside).await;
    }
    // The range ends behind the last address.
    for address in [u64::MAX, u64::MAX - 7] {
        refuses_write(harness, RemoteMemory { address, len: 16, ..exposed.remote() }).await;
        refuses_read(harness, RemoteMemory { address, len: 16, ..exposed.remote() }).await;
    }
    assert_pattern(&bytes_at(&exposed, 0, 100), 0);
}

pub(super) async fn access_out_of_bounds_leaves_the_neighbours_alone(harness: &Harness) {
    for (offset, len) in [(0, 101), (100, 1), (u64::MAX, 2), (u64::MAX - 9, 10)] {
        let mut behind = harness.b.room(GUARD_LEN + 100 + GUARD_LEN);
        let before = behind.split_to(GUARD_LEN);
        // The exposure lies in the middle of memory that is registered as a whole.
        let exposed = Expose::Mutable(behind.split_to(100), RemoteAccess::READ_WRITE);
        let exposed = harness.b.node.fabric.expose(exposed).expect("memory can be exposed");
        let outside = exposed.remote().slice(offset, len);
        refuses_write(harness, outside).await;
        refuses_read(harness, outside).await;
        harness.settle().await;
        assert_untouched(&before);
        assert_untouched(&behind);
        assert_untouched(&bytes_at(&exposed, 0, 100));
    }
}

pub(super) async fn access_that_was_not_allowed_is_refused(harness: &Harness) {
    let readable = harness.b.expose(100, 0, RemoteAccess::READ);
    refuses_write(harness, readable.remote()).await;
    let writable = harness.b.expose(100, 0, RemoteAccess::WRITE);
    refuses_read(harness, writable.remote()).await;
    let sealed = harness.b.expose(100, 0, RemoteAccess::default());
    refuses_write(harness, sealed.remote()).await;
    refuses_read(harness, sealed.remote()).await;
    let frozen = Expose::Frozen(harness.b.filled(100, 0));
    let frozen = harness.b.node.fabric.expose(frozen).expect("memory can be exposed");
    refuses_write(harness, frozen.remote()).await;
    for exposed in [readable, writable, sealed, frozen] {
        assert_pattern(&bytes_at(&exposed, 0, 100), 0);
    }
}

pub(super) async fn a_revoked_key_is_refused(harness: &Harness) {
    let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    let (a, _b) = harness.connected().await;
    a.read(harness.a.room(100), exposed.remote()).await.expect("the key is valid");
    let revoked = exposed.remote();
    drop(exposed);
    refuses_write(harness, revoked).await;
    refuses_read(harness, revoked).await;
}

pub(super) async fn a_key_revoked_before_its_turn_is_refused(harness: &Harness) {
    for writes in [true, false] {
        let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
        let (a, b) = harness.connected().await;
        // It waits for its receive, and the requests behind it wait for their turn.
        let first = a.send(harness.a.filled(8, 1), None);
        let late = access(harness, &a, exposed.remote(), writes);
        let behind = a.send(harness.a.filled(8, 2), None);
        harness.settle().await;
        drop(exposed);
        let receives = [b.receive(harness.b.room(8)), b.receive(harness.b.room(8))];
        first.await.expect("the peer takes it");
        assert_eq!(late.await, Err(WorkError::RemoteAccess));
        assert_gone(behind.await);
        let [taken, left] = receives;
        assert_pattern(&taken.await.expect("the message arrives").buffer, 1);
        assert_gone(left.await);
        assert_broken(harness, &a, &b).await;
    }
}

pub(super) async fn revoked_memory_is_not_written_any_more(harness: &Harness) {
    let len = 1 << 20;
    for turns in 0..20 {
        let (a, _b) = harness.connected().await;
        let (lender, returned) = HandingLender::new();
        let memory = harness.b.region(len).lend(lender).expect("allocated memory is writable");
        let exposed = Expose::Mutable(memory, RemoteAccess::READ_WRITE);
        let exposed = harness.b.node.fabric.expose(exposed).expect("memory can be exposed");
        let remote = exposed.remote();
        let writes: Vec<_> = (1..=4).map(|seed| a.write(harness.a.filled(len, seed), remote, None)).collect();
        let read = a.read(harness.a.room(len), remote);
        for _ in 0..turns {
            turn().await;
        }
        drop(exposed);
        let region = returned.await.expect("the memory comes back");
        let memory = region.into_mut().expect("allocated memory is writable");
        let before = memory.to_vec();
        // Any number of them may be done by then; none behind a refused one is.
        let mut refused = false;
        let outcomes = join_all(writes).await.into_iter().chain([read.await.map(drop)]);
        for outcome in outcomes {
            assert!(outcome.is_err() || !refused, "work behind one that was refused ended well");
            if outcome.is_err() && outcome != Err(WorkError::RemoteAccess) {
                assert_gone(outcome);
            }
            refused |= outcome.is_err();
        }
        harness.settle().await;
        assert!(memory[..] == before, "memory was written after it was given back");
    }
}

pub(super) async fn a_refused_write_brings_no_immediate(harness: &Harness) {
    let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    let readable = harness.b.expose(100, 0, RemoteAccess::READ);
    let wrong = RemoteMemory { key: exposed.remote().key ^ 1, ..exposed.remote() };
    for to in [wrong, exposed.remote().slice(1, 100), readable.remote()] {
        let (a, b) = harness.connected().await;
        let receives = [b.receive(harness.b.room(100)), b.receive(harness.b.room(100))];
        assert_eq!(a.write(harness.a.filled(100, 1), to, Some(7)).await, Err(WorkError::RemoteAccess));
        // A device may have taken a receive before it refuses.
        let [first, second] = receives;
        first.await.expect_err("the write was refused");
        assert_gone(second.await);
        assert_broken(harness, &a, &b).await;
    }
    for exposed in [exposed, readable] {
        assert_pattern(&bytes_at(&exposed, 0, 100), 0);
    }
}

pub(super) async fn nothing_behind_an_error_is_carried_out(harness: &Harness) {
    for error in [WorkError::RemoteInvalidRequest, WorkError::RemoteAccess] {
        for writes in [true, false] {
            let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
            let (a, b) = harness.connected().await;
            let first = a.send(harness.a.filled(8, 1), None);
            let wrong = RemoteMemory { key: exposed.remote().key ^ 1, ..exposed.remote() };
            let failing: BoxFuture<'_, _> = match error {
                WorkError::RemoteAccess => access(harness, &a, wrong, writes),
                _ => a.send(harness.a.filled(if writes { 9 } else { 1 << 20 }, 2), None).boxed(),
            };
            let write = a.write(harness.a.filled(100, 3), exposed.remote(), None);
            let read = a.read(harness.a.room(100), exposed.remote());
            let noted = a.write(harness.a.filled(100, 4), exposed.remote(), Some(4));
            let receives: Vec<_> = (0..4).map(|_| b.receive(harness.b.room(8))).collect();
            first.await.expect("the peer takes it");
            assert_eq!(failing.await, Err(error));
            assert_gone(write.await);
            assert_gone(read.await);
            assert_gone(noted.await);
            let received = join_all(receives).await.into_iter().filter(Result::is_ok).count();
            assert_eq!(received, 1);
            harness.settle().await;
            assert_pattern(&bytes_at(&exposed, 0, 100), 0);
        }
    }
}

pub(super) async fn work_of_every_kind_on_a_broken_queue_pair_is_flushed(harness: &Harness) {
    let (at_a, at_b) =
        (harness.a.expose(8, 0, RemoteAccess::READ_WRITE), harness.b.expose(8, 0, RemoteAccess::READ_WRITE));
    let config = QueuePairConfig { send_depth: 4, receive_depth: 4, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let receive = b.receive(harness.b.room(8));
    let wrong = RemoteMemory { key: at_b.remote().key ^ 1, ..at_b.remote() };
    assert_eq!(a.write(harness.a.filled(8, 1), wrong, None).await, Err(WorkError::RemoteAccess));
    assert_gone(receive.await);
    // There are more requests than the queues hold, since each ends.
    for _ in 0..5 {
        for (end, queue_pair, remote) in [(&harness.a, &a, at_b.remote()), (&harness.b, &b, at_a.remote())] {
            let held = queue_pair.send_with_more(end.filled(8, 1), None);
            let unsignaled = queue_pair.write_unsignaled(end.filled(8, 1), remote, None);
            queue_pair.flush();
            assert_gone(queue_pair.send(end.filled(8, 1), Some(1)).await);
            assert_gone(held.await);
            assert_gone(unsignaled.await);
            assert_gone(queue_pair.write(end.filled(8, 1), remote, None).await);
            assert_gone(queue_pair.write(end.filled(8, 1), remote, Some(1)).await);
            assert_gone(queue_pair.read(end.room(8), remote).await);
            assert_gone(queue_pair.receive(end.room(8)).await);
        }
    }
    for exposed in [at_a, at_b] {
        assert_pattern(&bytes_at(&exposed, 0, 8), 0);
    }
}

pub(super) async fn no_receive_in_time_is_an_error(harness: &Harness) {
    let config = QueuePairConfig { receiver_not_ready: Duration::from_millis(30), ..PATIENT };
    let exposed = harness.b.expose(8, 0, RemoteAccess::WRITE);
    for (len, write) in [(8, false), (1 << 20, false), (8, true)] {
        let (a, b) = harness.connected_with(config).await;
        let data = harness.a.filled(len, 0);
        let first = if write { a.write(data, exposed.remote(), Some(0)) } else { a.send(data, None) };
        let second = a.send(harness.a.filled(8, 0), None);
        assert_eq!(first.await, Err(WorkError::ReceiverNotReady));
        assert_gone(second.await);
        assert_broken(harness, &a, &b).await;
    }
}

pub(super) async fn a_close_flushes_what_was_posted_here(harness: &Harness) {
    let (a, _b) = harness.connected().await;
    let sends: Vec<_> = (0..4).map(|seed| a.send(harness.a.filled(1 << 20, seed), None)).collect();
    let receives: Vec<_> = (0..4).map(|_| a.receive(harness.a.room(8))).collect();
    harness.settle().await;
    a.close();
    a.close();
    for outcome in join_all(sends).await {
        assert_eq!(outcome, Err(WorkError::Flushed));
    }
    for outcome in join_all(receives).await {
        assert_eq!(outcome.expect_err("it was flushed"), WorkError::Flushed);
    }
}

pub(super) async fn a_close_ends_what_the_peer_posted(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let sends: Vec<_> = (0..4).map(|seed| a.send(harness.a.filled(1 << 20, seed), None)).collect();
    let receives: Vec<_> = (0..4).map(|_| a.receive(harness.a.room(8))).collect();
    harness.settle().await;
    b.close();
    for outcome in join_all(sends).await {
        assert_gone(outcome);
    }
    for outcome in join_all(receives).await {
        assert_gone(outcome);
    }
    assert_broken(harness, &a, &b).await;
}

pub(super) async fn a_dropped_queue_pair_ends_what_the_peer_posted(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let receives: Vec<_> = (0..4).map(|_| b.receive(harness.b.room(8))).collect();
    drop(a);
    for outcome in join_all(receives).await {
        assert_gone(outcome);
    }
    assert_gone(b.send(harness.b.filled(8, 0), None).await);
}

pub(super) async fn a_close_during_a_transfer_ends_both_sides(harness: &Harness) {
    for closes_b in [false, true] {
        let (a, b) = harness.connected().await;
        let receives: Vec<_> = (0..4).map(|_| b.receive(harness.b.room(4 << 20))).collect();
        let sends: Vec<_> = (0..4).map(|seed| a.send(harness.a.filled(4 << 20, seed), None)).collect();
        sends[0].nearly_done().await;
        if closes_b {
            b.close()
        } else {
            a.close()
        }
        let (sent, received) = join(join_all(sends), join_all(receives)).await;
        for outcome in sent.into_iter().filter(Result::is_err) {
            assert_gone(outcome);
        }
        // Messages that arrived are complete; none arrives after the first failure.
        let arrived = received.iter().take_while(|outcome| outcome.is_ok()).count();
        for (place, outcome) in received.into_iter().enumerate() {
            match outcome {
                Ok(received) if place < arrived => assert_pattern(&received.buffer, place as u64),
                outcome => assert_gone(outcome),
            }
        }
    }
}

pub(super) async fn a_close_during_large_writes_and_reads_ends_both_sides(harness: &Harness) {
    let len = 4 << 20;
    let exposed = harness.b.expose(len, 1, RemoteAccess::READ_WRITE);
    for (turns, closes_b) in [(0, false), (0, true), (3, false), (3, true), (30, false), (30, true)] {
        let (a, b) = harness.connected().await;
        let at_b = b.receive(harness.b.room(8));
        let reads: Vec<_> = (0..3).map(|_| a.read(harness.a.room(len), exposed.remote())).collect();
        let writes: Vec<_> = (0..3).map(|_| a.write(harness.a.filled(len, 1), exposed.remote(), None)).collect();
        for _ in 0..turns {
            turn().await;
        }
        if closes_b {
            b.close()
        } else {
            a.close()
        }
        let (read, written) = join(join_all(reads), join_all(writes)).await;
        for outcome in read {
            match outcome {
                // Bytes that arrived are complete.
                Ok(bytes) => assert_pattern(&bytes, 1),
                outcome => assert_gone(outcome),
            }
        }
        for outcome in written.into_iter().filter(Result::is_err) {
            assert_gone(outcome);
        }
        assert_gone(at_b.await);
        assert_broken(harness, &a, &b).await;
    }
    assert_pattern(&bytes_at(&exposed, 0, len), 1);
}

pub(super) async fn a_peer_that_is_gone_ends_all_work_of_both_sides(harness: &Harness) {
    let at_a = harness.a.expose(100, 0, RemoteAccess::READ_WRITE);
    let at_b = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    for departure in [Departure::CloseA, Departure::CloseB, Departure::DropA, Departure::DropB] {
        // All of it waits: behind a send without a receive,
        let (a, b) = harness.connected().await;
        let mut posted = Vec::new();
        for (end, queue_pair, remote) in [(&harness.a, &a, at_b.remote()), (&harness.b, &b, at_a.remote())] {
            posted.push(queue_pair.send(end.filled(1 << 20, 1), None).boxed());
            posted.push(queue_pair.write(end.filled(100, 1), remote, None).boxed());
            posted.push(queue_pair.read(end.room(100), remote).map(|outcome| outcome.map(drop)).boxed());
            posted.push(queue_pair.write(end.filled(100, 1), remote, Some(1)).boxed());
            posted.push(queue_pair.write_unsignaled(end.filled(100, 1), remote, None).boxed());
            posted.push(queue_pair.send_with_more(end.filled(8, 1), None).boxed());
        }
        harness.settle().await;
        let left = departure.apply(a, b);
        join_all(posted).await.into_iter().for_each(assert_gone);
        drop(left);
        // or for a message.
        let (a, b) = harness.connected().await;
        let mut posted: Vec<_> = (0..4).map(|_| a.receive(harness.a.room(8))).collect();
        posted.extend((0..4).map(|_| b.receive(harness.b.room(8))));
        harness.settle().await;
        let left = departure.apply(a, b);
        join_all(posted).await.into_iter().for_each(assert_gone);
        drop(left);
    }
    for exposed in [at_a, at_b] {
        assert_pattern(&bytes_at(&exposed, 0, 100), 0);
    }
}

pub(super) async fn a_peer_that_leaves_before_the_first_work_leaves_nobody_waiting(harness: &Harness) {
    let exposed = (harness.a.expose(8, 0, RemoteAccess::READ_WRITE), harness.b.expose(8, 0, RemoteAccess::READ_WRITE));
    for departure in [Departure::CloseA, Departure::CloseB, Departure::DropA, Departure::DropB] {
        for settles in [false, true] {
            let (a, b) = harness.connected().await;
            let left = departure.apply(a, b);
            if settles {
                harness.settle().await;
            }
            let ends = [(&harness.a, &left.0, exposed.1.remote()), (&harness.b, &left.1, exposed.0.remote())];
            for (end, queue_pair, remote) in ends {
                let Some(queue_pair) = queue_pair else { continue };
                let receive = queue_pair.receive(end.room(8));
                let send = queue_pair.send(end.filled(1 << 20, 1), None);
                let write = queue_pair.write(end.filled(8, 0), remote, None);
                let read = queue_pair.read(end.room(8), remote);
                assert_gone(send.await);
                assert_gone(write.await);
                assert_gone(read.await);
                assert_gone(receive.await);
            }
        }
    }
}

pub(super) async fn work_posted_after_a_close_is_flushed(harness: &Harness) {
    let exposed = harness.b.expose(8, 0, RemoteAccess::READ_WRITE);
    let (a, _b) = harness.connected().await;
    a.close();
    assert_flushes(harness, &a, exposed.remote()).await;
    let never_connected = harness.a.queue_pair(PATIENT);
    let receive = never_connected.receive(harness.a.room(8));
    never_connected.close();
    assert_eq!(receive.await.expect_err("it was flushed"), WorkError::Flushed);
    assert_flushes(harness, &never_connected, exposed.remote()).await;
}

pub(super) async fn a_broken_queue_pair_leaves_others_whole(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(8, 0, RemoteAccess::READ);
    refuses_write(harness, exposed.remote()).await;
    let receive = b.receive(harness.b.room(8));
    a.send(harness.a.filled(8, 1), None).await.expect("the peer takes it");
    assert_pattern(&receive.await.expect("the message arrives").buffer, 1);
}

/// Writes where no write is allowed, on a fresh pair of queue pairs.
async fn refuses_write(harness: &Harness, to: RemoteMemory) {
    let (a, b) = harness.connected().await;
    let receive = b.receive(harness.b.room(8));
    let write = a.write(harness.a.filled(len_of(to), 9), to, None);
    let behind = a.send(harness.a.filled(8, 0), None);
    assert_eq!(write.await, Err(WorkError::RemoteAccess));
    assert_gone(behind.await);
    assert_gone(receive.await);
    assert_broken(harness, &a, &b).await;
}

/// Reads where no read is allowed, on a fresh pair of queue pairs.
async fn refuses_read(harness: &Harness, from: RemoteMemory) {
    let (a, b) = harness.connected().await;
    let receive = b.receive(harness.b.room(8));
    let read = a.read(harness.a.room(len_of(from)), from);
    let behind = a.send(harness.a.filled(8, 0), None);
    assert_eq!(read.await.expect_err("the read is not allowed"), WorkError::RemoteAccess);
    assert_gone(behind.await);
    assert_gone(receive.await);
    assert_broken(harness, &a, &b).await;
}

/// Writes or reads as many bytes as `remote` has.
fn access<'a>(
    harness: &'a Harness,
    a: &QueuePair,
    remote: RemoteMemory,
    writes: bool,
) -> BoxFuture<'a, Result<(), WorkError>> {
    if writes {
        return a.write(harness.a.filled(len_of(remote), 9), remote, None).boxed();
    }
    a.read(harness.a.room(len_of(remote)), remote).map(|outcome| outcome.map(drop)).boxed()
}

fn len_of(memory: RemoteMemory) -> usize {
    usize::try_from(memory.len).expect("the bodies ask for short ranges")
}

/// Checks that both ends flush all work that is posted now.
async fn assert_broken(harness: &Harness, a: &QueuePair, b: &QueuePair) {
    assert_gone(a.send(harness.a.filled(1, 0), None).await);
    assert_gone(a.receive(harness.a.room(1)).await);
    assert_gone(b.receive(harness.b.room(1)).await);
    assert_gone(b.send(harness.b.filled(1, 0), None).await);
}

async fn assert_flushes(harness: &Harness, queue_pair: &QueuePair, remote: RemoteMemory) {
    let flushed = Err(WorkError::Flushed);
    assert_eq!(queue_pair.send(harness.a.filled(8, 0), None).await, flushed);
    assert_eq!(queue_pair.write(harness.a.filled(8, 0), remote, None).await, flushed);
    assert_eq!(queue_pair.read(harness.a.room(8), remote).await.map(drop), flushed);
    assert_eq!(queue_pair.receive(harness.a.room(8)).await.map(drop), flushed);
}

/// How one of two connected queue pairs goes away.
#[derive(Clone, Copy)]
enum Departure {
    CloseA,
    CloseB,
    DropA,
    DropB,
}

impl Departure {
    /// Lets it go away; returns the queue pairs that are left.
    fn apply(self, a: QueuePair, b: QueuePair) -> (Option<QueuePair>, Option<QueuePair>) {
        match self {
            Self::CloseA => a.close(),
            Self::CloseB => b.close(),
            Self::DropA => return (None, Some(b)),
            Self::DropB => return (Some(a), None),
        }
        (Some(a), Some(b))
    }
}

/// A lender that passes on the one region that it gets back.
struct HandingLender(Mutex<Option<oneshot::Sender<MemoryRegion>>>);

impl HandingLender {
    fn new() -> (Arc<Self>, oneshot::Receiver<MemoryRegion>) {
        let (sender, receiver) = oneshot::channel();
        (Arc::new(Self(Mutex::new(Some(sender)))), receiver)
    }
}

impl Lender for HandingLender {
    fn take_back(&self, region: MemoryRegion) {
        let sender = self.0.lock().expect("no code panics while it is locked").take();
        sender.expect("it lends one region").send(region).expect("the body waits for it");
    }
}

/// Bytes on either side of memory that must not be touched.
const GUARD_LEN: usize = 4096;
