//! Wraps a fabric so that a profile shows its node's tasks apart from all others.

use std::fmt;
use std::hint::black_box;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use rdmc::Fabric;
use rdmc_fabric::{ControlListener, ControlStream, Environment, FabricDecorator, Timestamp};

/// Wraps a fabric: the tasks of its node run inside [`poll_at_root`] or [`poll_at_receiver`], the fabric's own tasks do
/// not.
#[derive(Debug)]
pub(crate) struct Attributed {
    inner: Arc<dyn Fabric>,
    environment: Arc<AttributedEnvironment>,
}

impl Attributed {
    pub(crate) fn new(inner: Arc<dyn Fabric>, at_root: bool) -> Arc<Self> {
        let environment = Arc::new(AttributedEnvironment { inner: inner.environment(), at_root });
        Arc::new(Self { inner, environment })
    }
}

impl FabricDecorator for Attributed {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }
}

struct AttributedEnvironment {
    inner: Arc<dyn Environment>,
    at_root: bool,
}

impl fmt::Debug for AttributedEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttributedEnvironment").field("at_root", &self.at_root).finish_non_exhaustive()
    }
}

impl Environment for AttributedEnvironment {
    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
        self.inner.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.inner.spawn(Box::pin(AttributedTask { task, at_root: self.at_root }));
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        self.inner.fill_random(bytes);
    }

    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
        self.inner.listen(address)
    }

    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        self.inner.connect(address)
    }
}

struct AttributedTask {
    task: BoxFuture<'static, ()>,
    at_root: bool,
}

impl Future for AttributedTask {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.at_root { poll_at_root(&mut self.task, cx) } else { poll_at_receiver(&mut self.task, cx) }
    }
}

/// Polls a task of the root, so that a profile shows it.
///
/// The result passes through a black box after the call, so that the compiler makes no jump of the call. It is another
/// black box than below, so that the compiler does not merge the two functions.
#[inline(never)]
fn poll_at_root(task: &mut BoxFuture<'static, ()>, cx: &mut Context<'_>) -> Poll<()> {
    let outcome = task.as_mut().poll(cx);
    black_box((outcome, "root")).0
}

/// Polls a task of a receiver, so that a profile shows it.
#[inline(never)]
fn poll_at_receiver(task: &mut BoxFuture<'static, ()>, cx: &mut Context<'_>) -> Poll<()> {
    let outcome = task.as_mut().poll(cx);
    black_box((outcome, "receiver")).0
}
