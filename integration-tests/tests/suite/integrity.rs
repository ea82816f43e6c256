//! Tests of bits that change on the way, which the next member finds, heals and counts; and of digests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use rdmc::{
    Algorithm, Certificate, Digest, FailureCause, GroupFailure, GroupSpec, GroupStats, Memory, Message, Node, Rank,
    Receiver, SendError,
};
use rdmc_fabric::{Fabric, Fault, FaultFabric, Opcode};

use crate::cluster::{Kind, fabrics, form, pattern, spec_of_all, start_on, watched};

/// Chooses the fault for each block that one node sends, by its index.
type Plan = Box<dyn Fn(u64) -> Fault + Send>;

/// A cluster in which bits change.
struct Cluster {
    nodes: Vec<Node>,
    plans: Vec<Arc<Mutex<Plan>>>,
    /// Blocks that each node has sent since the last [`change`](Self::change).
    sent: Vec<Arc<AtomicU64>>,
    groups: AtomicU64,
}

/// The outcome of one message.
struct Outcome {
    messages: Vec<Message>,
    stats: Vec<GroupStats>,
    certificates: Vec<Certificate>,
}

impl Cluster {
    async fn start(kind: Kind, count: usize) -> Self {
        let plans: Vec<Arc<Mutex<Plan>>> =
            (0..count).map(|_| Arc::new(Mutex::new(Box::new(|_| Fault::None) as Plan))).collect();
        let sent: Vec<Arc<AtomicU64>> = (0..count).map(|_| Arc::default()).collect();
        let faulty = fabrics(kind, count).into_iter().zip(plans.iter().zip(&sent)).map(|(fabric, (plan, sent))| {
            let (plan, sent) = (plan.clone(), sent.clone());
            FaultFabric::new(fabric, move |posting| match posting.opcode {
                Opcode::Send => (plan.lock().expect("plans do not panic"))(sent.fetch_add(1, Ordering::Relaxed)),
                _ => Fault::None,
            }) as Arc<dyn Fabric>
        });
        let nodes = start_on(faulty.collect(), kind).await;
        Self { nodes, plans, sent, groups: AtomicU64::new(0) }
    }

    /// Lets `fault` happen to the block that `node` sends after `before` others.
    fn change(&self, node: usize, before: u64, fault: Fault) {
        self.change_by(node, move |index| if index == before { fault } else { Fault::None });
    }

    fn change_by(&self, node: usize, plan: impl Fn(u64) -> Fault + Send + 'static) {
        for quiet in &self.plans {
            *quiet.lock().expect("plans do not panic") = Box::new(|_| Fault::None);
        }
        self.sent.iter().for_each(|sent| sent.store(0, Ordering::Relaxed));
        *self.plans[node].lock().expect("plans do not panic") = Box::new(plan);
    }

    /// Specifies a group of all nodes with an unused number.
    fn spec(&self, algorithm: &Algorithm) -> GroupSpec {
        self.spec_in_blocks(algorithm, BLOCK)
    }

    fn spec_in_blocks(&self, algorithm: &Algorithm, block_size: u32) -> GroupSpec {
        let id = self.groups.fetch_add(1, Ordering::Relaxed);
        // Devices protect blocks, so checks are not the default there.
        spec_of_all(id, &self.nodes, algorithm.clone(), block_size).check_blocks(true)
    }

    /// Sends one message in its own group.
    async fn multicast(&self, spec: &GroupSpec, bytes: &[u8]) -> Outcome {
        let (sender, receivers) = form(&self.nodes, spec).await;
        let sent = async {
            sender.send(bytes.to_vec()).await.expect("the group does not fail");
            sender.close().await.expect("the group closes")
        };
        let taken = futures::future::join_all(receivers.into_iter().map(take_one));
        let (certificate, taken) = futures::join!(sent, taken);
        let mut outcome = Outcome { messages: vec![], stats: vec![], certificates: vec![certificate] };
        for (message, stats, certificate) in taken {
            outcome.messages.push(message);
            outcome.stats.push(stats);
            outcome.certificates.push(certificate);
        }
        outcome
    }
}

async fn take_one(mut receiver: Receiver) -> (Message, GroupStats, Certificate) {
    let message = receiver.next().await.expect("a message comes").expect("the group does not fail");
    assert!(receiver.next().await.is_none());
    let stats = receiver.stats();
    (message, stats, receiver.close().await.expect("the group closes"))
}

/// Block size in bytes: small, so that there is time for many groups.
const BLOCK: u32 = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bit_that_changes_in_any_block_on_any_edge_is_healed_and_the_edge_is_named() {
    const BLOCKS: usize = 5;
    for kind in Kind::all() {
        let cluster = Cluster::start(kind, 5).await;
        let bytes = pattern(BLOCKS * BLOCK as usize - 7, 3);
        for algorithm in Algorithm::ALL_FLAT {
            // The number of blocks that each member sends, found in a run without changes.
            cluster.change(0, u64::MAX, Fault::None);
            watched(cluster.multicast(&cluster.spec(&algorithm), &bytes)).await;
            let sends: Vec<u64> = cluster.sent.iter().map(|sent| sent.load(Ordering::Relaxed)).collect();
            assert_eq!(sends.iter().sum::<u64>(), 4 * BLOCKS as u64);
            for (node, count) in sends.iter().enumerate() {
                for index in 0..*count {
                    let bit = index * 1001 + node as u64;
                    cluster.change(node, index, Fault::Flip { bit });
                    let outcome = watched(cluster.multicast(&cluster.spec(&algorithm), &bytes)).await;
                    let what = format!("{kind} {algorithm}: block {index} of those that node {node} sent");
                    assert!(outcome.messages.iter().all(|message| message[..] == bytes), "{what}");
                    check_that_one_was_healed(&outcome.stats, node, &what);
                }
            }
        }
    }
}

/// Long blocks are summed while they arrive, or in a task of their own; short ones when they are here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bit_that_changes_in_a_long_block_is_healed() {
    for kind in Kind::all() {
        let cluster = Cluster::start(kind, 3).await;
        // The last is longer than what is summed at once.
        for block_size in [16 << 10, 20_000, 3 << 20] {
            let bytes = pattern(3 * block_size as usize - 7, 3);
            for node in [0, 1] {
                let bit = u64::from(block_size) * 8 - 64 - node as u64;
                cluster.change(node, 0, Fault::Flip { bit });
                let spec = cluster.spec_in_blocks(&Algorithm::Chain, block_size);
                let outcome = watched(cluster.multicast(&spec, &bytes)).await;
                let what = format!("{kind}: the first block of {block_size} bytes that node {node} sent");
                assert!(outcome.messages.iter().all(|message| message[..] == bytes), "{what}");
                check_that_one_was_healed(&outcome.stats, node, &what);
            }
        }
    }
}

/// Checks that exactly one member found one corrupted block, and that it came from `node`.
fn check_that_one_was_healed(stats: &[GroupStats], node: usize, what: &str) {
    let found: Vec<_> = (1u32..).map(Rank).zip(stats).filter(|(_, stats)| stats.blocks_corrupted > 0).collect();
    assert_eq!(found.len(), 1, "{what}");
    let (finder, stats) = found[0];
    assert_eq!((stats.blocks_corrupted, stats.blocks_healed), (1, 1), "{what}");
    let corruption = stats.last_corruption.expect("one was counted");
    assert_eq!((corruption.from.index(), corruption.to, corruption.message), (node, finder, 0), "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_seal_is_a_corrupted_block() {
    for kind in Kind::all() {
        let cluster = Cluster::start(kind, 3).await;
        for size in [0, 1, 3 * BLOCK as usize] {
            let bytes = pattern(size, 4);
            for index in [0, 1] {
                cluster.change(0, index, Fault::FlipImmediate { bit: 7 });
                let spec = cluster.spec(&Algorithm::Sequential);
                let outcome = watched(cluster.multicast(&spec, &bytes)).await;
                assert!(outcome.messages.iter().all(|message| message[..] == bytes));
                check_that_one_was_healed(&outcome.stats, 0, "the seal");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_checks_a_changed_bit_is_delivered() {
    for kind in Kind::all() {
        let cluster = Cluster::start(kind, 3).await;
        let bytes = pattern(10 * BLOCK as usize, 5);
        cluster.change(0, 2, Fault::Flip { bit: 100 });
        let spec = cluster.spec(&Algorithm::BinomialPipeline).check_blocks(false);
        let outcome = watched(cluster.multicast(&spec, &bytes)).await;
        assert!(outcome.messages.iter().any(|message| message[..] != bytes));
        assert!(outcome.stats.iter().all(|stats| stats.blocks_corrupted == 0));
        assert!(outcome.certificates.iter().all(|certificate| certificate.records()[0].digest.is_none()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_members_certify_the_digest_of_every_message() {
    for kind in Kind::all() {
        let cluster = Cluster::start(kind, 4).await;
        for algorithm in Algorithm::ALL_FLAT {
            for count in [1, 4] {
                let id = cluster.groups.fetch_add(1, Ordering::Relaxed);
                let spec = spec_of_all(id, &cluster.nodes[..count], algorithm.clone(), BLOCK).check_blocks(true);
                let (sender, receivers) = form(&cluster.nodes, &spec).await;
                let sizes = [0, 1, BLOCK as usize, 5 * BLOCK as usize + 1, 1000];
                let messages: Vec<_> = sizes.iter().zip(1..).map(|(size, seed)| pattern(*size, seed)).collect();
                let sent = async {
                    let sends = messages.iter().map(|message| sender.send(message.clone()));
                    futures::future::try_join_all(sends).await.expect("the group does not fail");
                    sender.close().await.expect("the group closes")
                };
                let closing = receivers.into_iter().map(Receiver::close);
                let (certificate, others) =
                    watched(futures::future::join(sent, futures::future::join_all(closing))).await;
                let digests: Vec<_> = certificate.records().iter().map(|record| record.digest).collect();
                let expected: Vec<_> = messages.iter().map(|message| Some(Digest::of(message, BLOCK))).collect();
                assert_eq!(digests, expected, "{kind} {algorithm} n={count}");
                assert!(others.into_iter().all(|other| other.as_ref() == Ok(&certificate)), "{kind} {algorithm}");
            }
        }
    }
}

/// Length of a message: longer than what `tcp` copies behind a header.
const LEN: u32 = 20_000;

/// Waits, within a limit, until a node has `count` verified messages: it cannot supply unverified ones.
fn wait_for_messages(node: &Node, count: u64) {
    for _ in 0..10_000 {
        if node.stats().messages >= count {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Sends a message that changes in the root's memory after it has gone to `before` of two members.
///
/// Returns the failure, if there is one, and the message of each member.
async fn multicast_what_changes(before: u64) -> (Option<GroupFailure>, Vec<(Option<Vec<u8>>, GroupStats)>) {
    let cluster = Cluster::start(Kind::Tcp, 3).await;
    let mut file = tempfile::tempfile().expect("a temporary file works");
    std::io::Write::write_all(&mut file, &[0; LEN as usize]).expect("a temporary file works");
    // SAFETY: only the kernel reads the memory, because the message is too long for a copy behind a header.
    let memory = unsafe { Memory::map_file(&file, LEN as usize) }.expect("a temporary file works");
    // The root sums the block before this.
    let first = cluster.nodes[1].clone();
    cluster.change_by(0, move |index| {
        if index == before {
            // Blocks posted before leave from the same memory, a little later.
            tokio::task::block_in_place(|| wait_for_messages(&first, before));
            std::os::unix::fs::FileExt::write_all_at(&file, &[1], 5).expect("a temporary file works");
        }
        Fault::None
    });
    let spec = cluster.spec(&Algorithm::Sequential).block_size(LEN);
    let (sender, receivers) = form(&cluster.nodes, &spec).await;
    let taken = receivers.into_iter().map(|mut receiver| async move {
        let message = receiver.next().await.expect("the stream has not ended").ok().map(|message| message.to_vec());
        let stats = receiver.stats();
        let _ = receiver.close().await;
        (message, stats)
    });
    let closed = async {
        // The memory may be free before a member has checked the message.
        if let Err(error) = sender.send(memory).await {
            assert!(matches!(error, SendError::Failed(_)), "{error}");
        }
        sender.close().await.err()
    };
    watched(futures::future::join(closed, futures::future::join_all(taken))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_in_the_root_s_memory_is_healed_from_another_member() {
    let (failure, taken) = multicast_what_changes(1).await;
    assert_eq!(failure, None);
    assert!(taken.iter().all(|(message, _)| message.as_deref() == Some(&[0; LEN as usize])));
    let stats: Vec<_> = taken.into_iter().map(|(_, stats)| stats).collect();
    check_that_one_was_healed(&stats, 0, "memory of the root");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_sends_what_nobody_can_supply_whole_is_named() {
    let (failure, taken) = multicast_what_changes(0).await;
    let failure = failure.expect("nobody has what was summed");
    assert_eq!(failure.first().member, Rank::ROOT);
    assert_eq!(failure.first().cause, FailureCause::Corrupted { message: 0, block: 0 });
    assert!(taken.iter().all(|(message, _)| message.is_none()));
}
