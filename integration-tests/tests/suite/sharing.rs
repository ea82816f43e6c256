//! Tests of members of one host that share every message: one sealed object, mapped by all.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt, join_all};
use rdmc::{
    Algorithm, Buffer, Cluster, DeliveryMode, Fabric, FailureCause, GroupError, GroupSpec, MemNetwork, Node, NodeId,
    Rank, Receiver, RecoveryError, SendError, SharedObject, SharedObjectMut, ShmFabric, Shutdown, TcpConfig,
    TcpShmFabric,
};
use rdmc_fabric::{
    AttachError, CompletionSource, FabricDecorator, FabricError, Fault, FaultFabric, ObjectDescriptor, QueuePair,
    QueuePairConfig, QueuePairDecorator, RawQueuePair, TraceFabric,
};

use crate::cluster::{
    Kind, form, free_addresses, pattern, poll_and_drop, spec_of_all, start, start_on, take_all, watched,
};
use crate::recovery::go_on;

fn object(len: usize, seed: u64) -> SharedObject {
    SharedObject::copy_of(&pattern(len, seed)).expect("there is memory")
}

fn shared(id: u64, nodes: &[Node], algorithm: Algorithm) -> GroupSpec {
    spec_of_all(id, nodes, algorithm, 64 << 10).delivery_mode(DeliveryMode::Shared)
}

/// Returns the mapping at an address: the file's number, and the permissions.
fn mapped_at(bytes: &[u8]) -> (u64, String) {
    let address = bytes.as_ptr() as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a process sees its maps");
    let found = maps.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let range = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        let how = fields.next()?.to_owned();
        range.contains(&address).then(|| Some((fields.nth(2)?.parse().ok()?, how)))?
    });
    found.expect("it is mapped")
}

/// Tells whether the file of an object is open or mapped in this process.
fn is_here(inode: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a process sees its maps");
    let of_objects = |line: &&str| line.contains("/memfd:rdmc");
    let mapped = maps.lines().filter(of_objects).any(|line| line.split_whitespace().nth(4) == Some(&inode.to_string()));
    let files = std::fs::read_dir("/proc/self/fd").expect("a process sees its descriptors");
    mapped
        || files.flatten().any(|entry| {
            let named = std::fs::read_link(entry.path()).is_ok_and(|link| link.starts_with("/memfd:rdmc"));
            named && std::fs::metadata(entry.path()).is_ok_and(|found| found.ino() == inode)
        })
}

/// Waits until the files are gone. Operations under way may hold them a little longer.
async fn all_gone(inodes: &[u64]) {
    while inodes.iter().any(|&inode| is_here(inode)) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_members_of_a_host_have_the_same_memory_and_nothing_is_left() {
    watched(async {
        for kind in [Kind::Mem, Kind::Shm] {
            check_sharing(&start(kind, 5).await, &kind.to_string()).await;
        }
        let fabrics =
            (0..4).map(|_| -> Arc<dyn Fabric> { TcpShmFabric::new(TcpConfig::default()).expect("shared memory") });
        check_sharing(&start_on(fabrics.collect(), Kind::Shm).await, "tcp+shm").await;
    })
    .await;
}

/// A decorator that overrides nothing.
#[derive(Debug)]
struct Plain(Arc<dyn Fabric>);

impl FabricDecorator for Plain {
    fn inner(&self) -> &dyn Fabric {
        &*self.0
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_behind_decorators_have_the_same_memory_too() {
    watched(async {
        let fabrics = (0..3).map(|_| -> Arc<dyn Fabric> {
            let shm = ShmFabric::new().expect("shared memory");
            FaultFabric::new(TraceFabric::new(Arc::new(Plain(shm)), |_| {}), |_| Fault::None)
        });
        check_sharing(&start_on(fabrics.collect(), Kind::Shm).await, "decorated shm").await;
    })
    .await;
}

async fn check_sharing(nodes: &[Node], what: &str) {
    for (id, algorithm) in (1..).zip([Algorithm::BinomialPipeline, Algorithm::Circulant, Algorithm::Chain]) {
        let (sender, receivers) = form(nodes, &shared(id, nodes, algorithm.clone())).await;
        let objects: Vec<_> = (0..).zip([1, 0, 100, 5_000_000, 4096]).map(|(seed, len)| object(len, seed)).collect();
        let first = mapped_at(&objects[3]);
        assert_eq!(first.1, "r--s", "nobody can write it");
        let sending = async {
            for object in &objects {
                sender.send(object.clone()).await.expect("nobody fails");
            }
            drop(sender.close().await.expect("all have all"));
        };
        let (taken, ()) = futures::join!(join_all(receivers.into_iter().map(take_all)), sending);
        for messages in &taken {
            assert_eq!(messages.len(), objects.len(), "{what} {algorithm}");
            for (message, object) in messages.iter().zip(&objects) {
                assert!(message[..] == object[..], "{what} {algorithm} {}", message.number());
                if !object.is_empty() {
                    assert_eq!(mapped_at(message), mapped_at(object), "{what}: a copy was made");
                }
            }
        }
        let inodes: Vec<u64> =
            objects.iter().filter(|object| !object.is_empty()).map(|object| mapped_at(object).0).collect();
        drop(objects);
        assert!(taken[0][3][..] == pattern(5_000_000, 3), "who has it keeps it");
        assert!(inodes.iter().all(|&inode| is_here(inode)));
        drop(taken);
        all_gone(&inodes).await;
    }
}

#[tokio::test]
async fn what_cannot_be_shared_is_refused_with_the_remedy() {
    watched(async {
        let nodes = start(Kind::Tcp, 2).await;
        let spec = shared(1, &nodes, Algorithm::Chain);
        for refused in [nodes[0].create_group(spec.clone()).await.err(), nodes[1].join_group(spec).await.err()] {
            let refused = refused.expect("TCP shares nothing");
            assert!(matches!(refused, GroupError::SharesNoObjects { fabric: "tcp", .. }), "{refused}");
            assert!(refused.to_string().contains("fabric shm"), "{refused}");
        }
        let nodes = start(Kind::Mem, 2).await;
        let delta = shared(1, &nodes, Algorithm::Chain).delta(true);
        assert!(matches!(nodes[0].create_group(delta).await, Err(GroupError::SharedDelta)));
        let spec = shared(2, &nodes, Algorithm::Chain);
        assert!(matches!(nodes[1].join_group(spec.clone()).with_offers().await, Err(GroupError::SharedOffers)));
        let (sender, receivers) = form(&nodes, &spec).await;
        let copied = sender.send(vec![1; 10]).await.expect_err("it is no object");
        assert!(matches!(copied, SendError::NotAnObject) && copied.to_string().contains("SharedObject"), "{copied}");
        drop((sender, receivers));
        // A member that wants copies does not form a group with members that share.
        let private = spec_of_all(3, &nodes, Algorithm::Chain, 64 << 10);
        let other = private.clone().delivery_mode(DeliveryMode::Shared);
        let (created, joined) = futures::join!(nodes[0].create_group(private), nodes[1].join_group(other));
        let Err(GroupError::Failed(failure)) = created else { panic!("{created:?}") };
        assert_eq!(failure.first().cause, FailureCause::SpecMismatch);
        assert!(joined.is_err());
    })
    .await;
}

#[tokio::test]
async fn an_object_is_copied_where_members_want_copies() {
    watched(async {
        for kind in [Kind::Mem, Kind::Tcp, Kind::Shm] {
            let nodes = start(kind, 3).await;
            let (sender, receivers) =
                form(&nodes, &spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 64 << 10)).await;
            let object = object(1_000_000, 1);
            let sending = async {
                sender.send(object.clone()).await.expect("nobody fails");
                sender.close().await.expect("all have all")
            };
            let (taken, certificate) = futures::join!(join_all(receivers.into_iter().map(take_all)), sending);
            assert_eq!(certificate.records()[0].size, 1_000_000);
            for messages in taken {
                assert!(messages[0][..] == object[..] && messages[0].as_ptr() != object.as_ptr(), "{kind}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn an_object_longer_than_a_member_takes_is_not_mapped() {
    watched(async {
        let cluster = Cluster::new((0u32..).zip(free_addresses(2)));
        let node = |id| {
            let builder = Node::builder(NodeId(id), cluster.clone()).fabric(Kind::Shm.fabric(&MemNetwork::new(), 0));
            builder.pool_bytes_max(if id == 0 { 8 << 20 } else { 2 << 20 }).start()
        };
        let (a, b) = futures::try_join!(node(0), node(1)).expect("they start");
        let nodes = [a, b];
        let (sender, mut receivers) = form(&nodes, &shared(1, &nodes, Algorithm::Chain)).await;
        let sending = sender.send(object(3 << 20, 1));
        let (taken, _) = futures::join!(receivers[0].next(), sending);
        let failure = taken.expect("a failure").expect_err("it is too long");
        assert_eq!(failure.first().member, Rank(1));
        assert!(failure.to_string().contains("exceed the pool's limit"), "{failure}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_objects_are_sent_than_may_be_open_at_once() {
    watched(async {
        let nodes = start(Kind::Shm, 3).await;
        let (sender, receivers) = form(&nodes, &shared(1, &nodes, Algorithm::Chain)).await;
        let sending = async {
            let sends = (0..200).map(|seed| sender.send(object(100, seed)));
            for sent in join_all(sends).await {
                sent.expect("nobody fails");
            }
            sender.close().await.expect("all have all")
        };
        let (taken, _) = futures::join!(join_all(receivers.into_iter().map(take_all)), sending);
        for messages in taken {
            assert!((0..).zip(&messages).all(|(seed, message)| message[..] == pattern(100, seed)));
            assert_eq!(messages.len(), 200);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_of_objects_dropped_at_any_poll_leave_nothing_open() {
    watched(async {
        let nodes = start(Kind::Shm, 3).await;
        let (sender, receivers) = form(&nodes, &shared(1, &nodes, Algorithm::Chain)).await;
        let mut inodes = Vec::new();
        let sending = async {
            for polls in 0..12 {
                let object = object(100_000, polls);
                inodes.push(mapped_at(&object).0);
                let polls = usize::try_from(polls).expect("a few");
                drop(poll_and_drop(sender.send(object), polls).await);
            }
            sender.close().await.expect("all have all")
        };
        let (taken, certificate) = futures::join!(join_all(receivers.into_iter().map(take_all)), sending);
        for messages in &taken {
            assert_eq!(messages.len() as u64, certificate.messages());
            assert!(messages.iter().all(|message| (0..12).any(|seed| message[..] == pattern(100_000, seed))));
        }
        drop(taken);
        all_gone(&inodes).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_members_leave_and_the_others_keep_what_they_have_and_go_on() {
    watched(async {
        let nodes = start(Kind::Shm, 5).await;
        // The first verdict may name only one of them; the other does not join the group of the survivors.
        let spec = shared(1, &nodes, Algorithm::BinomialPipeline).formation_limit(Duration::from_secs(3));
        let (sender, mut receivers) = form(&nodes, &spec).await;
        sender.send(object(1_000_000, 0)).await.expect("nobody fails yet");
        let mut first = join_all(receivers.iter_mut().map(next)).await;
        // They leave one after the other, so the second may end the group of the survivors.
        let (second, leaving) = (receivers.remove(3), receivers.remove(1));
        drop((leaving, second));
        let others = [receivers[0].failed(), receivers[1].failed()];
        let (failure, failures) = futures::join!(sender.failed(), join_all(others));
        let (root, others) = futures::join!(go_on(failure), join_all(failures.into_iter().map(go_on)));
        let sender = root.into_sender().expect("it goes on sending");
        let receivers = others.into_iter().map(|other| other.into_receiver().expect("it receives"));
        let sending = async {
            sender.send(object(1_000_000, 1)).await.expect("nobody fails any more");
            sender.close().await.expect("all have all")
        };
        let (taken, _) = futures::join!(join_all(receivers.map(take_all)), sending);
        assert!(taken.iter().all(|messages| messages.len() == 1 && messages[0][..] == pattern(1_000_000, 1)));
        assert!(first.drain(..).all(|message| message[..] == pattern(1_000_000, 0)));
    })
    .await;
}

async fn next(receiver: &mut Receiver) -> rdmc::Message {
    receiver.next().await.expect("a message").expect("the group does not fail")
}

fn failed_again<T>(outcome: Result<T, RecoveryError>) -> rdmc::GroupFailure {
    match outcome {
        Err(RecoveryError::Group(GroupError::Failed(failure))) => failure,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("others were told of a failure"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_not_mapped_an_object_when_the_root_is_gone_fails_and_the_others_go_on() {
    watched(async {
        let network = MemNetwork::new();
        let late = Arc::new(Late { inner: network.fabric(), gone: AtomicBool::new(false), by_tcp: false });
        let fabric = |id: usize| -> Arc<dyn Fabric> { if id == 2 { late.clone() } else { network.fabric() } };
        let mut nodes = start_on((0..4).map(fabric).collect(), Kind::Mem).await;
        let (sender, mut receivers) = form(&nodes, &shared(1, &nodes, Algorithm::Sequential)).await;
        let sent = sender.send(object(100_000, 1));
        let (at_one, rest) = receivers.split_at_mut(1);
        let (one, three, _) = futures::join!(next(&mut at_one[0]), next(&mut rest[1]), sent);
        late.gone.store(true, Ordering::Release);
        nodes.remove(0).shutdown(Shutdown::Abort).await;
        let failures = join_all(receivers.iter().map(Receiver::failed)).await;
        assert!(failures.iter().all(|failure| failure.names(Rank(0)) && *failure == failures[0]));
        let again = failures.iter().map(async |failure| match failure.recover().await {
            Ok(recovery) => recovery.into_receiver().expect("the root is gone").failed().await,
            early => failed_again(early),
        });
        let failures = join_all(again).await;
        for failure in &failures {
            assert_eq!((failure.failed.len(), failure.first().node), (1, NodeId(2)), "{failure}");
            assert!(matches!(failure.first().cause, FailureCause::Resources { .. }), "{failure}");
        }
        let others = [&failures[0], &failures[2]];
        let rest = others.map(async |failure| {
            let recovery = failure.recover().await.expect("these two go on");
            assert!(recovery.lost.is_empty());
            take_all(recovery.into_receiver().expect("the root is gone")).await
        });
        assert!(join_all(rest).await.iter().all(Vec::is_empty), "they were given all before");
        assert!(one[..] == pattern(100_000, 1) && three[..] == one[..]);
    })
    .await;
}

#[tokio::test]
async fn members_that_share_no_memory_are_named_with_the_remedy() {
    watched(async {
        let network = MemNetwork::new();
        let fabric = |_| -> Arc<dyn Fabric> {
            Arc::new(Late { inner: network.fabric(), gone: AtomicBool::new(false), by_tcp: true })
        };
        let nodes = start_on((0..3).map(fabric).collect(), Kind::Mem).await;
        let spec = shared(1, &nodes, Algorithm::Sequential).formation_limit(Duration::from_secs(3));
        let joining = join_all(nodes[1..].iter().map(|node| node.join_group(spec.clone())));
        let (created, joined) = futures::join!(nodes[0].create_group(spec.clone()), joining);
        for error in joined.into_iter().map(Result::err).chain([created.err()]) {
            let Some(GroupError::Failed(failure)) = error else { panic!("{error:?}") };
            assert!(failure.to_string().contains("processes of one host"), "{failure}");
        }
    })
    .await;
}

/// A fabric that attaches objects only after their owner is gone, or that reaches other nodes by TCP.
#[derive(Debug)]
struct Late {
    inner: Arc<rdmc::MemFabric>,
    gone: AtomicBool,
    by_tcp: bool,
}

struct ByTcp(Arc<dyn RawQueuePair>);

impl QueuePairDecorator for ByTcp {
    fn inner(&self) -> &dyn RawQueuePair {
        &*self.0
    }

    fn carrier(&self) -> Option<&'static str> {
        Some("tcp")
    }
}

impl FabricDecorator for Late {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let queue_pair = self.inner.create_queue_pair(completions, config)?;
        Ok(if self.by_tcp { queue_pair.map_raw(|raw| Arc::new(ByTcp(raw))) } else { queue_pair })
    }

    fn attach(&self, _: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        match self.gone.load(Ordering::Acquire) {
            true => async { Err(AttachError::Unreachable(std::io::ErrorKind::ConnectionRefused.into())) }.boxed(),
            false => std::future::pending().boxed(),
        }
    }
}

/// Variable that makes the test below the process of a root; its value has the addresses of the cluster.
const ROOT: &str = "RDMC_TEST_SHARING_ROOT";
const OBJECT_LEN: usize = 8 << 20;

/// As a test it does nothing. In its own process it is the root of a group.
#[test]
fn a_root_in_a_process_of_its_own() {
    let Ok(addresses) = std::env::var(ROOT) else { return };
    std::thread::spawn(|| {
        // Ends with the process that started it.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let cluster = Cluster::new((0u32..).zip(addresses.split(',').map(str::to_owned)));
        let node = Node::builder(NodeId(0), cluster.clone()).fabric(ShmFabric::new().unwrap()).start().await.unwrap();
        let spec = GroupSpec::new(1, cluster.nodes()).delivery_mode(DeliveryMode::Shared);
        let sender = node.create_group(spec).await.unwrap();
        let mut object = SharedObjectMut::new(OBJECT_LEN).unwrap();
        object.copy_from_slice(&pattern(OBJECT_LEN, 5));
        let object = object.seal().unwrap();
        sender.send(object.clone()).await.unwrap();
        println!("mapped {}", mapped_at(&object).0);
        std::future::pending::<()>().await;
    });
}

fn start_root(addresses: &[String]) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("a test knows where it is"));
    command.args(["sharing::a_root_in_a_process_of_its_own", "--exact", "--nocapture"]);
    command.env(ROOT, addresses.join(",")).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().expect("it is this program")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_that_is_killed_leaves_what_was_mapped_readable() {
    watched(async {
        let addresses = free_addresses(3);
        let mut root = start_root(&addresses);
        let cluster = Cluster::new((0u32..).zip(addresses));
        let spec = GroupSpec::new(1, cluster.nodes()).delivery_mode(DeliveryMode::Shared);
        let member = async |id| {
            let fabric = ShmFabric::new().expect("processes share memory here");
            let node = Node::builder(NodeId(id), cluster.clone()).fabric(fabric).start().await.expect("it starts");
            let mut receiver = node.join_group(spec.clone()).await.expect("the group forms");
            let message = next(&mut receiver).await;
            (node, receiver, message)
        };
        let (one, two) = futures::join!(member(1), member(2));
        let output = root.stdout.take().expect("it is piped");
        let told = tokio::task::spawn_blocking(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.into_iter().find_map(|line| Some(line.split_once("mapped ")?.1.to_owned()))
        });
        let told = told.await.unwrap().expect("it has sent");
        root.kill().unwrap();
        root.wait().unwrap();
        for (_, receiver, _) in [&one, &two] {
            assert_eq!(receiver.failed().await.first().member, Rank(0));
        }
        let inode = mapped_at(&one.2).0;
        assert_eq!(
            (inode, mapped_at(&two.2).0),
            (told.trim().parse().unwrap(), inode),
            "one object in three processes"
        );
        assert!(one.2[..] == pattern(OBJECT_LEN, 5) && two.2[..] == one.2[..]);
        drop((one, two));
        all_gone(&[inode]).await;
    })
    .await;
}
