//! What stable delivery costs.

use std::time::Duration;

use rdmc::{Algorithm, Delivery};
use rdmc_sim::{ClusterModel, Deployment, GroupPlan, Simulation};

/// Returns how long it takes until the last member has delivered the last of some messages, in virtual time.
fn time(members: u32, (messages, bytes): (usize, u64), delivery: Delivery) -> Duration {
    let simulation = Simulation::new(ClusterModel::new(members, 100_000, 1_300), 1).expect("the model is valid");
    let world = simulation.world().clone();
    let played = simulation.run(Duration::from_secs(60), async move {
        let deployment = Deployment::start(&world).await?;
        let (algorithm, block_size) = (Algorithm::BinomialPipeline, 1 << 20);
        let plan = GroupPlan { id: 1, members: world.nodes().collect(), algorithm, block_size, delivery, ring: None };
        let group = deployment.form(plan).await?;
        group.multicast(bytes).await?; // the group is at rest
        let times = group.stream(bytes, messages).await?;
        group.close().await?;
        let last = times.delivered.iter().max().expect("there are receivers");
        Ok::<_, rdmc_sim::DeploymentError>(last.since(times.began))
    });
    played.expect("the simulation ends").expect("the group closes")
}

#[test]
fn stable_delivery_takes_one_write_more_and_no_bandwidth() {
    // In a group of more than 16 members the rows travel through the root.
    for members in [2, 8, 24] {
        for (messages, mib) in [(3, 64), (6, 16)] {
            let work = (messages, mib << 20);
            let (immediate, stable) = (time(members, work, Delivery::Immediate), time(members, work, Delivery::Stable));
            let ratio = immediate.as_secs_f64() / stable.as_secs_f64();
            eprintln!("{members} members, {messages} of {mib} MiB: {ratio:.4}, {immediate:?} and {stable:?}");
            assert!(ratio >= 0.98, "{members} members, {messages} of {mib} MiB: {ratio:.4} of the bandwidth");
        }
        let short = (1, 1000);
        let (immediate, stable) = (time(members, short, Delivery::Immediate), time(members, short, Delivery::Stable));
        eprintln!("{members} members, 1000 bytes: {immediate:?} and {stable:?}");
    }
}
