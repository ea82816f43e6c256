//! Groups that share the ports of their members by their weights, and groups with a bound of their rate.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{Either, join_all, select, try_join, try_join_all};
use futures::{StreamExt, pin_mut};
use rdmc::{Algorithm, GroupSpec, GroupStats, NodeId, Receiver, Sender, SlowReceivers};
use rdmc_sim::{ClusterModel, Deployment, NodeIndex, Simulation, World};

const PORT_MBPS: u64 = 1_000;
/// Modelled bytes for each byte in memory.
const SCALE: u64 = 128;
const BLOCK: u64 = 64 << 10;
const MESSAGE_BLOCKS: u64 = 256;
/// The groups have found their shares by then.
const SETTLED: Duration = Duration::from_secs(3);
const MEASURED: Duration = Duration::from_secs(1);

/// A group of a run.
#[derive(Clone)]
struct Plan {
    members: Vec<u32>,
    share: u32,
    rate_max: Option<u64>,
    /// Modelled bytes a second that its application sends; as many as it can if `None`.
    offers: Option<u64>,
    /// Whether slow members are evicted after a second.
    evicts: bool,
    /// When its application closes it.
    ends: Option<Duration>,
}

impl Plan {
    fn new(members: impl IntoIterator<Item = u32>, share: u32) -> Self {
        Self { members: members.into_iter().collect(), share, rate_max: None, offers: None, evicts: false, ends: None }
    }
}

/// Groups of all nodes, each with another root.
fn turned(nodes: u32, shares: &[u32]) -> Vec<Plan> {
    (0..).zip(shares).map(|(root, share)| Plan::new((0..nodes).map(|at| (at + root) % nodes), *share)).collect()
}

/// Returns the part of a port that the last member of each group has received, and the limits that its root has told.
fn play(nodes: u32, latency: Duration, algorithm: &Algorithm, plans: &[Plan]) -> Vec<(f64, Option<u64>)> {
    let mut model = ClusterModel::new(nodes, PORT_MBPS, u64::try_from(latency.as_nanos()).expect("it is short"));
    model.payload_scale = SCALE;
    let simulation = Simulation::new(model, 1).expect("the model is valid");
    let (world, plans, algorithm) = (simulation.world().clone(), plans.to_vec(), algorithm.clone());
    let played = simulation.run(Duration::from_secs(60), async move {
        let deployment = Deployment::start(&world).await.expect("all nodes start");
        let groups = plans.iter().zip(1..).map(|(plan, id)| form(&deployment, id, plan, &algorithm));
        let groups = try_join_all(groups).await.expect("the groups form");
        let received: Vec<AtomicU64> = groups.iter().map(|_| AtomicU64::new(0)).collect();
        let (senders, receivers): (Vec<Sender>, Vec<Vec<Receiver>>) = groups.into_iter().unzip();
        let handles = senders.iter().cloned().zip(&plans);
        let working = join_all(handles.map(|(sender, plan)| send(&world, sender, plan)));
        let taking = join_all(receivers.into_iter().zip(&received).flat_map(|(receivers, received)| {
            let last = receivers.len() - 1;
            let world = &world;
            receivers
                .into_iter()
                .enumerate()
                .map(move |(at, receiver)| take(world, receiver, (at == last).then_some(received)))
        }));
        let measuring = async {
            world.sleep(SETTLED).await;
            let counts = || received.iter().map(|bytes| bytes.load(Ordering::Relaxed)).collect::<Vec<_>>();
            let before = counts();
            world.sleep(MEASURED).await;
            let port = (PORT_MBPS * 125_000) as f64 * MEASURED.as_secs_f64();
            let parts =
                counts().into_iter().zip(before).map(|(after, before)| (after - before) as f64 * SCALE as f64 / port);
            assert!(senders.iter().all(|sender| sender.stats().slow.is_none()), "nobody is slow");
            let limits = senders.iter().map(|sender| sender.stats().rate_limit);
            parts.zip(limits).collect::<Vec<_>>()
        };
        let work = futures::future::join(working, taking);
        pin_mut!(measuring, work);
        match select(measuring, work).await {
            Either::Left((parts, _)) => parts,
            Either::Right(_) => unreachable!("the groups have work for ever"),
        }
    });
    played.expect("the simulation ends")
}

async fn form(
    deployment: &Deployment,
    id: u64,
    plan: &Plan,
    algorithm: &Algorithm,
) -> Result<(Sender, Vec<Receiver>), rdmc::GroupError> {
    let spec = GroupSpec::new(id, plan.members.iter().copied().map(NodeId))
        .algorithm(algorithm.clone())
        .block_size(u32::try_from(BLOCK / SCALE).expect("it is short"))
        .share(plan.share)
        .rate_max(plan.rate_max.map(|rate| rate / SCALE));
    let patience = Duration::from_secs(1);
    let spec = if plan.evicts { spec.slow_receivers(SlowReceivers::evict_after(patience)) } else { spec };
    let root = deployment.node(NodeIndex(plan.members[0])).create_group(spec.clone());
    let joins = plan.members[1..].iter().map(|id| deployment.node(NodeIndex(*id)).join_group(spec.clone()));
    try_join(root, try_join_all(joins)).await
}

async fn send(world: &World, sender: Sender, plan: &Plan) {
    let payload = vec![7; usize::try_from(MESSAGE_BLOCKS * BLOCK / SCALE).expect("it is short")];
    if let Some(offers) = plan.offers {
        let short = payload[..usize::try_from(BLOCK / SCALE).expect("it is short")].to_vec();
        loop {
            // It leaves although nobody waits for it.
            drop(sender.enqueue(short.clone()));
            world.sleep(Duration::from_secs_f64(BLOCK as f64 / offers as f64)).await;
        }
    }
    let begun = world.now();
    let goes_on = || plan.ends.is_none_or(|ends| world.now().since(begun) < ends);
    let sends = std::iter::repeat_with(|| sender.send(payload.clone())).take_while(|_| goes_on());
    let mut sends = futures::stream::iter(sends).buffered(3);
    while let Some(sent) = sends.next().await {
        sent.expect("nothing fails");
    }
    drop(sends);
    sender.close().await.expect("nothing fails");
}

async fn take(world: &World, mut receiver: Receiver, received: Option<&AtomicU64>) {
    loop {
        let pause = world.sleep(Duration::from_millis(5));
        pin_mut!(pause);
        if let Either::Left((next, _)) = select(receiver.next(), pause).await {
            match next {
                Some(message) => drop(message.expect("nothing fails")),
                None => break,
            }
        }
        let GroupStats { bytes_received, .. } = receiver.stats();
        received.into_iter().for_each(|received| received.store(bytes_received, Ordering::Relaxed));
    }
    receiver.close().await.expect("nothing fails");
}

/// Asserts that the groups divide among themselves what they have by their weights, and returns how much that is.
fn assert_by_weight(what: &str, plans: &[Plan], parts: &[(f64, Option<u64>)], tolerance: f64) -> f64 {
    let sum: f64 = parts.iter().map(|(part, _)| part).sum();
    let weights: f64 = plans.iter().map(|plan| f64::from(plan.share)).sum();
    for (plan, (part, _)) in plans.iter().zip(parts) {
        let off = part / sum / (f64::from(plan.share) / weights) - 1.0;
        assert!(off.abs() <= tolerance, "{what}: a share of {} is off by {off:.3}: {parts:?}", plan.share);
    }
    sum
}

#[test]
fn groups_with_other_roots_share_the_ports_of_the_same_nodes_by_weight() {
    for (latency_us, tolerance) in [(2, 0.05), (100, 0.05), (5000, 0.07)] {
        for algorithm in [Algorithm::BinomialPipeline, Algorithm::Chain, Algorithm::TwoTree] {
            for shares in [[4, 2, 1], [1, 1, 1]] {
                let plans = turned(4, &shares);
                let parts = play(4, Duration::from_micros(latency_us), &algorithm, &plans);
                let what = format!("{algorithm}, {latency_us} µs");
                let used = assert_by_weight(&what, &plans, &parts, tolerance);
                println!("{what}, shares {shares:?}: {used:.3} of the port, {parts:.3?}");
                assert!(used >= 0.93, "{what}: only {used:.3} of the port");
            }
        }
    }
}

#[test]
fn a_share_that_is_not_used_goes_to_the_others() {
    // The first would get four sevenths.
    let mut plans = turned(4, &[4, 2, 1]);
    plans[0].offers = Some(PORT_MBPS * 125_000 / 5);
    let parts = play(4, Duration::from_micros(2), &Algorithm::Chain, &plans);
    assert!((0.19..=0.21).contains(&parts[0].0), "{parts:?}");
    let rest = assert_by_weight("the rest", &plans[1..], &parts[1..], 0.05);
    assert!(parts[0].0 + rest >= 0.87, "{parts:?}");
}

#[test]
fn a_group_is_held_back_only_where_its_members_share_a_port() {
    // The third group shares a port with nobody; the first two meet at node 2 alone.
    let plans = [Plan::new([0, 2], 1), Plan::new([1, 2], 3), Plan::new([3, 4], 1)];
    let parts = play(5, Duration::from_micros(2), &Algorithm::Chain, &plans);
    assert_by_weight("at node 2", &plans[..2], &parts[..2], 0.05);
    assert!(parts[2].0 >= 0.97 && parts[2].1.is_none(), "{parts:?}");
    assert!(parts[0].1.is_some() && parts[1].1.is_some(), "both are held back: {parts:?}");
}

#[test]
fn two_roots_share_the_port_of_their_node() {
    let plans = [Plan::new([0, 1], 3), Plan::new([0, 2], 1)];
    let parts = play(3, Duration::from_micros(2), &Algorithm::Chain, &plans);
    assert_by_weight("at node 0", &plans, &parts, 0.05);
}

#[test]
fn a_group_has_the_port_when_the_others_have_ended() {
    let mut plans = turned(4, &[1, 4]);
    plans[1].ends = Some(Duration::from_millis(1500));
    let parts = play(4, Duration::from_micros(2), &Algorithm::Chain, &plans);
    assert!(parts[0].0 >= 0.98 && parts[0].1.is_none(), "{parts:?}");
}

#[test]
fn copies_that_follow_each_other_are_bounded_one_by_one() {
    for algorithm in [Algorithm::Sequential, Algorithm::BinomialTree] {
        let mut plan = Plan::new(0..4, 1);
        plan.rate_max = Some(PORT_MBPS * 125_000 / 5);
        let [(part, _)] = play(4, Duration::from_micros(2), &algorithm, std::slice::from_ref(&plan))[..] else {
            unreachable!("there is one group");
        };
        assert!(part <= 0.21, "{algorithm}: {part}");
    }
}

#[test]
fn nobody_is_blamed_for_a_root_that_holds_blocks_back() {
    for algorithm in [Algorithm::BinomialPipeline, Algorithm::Chain] {
        let mut plan = Plan::new(0..4, 1);
        // A block every two seconds.
        plan.rate_max = Some(BLOCK / 2);
        plan.evicts = true;
        let parts = play(4, Duration::from_micros(2), &algorithm, std::slice::from_ref(&plan));
        assert!(parts[0].1.is_some(), "{algorithm}: {parts:?}");
    }
}

#[test]
fn a_root_does_not_share_what_comes_in() {
    // Node 0 sends in the first group, and receives in the second.
    let plans = [Plan::new([0, 1, 2], 1), Plan::new([3, 0], 100)];
    let parts = play(4, Duration::from_micros(2), &Algorithm::Chain, &plans);
    assert!(parts.iter().all(|(part, _)| *part >= 0.95), "{parts:?}");
}

#[test]
fn a_group_is_not_held_back_by_one_that_rests() {
    let mut plans = turned(4, &[1, 4]);
    plans[1].offers = Some(PORT_MBPS * 125_000 / 1000);
    let parts = play(4, Duration::from_micros(2), &Algorithm::Chain, &plans);
    assert!(parts[0].0 >= 0.98 && parts[0].1.is_none(), "{parts:?}");
}

#[test]
fn a_group_goes_no_faster_than_its_bound() {
    for algorithm in [Algorithm::BinomialPipeline, Algorithm::Chain, Algorithm::TwoTree, Algorithm::Fanout] {
        for percent in [2, 20] {
            let mut plan = Plan::new(0..4, 1);
            plan.rate_max = Some(PORT_MBPS * 1_250 * percent);
            // In the fan-out, one byte of a message is three that leave.
            let copies = if algorithm == Algorithm::Fanout { 3.0 } else { 1.0 };
            let bound = percent as f64 / 100.0 / copies;
            let [(part, limit)] = play(4, Duration::from_micros(2), &algorithm, std::slice::from_ref(&plan))[..] else {
                unreachable!("there is one group");
            };
            assert!((part / bound - 1.0).abs() <= 0.03, "{algorithm}: {part} instead of {bound}");
            assert!(limit.is_some(), "{algorithm}: it tells the bound");
        }
    }
}
