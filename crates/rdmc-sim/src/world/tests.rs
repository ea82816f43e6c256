//! Unit tests of the world.

use rdmc_fabric::{CompletionMode, Fabric, Peer, QueuePairConfig, Role};

use super::*;

#[test]
fn a_limited_path_has_a_rate_of_its_own() {
    let simulation = Simulation::new(ClusterModel::new(3, 8_000, 0), 1).unwrap();
    let world = simulation.world();
    let rate = |from, to| world.0.flows.rate_of(&world.0.path(NodeIndex(from), NodeIndex(to)));
    world.limit_path(NodeIndex(0), NodeIndex(1), 2_000);
    assert_eq!((rate(0, 1), rate(1, 0)), (2_000_000_000, 2_000_000_000));
    assert_eq!((rate(0, 2), rate(1, 2)), (8_000_000_000, 8_000_000_000));
    world.limit_path(NodeIndex(1), NodeIndex(0), 16_000);
    assert_eq!(rate(0, 1), 8_000_000_000, "the port decides");
}
#[test]
fn a_short_message_waits_behind_what_long_ones_have_queued() {
    // A byte takes a ns; the flows last longer than the test.
    let begins = |queue_bytes, flows: u64| {
        let mut model = ClusterModel::new(2, 8_000, 0);
        model.nic.queue_bytes = queue_bytes;
        let simulation = Simulation::new(model, 1).unwrap();
        let world = simulation.world().clone();
        let path = world.0.path(NodeIndex(0), NodeIndex(1));
        for _ in 0..flows {
            world.0.flows.start(path.clone(), 1_000_000, None, Box::new(|| {}));
        }
        let played = simulation.run(Duration::from_secs(1), async move {
            let (a, b) = (world.fabric(NodeIndex(0)), world.fabric(NodeIndex(1)));
            let end = |fabric: &Arc<SimFabric>| {
                let queue = fabric.create_completion_queue(1024, CompletionMode::Poll).unwrap();
                let source = queue.source();
                fabric.environment().spawn(Box::pin(queue.drain()));
                fabric.create_queue_pair(&source, QueuePairConfig::default()).unwrap()
            };
            let (from, to) = (end(&a), end(&b));
            let peer = |endpoint, role| Peer { endpoint, role, address: None };
            let (near, far) = futures::join!(
                from.connect(peer(to.endpoint(), Role::Active)),
                to.connect(peer(from.endpoint(), Role::Passive))
            );
            near.and(far).unwrap();
            let memory = |fabric: &Arc<SimFabric>| fabric.allocate(100).unwrap().into_mut().unwrap();
            let receive = to.receive(memory(&b));
            from.send(memory(&a).freeze(), None).await.unwrap();
            receive.await.unwrap();
            world.now().as_nanos()
        });
        played.unwrap()
    };
    assert_eq!(begins(0, 2), 100);
    assert_eq!(begins(5_000, 0), 100);
    assert_eq!(begins(5_000, 1), 5_100);
    assert_eq!(begins(5_000, 2), 10_100);
}
