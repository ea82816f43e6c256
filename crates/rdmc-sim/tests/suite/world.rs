//! The world: time limits, cuts in the middle of a message, invalid parameters.

use std::time::Duration;

use futures::future::{Either, join, select};
use rdmc_fabric::{BufferMut, CompletionMode, Fabric, Peer, QueuePair, QueuePairConfig, Role};
use rdmc_sim::{
    ClusterModel, DelayModel, Deployment, Distribution, GroupPlan, NodeIndex, Scenario, ScenarioError, SimFabric,
    Simulation, Stalled, World,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn simulation(model: ClusterModel) -> Simulation {
    Simulation::new(model, 1).expect("the model is valid")
}

#[test]
fn a_run_that_was_cut_short_goes_on() {
    let simulation = simulation(ClusterModel::new(1, 1_000, 0));
    let (world, clock) = (simulation.world().clone(), simulation.world().clone());
    world.spawn(Box::pin(async move { clock.sleep(Duration::from_secs(5)).await }));
    let sleeper = world.clone();
    let short = simulation.run(Duration::from_secs(1), async move { sleeper.sleep(Duration::from_secs(100)).await });
    assert!(matches!(short, Err(Stalled::TimeLimit { tasks: 2, .. })), "{short:?}");
    assert_eq!(world.now().as_nanos(), 1_000_000_000);
    let sleeper = world.clone();
    let long = simulation.run(Duration::from_secs(200), async move { sleeper.sleep(Duration::from_secs(150)).await });
    assert_eq!((long, world.now().as_nanos()), (Ok(()), 151_000_000_000));
}

/// Multicasts in a fresh world; returns its digest.
fn digest() -> u64 {
    let simulation = simulation(ClusterModel::new(9, 8_000, 1_000));
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(60), async move {
        let deployment = Deployment::start(&world).await?;
        let members = world.nodes().collect();
        let plan = GroupPlan {
            id: 1,
            members,
            algorithm: rdmc::Algorithm::BinomialPipeline,
            block_size: 4096,
            delivery: rdmc::Delivery::Immediate,
            ring: None,
        };
        let group = deployment.form(plan).await?;
        group.stream(1 << 20, 20).await?;
        group.close().await
    });
    played.expect("the simulation ends").expect("the group closes");
    simulation.world().digest()
}

#[test]
fn inside_a_tokio_runtime_everything_is_as_outside() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    assert_eq!(runtime.block_on(async { digest() }), digest());
}

/// Makes a queue pair whose completions a task drains.
fn queue_pair(fabric: &SimFabric) -> QueuePair {
    let queue = fabric.create_completion_queue(64, CompletionMode::Poll).expect("a completion queue");
    let config = QueuePairConfig { send_depth: 8, receive_depth: 8, ..QueuePairConfig::default() };
    let queue_pair = fabric.create_queue_pair(&queue.source(), config).expect("it has room");
    fabric.environment().spawn(Box::pin(queue.drain()));
    queue_pair
}

fn memory(fabric: &SimFabric, len: usize) -> BufferMut {
    fabric.allocate(len).expect("memory").into_mut().expect("it is writable")
}

/// A small message is on a slow port when the path is cut. It leaves again when the path is healed, and events of its
/// first attempt do not affect the next message.
#[test]
fn a_message_that_was_cut_off_arrives_once() {
    let simulation = simulation(ClusterModel::new(2, 1, 1_000));
    let world = simulation.world().clone();
    let (near, far) = (world.fabric(NodeIndex(0)), world.fabric(NodeIndex(1)));
    let lens = simulation.run(Duration::from_secs(60), async move {
        let (a, b) = (queue_pair(&near), queue_pair(&far));
        let peer = |of: &QueuePair, role| Peer { endpoint: of.endpoint(), role, address: None };
        let (at_a, at_b) = join(a.connect(peer(&b, Role::Active)), b.connect(peer(&a, Role::Passive))).await;
        at_a.and(at_b).expect("they connect");
        let receives = [b.receive(memory(&far, 250)), b.receive(memory(&far, 10_000_000))];
        let first = a.send(memory(&near, 250).freeze(), None);
        world.sleep(Duration::from_micros(500)).await;
        let (zero, one) = (NodeIndex(0), NodeIndex(1));
        world.cut(zero, one);
        world.limit_port(zero, 1_000);
        world.limit_port(one, 1_000);
        world.heal(zero, one);
        let second = a.send(memory(&near, 10_000_000).freeze(), None);
        assert_eq!((first.await, second.await), (Ok(()), Ok(())));
        let [first, second] = receives;
        [first.await.expect("it arrives").len, second.await.expect("it arrives").len]
    });
    assert_eq!(lens, Ok([250, 10_000_000]));
}

#[test]
fn of_a_node_that_dies_before_an_operation_others_see_what_it_did_before() {
    let seen = |operations: u64| {
        let simulation = simulation(ClusterModel::new(2, 1_000, 1_000));
        let world = simulation.world().clone();
        let (near, far) = (world.fabric(NodeIndex(0)).environment(), world.fabric(NodeIndex(1)).environment());
        let seen = simulation.run(Duration::from_secs(60), async move {
            let mut listener = far.listen("far:1").await.expect("the address is free");
            let dying = world.clone();
            world.before_operation(NodeIndex(0), operations, move || dying.kill(NodeIndex(0)));
            let environment = near.clone();
            near.spawn(Box::pin(async move {
                let mut stream = environment.connect("far:1").await.expect("a node listens");
                for piece in ["one ", "two ", "three"] {
                    stream.write_all(piece.as_bytes()).await.expect("it is connected");
                }
                std::future::pending().await
            }));
            let arrived = select(listener.accept(), Box::pin(world.sleep(Duration::from_secs(1)))).await;
            let Either::Left((stream, _)) = arrived else { return None };
            let mut text = Vec::new();
            // Returns an error when the connection breaks; `text` keeps the bytes before that.
            let _ = select(
                Box::pin(stream.expect("it listens").read_to_end(&mut text)),
                Box::pin(world.sleep(Duration::from_secs(1))),
            )
            .await;
            Some(String::from_utf8(text).expect("it is text"))
        });
        seen.expect("the simulation ends")
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!([0, 1, 2, 3, 4].map(seen), [None, text(""), text("one "), text("one two "), text("one two three")]);
}

/// Injects a fault into the connection from node 0 to node 1; returns the bytes of `hello` that each node reads in a
/// second.
fn after_fault(inject: fn(&World)) -> [String; 2] {
    let simulation = simulation(ClusterModel::new(2, 1_000, 1_000));
    let world = simulation.world().clone();
    let (near, far) = (world.fabric(NodeIndex(0)).environment(), world.fabric(NodeIndex(1)).environment());
    let read = simulation.run(Duration::from_secs(60), async move {
        let mut listener = far.listen("far:1").await.expect("the address is free");
        let (near, far) = join(near.connect("far:1"), listener.accept()).await;
        let (mut near, mut far) = (near.expect("a node listens"), far.expect("it listens"));
        inject(&world);
        let (at_near, at_far) = join(near.write_all(b"hello"), far.write_all(b"hello")).await;
        at_near.and(at_far).expect("they are connected");
        let (mut texts, [at_near, at_far]) = ([Vec::new(), Vec::new()], [near, far]);
        for (text, mut stream) in texts.iter_mut().zip([at_near, at_far]) {
            let second = Box::pin(world.sleep(Duration::from_secs(1)));
            // Returns an error when the connection breaks; `text` keeps the bytes before that.
            let _ = select(Box::pin(stream.read_to_end(text)), second).await;
        }
        texts.map(|text| String::from_utf8_lossy(&text).into_owned())
    });
    read.expect("the simulation ends")
}

#[test]
fn control_bytes_are_lost_or_spoilt_in_one_direction() {
    let texts = |near: &str, far: &str| [near.to_owned(), far.to_owned()];
    assert_eq!(after_fault(|_| {}), texts("hello", "hello"));
    assert_eq!(after_fault(|world| world.cut_one_way(NodeIndex(0), NodeIndex(1))), texts("hello", ""));
    assert_eq!(after_fault(|world| world.truncate_control(NodeIndex(0), NodeIndex(1), 3)), texts("", "hel"));
    assert_eq!(after_fault(|world| world.truncate_control(NodeIndex(0), NodeIndex(1), 0)), texts("", ""));
    assert_eq!(after_fault(|world| world.garble_control(NodeIndex(0), NodeIndex(1), 8)), texts("hello", "hdllo"));
}

#[test]
fn a_scenario_goes_on_without_its_root_and_tells_why_it_does_not_end() {
    let with = |event: &str| -> Scenario {
        let cluster = "[cluster]\nnodes = 8\nport_mbps = 10000\nlatency_ns = 1000\n";
        let groups =
            "[[groups]]\nmessages = [{ bytes = 16777216 }]\n[[groups]]\nmembers = [1, 2]\nmessages = [{ bytes = 1 }]\n";
        format!("{cluster}{groups}[[events]]\nwhat = \"{event}\"\nat_us = 5000\nnode = 0\n")
            .parse()
            .expect("a scenario")
    };
    for event in ["kill", "vanish"] {
        let played = with(event).play(1, false).expect("the others go on");
        assert!(played.groups[0].closed.is_err() && played.groups[1].closed.is_ok(), "{played:?}");
    }
    let stopped = with("stop").play(1, true).expect_err("what is stopped is waited for");
    assert!(matches!(stopped, ScenarioError::Stalled { ref recorded, .. } if !recorded.is_empty()), "{stopped:?}");
}

/// A change that makes the parameters invalid.
type Invalidate = fn(&mut ClusterModel);

#[test]
fn parameters_that_make_no_sense_are_named() {
    let delays = |mean_ns| Some(DelayModel { probability: 0.5, mean_ns, distribution: Distribution::Lognormal });
    let changes: [(&str, Invalidate); 14] = [
        ("nodes", |model| model.nodes = 0),
        ("nodes", |model| model.nodes = u32::MAX),
        ("port_mbps", |model| model.port_mbps = 0),
        ("port_mbps", |model| model.port_mbps = u64::MAX),
        ("latency_ns", |model| model.latency_ns = u64::MAX),
        ("payload_scale", |model| model.payload_scale = 0),
        ("costs", |model| model.host.wake_cpu_ns = u64::MAX),
        ("nic.retry_ns", |model| model.nic.retry_ns = u64::MAX),
        ("nic.header_bytes", |model| model.nic.header_bytes = u64::MAX),
        ("nic.queue_bytes", |model| model.nic.queue_bytes = u64::MAX),
        ("control.latency_ns", |model| model.control.latency_ns = u64::MAX),
        ("control.resend_ns", |model| model.control.resend_ns = 0),
        ("control.patience_ns", |model| model.control.patience_ns = u64::MAX),
        ("control.loss", |model| model.control.loss = f64::NAN),
    ];
    for (name, invalidate) in changes {
        let mut model = ClusterModel::new(2, 1_000, 10);
        invalidate(&mut model);
        let refused = Simulation::new(model, 1).expect_err(name).to_string();
        assert!(refused.contains(name), "{refused}");
    }
    for mean_ns in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut model = ClusterModel::new(2, 1_000, 10);
        model.host.delays = delays(mean_ns);
        let refused = Simulation::new(model, 1).expect_err("no mean of a delay").to_string();
        assert!(refused.contains("host.delays.mean_ns"), "{refused}");
    }
}
