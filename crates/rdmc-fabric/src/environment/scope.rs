//! Background tasks that end with their owner.

use std::sync::Arc;

use futures::future::{BoxFuture, Either, select};
use tokio::sync::watch;

use crate::environment::Environment;

/// Spawns tasks that end with the scope, at their next await.
#[derive(Debug)]
pub struct Scope {
    environment: Arc<dyn Environment>,
    alive: watch::Sender<bool>,
}

impl Scope {
    /// Creates a scope without tasks.
    pub fn new(environment: Arc<dyn Environment>) -> Self {
        Self { environment, alive: watch::Sender::new(true) }
    }

    /// Runs `task` until it ends or the scope does.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawner().spawn(Box::pin(task));
    }

    /// Ends all tasks, and all that are spawned later.
    pub fn end(&self) {
        self.alive.send_replace(false);
    }

    /// Returns a way to spawn into the scope that does not keep it alive.
    pub fn spawner(&self) -> Spawner {
        Spawner { environment: self.environment.clone(), alive: self.alive.subscribe() }
    }
}

/// Spawns into a [`Scope`] from inside one of its tasks.
#[derive(Clone, Debug)]
pub struct Spawner {
    environment: Arc<dyn Environment>,
    alive: watch::Receiver<bool>,
}

impl Spawner {
    /// Runs `task` until it ends or the scope does.
    pub fn spawn(&self, task: BoxFuture<'static, ()>) {
        let mut alive = self.alive.clone();
        self.environment.spawn(Box::pin(async move {
            // An error says that the scope is gone.
            let gone = std::pin::pin!(alive.wait_for(|alive| !alive));
            match select(task, gone).await {
                Either::Left(_) | Either::Right(_) => {}
            }
        }));
    }
}
