//! Dropped operations: the work is still done, and the memory comes back.

use futures::future::{FutureExt, join_all};

use super::{CountingLender, Harness, PATIENT, assert_pattern, bytes_at, turn};
use crate::fabric::QueuePairConfig;
use crate::memory::BufferMut;
use crate::remote::{Expose, RemoteAccess};

pub(super) async fn dropped_operations_are_carried_out_all_the_same(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(1 << 20, 0, RemoteAccess::WRITE);
    drop(b.receive(harness.b.room(1000)));
    let receive = b.receive(harness.b.room(1 << 20));
    drop(a.send(harness.a.filled(1000, 1), None));
    drop(a.write(harness.a.filled(1 << 20, 2), exposed.remote(), None));
    drop(a.send(harness.a.filled(1 << 20, 3), Some(3)));
    let received = receive.await.expect("the message arrives");
    assert_eq!(received.imm, Some(3));
    assert_pattern(&received.buffer, 3);
    assert_pattern(&bytes_at(&exposed, 0, 1 << 20), 2);
}

pub(super) async fn dropped_operations_give_their_memory_back(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let (at_a, at_b) = (CountingLender::new(), CountingLender::new());
    let memory = Expose::Mutable(harness.b.lent(&at_b, 1000, 0), RemoteAccess::READ_WRITE);
    let exposed = harness.b.node.fabric.expose(memory).expect("memory can be exposed");
    for seed in 1..=10 {
        drop(b.receive(harness.b.lent(&at_b, 1 << 20, 0)));
        drop(a.send(harness.a.lent(&at_a, 1 << 20, seed).freeze(), None));
        drop(a.write(harness.a.lent(&at_a, 1000, seed).freeze(), exposed.remote(), None));
        drop(a.read(harness.a.lent(&at_a, 1000, 0), exposed.remote()));
    }
    at_b.holds_at_least(10).await;
    at_a.holds_at_least(30).await;
    drop(exposed);
    at_b.holds_at_least(11).await;
}

pub(super) async fn operations_may_be_dropped_at_any_moment(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let (at_a, at_b) = (CountingLender::new(), CountingLender::new());
    let mut lent = 0;
    for turns in 0..30 {
        let receive = b.receive(harness.b.lent(&at_b, 300_000, 0));
        let send = a.send(harness.a.lent(&at_a, 300_000, turns).freeze(), None);
        lent += 1;
        for _ in 0..turns {
            // Polled in between, so that a waker is registered when the operation is dropped.
            if turns % 2 == 0 && receive.nearly_done().now_or_never().is_none() {
                let _ = send.nearly_done().now_or_never();
            }
            turn().await;
        }
        drop(send);
        drop(receive);
    }
    at_a.holds_at_least(lent).await;
    at_b.holds_at_least(lent).await;
    // The queue pair still works.
    let receive = b.receive(harness.b.room(10));
    a.send(harness.a.filled(10, 1), None).await.expect("the peer takes it");
    assert_pattern(&receive.await.expect("the message arrives").buffer, 1);
}

pub(super) async fn closing_gives_all_memory_back(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 8, receive_depth: 8, ..PATIENT };
    for turns in 0..20 {
        let (a, b) = harness.connected_with(config).await;
        let (at_a, at_b) = (CountingLender::new(), CountingLender::new());
        let memory = Expose::Mutable(harness.b.lent(&at_b, 300_000, 0), RemoteAccess::READ_WRITE);
        let exposed = harness.b.node.fabric.expose(memory).expect("memory can be exposed");
        let room = |seed| -> BufferMut { harness.b.lent(&at_b, 300_000, seed) };
        let receives = [b.receive(room(0)), b.receive(room(0)), b.receive(room(0))];
        let data = |seed| harness.a.lent(&at_a, 300_000, seed).freeze();
        let sends = [a.send(data(1), None), a.write(data(2), exposed.remote(), None), a.send(data(3), None)];
        let read = a.read(harness.a.lent(&at_a, 300_000, 0), exposed.remote());
        for _ in 0..turns {
            turn().await;
        }
        if turns % 2 == 0 {
            a.close()
        } else {
            drop(b)
        }
        // Each ends, with any outcome.
        join_all(sends).await;
        drop(join_all(receives).await);
        drop(read.await);
        drop(exposed);
        at_a.holds_at_least(4).await;
        at_b.holds_at_least(4).await;
    }
}
