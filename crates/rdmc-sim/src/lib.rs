//! The unchanged runtime on a modelled network in virtual time.

#![forbid(unsafe_code)]

mod control;
mod deployment;
mod environment;
pub mod experiments;
mod fabric;
mod flows;
mod host;
mod log;
mod model;
pub mod plot;
mod queue_pair;
mod random;
mod scenario;
mod simulation;
mod trace;
mod world;

pub use deployment::{Deployment, DeploymentError, FormedGroup, GroupPlan, MulticastTimes};
pub use fabric::SimFabric;
pub use log::Recorded;
pub use model::{ClusterModel, Completion, ControlModel, DelayModel, Distribution, HostModel, NicModel, RackModel};
pub use random::Random;
pub use scenario::{
    Played, PlayedGroup, PlayedMessage, Scenario, ScenarioError, ScenarioEvent, ScenarioGroup, ScenarioMessage,
};
pub use simulation::{NodeIndex, Stalled};
pub use trace::to_trace;
pub use world::{ModelError, Simulation, World};
