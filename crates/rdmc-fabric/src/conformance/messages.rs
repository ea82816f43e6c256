//! Two-sided messages: sends and receives.

use std::sync::Arc;

use futures::future::{join, join_all};

use super::{Harness, PATIENT, RecordingInspector, assert_pattern, assert_untouched, is_pending};
use crate::fabric::QueuePairConfig;
use crate::remote::RemoteAccess;
use crate::work::{ReceiveOptions, WorkError};

pub(super) async fn a_send_brings_its_bytes_and_its_immediate(harness: &Harness) {
    let (a, b) = harness.connected().await;
    for (seed, imm) in [(1, None), (2, Some(0)), (3, Some(u32::MAX)), (4, None)] {
        let receive = b.receive(harness.b.room(100));
        a.send(harness.a.filled(100, seed), imm).await.expect("the peer takes it");
        let received = receive.await.expect("the message arrives");
        assert_eq!((received.len, received.imm), (100, imm));
        assert_pattern(&received.buffer, seed);
    }
}

pub(super) async fn messages_of_every_size_are_exact(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let sizes = [0, 1, 4095, 4096, 4097, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, (1 << 20) + 3, 8 << 20];
    for (seed, len) in (0..).zip(sizes) {
        let receive = b.receive(harness.b.room(len));
        a.send(harness.a.filled(len, seed), Some(7)).await.expect("the peer takes it");
        let received = receive.await.expect("the message arrives");
        assert_eq!((received.len, received.buffer.len(), received.imm), (len, len, Some(7)));
        assert_pattern(&received.buffer, seed);
    }
}

pub(super) async fn a_message_shorter_than_its_receive_leaves_the_rest_alone(harness: &Harness) {
    let (a, b) = harness.connected().await;
    for len in [0, 1, 5000, 99_999] {
        let receive = b.receive(harness.b.room(100_000));
        a.send(harness.a.filled(len, 5), None).await.expect("the peer takes it");
        let received = receive.await.expect("the message arrives");
        assert_eq!((received.len, received.buffer.len()), (len, 100_000));
        assert_pattern(&received.buffer[..len], 5);
        assert_untouched(&received.buffer[len..]);
    }
}

pub(super) async fn a_thousand_sends_arrive_in_order(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 1000, receive_depth: 1000, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let receives: Vec<_> = (0..1000).map(|_| b.receive(harness.b.room(64))).collect();
    let sends: Vec<_> = (0..1000).map(|seed| a.send(harness.a.filled(64, seed), None)).collect();
    for outcome in join_all(sends).await {
        outcome.expect("the peer takes it");
    }
    for (seed, received) in (0..).zip(join_all(receives).await) {
        assert_pattern(&received.expect("the message arrives").buffer, seed);
    }
}

pub(super) async fn sends_and_writes_with_immediate_arrive_in_one_order(harness: &Harness) {
    let config = QueuePairConfig { send_depth: 300, receive_depth: 300, ..PATIENT };
    let (a, b) = harness.connected_with(config).await;
    let exposed = harness.b.expose(300 * 8, 0, RemoteAccess::WRITE);
    let receives: Vec<_> = (0..300).map(|_| b.receive(harness.b.room(8))).collect();
    let posted = (0..300).map(|imm| {
        let data = harness.a.filled(8, imm);
        let numbered = Some(u32::try_from(imm).expect("below 300"));
        if imm % 3 == 0 { a.write(data, exposed.remote().slice(imm * 8, 8), numbered) } else { a.send(data, numbered) }
    });
    for outcome in join_all(posted).await {
        outcome.expect("the peer takes it");
    }
    for (imm, received) in (0..).zip(join_all(receives).await) {
        let received = received.expect("the message arrives");
        assert_eq!((received.imm, received.len), (Some(imm), if imm % 3 == 0 { 0 } else { 8 }));
    }
}

pub(super) async fn both_directions_work_at_once(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let len = 1 << 20;
    let at_b: Vec<_> = (0..8).map(|_| b.receive(harness.b.room(len))).collect();
    let at_a: Vec<_> = (0..8).map(|_| a.receive(harness.a.room(len))).collect();
    let from_a: Vec<_> = (0..8).map(|seed| a.send(harness.a.filled(len, seed), None)).collect();
    let from_b: Vec<_> = (0..8).map(|seed| b.send(harness.b.filled(len, seed + 100), None)).collect();
    let (from_a, from_b) = join(join_all(from_a), join_all(from_b)).await;
    for outcome in from_a.into_iter().chain(from_b) {
        outcome.expect("the peer takes it");
    }
    let (at_a, at_b) = join(join_all(at_a), join_all(at_b)).await;
    for (seed, received) in (0..).zip(at_b).chain((100..).zip(at_a)) {
        assert_pattern(&received.expect("the message arrives").buffer, seed);
    }
}

pub(super) async fn a_send_waits_for_its_receive(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let mut small = a.send(harness.a.filled(16, 1), None);
    let mut large = a.send(harness.a.filled(1 << 20, 2), None);
    harness.settle().await;
    assert!(is_pending(&mut small), "a send completed before the peer took it");
    let first = b.receive(harness.b.room(16)).await.expect("the message arrives");
    assert_pattern(&first.buffer, 1);
    small.await.expect("the peer has taken it");
    harness.settle().await;
    assert!(is_pending(&mut large), "a send completed before the peer took it");
    let second = b.receive(harness.b.room(1 << 20)).await.expect("the message arrives");
    assert_pattern(&second.buffer, 2);
    large.await.expect("the peer has taken it");
}

pub(super) async fn a_receive_is_posted_before_the_connection_is_made(harness: &Harness) {
    let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair(PATIENT));
    let (at_a, at_b) = (a.receive(harness.a.room(10)), b.receive(harness.b.room(10)));
    harness.connect(&a, &b).await;
    a.send(harness.a.filled(10, 1), None).await.expect("the peer takes it");
    b.send(harness.b.filled(10, 2), None).await.expect("the peer takes it");
    assert_pattern(&at_b.await.expect("the message arrives").buffer, 1);
    assert_pattern(&at_a.await.expect("the message arrives").buffer, 2);
}

pub(super) async fn nearly_done_is_no_later_than_completion(harness: &Harness) {
    let (a, b) = harness.connected_with(QueuePairConfig { send_depth: 3, ..PATIENT }).await;
    let mut sends: Vec<_> = (0..3).map(|seed| a.send(harness.a.filled(1 << 20, seed), None)).collect();
    let refused = a.send(harness.a.filled(1, 0), None);
    refused.nearly_done().await;
    assert_eq!(refused.await, Err(WorkError::QueueFull { depth: 3 }));
    let nearness = [None, Some(0), Some(u32::MAX)];
    let receives: Vec<_> = nearness
        .into_iter()
        .map(|near_bytes| b.receive_with(harness.b.room(1 << 20), ReceiveOptions { near_bytes, ..Default::default() }))
        .collect();
    for send in &mut sends {
        send.nearly_done().await;
    }
    for receive in &receives {
        receive.nearly_done().await;
    }
    for received in join_all(receives).await {
        received.expect("the message arrives");
    }
    for outcome in join_all(sends).await {
        outcome.expect("the peer takes it");
    }
    // A send that completed before its state was asked for is nearly done as well.
    let receive = b.receive(harness.b.room(8));
    let send = a.send(harness.a.filled(8, 0), None);
    receive.await.expect("the message arrives");
    harness.settle().await;
    send.nearly_done().await;
    send.await.expect("the peer takes it");
    // So is a flushed one.
    let send = a.send(harness.a.filled(8, 0), None);
    a.close();
    send.nearly_done().await;
    send.await.expect_err("it was flushed");
}

/// Returns options by which a receive is shown to `inspector`, and is nearly done early.
fn shown_to(inspector: &Arc<RecordingInspector>) -> ReceiveOptions {
    ReceiveOptions { inspector: Some(inspector.clone()), near_bytes: Some(1000) }
}

pub(super) async fn an_inspector_sees_each_byte_once_and_in_order(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let sizes = [0, 1, 4097, 64 << 10, (1 << 20) + 3, 5, 3 << 20];
    // All receives are posted in advance and longer than their messages; every other one has no inspector.
    let receives: Vec<_> = sizes
        .map(|len| {
            let seen = Arc::new(RecordingInspector::default());
            let inspected = b.receive_with(harness.b.room(len + 100), shown_to(&seen));
            (len, seen, inspected, b.receive(harness.b.room(len)))
        })
        .into();
    let sent = (0..).zip(sizes).flat_map(|(seed, len)| [(2 * seed, len), (2 * seed + 1, len)]);
    let sends: Vec<_> = sent.map(|(seed, len)| a.send(harness.a.filled(len, seed), None)).collect();
    for (seed, (len, seen, inspected, other)) in (0..).zip(receives) {
        let received = inspected.await.expect("the message arrives");
        // A fabric may show any part of it.
        let seen = seen.bytes();
        assert!(seen.len() <= len, "{} bytes of {len} were shown", seen.len());
        assert_pattern(&seen, 2 * seed);
        assert_eq!(received.len, len);
        assert_pattern(&received.buffer[..len], 2 * seed);
        assert_untouched(&received.buffer[len..]);
        assert_pattern(&other.await.expect("the message arrives").buffer, 2 * seed + 1);
    }
    for outcome in join_all(sends).await {
        outcome.expect("the peer takes it");
    }
}

pub(super) async fn an_inspector_sees_nothing_of_a_write(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(100, 0, RemoteAccess::WRITE);
    let seen = Arc::new(RecordingInspector::default());
    let receive = b.receive_with(harness.b.room(100), shown_to(&seen));
    a.write(harness.a.filled(100, 1), exposed.remote(), Some(3)).await.expect("the peer allows it");
    let received = receive.await.expect("the immediate arrives");
    assert_eq!((received.len, received.imm, seen.bytes().len()), (0, Some(3), 0));
    assert_untouched(&received.buffer);
}
