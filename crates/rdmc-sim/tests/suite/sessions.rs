//! Sessions of `rdmc-wan` pass their bodies in virtual time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::Fabric;
use rdmc_sim::{ClusterModel, NodeIndex, PathModel, Simulation};
use rdmc_wan::conformance::{Ends, Rig};

/// Two nodes of a modelled network.
struct Sim {
    simulation: Simulation,
    /// How many pairs of ends there were, each with an address of its own.
    pairs: AtomicU64,
}

impl Sim {
    fn new(round_trip_ms: u64, path: Option<PathModel>) -> Self {
        let mut model = ClusterModel::new(2, 10_000, round_trip_ms * 500_000);
        model.control.latency_ns = round_trip_ms * 500_000;
        model.path = path;
        let simulation = Simulation::new(model, 1).expect("the model is valid");
        Self { simulation, pairs: AtomicU64::new(0) }
    }

    fn lossy() -> Self {
        Self::new(10, Some(PathModel { loss: 1e-3, jitter_ns: 100_000, ..PathModel::default() }))
    }
}

impl Rig for Sim {
    fn ends(&self) -> Ends {
        let [accepting, opening] =
            [0, 1].map(|node| -> Arc<dyn Fabric> { self.simulation.world().fabric(NodeIndex(node)) });
        let pair = self.pairs.fetch_add(1, Ordering::Relaxed);
        Ends { accepting, opening, address: format!("listener{pair}:1") }
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        self.simulation.run(LIMIT, body).expect("the body must not hang");
    }
}

rdmc_wan::session_suite!(near, Sim::new(0, None));
rdmc_wan::session_suite!(far, Sim::new(60, None));
rdmc_wan::session_suite!(far_and_lossy, Sim::lossy());

const LIMIT: Duration = Duration::from_secs(600);
