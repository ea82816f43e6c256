//! The limit of files and connections that this process may have open. A sender or receiver that has reached it must not
//! blame its peers.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Tells whether a text is that of an error because of a limit of open files. It may be the limit of a peer.
pub(crate) fn names_limit(text: &str) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| text.contains(&format!("(os error {})", errno.raw_os_error())))
}

/// Tells whether this process has too few descriptors left for another connection. `failed` tells that attempts to
/// connect failed, which has freed descriptors.
pub(crate) fn is_reached(members: usize, failed: bool) -> bool {
    let spare = if failed { of_attempts(members) } else { SPARE_MIN };
    free().is_some_and(|free| free <= spare as u64)
}

/// Tells whether the limit is so low that connections to so many members may have failed because of it.
pub(crate) fn is_low(members: usize) -> bool {
    let needed = of_attempts(members) + OTHERS_MAX;
    getrlimit(Resource::Nofile).current.is_some_and(|limit| limit <= needed as u64)
}

/// Returns how many descriptors attempts to connect to the members may take at the same moment.
fn of_attempts(members: usize) -> usize {
    (members * DESCRIPTORS_OF_MEMBER).min(ATTEMPTS_MAX)
}

/// Says that the limit is reached, and what to do.
pub(crate) fn reached() -> String {
    format!("this process cannot open more files or connections: {}", remedy())
}

/// Adds to the text of an error what to do, if a limit is the reason.
pub(crate) fn with_remedy(text: String) -> String {
    if names_limit(&text) && !text.contains(LIMIT_COMMAND) { format!("{text}; {}", remedy()) } else { text }
}

fn remedy() -> String {
    let limit = getrlimit(Resource::Nofile).current.map_or_else(String::new, |limit| format!(" of {limit}"));
    format!("raise this process's limit{limit} ({LIMIT_COMMAND}), or the limit of all processes of this host")
}

/// Returns how many more files this process may open; `None` if there is no limit or it is not known.
fn free() -> Option<u64> {
    let open = std::fs::read_dir("/proc/self/fd");
    let limit = getrlimit(Resource::Nofile).current?;
    match open {
        Ok(open) => Some(limit.saturating_sub(open.count() as u64)),
        // No descriptor is left to open the directory with.
        Err(error) => names_limit(&error.to_string()).then_some(0),
    }
}

/// Command that shows and raises the limit.
pub(crate) const LIMIT_COMMAND: &str = "ulimit -n";
/// Greatest number of descriptors that a connection to a member takes, while it is made.
const DESCRIPTORS_OF_MEMBER: usize = 8;
/// Greatest number of descriptors that do not belong to connections to members.
const OTHERS_MAX: usize = 32;
/// Greatest number of descriptors that attempts to connect take at the same moment, as far as is assumed.
const ATTEMPTS_MAX: usize = 64;
/// Number of free descriptors that are too few to make a connection.
const SPARE_MIN: usize = 8;
