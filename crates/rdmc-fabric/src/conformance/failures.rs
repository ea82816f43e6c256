//! Errors: who gets which, and that a broken queue pair leaves nobody waiting.

use std::time::Duration;

use futures::future::{join, join_all};

use super::{Harness, PATIENT, assert_gone, assert_pattern, bytes_at};
use crate::fabric::QueuePairConfig;
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
    // More than any address.
    for address in [u64::MAX, u64::MAX - 7] {
        refuses_write(harness, RemoteMemory { address, len: 16, ..exposed.remote() }).await;
        refuses_read(harness, RemoteMemory { address, len: 16, ..exposed.remote() }).await;
    }
    assert_pattern(&bytes_at(&exposed, 0, 100), 0);
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
        // What did arrive is whole; nothing after the first failure arrives.
        let arrived = received.iter().take_while(|outcome| outcome.is_ok()).count();
        for (place, outcome) in received.into_iter().enumerate() {
            match outcome {
                Ok(received) if place < arrived => assert_pattern(&received.buffer, place as u64),
                outcome => assert_gone(outcome),
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

fn len_of(memory: RemoteMemory) -> usize {
    usize::try_from(memory.len).expect("the bodies ask for short ranges")
}

/// Checks that both ends flush whatever is posted now.
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
