//! How a fabric or a queue pair wraps another one.
//!
//! A decorator implements [`FabricDecorator`] or [`QueuePairDecorator`] instead of [`Fabric`] or [`RawQueuePair`]. It
//! names the inner one and overrides the methods that it changes; all others are forwarded. The lint on each blanket
//! implementation requires every method, also those with a default, so that a new method cannot be forgotten.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource};
use crate::environment::Environment;
use crate::fabric::{Capabilities, ConnectError, Endpoint, Fabric, FabricError, Peer, QueuePairConfig, RawQueuePair};
use crate::memory::{AttachError, Buffer, Memory, MemoryRegion, ObjectDescriptor, ObjectShare, SharedObject};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion};
use crate::work::{QueuePairId, WorkRequest};

/// A fabric that wraps another one; every method forwards to the inner fabric unless it is overridden.
///
/// An overridden method affects direct calls only: if [`register`](Self::register) is overridden, for example,
/// [`allocate`](Self::allocate) still calls the inner fabric's own registration.
///
/// # Examples
/// A fabric that claims not to share objects:
/// ```
/// use std::sync::Arc;
/// use rdmc_fabric::{Capabilities, Fabric, FabricDecorator, MemNetwork};
///
/// #[derive(Debug)]
/// struct Unshared(Arc<dyn Fabric>);
///
/// impl FabricDecorator for Unshared {
///     fn inner(&self) -> &dyn Fabric {
///         &*self.0
///     }
///
///     fn capabilities(&self) -> Capabilities {
///         let mut capabilities = self.0.capabilities();
///         capabilities.shares_objects = false;
///         capabilities
///     }
/// }
///
/// let fabric: Arc<dyn Fabric> = Arc::new(Unshared(MemNetwork::new().fabric()));
/// assert!(!fabric.capabilities().shares_objects);
/// ```
pub trait FabricDecorator: Send + Sync + fmt::Debug {
    /// Returns the fabric that is wrapped.
    fn inner(&self) -> &dyn Fabric;

    /// Does what [`Fabric::capabilities`] does.
    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }

    /// Does what [`Fabric::environment`] does.
    fn environment(&self) -> Arc<dyn Environment> {
        self.inner().environment()
    }

    /// Does what [`Fabric::connect_ahead`] does.
    fn connect_ahead(&self, address: &str, connections: u16) {
        self.inner().connect_ahead(address, connections);
    }

    /// Does what [`Fabric::register`] does.
    ///
    /// # Errors
    /// As [`Fabric::register`].
    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        self.inner().register(memory)
    }

    /// Does what [`Fabric::allocate`] does.
    ///
    /// # Errors
    /// As [`Fabric::allocate`].
    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.inner().allocate(len)
    }

    /// Does what [`Fabric::expose`] does.
    ///
    /// # Errors
    /// As [`Fabric::expose`].
    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        self.inner().expose(memory)
    }

    /// Does what [`Fabric::create_completion_queue`] does.
    ///
    /// # Errors
    /// As [`Fabric::create_completion_queue`].
    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        self.inner().create_completion_queue(capacity, mode)
    }

    /// Does what [`Fabric::create_queue_pair`] does. [`QueuePair::map_raw`] wraps the result.
    ///
    /// # Errors
    /// As [`Fabric::create_queue_pair`].
    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        self.inner().create_queue_pair(completions, config)
    }

    /// Does what [`Fabric::share`] does.
    ///
    /// # Errors
    /// As [`Fabric::share`].
    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        self.inner().share(object)
    }

    /// Does what [`Fabric::attach`] does.
    ///
    /// # Cancel safety
    /// As [`Fabric::attach`].
    ///
    /// # Errors
    /// As [`Fabric::attach`].
    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        self.inner().attach(object)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<D: FabricDecorator> Fabric for D {
    fn capabilities(&self) -> Capabilities {
        FabricDecorator::capabilities(self)
    }

    fn environment(&self) -> Arc<dyn Environment> {
        FabricDecorator::environment(self)
    }

    fn connect_ahead(&self, address: &str, connections: u16) {
        FabricDecorator::connect_ahead(self, address, connections);
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        FabricDecorator::register(self, memory)
    }

    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        FabricDecorator::allocate(self, len)
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        FabricDecorator::expose(self, memory)
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        FabricDecorator::create_completion_queue(self, capacity, mode)
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        FabricDecorator::create_queue_pair(self, completions, config)
    }

    fn share(&self, object: &SharedObject) -> Result<ObjectShare, FabricError> {
        FabricDecorator::share(self, object)
    }

    fn attach(&self, object: ObjectDescriptor) -> BoxFuture<'static, Result<Buffer, AttachError>> {
        FabricDecorator::attach(self, object)
    }
}

/// A queue pair that wraps another one; every method forwards to the inner queue pair unless it is overridden.
pub trait QueuePairDecorator: Send + Sync {
    /// Returns the queue pair that is wrapped.
    fn inner(&self) -> &dyn RawQueuePair;

    /// Does what [`RawQueuePair::id`] does.
    fn id(&self) -> QueuePairId {
        self.inner().id()
    }

    /// Does what [`RawQueuePair::endpoint`] does.
    fn endpoint(&self) -> Endpoint {
        self.inner().endpoint()
    }

    /// Does what [`RawQueuePair::pace`] does.
    fn pace(&self, bytes_per_second: Option<u64>) {
        self.inner().pace(bytes_per_second);
    }

    /// Does what [`RawQueuePair::connect`] does.
    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        self.inner().connect(peer)
    }

    /// Does what [`RawQueuePair::post`] does.
    fn post(&self, request: WorkRequest) {
        self.inner().post(request);
    }

    /// Does what [`RawQueuePair::flush`] does.
    fn flush(&self) {
        self.inner().flush();
    }

    /// Does what [`RawQueuePair::carrier`] does.
    fn carrier(&self) -> Option<&'static str> {
        self.inner().carrier()
    }

    /// Does what [`RawQueuePair::close`] does.
    fn close(&self) {
        self.inner().close();
    }
}

#[deny(clippy::missing_trait_methods)]
impl<D: QueuePairDecorator> RawQueuePair for D {
    fn id(&self) -> QueuePairId {
        QueuePairDecorator::id(self)
    }

    fn endpoint(&self) -> Endpoint {
        QueuePairDecorator::endpoint(self)
    }

    fn pace(&self, bytes_per_second: Option<u64>) {
        QueuePairDecorator::pace(self, bytes_per_second);
    }

    fn connect(&self, peer: Peer) -> BoxFuture<'static, Result<(), ConnectError>> {
        QueuePairDecorator::connect(self, peer)
    }

    fn post(&self, request: WorkRequest) {
        QueuePairDecorator::post(self, request);
    }

    fn flush(&self) {
        QueuePairDecorator::flush(self);
    }

    fn carrier(&self) -> Option<&'static str> {
        QueuePairDecorator::carrier(self)
    }

    fn close(&self) {
        QueuePairDecorator::close(self);
    }
}
