//! Tests in which each member comes to harm at each of its requests, on the fabric `mem` with Tokio's clock and tasks.
//!
//! `rdmc-sim` does the same for more members and more kinds of operations and harm, in virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use rdmc::{Cluster, GroupError, GroupFailure, GroupSpec, MemNetwork, Node, NodeId, Rank};
use rdmc_fabric::{Fault, FaultFabric};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Barrier, Notify};

use crate::cluster::{pattern, watched};

#[test]
fn members_that_break_or_die_at_any_request_leave_one_truth() {
    for (victim, dies) in (0..MEMBERS).flat_map(|victim| [(victim, false), (victim, true)]) {
        let mut at = 0;
        while play(victim, at, dies) {
            at += 1;
        }
        assert!(at >= u64::from(BLOCKS), "member {victim} posts {at} requests");
    }
}

/// The outcome of the group for a member, and the number of messages that it took.
type End = (Result<(), GroupFailure>, u64);

/// Harms a member at its request number `at`, and checks the outcome at all others. Returns `false` if it posts fewer
/// requests.
fn play(victim: u32, at: u64, dies: bool) -> bool {
    let (mut mortal, alive) = (Some(runtime()), runtime());
    let network = MemNetwork::new();
    let (posted, harmed) = (Arc::new(AtomicU64::new(0)), Arc::new(Notify::new()));
    let (count, tell) = (posted.clone(), harmed.clone());
    let faulty = FaultFabric::new(network.fabric(), move |_| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        if number == at {
            tell.notify_one();
        }
        match dies {
            // The victim posts nothing more before it dies.
            true if number >= at => Fault::Delay(Duration::from_secs(3600)),
            false if number == at => Fault::Close,
            _ => Fault::None,
        }
    });
    let cluster = Cluster::new((0..MEMBERS).map(|id| (id, format!("node{id}"))));
    let spec = GroupSpec::new(1, cluster.nodes()).block_size(BLOCK_BYTES);
    let started = Arc::new(Barrier::new(MEMBERS as usize));
    let member = |id: u32| {
        let builder = Node::builder(NodeId(id), cluster.clone());
        let builder = builder.fabric(if id == victim { faulty.clone() } else { network.fabric() });
        take_part(builder, spec.clone(), id, started.clone())
    };
    let doomed = mortal.as_ref().expect("it was just made").spawn(member(victim));
    let others = futures::future::join_all((0..MEMBERS).filter(|&id| id != victim).map(|id| alive.spawn(member(id))));
    let ends: Vec<(u32, End)> = alive.block_on(watched(async {
        if dies {
            let death = async {
                harmed.notified().await;
                // Drops its tasks and connections wherever they are.
                mortal.take().expect("it dies once").shutdown_background();
            };
            let mut death = std::pin::pin!(death);
            let mut others = std::pin::pin!(others);
            let ended = match futures::future::select(&mut death, &mut others).await {
                futures::future::Either::Left(_) => others.await,
                futures::future::Either::Right((ended, _)) => ended,
            };
            ended.into_iter().map(|end| end.expect("it does not panic")).collect()
        } else {
            let (own, mut ended) = futures::join!(doomed, others);
            ended.push(own);
            ended.into_iter().map(|end| end.expect("it does not panic")).collect()
        }
    }));
    let harmed = posted.load(Ordering::Relaxed) > at;
    let (_, (first, _)) = &ends[0];
    for (id, (outcome, taken)) in &ends {
        assert_eq!(outcome, first, "member {id}, when {victim} comes to harm at {at}");
        let Err(failure) = outcome else { continue };
        assert!(harmed, "without a cause: {failure}");
        assert_eq!(failure.failed.len(), 1, "{failure}");
        // If a connection breaks, the failure may name either of its two members.
        assert!(!dies || failure.names(Rank(victim)), "{failure}, when {victim} dies at {at}");
        if *id > 0 {
            assert_eq!(failure.certificate.held_by(Rank(*id)), Some(*taken), "{failure}, when {victim} fails at {at}");
        }
    }
    harmed
}

async fn take_part(builder: rdmc::NodeBuilder, spec: GroupSpec, id: u32, started: Arc<Barrier>) -> (u32, End) {
    let node = builder.start().await.expect("all nodes start");
    started.wait().await;
    let failed = |error| match error {
        GroupError::Failed(failure) => failure,
        other => panic!("{other}"),
    };
    let mut taken = 0;
    let outcome = async {
        if id == 0 {
            let sender = node.create_group(spec).await.map_err(failed)?;
            // `close` reports the failure, too.
            let _ = sender.send(pattern((BLOCKS * BLOCK_BYTES) as usize, 1)).await;
            return sender.close().await.map(drop);
        }
        let mut receiver = node.join_group(spec).await.map_err(failed)?;
        while let Some(Ok(message)) = receiver.next().await {
            assert!(message[..] == pattern(message.len(), 1), "the bytes are those that were sent");
            taken += 1;
        }
        receiver.close().await.map(drop)
    };
    let outcome = outcome.await;
    // Other members may still have to learn the outcome.
    node.shutdown(rdmc::Shutdown::Drain { limit: Duration::from_secs(10) }).await;
    (id, (outcome, taken))
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime starts")
}

const MEMBERS: u32 = 3;
const BLOCKS: u32 = 3;
const BLOCK_BYTES: u32 = 1000;
