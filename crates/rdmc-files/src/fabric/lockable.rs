//! How much memory this process may lock: what is registered stays in memory, and so is locked.

use std::fmt;

use rdmc::Fabric;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::size::{Bytes, PAGE};

/// The limit of locked memory of this process, `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lockable {
    /// In bytes; `None` if there is no limit.
    limit: Option<u64>,
    /// Whether it does not hold for this user.
    exempt: bool,
}

impl Lockable {
    /// There is no limit, or nothing is registered.
    pub const WITHOUT_LIMIT: Self = Self { limit: None, exempt: false };

    /// Makes a limit that holds.
    pub fn up_to(bytes: u64) -> Self {
        Self { limit: Some(bytes), exempt: false }
    }

    /// Finds the limit, and by registering memory of `fabric` whether it holds for this user.
    ///
    /// Nothing else of the process may register memory meanwhile.
    pub fn find(fabric: Option<&dyn Fabric>) -> Self {
        let limit = getrlimit(Resource::Memlock).current;
        let exempt = limit.is_some() && fabric.is_some_and(is_exempt);
        Self { limit, exempt }
    }

    /// Returns the bytes that messages may take if `beside` are registered for something else.
    pub fn room(self, beside: u64) -> u64 {
        match self.limit {
            Some(limit) if !self.exempt => {
                let rest = limit.saturating_sub(LOCKED_BYTES_BESIDE).saturating_sub(beside);
                rest - rest % PAGE
            }
            _ => u64::MAX,
        }
    }

    /// Checks that there is room for messages of so many bytes.
    ///
    /// # Errors
    /// How much may be locked, and how much would have to be.
    pub fn check(self, bytes: u64) -> Result<(), String> {
        if bytes <= self.room(0) {
            return Ok(());
        }
        // Rounded up, so that a limit of as much is one that suffices.
        let needed_mib = bytes.saturating_add(LOCKED_BYTES_BESIDE).div_ceil(1 << 20);
        Err(format!("memory may be locked {self} only (RLIMIT_MEMLOCK), where RDMA needs {needed_mib} MiB"))
    }
}

impl fmt::Display for Lockable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            None => f.write_str("without limit"),
            Some(limit) if self.exempt => write!(f, "up to {}, but by this user without limit", Bytes(limit)),
            Some(limit) => write!(f, "up to {}", Bytes(limit)),
        }
    }
}

/// Tells whether the limit does not hold for this user: registers a page while nothing may be locked.
///
/// The capability alone does not tell: the kernel asks for it outside of all user namespaces.
fn is_exempt(fabric: &dyn Fabric) -> bool {
    let limit = getrlimit(Resource::Memlock);
    if setrlimit(Resource::Memlock, Rlimit { current: Some(0), ..limit }).is_err() {
        return false;
    }
    let registered = fabric.allocate(PROBE_LEN);
    setrlimit(Resource::Memlock, limit).expect("a process may set its limit to what it was");
    registered.is_ok()
}

/// What is locked beside messages, in bytes: queues, and cells that peers write.
pub(super) const LOCKED_BYTES_BESIDE: u64 = 16 << 20;
/// Long enough to be registered at once, which devices put off for a few bytes.
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
