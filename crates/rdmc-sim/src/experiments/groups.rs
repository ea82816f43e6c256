//! Overlapping groups, driven as the authors' program does.
//!
//! Every group has all members, in rotated order, so that each group has another root. In a round every root sends
//! one message. When all messages are delivered, the members meet at a barrier, and the next round begins. The time
//! includes the barriers, as in the authors' program.

use std::time::Duration;

use futures::future::try_join_all;
use rdmc::Algorithm;

use super::ExperimentError;
use super::measure::{MIB, VIRTUAL_LIMIT, deploy, hop_time};
use crate::deployment::{Deployment, DeploymentError, FormedGroup, GroupPlan, scale_for};
use crate::model::ClusterModel;
use crate::simulation::NodeIndex;
use crate::world::{Simulation, World};

/// Groups of the same members in an otherwise idle world; every root sends.
#[derive(Clone, Debug)]
pub(crate) struct OverlappingGroups {
    pub(crate) model: ClusterModel,
    /// Number of members that send. All nodes of the model are members.
    pub(crate) senders: u32,
    pub(crate) bytes: u64,
    pub(crate) block_size: u64,
    /// Messages of each sender before the barrier.
    pub(crate) stream: usize,
    pub(crate) rounds: u32,
    /// Rates of the racks' uplinks in Mbit/s; empty for those of the model.
    pub(crate) uplinks_mbps: Vec<u64>,
}

/// The result of all measured rounds.
#[derive(Clone, Debug)]
pub(crate) struct RoundsMeasurement {
    /// Duration of all rounds.
    pub(crate) elapsed: Duration,
    /// Number of messages, each counted once.
    pub(crate) messages: u64,
    /// The processor time of each member's software.
    pub(crate) cpu: Vec<Duration>,
}

impl OverlappingGroups {
    /// Describes messages of `bytes` among `members` nodes, with the block size of the authors' driver.
    pub(crate) fn new(mut model: ClusterModel, members: u32, senders: u32, bytes: u64) -> Self {
        model.nodes = members;
        let block_size = block_size_for(bytes);
        model.payload_scale = scale_for(&[block_size.min(bytes)], u64::MAX);
        Self { model, senders, bytes, block_size, stream: 1, rounds: 1, uplinks_mbps: Vec::new() }
    }

    /// Runs the rounds. One round that does not count comes first, unless only one round counts.
    pub(crate) fn run(&self) -> Result<RoundsMeasurement, ExperimentError> {
        let simulation = Simulation::new(self.model.clone(), 1)?;
        let (world, plan) = (simulation.world().clone(), self.clone());
        for (rack, &mbps) in (0..).zip(&self.uplinks_mbps) {
            world.limit_uplink(rack, mbps);
        }
        let played = simulation.run(VIRTUAL_LIMIT, async move {
            let members: Vec<NodeIndex> = world.nodes().collect();
            let plans = (0..plan.senders).map(|group| GroupPlan {
                id: u64::from(group) + 1,
                members: rotated(&members, group),
                algorithm: Algorithm::BinomialPipeline,
                block_size: plan.block_size,
                delivery: rdmc::Delivery::Immediate,
                ring: None,
            });
            let (_deployment, groups) = form_all(&world, plans.collect()).await?;
            if plan.rounds > 1 {
                plan.round(&world, &groups).await?;
            }
            let (began, cpu_before) = (world.now(), cpu_times(&world));
            for _ in 0..plan.rounds {
                plan.round(&world, &groups).await?;
            }
            let cpu = cpu_times(&world).into_iter().zip(cpu_before).map(|(after, before)| after - before).collect();
            let messages = u64::from(plan.senders) * plan.stream as u64 * u64::from(plan.rounds);
            Ok(RoundsMeasurement { elapsed: world.now().since(began), messages, cpu })
        });
        played?
    }

    async fn round(&self, world: &World, groups: &[FormedGroup]) -> Result<(), DeploymentError> {
        try_join_all(groups.iter().map(|group| group.stream(self.bytes, self.stream))).await?;
        world.sleep(barrier_time(&self.model)).await;
        Ok(())
    }
}

impl RoundsMeasurement {
    /// Returns messages per second.
    pub(crate) fn per_second(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let messages = self.messages as f64;
        messages / self.elapsed.as_secs_f64()
    }

    /// Returns the bandwidth in Gbit/s, receivers not counted.
    pub(crate) fn gbps(&self, bytes: u64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let bits = bytes as f64 * 8.0;
        self.per_second() * bits / 1e9
    }

    /// Returns the mean load of the members' software, in percent of a core.
    pub(crate) fn cpu_percent(&self) -> f64 {
        let total: Duration = self.cpu.iter().sum();
        #[expect(clippy::cast_precision_loss, reason = "counts are small")]
        let members = self.cpu.len() as f64;
        total.as_secs_f64() / members / self.elapsed.as_secs_f64() * 1e2
    }
}

/// Starts a runtime on every node and forms groups; returns when the nodes are idle again.
pub(crate) async fn form_all(
    world: &World,
    plans: Vec<GroupPlan>,
) -> Result<(Deployment, Vec<FormedGroup>), DeploymentError> {
    let deployment = deploy(world).await?;
    let groups = try_join_all(plans.into_iter().map(|plan| deployment.form(plan))).await?;
    world.sleep(SETTLED).await;
    Ok((deployment, groups))
}

/// Returns the block size of the authors' driver for a message.
pub(crate) fn block_size_for(bytes: u64) -> u64 {
    match bytes {
        0..8_192 => bytes.max(1),
        8_192..40_960 => 4_096,
        40_960..10_485_760 => bytes / 10,
        _ => MIB,
    }
}

/// Returns the members of the group with this number: member j is node (group + j) mod n.
pub(crate) fn rotated(members: &[NodeIndex], group: u32) -> Vec<NodeIndex> {
    let mut rotated = members.to_vec();
    rotated.rotate_left(group as usize % members.len().max(1));
    rotated
}

/// Returns the numbers of senders among `members`, with their names in the paper's figures.
pub(crate) fn sender_counts(members: u32) -> [(&'static str, u32); 3] {
    [("all send", members), ("half send", members.div_ceil(2)), ("one sends", 1)]
}

/// Returns the time of a dissemination barrier: ⌈log₂ n⌉ small writes and their completions.
pub(crate) fn barrier_time(model: &ClusterModel) -> Duration {
    hop_time(model) * model.nodes.next_power_of_two().trailing_zeros()
}

/// Upper bound of the time for which software is busy after groups were formed: with hundreds of groups it has posted
/// many receives. Hybrid waiting still polls then.
const SETTLED: Duration = Duration::from_millis(20);

fn cpu_times(world: &World) -> Vec<Duration> {
    let mode = world.model().host.completion;
    world.nodes().map(|node| world.cpu_time(node, mode)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::PaperCluster;

    #[test]
    fn blocks_are_those_of_the_authors_driver() {
        let blocks = |bytes: u64| (block_size_for(bytes), bytes.div_ceil(block_size_for(bytes)));
        assert_eq!(blocks(1), (1, 1));
        assert_eq!(blocks(8_191), (8_191, 1));
        assert_eq!(blocks(10_000), (4_096, 3));
        assert_eq!(blocks(1_000_000), (100_000, 10));
        assert_eq!(blocks(10_485_759), (1_048_575, 11));
        assert_eq!(blocks(100_000_000), (MIB, 96));
    }

    #[test]
    fn modelled_messages_have_as_many_blocks() {
        for bytes in [1, 10_000, 1_000_000, 100_000_000] {
            let groups = OverlappingGroups::new(PaperCluster::Fractus.model(), 2, 1, bytes);
            let scale = groups.model.payload_scale;
            let modelled = bytes.div_ceil(scale).div_ceil((groups.block_size / scale).max(1));
            assert_eq!(modelled, bytes.div_ceil(groups.block_size), "{bytes} bytes");
        }
    }

    #[test]
    fn every_group_has_another_root() {
        let members: Vec<_> = (0..3).map(NodeIndex).collect();
        let list = |group| rotated(&members, group).iter().map(|node| node.0).collect::<Vec<_>>();
        assert_eq!([list(0), list(1), list(2), list(3)], [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }
}
