//! Tests of hosts whose links go down and up in the middle of a multicast, or carry nothing in one direction.
//!
//! Every host is a network namespace with a port at a switch, which is in another namespace. No traffic leaves these,
//! and the machine's own network is untouched. Needs root and `ip`. `integration-tests/rounds` plays many rounds.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::fleet::{Campaign, Draw, Fleet, Host, file, judge};
use crate::requirement::skip;

#[test]
fn who_is_cut_off_is_named_by_all_others_and_fails_by_itself() {
    let campaign = Campaign::of("RDMC_NETWORK_ROUNDS", ROUNDS);
    let networks: Vec<Network> = (0..campaign.lanes(LANES)).map_while(Network::make).collect();
    let Some(network) = networks.first() else { return };
    let source = TempDir::new().unwrap();
    let path = file(&source, FILE_BYTES);
    let begun = Instant::now();
    assert_eq!(network.quiet(&path), Ok(true));
    let span = begun.elapsed();
    campaign.play(networks.len(), |lane, seed| networks[lane].play(&Round::draw(seed, span), &path));
    for network in &networks {
        assert_eq!(network.quiet(&path), Ok(true), "all links are up again");
    }
}

/// A round: what happens to a link, or to two hosts.
#[derive(Debug)]
struct Round {
    /// Number of the host; host 0 has the sender.
    victim: usize,
    after: Duration,
    cut: Cut,
}

#[derive(Clone, Copy, Debug)]
enum Cut {
    /// The host's own end of its link goes down.
    Host,
    /// The switch's end of the link goes down.
    Port,
    /// No other host hears this host.
    Mute,
    /// The host hears no other host.
    Deaf,
    /// The host and this one cannot hear each other.
    Pair(usize),
    /// The host's link is down for a while only.
    Short(Duration),
}

impl Round {
    fn draw(seed: u64, span: Duration) -> Self {
        let mut draw = Draw(seed);
        let victim = usize::try_from(draw.below(HOSTS as u64)).unwrap();
        let other = (victim + 1 + usize::try_from(draw.below(HOSTS as u64 - 1)).unwrap()) % HOSTS;
        // Consecutive seeds play one kind after the other.
        let cut = match seed % 6 {
            0 => Cut::Mute,
            1 => Cut::Port,
            2 => Cut::Deaf,
            3 => Cut::Host,
            4 => Cut::Pair(other),
            _ => Cut::Short(SHORT_MAX.mul_f64(draw.fraction())),
        };
        Self { victim, after: span.mul_f64(draw.fraction()), cut }
    }

    fn victims(&self) -> BTreeSet<usize> {
        match self.cut {
            Cut::Pair(other) => BTreeSet::from([self.victim, other]),
            _ => BTreeSet::from([self.victim]),
        }
    }
}

/// Hosts at a switch. A drop removes them.
struct Network {
    name: String,
}

impl Network {
    /// Makes the hosts, or prints why it cannot.
    fn make(number: usize) -> Option<Self> {
        let network = Self { name: format!("rdmctest{}-{number}", std::process::id()) };
        let switch = network.switch();
        if let Err(problem) = ip(&["netns", "add", &switch]) {
            skip("network", &format!("no network namespaces can be made here (needs root and iproute2): {problem}"));
            return None;
        }
        let made = network.connect();
        made.map_err(|problem| skip("network", &format!("hosts at a switch cannot be made here: {problem}"))).ok()?;
        Some(network)
    }

    fn connect(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&["-n", &switch, "link", "add", "switch", "type", "bridge", "stp_state", "0", "forward_delay", "0"])?;
        ip(&["-n", &switch, "link", "set", "switch", "up"])?;
        for number in 0..HOSTS {
            let (host, port) = (self.host(number), port(number));
            ip(&["netns", "add", &host])?;
            ip(&["link", "add", "eth0", "netns", &host, "type", "veth", "peer", "name", &port, "netns", &switch])?;
            ip(&["-n", &host, "addr", "add", &format!("{}/24", address(number)), "dev", "eth0"])?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
            ip(&["-n", &host, "link", "set", "eth0", "up"])?;
            ip(&["-n", &switch, "link", "set", &port, "master", "switch", "up"])?;
        }
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn host(&self, number: usize) -> String {
        format!("{}-{number}", self.name)
    }

    fn start(&self, path: &Path) -> Fleet {
        let host =
            |number| Host { namespace: Some(self.host(number)), address: Some(format!("{}:7471", address(number))) };
        Fleet::start(&(0..HOSTS).map(host).collect::<Vec<_>>(), path, &OPTIONS)
    }

    /// Sends a file undisturbed.
    fn quiet(&self, path: &Path) -> Result<bool, String> {
        judge(&self.start(path).end(), &BTreeSet::new(), path)
    }

    /// Plays a round, and returns its outcome.
    fn play(&self, round: &Round, path: &Path) -> Result<String, String> {
        let (fleet, victims) = (self.start(path), round.victims());
        std::thread::sleep(round.after);
        self.apply(round, true)?;
        if let Cut::Short(duration) = round.cut {
            std::thread::sleep(duration);
            self.apply(round, false)?;
        }
        // Hosts that are cut off end, too, while nothing reaches them.
        let ends = fleet.end();
        if !matches!(round.cut, Cut::Short(_)) {
            self.apply(round, false)?;
        }
        let closed = judge(&ends, &victims, path).map_err(|what| format!("{round:?}: {what}"))?;
        let cut = match round.cut {
            Cut::Host => "link down at the host",
            Cut::Port => "link down at the switch",
            Cut::Mute => "not heard",
            Cut::Deaf => "hears nobody",
            Cut::Pair(_) => "two cut off each other",
            Cut::Short(_) => "link down and up",
        };
        Ok(format!("{cut}, {}", if closed { "all others have the file" } else { "named by all others" }))
    }

    /// Applies the cut of a round, or undoes it.
    fn apply(&self, round: &Round, down: bool) -> Result<(), String> {
        let state = if down { "down" } else { "up" };
        let victim = round.victim;
        let others = || (0..HOSTS).filter(|&number| number != victim);
        match round.cut {
            Cut::Host | Cut::Short(_) => ip(&["-n", &self.host(victim), "link", "set", "eth0", state]),
            Cut::Port => ip(&["-n", &self.switch(), "link", "set", &port(victim), state]),
            Cut::Mute => others().try_for_each(|number| self.silence(victim, number, down)),
            Cut::Deaf => others().try_for_each(|number| self.silence(number, victim, down)),
            Cut::Pair(other) => {
                self.silence(victim, other, down)?;
                self.silence(other, victim, down)
            }
        }
    }

    /// Drops the traffic from one host to another, or stops doing so.
    fn silence(&self, from: usize, to: usize, lost: bool) -> Result<(), String> {
        let what = if lost { "add" } else { "del" };
        ip(&["-n", &self.host(from), "route", what, "blackhole", &format!("{}/32", address(to))])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // This fails for a namespace that was not made.
        (0..HOSTS).map(|number| self.host(number)).chain([self.switch()]).for_each(|name| {
            let _ = ip(&["netns", "del", &name]);
        });
    }
}

fn port(number: usize) -> String {
    format!("port{number}")
}

fn address(number: usize) -> String {
    format!("10.79.0.{}", number + 1)
}

/// Runs `ip`, and returns its complaint if it fails.
fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", arguments.join(" "), said.trim())) }
}

/// Number of hosts: most of them reach each other when one is cut off.
const HOSTS: usize = 4;
/// Rounds in a run of the test suite.
const ROUNDS: u64 = 2;
/// Rounds at a time in a long campaign, each in a network of its own.
const LANES: usize = 4;
/// Length of the file in bytes; with blocks this small, the transfer takes a while.
const FILE_BYTES: usize = 48 << 20;
/// Options of the sender. It waits for links that came up just before.
const OPTIONS: [&str; 5] = ["--block-size", "4k", "--wait", "--timeout", "20"];
/// Longest time for which a link is down before it comes up again: too short for the host to be declared failed. TCP
/// repeats after 0.2 s, 0.6 s and 1.4 s, and 1.7 s of silence are a failure.
const SHORT_MAX: Duration = Duration::from_millis(600);
