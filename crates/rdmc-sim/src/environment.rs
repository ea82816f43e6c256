//! The environment of a modelled node: virtual time, seeded randomness, modelled control connections.

use std::fmt;
use std::io;

use futures::future::BoxFuture;
use rdmc_fabric::{ControlListener, ControlStream, Environment, Timestamp};

use crate::control::Control;
use crate::simulation::{NodeIndex, lock};
use crate::world::World;

/// The environment of one node, in place of an operating system.
pub(crate) struct SimEnvironment {
    world: World,
    node: NodeIndex,
}

impl SimEnvironment {
    pub(crate) fn new(world: World, node: NodeIndex) -> Self {
        Self { world, node }
    }
}

impl fmt::Debug for SimEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimEnvironment").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Environment for SimEnvironment {
    fn now(&self) -> Timestamp {
        self.world.now()
    }

    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
        Box::pin(self.world.0.executor.sleep_until(at))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.world.spawn_on(self.node, task);
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        lock(&self.world.0.random).fill(bytes);
    }

    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
        let listening = Control::listen(&self.world.0, self.node, address);
        Box::pin(async move { listening })
    }

    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        Box::pin(Control::connect(self.world.0.clone(), self.node, address.to_owned()))
    }
}
