//! Single multicasts on a fresh world, and many worlds at once.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rdmc::Algorithm;

use super::ExperimentError;
use crate::deployment::{Deployment, DeploymentError, GroupPlan, MulticastTimes, scale_for};
use crate::log::Recorded;
use crate::model::ClusterModel;
use crate::simulation::{NodeIndex, lock};
use crate::world::{Simulation, World};

/// Starts a runtime on every node of an experiment without failures.
///
/// Failure detection is slow there: frequent signs of life among hundreds of nodes would be most of the events.
pub(crate) async fn deploy(world: &World) -> Result<Deployment, DeploymentError> {
    Deployment::start_with(world, |builder| builder.detection(DETECTION)).await
}

/// A mebibyte, the paper's block and the unit of its sizes.
pub(crate) const MIB: u64 = 1 << 20;

/// One multicast in an otherwise idle world.
#[derive(Clone, Debug)]
pub(crate) struct Single {
    pub(crate) model: ClusterModel,
    /// The members, the root first.
    pub(crate) members: Vec<NodeIndex>,
    pub(crate) algorithm: Algorithm,
    pub(crate) bytes: u64,
    pub(crate) block_size: u64,
    pub(crate) seed: u64,
}

/// The result of a multicast.
#[derive(Clone, Debug)]
pub(crate) struct Measurement {
    pub(crate) times: MulticastTimes,
    /// The recorded traffic from the moment of the send; empty without recording.
    pub(crate) recorded: Vec<Recorded>,
}

impl Single {
    /// Describes a multicast to the first `members` nodes of a cluster, modelled with short payload.
    pub(crate) fn new(
        mut model: ClusterModel,
        members: u32,
        algorithm: Algorithm,
        bytes: u64,
        block_size: u64,
    ) -> Self {
        model.nodes = model.nodes.min(members);
        model.payload_scale = scale_for(&[block_size], u64::MAX);
        Self { model, members: (0..members).map(NodeIndex).collect(), algorithm, bytes, block_size, seed: 1 }
    }

    /// Runs it.
    pub(crate) fn run(&self) -> Result<MulticastTimes, ExperimentError> {
        Ok(self.play(false, |_| {})?.times)
    }

    /// Runs it and calls `prepare` when the group is formed.
    pub(crate) fn run_with(
        &self,
        prepare: impl FnOnce(&World) + Send + 'static,
    ) -> Result<MulticastTimes, ExperimentError> {
        Ok(self.play(false, prepare)?.times)
    }

    /// Runs it, records the traffic, and calls `prepare` when the group is formed.
    pub(crate) fn run_recorded(
        &self,
        prepare: impl FnOnce(&World) + Send + 'static,
    ) -> Result<Measurement, ExperimentError> {
        self.play(true, prepare)
    }

    fn play(
        &self,
        records: bool,
        prepare: impl FnOnce(&World) + Send + 'static,
    ) -> Result<Measurement, ExperimentError> {
        let simulation = Simulation::new(self.model.clone(), self.seed)?;
        let world = simulation.world().clone();
        let plan = GroupPlan {
            id: 1,
            members: self.members.clone(),
            algorithm: self.algorithm.clone(),
            block_size: self.block_size,
            delivery: rdmc::Delivery::Immediate,
            ring: None,
        };
        let bytes = self.bytes;
        let settling = Duration::from_nanos(self.model.latency_ns) * SETTLING_LATENCIES;
        let played = simulation.run(VIRTUAL_LIMIT, async move {
            let deployment = deploy(&world).await?;
            let group = deployment.form(plan).await?;
            // The traffic of forming the group ends, and the round trips are measured.
            world.sleep(Duration::from_millis(1).max(settling)).await;
            if records {
                world.record();
            }
            prepare(&world);
            let times = group.multicast(bytes).await?;
            let recorded = world.recorded();
            group.close().await?;
            Ok(Measurement { times, recorded })
        });
        played?
    }
}

/// Runs independent jobs on all processors; returns the results in the order of the jobs.
pub(crate) fn in_parallel<J: Sync, T: Send>(
    jobs: &[J],
    run: impl Fn(&J) -> Result<T, ExperimentError> + Sync,
) -> Result<Vec<T>, ExperimentError> {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(jobs.len());
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<_>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((job, place)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    jobs.get(index).zip(results.get(index))
                } {
                    *lock(place) = Some(run(job));
                }
            });
        }
    });
    results.into_iter().map(|place| lock(&place).take().expect("every job was run")).collect()
}

/// Returns the time that `bytes` take on a port.
pub(crate) fn wire_time(model: &ClusterModel, bytes: u64) -> Duration {
    Duration::from_nanos(bytes * 8_000 / model.port_mbps)
}

/// Returns the time to relay a block that has just arrived, without its time on the ports: the stated latencies of a
/// model.
pub(crate) fn hop_time(model: &ClusterModel) -> Duration {
    let software_ns = model.host.completion_ns + model.host.post_ns;
    Duration::from_nanos(model.latency_ns + 2 * model.nic.operation_ns + software_ns)
}

/// Latencies after which a group that is formed is at rest.
const SETTLING_LATENCIES: u32 = 10;
/// Silence after which a node of an experiment counts as failed.
const DETECTION: Duration = Duration::from_secs(3600);
/// Limit of an experiment in virtual time.
pub(crate) const VIRTUAL_LIMIT: Duration = Duration::from_secs(24 * 3600);
