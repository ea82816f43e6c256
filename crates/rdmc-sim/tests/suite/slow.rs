//! A receiver with a slow port: the others name it, and can evict it.

use std::time::Duration;

use futures::StreamExt;
use futures::future::{Either, select};
use rdmc::{
    Algorithm, FailureCause, GroupFailure, GroupSpec, NodeId, Rank, Receiver, RecoveryError, SendError, Sender,
    SlowReceivers,
};
use rdmc_sim::{ClusterModel, Deployment, NodeIndex, Simulation, World};

const NODES: u32 = 8;
const PORT_MBPS: u64 = 1_000;
/// Payload scale: modelled bytes for each byte in memory.
const SCALE: u64 = 100;
const BLOCK: u32 = 256 << 10;

/// What is multicast.
#[derive(Clone, Copy)]
struct Load {
    messages: usize,
    /// Blocks of a message.
    blocks: usize,
}

impl Load {
    fn of(messages: usize) -> Self {
        Self { messages, blocks: 128 }
    }
}

/// The results of a run.
struct Run {
    /// When each member closed the group with all messages; `None` for an excluded member.
    ends: Vec<Option<Duration>>,
    /// The ranks that each member saw named as slow, at any time.
    named: Vec<Vec<Rank>>,
    /// The cause for which each member was excluded, if any.
    excluded: Vec<Option<FailureCause>>,
}

fn spec(members: &[u32], algorithm: &Algorithm, policy: SlowReceivers) -> GroupSpec {
    GroupSpec::new(1, members.iter().copied().map(NodeId))
        .algorithm(algorithm.clone())
        .block_size(BLOCK / u32::try_from(SCALE).expect("it is short"))
        .slow_receivers(policy)
}

async fn send(mut sender: Sender, load: Load) {
    let payload = vec![7; load.blocks * BLOCK as usize / usize::try_from(SCALE).expect("it is short")];
    let mut left = load.messages;
    loop {
        let mut sends: futures::stream::FuturesOrdered<_> = (0..left).map(|_| sender.send(payload.clone())).collect();
        let mut failed: Option<GroupFailure> = None;
        while let Some(sent) = sends.next().await {
            match sent {
                Ok(_) => left -= 1,
                Err(SendError::Failed(failure)) => {
                    left -= 1;
                    failed = Some(failure);
                }
                Err(SendError::NotQueued(failure)) => failed = Some(failure),
                Err(other) => panic!("{other}"),
            }
        }
        drop(sends);
        let failure = match failed {
            Some(failure) => failure,
            None => match sender.close().await {
                Ok(_) => return,
                Err(failure) => failure,
            },
        };
        sender = failure.recover().await.expect("the others go on").into_sender().expect("the root is among them");
    }
}

/// Receives all messages and notes the named ranks; returns the cause if this member is excluded.
async fn receive(world: &World, mut receiver: Receiver, named: &mut Vec<Rank>) -> Option<FailureCause> {
    loop {
        let failure = loop {
            named.extend(receiver.stats().slow);
            named.dedup();
            let next = match select(receiver.next(), std::pin::pin!(world.sleep(Duration::from_millis(100)))).await {
                Either::Left((next, _)) => next,
                Either::Right(..) => continue,
            };
            match next {
                Some(Ok(message)) => drop(message),
                Some(Err(failure)) => break failure,
                None => match receiver.close().await {
                    Ok(_) => return None,
                    Err(failure) => break failure,
                },
            }
        };
        match failure.recover().await {
            Ok(recovery) => receiver = recovery.into_receiver().expect("only the root gets a sender"),
            Err(RecoveryError::Excluded { cause }) => return Some(cause),
            Err(other) => panic!("{other}"),
        }
    }
}

/// Multicasts to `members`; one member may have a port of a tenth of the rate.
fn run(members: &[u32], algorithm: &Algorithm, slow: Option<u32>, policy: SlowReceivers, load: Load) -> Run {
    let mut model = ClusterModel::new(NODES, PORT_MBPS, 2_000);
    model.payload_scale = SCALE;
    let simulation = Simulation::new(model, 1).expect("the model is valid");
    let world = simulation.world().clone();
    let (members, algorithm) = (members.to_vec(), algorithm.clone());
    let played = simulation.run(Duration::from_secs(600), async move {
        let deployment = Deployment::start(&world).await.expect("all nodes start");
        if let Some(slow) = slow {
            world.limit_port(NodeIndex(slow), PORT_MBPS / 10);
        }
        let spec = spec(&members, &algorithm, policy);
        let begun = world.now();
        let root = deployment.node(NodeIndex(members[0])).create_group(spec.clone());
        let joins = members[1..].iter().map(|id| deployment.node(NodeIndex(*id)).join_group(spec.clone()));
        let (sender, receivers) =
            futures::future::try_join(root, futures::future::try_join_all(joins)).await.expect("the group forms");
        let receivers = receivers.into_iter().map(|receiver| async {
            let mut named = Vec::new();
            let excluded = receive(&world, receiver, &mut named).await;
            (world.now(), excluded, named)
        });
        let (receivers, ()) = futures::join!(futures::future::join_all(receivers), send(sender, load));
        let mut run = Run { ends: Vec::new(), named: Vec::new(), excluded: Vec::new() };
        for (ended, excluded, named) in receivers {
            run.ends.push(excluded.is_none().then(|| ended.since(begun)));
            run.excluded.push(excluded);
            run.named.push(named);
        }
        run
    });
    played.expect("the simulation ends")
}

fn members() -> Vec<u32> {
    (0..NODES).collect()
}

#[test]
fn a_slow_receiver_is_named_and_nobody_else() {
    for algorithm in Algorithm::ALL_FLAT {
        for slow in [1, 4, 7] {
            let run = run(&members(), &algorithm, Some(slow), SlowReceivers::Wait, Load::of(3));
            for (member, named) in run.named.iter().enumerate() {
                assert!(named.iter().all(|rank| *rank == Rank(slow)), "{algorithm} {slow}: {member} saw {named:?}");
            }
            let heard = run.named.iter().filter(|named| !named.is_empty()).count();
            // In a chain the members before it may end before it is found.
            assert!(heard > 0, "{algorithm} {slow}: no member saw it");
        }
    }
}

#[test]
fn of_equals_nobody_is_named() {
    for algorithm in Algorithm::ALL_FLAT {
        let run = run(&members(), &algorithm, None, SlowReceivers::Wait, Load::of(4));
        assert!(run.named.iter().all(Vec::is_empty), "{algorithm}: {:?}", run.named);
    }
}

#[test]
fn of_equals_nobody_is_named_while_one_after_the_other_is_served() {
    let evict = SlowReceivers::Evict { after: Duration::from_secs(1) };
    for algorithm in [Algorithm::Sequential, Algorithm::BinomialTree] {
        // Each copy takes four seconds.
        let run = run(&members(), &algorithm, None, evict, Load { messages: 1, blocks: 2048 });
        assert!(run.named.iter().all(Vec::is_empty), "{algorithm}: {:?}", run.named);
        assert!(run.ends.iter().all(Option::is_some), "{algorithm}: {:?}", run.excluded);
    }
}

#[test]
fn the_others_are_done_in_little_more_than_their_own_time() {
    let evict = SlowReceivers::Evict { after: Duration::from_secs(1) };
    for algorithm in [Algorithm::BinomialPipeline, Algorithm::Circulant] {
        let slow = 5;
        let others: Vec<u32> = members().into_iter().filter(|member| *member != slow).collect();
        let own = run(&others, &algorithm, None, evict, Load::of(100));
        let with = run(&members(), &algorithm, Some(slow), evict, Load::of(100));
        let last = |run: &Run| run.ends.iter().flatten().max().copied().expect("a member ends");
        let ratio = last(&with).as_secs_f64() / last(&own).as_secs_f64();
        println!("{algorithm}: {:.3} of their own time", ratio);
        assert!(ratio <= 1.1, "{algorithm}: {ratio}");
        let excluded: Vec<usize> = (0..7).filter(|at| with.excluded[*at].is_some()).collect();
        assert_eq!(excluded, [slow as usize - 1], "{algorithm}");
        assert!(matches!(with.excluded[slow as usize - 1], Some(FailureCause::TooSlow { .. })), "{algorithm}");
    }
}
