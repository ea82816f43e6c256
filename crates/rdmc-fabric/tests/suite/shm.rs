//! Promises of the fabric `shm` beyond the conformance suite.

use std::sync::Arc;

use futures::future::join;
use rdmc_fabric::{
    Buffer, BufferMut, CompletionMode, Expose, ExposedRegion, Fabric, Memory, Peer, QueuePair, QueuePairConfig,
    RemoteAccess, RemoteMemory, Role, ShmFabric, WorkError,
};

struct End {
    fabric: Arc<ShmFabric>,
    queue_pair: QueuePair,
}

/// Two nodes whose queue pairs are connected.
async fn pair() -> (End, End) {
    let end = || {
        let fabric = ShmFabric::new().expect("processes share memory here");
        let queue = fabric.create_completion_queue(1000, CompletionMode::Event).expect("there is room");
        let queue_pair = fabric.create_queue_pair(&queue.source(), QueuePairConfig::default()).expect("there is room");
        tokio::spawn(queue.drain());
        End { fabric, queue_pair }
    };
    let (a, b) = (end(), end());
    let peer = |end: &End, role| Peer { endpoint: end.queue_pair.endpoint(), role, address: None };
    let (at_a, at_b) = (peer(&b, Role::Active), peer(&a, Role::Passive));
    let (joined_a, joined_b) = join(a.queue_pair.connect(at_a), b.queue_pair.connect(at_b)).await;
    joined_a.and(joined_b).expect("they meet");
    (a, b)
}

impl End {
    /// Memory that the peer cannot map.
    fn unshared(&self, len: usize, byte: u8) -> Buffer {
        self.fabric.register(Memory::from(vec![byte; len])).expect("it is only memory").into_shared()
    }

    fn room(&self, len: usize) -> BufferMut {
        self.fabric.allocate(len).expect("there is memory").into_mut().expect("it is writable")
    }

    fn expose(&self, len: usize) -> ExposedRegion {
        let mut memory = self.room(len);
        memory.fill(7);
        self.fabric.expose(Expose::Mutable(memory, RemoteAccess::READ_WRITE)).expect("it is only memory")
    }
}

#[tokio::test]
async fn long_sends_of_unshared_memory_and_reads_do_not_mix() {
    let (a, b) = pair().await;
    let exposed = a.expose(3_000_000);
    for _ in 0..20 {
        let received = b.queue_pair.receive(b.room(2_000_000));
        let sent = a.queue_pair.send(a.unshared(2_000_000, 9), Some(1));
        let read = b.queue_pair.read(b.room(3_000_000), exposed.remote());
        let (received, read) = join(received, read).await;
        assert!(received.unwrap().buffer.iter().all(|&byte| byte == 9));
        assert!(read.unwrap().iter().all(|&byte| byte == 7));
        sent.await.unwrap();
    }
}

#[tokio::test]
async fn ends_that_refuse_each_other_both_end() {
    let (a, b) = pair().await;
    let (at_a, at_b) = (a.expose(1_000_000), b.expose(1_000_000));
    let ask = |end: &End, remote: RemoteMemory| {
        let read = end.queue_pair.read(end.room(1_000_000), remote);
        let wrong = RemoteMemory { key: remote.key ^ 1, ..remote };
        (read, end.queue_pair.write(end.unshared(10, 1), wrong, None))
    };
    let (read_a, wrong_a) = ask(&a, at_b.remote());
    let (read_b, wrong_b) = ask(&b, at_a.remote());
    // The reads may succeed or be flushed; none waits for ever.
    let ((read_a, wrong_a), (read_b, wrong_b)) = join(join(read_a, wrong_a), join(read_b, wrong_b)).await;
    assert!(wrong_a.is_err() && wrong_b.is_err());
    for bytes in [read_a, read_b].into_iter().flatten() {
        assert!(bytes.iter().all(|&byte| byte == 7));
    }
}

#[tokio::test]
async fn memory_of_another_node_of_the_process_is_sent_as_well() {
    let (a, b) = pair().await;
    let mut foreign = b.room(1_000_000);
    foreign.fill(5);
    let received = b.queue_pair.receive(b.room(1_000_000));
    a.queue_pair.send(foreign.freeze(), None).await.unwrap();
    assert!(received.await.unwrap().buffer.iter().all(|&byte| byte == 5));
}

#[tokio::test]
async fn who_knows_no_nonce_is_refused_and_counted() {
    let (a, b) = pair().await;
    let queue = a.fabric.create_completion_queue(1000, CompletionMode::Event).unwrap();
    let stranger = a.fabric.create_queue_pair(&queue.source(), QueuePairConfig::default()).unwrap();
    // It is connected already and accepts no other peer.
    let peer = Peer { endpoint: b.queue_pair.endpoint(), role: Role::Active, address: None };
    assert!(stranger.connect(peer).await.is_err());
    let received = b.queue_pair.receive(b.room(100));
    a.queue_pair.send(a.unshared(100, 3), None).await.unwrap();
    assert_eq!(received.await.unwrap().len, 100);
    // The refusal is counted after the response is sent.
    while b.fabric.refused_connections() == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_file_that_is_sent_need_not_be_in_memory_and_may_be_shortened() {
    let (a, b) = pair().await;
    let file = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[4; 1_000_000], 0).unwrap();
    // SAFETY: no code uses the bytes as a slice.
    let memory = unsafe { Memory::map_file(&file, 1_000_000) }.unwrap();
    let data = a.fabric.register(memory).unwrap().into_shared();
    let received = b.queue_pair.receive(b.room(1_000_000));
    a.queue_pair.send(data.clone(), None).await.unwrap();
    assert!(received.await.unwrap().buffer.iter().all(|&byte| byte == 4));
    file.set_len(1000).unwrap();
    let received = b.queue_pair.receive(b.room(1_000_000));
    assert_eq!(a.queue_pair.send(data, None).await, Err(WorkError::LocalProtection));
    assert!(received.await.is_err());
}
