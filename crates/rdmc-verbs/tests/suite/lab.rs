//! The effects of links, limits and forks on queue pairs: on two devices of the machine that `cargo xtask lab` makes.
//!
//! On other machines the suite prints that it is skipped.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::conformance::Node;
use rdmc_fabric::{
    BufferMut, CompletionMode, CompletionSource, Expose, FabricError, Memory, Peer, QueuePair, QueuePairConfig,
    RemoteAccess, Role, WorkError,
};
use rdmc_verbs::{VerbsConfig, VerbsFabric};

#[tokio::test]
async fn sends_to_a_peer_whose_link_is_down_end_as_a_lost_connection() {
    if !in_lab() {
        return;
    }
    let (a, b) = pair().await;
    let (at_a, at_b) = connected(&a, &b, QueuePairConfig::default()).await;
    let arrived = at_b.receive(b.room(8));
    at_a.send(a.room(8).freeze(), None).await.expect("the link is up");
    arrived.await.expect("the link is up");

    let idle = at_a.receive(a.room(8));
    let _posted = at_b.receive(b.room(1 << 20));
    let _up = LinkDown::new("port2");
    let went_down = std::time::Instant::now();
    let sends: Vec<_> = (0..3).map(|_| at_a.send(a.room(1 << 20).freeze(), None)).collect();
    let mut outcomes = watched(futures::future::join_all(sends)).await;
    println!("noticed after {:.1?}", went_down.elapsed());
    assert_eq!(outcomes.remove(0), Err(WorkError::ConnectionLost));
    for outcome in outcomes {
        assert!(matches!(outcome, Err(WorkError::Flushed | WorkError::ConnectionLost)), "{outcome:?}");
    }
    let idle = watched(idle).await.map(|_| ());
    assert!(matches!(idle, Err(WorkError::Flushed | WorkError::ConnectionLost)), "{idle:?}");
}

#[tokio::test]
async fn unsignaled_writes_end_without_a_request_behind_them() {
    if !in_lab() {
        return;
    }
    let (a, b) = pair().await;
    let (at_a, _at_b) = connected(&a, &b, QueuePairConfig::default()).await;
    let exposed = b.node.fabric.expose(Expose::Mutable(b.room(8), RemoteAccess::WRITE)).expect("it can be exposed");
    let write = || at_a.write_unsignaled(a.room(8).freeze(), exposed.remote(), None);
    watched(write()).await.expect("the link is up");
    let _up = LinkDown::new("port2");
    assert_eq!(watched(write()).await, Err(WorkError::ConnectionLost));
}

#[tokio::test]
async fn a_link_that_comes_back_within_the_retries_loses_nothing() {
    if !in_lab() {
        return;
    }
    let (a, b) = pair().await;
    let (at_a, at_b) = connected(&a, &b, QueuePairConfig::default()).await;
    let arrived = at_b.receive(b.room(1 << 20));
    let down = LinkDown::new("port2");
    let mut data = a.room(1 << 20);
    data.fill(7);
    let mut sent = std::pin::pin!(at_a.send(data.freeze(), None));
    // Far less than the two seconds after which the retries of a device end.
    assert!(
        tokio::time::timeout(Duration::from_millis(100), &mut sent).await.is_err(),
        "it passes a link that is down"
    );
    drop(down);
    watched(sent).await.expect("the retransmission arrives");
    assert!(watched(arrived).await.expect("the retransmission arrives").buffer.iter().all(|&byte| byte == 7));
}

#[tokio::test]
async fn deeper_queues_than_the_device_offers_are_refused_with_its_limit() {
    if !in_lab() {
        return;
    }
    let (a, _) = pair().await;
    let max = a.node.fabric.capabilities().completions_max;
    let refused = a.node.fabric.create_completion_queue(max + 1, CompletionMode::Event).expect_err("it is beyond it");
    let FabricError::Limit { wanted, max: told, .. } = refused else { panic!("{refused}") };
    assert_eq!((wanted, told), (u64::from(max) + 1, u64::from(max)));

    let deep = QueuePairConfig { send_depth: 1 << 24, ..QueuePairConfig::default() };
    let refused = a.node.fabric.create_queue_pair(&a.completions, deep).expect_err("it is beyond it");
    println!("{refused}");
    let limit = matches!(refused, FabricError::Limit { wanted, .. } if wanted == 1 << 24);
    assert!(limit || matches!(refused, FabricError::CompletionQueueFull { .. }), "{refused:?}");
}

#[tokio::test]
async fn more_memory_regions_than_the_device_offers_are_refused_with_its_limit() {
    if !in_lab() {
        return;
    }
    let (a, _) = pair().await;
    let region = || a.node.fabric.register(Memory::from(vec![7; 65]));
    let mut regions = Vec::new();
    let refused = loop {
        match region() {
            Ok(region) => regions.push(region),
            Err(refused) => break refused,
        }
        assert!(regions.len() < 1 << 20, "the device has no limit");
    };
    let FabricError::Memory { len: 65, source } = &refused else { panic!("{refused:?}") };
    let counts = format!("memory regions, of which this process has {}", regions.len());
    assert!(source.to_string().contains(&counts), "{source}");
    println!("{refused}: {source}");
    regions.pop();
    regions.push(region().expect("there is room for one again"));
}

/// A child process shares the parent's pages until one of them writes. The writer then gets a copy. If the writer is
/// the parent, the device would go on writing to the child's page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_arrives_in_memory_that_was_written_after_a_fork() {
    if !in_lab() {
        return;
    }
    let (a, b) = pair().await;
    let (at_a, at_b) = connected(&a, &b, QueuePairConfig::default()).await;
    let mut page = b.room(4096);
    let room = page.split_to(2048);
    let arrived = at_b.receive(room);

    let (mut forked, tell_forked) = std::io::pipe().expect("the system makes pipes");
    let (wait_to_go_on, mut go_on) = std::io::pipe().expect("the system makes pipes");
    let mut child = Command::new("true");
    child.stdin(Stdio::null());
    // SAFETY: between fork and exec the closure does nothing but two system calls on descriptors that it owns.
    unsafe {
        child.pre_exec(move || {
            rustix::io::write(&tell_forked, b"!")?;
            rustix::io::read(&wait_to_go_on, &mut [0_u8; 1])?;
            Ok(())
        })
    };
    let spawned = std::thread::spawn(move || child.spawn());
    forked.read_exact(&mut [0]).expect("the child is there");
    // This is the page of the posted receive.
    page.fill(1);
    let mut data = a.room(2048);
    data.fill(9);
    watched(at_a.send(data.freeze(), None)).await.expect("it is sent while the child shares the pages");
    let received = watched(arrived).await.expect("it is received while the child shares the pages");
    go_on.write_all(b"!").expect("the child waits");
    let mut child = spawned.join().expect("spawning does not panic").expect("the child starts");
    assert!(child.wait().expect("it is our child").success());
    assert!(received.buffer.iter().all(|&byte| byte == 9), "the message went into a page of the child");
    assert!(page.iter().all(|&byte| byte == 1));
}

/// A node with one completion queue that is drained by a task.
struct TestNode {
    node: Node,
    completions: Arc<dyn CompletionSource>,
}

impl TestNode {
    async fn new(device: &str) -> Self {
        let mut config = VerbsConfig::default();
        config.device = Some(device.into());
        let fabric = VerbsFabric::open(config).expect("the lab's devices can be opened");
        let node = Node::listening(fabric, "127.0.0.1:0").await;
        let queue = node.fabric.create_completion_queue(1024, CompletionMode::Event).expect("the device makes queues");
        let completions = queue.source();
        tokio::spawn(queue.drain());
        Self { node, completions }
    }

    fn room(&self, len: usize) -> BufferMut {
        self.node.fabric.allocate(len).expect("memory can be registered").into_mut().expect("it is writable")
    }

    fn peer(&self, queue_pair: &QueuePair, role: Role) -> Peer {
        Peer { endpoint: queue_pair.endpoint(), role, address: self.node.address }
    }
}

async fn pair() -> (TestNode, TestNode) {
    (TestNode::new("rxe1").await, TestNode::new("rxe2").await)
}

async fn connected(a: &TestNode, b: &TestNode, config: QueuePairConfig) -> (QueuePair, QueuePair) {
    let queue_pair =
        |end: &TestNode| end.node.fabric.create_queue_pair(&end.completions, config).expect("there is room");
    let (at_a, at_b) = (queue_pair(a), queue_pair(b));
    let both = futures::future::try_join(
        at_a.connect(b.peer(&at_b, Role::Active)),
        at_b.connect(a.peer(&at_a, Role::Passive)),
    );
    watched(both).await.expect("they connect");
    (at_a, at_b)
}

fn in_lab() -> bool {
    let lab = std::env::var_os("RDMC_LAB_NODES").is_some()
        && std::env::var_os("RDMC_LAB_DRIVER").is_some_and(|name| name == "rxe");
    if !lab {
        crate::skip("verbs on chosen devices: this is no lab; run `cargo xtask lab test verbs-lab`");
    }
    lab
}

/// A network interface that is down as long as this lives.
struct LinkDown(&'static str);

impl LinkDown {
    fn new(interface: &'static str) -> Self {
        set_link(interface, "down");
        Self(interface)
    }
}

impl Drop for LinkDown {
    fn drop(&mut self) {
        set_link(self.0, "up");
    }
}

fn set_link(interface: &str, state: &str) {
    let status = Command::new("ip").args(["link", "set", interface, state]).status();
    assert!(status.expect("the lab has ip").success());
}

/// Fails the test instead of hanging.
async fn watched<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), test).await.expect("the test hangs")
}
