//! Sizes that the root announces to members that learn them from their first blocks, too.

use std::time::Duration;

use futures::StreamExt;
use futures::future::{join_all, try_join_all};
use rdmc::{Algorithm, GroupSpec, NodeId};
use rdmc_sim::{ClusterModel, Deployment, Simulation};

const MESSAGES: u8 = 40;
const BLOCK: u32 = 1000;

/// Returns a message. Neighbouring ones have different lengths, of one to four blocks.
fn content(message: u8) -> Vec<u8> {
    vec![message; 1 + usize::from(message) * 1373 % 3900]
}

#[test]
fn distant_members_take_each_size_from_whatever_comes_first_and_never_from_a_later_message() {
    for (latency_ns, seed) in [(1_000, 1), (100_000, 2), (1_000_000, 3)] {
        let mut model = ClusterModel::new(8, 1_000, latency_ns);
        // Announcements come before blocks, with them, or much later.
        model.control.latency_ns = 1_000_000;
        // Several blocks have come when a member looks at the first of them.
        (model.host.completion_ns, model.host.wake_ns) = (30_000, 200_000);
        let simulation = Simulation::new(model, seed).expect("the model is valid");
        let world = simulation.world().clone();
        let played = simulation.run(Duration::from_secs(60), async move {
            let deployment = Deployment::start(&world).await.expect("the nodes start");
            let nodes: Vec<_> = world.nodes().map(|node| deployment.node(node).clone()).collect();
            let spec = GroupSpec::new(1, (0..8).map(NodeId)).algorithm(Algorithm::TwoTree).block_size(BLOCK);
            let spec = spec.check_blocks(true);
            let joins = try_join_all(nodes[1..].iter().map(|node| node.join_group(spec.clone())));
            let (sender, receivers) = futures::join!(nodes[0].create_group(spec.clone()), joins);
            let (sender, receivers) = (sender.expect("it forms"), receivers.expect("it forms"));
            let take = receivers.into_iter().map(|mut receiver| async move {
                for message in 0..MESSAGES {
                    let taken = receiver.next().await.expect("one more is due").expect("no failure");
                    assert_eq!(taken[..], content(message));
                }
                assert!(receiver.next().await.is_none());
                receiver.close().await.expect("it is closed");
            });
            let send = async {
                try_join_all((0..MESSAGES).map(|message| sender.send(content(message)))).await.expect("they are sent");
                sender.close().await.expect("it is closed");
            };
            futures::join!(send, join_all(take));
            nodes
                .iter()
                .map(|node| node.stats())
                .map(|stats| (stats.messages, stats.blocks_corrupted))
                .collect::<Vec<_>>()
        });
        assert_eq!(played.expect("the simulation ends"), [(MESSAGES.into(), 0); 8], "{latency_ns} ns");
    }
}
