//! The rate of the network interface by which a peer is reached, as far as the system tells it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;

/// Returns the rate in bits per second of the slowest interface by which one of these addresses is reached. `None` if
/// the system knows no rate.
pub(crate) fn rate_towards(addresses: impl IntoIterator<Item = IpAddr>) -> Option<u64> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (routes_v4, routes_v6) = (routes_v4(&read("/proc/net/route")), routes_v6(&read("/proc/net/ipv6_route")));
    let others = addresses.into_iter().filter(|address| !is_here(*address));
    let interfaces = others.filter_map(|address| match address.to_canonical() {
        IpAddr::V4(address) => interface_towards(&routes_v4, u128::from(u32::from(address))),
        IpAddr::V6(address) => interface_towards(&routes_v6, u128::from(address)),
    });
    interfaces.filter_map(|name| rate_of(&Path::new("/sys/class/net").join(name))).min()
}

/// Tells whether an address is one of this host: a socket that is connected with it has it, too. Nothing is sent.
fn is_here(address: IpAddr) -> bool {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let local = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((address, 9))?;
        socket.local_addr()
    };
    address.is_loopback() || local().is_ok_and(|local| local.ip() == address)
}

/// A line of a routing table. Addresses are numbers, of as many bits as they have.
#[derive(Debug, PartialEq, Eq)]
struct Route {
    interface: String,
    destination: u128,
    mask: u128,
    metric: u32,
}

/// Returns the interface of the most specific route to an address.
fn interface_towards(routes: &[Route], address: u128) -> Option<&str> {
    let matching = routes.iter().filter(|route| address & route.mask == route.destination & route.mask);
    let best = matching.min_by_key(|route| (u128::MAX - route.mask, route.metric));
    best.map(|route| route.interface.as_str())
}

/// Reads the table of IPv4. Its addresses are hexadecimal numbers whose bytes stand as in memory.
fn routes_v4(table: &str) -> Vec<Route> {
    let address = |text: &str| {
        let bytes = u32::from_str_radix(text, 16).ok()?.to_ne_bytes();
        Some(u128::from(u32::from(Ipv4Addr::from(bytes))))
    };
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [interface, destination, _, _, _, _, metric, mask, ..] = fields[..] else { return None };
        let (destination, mask) = (address(destination)?, address(mask)?);
        Some(Route { interface: interface.to_owned(), destination, mask, metric: metric.parse().ok()? })
    };
    table.lines().filter_map(route).collect()
}

/// Reads the table of IPv6.
fn routes_v6(table: &str) -> Vec<Route> {
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [destination, len, _, _, _, metric, _, _, _, interface] = fields[..] else { return None };
        let destination = u128::from_str_radix(destination, 16).ok().map(Ipv6Addr::from)?;
        let len = u32::from_str_radix(len, 16).ok().filter(|len| *len <= 128)?;
        let mask = u128::MAX.checked_shl(128 - len).unwrap_or(0);
        let metric = u32::from_str_radix(metric, 16).ok()?;
        Some(Route { interface: interface.to_owned(), destination: destination.into(), mask, metric })
    };
    table.lines().filter_map(route).collect()
}

/// Returns the rate of an interface, which has this directory. Interfaces that are no devices name one as well, but it
/// is not that of a port.
fn rate_of(interface: &Path) -> Option<u64> {
    if !interface.join("device").exists() {
        return None;
    }
    let speed = std::fs::read_to_string(interface.join("speed")).ok()?;
    // In Mbit/s; -1 if it is not known.
    speed.trim().parse::<u64>().ok().filter(|megabits| (1..=10_000_000).contains(megabits)).map(|it| it * 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_route_leads_to_an_address() {
        let number = |text: &str| u128::from(u32::from(text.parse::<Ipv4Addr>().unwrap()));
        let hex = |text: &str| format!("{:08X}", u32::from_ne_bytes(text.parse::<Ipv4Addr>().unwrap().octets()));
        let line = |interface: &str, to: &str, mask: &str, metric: u32| {
            format!("{interface}\t{}\t00000000\t0003\t0\t0\t{metric}\t{}\t0\t0\t0\n", hex(to), hex(mask))
        };
        let table = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n".to_owned()
            + &line("eth9", "0.0.0.0", "0.0.0.0", 100)
            + &line("eth0", "0.0.0.0", "0.0.0.0", 5)
            + &line("eth1", "10.0.0.0", "255.0.0.0", 0)
            + &line("eth2", "10.7.0.0", "255.255.0.0", 0);
        let routes = routes_v4(&table);
        assert_eq!(routes.len(), 4);
        for (address, interface) in [("10.7.1.1", "eth2"), ("10.8.1.1", "eth1"), ("192.0.2.1", "eth0")] {
            assert_eq!(interface_towards(&routes, number(address)), Some(interface));
        }
        assert_eq!(interface_towards(&[], 1), None);
    }

    #[test]
    fn tables_of_ipv6_are_read_as_well() {
        let line = |to: &str, len: u32, interface: &str| {
            let to: u128 = to.parse::<Ipv6Addr>().unwrap().into();
            let none = "0".repeat(32);
            format!("{to:032x} {len:02x} {none} 00 {none} 00000400 00000001 00000000 00000001 {interface:>8}\n")
        };
        let routes = routes_v6(&(line("::", 0, "eth0") + &line("2001:db8::", 32, "eth1") + "something else\n"));
        assert_eq!(routes.len(), 2);
        let towards = |text: &str| interface_towards(&routes, text.parse::<Ipv6Addr>().unwrap().into());
        assert_eq!((towards("2001:db8::7"), towards("2001:db9::7")), (Some("eth1"), Some("eth0")));
    }

    #[test]
    fn only_devices_have_the_rate_of_a_port() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("speed"), "25000\n").unwrap();
        assert_eq!(rate_of(dir.path()), None);
        std::fs::create_dir(dir.path().join("device")).unwrap();
        assert_eq!(rate_of(dir.path()), Some(25_000_000_000));
        for unknown in ["-1", "0", "4294967295", ""] {
            std::fs::write(dir.path().join("speed"), unknown).unwrap();
            assert_eq!(rate_of(dir.path()), None, "{unknown}");
        }
        assert_eq!(rate_towards([IpAddr::V4(Ipv4Addr::LOCALHOST)]), None);
    }
}
