//! `rdmc doctor`: what this host offers, and what to do about what is missing.

use std::fmt;
use std::fs;
use std::io::Write;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::cli::DoctorOptions;
use crate::progress::print_json;
use crate::size::Bytes;

/// Looks at everything, and prints what it found.
pub(crate) fn run(options: &DoctorOptions) -> anyhow::Result<()> {
    let report = Report { findings: examine() };
    if options.json {
        print_json(&report);
    } else {
        write!(std::io::stdout(), "{report}")?;
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    topic: &'static str,
    state: State,
    found: String,
    /// What to do, if something is missing.
    advice: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    /// As it should be.
    Good,
    /// Works, could be better.
    Weak,
    /// Not there.
    Missing,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            let mark = match finding.state {
                State::Good => "ok",
                State::Weak => "could be better",
                State::Missing => "missing",
            };
            writeln!(f, "{:18} {mark:16} {}", finding.topic, finding.found)?;
            if let Some(advice) = finding.advice {
                writeln!(f, "{:35} -> {advice}", "")?;
            }
        }
        Ok(())
    }
}

fn examine() -> Vec<Finding> {
    let devices = names_in("/sys/class/infiniband");
    vec![
        good("fabric mem", "between the members of one process"),
        good("fabric tcp", "between any hosts"),
        rdma_devices(&devices),
        verbs_library(&devices),
        locked_memory(&devices),
        huge_pages(),
        open_files(),
        send_buffer(),
        cores(),
    ]
}

fn good(topic: &'static str, found: impl Into<String>) -> Finding {
    Finding { topic, state: State::Good, found: found.into(), advice: None }
}

fn weak(topic: &'static str, state: State, found: impl Into<String>, advice: &'static str) -> Finding {
    Finding { topic, state, found: found.into(), advice: Some(advice) }
}

fn rdma_devices(devices: &[String]) -> Finding {
    const TOPIC: &str = "RDMA devices";
    if !devices.is_empty() {
        return good(TOPIC, devices.join(", "));
    }
    let advice =
        "tcp is used; for tests without hardware: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME";
    weak(TOPIC, State::Missing, "none in /sys/class/infiniband", advice)
}

fn verbs_library(devices: &[String]) -> Finding {
    const TOPIC: &str = "libibverbs";
    let holds = |dir: &str| names_in(dir).iter().any(|name| name.starts_with("libibverbs.so.1"));
    match LIBRARY_DIRS.into_iter().find(|dir| holds(dir)) {
        Some(dir) => good(TOPIC, format!("in {dir}")),
        None if devices.is_empty() => weak(TOPIC, State::Missing, "not installed", "not needed without an RDMA device"),
        None => weak(TOPIC, State::Missing, "not installed", "install rdma-core (Debian: ibverbs-providers)"),
    }
}

fn locked_memory(devices: &[String]) -> Finding {
    const TOPIC: &str = "locked memory";
    match getrlimit(Resource::Memlock).current {
        None => good(TOPIC, "unlimited"),
        Some(bytes) if bytes >= LOCKED_BYTES_MIN => good(TOPIC, Bytes(bytes).to_string()),
        Some(bytes) if devices.is_empty() => good(TOPIC, format!("{}, enough without an RDMA device", Bytes(bytes))),
        Some(bytes) => {
            let advice = "registered memory is locked: set memlock to unlimited in /etc/security/limits.d, or LimitMEMLOCK=infinity";
            weak(TOPIC, State::Weak, Bytes(bytes).to_string(), advice)
        }
    }
}

fn huge_pages() -> Finding {
    const TOPIC: &str = "huge pages";
    let mode = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let mode = mode.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("unknown", |(mode, _)| mode);
    let reserved = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Total:"))?;
        line.trim().parse::<u64>().ok()
    });
    let found = format!("transparent: {mode}; reserved: {}", reserved.unwrap_or(0));
    match mode {
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

fn send_buffer() -> Finding {
    const TOPIC: &str = "TCP buffers";
    let largest = |path: &str| fs::read_to_string(path).ok()?.split_whitespace().last()?.parse::<u64>().ok();
    let (send, receive) = (largest("/proc/sys/net/ipv4/tcp_wmem"), largest("/proc/sys/net/ipv4/tcp_rmem"));
    let (Some(send), Some(receive)) = (send, receive) else {
        return good(TOPIC, "as the system chooses");
    };
    let found = format!("send up to {}, receive up to {}", Bytes(send), Bytes(receive));
    if send.min(receive) < TCP_BUFFER_MIN {
        let advice = "fast or long links need more: sysctl net.ipv4.tcp_rmem='4096 131072 6291456' (and tcp_wmem)";
        return weak(TOPIC, State::Weak, found, advice);
    }
    good(TOPIC, found)
}

fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    good("cores", cores.to_string())
}

fn names_in(dir: impl AsRef<Path>) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Where distributions put libraries.
const LIBRARY_DIRS: [&str; 6] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/lib64"];
/// Locked memory with which an RDMA device is of use.
const LOCKED_BYTES_MIN: u64 = 1 << 30;
/// Open files that suffice for a hundred members.
const OPEN_FILES_MIN: u64 = 1024;
/// Largest TCP buffers that do not limit a fast local network.
const TCP_BUFFER_MIN: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_missing_comes_with_advice() {
        for finding in examine() {
            assert_eq!(finding.state != State::Good, finding.advice.is_some(), "{finding:?}");
        }
    }
}
