//! `rdmc doctor` examines what this host offers, and advises on what is missing.

use std::fmt;
use std::fs;
use std::io::Write;
use std::time::Duration;

use rdmc_files::fabric::shared_memory;
use rdmc_files::size::{ByteSize, Rate};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::cli::DoctorOptions;
use crate::progress::print_json;

/// Examines the host, and prints the findings.
pub(crate) async fn run(options: DoctorOptions) -> anyhow::Result<()> {
    let report = Examination { findings: examine() };
    if options.json {
        print_json(&report);
    } else {
        write!(std::io::stdout(), "{report}")?;
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Examination {
    findings: Vec<Finding>,
}

/// One finding.
#[derive(Debug, Serialize)]
struct Finding {
    topic: String,
    state: State,
    found: String,
    /// What to do if something is missing.
    advice: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    /// Good.
    Good,
    /// Works, but could be better.
    Weak,
    /// Missing.
    Missing,
}

impl fmt::Display for Examination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            let mark = match finding.state {
                State::Good => "ok",
                State::Weak => "could be better",
                State::Missing => "missing",
            };
            writeln!(f, "{:18} {mark:16} {}", finding.topic, finding.found)?;
            if let Some(advice) = &finding.advice {
                writeln!(f, "{:35} -> {advice}", "")?;
            }
        }
        Ok(())
    }
}

fn examine() -> Vec<Finding> {
    let mut findings =
        vec![good("fabric mem", "between the members of one process"), good("fabric tcp", "between any hosts"), shm()];
    findings.extend(rdma::examine());
    findings.extend([huge_pages(), open_files(), tcp_buffers(), long_paths(), cores()]);
    findings
}

fn good(topic: impl Into<String>, found: impl Into<String>) -> Finding {
    Finding { topic: topic.into(), state: State::Good, found: found.into(), advice: None }
}

fn weak(topic: impl Into<String>, state: State, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { topic: topic.into(), state, found: found.into(), advice: Some(advice.into()) }
}

fn shm() -> Finding {
    const TOPIC: &str = "fabric shm";
    match shared_memory() {
        Ok(()) => good(TOPIC, "between processes of this host"),
        Err(error) => weak(TOPIC, State::Missing, error.to_string(), "tcp is used between processes of this host too"),
    }
}

fn huge_pages() -> Finding {
    const TOPIC: &str = "huge pages";
    let mode_of = |file: &str| {
        let mode = fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}")).unwrap_or_default();
        mode.split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'))
            .map_or("unknown".into(), |(mode, _)| mode.to_owned())
    };
    let (mode, shared) = (mode_of("enabled"), mode_of("shmem_enabled"));
    let reserved = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Total:"))?;
        line.trim().parse::<u64>().ok()
    });
    let found = format!("transparent: {mode}, of shared memory: {shared}; reserved: {}", reserved.unwrap_or(0));
    match mode.as_str() {
        "always" | "madvise" => good(TOPIC, found),
        _ => {
            let advice =
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large objects take fewer page faults";
            weak(TOPIC, State::Weak, found, advice)
        }
    }
}

fn open_files() -> Finding {
    const TOPIC: &str = "open files";
    match getrlimit(Resource::Nofile).current {
        Some(files) if files < OPEN_FILES_MIN => {
            let advice = "every other member costs a few connections: ulimit -n 4096";
            weak(TOPIC, State::Weak, format!("at most {files}"), advice)
        }
        Some(files) => good(TOPIC, format!("at most {files}")),
        None => good(TOPIC, "unlimited"),
    }
}

/// Returns the largest buffers of a TCP connection in bytes: to send, and to receive.
fn largest_tcp_buffers() -> Option<(u64, u64)> {
    let largest = |path: &str| fs::read_to_string(path).ok()?.split_whitespace().last()?.parse::<u64>().ok();
    Some((largest("/proc/sys/net/ipv4/tcp_wmem")?, largest("/proc/sys/net/ipv4/tcp_rmem")?))
}

fn tcp_buffers() -> Finding {
    const TOPIC: &str = "TCP buffers";
    let Some((send, receive)) = largest_tcp_buffers() else {
        return good(TOPIC, "as the system chooses");
    };
    let found = format!("send up to {}, receive up to {}", ByteSize(send), ByteSize(receive));
    if send.min(receive) < TCP_BUFFER_MIN {
        let advice = "fast or long links need more: sysctl net.ipv4.tcp_rmem='4096 131072 6291456' (and tcp_wmem)";
        return weak(TOPIC, State::Weak, found, advice);
    }
    good(TOPIC, found)
}

/// What a session of `rdmc serve`, `get`, `put` or `gateway` meets on a long path.
fn long_paths() -> Finding {
    const TOPIC: &str = "long paths";
    let Some((send, receive)) = largest_tcp_buffers() else {
        return good(TOPIC, "as the system chooses");
    };
    // The kernel counts its own part of a buffer, too: about half.
    let fabric = rdmc::TcpFabric::with_config(rdmc_wan::tcp_config());
    let streams = rdmc_wan::SessionConfig::streams_over(&rdmc::Fabric::capabilities(&*fabric), true);
    let in_flight = u64::from(streams) * send.min(receive) / 2;
    let carried = Rate { bytes: in_flight, seconds: FAR.as_secs_f64() };
    let reach = format!("{streams} connections carry {carried} over {} ms", FAR.as_millis());
    if let Err(error) = has_bbr() {
        let advice = "each lost packet slows a connection down for many round trips: modprobe tcp_bbr, and allow it: \
                      sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'";
        return weak(TOPIC, State::Weak, format!("{reach}; no congestion control bbr ({error})"), advice);
    }
    let found = format!("{reach}; congestion control bbr");
    if in_flight < FAR_IN_FLIGHT_MIN {
        let advice = "for more: sysctl net.ipv4.tcp_rmem='4096 131072 67108864' (and tcp_wmem), or --streams 16";
        return weak(TOPIC, State::Weak, found, advice);
    }
    good(TOPIC, found)
}

/// Tells whether a connection of this user may have the congestion control that sessions ask for.
#[cfg(target_os = "linux")]
fn has_bbr() -> std::io::Result<()> {
    use rustix::net::{AddressFamily, SocketType, socket, sockopt};
    let Some(name) = rdmc_wan::tcp_config().congestion_control else { return Ok(()) };
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    Ok(sockopt::set_tcp_congestion(&socket, name)?)
}

#[cfg(not(target_os = "linux"))]
fn has_bbr() -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    good("cores", cores.to_string())
}

#[cfg(not(target_os = "linux"))]
mod rdma {
    use super::{Finding, State, weak};

    pub(super) fn examine() -> Vec<Finding> {
        vec![weak("fabric verbs", State::Missing, "needs Linux", "tcp is used")]
    }
}

#[cfg(target_os = "linux")]
mod rdma;

/// Number of open files that suffices for a hundred members.
const OPEN_FILES_MIN: u64 = 1024;
/// Size of TCP buffers in bytes that suffices for a fast local network.
const TCP_BUFFER_MIN: u64 = 4 << 20;
/// The round trip of a long path.
const FAR: Duration = Duration::from_millis(100);
/// Bytes in flight that suffice for 1 Gbit/s there.
const FAR_IN_FLIGHT_MIN: u64 = 1_000_000_000 / 8 / 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whatever_is_missing_comes_with_advice() {
        for finding in examine() {
            assert_eq!(finding.state != State::Good, finding.advice.is_some(), "{finding:?}");
        }
    }
}
