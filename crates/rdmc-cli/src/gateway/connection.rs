//! Whether the session of an entrance has its connection.
//!
//! A session opens another connection when it has lost one. So its entrance counts the connections that are opened.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc::Fabric;
use rdmc_fabric::{ControlListener, ControlStream, Environment, FabricDecorator, Timestamp};
use rdmc_wan::SessionHandle;
use tokio::sync::watch;

/// The connection of a session that this end has opened.
pub(super) struct Connection {
    session: SessionHandle,
    attempts: watch::Receiver<u64>,
    /// How often the session had been resumed when its connection was lost; `None` while it has one.
    lost_at: Option<u64>,
}

/// What happens to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Lost,
    /// The session goes on over another one.
    Resumed,
}

impl Connection {
    /// `attempts` counts those of the fabric by which the session was opened.
    pub(super) fn new(session: SessionHandle, mut attempts: watch::Receiver<u64>) -> Self {
        attempts.mark_unchanged();
        Self { session, attempts, lost_at: None }
    }

    /// Waits until the connection is lost, or the session goes on after that. If the future is dropped, nothing is
    /// lost.
    pub(super) async fn turn(&mut self) -> Turn {
        let Some(lost_at) = self.lost_at else {
            if self.attempts.changed().await.is_err() {
                // The session is over.
                std::future::pending::<()>().await;
            }
            self.lost_at = Some(self.session.stats().resumed);
            return Turn::Lost;
        };
        while self.session.stats().resumed == lost_at {
            tokio::time::sleep(TICK).await;
        }
        self.attempts.mark_unchanged();
        self.lost_at = None;
        Turn::Resumed
    }
}

/// Returns a fabric that counts the control connections which are opened by it, and the count.
pub(super) fn counting(fabric: Arc<dyn Fabric>) -> (Arc<dyn Fabric>, watch::Receiver<u64>) {
    let (attempts, counted) = watch::channel(0);
    let environment = Arc::new(CountingEnvironment { inner: fabric.environment(), attempts });
    (Arc::new(CountingFabric { inner: fabric, environment }), counted)
}

#[derive(Debug)]
struct CountingFabric {
    inner: Arc<dyn Fabric>,
    environment: Arc<CountingEnvironment>,
}

impl FabricDecorator for CountingFabric {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }
}

#[derive(Debug)]
struct CountingEnvironment {
    inner: Arc<dyn Environment>,
    attempts: watch::Sender<u64>,
}

#[deny(clippy::missing_trait_methods)]
impl Environment for CountingEnvironment {
    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
        self.inner.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.inner.spawn(task);
    }

    fn give_way(&self) -> BoxFuture<'static, ()> {
        self.inner.give_way()
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        self.inner.fill_random(bytes);
    }

    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
        self.inner.listen(address)
    }

    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        self.attempts.send_modify(|attempts| *attempts += 1);
        self.inner.connect(address)
    }
}

/// How often it is looked whether a session was resumed.
const TICK: Duration = Duration::from_millis(100);
