//! A completion queue of the device as a completion source: polled, or awaited through its channel's descriptor.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures::task::AtomicWaker;
use rdmc_fabric::{Completed, CompletionSource, FabricError};
use tokio::io::unix::AsyncFd;

use crate::connection::Connection;
use crate::device::{Device, await_on, check};
use crate::sys::{ibv_comp_channel, ibv_cq, ibv_wc};

/// The device's completion queue with its channel.
pub(crate) struct Cq {
    device: Arc<Device>,
    channel: NonNull<ibv_comp_channel>,
    cq: NonNull<ibv_cq>,
    /// Events that were taken and must be acknowledged before the queue is destroyed.
    events: AtomicU32,
}

// SAFETY: completion queues and channels of libibverbs may be used from any thread, at the same time.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    fn create(device: &Arc<Device>, entries: u32) -> Result<Self, FabricError> {
        let library = device.library;
        // SAFETY: the context is open.
        let channel = unsafe { (library.ibv_create_comp_channel)(device.context.as_ptr()) };
        let channel = NonNull::new(channel).ok_or_else(refused("a completion channel"))?;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let no_context = std::ptr::null_mut();
        // SAFETY: context and channel are open; vector 0 exists on every device.
        let cq = unsafe { (library.ibv_create_cq)(device.context.as_ptr(), entries, no_context, channel.as_ptr(), 0) };
        match NonNull::new(cq) {
            Some(cq) => Ok(Self { device: device.clone(), channel, cq, events: AtomicU32::new(0) }),
            None => {
                let error = refused("a completion queue")();
                // SAFETY: the channel was created above and nothing uses it.
                unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
                Err(error)
            }
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut ibv_cq {
        self.cq.as_ptr()
    }

    fn resize(&self, entries: u32) -> io::Result<()> {
        // SAFETY: the queue lives.
        check(unsafe { (self.device.library.ibv_resize_cq)(self.cq.as_ptr(), entries.cast_signed()) })
    }

    /// Fills `room` with completions and returns their number.
    fn poll(&self, room: &mut [ibv_wc]) -> usize {
        let poll = self.device.ops.poll_cq.expect("every driver polls");
        let len = c_int::try_from(room.len()).expect("a small array");
        // SAFETY: the queue lives, the room has `len` entries of the library's layout.
        let count = unsafe { poll(self.cq.as_ptr(), len, room.as_mut_ptr()) };
        usize::try_from(count).unwrap_or_else(|_| {
            tracing::error!(count, "the completion queue could not be polled");
            0
        })
    }

    /// Requests an event for the next completion.
    fn arm(&self) {
        let arm = self.device.ops.req_notify_cq.expect("every driver notifies");
        // SAFETY: the queue lives; 0 asks for every completion.
        let code = unsafe { arm(self.cq.as_ptr(), 0) };
        if code != 0 {
            tracing::error!(code, "the completion queue could not be armed");
        }
    }

    /// Takes an event from the channel, if there is one.
    fn take_event(&self) -> bool {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel lives and its descriptor does not block.
        let code = unsafe { (self.device.library.ibv_get_cq_event)(self.channel.as_ptr(), &mut cq, &mut context) };
        if code == 0 && self.events.fetch_add(1, Ordering::Relaxed) + 1 >= EVENTS_UNACKNOWLEDGED_MAX {
            self.acknowledge_events();
        }
        code == 0
    }

    fn acknowledge_events(&self) {
        let events = self.events.swap(0, Ordering::Relaxed);
        if events > 0 {
            // SAFETY: the queue lives; that many events were taken and not acknowledged.
            unsafe { (self.device.library.ibv_ack_cq_events)(self.cq.as_ptr(), events) };
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.acknowledge_events();
        // SAFETY: queue pairs keep their completion queue alive, so none is left.
        let queue = unsafe { (self.device.library.ibv_destroy_cq)(self.cq.as_ptr()) };
        // SAFETY: the only queue of the channel is gone.
        let channel = unsafe { (self.device.library.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
        if queue != 0 || channel != 0 {
            tracing::warn!(queue, channel, "a completion queue was not destroyed cleanly");
        }
    }
}

pub(crate) fn refused(what: &'static str) -> impl FnOnce() -> FabricError {
    move || FabricError::Device { what, source: io::Error::last_os_error() }
}

/// The source behind a [`CompletionQueue`](rdmc_fabric::CompletionQueue).
///
/// Locks are taken in this order: `device_side`, `connections`, a connection's own lock, `ready`.
pub(crate) struct Completions {
    pub(crate) cq: Arc<Cq>,
    fd: AsyncFd<OwnedFd>,
    device_side: Mutex<DeviceSide>,
    /// Queue pairs that may still complete work, by the number in their work requests.
    connections: Mutex<HashMap<u32, Arc<Connection>>>,
    /// Completed requests that were not taken yet.
    ready: Mutex<VecDeque<Completed>>,
    /// The task that waits for `ready`.
    waker: AtomicWaker,
    reservations: Mutex<Reservations>,
    capacity: u32,
}

struct DeviceSide {
    /// Whether an event will come with the next completion.
    armed: bool,
    polled: [ibv_wc; POLLED_MAX],
}

/// Reserved entries of the queue.
struct Reservations {
    /// Reserved entries, as users count them.
    reserved: u32,
    /// Entries of the device's queue that may be in use at once.
    needed: u32,
    /// Entries of the device's queue.
    entries: u32,
}

impl Completions {
    pub(crate) fn create(device: &Arc<Device>, capacity: u32) -> Result<Self, FabricError> {
        let entries = capacity.clamp(1, ENTRIES_AT_FIRST);
        let cq = Cq::create(device, entries)?;
        // SAFETY: the channel is initialised and lives.
        let fd = unsafe { cq.channel.as_ref() }.fd;
        let awaited = await_on(fd)
            .map_err(|source| FabricError::Device { what: "a completion channel to be awaited", source })?;
        // SAFETY: all fields are numbers, for which zero is a value.
        let polled = unsafe { std::mem::zeroed() };
        Ok(Self {
            cq: Arc::new(cq),
            fd: awaited,
            device_side: Mutex::new(DeviceSide { armed: false, polled }),
            connections: Mutex::default(),
            ready: Mutex::default(),
            waker: AtomicWaker::new(),
            reservations: Mutex::new(Reservations { reserved: 0, needed: 0, entries }),
            capacity,
        })
    }

    /// Returns the `Completions` behind `source`, if it is one.
    pub(crate) fn of(source: &Arc<dyn CompletionSource>) -> Option<Arc<Self>> {
        let any: Arc<dyn Any + Send + Sync> = source.clone();
        any.downcast().ok()
    }

    pub(crate) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.cq.device, device)
    }

    /// Adds requests that were completed without the device.
    pub(crate) fn push(&self, completed: impl IntoIterator<Item = Completed>) {
        let mut ready = lock(&self.ready);
        let before = ready.len();
        ready.extend(completed);
        let any = ready.len() > before;
        drop(ready);
        if any {
            self.waker.wake();
        }
    }

    /// Routes completions to `connection` from now on.
    pub(crate) fn attach(&self, connection: &Arc<Connection>) {
        lock(&self.connections).insert(connection.number(), connection.clone());
    }

    /// Forgets a connection that will complete no more work.
    pub(crate) fn detach(&self, number: u32) {
        let gone = lock(&self.connections).remove(&number);
        // Destroying a queue pair takes a while, so it happens outside the lock.
        drop(gone);
    }

    /// Reserves entries of the device's queue, in addition to those that [`reserve`](CompletionSource::reserve) counts.
    pub(crate) fn grow(&self, entries: u32) -> Result<(), FabricError> {
        let mut reservations = lock(&self.reservations);
        let needed = reservations.needed.saturating_add(entries);
        if needed > reservations.entries {
            let wanted = needed.next_power_of_two().max(ENTRIES_AT_FIRST);
            let max = u32::try_from(self.cq.device.attributes.max_cqe).unwrap_or(0);
            let entries = wanted.min(max);
            let refused = |source| FabricError::Device {
                what: "the completion queue larger; make more nodes or fewer groups",
                source,
            };
            if entries < needed {
                return Err(FabricError::Limit {
                    what: "entries of a completion queue",
                    wanted: needed.into(),
                    max: max.into(),
                });
            }
            self.cq.resize(entries).map_err(refused)?;
            tracing::debug!(entries, "completion queue resized");
            reservations.entries = entries;
        }
        reservations.needed = needed;
        Ok(())
    }

    /// Releases what [`grow`](Self::grow) has reserved.
    pub(crate) fn shrink(&self, entries: u32) {
        lock(&self.reservations).needed -= entries;
    }

    /// Takes completions from the device; returns whether there were any.
    fn poll_device(&self, side: &mut DeviceSide) -> bool {
        let count = self.cq.poll(&mut side.polled);
        for wc in &side.polled[..count] {
            let number = Connection::number_in(wc.wr_id);
            let connection = lock(&self.connections).get(&number).cloned();
            match connection {
                Some(connection) => connection.complete(wc, |completed| lock(&self.ready).push_back(completed)),
                None => tracing::debug!(number, "completion of a queue pair that is gone"),
            }
        }
        count > 0
    }
}

impl CompletionSource for Completions {
    fn poll(&self) -> Option<Completed> {
        let next = lock(&self.ready).pop_front();
        if next.is_some() {
            return next;
        }
        let mut side = lock(&self.device_side);
        while self.poll_device(&mut side) {
            // A polled completion may complete no request: it may mark that a queue is drained.
            if let Some(next) = lock(&self.ready).pop_front() {
                return Some(next);
            }
        }
        None
    }

    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.waker.register(cx.waker());
        let mut side = lock(&self.device_side);
        loop {
            match self.fd.poll_read_ready(cx) {
                Poll::Ready(Ok(mut guard)) => {
                    // Each arming brings one event, so one look is enough.
                    if self.cq.take_event() {
                        side.armed = false;
                    }
                    guard.clear_ready();
                }
                Poll::Ready(Err(error)) => {
                    tracing::error!(%error, "the completion channel cannot be awaited any more");
                    return Poll::Pending;
                }
                Poll::Pending if side.armed => break,
                Poll::Pending => {}
            }
            if !side.armed {
                // On a busy machine other tasks run now, also those that cause the next completions: many completions
                // then share one sleep and one wake-up. On an idle machine it costs next to nothing.
                std::thread::yield_now();
                if self.poll_device(&mut side) {
                    return Poll::Ready(());
                }
                self.cq.arm();
                side.armed = true;
                // A completion that came before the arming brings no event.
                if self.poll_device(&mut side) {
                    return Poll::Ready(());
                }
            }
        }
        drop(side);
        if lock(&self.ready).is_empty() { Poll::Pending } else { Poll::Ready(()) }
    }

    fn reserve(&self, entries: u32) -> Result<(), FabricError> {
        let mut reservations = lock(&self.reservations);
        match reservations.reserved.checked_add(entries).filter(|&sum| sum <= self.capacity) {
            Some(sum) => {
                reservations.reserved = sum;
                Ok(())
            }
            None => Err(FabricError::CompletionQueueFull {
                capacity: self.capacity,
                reserved: reservations.reserved,
                wanted: entries,
            }),
        }
    }

    fn release(&self, entries: u32) {
        lock(&self.reservations).reserved -= entries;
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // Queue pairs are dropped first: once they are destroyed, the device touches no memory of their requests.
        lock(&self.connections).clear();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Entries of a device's queue before queue pairs reserve more.
const ENTRIES_AT_FIRST: u32 = 1024;
/// Most completions taken from the device at once.
const POLLED_MAX: usize = 32;
/// Most events taken before they are acknowledged; each acknowledgement costs a lock.
const EVENTS_UNACKNOWLEDGED_MAX: u32 = 64;
