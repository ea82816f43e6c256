//! The limit of files and connections that this process may have open. A sender or receiver that has reached it must not
//! blame its peers.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::blame::{FailedPeer, PeerFailure};
use crate::error::{Kind, Problem};

/// Makes a refusal a local problem if this process has reached its limit. Says so of a partial delivery, too. It is called while the connections are open.
pub(crate) fn blamed_for(problem: Problem, members: usize) -> Problem {
    if !matches!(problem.kind, Kind::Refused | Kind::Partial) {
        return problem;
    }
    // A peer that has reached its own limit says so with the same words. A connection that could not be accepted here
    // is broken for the peer.
    let may_be = |peer: &FailedPeer| peer.cause() == PeerFailure::DataConnection;
    let may_be = names_limit(problem.reason_alone()) || problem.failed().iter().any(may_be);
    let spare = if may_be { members * DESCRIPTORS_OF_MEMBER } else { SPARE_MIN };
    // If the others went on, connections were closed since.
    let is_low = getrlimit(Resource::Nofile).current.is_some_and(|limit| limit <= (spare + OTHERS_MAX) as u64);
    match problem.kind {
        Kind::Partial if may_be && is_low => problem.context(own_limit()),
        Kind::Refused if free().is_some_and(|free| free <= spare as u64) => own(&problem),
        _ => problem,
    }
}

/// Makes the problem of a failed system call of this process a local one, if the call has failed because of the limit.
pub(crate) fn blamed_for_call(problem: Problem) -> Problem {
    if names_limit(problem.reason_alone()) { own(&problem) } else { problem }
}

/// Adds to the text of an error what to do, if a limit is the reason.
pub(crate) fn with_remedy(text: String) -> String {
    if names_limit(&text) && !text.contains(REMEDY) { format!("{text}; {}", remedy()) } else { text }
}

fn own(problem: &Problem) -> Problem {
    if problem.reason_alone().contains(REMEDY) {
        return Problem::local(problem.reason_alone());
    }
    Problem::local(own_limit())
}

fn own_limit() -> String {
    format!("this process cannot open more files or connections: {}", remedy())
}

fn remedy() -> String {
    let limit = getrlimit(Resource::Nofile).current.map_or_else(String::new, |limit| format!(" of {limit}"));
    format!("raise this process's limit{limit} ({REMEDY}), or the limit of all processes of this host")
}

/// Tells whether a text is that of an error because of a limit of open files.
fn names_limit(text: &str) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| text.contains(&format!("(os error {})", errno.raw_os_error())))
}

/// Returns how many more files this process may open; `None` if there is no limit or it is not known.
fn free() -> Option<u64> {
    let open = std::fs::read_dir("/proc/self/fd");
    let limit = getrlimit(Resource::Nofile).current?;
    match open {
        Ok(open) => Some(limit.saturating_sub(open.count() as u64)),
        // There is none left to look.
        Err(error) => names_limit(&error.to_string()).then_some(0),
    }
}

/// How the limit is raised.
const REMEDY: &str = "ulimit -n";
/// Greatest number of descriptors that a connection to a member takes, while it is made.
const DESCRIPTORS_OF_MEMBER: usize = 8;
/// Greatest number of descriptors that do not belong to connections to members.
const OTHERS_MAX: usize = 32;
/// Number of free descriptors that are too few to make a connection.
const SPARE_MIN: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_this_process_is_not_blamed_on_peers() {
        let failed = Problem::from(std::io::Error::from(Errno::MFILE)).of_kind(Kind::Refused);
        assert!(
            failed.reason_alone().contains("Too many open files (os error 24); raise this process's limit of "),
            "{failed}"
        );
        assert_eq!(blamed_for_call(failed).kind, Kind::Local);
        // Of a peer, while this process may open many more.
        let of_peer = Kind::Refused.problem("host:7471 could not be reached: Too many open files (os error 24)");
        assert_eq!(blamed_for(of_peer.clone(), 3), of_peer);
        let other = Kind::Partial.problem("host:7471 was lost");
        assert_eq!((blamed_for(other.clone(), 3), blamed_for_call(other.clone())), (other.clone(), other));
    }
}
