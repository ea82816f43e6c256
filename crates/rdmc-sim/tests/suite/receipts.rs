//! What the receipts of large groups cost: every receiver writes its row to the root.

use std::time::Duration;

use futures::StreamExt;
use rdmc::{Algorithm, GroupSpec, NodeId, Receiver};
use rdmc_fabric::Timestamp;
use rdmc_sim::{ClusterModel, Deployment, NodeIndex, Simulation, World};

use crate::proof;

/// Times since the root called send.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// The last receiver has the message.
    last: Duration,
    /// The receipt says so.
    delivered: Duration,
    /// The receipt says that all have stored it.
    stored: Duration,
}

/// Stores messages at once; returns when it got them.
async fn receive(world: World, mut receiver: Receiver) -> Vec<Timestamp> {
    let mut times = Vec::new();
    while let Some(message) = receiver.next().await {
        times.push(world.now());
        message.expect("no failure").stored();
    }
    receiver.close().await.expect("the group closes");
    times
}

/// Sends messages of 1 KiB one after the other, each after both answers of the receipt before.
fn times(model: ClusterModel, ring: bool) -> Vec<Times> {
    let simulation = Simulation::new(model, 1).expect("the model is valid");
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(600), async move {
        let deployment = Deployment::start_with(&world, |it| it.detection(QUIET)).await.expect("all nodes start");
        let spec = GroupSpec::new(1, world.nodes().map(|node| NodeId(node.0)))
            .algorithm(Algorithm::BinomialPipeline)
            .formation_limit(QUIET)
            .block_size(1 << 20);
        let spec = if ring { spec.ring(64, 1 << 10) } else { spec };
        let joins = world.nodes().skip(1).map(|node| deployment.node(node).join_group(spec.clone()));
        let root = deployment.node(NodeIndex(0)).create_group(spec.clone());
        let formed = futures::future::try_join(root, futures::future::try_join_all(joins)).await;
        let (sender, receivers) = formed.expect("the group forms");
        let received = receivers.into_iter().map(|receiver| receive(world.clone(), receiver));
        let sent = async {
            let mut answers = Vec::new();
            for _ in 0..MESSAGES {
                world.sleep(REST).await;
                let began = world.now();
                let receipt = sender.send(vec![7; 1 << 10]).await.expect("it is sent");
                receipt.delivered().await.expect("all have it");
                let delivered = world.now();
                receipt.stored().await.expect("all store it");
                answers.push((began, delivered, world.now()));
            }
            sender.close().await.expect("the group closes");
            answers
        };
        let (answers, received) = futures::future::join(sent, futures::future::join_all(received)).await;
        let times = answers.into_iter().enumerate().map(|(number, (began, delivered, stored))| {
            let last = received.iter().map(|times| times[number]).max().expect("there are receivers");
            Times { last: last.since(began), delivered: delivered.since(began), stored: stored.since(began) }
        });
        times.collect()
    });
    played.expect("the simulation ends")
}

/// Decision 66 has the table of the full form.
#[test]
fn receipts_wait_for_a_row_of_every_member() {
    let counts = proof::amount("receipts_wait_for_a_row_of_every_member", vec![64], vec![16, 64, 128, 256, 512]);
    for latency_ns in [1_300, 50_000] {
        for members in &counts {
            for ring in [false, true] {
                let mut model = ClusterModel::new(*members, 100_000, latency_ns);
                (model.host.post_ns, model.host.completion_ns) = (300, 500);
                let times = times(model, ring);
                eprintln!("{latency_ns} ns, {members} members, ring {ring}: {times:?}");
                assert!(times.iter().all(|it| it.last < it.delivered && it.delivered <= it.stored));
            }
        }
    }
}

/// Messages of a group. Before the second one, the root has asked for the rows.
const MESSAGES: usize = 2;
/// Pause before each.
const REST: Duration = Duration::from_millis(50);
/// Signs of life of hundreds of nodes would be most of the events.
const QUIET: Duration = Duration::from_secs(3600);
