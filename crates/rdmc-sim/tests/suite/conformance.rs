//! The simulated fabric passes the conformance suite, in virtual time.

use futures::future::BoxFuture;
use rdmc_fabric::conformance::{Node, Rig, WATCHDOG};
use rdmc_sim::{
    ClusterModel, DelayModel, Distribution, HostModel, NicModel, NodeIndex, RackModel, Simulation, WaitMode,
};

/// Two nodes of a modelled network.
struct Sim(Simulation);

impl Sim {
    fn new(model: ClusterModel) -> Self {
        Self(Simulation::new(model, 1).expect("the model is valid"))
    }

    /// Without costs and latency.
    fn free() -> Self {
        Self::new(ClusterModel::new(2, 100_000, 0))
    }

    /// With all costs: racks, software that sleeps and is held up, adapters without notices.
    fn costly() -> Self {
        let mut model = ClusterModel::new(2, 10_000, 1_500);
        model.racks = Some(RackModel { size: 1, uplink_mbps: 5_000, latency_ns: 700, rack_of: Vec::new() });
        model.nic = NicModel { operation_ns: 200, notice_bytes: 0, header_bytes: 60, ..NicModel::default() };
        let delays = DelayModel { probability: 0.2, mean_ns: 50_000.0, distribution: Distribution::Lognormal };
        model.host = HostModel {
            post_ns: 300,
            completion_ns: 500,
            wake_ns: 4_000,
            wake_cpu_ns: 2_000,
            completion: WaitMode::Event,
            delays: Some(delays),
        };
        model.control.loss = 0.1;
        Self::new(model)
    }

    /// With the payload scale of large transfers.
    fn scaled() -> Self {
        let mut model = ClusterModel::new(2, 40_000, 1_000);
        model.payload_scale = 1024;
        Self::new(model)
    }
}

impl Rig for Sim {
    fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
        let world = self.0.world().clone();
        Box::pin(async move {
            let (a, b) = (world.fabric(NodeIndex(0)), world.fabric(NodeIndex(1)));
            (Node::listening(a, "a:0").await, Node::listening(b, "b:0").await)
        })
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        self.0.run(2 * WATCHDOG, body).expect("the body must not hang");
    }
}

rdmc_fabric::conformance_suite!(free, Sim::free());
rdmc_fabric::conformance_suite!(costly, Sim::costly());
rdmc_fabric::conformance_suite!(scaled, Sim::scaled());
