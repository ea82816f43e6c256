//! The ports of RDMA devices, and the device through which others reach this host.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use crate::wording::Wording;

/// One port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) device: String,
    pub(super) number: u8,
    pub(super) state: String,
    pub(super) active: bool,
    pub(super) ethernet: bool,
    pub(super) addresses: Vec<IpAddr>,
}

impl Port {
    /// Returns an address that other hosts can send to; an IPv4 address if there is one.
    pub(super) fn routable(&self) -> Option<IpAddr> {
        let routable = self.addresses.iter().copied().filter(|address| match address {
            IpAddr::V4(_) => true,
            IpAddr::V6(address) => self.ethernet && !address.is_unicast_link_local(),
        });
        routable.min_by_key(IpAddr::is_ipv6)
    }
}

/// Finds the device through which others reach `address`. If `name` is given, only that device counts. Fails with the
/// reason.
pub(super) fn fitting<'a>(
    ports: &'a [Port],
    address: IpAddr,
    name: Option<&str>,
    wording: &Wording,
) -> Result<&'a str, String> {
    if ports.is_empty() {
        return Err(name.map_or("no RDMA device".to_owned(), |name| format!("no RDMA device {name}, nor any other")));
    }
    if address.is_loopback() {
        return Err(format!("{address} is the loopback"));
    }
    let named: Vec<_> = ports.iter().filter(|port| name.is_none_or(|name| port.device == name)).collect();
    let nobody_has = match name {
        Some(name) if named.is_empty() => return Err(format!("no RDMA device {name}")),
        Some(name) => format!("{name} does not have"),
        None => "no RDMA device has".to_owned(),
    };
    if address.is_unspecified() {
        return only(&named, wording).unwrap_or_else(|| Err(format!("{nobody_has} an active port with an address")));
    }
    let mut problem = format!("{nobody_has} the address {address}");
    for Port { device, number, state, active, .. } in named.into_iter().filter(|port| port.addresses.contains(&address))
    {
        if *active {
            return Ok(device);
        }
        problem = format!("port {number} of {device} is {state}");
    }
    Err(problem)
}

/// Finds the device that is meant if this host is reached at any address. `None` if no device is usable; fails if
/// several are.
///
/// The network of the other hosts is not known, so that one of several ports might be the wrong one.
fn only<'a>(ports: &[&'a Port], wording: &Wording) -> Option<Result<&'a str, String>> {
    let usable = |port: &&&Port| port.active && (port.routable().is_some() || !port.ethernet);
    let usable: Vec<&Port> = ports.iter().filter(usable).copied().collect();
    let Port { device, ethernet, .. } = usable.first()?;
    Some(match usable.len() {
        1 if *ethernet => Ok(device),
        1 => Err(format!("{device} is InfiniBand, which only {} verbs uses", wording.fabric)),
        _ if usable.iter().all(|port| port.device == *device) => {
            Err(format!("several ports of {device} are active; listen at the address of one"))
        }
        _ => Err(format!("several RDMA devices; name one by {} or listen at its address", wording.device)),
    })
}

/// Returns this host's address towards another host. No packet is sent.
pub(super) fn route_to(other: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = if other.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(other)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(device: &str, state: &str, ethernet: bool, addresses: &[&str]) -> Port {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let active = state == "ACTIVE";
        Port { device: device.into(), number: 1, state: state.into(), active, ethernet, addresses }
    }

    fn machine() -> Vec<Port> {
        vec![
            port("bare", "ACTIVE", true, &["fe80::1"]),
            port("down", "DOWN", true, &["10.0.0.3"]),
            port("good", "ACTIVE", true, &["fe80::2", "2001:db8::2", "10.0.0.2"]),
        ]
    }

    fn wording() -> Wording {
        Wording { fabric: "--fabric", device: "--device", encrypt: "--encrypt", ..Wording::default() }
    }

    fn fits(ports: &[Port], address: &str, name: Option<&str>) -> Result<String, String> {
        fitting(ports, address.parse().unwrap(), name, &wording()).map(str::to_owned)
    }

    #[test]
    fn the_device_with_the_address_is_used() {
        let machine = machine();
        assert_eq!(fits(&machine, "10.0.0.2", None), Ok("good".into()));
        assert_eq!(fits(&machine, "2001:db8::2", Some("good")), Ok("good".into()));
        assert_eq!(fits(&machine, "0.0.0.0", None), Ok("good".into()));
        assert_eq!(fits(&machine, "::", Some("good")), Ok("good".into()));
    }

    #[test]
    fn at_all_addresses_only_the_one_ethernet_device_is_used() {
        let ib = port("ib", "ACTIVE", false, &["fe80::3"]);
        let (one, two) = (port("one", "ACTIVE", true, &["10.0.0.1"]), port("two", "ACTIVE", true, &["10.1.0.1"]));
        let down = port("down", "DOWN", true, &["10.2.0.1"]);
        let second = Port { number: 2, addresses: two.addresses.clone(), ..one.clone() };
        let infiniband = "ib is InfiniBand, which only --fabric verbs uses".to_owned();
        let several = "several RDMA devices; name one by --device or listen at its address".to_owned();
        let ports = "several ports of one are active; listen at the address of one".to_owned();
        for any in ["0.0.0.0", "::"] {
            assert_eq!(fits(&[one.clone(), down.clone()], any, None), Ok("one".into()));
            assert_eq!(fits(std::slice::from_ref(&ib), any, None), Err(infiniband.clone()));
            assert_eq!(fits(&[ib.clone(), one.clone()], any, None), Err(several.clone()));
            assert_eq!(fits(&[one.clone(), two.clone()], any, None), Err(several.clone()));
            assert_eq!(fits(&[ib.clone(), one.clone(), two.clone()], any, Some("two")), Ok("two".into()));
            assert_eq!(fits(&[ib.clone(), one.clone()], any, Some("ib")), Err(infiniband.clone()));
            assert_eq!(fits(&[one.clone(), second.clone()], any, None), Err(ports.clone()));
        }
        assert_eq!(fits(&[ib, one, two], "10.1.0.1", None), Ok("two".into()));
    }

    #[test]
    fn it_is_said_why_no_device_is_used() {
        let machine = machine();
        let problem = |address, name| fits(&machine, address, name).unwrap_err();
        assert_eq!(problem("127.0.0.1", None), "127.0.0.1 is the loopback");
        assert_eq!(problem("10.0.0.9", None), "no RDMA device has the address 10.0.0.9");
        assert_eq!(problem("10.0.0.9", Some("good")), "good does not have the address 10.0.0.9");
        assert_eq!(problem("10.0.0.2", Some("bad")), "no RDMA device bad");
        assert_eq!(problem("10.0.0.3", None), "port 1 of down is DOWN");
        assert_eq!(problem("0.0.0.0", Some("bare")), "bare does not have an active port with an address");
        assert_eq!(fits(&machine[..2], "::", None).unwrap_err(), "no RDMA device has an active port with an address");
        assert_eq!(fits(&[], "10.0.0.2", None).unwrap_err(), "no RDMA device");
    }

    #[test]
    fn the_route_to_this_host_is_its_own_address() {
        assert_eq!(route_to(([127, 0, 0, 1], 9).into()).unwrap(), IpAddr::from([127, 0, 0, 1]));
    }
}
