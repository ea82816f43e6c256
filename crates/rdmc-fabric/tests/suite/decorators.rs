//! What the decorators do besides forwarding, which the conformance suite and `forwarding` check.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::{join, join_all};
use rdmc_fabric::{
    Buffer, BufferMut, CompletionMode, ConnectError, Fabric, FabricError, Fault, FaultFabric, MemNetwork, Opcode,
    Operation, Peer, QueuePair, QueuePairConfig, Received, Role, TraceFabric, TraceKind, WorkError,
};

/// Creates a queue pair of `fabric` whose completions a task drains.
fn queue_pair(fabric: &dyn Fabric) -> QueuePair {
    let queue = fabric.create_completion_queue(1024, CompletionMode::Event).unwrap();
    let queue_pair = fabric.create_queue_pair(&queue.source(), QueuePairConfig::default()).unwrap();
    fabric.environment().spawn(Box::pin(queue.drain()));
    queue_pair
}

async fn connect(a: &QueuePair, b: &QueuePair) -> Result<(), ConnectError> {
    let peer = |of: &QueuePair, role| Peer { endpoint: of.endpoint(), role, address: None };
    let (at_a, at_b) = join(a.connect(peer(b, Role::Active)), b.connect(peer(a, Role::Passive))).await;
    at_a.and(at_b)
}

fn room(fabric: &dyn Fabric) -> BufferMut {
    fabric.allocate(1).unwrap().into_mut().unwrap()
}

fn byte(fabric: &dyn Fabric, value: u8) -> Buffer {
    let mut room = room(fabric);
    room.fill(value);
    room.freeze()
}

async fn values(receives: Vec<Operation<Received>>) -> Vec<u8> {
    join_all(receives).await.into_iter().map(|received| received.unwrap().buffer[0]).collect()
}

#[tokio::test]
async fn a_flipped_bit_is_flipped_on_the_way_only() {
    let network = MemNetwork::new();
    let faulty = FaultFabric::new(network.fabric(), |posting| match (posting.opcode, posting.index) {
        (Opcode::Send, 1) => Fault::Flip { bit: 8 + 3 },
        (Opcode::Send, 2) => Fault::FlipImmediate { bit: 4 },
        _ => Fault::None,
    });
    let clean = network.fabric();
    let (a, b) = (queue_pair(&*faulty), queue_pair(&*clean));
    connect(&a, &b).await.unwrap();
    let receives: Vec<_> = (0..4).map(|_| b.receive(room(&*clean))).collect();
    let bytes: Vec<_> = (0..3).map(|_| byte(&*faulty, 0)).collect();
    let sends: Vec<_> = bytes.iter().map(|bytes| a.send(bytes.clone(), Some(0))).collect();
    // An empty message has no bit to flip.
    let empty = a.send(Buffer::empty(), Some(0));
    let received: Vec<_> = join_all(receives).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(received[..3].iter().map(|received| received.buffer[0]).collect::<Vec<_>>(), [0, 1 << 3, 0]);
    assert_eq!(received.iter().map(|received| received.imm).collect::<Vec<_>>(), [Some(0), Some(0), Some(16), Some(0)]);
    assert!(join_all(sends).await.iter().all(Result::is_ok) && empty.await.is_ok());
    assert!(bytes.iter().all(|bytes| bytes[0] == 0));
}

#[tokio::test]
async fn a_delayed_request_keeps_its_place() {
    let network = MemNetwork::new();
    let delay = Duration::from_millis(20);
    let slow = FaultFabric::new(network.fabric(), move |posting| {
        if (posting.opcode, posting.index) == (Opcode::Send, 1) { Fault::Delay(delay) } else { Fault::None }
    });
    let fast = network.fabric();
    let (a, b) = (queue_pair(&*slow), queue_pair(&*fast));
    connect(&a, &b).await.unwrap();
    let receives: Vec<_> = (0..4).map(|_| b.receive(room(&*fast))).collect();
    let start = slow.environment().now();
    let sends: Vec<_> = (0..4).map(|value| a.send(byte(&*slow, value), None)).collect();
    assert_eq!(values(receives).await, [0, 1, 2, 3]);
    assert!(slow.environment().now().since(start) >= delay);
    assert!(join_all(sends).await.iter().all(Result::is_ok));
    // After the delayed request, nothing waits any more.
    let receive = b.receive(room(&*fast));
    a.send(byte(&*slow, 9), None).await.unwrap();
    assert_eq!(values(vec![receive]).await, [9]);
}

#[tokio::test]
async fn the_chosen_request_finds_the_queue_pair_closed() {
    let network = MemNetwork::new();
    let faulty = FaultFabric::new(network.fabric(), |posting| {
        let chosen = (posting.queue_pair_index, posting.opcode, posting.index) == (1, Opcode::Send, 2);
        if chosen { Fault::Close } else { Fault::None }
    });
    let whole = network.fabric();
    for breaks in [false, true] {
        let (a, b) = (queue_pair(&*faulty), queue_pair(&*whole));
        connect(&a, &b).await.unwrap();
        let mut receives: Vec<_> = (0..4).map(|_| b.receive(room(&*whole))).collect();
        for value in 0..2 {
            a.send(byte(&*faulty, value), None).await.unwrap();
        }
        let third = a.send(byte(&*faulty, 2), None).await;
        assert_eq!(third, if breaks { Err(WorkError::Flushed) } else { Ok(()) });
        let fourth = receives.pop().unwrap();
        let third = receives.pop().unwrap();
        assert_eq!(values(receives).await, [0, 1]);
        assert_eq!(third.await.is_err(), breaks);
        drop(a);
        fourth.await.unwrap_err();
    }
}

#[tokio::test]
async fn closing_flushes_what_is_delayed() {
    let network = MemNetwork::new();
    let slow = FaultFabric::new(network.fabric(), |_| Fault::Delay(Duration::from_secs(3600)));
    let a = queue_pair(&*slow);
    let (receive, send) = (a.receive(room(&*slow)), a.send(byte(&*slow, 0), None));
    a.close();
    assert_eq!(receive.await.unwrap_err(), WorkError::Flushed);
    assert_eq!(send.await, Err(WorkError::Flushed));
}

#[tokio::test]
async fn close_all_is_the_death_of_a_node() {
    let network = MemNetwork::new();
    let mortal = FaultFabric::new(network.fabric(), |_| Fault::None);
    let survivor = network.fabric();
    let mut pairs = Vec::new();
    for _ in 0..3 {
        let (a, b) = (queue_pair(&*mortal), queue_pair(&*survivor));
        connect(&a, &b).await.unwrap();
        pairs.push((a, b));
    }
    let receives: Vec<_> = pairs.iter().map(|(_, b)| b.receive(room(&*survivor))).collect();
    mortal.close_all();
    for outcome in join_all(receives).await {
        outcome.unwrap_err();
    }
}

#[tokio::test]
async fn a_trace_tells_of_posts_and_completions_in_order() {
    let network = MemNetwork::new();
    let events = Arc::new(Mutex::new(Vec::new()));
    let sink = events.clone();
    let traced = TraceFabric::new(network.fabric(), move |event| sink.lock().unwrap().push(event));
    let plain = network.fabric();
    let (a, b) = (queue_pair(&*traced), queue_pair(&*plain));
    connect(&a, &b).await.unwrap();
    let receive = b.receive(room(&*plain));
    a.send(byte(&*traced, 1), Some(5)).await.unwrap();
    receive.await.unwrap();
    let receive = a.receive(room(&*traced));
    a.close();
    receive.await.unwrap_err();
    let events = events.lock().unwrap();
    assert!(events.is_sorted_by_key(|event| event.at));
    let told: Vec<_> = events
        .iter()
        .map(|event| match event.kind {
            TraceKind::Posted { queue_pair, opcode, len, imm } => {
                assert_eq!((queue_pair, len), (a.id(), 1));
                (opcode, None, imm)
            }
            TraceKind::Completed(completion) => {
                assert_eq!(completion.queue_pair, a.id());
                (completion.opcode, Some(completion.result), completion.imm)
            }
            _ => panic!("there are no other events"),
        })
        .collect();
    let want = [
        (Opcode::Send, None, Some(5)),
        (Opcode::Send, Some(Ok(1)), None),
        (Opcode::Receive, None, None),
        (Opcode::Receive, Some(Err(WorkError::Flushed)), None),
    ];
    assert_eq!(told, want);
}

#[tokio::test]
async fn a_trace_takes_completion_queues_of_its_own() {
    let inner = MemNetwork::new().fabric();
    let queue = inner.create_completion_queue(1024, CompletionMode::Event).unwrap();
    let traced = TraceFabric::new(inner, |_| {});
    let refused = traced.create_queue_pair(&queue.source(), QueuePairConfig::default());
    assert!(matches!(refused, Err(FabricError::ForeignCompletionQueue)));
}
