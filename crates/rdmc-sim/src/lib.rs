//! The unchanged runtime on a modelled network in virtual time.
//!
//! A [`Simulation`] has a [`World`] of nodes, ports, racks and hosts, described by a [`ClusterModel`], and an executor
//! that runs everything on one thread. [`World::fabric`] returns a node's fabric; a [`Deployment`] starts a runtime on
//! every node. A seed decides everything random: the same seed gives the same history, to the nanosecond, on every
//! machine.
//!
//! Three things use it:
//! - [`Scenario`]s read a cluster, groups, messages and faults from a file; [`to_trace`] draws the recorded traffic;
//! - [`experiments`] replay those of the papers, as tables and figures;
//! - [`campaign`]s draw thousands of cases with faults and check the outcome of each.
//!
//! # Examples
//! A multicast of 64 MiB among eight nodes with ports of 40 Gbit/s takes little longer than a transfer to one node.
//! ```
//! use std::time::Duration;
//! use rdmc_sim::{ClusterModel, Deployment, GroupPlan, Simulation};
//!
//! let mut model = ClusterModel::new(8, 40_000, 1_500);
//! model.payload_scale = 1024; // a byte for each KiB
//! let simulation = Simulation::new(model, 1)?;
//! let world = simulation.world().clone();
//! let times = simulation.run(Duration::from_secs(60), async move {
//!     let deployment = Deployment::start(&world).await?;
//!     let plan = GroupPlan {
//!         id: 1,
//!         members: world.nodes().collect(),
//!         algorithm: rdmc::Algorithm::BinomialPipeline,
//!         block_size: 1 << 20,
//!         delivery: rdmc::Delivery::Immediate,
//!         ring: None,
//!     };
//!     let group = deployment.form(plan).await?;
//!     let times = group.multicast(64 << 20).await?;
//!     group.close().await?;
//!     Ok::<_, rdmc_sim::DeploymentError>(times)
//! })??;
//! let to_one = Duration::from_nanos((64 << 20) * 8 / 40);
//! assert!(times.latency() < to_one * 11 / 10);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod campaign;
mod control;
mod deployment;
mod environment;
pub mod experiments;
mod fabric;
mod flows;
mod host;
mod log;
mod model;
mod offload;
mod path;
pub mod plot;
mod queue_pair;
mod random;
mod scenario;
mod simulation;
mod tcp_model;
mod trace;
mod world;

pub use deployment::{Deployment, DeploymentError, FormedGroup, GroupPlan, MulticastTimes};
pub use fabric::SimFabric;
pub use log::Recorded;
pub use model::{ClusterModel, ControlModel, DelayModel, Distribution, HostModel, NicModel, RackModel, WaitMode};
pub use offload::{Offload, SendOrder};
pub use path::{PathModel, PolicerModel};
pub use random::Random;
pub use scenario::{
    Played, PlayedGroup, PlayedMessage, Scenario, ScenarioError, ScenarioEvent, ScenarioGroup, ScenarioMessage,
};
pub use simulation::{NodeIndex, Stalled};
pub use tcp_model::{Congestion, TcpModel};
pub use trace::to_trace;
pub use world::{FlippedBit, ModelError, Simulation, World};
