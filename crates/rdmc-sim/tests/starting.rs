//! Nodes that start while others are stopped.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{join, join_all};
use rdmc::{Cluster, InviteFailure, Listener, Node, NodeId, StartError};
use rdmc_fabric::Fabric;
use rdmc_sim::{ClusterModel, NodeIndex, Simulation, World};

fn simulation(nodes: u32) -> Simulation {
    Simulation::new(ClusterModel::new(nodes, 1_000, 10_000), 1).expect("the model is sound")
}

fn fabric(world: &World, node: u32) -> Arc<dyn Fabric> {
    world.fabric(NodeIndex(node))
}

/// Runs a task on a node; returns its outcome.
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
                    rdmc::invite(fabric, &addresses, Default::default(), Duration::from_secs(20)).await
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
            // The other does not answer; the one that has accepted waits while it hears of the inviting node.
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
    played.expect("it ends");
}

#[test]
fn only_the_node_that_never_connected_is_named() {
    let simulation = simulation(3);
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(1_000), async move {
        let listeners = join_all((0..3).map(|node| Listener::bind(fabric(&world, node), "host:0"))).await;
        let listeners: Vec<Listener> = listeners.into_iter().map(|bound| bound.expect("it listens")).collect();
        let nodes = (0u32..).zip(&listeners).map(|(node, listener)| (node, listener.local_address().to_owned()));
        let cluster = Cluster::new(nodes);
        world.stop(NodeIndex(2));
        let started = (0..2u32).map(|node| {
            let builder = Node::builder(NodeId(node), cluster.clone()).listener(listeners[node as usize].clone());
            // The second gives up first, and is gone then.
            let builder = builder.fabric(fabric(&world, node)).connect_limit(Duration::from_secs(20 - u64::from(node)));
            on(&world, node, builder.start())
        });
        for started in join_all(started).await {
            let Err(StartError::Unreachable { missing, .. }) = started else { panic!("one is missing") };
            assert_eq!(missing, [NodeId(2)]);
        }
    });
    played.expect("it ends");
}
