use rdmc_sim::*;
use std::time::{Duration, Instant};
fn main() {
    let n: u32 = std::env::args().nth(1).unwrap().parse().unwrap();
    let scale: u64 = std::env::args().nth(2).unwrap().parse().unwrap();
    let mut model = ClusterModel::new(n, 40_000, 1_500);
    model.payload_scale = scale;
    model.nic.operation_ns = 100;
    if let Some(x) = std::env::args().nth(3) {
        model.nic.notice_bytes = x.parse().unwrap();
    }
    model.host.post_ns = 200;
    model.host.completion_ns = 300;
    let simulation = Simulation::new(model, 1).unwrap();
    let world = simulation.world().clone();
    let began = Instant::now();
    let deployment = simulation.run(Duration::MAX, async move { Deployment::start(&world).await }).unwrap().unwrap();
    println!("started after {:?}, virtual {:?}", began.elapsed(), deployment.world().now());
    let plan = GroupPlan {
        id: 1,
        members: (0..n).map(NodeIndex).collect(),
        algorithm: rdmc::Algorithm::BinomialPipeline,
        block_size: 1 << 20,
    };
    let began = Instant::now();
    let group = simulation.run(Duration::MAX, async move { deployment.form(plan).await }).unwrap().unwrap();
    println!("formed after {:?}", began.elapsed());
    let began = Instant::now();
    let times = simulation
        .run(Duration::MAX, async move {
            let times = group.multicast(256 << 20).await;
            group.close().await.unwrap();
            times
        })
        .unwrap()
        .unwrap();
    let block = (1u64 << 20) as f64 * 8.0 / 40e9;
    println!(
        "multicast after {:?}: {:?} = {:.2} blocks, skew {:?}",
        began.elapsed(),
        times.latency(),
        times.latency().as_secs_f64() / block,
        times.skew()
    );
    println!("digest {:x}", simulation.world().digest());
}
