//! How much memory this process may lock. Registered memory stays in memory, and is locked thereby.

use std::fmt;

use rdmc::Fabric;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::size::{ByteSize, PAGE};

/// The limit of locked memory of this process, `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lockable {
    /// In bytes; `None` if there is no limit.
    limit: Option<u64>,
    /// Whether this user is exempt from the limit.
    exempt: bool,
}

impl Lockable {
    /// No limit, or no registered memory.
    pub const WITHOUT_LIMIT: Self = Self { limit: None, exempt: false };

    /// Makes a limit that applies.
    pub fn up_to(bytes: u64) -> Self {
        Self { limit: Some(bytes), exempt: false }
    }

    /// Finds the limit. Registers memory of `fabric` to find whether the limit applies to this user.
    ///
    /// Nothing else in the process may register memory meanwhile.
    pub fn find(fabric: Option<&dyn Fabric>) -> Self {
        let limit = getrlimit(Resource::Memlock).current;
        let exempt = limit.is_some() && fabric.is_some_and(is_exempt);
        Self { limit, exempt }
    }

    /// Returns how many bytes of messages may be registered if `beside` bytes are registered for other purposes.
    pub fn room(self, beside: u64) -> u64 {
        match self.limit {
            Some(limit) if !self.exempt => {
                let rest = limit.saturating_sub(LOCKED_BYTES_BESIDE).saturating_sub(beside);
                rest - rest % PAGE
            }
            _ => u64::MAX,
        }
    }

    /// Checks that so many bytes of messages may be registered.
    ///
    /// # Errors
    /// How much may be locked, and how much would be needed.
    pub fn check(self, bytes: u64) -> Result<(), String> {
        if bytes <= self.room(0) {
            return Ok(());
        }
        // Rounded up, so that a limit of this size suffices.
        let needed_mib = bytes.saturating_add(LOCKED_BYTES_BESIDE).div_ceil(1 << 20);
        Err(format!("memory may be locked {self} only (RLIMIT_MEMLOCK), where RDMA needs {needed_mib} MiB"))
    }
}

impl fmt::Display for Lockable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            None => f.write_str("without limit"),
            Some(limit) if self.exempt => write!(f, "up to {}, but by this user without limit", ByteSize(limit)),
            Some(limit) => write!(f, "up to {}", ByteSize(limit)),
        }
    }
}

/// Tells whether this user is exempt from the limit: registers a page while the limit is 0.
///
/// The capability does not tell, because the kernel checks it outside of all user namespaces.
fn is_exempt(fabric: &dyn Fabric) -> bool {
    let limit = getrlimit(Resource::Memlock);
    if setrlimit(Resource::Memlock, Rlimit { current: Some(0), ..limit }).is_err() {
        return false;
    }
    let registered = fabric.allocate(PROBE_LEN);
    setrlimit(Resource::Memlock, limit).expect("a process may set its limit to what it was");
    registered.is_ok()
}

/// Memory that is locked beside messages, in bytes: queues, and cells that peers write.
pub(super) const LOCKED_BYTES_BESIDE: u64 = 16 << 20;
/// Length of the probe in bytes. Devices register memory of this length at once, and put off a few bytes.
const PROBE_LEN: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use rdmc::MemNetwork;

    use super::*;

    #[test]
    fn what_is_locked_beside_messages_is_kept_free() {
        let lockable = Lockable::up_to(1 << 30);
        assert_eq!(lockable.room(0), (1 << 30) - LOCKED_BYTES_BESIDE);
        assert_eq!(lockable.room(1), (1 << 30) - LOCKED_BYTES_BESIDE - PAGE);
        assert_eq!(Lockable::up_to(1 << 20).room(0), 0);
        assert_eq!(lockable.room(u64::MAX), 0);
        assert_eq!(Lockable::WITHOUT_LIMIT.room(1 << 40), u64::MAX);
    }

    #[test]
    fn a_limit_of_what_is_said_to_be_needed_suffices() {
        let bytes = (3 << 30) + 1;
        let short = Lockable::up_to(3 << 30).check(bytes).unwrap_err();
        assert_eq!(short, "memory may be locked up to 3 GiB only (RLIMIT_MEMLOCK), where RDMA needs 3089 MiB");
        assert_eq!(Lockable::up_to(3089 << 20).check(bytes), Ok(()));
        assert_eq!(Lockable::WITHOUT_LIMIT.check(u64::MAX), Ok(()));
    }

    #[test]
    fn a_limit_that_does_not_hold_limits_nothing_and_stays_as_it_is() {
        let before = getrlimit(Resource::Memlock);
        // Memory of this fabric is not locked.
        let found = Lockable::find(Some(&*MemNetwork::new().fabric()));
        assert_eq!((found.room(0), found.check(1 << 50)), (u64::MAX, Ok(())));
        assert!(found.to_string().ends_with("without limit"), "{found}");
        assert_eq!(getrlimit(Resource::Memlock), before);
        let known = Lockable::find(None);
        assert_eq!(known, Lockable { limit: before.current, exempt: false });
    }
}
