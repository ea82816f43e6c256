//! Where flows lead, and where they may.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tokio::net::{TcpStream, lookup_host};

use super::note::RefusedReason;

/// Where a flow leads.
///
/// Only the exit resolves names, since they may mean another host at the entrance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Target {
    /// An address.
    Address(SocketAddr),
    /// A name of at most 255 bytes, and a port.
    Name {
        /// The name.
        host: String,
        /// The port.
        port: u16,
    },
}

impl Target {
    /// Returns the target of a host, which may be an address without brackets, and a port. `None` if the name is empty
    /// or too long.
    pub fn new(host: &str, port: u16) -> Option<Self> {
        if let Ok(address) = host.parse() {
            return Some(Self::Address(SocketAddr::new(address, port)));
        }
        let is_name = !host.is_empty() && host.len() <= NAME_LEN_MAX && !host.contains(['\0', ' ', '/', ':']);
        is_name.then(|| Self::Name { host: host.to_owned(), port })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            // It may come from a peer, and goes into logs.
            Self::Name { host, port } => write!(f, "{}:{port}", host.escape_debug()),
        }
    }
}

/// Parses `HOST:PORT`; an IPv6 address stands in brackets.
impl FromStr for Target {
    type Err = ParseTargetError;

    fn from_str(text: &str) -> Result<Self, ParseTargetError> {
        let wrong = || ParseTargetError { text: text.to_owned() };
        let (host, port) = split(text).ok_or_else(wrong)?;
        let port = port.filter(|port| *port > 0).ok_or_else(wrong)?;
        Self::new(host, port).ok_or_else(wrong)
    }
}

/// A text is no target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not HOST:PORT, such as 10.0.0.2:22, [fd00::2]:22 or host.example:22")]
pub struct ParseTargetError {
    text: String,
}

/// The targets to which an exit connects. Empty by default: then it connects to nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList(Vec<AllowRule>);

/// One rule of an [`AllowList`].
///
/// | rule | allows |
/// |---|---|
/// | `10.0.0.0/8` | flows to these addresses, and to names that resolve to them |
/// | `10.0.0.2`, `[fd00::2]` | the same for one address |
/// | `host.example` | flows to this name, at every address to which it resolves |
/// | `10.0.0.0/8:22`, `[fd00::]/8:22`, `host.example:22` | the same at one port |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowRule {
    place: Place,
    port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Network { address: IpAddr, prefix_len: u8 },
    Name(String),
}

impl AllowList {
    /// Tells whether the list allows nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells whether flows to `target` are allowed without a look at what its name resolves to.
    pub(super) fn allows(&self, target: &Target) -> bool {
        match target {
            Target::Address(address) => self.allows_address(*address),
            Target::Name { host, port } => self.allows_name(host, *port),
        }
    }

    fn allows_name(&self, host: &str, port: u16) -> bool {
        self.0.iter().any(|rule| {
            rule.allows_port(port) && matches!(&rule.place, Place::Name(name) if name.eq_ignore_ascii_case(host))
        })
    }

    fn allows_address(&self, address: SocketAddr) -> bool {
        self.0.iter().any(|rule| rule.allows_port(address.port()) && rule.place.contains(address.ip()))
    }

    /// Connects to `target`, if it is allowed.
    ///
    /// The addresses of a name are tried one after the other, those that are not allowed excepted.
    pub(super) async fn connect(&self, target: &Target) -> Result<TcpStream, RefusedReason> {
        let found: Vec<SocketAddr> = match target {
            Target::Address(address) => vec![*address],
            // The system's resolver takes no part in what is refused anyway.
            Target::Name { host, port } if !self.may_allow(host, *port) => return Err(RefusedReason::NotAllowed),
            Target::Name { host, port } => {
                let found = lookup_host((host.as_str(), *port)).await.map_err(|_| RefusedReason::NoSuchHost)?;
                found.collect()
            }
        };
        let is_named = matches!(target, Target::Name { host, port } if self.allows_name(host, *port));
        let mut reason = if found.is_empty() { RefusedReason::NoSuchHost } else { RefusedReason::NotAllowed };
        for address in found.into_iter().filter(|address| is_named || self.allows_address(*address)) {
            match TcpStream::connect(address).await {
                Ok(socket) => return Ok(socket),
                Err(error) => {
                    tracing::debug!(%target, %address, %error, "cannot connect");
                    reason = reason_of(&error);
                }
            }
        }
        Err(reason)
    }

    /// Tells whether a name may lead to an allowed address.
    fn may_allow(&self, host: &str, port: u16) -> bool {
        let is_network = |rule: &&AllowRule| matches!(rule.place, Place::Network { .. });
        self.allows_name(host, port) || self.0.iter().filter(is_network).any(|rule| rule.allows_port(port))
    }
}

impl FromIterator<AllowRule> for AllowList {
    fn from_iter<I: IntoIterator<Item = AllowRule>>(rules: I) -> Self {
        Self(rules.into_iter().collect())
    }
}

impl AllowRule {
    fn allows_port(&self, port: u16) -> bool {
        self.port.is_none_or(|allowed| allowed == port)
    }
}

impl FromStr for AllowRule {
    type Err = ParseAllowRuleError;

    fn from_str(text: &str) -> Result<Self, ParseAllowRuleError> {
        let wrong = || ParseAllowRuleError { text: text.to_owned() };
        let Some((network, rest)) = text.split_once('/') else {
            // One address or a name. An IPv6 address may stand without brackets, and then has no port.
            let (host, port) = match text.parse::<Ipv6Addr>() {
                Ok(_) => (text, None),
                Err(_) => split(text).ok_or_else(wrong)?,
            };
            let place = match Target::new(host, 0).ok_or_else(wrong)? {
                Target::Address(address) => Place::network(address.ip(), None).ok_or_else(wrong)?,
                Target::Name { host, .. } => Place::Name(host),
            };
            return Ok(Self { place, port });
        };
        let address = network.trim_start_matches('[').trim_end_matches(']').parse().map_err(|_| wrong())?;
        let (prefix_len, port) = match rest.split_once(':') {
            Some((prefix_len, port)) => (prefix_len, Some(number(port).ok_or_else(wrong)?)),
            None => (rest, None),
        };
        let prefix_len = number(prefix_len).ok_or_else(wrong)?;
        Ok(Self { place: Place::network(address, Some(prefix_len)).ok_or_else(wrong)?, port })
    }
}

/// A text is no rule of an [`AllowList`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not NETWORK/PREFIX[:PORT] or HOST[:PORT], such as 10.0.0.0/8, [fd00::]/8:22 or host.example:22")]
pub struct ParseAllowRuleError {
    text: String,
}

impl Place {
    /// Returns a network; `None` if the prefix is too long, or does not cover all bits of the address.
    fn network(address: IpAddr, prefix_len: Option<u8>) -> Option<Self> {
        let whole = if address.is_ipv4() { 32 } else { 128 };
        let prefix_len = prefix_len.unwrap_or(whole);
        (prefix_len <= whole && bits(address) & !mask(address, prefix_len) == 0)
            .then_some(Self::Network { address, prefix_len })
    }

    fn contains(&self, other: IpAddr) -> bool {
        let Self::Network { address, prefix_len } = self else { return false };
        // An IPv4 address may come as an IPv6 one, and must not pass by a rule for IPv6, nor miss its own.
        let other = other.to_canonical();
        address.is_ipv4() == other.is_ipv4() && bits(other) & mask(*address, *prefix_len) == bits(*address)
    }
}

/// Returns the bits of an address; those of an IPv4 address stand at the low end.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn mask(address: IpAddr, prefix_len: u8) -> u128 {
    let whole: u32 = if address.is_ipv4() { 32 } else { 128 };
    let all = u128::MAX >> (128 - whole);
    all & u128::MAX.checked_shl(whole - u32::from(prefix_len)).unwrap_or(0)
}

/// Splits a host without its brackets from its port, if there is one; `None` if either is malformed.
fn split(text: &str) -> Option<(&str, Option<u16>)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>().ok()?;
        return match rest.strip_prefix(':') {
            Some(port) => Some((host, Some(number(port)?))),
            None => rest.is_empty().then_some((host, None)),
        };
    }
    match text.split_once(':') {
        Some((host, port)) => Some((host, Some(number(port)?))),
        None => Some((text, None)),
    }
}

/// Parses digits only: the standard parser takes a sign, too.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn reason_of(error: &io::Error) -> RefusedReason {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => RefusedReason::ConnectionRefused,
        io::ErrorKind::HostUnreachable => RefusedReason::HostUnreachable,
        io::ErrorKind::NetworkUnreachable => RefusedReason::NetworkUnreachable,
        io::ErrorKind::TimedOut => RefusedReason::TimedOut,
        _ => RefusedReason::Failed,
    }
}

/// Longest name in bytes.
pub(super) const NAME_LEN_MAX: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    fn list(rules: &[&str]) -> AllowList {
        rules.iter().map(|rule| rule.parse::<AllowRule>().unwrap_or_else(|error| panic!("{error}"))).collect()
    }

    #[test]
    fn targets_are_read_and_shown_alike() {
        for text in ["10.0.0.2:22", "[fd00::2]:22", "host.example:65535", "localhost:1"] {
            let target: Target = text.parse().unwrap();
            assert_eq!(target.to_string(), text);
        }
        for text in
            ["", ":1", "host", "host:", "host:0", "host:65536", "host:+1", "fd00::2", "[host]:1", "a b:1", "a/b:1"]
        {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
        assert!(Target::new(&"a".repeat(256), 1).is_none());
    }

    #[test]
    fn a_list_allows_networks_addresses_and_ports() {
        let allowed = list(&["10.0.0.0/8", "192.168.7.0/24:22", "[fd00::]/8:443", "fe80::/10", "1.2.3.4", "::1"]);
        let allows = |text: &str| allowed.allows_address(text.parse().unwrap());
        for yes in ["10.255.0.1:9", "192.168.7.255:22", "[fdff::1]:443", "[febf::1]:1", "1.2.3.4:5", "[::1]:7"] {
            assert!(allows(yes), "{yes}");
        }
        // An IPv4 address in the clothes of an IPv6 one is the IPv4 address.
        assert!(
            allows("[::ffff:10.0.0.1]:9") && !list(&["::/0"]).allows_address("[::ffff:10.0.0.1]:9".parse().unwrap())
        );
        for no in ["11.0.0.1:9", "192.168.7.1:23", "192.168.8.1:22", "[fe00::1]:443", "[fec0::1]:1", "1.2.3.5:5"] {
            assert!(!allows(no), "{no}");
        }
        assert!(!AllowList::default().allows_address("127.0.0.1:1".parse().unwrap()));
        let everything = list(&["0.0.0.0/0", "::/0"]);
        assert!(everything.allows_address("8.8.8.8:1".parse().unwrap()));
        assert!(everything.allows_address("[2001::1]:1".parse().unwrap()));
    }

    #[test]
    fn a_name_is_allowed_as_itself_or_by_its_addresses() {
        let allowed = list(&["host.example:22", "10.0.0.0/8:80"]);
        assert!(allowed.allows_name("HOST.example", 22) && !allowed.allows_name("host.example", 23));
        assert!(allowed.may_allow("other", 80) && !allowed.may_allow("other", 22));
    }

    #[test]
    fn malformed_rules_are_refused() {
        for text in
            ["", "/", "10.0.0.0/33", "10.0.0.1/8", "fd00::/129", "10.0.0.0/8:", "10.0.0.0/x", "a:b", "[::1", "a b"]
        {
            assert!(text.parse::<AllowRule>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_list_refuses_before_it_connects_or_resolves() {
        let place = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = place.local_addr().unwrap().port();
        let refused = AllowList::default().connect(&Target::new("127.0.0.1", port).unwrap()).await;
        assert_eq!(refused.unwrap_err(), RefusedReason::NotAllowed);
        let refused = list(&["10.0.0.0/8"]).connect(&Target::new("localhost", port).unwrap()).await;
        assert_eq!(refused.unwrap_err(), RefusedReason::NotAllowed);
        for rule in ["127.0.0.0/8", "localhost"] {
            list(&[rule]).connect(&Target::new("localhost", port).unwrap()).await.unwrap();
        }
    }
}
