//! An open device: its context, protection domain, limits and asynchronous events.

use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::time::MissedTickBehavior;

use rdmc_fabric::WorkError;

use crate::connection::{Connection, LOOK_INTERVAL};
use crate::devices::DeviceChoice;
use crate::error::VerbsError;
use crate::sys::{
    self, Library, ibv_async_event, ibv_context, ibv_context_ops, ibv_device, ibv_device_attr, ibv_pd, ibv_port_attr,
};

/// An open device. Every object that was created on it keeps it open.
pub(crate) struct Device {
    pub(crate) library: &'static Library,
    pub(crate) context: NonNull<ibv_context>,
    pub(crate) pd: NonNull<ibv_pd>,
    pub(crate) ops: ibv_context_ops,
    pub(crate) choice: DeviceChoice,
    pub(crate) attributes: ibv_device_attr,
    pub(crate) port: ibv_port_attr,
    /// Number of registered memory regions.
    pub(crate) regions: AtomicU32,
    /// The queue pairs that the device's events may name, by address.
    connections: Mutex<HashMap<usize, Weak<Connection>>>,
}

// SAFETY: contexts and protection domains of libibverbs may be used from any thread, at the same time.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the chosen device. `library` must be loaded, so that a missing library is reported as such.
    pub(crate) fn open(library: &'static Library, choice: DeviceChoice) -> Result<Arc<Self>, VerbsError> {
        let failed = |action| {
            let device = choice.device.clone();
            move |source| VerbsError::Device { device, action, source }
        };
        allow_forks(library);
        let context = open_context(library, &choice.device).map_err(failed("open the device"))?;
        // SAFETY: the context is open.
        let pd = unsafe { (library.ibv_alloc_pd)(context.as_ptr()) };
        let Some(pd) = NonNull::new(pd) else {
            let error = io::Error::last_os_error();
            // SAFETY: the context is open and nothing was created on it.
            unsafe { (library.ibv_close_device)(context.as_ptr()) };
            return Err(failed("allocate a protection domain")(error));
        };
        // SAFETY: an open context is initialised up to the fields declared.
        let ops = unsafe { context.as_ref() }.ops;
        // SAFETY: all fields are numbers, for which zero is a value.
        let attributes = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let port = unsafe { std::mem::zeroed() };
        let connections = Mutex::default();
        let regions = AtomicU32::new(0);
        let mut device = Self { library, context, pd, ops, choice, attributes, port, regions, connections };
        let failed = |action| {
            let device = device.choice.device.clone();
            move |source| VerbsError::Device { device, action, source }
        };
        let (no_attributes, no_port) = (failed("query the device"), failed("query the port"));
        // SAFETY: the context is open, the struct has the library's layout.
        let queried = unsafe { (library.ibv_query_device)(context.as_ptr(), &mut device.attributes) };
        check(queried).map_err(no_attributes)?;
        // SAFETY: as above.
        let queried = unsafe { (library.ibv_query_port)(context.as_ptr(), device.choice.port, &mut device.port) };
        check(queried).map_err(no_port)?;
        Ok(Arc::new(device))
    }

    /// Makes the device's events reach a queue pair.
    pub(crate) fn watch(&self, connection: &Arc<Connection>) {
        self.connections().insert(connection.address(), Arc::downgrade(connection));
    }

    /// Forgets a queue pair that is about to be destroyed.
    pub(crate) fn unwatch(&self, address: usize) {
        self.connections().remove(&address);
    }

    /// Starts the task that takes the device's events and looks after its connections; dropping the result ends it.
    pub(crate) fn take_events(self: &Arc<Self>) -> io::Result<oneshot::Sender<()>> {
        // SAFETY: an open context is initialised up to the fields declared.
        let fd = unsafe { self.context.as_ref() }.async_fd;
        let fd = await_on(fd)?;
        let (end, mut ended) = oneshot::channel();
        let device = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut looks = tokio::time::interval(LOOK_INTERVAL);
            looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let ready = tokio::select! {
                    _ = &mut ended => return,
                    ready = fd.readable() => match ready { Ok(ready) => Some(ready), Err(_) => return },
                    _ = looks.tick() => None,
                };
                let Some(device) = device.upgrade() else { return };
                let Some(mut ready) = ready else {
                    device.look_for_progress();
                    continue;
                };
                while let Some(event) = device.next_event() {
                    device.handle(event);
                }
                ready.clear_ready();
            }
        });
        Ok(end)
    }

    fn look_for_progress(&self) {
        // The lock is released before: to drop the last handle of a connection takes it.
        let connections: Vec<_> = self.connections().values().filter_map(Weak::upgrade).collect();
        connections.iter().for_each(|connection| connection.look_for_progress());
    }

    fn next_event(&self) -> Option<ibv_async_event> {
        let mut event = ibv_async_event { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: the context is open, the struct has the library's layout; its descriptor does not block.
        let taken = unsafe { (self.library.ibv_get_async_event)(self.context.as_ptr(), &mut event) };
        (taken == 0).then_some(event)
    }

    fn handle(&self, mut event: ibv_async_event) {
        let device = &self.choice.device;
        let element = event.element as usize;
        let broken = match event.event_type {
            sys::IBV_EVENT_QP_FATAL | sys::IBV_EVENT_QP_REQ_ERR | sys::IBV_EVENT_QP_ACCESS_ERR => {
                tracing::debug!(device, event = event.event_type, "the device broke a queue pair");
                self.connections().get(&element).and_then(Weak::upgrade).into_iter().collect()
            }
            sys::IBV_EVENT_DEVICE_FATAL | sys::IBV_EVENT_CQ_ERR => {
                tracing::error!(device, event = event.event_type, "the device failed; its queue pairs are broken");
                self.connections().values().filter_map(Weak::upgrade).collect()
            }
            sys::IBV_EVENT_PORT_ERR => {
                tracing::warn!(
                    device,
                    "a port went down; transfers wait until it is up again or their connections are lost"
                );
                Vec::new()
            }
            sys::IBV_EVENT_PORT_ACTIVE => {
                tracing::info!(device, "a port came up");
                Vec::new()
            }
            other => {
                tracing::debug!(device, event = other, "event of the device");
                Vec::new()
            }
        };
        // SAFETY: the event was taken from this library and is acknowledged once. Before anything may destroy its
        // queue pair, since destroying waits for the acknowledgement.
        unsafe { (self.library.ibv_ack_async_event)(&mut event) };
        for connection in broken {
            connection.break_with(WorkError::ConnectionLost);
        }
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, HashMap<usize, Weak<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: all objects of the protection domain kept the device alive, so they are gone.
        let deallocated = unsafe { (self.library.ibv_dealloc_pd)(self.pd.as_ptr()) };
        // SAFETY: as above, for the context.
        let closed = unsafe { (self.library.ibv_close_device)(self.context.as_ptr()) };
        if deallocated != 0 || closed != 0 {
            tracing::warn!(device = self.choice.device, deallocated, closed, "the device was not closed cleanly");
        }
    }
}

/// Prevents a fork, such as the start of a child process, from moving pages that a device writes. Older kernels and
/// libraries need this call before the first registration.
fn allow_forks(library: &Library) {
    // SAFETY: takes nothing, may be called at any time.
    let status = unsafe { (library.ibv_is_fork_initialized)() };
    if status == sys::IBV_FORK_DISABLED {
        // SAFETY: as above; too late if other code registered memory before, which it then reports.
        let code = unsafe { (library.ibv_fork_init)() };
        if code != 0 {
            tracing::warn!(code, "libibverbs cannot protect registered memory in forks; do not start child processes");
        }
    }
}

fn open_context(library: &Library, name: &str) -> io::Result<NonNull<ibv_context>> {
    let mut count: c_int = 0;
    // SAFETY: `count` is written, the result is a list ended by null.
    let list = unsafe { (library.ibv_get_device_list)(&mut count) };
    let list = NonNull::new(list).ok_or_else(io::Error::last_os_error)?;
    let mut opened = Err(io::Error::new(
        io::ErrorKind::NotFound,
        "libibverbs does not know the device; is its driver (Debian: ibverbs-providers) installed?",
    ));
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries.
        let entry: *mut ibv_device = unsafe { list.as_ptr().wrapping_add(at).read() };
        // SAFETY: the entry is a device of the list.
        let found = unsafe { (library.ibv_get_device_name)(entry) };
        // SAFETY: the name is a C string inside the device.
        if unsafe { CStr::from_ptr(found) }.to_bytes() == name.as_bytes() {
            // SAFETY: the entry is a device of the list.
            let context = unsafe { (library.ibv_open_device)(entry) };
            opened = NonNull::new(context).ok_or_else(|| {
                let error = io::Error::last_os_error();
                explain_open_failure(Path::new(SYSFS_VERBS), Path::new("/dev/infiniband"), name).unwrap_or(error)
            });
            break;
        }
    }
    // SAFETY: the list came from the library; an open context does not need it.
    unsafe { (library.ibv_free_device_list)(list.as_ptr()) };
    opened
}

/// Returns why the file of a device cannot be opened; `None` if it can.
///
/// The library reports "No such file or directory" in all cases.
fn explain_open_failure(classes: &Path, nodes: &Path, device: &str) -> Option<io::Error> {
    let is_of_device = |class: &PathBuf| fs::read_to_string(class.join("ibdev")).is_ok_and(|of| of.trim() == device);
    let classes = fs::read_dir(classes).ok()?.flatten().map(|class| class.path());
    let node = classes.filter(|class| is_of_device(class)).find_map(|class| Some(nodes.join(class.file_name()?)))?;
    let error = fs::File::options().read(true).write(true).open(&node).err()?;
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => "; give this user access to it, usually by a group",
        io::ErrorKind::NotFound => "; load the module ib_uverbs, or pass the file into the container",
        _ => "",
    };
    Some(io::Error::new(error.kind(), format!("{}: {error}{remedy}", node.display())))
}

/// The directory in which the kernel lists the devices' files.
const SYSFS_VERBS: &str = "/sys/class/infiniband_verbs";

/// Makes a descriptor of the library awaitable. The result is a duplicate; both descriptors become non-blocking.
pub(crate) fn await_on(fd: c_int) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the caller gives a descriptor of an open device or channel, which stays open meanwhile.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    let own = fd.try_clone_to_owned()?;
    // SAFETY: an `OwnedFd` is always the same descriptor and closes it only when dropped.
    let registered = unsafe { AsyncFd::register_with_interest(own, tokio::io::Interest::READABLE) };
    Ok(registered?)
}

/// Translates a function's result, which is an error number, to an error.
pub(crate) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Some functions of some versions return -1 and set the thread's error number.
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_whose_file_is_missing_is_told_from_others() {
        let root = tempfile::tempdir().unwrap();
        let [classes, nodes] = ["classes", "nodes"].map(|name| root.path().join(name));
        for (class, device) in [("uverbs0", "rxe1"), ("uverbs1", "rxe2")] {
            fs::create_dir_all(classes.join(class)).unwrap();
            fs::write(classes.join(class).join("ibdev"), format!("{device}\n")).unwrap();
        }
        fs::create_dir(&nodes).unwrap();
        fs::write(nodes.join("uverbs0"), "").unwrap();
        assert!(explain_open_failure(&classes, &nodes, "rxe1").is_none());
        let missing = explain_open_failure(&classes, &nodes, "rxe2").unwrap().to_string();
        assert!(missing.contains("nodes/uverbs1: ") && missing.contains("load the module ib_uverbs"), "{missing}");
        assert!(explain_open_failure(&classes, &nodes, "rxe3").is_none());
        assert!(explain_open_failure(&root.path().join("none"), &nodes, "rxe1").is_none());
    }
}
