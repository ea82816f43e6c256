//! One-sided operations on exposed memory.

use super::{Harness, UNTOUCHED, assert_pattern, bytes_at, is_pending};
use crate::remote::{Expose, RemoteAccess};

pub(super) async fn a_write_lands_and_wakes_nobody(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(100, 0, RemoteAccess::WRITE);
    let mut receive = b.receive(harness.b.room(100));
    a.write(harness.a.filled(100, 1), exposed.remote(), None).await.expect("the write lands");
    assert_pattern(&bytes_at(&exposed, 0, 100), 1);
    harness.settle().await;
    assert!(is_pending(&mut receive), "a write without immediate consumed a receive");
    a.send(harness.a.filled(10, 2), None).await.expect("the peer takes it");
    assert_eq!(receive.await.expect("the message arrives").len, 10);
}

pub(super) async fn the_length_is_that_of_the_local_memory(harness: &Harness) {
    let (a, _b) = harness.connected().await;
    let exposed = harness.b.expose(100, 1, RemoteAccess::READ_WRITE);
    for len in [0, 7, 9] {
        // As with real verbs, the remote side of a request is an address and a key.
        let of_b = a.read(harness.a.room(8), exposed.remote().slice(0, len)).await.expect("the bytes arrive");
        assert_pattern(&of_b, 1);
        a.write(harness.a.filled(8, 1), exposed.remote().slice(0, len), None).await.expect("the write lands");
    }
    assert_pattern(&bytes_at(&exposed, 0, 100), 1);
}

pub(super) async fn a_write_with_immediate_consumes_a_receive(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(100, 0, RemoteAccess::WRITE);
    let receives = [b.receive(harness.b.room(50)), b.receive(harness.b.room(0))];
    for (seed, receive) in (1..).zip(receives) {
        let imm = u32::try_from(seed).expect("a small number") << 30;
        a.write(harness.a.filled(100, seed), exposed.remote(), Some(imm)).await.expect("the write lands");
        let received = receive.await.expect("the notice arrives");
        assert_eq!((received.len, received.imm), (0, Some(imm)));
        assert!(received.buffer.iter().all(|&byte| byte == UNTOUCHED), "the memory of the receive was written");
        assert_pattern(&bytes_at(&exposed, 0, 100), seed);
    }
    // It waits for a receive, as a send does.
    let mut write = a.write(harness.a.filled(1, 9), exposed.remote().slice(0, 1), Some(9));
    harness.settle().await;
    assert!(is_pending(&mut write), "a write with immediate completed without a receive");
    assert_eq!(b.receive(harness.b.room(0)).await.expect("the notice arrives").imm, Some(9));
    write.await.expect("the write lands");
}

pub(super) async fn a_send_does_not_overtake_a_write(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(1 << 20, 0, RemoteAccess::WRITE);
    for seed in 1..=5 {
        let receive = b.receive(harness.b.room(1));
        let write = a.write(harness.a.filled(1 << 20, seed), exposed.remote(), None);
        let send = a.send(harness.a.filled(1, 0), None);
        receive.await.expect("the message arrives");
        assert_pattern(&bytes_at(&exposed, 0, 1 << 20), seed);
        write.await.expect("the write lands");
        send.await.expect("the peer takes it");
    }
}

pub(super) async fn a_read_brings_the_bytes(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let at_b = harness.b.expose(100, 1, RemoteAccess::READ);
    let at_a = harness.a.expose(100, 2, RemoteAccess::READ);
    let (of_a, of_b) = (a.read(harness.a.room(100), at_b.remote()), b.read(harness.b.room(100), at_a.remote()));
    assert_pattern(&of_a.await.expect("the bytes arrive"), 1);
    assert_pattern(&of_b.await.expect("the bytes arrive"), 2);
}

pub(super) async fn a_read_sees_the_write_before_it(harness: &Harness) {
    let (a, _b) = harness.connected().await;
    let exposed = harness.b.expose(100_000, 0, RemoteAccess::READ_WRITE);
    for seed in 1..=5 {
        let write = a.write(harness.a.filled(100_000, seed), exposed.remote(), None);
        let read = a.read(harness.a.room(100_000), exposed.remote());
        assert_pattern(&read.await.expect("the bytes arrive"), seed);
        write.await.expect("the write lands");
    }
}

pub(super) async fn offsets_reach_just_their_bytes(harness: &Harness) {
    let (a, _b) = harness.connected().await;
    let exposed = harness.b.expose(1000, 0, RemoteAccess::READ_WRITE);
    let ranges = [(0, 1, 300), (999, 1, 400), (500, 0, 500), (100, 57, 600)];
    let mut want = super::pattern(1000, 0);
    for (offset, len, seed) in ranges {
        let part = exposed.remote().slice(offset as u64, len as u64);
        a.write(harness.a.filled(len, seed), part, None).await.expect("the write lands");
        want[offset..offset + len].copy_from_slice(&super::pattern(len, seed));
    }
    assert_eq!(bytes_at(&exposed, 0, 1000), want);
    for (offset, len, seed) in ranges {
        let part = exposed.remote().slice(offset as u64, len as u64);
        let read = a.read(harness.a.room(len), part).await.expect("the bytes arrive");
        assert_eq!(read.len(), len);
        assert_pattern(&read, seed);
    }
}

pub(super) async fn an_access_of_no_bytes_at_the_end_succeeds(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let exposed = harness.b.expose(100, 0, RemoteAccess::READ_WRITE);
    let end = exposed.remote().slice(100, 0);
    a.write(harness.a.filled(0, 0), end, None).await.expect("there is nothing to refuse");
    assert_eq!(a.read(harness.a.room(0), end).await.expect("there is nothing to refuse").len(), 0);
    let receive = b.receive(harness.b.room(0));
    a.write(harness.a.filled(0, 0), end, Some(5)).await.expect("there is nothing to refuse");
    assert_eq!(receive.await.expect("the notice arrives").imm, Some(5));
    assert_pattern(&bytes_at(&exposed, 0, 100), 0);
}

pub(super) async fn large_writes_and_reads_are_exact(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let len = (4 << 20) + 1;
    let at_a = harness.a.expose(len, 0, RemoteAccess::WRITE);
    let at_b = harness.b.expose(len, 1, RemoteAccess::READ_WRITE);
    // Both move in the direction of the reader's responses, at the same time.
    let write = b.write(harness.b.filled(len, 2), at_a.remote(), None);
    let read = a.read(harness.a.room(len), at_b.remote());
    assert_pattern(&read.await.expect("the bytes arrive"), 1);
    write.await.expect("the write lands");
    assert_pattern(&bytes_at(&at_a, 0, len), 2);
    a.write(harness.a.filled(len, 3), at_b.remote(), None).await.expect("the write lands");
    assert_pattern(&bytes_at(&at_b, 0, len), 3);
}

pub(super) async fn the_owner_writes_what_peers_read(harness: &Harness) {
    let (a, _b) = harness.connected().await;
    let exposed = harness.b.expose(16, 0, RemoteAccess::READ);
    exposed.write_at(8, &0x0123_4567_89ab_cdef_u64.to_le_bytes()).expect("the range lies inside");
    assert_eq!(exposed.read_u64(8).expect("the range lies inside"), 0x0123_4567_89ab_cdef);
    let read = a.read(harness.a.room(8), exposed.remote().slice(8, 8)).await.expect("the bytes arrive");
    assert_eq!(read[..], 0x0123_4567_89ab_cdef_u64.to_le_bytes());
}

pub(super) async fn frozen_memory_is_read_by_both(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let buffer = harness.b.filled(1000, 1);
    let exposed = harness.b.node.fabric.expose(Expose::Frozen(buffer.clone())).expect("memory can be exposed");
    assert_pattern(&a.read(harness.a.room(1000), exposed.remote()).await.expect("the bytes arrive"), 1);
    assert_pattern(&bytes_at(&exposed, 0, 1000), 1);
    exposed.write_at(0, &[0]).expect_err("frozen memory is not written");
    // The same memory is sent while it is exposed.
    let receive = a.receive(harness.a.room(1000));
    b.send(buffer, None).await.expect("the peer takes it");
    assert_pattern(&receive.await.expect("the message arrives").buffer, 1);
}

pub(super) async fn the_owner_cannot_reach_outside_its_exposure(harness: &Harness) {
    let exposed = harness.b.expose(10, 0, RemoteAccess::READ_WRITE);
    for (offset, len) in [(10, 1), (0, 11), (usize::MAX, 1), (11, 0)] {
        exposed.read_at(offset, &mut vec![0; len]).expect_err("the range lies outside");
        exposed.write_at(offset, &vec![0; len]).expect_err("the range lies outside");
    }
    exposed.read_u64(3).expect_err("the number does not fit");
    assert_pattern(&bytes_at(&exposed, 0, 10), 0);
}

pub(super) async fn keys_differ_between_exposures(harness: &Harness) {
    let exposed: Vec<_> = (0..100).map(|_| harness.a.expose(8, 0, RemoteAccess::READ)).collect();
    let keys: std::collections::HashSet<_> = exposed.iter().map(|region| region.remote().key).collect();
    assert_eq!(keys.len(), 100);
}
