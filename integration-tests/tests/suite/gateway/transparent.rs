//! Tests of `rdmc gateway --transparent`: three hosts in a row, each a network namespace. Needs root, `ip` and `nft`.

use std::path::Path;
use std::process::Command;

use super::*;
use crate::program::finish;
use crate::requirement::skip;

#[test]
fn a_program_reaches_its_target_through_gateways_that_it_does_not_know() {
    let Some(hosts) = Hosts::make() else { return };
    let (served, got) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    std::fs::write(served.path().join("file"), pattern(3_000_000, 1)).unwrap();
    let (far, near) = (hosts.name("far"), hosts.name("near"));
    let _exit =
        Gateway::start_in(Some(&far), &["--serve", "10.81.2.2", "--allow", "10.81.3.1", "--allow", "fd81:3::1"]);
    let mut entrance = Gateway::start_in(Some(&near), &["--listen", "[::]", "--peer", "10.81.2.2", "--transparent"]);
    let get = |server: &str, into: &Path| {
        let get = ["get", &format!("{server}/file"), into.to_str().unwrap()];
        finish(command_in(Some(&hosts.name("client")), &get).spawn().unwrap())
    };
    for (number, server) in ["10.81.3.1:7500", "[fd81:3::1]:7500"].into_iter().enumerate() {
        let _server = Server::start(&far, &served, server);
        let into = got.path().join(number.to_string());
        std::fs::create_dir(&into).unwrap();
        let output = get(server, &into);
        assert_eq!(code(&output), 0, "{output:?}");
        assert_eq!(std::fs::read(into.join("file")).unwrap(), pattern(3_000_000, 1), "{server}");
    }

    // A connection to the entrance itself was not diverted, and would lead back to it.
    assert_ne!(code(&get("10.81.1.1:7471", got.path())), 0);
    let warning = entrance.event("warning");
    assert!(warning["message"].as_str().unwrap().contains("10.81.1.1:7471 was not diverted"), "{warning}");
}

/// A server of files, a process.
struct Server(Child);

impl Server {
    fn start(namespace: &str, dir: &TempDir, listen: &str) -> Self {
        let serve = ["serve", dir.path().to_str().unwrap(), "--listen", listen, "--json"];
        let mut child = command_in(Some(namespace), &serve).stderr(std::process::Stdio::inherit()).spawn().unwrap();
        // It says that it listens.
        let mut line = String::new();
        assert!(BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap() > 0, "it does not listen");
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client, a gateway on its way, and a server beyond a path that only the gateway knows. A drop removes them.
struct Hosts(String);

impl Hosts {
    /// Makes the hosts, or prints why it cannot.
    fn make() -> Option<Self> {
        let hosts = Self(format!("rdmcgate{}", std::process::id()));
        let made = hosts.connect();
        let why = "hosts with a rule for TPROXY cannot be made here (needs root, iproute2 and nftables)";
        made.map_err(|problem| skip("network", &format!("{why}: {problem}"))).ok()?;
        Some(hosts)
    }

    fn connect(&self) -> Result<(), String> {
        let [client, near, far] = NAMES.map(|name| self.name(name));
        for host in [&client, &near, &far] {
            ip(&format!("netns add {host}"))?;
            ip(&format!("-n {host} link set lo up"))?;
        }
        ip(&format!("link add eth0 netns {client} type veth peer name programs netns {near}"))?;
        ip(&format!("link add path netns {near} type veth peer name path netns {far}"))?;
        for (host, port, ipv4, ipv6) in [
            (&client, "eth0", "10.81.1.2/24", "fd81:1::2/64"),
            (&near, "programs", "10.81.1.1/24", "fd81:1::1/64"),
            (&near, "path", "10.81.2.1/24", "fd81:2::1/64"),
            (&far, "path", "10.81.2.2/24", "fd81:2::2/64"),
            (&far, "lo", "10.81.3.1/32", "fd81:3::1/128"),
        ] {
            ip(&format!("-n {host} addr add {ipv4} dev {port}"))?;
            ip(&format!("-n {host} addr add {ipv6} dev {port} nodad"))?;
            ip(&format!("-n {host} link set {port} up"))?;
        }
        ip(&format!("-n {client} route add default via 10.81.1.1"))?;
        ip(&format!("-n {client} route add default via fd81:1::1"))?;
        for family in ["-4", "-6"] {
            ip(&format!("-n {near} {family} rule add fwmark 1 lookup 100"))?;
            ip(&format!("-n {near} {family} route add local default dev lo table 100"))?;
        }
        run("ip", &["netns", "exec", &near, "nft", RULES])
    }

    fn name(&self, host: &str) -> String {
        format!("{}-{host}", self.0)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // This fails for a namespace that was not made.
        for name in NAMES {
            let _ = ip(&format!("netns del {}", self.name(name)));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    run("ip", &arguments.split(' ').collect::<Vec<_>>())
}

/// Runs a program, and returns its complaint if it fails.
fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{program} {}: {}", arguments.join(" "), said.trim())) }
}

const NAMES: [&str; 3] = ["client", "near", "far"];
/// The rules of the page on long paths, for all addresses beyond the path.
const RULES: &str = "\
add table inet rdmc
add chain inet rdmc divert { type filter hook prerouting priority mangle; }
add rule inet rdmc divert ip daddr 10.81.3.0/24 meta l4proto tcp tproxy ip to :7471 meta mark set 1 accept
add rule inet rdmc divert ip6 daddr fd81:3::/64 meta l4proto tcp tproxy ip6 to :7471 meta mark set 1 accept
";
