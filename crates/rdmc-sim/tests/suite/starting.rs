//! Nodes that are stopped, while they start and later.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::{FutureExt, join, join_all};
use rdmc::{
    Cluster, FailureCause, GroupError, GroupFailure, GroupSpec, InviteFailure, InviteOptions, Listener, Node,
    NodeBuilder, NodeId, SendError, StartError,
};
use rdmc_fabric::Fabric;
use rdmc_sim::{ClusterModel, Deployment, NodeIndex, Simulation, World};

fn simulation(nodes: u32) -> Simulation {
    Simulation::new(ClusterModel::new(nodes, 1_000, 10_000), 1).expect("the model is valid")
}

fn fabric(world: &World, node: u32) -> Arc<dyn Fabric> {
    world.fabric(NodeIndex(node))
}

/// Has so many nodes listen; returns also the cluster of all.
async fn listening(world: &World, nodes: u32) -> (Vec<Listener>, Cluster) {
    let listeners = join_all((0..nodes).map(|node| Listener::bind(fabric(world, node), "host:0"))).await;
    let listeners: Vec<Listener> = listeners.into_iter().map(|bound| bound.expect("it listens")).collect();
    let nodes = (0..).zip(&listeners).map(|(node, listener)| (node, listener.local_address().to_owned()));
    let cluster = Cluster::new(nodes);
    (listeners, cluster)
}

/// Runs a task on a node; returns its output.
async fn on<T: Send + 'static>(world: &World, node: u32, task: impl Future<Output = T> + Send + 'static) -> T {
    let (tell, told) = tokio::sync::oneshot::channel();
    let task = async move {
        let _ = tell.send(task.await);
    };
    world.spawn_on(NodeIndex(node), Box::pin(task));
    told.await.expect("its node lives")
}

#[test]
fn who_has_accepted_does_not_wait_long_for_an_inviting_node_that_is_stopped() {
    let simulation = simulation(3);
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(1_000), async move {
        let listeners = join_all((1..3).map(|node| Listener::bind(fabric(&world, node), "host:0"))).await;
        let listeners: Vec<Listener> = listeners.into_iter().map(|bound| bound.expect("it listens")).collect();
        let addresses: Vec<String> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
        let inviting =
            {
                let fabric = fabric(&world, 0);
                on(&world, 0, async move {
                    rdmc::invite(fabric, &addresses, InviteOptions::new(Duration::from_secs(20))).await
                })
            };
        let accepting = {
            let (listener, clock) = (listeners[0].clone(), world.clone());
            on(&world, 1, async move {
                let accepted = listener.next_invitation().await.accept().await;
                (accepted.map(drop), clock.now())
            })
        };
        let stopping = async {
            // One node does not answer. The node that has accepted waits as long as the inviting node shows signs of
            // life.
            world.sleep(Duration::from_secs(10)).await;
            world.stop(NodeIndex(0));
            world.sleep(Duration::from_secs(100)).await;
            world.resume(NodeIndex(0));
        };
        let ((invited, (accepted, at)), ()) = join(join(inviting, accepting), stopping).await;
        let failures = invited.expect_err("one was silent").failures;
        assert!(
            matches!(&failures[..], [(address, InviteFailure::Silent(_))] if address == listeners[1].local_address())
        );
        assert!(accepted.is_err());
        assert!((10..20).contains(&(at.as_nanos() / 1_000_000_000)), "{at:?}");
    });
    played.expect("the simulation ends");
}

/// Sends until the group fails; returns how it failed.
async fn send_until_it_fails(node: Node, spec: GroupSpec) -> GroupFailure {
    let root = node.create_group(spec).await.expect("the group is formed");
    loop {
        match root.send(vec![7; 100_000]).await {
            Ok(_) => {}
            Err(SendError::Failed(failure) | SendError::NotQueued(failure)) => return failure,
            Err(error) => panic!("the group was not closed: {error}"),
        }
    }
}

/// Receives until the group fails; returns how it failed.
async fn receive_until_it_fails(node: Node, spec: GroupSpec) -> GroupFailure {
    let mut receiver = node.join_group(spec).await.expect("the group is formed");
    loop {
        match receiver.next().await.expect("the root sends for ever") {
            Ok(message) => drop(message),
            Err(failure) => return failure,
        }
    }
}

#[test]
fn who_was_stopped_itself_knows_it_and_the_others_do_not_say_it_of_themselves() {
    for stopped in 0..3 {
        let simulation = simulation(3);
        let world = simulation.world().clone();
        let played = simulation.run(Duration::from_secs(1_000), async move {
            let deployment = Deployment::start(&world).await.expect("nothing is in its way");
            let node = |number| deployment.node(NodeIndex(number)).clone();
            let spec = GroupSpec::new(1, (0..3).map(NodeId));
            let root = on(&world, 0, send_until_it_fails(node(0), spec.clone()));
            let first = on(&world, 1, receive_until_it_fails(node(1), spec.clone()));
            let second = on(&world, 2, receive_until_it_fails(node(2), spec.clone()));
            let stopping = async {
                world.sleep(Duration::from_secs(3)).await;
                world.stop(NodeIndex(stopped));
                world.sleep(STOPPED_FOR).await;
                world.resume(NodeIndex(stopped));
            };
            let (failures, ()) = join(join_all([root.boxed(), first.boxed(), second.boxed()]), stopping).await;
            for (failure, number) in failures.into_iter().zip(0..) {
                let stalled = failure.stalled();
                if number == stopped {
                    let stalled = stalled.unwrap_or_else(|| panic!("{failure}"));
                    assert!(stalled <= STOPPED_FOR && stalled > STOPPED_FOR.mul_f64(0.8), "{stalled:?}");
                } else {
                    assert_eq!(stalled, None, "{failure}");
                    let named: Vec<_> = failure.failed.iter().map(|failed| failed.node).collect();
                    assert_eq!(named, [NodeId(stopped)], "{failure}");
                }
            }
        });
        played.expect("it ends");
    }
}

/// Longer than the detection time of two seconds.
const STOPPED_FOR: Duration = Duration::from_millis(5_200);

#[test]
fn only_the_node_that_never_connected_is_named() {
    let simulation = simulation(3);
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(1_000), async move {
        let (listeners, cluster) = listening(&world, 3).await;
        world.stop(NodeIndex(2));
        let started = (0..2u32).map(|node| {
            let builder = Node::builder(NodeId(node), cluster.clone()).listener(listeners[node as usize].clone());
            // The second node gives up first, and ends.
            let builder = builder.fabric(fabric(&world, node)).connect_limit(Duration::from_secs(20 - u64::from(node)));
            on(&world, node, builder.start())
        });
        for started in join_all(started).await {
            let Err(StartError::Unreachable { missing, .. }) = started else { panic!("one is missing") };
            assert_eq!(missing, [NodeId(2)]);
        }
    });
    played.expect("the simulation ends");
}

#[test]
fn a_group_goes_on_without_the_fewest_that_explain_who_was_never_connected_with_whom() {
    let pair: (&[_], &[_]) = (&[(1, 3)], &[1, 3]);
    // One is reached by the root alone.
    let alone: (&[_], &[_]) = (&[(1, 2), (1, 3)], &[1]);
    // With whose time to connect is over first, if not that of all at once.
    let cases = [(pair, None), (pair, Some(3)), (alone, Some(1)), (alone, Some(2)), (alone, Some(3))];
    for ((cuts, may_be_named), hasty) in cases {
        let simulation = simulation(4);
        let world = simulation.world().clone();
        let played = simulation.run(Duration::from_secs(1_000), async move {
            let (listeners, cluster) = listening(&world, 4).await;
            cuts.iter().for_each(|(one, other)| world.cut(NodeIndex(*one), NodeIndex(*other)));
            let members = (0..4u32).map(|node| {
                let builder = Node::builder(NodeId(node), cluster.clone()).listener(listeners[node as usize].clone());
                let limit = Duration::from_secs(if hasty == Some(node) { 7 } else { 10 });
                let builder = builder.fabric(fabric(&world, node)).connect_limit(limit);
                on(&world, node, async move { (outlasts(builder, node, may_be_named).await, node) })
            });
            let members = join_all(members).await;
            assert_eq!(members.iter().filter(|((_, goes_on), _)| *goes_on).count(), 3);
        });
        played.expect("the simulation ends");
    }
}

/// Forms a group of four that fails, because one of some members is named as unreachable. Returns whether the node goes
/// on in the next group.
async fn outlasts(builder: NodeBuilder, node: u32, may_be_named: &[u32]) -> (Node, bool) {
    let (started, _joining) = builder.start_joining().await.expect("it starts");
    let spec = GroupSpec::new(1, (0..4).map(NodeId)).recoverable(true);
    // At a member that is connected to all others, it is formed before it fails.
    let failed = match node {
        0 => match started.create_group(spec).await {
            Ok(sender) => Ok(sender.failed().await),
            Err(error) => Err(error),
        },
        _ => match started.join_group(spec).await {
            Ok(receiver) => Ok(receiver.failed().await),
            Err(error) => Err(error),
        },
    };
    let failure = match failed {
        Ok(failure) | Err(GroupError::Failed(failure)) => failure,
        Err(error) => panic!("{error}"),
    };
    let [failed] = &failure.failed[..] else { panic!("{failure}") };
    assert!(may_be_named.contains(&failed.node.0), "{failure}");
    assert!(matches!(failed.cause, FailureCause::Unreachable { .. }), "{failure}");
    let goes_on = failed.node != NodeId(node);
    if goes_on {
        failure.recover().await.expect("the others go on");
    }
    (started, goes_on)
}
